"""``cpu_grouped`` against a float32 loop over the decoded weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from collegium.errors import BadScaleError
from collegium.experts import CpuGrouped
from collegium.experts.cpu import decode as decoding, grouped as module
from collegium.experts.cpu.decode import Scratch, pack_matrix
from collegium.formats import FORMATS, Fp8Block, Int4Affine, Int4Group, MxFp4, NvFp4, by_name
from collegium.ops.activation import activate
from collegium.placement import Placement
from collegium.planning import plan
from collegium.problem import DeviceFacts, Problem
from collegium.types import ActivationSpec, ContiguousBatch, ExpertWeights, MoESpec, RoutingSpec
from raising import assert_values, raises_with

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BOUND = {"bf16": 8e-3, "fp16": 2e-3, "fp32": 5e-5}
NAMES = [kind.name for kind in FORMATS if not kind.read_only]


def heavy(*shape: int) -> torch.Tensor:
    """Unit-scale numbers with a heavy tail: Student's t with four degrees of freedom."""
    return torch.distributions.StudentT(4.0).sample(torch.Size(shape)) / 2**0.5


def problem_for(weights, *, dtype="bf16", activation=None, **changes):
    experts, hidden, wide = weights.down.shape
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=1),
        activation=activation or ActivationSpec(),
        weight_format=weights.down.name,
    )
    return Problem(spec=spec, device=DeviceFacts(kind="cpu"), dtype=dtype, **changes)


def make_weights(name, experts, hidden, wide, *, parts=2, bias=True):
    kind = by_name(name)
    return ExpertWeights(
        gate_up=kind.encode(heavy(experts, parts, wide, hidden) / hidden**0.5),
        down=kind.encode(heavy(experts, hidden, wide) / wide**0.5),
        gate_up_bias=heavy(experts, parts, wide) if bias else None,
        down_bias=heavy(experts, hidden) if bias else None,
    )


