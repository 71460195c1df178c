"""One layer from random weights: encode, plan, run, and compare with FP32."""

from __future__ import annotations

from collegium import (
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    RoutingSpec,
    encode_experts,
    plan,
    probe,
)
from collegium.testing.compare import heavy_tailed, random_experts, relative_error


def main() -> None:
    experts, hidden, wide = 16, 512, 384
    weights, router = random_experts(experts, 2, wide, hidden, seed=0), heavy_tailed(experts, hidden, seed=1)
    x = heavy_tailed(64, hidden, seed=2).bfloat16()

    def layer(weight_format: str, dtype: str, activations: str | None = None) -> MoELayer:
        spec = MoESpec(
            hidden_size=hidden,
            intermediate_size=wide,
            num_experts=experts,
            routing=RoutingSpec(top_k=4),
            weight_format=weight_format,
        )
        problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=64), dtype=dtype)
        made = plan(problem, Overrides(activation_format=activations))
        return MoELayer(encode_experts(weights, weight_format), made, router=RouterWeights(weight=router))

    truth = layer("fp32", "fp32")(x.float())
    print(layer("mxfp4", "bf16").plan.explain(), "\n")
    for name, activations in (
        ("bf16", None),
        ("fp8_block", None),
        ("nvfp4", None),
        ("mxfp4", "fp8_group128"),
    ):
        one = layer(name, "bf16", activations)
        error = relative_error(one(x), truth)
        print(f"{name} x {one.plan.activation_format}: {one.plan.expert_bytes:,} bytes, {100 * error:.2f} % from FP32")


if __name__ == "__main__":
    main()
