"""LayerBuilder: a layer from tensors that a serving engine's weight loader passes one at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack

import torch
from torch import Tensor

from .checkpoint.layer_parameters import Candidates, LayerParameters, LoadSummary, Shard, Stored, candidates_of
from .checkpoint.name_mapping import MappedTensor, NameMapping, expert_mapping
from .checkpoint.stored_format import StoredFormat
from .encoding import encoded
from .errors import InputError, MissingTensorError
from .formats import by_name
from .formats.unquantised import DTYPES
from .layer import MoELayer
from .loading import assemble, dummy_layer, problem_of, scale_request, with_weight_format
from .models import Declared, declared_format, describe, family_of
from .parallel.placement import linear
from .parallel.ranks import Ranks
from .placement import Placement
from .problem import Limits, Overrides
from .runtime.arguments import Dtype, dtype_name
from .runtime.checksum import tensor_checksum
from .runtime.devices import plain_torch, probe
from .stages.modules import RowFunction
from .types import MoESpec, RouterModule

__all__ = [
    "BuilderOptions",
    "DeclaredLayer",
    "LayerBuilder",
    "LayerOptions",
    "declared_layer",
    "load_mapped",
    "named_mapping",
]

_MAX_LISTED = 20


class LayerOptions(TypedDict, total=False):
    """Options of a layer that mean the same as for ``load_layer``."""

    weight_format: str | None
    dtype: Dtype | torch.dtype
    limits: Limits | None
    overrides: Overrides | None
    checked: bool


class BuilderOptions(LayerOptions, total=False):
    """Further options of ``LayerBuilder``: functions or modules of the caller, as ``MoELayer`` takes them."""

    shared: RowFunction | None
    latent: RowFunction | None


class LayerBuilder:
    """Collects the tensors of one MoE layer in any order, checks each when it arrives, and builds the layer once.

    spec: of the layer. names: the parameters that ``load`` takes. summary: what has been loaded and skipped so far.
    """

    @plain_torch()
    def __init__(
        self,
        spec: MoESpec,
        *,
        device: torch.device | str | Ranks | None = None,
        placement: Placement | None = None,
        stored: Stored | None = None,
        shared_stored: Stored | None = None,
        router: bool | RouterModule | RowFunction = True,
        **options: Unpack[BuilderOptions],
    ) -> None:
        """Prepare for the tensors of ``spec``, in its weight format; no model type is needed.

        device: as ``load_layer``. placement: the experts and slice of this rank, instead of those of Ranks as
        ``device``.
        stored: how the experts are stored: the name of a format, whose storages are distinguished by the names of the
        parameters; a ``checkpoint.StoredFormat``, needed for integers, FP8 blocks of other sizes than 128 x 128, and
        where storages share names; or a pair for gate and up, and for down. None: the formats of ``spec``.
        shared_stored: likewise for the shared expert. router: False for a layer whose callers pass logits or a routing,
        or a function or module of the caller, as ``MoELayer`` takes it.
        options: weight_format, dtype, limits, overrides and checked, as ``load_layer``; shared and latent: functions or
        modules of the caller, as ``MoELayer`` takes them. Nothing is loaded for what the caller computes.
        Raises InputError, SpecError and, with Ranks, RankError.
        """
        _check_arguments(spec, device, placement, options)
        self._weight_format = options.get("weight_format")
        if self._weight_format is not None:
            by_name(self._weight_format)
        self._spec = spec
        self._ranks = device if isinstance(device, Ranks) else None
        self._facts = probe(device.device if isinstance(device, Ranks) else device)
        if isinstance(device, Ranks):
            every = device.placement(spec.num_experts)
            self._placement = every if device.groups or device.spare else None
        else:
            self._placement = placement
        self._dtype = dtype_name("LayerBuilder", options.get("dtype", "bf16"))
        self._limits = options.get("limits") or Limits()
        self._overrides = options.get("overrides")
        self._checked = options.get("checked", False)
        self._router, self._shared, self._latent = router, options.get("shared"), options.get("latent")
        self._mapping: NameMapping | None = None
        self._layer_id: int | None = None
        shared = None
        if spec.shared is not None:
            shared = candidates_of(shared_stored, spec.shared_alone().formats)
        self._parameters: LayerParameters | None = self._collect(candidates_of(stored, spec.formats), shared)
        self._summary = self._parameters.summary

    @classmethod
    def from_config(cls, config: Mapping[str, object], layer: int, **options: Any) -> Self:
        """Return a builder for layer ``layer`` of the model that ``config``, a ``config.json``, describes.

        Formats, sizes of groups and the names of ``load_all`` are those that the config declares. options: of the
        constructor, without stored and shared_stored. Raises ConfigError for an unknown model type: pass a spec and a
        mapping then.
        """
        declared = declared_layer(config, layer)
        (upper, *_), (lower, *_) = declared.routed
        exact: dict[str, Any] = {"stored": (upper, lower)}
        if declared.shared is not None:
            exact["shared_stored"] = declared.shared[0][0], declared.shared[1][0]
        builder = cls(declared.spec, **exact, **options)
        builder._parameters = builder._collect(declared.routed, declared.shared)
        builder._summary = builder._parameters.summary
        builder._mapping = declared.mapping
        builder._layer_id = layer
        return builder

    @property
    def names(self) -> list[str]:
        """The parameters that ``load`` takes: those of experts, which need a shard, then all others."""
        return self._open("names").names

    @property
    def summary(self) -> LoadSummary:
        """What has been loaded, and which experts of other ranks were skipped."""
        return self._summary

    @plain_torch()
    def load(self, parameter: str, tensor: Tensor, *, shard: Shard | None = None, expert: int | None = None) -> bool:
        """Take one tensor; return whether this rank needs it, False for an expert of other ranks.

        parameter: the kind of tensor by the name of its format's storage, without dot: ``weight``, ``weight_scale``,
        ``weight_scale_2``, ``blocks``, ``qweight``, ``input_scale``, ``bias`` and so on. Others have a prefix:
        ``router.weight``, ``router.bias``, ``router.correction_bias``, ``router.expert_scale``, ``router.scale``,
        ``router.hash_table``; ``shared.`` with a parameter of the shared expert, and ``shared.gate``; ``latent.down``,
        ``latent.up``, ``latent.norm``. ``names`` lists those of this layer.
        tensor: whole, as stored, on any device; it is copied, so its memory may be reused at once. The rank's slice of
        the experts' width is cut out here.
        shard: ``w1`` (gate; up where there is no gate), ``w3`` (up), ``w2`` (down) or ``w13`` (gate rows, then up
        rows). expert: the global id; None for a tensor ``[E, ...]`` of all experts, and outside the routed experts.

        Raises InputError for an unknown name, shard or expert, TensorMismatchError for another shape or dtype,
        DuplicateTensorError for a tensor that was loaded before, and InputError after ``finish``.
        """
        return self._open("load").load(parameter, tensor, shard, expert).is_needed

    @plain_torch()
    def load_all(
        self, tensors: Iterable[tuple[str, Tensor]], mapping: Iterable[Sequence[Any]] | None = None
    ) -> LoadSummary:
        """Take all ``tensors``, pairs of name and tensor, that a mapping has; return ``summary``.

        mapping: tuples (parameter, source name, expert, shard); ``{expert}`` in a source name stands for a global id,
        so ``("weight", "moe.experts.{expert}.gate_proj.weight", None, "w1")`` is one row for all experts. Further
        fields of ``checkpoint.MappedTensor`` describe other layouts. Other names are listed in ``summary.ignored``.
        None: the names of the model's family, for a builder from ``from_config``; unknown names below the experts are
        an UnknownTensorError. Raises the errors of ``load``.
        """
        parameters = self._open("load_all")
        names = named_mapping(mapping, self._spec, self._mapping)
        load_mapped(
            lambda row, tensor, _: parameters.load(
                row.parameter, tensor, row.shard, row.expert, interleaved=row.interleaved
            ),
            parameters.summary,
            names,
            tensors,
        )
        return self._summary

    @plain_torch()
    def finish(self, weights: Literal["loaded", "dummy"] = "loaded") -> MoELayer:
        """Plan and pack what was loaded, and return the layer; once.

        weights: ``dummy`` fills the layer with random numbers, for start-up and benchmarks; nothing may be loaded then.

        Raises MissingTensorError, which names up to 20 missing tensors, on every rank where one lacks some, and the
        builder then takes more tensors; the CheckpointErrors of bad scales, PlanError, and with Ranks InputError where
        ranks loaded different routers or different weights of an expert that several of them hold.
        """
        parameters = self._open("finish")
        if weights == "dummy":
            layer = self._finish_dummy(parameters)
        elif weights == "loaded":
            layer = self._finish_loaded(parameters)
        else:
            raise InputError(f"LayerBuilder.finish: weights={weights!r} was passed; allowed: 'loaded', 'dummy'")
        layer.layer_id = self._layer_id
        return layer

    def _finish_loaded(self, parameters: LayerParameters) -> MoELayer:
        missing = parameters.missing()
        self._refuse_missing(missing)
        slots = list(range(len(self._slots())))
        scales = scale_request(self._overrides)
        experts = parameters.experts(slots, scales)
        shared, router, latent = parameters.shared(scales), parameters.router(), parameters.latent()
        self._agree(parameters, experts)
        # The tensors are no longer needed once the payloads exist.
        self._parameters = None
        experts = encoded(experts, self._weight_format)
        problem = problem_of(
            self._spec, experts, shared, self._facts, self._placement, limits=self._limits, dtype=self._dtype
        )
        return assemble(
            problem,
            self._overrides,
            experts,
            router=router if isinstance(self._router, bool) else self._router,
            shared=shared if self._shared is None else self._shared,
            latent=latent if self._latent is None else self._latent,
            checked=self._checked,
        )

    def _finish_dummy(self, parameters: LayerParameters) -> MoELayer:
        if parameters.summary.stored:
            raise InputError(
                f"LayerBuilder.finish: weights='dummy' was passed after {parameters.summary}; load nothing for a layer "
                "with random weights"
            )
        layer = dummy_layer(
            with_weight_format(self._spec, self._weight_format),
            self._ranks or self._facts.place,
            None if self._ranks is not None else self._placement,
            router=self._router,
            shared=self._shared,
            latent=self._latent,
            overrides=self._overrides,
            limits=self._limits,
            dtype=self._dtype,
            checked=self._checked,
        )
        self._parameters = None
        return layer

    def _slots(self) -> list[int]:
        """Return the expert of each local slot; spare slots hold a copy of the first expert, as files fill them."""
        if self._placement is None:
            return list(range(self._spec.num_experts))
        ids = self._placement.expert_ids
        return [*ids, *ids[:1] * self._placement.spare]

    def _collect(self, candidates: Candidates, shared: Candidates | None) -> LayerParameters:
        absent = [] if self._router is True else ["router"]
        if self._latent is not None:
            absent.append("latent")
        return LayerParameters(
            self._spec,
            candidates,
            shared,
            slots=self._slots(),
            placement=self._placement or linear(self._spec.num_experts),
            device=self._facts.place,
            absent=absent,
        )

    def _open(self, call: str) -> LayerParameters:
        """Return the parameters; raises InputError once the layer was built."""
        if self._parameters is None:
            raise InputError(
                f"LayerBuilder.{call}: the layer was built by finish(), and a builder builds one. Use another "
                "LayerBuilder for another layer, and WeightUpdater(layer) for new weights of this one"
            )
        return self._parameters

    def _refuse_missing(self, missing: list[str]) -> None:
        """Raise MissingTensorError on all ranks if one of them lacks tensors."""
        by_rank = (
            [missing] if self._ranks is None else self._ranks.exchange(missing[:_MAX_LISTED], "LayerBuilder.finish")
        )
        lacking = {rank: texts for rank, texts in enumerate(by_rank) if texts}
        if not lacking:
            return
        rank, texts = (0, missing) if missing else next(iter(lacking.items()))
        more = f", and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
        where = "" if missing else f" on rank {rank}"
        raise MissingTensorError(
            f"LayerBuilder.finish: missing{where}: {'; '.join(texts[:_MAX_LISTED])}{more}. Loaded so far: "
            f"{self._summary}. Load the rest and call finish() again"
        )

    def _agree(self, parameters: LayerParameters, weights: Any) -> None:
        """Compare specs, options, routers and replicas of all ranks."""
        if self._ranks is None:
            return
        dense = {name: int(tensor_checksum(tensor)) for name, tensor in parameters.dense.items()}
        options = (self._spec, weights.formats, self._weight_format, self._dtype, self._limits, self._overrides)
        self._ranks.agree({"options": str(options), "checksums": dense}, "LayerBuilder.finish")
        local: dict[tuple[int, int], int] = {}
        for slot, expert in enumerate(self._placement.expert_ids if self._placement is not None else ()):
            tensors = [*weights.gate_up[slot].tensors().values(), *weights.down[slot].tensors().values()]
            local[self._ranks.slice_rank, expert] = sum(int(tensor_checksum(t)) for t in tensors)
        everywhere: dict[tuple[int, int], dict[int, int]] = {}
        for rank, table in enumerate(self._ranks.exchange(local, "LayerBuilder.finish: replicas")):
            for key, value in table.items():
                everywhere.setdefault(key, {})[rank] = value
        for (_, expert), by_rank in everywhere.items():
            if len(set(by_rank.values())) > 1:
                raise InputError(
                    f"LayerBuilder.finish: ranks {sorted(by_rank)} hold expert {expert} and loaded different weights "
                    "for it; send the same tensors to all ranks"
                )


def _check_arguments(spec: MoESpec, device: object, placement: Placement | None, options: Mapping[str, object]) -> None:
    """Raise InputError for arguments of ``LayerBuilder`` that contradict each other, and for unknown ones."""
    if placement is not None and isinstance(device, Ranks):
        raise InputError(
            f"LayerBuilder: Ranks and the placement {placement} were given, and each determines the experts of "
            "this rank; give one of them"
        )
    known = [*LayerOptions.__annotations__, "shared", "latent"]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InputError(
            f"LayerBuilder: unknown arguments {unknown}; allowed: spec, device, placement, stored, shared_stored, "
            f"router, {', '.join(known)}"
        )
    if options.get("shared") is not None and spec.shared is not None:
        raise InputError(
            f"LayerBuilder: a function was passed as shared, and the spec has {spec.shared}; allowed: one of them, "
            "so use replace(spec, shared=None)"
        )


def named_mapping(mapping: Iterable[Sequence[Any]] | None, spec: MoESpec, default: NameMapping | None) -> NameMapping:
    """Return the caller's mapping, or the default one; raises InputError without either."""
    if mapping is not None:
        return NameMapping(mapping, spec)
    if default is None:
        raise InputError(
            "load_all: no mapping was passed, and a spec has no names; pass mapping= with tuples (parameter, source "
            "name, expert, shard), or use from_config"
        )
    return default


