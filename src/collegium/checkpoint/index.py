"""Which tensors belong to which layer: every name is looked at once, however many layers ask.

Here too it is settled which name table of the family a checkpoint follows: below which prefix its layers lie, one
tensor an expert or one stack, and in which orientation. The prefix is proven by the experts below it.
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

__all__ = ["Found", "Index", "expert_of", "index_of", "router_names", "single_matrices"]

# Modules below a layer and outside the family's MoE block whose names are those of routing, experts or feed-forward
# networks, unless they belong to attention, to residual connections, to the heads that predict further tokens, or are
# norms of the block's input or output, which the caller applies.
_SUSPECT = re.compile(
    r"expert|moe|rout|exps|shexp|exp_probs|correction|(^|_)(mlp|feed_forward)$|^ffn(_(gate|up|down|latent)|$)"
    r"|^(shared?_|gate$|mixer$|latent)"
)
_HARMLESS = re.compile(r"attn|^shared_head$|^(?!.*(exp|rout|gate_inp)).*norm")
_GGUF_LAYERS = "blk."
_NAME = re.compile(r"((?:[A-Za-z_]\w*\.)+)(0|[1-9]\d{0,8})\.(.+)")
# What may follow the path of a stack: not more letters of a longer name, nor the number of an expert.
_STACK_SUFFIX = re.compile(r"(?!.*\.\d+\.)(?:[._].+)?")


@dataclass(kw_only=True, slots=True)
class Found:
    """The expert tensors of one layer, by name only.

    single: ``(expert, projection)`` to suffix to header entry. stack: the same without experts (``gate`` means
    gate_up where both are in one). unknown: names of the layer that belong to router or experts by their place or by
    what they are called, and that the family does not have.
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
        """Return every suffix seen of ``projections``, with the dtypes it was seen in."""
        groups = [group for (_, which), group in self.single.items() if which in projections]
        groups += [group for which, group in self.stack.items() if which in projections]
        return _dtypes(item for group in groups for item in group.items())


def _dtypes(suffixes: Iterable[tuple[str, TensorInfo]]) -> dict[str, set[str]]:
    """Return the dtypes of the entries by suffix."""
    seen = defaultdict[str, set[str]](set)
    for suffix, info in suffixes:
        seen[suffix].add(info.dtype)
    return dict(seen)


class _Candidate(NamedTuple):
    """A table below a prefix where experts exist. Candidates compare by rank: the smallest is the best.

    stray: the prefix has a module that is not known to wrap a text model. faults: names that the table lacks, or that
    are not in the files. order: of tables that are equal, the first. head: the prefix. names: the table below it.
    """

    stray: bool
    faults: int
    order: int
    head: str
    names: Names


