"""After warming up, no call of 1 to ``max_tokens`` tokens or more, asked in any way, needs another kernel variant.

No GPU is needed: host code runs as it would beside one, and Triton's own code says which launches are of one variant
(see ``launches.py``).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from compiling import compile_apart, compile_selected

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

# (spec, routing, activations, parts): parts are a router and what it needs, a shared expert's format and gate.
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "bf16": ({"weight_format": "bf16"}, {}, "bf16", {}),
    "fp16, own router": ({"weight_format": "fp16"}, {}, "fp16", {"router": ()}),
    "FP8, biased groups, shared": (
        {"weight_format": "fp8_block"},
        {"correction_bias": True, "score": "sigmoid", "groups": 2, "group_score": "top2_sum"},
        "fp8_group128",
        {"router": ("correction_bias",), "shared": ("fp8_block", False)},
    ),
    "FP8 channels, gated shared": (
        {"weight_format": "fp8_channel"}, {}, "bf16", {"router": (), "shared": ("fp8_channel", True)},
    ),
    "MXFP4, FP8 shared": (
        {"weight_format": "mxfp4"},
        {},
        "fp8_group128",
        {"router": (), "shared": ("fp8_block", False)},
    ),
    "MXFP4, latent": ({"weight_format": "mxfp4", "latent_size": 128}, {}, "fp8_token", {}),
    "INT4, hash table": ({"weight_format": "int4_group"}, {"hash_routing": True}, "bf16", {"router": ("hash_table",)}),
    "NVFP4, weighted input": ({"weight_format": "nvfp4"}, {"weight_on_input": True}, "bf16", {}),
    "BF16, adapters": ({"weight_format": "bf16"}, {}, "bf16", {"adapters": (3, 16)}),
    "MXFP4, adapters": ({"weight_format": "mxfp4"}, {}, "fp8_token", {"adapters": (3, 16)}),
    "input of its own": ({"weight_format": "bf16"}, {"input_norm_eps": 1e-6}, "bf16", {"router": ()}),
}  # fmt: skip

_PROGRAM = """
import json, sys
from dataclasses import replace
import torch
from adapted import random_adapters
from launches import layer_on, pretending
from collegium import LatentWeights, MoESpec, RouterWeights, Routing, RoutingSpec, SharedSpec, SharedWeights
from collegium.dummy.weights import random_weights

HIDDEN, EXPERTS, TOP_K, LIMIT = 256, 8, 2, 640
EXTRA = {"correction_bias": torch.zeros(EXPERTS), "hash_table": torch.zeros(50, TOP_K, dtype=torch.int64)}


def built(spec, rule, activations, parts):
    made, given = MoESpec(
        hidden_size=HIDDEN, intermediate_size=128, num_experts=EXPERTS, routing=RoutingSpec(top_k=TOP_K, **rule), **spec
    ), {}
    if "router" in parts:
        extra = {name: EXTRA[name] for name in parts["router"]}
        given["router"] = RouterWeights(weight=torch.zeros(EXPERTS, HIDDEN), **extra)
    if "shared" in parts:
        name, gated = parts["shared"]
        made = replace(made, shared=SharedSpec(intermediate_size=96, gated=gated, weight_format=name))
        alone = replace(made, intermediate_size=96, num_experts=1, routing=RoutingSpec(top_k=1), shared=None)
        experts = random_weights(replace(alone, weight_format=name), torch.device("cpu"))
        given["shared"] = SharedWeights(experts=experts, gate=torch.zeros(1, HIDDEN) if gated else None)
    if made.latent_size is not None:
        down, up = torch.zeros(made.latent_size, HIDDEN), torch.zeros(HIDDEN, made.latent_size)
        given["latent"] = LatentWeights(down=down, up=up)
    layer = layer_on(made, activations, limit=LIMIT, **given)
    if "adapters" in parts:
        layer.set_adapters(random_adapters(parts["adapters"], EXPERTS, 128, HIDDEN, gated=True))
    return layer


