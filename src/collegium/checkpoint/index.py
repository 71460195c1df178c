"""Sort the tensors of a checkpoint by layer; every name is parsed once, whatever the number of layers.

The index also chooses the name table of the family that the checkpoint follows: the prefix of its layers, one tensor
per expert or a stack, and the orientation. A prefix is accepted if experts exist below it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..errors import DuplicateTensorError
from ..models import Family, Names, either_way, family_of, is_wrapped, unpacked
from ..types import MoESpec
from .header import FLOATS, TensorInfo
from .layout import PROJECTIONS, Projection, plain_shape, source_of, stack_paths
from .reader import Checkpoint
from .stored_format import ACTIVATION_SCALES, PART_SUFFIXES

__all__ = ["ExpertTensors", "Index", "expert_of", "index_of", "router_names", "single_matrices"]

# Modules below a layer and outside the family's MoE block whose names suggest routing, experts or feed-forward
# networks. Exceptions: attention, residual connections, heads for multi-token prediction, and norms of the block's
# input or output, which the caller applies.
_SUSPECT = re.compile(
    r"expert|moe|rout|exps|shexp|exp_probs|correction|(^|_)(mlp|feed_forward)$|^ffn(_(gate|up|down|latent)|$)"
    r"|^(shared?_|gate$|mixer$|latent)"
)
_HARMLESS = re.compile(r"attn|^shared_head$|^(?!.*(exp|rout|gate_inp)).*norm")
_GGUF_LAYERS = "blk."
_NAME = re.compile(r"((?:[A-Za-z_]\w*\.)+)(0|[1-9]\d{0,8})\.(.+)")
# What may follow the path of a stack: neither the tail of a longer name nor the number of an expert.
_STACK_SUFFIX = re.compile(r"(?!.*\.\d+\.)(?:[._].+)?")


@dataclass(kw_only=True, slots=True)
class ExpertTensors:
    """The expert tensors of one layer, by name only.

    single: ``(expert, projection)`` to suffix to header entry. stack: projection to suffix to header entry; ``gate``
    stands for gate_up where both are one tensor. unknown: names of the layer that look like a router's or an expert's
    by position or spelling and that the family does not have.
    """

    single: dict[tuple[int, Projection], dict[str, TensorInfo]] = field(default_factory=dict)
    stack: dict[Projection, dict[str, TensorInfo]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def items(self) -> Iterable[tuple[str, TensorInfo]]:
        """Yield suffix and header entry of all known expert tensors."""
        for group in (*self.single.values(), *self.stack.values()):
            yield from group.items()

    def infos(self) -> Iterable[TensorInfo]:
        """Return the header entries of all known expert tensors."""
        return (info for _, info in self.items())  # noqa: PERF102 - items() yields pairs of several dictionaries

    def suffixes(self, *projections: Projection) -> dict[str, set[str]]:
        """Return every suffix of ``projections`` with its dtypes."""
        groups = [group for (_, which), group in self.single.items() if which in projections]
        groups += [group for which, group in self.stack.items() if which in projections]
        return _dtypes_by_suffix(item for group in groups for item in group.items())


def _dtypes_by_suffix(suffixes: Iterable[tuple[str, TensorInfo]]) -> dict[str, set[str]]:
    """Return the dtypes of the entries by suffix."""
    dtypes = defaultdict[str, set[str]](set)
    for suffix, info in suffixes:
        dtypes[suffix].add(info.dtype)
    return dict(dtypes)


class _Candidate(NamedTuple):
    """A name table below a prefix with experts. Candidates are compared as tuples; the smallest is the best.

    stray: the prefix contains a module that is not known to wrap a text model. faults: number of names that the table
    or the files lack. order: position of the table, for ties. head: the prefix. names: the table below it.
    """

    stray: bool
    faults: int
    order: int
    head: str
    names: Names


class Index:
    """The tensors of a checkpoint by layer; create it with ``index_of``.

    heads: prefix before the layer's number to layer to (rest of the name, entry). family: the config's. names: the
    family's name table that the checkpoint follows.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.heads: dict[str, dict[int, list[tuple[str, TensorInfo]]]] = {}
        for name, info in checkpoint.tensors.items():
            match = _NAME.fullmatch(name)
            if match is not None:
                self.heads.setdefault(match[1], {}).setdefault(int(match[2]), []).append((match[3], info))
        self._expert_tensors: dict[int, ExpertTensors] = {}
        self._config = checkpoint.config
        self.family = family_of(checkpoint.config)
        self.names = self._choose_names(self.family, checkpoint.config)

    def tensors(self, layer: int) -> list[tuple[str, TensorInfo]]:
        """Return (name below the layer, entry) of every tensor of ``layer``."""
        return self.heads.get(self.names.layer.partition("{layer}")[0], {}).get(layer, [])

    def layers(self) -> Iterable[int]:
        """Return the numbers of all layers that have tensors."""
        return self.heads.get(self.names.layer.partition("{layer}")[0], {})

    def expert_tensors(self, layer: int) -> ExpertTensors:
        """Return the expert tensors of ``layer``."""
        if layer not in self._expert_tensors:
            found = _sort_tensors(self.names, layer, self.tensors(layer))
            if self.names.image_experts and layer in self.family.moe_layers(self._config):
                count = self.family.describe(self._config, layer).num_experts
                for expert, which in [key for key in found.single if key[0] >= count]:
                    del found.single[expert, which]
            self._expert_tensors[layer] = found
        return self._expert_tensors[layer]

    @property
    def has_shared(self) -> bool:
        """Whether any layer has a tensor of a shared expert."""
        cut = len(self.names.layer)
        paths = tuple(path[cut:] + "." for path in self.names.shared or ())
        return any(tail.startswith(paths) for layer in self.layers() for tail, _ in self.tensors(layer))

    def suffixes(self, layer: int, templates: Iterable[str]) -> dict[str, set[str]]:
        """Return the suffixes and dtypes of the tensors at module paths of ``layer``."""
        paths = [template.removeprefix(self.names.layer) for template in templates]
        return _dtypes_by_suffix(
            (tail.removeprefix(path), info)
            for tail, info in self.tensors(layer)
            for path in paths
            if tail.startswith(path + ".")
        )

    def _choose_names(self, family: Family, config: Mapping[str, object]) -> Names:
        """Return the table with the fewest faults among those whose experts exist; the first of equals.

        Raises DuplicateTensorError where experts exist below two prefixes that may both be the text model's.
        """
        layers = frozenset(family.moe_layers(config))
        candidates: list[_Candidate] = []
        for order, table in enumerate(family.tables):
            candidates += self._candidates(table, order, layers, config)
        # Try the spellings of tools if no published table accounts for all names.
        if not candidates or min(candidates).faults:
            order = len(family.tables)
            for table in family.tables:
                for other in unpacked(table):
                    candidates += self._candidates(other, order, layers, config)
                    order += 1
        if not candidates:
            return family.names
        best = min(candidates)
        rivals = sorted({candidate.head for candidate in candidates if candidate.stray == best.stray})
        if len(rivals) > 1:
            raise DuplicateTensorError(
                f"experts of {family.name} exist below {', '.join(map(repr, rivals))}, any of which may be the text "
                "model's; keep the tensors of one"
            )
        return best.names

    def _candidates(
        self, table: Names, order: int, layers: frozenset[int], config: Mapping[str, object]
    ) -> Iterable[_Candidate]:
        """Yield ``table`` below every prefix where it has experts."""
        published = table.layer.partition("{layer}")[0]
        for head, present in self.heads.items():
            is_text_model = is_wrapped(head, published)
            # While tensors are still arriving, the layer with the most of them is the best evidence.
            layer = max(layers.intersection(present), key=lambda i, all=present: (len(all[i]), -i), default=None)
            if is_text_model is None or layer is None:
                continue
            names = table.moved(head + table.layer.removeprefix(published))
            tensors = _sort_tensors(names, layer, present[layer])
            spec = self.family.describe(config, layer) if tensors.single or tensors.stack else None
            unclear = spec is not None and either_way(table) and spec.expert_hidden_size == spec.intermediate_size
            if spec is not None and not unclear:
                faults = _count_mismatched_stacks(tensors, table, spec) + len(tensors.unknown)
                tails = {tail for tail, _ in present[layer]}
                tails |= {f"{path}.weight" for path in _quantised_parts(table, tails).values()}
                faults += len(_non_expert_names(table)[0] - tails)
                yield _Candidate(not is_text_model, faults, order, head, names)


