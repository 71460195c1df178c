"""The question ``plan()`` answers: a layer, on a machine, over ranks, within limits; and what a kernel is asked."""

from dataclasses import dataclass, field, replace
from typing import Literal

from .placement import Placement
from .types import ActivationSpec, MoESpec, RoutingSpec, require

__all__ = ["COMBINES", "Combine", "DeviceFacts", "ExpertsProblem", "Limits", "Overrides", "Problem", "Refusal"]

Combine = Literal["exact", "reduced", "reduced_fp8"]
COMBINES = ("exact", "reduced", "reduced_fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The machine as far as planning needs it; made by hand or by ``collegium.probe``.

    kind: ``cpu`` or ``cuda``. capability: (major, minor) of a CUDA device, None on CPU.
    memory: bytes of the device, 0 when unknown. threads: CPU threads torch will use. index: number of the CUDA device
    on this machine, None for one that is not here. sms: its multiprocessors, None for those of an H100 or H200.
    peers: GPUs of its host whose memory it reaches, itself included, None where that is not known. bandwidth: bytes a
    second that its memory is clocked for, None for those of an H200. nvrtc: whether the compiler that PyTorch brings
    for CUDA is there.
    """

    kind: Literal["cpu", "cuda"]
    name: str = ""
    capability: tuple[int, int] | None = None
    memory: int = 0
    threads: int = 1
    index: int | None = None
    sms: int | None = None
    peers: int | None = None
    bandwidth: float | None = None
    nvrtc: bool = True

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
        n, m = self.max_tokens, self.rank_tokens
        require(type(n) is int and 1 <= n < 1 << 62, "max_tokens", n, "at least 1, a whole number below 2 ** 62")
        require(m is None or (type(m) is int and 0 < m <= n), "rank_tokens", m, f"None, or 1 to max_tokens={n}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsProblem:
    """What an experts kernel is asked on one rank, where it knows neither routing nor ranks; of a shared expert too.

    experts, parts, intermediate, hidden: the weights ``[experts, parts, intermediate, hidden]`` and
    ``[experts, hidden, intermediate]`` it packs. weighted: rows are multiplied by a weight before they are quantised.
    tokens, rows: the most of each in one batch; a row is a token at one of its experts.
    weight_format: of gate_up, and of down unless ``down_format`` names another.
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
    down_format: str | None = None

    @property
    def formats(self) -> tuple[str, str]:
        """Formats of gate_up and of down."""
        return self.weight_format, self.down_format or self.weight_format

    @property
    def mixed(self) -> bool:
        """Whether the two products have weights in two formats."""
        return self.formats[0] != self.formats[1]


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
        require(self.device.kind in ("cpu", "cuda"), "device kind", self.device.kind, "cpu, cuda")
        require(self.combine in COMBINES, "combine", self.combine, ", ".join(COMBINES))
        require(self.dtype in ("bf16", "fp16", "fp32"), "dtype", self.dtype, "bf16, fp16, fp32")
        require(type(self.limits) is Limits, "limits", self.limits, "Limits(max_tokens=...)")
        if self.placement is not None:
            held = self.placement.ranks or (self.placement.expert_ids,)
            beyond = [expert for ids in held for expert in ids if not 0 <= expert < self.spec.num_experts]
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
        """Whether every rank holds everything, so that nothing has to be exchanged; all ranks say the same."""
        placed, whole = self.placement, tuple(range(self.spec.num_experts))
        held = () if placed is None else {*placed.ranks, placed.expert_ids}
        return placed is None or (held == {whole} and placed.tp_size == 1 and not placed.spare)

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
            down_format=None if spec.down_format == spec.weight_format else spec.down_format,
            bias=spec.expert_bias,
            weighted=spec.routing.weight_on_input,
            tokens=self.limits.max_tokens,
            rows=self.limits.max_tokens * spec.routing.top_k,
            dtype=self.dtype,
            activation_format=self.activation_format or self.dtype,
            device=self.device,
        )

    def widened(self, more: int) -> "Problem":
        """Return the problem of the routed experts alone with ``more`` like them, to which every token goes too."""
        if not more:
            return self
        old = self.spec.routing
        rule = RoutingSpec(top_k=old.top_k + more, weight_on_input=old.weight_on_input)
        spec = replace(self.spec, num_experts=self.spec.num_experts + more, routing=rule, shared=None)
        return replace(self, spec=spec, placement=None)

    def shared(self) -> ExpertsProblem:
        """Return what the kernel of the shared expert is asked; raises SpecError when there is none."""
        return replace(self, spec=self.spec.shared_alone(), placement=None).routed


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """A user's explicit wish; the plan obeys or refuses, it never falls back. Names as the plan prints them.

    combine: one of ``COMBINES``, for layers over ranks. shared: whether the shared expert runs as ``merged``, more
    routed experts that every token goes to, ``beside`` them, for few tokens on a stream of its own in a CUDA graph,
    or ``apart``; nothing to a layer without one.
    """

    kernel: str | None = None
    activation_format: str | None = None
    dispatcher: str | None = None
    pipeline: str | None = None
    combine: Combine | None = None
    shared: Literal["merged", "beside", "apart"] | None = None

    def __post_init__(self) -> None:
        require(self.shared in (None, "merged", "beside", "apart"), "shared", self.shared, "merged, beside, apart")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One candidate and the reason, with numbers, why it was not chosen. what: kernel, dispatcher or pipeline."""

    what: str
    name: str
    reason: str
