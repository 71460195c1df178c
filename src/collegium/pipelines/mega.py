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

from ..adapters import TokenAdapters
from ..errors import InputError
from ..experts.triton.grouped import operand_format, projections
from ..experts.triton.packed import PackedExperts
from ..experts.triton.table import TritonKernel
from ..formats.unquantised import DTYPES
from ..kernels.arguments import Tile
from ..kernels.enums import (
    E2M1_E4M3,
    E2M1_E8M0,
    E4M3_E4M3,
    PHASE_COMBINE,
    PHASE_PUBLISH,
    X_BLOCK_SCALE,
    X_ROW_SCALE,
)
from ..kernels.peer_arguments import (
    ColumnBlock,
    CombineBuffers,
    MegaBlocks,
    MegaFormat,
    Product,
    Scratch,
    SourceTokens,
    TokenRows,
)
from ..ops.activation import activation_bounds
from ..ops.buffers import allocate, sizes
from ..ops.permute import tile_count
from ..ops.quantize import AS_IS, REORDERED, activation_format
from ..ops.weighted_sum import weighted_sum_regions
from ..parallel.peers import code_format, expert_map_args, prefetch_all
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
    from ..experts.triton.matrix import PackedMatrix
    from ..ops.buffers import Buffers
    from ..ops.quantize import ActivationFormat
    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import Routing
    from .base import PipelineParts, PipelineQuery

__all__ = ["MAX_TOKENS", "Mega", "MegaKind"]


class _Recipe(NamedTuple):
    """What the kernel multiplies: formats, the order of the columns of codes, what divides the width."""

    weights: str
    activations: str
    order: int
    width_multiple: int


RECIPES = (
    _Recipe("mxfp4", "fp8_token", REORDERED, 1),
    _Recipe("nvfp4", "fp8_token", REORDERED, 1),
    _Recipe("fp8_block", "fp8_group128", AS_IS, 16),  # its codes are copied by sixteen
)
MAX_TOKENS = 4096  # of a rank; an expert's list has an entry for every assignment of every rank


class _Faster(NamedTuple):
    """Where this pipeline is faster than ``split``: hidden size, tokens of a rank and rows of an expert."""

    min_hidden: int
    max_tokens: int
    max_rows: int


# By weight format, and whether there are four ranks or more: graphs of layers of the shapes of V4-Flash and V3, on two
# H200 (parallel_h200.csv) and on four H100 (parallel_h100.csv).
FASTER = {
    ("mxfp4", False): _Faster(7168, 8, 16),
    ("mxfp4", True): _Faster(7168, 128, 16),
    ("fp8_block", False): _Faster(4096, 128, 8),
    ("fp8_block", True): _Faster(4096, 128, 6),
}


class _LaunchConfig(NamedTuple):
    """Programs of a multiprocessor, which all run at once; stages of copies; K blocks of a stage."""

    programs: int
    stages: int
    depth: int


# Choices of a GPU; none changes a bit of the output.
# By weights (``enums.py``), rows of an m_tile and weight rows of an n_tile.
LAUNCH_CONFIGS = {
    (E2M1_E8M0, 16, 64): _LaunchConfig(3, 4, 2),
    (E2M1_E8M0, 16, 128): _LaunchConfig(3, 3, 2),
    (E2M1_E8M0, 32, 64): _LaunchConfig(3, 4, 2),
    (E2M1_E8M0, 32, 128): _LaunchConfig(3, 4, 1),
    (E2M1_E8M0, 64, 64): _LaunchConfig(2, 4, 2),
    (E2M1_E8M0, 64, 128): _LaunchConfig(2, 4, 1),
    # With n_tiles of 128, the two operands of a weight leave no registers for a third program or for m_tiles of 64.
    (E2M1_E4M3, 16, 64): _LaunchConfig(3, 4, 2),
    (E2M1_E4M3, 16, 128): _LaunchConfig(2, 3, 2),
    (E2M1_E4M3, 32, 64): _LaunchConfig(3, 4, 2),
    (E2M1_E4M3, 32, 128): _LaunchConfig(2, 4, 1),
    (E4M3_E4M3, 16, 64): _LaunchConfig(2, 5, 2),
    (E4M3_E4M3, 16, 128): _LaunchConfig(2, 3, 2),
    (E4M3_E4M3, 32, 64): _LaunchConfig(2, 5, 1),
    (E4M3_E4M3, 32, 128): _LaunchConfig(2, 4, 1),
}
MAX_REGISTERS = {3: 168}  # of a thread, by programs of a multiprocessor
TOKEN_BLOCK = 2  # tokens that are listed and pulled together
WARPS = 4
MIN_TILES_PER_SM = 3  # n_tiles of 128 weight rows for each multiprocessor from which on they are faster than of 64
SUM_COLUMNS = 1024  # of a token that are summed together
QUANTIZED_VALUES = 2048  # values between the products that a program quantises together


