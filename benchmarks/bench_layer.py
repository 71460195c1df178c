"""Time the routed experts of real layer shapes on one GPU, each time beside its floor.

One row is one layer from bfloat16 hidden states and top-k to bfloat16 output: dispatch, activation quantisation, both
products, combine. Calls are captured in one CUDA graph that walks through several inputs and routings, so weights
come from memory; shapes and formats take turns in a shuffled order; the time is the median replay. No time is printed
before the first and the last token agree with the reference kernel. The floor is max(bytes / 4.60 TB/s, FLOP / rate)
with the weights of the experts each routing really hits, 797 TFLOP/s for 16-bit and 1329 for E4M3 operands (an
H200's measured ceilings).

    python benchmarks/bench_layer.py --shapes dsv3 qwen3_30b --formats bf16 fp8_block:fp8_group128 --tokens 1 32 512
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from collegium.devices import probe
from collegium.experts.reference import Reference
from collegium.experts.triton_bf16 import TritonBf16
from collegium.experts.triton_fp8 import TritonFp8
from collegium.experts.triton_w4a16 import TritonW4A16
from collegium.formats import by_name
from collegium.ops import grouped_gemm as ops
from collegium.ops.quantize import operand
from collegium.ops.tiles import candidates, score
from collegium.parallel.local import Local
from collegium.types import ActivationSpec, ExpertWeights, Limits, MoESpec, Problem, Routing, RoutingSpec

SHAPES = {  # hidden, intermediate, experts, top-k
    "dsv3": (7168, 2048, 256, 8),
    "v4_flash": (4096, 2048, 256, 6),
    "gptoss120b": (2880, 2880, 128, 4),
    "qwen3_30b": (2048, 768, 128, 8),
}
KERNELS = (TritonBf16(), TritonFp8(), TritonW4A16())
BITS = {"bf16": 16, "fp8_block": 8 + 32 / 128**2, "fp8_channel": 8, "fp8_tensor": 8, "mxfp8": 8.25}
BITS |= {"mxfp4": 4.25, "nvfp4": 4.5, "int4_group": 4.5}
BANDWIDTH, RATE_16, RATE_8 = 4.60e6, 7.97e8, 1.329e9  # per microsecond
TOLERANCE = {16: 0.01, 8: 0.06}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One packed layer and the calls that are timed."""

    problem: Problem
    kernel: Any
    packed: Any
    weights: Any
    inputs: list[tuple[torch.Tensor, Routing]]

    @property
    def dispatcher(self) -> Local:
        """The strategy of one rank."""
        return Local(num_experts=self.problem.spec.num_experts)

    def call(self, index: int) -> torch.Tensor:
        """Run the whole layer on the inputs of this index."""
        x, routing = self.inputs[index]
        batch, handle = self.dispatcher.dispatch(x, routing)
        return self.dispatcher.combine(self.kernel.run(batch, self.packed), handle).to(x.dtype)


