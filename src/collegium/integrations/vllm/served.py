"""Recipes that have been served by vLLM, with results in ``benchmarks/results/vllm_*.csv``.

``COLLEGIUM_VLLM=auto`` replaces vLLM's experts only for these recipes; ``on`` and ``require`` for every recipe that has
a kernel. A test compares the table with the files, so that a row needs a committed run.
"""

from ...planning import Plan

__all__ = ["SERVED", "not_served"]

# By device type: (weights, activations). There are no runs on a GPU yet.
SERVED: dict[str, frozenset[tuple[str, str]]] = {
    "cpu": frozenset(
        {
            ("fp32", "fp32"),
            ("bf16", "bf16"),
            ("fp8_block", "bf16"),
            ("fp8_block", "fp8_group128"),
            ("fp8_channel", "bf16"),
            ("fp8_tensor", "bf16"),
            ("mxfp8", "bf16"),
            ("mxfp4", "bf16"),
            ("nvfp4", "bf16"),
            ("int4_group", "bf16"),
            ("int4_affine", "bf16"),
            ("int8_affine", "bf16"),
        }
    ),
}


def not_served(plan: Plan) -> str | None:
    """Return why ``auto`` leaves the experts of ``plan`` to vLLM, or None if the recipe has been served."""
    kind = plan.problem.device.kind
    weights = plan.problem.spec.weight_format
    activations = plan.activation_format
    if not plan.problem.routed.mixed and (weights, activations) in SERVED.get(kind, frozenset()):
        return None
    device = "a GPU" if kind == "cuda" else f"a {kind.upper()}"
    return (
        f"weights {weights} with activations {activations} have no committed run of vLLM on {device}; "
        f"COLLEGIUM_VLLM=on replaces vLLM's experts by kernel {plan.kernel}"
    )
