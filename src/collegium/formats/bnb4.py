"""The 4-bit format of bitsandbytes: codes into a table of 16 numbers, NF4 or FP4, one scale per 64 elements.

Source: bitsandbytes ``functional.py`` and ``backends/default/ops.py``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, InputError, MissingTensorError, TensorMismatchError
from .codecs import decode_rows, pack_nibbles, scale_groups_, unpack_nibbles
from .find_storage import find_storage, take
from .payload import Part, Payload, Storage

__all__ = ["Bnb4"]

_BLOCK = 64
_NESTED = 256


def _storage(kind: str) -> Storage:
    # bnb_4bit_quant_storage is the dtype in which the bytes are stored: (codes per element, inner shape).
    sizes = {"U8": (2, ()), "BF16": (4, ()), "F16": (4, ()), "F32": (8, ())}
    table = Part(suffix=".weight.quant_map", dtypes=("F32",), rows_per=0, columns_per=0, inner=(16,), if_present=True)
    nested = Part(suffix=".weight.nested_absmax", dtypes=("F32",), columns_per=_BLOCK * _NESTED, flat=True)
    return Storage(
        name=kind,
        parts=(
            Part(suffix=".weight", dtypes=tuple(sizes), columns_per=2, flat=True, by_dtype=sizes),
            Part(suffix=".weight.absmax", dtypes=("F32", "U8"), columns_per=_BLOCK, flat=True),
            table,
            Part(suffix=f".weight.quant_state.bitsandbytes__{kind}", dtypes=("U8",), columns_per=0, flat=True),
            replace(nested, required=False, if_present=True),
            replace(table, suffix=".weight.nested_quant_map", inner=(256,), required=False),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bnb4(Payload):
    """bitsandbytes 4-bit: ``codes [..., N, ceil(K/2)]`` uint8, low nibble first, ``scales [..., N, K/g]`` float32.

    table: float32 ``[..., 16]``, the values of the codes before scaling. group_size: g, the largest power of two up to
    64 that divides K, because blocks of 64 cross row boundaries.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    group_size: int

    name: ClassVar[str] = "bnb4"
    group: ClassVar[int] = _BLOCK
    read_only: ClassVar[bool] = True
    storages: ClassVar[tuple[Storage, ...]] = (_storage("nf4"), _storage("fp4"))

    @property
    def scale_block(self) -> tuple[int, int]:
        """One row and the columns of a group."""
        return 1, self.group_size

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: table[code] * scale as one float32 product, rounded once to ``dtype``."""
        count, columns = self.shape[-2:]
        codes, scales = (t.reshape(-1, t.shape[-1]) for t in (self.codes, self.scales))
        tables = self.table.reshape(-1, 16)

        def rows(start: int, stop: int) -> Tensor:
            matrix = torch.arange(start, stop, device=codes.device) // count
            index = unpack_nibbles(codes[start:stop])[:, :columns].long()
            return scale_groups_(tables[matrix].gather(1, index), scales[start:stop], self.group_size)

        return decode_rows(self.shape, dtype, codes.device, rows)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Arrange the flat codes by rows and dequantise the scales, as the library does.

        Takes one matrix: ``shape`` is ``(N, K)``. Raises CheckpointError if ``quant_state`` is unreadable and
        TensorMismatchError if it contradicts ``shape`` or the storage.
        """
        if len(shape) != 2:
            raise InputError(f"{cls.name}: from_parts takes one matrix (N, K), found the shape {list(shape)}")
        stored = dict(parts)
        if ".weight" in stored:
            stored[".weight"] = stored[".weight"].reshape(-1).view(torch.uint8)
        layout = find_storage(cls, storage)
        taken = take(cls, layout, stored, shape)
        state = _read_quant_state(taken[layout.parts[3].suffix], storage, shape)
        absmax = taken[".weight.absmax"]
        if absmax.dtype == torch.uint8:
            absmax = _nested_scales(absmax, taken, state)
        rows, columns = shape
        size = gcd(_BLOCK, columns)
        scales = absmax.repeat_interleave(_BLOCK // size)[: rows * columns // size]
        raw = taken[".weight"]
        codes = unpack_nibbles((raw >> 4) | (raw << 4))[: rows * columns].view(rows, columns)
        return cls(
            shape=tuple(shape),
            codes=pack_nibbles(torch.nn.functional.pad(codes, (0, columns % 2))),
            scales=scales.view(rows, -1),
            table=taken[".weight.quant_map"],
            group_size=size,
        )

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True where a scale or a table entry is not finite."""
        return self._per_matrix(~torch.isfinite(self.scales)) | ~torch.isfinite(self.table).all(-1)

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        return max(self.group_size, 2), {"codes": (2, 1), "scales": (self.group_size, 1)}


def _read_quant_state(raw: Tensor, storage: str, shape: tuple[int, ...]) -> Mapping[str, object]:
    """Return the JSON object stored as bytes, checked against storage and shape."""
    try:
        parsed: object = json.loads(bytes(raw.tolist()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"bnb4: quant_state is not a JSON object: {error}") from error
    state = cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}
    nested = state.get("nested_blocksize", _NESTED)
    stated = (state.get("quant_type"), state.get("blocksize"), state.get("shape"), nested)
    expected = (storage, _BLOCK, list(shape), _NESTED)
    if stated != expected:
        raise TensorMismatchError(
            f"bnb4: quant_state has (quant_type, blocksize, shape, nested_blocksize) = {stated!r:.200}, "
            f"needed is {expected}"
        )
    return state


def _nested_scales(absmax: Tensor, taken: Mapping[str, Tensor], state: Mapping[str, object]) -> Tensor:
    """Return float32 scales from doubly quantised ones: map[code] * nested_absmax + nested_offset."""
    scales, values = (taken.get(f".weight.nested_{name}") for name in ("absmax", "quant_map"))
    offset = state.get("nested_offset")
    if scales is None or values is None or isinstance(offset, bool) or not isinstance(offset, float | int):
        raise MissingTensorError(
            "bnb4: absmax is quantised (U8), so nested_absmax, nested_quant_map and a number nested_offset in "
            f"quant_state are needed; found nested_offset={offset!r}"
        )
    spread = scales.repeat_interleave(_NESTED)[: absmax.numel()]
    return (values[absmax.long()] * spread).add_(float(offset))
