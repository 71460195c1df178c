"""The CPU experts kernel: grouped by expert, weights decoded a tile at a time, any format.

For the rows of one expert, with A the dtype of x and C = bfloat16 if A is bfloat16, else float32::

    q  = A(x * input_weight)
    gu = C(tile(gate_up) @ q.T) * row_scale + bias      tile in C, sums in float32, rounded to C by the library
    h  = A(activation(gu))                              float32
    y  = C(tile(down) @ h.T) * row_scale + bias         float32

The CPU library packs its right operand on each call, so the right one is the smaller, the tokens; but in bfloat16
without AMX it reads weights on the right in place, in half the time for few rows (EPYC with AVX512_BF16, November
2026). A tile is at most 4 million weights, so no decoded copy of the layer exists.

``kernels.cpu_fused`` multiplies bfloat16 weights in place where it runs; C is float32 then. Each of the many library
calls of a layer waits for its slowest thread; tasks of that kernel do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from ...adapters import AdapterMatrices
from ...formats.payload import Payload
from ...ops.activation import activate
from ...problem import ExpertsProblem
from ...runtime.memory import Memory, Regions
from ...types import ActivationSpec, ContiguousBatch, ExpertWeights
from ..base import ExpertKernel, PackedWeights, map_tensors, refuse_codes, refuse_fast
from .decode import CPU_FORMATS, REORDERED_FORMATS, CodeMatrix, PlainMatrix, Scratch, pack_matrix
from .panels import FusedMatrix, as_fused, missing_requirement, scratch_bytes

__all__ = ["CpuExperts", "CpuGrouped", "add_changes", "cut_rows", "fast_activate", "starts_of", "tokens_of"]

# Weights in one decoded tile, 8 MiB of bfloat16: each call of the CPU library costs about 30 microseconds whatever
# its size, so tiles that stay in the second-level cache lose more than they save (Xeon with AMX, November 2026).
_TILE = 1 << 22
# Rows from which on the library is slower in bfloat16 than in float32 with the conversion, on a CPU with AVX2 (two
# cores of a Zen 3 EPYC, November 2026: 1.4 and 3.1 ms at 4 rows, 2.6 and 3.5 at 8, 5.0 and 2.4 at 12).
_FLOAT32_ROWS = 9
_HAS_TILES = bool(torch.cpu._is_amx_tile_supported())  # pyright: ignore[reportPrivateUsage]
_Spans = list[tuple[int, slice]]  # experts and their rows
_CHUNK_ROWS = 512  # rows with intermediate values in memory at once, unless one expert has more


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuExperts(PackedWeights):
    """Both matrices as the CPU decodes them; torch allocates the memory of a batch.

    fused: ``kernels.cpu_fused`` may multiply BF16 weights in place.
    """

    gate_up: PlainMatrix | CodeMatrix
    down: PlainMatrix | CodeMatrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: ActivationSpec
    fused: bool

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]``; rows of dropped assignments are not written.

        float32, but bfloat16 where a bfloat16 product is the result as it is: half the fresh memory, same bits.
        """
        refuse_codes(batch, CpuGrouped.name)
        finished = self.down.row_scale is None and self.down_bias is None
        exact = torch.bfloat16 if finished and batch.x.dtype == torch.bfloat16 else torch.float32
        rows = torch.empty(batch.source.numel(), self.down.shape[1], dtype=exact, device=batch.x.device)
        fused = self._as_fused() if self.fused and batch.x.dtype == torch.bfloat16 else None
        with torch.inference_mode():
            if fused is None:
                self._run_library(batch, rows)
            else:
                self._run_fused(batch, rows, *fused)
        return rows

    def _run_library(self, batch: ContiguousBatch, rows: Tensor) -> None:
        chunks = cut_rows(batch)
        longest = max((chunk.stop - chunk.start for chunk, _ in chunks), default=0)
        buffer = torch.empty(longest, self.gate_up.shape[1], dtype=torch.float32, device=batch.x.device)
        scratch = _scratch(self)
        compute = torch.bfloat16 if batch.x.dtype == torch.bfloat16 else torch.float32
        for chunk, spans in chunks:
            x = tokens_of(batch, chunk)
            gate_up = buffer[: x.shape[0]]
            _project(self.gate_up, self.gate_up_bias, x.to(compute), spans, gate_up, scratch)
            add_changes(batch, "gate_up", chunk, spans, x, gate_up)
            hidden = fast_activate(gate_up, self.activation).to(x.dtype)
            _project(self.down, self.down_bias, hidden.to(compute), spans, rows[chunk], scratch)
            add_changes(batch, "down", chunk, spans, hidden, rows[chunk])

    def _run_fused(self, batch: ContiguousBatch, rows: Tensor, gate_up: FusedMatrix, down: FusedMatrix) -> None:
        for chunk, spans in cut_rows(batch):
            x = tokens_of(batch, chunk)
            experts, starts = starts_of(spans)
            inner = gate_up.multiply(x, experts, starts)
            add_changes(batch, "gate_up", chunk, spans, x, inner)
            hidden = fast_activate(inner, self.activation).to(x.dtype)
            result = down.multiply(hidden, experts, starts)
            add_changes(batch, "down", chunk, spans, hidden, result)
            rows[chunk].copy_(result)

    def _as_fused(self) -> tuple[FusedMatrix, FusedMatrix] | None:
        """Return both matrices as ``kernels.cpu_fused`` reads them in place, or None where it cannot."""
        first = as_fused(self.gate_up, self.gate_up_bias)
        second = as_fused(self.down, self.down_bias)
        return None if first is None or second is None else (first, second)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> CpuExperts:
        experts = replace(self, gate_up=self.gate_up.map_tensors(change), down=self.down.map_tensors(change))
        return map_tensors(experts, change, "gate_up_bias", "down_bias")


