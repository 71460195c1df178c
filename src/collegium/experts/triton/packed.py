"""Both products of a batch: sorted, unsorted, or with the tiles of large batches.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...formats.int_affine import Int4Ordered, Int8Ordered
from ...ops.columns import ZeroPointCorrection, gather_columns, halves_and_sums
from ...ops.operand import Operand, gather_codes, operand, transpose_scales
from ...ops.quantize import AS_IS, ActivationFormat, formats_within, reorder_codes
from ...problem import ExpertsProblem
from ...runtime.launch import align_rows
from ...runtime.machine import Machine, machine_at
from ...runtime.memory import Memory, alloc, part
from ...types import ActivationSpec, ContiguousBatch, ExpertWeights, RemoteOutput
from ..base import PackedWeights, refuse_codes
from .dequantized import dequantized_groups
from .grouped import TileList, grouped_gemm, tile_list
from .matrix import PackedMatrix, RangeReport
from .packing import add_projection_dim, column_order
from .prefill import CodeScales, prefill_gemm
from .tiles.candidates import candidates
from .tiles.choice import LARGE_BLOCK_N, choose
from .tiles.problem import TileChoice, TunedTiles
from .tiles.score import score
from .tiling import ProductTiling, e4m3_format, middle_format, reads_transposed_scales

__all__ = ["PackedExperts", "pack_both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts(PackedWeights):
    """Both matrices of all experts and what runs between them.

    activations: the format whose E4M3 codes are multiplied, or None to multiply in the dtype of x. input_reach: of a
    static format. tiles, measured: as ``ProductTiling`` says. report: what packing made or rounded, where a plan cannot
    know.
    """

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: ActivationSpec
    machine: Machine
    activations: ActivationFormat | None = None
    input_reach: tuple[float, float] | None = None
    tiles: tuple[TileChoice, TileChoice] | None = None
    measured: tuple[TunedTiles, TunedTiles] = ((), ())
    report: object | None = None
    _tiling: ProductTiling = field(init=False, compare=False, repr=False)
    forms: tuple[ActivationFormat | None, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        name = self._codes
        forms = (None, None) if name is None else formats_within(name, self.input_reach)
        object.__setattr__(self, "forms", forms)
        tiling = ProductTiling(
            gate_up=self.gate_up.layout,
            down=self.down.layout,
            machine=self.machine,
            activations=self.activations,
            tiles=self.tiles,
            measured=self.measured,
            aligned=self.gate_up.values.data_ptr() % 16 == 0 == self.down.values.data_ptr() % 16,
        )
        object.__setattr__(self, "_tiling", tiling)

    @property
    def tiling(self) -> ProductTiling:
        """How batches are cut."""
        return self._tiling

    @property
    def key(self) -> Hashable:
        """Return what decides which kernel variants these experts need."""
        key: list[Hashable] = [self.activation, self.machine, self.activations, self.tiles, self.measured]
        for matrix in (self.gate_up, self.down):
            key.append(matrix.layout)
            tensors = (matrix.values, matrix.scale, matrix.row_scale, matrix.bias, matrix.order)
            key += [None if t is None else (t.dtype, t.shape, t.data_ptr() % 16) for t in tensors]
        return tuple(key)

    def output_spec(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return H, and the dtype of tokens that are multiplied as they are, or bfloat16; float32 for others."""
        kept = self.activations is None or dtype == torch.bfloat16
        return self.down.layout.shape[2], dtype if kept else torch.float32

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]``: both products of every row, in the dtype that ``storing`` says.

        Rounding a row to bfloat16 adds 0.17 % of its size at most to the layer's error, to float16 0.02 %, and halves
        the largest traffic of a big batch. An output of an expert beyond float16 is infinite, whatever its weight would
        make of it: so it is in transformers. Nothing waits for the device; rows from ``expert_offsets[E]`` on are
        uninitialised. With ``batch.back`` the second product stores rows where it says, and ``back.rows`` is returned;
        InputError where those are not what ``storing`` says.
        """
        refuse_codes(batch, "experts in Triton", self._codes)
        count = batch.source.numel()
        out = self._target(batch.remote, count, batch.dtype or batch.x.dtype, batch.x.device, memory)
        if count == 0:
            return out
        batch = replace(batch, x=align_rows(batch.x))
        rows = count if batch.rows is None else batch.rows
        large = self.tiling.large(rows)
        if large is not None:
            return self._run_large(batch, large, out, memory)
        first, second = self.tiling.pair(rows)
        tiles = _listed(batch, first, memory, "first")
        same = second.block_t == first.block_t
        pair = tiles, replace(tiles, tile=second) if same else _listed(batch, second, memory, "second")
        # A weight belongs to a row, so weighted rows are gathered; others are gathered by the product.
        gathered = batch.input_weights is not None
        rows_in = self._rows_in(batch, memory, self.gate_up.layout.row_order, gathered=gathered)
        source = None if gathered else batch.source
        rows_in, source = self._in_order(rows_in, batch.expert_offsets, source, memory)
        pair = pair[0], replace(pair[1], places=_places(batch))
        return self._both(rows_in, batch.expert_offsets, pair, out, memory, source=source, used=_used(batch))

    def run_unsorted(self, x: Tensor, ids: Tensor, memory: Memory | None = None) -> Tensor:
        """Return ``[T * K, H]``: what ``run`` returns for few assignments, in their own order and not sorted.

        ids: contiguous ``[T, K]`` integers; rows of ids outside ``0..E-1`` are uninitialised.
        """
        x, (tokens, top_k) = align_rows(x), ids.shape
        out = self._target(None, tokens * top_k, x.dtype, x.device, memory)
        first, second = (replace(tile, overlap=self.machine.pdl) for tile in self.tiling.pair(ids.numel()))
        rows_in = operand(x, self.forms[0], order=self.gate_up.layout.row_order, memory=part(memory, "x"))
        rows_in, source = self._in_order(rows_in, ids, ids, memory, top_k=top_k)
        # Where the tokens were quantised, which waits for the routing, the ids were there before the product's turn.
        listed = self.activations is not None
        tiles = TileList(expert=ids, row=ids, count=ids.numel(), tile=first, top_k=top_k, early=listed)
        pair = tiles, replace(tiles, tile=second)
        return self._both(rows_in, ids, pair, out, memory, source=source)

    def products(self) -> tuple[_Product, ...]:
        """Return gate_up and down."""
        return tuple(_Product(packed=self, place=place, name=name) for place, name in enumerate(("gate_up", "down")))

    def with_measured(self, tables: Mapping[str, TunedTiles]) -> PackedExperts:
        """Return the same experts with measured tiles."""
        return replace(self, measured=(tables["gate_up"], tables["down"]))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedExperts:
        return replace(self, gate_up=self.gate_up.map_tensors(change), down=self.down.map_tensors(change))

    @property
    def input_codes(self) -> tuple[str, int] | None:
        """Return the format and order of the first product's codes, None where it multiplies tokens, or calibrated."""
        form = self.activations
        return None if form is None or form.static else (form.name, self.gate_up.layout.row_order)

    @property
    def _codes(self) -> str | None:
        return None if self.activations is None else self.activations.name

    def _target(
        self, back: RemoteOutput | None, count: int, dtype: torch.dtype, device: torch.device, memory: Memory | None
    ) -> Tensor:
        """Return what ``count`` rows of tokens of ``dtype`` are written to."""
        width, narrow = self.output_spec(dtype)
        if back is None:
            return alloc(memory, "rows", (count, width), narrow, device)
        if back.rows.shape[1:] != (width,) or back.rows.dtype != narrow:
            raise InputError(
                f"back: rows of {back.rows.shape[1]} {back.rows.dtype}, these experts store rows of {width} {narrow}"
            )
        return back.rows

    def _rows_in(self, batch: ContiguousBatch, memory: Memory | None, order: int, *, gathered: bool) -> Operand:
        """Return the first product's operand: codes and scales that arrived, or what the tokens become here."""
        if batch.scale is not None:
            codes, scale = batch.x, batch.scale
            if gathered:
                codes, scale = gather_codes(codes, scale, batch.source, _used(batch), part(memory, "x"))
            if batch.order not in (AS_IS, order):
                raise InputError(f"the batch is codes in order {batch.order}, this product reads order {order}")
            return (codes if batch.order == order else reorder_codes(codes, order)), scale
        return operand(
            batch.x,
            self.forms[0],
            source=batch.source if gathered else None,
            weights=batch.input_weights,
            order=order,
            x_ready=batch.x_ready and not gathered,
            used=_used(batch) if gathered else None,
            memory=part(memory, "x"),
        )

    def _in_order(
        self, rows_in: Operand, owner: Tensor, source: Tensor | None, memory: Memory | None, *, top_k: int = 0
    ) -> tuple[Operand, Tensor | None]:
        """Return the operand and what gathers its rows; rows in the order of their experts' columns are gathered."""
        order = self.gate_up.order
        if order is None:
            return rows_in, source
        return (gather_columns(rows_in[0], order, owner, source, top_k=top_k, memory=part(memory, "x")), None), None

    def _both(
        self,
        rows_in: Operand,
        offsets: Tensor,
        tiles: tuple[TileList, TileList],
        out: Tensor,
        memory: Memory | None,
        *,
        source: Tensor | None,
        used: Tensor | None = None,
    ) -> Tensor:
        """Write ``out`` and return it: both products of ``rows_in``, which are codes and scales or rows and None."""
        x, x_scale = _summed(rows_in, self.gate_up, None, part(memory, "x"))
        if isinstance(x_scale, Tensor) and reads_transposed_scales(
            self.activations, self.gate_up.layout, tiles[0].tile
        ):
            x_scale = transpose_scales(x_scale, source, used=used, memory=part(memory, "x"))
        places = tiles[1].places
        count = out.shape[0] if places is None else places.shape[0]
        middle = alloc(memory, "middle", (count, self.gate_up.layout.shape[2]), out.dtype, out.device)
        grouped_gemm(
            x, self.gate_up, offsets, tiles[0], middle, source=source, x_scale=x_scale, activation=self.activation
        )
        form = middle_format(self.forms[1], self.down.layout, tiles[1].tile)
        made = operand(middle, form, order=self.down.layout.row_order, used=used, memory=part(memory, "h"))
        codes, scale = _summed(made, self.down, used, part(memory, "h"))
        # The tile lists were complete before the first product started.
        return grouped_gemm(codes, self.down, offsets, replace(tiles[1], early=True), out, x_scale=scale)

    def _run_large(self, batch: ContiguousBatch, tile: TileChoice, out: Tensor, memory: Memory | None) -> Tensor:
        """Write both products to ``out``, rows put in expert order first, with the bits of the small tiles."""
        form, offsets, device, count = self.activations, batch.expert_offsets, out.device, batch.source.numel()
        wide = self.gate_up.layout.shape[2]
        rows_in = self._rows_in(batch, memory, AS_IS, gathered=True)
        rows, x_scale = _summed(rows_in, self.gate_up, _used(batch), part(memory, "x"))
        codes, dtype = None, out.dtype
        if form is not None and form.group == LARGE_BLOCK_N:
            scale = alloc(memory, "scales", (count, -(-wide // LARGE_BLOCK_N)), torch.float32, device)
            codes = CodeScales(scale=scale, power=form.power, rounded=out.dtype == torch.bfloat16)
            dtype = torch.float8_e4m3fn
        middle = alloc(memory, "middle", (count, wide), dtype, device)
        most = max(self.gate_up.layout.expanded_bytes, self.down.layout.expanded_bytes)
        room = alloc(memory, "expanded", (most,), torch.int8, device) if most else None
        tiles = tile_list(offsets, count, tile, part(memory, "first"))
        turns = partial(dequantized_groups, offsets=offsets, tiles=tiles, rows=count, memory=part(memory, "second"))

        def room_of(matrix: PackedMatrix) -> Tensor | None:
            return room if matrix.layout.expanded_bytes else None  # the other product's weights may be operands as is

        for matrix, own, listed in turns(self.gate_up, room=room_of(self.gate_up)):
            prefill_gemm(rows, matrix, own, listed, middle, x_scale=x_scale, activation=self.activation, codes=codes)
        if codes is None:
            made = operand(middle, self.forms[1], used=_used(batch), memory=part(memory, "h"))
            middle, scale = _summed(made, self.down, _used(batch), part(memory, "h"))
        else:
            scale = codes.scale
        for matrix, own, listed in turns(self.down, room=room_of(self.down)):
            prefill_gemm(middle, matrix, own, replace(listed, places=_places(batch)), out, x_scale=scale)
        return out


_Packer = Callable[[Any, Tensor | None], PackedMatrix]


def pack_both(packers: tuple[_Packer, _Packer], weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
    """Return the experts of ``problem``; packers of gate_up and down: of a payload ``[E, P, N, K]`` and its bias."""
    if isinstance(weights.gate_up, Int4Ordered | Int8Ordered):
        weights = _rows_moved(weights)
    half = problem.activation_format == "fp16"

    def packed(packer: _Packer, payload: Any, bias: Tensor | None) -> PackedMatrix:
        made = packer(payload, None if bias is None else bias.contiguous())
        return replace(made, layout=replace(made.layout, half=half))

    gate_up = packed(packers[0], weights.gate_up, weights.gate_up_bias)
    down = packed(packers[1], add_projection_dim(weights.down), weights.down_bias)
    form = e4m3_format(problem.activation_format)
    return PackedExperts(
        gate_up=gate_up,
        down=replace(down, order=None),
        activation=problem.activation,
        machine=machine_at(weights.down.device),
        activations=form,
        input_reach=weights.input_reach if form is not None and form.static else None,
        report=_reported(gate_up.report, down.report),
    )


def _rows_moved(weights: ExpertWeights[Any]) -> ExpertWeights[Any]:
    """Return weights whose first product writes its columns in the order in which the second one reads them."""
    order = column_order(add_projection_dim(weights.down))

    def moved(tensor: Tensor) -> Tensor:
        return torch.stack([own.index_select(1, at) for own, at in zip(tensor, order, strict=True)])

    gate_up, bias = weights.gate_up, weights.gate_up_bias
    gate_up = replace(gate_up, **{name: moved(getattr(gate_up, name)) for name in gate_up.by_row})
    return replace(weights, gate_up=gate_up, gate_up_bias=None if bias is None else moved(bias))


def _reported(first: RangeReport | str | None, second: RangeReport | str | None) -> RangeReport | str | None:
    if isinstance(first, RangeReport) and isinstance(second, RangeReport):
        return first + second
    named = [f"{name} {report}" for name, report in (("gate_up", first), ("down", second)) if report is not None]
    return ", ".join(named) or None


def _summed(
    rows: Operand, matrix: PackedMatrix, used: Tensor | None, memory: Memory | None
) -> tuple[Tensor, Tensor | ZeroPointCorrection | None]:
    """Return an operand as it is, or in float16 over powers of two, with sums of its columns, as the weights ask."""
    return halves_and_sums(rows[0], used=used, memory=memory) if matrix.layout.rescaled else rows


def _used(batch: ContiguousBatch) -> Tensor | None:
    """Return how many rows are somebody's, on the device, of a batch with room for more than it is likely to hold."""
    return None if batch.rows is None else batch.expert_offsets[-1:]


def _places(batch: ContiguousBatch) -> Tensor | None:
    return None if batch.remote is None else batch.remote.offsets


def _listed(batch: ContiguousBatch, tile: TileChoice, memory: Memory | None, name: str) -> TileList:
    """Return the tile list that came with the batch, or make it."""
    for made in batch.tiles:
        if made.block_t == tile.block_t:
            return TileList(expert=made.expert, row=made.row, count=made.row.numel(), tile=tile)
    return tile_list(batch.expert_offsets, batch.source.numel(), tile, part(memory, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Product:
    """One of the two products, alone, for ``collegium tune``."""

    packed: PackedExperts
    place: int
    name: str

    @property
    def _matrix(self) -> PackedMatrix:
        return self.packed.down if self.place else self.packed.gate_up

    def default_tile(self, rows: int) -> TileChoice:
        """Return the tile chosen from the sizes alone."""
        return choose(self.packed.tiling.problem_of(self._matrix.layout, rows), self.packed.machine)

    def candidates(self, rows: int) -> tuple[TileChoice, ...]:
        """Return every tile that fits, the fastest by the score first."""
        asked, machine = self.packed.tiling.problem_of(self._matrix.layout, rows), self.packed.machine
        return tuple(sorted(candidates(asked, machine), key=lambda tile: score(asked, tile, machine)))

    def runner(self, batch: ContiguousBatch) -> Callable[[TileChoice], Tensor]:
        """Return this product of ``batch`` as a function of its tile; the second product reads random rows."""
        packed, matrix, first = self.packed, self._matrix, self.place == 0
        count = batch.source.numel()
        _, _, n_out, k_in = matrix.layout.shape
        x = batch.x if first else torch.randn(count, k_in, device=batch.x.device).to(batch.x.dtype)
        made = operand(x, packed.forms[self.place], order=matrix.layout.row_order)
        codes, scale = _summed(made, matrix, None, None)
        out = torch.empty(count, n_out, dtype=torch.bfloat16, device=x.device)
        more: dict[str, Any] = {"source": batch.source, "activation": packed.activation} if first else {}
        lists: dict[TileChoice, TileList] = {}
        # What quantises the second product's rows writes their scales so, at no cost.
        ever = not first and reads_transposed_scales(packed.activations, matrix.layout)
        beside = transpose_scales(scale, None) if ever and isinstance(scale, Tensor) else None

        def run(tile: TileChoice) -> Tensor:
            if tile not in lists:
                lists[tile] = tile_list(batch.expert_offsets, count, tile)
            laid = scale
            if isinstance(scale, Tensor) and reads_transposed_scales(packed.activations, matrix.layout, tile):
                laid = transpose_scales(scale, batch.source) if first else beside
            return grouped_gemm(codes, matrix, batch.expert_offsets, lists[tile], out, x_scale=laid, **more)

        return run
