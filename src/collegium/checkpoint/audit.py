"""The audit: every expert tensor accounted for, of the right shape and dtype, with scales that mean something."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from ..errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from ..models import describe, family_of
from .detect import Found, StoredFormat, detect, find_experts
from .layout import PROJECTIONS, Cut, Source, check_part, part_name, read_parts, source_of
from .remarks import Remarks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from ..formats.payload import Payload
    from ..models import Family
    from ..types import MoESpec
    from .reader import Checkpoint

__all__ = [
    "AuditReport",
    "LayerReport",
    "audit",
    "bad_bias",
    "bad_scale",
    "check_declared_shape",
    "check_layer",
    "refuse",
]

_MOST_PROBLEMS = 20
_ACTIVATION_SCALES = (".input_scale", ".input_global_scale")
_REFUSED = {
    ".weight_zero_point": "asymmetric weights have a zero point; only symmetric ones are supported",
    ".weight_g_idx": "activation order permutes the input columns; only weights in column order are supported",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One MoE layer: how its experts are stored, how many there are and their bytes in the files."""

    layer: int
    stored: StoredFormat
    experts: int
    nbytes: int


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


def refuse(checkpoint: Checkpoint, problems: Sequence[CheckpointError]) -> None:
    """Raise one error that lists up to 20 problems, of the class of the first; do nothing when there are none."""
    if problems:
        _refuse(checkpoint, problems)


def _refuse(checkpoint: Checkpoint, problems: Sequence[CheckpointError]) -> NoReturn:
    kind = type(problems[0])
    if len(problems) == 1:
        raise kind(str(problems[0]))
    lines = [f"- {problem}" for problem in problems[:_MOST_PROBLEMS]]
    rest = len(problems) - len(lines)
    if rest > 0:
        lines.append(f"- and {rest} more")
    raise kind(f"{checkpoint.path}: {len(problems)} problems:\n" + "\n".join(lines))


def bad_scale(source: Source, stored: StoredFormat) -> BadScaleError:
    """Return the error for a projection whose payload reports a fault."""
    names = [part_name(source, part) for part in stored.layout.parts if "scale" in part.suffix and part.required]
    if not names:
        return BadScaleError(f"{source.label}: {part_name(source, stored.layout.parts[0])} holds NaN or infinity")
    allowed = "E8M0 bytes 0 to 254" if stored.name in ("mxfp4", "mxfp8") else "finite and positive numbers"
    return BadScaleError(
        f"{source.label}: a scale of {stored.name} is forbidden or a code is NaN, allowed are {allowed}, zero only "
        f"where every code is zero ({', '.join(names)}); download the file again or export it anew"
    )


def check_layer(checkpoint: Checkpoint, spec: MoESpec, layer: int, stored: StoredFormat) -> list[CheckpointError]:
    """Return every problem the headers show in the experts of ``layer``; no tensor data is read."""
    family = family_of(checkpoint.config)
    found = find_experts(checkpoint, family, layer)
    problems: list[CheckpointError] = [
        UnknownTensorError(f"layer {layer}: {name} lies among the experts, {family.name} has no such tensor")
        for name in found.unknown
    ]
    if found.single and found.stack:
        msg = f"layer {layer}: experts are stored one by one and stacked at once; keep one of the two"
        problems.append(DuplicateTensorError(msg))
    if stored.stacked:
        problems += _check_stack(checkpoint, family, spec, layer, stored)
        problems += _check_biases(checkpoint, family, spec, layer)
    else:
        problems += _check_experts(checkpoint, family, spec, layer, stored)
    problems += _check_suffixes(found, family, spec, layer, stored)
    return problems


def _sources(family: Family, spec: MoESpec, layer: int, stacked: bool) -> Iterable[Source]:
    for expert in range(spec.num_experts):
        for which in PROJECTIONS:
            yield source_of(family.names, spec, layer=layer, expert=expert, projection=which, stacked=stacked)


def _parts_problems(checkpoint: Checkpoint, source: Source, stored: StoredFormat) -> list[CheckpointError]:
    problems: list[CheckpointError] = []
    needed = [part for part in stored.layout.parts if part.required]
    missing = [part_name(source, part) for part in needed if part_name(source, part) not in checkpoint]
    if missing:
        msg = f"{source.label}: {' and '.join(missing)} missing; {stored.name} in {stored.storage} storage needs it"
        problems.append(MissingTensorError(msg))
    for part in needed:
        if part_name(source, part) in checkpoint:
            try:
                check_part(source, part, checkpoint, stored.format)
            except TensorMismatchError as error:
                problems.append(error)
    return problems


def _check_stack(
    checkpoint: Checkpoint, family: Family, spec: MoESpec, layer: int, stored: StoredFormat
) -> list[CheckpointError]:
    problems: list[CheckpointError] = []
    for which in ("gate", "down"):
        source = source_of(family.names, spec, layer=layer, expert=0, projection=which, stacked=True)
        name = part_name(source, stored.layout.parts[0])
        held = checkpoint.tensors[name].shape[:1] if name in checkpoint else ()
        if held and held[0] != spec.num_experts:
            problems.append(_wrong_count(layer, held[0], spec))
        else:
            problems += _parts_problems(checkpoint, source, stored)
    return problems


