"""Low-rank adapters (LoRA) of a layer's experts that stay apart from the weights and are chosen for each token.

``ExpertAdapters`` are what a caller passes, ``PackedAdapters`` what kernels read, ``TokenAdapters`` one call's choice.
``AdapterMatrices.add_to`` is the reference of ``kernels/low_rank.py``, and what runs on a CPU.

Shape letters: S adapters, E experts, P projections of a product (gate and up; up alone; down), r rank, K inputs and N
outputs of a projection, T tokens, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import BadScaleError, InputError

__all__ = [
    "FEW_ROWS",
    "AdapterMatrices",
    "AdapterSizes",
    "ExpertAdapter",
    "ExpertAdapters",
    "LowRankPair",
    "PackedAdapters",
    "TokenAdapters",
    "change_rows",
]

_ALIGN = 16  # elements; every matrix begins at a multiple, and ranks of inner rows are rounded up to one
FEW_ROWS = 16  # of an expert, which kernels multiply as one tile
_MAX_CHANGE_RANK = 64  # above, a program would hold too many inner rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankPair:
    """The change of one projection of all experts: ``scale[e] * b[e] @ a[e]`` is added to the weight of expert e.

    a: ``[E, r, K]``. b: ``[E, N, r]``. scale: one number, or one for each expert ``[E]``.
    """

    a: Tensor
    b: Tensor
    scale: float | Tensor = 1.0

    @property
    def rank(self) -> int:
        """r, the largest of the experts' ranks; smaller ones are padded with zeros."""
        return self.a.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertAdapter:
    """One adapter of a layer's experts; None for a projection that it does not change.

    name: for messages. gate is None where the activation has no gate.
    """

    name: str
    gate: LowRankPair | None = None
    up: LowRankPair | None = None
    down: LowRankPair | None = None

    @property
    def pairs(self) -> dict[str, LowRankPair]:
        """The pairs by the name of their projection."""
        pairs = {"gate": self.gate, "up": self.up, "down": self.down}
        return {name: pair for name, pair in pairs.items() if pair is not None}

    @property
    def rank(self) -> int:
        """The largest rank of its projections."""
        return max((pair.rank for pair in self.pairs.values()), default=0)


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of one layer, chosen by their position: ``layer(x, adapter_ids=ids)``."""

    adapters: tuple[ExpertAdapter, ...]

    def __post_init__(self) -> None:
        if not self.adapters:
            raise InputError("ExpertAdapters: no adapter was passed, at least one is needed")

    def __len__(self) -> int:
        return len(self.adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of ids."""
        return tuple(adapter.name for adapter in self.adapters)


class AdapterSizes(NamedTuple):
    """What a plan needs to know of adapters.

    ranks: of each, the largest of its projections. inner_rank: columns of an inner row for each projection. nbytes: of
    all matrices.
    """

    ranks: tuple[int, ...]
    inner_ranks: tuple[int, int]
    nbytes: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{len(self.ranks)} of rank {ranks}, chosen per token; {self.nbytes:,} bytes"


