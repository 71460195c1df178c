"""Arguments of ``peer.py`` and ``mega.py`` in groups; ``arguments.py`` explains what Triton makes of named tuples.

Shape letters: T tokens of this rank, B the maximum number of tokens of a rank, W ranks, K experts per token, E experts,
H width, I intermediate size, G scales of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import CodeFormat, OperandFormat, Projections, Tile

__all__ = [
    "Assignments",
    "ColumnBlock",
    "CombineBuffers",
    "ExpertMapArgs",
    "MegaBlocks",
    "MegaFormat",
    "PassCounts",
    "Peers",
    "Product",
    "RankRows",
    "RouterOutput",
    "Scratch",
    "SourceTokens",
    "TokenRows",
]


class Peers(NamedTuple):
    """How a rank reaches its peers.

    head: int64, flags and counters in front of this rank's symmetric memory (HEAD in ``enums.py``). deltas: int64
    ``[W + 1]``, bytes from this rank's symmetric memory to each peer's, and the address of the host's status word.
    world: W.
    """

    head: Any
    deltas: Any
    world: Any


class RouterOutput(NamedTuple):
    """The routing of this rank's tokens, which kernels put together: its fields are not specialised.

    ids: ``[T, K]``, integers. weights: ``[T, K]``, floating, None where they are not sent. count: T * K assignments.
    """

    ids: Any
    weights: Any
    count: Any
    id_stride: Any
    weight_stride: Any


class ExpertMapArgs(NamedTuple):
    """Where experts are (``parallel/expert_map.py``).

    physical_ids: int32 ``[E, max_replicas]``, of which the first ``replica_counts [E]`` differ. load: int64 ``[E]``,
    counts assignments while the word ``recording`` is not 0.
    """

    physical_ids: Any
    replica_counts: Any
    load: Any
    recording: Any
    num_experts: Any
    max_replicas: Any


class SourceTokens(NamedTuple):
    """Tokens ``x [T, stride]`` of ``columns`` columns, and the size of a row as it is sent.

    padded_columns, groups: of its codes and scales.
    """

    x: Any
    stride: Any
    columns: Any
    padded_columns: Any
    groups: Any


class TokenRows(NamedTuple):
    """Tokens that a rank sends (B rows) or has pulled from all ranks (W * B rows), as ``TokenBuffers`` on the host.

    x: codes or numbers. scale: float32 ``[rows, G]``. ids: int32 ``[rows, K]``, physical ids of tokens that are sent,
    local slots of pulled ones. weights: float32 ``[rows, K]``. None stands for a part that is absent.
    """

    x: Any
    scale: Any
    ids: Any
    weights: Any


class CombineBuffers(NamedTuple):
    """What the sums of this rank's tokens are made of, and where they are written.

    rows: ``[., width]``, results of the experts or sums of ranks. shared: ``[T, shared_stride]`` is added last; None:
    nothing is. out: ``[T, width]``.
    """

    rows: Any
    shared: Any
    out: Any
    width: Any
    shared_stride: Any


class Assignments(NamedTuple):
    """This rank's assignments when results are combined, which kernels put together: its fields are not specialised.

    sent_ids: ``TokenRows.ids`` that were sent. slots: int64 ``[W * B, K]`` of every rank, which of the rank's rows each
    assignment of its pulled tokens is; None: this rank's memory contains the row of each of its assignments, in their
    order. weights: ``[T, K]``, floating, None for ones.
    """

    sent_ids: Any
    slots: Any
    weights: Any
    weight_stride: Any


class RankRows(NamedTuple):
    """What offsets of other ranks' rows follow from. deltas: as in ``Peers``. bound: B. rank: of this rank."""

    deltas: Any
    bound: Any
    local_slots: Any
    rank: Any


class Scratch(NamedTuple):
    """Memory of ``mega_kernel`` that only this rank uses; rows are those of assignments, W * B * K in all.

    counters: int32, zero when a pass begins; their order is in ``mega.py``. lists: int32 ``[local_slots, W * B * K]``,
    the assignments of each expert. middle: ``[W * B * K, columns]``, results of the first products, of which codes
    ``[., padded_columns]`` and scales ``[., groups]`` are what the second ones read.
    """

    counters: Any
    lists: Any
    middle: Any
    codes: Any
    scales: Any
    local_slots: Any
    columns: Any
    padded_columns: Any
    groups: Any


class Product(NamedTuple):
    """Weights of one of the two products, as in ``Weights``, and its tiles.

    n_tiles: tiles of ``Tile.block_n`` weight rows; rows of gate and up alternate in them. row_tiles: tiles of 64 rows
    in the layout of packed weights.
    """

    packed: Any
    scale: Any
    row_scale: Any
    bias: Any
    n_tiles: Any
    row_tiles: Any


class PassCounts(NamedTuple):
    """Numbers of the current pass, which kernels put together: its fields are not specialised.

    epoch: -1 if this rank gave up. layer: number of the layer. bound: B. rank: of this rank. timeout: of a wait for
    another rank, in microseconds.
    """

    epoch: Any
    layer: Any
    bound: Any
    rank: Any
    timeout: Any


class ColumnBlock(NamedTuple):
    """Columns that a program sums at once; compile-time.

    aligned: 16 divides the width. full: ``size`` divides the width.
    """

    size: int
    aligned: bool
    full: bool


class MegaBlocks(NamedTuple):
    """Block sizes of ``mega_kernel``; compile-time. Powers of two, except ``copies``.

    assignments: at least K. ranks: at least W. slots: at least the experts of a rank. tokens: listed and pulled
    together. columns, groups: at least those of a token's codes. words: 32-bit words of codes that are copied in each
    of ``copies`` steps. inner_columns: at least those of the codes between the products. inner_rows: quantised
    together.
    """

    assignments: int
    ranks: int
    slots: int
    tokens: int
    columns: int
    groups: int
    words: int
    copies: int
    inner_columns: int
    inner_rows: int


class MegaFormat(NamedTuple):
    """What ``mega_kernel`` is compiled for.

    first_phase, last_phase: PHASE in ``enums.py``. copy_all: tokens are copied before it is known whether
    they are needed. token_codes, inner_codes: how the rows of the two products are quantised. up, up_projections,
    up_tile and the same for down: the two products; their tiles differ in depth and in ``interleave_gate_up``.
    sums: columns that are summed at once. asm: False in Triton's interpreter.
    """

    first_phase: int
    last_phase: int
    top_k: int
    copy_all: bool
    blocks: MegaBlocks
    token_codes: CodeFormat
    inner_codes: CodeFormat
    up: OperandFormat
    up_projections: Projections
    up_tile: Tile
    down: OperandFormat
    down_projections: Projections
    down_tile: Tile
    sums: ColumnBlock
    asm: bool
