"""What ``register`` adds to three methods of transformers' models, so that nothing is silent.

``from_pretrained``, ``from_config`` and ``set_experts_implementation`` accept any registered name for any model: one
whose MoE layers know no implementations, or that has none, would go on as before. And where weights come from is
known to a model when it is loaded, to its experts never. Models that do not ask for Collegium are left as they are.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from ...errors import ConfigError
from ..extra import import_extra
from .modules import named_experts
from .trust import folder_of, record_origin

__all__ = ["install"]

_MARK = "_collegium_wrapped"


def install(name: str) -> None:
    """Wrap the methods, once however often it is called; name: the implementation to watch for."""
    base = import_extra("transformers").PreTrainedModel
    if hasattr(base.from_pretrained, _MARK):
        return
    for method, kind, work in (
        ("from_pretrained", classmethod, _from_pretrained),
        ("_from_config", classmethod, _from_config),
        ("set_experts_implementation", None, _set_implementation),
        ("_load_pretrained_model", staticmethod, _load),  # private: says no before gigabytes are read, where it exists
    ):
        found = base.__dict__.get(method)
        if kind is None or isinstance(found, kind):
            made = _wrap(found if kind is None else cast("Any", found).__func__, name, work)
            setattr(base, method, made if kind is None else kind(made))


def _wrap(original: Any, name: str, work: Callable[..., Any]) -> Any:
    """Return ``work``, which takes the original method, the name and what the method takes, in its place."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return work(original, name, *args, **kwargs)

    setattr(run, _MARK, True)
    return run


def _from_pretrained(original: Any, name: str, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    found = original(cls, *args, **kwargs)
    model = found[0] if isinstance(found, tuple) else found
    _require_experts(model, name, _config_requests(model.config, name))
    _confirm_all_changed(model, name, kwargs.get("experts_implementation"))
    if not named_experts(model):
        return found
    options = {key: kwargs[key] for key in ("cache_dir", "subfolder") if kwargs.get(key) is not None}
    other_sources = [key for key in ("state_dict", "gguf_file", "key_mapping") if kwargs.get(key) is not None]
    folder = None if other_sources else folder_of(model.config, **options)
    record_origin(model, folder, f"from_pretrained was given {', '.join(other_sources)}" if other_sources else "")
    return found


def _from_config(original: Any, name: str, cls: Any, /, config: Any, **kwargs: Any) -> Any:
    model, requested = original(cls, config, **kwargs), kwargs.get("experts_implementation")
    _require_experts(model, name, _mentions(requested, name))
    _confirm_all_changed(model, name, requested)
    return model


def _set_implementation(original: Any, name: str, model: Any, /, experts_implementation: Any) -> None:
    requested = _mentions(experts_implementation, name)
    _require_experts(model, name, requested)
    if requested:
        # Loading leaves this on a model; one that is built from a config has the config's folder and other weights.
        loaded = hasattr(model, "_weight_conversions")
        folder, why = (folder_of(model.config), "") if loaded else (None, "from_pretrained did not load them")
        record_origin(model, folder, why)
    original(model, experts_implementation)
    _confirm_all_changed(model, name, experts_implementation)


def _load(original: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    model = args[0] if args else kwargs["model"]
    _require_experts(model, name, _config_requests(model.config, name))
    return original(*args, **kwargs)


def _mentions(requested: Any, name: str) -> bool:
    return requested == name or (isinstance(requested, dict) and name in requested.values())


def _config_requests(config: Any, name: str) -> bool:
    """Tell whether a config or any part of it has this implementation."""
    parts = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
    own = getattr(config, "_experts_implementation", None) == name
    return own or any(_config_requests(part, name) for part in parts if part is not None)


def _require_experts(model: Any, name: str, requested: bool) -> None:
    if requested and not named_experts(model):
        raise ConfigError(
            f"experts_implementation={name!r} was asked of {type(model).__name__}, which has no experts that "
            "transformers lets another implementation run: it has no MoE layers, or its class runs them by itself, so "
            "nothing would change. Load the whole model with load_model() where docs/families.md lists it, or single "
            "layers with load_layer(); leave experts_implementation out to run transformers' own code"
        )


def _confirm_all_changed(model: Any, name: str, requested: Any) -> None:
    """Raise where transformers accepted the name and left experts with another implementation."""
    if not _mentions(requested, name):
        return
    implementations = {
        label: module.config._experts_implementation for label, _, module in cast("Any", named_experts(model))
    }
    others = [label for label, implementation in implementations.items() if implementation != name]
    if len(others) > (0 if requested == name else len(implementations) - 1):
        raise ConfigError(
            f"experts_implementation={requested!r} was asked of {type(model).__name__}, and {others[0]} still has "
            f"{implementations[others[0]]!r}: transformers changes it only for classes whose own source file has the interface. "
            "Give experts_implementation to from_pretrained, or ask the part of the model that transformers defines"
        )
