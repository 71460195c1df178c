"""Model families: how a config becomes a ``MoESpec`` and how the tensors are named.

A ``Config`` records which entries were read. An unread entry that concerns experts, routing or activation is an error,
so that no entry that changes the result is silently ignored. An absent entry has the default of the model's
configuration class (``Family.defaults``); without a default its absence is a ConfigError.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from ..errors import ConfigError
from ..types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .in_memory import InMemory

__all__ = [
    "AUTO_TEXT",
    "NESTED",
    "PREFIXES",
    "W123",
    "WIDTH",
    "Config",
    "Defaults",
    "Family",
    "Names",
    "StackedNames",
    "each_nth",
    "every_layer",
    "is_wrapped",
    "listed_layers",
    "object_of",
    "projections_of",
    "shared_width",
    "spec_of",
    "text_of",
    "whole_number",
]

_ABSENT = object()
Defaults = Mapping[str, object]
# Wrappers whose text part has the configuration class of the text part's model type.
AUTO_TEXT = ("kimi_k25",)
_MAX_COUNT = 1 << 14  # layers, experts; published models have at most 126 and 896
_MAX_SIZE = 1 << 24
# Alternative names of the same number in families and tools; if several are present, they must agree.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_WIDTH = ("moe_intermediate_size",)
# Number of shared experts, or their total width, in families whose models may have none.
_SHARED_COUNTS = {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "shared_intermediate_size"}
NESTED = ("thinker_config", "text_config", "language_config", "llm_config")
_PROJ = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
WIDTH = ("intermediate_size",)  # of an expert, in the families without ``moe_intermediate_size``
# Prefixes of a text model's layers, alone and inside multimodal models.
PREFIXES = (
    "model.layers.{layer}.",
    "model.language_model.layers.{layer}.",
    "language_model.model.layers.{layer}.",
    "language_model.layers.{layer}.",
    "thinker.model.layers.{layer}.",
    "layers.{layer}.",
)
# Modules that may enclose a text model's list of layers, in any order and number.
_WRAPPERS = frozenset(
    (
        "backbone",
        "base_model",
        "decoder",
        "language",
        "language_model",
        "llm",
        "lm",
        "model",
        "module",
        "text",
        "text_model",
        "thinker",
        "transformer",
    )
)
# Prefixes of modules with layers of another model: towers, talkers, and multi-token prediction.
_OTHER_MODELS = (
    "adapter",
    "audio",
    "code_predictor",
    "draft",
    "eagle",
    "encoder",
    "image",
    "medusa",
    "mtp",
    "nextn",
    "speech",
    "talker",
    "video",
    "vision",
    "visual",
    "vit",
)
_EXPERT_ENTRIES = re.compile(
    r"moe|expert|rout|swiglu|situ|scor|shared|mlp|n_group$|topk_group|topk_method|norm_topk|hidden_act|activation"
    r"|latent|act_fn|hash|ffn"
)
# Entries that match _EXPERT_ENTRIES but do not change the inference result of a layer: losses, training noise, outputs,
# dense layers, attention, and the dtype, which the quantisation code reads.
_HARMLESS_ENTRIES = frozenset(
    (
        "activation_dropout",
        "expert_dtype",
        "input_jitter_noise",
        "intermediate_size_mlp",
        "mamba_hidden_act",
        "moe_router_dtype",
        "moe_shared_expert_overlap",
        "mtp_mlp_layer_types",
        "num_kv_shared_layers",
        "output_router_logits",
        "output_scores",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "use_double_wide_mlp",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedNames:
    """Names of tensors that hold all experts of a layer; format suffixes follow the paths, biases end in ``_bias``.

    gate_up: gate and up in one stack, gate alone if ``up`` names a separate stack, or the up projection of experts
    without a gate. plain: suffix of an unquantised stack. interleaved: gate and up rows alternate (even is gate)
    instead of gate half first. transposed: unquantised tensors are stored input-first, ``[E, H, 2I]`` and
    ``[E, I, H]``; quantised tensors are output-first in every family. flat: experts follow each other along the rows,
    ``[E*I, H]``, and down is stored input-first (DBRX).
    """

    gate_up: str
    down: str
    up: str | None = None
    plain: str = ""
    interleaved: bool = False
    transposed: bool = False
    flat: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The literal name table of a family, with placeholders ``{layer}`` and ``{expert}``.

    layer: prefix of a layer. experts: prefix of the tensors of routed experts. gate, up, down: module paths of one
    expert, followed by the format's suffix (``.weight``, ...); up and down are None if the family stores stacks only,
    gate also if experts have none. gate and up are equal if one module holds both.
    shared: module paths of the shared expert: gate, up and down, or gate_up and down. shared_gate: its sigmoid gate.
    router_scale: factor of the router's input. expert_scale: factor of each expert's weight. hash_table: experts by
    token id. latent: module paths of the projections into and out of the latent width. latent_norm: the norm between
    the experts and the projection out of the latent width. biases: tensors ``[E, N]`` of gate, up and down if they are
    separate; None if they are the stacks' names with ``_bias``, or the modules' ``.bias``. outside: module paths of
    feed-forward networks that the caller runs, and tensors for tokens that a layer does not take. image_experts: the
    files number experts of image tokens after those of text, store the router input-first, and have a second row of
    the correction bias for image tokens.
    """

    layer: str
    experts: str
    gate: str | None = None
    up: str | None = None
    down: str | None = None
    stacked: StackedNames
    router_weight: str
    router_bias: str | None = None
    correction_bias: str | None = None
    router_scale: str | None = None
    expert_scale: str | None = None
    hash_table: str | None = None
    shared: tuple[str, ...] | None = None
    shared_gate: str | None = None
    latent: tuple[str, str] | None = None
    latent_norm: str | None = None
    biases: tuple[str, ...] | None = None
    outside: tuple[str, ...] | None = None
    image_experts: bool = False

    @classmethod
    def below(
        cls,
        layer: str = PREFIXES[0],
        *,
        experts: str = "mlp.experts.",
        single: tuple[str, ...] = _PROJ,
        stacked: StackedNames | None = None,
        router: str = "mlp.gate.weight",
        **others: str | tuple[str, ...],
    ) -> Names:
        """Build a table from paths below a layer.

        single: projections of one expert below ``experts{expert}.``. others: further fields, as paths below the layer.
        """
        stacked = stacked or StackedNames(gate_up=experts + "gate_up_proj", down=experts + "down_proj")
        paths = [layer + experts + "{expert}." + tail for tail in single]
        gate = paths.pop(0) if len(paths) == 3 else None
        extra = {
            name: layer + value if isinstance(value, str) else tuple(layer + path for path in value)
            for name, value in others.items()
        }
        return cls(
            layer=layer,
            experts=layer + experts,
            gate=gate,
            up=paths[0] if paths else None,
            down=paths[1] if paths else None,
            stacked=_replace_prefix(stacked, "", layer),
            router_weight=layer + router,
            **cast("dict[str, Any]", extra),
        )

    @property
    def fused(self) -> bool:
        """Whether gate and up of one expert are one module, with the row order of the stack."""
        return self.gate is not None and self.gate == self.up

    def projection(self, which: str) -> str:
        """Return the module path of one expert's ``gate``, ``up`` or ``down``, empty if there is none."""
        return {"gate": self.gate, "up": self.up, "down": self.down}[which] or ""

    def moved(self, layer: str) -> Names:
        """Return the same table with another prefix of a layer."""
        return self if layer == self.layer else _replace_prefix(self, self.layer, layer)


