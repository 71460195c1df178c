"""What ``plan()`` decides about: a layer on a device, over ranks, within limits; and its part for an experts kernel."""

from dataclasses import dataclass, field, replace
from typing import Literal

from .placement import Placement
from .types import ActivationSpec, MoESpec, RoutingSpec, require

__all__ = [
    "COMBINES",
    "PAGING",
    "SHARED_MODES",
    "TILES",
    "UNEQUAL_SCALES",
    "Combine",
    "DeviceFacts",
    "ExpertsProblem",
    "Limits",
    "Overrides",
    "Problem",
    "Refusal",
    "SharedMode",
    "Tiles",
    "UnequalScales",
]

Combine = Literal["exact", "reduced", "reduced_fp8"]
COMBINES = ("exact", "reduced", "reduced_fp8")
SharedMode = Literal["sequential", "side_stream", "overlapped", "merged", "sliced"]
SHARED_MODES = ("sequential", "side_stream", "overlapped", "merged", "sliced")
Tiles = Literal["small", "large"]
TILES = ("small", "large")
UnequalScales = Literal["refuse", "largest"]
UNEQUAL_SCALES: tuple[UnequalScales, ...] = ("refuse", "largest")
PAGING = ("lru", "lfu", "static")
_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The device as far as planning needs it; written by hand or returned by ``collegium.probe``.

    kind: ``cpu`` or ``cuda``. capability: (major, minor) of a CUDA device, None on a CPU.
    memory: bytes of the device, 0 when unknown. threads: CPU threads that torch uses. index: number of the CUDA device
    on this host, None for a device that is not present. sms: number of its multiprocessors; None: as an H100 or H200.
    peers: number of GPUs of its host whose memory it can access, itself included, None when unknown. bandwidth: bytes
    per second from its memory clock; None: as an H200. host_bandwidth: measured bytes per second from page-locked host
    memory, None when unknown. nvrtc: whether the CUDA compiler that PyTorch ships is
    installed.
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
    host_bandwidth: float | None = None

    @property
    def place(self) -> str:
        """The torch name of the device: ``cpu``, ``cuda:1``, or ``cuda`` without an index."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes that the plan reserves workspace for.

    max_tokens: of one pass. rank_tokens: how many of them one rank may send to another where that is fixed in advance
    (``all_to_all_fixed``), more are an error; None: all of them. gpu_bytes: of GPU memory for the routed experts of one
    layer; the others stay in host memory and are copied when a pass needs them. None: all experts are on the GPU.
    """

    max_tokens: int = 8192
    rank_tokens: int | None = None
    gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        size = self.gpu_bytes
        require(size is None or (type(size) is int and size >= 1), "gpu_bytes", size, "None, or bytes of at least 1")
        n, m = self.max_tokens, self.rank_tokens
        require(type(n) is int and 1 <= n < 1 << 62, "max_tokens", n, "at least 1, a whole number below 2 ** 62")
        require(m is None or (type(m) is int and 0 < m <= n), "rank_tokens", m, f"None, or 1 to max_tokens={n}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsProblem:
    """What an experts kernel has to run on one rank, without routing and ranks; also describes a shared expert.

    experts, parts, intermediate, hidden: sizes of the weights ``[experts, parts, intermediate, hidden]`` and
    ``[experts, hidden, intermediate]``. weighted: rows are multiplied by a weight before they are quantised.
    tokens, rows: maximum of one batch; a row is one token at one of its experts.
    weight_format: of gate_up, and of down unless ``down_format`` names another.
    activation_format: of rows before each product. dtype: of the tokens. tiles: see ``Overrides``.
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
    tiles: Tiles | None = None

    @property
    def formats(self) -> tuple[str, str]:
        """Formats of gate_up and of down."""
        return self.weight_format, self.down_format or self.weight_format

    @property
    def mixed(self) -> bool:
        """Whether gate_up and down have different formats."""
        return self.formats[0] != self.formats[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What ``plan()`` decides about, as a printable value.

    activation_format: format of activations before each product (``collegium.ops.quantize``); None: the plan chooses
        the one that loses nothing. dtype: of the layer's input. out_dtype: of its output; None: ``dtype``.
    placement: the experts of this rank; None: all experts, whole. graph: a CUDA graph must be able to capture the
        layer.
    combine: how rows return from other ranks, one of ``COMBINES``. sent_as: activation format of the codes that travel
        to other ranks, None for unquantised tokens; set by the plan. shared_slices: number of ranks that have a slice
        of the shared expert; set by the plan. tiles: see ``Overrides``; set by the plan. gpu_slots: slots on the GPU
        for the experts, fewer than these, where ``Limits.gpu_bytes`` has no room for all; set by the plan.
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
    out_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    shared_slices: int = 1
    tiles: Tiles | None = None
    gpu_slots: int | None = None

    def __post_init__(self) -> None:
        require(self.device.kind in ("cpu", "cuda"), "device kind", self.device.kind, "cpu, cuda")
        require(self.combine in COMBINES, "combine", self.combine, ", ".join(COMBINES))
        require(self.dtype in _DTYPES, "dtype", self.dtype, ", ".join(_DTYPES))
        require(self.out_dtype in (None, *_DTYPES), "out_dtype", self.out_dtype, f"None, {', '.join(_DTYPES)}")
        require(type(self.limits) is Limits, "limits", self.limits, "Limits(max_tokens=...)")
        if self.placement is not None:
            ranks = self.placement.ranks or (self.placement.expert_ids,)
            unknown = [expert for ids in ranks for expert in ids if not 0 <= expert < self.spec.num_experts]
            require(not unknown, "placement.expert_ids", unknown, f"0 to {self.spec.num_experts - 1}")

    @property
    def output_dtype(self) -> str:
        """Name of the dtype of the layer's output."""
        return self.out_dtype or self.dtype

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Logical ids of the experts on this rank."""
        return tuple(range(self.spec.num_experts)) if self.placement is None else self.placement.expert_ids

    @property
    def slots(self) -> int:
        """Number of slots for experts on this rank, spare ones included; fewer than experts where they are paged."""
        if self.gpu_slots is not None:
            return self.gpu_slots
        return len(self.local_experts) + (0 if self.placement is None else self.placement.spare)

    @property
    def packed_experts(self) -> int:
        """Number of experts that are packed: one for each slot, or all where they are paged."""
        return self.slots if self.gpu_slots is None else len(self.local_experts)

    @property
    def world_size(self) -> int:
        """Number of ranks that share the layer."""
        return 1 if self.placement is None else self.placement.world_size

    @property
    def alone(self) -> bool:
        """Whether every rank holds all experts whole, so nothing is exchanged; the same on all ranks."""
        placement = self.placement
        if placement is None:
            return True
        all_experts = tuple(range(self.spec.num_experts))
        complete = {*placement.ranks, placement.expert_ids} == {all_experts}
        return complete and placement.tp_size == 1 and not placement.spare

    @property
    def routed(self) -> ExpertsProblem:
        """The routed experts of this rank, for a kernel."""
        spec, placement = self.spec, self.placement
        intermediate = spec.intermediate_size
        if placement is not None and placement.tp_size > 1:
            intermediate = placement.slice_size or -(-intermediate // placement.tp_size)
        return ExpertsProblem(
            experts=self.slots,
            parts=spec.gate_up_parts,
            intermediate=intermediate,
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
            tiles=self.tiles,
        )

    def with_merged_experts(self, count: int) -> "Problem":
        """Return the problem of the routed experts with ``count`` more of them, each of which receives every token."""
        if not count:
            return self
        routing = RoutingSpec(top_k=self.spec.routing.top_k + count, weight_on_input=self.spec.routing.weight_on_input)
        spec = replace(self.spec, num_experts=self.spec.num_experts + count, routing=routing, shared=None)
        return replace(self, spec=spec, placement=None)

    def shared(self) -> ExpertsProblem:
        """Return the shared expert, or this rank's slice of it, for a kernel; raises SpecError when there is none."""
        whole = replace(self, spec=self.spec.shared_alone(), placement=None).routed
        return replace(whole, intermediate=whole.intermediate // self.shared_slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """Choices that the caller forces. The plan obeys or refuses them; it never falls back. Names are those of the plan.

    combine: one of ``COMBINES``, for layers over ranks. shared: one of ``SHARED_MODES``, how the shared expert runs.
    ``sequential``: after the routed experts; ``side_stream``: on a side stream in a CUDA graph, for small batches;
    ``overlapped``: during an exchange with other ranks; ``merged``: split into routed experts that receive every token;
    ``sliced``: every rank has a slice of its width, for the dispatcher ``partial``. Ignored for layers without a
    shared expert. microbatches: 2: a batch runs as two halves, and one half's tokens travel between ranks while the
    experts run the other half; None: 1. tiles: one of ``TILES``: whether sorted batches of any size run in small tiles
    or in those of large batches, which have the same bits; None: those that are faster for the number of rows.
    unequal_scales: what to do where a checkpoint has different calibrated activation scales for gate and up of an
    expert, which read one input: ``refuse`` (None) it or use the ``largest``. For static activation formats only.
    allow_slow: run forced choices that have not been measured to be faster than the default, such as half batches;
    otherwise the plan refuses them. paging: one of ``PAGING``, the policy that chooses which experts stay on the GPU
    where ``Limits.gpu_bytes`` has no room for all; None: ``lru``.
    """

    kernel: str | None = None
    activation_format: str | None = None
    dispatcher: str | None = None
    pipeline: str | None = None
    combine: Combine | None = None
    shared: SharedMode | None = None
    microbatches: int | None = None
    tiles: Tiles | None = None
    unequal_scales: UnequalScales | None = None
    allow_slow: bool = False
    paging: str | None = None

    def __post_init__(self) -> None:
        allowed = ", ".join(UNEQUAL_SCALES)
        require(self.unequal_scales in (None, *UNEQUAL_SCALES), "unequal_scales", self.unequal_scales, allowed)
        require(self.shared in (None, *SHARED_MODES), "shared", self.shared, ", ".join(SHARED_MODES))
        count = self.microbatches
        require(count is None or (type(count) is int and count in (1, 2)), "microbatches", count, "None, 1 or 2")
        require(self.tiles in (None, *TILES), "tiles", self.tiles, ", ".join(TILES))
        require(self.paging in (None, *PAGING), "paging", self.paging, ", ".join(PAGING))
        require(type(self.allow_slow) is bool, "allow_slow", self.allow_slow, "True or False")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A candidate that was not chosen, and why, with numbers. what: kernel, dispatcher or pipeline."""

    what: str
    name: str
    reason: str
