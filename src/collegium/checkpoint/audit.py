"""The audit: every expert tensor is present, has the right shape and dtype, and has valid scales."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from ..formats.payload import Payload
from ..models import describe, moe_layers
from ..runtime.progress import Progress, counted
from .activation_scales import activation_scales
from .dense_weights import dense_weight_problems, matrices_of, quantised_dense_weights, sentences
from .findings import Findings
from .header import FLOATS, TensorInfo
from .index import index_of, router_names, single_matrices
from .layer_view import CheckpointLayer
from .layout import bias_names, part_name, parts_problems, read_matrix, stack_paths
from .non_expert_weights import check_non_expert_weights
from .problems import raise_if_any
from .reader import Checkpoint
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = [
    "AuditReport",
    "LayerReport",
    "audit",
    "bad_bias",
    "check_dense_layers",
    "check_layer",
    "check_outside_experts",
]

_FACTORS = "input factors (AWQ), which no kernel applies; export it with the factors folded into the weights"
_LOW_RANK = "a low-rank correction (SVDQuant), which no kernel applies; export the checkpoint in another format"
_OFFSET = (
    "an offset of {}, which no kernel adds: the formats here are code * scale, or integers with a zero point; export "
    "symmetrically or with zero points"
)
_REFUSED_SUFFIXES = {
    ".weight_offset": _OFFSET.format("weights"),
    ".input_offset": _OFFSET.format("activations"),
    ".weight_zero_point": "a zero point, where the config declares no asymmetric packed integers",
    ".weight_g_idx": "an activation order of the columns, where the config declares no integer weights",
    ".pre_quant_scale": _FACTORS,
    "_pre_quant_scale": _FACTORS,
    ".svdquant_lora_a": _LOW_RANK,
    ".svdquant_lora_b": _LOW_RANK,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One MoE layer: the stored formats, number and bytes of its experts.

    stored: format of gate and up. down_stored: format of down, which may differ. nbytes: bytes in the files. kinds: the
    GGUF kinds of gate and up, and of down, empty for other files.
    """

    layer: int
    stored: StoredFormat
    down_stored: StoredFormat
    experts: int
    nbytes: int
    kinds: tuple[str, str] = ("", "")

    @property
    def formats(self) -> str:
        """Format and storage of the experts; down is listed separately if it differs."""
        both = zip((self.stored, self.down_stored), self.kinds, strict=True)
        upper, down = (f"{stored.name} ({kinds or stored.storage})" for stored, kinds in both)
        return upper if upper == down else f"gate and up {upper}, down {down}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """The result of an audit without errors.

    roles: role (``experts``, ``router``, ``shared``, ``beyond the last layer``, ``other``) to (tensors, bytes).
    findings: allowed but unusual facts. deep: whether the weights were read as well as the headers.
    """

    path: str
    layers: tuple[LayerReport, ...]
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    deep: bool = True


def check_layer(layer: CheckpointLayer, *, convert: bool = False) -> Iterator[CheckpointError]:
    """Yield the problems of the experts of ``layer`` that the headers show; no tensor data is read.

    convert: the experts will be encoded again, so gate and up may differ in format.
    """
    where = f"layer {layer.number}"
    tensors = layer.expert_tensors
    family = layer.index.family
    for name in tensors.unknown:
        yield UnknownTensorError(f"{where}: {name} is in the MoE block, {family.name} has no such tensor")
    if tensors.single and tensors.stack:
        yield DuplicateTensorError(f"{where}: experts are stored both one by one and stacked; keep one of the two")
    if layer.unequal is not None and not (convert or layer.decodes_gate_up):
        yield _format_mismatch(layer, layer.unequal)
    yield from _check_stack(layer) if layer.stored.stacked else _check_experts(layer)
    yield from _check_biases(layer)
    yield from _check_suffixes(layer)


def _format_mismatch(layer: CheckpointLayer, difference: str) -> ConfigError:
    command = f"collegium quantize {layer.checkpoint.path} --to FORMAT writes them; "
    return ConfigError(
        f"layer {layer.number}: gate and up of one expert differ in format: {difference}; they are one product, and no "
        f"format holds both exactly. Encode the experts into one format ({command}--format FORMAT, or "
        "weight_format=FORMAT in Python, encodes them at load time), or export the checkpoint with gate and up in one "
        "format"
    )


def check_dense_layers(checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Yield a problem for each layer that is dense according to the config but has experts in the files."""
    index = index_of(checkpoint)
    sparse = index.family.moe_layers(checkpoint.config)
    count = index.family.num_layers(checkpoint.config)
    # Later layers do multi-token prediction.
    end = max(sparse, default=0) if count is None else count
    for layer in sorted(set(index.layers()) - set(sparse)):
        infos = list(index.expert_tensors(layer).infos()) if layer < end else []
        if infos:
            tensors = f"{infos[0].name} and {len(infos) - 1} more tensors of experts"
            yield ConfigError(
                f"layer {layer}: has no routed experts by config.json, but the files hold {tensors}; layers with "
                f"experts are {list(sparse)}; correct config.json"
            )


