"""Is there memory for it: asked before anything is built, because a machine out of memory says nothing useful."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import InputError
from ..planning import Plan, expert_bytes
from ..problem import DeviceFacts
from ..types import MoESpec, RoutingSpec
from .measure import ceiling_bytes, input_sets

__all__ = ["bytes_per_weight", "check_free_memory", "free_bytes", "layer_needs"]

_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def check_free_memory(what: str, needs: Mapping[str, float], facts: DeviceFacts) -> None:
    """Raise InputError when ``needs``, bytes by what takes them, are more than is free on the device."""
    free, total = free_bytes(facts), sum(needs.values())
    if total > free:
        listed = ", ".join(f"{name} {_gigabytes(count)}" for name, count in needs.items())
        raise InputError(
            f"{what}: needs {_gigabytes(total)} ({listed}), and {facts.place} {facts.name} has {_gigabytes(free)} "
            "free; nothing was built. Ask for a smaller shape, fewer or smaller formats or fewer tokens"
        )


def free_bytes(facts: DeviceFacts) -> float:
    """Return the bytes a program can still take on a device of this machine; infinity when it does not say."""
    if facts.kind == "cuda":
        kept = torch.cuda.memory_reserved(facts.place) - torch.cuda.memory_allocated(facts.place)
        return torch.cuda.mem_get_info(facts.place)[0] + kept
    found = [float(facts.memory or "inf")]
    listing = Path("/proc/meminfo")
    if listing.exists():
        lines = (line.split() for line in listing.read_text().splitlines())
        found += [1024.0 * int(words[1]) for words in lines if words[:1] == ["MemAvailable:"]]
    if _LIMIT.exists() and _USED.exists() and (limit := _LIMIT.read_text().strip()).isdigit():
        found.append(float(limit) - float(_USED.read_text()))
    return max(0.0, min(found))


def layer_needs(plans: Sequence[Plan], tokens: Sequence[int], *, ceilings: bool = False) -> dict[str, float]:
    """Return what measuring layers of ``plans`` beside each other takes: weights, what packing adds, and batches."""
    spec, facts = plans[0].problem.spec, plans[0].problem.device
    largest = 4 * spec.gate_up_parts * spec.intermediate_size * spec.expert_hidden_size
    needs = {"weights": float(sum(made.weight_bytes for made in plans))}
    # Random values of one matrix in float32 and what encoding makes of them, beside a few experts that are done.
    needs["encoding"] = 3.0 * largest + max(min(7, spec.num_experts) * made.expert_bytes for made in plans)
    needs["packed copies"] = float(sum(made.weight_bytes for made in plans if _repacks(made)))
    # Input and output of each set; a routing is small beside them.
    needs["batches"] = sum(4.0 * spec.hidden_size * count * input_sets(count) for count in set(tokens))
    needs["workspace"] = float(max(made.workspace_bytes for made in plans))
    if ceilings:
        needs["ceilings"] = float(ceiling_bytes(torch.device(facts.place)))
    return {name: count for name, count in needs.items() if count}


def bytes_per_weight(weight_format: str) -> float:
    """Return the bytes of one weight with its share of the scales; raises SpecError for an unknown format."""
    size = 1024
    spec = MoESpec(hidden_size=size, intermediate_size=size, num_experts=1, routing=RoutingSpec(top_k=1))
    return expert_bytes(replace(spec, weight_format=weight_format, down_format=None)) / (3 * size * size)


def _repacks(made: Plan) -> bool:
    """Whether the plan's kernels lay codes out anew, beside the ones they were given."""
    pairs = zip((made.kernel, made.down_kernel), made.problem.spec.formats, strict=True)
    return any(_product_repacks(kernel, weights, made.activation_format) for kernel, weights in pairs)


def _product_repacks(kernel: str, weights: str, activations: str) -> bool:
    if kernel == "cpu_grouped":
        return weights == "nvfp4"
    if kernel == "triton_fp8":
        return weights == "mxfp8" or not activations.startswith("fp8")
    return kernel in ("cpu_fused", "triton_w4a16", "triton_w4a8", "triton_w8a16")


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
