"""Experts split over GPUs that read each other's memory, from tokens to weighted sums in one kernel.

The bits are those of ``split`` with the dispatcher ``symm_mem``: the steps are the same functions, and no bit of a row
depends on the rows beside it. Shape letters: T tokens of this rank, B the most of a rank, W ranks, K experts per token,
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
    """Sizes of a pass. wide, groups: of a token's codes and scales; inner_...: of those between the products."""

    world: int
    bound: int
    top_k: int
    slots: int
    wide: int
    groups: int
    inner: int
    inner_wide: int
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
            "sent/codes": ((self.bound, self.wide), codes),
            "sent/scales": ((self.bound, self.groups), torch.float32),
            "sent/ids": ((self.bound, self.top_k), torch.int32),
            "x": ((tokens, self.wide), codes),
            "scale": ((tokens, self.groups), torch.float32),
            "counters": ((self.counters(block_t),), torch.int32),
            "lists": ((self.slots, rows), torch.int32),
            "experts/middle": ((rows, self.inner), dtype),
            "experts/h/codes": ((rows, self.inner_wide), codes),
            "experts/h/scales": ((rows, self.inner_groups), torch.float32),
            "experts/rows": ((self.bound * self.top_k, self.width), dtype),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Mega:
    """One launch a pass, beside that of the shared expert, which comes before it."""

    parts: PipelineParts

    def __post_init__(self) -> None:
        if self.parts.after_expert is not None:
            raise InputError(
                "pipeline mega: found after_expert, which sees rows between two steps; in one kernel there is "
                "nothing between, take Overrides(pipeline='split')"
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
        """Return what ``Pipeline`` says."""
        added = shared() if shared else None
        if out is None:
            out = alloc(memory, "sum", tuple(x.shape), dtype, x.device)
        with step("mega", x.device):
            self.run(x, routing, memory or FreshMemory(x.device), out, added)
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
        """Do the first to the last of ``phases`` of a pass and write ``out [T, H]``.

        Several ranks of one process that run one after the other, as in Triton's interpreter, go through a phase each
        before the next one.
        """
        experts, reach = self._experts, self._reach
        ids, weights = row_contiguous(routing.topk_ids), row_contiguous(routing.topk_weights)
        peers = reach.peers_of(memory, ids.shape[0], x.device)
        if not peers.bound:
            return
        shape, on_gpu = self._shape(peers.bound, ids.shape[1]), x.is_cuda
        block_t, block_n = self._block_t(shape), self._block_n(shape)
        cut = CUTS[self.weight, block_t, block_n]
        _, rows_dtype = experts.output_spec(x.dtype)
        own = allocate(memory, shape.buffers(block_t, rows_dtype), x.device)
        x, added = row_contiguous(x), out if shared is None else row_contiguous(shared)
        words = (own["sent/codes"].view(torch.int32), own["x"].view(torch.int32))
        up, down, act, table = experts.gate_up, experts.down, experts.activation, reach.map
        programs = cut.programs * experts.machine.sms if on_gpu else 1
        args = (
            peers.head, peers.deltas, ids, weights, table.places, table.copies, table.load, table.recording,
            x, own["sent/codes"], words[0], own["sent/scales"], own["sent/ids"], own["x"], words[1], own["scale"],
            own["counters"], own["lists"], own["experts/middle"], own["experts/h/codes"], own["experts/h/scales"],
            *up.pointers, *down.pointers, own["experts/rows"], added, out,
            ids.numel(), peers.bound, ids.stride(0), weights.stride(0), table.num_experts, table.places.shape[1],
            peers.layer, peers.microseconds, peers.rank, peers.where["own"], peers.where["step"], peers.world,
            shape.slots, shape.counters(block_t),
            x.shape[1], x.stride(0), shape.wide, shape.groups, shape.inner, shape.inner_wide, shape.inner_groups,
            shape.width, *(_bands(each.layout, block_n) for each in (up, down)),
            *(_bands(each.layout, 64) for each in (up, down)), added.stride(0),
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
        """Return the rows of a unit, the weight rows of a piece, and whether tokens are pulled without asking."""
        shape = self._shape(tokens, self.parts.top_k)
        asked = prefetch_all(shape.world, shape.top_k, tokens)
        return frozenset({("mega", self._block_t(shape), self._block_n(shape), asked)})

    @property
    def weight(self) -> int:
        """What the weights are, a number of ``kernels/enums.py``."""
        return self._experts.gate_up.layout.weight

    @property
    def _experts(self) -> PackedExperts:
        assert isinstance(self.parts.experts, PackedExperts)
        return self.parts.experts

    @property
    def _reach(self) -> SymmMem:
        assert isinstance(self.parts.dispatcher, SymmMem)
        return self.parts.dispatcher

    def _shape(self, bound: int, top_k: int) -> _Shape:
        experts, table = self._experts, self._reach.map
        assert experts.activations is not None
        _, _, inner, hidden = experts.gate_up.layout.shape
        form, order = experts.activations, experts.gate_up.layout.row_order
        return _shape_of(form, order, (table.world_size, bound, top_k, table.width), hidden, inner)

    def _each(self, shape: _Shape) -> float:
        """Return the rows that an expert of this rank is likely to have."""
        return self._reach.rows(shape.bound, shape.top_k) / max(1, self._experts.gate_up.layout.shape[0])

    def _block_t(self, shape: _Shape) -> int:
        each = self._each(shape)
        return 16 if each <= 14 else 32 if each <= 40 or (self.weight, 64, 64) not in CUTS else 64

    def _block_n(self, shape: _Shape) -> int:
        """Return the weight rows of a task: fewer where there would be hardly a task for every program."""
        slots = self._experts.gate_up.layout.shape[0]
        hit = slots * (1 - (1 - 1 / max(1, slots)) ** self._reach.rows(shape.bound, shape.top_k))
        wide = hit * _bands(self._experts.gate_up.layout, 128)
        return 128 if wide >= WIDE * self._experts.machine.sms else 64

    def _constants(self, shape: _Shape, blocks: tuple[int, int, _Cut], peers: PeerBuffers) -> dict[str, Any]:
        block_t, block_n, cut = blocks
        experts = self._experts
        form, up, down, act = experts.activations, experts.gate_up, experts.down, experts.activation
        assert form is not None
        block_x, block_i = power_at_least(shape.wide, 128), power_at_least(shape.inner_wide, 128)
        words, block_c = shape.wide // 4, min(COLUMNS, power_at_least(shape.width, 32))
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

    def wide(columns: int) -> tuple[int, int]:
        most = form.padded_columns(columns, order)
        return most, -(-most // (form.group or most))

    return _Shape(*counts, *wide(hidden), inner, *wide(inner), hidden)


def _words(asked: PipelineQuery) -> bool:
    return asked.problem.spec.weight_format in ("mxfp4", "nvfp4")


def _slower(problem: Problem) -> str | None:
    """Return why ``split`` is taken where nobody asked, or None; all ranks say the same, whatever tokens they bring."""
    width, tokens, placed = problem.spec.expert_hidden_size, problem.limits.max_tokens, problem.placement
    spec, world = problem.spec, problem.world_size
    found = FASTER.get((spec.weight_format, world >= 4))
    if found is None:
        return f"measured too little with {spec.weight_format} weights; Overrides(pipeline='mega') takes it"
    least, most, rows = found
    most = min(most, rows * spec.num_experts // (spec.routing.top_k * world))
    if width < least or tokens > most:
        return (
            f"measured to be faster only for tokens from {least} wide and up to {most} of them on each of {world} "
            f"ranks with {spec.weight_format} weights; found {width} and {tokens}; Overrides(pipeline='mega') takes it"
        )
    if placed is not None and placed.spare:
        return (
            f"found {placed.spare} spare slots, so experts may move, which its kernel does not expect; "
            "Overrides(pipeline='mega') takes it"
        )
    return None


class MegaKind:
    """The row of the table: experts in MXFP4, NVFP4 or FP8 split over Hopper GPUs of one host."""

    name = "mega"
    does = "one kernel over all ranks"

    def refuse(self, asked: PipelineQuery) -> str | None:
        """Refuse other dispatchers, formats and GPUs, what its kernel lacks, and who did not ask."""
        problem, device = asked.problem, asked.problem.device
        rule, formats = problem.spec.routing, (problem.spec.weight_format, problem.activation_format)
        if device.kind != "cuda":
            return f"asked for {device.kind}; it is one kernel for CUDA GPUs"
        if asked.dispatcher.name != "symm_mem":
            return (
                f"asked for the dispatcher {asked.dispatcher.name}; it does what symm_mem does, and nothing around it"
            )
        if problem.routed.mixed:
            return f"asked for weights in {format_names(problem.spec.formats)}; its kernel takes one format for both"
        if formats not in FORMATS or not asked.kernel.name.startswith("triton"):
            taken = ", ".join(f"{weights} with {activations}" for weights, activations in FORMATS)
            return f"asked for {formats[0]} weights with {formats[1]} activations; it takes {taken}"
        if not _words(asked) and problem.spec.expert_hidden_size % 16:
            return f"asked for tokens of {problem.spec.expert_hidden_size}; their codes are copied by sixteen"
        if device.capability != (9, 0):
            found = "an unknown GPU" if device.capability is None else "sm_{}{}".format(*device.capability)
            return f"found {found}; its programs are counted for sm_90, where all of them run at once"
        if rule.weight_on_input:
            return "asked for router weights on the input; it weights rows after the experts"
        if problem.combine != "exact":
            return f"asked for the combine {problem.combine}; each row goes back as it is"
        if problem.limits.max_tokens > MOST_TOKENS:
            return f"asked for {problem.limits.max_tokens:,} tokens of a rank; it has lists for {MOST_TOKENS:,}"
        return None if asked.pipeline == self.name else _slower(problem)

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return None: ranks that bring different numbers of tokens run the same kernel."""
        return None

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return nothing: units are chosen for the rank that brings the most tokens."""
        return ""

    def regions(self, asked: PipelineQuery) -> Regions:
        """Return those of a pass of ``max_tokens`` tokens on every rank."""
        problem, spec = asked.problem, asked.problem.spec
        placed, tokens = problem.placement, problem.limits.max_tokens
        assert placed is not None
        assert problem.activation_format is not None
        form, order = activation_format(problem.activation_format), REORDERED if _words(asked) else AS_IS
        counts = problem.world_size, tokens, spec.routing.top_k, placed.width
        shape = _shape_of(form, order, counts, spec.expert_hidden_size, asked.experts.intermediate)
        dtype = torch.bfloat16 if DTYPES[problem.dtype] == torch.bfloat16 else torch.float32
        inside = spec.latent_size is not None
        own = weighted_sum_regions(tokens, spec.expert_hidden_size, torch.float32) if inside else {}
        return own | sizes(shape.buffers(16, dtype))

    def build(self, parts: PipelineParts) -> Mega:
        """Return the pipeline. Raises InputError for ``after_expert``."""
        return Mega(parts=parts)
