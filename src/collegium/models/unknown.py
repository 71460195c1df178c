"""Errors for configs without a family: dense models, and unknown or mistyped model types."""

import re
from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from ..types import closest
from .base import AUTO_TEXT, text_of

__all__ = ["dense_error", "mentions_experts", "no_experts_in", "unknown_error"]

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count")
_ABOUT_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def dense_error(config: Mapping[str, object], why: str) -> ConfigError:
    """Return the error for a model without routed experts; why: the evidence."""
    kind = config.get("model_type") or text_of(config).get("model_type")
    return ConfigError(
        f"config.json of model_type {kind!r}: this model is dense (no experts): {why}. Collegium runs "
        "Mixture-of-Experts models; load a dense one with transformers"
    )


def no_experts_in(config: Mapping[str, object]) -> ConfigError | None:
    """Return an error if the config of a known model type states that there are no experts, else None."""
    text = text_of(config)
    counts = {key: text[key] for key in _COUNTS if key in text}
    if any(counts.values()):
        return None
    if counts:
        return dense_error(config, ", ".join(f"{key} is {value}" for key, value in counts.items()))
    if str(config.get("model_type")).startswith("gguf:") and "block_count" in config:
        return dense_error(config, "the GGUF metadata have no expert_count")
    return None


def unknown_error(config: Mapping[str, object], known: Iterable[str]) -> ConfigError:
    """Return the error for a ``model_type`` that is not among ``known``."""
    kind = config.get("model_type")
    names = list(known)
    if kind in AUTO_TEXT:
        kind = text_of(config).get("model_type", kind)
    if kind is not None and not mentions_experts(config):
        why = "no entry is about experts"
        near = closest(str(kind), names)
        return dense_error(config, f"{why} (if the type is mistyped, {near})" if near else why)
    near = closest(str(kind), names) or f"some of them are {', '.join(names[:3])}"
    return ConfigError(
        f"config.json: model_type is {kind!r}, which is none of the {len(names)} known types; {near}. All are listed "
        "in docs/families.md; a new family is one file in collegium/models"
    )


def mentions_experts(value: object) -> bool:
    """Return whether a config, or a nested part of it, has an entry whose name is about experts."""
    if not isinstance(value, Mapping):
        return False
    return any(_ABOUT_EXPERTS.search(str(key)) or mentions_experts(part) for key, part in value.items())
