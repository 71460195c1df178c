"""Frozen values that packages exchange.

Shape letters: T tokens, K experts per token (top-k), E experts, D hidden size of the model, H width the routed
experts read and write (other than D only for latent MoE), I intermediate size, R received rows (T*K at most).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from .errors import CollegiumError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

    from .adapters import TokenAdapters

__all__ = [
    "ActivationSpec",
    "ContiguousBatch",
    "ExpertWeights",
    "LatentWeights",
    "MoESpec",
    "RemoteOutput",
    "RouterModule",
    "RouterWeights",
    "Routing",
    "RoutingSpec",
    "SharedSpec",
    "SharedWeights",
    "TileRows",
    "closest",
    "format_names",
    "named",
    "require",
]

ActivationKind = Literal["swiglu", "swiglu_oai", "swiglu_step", "situ", "geglu", "geglu_tanh", "relu2", "silu", "gelu"]
GATED_KINDS = ("swiglu", "swiglu_oai", "swiglu_step", "situ", "geglu", "geglu_tanh")
ACTIVATION_KINDS = (*GATED_KINDS, "relu2", "silu", "gelu")

ScoreFunction = Literal["softmax", "topk_softmax", "sigmoid", "sqrt_softplus", "sparsemixer"]
SCORE_FUNCTIONS = ("softmax", "topk_softmax", "sigmoid", "sqrt_softplus", "sparsemixer")
# Names that serving engines use for a rule, by score, renormalize and correction_bias.
_METHODS = {
    ("softmax", False, False): "default",
    ("softmax", True, False): "renormalize_naive",
    ("topk_softmax", False, False): "renormalize",
    ("topk_softmax", True, False): "renormalize",  # their sum is 1
    ("sigmoid", False, False): "sigmoid",
    ("sigmoid", True, False): "sigmoid_renorm",
    ("sigmoid", True, True): "deepseek_v3",
    ("sqrt_softplus", True, True): "deepseek_v4",
}


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise SpecError, with the ``name`` of a setting, its ``value`` and what is ``allowed``, unless ``ok``."""
    if not ok:
        raise SpecError(f"{name}: found {value!r}, allowed: {allowed}")


def named(table: Iterable[Any], name: str, message: str, error: type[CollegiumError] = SpecError) -> Any:
    """Return the row of ``table`` called ``name``.

    Without such a row raise ``error`` with ``message``, all names, and those that are spelled like ``name``.
    """
    rows = list(table)
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        names = [row.name for row in rows]
        near = closest(str(name), names)
        raise error(message + ", ".join(names) + (f"; {near}" if near else ""))
    return row