class Index:
    """The names of a checkpoint sorted by layer; made by ``index_of``.

    heads: what comes before the layer's number, to layer, to (rest of the name, entry). family: the config's. names:
    the family's table that is followed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.heads: dict[str, dict[int, list[tuple[str, TensorInfo]]]] = {}
        for name, info in checkpoint.tensors.items():
            match = _NAME.fullmatch(name)
            if match is not None:
                self.heads.setdefault(match[1], {}).setdefault(int(match[2]), []).append((match[3], info))
        self._found: dict[int, Found] = {}
        self.family = family_of(checkpoint.config)
        self.names = self._choose(self.family, checkpoint.config)

    def tensors(self, layer: int) -> list[tuple[str, TensorInfo]]:
        """Return (name below the layer, entry) of every tensor of ``layer``."""
        return self.heads.get(self.names.layer.partition("{layer}")[0], {}).get(layer, [])

    def layers(self) -> Iterable[int]:
        """Return the numbers of all layers that have tensors."""
        return self.heads.get(self.names.layer.partition("{layer}")[0], {})

    def found(self, layer: int) -> Found:
        """Return the expert tensors of ``layer``."""
        if layer not in self._found:
            self._found[layer] = _sort(self.names, layer, self.tensors(layer))
        return self._found[layer]

    @property
    def has_shared(self) -> bool:
        """Whether any layer has a tensor of a shared expert."""
        cut = len(self.names.layer)
        paths = tuple(path[cut:] + "." for path in self.names.shared or ())
        return any(rest.startswith(paths) for layer in self.layers() for rest, _ in self.tensors(layer))

    def suffixes(self, layer: int, templates: Iterable[str]) -> dict[str, set[str]]:
        """Return the suffixes and dtypes of the tensors at module paths of ``layer``."""
        paths = [template.removeprefix(self.names.layer) for template in templates]
        return _dtypes(
            (rest.removeprefix(path), info)
            for rest, info in self.tensors(layer)
            for path in paths
            if rest.startswith(path + ".")
        )

    def _choose(self, family: Family, config: Mapping[str, object]) -> Names:
        """Return the table whose experts exist and most of whose other names do; the first of equals.

        Raises DuplicateTensorError where experts lie below two prefixes that may both be the text model's.
        """
        layers = frozenset(family.moe_layers(config))
        found = [one for order, table in enumerate(family.tables) for one in self._below(table, order, layers, config)]
        # Spellings of tools are looked for where the published ones leave experts over.
        if not found or min(found).faults:
            order = len(family.tables)
            for table in family.tables:
                for other in unpacked(table):
                    found += self._below(other, order, layers, config)
                    order += 1
        if not found:
            return family.names
        best = min(found)
        rivals = sorted({one.head for one in found if one.stray == best.stray})
        if len(rivals) > 1:
            raise DuplicateTensorError(
                f"experts of {family.name} lie below {', '.join(map(repr, rivals))}, and nothing tells which of them "
                "are the text model's; keep the tensors of one"
            )
        return best.names

    def _below(
        self, table: Names, order: int, layers: frozenset[int], config: Mapping[str, object]
    ) -> Iterable[_Candidate]:
        """Yield ``table`` below every prefix where it has experts."""
        published = table.layer.partition("{layer}")[0]
        for head, present in self.heads.items():
            known = is_wrapped(head, published)
            # Of tensors that are still arriving, the layer with most of them says most.
            layer = max(layers.intersection(present), key=lambda i, all=present: (len(all[i]), -i), default=None)
            if known is None or layer is None:
                continue
            names = table.moved(head + table.layer.removeprefix(published))
            found = _sort(names, layer, present[layer])
            spec = self.family.describe(config, layer) if found.single or found.stack else None
            unclear = spec is not None and either_way(table) and spec.expert_hidden_size == spec.intermediate_size
            if spec is not None and not unclear:
                faults = _turned(found, table, spec) + len(found.unknown)
                rests = {rest for rest, _ in present[layer]}
                rests |= {f"{path}.weight" for path in _parts(table, rests).values()}
                faults += len(_others(table)[0] - rests)
                yield _Candidate(not known, faults, order, head, names)


_INDICES: WeakKeyDictionary[Checkpoint, Index] = WeakKeyDictionary()


def index_of(checkpoint: Checkpoint) -> Index:
    """Return the index of a checkpoint, built at the first call; raises ConfigError."""
    if checkpoint not in _INDICES:
        _INDICES[checkpoint] = Index(checkpoint)
    return _INDICES[checkpoint]


def expert_of(family: Family, name: str) -> int | None:
    """Return whose own tensor ``name`` is by a table of the family: the number of a routed expert, or None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = (pattern.fullmatch(match[3]) for pattern in _every_pattern(family))
    return next((_expert(one)[0] for one in found if one is not None), None)


@cache
def _every_pattern(family: Family) -> tuple[re.Pattern[str], ...]:
    tables = (*family.tables, *(other for table in family.tables for other in unpacked(table)))
    patterns = (_pattern(names) for names in tables)
    return tuple({one.pattern: one for one in patterns if one is not None}.values())


@cache
def _pattern(names: Names) -> re.Pattern[str] | None:
    """Return what the names of an expert's own tensors match, with a group for each projection and for the suffix."""
    paths: dict[str, Projection] = {}
    for which in PROJECTIONS:
        path = names.projection(which).removeprefix(names.layer)
        if path:
            paths.setdefault(path, which)  # gate and up in one module are found as gate
    if not paths:
        return None
    choices: list[str] = []
    for path, which in paths.items():
        head, _, tail = map(re.escape, path.partition("{expert}"))
        # no leading zeros: experts.01 is not what the loader would look for
        choices.append(rf"{head}(?P<{which}>0|[1-9][0-9]{{0,8}}){tail}")
    return re.compile(rf"(?:{'|'.join(choices)})(?P<suffix>\..+)")


