"""Ranks: the argument that splits a model. It describes how the ranks of torch.distributed share the experts."""

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

# Groups for ranks x slices, by the default group and these numbers: a second model reuses them.
_grid_groups: dict[tuple[weakref.ref[distributed.ProcessGroup], int, int], tuple[str, str]] = {}
# Groups over several dimensions of a mesh, by the default group and the members.
_mesh_groups: dict[tuple[weakref.ref[distributed.ProcessGroup], tuple[int, ...]], str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How ranks share experts, from the view of one rank; created by ``Ranks.of``.

    rank, world_size: among the ranks that split the experts; group: the name of their process group, empty for torch's
    default group. slice_rank, slices, slice_group: among the ranks that each hold a slice of the same experts' width.
    context_rank, contexts: among the ranks that hold parts of the same sequences (context parallel, of prefill or of
    all tokens). They split experts like ranks with different sequences.
    order: which experts a rank holds: ``linear`` (consecutive ones), ``round_robin``, or the experts of every rank.
    same_tokens: every rank is called with the same tokens (attention is replicated) and serves a share of them;
    otherwise each rank has different tokens (data parallel). The ranks of a slice group always have the same tokens.
    replicas: slots of a rank for replicas of other ranks' experts, filled with those of the next ranks. spare: further
    slots, which are empty. device: torch device of this rank's layers.
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
        """Return the role of this rank; all ranks call it together.

        mesh: experts and slices name the dimensions that split the experts and their width (None: not split; a mesh of
        one dimension splits the experts); ranks along other dimensions hold separate layers. Without a mesh, experts
        and slices are numbers of ranks, out of all ranks of torch.distributed; a missing number is inferred.
        context: the dimension whose ranks hold parts of the same sequences, which splits the experts together with
        the dimension of experts; without a mesh the number of neighbouring ranks that do so, out of those that split
        the experts. A rank's device is its current CUDA device, or the CPU if torch.distributed or the mesh uses CPUs.
        Raises InputError on every rank where names or numbers do not fit or ranks pass different arguments.
        """
        group_named("")  # raises if torch.distributed is not initialised
        settings: dict[str, Any] = {
            "order": order,
            "same_tokens": same_tokens,
            "replicas": replicas,
            "spare": spare,
            "context": context,
        }
        if mesh is None:
            group, slice_group = _agree_on_counts(experts, slices, context, settings)
        else:
            group, slice_group = _agree_on_mesh(mesh, experts, slices, context, settings)
        device = _device(None if mesh is None else mesh.device_type)
        _check_devices(device, (group, slice_group))
        rank, world_size = _rank_and_size(group)
        slice_rank, slice_count = _rank_and_size(slice_group)
        context_rank, contexts = _contexts(mesh, context, (rank, world_size), same_tokens)
        return cls(
            rank=rank,
            world_size=world_size,
            slice_rank=slice_rank,
            slices=slice_count,
            context_rank=context_rank,
            contexts=contexts,
            order=order,
            same_tokens=same_tokens,
            replicas=replicas,
            spare=spare,
            group=group or "",
            slice_group=slice_group or "",
            device=device,
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups with which this rank shares layers, the one that splits experts first."""
        return (self.group,) * (self.world_size > 1) + (self.slice_group,) * (self.slices > 1)

    def agree(self, value: Any, phase: str) -> None:
        """Raise InputError on every rank unless all ranks that share layers pass the same ``value``."""
        for name in self.groups:
            rendezvous_of(name).agree(value, phase)

    def exchange(self, value: Any, phase: str) -> list[Any]:
        """Return the values of all ranks that share layers, ranks of a slice group next to each other.

        Raises RankError where a rank does not respond.
        """
        values = [value]
        for name in reversed(self.groups):
            tables = rendezvous_of(name).exchange(values, phase)
            values = [entry for table in tables for entry in table]
        return values

    def placement(self, num_experts: int) -> Placement:
        """Return which of ``num_experts`` experts each rank holds; raises InputError for an impossible request."""
        ids = self._expert_ids(num_experts)
        candidates = [_candidate_replicas(ids, rank) for rank in range(len(ids))]
        max_replicas = min(map(len, candidates))
        if not _are_ints(self.replicas, self.spare) or not 0 <= self.replicas <= max_replicas or self.spare < 0:
            raise InputError(
                f"Ranks: replicas={self.replicas!r}, spare={self.spare!r} were requested {num_experts} experts on "
                f"{self.world_size} ranks; allowed are 0 to {max_replicas} replicas a rank, which are all experts of "
                "the other ranks, and 0 or more spare slots"
            )
        ranks = tuple(
            rank_ids + tuple(replicas[: self.replicas]) for rank_ids, replicas in zip(ids, candidates, strict=True)
        )
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

    def _expert_ids(self, num_experts: int) -> tuple[tuple[int, ...], ...]:
        """Return the experts of every rank, without replicas."""
        if isinstance(self.order, tuple):
            return self._check_order(self.order, num_experts)
        if num_experts < self.world_size:
            raise InputError(
                f"{num_experts} experts were to be split over {self.world_size} ranks; a rank holds at least one. Use "
                f"{num_experts} ranks or fewer, or let several share each expert: "
                f"Ranks.of(experts={_largest_divisor(num_experts, self.world_size)})"
            )
        split = {"linear": linear, "round_robin": round_robin}.get(str(self.order))
        if split is None:
            raise InputError(
                f"Ranks: order={self.order!r} was requested; allowed: 'linear', 'round_robin', or a tuple with the "
                "experts of every rank"
            )
        return split(num_experts, self.rank, self.world_size).ranks

    def _check_order(self, table: tuple[tuple[int, ...], ...], num_experts: int) -> tuple[tuple[int, ...], ...]:
        rank_ids = [ids if _are_ids(ids) else () for ids in table]
        present = {expert for ids in rank_ids for expert in ids}
        expected = set(range(num_experts))
        invalid = [rank for rank, ids in enumerate(rank_ids) if not ids]
        if len(table) != self.world_size or invalid or present != expected:
            raise InputError(
                f"Ranks: an expert map for {len(table)} ranks was given, {self.world_size} share {num_experts} "
                f"experts; every rank needs a tuple of one or more (ranks {invalid} have not), and every expert a rank "
                f"(missing {sorted(expected - present)[:8]}, unknown "
                f"{sorted(present - expected)[:8]})"
            )
        return table


def _agree_on_counts(
    experts: str | int | None, slices: str | int | None, context: str | int | None, settings: dict[str, Any]
) -> tuple[str | None, str | None]:
    """Agree on ``settings`` and the numbers of ranks; return the names of this rank's groups."""
    expert_ranks, slice_ranks = _rank_counts(experts, slices, context)
    settings = settings | {"experts": expert_ranks, "slices": slice_ranks}
    rendezvous_of().agree(settings, "Ranks.of")
    return _create_groups(expert_ranks, slice_ranks)


def _agree_on_mesh(
    mesh: DeviceMesh,
    experts: str | int | None,
    slices: str | int | None,
    context: str | int | None,
    settings: dict[str, Any],
) -> tuple[str | None, str | None]:
    """Agree on ``settings`` and the dimensions of ``mesh``; return the names of this rank's groups."""
    groups = _groups_of_mesh(mesh, experts, slices, context)
    settings = settings | {"mesh": mesh.mesh_dim_names, "experts": experts, "slices": slices}
    for name in groups:
        if name is not None:
            rendezvous_of(name).agree(settings, "Ranks.of")
    return groups


def _candidate_replicas(ids: tuple[tuple[int, ...], ...], rank: int) -> list[int]:
    """Return the experts of which ``rank`` may hold a replica, those of the next ranks first."""
    others = dict.fromkeys(expert for rank_ids in ids[rank + 1 :] + ids[:rank] for expert in rank_ids)
    # An expert map given by the caller may already have replicas, so other ranks may hold the same experts.
    return [expert for expert in others if expert not in ids[rank]]


def _are_ints(*numbers: object) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _are_ids(ids: object) -> bool:
    return isinstance(ids, tuple) and _are_ints(*cast("tuple[object, ...]", ids))


def _largest_divisor(num_experts: int, ranks: int) -> int:
    """Return the largest divisor of ``ranks`` up to ``num_experts``."""
    return next(n for n in range(num_experts, 0, -1) if ranks % n == 0)


def _rank_counts(experts: str | int | None, slices: str | int | None, context: str | int | None) -> tuple[int, int]:
    """Return the numbers of ranks that split the experts, and their width; a missing one is inferred."""
    world = distributed.get_world_size()
    arguments = {"experts": experts, "slices": slices, "context": context}
    names = {key: value for key, value in arguments.items() if value is not None and not isinstance(value, int)}
    if names:
        raise InputError(f"Ranks: {names} name dimensions of a mesh, and no mesh was given; give numbers of ranks")
    if isinstance(slices, int):
        slice_ranks = slices
    elif isinstance(experts, int):
        slice_ranks = world // max(1, experts)
    else:
        slice_ranks = 1
    expert_ranks = experts if isinstance(experts, int) else world // max(1, slice_ranks)
    if expert_ranks < 1 or slice_ranks < 1 or expert_ranks * slice_ranks != world:
        raise InputError(
            f"Ranks: experts={experts}, slices={slices} were requested, torch.distributed has {world} ranks; "
            f"{expert_ranks} x {slice_ranks} has to be {world}. Launch with as many ranks, or leave out one of the two "
            "numbers"
        )
    return expert_ranks, slice_ranks


def _contexts(
    mesh: DeviceMesh | None, context: str | int | None, rank_and_size: tuple[int, int], same_tokens: bool
) -> tuple[int, int]:
    """Return this rank's index among those that hold parts of the same sequences, and their number.

    rank_and_size: among the ranks that split the experts.
    """
    rank, size = rank_and_size
    if mesh is not None and isinstance(context, str):
        rank, count = mesh.get_local_rank(context), mesh.get_group(context).size()
    else:
        count = context if isinstance(context, int) else 1
        if count < 1 or size % count:
            raise InputError(
                f"Ranks: context={context} was requested, {size} ranks split the experts; allowed is a number that "
                "divides them"
            )
    if same_tokens and count > 1:
        raise InputError(
            f"Ranks: same_tokens=True and context={context!r} were requested; {count} context-parallel ranks hold "
            "other tokens of the same sequences. Leave one of the two out"
        )
    return rank % count, count


def _create_groups(experts: int, slices: int) -> tuple[str | None, str | None]:
    """Return the names of this rank's groups; if only one of the two is split, it is the default group."""
    if slices == 1 or experts == 1:
        return ("" if experts > 1 else None), ("" if slices > 1 else None)
    key = (weakref.ref(group_named("")), experts, slices)  # not by address: addresses are reused
    if key not in _grid_groups:
        for stale in [other for other in _grid_groups if other[0] != key[0]]:
            del _grid_groups[stale]
        expert_groups = [list(range(s, experts * slices, slices)) for s in range(slices)]
        slice_groups = [list(range(e * slices, (e + 1) * slices)) for e in range(experts)]
        _grid_groups[key] = _create_all(expert_groups), _create_all(slice_groups)
    return _grid_groups[key]


def _create_all(groups: list[list[int]]) -> str:
    """Create all ``groups``, as every rank has to in the same order; return the name of the one with this rank."""
    rank = distributed.get_rank()
    name = ""
    for members in groups:
        group: Any = distributed.new_group(members, timeout=_group_timeout())
        if rank in members:
            name = group.group_name
    return name


def _group_timeout() -> timedelta:
    return timedelta(seconds=max(60.0, timeout_seconds()))


def _groups_of_mesh(
    mesh: DeviceMesh, experts: str | int | None, slices: str | int | None, context: str | int | None
) -> tuple[str | None, str | None]:
    """Return the names of this rank's groups along dimensions of ``mesh``; experts and context form one group."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise InputError(f"Ranks: {mesh!r} was given as the mesh; allowed: a DeviceMesh, or none for all ranks")
    dims = tuple(mesh.mesh_dim_names or ())
    if experts is None and slices is None and context is None and mesh.ndim == 1:
        experts = dims[0] if dims else 0
    requested = [dim for dim in (experts, slices, context) if dim is not None]
    distinct = len(set(requested)) == len(requested)
    known = set(requested) <= set(dims) or (requested == [0] and not dims)
    if not requested or not distinct or not known:
        context_text = "" if context is None else f", context={context!r}"
        raise InputError(
            f"Ranks: experts={experts!r}, slices={slices!r}{context_text} were requested, the mesh has dimensions "
            f"{dims} of {tuple(mesh.shape)} ranks; name one of them, or different ones"
        )
    if mesh.get_coordinate() is None:
        raise InputError(f"Ranks: rank {distributed.get_rank()} is not in the mesh {mesh}; leave it out of the call")
    slice_group = None if slices is None else mesh.get_group(slices).group_name
    if experts is not None and context is not None:
        return _group_over(mesh, (experts, context)), slice_group
    dim = context if experts is None else experts
    group = None if dim is None else mesh.get_group(dim).group_name
    return group, slice_group


def _group_over(mesh: DeviceMesh, dims: tuple[Any, ...]) -> str:
    """Return the name of the group of this rank's neighbours along several dimensions of ``mesh``."""
    coordinates = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    index = tuple(slice(None) if name in dims else coordinate for name, coordinate in coordinates)
    members: list[int] = mesh.mesh[index].flatten().tolist()
    key = (weakref.ref(group_named("")), tuple(members))
    if key not in _mesh_groups:
        for stale in [other for other in _mesh_groups if other[0] != key[0]]:
            del _mesh_groups[stale]
        group: Any = distributed.new_group(members, timeout=_group_timeout(), use_local_synchronization=True)
        _mesh_groups[key] = group.group_name
    return _mesh_groups[key]


def _rank_and_size(group: str | None) -> tuple[int, int]:
    """Return this rank's index in ``group`` and the group's size, (0, 1) without a group."""
    if group is None:
        return 0, 1
    ranks = world_ranks(group)
    return ranks.index(distributed.get_rank()), len(ranks)


def _device(kind: str | None) -> str:
    """Return this rank's device: the current CUDA device if NCCL runs collectives, otherwise the CPU."""
    uses_gpu = "nccl" in str(distributed.get_backend_config()) if kind is None else kind == "cuda"
    return f"cuda:{torch.cuda.current_device()}" if uses_gpu and torch.cuda.is_available() else "cpu"


def _check_devices(device: str, groups: Iterable[str | None]) -> None:
    """Refuse two ranks on one GPU, which would wait for each other in kernels that occupy the GPU."""
    for group in groups:
        if group is None:
            continue
        devices = rendezvous_of(group).exchange((platform.node(), device), "Ranks.of: devices")
        duplicates = sorted({entry for entry in devices if devices.count(entry) > 1 and entry[1] != "cpu"})
        if duplicates:
            host, name = duplicates[0]
            raise InputError(
                f"Ranks: several ranks have {name} of {host} as their device; call "
                "torch.cuda.set_device(LOCAL_RANK) on each before, and launch one process for each GPU"
            )
