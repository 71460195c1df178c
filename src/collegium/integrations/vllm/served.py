"""Recipes that have been served by vLLM, with results in ``benchmarks/results/vllm_*.csv``.

``COLLEGIUM_VLLM=auto`` replaces vLLM's experts only for these recipes; ``on`` and ``require`` for every recipe that has
a kernel. ``scripts/make_engines.py`` writes the table from the files, so that an entry needs a committed run.
"""

from ...planning import Plan
from ...runtime.devices import DeviceFacts

__all__ = ["SERVED", "device_class", "not_served"]

# (weights, activations) by class of device.
# begin of the table written by scripts/make_engines.py
SERVED: dict[str, frozenset[tuple[str, str]]] = {
    "cpu": frozenset(
        {
            ("bf16", "bf16"),
            ("fp32", "fp32"),
            ("fp8_block", "bf16"),
            ("fp8_block", "fp8_group128"),
            ("fp8_channel", "bf16"),
            ("fp8_tensor", "bf16"),
            ("int4_affine", "bf16"),
            ("int4_group", "bf16"),
            ("int8_affine", "bf16"),
            ("mxfp4", "bf16"),
            ("mxfp8", "bf16"),
            ("nvfp4", "bf16"),
        }
    ),
}
# end of the table


def device_class(device: DeviceFacts) -> str:
    """Return ``cpu``, or the compute capability of a GPU as ``sm_90``."""
    if device.capability is None:
        return device.kind
    major, minor = device.capability
    return f"sm_{major}{minor}"


def not_served(plan: Plan) -> str | None:
    """Return why ``auto`` leaves the experts of ``plan`` to vLLM, or None if the recipe has been served."""
    device = device_class(plan.problem.device)
    weights = plan.problem.spec.weight_format
    activations = plan.activation_format
    if not plan.problem.routed.mixed and (weights, activations) in SERVED.get(device, frozenset()):
        return None
    return (
        f"weights {weights} with activations {activations} have no committed run of vLLM on {device}; "
        f"COLLEGIUM_VLLM=on replaces vLLM's experts by kernel {plan.kernel}"
    )
