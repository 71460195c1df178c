"""A payload from codes and scales of a quantised stack of experts; their dtypes and shapes tell the format.

Shape letters: E experts, P parts (2: gate and up; 1), N output rows of all parts, K input columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .fp8_block import Fp8Block
from .fp8_channel import Fp8Channel
from .fp8_tensor import Fp8Tensor
from .mxfp4 import MxFp4
from .mxfp8 import MxFp8
from .nvfp4 import NvFp4
from .payload import Payload

__all__ = ["payload_from_scales"]

_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_LAYOUTS = (
    "codes float8_e4m3fn [E, N, K] with scales [E] or [E, P] (one per matrix), [E, N] or [E, N, 1] (per row), "
    "[E, ceil(N / 128), ceil(K / 128)] (blocks, or of block_shape) in float32, bfloat16 or float16, E8M0 "
    "[E, N, ceil(K / 32)] (MXFP8); codes uint8 [E, N, K / 2] with scales E8M0 [E, N, K / 32] (MXFP4), or "
    "float8_e4m3fn [E, N, K / 16] and a global scale [E] or [E, P] (NVFP4)"
)


def payload_from_scales(
    weight: Tensor,
    scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    block_shape: tuple[int, int] | None = None,
    parts: int | None = None,
) -> Payload:
    """Return the payload of ``weight``, codes of FP8 or FP4 weights, and its ``scale``; value = code * scale.

    weight: float8_e4m3fn ``[E, N, K]``, or two E2M1 codes in a byte ``[E, N, K / 2]``, the lower nibble first. scale:
    one per matrix, row, block or group of columns, see ``docs/your-own-tensors.md``; a block scale of a stack of gate
    and up has whole blocks for each. global_scale: of NVFP4, multiplied with ``scale``. block_shape: rows and columns
    of an FP8 block; None: (128, 128). parts: the payload is ``[E, P, N / P, K]``; None: ``[E, N, K]``. Nothing is
    copied where the format allows it. Raises InputError for dtypes and shapes that no layout has.
    """
    found = _found(weight, scale, global_scale)
    if weight.dim() != 3 or (parts is not None and weight.shape[1] % parts):
        raise InputError(f"{found}, {parts or 1} parts; allowed: {_LAYOUTS}")
    if global_scale is not None and scale.dtype != torch.float8_e4m3fn:
        raise InputError(f"{found}; a global scale belongs to float8_e4m3fn scales of 16 columns (NVFP4)")
    if weight.dtype == torch.float8_e4m3fn:
        payload = _fp8(weight, scale, block_shape, parts)
    elif weight.dtype in _BYTES and block_shape is None:
        payload = _fp4(weight.view(torch.uint8), scale, global_scale, parts)
    else:
        payload = None
    if payload is None:
        raise InputError(f"{found}; allowed: {_LAYOUTS}")
    return payload


def _fp8(weight: Tensor, scale: Tensor, block_shape: tuple[int, int] | None, parts: int | None) -> Payload | None:
    experts, rows, columns = weight.shape
    codes = _in_parts(weight, parts)
    shape = tuple(codes.shape)
    count = parts or 1
    block = block_shape or (128, 128)
    blocks = (experts, count * -(-rows // count // block[0]), -(-columns // block[1]))
    if scale.dtype in _E8M0 and tuple(scale.shape) == (experts, rows, -(-columns // 32)) and block_shape is None:
        tensors = {".weight": codes, ".weight_scale": _in_parts(scale, parts)}
        return MxFp8.from_parts(tensors, storage="compressed-tensors", shape=shape)
    if tuple(scale.shape) == blocks and scale.dtype in (*_E8M0, *_FLOAT):
        tensors = {".weight": codes, ".weight_scale": _in_parts(scale, parts)}
        return Fp8Block.from_parts(tensors, storage="compressed-tensors", shape=shape, block=block)
    if scale.dtype not in _FLOAT or block_shape is not None:
        return None
    if tuple(scale.shape) in ((experts, rows), (experts, rows, 1)):
        tensors = {".weight": codes, ".weight_scale": _in_parts(scale.reshape(experts, rows), parts)}
        return Fp8Channel.from_parts(tensors, storage="modelopt", shape=shape)
    of_matrices = _per_matrix(scale, shape[:-2])
    if of_matrices is None:
        return None
    return Fp8Tensor.from_parts(
        {".weight": codes, ".weight_scale": of_matrices}, storage="compressed-tensors", shape=shape
    )


def _fp4(codes: Tensor, scale: Tensor, global_scale: Tensor | None, parts: int | None) -> Payload | None:
    experts, rows, width = codes.shape
    columns = 2 * width
    codes = _in_parts(codes, parts)
    shape = (*codes.shape[:-1], columns)
    if scale.dtype in _E8M0 and tuple(scale.shape) == (experts, rows, -(-columns // 32)):
        tensors = {".weight": codes, ".weight_scale": _in_parts(scale, parts)}
        return MxFp4.from_parts(tensors, storage="modelopt", shape=shape)
    if scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != (experts, rows, -(-columns // 16)):
        return None
    of_matrices = None if global_scale is None else _per_matrix(global_scale.float(), shape[:-2])
    if of_matrices is None:
        return None
    tensors = {".weight": codes, ".weight_scale": _in_parts(scale, parts), ".weight_scale_2": of_matrices}
    return NvFp4.from_parts(tensors, storage="modelopt", shape=shape)


def _in_parts(tensor: Tensor, parts: int | None) -> Tensor:
    """Return ``[E, N, ...]`` as ``[E, P, N / P, ...]``."""
    return tensor if parts is None else tensor.unflatten(1, (parts, -1))


def _per_matrix(scale: Tensor, lead: tuple[int, ...]) -> Tensor | None:
    """Return one scale for each matrix of ``lead``, ``[E]`` or ``[E, P]``; None for a shape that has others."""
    sizes = tuple(scale.shape)
    while len(sizes) > len(lead) and sizes[-1] == 1:
        sizes = sizes[:-1]
    if scale.numel() == 1:
        return scale.reshape((1,) * len(lead)).expand(lead).contiguous()
    if sizes == lead:
        return scale.reshape(lead).contiguous()
    if sizes in (lead[:1], (*lead[:1], 1)):
        return scale.reshape(lead[0], *(1 for _ in lead[1:])).expand(lead).contiguous()
    return None


def _found(weight: Tensor, scale: Tensor, global_scale: Tensor | None) -> str:
    text = f"found weights {tuple(weight.shape)} {weight.dtype} with scales {tuple(scale.shape)} {scale.dtype}"
    if global_scale is None:
        return f"{text} and no global scale"
    return f"{text} and global scales {tuple(global_scale.shape)}"
