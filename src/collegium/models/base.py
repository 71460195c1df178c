"""What a model family is: how its config becomes a ``MoESpec`` and how its tensors are named.

A ``Config`` remembers which entries were asked for. What is left over and speaks of experts, routing or activation
is refused, so that no entry that changes the mathematics is passed over in silence. An absent entry has the default of
the model's configuration class (``Family.defaults``); where there is none, its absence is a ConfigError.
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
]

_ABSENT = object()
Defaults = Mapping[str, object]
# Wrappers whose text part is of the class of its own model type.
AUTO_TEXT = ("kimi_k25",)
_MAX_COUNT = 1 << 14  # layers, experts; published models have at most 126 and 896
_MAX_SIZE = 1 << 24
# The same number under the names that families and tools give it; several must agree.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_WIDTH = ("moe_intermediate_size",)
# How many shared experts there are, or how wide they are together, in the families whose model may have none.
_SHARED_COUNTS = {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "shared_intermediate_size"}
NESTED = ("thinker_config", "text_config", "language_config", "llm_config")
_PROJ = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
WIDTH = ("intermediate_size",)  # of an expert, in the families without ``moe_intermediate_size``
# Where a text model's layers lie, by itself and inside multimodal models.
PREFIXES = (
    "model.layers.{layer}.",
    "model.language_model.layers.{layer}.",
    "language_model.model.layers.{layer}.",
    "language_model.layers.{layer}.",
    "thinker.model.layers.{layer}.",
    "layers.{layer}.",
)
# Modules that may lie around a text model's list of layers, in any order and number.
_WRAPPERS = frozenset((
    "backbone", "base_model", "decoder", "language", "language_model", "llm", "lm", "model", "module", "text",
    "text_model", "thinker", "transformer",
))  # fmt: skip
# First words of modules that hold layers of another model: towers, talkers, and those that predict further tokens.
_OTHER_MODELS = (
    "adapter", "audio", "code_predictor", "draft", "eagle", "encoder", "image", "medusa", "mtp", "nextn", "speech",
    "talker", "video", "vision", "visual", "vit",
)  # fmt: skip
_EXPERT_ENTRIES = re.compile(
    r"moe|expert|rout|swiglu|situ|scor|shared|mlp|n_group$|topk_group|topk_method|norm_topk|hidden_act|activation"
    r"|latent|act_fn|hash|ffn"
)
# Entries that speak of experts but do not change what a layer computes in inference: losses, training noise,
# outputs, dense layers, attention and the dtype that the quantisation block is asked for.
_HARMLESS_ENTRIES = frozenset((
    "activation_dropout", "expert_dtype", "input_jitter_noise", "intermediate_size_mlp", "mamba_hidden_act",
    "moe_router_dtype", "moe_shared_expert_overlap", "mtp_mlp_layer_types", "num_kv_shared_layers",
    "output_router_logits", "output_scores", "router_aux_loss_coef", "router_jitter_noise", "use_double_wide_mlp",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedNames:
    """Tensors that hold all experts of a layer; format suffixes follow the paths, biases end in ``_bias``.

    gate_up: gate and up in one stack, or gate alone when ``up`` names a stack of its own, or the one up projection
    of experts without a gate. plain: what follows the path of an unquantised stack. interleaved: gate and up
    alternate (even is gate) instead of gate half first. transposed: unquantised tensors are stored input-first,
    ``[E, H, 2I]`` and ``[E, I, H]``; quantised ones are output-first in every family. flat: experts follow each other
    along the rows, ``[E*I, H]``, and down is stored input-first (DBRX).
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
    """The literal name table of a family; ``{layer}`` and ``{expert}`` are filled in.

    layer: prefix of a layer. experts: prefix of everything that belongs to routed experts. gate, up, down: module
    paths of one expert, the format's suffix (``.weight``, ...) follows; up and down are None where the family stores
    experts stacked only, gate also where experts have none. gate and up are equal where one module holds both.
    shared: module paths of the shared expert's gate, up and down; where there are two and experts have a gate, of gate
    and up in one, and down. shared_gate: its sigmoid gate.
    router_scale: factor of the router's input; expert_scale: factor of each expert's weight; hash_table: experts by
    token id. latent: module paths of the projections into and out of the latent width; latent_norm: the norm between
    experts and the latter. biases: tensors ``[E, N]`` of gate, up and down where they are apart; None where they are
    the stacks' names with ``_bias``, or the modules' ``.bias``. outside: module paths of feed-forward networks that
    stay with the caller.
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
        """Build a table from paths below a layer; single: projections of one expert below ``experts{expert}.``."""
        stacked = stacked or StackedNames(gate_up=experts + "gate_up_proj", down=experts + "down_proj")
        paths = [layer + experts + "{expert}." + tail for tail in single]
        gate = paths.pop(0) if len(paths) == 3 else None
        extra = {k: layer + v if isinstance(v, str) else tuple(layer + p for p in v) for k, v in others.items()}
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
        """Whether gate and up of one expert are one module, whose rows lie as those of the stack."""
        return self.gate is not None and self.gate == self.up

    def projection(self, which: str) -> str:
        """Return the module path of one expert's ``gate``, ``up`` or ``down``, empty where there is none."""
        return {"gate": self.gate, "up": self.up, "down": self.down}[which] or ""

    def moved(self, layer: str) -> Names:
        """Return the same table below another prefix of a layer."""
        return self if layer == self.layer else _replace_prefix(self, self.layer, layer)


