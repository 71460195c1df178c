"""Grouped product over rows packed by expert: reference, checks, launch, and the two products of a batch.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..types import ACTIVATION_KINDS, ActivationSpec
from .activation import activate
from .permute import tile_count
from .prefill import prefill_bytes, prefill_experts, prefill_tile
from .quantize import activation_format, operand
from .tiles import Machine, TileChoice, TileProblem, choose

if TYPE_CHECKING:
    from torch import Tensor

    from ..types import ContiguousBatch, Problem

__all__ = [
    "PackedExperts",
    "PackedMatrix",
    "TileList",
    "constants",
    "grouped_gemm",
    "grouped_gemm_reference",
    "refuse_machine",
    "run_experts",
    "temporary_bytes",
    "tile_count",
    "tile_list",
    "with_tiles",
]

PLAIN, E4M3_BF16, E4M3_E4M3, E2M1_LANES, INT4_LANES, E4M3_QUARTERS = range(6)
NO_SCALE, BLOCK_SCALE, E8M0_SCALE, E4M3_SCALE, GROUP_SCALE, PAIR_SCALE = range(6)
_BLOCK_TILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """Weights ``[E, P, N, K]`` as the kernel reads them.

    values: plain and E4M3: ``[E, P, N, K or more]``; lanes: int16 ``[E, P, ceil(K / block_k), N, block_k / 4]``.
    weight, scale_kind: how values become operands and which scale stands in the K loop (the constants above).
    scale: 32-bit ``[E, P, ceil(K / block_k), words, N]``, or float32 ``[E, P, ceil(N / 128), ceil(K / 128)]`` for
        blocks.
    row_scale ``[E, P, N]`` float32 and bias ``[E, P, N]`` floating, or None. bits: stored bits a weight.
    """

    values: Tensor
    shape: tuple[int, int, int, int]
    weight: int
    block_k: int
    bits: float
    scale_kind: int = NO_SCALE
    words: int = 1
    scale: Tensor | None = None
    row_scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def k_blocks(self) -> int:
        """Steps of the K loop."""
        return -(-self.shape[3] // self.block_k)

    @property
    def steps(self) -> tuple[int, int, int]:
        """Elements of ``values`` from one row, K block and part to the next."""
        if self.weight in (E2M1_LANES, INT4_LANES):
            lanes = self.block_k // 4
            return lanes, self.shape[2] * lanes, self.k_blocks * self.shape[2] * lanes
        wide = self.values.shape[-1]
        return wide, self.block_k, self.shape[2] * wide

    def problem(self, rows: int, x_bits: int, x_groups: bool) -> TileProblem:
        """Return what tile choice asks about a product of ``rows`` rows with these weights."""
        experts, parts, n_out, k_in = self.shape
        return TileProblem(
            rows=rows,
            experts=experts,
            n_out=n_out,
            k_in=k_in,
            parts=parts,
            block_k=self.block_k,
            weight_bits=self.bits,
            x_bits=x_bits,
            decoded=self.weight not in (PLAIN, E4M3_E4M3),
            promoted=x_groups or self.scale_kind in (BLOCK_SCALE, GROUP_SCALE, PAIR_SCALE),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """Both matrices of all experts and what runs between them.

    activations: name of a format whose codes are E4M3, or None to multiply in the dtype of x.
    tiles: the two tiles to use instead of the choice made from the sizes, or None.
    """

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: ActivationSpec
    machine: Machine
    activations: str | None = None
    tiles: tuple[TileChoice, TileChoice] | None = None

    def block_t(self, rows: int) -> tuple[int, ...]:
        """Return the row counts whose token tiles ``run_experts`` will ask for."""
        if rows == 0 or _large(self, rows) is not None:
            return ()
        return tuple(dict.fromkeys(tile.block_t for tile in _tiles(self, rows)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TileList:
    """expert ``[count]`` int32 (-1: no tile) and first row ``[count]`` int64 of each token tile of ``tile``.

    used: ``[1]`` int32, how many tiles have an expert; they stand first. None: not counted.
    """

    expert: Tensor
    row: Tensor
    count: int
    tile: TileChoice
    used: Tensor | None = None


def grouped_gemm_reference(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    source: Tensor | None = None,
    bias: Tensor | None = None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Return ``[R, N]`` float32: row r of expert e is ``activation(x[source[r]] @ weight[e].T + bias[e])``.

    x ``[T, K]`` and weight ``[E, P, N, K]`` floating, multiplied in float32; bias ``[E, P, N]``. Without an
    activation P is 1. Rows no expert owns are zero. Reads the offsets on the host.
    """
    experts, parts, n_out, k_in = weight.shape
    index = torch.arange(x.shape[0], device=x.device) if source is None else source
    out = torch.zeros(index.numel(), n_out, device=x.device)
    offsets: list[int] = expert_offsets.tolist()
    for expert in range(experts):
        span = slice(offsets[expert], offsets[expert + 1])
        product = x[index[span]].float() @ weight[expert].float().reshape(parts * n_out, k_in).T
        product = product.view(-1, parts, n_out)
        if bias is not None:
            product = product + bias[expert].float()
        out[span] = product[:, 0] if activation is None else activate(product, activation)
    return out