def check_outside_experts(checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Yield the problems of all weights outside the routed experts, for a caller that loads those weights itself.

    Reads headers and the entries of hash tables.
    """
    yield from check_dense_layers(checkpoint)
    for number in moe_layers(checkpoint.config):
        try:
            yield from check_non_expert_weights(CheckpointLayer.open(checkpoint, number), tables=True)
        except CheckpointError as error:
            yield error


def _check_stack(layer: CheckpointLayer) -> Iterator[CheckpointError]:
    checkpoint = layer.checkpoint
    spec = layer.spec
    sources = [layer.source(0, which) for which in stack_paths(layer.names.stacked)]
    stack_sizes: dict[str, int] = {}
    for source in sources:
        for part in layer.stored_as(source).layout.parts:
            name = part_name(source, part)
            shape = checkpoint.tensors[name].shape if name in checkpoint else ()
            if shape and not source.flat and (part.rows_per or part.columns_per):
                stack_sizes[name] = shape[0]
    others = {name: count for name, count in stack_sizes.items() if count != spec.num_experts}
    if others and others == stack_sizes and len(set(stack_sizes.values())) == 1:
        yield _wrong_count(layer, next(iter(stack_sizes.values())))
        return
    matching = f"{len(stack_sizes) - len(others)} of {len(stack_sizes)}"
    for name, count in others.items():
        yield TensorMismatchError(
            f"layer {layer.number}: {name} is {checkpoint.tensors[name].shape}, for {count} experts; config.json has "
            f"num_experts={spec.num_experts}, which {matching} tensors match; download the file or export it again"
        )
    if not others:
        for source in sources:
            yield from parts_problems(checkpoint, source, layer.stored_as(source))


def _wrong_count(layer: CheckpointLayer, stored: int) -> ConfigError:
    return ConfigError(
        f"layer {layer.number}: the tensors hold experts 0 to {stored - 1} ({stored}), config.json has "
        f"num_experts={layer.spec.num_experts}; is the checkpoint pruned or incomplete? correct the one that is wrong"
    )


def _bias_shapes(layer: CheckpointLayer) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return name, shape and experts of every expert bias that the layer needs."""
    spec = layer.spec
    if not spec.expert_bias:
        return []
    *upper, down = bias_names(layer.names, layer.number, stacked=layer.stored.stacked)
    upper_width = spec.gate_up_parts * spec.intermediate_size // len(upper)
    widths = {**dict.fromkeys(upper, upper_width), down: spec.expert_hidden_size}
    every = tuple(range(spec.num_experts))
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for name, width in widths.items():
        if "{expert}" in name:
            shapes += [(name.replace("{expert}", str(expert)), (width,), (expert,)) for expert in every]
        else:
            shapes.append((name, (spec.num_experts, width), every))
    return shapes


def _check_biases(layer: CheckpointLayer) -> Iterator[CheckpointError]:
    where = f"layer {layer.number}"
    for name, shape, _ in _bias_shapes(layer):
        if name not in layer.checkpoint:
            yield MissingTensorError(f"{where}: {name} missing; {layer.index.family.name} experts have biases")
            continue
        info = layer.checkpoint.info(name)
        if info.shape != shape or info.dtype not in FLOATS:
            needed = f"needed is BF16, F16 or F32 {shape}"
            yield TensorMismatchError(f"{where}: {name} is {info.dtype} {info.shape}, {needed}")


def _check_experts(layer: CheckpointLayer) -> Iterator[CheckpointError]:
    checkpoint = layer.checkpoint
    where = f"layer {layer.number}"
    present = {expert for expert, _ in layer.expert_tensors.single}
    num_experts = layer.spec.num_experts
    if len(present) != num_experts and present == set(range(len(present))):
        yield _wrong_count(layer, len(present))
        return
    beyond = sorted(expert for expert in present if expert >= num_experts)
    if beyond:
        config_count = f"config.json has num_experts={num_experts} (0 to {num_experts - 1})"
        yield UnknownTensorError(f"{where}: experts {beyond[:8]} are in the files, {config_count}")
    for expert in sorted(set(range(num_experts)) - present):
        count = f"{len(present)} of {num_experts} experts are in the files"
        yield MissingTensorError(f"{where}, expert {expert}: no tensor at all; {count}")
    dtypes: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for expert, source in layer.sources():
        if expert not in present or (layer.names.fused and source.projection == "up"):  # checked with the gate
            continue
        stored = layer.stored_as(source)
        yield from parts_problems(checkpoint, source, stored)
        for part in stored.layout.parts:
            if part.required and part_name(source, part) in checkpoint:
                kind = (source.projection, part.suffix)
                dtypes[kind][checkpoint.info(part_name(source, part)).dtype] = source.label
    for (_, suffix), labels in dtypes.items():
        if len(labels) > 1:
            listed = ", ".join(f"{dtype} in {label}" for dtype, label in labels.items())
            differs = f"{suffix} differs in dtype: {listed}"
            yield TensorMismatchError(f"{where}: {differs}; all experts of a layer must have the same")


def _check_suffixes(layer: CheckpointLayer) -> Iterator[CheckpointError]:
    tensors = layer.expert_tensors
    where = f"layer {layer.number}"
    biased = layer.spec.expert_bias
    single_bias = {".bias"} if biased and layer.names.biases is None else set[str]()
    stack_bias = {"_bias"} if biased else set[str]()
    groups = [(which, group, single_bias) for (_, which), group in tensors.single.items()]
    groups += [(which, group, stack_bias) for which, group in tensors.stack.items()]
    for which, group, bias in groups:
        stored = {"up": layer.up_stored, "down": layer.down_stored}.get(which, layer.stored)
        allowed = {part.suffix for part in stored.layout.parts} | set(ACTIVATION_SCALES) | bias
        for suffix, info in group.items():
            if suffix in _REFUSED_SUFFIXES and suffix not in allowed:
                yield UnknownTensorError(f"{where}: {info.name}: {_REFUSED_SUFFIXES[suffix]}")
            elif suffix not in allowed:
                yield UnknownTensorError(
                    f"{where}: {info.name} is not known to {layer.index.family.name} in {stored.name} "
                    f"({stored.storage}); known suffixes are {', '.join(sorted(allowed))}"
                )


def _check_values(layer: CheckpointLayer, weight_findings: Findings) -> tuple[list[CheckpointError], list[str]]:
    """Read the experts one matrix at a time; return problems and findings.

    Faults are problems; different global scales of gate and up are a finding. weight_findings: records each matrix.
    """
    unequal = 0
    gate: Payload | None = None
    cache: dict[str, Tensor] = {}
    sources = [source for _, source in layer.sources()]
    scales = activation_scales(layer.checkpoint, sources)
    findings = scales.findings(f"layer {layer.number}", layer.both_stored)
    problems: list[CheckpointError] = []
    for source in sources:
        cache = {} if source.projection == "gate" else cache
        payload, matrix_problems = read_matrix(layer.checkpoint, source, layer.stored_as(source), cache=cache)
        problems += matrix_problems
        if payload is not None and not matrix_problems:
            weight_findings.record(source.label, payload)
        scale: Tensor | None = None if payload is None else payload.tensors().get("global_scale")
        if source.projection == "gate":
            gate = payload
        elif source.projection == "up" and gate is not None and scale is not None:
            gate_scale = gate.tensors().get("global_scale")
            unequal += int(gate_scale is not None and not torch.equal(scale, gate_scale))
    experts = layer.spec.num_experts
    for name, shape, ids in _bias_shapes(layer):
        problems += bad_bias(layer, name, layer.checkpoint.read(name).reshape(len(ids), shape[-1]), ids)
    if unequal:
        findings.append(
            f"layer {layer.number}: gate and up of {unequal} of {experts} experts have different global scales; "
            "both are kept exactly"
        )
    return problems, findings


def bad_bias(layer: CheckpointLayer, name: str, bias: Tensor, experts: Sequence[int]) -> list[CheckpointError]:
    """Return a problem if ``bias [E, N]`` of these experts holds NaN or infinity, else an empty list."""
    finite = torch.isfinite(bias).all(-1).tolist()
    bad = [expert for expert, is_finite in zip(experts, finite, strict=True) if not is_finite]
    return [BadScaleError(f"layer {layer.number}: {name} holds NaN or infinity for experts {bad[:8]}")] if bad else []


def _roles(checkpoint: Checkpoint, layers: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return number and bytes of tensors by role; tensors of no layer have the role ``other``."""
    index = index_of(checkpoint)
    totals = defaultdict[str, list[int]](lambda: [0, 0])

    def add(role: str, infos: Iterable[TensorInfo]) -> None:
        for info in infos:
            totals[role][0] += 1
            totals[role][1] += info.nbytes

    names = index.names
    router = {name.removeprefix(names.layer) for name in router_names(names) if name}
    # parts of a quantised router, and of a quantised gate of the shared expert
    router_prefix, *gate_prefixes = (path.removeprefix(names.layer) + "." for path in single_matrices(names))
    shared = tuple(p.removeprefix(names.layer) + "." for p in names.shared or ()) or ("\0",)
    gate = {names.shared_gate.removeprefix(names.layer)} if names.shared_gate else set[str]()
    for layer in layers:
        tensors = index.tensors(layer)
        add("experts", index.expert_tensors(layer).infos())
        add("router", (i for n, i in tensors if n in router or n.startswith(router_prefix)))
        add("shared", (i for n, i in tensors if n.startswith((*shared, *gate_prefixes)) or n in gate))
    add("beyond the last layer", (i for n in index.layers() if n > max(layers) for _, i in index.tensors(n)))
    count, nbytes = (sum(column) for column in zip(*totals.values(), strict=True))
    everything = sum(info.nbytes for info in checkpoint.tensors.values())
    totals["other"] = [len(checkpoint.tensors) - count, everything - nbytes]
    return {role: (n, size) for role, (n, size) in totals.items() if n}


def _dense_findings(checkpoint: Checkpoint) -> list[str]:
    """Describe the quantised matrices outside the experts, which only loading a whole model has to read."""
    dense_weights = quantised_dense_weights(checkpoint)
    problems = dense_weight_problems(checkpoint, dense_weights)
    texts = sentences(checkpoint, matrices_of(checkpoint, dense_weights))
    if problems:
        texts.append(f"not loaded as a whole model: {problems[0]}")
    return texts


def _layer_report(layer: CheckpointLayer) -> LayerReport:
    return LayerReport(
        layer=layer.number,
        stored=layer.stored,
        down_stored=layer.down_stored,
        experts=layer.spec.num_experts,
        nbytes=sum(info.nbytes for info in layer.expert_tensors.infos()),
        kinds=_kinds(layer)
        if "gguf" in {layer.stored.name, layer.up_stored.name, layer.down_stored.name}
        else ("", ""),
    )


def _kinds(layer: CheckpointLayer) -> tuple[str, str]:
    """Return the types of the weights of gate and up, and of down, as text."""
    tensors = layer.expert_tensors
    upper = tensors.suffixes("gate", "up").get(".weight", set())
    down = tensors.suffixes("down").get(".weight", set())
    return ", ".join(sorted(upper)), ", ".join(sorted(down))


def audit(
    checkpoint: Checkpoint, *, deep: bool = True, convert: bool = False, progress: Progress | None = None
) -> AuditReport:
    """Check the experts of every MoE layer and return a report.

    convert: as ``check_layer``. deep: also read every expert, one matrix at a time, and check its scales.
    progress: called before each layer and once at the end with (layers done, layers, text).

    Raises one CheckpointError (of the class of the first problem) that lists up to 20 problems, each with layer, expert
    and tensor.
    """
    describe(checkpoint.config)  # raises for a model without routed experts
    problems = [*check_dense_layers(checkpoint)]
    findings: list[str] = []
    reports: list[LayerReport] = []
    weight_findings = Findings()
    layers = moe_layers(checkpoint.config)
    for number in counted(layers, progress, "layer {}".format, end=f"{len(layers)} layers"):
        try:
            layer = CheckpointLayer.open(checkpoint, number)
        except CheckpointError as error:
            problems.append(error)
            continue
        expert_problems = [*check_layer(layer, convert=convert)]
        non_expert_problems = [*check_non_expert_weights(layer, deep=deep, findings=weight_findings)]
        if deep and not expert_problems:
            expert_problems, unequal = _check_values(layer, weight_findings)
            findings += unequal
        if layer.decodes_gate_up and not convert:
            findings.append(f"layer {number}: {layer.unequal}; both are decoded to bf16")
        problems += expert_problems + non_expert_problems
        reports.append(_layer_report(layer))
    raise_if_any(checkpoint, problems)
    return AuditReport(
        path=str(checkpoint.path),
        layers=tuple(reports),
        roles=_roles(checkpoint, layers),
        findings=(*dict.fromkeys(findings), *weight_findings.findings(), *_dense_findings(checkpoint)),
        deep=deep,
    )
