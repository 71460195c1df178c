"""MXFP8 rows on 16-bit tensor cores, and E8M0 scales of 128 columns on FP8 ones, in Triton's interpreter."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from by_kernel import by_kernel
from collegium.encoding import encode_experts
from collegium.experts.reference import Reference
from collegium.ops.quantize import activation_format, quantize_rows
from collegium.parallel.local import Local
from collegium.planning import kernel_named, plan
from collegium.problem import DeviceFacts, Limits, Overrides, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ContiguousBatch, MoESpec, Routing, RoutingSpec
from memories import Poisoned

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOPPER = DeviceFacts(kind="cuda", capability=(9, 0))
AMPERE = DeviceFacts(kind="cuda", capability=(8, 0))
KERNELS = {"mxfp8": "triton_fp8", "mxfp4": "triton_w4a16", "fp8_block": "triton_fp8"}
quantize_on_device = by_kernel(quantize_rows)


def rounded(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    """Return rows ``x`` as an OCP MX product reads them, float64, with scales that saturate nothing."""
    rows, columns = x.shape
    padded = torch.zeros(rows, -(-columns // group) * group, dtype=torch.float64)
    padded[:, :columns] = x.double()
    groups = padded.view(rows, -1, group)
    exponent = torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True) / 448)).clamp(min=-126)
    scale = torch.exp2(exponent)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    within = groups / scale
    distance = (within.abs().unsqueeze(-1) - numbers).abs()
    # Of two numbers as near, the one with an even code.
    distance += torch.tensor([0.0, 1e-13]).repeat(64)[:127]
    return (torch.copysign(numbers[distance.argmin(-1)], within) * scale).flatten(1)[:, :columns]


def emulated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return ``[T, H]`` float64 of SwiGLU experts whose rows are rounded before both products."""
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for token, ids in enumerate(routing.topk_ids.tolist()):
        row = rounded(x[token : token + 1])[0]
        for slot, expert in enumerate(ids):
            gate, up = gate_up[expert].double() @ row
            between = (gate / (1 + torch.exp(-gate)) * up).float()
            inner = rounded(between[None])[0]
            out[token] += routing.topk_weights[token, slot].double() * (down[expert].double() @ inner)
    return out


def problem_of(weights: str, activations: str, device: DeviceFacts = HOPPER, **options: Any) -> Problem:
    spec = MoESpec(
        hidden_size=160, intermediate_size=96, num_experts=4, routing=RoutingSpec(top_k=2), weight_format=weights
    )
    return Problem(spec=spec, device=device, limits=Limits(max_tokens=64), activation_format=activations, **options)