class DeclaredLayer(NamedTuple):
    """A layer as a config describes it: its spec, the formats of its experts and shared expert, and their names."""

    spec: MoESpec
    routed: Candidates
    shared: Candidates | None
    mapping: NameMapping


def declared_layer(config: Mapping[str, object], layer: int) -> DeclaredLayer:
    """Return what ``config`` declares for layer ``layer``; raises ConfigError and SpecError."""
    spec = describe(config, layer)
    names = family_of(config).names
    paths = names.gate or names.up or names.stacked.gate_up, names.down or names.stacked.down
    upper, lower = (_declared(config, path.format(layer=layer, expert=0)) for path in paths)
    shared: Candidates | None = None
    if spec.shared is not None:
        first, *_, last = (_declared(config, path.format(layer=layer)) for path in names.shared or paths)
        shared = first, last
    mapping = expert_mapping(config, layer, spec, [*upper, *lower], [] if shared is None else [*shared[0], *shared[1]])
    return DeclaredLayer(spec, (upper, lower), shared, mapping)


def load_mapped(
    load: Callable[[MappedTensor, Tensor, Tensor], object],
    summary: LoadSummary,
    names: NameMapping,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Load the tensors that ``names`` has, and list the names of all others as ignored.

    load: called with the row, the tensor as it is loaded, and the tensor as it was passed.
    """

    def load_one(name: str, tensor: Tensor) -> None:
        found = names.find(name, tensor)
        if found is None:
            summary.ignored.append(name)
            return
        row, oriented = found
        load(row, oriented, tensor)

    undecided: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if names.is_undecided(name, tensor):
            undecided.append((name, tensor.detach().clone()))
        else:
            load_one(name, tensor)
    for name, tensor in undecided:
        load_one(name, tensor)


def _declared(config: Mapping[str, object], path: str) -> list[StoredFormat]:
    """Return the stored formats that a config allows for the module at ``path``, the declared one first."""
    declared: Declared = declared_format(config, path)
    if declared.refusal:
        raise InputError(f"LayerBuilder: {path}: {declared.refusal}; convert the checkpoint into a format that is read")
    names = [declared.format or "bf16"]
    if declared.method is None:
        # The dtype in a config is the one of computation; unquantised tensors may have another.
        names = list(dict.fromkeys([*names, *DTYPES]))
    stored = [
        StoredFormat(
            name=name,
            storage=storage.name,
            block=declared.block or (128, 128),
            group=declared.group or 0,
            static_activations=declared.static_activations,
        )
        for name in names
        for storage in by_name(name).storages
        if declared.storage in (None, storage.name)
    ]
    return sorted(stored, key=lambda form: form.storage != declared.method)