def _wrong_count(layer: int, held: int, spec: MoESpec) -> ConfigError:
    return ConfigError(
        f"layer {layer}: the tensors hold experts 0 to {held - 1} ({held}), config.json says "
        f"num_experts={spec.num_experts}; is the checkpoint pruned or incomplete? correct the one that is wrong"
    )


def _check_biases(checkpoint: Checkpoint, family: Family, spec: MoESpec, layer: int) -> list[CheckpointError]:
    problems: list[CheckpointError] = []
    table, e = family.names.stacked, spec.num_experts
    wanted = ((table.gate_up, 2 * spec.intermediate_size), (table.down, spec.expert_hidden_size))
    for template, width in wanted if spec.expert_bias else ():
        name = template.format(layer=layer) + "_bias"
        if name not in checkpoint:
            problems.append(MissingTensorError(f"layer {layer}: {name} missing; {family.name} experts have biases"))
            continue
        info = checkpoint.info(name)
        if info.shape != (e, width) or info.dtype not in ("BF16", "F16", "F32"):
            msg = f"layer {layer}: {name} is {info.dtype} {info.shape}, needed is BF16, F16 or F32 {(e, width)}"
            problems.append(TensorMismatchError(msg))
    return problems


def _check_experts(
    checkpoint: Checkpoint, family: Family, spec: MoESpec, layer: int, stored: StoredFormat
) -> list[CheckpointError]:
    found = find_experts(checkpoint, family, layer)
    present, e = {expert for expert, _ in found.single}, spec.num_experts
    if len(present) != e and present == set(range(len(present))):
        return [_wrong_count(layer, len(present), spec)]
    problems: list[CheckpointError] = []
    beyond = sorted(expert for expert in present if expert >= e)
    if beyond:
        msg = f"layer {layer}: experts {beyond[:8]} are in the files, config.json says num_experts={e} (0 to {e - 1})"
        problems.append(UnknownTensorError(msg))
    for expert in sorted(set(range(e)) - present):
        msg = f"layer {layer}, expert {expert}: no tensor at all; {len(present)} of {e} experts are in the files"
        problems.append(MissingTensorError(msg))
    dtypes: dict[tuple[bool, str], dict[str, str]] = defaultdict(dict)
    for source in _sources(family, spec, layer, stacked=False):
        if int(source.label.split(",")[1].rsplit(" ", 1)[1]) not in present:
            continue
        problems += _parts_problems(checkpoint, source, stored)
        for part in stored.layout.parts:
            if part.required and part_name(source, part) in checkpoint:
                kind = (source.label.endswith("down"), part.suffix)
                dtypes[kind][checkpoint.info(part_name(source, part)).dtype] = source.label
    for (_, suffix), seen in dtypes.items():
        if len(seen) > 1:
            listed = ", ".join(f"{dtype} in {label}" for dtype, label in seen.items())
            msg = f"layer {layer}: {suffix} differs in dtype: {listed}; all experts of a layer must share one"
            problems.append(TensorMismatchError(msg))
    return problems


def _check_suffixes(
    found: Found, family: Family, spec: MoESpec, layer: int, stored: StoredFormat
) -> list[CheckpointError]:
    known = {part.suffix for part in stored.layout.parts} | set(_ACTIVATION_SCALES)
    stack_known = known | ({"_bias"} if spec.expert_bias else set())
    problems: list[CheckpointError] = []
    groups = [(group, known) for group in found.single.values()]
    groups += [(group, stack_known) for group in found.stack.values()]
    for group, allowed in groups:
        for suffix, info in group.items():
            if suffix in _REFUSED:
                problems.append(UnknownTensorError(f"layer {layer}: {info.name}: {_REFUSED[suffix]}"))
            elif suffix not in allowed:
                msg = (
                    f"layer {layer}: {info.name} is not known to {family.name} in {stored.name} ({stored.storage}); "
                    f"known suffixes are {', '.join(sorted(allowed))}"
                )
                problems.append(UnknownTensorError(msg))
    return problems


def _whole(source: Source) -> Cut:
    return Cut(rows=(0, source.rows), columns=(0, source.columns))


def check_declared_shape(checkpoint: Checkpoint, source: Source) -> TensorMismatchError | None:
    """Compare the ``.weight_shape`` of packed integers, where there is one, with what the config implies."""
    name = f"{source.path}.weight_shape"
    if name not in checkpoint:
        return None
    claimed = checkpoint.read(name).tolist()
    if claimed == [source.rows, source.columns]:
        return None
    return TensorMismatchError(
        f"{source.label}: {name} says {claimed}, the config implies {[source.rows, source.columns]}"
    )


