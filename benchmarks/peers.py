"""Our experts layer beside those of other projects, in one run on one GPU.

One row is one layer from bfloat16 hidden states, top-k weights and ids to bfloat16 output: dispatch, activation
quantisation, both products, combine. All contenders read the same encoded weights, the same inputs and the same
routings. None is timed before its first, middle and last token agree with FP32 truth on the decoded weights and its
whole output is finite. Calls are captured in one CUDA graph that walks through several inputs and routings, so that
weights come from memory; contenders take turns in rotated order; a time is the median replay of one call. The floor
comes from the experts each routing really hits and from ceilings measured in the same run. A peer that cannot be
imported, or cannot run a shape, is listed with the reason. On a machine without a GPU the same program runs our layer
and transformers', to try it out.

    python benchmarks/peers.py --shapes qwen3_30b dsv3 --tokens 1 32 512 --routings uniform zipf

Contenders compile at their first call; ``--rounds 0`` only builds, compiles and checks, so processes of one contender
each can fill the compile caches side by side before the run that is timed.

Peers: transformers (``grouped_mm`` experts), vLLM (Triton ``fused_experts``, DeepGEMM, Marlin) and humming-kernels,
each as its own project calls it.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import subprocess
import sys
import time
import types
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

import collegium
from collegium.commands.bench import TOLERANCES, experts_error, named_layer
from collegium.commands.measure import (
    ROUTINGS,
    Ceilings,
    driver_version,
    floor_of,
    graph_pool,
    input_sets,
    measure_ceilings,
    prepare_pass,
    random_routing,
    take_turns,
    version_of,
)
from collegium.dummy.weights import random_weights
from collegium.errors import CollegiumError
from collegium.layer import MoELayer
from collegium.ops.quantize import activation_format
from collegium.planning import plan
from collegium.problem import Limits, Overrides, Problem
from collegium.runtime.devices import probe
from collegium.types import Routing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from collegium.commands.measure import Floor
    from collegium.types import ExpertWeights, MoESpec

    Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [T, H], weights [T, K] float32, ids [T, K] int32 -> [T, H]

RESULTS = Path(__file__).parent / "results" / "peers_{shape}_h200.csv"
PACKAGES = ("torch", "triton", "transformers", "vllm", "humming-kernels")
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST = 8192  # our plans are made for batches of this size, whatever is measured, so that they are always the same
NOTHING_MEASURED = Ceilings(bandwidth=float("inf"), rate_16=float("inf"), rate_8=float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One column: ``build(weights, spec)`` lays out its own copy of our encoded weights and returns its call."""

    name: str
    weights: str
    activations: str
    build: Callable[[ExpertWeights[Any], MoESpec], Run]

    def __str__(self) -> str:
        """Return the name by which ``--skip`` knows it."""
        return f"{self.name}:{self.weights}:{self.activations}".replace(" ", "_")


# ----------------------------------------------------------------------------------------------- ours
def _ours(weights: ExpertWeights[Any], spec: MoESpec, activations: str) -> Run:
    problem = Problem(spec=spec, device=probe(PLACE.type), limits=Limits(max_tokens=MOST))
    made = plan(problem, Overrides(activation_format=activations))
    if PLACE.type == "cuda" and not made.capturable:
        raise CollegiumError(f"the plan is {made.kernel}, which no CUDA graph can hold")
    layer = MoELayer(weights, made)
    print(f"    ours {spec.weight_format} x {activations}: kernel {made.kernel}", flush=True)
    return lambda x, w, ids: layer(x, routing=Routing(topk_ids=ids, topk_weights=w))


# ----------------------------------------------------------------------------------------------- peers
def _transformers(weights: ExpertWeights[Any], spec: MoESpec) -> Run:
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    module = types.SimpleNamespace(
        gate_up_proj=weights.gate_up.values.flatten(1, 2),
        down_proj=weights.down.values,
        num_experts=spec.num_experts,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        _is_expert_parallel=False,
        has_post_expert_norm=False,
        act_fn=functional.silu,
        config=None,
    )
    module._apply_gate = partial(_default_apply_gate, module)
    return lambda x, w, ids: grouped_mm_experts_forward(module, x, ids.long(), w)


