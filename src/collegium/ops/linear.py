"""Rows times a weight, ``x @ weight.T``, where no row's bits depend on how many rows there are.

Libraries choose a kernel by the number of rows, so a token would get other bits in another batch, and another rank.

Shape letters: T tokens, K columns in, N columns out.
"""

import torch
from torch import Tensor

from ..errors import InputError
from ..formats.unquantised import DTYPES
from ..problem import Problem
from ..runtime.launch import align_rows, launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions, elementwise_max, with_prefix
from .buffers import Buffers, allocate, sizes
from .rms_norm import rms_norm_regions

__all__ = ["linear", "linear_regions", "regions_of", "sigmoid_gate"]

# K is cut into parts for as many programs, and into no more parts than that: numbers that stay when the GPU changes,
# because they decide the order of sums.
_PROGRAMS, _PARTS = 128, 32
_BLOCK_N, _BLOCK_K = 64, 64
# Values up to which parts are made side by side, in 32 MiB at most: beyond, the tiles of tokens are many enough.
_SPLIT_LIMIT = 1 << 18
# Rows of a block on a CPU. They are the lanes of the library's vectors, where all rows fare alike; with more, or as
# rows of the left operand, float32 rows at the edge of a thread's share got other bits (Xeon, AVX2 and AVX-512).
_LANES = {4: 16, 2: 32}


def linear_regions(tokens: int, k_in: int, n_out: int, out_dtype: torch.dtype | None) -> Regions:
    """Return the most bytes ``linear`` takes for any count of tokens up to ``tokens``; out_dtype None: it has an out.

    On a CUDA device; on a CPU none.
    """
    return sizes(_sums(_max_split_tokens(tokens, n_out), k_in, n_out) | _result(tokens, n_out, out_dtype))


