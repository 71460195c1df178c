"""NVFP4 rows times NVFP4 weights on 16-bit tensor cores: the exact numbers of the codes, in Triton's interpreter."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from by_kernel import by_kernel
from collegium import LayerBuilder, WeightUpdater, load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, load_experts
from collegium.encoding import encode_experts
from collegium.errors import InputError
from collegium.experts.reference import Reference
from collegium.experts.triton.packed import PackedExperts
from collegium.formats.unquantised import DTYPES
from collegium.layer import MoELayer
from collegium.loading import load_routed
from collegium.ops.quantize import activation_format, formats_within, quantize_rows
from collegium.ops.rows import ExpertScales
from collegium.parallel.local import Local
from collegium.parallel.placement import linear
from collegium.placement import Placement
from collegium.planning import kernel_named, plan
from collegium.problem import DeviceFacts, Limits, Overrides, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ContiguousBatch, ExpertWeights, MoESpec, Routing, RoutingSpec
from memories import Poisoned
from nvfp4_rows import emulated_experts, quantized
from raising import raises_with
from toys import TinySize, write_checkpoint

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOPPER = DeviceFacts(kind="cuda", capability=(9, 0))
AMPERE = DeviceFacts(kind="cuda", capability=(8, 0))
REACH = (20.0, 6.0)
FORMATS = ("nvfp4", "nvfp4_static")
quantize_on_device = by_kernel(quantize_rows)


def problem_of(sizes: tuple[int, int, int], activations: str, device: DeviceFacts = HOPPER, **options: Any) -> Problem:
    experts, hidden, intermediate = sizes
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        routing=RoutingSpec(top_k=2),
        weight_format="nvfp4",
    )
    return Problem(spec=spec, device=device, limits=Limits(max_tokens=64), activation_format=activations, **options)


def weights_of(sizes: tuple[int, int, int]) -> ExpertWeights[Any]:
    experts, hidden, intermediate = sizes
    weights = encode_experts(random_experts(experts, 2, intermediate, hidden, seed=1), "nvfp4")
    return replace(weights, input_reach=REACH)


def scales_of(activations: str) -> tuple[float | None, float | None]:
    if activations == "nvfp4":
        return None, None
    first, second = (form.scale for form in formats_within(activations, REACH))
    return first, second


def packed_of(sizes: tuple[int, int, int], activations: str) -> PackedExperts:
    problem = problem_of(sizes, activations)
    assert plan(problem).kernel == "triton_w4a16"
    packed: Any = kernel_named("triton_w4a16").pack(weights_of(sizes), problem.routed)
    return packed


def batch_of(x: torch.Tensor, experts: int) -> tuple[ContiguousBatch, Routing]:
    count = x.shape[0]
    routing = Routing(topk_ids=uneven_ids(count, 2, experts, seed=3), topk_weights=torch.rand(count, 2) + 0.1)
    return Local(num_experts=experts).dispatch(x, routing)[0], routing


def layer_output(packed: PackedExperts, x: torch.Tensor, experts: int) -> tuple[torch.Tensor, Routing]:
    count = x.shape[0]
    routing = Routing(topk_ids=uneven_ids(count, 2, experts, seed=3), topk_weights=torch.rand(count, 2) + 0.1)
    local = Local(num_experts=experts)
    batch, handle = local.dispatch(x, routing)
    return local.combine(packed.run(batch), handle, dtype=torch.float32), routing


def awkward_rows(columns: int) -> torch.Tensor:
    """Heavy tails, ties, blocks of zeros, numbers that underflow and that saturate a calibrated scale."""
    x = heavy_tailed(12, columns, seed=2) * torch.logspace(-7, 3, 12)[:, None]
    x[3], x[4] = 0.0, -0.0
    x[5, : columns // 2] = 0.0
    x[6] = torch.where(torch.arange(columns) % 2 == 0, 6.0, 1.25)
    x[7] *= 1e-30
    x[8] *= 1e30
    return x


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("columns", [1, 15, 16, 33, 176, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_rows_are_the_codes(activations: str, columns: int, dtype: torch.dtype) -> None:
    """Bit for bit: the kernel, the torch reference of the kernel, the codes themselves and plain arithmetic."""
    form, _ = formats_within(activations, REACH)
    decoded: Any = form.operand_format
    x = awkward_rows(columns).to(dtype)
    x = torch.where(x.isfinite(), x, 0.0)
    codes, found = form.quantize(x), quantize_on_device(x, decoded, memory=Poisoned())
    reference = decoded.quantize(x)
    numbers, scale = quantized(x, form.scale)
    assert found.codes.dtype == torch.bfloat16
    assert found.scales is not None
    for rows in (found, reference):
        assert torch.equal(rows.codes.float(), numbers), "BF16 rounds nothing"
        assert torch.equal(rows.scales, scale)
    assert torch.equal(codes.global_scale, scale)
    again = decoded.dequantize(found)
    assert relative_error(again, form.dequantize(codes)) < 1e-7
    source = torch.tensor([4, 4, 0, 11])
    gathered = quantize_on_device(x, decoded, source=source, memory=Poisoned())
    assert torch.equal(gathered.codes, found.codes[source])
    few = quantize_on_device(x, decoded, used=torch.tensor([5]), memory=Poisoned())
    assert torch.equal(few.codes[:5], found.codes[:5])
    assert few.codes[5:].isnan().all()


def test_lost_rows_are_nan_alone() -> None:
    decoded: Any = activation_format("nvfp4").operand_format
    x = heavy_tailed(5, 48, seed=1)
    x[1, 7], x[3, 0] = torch.nan, -torch.inf
    found = quantize_on_device(x, decoded, memory=Poisoned())
    assert found.scales is not None
    assert found.scales[:, 0].isnan().tolist() == [False, True, False, True, False]
    assert (found.codes[[1, 3]] == 0).all()
    clean = quantize_on_device(x[::2].contiguous(), decoded)
    assert torch.equal(found.codes[::2], clean.codes)


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("sizes", [(4, 64, 64), (3, 176, 112), (3, 130, 66)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_match_emulation(activations: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against float64 sums of the quantised numbers: float32 sums, and rows of results in the input's dtype."""
    packed = packed_of(sizes, activations)
    x = heavy_tailed(9, sizes[1], seed=5) * torch.logspace(-2, 1.5, 9)[:, None]
    x = x.to(dtype)
    found, routing = layer_output(packed, x, sizes[0])
    weights = weights_of(sizes)
    decoded = weights.gate_up.decode(), weights.down.decode()
    wanted = emulated_experts(x, *decoded, routing, scales=scales_of(activations))
    # The interpreter truncates numbers that it stores in bfloat16.
    assert relative_error(found, wanted) < (1e-6 if dtype == torch.float32 else 5e-3)
    other = emulated_experts(x, *decoded, routing, scales=(REACH[1] / 2688, REACH[0] / 2688))
    assert relative_error(other, wanted) > 0.02, "the emulation tells scales apart"


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_experts_match_reference(activations: str, dtype: Any) -> None:
    sizes = (4, 112, 80)
    problem = problem_of(sizes, activations, dtype=dtype)
    x = heavy_tailed(10, 112, seed=8).to(DTYPES[dtype])
    x[2], x[3, 16:64] = 0.0, 0.0
    batch, _ = batch_of(x, sizes[0])
    packed: Any = kernel_named("triton_w4a16").pack(weights_of(sizes), problem.routed)
    reference = Reference().pack(weights_of(sizes), problem.routed)
    found, wanted = packed.run(batch, Poisoned()), reference.run(batch)
    assert found.dtype == torch.float32
    assert relative_error(found, wanted) < 1e-6
    assert torch.equal(found == 0, wanted == 0)


