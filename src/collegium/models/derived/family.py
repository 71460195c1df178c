"""A family for one config whose model type has no file: derived from the class of the installed transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn

from ...errors import ConfigError, SpecError
from ...runtime.devices import plain_torch
from ...types import MoESpec
from ..base import Config, Family, Names, StackedNames, text_of
from .class_layers import ClassLayer, ClassModel, build, installed_release
from .proposal import Proposal, propose
from .stored_names import StoredNames, stored_names

__all__ = ["DerivedFamily", "derived_family"]

_ROUTER_ROLES = ("router_bias", "correction_bias", "expert_scale", "shared_gate")


@dataclass(frozen=True, slots=True)
class DerivedFamily(Family):
    """The family of one config; its specs were proved against the class on random float32 numbers.

    class_name, release: of transformers. proposals: by layer. layer_count: layers of the text model.
    """

    class_name: str = ""
    release: str = ""
    proposals: Mapping[int, Proposal] = field(default_factory=dict[int, Proposal], hash=False)
    layer_count: int | None = None

    @property
    def origin(self) -> str:
        """Where names and specs come from."""
        reason = self.refusal(min(self.proposals))
        checked = "checked" if reason is None else f"experts checked; whole models only, with its router: {reason}"
        return f"derived from transformers' class {self.class_name} ({self.release}), {checked}"

    def refusal(self, layer: int) -> str | None:
        """Return why ``layer`` runs only inside its class, None if Collegium computes all of it."""
        return self.proposals[layer].refusal if layer in self.proposals else None

    def num_layers(self, config: Mapping[str, object]) -> int | None:
        """Return the number of layers of the text model."""
        return self.layer_count

    def describe(self, config: Mapping[str, object], layer: int | None = None) -> MoESpec:
        """Return the proved spec of a layer, default the last; raises ConfigError for a layer without experts."""
        number = max(self.proposals) if layer is None else layer
        if number not in self.proposals:
            raise ConfigError(f"layer {number} has no routed experts; layers that have are {tuple(self.proposals)}")
        return self.proposals[number].spec

    def assumes_shared(self, config: Mapping[str, object], layer: int) -> bool:
        """Return False: a shared expert is one that the class has."""
        return False


def derived_family(config: Mapping[str, object]) -> DerivedFamily | None:
    """Return the family of a config, None if the installed transformers does not know its model type.

    Raises ConfigError, with the names found, if the class has experts that cannot be derived.
    """
    for kind, part in ((config.get("model_type"), config), (text_of(config).get("model_type"), text_of(config))):
        if isinstance(kind, str) and installed_release(kind) is not None:
            try:
                return _derive(kind, json.dumps(part, sort_keys=True))
            except (TypeError, ValueError) as error:  # no JSON
                raise ConfigError(f"config.json of model_type {kind!r}: {error}; correct the entry") from error
    return None


@lru_cache(maxsize=32)
def _derive(kind: str, config: str) -> DerivedFamily:
    model = build(kind, json.loads(config))
    with plain_torch():
        return _family(kind, model)


def _family(kind: str, model: ClassModel) -> DerivedFamily:
    proposals = _proposals(model)
    first = model.layers[0]
    found = stored_names(model, first)
    roles = _roles(first, found, proposals[first.number])
    outside = tuple(dict.fromkeys(path for layer in _kinds_of_layers(model) for path in _outside(model, layer, roles)))
    names = _table(first, found, proposals[first.number], outside)
    in_memory = _in_memory(model, first, proposals[first.number])
    count = getattr(model.text_config, "num_hidden_layers", None)
    return DerivedFamily(
        kind,
        (kind,),
        names,
        _spec_of,
        lambda _: tuple(proposals),
        () if in_memory is None or in_memory == names else (in_memory,),
        class_name=model.name,
        release=installed_release(kind) or "",
        proposals=proposals,
        layer_count=count if isinstance(count, int) else None,
    )


def _spec_of(_: Config, __: int) -> MoESpec:
    raise SpecError("a derived family describes layers itself")


def _proposals(model: ClassModel) -> dict[int, Proposal]:
    """Return the proposal of every layer; layers with the same modules and numbers share one."""
    proposals: dict[int, Proposal] = {}
    by_kind: dict[object, Proposal] = {}
    for layer in model.layers:
        kind = _kind(layer.block)
        if kind not in by_kind:
            try:
                by_kind[kind] = propose(model, layer)
            except SpecError as error:
                raise ConfigError(
                    f"model_type {model.model_type!r}: experts of transformers' class {model.name} cannot be derived: "
                    f"{error}; a new family is one file in collegium/models"
                ) from error
        proposals[layer.number] = by_kind[kind]
    roles = {tuple(sorted(proposal.roles)) for proposal in proposals.values() if proposal.refusal is None}
    if len(roles) > 1:
        raise ConfigError(
            f"model_type {model.model_type!r}: layers of transformers' class {model.name} have different routers; a "
            "new family is one file in collegium/models"
        )
    return proposals


def _kind(block: nn.Module) -> object:
    """Return a key that is equal for blocks with equal modules, shapes and numbers."""
    modules: list[object] = []
    for name, module in block.named_modules():
        values = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str) and k != "layer_idx"}
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = tuple((key, tuple(tensor.shape)) for key, tensor in named)
        modules.append((name, type(module).__name__, tuple(sorted(values.items())), shapes))
    return tuple(modules)


def _roles(layer: ClassLayer, found: StoredNames, proposal: Proposal) -> dict[str, Any]:
    """Return the file names of the block's tensors by role, as paths below the layer."""
    block = _below(layer.block_path, layer) + "."
    roles: dict[str, Any] = {}
    for role, value in proposal.roles.items():
        if isinstance(value, str):
            roles[role] = found.file_name(block + value)
        else:
            paths = [found.file_name(f"{block}{path}.weight") for path in value]
            roles[role] = tuple((path or "").removesuffix(".weight") for path in paths)
    missing = [role for role, value in roles.items() if value is None or (isinstance(value, tuple) and not all(value))]
    if missing:
        raise ConfigError(
            f"names of {', '.join(missing)} cannot be derived: the files have them converted, and in memory they are "
            f"{', '.join(str(proposal.roles[role]) for role in missing)}"
        )
    return roles


