"""The stored tensors of a stack of matrices, collected one at a time as a serving engine's weight loader passes them.

Every part of the stored format has one buffer ``[slots, P, ...]`` on the layer's device, so a tensor is copied once and
the payload of all experts is built from the buffers without another copy where the format allows it.

Shape letters: P parts (2: gate and up; 1), N output rows, K input columns.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadScaleError, DuplicateTensorError, InputError, TensorMismatchError
from ..formats.find_storage import SAFETENSORS_DTYPES
from ..formats.gguf import BLOCK_BYTES
from ..formats.payload import Part, Payload
from .header import FLOATS, TensorInfo
from .layout import Cut, Source, check_part, has_grid_per_half, padding_of, stored_shape_of, stored_slices
from .stored_format import StoredFormat
from .writer import entry_of

__all__ = ["MatrixParameters", "Piece", "StoredCopy", "Target", "check_plain", "parameter_name"]

_SHAPE_CLAIM = ".weight_shape"
_BIAS = Part(suffix=".bias", dtypes=FLOATS, columns_per=0)


def parameter_name(part: Part) -> str:
    """Return the name of a part without the dot or underscore that joins it to a module path."""
    return part.suffix.lstrip("._")


def check_plain(what: str, tensor: object) -> Tensor:
    """Return ``tensor`` detached; raises InputError for anything but a whole tensor with data."""
    plain = tensor.detach() if isinstance(tensor, Tensor) else tensor
    if type(plain) is not Tensor or plain.is_meta or plain.dtype not in SAFETENSORS_DTYPES.values():
        found = type(plain).__name__
        if isinstance(plain, Tensor):
            found += f" of {plain.dtype} on {plain.device}"
        raise InputError(
            f"{what}: found a {found}; allowed are whole, plain tensors (full_tensor() of a DTensor) of "
            f"{', '.join(map(str, SAFETENSORS_DTYPES.values()))}"
        )
    return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor, and the matrices of an expert that it holds.

    name: of the parameter. label: for errors. halves: indices of the parts that it holds, (0, 1) for gate and up in one
    tensor. interleaved: their rows alternate. experts: length of the stack of all experts; None: one expert's tensor.
    """

    name: str
    tensor: Tensor
    label: str
    halves: tuple[int, ...]
    interleaved: bool = False
    experts: int | None = None

    @property
    def fused(self) -> bool:
        """Whether the tensor holds gate and up."""
        return len(self.halves) > 1

    @property
    def layout(self) -> tuple[object, ...]:
        """Everything but the values and the expert: pieces with equal layouts are checked and cut alike."""
        tensor = self.tensor
        return self.name, tensor.dtype, tensor.shape, self.halves, self.interleaved, self.experts


class Target(NamedTuple):
    """Where a tensor goes: the entry of its stack (0 for one expert's tensor), and a slot."""

    entry: int
    slot: int


class StoredCopy(NamedTuple):
    """Row ``number`` of ``rows [N, ...]``, a buffer, which holds exactly the bytes of a tensor."""

    rows: Tensor
    number: int


class _Slicing(NamedTuple):
    """Where a half lies in a tensor: its shape as stored, the slices of the kept part, and every which row."""

    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    rows: slice | None