@pytest.mark.parametrize("activations", FORMATS)
def test_flows_have_equal_bits(activations: str) -> None:
    """Sorted and unsorted rows, alone and in a batch, with memory that is NaN before."""
    sizes = (4, 96, 80)
    packed = packed_of(sizes, activations)
    x = heavy_tailed(7, sizes[1], seed=6).bfloat16()
    batch, routing = batch_of(x, sizes[0])
    rows = packed.run(batch, Poisoned())
    unsorted = packed.run_unsorted(x, routing.topk_ids.contiguous(), Poisoned())
    offsets = batch.expert_offsets.tolist()
    experts = [expert for expert in range(sizes[0]) for _ in range(offsets[expert], offsets[expert + 1])]
    for row, (token, expert) in enumerate(zip(batch.source.tolist(), experts, strict=True)):
        slot = routing.topk_ids[token].tolist().index(expert)
        assert torch.equal(rows[row], unsorted[2 * token + slot])
    alone = Routing(topk_ids=routing.topk_ids[3:4], topk_weights=routing.topk_weights[3:4])
    single = packed.run_unsorted(x[3:4], alone.topk_ids.contiguous(), Poisoned())
    assert torch.equal(single, unsorted[6:8])


def test_weighted_inputs_and_dropped_rows() -> None:
    sizes = (4, 64, 48)
    packed = packed_of(sizes, "nvfp4")
    x = heavy_tailed(6, sizes[1], seed=7)
    batch, _ = batch_of(x, sizes[0])
    weights = torch.rand(batch.source.numel()) + 0.5
    problem = problem_of(sizes, "nvfp4", dtype="fp32")
    reference = Reference().pack(weights_of(sizes), problem.routed)
    weighted = replace(batch, input_weights=weights)
    assert relative_error(packed.run(weighted, Poisoned()), reference.run(weighted)) < 1e-6


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize("activations", FORMATS)
def test_plan_names_the_kernel(device: DeviceFacts, activations: str) -> None:
    problem = problem_of((8, 256, 128), "bf16", device)
    found = plan(problem, Overrides(activation_format=activations))
    assert found.kernel == "triton_w4a16"
    assert found.capturable
    text = found.explain()
    note = "each row" if activations == "nvfp4" else "calibrated"
    assert re.search(rf"weights nvfp4, activations {activations} \(.*{note}.*bf16", text)
    assert "multiplied" not in plan(problem, Overrides(activation_format=activations, kernel="reference")).explain()
    assert plan(problem).activation_format == "bf16", "W4A4 is not the default"


