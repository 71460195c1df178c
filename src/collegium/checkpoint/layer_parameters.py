"""All weights of one MoE layer, collected one tensor at a time: experts, shared expert, router, latent projections."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import BadScaleError, DuplicateTensorError, InputError, TensorMismatchError
from ..formats import by_name
from ..formats.payload import Payload
from ..ops.quantize import activation_format
from ..placement import Placement
from ..types import ExpertWeights, LatentWeights, MoESpec, RouterWeights, SharedWeights
from .activation_scales import ActivationScales, Reach, ScaleRequest, is_unequal, reach_of
from .layout import Cut, local_range
from .non_expert_weights import check_hash_entries
from .parameters import MatrixParameters, Piece, StoredCopy, Target, check_plain
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = ["SHARDS", "Candidates", "LayerParameters", "LoadSummary", "Loaded", "Shard", "Stored", "candidates_of"]

Shard = Literal["w1", "w2", "w3", "w13"]
SHARDS: tuple[Shard, ...] = ("w1", "w2", "w3", "w13")
# What a caller passes for the stored format of all matrices, or of gate and up, and of down.
Stored = str | StoredFormat | tuple[str | StoredFormat, str | StoredFormat]
Candidates = tuple[Sequence[StoredFormat], Sequence[StoredFormat]]
_INPUT_SCALES = frozenset(suffix.lstrip("._") for suffix in ACTIVATION_SCALES)
_SHARED = "shared."
_PREFIXES = (_SHARED, "router.", "latent.")


def candidates_of(stored: Stored | None, names: tuple[str, str]) -> Candidates:
    """Return the stored formats that tensors of gate and up, and of down, may have.

    stored: format names, all of whose storages are candidates, or exact formats; None: the formats ``names``. Raises
    SpecError for an unknown name, and InputError for integers by name, whose groups only the caller knows.
    """
    both = (stored, stored) if isinstance(stored, str | StoredFormat) else stored or names
    first, second = (_candidates(entry) for entry in both)
    return first, second


def _candidates(entry: str | StoredFormat) -> list[StoredFormat]:
    if isinstance(entry, StoredFormat):
        return [entry]
    form = by_name(entry)
    if entry.startswith("int"):
        storages = ", ".join(storage.name for storage in form.storages)
        raise InputError(
            f"stored: {entry} was passed by name; integers need their storage and group: "
            f"StoredFormat(name={entry!r}, storage=..., group=...), storage one of {storages}, group 0 for whole rows"
        )
    return [StoredFormat(name=entry, storage=storage.name) for storage in form.storages]


@dataclass(kw_only=True, slots=True)
class LoadSummary:
    """What was loaded. stored: number of tensors. nbytes: their size. skipped: tensors of experts of other ranks.

    skipped_experts: those experts. ignored: names that a mapping does not have.
    """

    stored: int = 0
    nbytes: int = 0
    skipped: int = 0
    skipped_experts: set[int] = field(default_factory=set[int])
    ignored: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        """Return one line."""
        text = f"{self.stored:,} tensors, {self.nbytes:,} bytes loaded"
        if self.skipped:
            text += f"; {self.skipped:,} of {len(self.skipped_experts)} experts of other ranks skipped"
        return text + (f"; {len(self.ignored):,} names ignored" if self.ignored else "")


class Loaded(NamedTuple):
    """Whether this rank needs a tensor, and where its bytes were copied to unchanged, None if nowhere."""

    is_needed: bool
    copy: StoredCopy | None = None


class LayerParameters:
    """The tensors of a layer's weights as they arrive, on the layer's device.

    spec: with the sizes of the whole layer. candidates, shared_candidates: of the experts and the shared expert.
    slots: the expert of each slot of this rank, -1 for an empty one. placement: its slice of the experts' width.
    absent: ``router``, ``latent`` or both where the layer has none or the caller computes it.
    """

    def __init__(
        self,
        spec: MoESpec,
        candidates: Candidates,
        shared_candidates: Candidates | None,
        *,
        slots: Sequence[int],
        placement: Placement,
        device: str,
        absent: Collection[str] = (),
    ) -> None:
        self.spec = spec
        self.summary = LoadSummary()
        self._device = device
        self._slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(slots):
            self._slots_of.setdefault(expert, []).append(slot)
        self._slots_of.pop(-1, None)
        self._slot_count = len(slots)
        self._tp_rank = placement.tp_rank
        self._upper: tuple[str, ...] = ("w1", "w3") if spec.activation.gated else ("w1",)
        labels = [f"expert {expert}" for expert in slots]
        self._experts = self._matrices(spec, candidates, labels, placement, bias=spec.expert_bias)
        self._shared: tuple[MatrixParameters, MatrixParameters] | None = None
        if shared_candidates is not None:
            whole = Placement(expert_ids=(0,))
            alone = spec.shared_alone()
            self._shared = self._matrices(alone, shared_candidates, ["the shared expert"], whole, bias=False)
        self._input_scales: dict[tuple[int | None, str], Tensor] = {}
        self._allowed = _dense_shapes(spec, absent)
        self._dense: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The parameters that may be loaded: first those of experts, which need a shard."""
        upper, lower = self._experts
        routed = list(dict.fromkeys([*upper.names, *lower.names]))
        shared = [] if self._shared is None else [_SHARED + n for matrix in self._shared for n in matrix.names]
        return [*routed, *dict.fromkeys(shared), *self._allowed]

    def load(
        self,
        parameter: str,
        tensor: Tensor,
        shard: Shard | None,
        expert: int | None,
        *,
        interleaved: bool = False,
    ) -> Loaded:
        """Take one tensor; see ``LayerBuilder.load``. interleaved: rows of gate and up alternate in ``w13``."""
        plain = check_plain(f"load: {parameter!r}", tensor)
        if parameter in self._allowed:
            self._load_dense(parameter, plain, shard, expert)
            loaded = Loaded(is_needed=True)
        elif parameter.startswith(_SHARED) and self._shared is not None:
            name = parameter.removeprefix(_SHARED)
            self._refuse_expert(parameter, expert)
            loaded = self._load_matrix(self._shared, name, plain, shard, None, interleaved=interleaved, routed=False)
        else:
            self._refuse_dense(parameter)
            self._check_expert(parameter, expert)
            loaded = self._load_matrix(
                self._experts, parameter, plain, shard, expert, interleaved=interleaved, routed=True
            )
        if loaded.is_needed:
            self.summary.stored += 1
            self.summary.nbytes += plain.numel() * plain.element_size()
        elif expert is not None:
            self.summary.skipped += 1
            self.summary.skipped_experts.add(expert)
        return loaded

    def missing(self, slots: Sequence[int] | None = None, *, dense: bool = True) -> list[str]:
        """Return what has not arrived, as text. slots: those to complete; None: all. dense: router and others too."""
        # Without a slot, the form of the empty payload is needed.
        occupied = sorted(slot for entries in self._slots_of.values() for slot in entries) or [0]
        needed = occupied if slots is None else slots
        texts = [text for matrix in self._experts for text in matrix.missing(needed)]
        if dense and self._shared is not None:
            texts += [text for matrix in self._shared for text in matrix.missing([0])]
        if dense:
            optional = ("router.bias", "router.scale")
            texts += [name for name in self._allowed if name not in self._dense and name not in optional]
        return texts

    def missing_shared_parts(self) -> list[str]:
        """Return what the shared expert's matrices lack, as text; nothing where none of it has arrived."""
        if self._shared is None or not self.shared_touched:
            return []
        return [text for matrix in self._shared for text in matrix.missing([0])]

    @property
    def touched(self) -> list[int]:
        """Slots of experts for which anything has arrived."""
        return sorted(self._experts[0].touched | self._experts[1].touched)

    @property
    def shared_touched(self) -> bool:
        """Whether anything of the shared expert's matrices has arrived."""
        return self._shared is not None and any(matrix.touched for matrix in self._shared)

    @property
    def dense(self) -> Mapping[str, Tensor]:
        """The tensors of router, latent projections and the shared expert's gate that have arrived, by parameter."""
        return self._dense

    def experts(self, slots: Sequence[int], scales: ScaleRequest | None = None) -> ExpertWeights[Payload]:
        """Return the experts of ``slots``, which ``missing`` finds complete.

        scales: the activation format, whose static scales are those of all experts. Raises CheckpointErrors.
        """
        upper, lower = self._experts
        gate_up, down = upper.payload(slots), lower.payload(slots)
        gate_up_bias, down_bias = upper.bias(slots), lower.bias(slots)
        if down_bias is not None and self._tp_rank:  # the sum over slices must contain it once
            down_bias = torch.zeros_like(down_bias)
        request = scales or ScaleRequest()
        reach = self._reach(self._experts, request, range(self.spec.num_experts))
        expert_of = {slot: expert for expert, owned in self._slots_of.items() for slot in owned}
        fields = {} if reach is None else reach.fields([expert_of[slot] for slot in slots], request.activations)
        return ExpertWeights(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias, **fields)

    def shared(self, scales: ScaleRequest | None = None) -> SharedWeights[Payload] | None:
        """Return the shared expert, None where the layer has none; arguments and errors as ``experts``."""
        if self._shared is None:
            return None
        upper, lower = self._shared
        request = scales or ScaleRequest()
        reach = self._reach(self._shared, request, [None])
        fields = {} if reach is None else reach.fields([0], request.activations)
        experts = ExpertWeights(gate_up=upper.payload([0]), down=lower.payload([0]), **fields)
        return SharedWeights(experts=experts, gate=self._dense.get("shared.gate"))

    def router(self) -> RouterWeights | None:
        """Return the router, None where the layer has none; a scale of its input is multiplied into the weight."""
        weight = self._dense.get("router.weight")
        if weight is None:
            return None
        scale = self._dense.get("router.scale")
        if scale is not None:
            weight = weight.float() * scale.float() * self.spec.hidden_size**-0.5
        fields = ("bias", "correction_bias", "hash_table", "expert_scale")
        return RouterWeights(weight=weight, **{name: self._dense.get(f"router.{name}") for name in fields})

    def latent(self) -> LatentWeights | None:
        """Return the latent projections in float32, None where the layer has none."""
        if "latent.down" not in self._dense:
            return None
        down, up = (self._dense[f"latent.{name}"].float() for name in ("down", "up"))
        norm = self._dense.get("latent.norm")
        return LatentWeights(down=down, up=up, norm=norm, norm_eps=self.spec.latent_norm_eps or 0.0)

    def largest_inputs(self, scales: ScaleRequest) -> tuple[float, float] | None:
        """Return the largest inputs that the static scales so far represent, None without any."""
        present = [expert for expert in range(self.spec.num_experts) if (expert, "w2") in self._input_scales]
        reach = self._reach(self._experts, scales, present) if present else None
        return None if reach is None else reach.largest

    def _matrices(
        self, spec: MoESpec, candidates: Candidates, labels: Sequence[str], placement: Placement, *, bias: bool
    ) -> tuple[MatrixParameters, MatrixParameters]:
        """Return the buffers of gate and up, and of down."""
        first, second = candidates
        local, width = local_range(spec, (first[0], second[0]), placement, pad=placement.tp_size > 1)
        rows, hidden = spec.intermediate_size, spec.expert_hidden_size
        common: dict[str, Any] = {"labels": labels, "device": self._device, "bias": bias}
        upper = MatrixParameters(
            first,
            shards=self._upper,
            shape=(rows, hidden),
            cut=Cut(rows=local, columns=(0, hidden)),
            padded=(width, hidden),
            **common,
        )
        lower = MatrixParameters(
            second,
            shards=("w2",),
            shape=(hidden, rows),
            cut=Cut(rows=(0, hidden), columns=local),
            padded=(hidden, width),
            **common,
        )
        return upper, lower

    def _load_matrix(
        self,
        matrices: tuple[MatrixParameters, MatrixParameters],
        name: str,
        tensor: Tensor,
        shard: Shard | None,
        expert: int | None,
        *,
        interleaved: bool,
        routed: bool,
    ) -> Loaded:
        """Take a tensor of experts, or of the shared expert (not routed)."""
        checked = self._prepare(matrices, name, tensor, shard, expert, interleaved=interleaved, routed=routed)
        if checked is None:
            assert shard is not None
            self._record_input_scale(name, tensor, shard, expert, routed=routed)
            return Loaded(is_needed=True)
        matrix, piece, part = checked
        targets = self._targets(expert) if routed else [Target(0, 0)]
        if not targets:
            return Loaded(is_needed=False)
        copy = matrix.store(piece, part, targets)
        return Loaded(is_needed=not routed or self._slot_count > 0, copy=copy)

    def _prepare(
        self,
        matrices: tuple[MatrixParameters, MatrixParameters],
        name: str,
        tensor: Tensor,
        shard: Shard | None,
        expert: int | None,
        *,
        interleaved: bool = False,
        routed: bool,
    ) -> tuple[MatrixParameters, Piece, Any] | None:
        """Return the buffers, the piece and the part of a tensor; None for a static scale of activations."""
        allowed = (*self._upper, *(("w13",) if len(self._upper) > 1 else ()), "w2")
        if shard not in allowed:
            meaning = "w1 is gate, w3 up, w13 gate above up" if len(self._upper) > 1 else "w1 is up"
            raise InputError(
                f"load: shard={shard!r} was passed with {name!r}; allowed: {', '.join(allowed)} ({meaning}, w2 down)"
            )
        matrix = matrices[shard == "w2"]
        if name in _INPUT_SCALES:
            return None
        who = "the shared expert"
        if routed:
            who = "all experts" if expert is None else f"expert {expert}"
        piece = Piece(
            name=name,
            tensor=tensor,
            label=f"{who}, {shard}",
            halves=(0, 1) if shard == "w13" else (self._upper.index(shard) if shard != "w2" else 0,),
            interleaved=interleaved,
            experts=self.spec.num_experts if routed and expert is None else None,
        )
        return matrix, piece, matrix.check(piece)

    def _targets(self, expert: int | None) -> list[Target]:
        """Return where a tensor of ``expert``, or of all, goes on this rank."""
        # Without a local expert, expert 0 gives the form of the empty payload.
        slots_of = self._slots_of if self._slot_count else {0: [0]}
        if expert is not None:
            return [Target(0, slot) for slot in slots_of.get(expert, ())]
        pairs = sorted((slot, entry) for entry, slots in slots_of.items() for slot in slots)
        return [Target(entry, slot) for slot, entry in pairs]

    def _record_input_scale(self, name: str, tensor: Tensor, shard: Shard, expert: int | None, *, routed: bool) -> None:
        """Remember a static scale of activations; those of all ranks' experts count."""
        experts: list[int | None] = [None] if not routed else [expert]
        if routed and expert is None:
            experts = list(range(self.spec.num_experts))
        halves = 2 if shard == "w13" else 1
        if not tensor.is_floating_point() or tensor.numel() not in {1, halves, len(experts), halves * len(experts)}:
            raise TensorMismatchError(
                f"load: {name} of {shard} is {list(tensor.shape)} {tensor.dtype}; allowed are floating numbers, one "
                "for each matrix"
            )
        values = tensor.float().cpu().reshape(-1)
        if name.endswith("global_scale"):
            values = values.reciprocal()
        rows = values.reshape(len(experts), -1) if values.numel() >= len(experts) else values.expand(len(experts), 1)
        for key, row in zip(experts, rows, strict=True):
            for which, value in zip(self._upper if shard == "w13" else (shard,), row.expand(halves), strict=True):
                self._input_scales[key if routed else -1, which] = value

    def _reach(
        self,
        matrices: tuple[MatrixParameters, MatrixParameters],
        request: ScaleRequest,
        experts: Sequence[int | None] | range,
    ) -> Reach | None:
        """Return the inputs that the static scales of ``experts`` represent; None for other formats."""
        if not activation_format(request.activations).static:
            return None
        scales = ActivationScales()
        for expert in experts:
            who = "the shared expert" if expert is None else f"expert {expert}"
            gate_scale = None
            for shard in (*self._upper, "w2"):
                value = self._input_scales.get((-1 if expert is None else expert, shard))
                if value is None:
                    scales.missing.append(f"{who}, {shard}")
                    continue
                number = float(value)
                if not 0 < number < float("inf"):
                    raise BadScaleError(
                        f"{who}, {shard}: input_scale is {number:g}, allowed are finite and positive numbers"
                    )
                (scales.down if shard == "w2" else scales.gate_up).append(number)
                if shard == "w3" and gate_scale is not None and is_unequal(number, gate_scale):
                    scales.unequal.append(
                        f"{who}, w3: input_scale is {number:g}, that of w1 is {gate_scale:g}; they share one input"
                    )
                gate_scale = number if shard == "w1" else None
        upper, lower = matrices
        return reach_of(scales, (upper.stored, lower.stored), request)

    def _load_dense(self, parameter: str, tensor: Tensor, shard: Shard | None, expert: int | None) -> None:
        """Take a tensor of router, latent projections or the shared expert's gate."""
        self._refuse_expert(parameter, expert)
        if shard is not None:
            raise InputError(f"load: shard={shard!r} was passed with {parameter!r}, which has none; leave it out")
        shape = self._allowed[parameter]
        is_table = parameter == "router.hash_table"
        if is_table and tensor.dim() == 2:
            shape = (tensor.shape[0], *shape[1:])
        kind = "integers" if is_table else "floating numbers"
        fits = [n for n in tensor.shape if n != 1] == [n for n in shape if n != 1]
        if not fits or tensor.is_floating_point() == is_table or tensor.element_size() < 2 - is_table:
            raise TensorMismatchError(
                f"load: {parameter} is {list(tensor.shape)} {tensor.dtype}; the spec needs {kind} {list(shape)}. "
                "Decode a quantised matrix before"
            )
        if parameter in self._dense:
            raise DuplicateTensorError(f"load: {parameter} was loaded before; every tensor may be loaded once")
        if is_table:
            check_hash_entries("load: router.hash_table", tensor.long(), self.spec.num_experts)
        elif not bool(torch.isfinite(tensor).all()):
            raise BadScaleError(f"load: {parameter} holds NaN or infinity; send it again")
        self._dense[parameter] = tensor.reshape(shape).to(self._device, copy=True)

    def _refuse_expert(self, parameter: str, expert: int | None) -> None:
        if expert is not None:
            raise InputError(f"load: expert={expert!r} was passed with {parameter!r}, which has none; leave it out")

    def _refuse_dense(self, parameter: str) -> None:
        """Raise InputError for a name that looks like one outside the experts and is none of this layer."""
        if not isinstance(cast("object", parameter), str) or parameter.startswith(_PREFIXES):
            raise InputError(f"load: parameter {parameter!r} is unknown; allowed: {', '.join(self.names)}")

    def _check_expert(self, parameter: str, expert: object) -> None:
        count = self.spec.num_experts
        if expert is not None and (type(expert) is not int or not 0 <= expert < count):
            raise InputError(
                f"load: expert={expert!r} was passed with {parameter!r}; allowed are global ids 0 to {count - 1}, and "
                f"None for a tensor that stacks all {count} experts"
            )


def _dense_shapes(spec: MoESpec, absent: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the parameters outside the experts' matrices that a layer has, and their shapes.

    absent: see ``LayerParameters``.
    """
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.expert_hidden_size
    rule = spec.routing
    shapes: dict[str, tuple[int, ...]] = {}
    if "router" not in absent:
        shapes |= {"router.weight": (experts, hidden), "router.bias": (experts,), "router.scale": (hidden,)}
        if rule.correction_bias:
            shapes["router.correction_bias"] = (experts,)
        if rule.expert_scale:
            shapes["router.expert_scale"] = (experts,)
        if rule.hash_routing:
            shapes["router.hash_table"] = (1, rule.top_k)
    if spec.shared is not None and spec.shared.gated:
        shapes["shared.gate"] = (1, hidden)
    if spec.latent_size is not None and "latent" not in absent:
        shapes |= {"latent.down": (width, hidden), "latent.up": (hidden, width)}
        if spec.latent_norm_eps is not None:
            shapes["latent.norm"] = (width,)
    return shapes
