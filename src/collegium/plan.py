"""plan(): which kernel runs a problem, in which formats, with how many bytes, and why the others do not.

Pure: it looks at no device and allocates nothing, so a laptop can plan for an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import PlanError
from .experts import KERNELS
from .formats import by_name
from .ops.quantize import ACTIVATION_FORMATS, activation_format
from .types import Choice, Refusal

if TYPE_CHECKING:
    from .experts import ExpertKernel
    from .types import MoESpec, Problem

__all__ = ["Plan", "expert_bytes", "plan"]

_ITEM_BYTES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every choice made. What runs is what stands here.

    problem: the question, with the activation format filled in. kernel, strategy: names of what was chosen.
    expert_bytes, weight_bytes, workspace_bytes: one expert, all routed experts of one layer, temporary memory.
    capturable: whether the forward pass may be captured in a CUDA graph. refusals: the other candidates and why.
    """

    problem: Problem
    kernel: str
    strategy: str
    activation_format: str
    expert_bytes: int
    weight_bytes: int
    workspace_bytes: int
    capturable: bool
    refusals: tuple[Refusal, ...]

    def explain(self) -> str:
        """Return the plan as lines a person can read."""
        spec, device = self.problem.spec, self.problem.device
        where = f"{device.kind} {device.name}".strip()
        lines = [
            f"layer      {spec.num_experts} experts, top-{spec.routing.top_k}, hidden {spec.hidden_size}, "
            f"intermediate {spec.intermediate_size}, {spec.activation.kind}"
            + (f" limit {spec.activation.limit:g}" if spec.activation.limit is not None else ""),
            f"machine    {where}, {device.threads} threads" if device.kind == "cpu" else f"machine    {where}",
            f"kernel     {self.kernel} (strategy {self.strategy})",
            f"formats    weights {spec.weight_format}, activations {self.activation_format}",
            f"bytes      {self.expert_bytes:,} an expert, {self.weight_bytes:,} a layer, "
            f"workspace at most {self.workspace_bytes:,} for {self.problem.limits.max_tokens:,} tokens",
            f"graph      {'can' if self.capturable else 'cannot'} be captured in a CUDA graph",
        ]
        lines += [f"refused    {refusal.kernel}: {refusal.reason}" for refusal in self.refusals]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain values for ``--json``."""
        return {
            "kernel": self.kernel,
            "strategy": self.strategy,
            "device": self.problem.device.kind,
            "device_name": self.problem.device.name,
            "weight_format": self.problem.spec.weight_format,
            "activation_format": self.activation_format,
            "expert_bytes": self.expert_bytes,
            "weight_bytes": self.weight_bytes,
            "workspace_bytes": self.workspace_bytes,
            "capturable": self.capturable,
            "refusals": [{"kernel": r.kernel, "reason": r.reason} for r in self.refusals],
        }


def expert_bytes(spec: MoESpec) -> int:
    """Return the bytes one routed expert takes in the spec's weight format, biases included, padding included."""
    hidden, wide, parts = spec.expert_hidden_size, spec.intermediate_size, spec.gate_up_parts
    matrices = parts * _matrix_bytes(spec.weight_format, wide, hidden) + _matrix_bytes(spec.weight_format, hidden, wide)
    biases = 2 * (parts * wide + hidden) if spec.expert_bias else 0
    return matrices + biases


def _matrix_bytes(name: str, rows: int, columns: int) -> int:
    layout = by_name(name)
    if layout.row_block == 1 and layout.group:
        columns = -(-columns // layout.group) * layout.group
    needed = (part for part in layout.storages[0].parts if part.required)
    return sum(math.prod(p.stored_shape(rows, columns)) * _ITEM_BYTES.get(p.dtypes[0], 1) for p in needed)


def plan(problem: Problem, force: Choice | None = None) -> Plan:
    """Choose the first kernel of the table that does not refuse ``problem``.

    force: explicit wishes; they are obeyed or refused, never replaced. Raises PlanError listing every refusal.
    """
    force = force or Choice()
    wanted = force.activation_format or problem.activation_format or problem.dtype
    activation_format(wanted)
    asked = replace(problem, activation_format=wanted)
    if force.kernel is not None and force.kernel not in {kernel.name for kernel in KERNELS}:
        names = ", ".join(kernel.name for kernel in KERNELS)
        raise PlanError(f"kernel {force.kernel!r} was forced; known kernels: {names}")
    refusals: list[Refusal] = []
    chosen: ExpertKernel | None = None
    for kernel in KERNELS:
        reason = _refusal(kernel, asked, force)
        if reason is None and chosen is None:
            chosen = kernel
        else:
            reason = reason or f"it can run this, but {chosen.name if chosen else ''} stands before it in the table"
            refusals.append(Refusal(kernel=kernel.name, reason=reason))
    if chosen is None:
        listed = "\n".join(f"  {r.kernel}: {r.reason}" for r in refusals)
        formats = ", ".join(f.name for f in ACTIVATION_FORMATS)
        raise PlanError(
            f"no kernel runs {asked.spec.weight_format} weights with {wanted} activations on {asked.device.kind}:\n"
            f"{listed}\nAllowed activation formats: {formats}. Drop the forced choice or change the named limit."
        )
    one = expert_bytes(asked.spec)
    return Plan(
        problem=asked,
        kernel=chosen.name,
        strategy="local",
        activation_format=wanted,
        expert_bytes=one,
        weight_bytes=one * asked.spec.num_experts,
        workspace_bytes=chosen.workspace_bytes(asked),
        capturable=chosen.capturable,
        refusals=tuple(refusals),
    )


def _refusal(kernel: ExpertKernel, problem: Problem, force: Choice) -> str | None:
    if force.kernel is not None and kernel.name != force.kernel:
        return f"kernel {force.kernel} was forced"
    return kernel.refuse(problem)