def make_batch(counts, hidden, dtype, *, dropped=0, weighted=False):
    rows = sum(counts) + dropped
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return ContiguousBatch(
        x=heavy(max(1, rows // 2), hidden).to(dtype),
        source=torch.randint(0, max(1, rows // 2), (rows,)),
        expert_offsets=offsets,
        input_weights=torch.rand(rows) if weighted else None,
    )


def truth(batch, weights, activation):
    """Float32 throughout except the two roundings to x's dtype that the recipe has."""
    dtype = batch.x.dtype
    result = torch.full((batch.source.numel(), weights.down.shape[1]), float("nan"))
    for expert in range(weights.down.shape[0]):
        for row in range(int(batch.expert_offsets[expert]), int(batch.expert_offsets[expert + 1])):
            x = batch.x[batch.source[row]].float()
            if batch.input_weights is not None:
                x = (x * batch.input_weights[row]).to(dtype).float()
            inner = weights.gate_up[expert].decode(torch.float32) @ x
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[expert]
            hidden = activate(inner[None], activation)[0].to(dtype).float()
            result[row] = weights.down[expert].decode(torch.float32) @ hidden
            if weights.down_bias is not None:
                result[row] += weights.down_bias[expert]
    return result


def judge(batch, weights, dtype, activation=None, bound=None):
    activation = activation or ActivationSpec()
    problem = problem_for(weights, dtype=dtype, activation=activation)
    kernel = CpuGrouped()
    assert kernel.refuse(problem.routed) is None
    rows = kernel.pack(weights, problem.routed).run(batch)
    used = int(batch.expert_offsets[-1])
    wanted = truth(batch, weights, activation)[:used]
    found = rows[:used]
    assert found.dtype in (torch.float32, batch.x.dtype)
    assert rows.shape == (batch.source.numel(), weights.down.shape[1])
    error = float((found - wanted).norm() / wanted.norm())
    assert error <= (bound or BOUND[dtype]), f"relative L2 error {error}"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20)


@pytest.mark.each_choice
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", NAMES)
def test_run_matches_truth_in_every_format(name, dtype, tiles, monkeypatch):
    monkeypatch.setattr(module, "_HAS_TILES", tiles)
    weights = make_weights(name, 5, 90, 33)
    judge(make_batch([1, 0, 4, 13, 2], 90, DTYPES[dtype], dropped=3), weights, dtype)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_avx2_multiplies_many_rows_in_float32(name, tiles, monkeypatch):
    monkeypatch.setattr(module, "_HAS_TILES", tiles)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    found, product = set(), torch.mm

    def mm(left, right, **more):
        found.add((min(left.shape[0], right.shape[1]), left.dtype, right.dtype))
        return product(left, right, **more)

    monkeypatch.setattr(module.torch, "mm", mm)
    judge(make_batch([1, 0, 9, 12, 8], 90, torch.bfloat16, dropped=3), make_weights(name, 5, 90, 33), "bf16")
    half, full = torch.bfloat16, torch.float32
    assert found - {(1, half, half)} == {(8, half, half), (9, full, full), (12, full, full)}


def affine(*shape: int, group: int) -> Int4Affine:
    """Random codes and zero points, as AWQ and asymmetric GPTQ checkpoints have them."""
    *lead, columns = shape
    groups = -(-columns // group)
    return Int4Affine(
        shape=shape,
        codes=torch.randint(0, 256, (*lead, -(-columns // 2)), dtype=torch.uint8),
        scales=(torch.rand(*lead, groups) + 0.1).half() / (4 * columns**0.5),
        zeros=torch.randint(0, 16, (*lead, groups), dtype=torch.uint8),
        group_size=group,
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("hidden", "wide", "group"), [(90, 33, 32), (256, 96, 128), (64, 40, 8), (34, 33, 1 << 20)])
def test_run_with_zero_points(dtype, hidden, wide, group):
    weights = ExpertWeights(
        gate_up=affine(3, 2, wide, hidden, group=min(group, hidden)),
        down=affine(3, hidden, wide, group=min(group, wide)),
    )
    judge(make_batch([3, 0, 9], hidden, DTYPES[dtype]), weights, dtype)


@pytest.mark.parametrize("tile", [64, 1 << 12])
@pytest.mark.parametrize("name", NAMES)
def test_run_matches_truth_in_small_tiles(name, tile, monkeypatch):
    monkeypatch.setattr(module, "_TILE", 8 * tile)
    monkeypatch.setattr(decoding, "_STEP", tile)
    weights = make_weights(name, 3, 176, 130, bias=False)
    judge(make_batch([3, 1, 2], 176, torch.bfloat16), weights, "bf16")


@pytest.mark.parametrize("counts", [[40, 0, 0], [0, 0, 1], [9, 8, 1], [0, 12, 0]])
@pytest.mark.parametrize("chunk", [1, 10, 512])
def test_run_with_hot_and_empty_experts(counts, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", chunk)
    judge(make_batch(counts, 64, torch.bfloat16), make_weights("mxfp4", 3, 64, 96), "bf16")


def test_run_with_no_rows():
    weights = make_weights("nvfp4", 3, 64, 96)
    batch = ContiguousBatch(
        x=torch.empty(0, 64, dtype=torch.bfloat16),
        source=torch.empty(0, dtype=torch.int64),
        expert_offsets=torch.zeros(4, dtype=torch.int64),
    )
    assert CpuGrouped().pack(weights, problem_for(weights).routed).run(batch).shape == (0, 64)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_run_multiplies_input_weights_first(dtype):
    weights = make_weights("fp8_block", 4, 130, 66)
    judge(make_batch([3, 1, 5, 0], 130, DTYPES[dtype], weighted=True), weights, dtype)


@pytest.mark.parametrize(
    "activation",
    [
        ActivationSpec(limit=0.5),
        ActivationSpec(kind="swiglu_oai", limit=1.0),
        ActivationSpec(kind="swiglu_step", limit=0.7),
        ActivationSpec(kind="geglu"),
        ActivationSpec(kind="situ"),
        ActivationSpec(kind="relu2"),
        ActivationSpec(kind="gelu"),
    ],
    ids=lambda a: a.kind,
)
def test_run_with_every_kind_of_activation(activation):
    parts = 2 if activation.gated else 1
    weights = make_weights("int4_group", 4, 64, 48, parts=parts)
    judge(make_batch([2, 5, 0, 1], 64, torch.float32), weights, "fp32", activation)


def test_truth_tells_gate_from_up():
    weights = make_weights("mxfp4", 2, 64, 96, bias=False)
    swapped = replace(weights, gate_up=MxFp4.encode(weights.gate_up.decode().flip(1)))
    batch = make_batch([4, 4], 64, torch.float32)
    kernel = CpuGrouped()
    own, other = (kernel.pack(w, problem_for(w, dtype="fp32").routed).run(batch) for w in (weights, swapped))
    assert float((own - other).norm() / own.norm()) > 0.1


@pytest.mark.parametrize("limit", [None, 0.75])
def test_fast_swiglu_agrees_with_activate(limit):
    spec = ActivationSpec(limit=limit)
    inner = heavy(17, 2 * 33) * 4
    torch.testing.assert_close(
        module.fast_activate(inner.clone(), spec), activate(inner.view(17, 2, 33), spec), rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8", "fp8_tensor", "fp8_channel"])
def test_tiles_exact_up_to_row_scale(name):
    payload = by_name(name).encode(heavy(2, 2, 24, 80) * torch.logspace(-6, 3, 24)[:, None])
    matrix = pack_matrix(payload, "gate_up")
    found = torch.stack(
        [matrix.tile(e, slice(0, 48), torch.float32, Scratch(48 * matrix.stored_columns, 128)).clone() for e in (0, 1)]
    )
    columns = matrix.arrange(torch.arange(80).float()[None] + 1)[0].long()
    wanted = torch.zeros(2, 48, 81).index_copy_(2, torch.arange(1, 81), payload.decode().view(2, 48, 80))
    scaled = found.double() * matrix.row_scale.double().unsqueeze(-1)
    # Zero codes of MXFP4 come out as 2^-63 of their group's scale.
    error = (scaled - wanted[:, :, columns].double()).abs()[:, :, columns > 0]
    largest = wanted.abs().amax(-1, keepdim=True).double()
    assert bool((error <= largest * 2.0**-23).all())


def test_extreme_mxfp4_scales():
    weights = make_weights("mxfp4", 1, 64, 64, bias=False)
    scales = weights.down.scales.clone()
    scales[0, 0], scales[0, 1], scales[0, 2, 0], scales[0, 2, 1] = 0, 245, 127, 1
    weights = replace(weights, down=replace(weights.down, scales=scales))
    batch = make_batch([3], 64, torch.float32)
    found = CpuGrouped().pack(weights, problem_for(weights, dtype="fp32").routed).run(batch)
    wanted = truth(batch, weights, ActivationSpec())
    for column in (1, 2):
        torch.testing.assert_close(found[:, column], wanted[:, column], rtol=1e-4, atol=0.0)
    # 2^-127 times anything of unit scale is a subnormal float32; its last bits belong to the flush mode.
    torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=0.0, atol=2.0**-126)


@pytest.mark.parametrize(
    "payload",
    [
        Int4Group.encode(torch.randn(2, 20, 90), group_size=90),
        Int4Group.encode(torch.randn(2, 20, 256), group_size=128, scale_dtype=torch.float32),
        Fp8Block.encode(torch.randn(2, 2, 150, 140)),
        NvFp4.encode(torch.randn(2, 20, 48), global_divides=True),
    ],
    ids=["int4 one group", "int4 float32 scales", "fp8 blocks per part", "nvfp4 dividing"],
)
def test_tile_matches_decode(payload):
    matrix = pack_matrix(payload, "down")
    rows = matrix.shape[1]
    eye = matrix.arrange(torch.eye(matrix.shape[2]))
    for begin, stop in ((0, rows), (rows - 7, rows)):
        scratch = Scratch((stop - begin) * matrix.stored_columns, 256)
        found = matrix.tile(1, slice(begin, stop), torch.float32, scratch) @ eye.T
        if matrix.row_scale is not None:
            found = found * matrix.row_scale[1, begin:stop, None]
        wanted = payload.decode()[1].reshape(rows, -1)[begin:stop]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_group", "mxfp8", "fp8_block", "bf16"])
def test_packed_bytes_stay_the_formats_bytes(name):
    weights = make_weights(name, 2, 256, 384, bias=False)
    packed = CpuGrouped().pack(weights, problem_for(weights).routed)
    assert packed.slot_bytes * weights.down.shape[0] <= 1.05 * (weights.gate_up.nbytes + weights.down.nbytes)


def test_two_runs_give_the_same_bits():
    weights = make_weights("nvfp4", 4, 176, 130)
    packed = CpuGrouped().pack(weights, problem_for(weights).routed)
    batch = make_batch([3, 9, 1, 4], 176, torch.bfloat16)
    assert torch.equal(packed.run(batch), packed.run(batch))


def test_pack_refuses_a_nan_scale():
    weights = make_weights("mxfp4", 3, 64, 64)
    weights.down.scales[1, 5, 1] = 255
    with raises_with(BadScaleError, "expert 1", "mxfp4"):
        CpuGrouped().pack(weights, problem_for(weights).routed)


def test_refuse_gives_reasons():
    weights = make_weights("mxfp4", 3, 64, 64)
    kernel, good = CpuGrouped(), problem_for(weights)
    cuda = DeviceFacts(kind="cuda", capability=(9, 0))
    assert_values(str(kernel.refuse(replace(good, device=cuda).routed)), "cuda", "cpu")
    assert_values(str(kernel.refuse(replace(good, activation_format="mxfp8").routed)), "mxfp8", "bf16")
    assert_values(str(kernel.refuse(replace(good, activation_format="fp32").routed)), "fp32", "bf16")
    odd = replace(good, spec=replace(good.spec, weight_format="gguf"))
    assert_values(str(kernel.refuse(odd.routed)), "gguf", "mxfp4")
    assert kernel.refuse(replace(good, activation_format="bf16").routed) is None


def test_slices_belong_to_the_dispatcher():
    weights = make_weights("mxfp4", 3, 64, 64)
    placed = Placement(world_size=2, expert_ids=(0, 1, 2), tp_rank=1, tp_size=2)
    asked = replace(problem_for(weights), placement=placed)
    assert (asked.routed.experts, asked.routed.intermediate, asked.routed.hidden) == (3, 32, 64)
    assert CpuGrouped().refuse(asked.routed) is None
    assert plan(asked).wire_format.startswith("float32 sums of 2 slices")


def test_workspace_grows_with_the_batch():
    weights = make_weights("mxfp4", 3, 64, 64)
    problem = problem_for(weights)
    larger = replace(problem, limits=replace(problem.limits, max_tokens=2 * problem.limits.max_tokens))
    kernel = CpuGrouped()
    assert sum(kernel.regions(larger.routed).values()) > sum(kernel.regions(problem.routed).values()) > 0


@pytest.mark.parametrize("name", ["fp16", "fp32"])
@pytest.mark.parametrize("sizes", [(64, 64), (90, 33)])
def test_plain_numbers_are_rounded_once(name, sizes):
    weights = make_weights(name, 3, *sizes)
    before = weights.down.values.clone()
    batch = make_batch([9, 0, 40], sizes[0], torch.bfloat16)
    packed = CpuGrouped().pack(weights, problem_for(weights).routed)
    assert packed.gate_up.values.dtype == packed.down.values.dtype == torch.bfloat16
    rounded = {part: getattr(weights, part).values.bfloat16() for part in ("gate_up", "down")}
    same = replace(
        weights, **{part: by_name("bf16")(shape=tuple(own.shape), values=own) for part, own in rounded.items()}
    )
    alike = CpuGrouped().pack(same, problem_for(same).routed)
    assert alike.down.values.data_ptr() == rounded["down"].data_ptr(), "what is bfloat16 stays where it is"
    assert torch.equal(packed.run(batch), alike.run(batch))
    assert torch.equal(weights.down.values, before)
    exact = CpuGrouped().pack(weights, problem_for(weights, dtype="fp32").routed)
    assert exact.down.values.data_ptr() == weights.down.values.data_ptr()
