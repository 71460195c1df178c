"""Rows times a weight, ``x @ weight.T``, where no row's bits depend on the number of rows.

Libraries choose a kernel by the number of rows, so a token would get other bits in another batch, and another rank.

Shape letters: T tokens, K columns in, N columns out.
"""

import torch
from torch import Tensor

from ..errors import InputError
from ..formats.unquantised import DTYPES
from ..kernels.arguments import LinearTile, MatrixRows, SumOrder
from ..problem import Problem
from ..runtime.launch import align_rows, launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions, elementwise_max, with_prefix
from .buffers import Buffers, allocate, sizes
from .rms_norm import rms_norm_regions

__all__ = ["linear", "linear_regions", "regions_of", "sigmoid_gate"]

# K is split into parts for this many programs, and into no more parts than that. The constants do not follow the GPU,
# because they decide the order of sums.
_PROGRAMS, _PARTS = 128, 32
_BLOCK_N, _BLOCK_K = 64, 64
# Outputs up to which parts run in parallel, in 32 MiB at most: beyond, there are enough tiles of tokens.
_SPLIT_LIMIT = 1 << 18
# Rows of a block on a CPU: the lanes of the library's vectors, which treat all rows alike. With more, or as rows of the
# left operand, float32 rows at the edge of a thread's share got other bits (Xeon, AVX2 and AVX-512).
_LANES = {4: 16, 2: 32}


def linear_regions(tokens: int, k_in: int, n_out: int, out_dtype: torch.dtype | None) -> Regions:
    """Return the most bytes ``linear`` takes for any count of tokens up to ``tokens``; out_dtype None: out is passed.

    On a CUDA device; on a CPU none.
    """
    return sizes(_sums(_max_split_tokens(tokens, n_out), k_in, n_out) | _result(tokens, n_out, out_dtype))


def regions_of(problem: Problem) -> Regions:
    """Return the regions of a layer's router, latent projections and shared expert's gate, with their norms."""
    spec, tokens = problem.spec, problem.limits.max_tokens
    hidden, latent = spec.hidden_size, spec.latent_size
    if problem.device.kind != "cuda":
        return {}
    regions = with_prefix("router", linear_regions(tokens, hidden, spec.num_experts, torch.float32))
    if spec.routing.input_norm_eps is not None:
        regions |= with_prefix("router", rms_norm_regions(tokens, hidden))
    if spec.latent_norm_eps is not None and latent is not None:
        regions |= with_prefix("latent", rms_norm_regions(tokens, latent))
    if latent is not None:
        regions |= with_prefix("latent/enter", linear_regions(tokens, hidden, latent, DTYPES[problem.dtype]))
        regions |= with_prefix("latent/leave", linear_regions(tokens, latent, hidden, None))
    if spec.shared is not None and spec.shared.gated:
        sums = [sizes(_gate_sums(count, hidden)) for count in (_max_split_tokens(tokens, 1), tokens)]
        regions |= with_prefix("gate", elementwise_max(*sums) | sizes(_gated_rows(tokens, hidden)))
    return regions