def tile_list(expert_offsets: Tensor, rows: int, tile: TileChoice) -> TileList:
    """List the token tiles of ``expert_offsets [E+1]`` int64, on its device and without waiting for it."""
    experts = expert_offsets.numel() - 1
    count = tile_count(rows, experts, tile.block_t)
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ..kernels.tiles import tile_list_kernel

    expert = torch.empty(count, dtype=torch.int32, device=expert_offsets.device)
    used = torch.empty(1, dtype=torch.int32, device=expert_offsets.device)
    row = torch.empty(count, dtype=torch.int64, device=expert_offsets.device)
    launch: Any = tile_list_kernel
    launch[(-(-count // _BLOCK_TILES),)](
        expert_offsets,
        expert,
        row,
        used,
        experts,
        count,
        BLOCK_T=tile.block_t,
        BLOCK_E=max(16, 1 << (experts - 1).bit_length()),
        BLOCK_TILES=_BLOCK_TILES,
    )
    return TileList(expert=expert, row=row, used=used, count=count, tile=tile)


def grouped_gemm(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    source: Tensor | None = None,
    x_scale: Tensor | None = None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm_reference`` for what stands in it.

    x: ``[T, K]`` of the operand dtype, read at ``source [R]`` int64, or row by row without it. x_scale: float32
    ``[T, ceil(K / 128)]`` or ``[T, 1]`` for E4M3 rows. tiles: from ``tile_list``. Rows from
    ``expert_offsets[E]`` on are not written. Raises InputError for wrong shapes or dtypes.
    """
    _check(x, packed, out, x_scale)
    _, _, n_out, k_in = packed.shape
    spec = activation or ActivationSpec()
    tile = tiles.tile
    n_step, k_step, part_step = packed.steps
    blocks = packed.scale_kind == BLOCK_SCALE and packed.scale is not None
    spare = tiles.row  # stands where a pointer is not used
    from ..kernels.grouped_gemm import grouped_gemm_kernel

    launch: Any = grouped_gemm_kernel
    launch[(tiles.count * -(-n_out // tile.block_n),)](
        x,
        spare if x_scale is None else x_scale,
        packed.values,
        spare if packed.scale is None else packed.scale,
        spare if packed.row_scale is None else packed.row_scale,
        spare if packed.bias is None else packed.bias,
        out,
        spare if source is None else source,
        expert_offsets,
        tiles.expert,
        tiles.row,
        n_out,
        k_in,
        x.stride(0),
        n_step,
        k_step,
        part_step,
        packed.scale.shape[2] if blocks and packed.scale is not None else 1,
        tiles.count,
        float(spec.limit or 0.0),
        float(spec.alpha),
        float(spec.gate_bound),
        float(spec.up_bound),
        **constants(packed, tile, activation, x_groups=0 if x_scale is None else 1 + (x_scale.shape[1] == 1)),
        GATHER=source is not None,
        ASM=x.is_cuda,
        num_warps=tile.warps,
    )
    return out


def constants(
    packed: PackedMatrix, tile: TileChoice, activation: ActivationSpec | None, *, x_groups: int
) -> dict[str, Any]:
    """Return the compile-time arguments that follow from the weights, the tile and the activation."""
    return {
        "WEIGHT": packed.weight,
        "SCALE": packed.scale_kind,
        "WORDS": packed.words,
        "X_SCALE": x_groups,
        "ROW_SCALE": packed.row_scale is not None,
        "BIAS": packed.bias is not None,
        "PARTS": packed.shape[1],
        "KIND": -1 if activation is None else ACTIVATION_KINDS.index(activation.kind),
        "HAS_LIMIT": activation is not None and activation.limit is not None,
        "K_BLOCKS": packed.k_blocks,
        "EVEN_K": packed.shape[3] % packed.block_k == 0,
        "BLOCK_N": tile.block_n,
        "BLOCK_T": tile.block_t,
        "BLOCK_K": packed.block_k,
        "GROUP_T": tile.group_t,
        "STAGES": tile.stages,
    }


def run_experts(batch: ContiguousBatch, packed: PackedExperts) -> Tensor:
    """Return ``[R, H]``: both products of every row, in bfloat16 for bfloat16 x and in float32 otherwise.

    Rounding a row to bfloat16 adds 0.17 % of its size at most to the layer's error, and halves the largest traffic
    of a big batch. Nothing waits for the device; rows from ``expert_offsets[E]`` on are uninitialised.
    """
    x, source = batch.x, batch.source
    rows = source.numel()
    _, _, wide, _ = packed.gate_up.shape
    hidden = packed.down.shape[2]
    middle_dtype = torch.float32 if packed.activations and x.dtype != torch.bfloat16 else x.dtype
    out_dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    out = torch.empty(rows, hidden, dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    offsets = batch.expert_offsets
    large = _large(packed, rows)
    if large is not None:
        return prefill_experts(batch, packed, tile_list(offsets, rows, large), out)
    first, second = _tiles(packed, rows)
    tiles = _listed(batch, first)
    # A weight belongs to a row, so weighted rows are gathered; others are gathered by the product.
    weighted = batch.input_weights is not None
    rows_in, x_scale = operand(x, packed.activations, source=source if weighted else None, weights=batch.input_weights)
    middle = torch.empty(rows, wide, dtype=middle_dtype, device=x.device)
    grouped_gemm(
        rows_in,
        packed.gate_up,
        offsets,
        tiles,
        middle,
        source=None if weighted else source,
        x_scale=x_scale,
        activation=packed.activation,
    )
    same = second.block_t == first.block_t
    tiles = replace(tiles, tile=second) if same else _listed(batch, second)
    rows_in, x_scale = operand(middle, packed.activations)
    return grouped_gemm(rows_in, packed.down, offsets, tiles, out, x_scale=x_scale)


def refuse_machine(problem: Problem) -> str | None:
    """Return why Triton's grouped product cannot serve the device or the ranks of ``problem``, or None."""
    device = problem.device
    if problem.world_size * problem.tp_size > 1:
        return f"asked for world_size={problem.world_size} and tp_size={problem.tp_size}; it runs on one rank only"
    if device.kind != "cuda":
        return f"asked for {device.kind}; it needs a CUDA GPU"
    if device.capability is not None and device.capability < (8, 0):
        return f"found sm_{device.capability[0]}{device.capability[1]}; it needs sm_80 (Ampere) or later"
    if find_spec("triton") is None:
        return "found no Triton; install the package triton to use it"
    return None


def temporary_bytes(problem: Problem, *, codes: bool) -> int:
    """Return the bytes ``run_experts`` takes at most: middle and result rows, E4M3 codes of both, tile lists."""
    spec = problem.spec
    tokens = problem.limits.max_tokens
    rows = tokens * spec.routing.top_k
    hidden, wide = spec.expert_hidden_size, spec.intermediate_size
    middle = 4 if codes and problem.dtype != "bf16" else 2
    result = 2 if problem.dtype == "bf16" else 4
    total = rows * (middle * wide + result * hidden) + 2 * 12 * tile_count(rows, spec.num_experts, 16)
    total += prefill_bytes(problem, codes=codes)
    if codes:
        # One float32 scale for 128 codes.
        taken = rows if spec.routing.weight_on_input else tokens
        total += taken * (hidden + hidden // 32 + 4) + rows * (wide + wide // 32 + 4)
    elif spec.routing.weight_on_input:
        total += rows * hidden * middle
    return total


def _problems(packed: PackedExperts, rows: int) -> tuple[TileProblem, TileProblem]:
    bits = 8 if packed.activations else 16
    groups = packed.activations is not None and activation_format(packed.activations).group > 0
    return packed.gate_up.problem(rows, bits, groups), packed.down.problem(rows, bits, groups)


def _listed(batch: ContiguousBatch, tile: TileChoice) -> TileList:
    """Return the tile list that came with the batch, or make it."""
    for made in batch.tiles:
        if made.block_t == tile.block_t:
            return TileList(expert=made.expert, row=made.row, count=made.row.numel(), tile=tile)
    return tile_list(batch.expert_offsets, batch.source.numel(), tile)


def _tiles(packed: PackedExperts, rows: int) -> tuple[TileChoice, TileChoice]:
    if packed.tiles is not None:
        return packed.tiles
    first, second = _problems(packed, rows)
    return choose(first, packed.machine), choose(second, packed.machine)


def _large(packed: PackedExperts, rows: int) -> TileChoice | None:
    """Return the tile of both products of a large batch, or None where the small-batch product runs."""
    aligned = packed.gate_up.values.data_ptr() % 16 == 0 == packed.down.values.data_ptr() % 16
    if packed.tiles is not None or not aligned:
        return None
    first, second = _problems(packed, rows)
    return prefill_tile(second, packed.machine) and prefill_tile(first, packed.machine)


def _check(x: Tensor, packed: PackedMatrix, out: Tensor, x_scale: Tensor | None) -> None:
    _, _, n_out, k_in = packed.shape
    if x.dim() != 2 or x.shape[1] != k_in or x.stride(1) != 1:
        raise InputError(
            f"grouped_gemm: x is {tuple(x.shape)} with strides {x.stride()}, these weights need [rows, {k_in}] with "
            "dense rows; call contiguous() first"
        )
    if packed.weight == E4M3_E4M3:
        allowed = (torch.float8_e4m3fn,)
    elif packed.weight == PLAIN:
        allowed = (packed.values.dtype,)
    else:
        allowed = (torch.bfloat16,)
    if x.dtype not in allowed:
        raise InputError(f"grouped_gemm: x is {x.dtype}, these weights multiply {allowed[0]}; convert x")
    if (x_scale is not None) != (packed.weight == E4M3_E4M3):
        raise InputError("grouped_gemm: E4M3 rows need x_scale, other rows must not have one")
    if out.dim() != 2 or out.shape[1] != n_out or not out.is_contiguous():
        raise InputError(f"grouped_gemm: out is {tuple(out.shape)}, these weights write contiguous [rows, {n_out}]")


def with_tiles(packed: PackedExperts, tiles: tuple[TileChoice, TileChoice]) -> PackedExperts:
    """Return ``packed`` with fixed tiles instead of the choice made from the sizes."""
    return replace(packed, tiles=tiles)
