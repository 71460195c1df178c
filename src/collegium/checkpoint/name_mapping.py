"""Names of a checkpoint's tensors and what they are called when they are loaded one at a time."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, UnknownTensorError
from ..models import Family, Names, either_way, family_of, is_wrapped, unpacked
from ..types import MoESpec
from .layout import bias_names, projections
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = ["MappedTensor", "NameMapping", "expert_mapping"]

_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_LAYER = re.compile(r"((?:[A-Za-z_]\w*\.)+)(0|[1-9]\d{0,8})\.(.+)")
_EXPERT = "{expert}"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class MappedTensor(NamedTuple):
    """One row of a mapping; a plain tuple of the first two to four fields will do.

    parameter: what ``load`` calls it. source: the tensor's name; ``{expert}`` stands for an expert's global id. expert:
    the id where the name has none; None with ``{expert}``, and for stacks of all experts. shard: ``w1``, ``w2``, ``w3``
    or ``w13``; None outside the experts. transposed: an unquantised matrix is stored input-first. interleaved: rows of
    gate and up alternate. flat: experts follow each other along the rows.
    """

    parameter: str
    source: str
    expert: int | None = None
    shard: Any = None
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False


class NameMapping:
    """Rows by the names of tensors.

    family, layer: of a default mapping, which accepts any prefix of the text model's layers, and refuses tensors of the
    layer's experts that it does not have.
    """

    def __init__(
        self, rows: Iterable[Sequence[Any]], spec: MoESpec, family: Family | None = None, layer: int | None = None
    ) -> None:
        self._spec = spec
        self._family = family
        self._layer = layer
        self._transposed: bool | None = None
        self._rows: dict[str, list[MappedTensor]] = {}
        for row in rows:
            entry = row if isinstance(row, MappedTensor) else _checked_row(row)
            known = self._rows.setdefault(entry.source, [])
            if entry not in known:
                known.append(entry)

    def find(self, name: str, tensor: Tensor) -> tuple[MappedTensor, Tensor] | None:
        """Return the row of a tensor, with its expert, and the tensor as ``load`` takes it; None for another name.

        Raises UnknownTensorError for a tensor of the layer's experts without a row, and InputError where several rows
        fit.
        """
        published = self._published(name)
        if published is None:
            return None
        expert, rows = self._look_up(published)
        if not rows:
            self._refuse_expert_name(published)
            return None
        rows = self._fitting(rows, tensor)
        if len(rows) != 1:
            raise InputError(
                f"load_all: {name} {list(tensor.shape)} fits {len(rows)} rows of the mapping, which differ in layout; "
                "pass mapping= with one row for it"
            )
        row = rows[0] if expert is None else rows[0]._replace(expert=expert)
        return row, _as_loaded(row, tensor, self._spec)

    def is_undecided(self, name: str, tensor: Tensor) -> bool:
        """Return whether the orientation of a tensor follows only from that of others, which ``find`` has not seen."""
        published = self._published(name)
        return published is not None and len(self._fitting(self._look_up(published)[1], tensor)) > 1

    def _fitting(self, rows: list[MappedTensor], tensor: Tensor) -> list[MappedTensor]:
        """Return the rows that fit a tensor; one that only one orientation fits decides for square ones."""
        if len(rows) < 2:
            return rows
        if tensor.dtype not in _FLOATS:
            return list(dict.fromkeys(row._replace(transposed=False) for row in rows))
        fitting = [row for row in rows if _fits(row, tensor, self._spec)]
        if len(fitting) == 1:
            self._transposed = fitting[0].transposed
        elif self._transposed is not None:
            fitting = [row for row in fitting if row.transposed == self._transposed]
        return fitting

    def _published(self, name: str) -> str | None:
        """Return the name below the family's published prefix; None for another layer or another model."""
        if self._family is None:
            return name
        match = _LAYER.fullmatch(name)
        published = self._family.names.layer.partition("{layer}")[0]
        if match is None or int(match[2]) != self._layer or not is_wrapped(match[1], published):
            return None
        return f"{published}{match[2]}.{match[3]}"

    def _look_up(self, name: str) -> tuple[int | None, list[MappedTensor]]:
        """Return the expert in a name and the rows of its pattern, or None and the rows of the exact name."""
        if name in self._rows:
            return None, self._rows[name]
        for match in _NUMBER.finditer(name):
            pattern = name[: match.start()] + _EXPERT + name[match.end() :]
            if pattern in self._rows:
                return int(match[0]), self._rows[pattern]
        return None, []

    def _refuse_expert_name(self, name: str) -> None:
        if self._family is None:
            return
        prefixes = {table.experts.format(layer=self._layer) for table in self._family.tables}
        if name.startswith(tuple(prefixes)):
            raise UnknownTensorError(
                f"load_all: {name} is below the experts of {self._family.name} and is none of their tensors; pass "
                "mapping= with a row for it, or leave it out"
            )