def asked(layer, tokens):
    # Every way to call with this count of tokens: (what, x, the rest).
    dtype = torch.float16 if layer.plan.problem.dtype == "fp16" else torch.bfloat16
    rule, own = layer.spec.routing, layer.router is not None
    x, ids = torch.zeros(tokens, HIDDEN, dtype=dtype), torch.zeros(tokens, TOP_K, dtype=torch.int64)
    weights, usual = torch.zeros(tokens, TOP_K), {}
    known = {"token_ids": torch.zeros(tokens, dtype=torch.int64)}
    for whole in (torch.int64, torch.int32):
        for kind in (torch.float32, dtype):
            yield f"{whole} {kind}", x, {"routing": Routing(topk_ids=ids.to(whole), topk_weights=weights.to(kind))}
    usual = {"routing": Routing(topk_ids=ids, topk_weights=weights)}
    if layer.adapters is not None:
        for whole in (torch.int64, torch.int32):
            yield f"adapters {whole}", x, {**usual, "adapter_ids": torch.zeros(tokens, dtype=whole)}
    wide = torch.zeros(tokens, EXPERTS, dtype=torch.int64)[:, 1 : TOP_K + 1]
    apart = Routing(topk_ids=wide, topk_weights=torch.zeros(tokens, EXPERTS)[:, 1 : TOP_K + 1])
    yield "columns of wider ids and weights", x, {"routing": apart}
    yield "columns of a wider x", torch.zeros(tokens, HIDDEN + 40, dtype=dtype)[:, 8 : HIDDEN + 8], usual
    yield "an odd address", torch.zeros(tokens * HIDDEN + 3, dtype=dtype)[3:].view(tokens, HIDDEN), usual
    yield "three dimensions", x[None], usual
    if tokens == 1:
        yield "a column as the one row", torch.zeros(HIDDEN, 1, dtype=dtype).T, usual
        turned = Routing(topk_ids=ids.new_zeros(TOP_K, 1).T, topk_weights=weights.new_zeros(TOP_K, 1).T)
        yield "columns as the one routing", x, {"routing": turned}
    if own or not (rule.correction_bias or rule.hash_routing):
        for kind in (torch.float32, dtype):
            yield f"logits {kind}", x, {"router_logits": torch.zeros(tokens, EXPERTS, dtype=kind), **known}
        odd = torch.zeros(tokens * EXPERTS + 1)[1:].view(tokens, EXPERTS)
        yield "logits at an odd address", x, {"router_logits": odd, **known}
        yield "int32 tokens", x, {"router_logits": torch.zeros(tokens, EXPERTS), "token_ids": known["token_ids"].int()}
        column = torch.zeros(tokens, 16, dtype=torch.int64)[:, 15]
        yield "a column of tokens", x, {"router_logits": torch.zeros(tokens, EXPERTS), "token_ids": column}
    if own and rule.input_norm_eps is None:
        yield "own router", x, known
        if not rule.hash_routing:
            yield "own router alone", x, {}
    elif own:
        yield "router's own input", x, {"router_input": x}


found = []
for case in json.load(sys.stdin):
    with pretending() as launches, torch.inference_mode():
        layer = built(*case)
        batches = layer.warm_up()
        warm = set(launches.found)
        calls, missed = 0, []
        # Beyond the limit a last pass has what is left: one token, few, many.
        for tokens in (*range(1, LIMIT + 1), *(LIMIT + rest for rest in (1, 2, 3, 7, 33, 300)), 3 * LIMIT + 5):
            for what, x, rest in asked(layer, tokens):
                layer(x, **rest)
                calls += 1
            for key in set(launches.found) - warm:
                missed.append(f"{tokens} tokens: {launches.found[key].name}")
                warm.add(key)
        found.append([batches, calls, len(warm), missed])
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def called(request: pytest.FixtureRequest) -> dict[int, Any]:
    test = "test_warm_up_covers_every_variant"
    return compile_selected(request, test, _PROGRAM, list(LAYERS.values()))


MAIN = ("FP8, biased groups, shared", "MXFP4, latent", "NVFP4, weighted input", "input of its own")


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, id=n, marks=() if n in MAIN else pytest.mark.exhaustive) for i, n in enumerate(LAYERS)],
)
def test_warm_up_covers_every_variant(called: dict[int, Any], index: int) -> None:
    batches, calls, variants, missed = called[index]
    assert not missed
    assert batches < 40
    assert calls > 5000
    assert variants > 20


_KINDS = """
import json, sys
from dataclasses import replace
import torch
from launches import layer_on, pretending
from collegium import MoELayer, MoESpec, Routing, RoutingSpec, warm_up
from collegium.dummy.weights import random_weights
from collegium.formats.unquantised import Bf16

spec = MoESpec(hidden_size=64, intermediate_size=32, num_experts=3, routing=RoutingSpec(top_k=2))
with pretending() as launches, torch.inference_mode():
    one, same, odd = (layer_on(spec, "bf16", limit=80) for _ in range(3))
    # Weights are used where they are, and here that is no multiple of 16 bytes.
    down = odd.experts.down
    values = torch.zeros(down.values.numel() + 1, dtype=torch.bfloat16)[1:].view(down.values.shape)
    odd.__dict__["experts"] = replace(odd.experts, down=replace(down, values=values))
    ways = [(most, own, replace(own.parts, experts=odd.experts)) for most, own in odd._context.pipelines]
    pipelines = tuple((most, replace(own, parts=parts)) for most, own, parts in ways)
    odd._context = replace(odd._context, pipelines=pipelines)
    batches = warm_up([one, same, odd])
    counted, known = one.warm_up(), set(launches.found)
    for tokens in range(1, 81):
        x, ids = torch.zeros(tokens, 64, dtype=torch.bfloat16), torch.zeros(tokens, 2, dtype=torch.int64)
        odd(x, routing=Routing(topk_ids=ids, topk_weights=torch.ones(tokens, 2)))
    print("RESULT" + json.dumps([batches, counted, [launches.found[k].name for k in set(launches.found) - known]]))
"""


def test_warm_up_with_unaligned_weights() -> None:
    batches, one, missed = compile_apart(_KINDS, [])
    assert not missed
    assert one < batches <= 2 * one + 2
