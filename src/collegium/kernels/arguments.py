"""Arguments of kernels, grouped in named tuples.

Triton passes each field of a tuple as a separate argument and specialises it: whether an address or size is divisible
by 16, and the integer 1, are compiled in. Arguments for which that would compile a kernel again from batch to batch
stay separate parameters, listed in ``do_not_specialize``. A tuple of compile-time values is one ``tl.constexpr``
parameter.

The host makes these tuples, so this module does not import Triton. Fields of type ``Any`` are tensors on the host and
pointers in a kernel. Shape letters: T tokens, R rows, E experts, P projections (2: gate and up; 1), N outputs of a
projection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "ActivationBounds",
    "AdapterRows",
    "CodeFormat",
    "CodeRows",
    "ExpertGroups",
    "InputRows",
    "LinearTile",
    "MatrixRows",
    "OperandFormat",
    "PagingTables",
    "PermutationFormat",
    "Projections",
    "RoutingFormat",
    "RowOrder",
    "ScoreUpdate",
    "SumOrder",
    "Tile",
    "Tokens",
    "WeightStrides",
    "Weights",
]


class Tokens(NamedTuple):
    """The rows that are multiplied.

    x: ``[T or R, stride]``, of the operand dtype. scale: float32, in the layout ``OperandFormat.x_scale``; any tensor
    if rows have no scale. sums: float16 ``[T or R, 32 * K blocks]``, sums of the rows' columns, for weights with
    minima (``ops/columns.py``); any tensor for other weights. scale_stride: elements from the scales of one K block to
    those of the next.
    """

    x: Any
    scale: Any
    sums: Any
    stride: int
    scale_stride: int


class Weights(NamedTuple):
    """A packed weight matrix of all experts.

    packed: codes or numbers. scale: of blocks or groups. row_scale: float32, one for each row; for codes that index a
    table, the table. bias: ``[E, P, N]``. A missing tensor is replaced by another one of the matrix.
    """

    packed: Any
    scale: Any
    row_scale: Any
    bias: Any


class WeightStrides(NamedTuple):
    """Elements of ``Weights.packed`` from one row, K block and matrix (expert and projection) to the next.

    scale_rows: rows of the block scales of a matrix, ceil(N / 128).
    """

    row: int
    k_block: int
    matrix: int
    scale_rows: int


class ActivationBounds(NamedTuple):
    """The numbers in an activation's formula (``types.ActivationSpec``); gate_bound: beta of swiglu_oai."""

    limit: float
    alpha: float
    gate_bound: float
    up_bound: float


class AdapterRows(NamedTuple):
    """The adapters of a product and those of its rows (``low_rank.py``).

    ids: ``[T]`` integers, the adapter of each token; -1: none. source: int64 ``[R]``, the token of each row; any tensor
    where rows are not sorted. inner: float32 ``[R, P, rank]``, the rows times A, or changes ``[R, P, N]``. a, b: one
    after the other, A ``[E, rank, K]`` and transposed B ``[E, rank, N]`` of each adapter and projection. table: int64
    ``[adapters, P, 3]``, rank and first elements of A and B. count: of adapters. experts: E; experts from there on,
    merged shared ones, have no matrices.
    """

    ids: Any
    source: Any
    inner: Any
    a: Any
    b: Any
    table: Any
    count: int
    experts: int


class OperandFormat(NamedTuple):
    """How both operands of a product are stored; compile-time.

    weight, scale, x_scale: numbers of ``enums.py``. words: 32-bit words of scales for each row and K block. row_scale,
    bias: whether the weights have them. k_blocks: blocks of ``block_k`` columns. even_k: ``block_k`` divides K.
    """

    weight: int
    scale: int
    words: int
    x_scale: int
    row_scale: bool
    bias: bool
    k_blocks: int
    block_k: int
    even_k: bool


class Projections(NamedTuple):
    """What a product computes; compile-time.

    count: 2 for gate and up, otherwise 1. activation: NO_ACTIVATION, or a position in ``types.ACTIVATION_KINDS``, plus
    FAST_MATH. has_limit: whether ``ActivationBounds.limit`` applies. adapter_rank: of ``AdapterRows.inner``, a multiple
    of 16; 0 without adapters. stored_changes: ``AdapterRows.inner`` has the changes of rows.
    """

    count: int
    activation: int
    has_limit: bool
    adapter_rank: int = 0
    stored_changes: bool = False


class Tile(NamedTuple):
    """The part of a product that one program computes, and how; compile-time.

    block_n: weight rows. block_t: token rows. group_t: token tiles that share a pass over the columns. narrow: a tile
    with few rows is multiplied as one of half or a quarter of block_t. depth: K blocks per step of the loop. stages: of
    the software pipeline. interleave_gate_up: eight rows of gate and eight of up alternate in one operand.
    fuse_k_block: a K block of decoded weights is one operand instead of four.
    """

    block_n: int
    block_t: int
    group_t: int
    narrow: bool
    depth: int
    stages: int
    interleave_gate_up: bool
    fuse_k_block: bool
    warps: int


