"""WeightUpdater: new weights for a layer that serves, written into its packed memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from .checkpoint.activation_scales import ScaleRequest
from .checkpoint.layer_parameters import LayerParameters, LoadSummary, Shard, Stored, candidates_of
from .checkpoint.name_mapping import MappedTensor, NameMapping
from .checkpoint.parameters import StoredCopy, check_plain
from .encoding import in_formats
from .errors import InputError, MissingTensorError
from .experts import ExpertKernel, PackedWeights
from .formats import by_name
from .formats.payload import Payload
from .layer import MoELayer
from .layer_builder import declared_layer, load_mapped, named_mapping
from .ops.quantize import activation_format
from .parallel.placement import linear
from .planning import kernel_named
from .problem import ExpertsProblem
from .runtime.checksum import Key, combined_checksum, tensor_checksum, tensor_checksums
from .runtime.devices import plain_torch
from .stages.modules import InputTransform
from .stages.shared import SharedExpert, slice_shared, split_shared
from .types import ExpertWeights, SharedWeights

__all__ = ["UpdateSummary", "WeightUpdater", "experts_between"]

_BATCH_BYTES = 1 << 30  # stored bytes of experts packed at a time
_MAX_LISTED = 20
_REL_TOLERANCE = 1e-6  # of static scales, which files store as float32


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSummary:
    """One finished update.

    experts: number of slots that were written. stored, skipped, ignored: as ``LayerBuilder.summary``. checksums: of
    every loaded tensor, by parameter, shard and expert. checksum: of all of them; a sender computes the same with
    ``collegium.weights_checksum``.
    """

    experts: int
    stored: LoadSummary
    checksums: Mapping[Key, int]

    @property
    def checksum(self) -> int:
        """One number for all loaded tensors, whatever their order."""
        return combined_checksum(self.checksums)

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.experts} experts updated: {self.stored}; checksum {self.checksum:016x}"


class WeightUpdater:
    """Replaces the weights of a layer in place, for reinforcement learning: no new plan, no new memory addresses.

    CUDA graphs, recorded launches and compiled code stay valid. Use it as ``LayerBuilder``: ``load`` or ``load_all``,
    then ``finish``, and so on for the next update.
    """

    def __init__(
        self,
        layer: MoELayer,
        *,
        stored: Stored | None = None,
        shared_stored: Stored | None = None,
        partial: bool = False,
    ) -> None:
        """Prepare for new weights of ``layer``.

        stored, shared_stored: how the tensors are stored, as for ``LayerBuilder``; None: in the layer's formats.
        Another format is encoded into that of the layer, so a trainer may send BF16 to a layer in MXFP4.
        partial: an update may leave out whole experts, the router and the rest; otherwise all must arrive.
        Raises InputError for a kernel that packs experts together.
        """
        self._layer = layer
        self._partial = partial
        layer.experts.slots()  # refuses packings that mix experts
        if activation_format(layer.plan.activation_format).by_expert:
            raise InputError(
                f"WeightUpdater: the layer has activation format {layer.plan.activation_format}, whose scales are "
                "packed with each expert; build a new layer, or use nvfp4_static or nvfp4"
            )
        spec = layer.spec
        self._candidates = candidates_of(stored, spec.formats)
        self._shared_candidates = None
        if spec.shared is not None:
            self._shared_candidates = candidates_of(shared_stored, spec.shared_alone().formats)
        self._mapping: NameMapping | None = None
        self._begin()

    @classmethod
    def from_config(cls, layer: MoELayer, config: Mapping[str, object], number: int, *, partial: bool = False) -> Self:
        """Return an updater of ``layer``, number ``number`` of the model that ``config`` describes.

        Formats and names are those that the config declares, as for ``LayerBuilder.from_config``.
        """
        declared = declared_layer(config, number)
        updater = cls(
            layer, stored=(declared.routed[0][0], declared.routed[1][0]), shared_stored="bf16", partial=partial
        )
        updater._candidates = declared.routed
        updater._shared_candidates = None if layer.spec.shared is None else declared.shared
        updater._mapping = declared.mapping
        updater._begin()
        return updater

    def _begin(self) -> None:
        """Forget what was loaded."""
        layer = self._layer
        self._slots = _experts_by_slot(layer)
        self._device = layer.experts.slots()[0].device
        dense = {"router": layer.router, "latent": layer.latent}
        absent = [name for name, owner in dense.items() if owner is None or isinstance(owner, InputTransform)]
        self._parameters = LayerParameters(
            layer.spec,
            self._candidates,
            self._shared_candidates,
            slots=self._slots,
            placement=layer.plan.problem.placement or linear(layer.spec.num_experts),
            device=str(self._device),
            absent=absent,
        )
        self._sums: dict[Key, Tensor] = {}
        self._copies: dict[Key, StoredCopy] = {}

    @property
    def names(self) -> list[str]:
        """The parameters that ``load`` takes."""
        return self._parameters.names

    @plain_torch()
    def load(self, parameter: str, tensor: Tensor, *, shard: Shard | None = None, expert: int | None = None) -> bool:
        """Take one tensor, as ``LayerBuilder.load`` does; the layer changes only when ``finish`` is called.

        Raises InputError also for a router bias where the layer has none.
        """
        return self._load(MappedTensor(parameter, parameter, expert, shard), tensor, tensor)

    @plain_torch()
    def load_all(
        self, tensors: Iterable[tuple[str, Tensor]], mapping: Iterable[Sequence[Any]] | None = None
    ) -> LoadSummary:
        """Take all ``tensors`` that ``mapping`` has, as ``LayerBuilder.load_all`` does."""
        names = named_mapping(mapping, self._layer.spec, self._mapping)
        summary = self._parameters.summary
        load_mapped(self._load, summary, names, tensors)
        return summary

    @plain_torch()
    def finish(self) -> UpdateSummary:
        """Write what was loaded into the layer's memory, on the current stream, and return what it was.

        Nothing is written before everything was checked. No other thread may be in the layer, and other streams must
        wait for this one. Ranks update independently; call the layer when all of them have finished. Afterwards the
        updater takes the next update, also after an error.

        Raises MissingTensorError, after which more tensors may be loaded; BadScaleError and InputError, after which the
        layer is unchanged, for forbidden numbers, and for static scales beyond those that the layer was built with.
        """
        parameters = self._parameters
        slots = self._complete_slots()
        try:
            experts = self._new_experts(slots) if slots else None
            shared = parameters.shared() if parameters.shared_touched else None
            self._check_reach()
            self._sum_copies()
            if experts is not None:
                self._write_experts(self._packed_batches(slots, experts))
            if shared is not None:
                self._write_shared(in_formats(shared.experts, self._layer.spec.shared_alone().formats))
            self._write_dense()
            values = torch.stack([*self._sums.values()]).tolist() if self._sums else []
            checksums = dict(zip(self._sums, (int(value) % (1 << 64) for value in values), strict=True))
            return UpdateSummary(experts=len(slots), stored=parameters.summary, checksums=checksums)
        finally:
            self._begin()

    def _load(self, row: MappedTensor, tensor: Tensor, original: Tensor) -> bool:
        """Take one tensor, and remember the checksum of ``original``, which may be laid out otherwise."""
        router = self._layer.router
        if row.parameter == "router.bias" and router is not None and router.bias is None:
            raise InputError(
                "WeightUpdater.load: router.bias was passed, and the layer's router has none; leave it out"
            )
        # Move the tensor once, for both the checksum and the copy.
        oriented = check_plain(f"load: {row.parameter!r}", tensor).to(self._device)
        loaded = self._parameters.load(row.parameter, oriented, row.shard, row.expert, interleaved=row.interleaved)
        key = row.parameter, row.shard, row.expert
        if loaded.is_needed and loaded.copy is not None and original is tensor:
            self._copies[key] = loaded.copy
        elif loaded.is_needed:
            moved = oriented if original is tensor else original.detach().to(self._device)
            self._sums[key] = tensor_checksum(moved)
        return loaded.is_needed

    def _sum_copies(self) -> None:
        """Compute the checksums of single matrices from their copies, those of one buffer at once."""
        by_buffer: dict[int, list[tuple[Key, StoredCopy]]] = {}
        for key, copy in self._copies.items():
            by_buffer.setdefault(copy.rows.data_ptr(), []).append((key, copy))
        for entries in by_buffer.values():
            sums = tensor_checksums(entries[0][1].rows, [copy.number for _, copy in entries])
            self._sums |= zip([key for key, _ in entries], sums.unbind(), strict=True)

    def _complete_slots(self) -> list[int]:
        """Return the slots to write; raises MissingTensorError where something is missing."""
        parameters = self._parameters
        if "router.scale" in parameters.dense and "router.weight" not in parameters.dense:
            raise MissingTensorError("WeightUpdater.finish: router.scale was loaded without router.weight; load both")
        if self._partial:
            slots = parameters.touched
            missing = parameters.missing(slots, dense=False) + parameters.missing_shared_parts()
        else:
            slots = [slot for slot, expert in enumerate(self._slots) if expert != -1]
            missing = parameters.missing(dense=True)
        if missing:
            more = f", and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
            hint = "" if self._partial else ", or use WeightUpdater(layer, partial=True) to leave out whole experts"
            raise MissingTensorError(
                f"WeightUpdater.finish: missing: {'; '.join(missing[:_MAX_LISTED])}{more}. Loaded so far: "
                f"{parameters.summary}. Load the rest and call finish() again{hint}"
            )
        return slots

    def _new_experts(self, slots: Sequence[int]) -> ExpertWeights[Payload]:
        """Return the new experts of ``slots`` in the layer's formats."""
        weights = in_formats(self._parameters.experts(slots), self._layer.spec.formats)
        return replace(weights, input_reach=self._layer.experts.input_reach)

    def _check_reach(self) -> None:
        """Raise InputError where new static scales exceed those that the layer's kernels were built with."""
        built = self._layer.experts.input_reach
        if built is None:
            return
        plan = self._layer.plan
        unequal = plan.overrides.unequal_scales or "refuse"
        largest = self._parameters.largest_inputs(ScaleRequest(activations=plan.activation_format, unequal=unequal))
        if largest is not None and any(
            new > old * (1 + _REL_TOLERANCE) for new, old in zip(largest, built, strict=True)
        ):
            raise InputError(
                f"WeightUpdater.finish: the static scales represent inputs up to {largest}, the layer was built for "
                f"{built}; build another layer for a new calibration"
            )

    def _packed_batches(
        self, slots: Sequence[int], weights: ExpertWeights[Payload]
    ) -> Iterable[tuple[Sequence[int], PackedWeights]]:
        """Yield slots and their packed experts, up to 1 GiB at a time."""
        plan = self._layer.plan
        kernel, problem = kernel_named(plan.kernel), plan.routed_problem.routed
        step = len(slots)
        if not any(by_name(form).ordered_columns or by_name(form).read_only for form in problem.formats):
            # Packing of other formats cannot fail for what the weights are, so that no update stops half way.
            step = max(1, step * _BATCH_BYTES // (weights.gate_up.nbytes + weights.down.nbytes))
        for start in range(0, len(slots), step):
            batch = slots[start : start + step]
            yield batch, _pack(kernel, experts_between(weights, start, start + len(batch)), problem)

    def _write_experts(self, batches: Iterable[tuple[Sequence[int], PackedWeights]]) -> None:
        """Copy packed experts into the layer's, and print from now on what packing rounded."""
        experts = self._layer.experts
        reports: list[Any] = []
        for slots, packed in batches:
            experts.put_all(slots, packed)
            reports.append(packed.report)
        if reports and experts.report is not None:
            total = reports[0]
            for report in reports[1:]:
                total = report if isinstance(report, str) else total + report
            experts.note_report(f"{total} (of the last update)")

    def _write_shared(self, weights: ExpertWeights[Payload]) -> None:
        """Write the shared expert, which may be merged with the routed ones."""
        layer, plan = self._layer, self._layer.plan
        count = plan.merged_shared_experts
        if count:
            first = plan.problem.slots
            packed = _pack(kernel_named(plan.kernel), split_shared(weights, count), plan.routed_problem.routed)
            layer.experts.put_all(range(first, first + count), packed)
        elif isinstance(layer.shared, SharedExpert):
            if plan.problem.shared_slices > 1:
                weights = slice_shared(plan, SharedWeights(experts=weights)).experts
            weights = replace(weights, input_reach=layer.shared.experts.input_reach)
            packed = _pack(kernel_named(str(plan.shared_kernel)), weights, plan.problem.shared())
            layer.shared.experts.put_all([0], packed)

    def _write_dense(self) -> None:
        """Write router, latent projections and the shared expert's gate, as far as they arrived."""
        layer, parameters = self._layer, self._parameters
        router = parameters.router()
        for parameter, tensor in parameters.dense.items():
            owner, _, name = parameter.partition(".")
            target = getattr(getattr(layer, owner), name, None)
            if parameter == "router.weight" and router is not None:
                tensor = router.weight  # times the scale of its input
            if target is not None:
                target.copy_(tensor)


def _experts_by_slot(layer: MoELayer) -> tuple[int, ...]:
    """Return the expert in each local slot, -1 for an empty one, as balancing left them."""
    problem = layer.plan.problem
    expert_map = layer.dispatcher.expert_map
    slots = problem.local_experts if expert_map is None else expert_map.slots[expert_map.rank]
    # The map is as wide as the rank with the most slots.
    return tuple(slots[: problem.slots]) + (-1,) * (problem.slots - len(slots))


def _pack(kernel: ExpertKernel, weights: ExpertWeights[Payload], problem: ExpertsProblem) -> PackedWeights:
    return kernel.pack(weights, replace(problem, experts=weights.down.shape[0]))


def experts_between(weights: ExpertWeights[Payload], start: int, stop: int) -> ExpertWeights[Payload]:
    """Return experts ``start`` to ``stop``."""
    biases = (weights.gate_up_bias, weights.down_bias)
    gate_up_bias, down_bias = (None if bias is None else bias[start:stop] for bias in biases)
    return replace(
        weights,
        gate_up=weights.gate_up[start:stop],
        down=weights.down[start:stop],
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