def regions_of(problem: Problem) -> Regions:
    """Return those of a layer: of its router, latent projections and the shared expert's gate, with their norms."""
    spec, tokens = problem.spec, problem.limits.max_tokens
    hidden, inner = spec.hidden_size, spec.latent_size
    if problem.device.kind != "cuda":
        return {}
    regions = with_prefix("router", linear_regions(tokens, hidden, spec.num_experts, torch.float32))
    if spec.routing.input_norm_eps is not None:
        regions |= with_prefix("router", rms_norm_regions(tokens, hidden))
    if spec.latent_norm_eps is not None and inner is not None:
        regions |= with_prefix("latent", rms_norm_regions(tokens, inner))
    if inner is not None:
        regions |= with_prefix("latent/enter", linear_regions(tokens, hidden, inner, DTYPES[problem.dtype]))
        regions |= with_prefix("latent/leave", linear_regions(tokens, inner, hidden, None))
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
        made = _in_blocks(x, weight)
        if added is not None:
            made = made.float().add_(added)
        return made.to(weight.dtype) if out is None else out.copy_(made)
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ..kernels.linear import add_parts_kernel

    (tokens, k_in), n_out = x.shape, weight.shape[0]
    apart = _split_k(tokens, k_in, n_out)
    asked = _result(tokens, n_out, weight.dtype if out is None else None)
    room = allocate(memory, asked | (_sums(tokens, k_in, n_out) if apart else {}), x.device)
    out = room["out"] if out is None else out
    if tokens == 0:
        return out
    if not apart:
        _multiply(x, weight, added, out)
        return out
    sums = room["sums"]
    _multiply(x, weight, None, sums, apart=True)
    more, step = _added_rows(added, sums, n_out)
    block = min(power_at_least(n_out, 32), 128)
    constants = {"PARTS": sums.shape[0], "BLOCK": block, "ADDED": added is not None, "PDL": overlaps(x)}
    launch(add_parts_kernel, (-(-n_out // block), tokens), (sums, more, out, tokens, n_out, step), constants)
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
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ..kernels.linear import gate_rows_kernel

    (tokens, k_in), width = x.shape, rows.shape[1]
    room = allocate(memory, _gate_sums(tokens, k_in) | _gated_rows(tokens, width), x.device)
    sums, out = room["sums"], room["rows"]
    if tokens == 0:
        return out
    _multiply(x, gate, None, sums, apart=_split_k(tokens, k_in, 1))
    rows = row_contiguous(rows)
    # Few tokens are spread over more programs; with many of them a program does the sigmoid for more columns.
    block = min(power_at_least(width, 32), 2048 if tokens >= 64 else 256)
    args = (sums, rows, out, tokens, width, rows.stride(0))
    constants = {"PARTS": sums.shape[0], "BLOCK": block, "PDL": overlaps(x)}
    warps = max(1, min(4, block // 256))
    launch(gate_rows_kernel, (-(-width // block), tokens), args, constants, num_warps=warps, enable_fp_fusion=False)
    return out


def _multiply(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor, *, apart: bool = False) -> None:
    """Write ``out [T, N]``, or ``[P, T, N]`` float32 where the P parts of the sums are made apart."""
    from ..kernels.linear import linear_kernel

    (tokens, k_in), n_out = x.shape, weight.shape[0]
    each, parts = _split_sizes(k_in, n_out)
    x, weight = align_rows(x), weight.contiguous()
    more, step = _added_rows(added, weight, n_out)
    few, wide = tokens <= 16, x.element_size() == 4 or k_in % 16
    block_t = 16 if few else 32 if wide else 64
    terms = 0 if weight.element_size() == 2 else {torch.bfloat16: 1, torch.float16: 2}.get(x.dtype, 3)
    steps = each if apart else -(-k_in // _BLOCK_K)
    constants = {"TERMS": terms, "PART": apart, "EACH": each, "STEPS": steps, "ASM": x.is_cuda, "PDL": overlaps(x)}
    constants |= {"BLOCK_N": _BLOCK_N, "BLOCK_T": block_t, "BLOCK_K": _BLOCK_K, "STAGES": 4 if few else 3}
    constants["ADDED"] = added is not None
    args = (x, weight, more, out, tokens, n_out, k_in, x.stride(0), step)
    grid = (-(-tokens // block_t), -(-n_out // _BLOCK_N), parts if apart else 1)
    launch(linear_kernel, grid, args, constants, num_warps=4)


def _added_rows(added: Tensor | None, instead: Tensor, n_out: int) -> tuple[Tensor, int]:
    """Return what a kernel adds, ``instead`` where that is nothing, and how far its rows are apart, 0 for one row."""
    more = instead if added is None else added.contiguous()
    return more, 0 if added is None or more.dim() == 1 else n_out


def _in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product, made of calls of the library that differ in nothing but the values."""
    (tokens, k_in), lanes = x.shape, _LANES[weight.element_size()]
    count = -(-tokens // lanes)
    # Copied: a library also looks at addresses.
    rows = weight.new_empty(count * lanes, k_in)
    rows[:tokens], rows[tokens:] = x, 0
    products = weight.new_empty(count, weight.shape[0], lanes)
    for block, product in zip(rows.view(count, lanes, k_in), products, strict=True):
        torch.mm(weight, block.t(), out=product)
    return products.transpose(1, 2).reshape(-1, weight.shape[0])[:tokens]


def _split_sizes(k_in: int, n_out: int) -> tuple[int, int]:
    """Return how many blocks of K make a part, and how many parts there are: the order of every sum."""
    blocks, tiles = -(-k_in // _BLOCK_K), -(-n_out // _BLOCK_N)
    each = max(-(-blocks * tiles // _PROGRAMS), -(-blocks // _PARTS))
    return each, -(-blocks // each)


def _split_k(tokens: int, k_in: int, n_out: int) -> bool:
    """Return whether the parts of each sum are made by programs side by side."""
    return _split_sizes(k_in, n_out)[1] > 1 and power_at_least(tokens) * n_out <= _SPLIT_LIMIT


def _max_split_tokens(tokens: int, n_out: int) -> int:
    """Return the most tokens, up to ``tokens``, whose sums are made in parts."""
    return min(tokens, 1 << (_SPLIT_LIMIT // n_out).bit_length() - 1) if n_out <= _SPLIT_LIMIT else 0


def _sums(tokens: int, k_in: int, n_out: int) -> Buffers:
    parts = _split_sizes(k_in, n_out)[1]
    return {"sums": ((parts, tokens, n_out), torch.float32)} if parts > 1 else {}


def _gate_sums(tokens: int, k_in: int) -> Buffers:
    """Return the logits of a gate, in the parts that are added where they are read."""
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
            f"linear: weight is {tuple(weight.shape)} {weight.dtype}, allowed beside x of {x.dtype}: [N, K] of "
            f"{' or '.join(sorted(map(str, allowed)))}"
        )
    (n_out, k_in), tokens = weight.shape, x.shape[0]
    if x.dim() != 2 or x.shape[1] != k_in or not x.is_floating_point():
        raise InputError(f"linear: x is {tuple(x.shape)} {x.dtype}, allowed: [T, {k_in}] floating, for this weight")
    if added is not None and (tuple(added.shape) not in ((n_out,), (tokens, n_out)) or not added.is_floating_point()):
        raise InputError(
            f"linear: added is {tuple(added.shape)} {added.dtype}, allowed: floating ({n_out},) or ({tokens}, {n_out})"
        )
    if out is not None and (tuple(out.shape) != (tokens, n_out) or not out.is_contiguous()):
        raise InputError(f"linear: out is {tuple(out.shape)}, allowed: contiguous ({tokens}, {n_out})")