T = TypeVar("T", Names, StackedNames)


def _replace_prefix(table: T, old: str, new: str) -> T:
    """Return ``table`` with prefix ``old`` of every path replaced by ``new``."""
    changed: dict[str, object] = {}
    for entry in fields(table):
        value = getattr(table, entry.name)
        if isinstance(value, StackedNames):
            changed[entry.name] = _replace_prefix(value, old, new)
        elif isinstance(value, tuple):
            changed[entry.name] = tuple(new + path.removeprefix(old) for path in cast("tuple[str, ...]", value))
        elif isinstance(value, str) and entry.name != "plain":
            changed[entry.name] = new + value.removeprefix(old)
    return replace(table, **changed)  # pyright: ignore[reportArgumentType]


def is_wrapped(prefix: str, layer: str) -> bool | None:
    """Return whether tensors below ``prefix`` may be the text model's layers, whose published prefix is ``layer``.

    Both end in a dot and have no ``{layer}``. True: ``prefix`` ends in the same list of layers, inside modules that are
    known to wrap a text model. False: the same list, inside an unknown module. None: another list, or another model.
    """
    *outer, layers = prefix.removesuffix(".").split(".")
    *published, published_layers = layer.removesuffix(".").split(".")
    if layers != published_layers or any(name.startswith(_OTHER_MODELS) for name in outer):
        return None
    return _WRAPPERS.issuperset(set(outer) - set(published))