# A scale for each expert.

EXPERT_REACH = torch.tensor([[20.0, 6.0], [2.0, 0.7], [0.4, 30.0], [9.0, 1.0]])


def weights_by_expert(sizes: tuple[int, int, int]) -> ExpertWeights[Any]:
    return replace(weights_of(sizes), expert_reach=EXPERT_REACH[: sizes[0]])


@pytest.mark.parametrize("experts", [1, 5, 40])
def test_kernel_uses_each_experts_scale(experts: int) -> None:
    """Bit for bit, next to experts without rows, and rows of dropped assignments after the last expert."""
    counts = torch.randint(0, 4, (experts,))
    counts[0] = 3
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    values = torch.logspace(-3, 1, experts) / 2688
    rows = int(offsets[-1])
    x = heavy_tailed(rows + 4, 50, seed=9)
    form: Any = activation_format("nvfp4_expert").operand_format
    bound = form.with_expert_scales(ExpertScales(values, offsets))
    found, reference = quantize_on_device(x, bound, memory=Poisoned()), bound.quantize(x)
    numbers, scales = quantized(x[:rows], values.repeat_interleave(counts))
    for made in (found, reference):
        assert torch.equal(made.codes[:rows].float(), numbers)
        assert made.scales is not None
        assert torch.equal(made.scales[:rows], scales)
        assert made.scales.isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(4, 64, 64), (3, 130, 66)])
def test_experts_have_separate_scales(sizes: tuple[int, int, int], dtype: Any) -> None:
    problem = problem_of(sizes, "nvfp4_expert", dtype=dtype)
    made = plan(problem)
    assert made.kernel == "triton_w4a16"
    assert re.search(r"activations nvfp4_expert \(.*each expert.*bf16", made.explain())
    assert {token_range.pipeline for token_range in made.token_ranges} == {"split"}
    packed: Any = kernel_named("triton_w4a16").pack(weights_by_expert(sizes), problem.routed)
    reference = Reference().pack(weights_by_expert(sizes), problem.routed)
    x = (heavy_tailed(9, sizes[1], seed=5) * torch.logspace(-1, 1.5, 9)[:, None]).to(DTYPES[dtype])
    found, routing = layer_output(packed, x, sizes[0])
    weights = weights_of(sizes)
    scales = EXPERT_REACH[: sizes[0]] / 2688
    decoded = weights.gate_up.decode(), weights.down.decode()
    wanted = emulated_experts(x, *decoded, routing, scales=(scales[:, 0], scales[:, 1]))
    assert relative_error(found, wanted) < (1e-6 if dtype == "fp32" else 5e-3)
    largest = emulated_experts(x, *decoded, routing, scales=(scales[:, 0].max(), scales[:, 1].max()))
    assert relative_error(largest, wanted) > 0.05, "the emulation tells scales apart"
    batch, _ = batch_of(x, sizes[0])
    assert relative_error(packed.run(batch, Poisoned()), reference.run(batch)) < (1e-6 if dtype == "fp32" else 5e-3)
    for slot in range(sizes[0]):
        assert packed.reach_of(slot) == pytest.approx(EXPERT_REACH[slot].tolist())
        assert reference.reach_of(slot) == pytest.approx(EXPERT_REACH[slot].tolist())


@pytest.mark.parametrize("activations", [*FORMATS, "nvfp4_expert"])
@pytest.mark.parametrize("weighted", [False, True])
def test_experts_with_the_quantising_kernel(activations: str, weighted: bool) -> None:
    """What runs on a GPU: the kernel instead of its torch reference, with the same bits."""
    sizes = (4, 112, 80)
    problem = problem_of(sizes, activations, dtype="fp32")
    packed: Any = kernel_named("triton_w4a16").pack(weights_by_expert(sizes), problem.routed)
    x = heavy_tailed(9, sizes[1], seed=5)
    batch, _ = batch_of(x, sizes[0])
    if weighted:
        batch = replace(batch, input_weights=torch.rand(batch.source.numel()) + 0.5)
    wanted = packed.run(batch)
    assert torch.equal(by_kernel_run(packed, batch), wanted)


