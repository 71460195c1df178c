"""One small batch through every kernel, for compute-sanitizer; wrong numbers and memory errors end with exit code 1.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
compute-sanitizer --tool racecheck python3 tests/gpu/sanitize.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

import torch

from collegium import MoELayer, MoESpec, Overrides, Problem, RouterWeights, Routing, RoutingSpec, plan
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from integers import encoded
from mega_ranks import CASES, Case, Ranks, given
from rough_tokens import same

HIDDEN, WIDE, EXPERTS = 384, 256, 5
RECIPES = [
    ("bf16", None),
    ("fp8_block", "fp8_group128"),
    ("fp8_block", None),
    ("fp8_channel", "fp8_token"),
    ("mxfp8", None),
    ("mxfp4", None),
    ("mxfp4", "fp8_token"),
    ("nvfp4", None),
    ("nvfp4", "fp8_token"),
    ("int4_group", None),
    ("int4_affine", None),
    ("int8_ordered", None),
]


def run(weights: str, activations: str | None, tokens: int, tiles: Any = None) -> float:
    """Return the difference of a layer's output from the reference kernel's. tiles: as in Overrides."""
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=2),
        weight_format=weights,
    )
    coded = encoded(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), weights)
    made = replace(coded, gate_up=coded.gate_up.to("cuda"), down=coded.down.to("cuda"))
    router = RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=2).cuda())
    problem = Problem(spec=spec, device=probe(torch.device("cuda")))
    x = heavy_tailed(tokens, HIDDEN, seed=tokens).cuda().bfloat16()
    # One batch brings a routing of its own, with ids out of range and repeated, and a NaN weight: their rows are NaN.
    given = None
    if tokens == 37:
        weights_given = torch.rand(tokens, 2, device="cuda").index_fill(0, torch.tensor([5], device="cuda"), torch.nan)
        given = Routing(topk_ids=torch.randint(-1, EXPERTS + 1, (tokens, 2)).cuda(), topk_weights=weights_given)
    found = []
    for kernel in (None, "reference"):
        forced = None if kernel else tiles
        chosen = plan(problem, Overrides(kernel=kernel, activation_format=activations, tiles=forced))
        layer = MoELayer(made, chosen, router=router)
        layer.workspaces = None  # separate allocations, so that a read past one is seen
        found.append(layer(x, routing=given))
    lost = found[1].isnan().all(dim=1)
    if not torch.equal(found[0].isnan().all(dim=1), lost) or bool(lost.any()) != (given is not None):
        return float("inf")
    return relative_error(found[0][~lost], found[1][~lost])


def over_ranks(case: Case) -> int:
    """Return how many outputs of ranks that share this GPU, in one kernel a pass, are not those of one rank."""
    ranks, wrong = Ranks(case, 2, "cuda", most=600), 0
    for turn, counts in enumerate(((3, 0), (1, 60), (600, 77))):
        inputs = ranks.each(lambda r, n=counts, t=turn: given(case, 10 * t + r, n[r], hot=t == 1))
        outs = ranks.everybody(inputs, torch.bfloat16)
        wrong += sum(not same(out, ranks.wanted(own, out.dtype)) for out, own in zip(outs, inputs, strict=True))
    return wrong


def main() -> int:
    """Run every recipe on few and on many rows, and passes over ranks in one kernel."""
    wrong = 0
    for weights, activations in RECIPES:
        for tokens in (1, 37, 700):
            error = run(weights, activations, tokens)
            wrong += not error < 0.03
            print(f"{weights} x {activations or 'bf16'} T={tokens}: {error:.4f}")
    # Four-bit weights of large batches: tiles of few tokens, and of an expert's last ones.
    for tokens in (5, 37, 700) if torch.cuda.get_device_capability() == (9, 0) else ():
        error = run("mxfp4", "fp8_token", tokens, tiles="large")
        wrong += not error < 0.03
        print(f"mxfp4 x fp8_token, large tiles, T={tokens}: {error:.4f}")
    for case in CASES if torch.cuda.get_device_capability() == (9, 0) else ():
        other = over_ranks(case)
        wrong += other
        print(f"mega, {case.weights} x {case.tokens}, {case.hidden} columns: {other} outputs of 6 differ")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