_INDICES: WeakKeyDictionary[Checkpoint, Index] = WeakKeyDictionary()


def index_of(checkpoint: Checkpoint) -> Index:
    """Return the index of a checkpoint, built at the first call; raises ConfigError."""
    if checkpoint not in _INDICES:
        _INDICES[checkpoint] = Index(checkpoint)
    return _INDICES[checkpoint]


def expert_of(family: Family, name: str) -> int | None:
    """Return the routed expert that tensor ``name`` belongs to by a table of the family, None for a shared tensor."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    matches = (pattern.fullmatch(match[3]) for pattern in _family_patterns(family))
    return next((_parse_expert(hit)[0] for hit in matches if hit is not None), None)


@cache
def _family_patterns(family: Family) -> tuple[re.Pattern[str], ...]:
    tables = (*family.tables, *(other for table in family.tables for other in unpacked(table)))
    patterns = (_expert_pattern(names) for names in tables)
    return tuple({pattern.pattern: pattern for pattern in patterns if pattern is not None}.values())


@cache
def _expert_pattern(names: Names) -> re.Pattern[str] | None:
    """Return a pattern for the tensors of a single expert, with a group for each projection and for the suffix."""
    paths: dict[str, Projection] = {}
    for which in PROJECTIONS:
        path = names.projection(which).removeprefix(names.layer)
        if path:
            paths.setdefault(path, which)  # gate and up in one module are listed as gate
    if not paths:
        return None
    choices: list[str] = []
    for path, which in paths.items():
        head, _, tail = map(re.escape, path.partition("{expert}"))
        # No leading zeros: the loader would not look for experts.01.
        choices.append(rf"{head}(?P<{which}>0|[1-9][0-9]{{0,8}}){tail}")
    return re.compile(rf"(?:{'|'.join(choices)})(?P<suffix>\..+)")


def _parse_expert(match: re.Match[str]) -> tuple[int, Projection]:
    """Return expert and projection of a match of ``_expert_pattern``."""
    groups = match.groupdict()
    which: Projection = next(projection for projection in PROJECTIONS if groups.get(projection) is not None)
    return int(groups[which]), which


def router_names(names: Names) -> tuple[str | None, ...]:
    """Return the names of all tensors that choose and weight experts."""
    exact = (names.router_weight, names.router_bias, names.correction_bias, names.router_scale, names.expert_scale)
    return (*exact, names.hash_table)


def single_matrices(names: Names) -> tuple[str, ...]:
    """Return the module paths of the router and of the shared expert's gate, which may be quantised."""
    return tuple(name.removesuffix(".weight") for name in (names.router_weight, names.shared_gate) if name is not None)