def by_kernel_run(packed: PackedExperts, batch: ContiguousBatch) -> torch.Tensor:
    with patch("collegium.ops.quantize.on_device", lambda *_: True):
        return packed.run(batch, Poisoned())


def test_scales_move_with_their_experts() -> None:
    sizes = (4, 64, 64)
    problem = problem_of(sizes, "nvfp4_expert")
    for kernel in (kernel_named("triton_w4a16"), Reference()):
        packed: Any = kernel.pack(weights_by_expert(sizes), problem.routed)
        target = packed.resized(2)
        target.put(0, packed.take(2))
        target.put(1, packed.take(1))
        assert target.reach_of(0) == pytest.approx((0.4, 30.0))
        assert target.reach_of(1) == pytest.approx((2.0, 0.7))


def test_missing_expert_scales_refused() -> None:
    sizes = (4, 64, 64)
    problem = problem_of(sizes, "nvfp4_expert")
    cpu = replace(problem, device=DeviceFacts(kind="cpu"))
    for reach in (None, EXPERT_REACH[:3]):
        weights = replace(weights_of(sizes), expert_reach=reach)
        for call in (
            lambda weights=weights: kernel_named("triton_w4a16").pack(weights, problem.routed),
            lambda weights=weights: Reference().pack(weights, problem.routed),
            lambda weights=weights: MoELayer(weights, plan(cpu)),
        ):
            with raises_with(InputError, "nvfp4_expert", "(4, 2)", "nvfp4_static"):
                call()
    with raises_with(InputError, "nvfp4_expert", "calibrated"):
        quantize_rows(torch.ones(3, 32), "nvfp4_expert")
    with raises_with(InputError, "9.99", "calibrate"):
        kernel_named("triton_w4a16").pack(
            replace(weights_of(sizes), expert_reach=torch.full((4, 2), 1e-40 * 2688)), problem.routed
        )


def test_checkpoint_scales_of_each_expert(tmp_path: Path) -> None:
    """Two layers on disk: scales of each expert, also where an engine passes tensors and where ranks hold some."""
    size = TinySize(hidden=64, intermediate=48, experts=4, top_k=2, layers=2)
    tiny = write_checkpoint(tmp_path, "mixtral", "nvfp4", "modelopt", size=size)
    reach = {0: EXPERT_REACH, 1: EXPERT_REACH.flip(0)}
    names = {"w1": 0, "w3": 0, "w2": 1}
    for layer, expert, which in product(range(2), range(4), names):
        base = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}"
        tiny.tensors[f"{base}.input_scale"] = reach[layer][expert, names[which]] / 2688
    save_file({n: t.contiguous().clone() for n, t in tiny.tensors.items()}, tmp_path / "model.safetensors")
    force = Overrides(activation_format="nvfp4_expert")
    x = heavy_tailed(11, 64, seed=2)
    routing = Routing(topk_ids=uneven_ids(11, 2, 4, seed=3), topk_weights=torch.rand(11, 2) + 0.1)
    for number in range(2):
        layer = load_layer(tmp_path, number, device="cpu", dtype="fp32", overrides=force)
        assert re.search(r"\n *scales .*each expert", str(layer))
        weights = load_experts(CheckpointLayer.open(Checkpoint.open(tmp_path), number), linear(4))
        scales = reach[number] / 2688
        decoded = weights.gate_up.decode(), weights.down.decode()
        wanted = emulated_experts(x, *decoded, routing, scales=(scales[:, 0], scales[:, 1]))
        assert relative_error(layer(x, routing=routing), wanted) < 1e-6
        builder = LayerBuilder.from_config(tiny.config, number, device="cpu", dtype="fp32", overrides=force)
        builder.load_all(tiny.tensors.items())
        built = builder.finish()
        assert torch.equal(built(x, routing=routing), layer(x, routing=routing))
        with raises_with(InputError, "WeightUpdater", "nvfp4_expert"):
            WeightUpdater(built)
        opened = CheckpointLayer.open(Checkpoint.open(tmp_path), number)
        parts = [
            load_routed(
                opened,
                device="cpu",
                dtype="fp32",
                overrides=replace(force, dispatcher="partial"),
                placement=Placement(expert_ids=ids),
            )
            for ids in ((2, 0), (3, 1))
        ]
        assert relative_error(sum(part(x, routing=routing) for part in parts), wanted) < 1e-6
