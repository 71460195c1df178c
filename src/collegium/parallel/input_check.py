"""Compare what ranks bring to a pass where all of them have to bring the same: tokens, routing, and what chooses it.

Ranks with ``same_tokens`` and the ranks that hold slices of the same experts compute parts of one output. With other
inputs each of them still computes something, and the output mixes tokens without an error. Hashes of the inputs and of
the chosen experts are exchanged on the host before anything else is sent, so all ranks come to the same verdict and all
raise. A rank that raises in a pass which is not compared, while the others go on, compares its next pass: they do not,
and all raise.

A layer with ``checked=True`` compares every pass. Any other layer compares the first pass of each kind, which finds a
mistake in the wiring of a program, and then costs nothing. Passes that a CUDA graph captures are never compared: the
host cannot read tensors there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from ..errors import InputError, RankError
from .bit_hash import bit_hash, one_value
from .groups import check_ranks
from .rendezvous import group_lock, known_to_all, rendezvous_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ..placement import Placement

__all__ = [
    "FIRST_PASSES",
    "Contribution",
    "Fingerprint",
    "InputCheck",
    "check_contributions",
    "compared_words",
    "differing_ranks",
    "fingerprints",
    "input_check",
]

# Passes of a kind that are compared when all elements of x are equal, as in a dummy batch of zeros, which every rank
# has by chance; one is enough for any other batch. 0 turns the first comparisons off; all ranks need the same number.
FIRST_PASSES = 3


class Fingerprint(NamedTuple):
    """A tensor by its dtype, its shape and the hash of its bits."""

    dtype: str
    shape: tuple[int, ...]
    bits: int

    def __str__(self) -> str:
        """Return dtype and shape."""
        return f"{self.dtype} {list(self.shape)}"


class Contribution(NamedTuple):
    """What one rank brings to a pass.

    rank: in torch's default group. layer: its number among those built over the group, 0 where the caller does not
    compare it. inputs: of every tensor by name, None in passes whose inputs are not compared. constant: all elements of
    x have one value. error: why this rank cannot run the pass, empty if it can.
    """

    rank: int
    tokens: int
    layer: int = 0
    inputs: Mapping[str, Fingerprint] | None = None
    constant: bool = False
    error: str = ""


def fingerprints(tensors: Mapping[str, Tensor | None], x: Tensor) -> tuple[dict[str, Fingerprint], bool]:
    """Return the fingerprint of each of ``tensors``, and whether all elements of ``x`` have one value.

    Waits for the device once.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    numbers = [bit_hash(tensor) for tensor in present.values()] + [one_value(x).to(torch.int64)]
    *hashes, constant = torch.stack(numbers).tolist()
    found = {
        name: Fingerprint(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bits)
        for (name, tensor), bits in zip(present.items(), hashes, strict=True)
    }
    return found, bool(constant)