def _below(path: str, layer: ClassLayer) -> str:
    return path.removeprefix(layer.prefix)


def _kinds_of_layers(model: ClassModel) -> Iterator[ClassLayer]:
    """Yield the first layer of each set of tensors below a layer."""
    names: dict[str, list[str]] = {}
    for name in model.model.state_dict():
        head = next((layer.prefix for layer in model.layers if name.startswith(layer.prefix)), "")
        names.setdefault(head, []).append(name.removeprefix(head))
    kinds: set[tuple[str, ...]] = set()
    for layer in model.layers:
        kind = tuple(names[layer.prefix])
        if kind not in kinds:
            kinds.add(kind)
            yield layer


def _outside(model: ClassModel, layer: ClassLayer, roles: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names below a layer that belong neither to experts nor to a role, as modules or tensors."""
    found = stored_names(model, layer)
    used = {path for value in roles.values() for path in ((value,) if isinstance(value, str) else value)}
    used |= {f"{path}.weight" for path in used}
    own = [name for parts in found.in_memory.values() for name, _, _ in parts]
    heads = {name.partition(".")[0] for name in (*own, *found.single.values(), *found.stacked.values())}
    paths = [name.partition(".")[0] if name.partition(".")[0] not in heads else name for name in found.others]
    paths += [name for name in own if name not in used]
    return tuple(dict.fromkeys(path.removesuffix(".weight") for path in paths))


def _table(layer: ClassLayer, found: StoredNames, proposal: Proposal, outside: Sequence[str]) -> Names:
    """Return the name table of published files."""
    roles = _roles(layer, found, proposal)
    at = found.prefix
    single, stacked = found.single, found.stacked
    gate, up, down = (
        single.get("gate", single.get("gate_up")),
        single.get("up", single.get("gate_up")),
        single.get("down"),
    )
    experts = (down or "").partition("{expert}")[0] if down else stacked["down"].rpartition(".")[0] + "."
    if stacked:
        upper = stacked.get("gate_up") or stacked.get("gate") or stacked["up"]
        second = stacked.get("up") if "gate" in stacked else None
        stack = StackedNames(
            gate_up=at + upper,
            down=at + stacked["down"],
            up=None if second is None else at + second,
            plain=found.plain,
            interleaved=found.interleaved,
            transposed=found.transposed,
            flat=found.flat,
        )
    else:
        stack = _memory_stack(layer, at)
    biases = tuple(at + found.biases[which] for which in ("gate", "gate_up", "up", "down") if which in found.biases)
    return Names(
        layer=at,
        experts=at + experts,
        gate=None if gate is None else at + gate,
        up=None if up is None else at + up,
        down=None if down is None else at + down,
        stacked=stack,
        router_weight=at + roles.get("router_weight", outside[-1] + ".weight"),
        **{role: at + roles[role] for role in _ROUTER_ROLES if role in roles},
        shared=tuple(at + path for path in roles["shared"]) if "shared" in roles else None,
        biases=biases or None,
        outside=tuple(at + path for path in outside) or None,
    )


def _memory_stack(layer: ClassLayer, at: str) -> StackedNames:
    """Return the stacks as the class has them in memory."""
    experts: Any = layer.experts
    path = at + _below(layer.experts_path, layer) + "."
    return StackedNames(
        gate_up=path + ("gate_up_proj" if experts.has_gate else "up_proj"),
        down=path + "down_proj",
        interleaved=not experts.is_concatenated,
        transposed=bool(experts.is_transposed),
    )


def _in_memory(model: ClassModel, layer: ClassLayer, proposal: Proposal) -> Names | None:
    """Return the table of files that keep the names in memory, None where the block is not a layer."""
    if proposal.refusal is not None:
        return None
    at = layer.prefix.removesuffix(f"{layer.number}.") + "{layer}."
    block = at + _below(layer.block_path, layer) + "."
    roles: dict[str, Any] = {
        role: block + value if isinstance(value, str) else tuple(block + path for path in value)
        for role, value in proposal.roles.items()
    }
    inside = [_below(name, layer) for name, _ in model.model.named_parameters() if name.startswith(layer.prefix)]
    outside = [name.partition(".")[0] for name in inside if not f"{layer.prefix}{name}".startswith(layer.block_path)]
    return Names(
        layer=at,
        experts=at + _below(layer.experts_path, layer) + ".",
        stacked=_memory_stack(layer, at),
        outside=tuple(at + path for path in dict.fromkeys(outside)),
        **roles,
    )