class CpuGrouped(ExpertKernel):
    """Any weight format on any CPU torch runs on; activations stay in the dtype of x.

    Runs with the same thread count give the same bits. They may depend on how many rows an expert
    gets: the CPU library picks its kernel by the row count.
    """

    name = "cpu_grouped"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other devices, quantised activations and unknown formats."""
        if problem.device.kind != "cpu":
            return f"the device is {problem.device.kind}; supported: cpu"
        if problem.activation_format != problem.dtype:
            return (
                f"activation format {problem.activation_format} was requested; supported: {problem.dtype}, the layer's "
                "dtype"
            )
        known = [known.name for known in CPU_FORMATS]
        for form in problem.formats:
            if form not in known:
                return f"the weights are {form}; supported: {', '.join(known)}"
        return refuse_fast(problem)

    def repacks(self, weight_format: str, activation_format: str) -> bool:
        """Return whether the CPU layout has the codes in another order."""
        return weight_format in {known.name for known in REORDERED_FORMATS}

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Tiles, plus the rows of the largest batch all routed to one expert."""
        hidden, intermediate = problem.hidden, problem.intermediate
        # Indices and bfloat16 values, 2 bytes a weight each, and for float32 activations the pieces and their join.
        longest = max(hidden, intermediate)
        threads = max(problem.device.threads, torch.get_num_threads())
        tile = max(12 * max(_TILE, longest + 256), threads * scratch_bytes(longest))
        # Per row: x gathered, arranged and transposed, gate_up in two precisions, its activation, the result.
        row = 4 * (4 * hidden + (2 * problem.parts + 4) * intermediate)
        return {"tile": tile, "rows": max(1, problem.rows) * row}

    def pack(self, weights: ExpertWeights[Payload], problem: ExpertsProblem) -> CpuExperts:
        """Share or re-lay the codes, one expert at a time, and convert biases to float32.

        Plain numbers are rounded to bfloat16 for bfloat16 tokens. Raises
        BadScaleError for scales or codes the format forbids.
        """
        experts = weights.down.shape[0]
        gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
        rounded = torch.bfloat16 if problem.dtype == "bf16" else None
        return CpuExperts(
            gate_up=pack_matrix(weights.gate_up, "gate_up", rounded),
            down=pack_matrix(weights.down, "down", rounded),
            gate_up_bias=None if gate_up_bias is None else gate_up_bias.reshape(experts, -1).float().contiguous(),
            down_bias=None if down_bias is None else down_bias.float().contiguous(),
            activation=problem.activation,
            fused=missing_requirement() is None,
        )


def _project(
    matrix: PlainMatrix | CodeMatrix, bias: Tensor | None, x: Tensor, spans: _Spans, out: Tensor, scratch: Scratch
) -> None:
    """Write ``x [r, K] @ matrix[e].T * row_scale + bias`` of every (expert, rows) of ``spans`` to ``out``."""
    x = matrix.arrange(x)
    for expert, span in spans:
        rows = x[span]
        if rows.shape[0] >= _FLOAT32_ROWS and torch.backends.cpu.get_cpu_capability() == "AVX2":
            rows = rows.float()
        product = _product(matrix, expert, rows, scratch)
        # In the dtype of ``out``.
        if matrix.row_scale is None:
            out[span].copy_(product)
        else:
            torch.mul(product, matrix.row_scale[expert], out=out[span])
        if bias is not None:
            out[span].add_(bias[expert])