def closest(name: str, names: Iterable[str]) -> str:
    """Return a clause with up to three of ``names`` that are spelled like ``name``, empty where none is."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    near = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f"closest to {name!r}: {', '.join(by_lower[match] for match in near)}" if near else ""


def format_names(formats: tuple[str, str]) -> str:
    """Return the formats of gate_up and of down as text: one name where they are equal."""
    first, second = formats
    return first if first == second else f"{first} (gate_up) and {second} (down)"


def _require_count(name: str, value: object) -> None:
    require(isinstance(value, int) and value >= 1, name, value, "a whole number, at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationSpec:
    """The activation between the two projections of an expert.

    kind: one of ``ACTIVATION_KINDS``.
    limit: clamp bound. For ``swiglu`` and ``swiglu_oai`` the gate is clamped above and up on both sides *before*
        the activation; for ``swiglu_step`` silu(gate) is clamped above and up on both sides *after* it. None: no clamp.
    alpha, beta: of ``swiglu_oai``: the factor inside the sigmoid, and the constant added to up (gpt-oss: 1.702 and 1).
    gate_bound, up_bound: the two tanh bounds of ``situ`` (Kimi-K3: 4 and 25).
    fast: Triton kernels use the GPU's approximate sigmoid and tanh, with absolute errors up to 2^-11 and 2^-10, also
        for values near zero. Other kernels refuse it.
    """

    kind: ActivationKind = "swiglu"
    limit: float | None = None
    alpha: float = 1.702
    gate_bound: float = 4.0
    up_bound: float = 25.0
    beta: float = 1.0
    fast: bool = False

    def __post_init__(self) -> None:
        require(self.kind in ACTIVATION_KINDS, "activation kind", self.kind, ", ".join(ACTIVATION_KINDS))
        require(self.limit is None or self.limit > 0, "activation limit", self.limit, "None or a positive number")
        if self.limit is not None:
            kinds = ("swiglu", "swiglu_oai", "swiglu_step")
            require(self.kind in kinds, "activation with a limit", self.kind, ", ".join(kinds))

    @property
    def gated(self) -> bool:
        """Whether the first projection has a gate half and an up half."""
        return self.kind in GATED_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSpec:
    """How router logits ``[T, E]`` become ``topk_ids`` and ``topk_weights`` ``[T, K]``.

    score: ``softmax`` over all experts before top-k; ``topk_softmax`` over the selected logits only; ``sigmoid`` and
        ``sqrt_softplus`` elementwise before top-k; ``sparsemixer``: two experts one after the other, weighted by a
        softmax over the logits within ``2 * jitter`` of the best remaining one (Phi-3.5-MoE).
    renormalize: divide the selected weights by (their sum + ``renormalize_eps``), or by ``renormalize_floor`` if that
        is larger.
    groups, topk_groups: grouped top-k; ``group_score`` is the maximum of the group or the sum of its two best.
    scale: routed scaling factor, applied last.
    correction_bias: whether a per-expert bias is added for selection only, never to the weights.
    weight_on_input: the router weight multiplies the expert's input instead of its output (Llama-4).
    hash_routing: experts are looked up by token id in a table; the weights still come from the scores.
    input_norm_eps: epsilon of an RMS norm without weight on the router's input (Gemma-4); None: no norm.
    expert_scale: whether the weight of each assignment is finally multiplied by a factor of its expert.
    round_logits: whether logits of the layer's router are rounded before they are scored, as in models that compute
        the router in 16 bits. True: to the dtype of the layer's input; ``bf16`` or ``fp16``: to that dtype, whatever
        the input; False: they stay float32.
    id_dtype: of the ``topk_ids`` that this rule chooses, ``int64`` or ``int32``.
    """

    top_k: int
    score: ScoreFunction = "softmax"
    renormalize: bool = True
    renormalize_eps: float = 0.0
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    scale: float = 1.0
    correction_bias: bool = False
    weight_on_input: bool = False
    hash_routing: bool = False
    renormalize_floor: float = 0.0
    jitter: float = 0.01
    input_norm_eps: float | None = None
    expert_scale: bool = False
    round_logits: bool | Literal["bf16", "fp16"] = False
    id_dtype: Literal["int64", "int32"] = "int64"

    def __post_init__(self) -> None:
        for name in ("top_k", "groups", "topk_groups"):
            _require_count(name, getattr(self, name))
        require(self.score in SCORE_FUNCTIONS, "score function", self.score, ", ".join(SCORE_FUNCTIONS))
        valid = 1 <= self.topk_groups <= self.groups
        require(valid, "topk_groups", self.topk_groups, f"1 to groups={self.groups}")
        require(self.group_score in ("max", "top2_sum"), "group_score", self.group_score, "max, top2_sum")
        require(self.renormalize_eps >= 0, "renormalize_eps", self.renormalize_eps, "0 or more")
        require(self.renormalize_floor >= 0, "renormalize_floor", self.renormalize_floor, "0 or more")
        rounded = "False, True (to the dtype of the input), 'bf16', 'fp16'"
        require(self.round_logits in (False, True, "bf16", "fp16"), "round_logits", self.round_logits, rounded)
        signed = "int64, int32 (an unsigned id cannot be -1, which means not here)"
        require(self.id_dtype in ("int64", "int32"), "id_dtype", self.id_dtype, signed)
        if self.score == "sparsemixer":
            plain = not (self.renormalize or self.correction_bias or self.hash_routing or self.groups > 1)
            require(plain and self.top_k == 2, "sparsemixer", self, "top_k=2 and renormalize=False alone")
            require(self.jitter > 0, "jitter", self.jitter, "a positive number")

    @property
    def method(self) -> str:
        """The name that serving engines use for this rule, for a kernel that routes by itself.

        ``default``, ``renormalize_naive``, ``renormalize``, ``sigmoid``, ``sigmoid_renorm``, ``deepseek_v3`` (groups or
        none), ``deepseek_v4``, ``llama4``; ``unspecified`` for every other rule. ``docs/routing.md`` has the table.
        The name does not cover top_k, groups, scale and renormalize_eps.
        """
        name = _METHODS.get((self.score, self.renormalize, self.correction_bias), "unspecified")
        if self.weight_on_input:
            name = "llama4" if name == "sigmoid" and self.top_k == 1 else "unspecified"
        grouped = self.groups > 1 and (name, self.group_score) != ("deepseek_v3", "top2_sum")
        other = grouped or self.hash_routing or self.expert_scale or self.renormalize_floor
        return "unspecified" if other else name


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpec:
    """The dense expert that every token passes through.

    gated: its output is multiplied by sigmoid(Linear(x) -> 1) (Qwen2-MoE family). activation: None: that of the routed
    experts. weight_format: of gate and up, and of down unless ``down_format`` names another; None: those of the routed
    experts.
    """

    intermediate_size: int
    gated: bool = False
    activation: ActivationSpec | None = None
    weight_format: str | None = None
    down_format: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """One Mixture-of-Experts layer, as the model's config describes it. Sizes are logical, never padded.

    hidden_size: D, width of the layer's input and output.
    intermediate_size: I, width between the projections of one expert.
    weight_format: name of the format the experts are published in (see ``collegium.formats.FORMATS``).
    down_format: format of the down projections where it is another one; None: ``weight_format``.
    expert_bias: whether both projections carry biases ``[E, 2I or I]`` and ``[E, H]``.
    latent_size: H when the routed experts work in a latent width; None means H = D.
    latent_norm_eps: epsilon of the RMS norm before the projection out of the latent width, None when there is none.
    shared: the shared expert, or None.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    routing: RoutingSpec
    activation: ActivationSpec = field(default_factory=ActivationSpec)
    weight_format: str = "bf16"
    expert_bias: bool = False
    latent_size: int | None = None
    shared: SharedSpec | None = None
    latent_norm_eps: float | None = None
    down_format: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts"):
            _require_count(name, getattr(self, name))
        _require_count("latent_size", self.expert_hidden_size)
        k, e, g = self.routing.top_k, self.num_experts, self.routing.groups
        require(k <= e, "top_k", k, f"at most num_experts={e}")
        require(e % g == 0, "num_experts with routing groups", (e, g), "num_experts a multiple of groups")
        candidates = self.routing.topk_groups * (e // g)
        require(k <= candidates, "top_k with topk_groups", k, f"at most the {candidates} experts of those groups")

    @property
    def expert_hidden_size(self) -> int:
        """H, the width the routed experts read and write."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def formats(self) -> tuple[str, str]:
        """Formats of gate and up, and of down."""
        return self.weight_format, self.down_format or self.weight_format

    @property
    def gate_up_parts(self) -> int:
        """2 when the first projection is gate and up, 1 when it is a single up projection."""
        return 2 if self.activation.gated else 1

    def routed_alone(self) -> MoESpec:
        """Return a layer of the routed experts only, with their width H; callers pass the routing."""
        rule = RoutingSpec(top_k=self.routing.top_k)
        return replace(
            self, hidden_size=self.expert_hidden_size, latent_size=None, latent_norm_eps=None, shared=None, routing=rule
        )

    def shared_alone(self) -> MoESpec:
        """Return the shared expert as a layer of one expert that receives every token; kernels run it as such.

        Raises SpecError when there is none.
        """
        if self.shared is None:
            raise SpecError("shared_alone: the spec has no shared expert; call it only where spec.shared is set")
        first = self.shared.weight_format or self.weight_format
        return MoESpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared.intermediate_size,
            num_experts=1,
            routing=RoutingSpec(top_k=1),
            activation=self.shared.activation or self.activation,
            weight_format=first,
            down_format=self.shared.down_format or (None if self.shared.weight_format else self.down_format),
        )


F_co = TypeVar("F_co", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights(Generic[F_co]):
    """The local experts of one layer in logical order: gate before up, nothing padded, nothing interleaved.

    gate_up: payload with logical shape ``[E, P, I, H]``; P is 2 (index 0 gate, 1 up) or 1 without a gate.
    down: payload with logical shape ``[E, H, I]``.
    gate_up_bias ``[E, P, I]`` and down_bias ``[E, H]``: floating point, or None when the model has no biases.
    input_reach: the largest inputs of gate_up and of down that the calibration represents, for static activation
        formats; the same on every rank that shares the layer. None: unknown.
    expert_reach: ``[E, 2]`` float32, the same of each expert, for formats with a scale per expert. None: unknown.
    """

    gate_up: F_co
    down: F_co
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    input_reach: tuple[float, float] | None = None
    expert_reach: Tensor | None = None

    @property
    def formats(self) -> dict[str, Any]:
        """The fields ``weight_format`` and ``down_format`` of a spec for these payloads."""
        first, second = (cast("Any", payload).name for payload in (self.gate_up, self.down))
        return {"weight_format": first, "down_format": None if second == first else second}


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """``topk_ids [T, K]`` of an integer dtype and ``topk_weights [T, K]`` of a floating one, read as float32.

    An id of -1 means "not here" and adds nothing, whatever its weight is. Other ids that are not an expert make the
    output of their token NaN, and so does a NaN weight.
    """

    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterWeights:
    """The router's linear layer: weight ``[E, D]``, bias, correction_bias and expert_scale ``[E]`` or None.

    hash_table: ``[vocabulary, K]`` expert ids, for hash routing only.
    """

    weight: Tensor
    bias: Tensor | None = None
    correction_bias: Tensor | None = None
    hash_table: Tensor | None = None
    expert_scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterModule:
    """A router of the caller: a function or module ``gate`` from the router's input ``[T, D]`` to logits ``[T, E]``.

    A tuple of results stands for its first entry. The spec's rule chooses experts from the logits, with
    correction_bias, hash_table and expert_scale as in ``RouterWeights``.
    """

    gate: Callable[[Tensor], Any]
    correction_bias: Tensor | None = None
    hash_table: Tensor | None = None
    expert_scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWeights(Generic[F_co]):
    """The shared expert as ``ExpertWeights`` of one expert, and its sigmoid gate ``[1, D]`` or None."""

    experts: ExpertWeights[F_co]
    gate: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWeights:
    """Projections around the routed experts of a latent MoE.

    down ``[H, D]`` maps the input to the latent width, up ``[D, H]`` maps the summed expert output back.
    norm ``[H]``: weight of an RMS norm applied to the summed output before ``up``, or None; norm_eps: its epsilon.
    """

    down: Tensor
    up: Tensor
    norm: Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRows:
    """Token tiles of ``block_t`` rows: expert ``[count]`` int32 (-1: no tile) and first row ``[count]`` int64.

    used: ``[3]`` int32, how many tiles have an expert (they come first), and two zeros, counters of a kernel that draws
    tiles.
    """

    block_t: int
    expert: Tensor
    row: Tensor
    used: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOutput:
    """Output buffers on several ranks: experts write each row to the rank that owns its token.

    rows: ``[N, H]`` contiguous, this rank's buffer. offsets: ``[R]`` int64, where row r is written, in elements from
    the start of ``rows``; it may be in a peer's memory, also at a negative offset. ``kernels.enums.NOWHERE``: the row
    is not written.
    """

    rows: Tensor
    offsets: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ContiguousBatch:
    """Rows sorted by expert, as indices into the tokens; nothing is gathered yet.

    x: ``[T, H]`` activations, or E4M3 codes with ``scale [T, G]`` float32. source: ``[R]`` int64, row r reads
    ``x[source[r]]``; rows are sorted by expert, and within an expert by token. expert_offsets: ``[E+1]`` int64 on x's
    device, expert e has rows ``expert_offsets[e]:expert_offsets[e+1]``; rows from ``expert_offsets[E]`` on belong to
    dropped assignments and must not be read from the result. input_weights: ``[R]`` float32, factors of the rows before
    everything else (router weight on the input), or None. tiles: token tile lists for kernels that request them. rows:
    number of rows to choose tiles for, None: R; less than R where the batch has room for more rows than it is likely to
    contain. dtype: of the tokens and the result, None: that of x. order: column order of codes, numbered as in
    ``ops/quantize.py``. x_ready: whether no launch since x was written touches x or the buffers allocated next, so that
    a kernel that reads only x may overlap the sort. remote: where ``run`` writes the rows; it then returns
    ``remote.rows``. Only for experts with an ``output_spec``. adapters: those of the layer, and which one each token
    has; None: none has one. middle_scale: ``[T, G]`` float32, given scales of the rows between the products, by token,
    for activation formats that have them; None: as in the format. slots: ``[T, top-k]`` int64, contiguous, the
    row of each assignment, negative where it was dropped; None: unknown, allowed for tokens that are not codes.
    """

    x: Tensor
    source: Tensor
    expert_offsets: Tensor
    input_weights: Tensor | None = None
    tiles: tuple[TileRows, ...] = ()
    rows: int | None = None
    scale: Tensor | None = None
    dtype: torch.dtype | None = None
    order: int = 0
    x_ready: bool = False
    remote: RemoteOutput | None = None
    adapters: TokenAdapters | None = None
    middle_scale: Tensor | None = None
    slots: Tensor | None = None
