"""The question ``plan()`` answers: a layer, on a machine, over ranks, within limits; and what a kernel is asked."""

from dataclasses import dataclass, field, replace
from typing import Literal

from .types import ActivationSpec, MoESpec, require

__all__ = [
    "COMBINES",
    "Choice",
    "Combine",
    "DeviceFacts",
    "ExpertsProblem",
    "Limits",
    "Placement",
    "Problem",
    "Refusal",
]

Combine = Literal["exact", "reduced", "reduced_fp8"]
COMBINES = ("exact", "reduced", "reduced_fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which experts and which slice of their intermediate width this rank holds.

    rank, world_size: among the ranks that split the experts. expert_ids: logical ids of the local experts, in local
    slot order, each once; several ranks may hold the same expert. spare: slots after those that hold no expert yet.
    tp_rank, tp_size: the slice of I held here: rows of gate and up, columns of down.
    slice_size: rows of the slice; None: I / tp_size, rounded up. A slice that is filled up to whole groups has more.
    ranks: what every rank holds, in the order of ranks, for dispatchers that send tokens to others; empty: not told.
    same_tokens: every rank is called with the same tokens, instead of its own; each then serves a share of them.
    group, slice_group: names of the process groups of those that split the experts, and of those that hold the slices
    of one part; empty: torch's default group.
    """

    rank: int = 0
    world_size: int = 1
    expert_ids: tuple[int, ...]
    tp_rank: int = 0
    tp_size: int = 1
    slice_size: int | None = None
    ranks: tuple[tuple[int, ...], ...] = ()
    spare: int = 0
    same_tokens: bool = False
    group: str = ""
    slice_group: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.rank < self.world_size, "rank", self.rank, f"0 to {self.world_size - 1}")
        require(0 <= self.tp_rank < self.tp_size, "tp_rank", self.tp_rank, f"0 to {self.tp_size - 1}")
        require(len(set(self.expert_ids)) == len(self.expert_ids), "expert_ids", self.expert_ids, "each id once")
        require(self.spare >= 0, "spare", self.spare, "0 or more slots")
        told = len(self.ranks)
        require(told in (0, self.world_size), "ranks", told, f"none, or one entry for each of {self.world_size} ranks")
        own = self.ranks[self.rank] if told else self.expert_ids
        require(own == self.expert_ids, f"ranks[{self.rank}]", own, f"expert_ids={self.expert_ids}")

    def __str__(self) -> str:
        """Return rank, experts and slice in words."""
        ids = list(self.expert_ids)
        whole = len(ids) > 2 and ids == list(range(ids[0], ids[0] + len(ids)))
        held = f"{ids[0]} to {ids[-1]}" if whole else ", ".join(map(str, ids)) or "none"
        part = f", slice {self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
        free = f", {self.spare} spare slots" if self.spare else ""
        same = ", the same tokens on every rank" if self.same_tokens else ""
        return f"rank {self.rank} of {self.world_size}, experts {held}{free}{part}{same}"

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups with which this rank shares layers, the one that splits experts first."""
        return (self.group,) * (self.world_size > 1) + (self.slice_group,) * (self.tp_size > 1)

    @property
    def width(self) -> int:
        """Slots of the rank that has most, this one where others are not told."""
        return max(map(len, self.ranks or (self.expert_ids,))) + self.spare


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The machine as far as planning needs it; made by hand or by ``collegium.probe``.

    kind: ``cpu`` or ``cuda``. capability: (major, minor) of a CUDA device, None on CPU.
    memory: bytes of the device, 0 when unknown. threads: CPU threads torch will use. index: number of the CUDA device
    on this machine, None for one that is not here. sms: its multiprocessors, None for those of an H100 or H200.
    peers: GPUs of its host whose memory it reaches, itself included, None where that is not known.
    """

    kind: Literal["cpu", "cuda"]
    name: str = ""
    capability: tuple[int, int] | None = None
    memory: int = 0
    threads: int = 1
    index: int | None = None
    sms: int | None = None
    peers: int | None = None

    @property
    def place(self) -> str:
        """What torch calls the device: ``cpu``, ``cuda:1``, or ``cuda`` for one without a number."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds the plan sizes its workspace for.

    max_tokens: of one pass. rank_tokens: how many of them one rank may send to one other where that is fixed before
    (``all_to_all_fixed``); more are an error. None: all of them.
    """

    max_tokens: int = 8192
    rank_tokens: int | None = None

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        fits = self.rank_tokens is None or 1 <= self.rank_tokens <= self.max_tokens
        require(fits, "rank_tokens", self.rank_tokens, f"None, or 1 to max_tokens={self.max_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsProblem:
    """What an experts kernel is asked on one rank, where it knows neither routing nor ranks; of a shared expert too.

    experts, parts, intermediate, hidden: the weights ``[experts, parts, intermediate, hidden]`` and
    ``[experts, hidden, intermediate]`` it packs. weighted: rows are multiplied by a weight before they are quantised.
    tokens, rows: the most of each in one batch; a row is a token at one of its experts.
    activation_format: what rows become before each product; dtype: of the tokens.
    """

    experts: int
    parts: int
    intermediate: int
    hidden: int
    activation: ActivationSpec
    weight_format: str
    bias: bool
    weighted: bool
    tokens: int
    rows: int
    dtype: Literal["bf16", "fp16", "fp32"]
    activation_format: str
    device: DeviceFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The printable question ``plan()`` answers.

    activation_format: format activations take before each multiplication (``collegium.ops.quantize``); None lets the
        plan choose the one that loses nothing. dtype: of the layer's input and output.
    placement: what this rank holds; None: every expert, whole. graph: a CUDA graph has to be able to capture the layer.
    combine: one of ``COMBINES``, how rows come back from other ranks. sent_as: the activation format whose codes travel
        to them, None for tokens as they are; the plan says which.
    """

    spec: MoESpec
    device: DeviceFacts
    limits: Limits = field(default_factory=Limits)
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    activation_format: str | None = None
    placement: Placement | None = None
    graph: bool = False
    combine: Combine = "exact"
    sent_as: str | None = None

    def __post_init__(self) -> None:
        require(self.combine in COMBINES, "combine", self.combine, ", ".join(COMBINES))
        require(self.dtype in ("bf16", "fp16", "fp32"), "dtype", self.dtype, "bf16, fp16, fp32")
        require(type(self.limits) is Limits, "limits", self.limits, "Limits(max_tokens=...)")
        if self.placement is not None:
            beyond = [expert for expert in self.placement.expert_ids if not 0 <= expert < self.spec.num_experts]
            require(not beyond, "placement.expert_ids", beyond, f"0 to {self.spec.num_experts - 1}")

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Logical ids of the experts this rank holds."""
        return tuple(range(self.spec.num_experts)) if self.placement is None else self.placement.expert_ids

    @property
    def slots(self) -> int:
        """How many experts this rank has room for."""
        return len(self.local_experts) + (0 if self.placement is None else self.placement.spare)

    @property
    def world_size(self) -> int:
        """How many ranks share the layer."""
        return 1 if self.placement is None else self.placement.world_size

    @property
    def alone(self) -> bool:
        """Whether this rank holds everything, so that nothing has to be exchanged."""
        placed = self.placement
        if placed is None:
            return True
        whole = placed.expert_ids == tuple(range(self.spec.num_experts))
        return whole and placed.tp_size == 1 and not placed.spare

    @property
    def routed(self) -> ExpertsProblem:
        """What the kernel of the routed experts is asked on this rank."""
        spec, placed = self.spec, self.placement
        wide = spec.intermediate_size
        if placed is not None and placed.tp_size > 1:
            wide = placed.slice_size or -(-wide // placed.tp_size)
        return ExpertsProblem(
            experts=self.slots,
            parts=spec.gate_up_parts,
            intermediate=wide,
            hidden=spec.expert_hidden_size,
            activation=spec.activation,
            weight_format=spec.weight_format,
            bias=spec.expert_bias,
            weighted=spec.routing.weight_on_input,
            tokens=self.limits.max_tokens,
            rows=self.limits.max_tokens * spec.routing.top_k,
            dtype=self.dtype,
            activation_format=self.activation_format or self.dtype,
            device=self.device,
        )

    def shared(self) -> ExpertsProblem:
        """Return what the kernel of the shared expert is asked; raises SpecError when there is none."""
        return replace(self, spec=self.spec.shared_alone(), placement=None).routed


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A user's explicit wish; the plan obeys or refuses, it never falls back. Names as the plan prints them.

    combine: one of ``COMBINES``, for layers over ranks.
    """

    kernel: str | None = None
    activation_format: str | None = None
    dispatcher: str | None = None
    pipeline: str | None = None
    combine: Combine | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One candidate and the reason, with numbers, why it was not chosen. what: kernel, dispatcher or pipeline."""

    what: str
    name: str
    reason: str