def differing_ranks(values: Mapping[int, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks whose value is not the most frequent one, and those that have it.

    values: by rank. Of values that are equally frequent, the one of the lowest rank is taken.
    """
    ranks = sorted(values)
    agreeing = [tuple(other for other in ranks if values[other] == values[rank]) for rank in ranks]
    majority = max(agreeing, key=len)
    return tuple(rank for rank in ranks if rank not in majority), majority


def check_contributions(name: str, table: Sequence[Contribution]) -> None:
    """Raise on every rank unless the ranks of ``table``, which have to bring the same, do.

    name: of what needs the same inputs. Raises InputError for different layers and numbers of tokens, and RankError,
    with the ranks that differ from the majority, for anything else.
    """
    failed = {each.rank: each.error for each in table if each.error}
    if failed:
        listed = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise RankError(
            f"{name}: nothing was sent, because not every rank can run this pass: {listed}",
            ranks=tuple(failed),
            phase=f"{name} dispatch",
        )
    layers, counts = [each.layer for each in table], [each.tokens for each in table]
    if len(set(layers)) > 1:
        text = (
            f"{name}: every rank has to call the same layer, found layers {layers} by rank, numbered as they were "
            "built; call layers in the same order on every rank"
        )
        raise known_to_all(InputError(text))
    if len(set(counts)) > 1:
        text = (
            f"{name}: every rank has to be called with the same tokens, found {counts} of them by rank; give all ranks "
            "the same input, or make the ranks with same_tokens=False and without slices"
        )
        raise known_to_all(InputError(text))
    _check_inputs(name, table)


def _check_inputs(name: str, table: Sequence[Contribution]) -> None:
    others, rest = differing_ranks({each.rank: each.inputs for each in table})
    if not others:
        return
    by_rank = {each.rank: each.inputs for each in table}
    first, other = by_rank[rest[0]], by_rank[others[0]]
    if first is None or other is None:
        comparing = tuple(rank for rank, inputs in by_rank.items() if inputs is not None)
        said = f"rank {_listed(comparing)} compares the inputs of this pass, and the other ranks do not"
        do = "every rank has to make the same calls of the same layers, with checked= alike"
    else:
        said = f"rank {_listed(others)} differs from rank {_listed(rest)} in {_differences(first, other)}"
        do = (
            "give all ranks the same tokens and the same routing, equal in every bit; a caller whose ranks have "
            "different tokens needs Ranks.of(same_tokens=False) without slices. FIRST_PASSES = 0 in "
            "collegium.parallel.input_check, on all ranks, turns the first comparisons off"
        )
    raise RankError(
        f"{name}: every rank has to be called with the same tokens; {said}. Nothing was sent: {do}",
        ranks=others,
        phase=f"{name} dispatch",
    )


def _differences(first: Mapping[str, Fingerprint], other: Mapping[str, Fingerprint]) -> str:
    """Return in words which inputs differ, and how."""
    texts: list[str] = []
    for name in {**first, **other}:
        one, two = first.get(name), other.get(name)
        if one is None or two is None:
            texts.append(f"{name} ({'missing' if two is None else two}, not {'missing' if one is None else one})")
        elif one[:2] != two[:2]:
            texts.append(f"{name} ({two}, not {one})")
        elif one != two:
            texts.append(f"the values of {name} ({one})")
    return ", ".join(texts)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class InputCheck:
    """The comparison of one layer, which counts the passes that were compared.

    groups: name and process group of each exchange, in the order in which dispatchers exchange. size: ranks next to
    each other in the gathered table that have to bring the same; 1: none. every: compare every pass. layer: the number
    that the first dispatcher compares.
    """

    def __init__(self, groups: tuple[tuple[str, str], ...], *, size: int, whole: bool, every: bool, layer: int) -> None:
        """Compare nothing yet. whole: all ranks of ``groups`` have to bring the same."""
        self.groups, self.every, self.layer = groups, every, layer
        self._size, self._whole = size, whole
        self._compared: dict[Any, int] = {}

    @property
    def compares(self) -> bool:
        """Whether two ranks have to bring the same."""
        return self._size > 1

    def due(self, tokens: int, given: tuple[bool, ...]) -> bool:
        """Return whether a pass of ``tokens`` tokens is to be compared; ``given``: which optional inputs it has.

        All ranks come to the same answer without an exchange, as long as they make the same calls.
        """
        return self.every or (self.compares and self._compared.get(self._kind(tokens, given), 0) < FIRST_PASSES)

    def forget(self) -> None:
        """Compare the next pass of every kind: after an error of one rank the others may be a call ahead."""
        self._compared.clear()

    def compare(
        self,
        tokens: int,
        given: tuple[bool, ...],
        tensors: Mapping[str, Tensor | None] | None,
        error: Exception | None = None,
    ) -> None:
        """Exchange the fingerprints of ``tensors``, by name, ``x`` among them; all ranks call it together.

        error: why this rank cannot run the pass, raised here once the others know; tensors is then None. Raises what
        ``check_contributions`` does, on every rank, and RankError where a rank does not come.
        """
        if error is not None:
            known_to_all(error)
        own = self._contribution(tokens, tensors, error)
        table = [own]
        try:
            with group_lock(tuple({group for _, group in self.groups})):
                for name, group in self.groups:
                    rows = rendezvous_of(group).exchange(table, f"{name} dispatch")
                    table = [each for row in rows for each in row]
        except RankError:
            if error is None:
                raise
        if error is not None:
            raise error
        self._judge(table)
        kind = self._kind(tokens, given)
        telling = not any(each.constant for each in table)
        self._compared[kind] = self._compared.get(kind, 0) + (FIRST_PASSES if telling else 1)

    def _contribution(
        self, tokens: int, tensors: Mapping[str, Tensor | None] | None, error: Exception | None
    ) -> Contribution:
        inputs: Mapping[str, Fingerprint] = {}
        constant = False
        if self.compares and tensors is not None and tensors["x"] is not None:
            inputs, constant = fingerprints(tensors, tensors["x"])
        return Contribution(
            rank=distributed.get_rank(),
            tokens=tokens,
            layer=self.layer,
            inputs=inputs,
            constant=constant,
            error="" if error is None else f"{type(error).__name__}: {error}",
        )

    def _judge(self, table: Sequence[Contribution]) -> None:
        name = self.groups[0][0]
        size = len(table) if self._whole else self._size
        if any(each.error for each in table):
            check_contributions(name, table)
        for start in range(0, len(table), size):
            check_contributions(name, table[start : start + size])

    def _kind(self, tokens: int, given: tuple[bool, ...]) -> Any:
        # Groups of slices may bring other numbers of tokens than each other, and must not decide by them.
        return (given, min(tokens, 2)) if self._whole else None


def input_check(placed: Placement | None, dispatcher: str, *, checked: bool, layer: int) -> InputCheck | None:
    """Return what compares the inputs of a layer, None where nothing is compared.

    dispatcher: its name. layer: its number among those built over the slice group.
    """
    if placed is None or not placed.groups:
        return None
    if dispatcher == "partial":
        return _check_of_partial(placed) if checked else None
    across = placed.world_size > 1
    slices = (("slices", placed.slice_group),) if placed.tp_size > 1 else ()
    if placed.same_tokens and across:
        order = (("same_tokens", placed.group), *slices)
        size = placed.world_size * placed.tp_size
        return InputCheck(order, size=size, whole=True, every=checked, layer=0)
    if slices:
        order = (*slices, ("slices", placed.group)) if across else slices
        return InputCheck(order, size=placed.tp_size, whole=not across, every=checked, layer=layer)
    if dispatcher == "local" or not checked:
        return None
    # Nothing has to be the same; the ranks of a checked layer hear when one of them cannot run a pass.
    order = ((f"checked {dispatcher}", placed.group),)
    return InputCheck(order, size=1, whole=False, every=True, layer=0)


def _check_of_partial(placed: Placement) -> InputCheck | None:
    """Return the check of ranks whose caller adds up the parts, if its process groups are those of the placement."""
    try:
        check_ranks("partial", placed)
    except InputError:
        return None
    order = tuple(("partial", name) for name in placed.groups)
    size = placed.world_size * placed.tp_size
    return InputCheck(order, size=size, whole=True, every=True, layer=0)


def compared_words(placed: Placement | None, dispatcher: str) -> str | None:
    """Return in words when inputs are compared between ranks, None where no two ranks have to bring the same."""
    if placed is None or not placed.groups:
        return None
    if dispatcher == "partial":
        return "compared between ranks in every pass with checked=True, otherwise never; never in a CUDA graph"
    if not placed.same_tokens and placed.tp_size == 1:
        return None
    return (
        "compared between ranks in the first pass of each kind, in every pass with checked=True; never in a CUDA graph"
    )
