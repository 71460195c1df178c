"""Compare what the ranks of a layer build: plan, options, and the weights that more than one rank holds.

Ranks that share a layer compute parts of one result. If their plans or weights differ, each still computes something,
and the output mixes two layers without an error. So every rank contributes its settings and checksums of its weights to
one exchange for each process group when the layer is built, and all ranks raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import distributed

from ..errors import InputError, RankError
from .groups import check_ranks
from .input_check import differing_ranks
from .rendezvous import exchange_tables, known_to_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..placement import Placement

__all__ = ["LayerContribution", "SlotWeights", "check_layers", "compare_layers", "compared_groups"]

_PHASE = "building a layer"


class SlotWeights(NamedTuple):
    """The weights in one slot of a rank. sample: checksum of some bytes. checksum: of all bytes, None if not computed.

    The checksum is computed for experts that are in several slots of the layer.
    """

    expert: int
    sample: int
    checksum: int | None = None


class LayerContribution(NamedTuple):
    """What one rank brings to the construction of a layer.

    rank: in torch's default group. expert_rank, slice_rank: among the ranks that split the experts, and their width.
    settings: what all ranks need to have in common, by name. expert_ids: this rank's experts in the order of slots.
    slots: their weights, empty for kernels that pack experts together. whole: checksums of the weights that every rank
    holds, by name. may_repeat: different experts may have the same weights. error: why this rank cannot build the
    layer, empty if it can.
    """

    rank: int
    expert_rank: int = 0
    slice_rank: int = 0
    settings: Mapping[str, Any] = {}
    expert_ids: tuple[int, ...] = ()
    slots: tuple[SlotWeights, ...] = ()
    whole: Mapping[str, int] = {}
    may_repeat: bool = False
    error: str = ""


def compared_groups(placement: Placement | None, dispatcher: str, *, checked: bool) -> tuple[str, ...]:
    """Return the process groups whose ranks compare the layer; empty where nothing is compared.

    The ranks of a layer with partial sums exchange only if it is checked: their caller may build one at a time.
    """
    if placement is None or not (distributed.is_available() and distributed.is_initialized()):
        return ()
    if dispatcher == "partial":
        return placement.groups if checked and _has_groups(placement) else ()
    independent = dispatcher == "local" and placement.tp_size == 1 and not placement.same_tokens
    return () if independent else placement.groups


def _has_groups(placement: Placement) -> bool:
    """Return whether the process groups match ``placement``."""
    try:
        check_ranks("partial", placement)
    except InputError:
        return False
    return True


def compare_layers(
    name: str, groups: Sequence[str], contribution: LayerContribution, error: Exception | None = None
) -> None:
    """Exchange the ``contribution`` of every rank; all ranks of ``groups`` call it together.

    name: of the dispatcher. error: why this rank cannot build the layer, raised here once the other ranks know it.
    Raises as ``check_layers`` does, on every rank, and RankError where a rank does not respond.
    """
    if error is not None:
        contribution = contribution._replace(error=f"{type(error).__name__}: {error}")
    check_layers(name, exchange_tables(contribution, [(_PHASE, group) for group in groups], error))


def check_layers(name: str, table: Sequence[LayerContribution]) -> None:
    """Raise on every rank unless the ranks of ``table`` build one layer.

    name: of the dispatcher. Raises InputError for different settings, and RankError, with the ranks that differ, for
    different weights and where a rank cannot build the layer.
    """
    where = f"{name}: {_PHASE}"
    errors = {entry.rank: entry.error for entry in table if entry.error}
    if errors:
        listing = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
        raise RankError(f"{where}: not every rank can build it: {listing}", ranks=tuple(errors), phase=where)
    _check_settings(where, table)
    _check_coverage(where, table)
    _check_whole(where, table)
    _check_copies(where, table)
    _check_distinct(where, table)


def _check_settings(where: str, table: Sequence[LayerContribution]) -> None:
    differing, majority = differing_ranks({entry.rank: entry.settings for entry in table})
    if not differing:
        return
    by_rank = {entry.rank: entry.settings for entry in table}
    pair = sorted((majority[0], differing[0]))
    first, second = by_rank[pair[0]], by_rank[pair[1]]
    names = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    listing = "; ".join(f"{key} {first.get(key)} and {second.get(key)}" for key in names)
    text = f"{where}: ranks {pair[0]} and {pair[1]} differ: {listing}; every rank has to request the same"
    raise known_to_all(InputError(text))


def _check_coverage(where: str, table: Sequence[LayerContribution]) -> None:
    """Refuse experts that no rank holds, where placements do not list the experts of all ranks."""
    missing = set(range(table[0].settings["num_experts"])).difference(*(entry.expert_ids for entry in table))
    if missing:
        text = f"{where}: no rank holds experts {_join(sorted(missing)[:8])}; every expert needs a rank"
        raise known_to_all(InputError(text))


def _check_whole(where: str, table: Sequence[LayerContribution]) -> None:
    """Compare the weights that every rank holds: router, shared expert, latent projections."""
    by_rank = {entry.rank: entry.whole for entry in table}
    differing, majority = differing_ranks(by_rank)
    if not differing:
        return
    first, second = by_rank[majority[0]], by_rank[differing[0]]
    names = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    listing = "; ".join(f"{key} ({_hexadecimal(second.get(key))}, not {_hexadecimal(first.get(key))})" for key in names)
    raise RankError(
        f"{where}: rank {_join(differing)} differs from rank {_join(majority)} in the weights of {listing}; every rank "
        "holds these whole, so build all ranks from one checkpoint",
        ranks=differing,
        phase=where,
    )


def _check_copies(where: str, table: Sequence[LayerContribution]) -> None:
    """Compare the slots that hold the same slice of the same expert."""
    copies: dict[tuple[int, int], dict[tuple[int, int], SlotWeights]] = {}
    for entry in table:
        for slot, weights in enumerate(entry.slots):
            copies.setdefault((entry.slice_rank, weights.expert), {})[entry.rank, slot] = weights
    for (_, expert), slots in copies.items():
        values = {location: (weights.sample, weights.checksum) for location, weights in slots.items()}
        if len(set(values.values())) == 1:
            continue
        listing = ", ".join(
            f"rank {rank} slot {slot}: {_hexadecimal(sample if checksum is None else checksum)}"
            for (rank, slot), (sample, checksum) in values.items()
        )
        ranks = [rank for rank, _ in values]
        values_by_rank = {rank: [value for (other, _), value in values.items() if other == rank] for rank in ranks}
        differing, _ = differing_ranks(values_by_rank)
        raise RankError(
            f"{where}: the copies of expert {expert} have different weights, found checksums {listing}; build all "
            "ranks from one checkpoint, and pass the experts in the order of Placement.expert_ids",
            ranks=differing or tuple(dict.fromkeys(ranks)),
            phase=where,
        )


def _check_distinct(where: str, table: Sequence[LayerContribution]) -> None:
    """Refuse ranks that hold the same weights, slot by slot, as different experts or different slices.

    Ranks whose experts repeat each other are left out: weights may be constant, or copies of one dense MLP.
    """
    first_entries: dict[tuple[int, ...], LayerContribution] = {}
    for entry in table:
        samples = tuple(weights.sample for weights in entry.slots)
        ids = [weights.expert for weights in entry.slots]
        if entry.may_repeat or len(samples) < 2 or len(set(samples)) < len(set(ids)):
            continue
        other = first_entries.setdefault(samples, entry)
        other_ids = [weights.expert for weights in other.slots]
        if (other_ids, other.slice_rank) == (ids, entry.slice_rank):
            continue
        raise RankError(
            f"{where}: ranks {other.rank} and {entry.rank} hold the same weights, which the placement calls "
            f"{_described(other, other_ids)} and {_described(entry, ids)}; pass each rank the experts and the slice of "
            "its Placement (collegium.parallel.placement.expert_ids_of selects experts)",
            ranks=(entry.rank,),
            phase=where,
        )


def _described(entry: LayerContribution, ids: list[int]) -> str:
    experts = f"experts {_join(ids[:8])}{' ...' if len(ids) > 8 else ''}"
    return f"{experts} (slice {entry.slice_rank})"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _hexadecimal(checksum: int | None) -> str:
    return "none" if checksum is None else f"{checksum % (1 << 64):016x}"
