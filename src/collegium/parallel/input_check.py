"""Compare the inputs of ranks that must have the same: tokens, routing, and inputs of the router.

Ranks with ``same_tokens``, and ranks that hold slices of the same experts, compute parts of one output. If their inputs
differ, each still computes something, and the output mixes tokens without an error. So hashes of the inputs and of the
chosen experts are exchanged on the host before anything else is sent, and all ranks raise. If one rank raises in a pass
that is not compared while the others go on, it compares its next pass and the others do not, so all raise then.

A layer with ``checked=True`` compares every pass. Other layers compare the first pass of each kind, which detects wrong
wiring of a program and then costs nothing. Passes that a CUDA graph captures are never compared: the host cannot read
tensors there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from ..errors import InputError, RankError
from .bit_hash import bit_hash, one_value
from .groups import check_ranks
from .rendezvous import exchange_tables, known_to_all

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

# Number of passes of a kind that are compared when all elements of x are equal, as in a dummy batch of zeros, where
# ranks agree by chance; for other batches one is enough. 0 disables these comparisons; all ranks need the same number.
FIRST_PASSES = 3


class Fingerprint(NamedTuple):
    """The dtype and shape of a tensor, and the hash of its bits."""

    dtype: str
    shape: tuple[int, ...]
    bits: int

    def __str__(self) -> str:
        """Return dtype and shape."""
        return f"{self.dtype} {list(self.shape)}"


class Contribution(NamedTuple):
    """What one rank brings to a pass.

    rank: in torch's default group. layer: its number among those built over the group, 0 if it is not compared.
    inputs: fingerprints of tensors by name, None in passes whose inputs are not compared. constant: all elements of x
    are equal. error: why this rank cannot run the pass, empty if it can.
    """

    rank: int
    tokens: int
    layer: int = 0
    inputs: Mapping[str, Fingerprint] | None = None
    constant: bool = False
    error: str = ""


def fingerprints(tensors: Mapping[str, Tensor | None], x: Tensor) -> tuple[dict[str, Fingerprint], bool]:
    """Return the fingerprint of each of ``tensors``, and whether all elements of ``x`` are equal.

    Waits for the device once.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    numbers = [bit_hash(tensor) for tensor in present.values()]
    numbers.append(one_value(x).to(torch.int64))
    *hashes, constant = torch.stack(numbers).tolist()
    prints = {
        name: Fingerprint(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bits)
        for (name, tensor), bits in zip(present.items(), hashes, strict=True)
    }
    return prints, bool(constant)