def _product(matrix: PlainMatrix | CodeMatrix, expert: int, rows: Tensor, scratch: Scratch) -> Tensor:
    """Return ``rows @ matrix[expert].T``, decoded a tile at a time."""
    count, width = rows.shape[0], matrix.shape[1]
    step = matrix.tile_rows(rows.dtype, _TILE)
    tokens_left = rows.dtype == torch.bfloat16 and not _HAS_TILES
    product = rows.new_empty(count, width) if tokens_left else rows.new_empty(width, count).t()
    tokens = rows if tokens_left else rows.t().contiguous()
    for begin in range(0, width, step):
        tile = slice(begin, min(begin + step, width))
        weights = matrix.tile(expert, tile, rows.dtype, scratch)
        if tokens_left:
            torch.mm(tokens, weights.t(), out=product[:, tile])
        elif count > 1:
            torch.mm(weights, tokens, out=product.t()[tile])
        else:  # a product of matrix and vector reads the weights faster
            torch.mv(weights, tokens[:, 0], out=product[0, tile])
    return product


def fast_activate(inner: Tensor, spec: ActivationSpec) -> Tensor:
    """Return ``activate`` of ``inner [r, P * I]``; SwiGLU in float32 instead of float64, which is several times faster.

    The two differ by a few units in the last place of float32.
    """
    if spec.kind != "swiglu":
        return activate(inner.view(inner.shape[0], 2 if spec.gated else 1, -1), spec)
    gate, up = inner.chunk(2, dim=-1)
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return functional.silu(gate).mul_(up)


def cut_rows(batch: ContiguousBatch) -> list[tuple[slice, _Spans]]:
    """Cut the rows of ``batch`` into chunks of at most ``_CHUNK_ROWS``, or of one expert, with the spans of experts.

    Rows of a span are counted from the first of their chunk.
    """
    cuts: list[tuple[slice, _Spans]] = []
    start, spans = 0, _Spans()
    for expert, (first, last) in enumerate(pairwise(batch.expert_offsets.tolist())):
        if spans and last - start > _CHUNK_ROWS:
            cuts.append((slice(start, first), spans))
            start, spans = first, _Spans()
        if last > first:
            spans.append((expert, slice(first - start, last - start)))
    if spans:
        cuts.append((slice(start, start + spans[-1][1].stop), spans))
    return cuts


def tokens_of(batch: ContiguousBatch, span: slice) -> Tensor:
    """Return the tokens of rows ``span``, times their input weights where there are any."""
    x = batch.x.index_select(0, batch.source[span])
    return x if batch.input_weights is None else (x.float() * batch.input_weights[span, None]).to(x.dtype)


def add_changes(batch: ContiguousBatch, product: str, chunk: slice, spans: _Spans, x: Tensor, out: Tensor) -> None:
    """Add the adapters' changes of ``x [r, K]``, the rows ``chunk``, to ``out``. product: gate_up or down."""
    if batch.adapters is None:
        return
    matrices: AdapterMatrices = getattr(batch.adapters.packed, product)
    matrices.add_to(out, x, batch.adapters.ids[batch.source[chunk]], spans)


def starts_of(spans: _Spans) -> tuple[Tensor, Tensor]:
    """Return the experts of ``spans``, and where the rows of each begin, for ``FusedMatrix.multiply``."""
    # LongTensor is on the CPU whatever torch's default device is.
    bounds = accumulate((span.stop - span.start for _, span in spans), initial=0)
    return torch.LongTensor([expert for expert, _ in spans]), torch.LongTensor([*bounds])


def _scratch(packed: CpuExperts) -> Scratch:
    """Return scratch memory for the largest tile of the two projections."""
    matrices = [matrix for matrix in (packed.gate_up, packed.down) if isinstance(matrix, CodeMatrix)]
    size = max((matrix.tile_rows(torch.bfloat16, _TILE) * matrix.stored_columns for matrix in matrices), default=0)
    return Scratch(size, max((matrix.stored_columns for matrix in matrices), default=0))
