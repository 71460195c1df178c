"""A pass takes no more memory than the plan declares, in any batch, and the plan declares little more than that.

No GPU is needed: host code runs as it would beside one (see ``launches.py``), in a workspace of the CPU. What a pass
takes beyond a region raises there; what is taken of each region is compared with the plan.
"""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import Any

import pytest

from collegium.formats import FORMATS
from collegium.ops.quantize import ACTIVATION_FORMATS
from compiling import compile_apart

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

# (most tokens of a pass, spec, routing, shared expert, experts of this rank): sizes are no multiples of 128 but in one.
SPECS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any] | None, list[int] | None]] = {
    "plain": (700, {"hidden_size": 352, "intermediate_size": 208, "num_experts": 4}, {"top_k": 1}, None, None),
    "gated": (
        310,
        {"hidden_size": 352, "intermediate_size": 208, "num_experts": 4},
        {"top_k": 2},
        {"gated": True},
        None,
    ),
    "whole": (640, {"hidden_size": 384, "intermediate_size": 256, "num_experts": 4}, {"top_k": 2}, {}, None),
    "on input": (
        290,
        {"hidden_size": 224, "intermediate_size": 160, "num_experts": 4, "expert_bias": True},
        {"top_k": 2, "weight_on_input": True},
        None,
        None,
    ),
    "latent": (
        400,
        {"hidden_size": 288, "latent_size": 160, "intermediate_size": 96, "num_experts": 4, "expert_bias": True},
        {"top_k": 4},
        {},
        None,
    ),
    "many": (300, {"hidden_size": 96, "intermediate_size": 160, "num_experts": 300}, {"top_k": 8}, None, None),
    "part": (420, {"hidden_size": 352, "intermediate_size": 208, "num_experts": 6}, {"top_k": 2}, None, [1, 4]),
}
# Four-bit weights are laid out otherwise for the last, and tiles of large batches are for the first alone.
CAPABILITIES = ((9, 0), (10, 0))
SMALL = 64 << 10  # bytes that need no comparison

_PROGRAM = """
import json, sys
from dataclasses import replace
from functools import cache
from unittest.mock import patch
import torch
from integers import encoded
from launches import Launches, pretending
from collegium import Overrides, DeviceFacts, LatentWeights, Limits, MoELayer, MoESpec, Placement, PlanError, Problem
from collegium import RouterWeights, Routing, RoutingSpec, SharedSpec, SharedWeights, plan
from collegium.dummy.weights import random_weights
from collegium.dummy.encoders import ENCODERS
from collegium.experts.triton.table import TritonKernel
from collegium.formats.unquantised import DTYPES
from collegium.planning import kernel_named
from collegium.runtime.memory import MemoryMap, Workspaces
from collegium.runtime.warm_up import sizes_for

CPU = torch.device("cpu")


@cache
def weights_of(spec):
    name = spec.weight_format
    if name not in ENCODERS:
        return random_weights(spec, CPU)
    return encoded(random_weights(replace(spec, weight_format="bf16"), CPU), name)


taken, find = {}, MemoryMap.find


def noted(self, name, nbytes):
    taken[name] = max(taken.get(name, 0), nbytes)
    return find(self, name, nbytes)


def spec_of(weights, sizes, rule, shared):
    spec = MoESpec(weight_format=weights, routing=RoutingSpec(**rule), **sizes)
    return spec if shared is None else replace(spec, shared=SharedSpec(intermediate_size=144, **shared))


def layer_of(spec, chosen):
    given, wide = {}, spec.hidden_size
    if spec.shared is not None:
        gate = torch.zeros(1, wide) if spec.shared.gated else None
        given["shared"] = SharedWeights(experts=weights_of(spec.shared_alone()), gate=gate)
    if spec.latent_size is not None:
        down, up = torch.zeros(spec.latent_size, wide), torch.zeros(wide, spec.latent_size)
        given["latent"] = LatentWeights(down=down, up=up)
    held = replace(spec, shared=None, num_experts=len(chosen.problem.local_experts))
    given["router"] = RouterWeights(weight=torch.zeros(spec.num_experts, wide))
    return MoELayer(weights_of(held), chosen, **given)


def with_new_memory(layer):
    # A workspace looks for the place of a buffer once.
    taken.clear()
    layer.workspaces = Workspaces(CPU)
    layer.workspaces.reserve(layer.plan.workspace_bytes)


def call(layer, tokens):
    spec, dtype = layer.spec, layer.input_dtype
    x = torch.zeros(tokens, spec.hidden_size, dtype=dtype)
    ids = torch.zeros(tokens, spec.routing.top_k, dtype=torch.int32)
    layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.zeros(ids.shape)))
    layer(x, router_logits=torch.zeros(tokens, spec.num_experts))
    layer(x)


def run(capability, weights, activations, dtype, most, sizes, rule, shared, held):
    facts = DeviceFacts(kind="cuda", name="pretended", capability=tuple(capability), memory=1 << 36, sms=132)
    spec = spec_of(weights, sizes, rule, shared)
    placed = None if held is None else Placement(rank=0, world_size=3, expert_ids=tuple(held))
    problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=most), dtype=dtype, placement=placed)
    force = Overrides(activation_format=activations, dispatcher=None if held is None else "partial")
    try:
        chosen = plan(problem, force)
    except PlanError:
        return None
    if not isinstance(kernel_named(chosen.kernel), TritonKernel):
        return None
    # A dispatcher puts its table where the plan says the layer is.
    chosen = replace(chosen, problem=replace(chosen.problem, device=replace(facts, kind="cpu")))
    # What is launched does not matter here, and noting it takes most of the time.
    quiet, noting = patch.object(Launches, "note", lambda *_, **__: None), patch.object(MemoryMap, "find", noted)
    with quiet, pretending(tuple(capability)), torch.inference_mode(), noting:
        layer, largest = layer_of(spec, chosen), {}
        counts = (0, *sizes_for(layer.variants, most), most - 1, most + 1, 2 * most + 3)
        families = [f"{stretch.pipeline} {stretch.tiles}" for stretch in layer.plan.token_ranges]
        try:
            for aligned in (True, False):
                if not aligned:
                    # Weights at odd addresses, which only packing finds, run with small tiles in every batch.
                    for packed in (layer.experts, *(() if layer.shared is None else (layer.shared.experts,))):
                        object.__setattr__(packed, "_tiling", replace(packed.tiling, aligned=False))
                with_new_memory(layer)
                for tokens in counts:
                    call(layer, tokens)
                with_new_memory(layer)
                # Parts of products are made side by side up to a power of two.
                for tokens in (1 << most.bit_length() - 1, most):
                    call(layer, tokens)
                largest = {name: max(size, largest.get(name, 0)) for name, size in taken.items()} | {
                    name: size for name, size in largest.items() if name not in taken
                }
        except AssertionError as error:
            return [str(error), {}, {}, []]
    return ["", {region.name: region.nbytes for region in layer.plan.regions}, largest, families]


print("RESULT" + json.dumps([run(*case) for case in json.load(sys.stdin)]))
"""


