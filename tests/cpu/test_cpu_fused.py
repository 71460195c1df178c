"""``cpu_fused`` against a float32 loop over the decoded weights, and its bits in every company."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collegium import moe
from collegium.dummy.encoders import write_half
from collegium.errors import BadScaleError, InputError
from collegium.experts import CpuFused, CpuGrouped
from collegium.experts.cpu import panels
from collegium.experts.cpu.fused import pack_fused
from collegium.experts.cpu.panels import missing_requirement
from collegium.formats import (
    Bnb4,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gguf,
    Int4Affine,
    Int4Group,
    Int4Ordered,
    Int8Affine,
    Int8Ordered,
    MxFp4,
    MxFp8,
    NvFp4,
    by_name,
)
from collegium.formats.gguf import KINDS
from collegium.planning import plan
from collegium.problem import DeviceFacts, Problem
from collegium.testing.compare import heavy_tailed
from collegium.types import ActivationSpec, ContiguousBatch, ExpertWeights, MoESpec, RoutingSpec
from raising import assert_values, raises_with

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
FLOATS = ["fp8_block", "fp8_channel", "fp8_tensor", "mxfp8"]
NAMES = ["mxfp4", "nvfp4", "int4_group", *FLOATS]
CPU = DeviceFacts(kind="cpu")


def problem(name="mxfp4", activation=None, hidden=64, wide=64, experts=3, **changes):
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=1),
        activation=activation or ActivationSpec(),
        weight_format=name,
    )
    return Problem(spec=spec, device=CPU, **changes)


@cache
def compiled(name):
    """Return the kernel as compiled where ``_host`` says what the fixture ``kernel`` has it say; name: of that."""
    from numba import cfunc, types

    from collegium.kernels import cpu_fused as device

    return cfunc(types.void(types.intp))(device._work)


def variant(name, available, requirement):
    """Return a parameter of ``kernel``, skipped on CPUs without ``requirement``."""
    return pytest.param(name, marks=pytest.mark.skipif(not available, reason=f"this CPU has no {requirement}"))


def variants():
    """Return the parameters of ``kernel``; where the kernel does not run at all, the fixture skips."""
    if missing_requirement() is not None:
        return ["avx2"]
    device = import_module("collegium.kernels.cpu_fused")
    return [
        "avx2",
        variant("vectors", device._host("avx512f"), "AVX-512"),
        variant("pairs", device._host("avx512bf16"), "AVX512_BF16"),
        variant("tiles", device.has_tiles(), "AMX"),
    ]


@pytest.fixture(params=variants())
def kernel(request, monkeypatch):
    """Return the kernel with AVX2 alone, with AVX-512, with products of pairs of bfloat16, and with AMX."""
    missing = CpuFused().refuse(problem().routed)
    if missing is not None:
        pytest.skip(missing)
    from collegium.kernels import cpu_fused as device

    if request.param != "tiles":
        monkeypatch.setattr(device, "has_tiles", lambda: False)
    if request.param in ("vectors", "avx2"):
        monkeypatch.setattr(device, "_host", lambda feature: (feature, request.param) == ("avx512f", "vectors"))
        monkeypatch.setattr(device, "PAIR_BYTES", 8)
        monkeypatch.setattr(device, "_compiled", lambda: compiled(request.param))
    return CpuFused()


def make_weights(name, experts, hidden, wide, *, parts=2, bias=True):
    kind = by_name(name)
    return ExpertWeights(
        gate_up=kind.encode(heavy_tailed(experts, parts, wide, hidden, seed=1) / hidden**0.5),
        down=kind.encode(heavy_tailed(experts, hidden, wide, seed=2) / wide**0.5),
        gate_up_bias=heavy_tailed(experts, parts, wide, seed=3) if bias else None,
        down_bias=heavy_tailed(experts, hidden, seed=4) if bias else None,
    )


def make_batch(counts, hidden, *, dropped=0, weighted=False, dtype=torch.bfloat16):
    rows = sum(counts) + dropped
    return ContiguousBatch(
        x=heavy_tailed(max(1, rows), hidden, seed=5).to(dtype),
        source=torch.randperm(max(1, rows))[:rows],
        expert_offsets=torch.tensor([0, *counts]).cumsum(0),
        input_weights=torch.rand(rows) if weighted else None,
    )


def alone(batch, row):
    """Return a batch of one row of ``batch``."""
    own = None if batch.input_weights is None else batch.input_weights[row : row + 1]
    offsets = (batch.expert_offsets > row).long()
    return replace(batch, source=batch.source[row : row + 1], expert_offsets=offsets, input_weights=own)


def truth(batch, weights, activation=None):
    """Float32 sums of the weights as decoded, rounded to bfloat16 as the recipe says; rows have the dtype of x."""
    from collegium.ops.activation import activate

    def decoded(payload):
        values = payload.decode(torch.float32)
        scaled_after = isinstance(payload, MxFp4 | NvFp4 | MxFp8 | Fp8Channel | Fp8Tensor)
        return values if scaled_after else values.bfloat16().float()

    result = torch.full((batch.source.numel(), weights.down.shape[1]), torch.nan)
    for expert in range(weights.down.shape[0]):
        for row in range(int(batch.expert_offsets[expert]), int(batch.expert_offsets[expert + 1])):
            x = batch.x[batch.source[row]].float()
            if batch.input_weights is not None:
                x = (x * batch.input_weights[row]).to(batch.x.dtype).float()
            inner = decoded(weights.gate_up[expert]) @ x
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[expert]
            hidden = activate(inner[None], activation or ActivationSpec())[0].to(batch.x.dtype).float()
            result[row] = decoded(weights.down[expert]) @ hidden
            if weights.down_bias is not None:
                result[row] += weights.down_bias[expert]
    return result


def judge(kernel, batch, weights, activation=None, most=1e-3, like=None):
    packed = kernel.pack(weights, problem(weights.down.name, activation).routed)
    used = int(batch.expert_offsets[-1])
    found, wanted = packed.run(batch)[:used], truth(like or batch, weights, activation)[:used]
    assert found.dtype == torch.float32
    # Sums in another order can round a hidden value to its neighbour in bfloat16, no more.
    error = float((found - wanted).norm() / wanted.norm())
    assert error <= most, f"relative L2 error {error}"


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("hidden", "wide", "bias"), [(64, 32, True), (320, 192, False), (192, 64, True)])
def test_bf16_weights_are_not_copied(kernel, hidden, wide, bias, weighted):
    weights = make_weights("bf16", 5, hidden, wide, bias=bias)
    packed = CpuGrouped().pack(weights, problem("bf16").routed)
    both = packed._as_fused()
    assert both is not None
    assert both[0].codes.data_ptr() == weights.gate_up.values.data_ptr(), "the weights were copied"
    batch = make_batch([1, 0, 6, 19, 40], hidden, dropped=3, weighted=weighted)
    used = int(batch.expert_offsets[-1])
    found, wanted = packed.run(batch)[:used].float(), truth(batch, weights)[:used]
    assert float((found - wanted).norm() / wanted.norm()) <= (1e-3 if bias else 3e-3)  # without biases in bfloat16

    for row in (0, 3, 5, 6, 25, 40):
        assert torch.equal(packed.run(alone(batch, row))[0].float(), found[row]), (
            "a row's bits depend on the rows beside it"
        )

    packed.put(2, tuple(tensor.clone() for tensor in packed.take(1)))
    moved = truth(batch, weights)[:used]  # which lie where the packed ones do
    assert not torch.equal(moved, wanted)
    assert float((packed.run(batch)[:used].float() - moved).norm() / moved.norm()) <= (1e-3 if bias else 3e-3)


@pytest.mark.parametrize(("hidden", "wide"), [(64, 33), (90, 64), (64, 48)])
def test_unsupported_sizes_use_the_library(kernel, hidden, wide):
    weights, batch = make_weights("bf16", 3, hidden, wide), make_batch([1, 0, 9], hidden)
    packed = CpuGrouped().pack(weights, problem("bf16").routed)
    assert packed._as_fused() is None
    wanted = truth(batch, weights)
    assert float((packed.run(batch) - wanted).norm() / wanted.norm()) <= 2e-2


def test_strided_rows_use_the_library(kernel):
    weights, batch = make_weights("bf16", 3, 64, 64, bias=False), make_batch([1, 0, 9], 64)
    apart = replace(weights.down, values=weights.down.values.transpose(1, 2).contiguous().transpose(1, 2))
    packed = CpuGrouped().pack(replace(weights, down=apart), problem("bf16").routed)
    assert packed._as_fused() is None
    wanted = truth(batch, weights)
    assert float((packed.run(batch) - wanted).norm() / wanted.norm()) <= 2e-2


@pytest.mark.each_choice
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("hidden", "wide"), [(90, 33), (64, 64), (300, 130), (31, 1)])
def test_run_matches_truth(kernel, name, hidden, wide):
    judge(kernel, make_batch([1, 0, 6, 19, 40], hidden, dropped=3), make_weights(name, 5, hidden, wide))


@pytest.mark.each_choice
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("hidden", "wide", "weighted"), [(90, 33, False), (64, 64, True)])
def test_float16_rows_keep_all_their_bits(kernel, name, hidden, wide, weighted):
    weights = make_weights(name, 5, hidden, wide)
    batch = make_batch([1, 0, 6, 19, 40], hidden, dropped=3, weighted=weighted, dtype=torch.float16)
    judge(kernel, batch, weights, most=2e-4)
    with pytest.raises(AssertionError, match="relative L2 error"):  # as rows of bfloat16 would be
        judge(kernel, replace(batch, x=batch.x.bfloat16().half()), weights, most=2e-4, like=batch)
    packed = kernel.pack(weights, problem(name).routed)
    wanted = packed.run(batch)
    for row in (0, 3, 5, 6, 25, 40):
        assert torch.equal(packed.run(alone(batch, row))[0], wanted[row]), "a row's bits depend on the rows beside it"


def test_fp16_infinity_stays_in_its_row(kernel):
    batch = make_batch([3, 0, 2], 64, dtype=torch.float16)
    packed = kernel.pack(make_weights("mxfp4", 3, 64, 64), problem("mxfp4").routed)
    wanted = packed.run(batch)
    token = int(batch.source[1])
    batch.x[token, 5] = torch.inf
    found = packed.run(batch)
    assert not found[1].isfinite().any()
    others = [row for row in range(5) if row != 1]
    assert torch.equal(found[others], wanted[others])
    where, own = (torch.tensor([0]), torch.tensor([0, 1])), batch.x[token : token + 1]
    found, wanted = (packed.gate_up[0].multiply(x, *where) for x in (own, own.bfloat16()))
    assert found.isinf().any()
    assert torch.equal(found.isinf(), wanted.isinf()), "no NaN of what is left of an infinity"


def affine(kind, *shape, group=32, dtype=torch.float16):
    *lead, columns = shape
    own, lines = min(group, columns), (*lead, -(-columns // min(group, columns)))
    order = {}
    if kind in (Int4Ordered, Int8Ordered):
        # Each matrix has an order of its own, and groups of any size.
        heads = [
            torch.randint(0, lines[-1], (columns,), dtype=torch.int32) for _ in range(torch.Size(lead[:-1]).numel())
        ]
        order = {"group_of": torch.stack(heads).view(*lead[:-1], columns)}
    return kind(
        shape=shape,
        codes=torch.randint(0, 256, (*lead, -(-columns * kind.bits // 8)), dtype=torch.uint8),
        scales=((torch.rand(*lines) + 0.1) / (2**kind.bits * columns**0.5 / 4)).to(dtype),
        zeros=torch.randint(0, 2**kind.bits, lines, dtype=torch.uint8),
        group_size=own,
        **order,
    )


def blocks(title, *shape):
    kind = KINDS[title]
    found = torch.randint(0, 256, (*shape[:-1], -(-shape[-1] // kind.elements), kind.nbytes), dtype=torch.uint8)
    for index in range(kind.terms):
        write_half(title, found, index, heavy_tailed(*found.shape[:-1], seed=index) * 2**-6 / shape[-1] ** 0.5)
    if not kind.terms:
        found[..., 0] = torch.randint(118, 124, found.shape[:-1])
    return Gguf(shape=shape, blocks=found, title=title)


def looked_up(*shape):
    *lead, columns = shape
    size = 2 if columns % 64 else 64
    return Bnb4(
        shape=shape,
        codes=torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8),
        scales=heavy_tailed(*lead, columns // size, seed=11) / columns**0.5,
        table=heavy_tailed(*lead[:-1], 16, seed=12),
        group_size=size,
    )


READ = {
    **{title: lambda *shape, title=title: blocks(title, *shape) for title in KINDS},
    **{kind.name: lambda *shape, kind=kind: affine(kind, *shape) for kind in (Int8Affine, Int4Ordered, Int8Ordered)},
    "bnb4": looked_up,
}


@pytest.mark.each_choice
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(("hidden", "wide"), [(256, 512), (90, 34)])
def test_formats_that_are_only_read(kernel, name, hidden, wide):
    bias = heavy_tailed(5, 2, wide, seed=3)
    weights = ExpertWeights(
        gate_up=READ[name](5, 2, wide, hidden), down=READ[name](5, hidden, wide), gate_up_bias=bias, down_bias=None
    )
    # Zeros and offsets of any size leave sums that cancel.
    for dtype, most in ((torch.bfloat16, 3e-3), (torch.float16, 1e-3)):
        judge(kernel, make_batch([1, 0, 6, 19, 40], hidden, dropped=3, dtype=dtype), weights, most=most)


@pytest.mark.each_choice
@pytest.mark.parametrize("name", READ)
def test_read_only_codes_rounded_once(kernel, name):
    """Rows of x with a single one read single weights."""
    payload = READ[name](2, 70, 512)
    matrix = pack_fused(payload, None, "down")
    found = matrix.multiply(torch.eye(512).bfloat16().repeat(2, 1), torch.tensor([0, 1]), torch.tensor([0, 512, 1024]))[
        :, :70
    ]
    found, wanted = found.view(2, 512, 70).transpose(1, 2), payload.decode(torch.float32).bfloat16().float()
    # A row's largest E8M0 scale multiplies the sum; a bfloat16 that is subnormal may become zero.
    assert torch.equal(found, wanted.masked_fill(wanted.abs() < 2.0**-126, 0.0))


@pytest.mark.parametrize("kind", [Int4Affine, Int8Affine])
def test_zero_points_subtracted_before_fp32_scaling(kernel, kind):
    """A scale of 24 bits times a zero is not exact: a code that is the zero would not become one."""
    payload = affine(kind, 1, 64, 512, dtype=torch.float32)
    found = pack_fused(payload, None, "down").multiply(
        torch.eye(512).bfloat16(), torch.tensor([0]), torch.tensor([0, 512])
    )
    assert torch.equal(found.T, payload.decode(torch.float32).bfloat16().float()[0])


@pytest.mark.parametrize("kind", [Int4Ordered, Int8Ordered])
def test_column_slice_with_activation_order(kernel, kind):
    whole = affine(kind, 2, 70, 512)
    order = torch.stack([torch.randperm(512) // 32 for _ in range(2)]).int()
    part = replace(whole, group_of=order).columns(128, 384)
    matrix = pack_fused(part, None, "down")
    where = torch.tensor([0, 1]), torch.tensor([0, 256, 512])
    found = matrix.multiply(torch.eye(256).bfloat16().repeat(2, 1), *where)[:, :70].view(2, 256, 70).transpose(1, 2)
    assert torch.equal(found, part.decode(torch.float32).bfloat16().float())
    assert matrix.codes.shape[2] < 256, "less than twice the columns"


@pytest.mark.each_choice
@pytest.mark.parametrize("name", READ)
def test_read_only_formats_are_batch_invariant(kernel, name):
    weights = ExpertWeights(gate_up=READ[name](2, 2, 64, 256), down=READ[name](2, 256, 64))
    packed, x = kernel.pack(weights, problem(weights.down.name).routed), heavy_tailed(30, 256, seed=8).bfloat16()

    def run(source, counts):
        return packed.run(ContiguousBatch(x=x, source=source, expert_offsets=torch.tensor([0, *counts]).cumsum(0)))

    alone = torch.cat([run(torch.tensor([row]), [0, 1]) for row in range(30)])
    for count in (3, 17, 30):
        order = torch.randperm(30)[:count]
        assert torch.equal(run(torch.cat([order, order]), [count, count])[count:], alone[order])


@pytest.mark.parametrize("name", READ)
def test_packed_bytes_are_near_those_published(name):
    wide = 2048
    payload = affine(by_name(name), 2, 256, wide, group=128) if name.startswith("int") else READ[name](2, 256, wide)
    if "group_of" in payload.tensors():  # as published: all groups have the same size
        order = torch.stack([torch.randperm(wide) // 128 for _ in range(2)]).int()
        payload = replace(payload, group_of=order)
    packed = pack_fused(payload, None, "down")
    found = sum(getattr(packed, name).nbytes for name in panels.TENSORS if getattr(packed, name) is not None)
    codes = 2 * 256 * wide
    # Codes of less than four bits take four, and up to one more for the scales of their runs of columns.
    published = codes * 5 // 8 if payload.nbytes < codes // 2 else payload.nbytes
    assert found <= 1.05 * published


@pytest.mark.each_choice
@pytest.mark.parametrize("name", ["bf16", "mxfp4", "int4_group"])
@pytest.mark.parametrize("lie", ["in a larger tensor", "transposed", "the same for all"])
def test_biases_may_lie_anyhow(kernel, name, lie):
    weights, x = make_weights(name, 3, 64, 64), heavy_tailed(9, 64, seed=5).bfloat16()
    first, second = weights.gate_up_bias.view(3, 128), weights.down_bias
    if lie == "the same for all":
        biases = first[:1].expand(3, 128), second[:1].expand(3, 64)
    elif lie == "transposed":
        biases = first.t().contiguous().t(), second.t().contiguous().t()
    else:
        biases = first.repeat(1, 2)[:, :128], second.repeat(1, 2)[:, :64]
    assert not any(bias.is_contiguous() for bias in biases)
    ids = torch.arange(9).view(9, 1) // 3
    found = moe(x, weights.gate_up, weights.down, ids, torch.ones(9, 1), biases=biases).float()
    weights = replace(weights, gate_up_bias=biases[0].reshape(3, 2, 64), down_bias=biases[1])
    batch = ContiguousBatch(x=x, source=torch.arange(9), expert_offsets=torch.tensor([0, 3, 6, 9]))
    wanted = truth(batch, weights)
    assert float((found - wanted).norm() / wanted.norm()) <= 5e-3


@pytest.mark.parametrize("switch", ["NUMBA_CPU_NAME=generic", "NUMBA_ENABLE_AVX=0", "NUMBA_DISABLE_JIT=1"])
def test_disabled_numba_is_named(tmp_path, switch):
    """In a process of its own, which LLVM ended before."""
    pytest.importorskip("numba")
    if panels.missing_requirement() is not None:
        pytest.skip("no machine code here")
    program = f"""
