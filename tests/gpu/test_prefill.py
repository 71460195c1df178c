"""The large-batch product on a Hopper GPU: truth, the bits of the small-batch product, graphs and ugly sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from collegium.encoding import encode_experts
from collegium.experts.reference import Reference
from collegium.experts.triton import prefill
from collegium.experts.triton.grouped import tile_list
from collegium.experts.triton.layout import ROWS
from collegium.experts.triton.matrix import PackedMatrix
from collegium.experts.triton.packed import PackedExperts
from collegium.experts.triton.prefill import CodeScales, prefill_gemm
from collegium.experts.triton.table import TritonBf16, TritonFp8
from collegium.experts.triton.tiles import choice
from collegium.experts.triton.tiles.choice import prefill_tile
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats.unquantised import DTYPES
from collegium.ops.operand import operand
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.runtime import nvrtc
from collegium.runtime.devices import probe
from collegium.runtime.nvrtc import CudaKernel, compiled
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, ContiguousBatch, MoESpec, Routing, RoutingSpec
from passes import check_rows_stand_alone
from products import grouped_gemm_reference

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = torch.device("cuda")
LARGE = TileChoice(block_n=128, block_t=192, warps=12, stages=5, programs=132)
CASES = (
    ("bf16", "bf16", 0.01),
    ("bf16", "fp16", 0.002),
    ("fp16", "bf16", 0.01),
    ("fp8_block", "fp8_group128", 0.06),
    ("fp8_block", "fp8_group128_pow2", 0.06),
    ("fp8_block", "fp8_token", 0.06),
    ("fp8_channel", "fp8_group128", 0.06),
    ("fp8_channel", "fp8_token", 0.06),
    ("fp8_tensor", "fp8_token", 0.06),
    ("fp8_tensor", "fp8_static", 0.06),
)


def dtype_of(act: str) -> Any:
    return "fp16" if act == "fp16" else "bf16"


def build(weights: str, act: str, *, experts: int = 17, wide: int = 176, hidden: int = 336) -> tuple[Any, ...]:
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=4),
        activation=ActivationSpec(limit=2.0),
        weight_format=weights,
        expert_bias=True,
    )
    problem = Problem(spec=spec, device=probe(DEVICE), dtype=dtype_of(act), activation_format=act)
    kernel: Any = TritonBf16() if weights.endswith("16") else TritonFp8()
    made = encode_experts(random_experts(experts, 2, wide, hidden, seed=1, bias=True), weights)
    made = replace(
        made,
        gate_up=made.gate_up.to("cuda"),
        down=made.down.to("cuda"),
        gate_up_bias=None if made.gate_up_bias is None else made.gate_up_bias.cuda(),
        down_bias=None if made.down_bias is None else made.down_bias.cuda(),
    )
    return kernel.pack(made, problem.routed), made, problem


@pytest.fixture(autouse=True)
def large_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run batches of 56 rows an expert with the large tiles, so that tests stay small."""
    monkeypatch.setattr(choice, "large_from", lambda *_: 56)


def small(packed: PackedExperts) -> PackedExperts:
    """Return the same experts, which multiply with the small-batch product whatever the batch."""
    return replace(packed, machine=replace(packed.machine, compiles=False))


def dispatched(
    tokens: int, experts: int, hidden: int, ids: torch.Tensor | None = None, dtype: str = "bf16"
) -> ContiguousBatch:
    x = heavy_tailed(tokens, hidden, seed=3).to(DTYPES[dtype]).cuda()
    chosen = uneven_ids(tokens, 4, experts, seed=2).cuda() if ids is None else ids
    routing = Routing(topk_ids=chosen, topk_weights=torch.rand(tokens, 4, device="cuda"))
    return Local(num_experts=experts).dispatch(x, routing)[0]


@pytest.mark.parametrize(("weights", "act", "bound"), CASES)
@pytest.mark.parametrize("sizes", [(17, 176, 336), (16, 1408, 2880)])
def test_matches_truth_and_small_batch_bits(weights: str, act: str, bound: float, sizes: tuple[int, int, int]) -> None:
    experts, wide, hidden = sizes
    packed, made, problem = build(weights, act, experts=experts, wide=wide, hidden=hidden)
    ids = uneven_ids(600, 4, experts, seed=2).cuda()
    ids[1, 1] = -1
    ids[ids == 3] = -1  # an empty expert
    batch = dispatched(600, experts, hidden, ids, dtype_of(act))
    rows, stop = batch.source.numel(), int(batch.expert_offsets[-1])
    bits, groups = (16, False) if weights.endswith("16") else (8, act not in ("fp8_token", "fp8_static"))
    assert prefill_tile(packed.gate_up.layout.problem(rows, bits, groups), packed.machine) is not None
    assert packed.tiling.large(rows) is not None
    assert small(packed).tiling.large(rows) is None
    found = packed.run(batch)[:stop]
    truth = Reference().pack(made, replace(problem, activation_format="fp32").routed).run(batch)[:stop]
    assert relative_error(found, truth) < bound
    assert torch.equal(found, small(packed).run(batch)[:stop])


@pytest.mark.parametrize(("weights", "act", "bound"), CASES)
def test_rows_are_batch_invariant(weights: str, act: str, bound: float) -> None:
    packed, _, _ = build(weights, act, wide=256, hidden=512)
    check_rows_stand_alone(packed, (9, 130, 237, 238, 333, 1024, 4096), DTYPES[dtype_of(act)])


