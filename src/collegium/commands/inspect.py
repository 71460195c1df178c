"""``collegium inspect`` and ``collegium plan``: contents of a checkpoint, and the plan for it."""

from dataclasses import dataclass, replace

import torch

from ..balance.load import LoadTrace
from ..balance.residency import expected_misses
from ..checkpoint.audit import AuditReport, audit
from ..checkpoint.loader import describe_checkpoint
from ..checkpoint.reader import Checkpoint, gguf_file, read_config
from ..errors import ConfigError, InputError
from ..formats import by_name
from ..locate import locate
from ..models import DerivedFamily, describe, family_of
from ..planning import Plan, plan
from ..problem import DeviceFacts, Limits, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress
from ..types import MoESpec
from .gpu_memory import layer_gpu_bytes
from .measure import measure_host_bandwidth

__all__ = ["ELSEWHERE", "Inspection", "inspect_model", "plan_model"]


def _gpu(name: str, cc: tuple[int, int], gigabytes: int, sms: int, bandwidth: float) -> DeviceFacts:
    return DeviceFacts(kind="cuda", name=name, capability=cc, memory=gigabytes * 10**9, sms=sms, bandwidth=bandwidth)


# GPUs to plan for without having one, from NVIDIA's data sheets; Hopper's bandwidths follow from the memory clock.
ELSEWHERE = {
    "a100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108, 2.039e12),
    "h100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 132, 3.352e12),
    "h200": _gpu("NVIDIA H200", (9, 0), 141, 132, 4.917e12),
    "b200": _gpu("NVIDIA B200", (10, 0), 180, 148, 8e12),
    "l40s": _gpu("NVIDIA L40S", (8, 9), 48, 142, 8.64e11),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 24, 128, 1.008e12),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """One checkpoint: family, layers, formats, sizes, audit findings, and the plan for this machine.

    origin: where the names and specs of a family without a file come from, and whether they were checked; None for the
    families in files. routed_by_class: its class in transformers chooses the experts, by a rule that ``spec`` lacks.
    """

    path: str
    family: str
    origin: str | None
    routed_by_class: bool
    spec: MoESpec
    report: AuditReport
    plan: Plan

    def lines(self) -> list[tuple[str, str]]:
        """Return (property, value) pairs for a table."""
        spec = self.spec
        routing = spec.routing
        formats = sorted({layer.formats for layer in self.report.layers})
        indices = [layer.layer for layer in self.report.layers]
        routing_terms = [f"top-{routing.top_k} by the router of its class" if self.routed_by_class else routing.score]
        if routing.renormalize and not self.routed_by_class:
            routing_terms.append("renormalised")
        if routing.groups > 1:
            routing_terms.append(f"{routing.topk_groups} of {routing.groups} groups")
        if routing.correction_bias:
            routing_terms.append("correction bias")
        depth = "every scale read" if self.report.deep else "headers only"
        rows = [
            ("family", self.family if self.origin is None else f"{self.family}, {self.origin}"),
            ("MoE layers", f"{len(indices)} ({indices[0]} to {indices[-1]})"),
            ("experts", f"{spec.num_experts} per layer, top-{routing.top_k}"),
            ("sizes", f"hidden {spec.hidden_size}, intermediate {spec.intermediate_size}"),
            ("expert format", ", ".join(formats)),
            ("routing", ", ".join(routing_terms)),
            ("activation", spec.activation.kind),
            ("shared expert", "none" if spec.shared is None else f"intermediate {spec.shared.intermediate_size}"),
        ]
        rows += [(role, f"{count:,} tensors, {nbytes:,} bytes") for role, (count, nbytes) in self.report.roles.items()]
        rows.append(("audit", f"passed, {depth}"))
        rows += [("finding", text) for text in self.report.findings]
        return rows

    def to_json(self) -> dict[str, object]:
        """Return the inspection as plain values for ``--json``."""
        spec = self.spec
        return {
            "path": self.path,
            "family": self.family,
            "origin": self.origin,
            "num_experts": spec.num_experts,
            "top_k": spec.routing.top_k,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "activation": spec.activation.kind,
            "limit": spec.activation.limit,
            "score": None if self.routed_by_class else spec.routing.score,
            "shared_intermediate_size": None if spec.shared is None else spec.shared.intermediate_size,
            "moe_layers": [
                {
                    "layer": layer.layer,
                    "format": layer.stored.name,
                    "storage": layer.stored.storage,
                    "down_format": layer.down_stored.name,
                    "down_storage": layer.down_stored.storage,
                    "experts": layer.experts,
                    "bytes": layer.nbytes,
                }
                for layer in self.report.layers
            ],
            "expert_tensor_bytes": sum(layer.nbytes for layer in self.report.layers),
            "roles": {role: {"tensors": count, "bytes": nbytes} for role, (count, nbytes) in self.report.roles.items()},
            "deep": self.report.deep,
            "findings": list(self.report.findings),
            "plan": self.plan.to_json(),
        }