import torch
from collegium import load_layer
layer = load_layer({str(SHIPPED)!r}, 2, device="cpu", weight_format="mxfp4")
assert layer(torch.randn(3, 256).bfloat16()).isfinite().all()
print(layer.plan.explain())
"""
    name, value = switch.split("=")
    environment = {**os.environ, name: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(f"cpu_fused: .*{switch}.*unset", done.stdout)


def test_openmp_runtime_located_among_other_files(kernel, monkeypatch, tmp_path):
    """Also in a folder with a space in its name, beside a library that was replaced and a file that is none."""
    from collegium.kernels import cpu_fused as device

    if device._parallel() is None:
        pytest.skip("torch has no such runtime here")
    maps = Path("/proc/self/maps").read_text()
    own = next(line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line or "omp" in line[-20:])
    moved = tmp_path / "with a space" / Path(own).name
    moved.parent.mkdir()
    shutil.copy(own, moved)
    begin = "7f0000000000-7f0000001000 r-xp 00000000 00:00 1 "
    other = tmp_path / "libgomp notes"
    other.write_text("no library")
    listed = "".join(f"{begin}{path}\n" for path in (f"/gone/{Path(own).name} (deleted)", other, moved))
    monkeypatch.setattr(Path, "read_text", lambda path: listed)
    found = device._parallel.__wrapped__()
    assert found is not None


def test_tile_shapes_live_for_a_call(monkeypatch):
    """Two threads that call for the first time may each make them; only one pair is kept."""
    device = pytest.importorskip("collegium.kernels.cpu_fused")
    alive, seen = [], []

    def shapes():
        made = type("Shapes", (np.ndarray,), {})((17, 64), dtype=np.uint8)
        alive.append(weakref.ref(made))
        return made

    work = SimpleNamespace(ctypes=lambda address: seen.append(alive[0]() is not None))
    monkeypatch.setattr(device, "_shapes", shapes)
    monkeypatch.setattr(device, "_compiled", lambda: work)
    device.run(np.zeros(len(device.FIELDS), dtype=np.int64), 1)
    assert seen == [True]


def test_threads_without_the_runtime_of_torch(kernel, monkeypatch):
    from collegium.kernels import cpu_fused as device

    packed, batch = kernel.pack(make_weights("mxfp4", 3, 64, 96), problem().routed), make_batch([1, 9, 30], 64)
    started, before = [], torch.get_num_threads()
    wanted = packed.run(batch)

    def pool(threads):
        started.append(threads)
        return ThreadPoolExecutor(threads)

    monkeypatch.setattr(device, "_parallel", lambda: None)
    monkeypatch.setattr(device, "ThreadPoolExecutor", pool)
    torch.set_num_threads(3)
    try:
        assert torch.equal(packed.run(batch), wanted)
    finally:
        torch.set_num_threads(before)
    assert started == [3, 3]


@pytest.mark.parametrize(
    ("group", "dtype"), [(8, torch.float16), (32, torch.bfloat16), (128, torch.float32), (130, torch.float16)]
)
def test_run_with_groups_and_zero_points(kernel, group, dtype):
    for kind in (Int4Affine, Int8Affine):
        gate_up, down = (affine(kind, *shape, group=group, dtype=dtype) for shape in ((3, 2, 33, 130), (3, 130, 33)))
        judge(kernel, make_batch([3, 0, 9], 130), ExpertWeights(gate_up=gate_up, down=down))
    grouped = [
        Int4Group.encode(heavy_tailed(*shape, seed=6) / 10, group_size=group, scale_dtype=dtype)
        for shape in ((3, 2, 48, 130), (3, 130, 48))
    ]
    judge(kernel, make_batch([3, 0, 9], 130), ExpertWeights(gate_up=grouped[0], down=grouped[1]))


@pytest.mark.parametrize("name", NAMES)
def test_every_code_and_scale_decodes_exactly(kernel, name):
    """Rows of x with a single one read single weights."""
    payload = by_name(name).encode(heavy_tailed(2, 70, 160, seed=7) * torch.logspace(-6, 3, 70)[:, None])
    codes = torch.randint(0, 256, payload.codes.shape, dtype=torch.uint8)
    if name in FLOATS:
        codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
        assert len(codes.view(torch.uint8).unique()) == 254
    payload = replace(payload, codes=codes)
    if name == "nvfp4":  # all bytes that are allowed, subnormal ones too
        scales = torch.arange(payload.scales.numel()).remainder(126).to(torch.uint8).view(payload.scales.shape) + 1
        payload = replace(payload, scales=scales.view(torch.float8_e4m3fn))
    elif name in ("mxfp4", "mxfp8"):
        scales = torch.arange(payload.scales.numel()).remainder(200).to(torch.uint8).view(payload.scales.shape) + 20
        payload = replace(payload, scales=scales)
    matrix = pack_fused(payload, None, "down")
    eye = torch.eye(160).bfloat16()
    found = matrix.multiply(eye.repeat(2, 1), torch.tensor([0, 1]), torch.tensor([0, 160, 320]))[:, :70]
    wanted = payload.decode(torch.float32)
    wanted = (wanted.bfloat16() if name in ("int4_group", "fp8_block") else wanted).float()
    # What is 2^-120 of the largest weight of its row may become zero.
    rough = wanted.abs() < wanted.abs().amax(-1, keepdim=True) * 2.0**-120
    found = found.view(2, 160, 70).transpose(1, 2)
    # A global scale multiplies the sum here, the group's scale in ``decode``: one rounding of float32 each.
    torch.testing.assert_close(found[~rough], wanted[~rough], rtol=2.0**-23 if name == "nvfp4" else 0.0, atol=0.0)
    assert bool((found[rough].abs() <= wanted[rough].abs()).all())


@pytest.mark.parametrize("block", [(64, 48), (1, 32), (128, 256)])
def test_blocks_of_other_sizes(kernel, block):
    gate_up, down = heavy_tailed(3, 2, 70, 200, seed=1) / 14, heavy_tailed(3, 200, 70, seed=2) / 8
    made = ExpertWeights(
        gate_up=Fp8Block.encode(gate_up, block=block), down=Fp8Block.encode(down, block=block),
        gate_up_bias=None, down_bias=None,
    )  # fmt: skip
    judge(kernel, make_batch([2, 0, 9], 200), made)


def test_odd_block_width_refused(kernel):
    payload = Fp8Block.encode(heavy_tailed(1, 64, 70, seed=2), block=(64, 35))
    with raises_with(InputError, "(64, 35)"):
        pack_fused(payload, None, "down")


@pytest.mark.parametrize("counts", [[40, 0, 0], [0, 0, 1], [600, 8, 1], [0, 12, 0]])
def test_hot_and_empty_experts(kernel, counts):
    judge(kernel, make_batch(counts, 64), make_weights("mxfp4", 3, 64, 96))


def test_no_rows(kernel):
    assert kernel.pack(make_weights("nvfp4", 3, 64, 96), problem("nvfp4").routed).run(
        make_batch([0, 0, 0], 64)
    ).shape == (0, 64)


def test_input_weights_come_first(kernel):
    judge(kernel, make_batch([3, 1, 5], 130, weighted=True), make_weights("nvfp4", 3, 130, 66))


@pytest.mark.parametrize(
    "activation",
    [ActivationSpec(limit=0.5), ActivationSpec(kind="swiglu_oai", limit=1.0), ActivationSpec(kind="relu2")],
    ids=lambda a: a.kind,
)
def test_every_activation(kernel, activation):
    parts = 2 if activation.gated else 1
    judge(kernel, make_batch([2, 5, 0], 64), make_weights("int4_group", 3, 64, 48, parts=parts), activation)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_batch_invariant(kernel, name):
    packed = kernel.pack(make_weights(name, 2, 200, 70), problem(name).routed)
    x = heavy_tailed(50, 200, seed=8).bfloat16()

    def run(source, counts):
        return packed.run(ContiguousBatch(x=x, source=source, expert_offsets=torch.tensor([0, *counts]).cumsum(0)))

    alone = torch.cat([run(torch.tensor([row]), [0, 1]) for row in range(50)])
    for count in (2, 5, 6, 7, 15, 16, 17, 33, 50):
        order = torch.randperm(50)[:count]
        found = run(torch.cat([order, order]), [count, count])[count:]
        assert torch.equal(found, alone[order])


def test_a_row_of_nan_stays_alone(kernel):
    packed = kernel.pack(make_weights("mxfp4", 1, 64, 64), problem().routed)
    batch = make_batch([20], 64)
    before = packed.run(batch)
    batch.x[batch.source[3]] = torch.nan
    after = packed.run(batch)
    assert bool(after[3].isnan().all())
    assert torch.equal(torch.cat([before[:3], before[4:]]), torch.cat([after[:3], after[4:]]))


@pytest.mark.parametrize("bits", [0x7FFF, 0x7F81, -1])
def test_int4_nan_scale_propagates(kernel, bits):
    weights = make_weights("int4_group", 1, 64, 64, bias=False)
    weights.down.scales.view(torch.int16)[0, 5, 1] = bits
    found = kernel.pack(weights, problem("int4_group").routed).run(make_batch([2], 64))
    assert bool(found[:, 5].isnan().all())
    assert int(found.isnan().sum()) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_concurrent_threads_with_torch_products(kernel, threads):
    packed = kernel.pack(make_weights("nvfp4", 3, 128, 96), problem("nvfp4").routed)
    batches = [make_batch(counts, 128) for counts in ([1, 0, 0], [3, 7, 30], [0, 17, 2])]
    left, right = heavy_tailed(64, 256, seed=9).bfloat16(), heavy_tailed(256, 64, seed=10).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wanted, product = [packed.run(batch) for batch in batches], left @ right

        def work(turn):
            with torch.inference_mode():
                torch.set_num_threads(threads)
                return all(
                    torch.equal(packed.run(batches[(turn + i) % 3]), wanted[(turn + i) % 3])
                    and torch.equal(left @ right, product)
                    for i in range(20)
                )

        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(work, range(4)))
    finally:
        torch.set_num_threads(before)


def test_bits_independent_of_thread_count(kernel):
    packed = kernel.pack(make_weights("mxfp4", 3, 128, 96), problem().routed)
    batch, before = make_batch([1, 9, 30], 128), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(packed.run(batch))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_pack_refuses_what_it_cannot_read(kernel):
    weights = make_weights("mxfp4", 3, 64, 64)
    weights.down.scales[1, 5, 1] = 255
    with raises_with(BadScaleError, "expert 1", "mxfp4"):
        kernel.pack(weights, problem().routed)


@pytest.mark.parametrize("name", NAMES)
def test_packed_bytes(kernel, name):
    kind = by_name(name)
    more = {"group_size": 128} if kind is Int4Group else {}
    payload = kind.encode(torch.randn(2, 256, 512), **more)
    packed = kernel.pack(ExpertWeights(gate_up=payload, down=payload), problem(name).routed)
    assert 2 * packed.slot_bytes <= 2 * 1.04 * payload.nbytes


def test_the_plan_says_why_not(monkeypatch):
    monkeypatch.setattr(panels, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(panels.sys, "platform", "linux")
    made = plan(problem())
    assert made.kernel == "cpu_grouped"
    assert "pip install 'collegium[cpu]'" in made.explain()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert re.search("cpu_fused: .*DEFAULT.*linux.*AVX2", plan(problem()).explain())


def test_refuse_gives_reasons():
    kernel, good = CpuFused(), problem()
    cuda = DeviceFacts(kind="cuda", capability=(9, 0))
    assert_values(str(kernel.refuse(replace(good, device=cuda).routed)), "cuda", "cpu")
    assert_values(str(kernel.refuse(replace(good, dtype="fp32").routed)), "fp32", "bf16 or fp16")
    assert_values(str(kernel.refuse(replace(good, activation_format="mxfp8").routed)), "mxfp8", "bf16 or fp16")
    assert_values(str(kernel.refuse(problem("bf16").routed)), "bf16", "mxfp4")
    assert_values(str(kernel.refuse(problem("bnb4", hidden=63).routed)), "bnb4", 63, 64)


def test_the_order_of_scales():
    device = pytest.importorskip("collegium.kernels.cpu_fused")
    names = ["uint8", "float8_e4m3fn", "int8", "bfloat16", "float16", "float32"]
    assert [str(dtype).removeprefix("torch.") for dtype in panels._SCALES] == names
    assert device.SCALES == ("e8m0", "e4m3", "int8", "bf16", "fp16", "fp32")
