"""What a model family is: how its config becomes a ``MoESpec`` and how its tensors are named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..types import MoESpec

__all__ = [
    "Family",
    "Names",
    "StackedNames",
    "flag",
    "integer",
    "integers",
    "number",
    "require_silu",
    "value",
]

_ABSENT = object()
_MOST_COUNT = 1 << 14  # layers, experts; published models have at most 126 and 896
_MOST_SIZE = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedNames:
    """Tensors that hold all experts of a layer; format suffixes follow the paths, biases end in ``_bias``.

    interleaved: gate and up alternate (even is gate) instead of gate half first. transposed: unquantised tensors are
    stored input-first, ``[E, H, 2I]`` and ``[E, I, H]``; quantised ones are output-first in every family.
    """

    gate_up: str
    down: str
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The literal name table of a family; ``{layer}`` and ``{expert}`` are filled in.

    experts: prefix of everything that belongs to routed experts. gate, up, down: module paths of one expert, the
    format's suffix (``.weight``, ...) follows; None where the family stores experts stacked only. shared: module paths
    of the shared expert's gate, up and down.
    """

    experts: str
    gate: str | None = None
    up: str | None = None
    down: str | None = None
    stacked: StackedNames
    router_weight: str
    router_bias: str | None = None
    correction_bias: str | None = None
    shared: tuple[str, str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row of ``models.FAMILIES``.

    model_types: values of ``model_type`` it answers to. describe: config to ``MoESpec`` (``weight_format`` left to
    the caller). moe_layers: config to the indices of the layers that have routed experts.
    """

    name: str
    model_types: tuple[str, ...]
    names: Names
    describe: Callable[[Mapping[str, object]], MoESpec]
    moe_layers: Callable[[Mapping[str, object]], tuple[int, ...]]


def value(config: Mapping[str, object], keys: tuple[str, ...], default: object = _ABSENT) -> object:
    """Return the first of ``keys`` the config has (null counts as absent), else the default; raises ConfigError."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is _ABSENT:
        msg = f"config.json of model_type {config.get('model_type')!r} lacks {' or '.join(keys)}"
        raise ConfigError(msg)
    return default


def integer(config: Mapping[str, object], *keys: str, default: object = _ABSENT) -> int:
    """Return an integer of the config; raises ConfigError."""
    found = value(config, keys, default)
    if isinstance(found, bool) or not isinstance(found, int):
        msg = f"config.json: {keys[0]} is {found!r}, allowed is an integer"
        raise ConfigError(msg)
    most = _MOST_COUNT if keys[0].startswith(("num_", "n_")) else _MOST_SIZE
    if abs(found) > most:
        # loops and tables are made for every layer and expert before the first tensor can contradict the config
        size = found if found.bit_length() < 64 else "beyond 2^63"
        msg = f"config.json: {keys[0]} is {size}, allowed is {most} at most"
        raise ConfigError(msg)
    return found


def number(config: Mapping[str, object], *keys: str, default: object = _ABSENT) -> float:
    """Return a number of the config as float; raises ConfigError."""
    found = value(config, keys, default)
    if isinstance(found, bool) or not isinstance(found, int | float):
        msg = f"config.json: {keys[0]} is {found!r}, allowed is a number"
        raise ConfigError(msg)
    return float(found)


def flag(config: Mapping[str, object], key: str, *, default: bool) -> bool:
    """Return a boolean of the config; raises ConfigError."""
    found = value(config, (key,), default)
    if not isinstance(found, bool):
        msg = f"config.json: {key} is {found!r}, allowed are true and false"
        raise ConfigError(msg)
    return found


def integers(config: Mapping[str, object], key: str) -> tuple[int, ...]:
    """Return a list of integers of the config, empty when absent; raises ConfigError."""
    found = value(config, (key,), [])
    items = cast("list[object]", found) if isinstance(found, list) else [None]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        msg = f"config.json: {key} is {found!r}, allowed is a list of integers"
        raise ConfigError(msg)
    return tuple(cast("list[int]", items))


def require_silu(config: Mapping[str, object]) -> None:
    """Refuse an activation other than SiLU; raises ConfigError."""
    found = value(config, ("hidden_act",), "silu")
    if found not in ("silu", "swish"):
        msg = f"config.json: hidden_act is {found!r}, known for {config.get('model_type')!r} are 'silu' and 'swish'"
        raise ConfigError(msg)