class _Tiling(NamedTuple):
    """Rows of an m_tile, weight rows of an n_tile, and how they are launched."""

    block_t: int
    block_n: int
    config: _LaunchConfig


class _Shape(NamedTuple):
    """Sizes of a pass.

    padded_columns, groups: of a token's codes and scales; inner_padded_columns, inner_groups: of those between the
    products, ``inner`` columns wide. hidden: of a token and a result.
    """

    world: int
    bound: int
    top_k: int
    slots: int
    hidden: int
    padded_columns: int
    groups: int
    inner: int
    inner_padded_columns: int
    inner_groups: int

    @property
    def rows(self) -> int:
        """Assignments of all ranks."""
        return self.world * self.bound * self.top_k

    def counters(self, block_t: int) -> int:
        """Return the number of counters for m_tiles of ``block_t`` rows."""
        return 3 + self.slots + tile_count(self.rows, self.slots, block_t)

    def buffers(self, block_t: int, dtype: torch.dtype) -> Buffers:
        """Return all buffers of a pass whose rows are of ``dtype``, by their regions' names."""
        tokens, rows = self.world * self.bound, self.rows
        codes = torch.float8_e4m3fn
        return {
            "sent/codes": ((self.bound, self.padded_columns), codes),
            "sent/scales": ((self.bound, self.groups), torch.float32),
            "sent/ids": ((self.bound, self.top_k), torch.int32),
            "x": ((tokens, self.padded_columns), codes),
            "scale": ((tokens, self.groups), torch.float32),
            "counters": ((self.counters(block_t),), torch.int32),
            "lists": ((self.slots, rows), torch.int32),
            "experts/middle": ((rows, self.inner), dtype),
            "experts/h/codes": ((rows, self.inner_padded_columns), codes),
            "experts/h/scales": ((rows, self.inner_groups), torch.float32),
            "experts/rows": ((self.bound * self.top_k, self.hidden), dtype),
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
        shared: Callable[[], Tensor | None] | None = None,
        out: Tensor | None = None,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        """Return the weighted sums ``[T, H]``; see ``Pipeline``."""
        assert adapters is None, "the plan refuses adapters over ranks"
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
        phases: tuple[int, int] = (PHASE_PUBLISH, PHASE_COMBINE),
    ) -> None:
        """Run ``phases``, from the first to the last, of a pass and write ``out [T, H]``.

        Ranks in one process that run one after the other, as in Triton's interpreter, each run one phase before the
        next phase begins.
        """
        ids, weights = row_contiguous(routing.topk_ids), row_contiguous(routing.topk_weights)
        peers = self._dispatcher.peers_of(memory, ids.shape[0], x.device)
        if not peers.bound:
            return
        shape = self._shape(peers.bound, ids.shape[1])
        tiling = self._tiling(shape)
        _, rows_dtype = self._experts.output_spec(x.dtype)
        buffers = allocate(memory, shape.buffers(tiling.block_t, rows_dtype), x.device)
        shared_rows = None if shared is None else row_contiguous(shared)
        combine = CombineBuffers(
            rows=buffers["experts/rows"],
            shared=shared_rows,
            out=out,
            width=shape.hidden,
            shared_stride=0 if shared_rows is None else shared_rows.stride(0),
        )
        args = (
            *(peers.kernel_args, ids, weights, expert_map_args(self._dispatcher.expert_map)),
            *self._token_args(row_contiguous(x), shape, buffers),
            *self._product_args(tiling.block_n),
            *(combine, activation_bounds(self._experts.activation)),
            *(ids.numel(), peers.bound, ids.stride(0), weights.stride(0), peers.layer, peers.timeout_us),
            *(peers.rank, peers.flag_offset, peers.flag_stride, shape.counters(tiling.block_t)),
        )
        constants = {"FORMAT": self._format(shape, tiling, phases, x)}
        # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
        from ..kernels.mega import mega_kernel

        programs, options = self._launch_options(tiling.config, x)
        launch(mega_kernel, (programs,), args, constants, num_warps=WARPS, **options)

    def _token_args(self, x: Tensor, shape: _Shape, buffers: dict[str, Tensor]) -> tuple[Any, ...]:
        """Return the kernel's arguments from ``source`` to ``scratch``."""
        source = SourceTokens(
            x=x,
            stride=x.stride(0),
            columns=shape.hidden,
            padded_columns=shape.padded_columns,
            groups=shape.groups,
        )
        sent = TokenRows(x=buffers["sent/codes"], scale=buffers["sent/scales"], ids=buffers["sent/ids"], weights=None)
        pulled = TokenRows(x=buffers["x"], scale=buffers["scale"], ids=None, weights=None)
        scratch = Scratch(
            counters=buffers["counters"],
            lists=buffers["lists"],
            middle=buffers["experts/middle"],
            codes=buffers["experts/h/codes"],
            scales=buffers["experts/h/scales"],
            local_slots=shape.slots,
            columns=shape.inner,
            padded_columns=shape.inner_padded_columns,
            groups=shape.inner_groups,
        )
        return source, sent, pulled, scratch

    def _product_args(self, block_n: int) -> tuple[Product, Product]:
        """Return the kernel's arguments ``up`` and ``down``."""

        def product(packed: PackedMatrix) -> Product:
            weights = packed.pointers
            return Product(
                packed=weights.packed,
                scale=weights.scale,
                row_scale=weights.row_scale,
                bias=weights.bias,
                n_tiles=_n_tiles(packed.layout, block_n),
                row_tiles=_n_tiles(packed.layout, 64),
            )

        return product(self._experts.gate_up), product(self._experts.down)

    def _launch_options(self, config: _LaunchConfig, x: Tensor) -> tuple[int, dict[str, Any]]:
        """Return the number of programs, and Triton's options."""
        if not x.is_cuda:
            return 1, {}
        # A grid that does not fit is then an error, and no program waits for one that never starts.
        options: dict[str, Any] = {"launch_cooperative_grid": True}
        if config.programs in MAX_REGISTERS:
            options["maxnreg"] = MAX_REGISTERS[config.programs]
        return config.programs * self._experts.machine.sms, options

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the rows of an m_tile, the weight rows of an n_tile, and whether all tokens are pulled."""
        shape = self._shape(tokens, self.parts.top_k)
        tiling = self._tiling(shape)
        prefetch = prefetch_all(shape.world, shape.top_k, tokens)
        return frozenset({("mega", tiling.block_t, tiling.block_n, prefetch)})

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

    def _tiling(self, shape: _Shape) -> _Tiling:
        block_t, block_n = self._block_t(shape), self._block_n(shape)
        return _Tiling(block_t, block_n, LAUNCH_CONFIGS[self.weight, block_t, block_n])

    def _block_t(self, shape: _Shape) -> int:
        rows_per_expert = self._rows_per_expert(shape)
        if rows_per_expert <= 14:
            return 16
        if rows_per_expert <= 40 or (self.weight, 64, 64) not in LAUNCH_CONFIGS:
            return 32
        return 64

    def _block_n(self, shape: _Shape) -> int:
        """Return the weight rows of an n_tile: fewer if there would be hardly one tile for every program."""
        slots = self._experts.gate_up.layout.shape[0]
        active_experts = slots * (1 - (1 - 1 / max(1, slots)) ** self._dispatcher.rows(shape.bound, shape.top_k))
        n_tiles = active_experts * _n_tiles(self._experts.gate_up.layout, 128)
        return 128 if n_tiles >= MIN_TILES_PER_SM * self._experts.machine.sms else 64

    def _format(self, shape: _Shape, tiling: _Tiling, phases: tuple[int, int], x: Tensor) -> MegaFormat:
        experts = self._experts
        form, up, down = experts.activations, experts.gate_up, experts.down
        assert form is not None
        order = up.layout.row_order
        blocks = _blocks(shape, tiling.block_t)
        sum_columns = min(SUM_COLUMNS, power_at_least(shape.hidden, 32))
        return MegaFormat(
            first_phase=phases[0],
            last_phase=phases[1],
            top_k=shape.top_k,
            copy_all=prefetch_all(shape.world, shape.top_k, shape.bound),
            blocks=blocks,
            token_codes=code_format(form, blocks.columns, order, x),
            inner_codes=code_format(form, blocks.inner_columns, order, x),
            up=operand_format(up, _x_scale(shape.groups)),
            up_projections=projections(up, experts.activation),
            up_tile=_tile(tiling, up.layout),
            down=operand_format(down, _x_scale(shape.inner_groups)),
            down_projections=projections(down, None),
            down_tile=_tile(tiling, down.layout),
            sums=ColumnBlock(size=sum_columns, aligned=shape.hidden % 16 == 0, full=shape.hidden % sum_columns == 0),
            asm=x.is_cuda,
        )


def _blocks(shape: _Shape, block_t: int) -> MegaBlocks:
    words = shape.padded_columns // 4
    block_words = min(2048, power_at_least(words, 32))
    inner_columns = power_at_least(shape.inner_padded_columns, 128)
    return MegaBlocks(
        assignments=power_at_least(shape.top_k),
        ranks=power_at_least(shape.world),
        slots=power_at_least(shape.slots, 16),
        tokens=TOKEN_BLOCK,
        columns=power_at_least(shape.padded_columns, 128),
        groups=power_at_least(shape.groups),
        words=block_words,
        copies=-(-words // block_words),
        inner_columns=inner_columns,
        inner_rows=max(1, min(block_t, QUANTIZED_VALUES // inner_columns)),
    )


def _tile(tiling: _Tiling, layout: Layout) -> Tile:
    """Return the tile of a product. Its matrix has gate and up in alternating rows if it has both."""
    return Tile(
        block_n=tiling.block_n,
        block_t=tiling.block_t,
        group_t=1,
        narrow=False,
        depth=gcd(tiling.config.depth, layout.k_blocks),
        stages=tiling.config.stages,
        interleave_gate_up=layout.shape[1] == 2,
        fuse_k_block=False,
        warps=WARPS,
    )


def _x_scale(groups: int) -> int:
    """Return ``OperandFormat.x_scale`` for rows with ``groups`` scales."""
    return X_BLOCK_SCALE if groups > 1 else X_ROW_SCALE


def _n_tiles(layout: Layout, block_n: int) -> int:
    """Return the number of tiles of ``block_n`` weight rows, gate and up counted together."""
    matrices, rows = layout.operand_rows
    return -(-matrices * rows // block_n)


def _shape_of(form: ActivationFormat, order: int, counts: tuple[int, int, int, int], hidden: int, inner: int) -> _Shape:
    """Return the sizes of a pass. counts: W, B, K and slots. order: of the columns of codes."""

    def columns_and_groups(columns: int) -> tuple[int, int]:
        padded = form.padded_columns(columns, order)
        return padded, -(-padded // (form.group or padded))

    return _Shape(*counts, hidden, *columns_and_groups(hidden), inner, *columns_and_groups(inner))


def _recipe_of(problem: Problem) -> _Recipe | None:
    """Return the recipe of the layer of ``problem``, None for formats that the kernel does not take."""
    formats = problem.spec.weight_format, problem.activation_format
    return next((recipe for recipe in RECIPES if (recipe.weights, recipe.activations) == formats), None)


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
        if device.kind != "cuda":
            return f"the device is {device.kind}; it is one kernel for CUDA GPUs"
        if query.dispatcher.name != "symm_mem":
            return f"the dispatcher is {query.dispatcher.name}; it replaces symm_mem, without a wrapper"
        if problem.routed.mixed:
            return f"the weights are {format_names(problem.spec.formats)}; its kernel takes one format for both"
        recipe = _recipe_of(problem)
        if recipe is None or not isinstance(query.kernel, TritonKernel):
            supported = ", ".join(f"{known.weights} with {known.activations}" for known in RECIPES)
            return (
                f"the kernel is {query.kernel.name}, for {problem.spec.weight_format} weights with "
                f"{problem.activation_format} activations; it takes {supported}, in a kernel of Triton"
            )
        if problem.spec.expert_hidden_size % recipe.width_multiple:
            return (
                f"the hidden size is {problem.spec.expert_hidden_size}; it takes multiples of {recipe.width_multiple}"
            )
        if device.capability != (9, 0):
            gpu = "an unknown GPU" if device.capability is None else "sm_{}{}".format(*device.capability)
            return f"found {gpu}; its grid is sized for sm_90, where all programs run at once"
        if rule.weight_on_input:
            return "router weights are on the input; it weights rows after the experts"
        if problem.combine != "exact":
            return f"the combine is {problem.combine}; it returns each row unchanged"
        if problem.limits.max_tokens > MAX_TOKENS:
            return f"a rank may have {problem.limits.max_tokens:,} tokens; its lists hold {MAX_TOKENS:,}"
        return None if query.pipeline == self.name else _slower(problem)

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return None: ranks with different numbers of tokens run the same kernel."""
        return None

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return nothing: m_tiles are chosen for the rank with the most tokens."""
        return ""

    def regions(self, query: PipelineQuery) -> Regions:
        """Return the regions of a pass of ``max_tokens`` tokens on every rank."""
        problem, spec = query.problem, query.problem.spec
        tokens = problem.limits.max_tokens
        recipe = _recipe_of(problem)
        assert problem.placement is not None
        assert recipe is not None
        form = activation_format(recipe.activations)
        counts = problem.world_size, tokens, spec.routing.top_k, problem.placement.width
        shape = _shape_of(form, recipe.order, counts, spec.expert_hidden_size, query.experts.intermediate)
        dtype = torch.bfloat16 if DTYPES[problem.dtype] == torch.bfloat16 else torch.float32
        regions: Regions = {}
        if spec.latent_size is not None:
            regions |= weighted_sum_regions(tokens, spec.expert_hidden_size, torch.float32)
        return regions | sizes(shape.buffers(16, dtype))

    def build(self, parts: PipelineParts) -> Mega:
        """Return the pipeline. Raises InputError for ``after_expert``."""
        return Mega(parts=parts)