def expert_mapping(
    config: Mapping[str, object],
    layer: int,
    spec: MoESpec,
    routed: Sequence[StoredFormat],
    shared: Sequence[StoredFormat],
) -> NameMapping:
    """Return the default mapping of one layer of a model whose family is known; raises ConfigError otherwise.

    routed, shared: the stored formats whose tensors are mapped.
    """
    family = family_of(config)
    rows: list[MappedTensor] = []
    tables = [*family.tables, *(other for table in family.tables for other in unpacked(table) if not either_way(other))]
    for table in tables:
        # All tables get the published prefix of the family; ``find`` replaces other prefixes by it.
        names = table.moved(family.names.layer)
        rows += _single_rows(names, layer, spec, routed)
        rows += _stacked_rows(names, layer, spec, routed)
        rows += _dense_rows(names, layer)
        rows += _shared_rows(names, layer, spec, shared)
    return NameMapping(rows, spec, family, layer)


def _checked_row(row: Sequence[Any]) -> MappedTensor:
    if isinstance(row, str) or not 2 <= len(row) <= len(MappedTensor._fields):
        raise InputError(
            f"mapping: found the row {row!r}; allowed are tuples (parameter, source name, expert, shard), such as "
            "('weight', 'experts.{expert}.gate_proj.weight', None, 'w1')"
        )
    return MappedTensor(*row)


def _suffixes(stored: Sequence[StoredFormat]) -> dict[str, str]:
    """Return the suffixes of all parts and static scales, and the parameters that they are."""
    suffixes = [part.suffix for form in stored for part in form.layout.parts]
    return {suffix: suffix.lstrip("._") for suffix in (*suffixes, *ACTIVATION_SCALES)}


def _single_rows(names: Names, layer: int, spec: MoESpec, stored: Sequence[StoredFormat]) -> Iterator[MappedTensor]:
    """Yield the rows of experts with separate tensors."""
    for which in projections(spec):
        path = names.projection(which).replace("{layer}", str(layer))
        if not path or (names.fused and which == "up"):
            continue
        shard = _shard_of(which, spec, fused=names.fused)
        interleaved = names.fused and names.stacked.interleaved and shard == "w13"
        for suffix, parameter in {**_suffixes(stored), ".bias": "bias"}.items():
            if suffix.startswith("."):
                yield MappedTensor(parameter, path + suffix, None, shard, interleaved=interleaved)


