"""Integer and bitsandbytes checkpoints as published: decoded against the definition, loaded, audited, run.

The decoders of this file follow the definition of each packing, element by element, and share nothing with the
library. Words are random, so every bit of them counts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from collegium import load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts
from collegium.errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    InputError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from collegium.formats import FORMATS, Bnb4, Fp32, Int4Affine, Int4Group, Int4Ordered, Int8Affine, Int8Ordered
from collegium.layer import MoELayer
from collegium.parallel.placement import linear, tensor_parallel
from collegium.planning import plan
from collegium.problem import Overrides
from collegium.types import ExpertWeights
from raising import raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Parts = dict[str, Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32


def words(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32))


def scales(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.from_numpy(np.exp(rng.standard_normal(shape) - 4).astype(np.float32)).to(dtype)


def fields(tensor: Tensor, word: np.ndarray, shift: np.ndarray, bits: int) -> np.ndarray:
    """Bits ``shift`` and following of ``tensor[word]`` as unsigned integers."""
    return (tensor.numpy().view(np.uint32)[word].astype(np.int64) >> shift) & (2**bits - 1)


def affine(parts: Parts, bits: int, packing: str) -> Tensor:
    """Decode GPTQ or AWQ parts by definition, to ``[N, K]``."""
    scale = parts[".scales"].float().numpy()
    columns = scale.shape[1]
    per = 32 // bits
    if packing == "awq":
        k_in = parts[".qweight"].shape[0]
        group_of = np.arange(k_in) // -(-k_in // scale.shape[0])
    else:
        group_of = parts[".g_idx"].numpy()
        k_in = len(group_of)
    k, n = np.meshgrid(np.arange(k_in), np.arange(columns), indexing="ij")
    g = group_of[k]
    if packing == "awq":
        place = np.array([AWQ_ORDER.index(j) for j in range(8)])[n % 8]
        code = fields(parts[".qweight"], (k, n // 8), 4 * place, 4)
        zero = fields(parts[".qzeros"], (g, n // 8), 4 * place, 4)
    else:
        code = fields(parts[".qweight"], (k // per, n), bits * (k % per), bits)
        zero = fields(parts[".qzeros"], (g, n // per), bits * (n % per), bits)
        zero = (zero + (packing == "gptq")) & (2**bits - 1)
    return torch.from_numpy(scale[g, n] * (code - zero).astype(np.float32)).T


def gptq_parts(
    rng: np.random.Generator, n: int, k: int, bits: int = 4, group: int = GROUP, order: bool = False
) -> Parts:
    per, groups = 32 // bits, -(-k // group)
    g_idx = np.arange(k) // group
    return {
        ".qweight": words(rng, k // per, n),
        ".qzeros": words(rng, groups, -(-n // per)),
        ".scales": scales(rng, groups, n),
        ".g_idx": torch.from_numpy((rng.permutation(g_idx) if order else g_idx).astype(np.int32)),
    }


def awq_parts(rng: np.random.Generator, n: int, k: int, group: int = GROUP) -> Parts:
    return {
        ".qweight": words(rng, k, n // 8),
        ".qzeros": words(rng, -(-k // group), n // 8),
        ".scales": scales(rng, -(-k // group), n),
    }


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def test_gptq_worked_example() -> None:
    parts = {
        ".qweight": torch.tensor([[0xFBA98710 - 2**32] * 8], dtype=torch.int32),
        ".qzeros": torch.tensor([[0x77777777]], dtype=torch.int32),
        ".scales": torch.full((1, 8), 0.5, dtype=torch.float16),
        ".g_idx": torch.zeros(8, dtype=torch.int32),
    }
    wanted = [[-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 1.5, 3.5]] * 8
    for form in (Int4Group, Int4Affine):
        assert form.from_parts(parts, storage="gptq", shape=(8, 8)).decode().tolist() == wanted
    second = {**parts, ".qzeros": torch.tensor([[0x88888888 - 2**32]], dtype=torch.int32)}
    assert Int4Group.from_parts(second, storage="gptq_v2", shape=(8, 8)).decode().tolist() == wanted
    with raises_with(TensorMismatchError, "zero points", "7 to 7", "8"):
        Int4Group.from_parts(parts, storage="gptq_v2", shape=(8, 8))


def test_awq_worked_example() -> None:
    parts = {
        ".qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        ".qzeros": torch.tensor([[0x33333333]], dtype=torch.int32),
        ".scales": torch.full((1, 8), 2.0, dtype=torch.float16),
    }
    payload = Int4Affine.from_parts(parts, storage="awq", shape=(8, 1))
    assert payload.decode().flatten().tolist() == [-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("packing", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(40, 96, 32), (24, 88, 32), (16, 64, 64), (33, 72, 24)])
def test_gptq_decodes_by_definition(bits: int, packing: str, order: bool, n: int, k: int, group: int) -> None:
    parts = gptq_parts(np.random.default_rng(n), n, k, bits, group, order)
    form = {4: Int4Ordered if order else Int4Affine, 8: Int8Ordered if order else Int8Affine}[bits]
    payload = form.from_parts(parts, storage=packing, shape=(n, k), group_size=group)
    truth = affine(parts, bits, packing)
    assert same(payload.decode(), truth)
    assert same(payload.decode(torch.bfloat16), truth.bfloat16())
    assert not payload.faults()
    assert same(payload.rows(8, 16).decode(), truth[8:16])
    step = 8 if order or group >= k else group
    assert same(payload.columns(step, 2 * step).decode(), truth[:, step : 2 * step])
    assert same(payload.columns(step, k).rows(3, n).decode(), truth[3:, step:])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 5), k=st.integers(1, 90), group=st.sampled_from([8, 32, 128]))
def test_awq_decodes_by_definition(seed: int, n: int, k: int, group: int) -> None:
    parts = awq_parts(np.random.default_rng(seed), 8 * n, k, group)
    payload = Int4Affine.from_parts(parts, storage="awq", shape=(8 * n, k), group_size=group)
    g = torch.arange(k) // group
    truth = affine({**parts, ".scales": parts[".scales"]}, 4, "awq") if group >= k or k % group == 0 else None
    if truth is None:
        whole = {
            ".qweight": torch.cat((parts[".qweight"], parts[".qweight"].new_zeros(-k % group, n))),
            ".qzeros": parts[".qzeros"],
            ".scales": parts[".scales"],
        }
        truth = affine(whole, 4, "awq")[:, :k]
    assert int(g[-1]) < parts[".scales"].shape[0]
    assert same(payload.decode(), truth)


def test_several_matrices_keep_their_own_order() -> None:
    rng = np.random.default_rng(0)
    each = [gptq_parts(rng, 16, 64, order=True) for _ in range(6)]
    payloads = [Int4Ordered.from_parts(p, storage="gptq", shape=(16, 64), group_size=32) for p in each]
    stack = payloads[0].repeated(2).repeated(3)
    for slot, payload in enumerate(payloads):
        stack[slot // 2].put(slot % 2, payload)
    truth = torch.stack([affine(p, 4, "gptq") for p in each]).view(3, 2, 16, 64)
    assert same(stack.decode(), truth)
    assert same(stack[1].decode(), truth[1])
    assert stack.faults().shape == (3, 2)


@pytest.mark.parametrize("bad", [-1, 3, 2**30])
def test_group_index_out_of_range(bad: int) -> None:
    parts = gptq_parts(np.random.default_rng(0), 16, 96, order=True)
    parts[".g_idx"][17] = bad
    with pytest.raises(TensorMismatchError, match=rf"g_idx .*{bad}.*0 to 2"):
        Int4Ordered.from_parts(parts, storage="gptq", shape=(16, 96), group_size=32)
    with raises_with(TensorMismatchError, "g_idx"):
        Int4Affine.from_parts(parts, storage="gptq", shape=(16, 96), group_size=32)


def test_declared_order_needs_an_index() -> None:
    parts = gptq_parts(np.random.default_rng(0), 16, 96)
    del parts[".g_idx"]
    with raises_with(MissingTensorError, "int4_ordered", "'.g_idx'"):
        Int4Ordered.from_parts(parts, storage="gptq", shape=(16, 96), group_size=32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_forbidden_scales(value: float) -> None:
    parts = gptq_parts(np.random.default_rng(0), 16, 96)
    parts[".scales"][1, 5] = value
    payload = Int4Affine.from_parts(parts, storage="gptq", shape=(16, 96), group_size=32)
    assert bool(payload.faults())


def test_zero_scale_with_zero_points_allowed() -> None:
    parts = gptq_parts(np.random.default_rng(0), 8, 32)
    parts[".qweight"].fill_(0x33333333)
    parts[".qzeros"].fill_(0x22222222)
    parts[".scales"].zero_()
    payload = Int4Affine.from_parts(parts, storage="gptq", shape=(8, 32), group_size=32)
    assert not payload.faults()
    assert payload.decode().abs().max() == 0


def test_a_bias_must_be_zero() -> None:
    parts = {**gptq_parts(np.random.default_rng(0), 16, 96), ".bias": torch.zeros(16, dtype=torch.float16)}
    Int4Affine.from_parts(parts, storage="gptq", shape=(16, 96), group_size=32)
    parts[".bias"][3] = 1
    with raises_with(TensorMismatchError, "bias"):
        Int4Affine.from_parts(parts, storage="gptq", shape=(16, 96), group_size=32)


@pytest.mark.parametrize("suffix", [".qweight", ".qzeros", ".scales"])
def test_wrong_shapes_are_refused(suffix: str) -> None:
    for form, parts in ((Int4Affine, gptq_parts), (Int4Affine, awq_parts)):
        found = parts(np.random.default_rng(0), 16, 96)
        found[suffix] = found[suffix][:, :-1]
        storage = "awq" if parts is awq_parts else "gptq"
        with pytest.raises(TensorMismatchError, match=rf"{suffix} .*\[16, 96\]"):
            form.from_parts(found, storage=storage, shape=(16, 96), group_size=32)


@pytest.mark.parametrize("name", [f.name for f in FORMATS if f.read_only])
def test_read_only_formats_say_so(name: str) -> None:
    form = next(f for f in FORMATS if f.name == name)
    with pytest.raises(InputError, match=rf"{name} is read-only.*encode into int4_group"):
        form.encode(torch.ones(8, 32))


# bitsandbytes


NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


def state(kind: str, shape: tuple[int, int], **more: object) -> Tensor:
    found = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape), **more}
    return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)


def bnb_parts(rng: np.random.Generator, n: int, k: int, kind: str = "nf4", nested: bool = False) -> Parts:
    blocks = -(-n * k // 64)
    parts = {
        ".weight": torch.from_numpy(rng.integers(0, 256, (-(-n * k // 2), 1), dtype=np.uint8)),
        ".weight.absmax": scales(rng, blocks, dtype=torch.float32),
        ".weight.quant_map": torch.tensor(NF4) if kind == "nf4" else torch.linspace(-1, 1, 16),
    }
    extra: dict[str, object] = {}
    if nested:
        extra = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0123}
        parts[".weight.absmax"] = torch.from_numpy(rng.integers(0, 256, blocks, dtype=np.uint8))
        parts[".weight.nested_absmax"] = scales(rng, -(-blocks // 256), dtype=torch.float32)
        parts[".weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = state(kind, (n, k), **extra)
    return parts


def bnb(parts: Parts, n: int, k: int, nested: bool) -> Tensor:
    """Decode by definition: element 2j of the flat matrix is the high nibble of byte j."""
    raw, table = parts[".weight"].numpy().reshape(-1), parts[".weight.quant_map"].numpy()
    out = np.empty(n * k, dtype=np.float32)
    for i in range(n * k):
        code = raw[i // 2] >> 4 if i % 2 == 0 else raw[i // 2] & 15
        scale = parts[".weight.absmax"].numpy()[i // 64]
        if nested:
            step = parts[".weight.nested_absmax"].numpy()[i // 64 // 256]
            scale = np.float32(parts[".weight.nested_quant_map"].numpy()[scale] * step) + np.float32(0.0123)
        out[i] = table[code] * np.float32(scale)
    return torch.from_numpy(out).view(n, k)


def test_nf4_worked_example() -> None:
    parts = {
        ".weight": torch.tensor([[0x7F], [0x0E]], dtype=torch.uint8),
        ".weight.absmax": torch.tensor([2.0]),
        ".weight.quant_map": torch.tensor(NF4),
        ".weight.quant_state.bitsandbytes__nf4": state("nf4", (1, 4)),
    }
    payload = Bnb4.from_parts(parts, storage="nf4", shape=(1, 4))
    assert payload.decode().flatten().tolist() == [0.0, 2.0, -2.0, 1.4459136724472046]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("n", "k"), [(12, 64), (300, 64), (9, 96), (5, 90), (3, 33)])
def test_bitsandbytes_decodes_by_definition(n: int, k: int, kind: str, nested: bool) -> None:
    parts = bnb_parts(np.random.default_rng(k), n, k, kind, nested)
    payload = Bnb4.from_parts(parts, storage=kind, shape=(n, k))
    truth = bnb(parts, n, k, nested)
    assert same(payload.decode(), truth)
    assert same(payload.rows(1, 3).decode(), truth[1:3])
    step = max(payload.group_size, 2)
    assert same(payload.columns(k // step * step - step, k).decode(), truth[:, k // step * step - step :])
    assert not payload.faults()
    typed = {**parts, ".weight": parts[".weight"].view(-1)[: n * k // 8 * 4].view(torch.bfloat16)}
    if n * k % 8 == 0:
        assert same(Bnb4.from_parts(typed, storage=kind, shape=(n, k)).decode(), truth)


STATE = ".weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("suffix", "value", "error", "text"),
    [
        (STATE, torch.tensor([123, 34], dtype=torch.uint8), CheckpointError, "not a JSON"),
        (STATE, state("fp4", (8, 64)), TensorMismatchError, r"\('fp4', 64, \[8, 64\]"),
        (STATE, state("nf4", (8, 65)), TensorMismatchError, r"\[8, 65\]"),
        (".weight.absmax", torch.ones(7), TensorMismatchError, r"absmax is \[7\], a logical \[8, 64\] needs \[8\]"),
        (".weight.absmax", torch.ones(8, dtype=torch.uint8), MissingTensorError, "nested_absmax, nested_quant_map"),
    ],
)  # fmt: skip
def test_broken_bitsandbytes(suffix: str, value: Tensor, error: type[Exception], text: str) -> None:
    parts = {**bnb_parts(np.random.default_rng(0), 8, 64), suffix: value}
    with pytest.raises(error, match=text):
        Bnb4.from_parts(parts, storage="nf4", shape=(8, 64))


# whole checkpoints

SIZE = TinySize(hidden=96, intermediate=64, experts=3, top_k=2, layers=1)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
NF = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HEAD = "model.layers.0.block_sparse_moe.experts."


def symmetric(rng: np.random.Generator, n: int, k: int) -> Parts:
    return {**gptq_parts(rng, n, k), ".qzeros": torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32)}


METHODS: dict[str, tuple[dict[str, Any], str, Callable[..., Parts], Callable[[Parts, int, int], Tensor]]] = {
    "gptq": (GPTQ, "int4_affine", gptq_parts, lambda p, n, k: affine(p, 4, "gptq")),
    "gptq symmetric": ({**GPTQ, "sym": True}, "int4_group", symmetric, lambda p, n, k: affine(p, 4, "gptq")),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"}, "int4_affine", gptq_parts, lambda p, n, k: affine(p, 4, "gptq_v2")
    ),
    "gptq v2 by its newer name": (
        {**GPTQ, "format": "gptq_v2"}, "int4_affine", gptq_parts, lambda p, n, k: affine(p, 4, "gptq_v2")
    ),
    "gptq 8 bits": (
        {**GPTQ, "bits": 8}, "int8_affine", lambda r, n, k: gptq_parts(r, n, k, 8), lambda p, n, k: affine(p, 8, "gptq")
    ),
    "gptq one group": (
        {**GPTQ, "group_size": -1}, "int4_affine", lambda r, n, k: gptq_parts(r, n, k, group=k),
        lambda p, n, k: affine(p, 4, "gptq"),
    ),
    "gptq ordered": (
        {**GPTQ, "desc_act": True}, "int4_ordered", lambda r, n, k: gptq_parts(r, n, k, order=True),
        lambda p, n, k: affine(p, 4, "gptq"),
    ),
    "awq": (AWQ, "int4_affine", awq_parts, lambda p, n, k: affine(p, 4, "awq")),
    "nf4": (NF, "bnb4", bnb_parts, lambda p, n, k: bnb(p, n, k, nested=False)),
    "nf4 nested": (
        NF, "bnb4", lambda r, n, k: bnb_parts(r, n, k, nested=True), lambda p, n, k: bnb(p, n, k, nested=True)
    ),
}  # fmt: skip


def write(folder: Path, method: str) -> dict[tuple[int, str], Tensor]:
    """Write a toy Mixtral with published names; return the decoded matrices by (expert, projection)."""
    block, _, make, decode = METHODS[method]
    tiny = write_checkpoint(folder, "mixtral", "bf16", size=SIZE)
    rng = np.random.default_rng(7)
    tensors = {name: t.contiguous() for name, t in tiny.tensors.items() if not name.startswith(HEAD)}
    truth: dict[tuple[int, str], Tensor] = {}
    for expert in range(SIZE.experts):
        for name in ("w1", "w3", "w2"):
            n, k = (SIZE.hidden, SIZE.intermediate) if name == "w2" else (SIZE.intermediate, SIZE.hidden)
            parts = make(rng, n, k)
            truth[expert, name] = decode(parts, n, k)
            tensors |= {f"{HEAD}{expert}.{name}{suffix}": t.contiguous() for suffix, t in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**tiny.config, "quantization_config": block}))
    return truth


def change(folder: Path, name: str, make: Callable[[Tensor], Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    made = make(tensors.pop(name, torch.empty(0)))
    if made is not None:
        tensors[name] = made.contiguous()
    save_file(tensors, file)


@pytest.mark.parametrize("method", METHODS)
def test_published_checkpoints_load_and_run(tmp_path: Path, method: str) -> None:
    truth = write(tmp_path, method)
    checkpoint = Checkpoint.open(tmp_path)
    report = audit(checkpoint)
    assert [entry.stored.name for entry in report.layers] == [METHODS[method][1]]
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(SIZE.experts))
    gate_up = torch.stack([torch.stack((truth[e, "w1"], truth[e, "w3"])) for e in range(SIZE.experts)])
    down = torch.stack([truth[e, "w2"] for e in range(SIZE.experts)])
    assert same(weights.gate_up.decode(), gate_up)
    assert same(weights.down.decode(), down)

    reference = Overrides(kernel="reference")
    layer = load_layer(tmp_path, 0, dtype="fp32", device="cpu", overrides=reference)
    problem = replace(layer.plan.problem, spec=replace(layer.plan.problem.spec, weight_format="fp32"))
    plain = MoELayer(
        ExpertWeights(
            gate_up=Fp32(values=gate_up, shape=tuple(gate_up.shape)), down=Fp32(values=down, shape=tuple(down.shape))
        ),
        plan(problem, reference),
    )
    x, logits = torch.randn(9, SIZE.hidden), torch.randn(9, SIZE.experts)
    assert torch.equal(layer(x, router_logits=logits), plain(x, router_logits=logits))
    assert load_layer(tmp_path, 0, weight_format="bf16", device="cpu").plan.kernel == "cpu_grouped"
    # The kernel of this machine's CPU in both 16-bit dtypes, twice.
    kernels = set[str]()
    for dtype, own in (("bf16", x.bfloat16()), ("fp16", (x / 4).half())):  # sums stay below 65504
        fast = load_layer(tmp_path, 0, device="cpu", dtype=dtype)
        kernels.add(fast.plan.kernel)
        found, wanted = fast(own, router_logits=logits), plain(own.float(), router_logits=logits)
        assert found.dtype == own.dtype
        assert torch.equal(found, fast(own, router_logits=logits))
        assert float((found - wanted).norm() / wanted.norm()) < 6e-3
    assert len(kernels) == 1, "float16 runs where bfloat16 does"


@pytest.mark.parametrize("method", [m for m in METHODS if m != "nf4 nested"])
def test_published_checkpoints_slice_for_tensor_parallelism(tmp_path: Path, method: str) -> None:
    truth = write(tmp_path, method)
    checkpoint = Checkpoint.open(tmp_path)
    layer = CheckpointLayer.open(checkpoint, 0)
    for rank in range(2):
        placement = tensor_parallel(SIZE.experts, rank, 2)
        if method == "nf4":
            with raises_with(InputError, "tensor-parallel", "[1]"):
                load_experts(layer, placement)
            continue
        weights = load_experts(layer, placement)
        span = slice(32 * rank, 32 * rank + 32)
        for e in range(SIZE.experts):
            assert same(weights.gate_up[e].decode()[1], truth[e, "w3"][span])
            assert same(weights.down[e].decode(), truth[e, "w2"][:, span])


@pytest.mark.parametrize(
    ("method", "name", "make", "error", "text"),
    [
        ("gptq ordered", "1.w2.g_idx", lambda t: t + 9, TensorMismatchError,
         r"expert 1, down: int4_ordered g_idx holds groups 9 to 10, allowed are 0 to 1"),
        ("gptq ordered", "1.w2.g_idx", lambda t: None, MissingTensorError, r"expert 1, down: .*g_idx missing"),
        ("gptq", "2.w1.g_idx", lambda t: t.flip(0), TensorMismatchError, r"expert 2, gate: .*g_idx permutes"),
        ("gptq", "2.w1.scales", lambda t: t[:1], TensorMismatchError,
         r"expert 2, gate: scale is \(1, 64\), int4_affine with N=64 and K=96 needs \(3, 64\)"),
        ("gptq", "2.w1.qzeros", lambda t: t.T, TensorMismatchError, r"qzeros"),
        ("gptq", "2.w1.scales", lambda t: t * float("nan"), BadScaleError, r"expert 2, gate: a scale of int4_affine"),
        ("gptq symmetric", "0.w3.qzeros", lambda t: t + 1, TensorMismatchError,
         r"expert 0, up: .*symmetric weights, the zero points are 8 to 9"),
        ("gptq", "0.w1.bias", lambda t: torch.ones(64), TensorMismatchError, r"expert 0, gate: .*bias is not zero"),
        ("gptq", "0.w1.weight_zero_point", lambda t: torch.zeros(1), UnknownTensorError, "a zero point, where"),
        ("awq", "0.w1.g_idx", lambda t: torch.zeros(96, dtype=torch.int32), UnknownTensorError, "g_idx is not known"),
        ("awq", "0.w2.qweight", lambda t: t.T, TensorMismatchError, r"weight is \(12, 64\).*needs \(64, 12\)"),
        ("nf4", "0.w2.weight.absmax", lambda t: t * float("inf"), BadScaleError, r"expert 0, down"),
        ("nf4", "0.w2.weight.quant_state.bitsandbytes__nf4", lambda t: t[:-1], CheckpointError, "not a JSON object"),
        ("nf4", "0.w2.weight.quant_state.bitsandbytes__nf4", lambda t: torch.zeros(70_000, dtype=torch.uint8),
         TensorMismatchError, "has 70000 bytes, at most 65536"),
        ("nf4", "0.w2.weight", lambda t: t[:-2], TensorMismatchError, r"expert 0, down: weight is \(3070, 1\)"),
    ],
)  # fmt: skip
def test_broken_published_checkpoints(
    tmp_path: Path, method: str, name: str, make: Any, error: type[CheckpointError], text: str
) -> None:
    write(tmp_path, method)
    change(tmp_path, HEAD + name, make)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(error, match=text):
        audit(checkpoint)
    with pytest.raises(error, match=text):
        load_experts(CheckpointLayer.open(checkpoint, 0), linear(SIZE.experts))


def test_config_and_integer_tensors_must_agree(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    for block, text in (
        (NF, r"declares bnb4 \(bitsandbytes\), which needs .weight \+ .weight.absmax"),
        (None, r"looks like .*int4_affine.*; config.json declares bf16"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
        checkpoint = Checkpoint.open(tmp_path)
        with pytest.raises(ConfigError, match=text):
            CheckpointLayer.open(checkpoint)