def _vllm_triton(weights: ExpertWeights[Any], spec: MoESpec) -> Run:
    import vllm._custom_ops  # noqa: F401
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

    if spec.weight_format == "bf16":
        upper, lower = weights.gate_up.values.flatten(1, 2), weights.down.values
        return lambda x, w, ids: fused_experts_impl(x, upper, lower, w, ids)
    upper, lower = weights.gate_up.codes.flatten(1, 2), weights.down.codes
    scales = {"w1_scale": weights.gate_up.scales.flatten(1, 2), "w2_scale": weights.down.scales}
    _need_blocks(spec)
    return lambda x, w, ids: fused_experts_impl(
        x, upper, lower, w, ids, use_fp8_w8a8=True, block_shape=[128, 128], **scales
    )


def _need_blocks(spec: MoESpec) -> None:
    if spec.hidden_size % 128 or spec.intermediate_size % 128:
        raise ValueError(f"hidden {spec.hidden_size} and intermediate {spec.intermediate_size}: no multiples of 128")


def _deepgemm(weights: ExpertWeights[Any], spec: MoESpec) -> Run:
    import vllm._custom_ops  # noqa: F401
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils as utils
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
    from vllm.model_executor.layers.quantization.utils.fp8_utils import silu_mul_per_token_group_quant_fp8_colmajor
    from vllm.utils import deep_gemm

    _need_blocks(spec)
    upper = (weights.gate_up.codes.flatten(1, 2), weights.gate_up.scales.flatten(1, 2).contiguous())
    lower = (weights.down.codes, weights.down.scales)
    experts, hidden, wide = spec.num_experts, spec.hidden_size, spec.intermediate_size
    code, product = torch.float8_e4m3fn, deep_gemm.m_grouped_fp8_gemm_nt_contiguous

    def run(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        tokens, top_k = ids.shape
        codes, scales = moe_kernel_quantize_input(x, None, code, False, [128, 128])
        least = deep_gemm.get_mk_alignment_for_contiguous_layout()[0]
        rows, _ = utils.compute_aligned_M_and_alignment(tokens, top_k, experts, least, None)
        room = torch.empty(rows, hidden, device=x.device, dtype=code)
        a, a_scale, layout, inverse, align = utils.deepgemm_moe_permute(
            codes, scales, ids, experts, None, None, aq_out=room, use_psum_layout=True
        )
        with deep_gemm.mk_alignment_scope(align):
            middle = torch.empty(rows, 2 * wide, device=x.device, dtype=torch.bfloat16)
            product((a, a_scale), upper, middle, layout, use_psum_layout=True)
            b, b_scale = silu_mul_per_token_group_quant_fp8_colmajor(
                input=middle,
                output=torch.empty(rows, wide, device=x.device, dtype=code),
                use_ue8m0=False,
                clamp_limit=None,
                group_size=128,
                alpha=1.0,
                beta=0.0,
                expert_ends=layout,
                expert_alignment=align,
            )
            result = torch.empty(rows, hidden, device=x.device, dtype=torch.bfloat16)
            product((b, b_scale), lower, result, layout, use_psum_layout=True)
        out = torch.empty_like(x)
        utils.deepgemm_unpermute_and_reduce(
            a=result, topk_ids=ids, topk_weights=w, inv_perm=inverse, expert_map=None, output=out
        )
        return out

    return run


def _marlin(weights: ExpertWeights[Any], spec: MoESpec) -> Run:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as prepare
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    if spec.hidden_size % 256 or spec.intermediate_size % 128:
        raise ValueError(f"hidden {spec.hidden_size} must be a multiple of 256 and intermediate of 128")
    upper, lower = weights.gate_up, weights.down
    pieces = [upper.codes.flatten(1, 2), lower.codes, upper.scales.flatten(1, 2), lower.scales]
    pieces = [piece.clone() for piece in pieces]
    scales: dict[str, Any] = {}
    if spec.weight_format == "mxfp4":
        layer = types.SimpleNamespace(params_dtype=torch.bfloat16)
        w13, w2, s13, s2, _, _ = prepare.prepare_moe_mxfp4_layer_for_marlin(layer, *pieces, None, None)
    else:
        layer = types.SimpleNamespace(
            params_dtype=torch.bfloat16,
            num_experts=spec.num_experts,
            local_num_experts=spec.num_experts,
            hidden_size=spec.hidden_size,
            intermediate_size_per_partition=spec.intermediate_size,
            moe_config=types.SimpleNamespace(is_act_and_mul=True),
        )
        c13, c2, s13, s2 = pieces
        w13, s13, g13, w2, s2, g2 = prepare.prepare_nvfp4_moe_layer_for_marlin(
            layer, c13, s13, _one_global(upper), c2, s2, lower.global_scale.clone(), True
        )
        scales = {"global_scale1": g13, "global_scale2": g2}
    space = marlin_make_workspace_new(w13.device, 4)
    return lambda x, w, ids: fused_marlin_moe(
        x,
        w13,
        w2,
        None,
        None,
        s13,
        s2,
        w,
        ids,
        quant_type_id=scalar_types.float4_e2m1f.id,
        workspace=space,
        moe_sum=lambda a, b, *_: (ops.moe_sum(a, b), b)[1],
        **scales,
    )


def _one_global(upper: Any) -> Tensor:
    gate, up = upper.global_scale.unbind(1)
    if not torch.equal(gate, up):
        raise ValueError("gate and up have different global scales; this peer takes one")
    return gate.clone()


_HUMMING_INPUTS = {
    "bf16": {"quant_method": "humming", "dtype": "bfloat16"},
    "fp8_group128": {
        "quant_method": "humming",
        "dtype": "float8e4m3",
        "group_size": 128,
        "quant_mode": "dynamic_group",
    },
    "fp8_token": {"quant_method": "humming", "dtype": "float8e4m3", "group_size": 0, "quant_mode": "dynamic_token"},
}
_HUMMING_WEIGHTS = {
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
    "fp8_block": {
        "quant_method": "humming",
        "b_dtype": "float8e4m3",
        "weight_scale_group_size": 128,
        "weight_scale_group_size_n": 128,
        "weight_scale_type": "block",
    },
}


def _humming(weights: ExpertWeights[Any], spec: MoESpec, activations: str) -> Run:
    """Wire it as vLLM's experts without expert parallelism do: rows indexed, not gathered."""
    from humming.config import GemmType
    from humming.forward import may_process_input
    from humming.tune import get_heuristics_config
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    if spec.weight_format == "fp8_block":
        _need_blocks(spec)
    hidden, wide, experts = spec.hidden_size, spec.intermediate_size, spec.num_experts
    layers = [
        _humming_layer(weights.gate_up, spec, activations, (2 * wide, hidden)),
        _humming_layer(weights.down, spec, activations, (hidden, wide)),
    ]
    configs = [layer.humming_config for layer in layers]
    tuned = [get_heuristics_config(layer_config=c, gemm_type=GemmType("indexed")) for c in configs]
    texts = [json.dumps(choice) for choice in tuned]
    compute = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})
    silu = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}

    def rows_of_tile(index: int, rows: int) -> int:
        return next((c["block_shape"][0] for low, high, c in tuned[index] if low < rows <= high), 64)

    def product(index: int, rows: Tensor, scale: Tensor | None, places: Any, top_k: int, total: int) -> Tensor:
        width = 2 * wide if index == 0 else hidden
        out = torch.empty(total, width, device=rows.device, dtype=torch.bfloat16)
        layers[index](
            rows,
            outputs=out,
            input_scale=scale,
            sorted_ids=places[0],
            expert_ids=places[1],
            num_tokens_padded=places[2],
            top_k=top_k,
            valid_shape_m=total,
            compute_config=compute,
            tuning_config=texts[index],
        )
        return out

    def run(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        tokens, top_k = ids.shape
        total = tokens * top_k
        sizes = [rows_of_tile(index, total) for index in (0, 1)]
        first = moe_align_block_size(ids, sizes[0], experts, None, ignore_invalid_experts=True)
        second = first
        if sizes[1] != sizes[0]:
            second = moe_align_block_size(ids, sizes[1], experts, None, ignore_invalid_experts=True)
        rows, group, token = may_process_input(configs[0], inputs=x)
        middle = product(0, rows, group if group is not None else token, first, top_k, total)
        rows, group, token = may_process_input(configs[1], inputs=middle, **silu)
        result = product(1, rows, group if group is not None else token, second, 1, total)
        return moe_fused_mul_sum(result.view(tokens, top_k, hidden), w, topk_ids=ids)

    return run


def _humming_layer(payload: Any, spec: MoESpec, activations: str, shape: tuple[int, int]) -> Any:
    from humming.layer import HummingLayer

    with torch.device("cuda"):
        layer = HummingLayer(
            shape_n=shape[0],
            shape_k=shape[1],
            weight_config=dict(_HUMMING_WEIGHTS[spec.weight_format]),
            input_config=dict(_HUMMING_INPUTS[activations]),
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            num_experts=spec.num_experts,
            torch_dtype=torch.bfloat16,
        )
    merge = (lambda t: t.flatten(1, 2)) if len(payload.shape) == 4 else (lambda t: t)
    parts = {"weight": merge(payload.codes), "weight_scale": merge(payload.scales)}
    if spec.weight_format == "fp8_block":
        parts["weight"] = parts["weight"].view(torch.int32)
    if spec.weight_format == "nvfp4":
        parts["weight_scale_2"] = _one_global(payload) if len(payload.shape) == 4 else payload.global_scale.clone()
    for name, have in parts.items():
        want = getattr(layer, name)
        if want.shape != have.shape or want.dtype != have.dtype:
            raise ValueError(
                f"{name}: it wants {tuple(want.shape)} {want.dtype}, we have {tuple(have.shape)} {have.dtype}"
            )
        setattr(layer, name, torch.nn.Parameter(have.clone(), requires_grad=False))
    layer.transform()
    return layer


def _columns() -> tuple[Peer, ...]:
    ours = (
        ("bf16", "bf16"),
        ("fp8_block", "fp8_group128"),
        ("mxfp4", "bf16"),
        ("mxfp4", "fp8_group128"),
        ("mxfp4", "fp8_token"),
        ("nvfp4", "bf16"),
        ("nvfp4", "fp8_token"),
    )
    found = [Peer(name="collegium", weights=w, activations=a, build=partial(_ours, activations=a)) for w, a in ours]
    found += [
        Peer(name="transformers grouped_mm", weights="bf16", activations="bf16", build=_transformers),
        Peer(name="vllm triton", weights="bf16", activations="bf16", build=_vllm_triton),
        Peer(name="vllm triton", weights="fp8_block", activations="fp8_group128", build=_vllm_triton),
        Peer(name="vllm deepgemm", weights="fp8_block", activations="fp8_group128", build=_deepgemm),
        Peer(name="vllm marlin", weights="mxfp4", activations="bf16", build=_marlin),
        Peer(name="vllm marlin", weights="nvfp4", activations="bf16", build=_marlin),
    ]
    for weights, activations in (
        ("fp8_block", "fp8_group128"),
        ("mxfp4", "bf16"),
        ("mxfp4", "fp8_group128"),
        ("mxfp4", "fp8_token"),
        ("nvfp4", "bf16"),
    ):
        build = partial(_humming, activations=activations)
        found.append(Peer(name="humming", weights=weights, activations=activations, build=build))
    return tuple(found)


# ----------------------------------------------------------------------------------------------- the run
class Table:
    """The CSV file, written case by case so that a run that is cut short keeps what it measured."""

    def __init__(self, path: Path, commit: str) -> None:
        self.head = {
            "gpu": torch.cuda.get_device_name() if PLACE.type == "cuda" else PLACE.type,
            "driver": driver_version(PLACE),
            **{name: version_of(name) for name in PACKAGES},
            "collegium": collegium.__version__,
            "commit": commit,
            "command": " ".join(["python", "benchmarks/peers.py", *_said(sys.argv[1:])]),
        }
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer: csv.DictWriter[str] | None = None

    def add(self, **row: object) -> None:
        """Write a row with what is the same for all."""
        full = self.head | row
        if self.writer is None:
            self.writer = csv.DictWriter(self.file, list(full), lineterminator="\n")
            self.writer.writeheader()
        self.writer.writerow(full)
        self.file.flush()


def _said(arguments: list[str]) -> list[str]:
    """Return the arguments that say what was measured: not where to, and not the commit, which has its own column."""
    left_out = {place + step for place, a in enumerate(arguments) if a in ("--out", "--commit") for step in (0, 1)}
    return [argument for place, argument in enumerate(arguments) if place not in left_out]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The inputs of one routing style and token count, the same for all contenders."""

    plain: MoESpec
    tokens: int
    style: str
    inputs: list[tuple[Tensor, Tensor, Tensor]]
    routings: list[Routing]

    @classmethod
    def made(cls, plain: MoESpec, tokens: int, style: str, count: int) -> Case:
        """Return ``count`` random inputs and routings."""
        generator = torch.Generator(PLACE).manual_seed(tokens)
        inputs: list[tuple[Tensor, Tensor, Tensor]] = []
        routings: list[Routing] = []
        for _ in range(count):
            x = torch.randn(tokens, plain.hidden_size, device=PLACE, generator=generator).bfloat16()
            routing = random_routing(tokens, plain, style, generator)
            routings.append(routing)
            inputs.append((x, routing.topk_weights, routing.topk_ids.int()))
        return cls(plain=plain, tokens=tokens, style=style, inputs=inputs, routings=routings)


Runs = dict[Peer, tuple["Run", "ExpertWeights[Any]"]]


def main() -> int:
    args = _options()
    started = time.time()
    ceilings = measure_ceilings(PLACE) if args.rounds else NOTHING_MEASURED
    print("ceilings", ceilings, flush=True)
    table = Table(Path(str(args.out).format(shape="_".join(args.shapes))), args.commit)
    for shape in args.shapes:
        _, plain = named_layer(shape)
        runs, refused = _build([c for c in _columns() if _wanted(c, args)], plain, args.skip)
        head = {"shape": shape}
        for column, reason in refused.items():
            table.add(**head, routing="", tokens="", **_row(column, note=reason))
        print(f"{shape}: built {len(runs)} after {time.time() - started:.0f} s", flush=True)
        for routing in args.routings:
            for tokens in args.tokens:
                if time.time() - started > args.seconds:
                    print(f"{shape} {routing} T={tokens}: no time left", flush=True)
                    continue
                case = Case.made(plain, tokens, routing, input_sets(tokens) if args.rounds else 1)
                rows = {column: _row(column, _floor(column, case, ceilings)) for column in runs}
                try:
                    _measure(case, runs, rows, args.rounds)
                finally:
                    for row in rows.values():
                        table.add(**head, routing=routing, tokens=tokens, **row)
                    _show(rows, tokens, routing)
        runs.clear()
        _tidy()
    print(f"done after {time.time() - started:.0f} s")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3_30b", "dsv3"], help="as collegium bench takes them")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--routings", nargs="+", default=["uniform"], choices=list(ROUTINGS))
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name holds one of these words")
    parser.add_argument("--weights", nargs="+", default=[], help="these weight formats only")
    parser.add_argument("--activations", nargs="+", default=[], help="these activation formats only")
    parser.add_argument("--skip", nargs="*", default=[], help="list name:weights:activations, as broken when alone")
    parser.add_argument("--rounds", type=int, default=9, help="0: compile and check only")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=_commit(), help="of the code that runs, where git cannot say")
    return parser.parse_args()


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _wanted(column: Peer, args: argparse.Namespace) -> bool:
    named = not args.only or any(word in column.name for word in args.only)
    return (
        named
        and (not args.weights or column.weights in args.weights)
        and (not args.activations or column.activations in args.activations)
    )


def _row(column: Peer, floor: Floor | None = None, note: str = "") -> dict[str, object]:
    """Return the row of a contender, with what is not measured empty."""
    return {
        "contender": column.name,
        "weights": column.weights,
        "activations": column.activations,
        "us": "",
        "floor_us": round(1e6 * floor.seconds, 2) if floor else "",
        "of_floor": "",
        "bound": floor.bound if floor else "",
        "experts_hit": round(floor.experts_hit, 1) if floor else "",
        "error": "",
        "note": note,
    }


def _floor(column: Peer, case: Case, ceilings: Ceilings) -> Floor:
    return floor_of(replace(case.plain, weight_format=column.weights), column.activations, case.routings, ceilings)


def _reason(what: str, fault: BaseException) -> str:
    return f"{what}: {type(fault).__name__}: {' '.join(str(fault).split())[:200]}"


def _tidy() -> None:
    gc.collect()
    if PLACE.type == "cuda":
        torch.cuda.synchronize()  # raises after a fault that leaves the device unusable, which ends the run
        torch.cuda.empty_cache()


def _build(columns: list[Peer], plain: MoESpec, skip: list[str]) -> tuple[Runs, dict[Peer, str]]:
    """Build format by format; what cannot be built is returned with its reason."""
    runs: Runs = {}
    refused: dict[Peer, str] = {}
    for name in dict.fromkeys(column.weights for column in columns):
        spec = replace(plain, weight_format=name)
        weights = random_weights(spec, PLACE)
        for column in columns:
            if column.weights != name:
                continue
            if str(column) in skip:
                refused[column] = "absent: it failed in a process of its own"
                continue
            begin = time.time()
            try:
                runs[column] = (column.build(weights, spec), weights)
            except Exception as error:  # a peer fails in its own way; it is listed, and the run goes on
                refused[column] = _reason("absent", error)
                print(f"    {column}: {refused[column]}", flush=True)
            _tidy()
            print(f"    {column}: {time.time() - begin:.1f} s to build", flush=True)
    return runs, refused


def _measure(case: Case, runs: Runs, rows: dict[Peer, dict[str, object]], rounds: int) -> None:
    """Fill ``rows``: the error of each contender, and the time of each that is right."""
    right = [column for column in runs if _gate(case, column, runs[column], rows[column])]
    passes: dict[Any, Callable[[], object]] = {}
    pool = graph_pool(PLACE)
    for column in right if rounds else ():
        calls = [partial(runs[column][0], *one) for one in case.inputs]
        try:
            passes[column] = prepare_pass(calls, PLACE, pool=pool)
        except Exception as fault:
            rows[column]["note"] = _reason("no graph", fault)
            pool = graph_pool(PLACE)  # what the broken capture began to take is in the old one
            _tidy()
    for column, taken in take_turns(passes, PLACE, rounds=rounds).items():
        seconds, row = taken / len(case.inputs), rows[column]
        row["us"], row["of_floor"] = round(1e6 * seconds, 2), round(1e-6 * float(str(row["floor_us"])) / seconds, 3)
    passes.clear()
    _tidy()


def _gate(case: Case, column: Peer, own: tuple[Run, ExpertWeights[Any]], row: dict[str, object]) -> bool:
    """Say whether the contender's first output is right; note its error, or why there is none."""
    run, weights = own
    begin = time.time()
    problem = Problem(spec=replace(case.plain, weight_format=column.weights), device=probe(PLACE.type))
    try:
        with torch.inference_mode():
            found = run(*case.inputs[0])
            error = experts_error(found, problem, weights, (case.inputs[0][0], case.routings[0]))
    except Exception as fault:
        row["note"] = _reason("failed", fault)
        print(f"    {column} T={case.tokens}: {row['note']}", flush=True)
        _tidy()
        return False
    row["error"] = round(error, 5)
    allowed = TOLERANCES[activation_format(column.activations).bits]
    if not error <= allowed:
        row["note"] = f"wrong: error above {allowed}; not timed"
    if time.time() - begin > 5:
        print(f"    {column} T={case.tokens}: first call {time.time() - begin:.1f} s", flush=True)
    return error <= allowed


def _show(rows: dict[Peer, dict[str, object]], tokens: int, style: str) -> None:
    for row in rows.values():
        print(
            f"{style:8s} T={tokens:<5d} {row['weights']!s:10s} x {row['activations']!s:13s} {row['contender']!s:24s} "
            f"{row['us']!s:>9s} us  floor {row['floor_us']!s:>8s}  {row['of_floor']!s:>6s}  error {row['error']!s:8s} "
            f"{row['note']}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
