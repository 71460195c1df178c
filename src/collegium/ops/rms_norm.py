"""Root-mean-square norm of rows in float32 (Zhang and Sennrich, 2019).

Shape letters: T tokens, C columns.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime.launch import launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions
from .buffers import Buffers, allocate, sizes
from .checks import require_input

__all__ = ["rms_norm", "rms_norm_regions"]

_BLOCK = 4096  # columns that a program reads at once


def rms_norm_regions(tokens: int, columns: int) -> Regions:
    """Return the most bytes ``rms_norm`` takes for any count of tokens up to ``tokens``."""
    return sizes(_buffers(tokens, columns))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, memory: Memory | None = None) -> Tensor:
    """Return ``x / sqrt(mean(x * x) + eps) * weight``, ``[T, C]`` float32, for ``x [T, C]``.

    x: floating. weight: ``[C]`` float32, or None for ones. On a GPU a row's bits do not depend on T. memory: where the
    kernel takes "norm". Raises InputError for wrong shapes or dtypes.
    """
    require_input(x.dim() == 2 and x.is_floating_point(), "x", x, "[T, C] of a floating dtype")
    tokens, columns = x.shape
    if weight is not None:
        valid = tuple(weight.shape) == (columns,) and weight.dtype == torch.float32
        require_input(valid, "weight", weight, f"float32 ({columns},)")
    if not on_device(x):
        return functional.rms_norm(x.float(), (columns,), weight, eps)
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels.rms_norm import rms_norm_kernel

    out = allocate(memory, _buffers(tokens, columns), x.device)["norm"]
    if tokens == 0:
        return out
    x = row_contiguous(x)
    block = min(power_at_least(columns, 32), _BLOCK)
    weight = None if weight is None else weight.contiguous()
    args = (x, weight, out, columns, x.stride(0), float(columns), float(eps))
    constants = {
        "BLOCK": block,
        "STEPS": -(-columns // block),
        "PDL": overlaps(x),
    }
    warps = max(1, min(8, block // 256))
    launch(rms_norm_kernel, (tokens,), args, constants, num_warps=warps, enable_fp_fusion=False)
    return out


def _buffers(tokens: int, columns: int) -> Buffers:
    return {"norm": ((tokens, columns), torch.float32)}