def batch_of(x: torch.Tensor) -> tuple[ContiguousBatch, Any, Routing]:
    routing = Routing(topk_ids=uneven_ids(len(x), 2, 4, seed=3), topk_weights=torch.rand(len(x), 2) + 0.1)
    batch, handle = Local(num_experts=4).dispatch(x, routing)
    return batch, handle, routing


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 160, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_the_codes(columns: int, dtype: torch.dtype) -> None:
    """Bit for bit: the kernel, the torch reference of the kernel, the codes themselves and plain arithmetic."""
    form = activation_format("mxfp8")
    decoded: Any = form.operand_format
    x = heavy_tailed(12, columns, seed=2) * torch.logspace(-7, 3, 12)[:, None]
    x[3], x[5, : columns // 2] = 0.0, -0.0
    x[6] = torch.where(torch.arange(columns) % 2 == 0, 448.0, 17.0)
    x[7], x[8] = x[7] * 1e-24, x[8] * 1e30
    x = x.to(dtype)
    x = torch.where(x.isfinite(), x, 0.0)
    found = quantize_on_device(x, decoded, memory=Poisoned())
    assert found.codes.dtype == torch.bfloat16
    assert found.scales is None
    assert torch.equal(decoded.quantize(x).codes, found.codes)
    assert torch.equal(found.codes.float(), form.round_trip(x)), "BF16 rounds nothing"
    assert torch.equal(found.codes.double(), rounded(x))
    gathered = quantize_on_device(x, decoded, source=torch.tensor([4, 4, 0, 11]), memory=Poisoned())
    assert torch.equal(gathered.codes, found.codes[[4, 4, 0, 11]])
    few = quantize_on_device(x, decoded, used=torch.tensor([5]), memory=Poisoned())
    assert torch.equal(few.codes[:5], found.codes[:5])


def test_lost_groups_are_nan_alone() -> None:
    decoded: Any = activation_format("mxfp8").operand_format
    x = heavy_tailed(3, 80, seed=1)
    x[1, 40] = torch.nan
    found = quantize_on_device(x, decoded, memory=Poisoned()).codes
    assert found[1, 32:64].isnan().all()
    assert found.isnan().sum() == 32


@pytest.mark.parametrize("weights", KERNELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_match_emulation(weights: str, dtype: Any) -> None:
    experts = encode_experts(random_experts(4, 2, 96, 160, seed=1), weights)
    problem = problem_of(weights, "mxfp8", dtype=dtype)
    packed: Any = kernel_named(KERNELS[weights]).pack(experts, problem.routed)
    x = heavy_tailed(9, 160, seed=5) * torch.logspace(-2, 1.5, 9)[:, None]
    x = x.bfloat16() if dtype == "bf16" else x
    batch, handle, routing = batch_of(x)
    rows = packed.run(batch, Poisoned())
    found = Local(num_experts=4).combine(rows, handle, dtype=torch.float32)
    matrices = experts.gate_up.decode(), experts.down.decode()
    wanted = emulated(x, *matrices, routing)
    # The interpreter truncates numbers that it stores in bfloat16.
    assert relative_error(found, wanted) < (1e-6 if dtype == "fp32" else 5e-3)
    swapped = emulated(x, matrices[0].flip(1), matrices[1], routing)
    assert relative_error(swapped, wanted) > 0.1
    if dtype == "fp32":
        reference = Reference().pack(experts, problem.routed).run(batch)
        assert relative_error(rows, reference) < 1e-6
        with patch("collegium.ops.quantize.on_device", lambda *_: True):
            assert torch.equal(packed.run(batch, Poisoned()), rows), "the quantising kernel gives other rows"
    unsorted = packed.run_unsorted(x, routing.topk_ids.contiguous(), Poisoned())
    ids = routing.topk_ids.flatten()
    assert torch.equal(rows, unsorted[torch.argsort(ids, stable=True)])


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize("weights", KERNELS)
def test_plan_names_the_kernel(device: DeviceFacts, weights: str) -> None:
    made = plan(problem_of(weights, "mxfp8", device))
    assert made.kernel == KERNELS[weights]
    assert made.capturable
    assert "activations mxfp8 (multiplied as bf16 without rounding)" in made.explain()
    assert plan(problem_of(weights, "mxfp8", device), Overrides(kernel="reference")).kernel == "reference"


def test_e8m0_scales_of_128_columns() -> None:
    """The kernel multiplies by the powers of two that the bytes stand for."""
    experts = encode_experts(random_experts(4, 2, 96, 160, seed=1), "fp8_block")
    x = heavy_tailed(9, 160, seed=5)
    batch, _, _ = batch_of(x)
    rows: list[torch.Tensor] = []
    for name in ("fp8_group128_e8m0", "fp8_group128_pow2", "fp8_group128"):
        problem = problem_of("fp8_block", name, dtype="fp32")
        assert plan(problem).kernel == "triton_fp8"
        packed: Any = kernel_named("triton_fp8").pack(experts, problem.routed)
        rows.append(packed.run(batch, Poisoned()))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    problem = problem_of("fp8_block", "fp8_group128_e8m0", dtype="fp32")
    assert relative_error(rows[0], Reference().pack(experts, problem.routed).run(batch)) < 1e-6