def every_layer(config: Config) -> tuple[int, ...]:
    """Return all layers."""
    return tuple(range(config.integer("num_hidden_layers")))


def each_nth(config: Config, step: int) -> tuple[int, ...]:
    """Return the last of every ``step`` layers, an empty tuple if ``step`` is not positive."""
    return tuple(i for i in every_layer(config) if step > 0 and (i + 1) % step == 0)


_AS_IN_FILES = InMemory()


@dataclass(frozen=True, slots=True)
class Family:
    """One row of ``models.FAMILIES``.

    model_types: values of ``model_type`` of this family. names: the published table. others: further tables in use.
    spec_of: config and layer to ``MoESpec`` (``weight_format`` is set by the caller). layers_of: config to the indices
    of the layers with routed experts. defaults: by model type, the defaults of the model's configuration class, limited
    to the entries read here; a multimodal wrapper has those of its text class. null_is_default: entries for which the
    class replaces null by its default. in_memory: differences to the model in transformers.
    """

    name: str
    model_types: tuple[str, ...]
    names: Names
    spec_of: Callable[[Config, int], MoESpec]
    layers_of: Callable[[Config], tuple[int, ...]] = every_layer
    others: tuple[Names, ...] = ()
    defaults: Mapping[str, Defaults] = field(default_factory=dict[str, Defaults], hash=False)
    null_is_default: frozenset[str] = frozenset()
    in_memory: InMemory = _AS_IN_FILES

    def read(self, config: Mapping[str, object]) -> Config:
        """Return the text part of a config with the defaults of its model type."""
        text = text_of(config)
        # The class of a wrapper determines the class of its text part, whatever model type that part has.
        kinds = [config.get("model_type"), text.get("model_type")]
        if kinds[0] in AUTO_TEXT:
            kinds.reverse()
        kind = next((name for name in kinds if name in self.model_types), None)
        return Config(config, kind, self.defaults.get(str(kind), {}), self.null_is_default)

    def num_layers(self, config: Mapping[str, object]) -> int | None:
        """Return the number of layers without those for multi-token prediction, None if the config has no entry."""
        count = self.read(config).value("num_hidden_layers", "n_layers", default=None)
        return count if isinstance(count, int) and not isinstance(count, bool) else None

    @property
    def tables(self) -> tuple[Names, ...]:
        """All name tables, the published one first."""
        return (self.names, *self.others)

    def moe_layers(self, config: Mapping[str, object]) -> tuple[int, ...]:
        """Return the indices of the layers that have routed experts; raises ConfigError."""
        return self.layers_of(self.read(config))

    def describe(self, config: Mapping[str, object], layer: int | None = None) -> MoESpec:
        """Return the spec of a layer, default the last with routed experts; raises ConfigError and SpecError."""
        read = self.read(config)
        layers = self.layers_of(read)
        if layer is None:
            layer = layers[-1] if layers else 0
        spec = self.spec_of(read, layer)
        read.refuse_unread()
        return spec

    def refusal(self, layer: int) -> str | None:
        """Return why ``layer`` runs only inside its class in transformers, None if Collegium computes all of it."""
        return None

    def assumes_shared(self, config: Mapping[str, object], layer: int) -> bool:
        """Return whether the layer's shared expert comes from the model type's defaults, not from the config."""
        read = self.read(config)
        return self.spec_of(read, layer).shared is not None and bool(read.assumed & _SHARED_COUNTS)


def text_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the part of a multimodal config that describes the text model."""
    for key in NESTED:
        config = object_of(config.get(key), config)
    return config


def whole_number(text: str) -> int | None:
    """Return the number that up to nine ASCII digits stand for, None for any other text from a file."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def object_of(value: object, otherwise: Mapping[str, object] | None = None) -> Mapping[str, object]:
    """Return ``value`` if it is a JSON object, else ``otherwise``, else an empty object."""
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else otherwise or {}