T = TypeVar("T", Names, StackedNames)


def _replace_prefix(table: T, old: str, new: str) -> T:
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
    """Tell whether tensors below ``prefix`` may be the text model's layers, whose published prefix is ``layer``.

    Both end in a dot and have no ``{layer}``. True: ``prefix`` ends in the same list of layers, inside modules that
    are known to wrap a text model. False: inside a module that is not known. None: another list, or another model.
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
    """Return the last of every ``step`` layers, none where ``step`` is not positive."""
    return tuple(i for i in every_layer(config) if step > 0 and (i + 1) % step == 0)


_AS_IN_FILES = InMemory()


@dataclass(frozen=True, slots=True)
class Family:
    """One row of ``models.FAMILIES``.

    model_types: values of ``model_type`` it answers to. names: the published table; others: tables that exist beside
    it. spec_of: config and layer to ``MoESpec`` (``weight_format`` left to the caller). layers_of: config to the
    indices of the layers that have routed experts. defaults: by model type, what the model's configuration class takes
    for absent entries, limited to the entries read here; a wrapper of several modalities has those of its text class.
    null_is_default: entries for which the class replaces null by its default. in_memory: what transformers
    names or holds otherwise.
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
        # The class of a wrapper fixes the class of its text part, whatever model type that part states.
        kinds = [config.get("model_type"), text.get("model_type")]
        if kinds[0] in AUTO_TEXT:
            kinds.reverse()
        kind = next((name for name in kinds if name in self.model_types), None)
        return Config(config, kind, self.defaults.get(str(kind), {}), self.null_is_default)

    def num_layers(self, config: Mapping[str, object]) -> int | None:
        """Return the number of layers before those that predict further tokens, None where the config has none."""
        count = self.read(config).value("num_hidden_layers", "n_layers", default=None)
        return count if isinstance(count, int) and not isinstance(count, bool) else None

    @property
    def tables(self) -> tuple[Names, ...]:
        """The tables of names that are known: published, saved otherwise."""
        return (self.names, *self.others)

    def moe_layers(self, config: Mapping[str, object]) -> tuple[int, ...]:
        """Return the indices of the layers that have routed experts; raises ConfigError."""
        return self.layers_of(self.read(config))

    def describe(self, config: Mapping[str, object], layer: int | None = None) -> MoESpec:
        """Return the spec of a layer, default the last with routed experts; raises ConfigError and SpecError."""
        read = self.read(config)
        layers = self.layers_of(read)
        spec = self.spec_of(read, layer if layer is not None else layers[-1] if layers else 0)
        read.refuse_unread()
        return spec

    def assumes_shared(self, config: Mapping[str, object], layer: int) -> bool:
        """Tell whether the layer's shared expert is one of the model type's defaults, not of the config."""
        read = self.read(config)
        return self.spec_of(read, layer).shared is not None and bool(read.assumed & _SHARED_COUNTS)