def _quantised_parts(names: Names, present: Set[str]) -> dict[str, str]:
    """Return the parts of a quantised router or shared gate among the names below a layer: name to module."""
    parts: dict[str, str] = {}
    if names.layer.startswith(_GGUF_LAYERS):
        return parts  # a matrix in GGUF blocks is one tensor
    for path in (path.removeprefix(names.layer) for path in single_matrices(names)):
        # GPTQ and AWQ write biases of zero
        suffixes = PART_SUFFIXES if f"{path}.qweight" in present else PART_SUFFIXES - {".bias"}
        # Suffixes without a dot belong to stacks.
        candidates = [path + suffix for suffix in (*suffixes, *ACTIVATION_SCALES) if suffix.startswith(".")]
        for name in candidates:
            if name in present:
                parts[name] = path
    return parts


def _non_expert_names(names: Names) -> tuple[set[str], tuple[str, ...]]:
    """Return the tensor names and the module paths of an MoE block outside its routed experts."""
    exact = (*router_names(names), names.shared_gate, names.latent_norm, *(names.biases or ()))
    paths = (*(names.shared or ()), *(names.latent or ()), *(names.outside or ()))
    cut = len(names.layer)
    return {name[cut:] for name in exact if name is not None}, tuple(path[cut:] + "." for path in paths)


def _count_mismatched_stacks(tensors: ExpertTensors, table: Names, spec: MoESpec) -> int:
    """Count the unquantised stacks that do not have the table's shape.

    A transposed table mismatches at least one stack, since ``H = 2I`` and ``H = I`` are never both true.
    """
    mismatched = 0
    for which, parts in tensors.stack.items():
        needed = plain_shape(source_of(table, spec, layer=0, expert=0, projection=which, stacked=True))
        weight = parts.get(".weight")
        if weight is not None and weight.dtype in FLOATS and weight.shape != needed:
            mismatched += 1
    return mismatched


def _is_suspicious(tail: str) -> bool:
    """Return whether a tensor below a layer, outside its MoE block, could change the result of the block."""
    module = tail.partition(".")[0]
    return _SUSPECT.search(module) is not None and _HARMLESS.search(module) is None


def _sort_tensors(names: Names, layer: int, tensors: Iterable[tuple[str, TensorInfo]]) -> ExpertTensors:
    """Sort the tensors below a layer into those of experts and unknown ones."""
    experts = ExpertTensors()
    pattern = _expert_pattern(names)
    exact, paths = _non_expert_names(names)
    exact |= {path.removeprefix(names.layer) for path in names.outside or ()}
    prefix = names.experts.removeprefix(names.layer)
    table = names.stacked
    block = names.router_weight.removeprefix(names.layer).partition(".")[0] + "."
    stacks: dict[str, Projection] = {p.removeprefix(names.layer): which for which, p in stack_paths(table).items()}
    tensors = [*tensors]
    parts = _quantised_parts(names, {tail for tail, _ in tensors})
    for tail, info in tensors:
        if tail in exact or tail in parts or tail.startswith(paths):
            continue
        if not (tail.startswith((prefix, block)) or _is_suspicious(tail)):
            continue
        match = pattern.fullmatch(tail) if pattern is not None else None
        if match is not None:
            experts.single.setdefault(_parse_expert(match), {})[match["suffix"]] = info
            continue
        path = next((p for p in stacks if tail.startswith(p) and _STACK_SUFFIX.fullmatch(tail, len(p))), None)
        if path is None:
            experts.unknown.append(names.layer.format(layer=layer) + tail)
        else:
            # The formats call the part of an unquantised stack ".weight", whatever its suffix in the files.
            suffix = tail.removeprefix(path)
            suffix = ".weight" if suffix == table.plain else suffix
            experts.stack.setdefault(stacks[path], {})[suffix] = info
    return experts
