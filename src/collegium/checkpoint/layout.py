"""Locate the parts of one projection of one expert, and read a slice of it.

A ``Source`` hides the difference between per-expert and stacked checkpoints: it describes which tensors hold the
projection, which entry of the stack it is, and how its rows map to the stored rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import BadScaleError, CheckpointError, InputError, MissingTensorError, TensorMismatchError
from ..formats import FORMATS
from ..formats.payload import Part, Payload
from ..models import Names, StackedNames
from ..placement import Placement
from ..types import MoESpec, format_names
from .header import FLOATS, TensorInfo
from .reader import Checkpoint
from .stored_format import StoredFormat

__all__ = [
    "PROJECTIONS",
    "Cut",
    "Projection",
    "Source",
    "bias_names",
    "check_part",
    "has_grid_per_half",
    "local_range",
    "padding_of",
    "part_name",
    "parts_problems",
    "plain_shape",
    "projections",
    "read_matrix",
    "read_whole",
    "source_of",
    "stack_paths",
    "stored_shape_of",
    "stored_slices",
]

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
_MAX_LIST = 1 << 16
_MAX_RANKS = 64
_PADDABLE = ("bf16", "fp16", "fp32", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "mxfp8", "nvfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One projection ``[rows, columns]`` of one expert, as stored.

    path: module path; format suffixes follow it. experts: length of the stack, None where each expert has separate
    tensors. index: entry of the stack. stored_rows: rows of the stored matrix. offset, step: row i of the projection is
    stored row ``offset + step * i``. transposed: an unquantised tensor is stored ``[columns, rows]``. flat: the entries
    of the stack follow each other along the first stored axis. plain: suffix of an unquantised stack. separate_bias:
    the module may have a bias, which is not read with the matrix; without it a bias is refused.
    """

    label: str
    path: str
    projection: Projection = "gate"
    rows: int
    columns: int
    experts: int | None = None
    index: int = 0
    stored_rows: int
    offset: int = 0
    step: int = 1
    transposed: bool = False
    flat: bool = False
    plain: str = ""
    separate_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The rows and columns of a projection to read, half-open."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def source_of(names: Names, spec: MoESpec, *, layer: int, expert: int, projection: Projection, stacked: bool) -> Source:
    """Return the location of ``projection`` of ``expert``."""
    rows, columns = spec.intermediate_size, spec.expert_hidden_size
    if projection == "down":
        rows, columns = columns, rows
    label = f"layer {layer}, expert {expert}, {projection}"
    table = names.stacked
    stored_rows = rows
    offset = 0
    step = 1
    fused = table.up is None if stacked else names.fused
    if projection != "down" and spec.gate_up_parts == 2 and fused:
        stored_rows = 2 * rows
        half = int(projection == "up")
        offset, step = (half, 2) if table.interleaved else (half * rows, 1)
    if not stacked:
        return Source(
            label=label,
            path=names.projection(projection).format(layer=layer, expert=expert),
            projection=projection,
            rows=rows,
            columns=columns,
            stored_rows=stored_rows,
            offset=offset,
            step=step,
            separate_bias=spec.expert_bias,
        )
    paths = stack_paths(table)
    return Source(
        label=label,
        path=paths.get(projection, paths["gate"]).format(layer=layer),
        projection=projection,
        rows=rows,
        columns=columns,
        experts=spec.num_experts,
        index=expert,
        stored_rows=stored_rows,
        offset=offset,
        step=step,
        transposed=table.transposed or (table.flat and projection == "down"),
        flat=table.flat,
        plain=table.plain,
    )


def projections(spec: MoESpec) -> tuple[Projection, ...]:
    """Return the projections of an expert; experts without a gate have up and down."""
    return PROJECTIONS if spec.activation.gated else ("up", "down")


def stack_paths(table: StackedNames) -> dict[Projection, str]:
    """Return the paths of the stacks; ``gate`` stands for gate_up, or for up in experts without a gate."""
    paths: dict[Projection, str] = {"gate": table.gate_up, "down": table.down}
    return paths if table.up is None else {**paths, "up": table.up}


def plain_shape(source: Source) -> tuple[int, ...]:
    """Return the shape of the unquantised tensor that holds the projection."""
    return stored_shape_of(source, Part(suffix=".weight", dtypes=()))