def _stacked_rows(names: Names, layer: int, spec: MoESpec, stored: Sequence[StoredFormat]) -> Iterator[MappedTensor]:
    """Yield the rows of stacks of all experts, and of their biases."""
    table = names.stacked
    fused = table.up is None and spec.activation.gated
    paths = {_shard_of("gate" if spec.activation.gated else "up", spec, fused=fused): table.gate_up, "w2": table.down}
    if table.up is not None:
        paths["w3"] = table.up
    for shard, template in paths.items():
        path = template.format(layer=layer)
        interleaved = table.interleaved and shard == "w13"
        for suffix, parameter in _suffixes(stored).items():
            name = path + (table.plain if suffix == ".weight" else suffix)
            flipped = suffix == ".weight" and (table.transposed or (table.flat and shard == "w2"))
            yield MappedTensor(parameter, name, None, shard, flipped, interleaved, table.flat)
            if suffix == ".weight" and not table.plain:
                yield MappedTensor(parameter, path + suffix, None, shard, flipped, interleaved, table.flat)
    shards = ("w13", "w2") if spec.activation.gated else ("w1", "w2")
    templates = bias_names(names, layer, stacked=True)
    if len(templates) == 3:
        shards = ("w1", "w3", "w2")
    for shard, template in zip(shards, templates, strict=False):
        yield MappedTensor("bias", template, None, shard, interleaved=table.interleaved and shard == "w13")


def _dense_rows(names: Names, layer: int) -> Iterator[MappedTensor]:
    """Yield the rows of the router, the shared expert's gate and the latent projections."""
    latent = names.latent or ()
    sources = {
        "router.weight": names.router_weight,
        "router.bias": names.router_bias,
        "router.scale": names.router_scale,
        "router.correction_bias": names.correction_bias,
        "router.expert_scale": names.expert_scale,
        "router.hash_table": names.hash_table,
        "shared.gate": names.shared_gate,
        "latent.norm": names.latent_norm,
        **{f"latent.{which}": f"{path}.weight" for which, path in zip(("down", "up"), latent, strict=False)},
    }
    for parameter, source in sources.items():
        if source is not None:
            yield MappedTensor(parameter, source.replace("{layer}", str(layer)))


def _shared_rows(names: Names, layer: int, spec: MoESpec, stored: Sequence[StoredFormat]) -> Iterator[MappedTensor]:
    """Yield the rows of the shared expert's matrices."""
    paths = [path.format(layer=layer) for path in names.shared or ()]
    if spec.shared is None or not paths:
        return
    fused = spec.activation.gated and len(paths) == 2
    shards = ("w1", "w3", "w2") if len(paths) == 3 else ("w13" if fused else "w1", "w2")
    for path, shard in zip(paths, shards, strict=True):
        for suffix, parameter in _suffixes(stored).items():
            yield MappedTensor(f"shared.{parameter}", path + suffix, None, shard)


def _shard_of(which: str, spec: MoESpec, *, fused: bool) -> str:
    """Return what engines call a projection; the only upper projection of experts without a gate is ``w1``."""
    if which == "down":
        return "w2"
    if fused and spec.activation.gated:
        return "w13"
    return "w3" if which == "up" and spec.activation.gated else "w1"


def _matrix_shape(shard: str, spec: MoESpec) -> tuple[int, int]:
    rows, columns = spec.intermediate_size, spec.expert_hidden_size
    return {"w13": (2 * rows, columns), "w2": (columns, rows)}.get(shard, (rows, columns))


def _fits(row: MappedTensor, tensor: Tensor, spec: MoESpec) -> bool:
    """Return whether an unquantised matrix has the shape of ``row``; True for other tensors."""
    if not row.parameter.endswith("weight") or tensor.dtype not in _FLOATS or row.shard is None:
        return True
    rows, columns = _matrix_shape(row.shard, spec)
    if row.flat:
        return True
    return tuple(tensor.shape[-2:]) == ((columns, rows) if row.transposed else (rows, columns))


def _as_loaded(row: MappedTensor, tensor: Tensor, spec: MoESpec) -> Tensor:
    """Return a tensor with its experts along the first axis and its matrices output-first."""
    if row.shard is None or row.parameter == "bias":
        return tensor
    if row.flat and tensor.dim() > 1 and tensor.shape[0] % spec.num_experts == 0:
        tensor = tensor.unflatten(0, (spec.num_experts, -1))
    return tensor.mT if row.transposed and tensor.dtype in _FLOATS and tensor.dim() > 1 else tensor