class Config:
    """The text part of one ``config.json``; every method raises ConfigError for an invalid entry.

    kind: the model type whose rules apply. defaults: of that model type's configuration class. null_is_default:
    entries whose null means the default.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        kind: object = None,
        defaults: Defaults | None = None,
        null_is_default: frozenset[str] = frozenset(),
    ) -> None:
        self.entries = text_of(config)
        self.kind = str(kind)
        self.read_keys: set[str] = set()
        self.assumed: set[str] = set()  # absent entries for which the model type's default was taken
        self.parts: list[Config] = []
        self._defaults: Defaults = {} if defaults is None else defaults
        self._null_is_default = null_is_default
        self._model = config.get("model_type") or self.entries.get("model_type") or kind

    def value(self, *keys: str, default: object = _ABSENT) -> object:
        """Return the entry under any of ``keys``; if several are present, they must agree.

        An absent entry has the default of the model type, else ``default``; without either its absence is an error.
        Null means absent, except for an entry whose default is not null, because the configuration class keeps null.
        """
        self.read_keys.update(keys)
        present = {key: self.entries[key] for key in keys if self.entries.get(key) is not None}
        values = list(present.values())
        if any(value != values[0] for value in values[1:]):
            raise self.wrong(", ".join(present), ", ".join(map(str, values)), "one value for both")
        if values:
            return values[0]
        named = next((key for key in keys if self._defaults.get(key) is not None), "")
        fallback = self._defaults.get(named)
        nulls = [key for key in keys if key in self.entries and key not in self._null_is_default]
        if nulls and fallback is not None:
            raise self.wrong(nulls[0], None, f"a value, or no entry, which means {fallback!r}")
        if fallback is not None:
            self.assumed.add(named)
            return fallback
        if default is _ABSENT:
            raise ConfigError(
                f"config.json of model_type {self._model!r} lacks {' or '.join(keys)}; the model has no default for it"
            )
        return default

    def _value_of_type(self, allowed_type: Any, allowed: str, keys: tuple[str, ...], default: object) -> Any:
        """Return an entry of ``allowed_type``; booleans are not numbers. allowed: description for the error."""
        value = self.value(*keys, default=default)
        if not isinstance(value, allowed_type) or (isinstance(value, bool) and allowed_type is not bool):
            raise self.wrong(keys[0], value, allowed)
        return value

    def integer(self, *keys: str, default: object = _ABSENT) -> int:
        """Return an integer."""
        value: int = self._value_of_type(int, "an integer", keys, default)
        is_count = keys[0].startswith(("num_", "n_")) or keys[0].endswith(("_count", "_layers"))
        maximum = _MAX_COUNT if is_count else _MAX_SIZE
        if abs(value) > maximum:
            # Bounds the loops over layers and experts that run before the tensors can contradict the config.
            size = value if value.bit_length() < 64 else "beyond 2^63"
            raise ConfigError(f"config.json: {keys[0]} is {size}, allowed is {maximum} at most")
        return value

    def number(self, *keys: str, default: object = _ABSENT) -> float:
        """Return a finite number as float."""
        value = self._value_of_type(int | float, "a number", keys, default)
        if not abs(value) <= sys.float_info.max:  # also false for NaN
            raise self.wrong(keys[0], value, "a finite number")
        return float(value)

    def flag(self, *keys: str, default: object = _ABSENT) -> bool:
        """Return a boolean."""
        return self._value_of_type(bool, "true and false", keys, default)

    def only(self, key: str, *allowed: object) -> None:
        """Raise ConfigError unless the entry is one of ``allowed``; absent means its default, else the first one."""
        value = self.value(key, default=allowed[0])
        if value not in allowed:
            raise self.wrong(key, value, " and ".join(map(repr, allowed)))

    def inner(self, key: str) -> Config:
        """Return the object under ``key`` as a nested config, empty if absent."""
        defaults = object_of(self._defaults.get(key))
        part = Config(self._value_of_type(dict, "an object", (key,), {}), self._model, defaults)
        self.parts.append(part)
        return part

    @property
    def top_k(self) -> int:
        """The number of experts per token."""
        return self.integer(*_TOP_K)

    def items(self, *keys: str) -> list[object] | None:
        """Return a list, or None if absent or a number; text is split at commas."""
        value = self.value(*keys, default=None)
        if isinstance(value, str) and len(value) <= _MAX_COUNT:
            pieces = [piece.strip() for piece in value.split(",")]
            value = [piece if (number := whole_number(piece)) is None else number for piece in pieces]
        return cast("list[object]", value) if isinstance(value, list) else None

    def kinds(self, key: str) -> list[object] | None:
        """Return a list with at least one entry per layer, or None if absent or a number."""
        entries = self.items(key)
        layers = self.integer("num_hidden_layers")
        if entries is not None and len(entries) < layers:
            raise self.wrong(key, f"a list of {len(entries)}", f"one entry for each of num_hidden_layers={layers}")
        return entries

    def per_layer(self, *keys: str, layer: int, default: object = _ABSENT) -> int:
        """Return an integer that is one entry for all layers, or an element of a list with one per layer."""
        entry = self.value(*keys, default=default)
        if isinstance(entry, list):
            values = cast("list[object]", entry)
            entry = values[layer] if layer < len(values) else None
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise self.wrong(keys[0], entry, f"an integer, or a list with one for layer {layer}")
        return entry

    def passed_over(self, *keys: str) -> None:
        """Mark entries as read that do not change the inference result of a layer."""
        self.read_keys.update(keys)

    def wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        """Return the error for an invalid entry."""
        return ConfigError(f"config.json of model_type {self._model!r}: {key} is {value!r}, allowed is {allowed}")

    def refuse_unread(self) -> None:
        """Raise ConfigError for unread entries about experts, routing or activation that are not empty or false."""
        for part in self.parts:
            part.refuse_unread()
        known = self.read_keys | _HARMLESS_ENTRIES
        unread = {k: v for k, v in self.entries.items() if v and _EXPERT_ENTRIES.search(k) and k not in known}
        if unread:
            listed = ", ".join(f"{key}={value!r}" for key, value in unread.items())
            raise ConfigError(
                f"config.json of model_type {self._model!r}: {listed} is not implemented for this family and could "
                "change what its experts compute; remove the entry if it has no effect on them"
            )


def listed_layers(config: Config) -> tuple[int, ...]:
    """Return the MoE layers, declared by a list of layer types, by one flag per layer, or by first layer and step."""
    layers = range(config.integer("num_hidden_layers"))
    kinds = config.kinds("mlp_layer_types")
    flags = config.kinds("moe_layer_freq")
    config.passed_over("first_k_dense_replace")
    if kinds is not None:
        return tuple(i for i in layers if kinds[i] != "dense")
    if flags is not None:
        return tuple(i for i in layers if flags[i])
    dense = config.integer("first_k_dense_replace")
    step = config.integer("moe_layer_freq", default=1)
    if step < 1:
        raise config.wrong("moe_layer_freq", step, "1 or more")
    return tuple(i for i in layers if i >= dense and i % step == 0)


def shared_width(config: Config, *keys: str, width: tuple[str, ...] = _WIDTH) -> SharedSpec | None:
    """Return the shared expert, as wide as a number of routed ones, or None if the number is 0.

    keys: names of the entry with the number. width: names of the entry with an expert's width.
    """
    count = config.integer(*keys)
    size = config.integer(*width)
    return SharedSpec(intermediate_size=count * size) if count else None


def projections_of(path: str) -> tuple[str, ...]:
    """Return the module paths of gate, up and down below ``path``, with the names that most families use."""
    return tuple(path + name for name in _PROJ)


def spec_of(
    config: Config,
    routing: RoutingSpec,
    *,
    width: tuple[str, ...] = _WIDTH,
    activation: ActivationSpec | None = None,
    **others: Any,
) -> MoESpec:
    """Return the spec of a layer; SiLU is required without ``activation``.

    width: the names of the entry with an expert's width. others: further fields of ``MoESpec``.
    """
    if activation is None:
        config.only("hidden_act", "silu", "swish")
    return MoESpec(
        hidden_size=config.integer("hidden_size", "d_model"),
        intermediate_size=config.integer(*width),
        num_experts=config.integer(*_EXPERTS),
        routing=routing,
        activation=activation or ActivationSpec(),
        **others,
    )