def random_payload(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Any:
    """Return weights of unit gain, made as codes so that no large float tensor is ever held."""
    device, inner = generator.device, shape[-1]
    gain = inner**-0.5

    def bytes_(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device, generator=generator) + 0.5

    kind = by_name(name)
    lead = shape[:-1]
    if name == "bf16":
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for expert in values:
            expert.normal_(0, gain, generator=generator)
        return kind(shape=shape, values=values)  # type: ignore[call-arg]
    if name in ("fp8_block", "fp8_channel", "mxfp8"):
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        for expert in codes:
            expert.copy_(torch.randn(shape[1:], device=device, generator=generator) * 32)
        if name == "mxfp8":
            made = torch.randint(-2, 3, (*lead, inner // 32), device=device, generator=generator)
            return kind(shape=shape, codes=codes, scales=(made + 122 - 6).to(torch.uint8))  # type: ignore[call-arg]
        size = (*shape[:-2], -(-shape[-2] // 128), -(-inner // 128)) if name == "fp8_block" else lead
        return kind(shape=shape, codes=codes, scales=scales(*size) * gain / 32)  # type: ignore[call-arg]
    codes = bytes_(*lead, inner // 2)
    if name == "mxfp4":
        made = torch.randint(-2, 2, (*lead, inner // 32), device=device, generator=generator)
        return kind(shape=shape, codes=codes, scales=(made + 120).to(torch.uint8))  # type: ignore[call-arg]
    if name == "nvfp4":
        made = scales(*lead, inner // 16).mul_(64).to(torch.float8_e4m3fn)
        spread = torch.full(shape[:-2], gain / 64 / 3, device=device)
        return kind(shape=shape, codes=codes, scales=made, global_scale=spread)  # type: ignore[call-arg]
    made = (scales(*lead, inner // 32) * gain / 5).to(torch.bfloat16)
    return kind(shape=shape, codes=codes, scales=made, group_size=32)  # type: ignore[call-arg]


def route(tokens: int, experts: int, top_k: int, style: str, generator: torch.Generator) -> Routing:
    """Return distinct random experts for each token: uniform, zipf (1.2), one hot expert, or half of them empty."""
    weight = torch.ones(experts, device=generator.device)
    if style == "zipf":
        weight = torch.arange(1, experts + 1, device=generator.device).float() ** -1.2
    if style == "half":
        weight[experts // 2 :] = 0
    weight = weight[torch.randperm(experts, device=generator.device, generator=generator)]
    ids = torch.multinomial(weight.expand(tokens, experts), top_k, generator=generator)
    if style == "hot":
        ids = torch.where(ids == 0, ids[:, :1], ids)
        ids[:, 0] = 0
    weights = torch.rand(tokens, top_k, device=generator.device, generator=generator)
    return Routing(topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


def graph_time(calls: list[Any], replays: int) -> float:
    """Return the median microseconds of one call inside a graph that holds all ``calls``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def gate(case: Case) -> float:
    """Return the relative error of the first and last token of the first call against the reference kernel."""
    x, routing = case.inputs[0]
    found = case.call(0)
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    ends = torch.tensor([0, x.shape[0] - 1], device=x.device)
    reference = Reference()
    few = Routing(topk_ids=routing.topk_ids[ends], topk_weights=routing.topk_weights[ends])
    batch, handle = case.dispatcher.dispatch(x[ends], few)
    # Judged in the activation format of 16 bits: the tolerance holds the rounding of E4M3 activations.
    judge = reference.pack(case.weights, replace(case.problem, activation_format="fp32"))
    truth = case.dispatcher.combine(reference.run(batch, judge), handle)
    return float((found[ends].float() - truth).norm() / truth.norm())


def floor(case: Case, bits: float, eight: bool) -> float:
    spec = case.problem.spec
    matrix = spec.expert_hidden_size * spec.intermediate_size * 3
    hits = [int(torch.unique(r.topk_ids).numel()) for _, r in case.inputs]
    rows = case.inputs[0][1].topk_ids.numel()
    moved = statistics.mean(hits) * matrix * bits / 8 + 4 * case.inputs[0][0].numel()
    return max(moved / BANDWIDTH, 2 * rows * matrix / (RATE_8 if eight else RATE_16))


def build(shape: str, weights: str, act: str, generator: torch.Generator) -> tuple[Problem, Any, Any, Any]:
    hidden, wide, experts, top_k = SHAPES[shape]
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=top_k),
        activation=ActivationSpec(),
        weight_format=weights,
    )
    device = generator.device
    problem = Problem(spec=spec, device=probe(device), limits=Limits(max_tokens=8192), activation_format=act)
    kernel = next(k for k in KERNELS if k.refuse(problem) is None)
    made = ExpertWeights(
        gate_up=random_payload(weights, (experts, 2, wide, hidden), generator),
        down=random_payload(weights, (experts, hidden, wide), generator),
    )
    return problem, kernel, kernel.pack(made, problem), made


def sweep(case: Case, limit: int) -> list[dict[str, Any]]:
    """Time every tile near the best score for both products, alone."""
    packed = case.packed
    batches = [case.dispatcher.dispatch(x, r)[0] for x, r in case.inputs]
    rows = batches[0].source.numel()
    found: list[dict[str, Any]] = []
    eight = packed.activations is not None
    for name, matrix in (("gate_up", packed.gate_up), ("down", packed.down)):
        problem = matrix.problem(rows, 8 if eight else 16, eight)
        ranked = sorted(candidates(problem, packed.machine), key=lambda t: score(problem, t, packed.machine))
        first = name == "gate_up"
        width = matrix.shape[3]
        sources = [b.x if first else torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for b in batches]
        made = [operand(s, packed.activations) for s in sources]
        out = torch.empty(rows, matrix.shape[2], device="cuda", dtype=torch.bfloat16)
        for place, tile in enumerate(ranked[:limit]):
            calls = [
                partial(
                    ops.grouped_gemm,
                    x,
                    matrix,
                    batch.expert_offsets,
                    ops.tile_list(batch.expert_offsets, rows, tile),
                    out,
                    source=batch.source if first else None,
                    x_scale=scale,
                    activation=packed.activation if first else None,
                )
                for batch, (x, scale) in zip(batches, made, strict=True)
            ]
            time = graph_time(calls, 4)
            row = {
                "product": name,
                "place": place,
                "us": round(time, 1),
                "score": round(score(problem, tile, packed.machine), 1),
            }
            row |= {k: getattr(tile, k) for k in ("block_n", "block_t", "warps", "stages", "group_t")}
            found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_block:fp8_group128", "mxfp4", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--routing", default="uniform", choices=["uniform", "zipf", "hot", "half"])
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--sweep", type=int, default=0, help="time this many tiles of each product instead")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    rows: list[dict[str, Any]] = []
    pairs = [(shape, name) for shape in args.shapes for name in args.formats]
    random.Random(0).shuffle(pairs)
    for shape, name in pairs:
        weights, _, act = name.partition(":")
        problem, kernel, packed, made = build(shape, weights, act or "bf16", generator)
        _, _, experts, top_k = SHAPES[shape]
        for tokens in random.Random(1).sample(args.tokens, len(args.tokens)):
            sets = 8 if tokens <= 128 else 4 if tokens <= 512 else 2
            inputs = [
                (
                    torch.randn(tokens, problem.spec.hidden_size, device="cuda", generator=generator).bfloat16(),
                    route(tokens, experts, top_k, args.routing, generator),
                )
                for _ in range(sets)
            ]
            case = Case(problem=problem, kernel=kernel, packed=packed, weights=made, inputs=inputs)
            head = {"shape": shape, "format": name, "tokens": tokens}
            if args.sweep:
                found = sweep(case, args.sweep)
                rows += [head | row for row in found]
                for row in found:
                    print(json.dumps(head | row), flush=True)
                continue
            error = gate(case)
            if not error < TOLERANCE[8 if act.startswith("fp8") else 16]:
                print(f"{shape} {name} T={tokens}: relative error {error:.4f}, not timed", flush=True)
                return 1
            batches = [case.dispatcher.dispatch(x, r)[0] for x, r in inputs]
            layer = graph_time([partial(case.call, i) for i in range(sets)], args.replays)
            alone = graph_time([partial(kernel.run, batch, packed) for batch in batches], args.replays)
            least = floor(case, BITS[weights], act.startswith("fp8"))
            row = head | {
                "layer_us": round(layer, 1),
                "experts_us": round(alone, 1),
                "floor_us": round(least, 1),
            }
            row |= {
                "experts_over_floor": round(alone / least, 2),
                "error": round(error, 5),
                "kernel": kernel.name,
            }
            rows.append(row)
            print(
                f"{shape:11s} {name:24s} T={tokens:<5d} layer {layer:9.1f}  experts {alone:9.1f}  floor {least:8.1f}  "
                f"experts/floor {alone / least:5.2f}  error {error:.4f}",
                flush=True,
            )
        packed = made = case = inputs = batches = None
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