def _check_values(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, stored: StoredFormat, remarks: Remarks
) -> tuple[list[CheckpointError], list[str]]:
    """Read the experts one matrix at a time: faults are problems, unequal global scales of gate and up a finding."""
    family = family_of(checkpoint.config)
    problems: list[CheckpointError] = []
    unequal = 0
    first: Payload | None = None
    seen: dict[str, Tensor] = {}
    for source in _sources(family, spec, layer, stored.stacked):
        if source.label.endswith("gate"):
            seen = {}
        shape_problem = check_declared_shape(checkpoint, source)
        if shape_problem is not None:
            problems.append(shape_problem)
            continue
        parts = read_parts(checkpoint, source, stored.layout, _whole(source), seen)
        payload = stored.build(parts, (source.rows, source.columns))
        if bool(payload.faults()):
            problems.append(bad_scale(source, stored))
        else:
            remarks.see(source.label, payload)
        scale: Tensor | None = payload.tensors().get("global_scale")
        if source.label.endswith("gate"):
            first = payload
        elif source.label.endswith("up") and first is not None and scale is not None:
            unequal += int(not torch.equal(scale, first.tensors()["global_scale"]))
    for template in (family.names.stacked.gate_up, family.names.stacked.down) if spec.expert_bias else ():
        name = template.format(layer=layer) + "_bias"
        problems += bad_bias(layer, name, checkpoint.read(name), range(spec.num_experts))
    findings = []
    if unequal:
        findings.append(
            f"layer {layer}: gate and up of {unequal} of {spec.num_experts} experts have different global scales; "
            "each keeps its own, exactly"
        )
    return problems, findings


def bad_bias(layer: int, name: str, bias: Tensor, experts: Sequence[int]) -> list[CheckpointError]:
    """Return a problem when ``bias [E, N]`` of these experts holds NaN or infinity, else nothing."""
    bad = [expert for expert, fine in zip(experts, torch.isfinite(bias).all(-1).tolist(), strict=True) if not fine]
    return [BadScaleError(f"layer {layer}: {name} holds NaN or infinity for experts {bad[:8]}")] if bad else []


def _roles(checkpoint: Checkpoint, family: Family, layers: Sequence[int]) -> dict[str, tuple[int, int]]:
    names = family.names
    routers = {
        template.format(layer=layer)
        for template in (names.router_weight, names.router_bias, names.correction_bias)
        if template is not None
        for layer in layers
    }
    shared = tuple(template.format(layer=layer) + "." for template in names.shared or () for layer in layers)
    experts = tuple(names.experts.format(layer=layer) for layer in layers)
    beyond = names.experts.partition("{layer}")[0] + f"{max(layers) + 1}."
    totals: dict[str, tuple[int, int]] = {}
    for name, info in checkpoint.tensors.items():
        if name.startswith(experts):
            role = "experts"
        elif name in routers:
            role = "router"
        elif name.startswith(shared):
            role = "shared"
        else:
            role = "beyond the last layer" if name.startswith(beyond) else "other"
        count, nbytes = totals.get(role, (0, 0))
        totals[role] = (count + 1, nbytes + info.nbytes)
    return totals


def audit(
    checkpoint: Checkpoint, *, deep: bool = True, progress: Callable[[int, int, str], None] | None = None
) -> AuditReport:
    """Check the experts of every MoE layer and return what was found.

    deep: also read every expert, one matrix at a time, check its scales and look for copies. progress: called before
    each layer and once at the end with (layers done, layers, text). Raises one CheckpointError (of the class of the
    first problem) that lists up to 20 problems, each with layer, expert and tensor.
    """
    family = family_of(checkpoint.config)
    spec = describe(checkpoint.config)
    problems: list[CheckpointError] = []
    findings: list[str] = []
    reports: list[LayerReport] = []
    remarks = Remarks()
    layers = family.moe_layers(checkpoint.config)
    for done, layer in enumerate(layers):
        if progress is not None:
            progress(done, len(layers), f"layer {layer}")
        try:
            stored = detect(checkpoint.config, checkpoint, layer)
        except CheckpointError as error:
            problems.append(error)
            continue
        wrong = check_layer(checkpoint, spec, layer, stored)
        if deep and not wrong:
            wrong, unequal = _check_values(checkpoint, spec, layer, stored, remarks)
            findings += unequal
        problems += wrong
        prefix = family.names.experts.format(layer=layer)
        nbytes = sum(i.nbytes for n, i in checkpoint.tensors.items() if n.startswith(prefix))
        reports.append(LayerReport(layer=layer, stored=stored, experts=spec.num_experts, nbytes=nbytes))
    if progress is not None:
        progress(len(layers), len(layers), f"{len(layers)} layers")
    refuse(checkpoint, problems)
    return AuditReport(
        path=str(checkpoint.path),
        layers=tuple(reports),
        roles=_roles(checkpoint, family, layers),
        findings=(*findings, *remarks.findings()),
        deep=deep,
    )
