"""Experts split over GPUs that read each other's memory, from tokens to weighted sums in one kernel.

The bits are those of ``split`` with the dispatcher ``symm_mem``: the steps are the same functions, and no bit of a row
depends on other rows. Shape letters: T tokens of this rank, B the most of a rank, W ranks, K experts per token,
H width, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError
from ..experts.triton.grouped import activation_bounds, activation_kind
from ..experts.triton.packed import PackedExperts
from ..formats.unquantised import DTYPES
from ..kernels.enums import E2M1_E4M3, E2M1_E8M0, E4M3_E4M3
from ..ops.buffers import allocate, sizes
from ..ops.permute import tile_count
from ..ops.quantize import AS_IS, REORDERED, activation_format
from ..ops.weighted_sum import weighted_sum_regions
from ..parallel.peers import prefetch_all
from ..parallel.symm_mem import SymmMem
from ..runtime.launch import launch, power_at_least, row_contiguous
from ..runtime.memory import FreshMemory, alloc
from ..runtime.profiler_ranges import step
from ..types import format_names

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from ..experts import Tiling
    from ..experts.triton.layout import Layout
    from ..ops.buffers import Buffers
    from ..ops.quantize import ActivationFormat
    from ..parallel.peers import PeerBuffers
    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import Routing
    from .base import PipelineParts, PipelineQuery

__all__ = ["COMBINE", "MOST_TOKENS", "PUBLISH", "PULL", "Mega", "MegaKind"]

PUBLISH, PULL, COMBINE = 1, 2, 3  # phases of the kernel
FORMATS = (("mxfp4", "fp8_token"), ("nvfp4", "fp8_token"), ("fp8_block", "fp8_group128"))
MOST_TOKENS = 4096  # of a rank: each expert has room for all ranks' assignments on its list
# Where it was the faster one in graphs of layers of V4-Flash's and V3's shapes, on two H200 (parallel_h200.csv) and on
# four H100 (parallel_h100.csv), also for more ranks: from tokens of that width on, up to so many of a rank, and as many
# rows of an expert.
FASTER = {
    ("mxfp4", False): (7168, 8, 16), ("mxfp4", True): (7168, 128, 16),
    ("fp8_block", False): (4096, 128, 8), ("fp8_block", True): (4096, 128, 6),
}  # fmt: skip


class _Cut(NamedTuple):
    """How products are cut: programs of a multiprocessor, all at once; stages of copies; K blocks of a stage."""

    programs: int
    stages: int
    depth: int


# What a GPU is to decide; no bit of the output depends on any of them.
# What are the weights, how many rows has a unit, and how many weight rows a piece?
CUTS = {
    (E2M1_E8M0, 16, 64): _Cut(3, 4, 2),
    (E2M1_E8M0, 16, 128): _Cut(3, 3, 2),
    (E2M1_E8M0, 32, 64): _Cut(3, 4, 2),
    (E2M1_E8M0, 32, 128): _Cut(3, 4, 1),
    (E2M1_E8M0, 64, 64): _Cut(2, 4, 2),
    (E2M1_E8M0, 64, 128): _Cut(2, 4, 1),
    # In pieces of 128 rows two operands a weight take the registers of a third program, and those of units of 64.
    (E2M1_E4M3, 16, 64): _Cut(3, 4, 2),
    (E2M1_E4M3, 16, 128): _Cut(2, 3, 2),
    (E2M1_E4M3, 32, 64): _Cut(3, 4, 2),
    (E2M1_E4M3, 32, 128): _Cut(2, 4, 1),
    (E4M3_E4M3, 16, 64): _Cut(2, 5, 2),
    (E4M3_E4M3, 16, 128): _Cut(2, 3, 2),
    (E4M3_E4M3, 32, 64): _Cut(2, 5, 1),
    (E4M3_E4M3, 32, 128): _Cut(2, 4, 1),
}
REGISTERS = {3: 168}  # of a thread, so that as many programs fit
CHUNK = 2  # tokens that are listed and pulled together
WARPS = 4
WIDE = 3  # pieces of 128 weight rows for each multiprocessor from which on they are the faster ones, not 64
COLUMNS = 1024  # of a token that are summed together
QUANTISED = 2048  # values between the products that a program quantises together


class _Shape(NamedTuple):
    """Sizes of a pass. columns, groups: of a token's codes and scales; inner_...: of those between the products."""

    world: int
    bound: int
    top_k: int
    slots: int
    columns: int
    groups: int
    inner: int
    inner_columns: int
    inner_groups: int
    width: int

    @property
    def rows(self) -> int:
        """Assignments of all ranks."""
        return self.world * self.bound * self.top_k

    def counters(self, block_t: int) -> int:
        """Return how many words of counters units of ``block_t`` rows need."""
        return 3 + self.slots + tile_count(self.rows, self.slots, block_t)

    def buffers(self, block_t: int, dtype: torch.dtype) -> Buffers:
        """Return all buffers of a pass whose rows are of ``dtype``, by their regions' names."""
        tokens, rows = self.world * self.bound, self.rows
        codes = torch.float8_e4m3fn
        return {
            "sent/codes": ((self.bound, self.columns), codes),
            "sent/scales": ((self.bound, self.groups), torch.float32),
            "sent/ids": ((self.bound, self.top_k), torch.int32),
            "x": ((tokens, self.columns), codes),
            "scale": ((tokens, self.groups), torch.float32),
            "counters": ((self.counters(block_t),), torch.int32),
            "lists": ((self.slots, rows), torch.int32),
            "experts/middle": ((rows, self.inner), dtype),
            "experts/h/codes": ((rows, self.inner_columns), codes),
            "experts/h/scales": ((rows, self.inner_groups), torch.float32),
            "experts/rows": ((self.bound * self.top_k, self.width), dtype),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Mega:
    """One launch a pass, after the launches of the shared expert."""

    parts: PipelineParts

    def __post_init__(self) -> None:
        if self.parts.after_expert is not None:
            raise InputError(
                "pipeline mega: found after_expert, which reads rows between two steps, and one kernel has no such "
                "point; use Overrides(pipeline='split')"
            )

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype,
        shared: Callable[[], Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sums ``[T, H]``; see ``Pipeline``."""
        shared_rows = None if shared is None else shared()
        if out is None:
            out = alloc(memory, "sum", tuple(x.shape), dtype, x.device)
        with step("mega", x.device):
            self.run(x, routing, memory or FreshMemory(x.device), out, shared_rows)
        return out

    def run(
        self,
        x: Tensor,
        routing: Routing,
        memory: Memory,
        out: Tensor,
        shared: Tensor | None,
        *,
        phases: tuple[int, int] = (PUBLISH, COMBINE),
    ) -> None:
        """Run ``phases``, from the first to the last, of a pass and write ``out [T, H]``.

        Ranks in one process that run one after the other, as in Triton's interpreter, each run one phase before the
        next phase begins.
        """
        experts, dispatcher = self._experts, self._dispatcher
        ids, weights = row_contiguous(routing.topk_ids), row_contiguous(routing.topk_weights)
        peers = dispatcher.peers_of(memory, ids.shape[0], x.device)
        if not peers.bound:
            return
        shape, on_gpu = self._shape(peers.bound, ids.shape[1]), x.is_cuda
        block_t, block_n = self._block_t(shape), self._block_n(shape)
        cut = CUTS[self.weight, block_t, block_n]
        _, rows_dtype = experts.output_spec(x.dtype)
        buf = allocate(memory, shape.buffers(block_t, rows_dtype), x.device)
        x, added = row_contiguous(x), out if shared is None else row_contiguous(shared)
        words = (buf["sent/codes"].view(torch.int32), buf["x"].view(torch.int32))
        up, down, act, table = experts.gate_up, experts.down, experts.activation, dispatcher.expert_map
        programs = cut.programs * experts.machine.sms if on_gpu else 1
        args = (
            peers.head, peers.deltas, ids, weights,
            table.physical_ids, table.replica_counts, table.load, table.recording,
            x, buf["sent/codes"], words[0], buf["sent/scales"], buf["sent/ids"], buf["x"], words[1], buf["scale"],
            buf["counters"], buf["lists"], buf["experts/middle"], buf["experts/h/codes"], buf["experts/h/scales"],
            *up.pointers, *down.pointers, buf["experts/rows"], added, out,
            ids.numel(), peers.bound, ids.stride(0), weights.stride(0), table.num_experts, table.physical_ids.shape[1],
            peers.layer, peers.timeout_us, peers.rank, peers.flag_offset, peers.flag_stride, peers.world,
            shape.slots, shape.counters(block_t),
            x.shape[1], x.stride(0), shape.columns, shape.groups, shape.inner, shape.inner_columns, shape.inner_groups,
            shape.width, *(_bands(product.layout, block_n) for product in (up, down)),
            *(_bands(product.layout, 64) for product in (up, down)), added.stride(0),
            *activation_bounds(act),
        )  # fmt: skip
        constants = {"FIRST": phases[0], "LAST": phases[1]} | self._constants(shape, (block_t, block_n, cut), peers)
        constants |= {"SHARED": shared is not None, "ASM": on_gpu}
        # So that a grid that does not fit is an error and no program waits for one that never starts.
        options = {"launch_cooperative_grid": True} if on_gpu else {}
        options |= {"maxnreg": REGISTERS[cut.programs]} if on_gpu and cut.programs in REGISTERS else {}
        # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
        from ..kernels.mega import mega_kernel

        launch(mega_kernel, (programs,), args, constants, num_warps=WARPS, **options)

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the rows of a unit, the weight rows of a piece, and whether all tokens are pulled."""
        shape = self._shape(tokens, self.parts.top_k)
        prefetch = prefetch_all(shape.world, shape.top_k, tokens)
        return frozenset({("mega", self._block_t(shape), self._block_n(shape), prefetch)})

    @property
    def weight(self) -> int:
        """What the weights are, a number of ``kernels/enums.py``."""
        return self._experts.gate_up.layout.weight

    @property
    def _experts(self) -> PackedExperts:
        assert isinstance(self.parts.experts, PackedExperts)
        return self.parts.experts

    @property
    def _dispatcher(self) -> SymmMem:
        assert isinstance(self.parts.dispatcher, SymmMem)
        return self.parts.dispatcher

    def _shape(self, bound: int, top_k: int) -> _Shape:
        experts, table = self._experts, self._dispatcher.expert_map
        assert experts.activations is not None
        _, _, inner, hidden = experts.gate_up.layout.shape
        form, order = experts.activations, experts.gate_up.layout.row_order
        return _shape_of(form, order, (table.world_size, bound, top_k, table.width), hidden, inner)

    def _rows_per_expert(self, shape: _Shape) -> float:
        """Return the expected number of rows of an expert of this rank."""
        return self._dispatcher.rows(shape.bound, shape.top_k) / max(1, self._experts.gate_up.layout.shape[0])

    def _block_t(self, shape: _Shape) -> int:
        rows_per_expert = self._rows_per_expert(shape)
        if rows_per_expert <= 14:
            return 16
        if rows_per_expert <= 40 or (self.weight, 64, 64) not in CUTS:
            return 32
        return 64

    def _block_n(self, shape: _Shape) -> int:
        """Return the weight rows of a task: fewer where there would be hardly a task for every program."""
        slots = self._experts.gate_up.layout.shape[0]
        active_experts = slots * (1 - (1 - 1 / max(1, slots)) ** self._dispatcher.rows(shape.bound, shape.top_k))
        pieces = active_experts * _bands(self._experts.gate_up.layout, 128)
        return 128 if pieces >= WIDE * self._experts.machine.sms else 64

    def _constants(self, shape: _Shape, blocks: tuple[int, int, _Cut], peers: PeerBuffers) -> dict[str, Any]:
        block_t, block_n, cut = blocks
        experts = self._experts
        form, up, down, act = experts.activations, experts.gate_up, experts.down, experts.activation
        assert form is not None
        block_x, block_i = power_at_least(shape.columns, 128), power_at_least(shape.inner_columns, 128)
        words, block_c = shape.columns // 4, min(COLUMNS, power_at_least(shape.width, 32))
        block_w = min(2048, power_at_least(words, 32))
        block_k = up.layout.block_k
        return {
            "TOP_K": shape.top_k, "BLOCK_K": power_at_least(shape.top_k), "PEERS": power_at_least(peers.world),
            "BLOCK_E": power_at_least(shape.slots, 16), "CHUNK": CHUNK, "BLOCK_X": block_x, "BLOCK_W": block_w,
            "STEPS": -(-words // block_w), "BLOCK_G": power_at_least(shape.groups), "BLOCK_I": block_i,
            "AT_ONCE": max(1, min(block_t, QUANTISED // block_i)), "X_GROUP": form.group or block_x,
            "INNER_GROUP": form.group or block_i, "POWER": form.power, "REORDER": up.layout.row_order == REORDERED,
            "WEIGHT": up.layout.weight, "X_SCALE": _scales(shape.groups), "INNER_SCALE": _scales(shape.inner_groups),
            "BIAS": up.bias is not None, "PARTS": up.layout.shape[1], "KIND": activation_kind(act),
            "HAS_LIMIT": act.limit is not None, "UP_BLOCKS": up.layout.k_blocks, "DOWN_BLOCKS": down.layout.k_blocks,
            "UP_EVEN": shape.width % block_k == 0, "DOWN_EVEN": shape.inner % block_k == 0,
            "WARPS": WARPS, "BLOCK_N": block_n, "BLOCK_T": block_t, "BLOCK": block_k,
            "UP_DEPTH": gcd(cut.depth, up.layout.k_blocks), "DOWN_DEPTH": gcd(cut.depth, down.layout.k_blocks),
            "STAGES": cut.stages,
            "ALL": prefetch_all(peers.world, shape.top_k, peers.bound),
            "PLACED": 16 if shape.width % 16 == 0 else 1, "BLOCK_C": block_c, "EVEN": shape.width % 16 == 0,
            "FULL": shape.width % block_c == 0,
        }  # fmt: skip


def _scales(groups: int) -> int:
    """Return X_SCALE of a product whose rows have so many scales."""
    return 1 if groups > 1 else 2


def _bands(layout: Layout, block_n: int) -> int:
    """Return the pieces of ``block_n`` weight rows of a product: both parts of a weight are in each."""
    matrices, rows = layout.operand_rows
    return -(-matrices * rows // block_n)


def _shape_of(form: ActivationFormat, order: int, counts: tuple[int, int, int, int], hidden: int, inner: int) -> _Shape:
    """Return the sizes of a pass; counts: W, B, K and slots. order: of the columns of codes."""

    def columns_and_groups(columns: int) -> tuple[int, int]:
        padded = form.padded_columns(columns, order)
        return padded, -(-padded // (form.group or padded))

    return _Shape(*counts, *columns_and_groups(hidden), inner, *columns_and_groups(inner), hidden)


def _has_4bit_weights(query: PipelineQuery) -> bool:
    return query.problem.spec.weight_format in ("mxfp4", "nvfp4")


def _slower(problem: Problem) -> str | None:
    """Return why ``split`` runs unless this pipeline is forced, or None; all ranks get the same answer."""
    spec, world, placement = problem.spec, problem.world_size, problem.placement
    hidden, tokens = spec.expert_hidden_size, problem.limits.max_tokens
    measured = FASTER.get((spec.weight_format, world >= 4))
    if measured is None:
        return f"measured too little with {spec.weight_format} weights; Overrides(pipeline='mega') takes it"
    min_hidden, max_tokens, max_rows = measured
    max_tokens = min(max_tokens, max_rows * spec.num_experts // (spec.routing.top_k * world))
    if hidden < min_hidden or tokens > max_tokens:
        return (
            f"measured to be faster only for a hidden size from {min_hidden} and up to {max_tokens} tokens on each of "
            f"{world} ranks with {spec.weight_format} weights; found {hidden} and {tokens}; "
            "Overrides(pipeline='mega') takes it"
        )
    if placement is not None and placement.spare:
        return (
            f"found {placement.spare} spare slots, so experts may move, which its kernel does not support; "
            "Overrides(pipeline='mega') takes it"
        )
    return None


class MegaKind:
    """Experts in MXFP4, NVFP4 or FP8, split over Hopper GPUs of one host."""

    name = "mega"
    description = "one kernel over all ranks"
    fills_gpu = True

    def refuse(self, query: PipelineQuery) -> str | None:
        """Refuse other dispatchers, formats and GPUs, what the kernel lacks, and where it is slower unless forced."""
        problem, device = query.problem, query.problem.device
        rule = problem.spec.routing
        weights, activations = problem.spec.weight_format, problem.activation_format
        if device.kind != "cuda":
            return f"the device is {device.kind}; it is one kernel for CUDA GPUs"
        if query.dispatcher.name != "symm_mem":
            return f"the dispatcher is {query.dispatcher.name}; it replaces symm_mem, without a wrapper"
        if problem.routed.mixed:
            return f"the weights are {format_names(problem.spec.formats)}; its kernel takes one format for both"
        if (weights, activations) not in FORMATS or not query.kernel.name.startswith("triton"):
            supported = ", ".join(f"{first} with {second}" for first, second in FORMATS)
            return f"the weights are {weights} with {activations} activations; it takes {supported}"
        if not _has_4bit_weights(query) and problem.spec.expert_hidden_size % 16:
            return f"the hidden size is {problem.spec.expert_hidden_size}; its codes are copied by sixteen"
        if device.capability != (9, 0):
            gpu = "an unknown GPU" if device.capability is None else "sm_{}{}".format(*device.capability)
            return f"found {gpu}; its grid is sized for sm_90, where all programs run at once"
        if rule.weight_on_input:
            return "router weights are on the input; it weights rows after the experts"
        if problem.combine != "exact":
            return f"the combine is {problem.combine}; it returns each row unchanged"
        if problem.limits.max_tokens > MOST_TOKENS:
            return f"a rank may have {problem.limits.max_tokens:,} tokens; its lists hold {MOST_TOKENS:,}"
        return None if query.pipeline == self.name else _slower(problem)

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return None: ranks with different numbers of tokens run the same kernel."""
        return None

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return nothing: units are chosen for the rank with the most tokens."""
        return ""

    def regions(self, query: PipelineQuery) -> Regions:
        """Return the regions of a pass of ``max_tokens`` tokens on every rank."""
        problem, spec = query.problem, query.problem.spec
        tokens = problem.limits.max_tokens
        assert problem.placement is not None
        assert problem.activation_format is not None
        form = activation_format(problem.activation_format)
        order = REORDERED if _has_4bit_weights(query) else AS_IS
        counts = problem.world_size, tokens, spec.routing.top_k, problem.placement.width
        shape = _shape_of(form, order, counts, spec.expert_hidden_size, query.experts.intermediate)
        dtype = torch.bfloat16 if DTYPES[problem.dtype] == torch.bfloat16 else torch.float32
        regions: Regions = {}
        if spec.latent_size is not None:
            regions |= weighted_sum_regions(tokens, spec.expert_hidden_size, torch.float32)
        return regions | sizes(shape.buffers(16, dtype))

    def build(self, parts: PipelineParts) -> Mega:
        """Return the pipeline. Raises InputError for ``after_expert``."""
        return Mega(parts=parts)
