"""Convert published integer weights to row-major codes: GPTQ, AWQ, compressed-tensors and ModelOpt packings.

All but ModelOpt's use 32-bit words with 4-bit or 8-bit codes. GPTQ is compressed-tensors stored input-first, so its
transposed words are rows of codes; AWQ packs output columns in a different order. ModelOpt's bytes hold the codes of
two rows in one column.
Sources: GPTQModel ``nn_modules/qlinear``, AutoAWQ gemm layout, compressed-tensors ``pack_quantized``, ModelOpt
``export/quant_utils.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import CollegiumError, InputError, TensorMismatchError
from .codecs import pack_nibbles
from .find_storage import find_storage, take
from .payload import Part, Payload, Storage

__all__ = ["GROUP", "Integers", "awq", "check_group_size", "compressed", "gptq", "modelopt", "read_integers"]

GROUP = 32
_SCALES = ("BF16", "F16", "F32")
_INDICES = ("I32", "I64")
# AWQ stores column 8c + [0, 2, 4, 6, 1, 3, 5, 7][p] at bits 4p; these are the positions of columns 0 to 7.
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Integers:
    """Integer weights by rows.

    codes: uint8 ``[..., N, bytes]`` (4 bits: low nibble first). scales: ``[..., N, G]`` as stored. zeros: uint8
    ``[..., N, G]``, None if the storage has none. group_of: int32 ``[..., K]``, the group of every column, None if
    columns are in order. group_size: columns per group.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor | None
    group_size: int


def _index_part(suffix: str, *, ordered: bool) -> Part:
    # An index of columns in order is read to verify that order.
    return Part(suffix=suffix, dtypes=_INDICES, rows_per=0, required=ordered, if_present=True)


def compressed(name: str, bits: int, *, ordered: bool = False) -> Storage:
    """Return a compressed-tensors storage; ``*-asymmetric`` has zero points, ``int-quantized`` bytes, not words."""
    per_word = 32 // bits
    weight = Part(suffix=".weight_packed", dtypes=("I32",), columns_per=per_word)
    zero = Part(suffix=".weight_zero_point", dtypes=("I32",), rows_per=per_word, columns_per=GROUP)
    return Storage(
        name=name,
        parts=(
            Part(suffix=".weight", dtypes=("I8",)) if name == "int-quantized" else weight,
            Part(suffix=".weight_scale", dtypes=_SCALES, columns_per=GROUP),
            *((zero,) if name.endswith("-asymmetric") else ()),
            Part(suffix=".weight_shape", dtypes=_INDICES, rows_per=0, columns_per=0, inner=(2,), required=False),
            _index_part(".weight_g_idx", ordered=ordered),
        ),
    )


def _input_first(name: str, weight: Part, zeros: Part, *more: Part) -> Storage:
    scales = Part(suffix=".scales", dtypes=_SCALES, columns_per=GROUP, transposed=True)
    bias = Part(suffix=".bias", dtypes=_SCALES, columns_per=0, required=False, if_present=True)
    return Storage(name=name, parts=(weight, scales, zeros, *more, bias))


def gptq(name: str, bits: int, *, ordered: bool = False) -> Storage:
    """Return a GPTQ storage, ``gptq`` (zero points stored minus one) or ``gptq_v2`` (unchanged)."""
    per_word = 32 // bits
    return _input_first(
        name,
        Part(suffix=".qweight", dtypes=("I32",), columns_per=per_word, transposed=True),
        Part(suffix=".qzeros", dtypes=("I32",), rows_per=per_word, columns_per=GROUP, transposed=True),
        _index_part(".g_idx", ordered=ordered),
    )


def awq() -> Storage:
    """Return the AWQ gemm storage, 4 bits."""
    return _input_first(
        "awq",
        Part(suffix=".qweight", dtypes=("I32",), rows_per=8, transposed=True),
        Part(suffix=".qzeros", dtypes=("I32",), rows_per=8, columns_per=GROUP, transposed=True),
    )


def modelopt() -> Storage:
    """Return ModelOpt's storage of INT4: a byte holds rows 2i (low nibble) and 2i + 1 of one column, as signed codes.

    ``.weight_scale_2`` is for kernels that round decoded weights to FP8; it is not part of the weights.
    """
    return Storage(
        name="modelopt",
        parts=(
            Part(suffix=".weight", dtypes=("U8",), rows_per=2),
            Part(suffix=".weight_scale", dtypes=_SCALES, columns_per=GROUP),
            Part(suffix=".weight_scale_2", dtypes=_SCALES, rows_per=0, columns_per=0, required=False),
        ),
    )


