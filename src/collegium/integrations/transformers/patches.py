"""All run-time patches of transformers, in one file.

The experts themselves need none: ``ExpertsInterface.register`` is public. The patches cover what has no interface:

=========================  =====================================  ===================================================
patch                      scope                                  reason
=========================  =====================================  ===================================================
``wrap_method``            ``PreTrainedModel``, whole process     check that a requested implementation takes effect
``wrap_extra_repr``        experts classes, whole process         show the kernel in ``print(model)``
``temporary_subclass``     one call of ``from_pretrained``        build a model whose experts have no parameters
``override_methods``       one model                              refuse saving and moving packed experts
``progress_silenced``      logging, during one load               hide the list of experts' tensors as unexpected
=========================  =====================================  ===================================================
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

from torch import nn

from ..extra import import_extra

__all__ = [
    "is_wrapped",
    "override_methods",
    "progress_silenced",
    "restore_class",
    "temporary_subclass",
    "wrap_extra_repr",
    "wrap_method",
    "wrapper",
]

_MARK = "_collegium_wrapped"
_ORIGINAL_REPR = "collegium_extra_repr"


def wrap_method(cls: Any, method: str, work: Callable[..., Any], kind: type | None) -> None:
    """Replace a method of ``cls`` by ``work(original, *args, **kwargs)``.

    kind: classmethod, staticmethod, or None for a plain method. A class without the method, or with another kind of
    method, is left as it is.
    """
    original = vars(cls).get(method)
    if kind is None:
        setattr(cls, method, wrapper(original, work))
    elif isinstance(original, kind):
        setattr(cls, method, kind(wrapper(cast("Any", original).__func__, work)))


def wrapper(original: Any, work: Callable[..., Any]) -> Any:
    """Return a function with the signature of ``original`` that calls ``work(original, ...)``."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return work(original, *args, **kwargs)

    setattr(run, _MARK, True)
    return run


def is_wrapped(method: Any) -> bool:
    """Return whether ``method`` is a wrapper from this file."""
    return hasattr(method, _MARK)


def wrap_extra_repr(cls: Any, extend: Callable[[nn.Module, str], str]) -> None:
    """Let ``extra_repr`` of ``cls`` return ``extend(module, text)``; once per class.

    The class is patched and not the module: an attribute of a module that refers to the module would be a reference
    cycle, which keeps GPU memory until the next collection.
    """
    if _ORIGINAL_REPR in vars(cls):
        return
    original = cls.extra_repr
    setattr(cls, _ORIGINAL_REPR, original)

    def extra_repr(self: nn.Module) -> str:
        return extend(self, original(self))

    cls.extra_repr = extra_repr


def temporary_subclass(cls: Any, after_init: Callable[[Any], None]) -> Any:
    """Return a subclass of a model class, with the same name, that calls ``after_init(model)`` when it is built.

    ``from_pretrained`` builds the model and loads its weights in one call, and has no hook in between. Pass the model
    to ``restore_class`` afterwards.
    """

    class Subclass(cls):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            after_init(self)

    Subclass.__name__ = cls.__name__
    Subclass.__qualname__ = cls.__qualname__
    Subclass.__module__ = cls.__module__
    return Subclass


def restore_class(model: Any, cls: Any) -> None:
    """Give a model of ``temporary_subclass(cls, ...)`` its class ``cls``, which adds only ``__init__``."""
    model.__class__ = cls


def override_methods(module: Any, **methods: Callable[..., Any]) -> None:
    """Override methods of one module by functions that do not take ``self``."""
    for name, method in methods.items():
        setattr(module, name, method)


@contextmanager
def progress_silenced() -> Generator[None]:
    """Silence transformers' progress bar and its list of unexpected tensors, which are the experts."""
    logging = import_extra("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bar:
            logging.enable_progress_bar()
