"""Both products of a batch with packed weights, and the flows that run them.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ...adapters import TokenAdapters
from ...errors import InputError
from ...ops.columns import ZeroPointCorrection, gather_columns
from ...ops.operand import Operand, operand, transpose_scales
from ...ops.quantize import AS_IS, ActivationFormat, formats_within, reorder_codes
from ...ops.rows import ExpertScales
from ...ops.scatter import scatter_codes, scatter_rows
from ...problem import Tiles
from ...runtime.launch import align_rows
from ...runtime.machine import Machine
from ...runtime.memory import Memory, alloc, part
from ...types import ActivationSpec, ContiguousBatch, RemoteOutput
from ..base import PackedWeights, refuse_codes
from .dequantized import dequantized_groups
from .grouped import TileList, grouped_gemm, rescale, tile_list
from .low_rank import AdaptedRows, low_rank_rows
from .matrix import PackedMatrix
from .prefill import CodeScales, prefill_gemm
from .tiles.choice import LARGE_BLOCK_N
from .tiles.problem import TileChoice, TunedTiles
from .tiling import ProductTiling, TilePair, product_format, reads_transposed_scales
from .tuning import MeasuredProduct
from .w4_prefill import w4_prefill_gemm

__all__ = ["PackedExperts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts(PackedWeights):
    """Both matrices of all experts and what runs between them.

    Three flows compute the same bits:

    - sorted (``run``): rows in expert order, cut into token tiles; ``grouped_gemm`` gathers the tokens.
    - large (``run`` with many rows): tokens are quantised once and written to expert order first. ``w4_prefill_gemm``
      decodes four-bit weights in registers; ``prefill_gemm`` multiplies the others, which are dequantised once if that
      pays.
    - unsorted (``run_unsorted``): few assignments in the order of their ids, each in a separate tile.

    A batch with adapters never takes the large flow, whose kernel does not add low-rank changes.

    activations: the format of quantised rows, or None to multiply in the dtype of x. input_reach: of a static format.
    tiles, measured, forced: as in ``ProductTiling``. report: what packing rounded, or how it stores weights whose size
    a plan cannot tell. forms: the format of each product's rows. expert_scales: where each expert has separate ones,
    the scales ``[E]`` float32 of both products' rows.
    """

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: ActivationSpec
    machine: Machine
    activations: ActivationFormat | None = None
    input_reach: tuple[float, float] | None = None
    tiles: TilePair | None = None
    measured: tuple[TunedTiles, TunedTiles] = ((), ())
    forced: Tiles | None = None
    report: object | None = None
    expert_scales: tuple[Tensor, Tensor] | None = None
    _tiling: ProductTiling = field(init=False, compare=False, repr=False)
    forms: tuple[ActivationFormat | None, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        form = self.activations
        forms = (None, None) if form is None else formats_within(form, self.input_reach)
        object.__setattr__(self, "forms", forms)
        tiling = ProductTiling(
            gate_up=self.gate_up.layout,
            down=self.down.layout,
            machine=self.machine,
            activations=self.activations,
            tiles=self.tiles,
            measured=self.measured,
            forced=self.forced,
            aligned=self.gate_up.values.data_ptr() % 16 == 0 == self.down.values.data_ptr() % 16,
        )
        object.__setattr__(self, "_tiling", tiling)

    @property
    def tiling(self) -> ProductTiling:
        """How batches are cut."""
        return self._tiling

    @property
    def key(self) -> Hashable:
        """Everything besides the tiling that selects kernel variants of these experts."""
        key: list[Hashable] = [
            self.activation,
            self.machine,
            self.activations,
            self.tiles,
            self.measured,
            self.forced,
        ]
        for matrix in (self.gate_up, self.down):
            key.append(matrix.layout)
            tensors = (matrix.values, matrix.scale, matrix.row_scale, matrix.bias, matrix.order)
            key += [None if t is None else (t.dtype, t.shape, t.data_ptr() % 16) for t in tensors]
        return tuple(key)

    @property
    def input_codes(self) -> tuple[str, int] | None:
        """Format and order of the first product's codes; None where it multiplies tokens, or scales are calibrated."""
        form = self.activations
        if form is None or form.static or not form.e4m3:
            return None
        return form.name, self.gate_up.layout.row_order

    def output_spec(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return H and the dtype of stored rows: bfloat16 or the multiplied dtype of tokens; float32 for others."""
        same_dtype = self.activations is None or dtype == torch.bfloat16
        return self.down.layout.shape[2], dtype if same_dtype else torch.float32

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]``: both products of every row, in the dtype of ``output_spec``.

        Rounding a row to bfloat16 adds 0.17 % of its size at most to the layer's error, to float16 0.02 %, and halves
        the largest traffic of a big batch. An output beyond float16 is infinite before its weight multiplies it, as in
        transformers. Nothing waits for the device; rows from ``expert_offsets[E]`` on are uninitialised. With
        ``batch.remote`` the second product stores rows at its offsets, and ``remote.rows`` is returned; raises
        InputError where those do not have the width and dtype of ``output_spec``.
        """
        form = self.activations
        refuse_codes(batch, "experts in Triton", form.name if form is not None and form.e4m3 else None)
        count = batch.source.numel()
        out = self._output(batch.remote, count, batch.dtype or batch.x.dtype, batch.x.device, memory)
        if count == 0:
            return out
        x = align_rows(batch.x)
        # A kernel that reads x must not overlap the kernel that copies x.
        batch = replace(batch, x=x, x_ready=batch.x_ready and x is batch.x)
        rows = count if batch.rows is None else batch.rows
        large = self.tiling.large(rows) if batch.adapters is None else None
        if large is not None:
            return self._run_large(batch, large, out, memory)
        return self._run_sorted(batch, self.tiling.pair(rows), out, memory)

    def run_unsorted(
        self, x: Tensor, ids: Tensor, memory: Memory | None = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Return ``[T * K, H]``: what ``run`` returns for few assignments, in the order of ``ids`` and not sorted.

        ids: contiguous ``[T, K]`` integers; rows of ids outside ``0..E-1`` are uninitialised. adapters: of the tokens.
        """
        x = align_rows(x)
        count, top_k = ids.numel(), ids.shape[1]
        out = self._output(None, count, x.dtype, x.device, memory)
        # Where tokens were quantised, which waits for the routing, the ids were complete before the first product.
        first = TileList(
            expert=ids,
            row=ids,
            count=count,
            tile=self._unsorted_tiles(count)[0],
            top_k=top_k,
            early=self.activations is not None,
        )
        second = replace(first, tile=self._unsorted_tiles(count)[1], early=True)
        memory_x = part(memory, "x")
        source: Tensor | None = ids
        adapted = None if adapters is None else AdaptedRows(adapters.ids, ids, ids, count)
        tokens = x
        x, x_scale = operand(x, self.forms[0], order=self.gate_up.layout.row_order, memory=memory_x)
        if self.gate_up.order is not None:
            x = gather_columns(x, self.gate_up.order, ids, ids, top_k=top_k, memory=memory_x)
            source = None
        x, x_scale = rescale((x, x_scale), self.gate_up, None, memory_x)
        if isinstance(x_scale, Tensor) and reads_transposed_scales(self.activations, self.gate_up.layout, first.tile):
            # The product reads transposed scales by assignment. Only measured tiles are that tall for so few rows.
            token = torch.arange(count, device=x.device) // top_k
            x_scale = transpose_scales(x_scale, token, memory=memory_x)
        middle = self._middle(count, out, memory)
        first = _with_changes(first, tokens, adapters, adapted, memory, gathered=True)
        grouped_gemm(x, self.gate_up, ids, first, middle, source=source, x_scale=x_scale, activation=self.activation)
        h, h_scale = self._second_operand(middle, second, None, memory)
        second = _with_changes(second, middle, adapters, adapted, memory)
        return grouped_gemm(h, self.down, ids, second, out, x_scale=h_scale)

    def products(self) -> tuple[MeasuredProduct, ...]:
        """Return gate_up and down."""
        gate_up = MeasuredProduct(
            name="gate_up",
            matrix=self.gate_up,
            tiling=self.tiling,
            activation=self.activation,
            form=_without_scales(self.forms[0]),
            first=True,
        )
        form = _without_scales(self.forms[1])
        return gate_up, replace(gate_up, name="down", matrix=self.down, form=form, first=False)

    def with_measured(self, tables: Mapping[str, TunedTiles]) -> PackedExperts:
        """Return the same experts with measured tiles."""
        return replace(self, measured=(tables["gate_up"], tables["down"]))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedExperts:
        scales = self.expert_scales
        return replace(
            self,
            gate_up=self.gate_up.map_tensors(change),
            down=self.down.map_tensors(change),
            expert_scales=None if scales is None else (change(scales[0]), change(scales[1])),
        )

    def reach_of(self, slot: int) -> tuple[float, float] | None:
        """Return the largest inputs of ``slot`` that do not saturate."""
        if self.expert_scales is None or self.activations is None:
            return self.input_reach
        first, second = (float(scales[slot]) * self.activations.max_value for scales in self.expert_scales)
        return first, second

    def _form_of(self, product: int, batch: ContiguousBatch) -> ActivationFormat | None:
        """Return the format of the rows of product 0 or 1, with scales of their experts or tokens if there are any."""
        form = self.forms[product]
        if product == 1 and form is not None and batch.middle_scale is not None:
            # Rows without an expert have any source.
            return form.with_row_scales(batch.middle_scale[batch.source.clamp(0, batch.x.shape[0] - 1)])
        if form is None or self.expert_scales is None:
            return form
        return form.with_expert_scales(ExpertScales(self.expert_scales[product], batch.expert_offsets))

    def _output(
        self, remote: RemoteOutput | None, count: int, dtype: torch.dtype, device: torch.device, memory: Memory | None
    ) -> Tensor:
        """Return the tensor that ``count`` rows of tokens of ``dtype`` are written to."""
        width, out_dtype = self.output_spec(dtype)
        if remote is None:
            return alloc(memory, "rows", (count, width), out_dtype, device)
        if remote.rows.shape[1:] != (width,) or remote.rows.dtype != out_dtype:
            raise InputError(
                f"remote output: found rows of {remote.rows.shape[1]} {remote.rows.dtype}, allowed: rows of {width} "
                f"{out_dtype}, as output_spec returns them"
            )
        return remote.rows

    def _middle(self, count: int, out: Tensor, memory: Memory | None) -> Tensor:
        """Return the tensor for rows between the products, in the dtype of ``out`` or float32 (``exact_rows``)."""
        form = self.activations
        dtype = torch.float32 if form is not None and form.exact_rows else out.dtype
        return alloc(memory, "middle", (count, self.gate_up.layout.shape[2]), dtype, out.device)

    def _unsorted_tiles(self, count: int) -> TilePair:
        """Return the tiles of ``count`` unsorted assignments, which always overlap the previous kernel."""
        first, second = self.tiling.pair(count)
        return replace(first, overlap=self.machine.pdl), replace(second, overlap=self.machine.pdl)

    def _run_sorted(self, batch: ContiguousBatch, tiles: TilePair, out: Tensor, memory: Memory | None) -> Tensor:
        """Write both products to ``out``, with token tiles of rows in expert order."""
        offsets, memory_x = batch.expert_offsets, part(memory, "x")
        first = _tile_list(batch, tiles[0], memory, "first")
        if tiles[1].block_t == tiles[0].block_t:
            second = replace(first, tile=tiles[1])
        else:
            second = _tile_list(batch, tiles[1], memory, "second")
        # The tile lists were complete before the first product started.
        second = replace(second, row_offsets=_row_offsets(batch), early=True)
        source: Tensor | None = None
        if batch.input_weights is None and self.expert_scales is None:
            x, x_scale = self._token_operand(batch, memory_x)
            source = batch.source
        else:
            # A weight or an expert's scale belongs to a row, so such rows are gathered before the product.
            x, x_scale = self._gathered_operand(batch, self._form_of(0, batch), memory_x)
        if self.gate_up.order is not None:
            x = gather_columns(x, self.gate_up.order, offsets, source, memory=memory_x)
            source = None
        x, x_scale = rescale((x, x_scale), self.gate_up, None, memory_x)
        if isinstance(x_scale, Tensor) and reads_transposed_scales(self.activations, self.gate_up.layout, first.tile):
            x_scale = transpose_scales(x_scale, source, used=_used_rows(batch), memory=memory_x)
        middle = self._middle(batch.source.numel(), out, memory)
        adapters, adapted = batch.adapters, _adapted_rows(batch)
        first = _with_changes(first, batch.x, adapters, adapted, memory, gathered=True)
        grouped_gemm(
            x, self.gate_up, offsets, first, middle, source=source, x_scale=x_scale, activation=self.activation
        )
        h, h_scale = self._second_operand(middle, second, batch, memory)
        second = _with_changes(second, middle, adapters, adapted, memory)
        return grouped_gemm(h, self.down, offsets, second, out, x_scale=h_scale)

    def _run_large(self, batch: ContiguousBatch, tiles: TilePair, out: Tensor, memory: Memory | None) -> Tensor:
        """Write both products to ``out``, tokens put in expert order first, with the bits of the small tiles."""
        count, offsets, used = batch.source.numel(), batch.expert_offsets, _used_rows(batch)
        x, x_scale = self._large_operand(batch, tiles[0], part(memory, "x"))
        codes = None if batch.middle_scale is not None else self._middle_codes(count, out, memory)
        if codes is None:
            middle = self._middle(count, out, memory)
        else:
            shape = (count, self.gate_up.layout.shape[2])
            middle = alloc(memory, "middle", shape, torch.float8_e4m3fn, out.device)
        size = max(self.gate_up.layout.dequantized_bytes, self.down.layout.dequantized_bytes)
        buffer = alloc(memory, "expanded", (size,), torch.int8, out.device) if size else None
        groups = partial(dequantized_groups, buffer=buffer, offsets=offsets, rows=count, memory=part(memory, "second"))
        first = second = _tile_list(batch, tiles[0], memory, "first")
        for matrix, group_offsets, listed in groups(self.gate_up, tiles=first):
            _multiply_large(
                x, matrix, group_offsets, listed, middle, x_scale=x_scale, activation=self.activation, codes=codes
            )
        if tiles[1] != tiles[0]:
            second = _tile_list(batch, tiles[1], memory, "second")
        if codes is None:
            form, order = self._form_of(1, batch), self.down.layout.row_order
            if self.down.layout.in_registers:
                form = product_format(form, self.down.layout, tiles[1])
            rows = operand(middle, form, order=order, used=used, memory=part(memory, "h"))
            h, h_scale = rescale(rows, self.down, used, part(memory, "h"))
        else:
            h, h_scale = middle, codes.scale
        for matrix, group_offsets, listed in groups(self.down, tiles=second):
            placed = replace(listed, row_offsets=_row_offsets(batch))
            _multiply_large(h, matrix, group_offsets, placed, out, x_scale=h_scale)
        return out

    def _large_operand(
        self, batch: ContiguousBatch, tile: TileChoice, memory: Memory | None
    ) -> tuple[Tensor, Tensor | ZeroPointCorrection | None]:
        """Return the first product's operand of a large batch with ``tile``, in expert order."""
        used, layout, order = _used_rows(batch), self.gate_up.layout, self.gate_up.order
        if order is not None and batch.input_weights is None:
            return gather_columns(batch.x, order, batch.expert_offsets, batch.source, memory=memory), None
        form = self._form_of(0, batch)
        if layout.in_registers:
            form = product_format(form, layout, tile)
        x, x_scale = self._ordered_operand(batch, form, memory)
        if order is not None:
            x = gather_columns(x, order, batch.expert_offsets, None, memory=memory)
        return rescale((x, x_scale), self.gate_up, used, memory)

    def _middle_codes(self, count: int, out: Tensor, memory: Memory | None) -> CodeScales | None:
        """Return where a large batch's first product stores scales, or None where it does not quantise its result."""
        form = self.activations
        if form is None or form.group != LARGE_BLOCK_N:
            return None
        if self.gate_up.layout.in_registers or self.down.layout.in_registers:
            return None
        groups = -(-self.gate_up.layout.shape[2] // LARGE_BLOCK_N)
        scale = alloc(memory, "scales", (count, groups), torch.float32, out.device)
        return CodeScales(scale=scale, power=form.power, rounded=out.dtype == torch.bfloat16)

    def _token_operand(self, batch: ContiguousBatch, memory: Memory | None) -> Operand:
        """Return the first product's operand, one row per token: received codes, or the tokens quantised here."""
        order = self.gate_up.layout.row_order
        if batch.scale is None:
            return operand(batch.x, self.forms[0], order=order, x_ready=batch.x_ready, memory=memory)
        return reorder_codes(batch.x, _reorder(batch.order, order)), batch.scale

    def _ordered_operand(self, batch: ContiguousBatch, form: ActivationFormat | None, memory: Memory | None) -> Operand:
        """Return the first product's operand in expert order, each token read once where nothing belongs to its rows.

        form: of the rows. Raises InputError for received codes without ``slots``.
        """
        rows, order = batch.source.numel(), self.gate_up.layout.row_order
        if batch.scale is not None:
            if batch.slots is None:
                raise InputError("a large batch of codes has no slots; pass those of ops.permute.permute")
            reorder = _reorder(batch.order, order)
            transposed = form is not None and form.transposed_scales
            return scatter_codes(
                batch.x, batch.scale, batch.slots, rows, reorder=reorder, transposed=transposed, memory=memory
            )
        # The rows of a single expert, a shared one for instance, are as many as its tokens.
        single = self.gate_up.layout.shape[0] == 1
        if single or batch.slots is None or batch.input_weights is not None or self.expert_scales is not None:
            return self._gathered_operand(batch, form, memory)
        return scatter_rows(batch.x, form, batch.slots, rows, order=order, x_ready=batch.x_ready, memory=memory)

    def _gathered_operand(
        self, batch: ContiguousBatch, form: ActivationFormat | None, memory: Memory | None
    ) -> Operand:
        """Return the first product's operand in expert order, times the input weights where there are any.

        form: of the rows.
        """
        return operand(
            batch.x,
            form,
            source=batch.source,
            weights=batch.input_weights,
            order=self.gate_up.layout.row_order,
            used=_used_rows(batch),
            memory=memory,
        )

    def _second_operand(
        self, middle: Tensor, tiles: TileList, batch: ContiguousBatch | None, memory: Memory | None
    ) -> tuple[Tensor, Tensor | ZeroPointCorrection | None]:
        """Return rows between the products as the second product reads them with ``tiles``; batch: None if unsorted."""
        used = None if batch is None else _used_rows(batch)
        between = self.forms[1] if batch is None else self._form_of(1, batch)
        form = product_format(between, self.down.layout, tiles.tile)
        memory_h = part(memory, "h")
        rows = operand(middle, form, order=self.down.layout.row_order, used=used, memory=memory_h)
        return rescale(rows, self.down, used, memory_h)


def _multiply_large(
    x: Tensor,
    matrix: PackedMatrix,
    offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    x_scale: Tensor | ZeroPointCorrection | None,
    activation: ActivationSpec | None = None,
    codes: CodeScales | None = None,
) -> None:
    """Write one product of a large batch to ``out``; arguments as in ``prefill_gemm``."""
    if not matrix.layout.in_registers:
        prefill_gemm(x, matrix, offsets, tiles, out, x_scale=x_scale, activation=activation, codes=codes)
        return
    assert codes is None
    assert not isinstance(x_scale, ZeroPointCorrection)
    w4_prefill_gemm(x, matrix, offsets, tiles, out, x_scale=x_scale, activation=activation)


def _without_scales(form: ActivationFormat | None) -> ActivationFormat | None:
    """Return the format for rows of no expert, whose scales are computed: as fast, for measuring products."""
    return form if form is None or not form.by_expert else replace(form, static=False, by_expert=False)


def _reorder(order: int, requested: int) -> int:
    """Return the order to bring received codes into, AS_IS where they have the requested one."""
    if order not in (AS_IS, requested):
        raise InputError(f"the batch is codes in order {order}, this product reads order {requested}")
    return AS_IS if order == requested else requested


def _used_rows(batch: ContiguousBatch) -> Tensor | None:
    """Return how many rows have an expert, on the device, for a batch with room for more rows than expected."""
    return None if batch.rows is None else batch.expert_offsets[-1:]


def _adapted_rows(batch: ContiguousBatch) -> AdaptedRows | None:
    """Return the rows of a batch with adapters, None for another batch."""
    if batch.adapters is None:
        return None
    count = batch.source.numel()
    return AdaptedRows(batch.adapters.ids, batch.source, batch.expert_offsets, count, batch.input_weights)


def _with_changes(
    tiles: TileList,
    x: Tensor,
    adapters: TokenAdapters | None,
    rows: AdaptedRows | None,
    memory: Memory | None,
    *,
    gathered: bool = False,
) -> TileList:
    """Return ``tiles`` with the adapters' changes of the first product (gathered) or the second, if there are any."""
    if adapters is None or rows is None:
        return tiles
    matrices = adapters.packed.gate_up if gathered else adapters.packed.down
    if not gathered:
        rows = rows._replace(input_weights=None)
    memory = part(memory, "gate_up_adapters" if gathered else "down_adapters")
    return replace(tiles, low_rank=low_rank_rows(x, matrices, rows, tiles, gathered=gathered, memory=memory))


def _row_offsets(batch: ContiguousBatch) -> Tensor | None:
    return None if batch.remote is None else batch.remote.offsets


def _tile_list(batch: ContiguousBatch, tile: TileChoice, memory: Memory | None, name: str) -> TileList:
    """Return the tile list that came with the batch, or list the tiles."""
    for rows in batch.tiles:
        if rows.block_t == tile.block_t:
            return TileList(expert=rows.expert, row=rows.row, count=rows.row.numel(), tile=tile, used=rows.used)
    return tile_list(batch.expert_offsets, batch.source.numel(), tile, part(memory, name))