def read_integers(
    cls: type[Payload],
    bits: int,
    parts: Mapping[str, Tensor],
    *,
    storage: str,
    shape: tuple[int, ...],
    group_size: int | None,
) -> Integers:
    """Convert the parts of an integer storage.

    group_size: the config's; None derives it from the scales. Raises TensorMismatchError if more than one size fits,
    and if a shape, ``.weight_shape``, the column order or a bias contradicts the declaration.
    """
    layout = find_storage(cls, storage)
    scale = layout.parts[1]
    if group_size is None:
        group_size = _derive_group_size(cls.name, scale, parts.get(scale.suffix), shape)
    check_group_size(cls.name, group_size, shape[-1], TensorMismatchError)
    group_size = min(group_size, shape[-1])
    sized = [replace(p, columns_per=group_size) if p.columns_per == GROUP else p for p in layout.parts]
    taken = take(cls, replace(layout, parts=tuple(sized)), parts, shape)
    _check_claims(cls.name, taken, shape)
    zeros = next((taken[p.suffix] for p in layout.parts if "zero" in p.suffix), None)
    positions = _AWQ_POSITIONS if storage == "awq" else range(32 // bits)
    if zeros is not None:
        zeros = _unpack_rows(zeros, bits, positions, shape[-2])
        if storage == "gptq":
            zeros = (zeros + 1) & (2**bits - 1)  # stored minus one, modulo 2^bits
        zeros = zeros.to(torch.uint8).contiguous()
    index = next((part for part in layout.parts if part.suffix.endswith("g_idx")), None)
    return Integers(
        codes=_unpack_codes(taken[layout.parts[0].suffix], bits, storage, shape),
        scales=taken[scale.suffix].contiguous(),
        zeros=zeros,
        group_of=None if index is None else _group_index(cls.name, index, taken, (shape[-1], group_size)),
        group_size=group_size,
    )


def _unpack_codes(stored: Tensor, bits: int, storage: str, shape: tuple[int, ...]) -> Tensor:
    if stored.dtype == torch.int8:
        return stored.contiguous().view(torch.uint8) ^ 0x80
    if storage == "modelopt":
        rows = torch.stack((stored & 0xF, stored >> 4), dim=-2).flatten(-3, -2)[..., : shape[-2], :]
        return pack_nibbles(torch.nn.functional.pad(rows ^ 8, (0, shape[-1] % 2)))
    if storage == "awq":
        nibbles = _unpack_rows(stored, 4, _AWQ_POSITIONS, shape[-2]).to(torch.uint8)
        return pack_nibbles(torch.nn.functional.pad(nibbles, (0, shape[-1] % 2)))
    # A tensor with one word per row is contiguous by torch's rules whatever its stride, but view() needs stride 1.
    stored = stored.contiguous() if stored.stride(-1) == 1 else stored.clone(memory_format=torch.contiguous_format)
    return stored.view(torch.uint8)[..., : -(-shape[-1] * bits // 8)]


def _unpack_rows(words: Tensor, bits: int, positions: Sequence[int], rows: int) -> Tensor:
    """Return int32 ``[..., rows, G]`` of words ``[..., ceil(rows / n), G]``; row j of n is at ``places[j]``."""
    shifts = torch.tensor(positions, dtype=torch.int32, device=words.device).mul_(bits).unsqueeze(-1)
    return ((words.unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-3, -2)[..., :rows, :]


def _group_index(name: str, index: Part, taken: Mapping[str, Tensor], sizes: tuple[int, int]) -> Tensor | None:
    """Return the group of every column, None if columns are in order; raises TensorMismatchError.

    sizes: K and the group size.
    """
    order = taken.get(index.suffix)
    columns, size = sizes
    if order is None:
        return None
    groups = -(-columns // size)
    low = int(order.min())
    high = int(order.max())
    if index.required:
        if low < 0 or high >= groups:
            raise TensorMismatchError(
                f"{name} g_idx holds groups {low} to {high}, allowed are 0 to {groups - 1} (K={columns}, groups of "
                f"{size}); download the file again"
            )
        return order.to(torch.int32)
    plain = torch.arange(columns, device=order.device) // size
    # In a slice of the columns the first group is not 0.
    if not bool((order - order[..., :1] == plain).all()):
        raise TensorMismatchError(
            f"{name} g_idx permutes the columns (groups {low} to {high}), the config declares columns in order; "
            "correct desc_act or actorder in quantization_config"
        )
    return None


def _check_claims(name: str, taken: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
    claimed = taken.get(".weight_shape")
    if claimed is not None and not bool((claimed == claimed.new_tensor(shape[-2:])).all()):
        raise TensorMismatchError(
            f"{name} .weight_shape is {[int(n) for n in claimed.reshape(-1, 2)[0]]}, the config implies "
            f"{list(shape[-2:])}; check the sizes in the config"
        )
    bias = taken.get(".bias")
    if bias is not None and bool((bias != 0).any()):
        raise TensorMismatchError(f"{name} .bias is not zero, and experts of this model have no biases")


def check_group_size(name: str, group_size: int, columns: int, error: type[CollegiumError] = InputError) -> None:
    """Raise ``error`` unless a group is a multiple of 8 columns or a whole row."""
    if group_size < 1 or (group_size % 8 and group_size < columns):
        raise error(
            f"{name}: group_size is {group_size}, allowed: a multiple of 8, or at least K={columns} for one scale per "
            "row"
        )


def _derive_group_size(name: str, part: Part, scales: Tensor | None, shape: tuple[int, ...]) -> int:
    """Return the only usual group size (K / stored, or a power of two) that fits the number of scales per row."""
    columns = shape[-1]
    stored = 1
    if scales is not None and scales.dim() == len(shape):
        stored = scales.shape[-2 if part.transposed else -1]
    if stored <= 1:
        return columns
    sizes = {size for size in (16, 32, 64, 128, 256, 512, 1024) if -(-columns // size) == stored}
    if columns % stored == 0 and columns // stored % 8 == 0:
        sizes.add(columns // stored)
    if len(sizes) != 1:
        candidates = " or ".join(str(size) for size in sorted(sizes)) or "no usual size"
        raise TensorMismatchError(
            f"{name} {part.suffix} has {stored} columns for K={columns}: the group size could be {candidates}; pass "
            "the config's group_size"
        )
    return sizes.pop()