class MatrixParameters:
    """Buffers for matrices ``[slots, P, N, K]`` in one stored format.

    candidates: stored formats that the tensors may have, the most likely first; arriving tensors exclude the others.
    labels: of each slot, for errors. shards: what engines call the parts; without the axis P for ``("w2",)``. shape: N
    and K of a whole matrix. cut: what of it is kept. padded: N and K of the buffers' matrices. bias: whether the
    matrices have biases.
    """

    def __init__(
        self,
        candidates: Sequence[StoredFormat],
        *,
        labels: Sequence[str],
        shards: tuple[str, ...],
        shape: tuple[int, int],
        cut: Cut,
        padded: tuple[int, int],
        device: torch.device | str,
        bias: bool,
    ) -> None:
        self.candidates = list(candidates)
        self._labels = labels
        self._shards = shards
        self._parts = None if shards == ("w2",) else len(shards)
        self._shape = shape
        self._cut = cut
        self._padded = padded
        self._device = device
        self._has_bias = bias
        self._buffers: dict[str, Tensor] = {}
        self._lists: dict[str, dict[tuple[int, int], Tensor]] = {}  # parts of any length, by slot and half
        self._present: dict[str, set[tuple[int, int]]] = {}
        self._geometry: dict[str, Part] = {}
        # By layout, so that tensors like earlier ones are neither checked nor sliced again.
        self._checked: dict[tuple[object, ...], Part] = {}
        self._slicings: dict[tuple[object, ...], _Slicing] = {}

    @property
    def stored(self) -> StoredFormat:
        """The stored format that fits all tensors so far."""
        return self.candidates[0]

    @property
    def names(self) -> list[str]:
        """The parameters that may be loaded."""
        parts = [part for stored in self.candidates for part in self._parts_of(stored).values()]
        return list(dict.fromkeys(parameter_name(part) for part in parts))

    def check(self, piece: Piece) -> Part:
        """Return the part that ``piece`` is, adapted to its shape.

        Raises InputError for an unknown parameter, and TensorMismatchError for another shape or dtype.
        """
        key = piece.layout
        if key not in self._checked:
            self._checked[key] = self._check(piece)
        return self._checked[key]

    def _check(self, piece: Piece) -> Part:
        known = [stored for stored in self.candidates if piece.name in self._parts_of(stored)]
        if not known:
            formats = dict.fromkeys(f"{stored.name} ({stored.storage})" for stored in self.candidates)
            raise InputError(
                f"load: parameter {piece.name!r} of {piece.label} is not one of {', '.join(formats)}; allowed: "
                f"{', '.join(self.names)}. Pass stored=StoredFormat(name=..., storage=...) for another storage"
            )
        errors: list[TensorMismatchError] = []
        fitted: Part | None = None
        fitting: list[StoredFormat] = []
        for stored in known:
            try:
                part = self._fit(piece, stored)
            except TensorMismatchError as error:
                errors.append(error)
                continue
            fitted = fitted or part
            if replace(part, dtypes=()) == replace(fitted, dtypes=()):
                fitting.append(stored)
        if fitted is None:
            raise errors[0]
        self._narrow(piece, fitted, fitting)
        return fitted

    def store(self, piece: Piece, part: Part, targets: Sequence[Target]) -> StoredCopy | None:
        """Copy ``piece`` into the buffers of ``targets``; return where it lies unchanged, None if nowhere.

        Raises DuplicateTensorError where it arrived before.
        """
        if part.suffix == _SHAPE_CLAIM:
            self._check_claim(piece)
            return None
        if not (part.required or part.if_present or part.suffix == _BIAS.suffix):
            return None
        present = self._present.setdefault(part.suffix, set())
        locations = {(target.slot, half) for target in targets for half in piece.halves}
        repeated = sorted(locations & present)
        if repeated:
            raise DuplicateTensorError(
                f"load: {piece.name} of {self._matrix(*repeated[0])} was loaded before, now again with {piece.label}; "
                "every tensor may be loaded once"
            )
        copies = [self._copy(piece, part, half, targets) for half in piece.halves]
        present |= locations
        return copies[0] if len(copies) == 1 else None

    def missing(self, slots: Iterable[int]) -> list[str]:
        """Return everything that the matrices of ``slots`` still need, as text."""
        needed = [part for part in self._parts_of(self.stored).values() if part.required or part is _BIAS]
        locations = [(slot, half) for slot in slots for half in range(self._parts or 1)]
        return [
            f"{parameter_name(part)} of {self._matrix(*location)}"
            for location in locations
            for part in needed
            if location not in self._present.get(part.suffix, ())
        ]

    @property
    def touched(self) -> set[int]:
        """The slots for which anything has arrived."""
        return {slot for present in self._present.values() for slot, _ in present}

    def payload(self, slots: Sequence[int]) -> Payload:
        """Return the matrices of ``slots``, ``[len(slots), P, N, K]``, contiguous.

        Everything that ``missing`` lists must have arrived. Raises the CheckpointErrors of ``from_parts``, and
        BadScaleError for scales and codes that the format forbids.
        """
        # Without a slot, one slot of whatever memory holds gives the form of an empty payload.
        chosen = list(slots) or [0]
        stored = self.stored
        suffixes = [part.suffix for part in stored.layout.parts if self._is_complete(part, chosen)]
        if any(part.flat for part in stored.layout.parts):
            payload = self._payload_by_matrix(stored, suffixes, chosen)
        else:
            rows, columns = self._shape if stored.whole else self._padded
            parts = {suffix: self._take(self._buffers[suffix], chosen) for suffix in suffixes}
            payload = stored.build(parts, (len(chosen), *self._axis, rows, columns))
        if stored.whole and self._cut != self._everything:
            payload = payload.rows(*self._cut.rows).columns(*self._cut.columns)
        payload = replace(payload, **{name: tensor.contiguous() for name, tensor in payload.tensors().items()})
        if slots and bool((bad := payload.faults()).any()):
            index, *half = bad.nonzero()[0].tolist()
            raise BadScaleError(
                f"load: {self._matrix(chosen[index], *half)} has NaN, infinity or a scale that {payload.name} forbids, "
                f"and so have {int(bad.sum()) - 1} more of {bad.numel()} matrices; send the tensors or export the "
                "model again"
            )
        return payload if slots else payload[:0]

    def bias(self, slots: Sequence[int]) -> Tensor | None:
        """Return the biases of ``slots``, ``[len(slots), P, N]``, or None; raises BadScaleError where not finite."""
        if not self._has_bias:
            return None
        buffer = self._buffers.get(_BIAS.suffix)
        if buffer is None:
            return torch.zeros(0, *self._axis, self._padded[0], dtype=torch.bfloat16, device=self._device)
        bias = self._take(buffer, list(slots))
        finite = torch.isfinite(bias).flatten(1).all(-1)
        if not bool(finite.all()):
            indices: list[int] = (~finite).nonzero()[:8, 0].tolist()
            bad = [self._labels[slots[index]] for index in indices]
            raise BadScaleError(f"load: the bias of {', '.join(bad)} holds NaN or infinity; send it again")
        return bias

    def _matrix(self, slot: int, half: int = 0) -> str:
        return f"{self._labels[slot]}, {self._shards[half]}" if self._labels else self._shards[half]

    @property
    def _axis(self) -> tuple[int, ...]:
        return () if self._parts is None else (self._parts,)

    @property
    def _everything(self) -> Cut:
        return Cut(rows=(0, self._shape[0]), columns=(0, self._shape[1]))

    def _parts_of(self, stored: StoredFormat) -> dict[str, Part]:
        """Return the parts of a candidate by parameter; the experts' bias replaces a part that only claims zeros."""
        parts = {parameter_name(part): part for part in stored.layout.parts}
        return parts | {parameter_name(_BIAS): _BIAS} if self._has_bias else parts

    def _fit(self, piece: Piece, stored: StoredFormat) -> Part:
        """Return the part of ``stored`` adapted to ``piece``; raises TensorMismatchError."""
        part = self._parts_of(stored)[piece.name]
        dtype, shape = entry_of(piece.tensor)
        if dtype == "U8" and shape:
            # Blocks of GGUF are bytes in memory, their size shows the kind.
            dtype = next((kind for kind in part.dtypes if BLOCK_BYTES.get(kind) == shape[-1]), dtype)
        if part.flat and (piece.fused or piece.experts is not None):
            raise TensorMismatchError(
                f"load: {piece.name} of {piece.label}: {stored.name} stores each matrix in one flat list, so gate and "
                "up, and experts, cannot be cut out of one tensor; load w1, w3 and w2 of each expert"
            )
        source = self._source(piece, 0)
        if part.rows_per or part.columns_per or part.flat:
            info = TensorInfo(
                name=piece.name,
                dtype=dtype,
                shape=shape,
                file=Path("<memory>"),
                start=0,
                stop=piece.tensor.numel() * piece.tensor.element_size(),
            )
            check_part(source, part, info, stored.format)
            return part.fitted(dtype, shape, source.stored_rows)
        if part.suffix == _SHAPE_CLAIM or dtype in part.dtypes:
            counts = self._number_counts(piece, part)
            if piece.tensor.numel() in counts:
                return part
            allowed = f"{' or '.join(map(str, sorted(counts)))} numbers"
        else:
            allowed = " or ".join(part.dtypes)
        raise TensorMismatchError(f"{piece.label}: {piece.name} is {dtype} {shape}, {stored.name} allows {allowed}")

    def _narrow(self, piece: Piece, part: Part, fitting: list[StoredFormat]) -> None:
        """Continue with the candidates that ``piece`` fits; raises TensorMismatchError for an unlike earlier tensor."""
        known = self._geometry.get(part.suffix)
        alike = replace(part, dtypes=(), rows_per=0) if part.repeats else replace(part, dtypes=())
        if known is not None and known != alike:
            raise TensorMismatchError(
                f"{piece.label}: {piece.name} is {list(piece.tensor.shape)} {piece.tensor.dtype}, which is laid out "
                "unlike that of other experts; all experts of a layer need one storage"
            )
        self.candidates = fitting
        self._geometry[part.suffix] = alike

    def _number_counts(self, piece: Piece, part: Part) -> set[int]:
        """Return how many numbers a part without rows and columns may hold."""
        inner = math.prod(part.inner)
        counts = {inner, 2 * inner} if piece.fused and part.suffix != _SHAPE_CLAIM else {inner}
        return counts if piece.experts is None else {inner} | {count * piece.experts for count in counts}

    def _source(self, piece: Piece, half: int) -> Source:
        """Return where ``half`` lies in the tensor of ``piece``."""
        rows, columns = self._shape
        source = Source(
            label=piece.label,
            path=piece.label.rpartition(" ")[2],
            rows=rows,
            columns=columns,
            experts=piece.experts,
            stored_rows=rows,
            plain=".weight",
        )
        if not piece.fused:
            return source
        offset, step = (half, 2) if piece.interleaved else (half * rows, 1)
        return replace(source, stored_rows=2 * rows, offset=offset, step=step)

    def _check_claim(self, piece: Piece) -> None:
        """Compare the claimed shape of integer weights with the matrices; raises TensorMismatchError."""
        rows, columns = self._shape
        implied = [rows * len(piece.halves), columns]
        if any(claim != implied for claim in piece.tensor.reshape(-1, 2).tolist()):
            raise TensorMismatchError(
                f"{piece.label}: weight_shape is {piece.tensor.reshape(-1, 2)[0].tolist()}, the spec implies {implied}"
            )

    def _copy(self, piece: Piece, part: Part, half: int, targets: Sequence[Target]) -> StoredCopy | None:
        """Copy one half of ``piece`` to every target; return a row of the buffer that equals the whole tensor."""
        values = self._cut_part(piece, part, half)
        if part.any_length:
            lists = self._lists.setdefault(part.suffix, {})
            for entry, slot in targets:
                lists[slot, half] = values[entry].to(self._device, copy=True)
            return None
        whole = self._buffer(piece, part, values)
        buffer = whole if self._parts is None else whole[:, half]
        is_padded = values.shape[1:] != buffer.shape[1:]
        region = tuple(slice(0, size) for size in values.shape[1:]) if is_padded else ()
        entries, slots = ([target[axis] for target in targets] for axis in (0, 1))
        if len(targets) > 1 and _is_run(entries) and _is_run(slots):
            stack = values[entries[0] : entries[-1] + 1]
            buffer[slots[0] : slots[-1] + 1][(slice(None), *region)].copy_(stack)
            return None
        for entry, slot in targets:
            buffer[slot][region].copy_(values[entry])
        is_verbatim = values.numel() == piece.tensor.numel() and values.is_contiguous() and piece.tensor.is_contiguous()
        if is_padded or not is_verbatim or piece.experts is not None or not targets:
            return None
        if self._parts is None:
            return StoredCopy(whole, slots[0])
        return StoredCopy(whole.flatten(0, 1), slots[0] * self._parts + half)

    def _cut_part(self, piece: Piece, part: Part, half: int) -> Tensor:
        """Return the kept part of one half, ``[experts or 1, *stored shape]``, with rows repeated to one scale each."""
        tensor = piece.tensor
        stack = 1 if piece.experts is None else piece.experts
        if part.flat:
            return tensor.reshape(1, -1)
        if not part.rows_per and not part.columns_per:
            return self._cut_numbers(piece, part, half, stack)
        key = half, *piece.layout
        slicing = self._slicings.get(key)
        if slicing is None:
            slicing = self._slicings[key] = self._slicing(piece, part, half)
        values = tensor.reshape(stack, *slicing.shape)[(slice(None), *slicing.slices)]
        if part.repeats and part.rows_per > 1:
            values = values.view(torch.uint8).repeat_interleave(part.rows_per, dim=1)
        if slicing.rows is not None:
            values = values[..., slicing.rows] if part.transposed else values[:, slicing.rows]
        return values

    def _slicing(self, piece: Piece, part: Part, half: int) -> _Slicing:
        """Return where the kept part of ``half`` lies in tensors like that of ``piece``."""
        source = self._source(piece, half)
        halves = has_grid_per_half(source, part, tuple(piece.tensor.shape))
        source = replace(source, experts=None)
        cut_later = self._cut != self._everything and self.stored.whole
        slices, _ = stored_slices(source, part, self._everything if cut_later else self._cut, halves=halves)
        rows = slice(source.offset, None, source.step) if source.step > 1 and part.rows_per else None
        return _Slicing(tuple(stored_shape_of(source, part, halves=halves)), tuple(slices), rows)

    def _cut_numbers(self, piece: Piece, part: Part, half: int, stack: int) -> Tensor:
        """Return the numbers of each matrix, ``[stack, *inner]``."""
        tensor = piece.tensor
        inner = math.prod(part.inner)
        if tensor.numel() == 2 * inner * stack and piece.fused:
            return tensor.reshape(stack, 2, *part.inner)[:, half]
        if tensor.numel() == inner:
            return tensor.reshape(1, *part.inner).expand(stack, *part.inner)
        return tensor.reshape(stack, *part.inner)

    def _buffer(self, piece: Piece, part: Part, values: Tensor) -> Tensor:
        """Return the buffer of a part, allocated when its first tensor arrives; raises TensorMismatchError."""
        buffer = self._buffers.get(part.suffix)
        if buffer is None:
            whole = self.stored.whole
            fitted = replace(part, rows_per=1) if part.repeats else part
            shape = fitted.stored_shape(*(self._shape if whole else self._padded))
            shape = (max(1, len(self._labels)), *self._axis, *shape)
            buffer = torch.empty(shape, dtype=values.dtype, device=self._device)
            if self._padded != self._shape and not whole:
                buffer.copy_(padding_of(part, values.dtype).expand(shape))
            self._buffers[part.suffix] = buffer
        if buffer.dtype != values.dtype:
            raise TensorMismatchError(
                f"{piece.label}: {piece.name} is {values.dtype}, that of other experts is {buffer.dtype}; all experts "
                "of a layer need one dtype"
            )
        return buffer

    def _is_complete(self, part: Part, slots: Sequence[int]) -> bool:
        """Return whether a part takes part in the payload; raises TensorMismatchError where some matrices lack it."""
        if part.suffix == _BIAS.suffix and self._has_bias:
            return False
        present = self._present.get(part.suffix, set())
        locations = {(slot, half) for slot in slots for half in range(self._parts or 1)}
        if part.required:
            return True
        if locations & present and locations - present:
            slot, half = min(locations - present)
            raise TensorMismatchError(
                f"load: {parameter_name(part)} was loaded for some matrices and not for {self._matrix(slot, half)}; "
                "load it for all of them or none"
            )
        return part.if_present and locations <= present

    def _payload_by_matrix(self, stored: StoredFormat, suffixes: Sequence[str], slots: Sequence[int]) -> Payload:
        """Build the payload one matrix at a time, for formats with flat lists."""
        result: Payload | None = None
        for index, slot in enumerate(slots):
            for half in range(self._parts or 1):
                where = (slot,) if self._parts is None else (slot, half)
                parts = {
                    suffix: self._lists[suffix][slot, half] if suffix in self._lists else self._buffers[suffix][where]
                    for suffix in suffixes
                }
                matrix = stored.build(parts, self._shape)
                if result is None:
                    expert = matrix if self._parts is None else matrix.repeated(self._parts)
                    result = expert.repeated(len(slots))
                if self._parts is None:
                    result.put(index, matrix)
                else:
                    result[index].put(half, matrix)
        assert result is not None
        return result

    def _take(self, buffer: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the entries ``slots`` of a buffer, without a copy where they are all of it."""
        if list(slots) == list(range(buffer.shape[0])):
            return buffer
        return torch.stack([buffer[slot] for slot in slots]) if slots else buffer[:0]


def _is_run(numbers: Sequence[int]) -> bool:
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
