"""Time the kernels around the grouped products inside a CUDA graph, beside their torch references.

Median microseconds of a launch among many in one graph, and GB/s of the bytes each must move.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch

from collegium.commands.measure import prepare_pass, take_turns
from collegium.ops import permute, quantize, route, weighted_sum
from collegium.runtime import launch
from collegium.types import RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {"dsv3": (7168, 256, 8), "qwen3": (2048, 128, 8)}
MODULES: tuple[Any, ...] = (permute, quantize, route, weighted_sum)


def timed(call: Callable[[], object], *, inner: int, rounds: int) -> float:
    """Return the median microseconds of one ``call``, ``inner`` of them in a graph."""
    return 1e6 * take_turns({"": prepare_pass([call] * inner, PLACE)}, PLACE, rounds=rounds)[""] / inner


def cases(shape: str, tokens: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Return the calls of one shape and the bytes each must move."""
    hidden, experts, top_k = SHAPES[shape]
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts, device=PLACE)
    spec = RoutingSpec(
        top_k=top_k, score="sigmoid", groups=8, topk_groups=4, group_score="top2_sum", correction_bias=True, scale=2.5
    )
    plain = RoutingSpec(top_k=top_k)
    bias = torch.randn(experts, device=PLACE)
    chosen = route.route(logits, plain)
    small = chosen.topk_ids.int()
    order = permute.permute(chosen.topk_ids, experts)
    x = torch.randn(tokens, hidden, device=PLACE).bfloat16()
    rows = torch.randn(tokens * top_k, hidden, device=PLACE).bfloat16()
    assigned = tokens * top_k
    table: dict[str, tuple[Callable[[], object], float]] = {
        "route_softmax": (lambda: route.route(logits, plain), tokens * (4 * experts + 12 * top_k)),
        "route_grouped": (lambda: route.route(logits, spec, bias=bias), tokens * (4 * experts + 12 * top_k)),
        "permute": (lambda: permute.permute(small, experts), assigned * 20),
        "permute_tiles": (lambda: permute.permute(small, experts, block_t=(16, 64)), assigned * 20),
        "combine": (
            lambda: weighted_sum.weighted_sum(rows, order.slots, chosen.topk_weights, torch.bfloat16),
            2.0 * hidden * (assigned + tokens),
        ),
    }
    for name, width in (("fp8_group128", 1.03), ("fp8_token", 1.0), ("mxfp8", 1.03), ("nvfp4", 0.5625)):
        table[name] = (lambda name=name: quantize.quantize_rows(x, name), tokens * hidden * (2 + width))
    table["fp8_group128_gathered"] = (
        lambda: quantize.quantize_rows(x, "fp8_group128", source=order.source),
        hidden * (2 * tokens + 1.03 * assigned),
    )
    return table


def main() -> int:
    """Print one line a case: microseconds, GB/s and the torch reference's microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 32, 128, 512, 8192])
    parser.add_argument("--no-reference", action="store_true")
    asked = parser.parse_args()
    print("shape,tokens,op,us,GB/s,torch us")
    failed = 0
    for shape in asked.shapes:
        for tokens in asked.tokens:
            for name, (call, moved) in cases(shape, tokens).items():
                try:
                    mine = timed(call, inner=20, rounds=7)
                    other = float("nan") if asked.no_reference else reference(call)
                except Exception as fault:  # the other kernels are still measured
                    failed += 1
                    print(f"{shape},{tokens},{name},{type(fault).__name__}: {fault}", flush=True)
                    continue
                print(f"{shape},{tokens},{name},{mine:.2f},{moved / mine / 1000:.0f},{other:.1f}", flush=True)
    return int(failed > 0)


def reference(call: Callable[[], object]) -> float:
    """Return the microseconds of ``call`` in torch."""
    kept = launch.on_device
    for module in MODULES:
        module.on_device = lambda *_: False
    try:
        return timed(call, inner=2, rounds=3)
    finally:
        for module in MODULES:
            module.on_device = kept


if __name__ == "__main__":
    sys.exit(main())