def bias_names(names: Names, layer: int, *, stacked: bool) -> tuple[str, ...]:
    """Return the names of the expert biases: gate, up and down, or gate_up and down.

    A name with ``{expert}`` is a template for one tensor per expert; other names are tensors ``[E, N]``.
    """
    single = tuple(dict.fromkeys(names.projection(which) for which in PROJECTIONS if names.projection(which)))
    templates = names.biases or tuple(f"{path}_bias" for path in (names.stacked.gate_up, names.stacked.down))
    if names.biases is None and not stacked:
        templates = tuple(f"{path}.bias" for path in single)
    return tuple(template.replace("{layer}", str(layer)) for template in templates)


def part_name(source: Source, part: Part) -> str:
    """Return the tensor name of a part; most unquantised stacks have no suffix."""
    suffix = source.plain if source.experts is not None and part.suffix == ".weight" else part.suffix
    return source.path + suffix


def stored_shape_of(source: Source, part: Part, *, halves: bool = False) -> tuple[int, ...]:
    """Return the shape of a part in the files; halves: as ``has_grid_per_half`` returns."""
    shape = part.stored_shape(source.stored_rows, source.columns)
    if halves:
        shape = (2 * _half_rows(source, part), *shape[1:])
    if _is_input_first(source, part) and not part.transposed:
        shape = shape[::-1]
    if source.flat and source.experts is not None:
        return (source.experts * shape[0], *shape[1:])
    return shape if source.experts is None else (source.experts, *shape)


def _is_input_first(source: Source, part: Part) -> bool:
    """Return whether a part is stored input-first; in a family's transposed stacks only unquantised tensors are."""
    plain = source.flat or {*part.dtypes} <= {*FLOATS}
    return part.transposed or (source.transposed and source.experts is not None and part.suffix == ".weight" and plain)


def _may_share_scales(source: Source, part: Part) -> bool:
    """Return whether a scale of several rows could cover rows of both gate and up in a fused tensor."""
    return part.rows_per > 1 and source.stored_rows == 2 * source.rows