def text_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the part of a multimodal config that describes the text model."""
    for key in NESTED:
        config = object_of(config.get(key), config)
    return config


def object_of(value: object, otherwise: Mapping[str, object] | None = None) -> Mapping[str, object]:
    """Return ``value`` where it is an object of JSON, else ``otherwise`` or an empty one."""
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else otherwise or {}


class Config:
    """The text part of one ``config.json``; every method raises ConfigError on what it does not allow.

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
        """Return the entry under any of ``keys``; several must agree.

        An absent entry has the default of the model type, else ``default``; without either its absence is an error.
        Null is what absence is, but for an entry whose default is not null: the configuration class keeps the null.
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
        """Return an entry of ``kind``; true and false are no numbers."""
        value = self.value(*keys, default=default)
        if not isinstance(value, allowed_type) or (isinstance(value, bool) and allowed_type is not bool):
            raise self.wrong(keys[0], value, allowed)
        return value

    def integer(self, *keys: str, default: object = _ABSENT) -> int:
        """Return an integer."""
        value: int = self._value_of_type(int, "an integer", keys, default)
        maximum = _MAX_COUNT if keys[0].startswith(("num_", "n_")) else _MAX_SIZE
        if abs(value) > maximum:
            # loops and tables are made for every layer and expert before the first tensor can contradict the config
            size = value if value.bit_length() < 64 else "beyond 2^63"
            raise ConfigError(f"config.json: {keys[0]} is {size}, allowed is {maximum} at most")
        return value

    def number(self, *keys: str, default: object = _ABSENT) -> float:
        """Return a finite number as float."""
        value = self._value_of_type(int | float, "a number", keys, default)
        if not abs(value) <= sys.float_info.max:  # NaN is not, and neither is an integer beyond it
            raise self.wrong(keys[0], value, "a finite number")
        return float(value)

    def flag(self, *keys: str, default: object = _ABSENT) -> bool:
        """Return a boolean."""
        return self._value_of_type(bool, "true and false", keys, default)

    def only(self, key: str, *allowed: object) -> None:
        """Refuse an entry other than the allowed ones; absence means its default, else the first of them."""
        value = self.value(key, default=allowed[0])
        if value not in allowed:
            raise self.wrong(key, value, " and ".join(map(repr, allowed)))

    def inner(self, key: str) -> Config:
        """Return the object under ``key`` as a config of its own, empty when absent."""
        defaults = object_of(self._defaults.get(key))
        part = Config(self._value_of_type(dict, "an object", (key,), {}), self._model, defaults)
        self.parts.append(part)
        return part

    @property
    def top_k(self) -> int:
        """The number of experts per token."""
        return self.integer(*_TOP_K)

    def items(self, *keys: str) -> list[object] | None:
        """Return a list, or None when absent or a number; text is split at commas."""
        value = self.value(*keys, default=None)
        if isinstance(value, str) and len(value) <= _MAX_COUNT:
            value = [int(piece) if piece.strip().isdigit() else piece.strip() for piece in value.split(",")]
        return cast("list[object]", value) if isinstance(value, list) else None

    def kinds(self, key: str) -> list[object] | None:
        """Return a list with one entry for each layer at least, or None when absent or a number."""
        entries, layers = self.items(key), self.integer("num_hidden_layers")
        if entries is not None and len(entries) < layers:
            raise self.wrong(key, f"a list of {len(entries)}", f"one entry for each of num_hidden_layers={layers}")
        return entries

    def per_layer(self, *keys: str, layer: int, default: object = _ABSENT) -> int:
        """Return an integer that is given once, or in a list for each layer."""
        value, key = self.value(*keys, default=default), keys[0]
        if isinstance(value, list):
            listed = cast("list[object]", value)
            value = listed[layer] if layer < len(listed) else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, f"an integer, or a list with one for layer {layer}")
        return value

    def passed_over(self, *keys: str) -> None:
        """Say that entries do not change what a layer computes in inference."""
        self.read_keys.update(keys)

    def wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        """Return the error for an entry that is not allowed."""
        return ConfigError(f"config.json of model_type {self._model!r}: {key} is {value!r}, allowed is {allowed}")

    def refuse_unread(self) -> None:
        """Refuse entries that speak of experts, routing or activation, say something, and were never asked for."""
        for part in self.parts:
            part.refuse_unread()
        left = {
            k: v
            for k, v in self.entries.items()
            if v and _EXPERT_ENTRIES.search(k) and k not in self.read_keys | _HARMLESS_ENTRIES
        }
        if left:
            listed = ", ".join(f"{key}={value!r}" for key, value in left.items())
            raise ConfigError(
                f"config.json of model_type {self._model!r}: {listed} is not implemented for this family and could "
                "change what its experts compute; remove the entry if it has no effect on them"
            )


def listed_layers(config: Config) -> tuple[int, ...]:
    """Return the layers after the dense ones: a list of kinds, or one flag a layer, or a first layer and a step."""
    layers = range(config.integer("num_hidden_layers"))
    kinds, flags = config.kinds("mlp_layer_types"), config.kinds("moe_layer_freq")
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
    """Return the shared expert that is as wide as ``keys`` routed ones together, or None for a count of 0."""
    count, size = config.integer(*keys), config.integer(*width)
    return SharedSpec(intermediate_size=count * size) if count else None


def projections_of(path: str) -> tuple[str, ...]:
    """Return the module paths of gate, up and down below ``path``, under the names most families use."""
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
