"""Check the free memory before anything is built: running out of memory later gives no useful message."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import InputError
from ..planning import Plan, expert_bytes, kernel_named
from ..problem import DeviceFacts
from ..types import MoESpec, RoutingSpec
from .measure import ceiling_bytes, input_sets

__all__ = ["bytes_per_weight", "check_free_memory", "free_bytes", "layer_needs"]

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def check_free_memory(what: str, needs: Mapping[str, float], facts: DeviceFacts) -> None:
    """Raise InputError if ``needs`` (bytes by purpose) exceed the free memory of the device."""
    free = free_bytes(facts)
    total = sum(needs.values())
    if total > free:
        items = ", ".join(f"{name} {_gigabytes(nbytes)}" for name, nbytes in needs.items())
        raise InputError(
            f"{what}: needs {_gigabytes(total)} ({items}), and {facts.place} {facts.name} has {_gigabytes(free)} "
            "free; nothing was built. Use a smaller shape, fewer or smaller formats, or fewer tokens"
        )


def free_bytes(facts: DeviceFacts) -> float:
    """Return the bytes that can still be allocated on a device of this machine; infinity if unknown."""
    if facts.kind == "cuda":
        cached_by_torch = torch.cuda.memory_reserved(facts.place) - torch.cuda.memory_allocated(facts.place)
        return torch.cuda.mem_get_info(facts.place)[0] + cached_by_torch
    bounds = [float(facts.memory or "inf")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        bounds += [1024.0 * int(words[1]) for words in lines if words[:1] == ["MemAvailable:"]]
    if _CGROUP_LIMIT.exists() and _CGROUP_USED.exists():
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit.isdigit():  # otherwise "max"
            bounds.append(float(limit) - float(_CGROUP_USED.read_text()))
    return max(0.0, min(bounds))


def layer_needs(plans: Sequence[Plan], tokens: Sequence[int], *, ceilings: bool = False) -> dict[str, float]:
    """Return the bytes, by purpose, of measuring layers of all ``plans`` in turns with batches of ``tokens``."""
    spec = plans[0].problem.spec
    device = torch.device(plans[0].problem.device.place)
    matrix_bytes = 4 * spec.gate_up_parts * spec.intermediate_size * spec.expert_hidden_size  # float32
    # The random values of one matrix and temporaries of encoding it, plus the encoded distinct experts.
    encoding = 3.0 * matrix_bytes + max(min(7, spec.num_experts) * item.expert_bytes for item in plans)
    # Input and output of each set; the routing is small in comparison.
    batches = sum(4.0 * spec.hidden_size * count * input_sets(count) for count in set(tokens))
    needs = {
        "weights": float(sum(item.weight_bytes for item in plans)),
        "encoding": encoding,
        "packed copies": float(sum(item.weight_bytes for item in plans if _repacks(item))),
        "batches": batches,
        "workspace": float(max(item.workspace_bytes for item in plans)),
        "ceilings": float(ceiling_bytes(device)) if ceilings else 0.0,
    }
    return {name: nbytes for name, nbytes in needs.items() if nbytes}


def bytes_per_weight(weight_format: str) -> float:
    """Return the bytes of one weight, including its share of the scales; raises SpecError for an unknown format."""
    size = 1024
    spec = MoESpec(hidden_size=size, intermediate_size=size, num_experts=1, routing=RoutingSpec(top_k=1))
    return expert_bytes(replace(spec, weight_format=weight_format, down_format=None)) / (3 * size * size)


def _repacks(layer_plan: Plan) -> bool:
    """Return whether the plan's kernels pack codes into new tensors, so that both copies exist for a while."""
    pairs = zip((layer_plan.kernel, layer_plan.down_kernel), layer_plan.problem.spec.formats, strict=True)
    return any(kernel_named(name).repacks(weights, layer_plan.activation_format) for name, weights in pairs)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