def change_rows(rows: int, experts: int, rank: int) -> int:
    """Return up to how many of ``rows`` rows have their whole changes stored on a GPU, instead of inner rows.

    rank: of inner rows. That many are FEW_ROWS for each of ``experts``, down to a power of two, up to which batches are
    warmed up together.
    """
    if rank > _MAX_CHANGE_RANK:
        return 0
    return min(rows, 1 << ((FEW_ROWS * experts).bit_length() - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterMatrices:
    """The matrices of all adapters for one product, one after the other.

    a, b: flat; A ``[E, r, K]`` and transposed B ``[E, r, N]`` of each adapter and projection. table: int64 ``[S, P,
    3]``, rank and first elements of A and B. scale: float32 ``[S, P, E]``. ranks: the ranks on the host, ``[S][P]``.
    """

    a: Tensor
    b: Tensor
    table: Tensor
    scale: Tensor
    ranks: tuple[tuple[int, ...], ...]
    k_in: int
    n_out: int

    @property
    def projections(self) -> int:
        """P."""
        return self.scale.shape[1]

    @property
    def experts(self) -> int:
        """E."""
        return self.scale.shape[2]

    @property
    def inner_rank(self) -> int:
        """Columns of an inner row for each projection: the largest rank, rounded up to what kernels multiply."""
        largest = max(rank for ranks in self.ranks for rank in ranks)
        return -(-largest // _ALIGN) * _ALIGN

    def add_to(self, out: Tensor, x: Tensor, adapter_ids: Tensor, spans: Iterable[tuple[int, slice]]) -> None:
        """Add the changes of rows ``x [R, K]`` to ``out [R, P * N]``, in float32; other rows stay untouched.

        adapter_ids: ``[R]``, -1 for none; any other id that is no adapter makes the row NaN. spans: experts and their
        rows. Waits for the device.
        """
        count = len(self.ranks)
        wrong = (adapter_ids < -1) | (adapter_ids >= count)
        for expert, span in spans:
            if expert >= self.experts:
                continue  # a merged shared expert, which no adapter changes
            ids = adapter_ids[span]
            for adapter in ids.unique().tolist():
                if 0 <= adapter < count:
                    rows = (ids == adapter).nonzero()[:, 0] + span.start
                    out[rows] = (out[rows].float() + self._change(adapter, expert, x[rows])).to(out.dtype)
            out[span].masked_fill_(wrong[span, None], torch.nan)

    def _change(self, adapter: int, expert: int, x: Tensor) -> Tensor:
        """Return the float32 change ``[rows, P * N]`` of rows of one adapter and expert."""
        changes: list[Tensor] = []
        for projection, rank in enumerate(self.ranks[adapter]):
            _, a_first, b_first = self.table[adapter, projection].tolist()
            a_first += expert * rank * self.k_in
            b_first += expert * rank * self.n_out
            a = self.a[a_first : a_first + rank * self.k_in].view(rank, self.k_in).float()
            b = self.b[b_first : b_first + rank * self.n_out].view(rank, self.n_out).float()
            changes.append((x.float() @ a.T) * self.scale[adapter, projection, expert] @ b)
        return torch.cat(changes, dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedAdapters:
    """The adapters of a layer as kernels read them, in the dtype of the layer's input."""

    names: tuple[str, ...]
    gate_up: AdapterMatrices
    down: AdapterMatrices

    @property
    def count(self) -> int:
        """S."""
        return len(self.names)

    @property
    def sizes(self) -> AdapterSizes:
        """Return what a plan needs to know."""
        both = zip(self.gate_up.ranks, self.down.ranks, strict=True)
        matrices = (self.gate_up, self.down)
        return AdapterSizes(
            ranks=tuple(max(*first, *second) for first, second in both),
            inner_ranks=(self.gate_up.inner_rank, self.down.inner_rank),
            nbytes=sum(t.numel() * t.element_size() for m in matrices for t in (m.a, m.b, m.table, m.scale)),
        )

    @staticmethod
    def pack(
        adapters: ExpertAdapters,
        *,
        experts: int,
        gated: bool,
        intermediate: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedAdapters:
        """Round the matrices to ``dtype`` and lay them out on ``device``.

        Raises InputError for matrices of other sizes than the layer's and for a gate that the layer lacks, and
        BadScaleError for numbers that are not finite, or not finite in ``dtype``.
        """
        first = ("gate", "up") if gated else ("up",)
        sizes = dict.fromkeys(first, (intermediate, hidden)) | {"down": (hidden, intermediate)}
        for adapter in adapters.adapters:
            _check(adapter, sizes, experts)

        def matrices(names: tuple[str, ...]) -> AdapterMatrices:
            return _pack_product(adapters, names, experts, sizes[names[0]], lambda t: _rounded(t, dtype, device))

        return PackedAdapters(names=adapters.names, gate_up=matrices(first), down=matrices(("down",)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdapters:
    """The adapters of a layer and which one each token has: ``ids [T]`` int32 or int64, -1 for none."""

    packed: PackedAdapters
    ids: Tensor


def _check(adapter: ExpertAdapter, sizes: dict[str, tuple[int, int]], experts: int) -> None:
    if not adapter.pairs:
        raise InputError(f"adapter {adapter.name}: it changes no projection; allowed: pairs for {', '.join(sizes)}")
    for name, pair in adapter.pairs.items():
        if name not in sizes:
            raise InputError(
                f"adapter {adapter.name}: it has a pair for {name}, and the layer's activation has no gate; allowed: "
                f"{', '.join(sizes)}"
            )
        rows, columns = sizes[name]
        rank = pair.a.shape[1] if pair.a.dim() == 3 else 0
        shapes = tuple(pair.a.shape), tuple(pair.b.shape)
        allowed = (experts, max(rank, 1), columns), (experts, rows, max(rank, 1))
        if shapes != allowed:
            raise InputError(
                f"adapter {adapter.name}: A and B of {name} are {shapes[0]} and {shapes[1]}, the layer needs "
                f"{allowed[0]} and {allowed[1]}: experts, rank from 1 on, and the layer's sizes"
            )
        scale = torch.as_tensor(pair.scale)
        if scale.shape not in ((), (experts,)):
            raise InputError(
                f"adapter {adapter.name}: scale of {name} is {tuple(scale.shape)}; allowed: one number, or ({experts},)"
            )
        for part, tensor in (("A", pair.a), ("B", pair.b), ("scale", scale)):
            if not bool(tensor.isfinite().all()):
                raise BadScaleError(f"adapter {adapter.name}: {part} of {name} holds NaN or infinity; train it again")


def _rounded(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    result = tensor.detach().to(device=device, dtype=dtype).contiguous()
    if not bool(result.isfinite().all()):
        raise BadScaleError(
            f"an adapter has numbers up to {float(tensor.abs().max()):g}, {dtype} reaches {torch.finfo(dtype).max:g}; "
            "load the layer with dtype='bf16'"
        )
    return result


def _pack_product(
    adapters: ExpertAdapters,
    names: tuple[str, ...],
    experts: int,
    size: tuple[int, int],
    convert: Callable[[Tensor], Tensor],
) -> AdapterMatrices:
    """Return the matrices of the projections ``names`` of one product, whose sizes are ``size``, (N, K)."""
    n_out, k_in = size
    pairs = [[adapter.pairs.get(name) for name in names] for adapter in adapters.adapters]
    ranks = tuple(tuple(0 if pair is None else pair.rank for pair in row) for row in pairs)
    a_pieces: list[Tensor] = []
    b_pieces: list[Tensor] = []
    table = torch.zeros(len(pairs), len(names), 3, dtype=torch.int64, device="cpu")
    scale = torch.zeros(len(pairs), len(names), experts, dtype=torch.float32, device="cpu")
    a_first, b_first = 0, 0
    for index, row in enumerate(pairs):
        for projection, pair in enumerate(row):
            table[index, projection] = torch.tensor((ranks[index][projection], a_first, b_first), device="cpu")
            if pair is None:
                continue
            scale[index, projection] = torch.as_tensor(pair.scale).detach().to("cpu", torch.float32)
            a_pieces.append(_padded(convert(pair.a)))
            b_pieces.append(_padded(convert(pair.b.mT)))
            a_first += a_pieces[-1].numel()
            b_first += b_pieces[-1].numel()
    # A product that no adapter changes has tensors too, for kernels that take pointers.
    a, b = (torch.cat(pieces) if pieces else convert(torch.zeros(_ALIGN)) for pieces in (a_pieces, b_pieces))
    return AdapterMatrices(
        a=a, b=b, table=table.to(a.device), scale=scale.to(a.device), ranks=ranks, k_in=k_in, n_out=n_out
    )


def _padded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` flat, with zeros up to a multiple of ``_ALIGN`` elements."""
    count = math.prod(tensor.shape)
    flat = tensor.new_zeros(-(-count // _ALIGN) * _ALIGN)
    flat[:count] = tensor.reshape(-1)
    return flat