def _expert(match: re.Match[str]) -> tuple[int, Projection]:
    """Return expert and projection of a match of ``_pattern``."""
    groups = match.groupdict()
    which: Projection = next(one for one in PROJECTIONS if groups.get(one) is not None)
    return int(groups[which]), which


def router_names(names: Names) -> tuple[str | None, ...]:
    """Return the names of everything that chooses experts and weighs them."""
    own = (names.router_weight, names.router_bias, names.correction_bias, names.router_scale, names.expert_scale)
    return (*own, names.hash_table)


def single_matrices(names: Names) -> tuple[str, ...]:
    """Return the module paths of the router and of the shared expert's gate, which may be quantised as others are."""
    return tuple(name.removesuffix(".weight") for name in (names.router_weight, names.shared_gate) if name is not None)


def _parts(names: Names, present: Set[str]) -> dict[str, str]:
    """Return the parts of a quantised router and shared gate among the names below a layer, each with its module."""
    parts: dict[str, str] = {}
    if names.layer.startswith(_GGUF_LAYERS):
        return parts  # a matrix in GGUF blocks is one tensor
    for path in (path.removeprefix(names.layer) for path in single_matrices(names)):
        # GPTQ and AWQ write biases of zero
        known = PART_SUFFIXES if f"{path}.qweight" in present else PART_SUFFIXES - {".bias"}
        # Suffixes without a dot belong to stacks.
        named = [path + suffix for suffix in (*known, *ACTIVATION_SCALES) if suffix.startswith(".")]
        parts |= {name: path for name in named if name in present}
    return parts


def _others(names: Names) -> tuple[set[str], tuple[str, ...]]:
    """Return the names and the module paths of everything in an MoE block that is no expert."""
    exact = (*router_names(names), names.shared_gate, names.latent_norm, *(names.biases or ()))
    paths = (*(names.shared or ()), *(names.latent or ()), *(names.outside or ()))
    cut = len(names.layer)
    return {name[cut:] for name in exact if name is not None}, tuple(path[cut:] + "." for path in paths)


def _turned(found: Found, table: Names, spec: MoESpec) -> int:
    """Count the unquantised stacks that do not have the table's shape; ``H = 2I`` and ``H = I`` are never both true."""
    wrong = 0
    for which, parts in found.stack.items():
        needed = plain_shape(source_of(table, spec, layer=0, expert=0, projection=which, stacked=True))
        wrong += ".weight" in parts and parts[".weight"].dtype in FLOATS and parts[".weight"].shape != needed
    return wrong


def _suspicious(rest: str) -> bool:
    """Tell whether a tensor below a layer, outside its MoE block, could change what the block computes."""
    module = rest.partition(".")[0]
    return _SUSPECT.search(module) is not None and _HARMLESS.search(module) is None


def _sort(names: Names, layer: int, tensors: Iterable[tuple[str, TensorInfo]]) -> Found:
    found, pattern, (exact, paths) = Found(), _pattern(names), _others(names)
    prefix, table = names.experts.removeprefix(names.layer), names.stacked
    block = names.router_weight.removeprefix(names.layer).partition(".")[0] + "."
    stacks: dict[str, Projection] = {p.removeprefix(names.layer): which for which, p in stack_paths(table).items()}
    tensors = [*tensors]
    parts = _parts(names, {rest for rest, _ in tensors})
    for rest, info in tensors:
        if rest in exact or rest in parts or rest.startswith(paths):
            continue
        if not (rest.startswith((prefix, block)) or _suspicious(rest)):
            continue
        match = pattern.fullmatch(rest) if pattern is not None else None
        if match is not None:
            found.single.setdefault(_expert(match), {})[match["suffix"]] = info
            continue
        path = next((p for p in stacks if rest.startswith(p) and _STACK_SUFFIX.fullmatch(rest, len(p))), None)
        if path is None:
            found.unknown.append(names.layer.format(layer=layer) + rest)
        else:
            # whatever an unquantised stack is stored under, the formats call that part ".weight"
            suffix = rest.removeprefix(path)
            suffix = ".weight" if suffix == table.plain else suffix
            found.stack.setdefault(stacks[path], {})[suffix] = info
    return found