def inspect_model(
    path: str, *, deep: bool = True, device: str | None = None, progress: Progress | None = None
) -> Inspection:
    """Open, audit and plan the checkpoint at ``path``; raises the errors of the audit.

    deep: read every expert and check its scales; otherwise read only file headers.
    progress: called with (done, total, text).
    """
    checkpoint = Checkpoint.open(path)
    if not checkpoint.config:
        raise ConfigError(f"{path}: config.json is missing or empty; inspect needs it to interpret the tensors")
    spec = describe_checkpoint(checkpoint)
    family = family_of(checkpoint.config)
    return Inspection(
        path=str(path),
        family=family.name,
        origin=family.origin if isinstance(family, DerivedFamily) else None,
        routed_by_class=family.refusal(family.moe_layers(checkpoint.config)[-1]) is not None,
        spec=spec,
        report=audit(checkpoint, deep=deep, progress=progress),
        plan=plan(Problem(spec=spec, device=probe(device))),
    )


def plan_model(
    path: str,
    *,
    device: str | None = None,
    overrides: Overrides | None = None,
    weight_format: str | None = None,
    limits: Limits | None = None,
    gpu_memory: str | None = None,
    trace: str | None = None,
) -> Plan:
    """Plan one MoE layer from ``config.json`` (a folder or the file) or a GGUF header; tensors are not read.

    device: see ``probe``, or a name of ``ELSEWHERE``.
    weight_format: plan for experts that are converted to this format.
    gpu_memory: for the experts of all layers, such as ``24GiB``; the plan is that of one layer with an equal part.
    The bandwidth of host memory is measured if the device is present. trace: a file of ``collegium balance record``,
    from which misses are expected.

    Raises ConfigError, SpecError and PlanError.
    """
    located = locate(path, weights=False)
    folder = located.parent if located.is_file() else located
    if gguf_file(located) is not None:
        checkpoint = Checkpoint.open(located)
        spec, config = describe_checkpoint(checkpoint), checkpoint.config
    elif (folder / "config.json").is_file():
        config = read_config(folder)
        spec = describe(config)
    else:
        raise ConfigError(f"{path}: config.json is missing; give a model's folder or its config.json")
    if weight_format is not None:
        spec = replace(spec, weight_format=by_name(weight_format).name, down_format=None)
    facts = ELSEWHERE.get((device or "").lower()) or probe(device)
    limits = limits or Limits()
    if gpu_memory is not None:
        limits = replace(limits, gpu_bytes=layer_gpu_bytes(gpu_memory, config))
    layer_plan = plan(Problem(spec=spec, device=facts, limits=limits), overrides)
    return _with_misses(layer_plan, trace)


def _with_misses(layer_plan: Plan, trace: str | None) -> Plan:
    """Return the plan of a paged layer with the measured bandwidth of host memory and the misses of ``trace``."""
    problem, policy = layer_plan.problem, layer_plan.paging
    if policy is None:
        if trace is not None:
            raise InputError(
                f"--trace {trace}: all {problem.spec.num_experts} experts of a layer are on the device, so none is "
                "missing; allowed with --gpu-memory below the size of the experts"
            )
        return layer_plan
    if problem.device.index is not None:
        rate = measure_host_bandwidth(torch.device(problem.device.place))
        layer_plan = replace(layer_plan, problem=replace(problem, device=replace(problem.device, host_bandwidth=rate)))
    if trace is None:
        return layer_plan
    recorded = LoadTrace.open(trace)
    if recorded.counts.shape[2] != problem.spec.num_experts:
        raise InputError(
            f"--trace {trace}: it is of {recorded.counts.shape[2]} experts, {recorded.model}; the model has "
            f"{problem.spec.num_experts}. Record one with `collegium balance record`"
        )
    return replace(layer_plan, expected_misses=tuple(expected_misses(recorded, problem.slots, policy)))
