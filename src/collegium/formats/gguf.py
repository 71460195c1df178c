"""Quantised blocks of GGUF files, kept as they are stored: Q4_0 to Q8_0, Q4_K, Q5_K, Q6_K and MXFP4.

Gate and up of a layer share a kind of block, down may have another. Source: the ``gguf`` package, ``quants.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch

from ..errors import TensorMismatchError
from .codecs import E2M1_VALUES, decode_rows, e8m0_values, look_up
from .intake import any_per_matrix, check_cut, find_storage
from .payload import Part, Payload, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["KINDS", "Gguf"]


def _half(raw: Tensor, at: int) -> Tensor:
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Return ``[n, 2b]`` float32: the low nibbles of ``[n, b]`` bytes, then the high ones."""
    return torch.cat((raw & 0xF, raw >> 4), dim=-1).float()


def _bits(raw: Tensor) -> Tensor:
    """Return ``[n, 8b]`` float32: the bits of ``[n, b]`` bytes, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw.unsqueeze(-1) >> shifts) & 1).flatten(1).float()


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 2:]) - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _nibbles(raw[:, 4:]) + _half(raw, 2)


def _q5_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 6:]) + 16 * _bits(raw[:, 2:6]) - 16)


def _q5_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 8:]) + 16 * _bits(raw[:, 4:8])) + _half(raw, 2)


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * raw[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 six-bit scales and mins ``[n, 8]`` float32 that 12 bytes hold."""
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales.float(), mins.float()


def _k_values(raw: Tensor, codes: Tensor) -> Tensor:
    """Return d * scale * code - dmin * min for codes ``[n, 8, 32]``; only the difference is rounded."""
    scales, mins = _k_scales(raw[:, 4:16])
    steps, offsets = _half(raw, 0) * scales, _half(raw, 2) * mins
    return (steps.unsqueeze(-1) * codes - offsets.unsqueeze(-1)).flatten(1)


def _q4_k(raw: Tensor) -> Tensor:
    return _k_values(raw, _nibbles(raw[:, 16:].reshape(-1, 32)).view(-1, 8, 32))


def _q5_k(raw: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    fifth = (raw[:, None, 16:48] >> shifts) & 1
    return _k_values(raw, _nibbles(raw[:, 48:].reshape(-1, 32)).view(-1, 8, 32) + 16 * fifth.float())


def _q6_k(raw: Tensor) -> Tensor:
    low = _nibbles(raw[:, :128].reshape(-1, 64)).view(-1, 256)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    high = ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).float().view(-1, 256)
    scales = _half(raw, 208) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return ((low + 16 * high - 32).view(-1, 16, 16) * scales.unsqueeze(-1)).flatten(1)


def _mxfp4(raw: Tensor) -> Tensor:
    # the library looks codes up among integers, so code 8 is a zero without a sign
    values = torch.tensor([v if v else 0.0 for v in E2M1_VALUES], device=raw.device)
    return values[_nibbles(raw[:, 1:]).long()] * look_up(e8m0_values(raw.device), raw[:, :1])


class _Kind(NamedTuple):
    """A kind of block: title, elements and bytes, where its half-precision scales lie, how ``[n, bytes]`` decodes."""

    title: str
    elements: int
    nbytes: int
    halves: tuple[int, ...]
    decode: Callable[[Tensor], Tensor]


_TABLE = (
    _Kind("Q4_0", 32, 18, (0,), _q4_0),
    _Kind("Q4_1", 32, 20, (0, 2), _q4_1),
    _Kind("Q5_0", 32, 22, (0,), _q5_0),
    _Kind("Q5_1", 32, 24, (0, 2), _q5_1),
    _Kind("Q8_0", 32, 34, (0,), _q8_0),
    _Kind("Q4_K", 256, 144, (0, 2), _q4_k),
    _Kind("Q5_K", 256, 176, (0, 2), _q5_k),
    _Kind("Q6_K", 256, 210, (208,), _q6_k),
    _Kind("MXFP4", 32, 17, (), _mxfp4),
)
KINDS = {kind.title: kind for kind in _TABLE}
_BY_BYTES = {kind.nbytes: kind for kind in _TABLE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gguf(Payload):
    """GGUF blocks: ``blocks [..., N, ceil(K / elements), bytes]`` uint8; the bytes of a block tell its kind."""

    blocks: Tensor

    name: ClassVar[str] = "gguf"
    group: ClassVar[int] = 32
    read_only: ClassVar[bool] = True
    by_row: ClassVar[tuple[str, ...]] = ("blocks",)
    # the part as planned is Q8_0, the largest of the kinds
    storages: ClassVar[tuple[Storage, ...]] = (
        Storage(
            name="gguf",
            parts=(
                Part(
                    suffix=".weight",
                    dtypes=tuple(KINDS),
                    columns_per=32,
                    inner=(34,),
                    by_dtype={kind.title: (kind.elements, (kind.nbytes,)) for kind in _TABLE},
                ),
            ),
        ),
    )

    @property
    def kind(self) -> str:
        """The name of the blocks' kind, for instance ``Q4_K``."""
        return _BY_BYTES[self.blocks.shape[-1]].title

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: float32 as the ``gguf`` package computes it, rounded once to ``dtype``."""
        kind = _BY_BYTES[self.blocks.shape[-1]]
        flat = self.blocks.reshape(-1, *self.blocks.shape[-2:])

        def rows(start: int, stop: int) -> Tensor:
            return kind.decode(flat[start:stop].reshape(-1, kind.nbytes)).view(stop - start, -1)

        return decode_rows(self.shape, dtype, flat.device, rows)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take uint8 blocks ``[..., N, ceil(K / elements), bytes]`` as stored; TensorMismatchError for others."""
        find_storage(cls, storage)
        blocks = parts.get(".weight", torch.empty(0))
        kind = _BY_BYTES.get(blocks.shape[-1]) if blocks.dtype == torch.uint8 else None
        needed = None if kind is None else (*shape[:-1], -(-shape[-1] // kind.elements), kind.nbytes)
        if needed is None or tuple(blocks.shape) != needed:
            sizes = ", ".join(f"{k.title} {k.nbytes} bytes for {k.elements}" for k in _TABLE)
            raise TensorMismatchError(
                f"gguf .weight is {blocks.dtype} {list(blocks.shape)}, a logical {list(shape)} needs "
                f"{needed or 'blocks'}; known blocks: {sizes}"
            )
        return cls(shape=tuple(shape), blocks=blocks)

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a NaN or infinite half or E8M0 byte 255."""
        leading = len(self.shape) - 2
        kind = _BY_BYTES[self.blocks.shape[-1]]
        bad = [~torch.isfinite(_half(self.blocks.flatten(0, -2), at)) for at in kind.halves]
        bad = bad or [self.blocks.flatten(0, -2)[:, :1] == 255]
        per_block = torch.stack(bad).any(0)
        return any_per_matrix(per_block.view(*self.blocks.shape[:-1]), leading)

    def columns(self, start: int, stop: int) -> Self:
        """Return a view of input columns ``start:stop``; both on block boundaries or at the end."""
        size = _BY_BYTES[self.blocks.shape[-1]].elements
        check_cut(f"{self.name}: input columns", start, stop, self.shape[-1], size)
        blocks = self.blocks[..., start // size : -(-stop // size), :]
        return replace(self, shape=(*self.shape[:-1], stop - start), blocks=blocks)
