"""Quantised blocks of GGUF files in their stored form: all kinds of ggml but NVFP4, which is ``nvfp4``.

Gate and up of a layer have one block type, down may have another. Sources: the ``gguf`` package, ``quants.py``, and
ggml, ``ggml-common.h``, for the layouts. ``gguf_codes`` reads the codes of the kinds below four bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import TensorMismatchError
from . import gguf_codes as low
from .codecs import E2M1_VALUES, decode_rows, e8m0_values, look_up
from .find_storage import check_cut, find_storage
from .gguf_codes import nibbles
from .payload import Part, Payload, Storage

__all__ = ["BLOCK_BYTES", "KINDS", "Gguf"]


def _bits(raw: Tensor) -> Tensor:
    """Return ``[n, 8b]``: the bits of ``[n, b]`` bytes, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _k_steps(raw: Tensor) -> Tensor:
    """Return the 8 six-bit scales and mins ``[n, 8, 2]`` that 12 bytes hold."""
    first, second, third = raw[:, 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return torch.stack((scales, mins), dim=-1)


def _q5_k(raw: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    fifth = (raw[:, None, 16:48] >> shifts) & 1
    return nibbles(raw[:, 48:].reshape(-1, 32)).view(-1, 256) | (fifth << 4).flatten(1)


def _q6_k(raw: Tensor) -> Tensor:
    low = nibbles(raw[:, :128].reshape(-1, 64)).view(-1, 256)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    return low | (high << 4).view(-1, 256)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A block type.

    title: its name in GGUF. elements, nbytes: of a block. halves: offsets of its half-precision numbers. codes:
    function from blocks ``[n, bytes]`` to uint8 codes ``[n, elements]``. bits: of a code. zero: the code of zero.
    steps: function from blocks to int8 factors ``[n, G, halves]`` of the halves, or None. The second half is subtracted
    if there are steps, else added. numbers: what the codes mean, in units of ``unit``, a power of two; None: code -
    zero. read_half: function from blocks to their float16 ``[n, 1]`` where it is not contiguous.
    """

    title: str
    elements: int
    nbytes: int
    halves: tuple[int, ...]
    codes: Callable[[Tensor], Tensor]
    bits: int = 4
    zero: int = 0
    steps: Callable[[Tensor], Tensor] | None = None
    numbers: tuple[int, ...] | None = None
    unit: float = 1.0
    read_half: Callable[[Tensor], Tensor] | None = None

    @property
    def terms(self) -> int:
        """How many half-precision numbers a block has; 0 for MXFP4, whose scale is an E8M0 byte."""
        return 1 if self.read_half is not None else len(self.halves)

    @property
    def run(self) -> int:
        """Columns that share a scale."""
        if self.steps is None:
            return self.elements
        return self.elements // self.steps(torch.zeros(1, self.nbytes, dtype=torch.uint8)).shape[1]

    @property
    def values(self) -> Tensor:
        """What the lower four bits of a code mean, float32 ``[16]``."""
        if self.numbers is None:
            return torch.arange(16.0) - self.zero
        return torch.tensor(self.numbers, dtype=torch.float32) * self.unit


_TABLE = (
    _Kind("Q4_0", 32, 18, (0,), lambda raw: nibbles(raw[:, 2:]), zero=8),
    _Kind("Q4_1", 32, 20, (0, 2), lambda raw: nibbles(raw[:, 4:])),
    _Kind("Q5_0", 32, 22, (0,), lambda raw: nibbles(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4, 5, 16),
    _Kind("Q5_1", 32, 24, (0, 2), lambda raw: nibbles(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4, 5),
    _Kind("Q8_0", 32, 34, (0,), lambda raw: raw[:, 2:] ^ 128, 8, 128),
    _Kind("Q2_K", 256, 84, (80, 82), low.q2_k, steps=low.q2_k_steps),
    _Kind("Q3_K", 256, 110, (108,), low.q3_k, zero=4, steps=low.q3_k_steps),
    _Kind("Q4_K", 256, 144, (0, 2), lambda raw: nibbles(raw[:, 16:].reshape(-1, 32)).view(-1, 256), steps=_k_steps),
    _Kind("Q5_K", 256, 176, (0, 2), _q5_k, 5, steps=_k_steps),
    _Kind("Q6_K", 256, 210, (208,), _q6_k, 6, 32, lambda raw: raw[:, 192:208, None].view(torch.int8)),
    _Kind("MXFP4", 32, 17, (), lambda raw: nibbles(raw[:, 1:])),
    _Kind("IQ4_NL", 32, 18, (0,), lambda raw: nibbles(raw[:, 2:]), numbers=low.IQ4),
    _Kind("IQ4_XS", 256, 136, (0,), low.iq4_xs, steps=low.iq4_xs_steps, numbers=low.IQ4),
    _Kind("IQ3_XXS", 256, 98, (0,), low.iq3_xxs, steps=low.iq3_xxs_steps, numbers=low.IQ3_XXS, unit=1 / 4),
    _Kind("IQ3_S", 256, 110, (0,), low.iq3_s, steps=low.iq3_s_steps, numbers=low.IQ3_S),
    _Kind("IQ2_XXS", 256, 66, (0,), low.iq2_xxs, steps=low.iq2_xxs_steps, numbers=low.IQ2, unit=1 / 8),
    _Kind("IQ2_XS", 256, 74, (0,), low.iq2_xs, steps=low.iq2_xs_steps, numbers=low.IQ2, unit=1 / 8),
    _Kind("IQ2_S", 256, 82, (0,), low.iq2_s, steps=low.iq2_s_steps, numbers=low.IQ2, unit=1 / 8),
    _Kind("IQ1_S", 256, 50, (0,), low.iq1_s, steps=low.iq1_s_steps, numbers=low.IQ1, unit=1 / 8),
    _Kind("IQ1_M", 256, 56, (), low.iq1_m, 4, 0, low.iq1_m_steps, low.IQ1, 1 / 8, low.iq1_m_half),
    _Kind("TQ1_0", 256, 54, (52,), low.tq1_0, zero=1),
    _Kind("TQ2_0", 256, 66, (64,), low.tq2_0, zero=1),
)
KINDS = {kind.title: kind for kind in _TABLE}
# NVFP4 becomes ``nvfp4``.
BLOCK_BYTES: Mapping[str, int] = {kind.title: kind.nbytes for kind in _TABLE} | {"NVFP4": 36}
# Blocks of one size have one of these kinds; the storages of other kinds are named after them.
_BY_BYTES = {kind.nbytes: kind for kind in reversed(_TABLE)}
_SIZES = {kind.title: (kind.elements, (kind.nbytes,)) for kind in _TABLE}
# The default is Q8_0, the largest block type, which planning uses.
_PART = Part(
    suffix=".weight",
    dtypes=tuple(kind.title for kind in _BY_BYTES.values())[::-1],
    columns_per=32,
    inner=(34,),
    by_dtype=_SIZES,
)


def _storages() -> tuple[Storage, ...]:
    """Return the storage of most kinds, and one for each kind whose blocks have the size of another's."""
    alike = [kind for kind in _TABLE if _BY_BYTES[kind.nbytes] is not kind]
    parts = [
        Part(suffix=".weight", dtypes=(kind.title,), columns_per=kind.elements, inner=(kind.nbytes,)) for kind in alike
    ]
    apart = (Storage(name=kind.title, parts=(part,)) for kind, part in zip(alike, parts, strict=True))
    return Storage(name="gguf", parts=(_PART,)), *apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Gguf(Payload):
    """GGUF blocks: ``blocks [..., N, ceil(K / elements), bytes]`` uint8.

    title: the kind, a key of ``KINDS``; empty: the first kind with blocks of this size.
    """

    blocks: Tensor
    title: str = ""

    name: ClassVar[str] = "gguf"
    group: ClassVar[int] = 32
    read_only: ClassVar[bool] = True
    by_row: ClassVar[tuple[str, ...]] = ("blocks",)
    storages: ClassVar[tuple[Storage, ...]] = _storages()

    @property
    def kind(self) -> _Kind:
        """The type of the blocks."""
        return KINDS[self.title] if self.title else _BY_BYTES[self.blocks.shape[-1]]

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: float32 as the ``gguf`` package computes it, rounded once to ``dtype``."""
        flat = self.blocks.reshape(-1, *self.blocks.shape[-2:])

        def rows(start: int, stop: int) -> Tensor:
            return _decode(replace(self, blocks=flat[start:stop])).view(stop - start, -1)

        return decode_rows(self.shape, dtype, flat.device, rows)

    def codes(self) -> Tensor:
        """Return uint8 ``[..., N, blocks * elements]``, codes of ``bits`` bits."""
        kind = self.kind
        return kind.codes(self.blocks.reshape(-1, kind.nbytes)).view(*self.blocks.shape[:-2], -1)

    def lines(self) -> tuple[Tensor, Tensor | None]:
        """Return the halves float16 ``[n, h]`` of n blocks, and their factors int8 ``[n, G, h]`` or None.

        value = number * halves[0] * steps[0] - halves[1] * steps[1], or + halves[1] without steps; number: code - zero,
        or that of ``numbers`` times ``unit``.
        """
        kind = self.kind
        raw = self.blocks.reshape(-1, self.blocks.shape[-1])
        steps = None if kind.steps is None else kind.steps(raw).view(torch.int8)
        if kind.read_half is not None:
            return kind.read_half(raw), steps
        halves = [raw[:, at : at + 2].contiguous().view(torch.float16) for at in kind.halves]
        return torch.cat(halves, dim=-1), steps

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take uint8 blocks ``[..., N, ceil(K / elements), bytes]`` as stored; raises TensorMismatchError.

        storage: ``gguf``, where the size of a block identifies its kind, or the name of a kind that shares its size.
        """
        find_storage(cls, storage)
        title = storage if storage in KINDS else ""
        blocks = parts.get(".weight", torch.empty(0))
        kind = KINDS[title] if title else _BY_BYTES.get(blocks.shape[-1])
        kind = kind if blocks.dtype == torch.uint8 else None
        needed = None if kind is None else (*shape[:-1], -(-shape[-1] // kind.elements), kind.nbytes)
        if needed is None or tuple(blocks.shape) != needed:
            sizes = ", ".join(f"{k.title} {k.nbytes} bytes for {k.elements}" for k in _TABLE)
            raise TensorMismatchError(
                f"gguf .weight is {blocks.dtype} {list(blocks.shape)}, a logical {list(shape)} needs "
                f"{needed or 'blocks'}; known blocks: {sizes}"
            )
        return cls(shape=tuple(shape), blocks=blocks, title=title)

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a NaN or infinite half or E8M0 byte 255."""
        bad = ~torch.isfinite(self.lines()[0]) if self.kind.terms else self.blocks.flatten(0, -2)[:, :1] == 255
        return self._per_matrix(bad)

    def columns(self, start: int, stop: int) -> Self:
        """Return a view of input columns ``start:stop``; both on block boundaries or at the end."""
        size = self.kind.elements
        check_cut(f"{self.name}: input columns", start, stop, self.shape[-1], size)
        blocks = self.blocks[..., start // size : -(-stop // size), :]
        return replace(self, shape=(*self.shape[:-1], stop - start), blocks=blocks)


def _decode(payload: Gguf) -> Tensor:
    """Return float32 ``[n, elements]`` of n blocks; the product of a second half is exact before the subtraction."""
    codes = payload.codes().view(-1, payload.kind.elements)
    kind = payload.kind
    if not kind.terms:
        # The library decodes with an integer table, so code 8 is +0.
        values = torch.tensor([v if v else 0.0 for v in E2M1_VALUES], device=codes.device)
        return values[codes.long()] * look_up(e8m0_values(codes.device), payload.blocks.flatten(0, -2)[:, :1])
    halves, steps = payload.lines()
    lines = halves.float().unsqueeze(1) * (1.0 if steps is None else steps.float())
    numbers = codes.float() - kind.zero if kind.numbers is None else look_up(kind.values.to(codes.device), codes)
    values = numbers.view(codes.shape[0], lines.shape[1], -1) * lines[..., :1]
    if lines.shape[-1] > 1:
        values = values + (lines[..., 1:] if steps is None else -lines[..., 1:])
    return values.flatten(1)
