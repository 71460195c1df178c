"""The audit: every expert tensor accounted for, of the right shape and dtype, with scales that mean something."""

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
from .problems import raise_first
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

_FACTORS = "factors of the inputs (AWQ), which no kernel applies; export it with them folded into the weights"
_LOW_RANK = "a low-rank correction (SVDQuant), which no kernel applies; export the checkpoint in another format"
_REFUSED = {
    ".weight_zero_point": "a zero point, where the config declares no asymmetric packed integers",
    ".weight_g_idx": "an activation order of the columns, where the config declares no integer weights",
    ".pre_quant_scale": _FACTORS,
    "_pre_quant_scale": _FACTORS,
    ".svdquant_lora_a": _LOW_RANK,
    ".svdquant_lora_b": _LOW_RANK,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One MoE layer: how its experts are stored, how many there are and their bytes in the files.

    stored: of gate and up. down_stored: of down, another one perhaps.
    """

    layer: int
    stored: StoredFormat
    down_stored: StoredFormat
    experts: int
    nbytes: int

    @property
    def formats(self) -> str:
        """Format and storage of the experts, those of down as well where they are others."""
        first, second = (f"{stored.name} ({stored.storage})" for stored in (self.stored, self.down_stored))
        return first if first == second else f"gate and up {first}, down {second}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What an audit without refusals found.

    roles: role (``experts``, ``router``, ``shared``, ``beyond the last layer``, ``other``) to (tensors, bytes).
    findings: remarkable but allowed. deep: whether the weights were read as well as the headers.
    """

    path: str
    layers: tuple[LayerReport, ...]
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    deep: bool = True


def check_layer(layer: CheckpointLayer, *, convert: bool = False) -> Iterator[CheckpointError]:
    """Yield every problem the headers show in the experts of ``layer``; no tensor data is read.

    convert: the experts will be encoded anew, so gate and up may differ in format.
    """
    where, found, family = f"layer {layer.number}", layer.found, layer.index.family
    for name in found.unknown:
        yield UnknownTensorError(f"{where}: {name} lies in the MoE block, {family.name} has no such tensor")
    if found.single and found.stack:
        yield DuplicateTensorError(f"{where}: experts are stored one by one and stacked at once; keep one of the two")
    if layer.unequal is not None and not convert:
        yield _unequal(layer, layer.unequal)
    yield from _check_stack(layer) if layer.stored.stacked else _check_experts(layer)
    yield from _check_biases(layer)
    yield from _check_suffixes(layer)


def _unequal(layer: CheckpointLayer, how: str) -> ConfigError:
    path, again = layer.checkpoint.path, "gate and up alike"
    command = f"collegium quantize {path} --to FORMAT writes them; "
    if layer.checkpoint.is_gguf:
        command, again = "", "one --tensor-type for ffn_gate_exps and ffn_up_exps"
    return ConfigError(
        f"layer {layer.number}: gate and up of one expert differ in format: {how}; they are one product, and no format "
        f"holds both exactly. Encode the experts into one format ({command}--format FORMAT, or weight_format=FORMAT in "
        f"Python, loads them so), or export the checkpoint with {again}"
    )


def check_dense_layers(checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Yield a problem for each layer that the config calls dense although the files hold experts for it."""
    index = index_of(checkpoint)
    sparse, count = index.family.moe_layers(checkpoint.config), index.family.num_layers(checkpoint.config)
    # from there on layers predict further tokens
    end = max(sparse, default=0) if count is None else count
    for layer in sorted(set(index.layers()) - set(sparse)):
        infos = list(index.found(layer).infos()) if layer < end else []
        if infos:
            held = f"{infos[0].name} and {len(infos) - 1} more tensors of experts"
            says = f"layer {layer}: config.json says it has no routed experts, the files hold {held}"
            yield ConfigError(f"{says}; layers with experts are {list(sparse)}; correct config.json")


def check_outside_experts(checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Yield every problem of what the layers have beside their routed experts, for a caller that loads it itself.

    Read are headers, and the entries of hash tables.
    """
    yield from check_dense_layers(checkpoint)
    for number in moe_layers(checkpoint.config):
        try:
            yield from check_non_expert_weights(CheckpointLayer.open(checkpoint, number), tables=True)
        except CheckpointError as error:
            yield error


def _check_stack(layer: CheckpointLayer) -> Iterator[CheckpointError]:
    checkpoint, spec = layer.checkpoint, layer.spec
    sources = [layer.source(0, which) for which in stack_paths(layer.names.stacked)]
    held: dict[str, int] = {}
    for source in sources:
        for part in layer.stored_as(source).layout.parts:
            name = part_name(source, part)
            shape = checkpoint.tensors[name].shape if name in checkpoint else ()
            if shape and not source.flat and (part.rows_per or part.columns_per):
                held[name] = shape[0]
    others = {name: count for name, count in held.items() if count != spec.num_experts}
    if others and others == held and len(set(held.values())) == 1:
        yield _wrong_count(layer, next(iter(held.values())))
        return
    for name, count in others.items():
        yield TensorMismatchError(
            f"layer {layer.number}: {name} is {checkpoint.tensors[name].shape}, for {count} experts; config.json "
            f"says num_experts={spec.num_experts}, and {len(held) - len(others)} of {len(held)} tensors hold so "
            "many; download the file again or export it anew"
        )
    for source in () if others else sources:
        yield from parts_problems(checkpoint, source, layer.stored_as(source))


def _wrong_count(layer: CheckpointLayer, held: int) -> ConfigError:
    return ConfigError(
        f"layer {layer.number}: the tensors hold experts 0 to {held - 1} ({held}), config.json says "
        f"num_experts={layer.spec.num_experts}; is the checkpoint pruned or incomplete? correct the one that is wrong"
    )


def _bias_shapes(layer: CheckpointLayer) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return name, shape and experts of every expert bias the layer needs."""
    spec = layer.spec
    if not spec.expert_bias:
        return []
    *upper, down = bias_names(layer.names, layer.number, stacked=layer.stored.stacked)
    wide = spec.gate_up_parts * spec.intermediate_size // len(upper)
    widths = {**dict.fromkeys(upper, wide), down: spec.expert_hidden_size}
    every = tuple(range(spec.num_experts))
    found: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for name, width in widths.items():
        if "{expert}" in name:
            found += [(name.replace("{expert}", str(expert)), (width,), (expert,)) for expert in every]
        else:
            found.append((name, (spec.num_experts, width), every))
    return found


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
    checkpoint, where = layer.checkpoint, f"layer {layer.number}"
    present, e = {expert for expert, _ in layer.found.single}, layer.spec.num_experts
    if len(present) != e and present == set(range(len(present))):
        yield _wrong_count(layer, len(present))
        return
    beyond = sorted(expert for expert in present if expert >= e)
    if beyond:
        says = f"config.json says num_experts={e} (0 to {e - 1})"
        yield UnknownTensorError(f"{where}: experts {beyond[:8]} are in the files, {says}")
    for expert in sorted(set(range(e)) - present):
        held = f"{len(present)} of {e} experts are in the files"
        yield MissingTensorError(f"{where}, expert {expert}: no tensor at all; {held}")
    dtypes: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for expert, source in layer.sources():
        if expert not in present or (layer.names.fused and source.label.endswith("up")):  # asked for with the gate
            continue
        stored = layer.stored_as(source)
        yield from parts_problems(checkpoint, source, stored)
        for part in stored.layout.parts:
            if part.required and part_name(source, part) in checkpoint:
                kind = (source.projection, part.suffix)
                dtypes[kind][checkpoint.info(part_name(source, part)).dtype] = source.label
    for (_, suffix), seen in dtypes.items():
        if len(seen) > 1:
            listed = ", ".join(f"{dtype} in {label}" for dtype, label in seen.items())
            differs = f"{suffix} differs in dtype: {listed}"
            yield TensorMismatchError(f"{where}: {differs}; all experts of a layer must share one")


def _check_suffixes(layer: CheckpointLayer) -> Iterator[CheckpointError]:
    found, where, biased = layer.found, f"layer {layer.number}", layer.spec.expert_bias
    single_bias = {".bias"} if biased and layer.names.biases is None else set[str]()
    groups = [(which, group, single_bias) for (_, which), group in found.single.items()]
    groups += [(which, group, {"_bias"} if biased else set[str]()) for which, group in found.stack.items()]
    for which, group, bias in groups:
        stored = {"up": layer.up_stored, "down": layer.down_stored}.get(which, layer.stored)
        allowed = {part.suffix for part in stored.layout.parts} | set(ACTIVATION_SCALES) | bias
        for suffix, info in group.items():
            if suffix in _REFUSED and suffix not in allowed:
                yield UnknownTensorError(f"{where}: {info.name}: {_REFUSED[suffix]}")
            elif suffix not in allowed:
                yield UnknownTensorError(
                    f"{where}: {info.name} is not known to {layer.index.family.name} in {stored.name} "
                    f"({stored.storage}); known suffixes are {', '.join(sorted(allowed))}"
                )


def _check_values(layer: CheckpointLayer, remarks: Findings) -> tuple[list[CheckpointError], list[str]]:
    """Read the experts one matrix at a time: faults as problems, unequal global scales of gate and up as a finding."""
    unequal = 0
    first: Payload | None = None
    seen: dict[str, Tensor] = {}
    sources = [source for _, source in layer.sources()]
    scales = activation_scales(layer.checkpoint, sources, layer.both_stored)
    problems, findings = list[CheckpointError](), scales.findings(f"layer {layer.number}", layer.both_stored)
    for source in sources:
        seen = {} if source.label.endswith("gate") else seen
        payload, wrong = read_matrix(layer.checkpoint, source, layer.stored_as(source), seen=seen)
        problems += wrong
        if payload is not None and not wrong:
            remarks.record(source.label, payload)
        scale: Tensor | None = None if payload is None else payload.tensors().get("global_scale")
        if source.label.endswith("gate"):
            first = payload
        elif source.label.endswith("up") and first is not None and scale is not None:
            other = first.tensors().get("global_scale")
            unequal += int(other is not None and not torch.equal(scale, other))
    experts = layer.spec.num_experts
    for name, shape, ids in _bias_shapes(layer):
        problems += bad_bias(layer, name, layer.checkpoint.read(name).reshape(len(ids), shape[-1]), ids)
    if unequal:
        findings.append(
            f"layer {layer.number}: gate and up of {unequal} of {experts} experts have different global scales; "
            "each keeps its own, exactly"
        )
    return problems, findings


def bad_bias(layer: CheckpointLayer, name: str, bias: Tensor, experts: Sequence[int]) -> list[CheckpointError]:
    """Return a problem when ``bias [E, N]`` of these experts holds NaN or infinity, else nothing."""
    bad = [expert for expert, fine in zip(experts, torch.isfinite(bias).all(-1).tolist(), strict=True) if not fine]
    return [BadScaleError(f"layer {layer.number}: {name} holds NaN or infinity for experts {bad[:8]}")] if bad else []


def _roles(checkpoint: Checkpoint, layers: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Count tensors and bytes by role, each tensor once; what no layer claims is ``other``."""
    index, totals = index_of(checkpoint), defaultdict[str, list[int]](lambda: [0, 0])

    def add(role: str, infos: Iterable[TensorInfo]) -> None:
        for info in infos:
            totals[role][0] += 1
            totals[role][1] += info.nbytes

    names = index.names
    router = {name.removeprefix(names.layer) for name in router_names(names) if name}
    # parts of a quantised router, and of a quantised gate of the shared expert
    below, *beside = (path.removeprefix(names.layer) + "." for path in single_matrices(names))
    shared = tuple(p.removeprefix(names.layer) + "." for p in names.shared or ()) or ("\0",)
    gate = {names.shared_gate.removeprefix(names.layer)} if names.shared_gate else set[str]()
    for layer in layers:
        rest = index.tensors(layer)
        add("experts", index.found(layer).infos())
        add("router", (i for n, i in rest if n in router or n.startswith(below)))
        add("shared", (i for n, i in rest if n.startswith((*shared, *beside)) or n in gate))
    add("beyond the last layer", (i for n in index.layers() if n > max(layers) for _, i in index.tensors(n)))
    count, nbytes = (sum(column) for column in zip(*totals.values(), strict=True))
    everything = sum(info.nbytes for info in checkpoint.tensors.values())
    totals["other"] = [len(checkpoint.tensors) - count, everything - nbytes]
    return {role: (n, size) for role, (n, size) in totals.items() if n}


def _outside(checkpoint: Checkpoint) -> list[str]:
    """Say what is quantised outside the experts, which only a whole model needs to be readable."""
    found = quantised_dense_weights(checkpoint)
    wrong, said = dense_weight_problems(checkpoint, found), sentences(checkpoint, matrices_of(checkpoint, found))
    return [*said, *([f"not loaded as a whole model: {wrong[0]}"] if wrong else [])]


def _reported(layer: CheckpointLayer) -> LayerReport:
    return LayerReport(
        layer=layer.number,
        stored=layer.stored,
        down_stored=layer.down_stored,
        experts=layer.spec.num_experts,
        nbytes=sum(info.nbytes for info in layer.found.infos()),
    )


def audit(
    checkpoint: Checkpoint, *, deep: bool = True, convert: bool = False, progress: Progress | None = None
) -> AuditReport:
    """Check the experts of every MoE layer and return what was found.

    convert: as ``check_layer``. deep: also read every expert, one matrix at a time, and check its scales.
    progress: called before each layer and once at the end with (layers done, layers, text). Raises one CheckpointError
    (of the class of the first problem) that lists up to 20 problems, each with layer, expert and tensor.
    """
    describe(checkpoint.config)  # refuses a model without routed experts
    problems = [*check_dense_layers(checkpoint)]
    findings: list[str] = []
    reports: list[LayerReport] = []
    remarks = Findings()
    layers = moe_layers(checkpoint.config)
    for number in counted(layers, progress, "layer {}".format, end=f"{len(layers)} layers"):
        try:
            layer = CheckpointLayer.open(checkpoint, number)
        except CheckpointError as error:
            problems.append(error)
            continue
        wrong = [*check_layer(layer, convert=convert)]
        beside = [*check_non_expert_weights(layer, deep=deep, remarks=remarks)]
        if deep and not wrong:
            wrong, unequal = _check_values(layer, remarks)
            findings += unequal
        problems += wrong + beside
        reports.append(_reported(layer))
    raise_first(checkpoint, problems)
    return AuditReport(
        path=str(checkpoint.path),
        layers=tuple(reports),
        roles=_roles(checkpoint, layers),
        findings=(*dict.fromkeys(findings), *remarks.findings(), *_outside(checkpoint)),
        deep=deep,
    )