def linear(
    x: Tensor, weight: Tensor, added: Tensor | None = None, *, out: Tensor | None = None, memory: Memory | None = None
) -> Tensor:
    """Return ``x [T, K]`` times ``weight [N, K]`` plus ``added``, ``[T, N]`` in the dtype of the weight or of ``out``.

    x: floating, any rows. weight: float32, or of the 16-bit dtype of x. added: ``[N]`` for every row, or ``[T, N]``,
    floating. Sums are float32, added comes last, and the result is rounded once; on a CPU a 16-bit product is rounded
    before that. Float32 is as exact as a float32 product, but a row or weight that is infinite, or finite beyond
    bfloat16, gives NaN on a GPU. out: contiguous, written and returned. memory: where kernels take "sums", and "out"
    where none is given. Raises InputError for wrong shapes or dtypes.
    """
    _check(x, weight, added, out)
    if not on_device(x):
        result = _in_blocks(x, weight)
        if added is not None:
            result = result.float().add_(added)
        return result.to(weight.dtype) if out is None else out.copy_(result)
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels.linear import add_parts_kernel

    tokens, k_in = x.shape
    n_out = weight.shape[0]
    split = _split_k(tokens, k_in, n_out)
    buffers = _result(tokens, n_out, weight.dtype if out is None else None)
    if split:
        buffers |= _sums(tokens, k_in, n_out)
    tensors = allocate(memory, buffers, x.device)
    out = tensors["out"] if out is None else out
    if tokens == 0:
        return out
    if not split:
        _multiply(x, weight, added, out)
        return out
    sums = tensors["sums"]
    _multiply(x, weight, None, sums, split=True)
    addend = _addend(added, sums, n_out)
    block = min(power_at_least(n_out, 32), 128)
    constants = {"PARTS": sums.shape[0], "ADDED": added is not None, "BLOCK": block, "PDL": overlaps(x)}
    launch(add_parts_kernel, (-(-n_out // block), tokens), (sums, addend, out, tokens, n_out), constants)
    return out


def sigmoid_gate(x: Tensor, gate: Tensor, rows: Tensor, *, memory: Memory | None = None) -> Tensor:
    """Return ``sigmoid(x @ gate.T) * rows``, ``[T, D]`` float32, for ``x [T, K]``, ``gate [1, K]`` and ``rows [T, D]``.

    The logit is that of ``linear``, in float32; the sigmoid is evaluated in float64 and rounded once, and the product
    is rounded to float32. So a row's bits do not depend on T. gate: as ``linear`` takes a weight. rows: floating.
    memory: where kernels take "sums" and "rows". Raises InputError for wrong shapes or dtypes.
    """
    _check(x, gate, None, None)
    if gate.shape[0] != 1 or rows.dim() != 2 or rows.shape[0] != x.shape[0] or not rows.is_floating_point():
        raise InputError(
            f"gated: found a gate {tuple(gate.shape)} and rows {tuple(rows.shape)} {rows.dtype}, allowed: a gate "
            f"(1, {x.shape[1]}) and floating rows ({x.shape[0]}, D), one for each row of x"
        )
    if not on_device(x):
        # In float64: torch's float32 sigmoid gives the last rows of a batch other bits on a CPU.
        return torch.sigmoid(linear(x, gate).double()).float() * rows
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels.linear import gate_rows_kernel

    tokens, k_in = x.shape
    width = rows.shape[1]
    tensors = allocate(memory, _gate_sums(tokens, k_in) | _gated_rows(tokens, width), x.device)
    sums, out = tensors["sums"], tensors["rows"]
    if tokens == 0:
        return out
    _multiply(x, gate, None, sums, split=_split_k(tokens, k_in, 1))
    rows = row_contiguous(rows)
    # Few tokens are spread over more programs; with many of them a program evaluates the sigmoid for more columns.
    block = min(power_at_least(width, 32), 2048 if tokens >= 64 else 256)
    args = (sums, rows, out, tokens, width, rows.stride(0))
    constants = {"PARTS": sums.shape[0], "BLOCK": block, "PDL": overlaps(x)}
    warps = max(1, min(4, block // 256))
    launch(gate_rows_kernel, (-(-width // block), tokens), args, constants, num_warps=warps, enable_fp_fusion=False)
    return out


def _multiply(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor, *, split: bool = False) -> None:
    """Write ``out [T, N]``, or ``[P, T, N]`` float32 where K is split into P parts that run in parallel."""
    from ..kernels.linear import linear_kernel

    tokens, k_in = x.shape
    n_out = weight.shape[0]
    part_blocks, parts = _split_sizes(k_in, n_out)
    x, weight = align_rows(x), weight.contiguous()
    addend = _addend(added, weight, n_out)
    few = tokens <= 16
    block_t = 32 if x.element_size() == 4 or k_in % 16 else 64
    if few:
        block_t = 16
    # Terms that float32 weights are split into: as many as the operands of x need.
    terms = 0 if weight.element_size() == 2 else {torch.bfloat16: 1, torch.float16: 2}.get(x.dtype, 3)
    constants = {
        "TERMS": terms,
        "ADDED": added is not None,
        "ORDER": SumOrder(split, part_blocks, part_blocks if split else -(-k_in // _BLOCK_K)),
        "TILE": LinearTile(_BLOCK_N, block_t, _BLOCK_K, stages=4 if few else 3),
        "ASM": x.is_cuda,
        "PDL": overlaps(x),
    }
    args = (MatrixRows(x, x.stride(0)), weight, addend, out, tokens, n_out, k_in)
    grid = (-(-tokens // block_t), -(-n_out // _BLOCK_N), parts if split else 1)
    launch(linear_kernel, grid, args, constants, num_warps=4)


def _addend(added: Tensor | None, unused: Tensor, n_out: int) -> MatrixRows:
    """Return what a kernel adds: one row for all tokens, a row for each, or ``unused`` if nothing is added."""
    if added is None:
        return MatrixRows(unused, 0)
    return MatrixRows(added.contiguous(), 0 if added.dim() == 1 else n_out)


def _in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product from library calls that differ in nothing but the values."""
    tokens, k_in = x.shape
    lanes = _LANES[weight.element_size()]
    count = -(-tokens // lanes)
    # Copied: a library also looks at addresses.
    rows = weight.new_empty(count * lanes, k_in)
    rows[:tokens] = x
    rows[tokens:] = 0
    products = weight.new_empty(count, weight.shape[0], lanes)
    for block, product in zip(rows.view(count, lanes, k_in), products, strict=True):
        torch.mm(weight, block.t(), out=product)
    return products.transpose(1, 2).reshape(-1, weight.shape[0])[:tokens]


def _split_sizes(k_in: int, n_out: int) -> tuple[int, int]:
    """Return the blocks of K in a part and the number of parts: the order of every sum."""
    blocks, tiles = -(-k_in // _BLOCK_K), -(-n_out // _BLOCK_N)
    part_blocks = max(-(-blocks * tiles // _PROGRAMS), -(-blocks // _PARTS))
    return part_blocks, -(-blocks // part_blocks)


def _split_k(tokens: int, k_in: int, n_out: int) -> bool:
    """Return whether programs compute the parts of each sum in parallel."""
    return _split_sizes(k_in, n_out)[1] > 1 and power_at_least(tokens) * n_out <= _SPLIT_LIMIT


def _max_split_tokens(tokens: int, n_out: int) -> int:
    """Return the most tokens, up to ``tokens``, whose sums are split into parts."""
    if n_out > _SPLIT_LIMIT:
        return 0
    return min(tokens, 1 << (_SPLIT_LIMIT // n_out).bit_length() - 1)


def _sums(tokens: int, k_in: int, n_out: int) -> Buffers:
    parts = _split_sizes(k_in, n_out)[1]
    return {"sums": ((parts, tokens, n_out), torch.float32)} if parts > 1 else {}


def _gate_sums(tokens: int, k_in: int) -> Buffers:
    """Return the buffer of a gate's logits, in parts that ``gate_rows_kernel`` adds."""
    parts = _split_sizes(k_in, 1)[1] if _split_k(tokens, k_in, 1) else 1
    return {"sums": ((parts, tokens, 1), torch.float32)}


def _gated_rows(tokens: int, width: int) -> Buffers:
    return {"rows": ((tokens, width), torch.float32)}


def _result(tokens: int, n_out: int, dtype: torch.dtype | None) -> Buffers:
    return {} if dtype is None else {"out": ((tokens, n_out), dtype)}


def _check(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor | None) -> None:
    allowed = {torch.float32} | ({x.dtype} & {torch.bfloat16, torch.float16})
    if weight.dim() != 2 or weight.dtype not in allowed:
        raise InputError(
            f"linear: weight is {tuple(weight.shape)} {weight.dtype}, allowed with x of {x.dtype}: [N, K] of "
            f"{' or '.join(sorted(map(str, allowed)))}"
        )
    n_out, k_in = weight.shape
    tokens = x.shape[0]
    if x.dim() != 2 or x.shape[1] != k_in or not x.is_floating_point():
        raise InputError(f"linear: x is {tuple(x.shape)} {x.dtype}, allowed: [T, {k_in}] floating, for this weight")
    if added is not None and (tuple(added.shape) not in ((n_out,), (tokens, n_out)) or not added.is_floating_point()):
        raise InputError(
            f"linear: added is {tuple(added.shape)} {added.dtype}, allowed: floating ({n_out},) or ({tokens}, {n_out})"
        )
    if out is not None and (tuple(out.shape) != (tokens, n_out) or not out.is_contiguous()):
        raise InputError(f"linear: out is {tuple(out.shape)}, allowed: contiguous ({tokens}, {n_out})")
