"""Which experts the tokens of a whole model go to, counted on the host while transformers runs it."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from ...balance.recorder import Recorder
from ...errors import InputError
from .blocks import blocks_of
from .modules import experts_modules
from .plugin import layers_of

__all__ = ["Recorder", "recording"]


@contextmanager
def recording(model: nn.Module) -> Generator[Recorder]:
    """Count what the experts of ``model`` are asked by every forward pass inside; reads the device at every layer.

    The layers have to be there: ``load_model`` makes them, ``register`` at the first call. Nothing is changed in what
    they compute. Raises InputError for layers that are not built and for blocks that route inside their layer, whose
    choice is not seen here. A compiled model calls no modules, so nothing is counted.
    """
    inside, modules = blocks_of(model), experts_modules(model)
    built = layers_of(model)
    if inside or not modules or len(built) != len(modules):
        raise InputError(
            f"recording {type(model).__name__}: {len(modules)} layers are routed by transformers, {len(built)} are "
            f"built, {len(inside)} route inside a block of Collegium; needed are layers that transformers routes, all "
            "of them built: use load_model(), or call the model once"
        )
    with Recorder(dict(zip(sorted(modules), built, strict=True))).watching(modules) as found:
        yield found