def _half_rows(source: Source, part: Part) -> int:
    return -(-source.rows // part.rows_per)


def has_grid_per_half(source: Source, part: Part, shape: tuple[int, ...]) -> bool:
    """Return whether gate and up in a fused tensor have a grid of scales each where a common one would be smaller."""
    if not _may_share_scales(source, part) or source.step > 1 or source.flat or part.transposed or part.flat:
        return False
    rows = 2 * _half_rows(source, part)
    axis = 0 if source.experts is None else 1
    common = -(-source.stored_rows // part.rows_per)
    return len(shape) > axis and shape[axis] == rows != common


def _squeeze(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def check_part(source: Source, part: Part, info: TensorInfo, cls: type[Payload]) -> None:
    """Compare a part's header entry with the config; raises TensorMismatchError."""
    name = part_name(source, part)
    if info.dtype not in part.dtypes:
        raise TensorMismatchError(
            f"{source.label}: {name} is {info.dtype}, {cls.name} allows {' or '.join(part.dtypes)}"
        )
    part = part.fitted(info.dtype, info.shape, source.stored_rows)
    halves = has_grid_per_half(source, part, info.shape)
    needed = stored_shape_of(source, part, halves=halves)
    if part.any_length:
        if info.nbytes > _MAX_LIST:
            raise TensorMismatchError(
                f"{source.label}: {name} has {info.nbytes} bytes, at most {_MAX_LIST} are allowed"
            )
        return
    if _squeeze(info.shape) != _squeeze(needed) and not _is_shared_number(source, part, info.shape):
        kind = "weight"
        if "scale" in part.suffix:
            kind = "scale"
        elif part.suffix.endswith("g_idx"):
            kind = "index"
        raise TensorMismatchError(
            f"{source.label}: {kind} is {info.shape}, {cls.name} with N={source.stored_rows} and K={source.columns} "
            f"needs {needed}{_group_hint(source, part, info.shape, cls)} ({name})"
        )
    shared_grid = source.experts is not None and _may_share_scales(source, part) and not halves
    if part.required and shared_grid and (source.step > 1 or source.rows % part.rows_per):
        meet = "alternate" if source.step > 1 else f"meet at row {source.rows}"
        raise TensorMismatchError(
            f"{source.label}: gate and up in one tensor {meet}, which is inside a scale block of {part.rows_per} rows "
            f"({name})"
        )


def parts_problems(checkpoint: Checkpoint, source: Source, stored: StoredFormat) -> Iterator[CheckpointError]:
    """Yield the problems of one projection that the headers show: missing parts, wrong shapes and dtypes."""
    needed = [part for part in stored.layout.parts if part.required]
    missing = [part_name(source, part) for part in needed if part_name(source, part) not in checkpoint]
    if missing:
        needs = f"{stored.name} in {stored.storage} storage needs it"
        yield MissingTensorError(f"{source.label}: {' and '.join(missing)} missing; {needs}")
    for part in stored.layout.parts:
        if (part.required or part.if_present) and part_name(source, part) in checkpoint:
            try:
                check_part(source, part, checkpoint.info(part_name(source, part)), stored.format)
            except TensorMismatchError as error:
                yield error


def _is_shared_number(source: Source, part: Part, shape: tuple[int, ...]) -> bool:
    """Return whether a stack stores one number for all experts, or one each for gate and up of every expert."""
    if source.experts is None or part.rows_per or part.columns_per:
        return False
    return not _squeeze(shape) or _is_number_per_half(source, shape)


def _is_number_per_half(source: Source, shape: tuple[int, ...]) -> bool:
    """Return whether a shape is ``[E, 2]``, ignoring trailing dimensions of 1, for gate and up in one stack."""
    return shape[:2] == (source.experts, 2) and math.prod(shape[2:]) == 1 and source.stored_rows == 2 * source.rows


def _group_hint(source: Source, part: Part, shape: tuple[int, ...], cls: type[Payload]) -> str:
    """Return a hint that names the formats whose group size matches the shape of a scale, or an empty text."""
    if "scale" not in part.suffix or part.transposed or not part.columns_per or not shape or not shape[-1]:
        return ""
    group, remainder = divmod(source.columns, shape[-1])
    if remainder or group == part.columns_per:
        return ""
    others = [f.name for f in FORMATS if f.group == group and f.name != cls.name]
    guess = f", is this {' or '.join(others)}?" if others else ""
    return f"; {shape[-1]} would be group {group}{guess}"


def _read_part(checkpoint: Checkpoint, source: Source, part: Part, cut: Cut, cache: dict[str, Tensor]) -> Tensor:
    """Read a part of ``cut``, axes as stored but without the stack dimension; cache: as for ``read_matrix``."""
    name = part_name(source, part)
    actual = checkpoint.info(name).shape
    repeats = part.repeats
    part = part.fitted(checkpoint.info(name).dtype, actual, source.stored_rows)
    if part.flat:
        return checkpoint.read(name)
    if not part.rows_per and not part.columns_per:
        return _read_number(checkpoint, source, part, actual)
    halves = has_grid_per_half(source, part, actual)
    slices, stacked = stored_slices(source, part, cut, halves=halves)
    key = f"{name}{slices}"
    tensor = cache.get(key)
    if tensor is None:
        expected = stored_shape_of(source, part, halves=halves)
        tensor = checkpoint.read_slice(name, _align_slices(slices, expected, actual))
        if source.step > 1:
            cache[key] = tensor
    tensor = tensor.reshape([s.stop - s.start for s in slices])
    if stacked:
        tensor = tensor[0]
    if _is_input_first(source, part):
        tensor = tensor.mT
    if repeats and part.rows_per > 1:
        tensor = tensor.view(torch.uint8).repeat_interleave(part.rows_per, dim=0)
    if source.step > 1 and part.rows_per:
        tensor = tensor[source.offset :: source.step]
    return tensor.mT if part.transposed else tensor


def stored_slices(source: Source, part: Part, cut: Cut, *, halves: bool = False) -> tuple[list[slice], bool]:
    """Return the stored slices of a cut, and whether the first of them selects an entry of a stack."""
    if source.step > 1:
        first, last = (source.step * row for row in cut.rows)
    else:
        first, last = (source.offset + row for row in cut.rows)
    slices: list[slice] = []
    if halves:
        half = _boundaries(source, *cut.rows, part.rows_per, source.rows)
        start = _half_rows(source, part) if source.offset else 0
        slices.append(slice(start + half.start, start + half.stop))
    elif part.rows_per:
        slices.append(_boundaries(source, first, last, part.rows_per, source.stored_rows))
    if part.columns_per:
        slices.append(_boundaries(source, *cut.columns, part.columns_per, source.columns))
    slices.extend(slice(0, n) for n in part.inner)
    if _is_input_first(source, part):
        slices.reverse()
    stacked = source.experts is not None and not source.flat
    if stacked:
        slices.insert(0, slice(source.index, source.index + 1))
    elif source.flat and source.experts is not None:
        base = source.index * (stored_shape_of(source, part)[0] // source.experts)
        slices[0] = slice(base + slices[0].start, base + slices[0].stop)
    return slices, stacked


def _read_number(checkpoint: Checkpoint, source: Source, part: Part, actual: tuple[int, ...]) -> Tensor:
    """Read a number that does not depend on rows and columns: per matrix, per gate and up, or for all experts."""
    stacked = source.experts is not None and len(_squeeze(actual)) > len(_squeeze(part.inner))
    index = slice(source.index, source.index + 1)
    tensor = checkpoint.read_slice(part_name(source, part), (index,) if stacked else ())
    if stacked and not part.inner and _is_number_per_half(source, actual):
        return tensor.reshape(2)[int(source.offset > 0)]
    return tensor.reshape(part.inner)


def local_range(
    spec: MoESpec, both: tuple[StoredFormat, StoredFormat], placement: Placement, *, pad: bool
) -> tuple[tuple[int, int], int]:
    """Return this rank's half-open range of I, and the width to pad it to.

    both: the stored formats of gate and up, and of down. Raises InputError, which lists the valid tensor-parallel
    sizes.
    """
    intermediate = spec.intermediate_size
    parts = [part for stored in both for part in stored.layout.parts if part.required]
    step = math.lcm(*(size for part in parts for size in (part.rows_per, part.columns_per) if size))
    paddable = all(stored.name in _PADDABLE for stored in both)
    if placement.tp_size == 1:
        return (0, intermediate), intermediate
    width, remainder = divmod(intermediate, placement.tp_size)
    if (remainder or width % step) and pad and paddable:
        width = math.ceil(math.ceil(intermediate / step) / placement.tp_size) * step
        start = placement.tp_rank * width
        if start >= intermediate:
            return (0, 0), width
        return (start, min(intermediate, start + width)), width
    if remainder or width % step:
        works = [
            n for n in range(1, _MAX_RANKS + 1) if intermediate % n == 0 and (n == 1 or (intermediate // n) % step == 0)
        ]
        raise InputError(
            f"tp_size={placement.tp_size} cuts intermediate_size={intermediate} into "
            f"{intermediate / placement.tp_size:g}, which is no multiple of {step} ({format_names(spec.formats)} "
            f"groups); tensor-parallel sizes that work: {works}; expert parallelism has no such limit, and pad=True "
            "pads with zeros"
        )
    return (placement.tp_rank * width, (placement.tp_rank + 1) * width), width


def _boundaries(source: Source, start: int, stop: int, per: int, size: int) -> slice:
    if start % per or (stop % per and stop != size):
        raise InputError(f"{source.label}: cut {start}:{stop} of {size} does not fall on multiples of {per}")
    return slice(start // per, -(-stop // per))


def _align_slices(slices: list[slice], expected: tuple[int, ...], actual: tuple[int, ...]) -> list[slice]:
    """Map slices of the expected shape to a stored shape that differs in dimensions of size 1 only."""
    if expected == actual:
        return slices
    real = iter([w for w, n in zip(slices, expected, strict=True) if n != 1])
    return [slice(0, 1) if n == 1 else next(real) for n in actual]


def _check_declared_shape(checkpoint: Checkpoint, source: Source) -> list[CheckpointError]:
    """Compare the ``.weight_shape`` of packed integers, if present, with the config."""
    name = f"{source.path}.weight_shape"
    implied = [source.rows if source.experts is not None else source.stored_rows, source.columns]
    claimed = checkpoint.read(name).tolist() if name in checkpoint else implied
    if claimed == implied:
        return []
    return [TensorMismatchError(f"{source.label}: {name} is {claimed}, the config implies {implied}")]


def read_matrix(
    checkpoint: Checkpoint,
    source: Source,
    stored: StoredFormat,
    cut: Cut | None = None,
    cache: dict[str, Tensor] | None = None,
    padded_shape: tuple[int, int] | None = None,
) -> tuple[Payload | None, list[CheckpointError]]:
    """Read ``cut`` (default: all) of one projection; return its payload, None if unreadable, and its problems.

    Reads the required parts, and ``if_present`` parts where they exist. cache: tensors of this expert that were read
    before, so that interleaved rows are read once for gate and up. padded_shape: rows and columns to pad the cut to
    with zeros.
    """
    problems = _check_declared_shape(checkpoint, source)
    if problems:
        return None, problems
    everything = Cut(rows=(0, source.rows), columns=(0, source.columns))
    cut = everything if cut is None else cut
    if _must_decode_before_cut(source, stored):
        return _read_fused(checkpoint, source, stored, cut)
    span = everything if stored.whole else cut
    present = [p for p in stored.layout.parts if p.required or (p.if_present and part_name(source, p) in checkpoint)]
    present = [p for p in present if not (source.separate_bias and p.suffix == ".bias")]
    cache = {} if cache is None else cache
    parts = {p.suffix: _read_part(checkpoint, source, p, span, cache) for p in present}
    shape = (span.rows[1] - span.rows[0], span.columns[1] - span.columns[0])
    if padded_shape is not None and padded_shape != shape and not stored.whole:
        parts = {
            p.suffix: _pad_part(parts[p.suffix], p, padded_shape) for p in stored.layout.parts if p.suffix in parts
        }
        shape = padded_shape
    try:
        payload = stored.build(parts, shape)
    except CheckpointError as error:
        return None, [type(error)(f"{source.label}: {error}")]
    if span != cut:
        payload = payload.rows(*cut.rows).columns(*cut.columns)
    return payload, [_scale_error(source, stored)] if bool(payload.faults()) else []


def _must_decode_before_cut(source: Source, stored: StoredFormat) -> bool:
    """Return whether gate and up are one matrix whose parts must be read whole and laid out by rows before a cut."""
    parts = [part for part in stored.layout.parts if part.required]
    flat = any(part.flat for part in parts)
    return source.stored_rows != source.rows and (
        flat or (source.step > 1 and any(part.rows_per > 1 for part in parts))
    )


def _read_fused(
    checkpoint: Checkpoint, source: Source, stored: StoredFormat, cut: Cut
) -> tuple[Payload | None, list[CheckpointError]]:
    """Return the result of ``read_matrix`` for gate or up, by reading the whole matrix of both."""
    both = replace(source, rows=source.stored_rows, offset=0, step=1)
    payload, problems = read_matrix(checkpoint, both, stored)
    if payload is None:
        return None, problems
    try:
        payload = payload.every(source.step, source.offset, source.rows)
    except InputError as error:
        return None, [TensorMismatchError(f"{source.label}: {error}")]
    if cut != Cut(rows=(0, source.rows), columns=(0, source.columns)):
        payload = payload.rows(*cut.rows).columns(*cut.columns)
    return payload, problems


def read_whole(checkpoint: Checkpoint, source: Source, stored: StoredFormat, cut: Cut | None = None) -> Payload:
    """Return the payload of ``read_matrix``; raises its first problem."""
    payload, problems = read_matrix(checkpoint, source, stored, cut)
    if payload is None or problems:
        raise problems[0]
    return payload


def _pad_part(tensor: Tensor, part: Part, shape: tuple[int, int]) -> Tensor:
    """Pad a part to the shape it has for a matrix of ``shape``."""
    padded = padding_of(part, tensor.dtype).expand(part.stored_shape(*shape)).clone()
    padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return padded


def padding_of(part: Part, dtype: torch.dtype) -> Tensor:
    """Return the number that pads a part: 0 for weights, 1 for scales."""
    scale = "scale" in part.suffix
    if dtype == torch.uint8:
        return torch.tensor(127 if scale else 0, dtype=torch.uint8)  # E8M0 127 is 1
    return torch.tensor(float(scale)).to(dtype)


def _scale_error(source: Source, stored: StoredFormat) -> BadScaleError:
    """Return the error for a projection whose payload has a fault."""
    names = [part_name(source, part) for part in stored.layout.parts if "scale" in part.suffix and part.required]
    if not names:
        return BadScaleError(f"{source.label}: {part_name(source, stored.layout.parts[0])} holds NaN or infinity")
    allowed = "E8M0 bytes 0 to 254" if stored.format.e8m0_scales else "finite and positive numbers"
    return BadScaleError(
        f"{source.label}: a scale of {stored.name} is forbidden or a code is NaN, allowed are {allowed}, zero only "
        f"where every code is zero ({', '.join(names)}); download the file again or export it again"
    )
