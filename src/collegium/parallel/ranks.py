"""Ranks: the one argument that splits a model. It says how the ranks of torch.distributed share the experts."""

from __future__ import annotations

import platform
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import distributed

from ..errors import InputError
from ..placement import Placement
from .groups import group_named, world_ranks
from .placement import linear, round_robin
from .rendezvous import rendezvous_of, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Order", "Ranks"]

Order = Literal["linear", "round_robin"] | tuple[tuple[int, ...], ...]

# Groups made for ranks x slices, by the default group and the numbers: a second model takes the same ones.
_made: dict[tuple[weakref.ref[distributed.ProcessGroup], int, int], tuple[str, str]] = {}
# The same for dimensions of a mesh that split the experts together, by the default group and the members.
_joint: dict[tuple[weakref.ref[distributed.ProcessGroup], tuple[int, ...]], str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How ranks share experts, as one of them sees it; made by ``Ranks.of``.

    rank, world_size: of those that split the experts; group: the name of their process group, empty for torch's default
    one. slice_rank, slices, slice_group: of those that each hold a slice of the same experts' width.
    context_rank, contexts: of those that hold parts of the same sequences (context parallel, of prefill or of all
    tokens). They split experts like ranks with sequences of their own: what they bring is their own tokens.
    order: which experts a rank holds: ``linear`` (consecutive ones), ``round_robin``, or the experts of every rank.
    same_tokens: every rank is called with the same tokens (attention is replicated), of which it serves a share;
    otherwise with its own (data parallel). The ranks of one slice group always bring the same tokens.
    replicas: slots a rank has for copies of other ranks' experts, filled with those of the next ranks. spare: slots
    beyond, which hold no expert yet. device: where this rank's layers are, as torch calls it.
    """

    rank: int = 0
    world_size: int = 1
    slice_rank: int = 0
    slices: int = 1
    context_rank: int = 0
    contexts: int = 1
    order: Order = "linear"
    same_tokens: bool = False
    replicas: int = 0
    spare: int = 0
    group: str = ""
    slice_group: str = ""
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh | None = None,
        *,
        experts: str | int | None = None,
        slices: str | int | None = None,
        context: str | int | None = None,
        order: Order = "linear",
        same_tokens: bool = False,
        replicas: int = 0,
        spare: int = 0,
    ) -> Self:
        """Return how this rank takes part; every rank asks at the same time.

        mesh: experts and slices name the dimensions that split the experts and their width (None: that is not split;
        a mesh of one dimension splits the experts); ranks along other dimensions hold layers of their own. Without a
        mesh they are how many ranks do so, of all ranks that torch.distributed has; what is left out is found.
        context: the dimension whose ranks hold parts of the same sequences, which splits the experts together with
        that of experts; without a mesh how many neighbours do so, of the ranks that split the experts. A
        rank's device is its current CUDA device, the CPU where torch.distributed or the mesh is of CPUs.
        Raises InputError on every rank where names or numbers do not fit or ranks ask for different things.
        """
        group_named("")  # refuses where torch.distributed is not there
        asked: dict[str, Any] = {"order": order, "same_tokens": same_tokens, "replicas": replicas, "spare": spare}
        asked["context"] = context
        if mesh is None:
            one, two = _numbers(experts, slices, context)
            rendezvous_of().agree(asked | {"experts": one, "slices": two}, "Ranks.of")
            group, slice_group = _groups(one, two)
            place = _device(None)
        else:
            group, slice_group = _named(mesh, experts, slices, context)
            asked |= {"mesh": mesh.mesh_dim_names, "experts": experts, "slices": slices}
            for each in (group, slice_group):
                if each is not None:
                    rendezvous_of(each).agree(asked, "Ranks.of")
            place = _device(mesh.device_type)
        _check_devices(place, (group, slice_group))
        rank, size = _place(group)
        slice_rank, cut = _place(slice_group)
        context_rank, contexts = _contexts(mesh, context, (rank, size), same_tokens)
        return cls(
            rank=rank,
            world_size=size,
            slice_rank=slice_rank,
            slices=cut,
            context_rank=context_rank,
            contexts=contexts,
            order=order,
            same_tokens=same_tokens,
            replicas=replicas,
            spare=spare,
            group=group or "",
            slice_group=slice_group or "",
            device=place,
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups this rank shares layers with, the one that splits experts first."""
        return (self.group,) * (self.world_size > 1) + (self.slice_group,) * (self.slices > 1)

    def agree(self, value: Any, phase: str) -> None:
        """Raise InputError on every rank unless all that share layers give the same ``value``."""
        for name in self.groups:
            rendezvous_of(name).agree(value, phase)

    def exchange(self, value: Any, phase: str) -> list[Any]:
        """Return what every rank that shares layers gave, ranks of a slice group next to each other.

        Raises RankError where one does not come.
        """
        found = [value]
        for name in reversed(self.groups):
            found = [each for own in rendezvous_of(name).exchange(found, phase) for each in own]
        return found

    def placement(self, num_experts: int) -> Placement:
        """Return which of ``num_experts`` experts each rank holds; raises InputError where it cannot be."""
        held = self._held(num_experts)
        others = [[e for own in held[r + 1 :] + held[:r] for e in own] for r in range(len(held))]
        for r, own in enumerate(held):
            # With copies in an expert map, the others may hold what this rank has.
            others[r] = [expert for expert in dict.fromkeys(others[r]) if expert not in own]
        most = min(map(len, others))
        if not _whole(self.replicas, self.spare) or not 0 <= self.replicas <= most or self.spare < 0:
            raise InputError(
                f"Ranks: replicas={self.replicas!r}, spare={self.spare!r} were asked for {num_experts} experts on "
                f"{self.world_size} ranks; allowed are 0 to {most} replicas a rank, which are all that the others "
                "hold, and 0 or more spare slots"
            )
        ranks = tuple(own + tuple(more[: self.replicas]) for own, more in zip(held, others, strict=True))
        return Placement(
            rank=self.rank,
            world_size=self.world_size,
            expert_ids=ranks[self.rank],
            tp_rank=self.slice_rank,
            tp_size=self.slices,
            ranks=ranks,
            spare=self.spare,
            same_tokens=self.same_tokens,
            group=self.group,
            slice_group=self.slice_group,
        )

    def _held(self, num_experts: int) -> tuple[tuple[int, ...], ...]:
        if isinstance(self.order, tuple):
            return self._checked(self.order, num_experts)
        if num_experts < self.world_size:
            raise InputError(
                f"{num_experts} experts were to be split over {self.world_size} ranks; a rank holds at least one. Use "
                f"{num_experts} ranks or fewer, or let several share each expert: "
                f"Ranks.of(experts={_largest(num_experts, self.world_size)})"
            )
        made = {"linear": linear, "round_robin": round_robin}.get(str(self.order))
        if made is None:
            raise InputError(
                f"Ranks: order={self.order!r} was asked for; allowed: 'linear', 'round_robin', or a tuple with the "
                "experts of every rank"
            )
        return made(num_experts, self.rank, self.world_size).ranks

    def _checked(self, table: tuple[tuple[int, ...], ...], num_experts: int) -> tuple[tuple[int, ...], ...]:
        held = [own if _are_ids(own) else () for own in table]
        found, wanted = {expert for own in held for expert in own}, set(range(num_experts))
        wrong = [rank for rank, own in enumerate(held) if not own or len(set(own)) < len(own)]
        if len(table) != self.world_size or wrong or found != wanted:
            raise InputError(
                f"Ranks: an expert map for {len(table)} ranks was given, {self.world_size} share {num_experts} "
                f"experts; every rank needs a tuple of one or more, none of them twice (ranks {wrong} have not), and "
                f"every expert a rank (missing {sorted(wanted - found)[:8]}, unknown {sorted(found - wanted)[:8]})"
            )
        return table


def _whole(*numbers: object) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _are_ids(own: object) -> bool:
    return isinstance(own, tuple) and _whole(*cast("tuple[object, ...]", own))


def _largest(num_experts: int, ranks: int) -> int:
    return next(n for n in range(num_experts, 0, -1) if ranks % n == 0)


def _numbers(experts: str | int | None, slices: str | int | None, context: str | int | None) -> tuple[int, int]:
    """Return ranks that split the experts and slices, of as many ranks as there are."""
    world = distributed.get_world_size()
    given = {"experts": experts, "slices": slices, "context": context}
    named = {key: value for key, value in given.items() if value is not None and not isinstance(value, int)}
    if named:
        raise InputError(f"Ranks: {named} name dimensions of a mesh, and no mesh was given; give numbers of ranks")
    cut = slices if isinstance(slices, int) else world // max(1, experts) if isinstance(experts, int) else 1
    held = experts if isinstance(experts, int) else world // max(1, cut)
    if held < 1 or cut < 1 or held * cut != world:
        raise InputError(
            f"Ranks: experts={experts}, slices={slices} were asked for, torch.distributed has {world} ranks; "
            f"{held} x {cut} has to be {world}. Launch with as many ranks, or leave out one of the two numbers"
        )
    return held, cut


def _contexts(
    mesh: DeviceMesh | None, context: str | int | None, place: tuple[int, int], same_tokens: bool
) -> tuple[int, int]:
    """Return this rank's place among those that hold parts of the same sequences, and how many they are.

    place: rank among those that split the experts, and how many they are.
    """
    rank, size = place
    if mesh is not None and isinstance(context, str):
        rank, count = mesh.get_local_rank(context), mesh.get_group(context).size()
    else:
        count = context if isinstance(context, int) else 1
        if count < 1 or size % count:
            raise InputError(
                f"Ranks: context={context} was asked for, {size} ranks split the experts; allowed is a number that "
                "divides them"
            )
    if same_tokens and count > 1:
        raise InputError(
            f"Ranks: same_tokens=True and context={context!r} were asked for; {count} context-parallel ranks hold "
            "other tokens of the same sequences. Leave one of the two out"
        )
    return rank % count, count


def _groups(experts: int, slices: int) -> tuple[str | None, str | None]:
    """Return the names of this rank's groups; the default one serves where only one of the two is split."""
    if slices == 1 or experts == 1:
        return ("" if experts > 1 else None), ("" if slices > 1 else None)
    key = (weakref.ref(group_named("")), experts, slices)  # an address comes again
    if key not in _made:
        for old in [old for old in _made if old[0] != key[0]]:
            del _made[old]
        rank, names = distributed.get_rank(), ["", ""]
        across = [list(range(s, experts * slices, slices)) for s in range(slices)]
        within = [list(range(e * slices, (e + 1) * slices)) for e in range(experts)]
        for which, lists in enumerate((across, within)):
            for members in lists:  # every rank makes every group, in the same order
                made: Any = distributed.new_group(members, timeout=timedelta(seconds=max(60.0, timeout_seconds())))
                if rank in members:
                    names[which] = made.group_name
        _made[key] = names[0], names[1]
    return _made[key]


def _named(
    mesh: DeviceMesh, experts: str | int | None, slices: str | int | None, context: str | int | None
) -> tuple[str | None, str | None]:
    """Return the names of this rank's groups along dimensions of ``mesh``, experts and context making one."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise InputError(
            f"Ranks: {mesh!r} was given as the mesh; allowed: a DeviceMesh, or none for all ranks there are"
        )
    dims = tuple(mesh.mesh_dim_names or ())
    if experts is None and slices is None and context is None and mesh.ndim == 1:
        experts = dims[0] if dims else 0
    named = [dim for dim in (experts, slices, context) if dim is not None]
    if not named or len(set(named)) < len(named) or not (set(named) <= set(dims) or (named == [0] and not dims)):
        also = "" if context is None else f", context={context!r}"
        raise InputError(
            f"Ranks: experts={experts!r}, slices={slices!r}{also} were asked for, the mesh has dimensions {dims} of "
            f"{tuple(mesh.shape)} ranks; name one of them, or different ones"
        )
    if mesh.get_coordinate() is None:
        raise InputError(f"Ranks: rank {distributed.get_rank()} is not in the mesh {mesh}; leave it out of the call")
    if experts is not None and context is not None:
        return _group_over(mesh, (experts, context)), None if slices is None else mesh.get_group(slices).group_name
    found: Any = [
        None if dim is None else mesh.get_group(dim).group_name
        for dim in (context if experts is None else experts, slices)
    ]
    return found[0], found[1]


def _group_over(mesh: DeviceMesh, dims: tuple[Any, ...]) -> str:
    """Return the name of the group of this rank's neighbours along several dimensions of ``mesh``."""
    here = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    index = tuple(slice(None) if name in dims else own for name, own in here)
    members: list[int] = mesh.mesh[index].flatten().tolist()
    key = (weakref.ref(group_named("")), tuple(members))
    if key not in _joint:
        for old in [old for old in _joint if old[0] != key[0]]:
            del _joint[old]
        patience = timedelta(seconds=max(60.0, timeout_seconds()))
        made: Any = distributed.new_group(members, timeout=patience, use_local_synchronization=True)
        _joint[key] = made.group_name
    return _joint[key]


def _place(group: str | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    ranks = world_ranks(group)
    return ranks.index(distributed.get_rank()), len(ranks)


def _device(kind: str | None) -> str:
    """Return this rank's device: the current CUDA device where NCCL runs collectives, the CPU otherwise."""
    runs = "nccl" in str(distributed.get_backend_config()) if kind is None else kind == "cuda"
    return f"cuda:{torch.cuda.current_device()}" if runs and torch.cuda.is_available() else "cpu"


def _check_devices(place: str, groups: Iterable[str | None]) -> None:
    """Refuse two ranks on one GPU, which would wait for each other in kernels that hold the GPU."""
    for group in groups:
        found = [] if group is None else rendezvous_of(group).exchange((platform.node(), place), "Ranks.of: devices")
        twice = sorted({own for own in found if found.count(own) > 1 and own[1] != "cpu"})
        if twice:
            raise InputError(
                f"Ranks: several ranks have {twice[0][1]} of {twice[0][0]} as their device; call "
                "torch.cuda.set_device(LOCAL_RANK) on each before, and launch as many processes as there are GPUs"
            )
