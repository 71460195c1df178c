"""Checks around four methods of transformers' models, installed by ``register`` and ``load_model``.

``from_pretrained``, ``from_config`` and ``set_experts_implementation`` accept any registered name for any model: a
model without exchangeable experts would silently run transformers' code. And the source of the weights is known when a
model is loaded, but not to its experts modules. Models that do not request Collegium behave as before.
"""

from functools import partial
from typing import Any, cast

from ...errors import ConfigError
from ..extra import import_extra
from .modules import named_experts
from .patches import is_wrapped, wrap_method
from .trust import folder_of, record_origin

__all__ = ["install"]


def install(name: str) -> None:
    """Wrap the methods once per process; name: the experts implementation to check for."""
    base = import_extra("transformers").PreTrainedModel
    if is_wrapped(base.from_pretrained):
        return
    wrap_method(base, "from_pretrained", partial(_from_pretrained, name), classmethod)
    wrap_method(base, "_from_config", partial(_from_config, name), classmethod)
    wrap_method(base, "set_experts_implementation", partial(_set_implementation, name), None)
    # A private method: in releases that have it, a model is refused before gigabytes are read.
    wrap_method(base, "_load_pretrained_model", partial(_load, name), staticmethod)


def _from_pretrained(name: str, original: Any, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    loaded = original(cls, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    _require_experts(model, name, _config_requests(model.config, name))
    _confirm_all_changed(model, name, kwargs.get("experts_implementation"))
    if not named_experts(model):
        return loaded
    options = {key: kwargs[key] for key in ("cache_dir", "subfolder") if kwargs.get(key) is not None}
    other_sources = [key for key in ("state_dict", "gguf_file", "key_mapping") if kwargs.get(key) is not None]
    if other_sources:
        record_origin(model, None, f"from_pretrained was called with {', '.join(other_sources)}")
    else:
        record_origin(model, folder_of(model.config, **options))
    return loaded


def _from_config(name: str, original: Any, cls: Any, /, config: Any, **kwargs: Any) -> Any:
    model = original(cls, config, **kwargs)
    requested = kwargs.get("experts_implementation")
    _require_experts(model, name, _mentions(requested, name))
    _confirm_all_changed(model, name, requested)
    return model


def _set_implementation(name: str, original: Any, model: Any, /, experts_implementation: Any) -> None:
    requested = _mentions(experts_implementation, name)
    _require_experts(model, name, requested)
    if requested:
        # Set by loading. A model built from a config has that config's folder, but other weights.
        if hasattr(model, "_weight_conversions"):
            record_origin(model, folder_of(model.config))
        else:
            record_origin(model, None, "from_pretrained did not load them")
    original(model, experts_implementation)
    _confirm_all_changed(model, name, experts_implementation)


def _load(name: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    model = args[0] if args else kwargs["model"]
    _require_experts(model, name, _config_requests(model.config, name))
    return original(*args, **kwargs)


def _mentions(requested: Any, name: str) -> bool:
    return requested == name or (isinstance(requested, dict) and name in requested.values())


def _config_requests(config: Any, name: str) -> bool:
    """Return whether a config or one of its nested configs has this implementation."""
    if getattr(config, "_experts_implementation", None) == name:
        return True
    nested = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
    return any(_config_requests(part, name) for part in nested if part is not None)


def _require_experts(model: Any, name: str, requested: bool) -> None:
    if requested and not named_experts(model):
        raise ConfigError(
            f"experts_implementation={name!r} was requested for {type(model).__name__}, which has no experts with an "
            "exchangeable implementation: it has no MoE layers, or its class runs them itself, so nothing would "
            "change. Load the whole model with load_model() if docs/families.md lists it, or single layers with "
            "load_layer(); leave experts_implementation out to run transformers' code"
        )


def _confirm_all_changed(model: Any, name: str, requested: Any) -> None:
    """Raise ConfigError if transformers accepted the name but left experts with another implementation."""
    if not _mentions(requested, name):
        return
    experts = cast("Any", named_experts(model))
    implementations = {label: module.config._experts_implementation for label, _, module in experts}
    others = [label for label, implementation in implementations.items() if implementation != name]
    # A dict requests it for some of the experts, at least one.
    allowed_others = 0 if requested == name else len(implementations) - 1
    if len(others) > allowed_others:
        raise ConfigError(
            f"experts_implementation={requested!r} was requested for {type(model).__name__}, and {others[0]} still has "
            f"{implementations[others[0]]!r}: transformers changes it only for classes whose source file has the "
            "interface. Pass experts_implementation to from_pretrained, or call the part of the model that "
            "transformers defines"
        )