class RowOrder(NamedTuple):
    """Where rows are read and written; compile-time.

    gather: row r is read at ``source[r]``; with top_k, at ``r // top_k``. top_k: not 0 if each assignment is a tile of
    one row. row_map: a divisor of all entries of ``row_map``, 0 if rows are written in order.
    """

    gather: bool
    top_k: int
    row_map: int


class InputRows(NamedTuple):
    """Rows that a kernel reads: row r is ``x[index[r]] * weights[r]``.

    x: ``[T, stride]``, of which ``columns`` are read. index: int64 ``[rows]``, None where row r is ``x[r]``. weights:
    float32 ``[rows]``, None where rows are not weighted.
    """

    x: Any
    index: Any
    weights: Any
    rows: Any
    columns: Any
    stride: Any


class CodeRows(NamedTuple):
    """Rows of codes that a kernel writes, and their scales.

    codes: ``[rows, columns]``. scales: ``[rows, groups]``, or ``[groups, scale_stride]``, transposed, where
    ``scale_stride`` is not None; words: ``[ceil(groups / 4), scale_stride]``.
    """

    codes: Any
    scales: Any
    rows: Any
    columns: Any
    groups: Any
    scale_stride: Any


class CodeFormat(NamedTuple):
    """How rows are stored as E4M3 codes and scales; compile-time.

    group: columns that share a scale. power_of_two: scales are powers of two. e8m0: they are stored as E8M0 bytes.
    reorder: columns change places within 128 (``reorder_codes`` of ``ops/quantize.py``). software_rounding: the kernel
    rounds codes itself, because Triton's interpreter rounds them wrongly. words: E8M0 bytes are stored four in an
    int32, transposed.
    """

    group: int
    power_of_two: bool
    e8m0: bool
    reorder: bool
    software_rounding: bool
    words: bool = False


class PagingTables(NamedTuple):
    """Where the experts of a layer are, in GPU memory; S slots hold some of the E experts. int32 unless noted.

    expert_slot: ``[E]``, -1 for an expert without a slot. slot_expert: ``[S]``, -1 for an empty slot. scores: float32
    ``[E]``; low ones lose their slot first. needed: ``[E]``, 0 between passes. counters: int64 ``[2]``, needed experts
    of all passes that had a slot, and that had none.

    Of the last pass: place: ``[E]``, round times S plus slot of the experts it needed, -1 for the others. copy_expert,
    copy_slot: ``[E]``, the copies in their order. round_start: ``[2 * E + 4]``, the first copy of each round, then all
    others. ready: ``[1]``, how many copies of the first round that has any go to slots without a needed expert.
    keys: float32 ``[S]``, order: ``[S]``, scratch.
    """

    expert_slot: Any
    slot_expert: Any
    scores: Any
    needed: Any
    counters: Any
    place: Any
    copy_expert: Any
    copy_slot: Any
    round_start: Any
    keys: Any
    order: Any
    ready: Any


class PermutationFormat(NamedTuple):
    """What ``permute.py`` sorts and writes; compile-time.

    top_k: assignments of a token. block_e: experts, rounded up to a power of two. block_t_a, block_t_b: rows of a tile
    in the two tile lists, 0 where a list is not written. element_bytes: of the rows that ``row_map`` places.
    """

    top_k: int
    block_e: int
    block_t_a: int
    block_t_b: int
    element_bytes: int


class RoutingFormat(NamedTuple):
    """How ``route.py`` chooses and weights experts; compile-time.

    score: index in ``types.SCORE_FUNCTIONS``. top_k: experts of a token. block_k: top_k rounded up to a power of two.
    renormalize: whether weights are divided by their sum.
    """

    score: int
    top_k: int
    block_k: int
    renormalize: bool


class ExpertGroups(NamedTuple):
    """Groups of experts of which ``route.py`` chooses the best; compile-time.

    block_g, block_s: groups and experts of a group, rounded up to powers of two. top: groups that are chosen, 0 where
    experts of all groups are. top2_sum: a group's score is the sum of its two best instead of its best.
    """

    block_g: int
    block_s: int
    top: int
    top2_sum: bool


class MatrixRows(NamedTuple):
    """Rows of a matrix with contiguous elements; stride: from one row to the next, 0 where all are the same row."""

    rows: Any
    stride: int


class ScoreUpdate(NamedTuple):
    """How the score of an expert changes in a pass that needs it, and in any other: times a factor, plus a step."""

    needed_factor: float
    needed_step: float
    other_factor: float
    other_step: float


class SumOrder(NamedTuple):
    """The order of a sum over blocks of K in ``linear_kernel``; compile-time.

    split: each program computes one part; otherwise a program computes all and adds them. part_blocks: blocks of a
    part. program_blocks: blocks that a program multiplies.
    """

    split: bool
    part_blocks: int
    program_blocks: int


class LinearTile(NamedTuple):
    """The tile of ``linear_kernel``; compile-time. stages: of the software pipeline."""

    block_n: int
    block_t: int
    block_k: int
    stages: int