@pytest.mark.parametrize(("weights", "act"), [("bf16", "bf16"), ("fp8_block", "fp8_group128")])
def test_graph_replay_follows_one_hot_routing(weights: str, act: str) -> None:
    packed, _, _ = build(weights, act)
    local = Local(num_experts=17)
    x = heavy_tailed(300, 336, seed=3).bfloat16().cuda()
    weight = torch.rand(300, 4, device="cuda")
    ids = uneven_ids(300, 4, 17, seed=2).cuda()

    def layer(experts: PackedExperts) -> torch.Tensor:
        batch, handle = local.dispatch(x, Routing(topk_ids=ids, topk_weights=weight))
        return local.combine(experts.run(batch), handle)

    layer(packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer(packed)
    for seed in (5, 6):
        ids.copy_(uneven_ids(300, 4, 17, seed=seed))
        if seed == 6:
            ids[:, 1:] = -1
            ids[:, 0] = 11
        graph.replay()
        assert torch.equal(replayed, layer(small(packed)))


def test_variant_loads_during_graph_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed, _, _ = build("fp8_block", "fp8_group128")
    batch = dispatched(300, 17, 336)
    stop, wanted = int(batch.expert_offsets[-1]), packed.run(batch).clone()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prefill, "KERNEL", CudaKernel("prefill", prefill.source_of, prefill.KERNEL.shared))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = packed.run(batch)
    graph.replay()
    assert torch.equal(found[:stop], wanted[:stop])
    assert len(list((tmp_path / "collegium" / "kernels").iterdir())) == 2, "one for each product"


def test_concurrent_threads_compile_variant_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed, _, _ = build("bf16", "bf16")
    batches = [dispatched(tokens, 17, 336) for tokens in (300, 420, 555, 600)]
    wanted = [packed.run(batch)[: int(batch.expert_offsets[-1])].clone() for batch in batches]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prefill, "KERNEL", CudaKernel("prefill", prefill.source_of, prefill.KERNEL.shared))
    texts: list[str] = []
    monkeypatch.setattr(nvrtc, "compiled", lambda *a: texts.append(a[0]) or compiled(*a))

    def run(batch: ContiguousBatch) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = packed.run(batch)
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, batches))
    assert len(texts) == 2
    for rows, right in zip(found, wanted, strict=True):
        assert torch.equal(rows[: right.shape[0]], right)


def test_nothing_waits_for_the_device() -> None:
    packed, _, _ = build("fp8_block", "fp8_group128")
    batch = dispatched(300, 17, 336)
    packed.run(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed.run(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nan_tokens_stay_in_their_rows() -> None:
    for weights, act in (("bf16", "bf16"), ("fp8_block", "fp8_group128")):
        packed, _, _ = build(weights, act)
        batch = dispatched(300, 17, 336)
        stop = int(batch.expert_offsets[-1])
        clean = packed.run(batch)
        x = batch.x.clone()
        x[3, 5] = torch.nan
        found = packed.run(replace(batch, x=x))
        hit = (batch.source == 3)[:stop]
        assert bool(torch.isnan(found[:stop][hit]).all())
        assert torch.equal(found[:stop][~hit], clean[:stop][~hit])


@pytest.mark.parametrize("act", ["fp8_group128", "fp8_group128_pow2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_intermediate_codes_and_scales(act: str, parts: int) -> None:
    """What leaves the first product as codes is what quantising its rows gives, bit for bit."""
    codes = torch.randn(3, parts, 336, 512, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(3, parts, 3, 4, device="cuda") * 0.1
    packed = PackedMatrix(layout=ROWS["fp8_block"].of((3, parts, 336, 512)), values=codes, scale=scale)
    x, x_scale = operand(heavy_tailed(300, 512, seed=3).bfloat16().cuda(), "fp8_group128")
    offsets = torch.tensor([0, 130, 130, 299], device="cuda")
    tiles = tile_list(offsets, 300, LARGE)
    activation = ActivationSpec(kind="swiglu" if parts == 2 else "relu2")
    rows = torch.full((300, 336), 7.0, dtype=torch.bfloat16, device="cuda")
    prefill_gemm(x, packed, offsets, tiles, rows, x_scale=x_scale, activation=activation)
    assert bool((rows[299] == 7.0).all())
    wanted, wanted_scale = operand(rows, act)
    out = torch.zeros(300, 336, dtype=torch.float8_e4m3fn, device="cuda")
    made = CodeScales(scale=torch.zeros(300, 3, device="cuda"), power=act.endswith("pow2"), rounded=True)
    prefill_gemm(x, packed, offsets, tiles, out, x_scale=x_scale, activation=activation, codes=made)
    assert wanted_scale is not None
    assert torch.equal(made.scale[:299], wanted_scale[:299])
    assert torch.equal(out[:299].view(torch.uint8), wanted[:299].view(torch.uint8))
    assert bool((out[299].float() == 0).all())


def test_addresses_beyond_2_to_the_31() -> None:
    experts, wide, hidden = 17, 8192, 8192  # 2.3e9 elements in gate and up
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.empty(experts, 2, wide, hidden, dtype=torch.bfloat16, device="cuda")
    for expert in values:
        expert.normal_(0, hidden**-0.5, generator=generator)
    packed = PackedMatrix(layout=ROWS["plain"].of((experts, 2, wide, hidden)), values=values)
    x = torch.randn(300, hidden, device="cuda", generator=generator).bfloat16()
    offsets = torch.tensor([0] * 15 + [100, 170, 300], device="cuda")
    out = torch.empty(300, wide, dtype=torch.float32, device="cuda")
    activation = ActivationSpec()
    prefill_gemm(x, packed, offsets, tile_list(offsets, 300, LARGE), out, activation=activation)
    assert relative_error(out, grouped_gemm_reference(x, values, offsets, activation=activation)) < 1e-4
