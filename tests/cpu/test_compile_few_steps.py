"""Every product compiles where its K loop has one, two or three steps, as slices for tensor parallelism do.

No GPU is needed; which variants there are is what the host code of a layer asks for (see ``launches.py``). The whole
grid, with numbers, is in ``tests/gpu/test_few_steps.py``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from compiling import compile_selected, grid

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

# (capability, weights, activations, hidden and intermediate sizes): steps are 64 or 128 columns, 16-bit and NVFP4
# weights 64.
CASES: tuple[tuple[int, str, str, tuple[tuple[int, int], ...]], ...] = (
    (9, "bf16", "bf16", ((64, 96), (192, 16))),
    (9, "fp8_block", "fp8_group128", ((128, 272), (256, 64))),
    (9, "fp8_channel", "fp8_token", ((96, 256),)),
    (9, "fp8_tensor", "bf16", ((128, 200),)),
    (9, "mxfp8", "bf16", ((32, 130),)),
    (9, "mxfp4", "bf16", ((64, 200),)),
    (9, "nvfp4", "bf16", ((16, 96),)),
    (9, "int4_group", "bf16", ((128, 32),)),
    (9, "mxfp4", "fp8_token", ((130, 64),)),
    (9, "nvfp4", "fp8_group128", ((32, 384),)),
    (9, "int4_group", "fp8_group128", ((64, 200),)),
    (8, "bf16", "bf16", ((64, 96),)),
    (8, "mxfp4", "bf16", ((64, 200),)),
    (10, "bf16", "bf16", ((64, 96),)),
    (10, "mxfp4", "fp8_group128", ((256, 64),)),
    (10, "mxfp4", "fp8_token", ((64, 200),)),
)

_PROGRAM = """
import json, sys
import torch
from launches import layer_on, pretending
from collegium import ActivationSpec, MoESpec, Routing, RoutingSpec
from collegium.kernels.arguments import OperandFormat

found = []
for major, weights, activations, sizes in json.load(sys.stdin):
    with pretending((major, 0)) as launches, torch.inference_mode():
        for place, (hidden, wide) in enumerate(sizes):
            # Every second size has one expert and no gate.
            experts, kind = (1, "relu2") if place % 2 else (3, "swiglu")
            top_k = min(2, experts)
            spec = MoESpec(
                hidden_size=hidden, intermediate_size=wide, num_experts=experts, routing=RoutingSpec(top_k=top_k),
                activation=ActivationSpec(kind=kind), weight_format=weights,
            )
            layer = layer_on(spec, activations, (major, 0))
            assert layer.plan.kernel.startswith("triton"), layer.plan
            for tokens in (1, 600):
                x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
                ids = torch.zeros(tokens, top_k, dtype=torch.int64)
                layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.ones(tokens, top_k)))
    formats = [(v, v.arguments.get("FORMAT")) for v in launches.found.values()]
    decoded = [(v, operands) for v, operands in formats if isinstance(operands, OperandFormat)]
    products = [v for v, _ in decoded] + [v for v, _ in formats if v.kernel.__name__ == "prefill"]
    failed = []
    for variant in products:
        try:
            variant.compile(launches.target)
        except Exception as error:
            failed.append(f"{variant.name}: {error!r}")
    names = sorted({v.kernel.__name__ for v in products})
    steps = {operands.k_blocks for _, operands in decoded}
    found.append([names, sorted(steps), len(products), failed])
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, Any]:
    asked = [list(case) for case in CASES]
    return compile_selected(request, "test_kernels_compile_with_few_steps", _PROGRAM, asked)


@grid(CASES, lambda major, _, act, *__: [major, (major == 9, act)], lambda major, w, act, _: f"sm{major}0-{w}-{act}")
def test_kernels_compile_with_few_steps(compiled: dict[int, Any], index: int) -> None:
    major, weights, activations, _ = CASES[index]
    names, steps, count, failed = compiled[index]
    assert not failed
    assert count >= 3
    assert steps[0] == 1
    assert steps[-1] <= 4
    large = major == 9 and (weights == "bf16" or (activations.startswith("fp8") and weights.startswith("fp8")))
    assert ("prefill" in names) == large
    assert len(names) == 1 + large