WEIGHTS = [form.name for form in FORMATS if not form.read_only]
# What is only read differs by the rows that activation order gathers, of tokens and of weighted tokens, and by sums.
READ = {"int4_affine", "int4_ordered", "int8_ordered", "gguf"}
READ_BY = ("whole", "on input")
ACTIVATIONS = [form.name for form in ACTIVATION_FORMATS]


def cases_of(label: str) -> list[tuple[Any, ...]]:
    """Return (capability, weights, activations, dtype): all of them for one spec, the usual dtype for the others."""
    found: list[tuple[Any, ...]] = []
    formats = [*WEIGHTS, *sorted(READ)] if label in READ_BY else WEIGHTS
    for capability, weights, activations in product(CAPABILITIES, formats, ACTIVATIONS):
        usual = "fp16" if weights == "fp16" else "bf16"
        if capability == CAPABILITIES[0]:
            dtypes = ("bf16", "fp16", "fp32") if label == "whole" else (usual,)
            found += [(capability, weights, activations, dtype) for dtype in dtypes]
        elif label == "gated":
            found.append((capability, weights, activations, usual))
    return found


MAIN = ("gated", "on input", "part")


REST = tuple(label for label in SPECS if label not in MAIN)


def ran_by(labels: tuple[str, ...]) -> dict[str, dict[tuple[Any, ...], Any]]:
    asked = [(label, case) for label in labels for case in cases_of(label)]
    found = compile_apart(_PROGRAM, [[*case, *SPECS[label]] for label, case in asked])
    ran: dict[str, dict[tuple[Any, ...], Any]] = {label: {} for label in labels}
    for (label, case), result in zip(asked, found, strict=True):
        if result is not None:
            ran[label][case] = result
    return ran


@pytest.mark.parametrize("labels", [MAIN, pytest.param(REST, marks=pytest.mark.exhaustive)], ids=["main", "rest"])
def test_pass_memory_matches_plan(labels: tuple[str, ...]) -> None:
    for label, ran in ran_by(labels).items():
        check(label, ran)


def check(label: str, ran: dict[tuple[Any, ...], Any]) -> None:
    faults = {case: error for case, (error, *_) in ran.items() if error}
    assert not faults
    taken_by = {"bf16", "fp16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4", "int4_group"}
    taken_by |= READ if label in READ_BY else set()
    assert {weights for _, weights, _, _ in ran} >= taken_by
    assert {"bf16", "fp8_token", "fp8_group128"} <= {activations for _, _, activations, _ in ran}
    families = {family for *_, own in ran.values() for family in own}
    assert "split small tiles" in families
    assert ("split large tiles" in families) == (label != "many")
    assert ("direct small tiles" in families) == (label not in ("on input", "part"))
    for case, (_, declared, largest, _) in ran.items():
        assert set(largest) <= set(declared)
        for name, size in declared.items():
            # What a product takes for its descriptors is Triton's to say, on a GPU.
            if size > SMALL and not name.endswith("/scratch"):
                assert 2 * largest.get(name, 0) >= size, (case, name)