def differing_ranks(values: Mapping[int, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks whose value is not the most frequent one, and the ranks that have it.

    values: by rank. If values are equally frequent, the lowest rank's counts as the most frequent.
    """
    ranks = sorted(values)
    agreeing = [tuple(other for other in ranks if values[other] == values[rank]) for rank in ranks]
    majority = max(agreeing, key=len)
    return tuple(rank for rank in ranks if rank not in majority), majority


def check_contributions(name: str, table: Sequence[Contribution]) -> None:
    """Raise on every rank unless all ranks of ``table`` bring the same.

    name: of the dispatcher that requires it. Raises InputError for different layers and numbers of tokens, and
    RankError, with the ranks that differ from the majority, for other differences.
    """
    errors = {entry.rank: entry.error for entry in table if entry.error}
    if errors:
        listing = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
        raise RankError(
            f"{name}: nothing was sent, because not every rank can run this pass: {listing}",
            ranks=tuple(errors),
            phase=f"{name} dispatch",
        )
    layers = [entry.layer for entry in table]
    counts = [entry.tokens for entry in table]
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
    by_rank = {entry.rank: entry.inputs for entry in table}
    differing, majority = differing_ranks(by_rank)
    if not differing:
        return
    expected = by_rank[majority[0]]
    actual = by_rank[differing[0]]
    if expected is None or actual is None:
        comparing = tuple(rank for rank, inputs in by_rank.items() if inputs is not None)
        problem = f"rank {_join(comparing)} compares the inputs of this pass, and the other ranks do not"
        remedy = "every rank has to make the same calls of the same layers, with checked= alike"
    else:
        problem = f"rank {_join(differing)} differs from rank {_join(majority)} in {_differences(expected, actual)}"
        remedy = (
            "give all ranks the same tokens and the same routing, equal in every bit; a caller whose ranks have "
            "different tokens needs Ranks.of(same_tokens=False) without slices. FIRST_PASSES = 0 in "
            "collegium.parallel.input_check, on all ranks, turns the first comparisons off"
        )
    raise RankError(
        f"{name}: every rank has to be called with the same tokens; {problem}. Nothing was sent: {remedy}",
        ranks=differing,
        phase=f"{name} dispatch",
    )


def _differences(expected: Mapping[str, Fingerprint], actual: Mapping[str, Fingerprint]) -> str:
    """Describe which inputs differ, and how."""
    texts: list[str] = []
    for name in {**expected, **actual}:
        first = expected.get(name)
        second = actual.get(name)
        if first is None or second is None:
            texts.append(f"{name} ({second or 'missing'}, not {first or 'missing'})")
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            texts.append(f"{name} ({second}, not {first})")
        elif first != second:
            texts.append(f"the values of {name} ({first})")
    return ", ".join(texts)


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class InputCheck:
    """The comparison of one layer's inputs; counts the passes that were compared.

    groups: name and process group of each exchange, in the order in which dispatchers exchange. every: compare every
    pass. layer: the number that the first dispatcher compares.
    """

    def __init__(self, groups: tuple[tuple[str, str], ...], *, size: int, whole: bool, every: bool, layer: int) -> None:
        """Start without a comparison.

        size: number of consecutive ranks in the gathered table that must have the same inputs; 1: none. whole: all
        ranks of ``groups`` must have the same inputs.
        """
        self.groups = groups
        self.every = every
        self.layer = layer
        self._size = size
        self._whole = whole
        self._compared: dict[Any, int] = {}

    @property
    def compares(self) -> bool:
        """Whether any two ranks must have the same inputs."""
        return self._size > 1

    def due(self, tokens: int, inputs: tuple[bool, ...]) -> bool:
        """Return whether to compare a pass of ``tokens`` tokens. inputs: which optional inputs it has.

        Ranks that make the same calls get the same answer without an exchange.
        """
        return self.every or (self.compares and self._compared.get(self._kind(tokens, inputs), 0) < FIRST_PASSES)

    def forget(self) -> None:
        """Compare the next pass of every kind again: after an error of one rank the others may be a call ahead."""
        self._compared.clear()

    def compare(
        self,
        tokens: int,
        inputs: tuple[bool, ...],
        tensors: Mapping[str, Tensor | None] | None,
        error: Exception | None = None,
    ) -> None:
        """Exchange the fingerprints of ``tensors`` by name, including ``x``; all ranks call it together.

        inputs: as for ``due``. error: why this rank cannot run the pass, raised here after the exchange; tensors is
        then None. Raises as ``check_contributions`` does, on every rank, and RankError where a rank does not respond.
        """
        groups = [(f"{name} dispatch", group) for name, group in self.groups]
        table = exchange_tables(self._contribution(tokens, tensors, error), groups, error)
        self._check(table)
        kind = self._kind(tokens, inputs)
        constant = any(entry.constant for entry in table)
        self._compared[kind] = self._compared.get(kind, 0) + (1 if constant else FIRST_PASSES)

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

    def _check(self, table: Sequence[Contribution]) -> None:
        name, _ = self.groups[0]
        size = len(table) if self._whole else self._size
        if any(entry.error for entry in table):
            check_contributions(name, table)
        for start in range(0, len(table), size):
            check_contributions(name, table[start : start + size])

    def _kind(self, tokens: int, inputs: tuple[bool, ...]) -> Any:
        # Slice groups may have different numbers of tokens, which must not decide whether they compare.
        return (inputs, min(tokens, 2)) if self._whole else None


def input_check(placement: Placement | None, dispatcher: str, *, checked: bool, layer: int) -> InputCheck | None:
    """Return the input comparison of a layer, None if nothing is compared.

    dispatcher: its name. layer: its number among those built over the slice group.
    """
    if placement is None or not placement.groups:
        return None
    if dispatcher == "partial":
        return _check_of_partial(placement) if checked else None
    splits_experts = placement.world_size > 1
    slices = (("slices", placement.slice_group),) if placement.tp_size > 1 else ()
    if placement.same_tokens and splits_experts:
        groups = (("same_tokens", placement.group), *slices)
        size = placement.world_size * placement.tp_size
        return InputCheck(groups, size=size, whole=True, every=checked, layer=0)
    if slices:
        groups = (*slices, ("slices", placement.group)) if splits_experts else slices
        return InputCheck(groups, size=placement.tp_size, whole=not splits_experts, every=checked, layer=layer)
    if dispatcher == "local" or not checked:
        return None
    # No inputs must be the same, but the ranks of a checked layer learn if one of them cannot run a pass.
    groups = ((f"checked {dispatcher}", placement.group),)
    return InputCheck(groups, size=1, whole=False, every=True, layer=0)


def _check_of_partial(placement: Placement) -> InputCheck | None:
    """Return the check of ranks whose caller adds up partial sums, if its process groups match the placement."""
    try:
        check_ranks("partial", placement)
    except InputError:
        return None
    groups = tuple(("partial", name) for name in placement.groups)
    size = placement.world_size * placement.tp_size
    return InputCheck(groups, size=size, whole=True, every=True, layer=0)


def compared_words(placement: Placement | None, dispatcher: str) -> str | None:
    """Describe when inputs are compared between ranks; None if no two ranks must have the same inputs."""
    if placement is None or not placement.groups:
        return None
    if dispatcher == "partial":
        return "compared between ranks in every pass if checked=True; never in a CUDA graph"
    if not placement.same_tokens and placement.tp_size == 1:
        return None
    return (
        "compared between ranks in the first pass of each kind, and in every pass if checked=True; "
        "never in a CUDA graph"
    )
