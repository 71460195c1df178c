"""Which recipes have been served by vLLM, with results in ``benchmarks/results/vllm_*.csv``.

``COLLEGIUM_VLLM=auto`` replaces vLLM's experts for these alone; ``on`` and ``require`` replace them for every recipe
that a kernel runs. A test compares the table with the files, so a row needs a run that is committed.
"""

from ...planning import Plan

__all__ = ["SERVED", "not_served"]

# Kind of device: (weights, activations). No file has rows of a GPU.
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
    """Return why ``auto`` leaves the experts of ``plan`` to vLLM, or None where the recipe has been served."""
    kind, recipe = plan.problem.device.kind, (plan.problem.spec.weight_format, plan.activation_format)
    if not plan.problem.routed.mixed and recipe in SERVED.get(kind, frozenset()):
        return None
    where = "a GPU" if kind == "cuda" else f"a {kind.upper()}"
    return (
        f"weights {recipe[0]} with activations {recipe[1]} have no committed run of vLLM on {where}; "
        f"COLLEGIUM_VLLM=on replaces vLLM's experts by kernel {plan.kernel}"
    )
