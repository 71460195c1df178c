"""GGUF files: blocks against the ``gguf`` package, hostile headers, and toy models written by that package."""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings, strategies as st

from collegium import load_layer
from collegium.checkpoint import (
    Checkpoint,
    CheckpointLayer,
    audit,
    describe_checkpoint,
    load_experts,
    load_router,
    load_shared,
)
from collegium.checkpoint.gguf import GGML_TYPES, read_gguf
from collegium.commands.inspect import inspect_model, plan_model
from collegium.commands.quantize import quantize_model
from collegium.dummy.encoders import write_half
from collegium.errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    HostileFileError,
    InputError,
    MissingTensorError,
    TensorMismatchError,
    TruncatedFileError,
    UnknownTensorError,
)
from collegium.formats import Fp32, Gguf, MxFp4, NvFp4
from collegium.formats.gguf import KINDS
from collegium.formats.gguf_grids import GRIDS, PATH, grid_of
from collegium.formats.unquantised import DTYPES
from collegium.layer import MoELayer
from collegium.models import FAMILIES, describe
from collegium.parallel.local import Local
from collegium.parallel.placement import linear, tensor_parallel
from collegium.pipelines import PipelineParts
from collegium.pipelines.split import Split
from collegium.planning import kernel_named, plan
from collegium.problem import Overrides
from collegium.testing.compare import relative_error
from collegium.types import ActivationSpec, ExpertWeights, Routing
from gguf_files import ARCHITECTURES, D, E, random_blocks, theirs, write_gguf
from raising import raises_with
from truth import moe_truth
from write_gguf_grids import packed_grids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.int32), right.view(torch.int32))


def test_types_are_those_of_the_package() -> None:
    for number, (name, elements, nbytes) in GGML_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, elements, nbytes)
    assert {name: (k.elements, k.nbytes) for name, k in KINDS.items()} == {
        name: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in KINDS
    }


def storage_of(kind: str) -> str:
    return kind if kind in [storage.name for storage in Gguf.storages] else "gguf"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), count=st.integers(1, 4))
def test_blocks_decode_as_the_package(kind: str, seed: int, rows: int, count: int) -> None:
    size = KINDS[kind].elements
    raw = random_blocks(np.random.default_rng(seed), kind, 2, rows, count * size)
    parts = {".weight": torch.from_numpy(raw).view(2, rows, count, -1)}
    payload = Gguf.from_parts(parts, storage=storage_of(kind), shape=(2, rows, count * size))
    truth = theirs(raw, kind)
    assert payload.kind.title == kind
    assert same_bits(payload.decode(), truth)
    assert torch.equal(payload.decode(torch.bfloat16), truth.bfloat16())
    assert same_bits(payload[1].decode(), truth[1])
    assert same_bits(payload.columns((count - 1) * size, count * size).decode(), truth[..., -size:].contiguous())
    assert same_bits(payload.rows(rows - 1, rows).decode(), truth[:, -1:].contiguous())
    assert payload.faults().tolist() == [False, False]


def test_mxfp4_blocks_become_mxfp4() -> None:
    raw = random_blocks(np.random.default_rng(0), "MXFP4", 2, 5, 96)
    parts = {".weight": torch.from_numpy(raw).view(2, 5, 3, 17)}
    assert same_bits(MxFp4.from_parts(parts, storage="gguf", shape=(2, 5, 96)).decode(), theirs(raw, "MXFP4"))


def test_nvfp4_blocks_become_nvfp4() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (2, 5, 3, 36), dtype=np.uint8)
    raw[..., :4] = np.arange(1, 121).reshape(2, 5, 3, 4)
    payload = NvFp4.from_parts({".weight": torch.from_numpy(raw)}, storage="gguf", shape=(2, 5, 192))
    truth = torch.from_numpy(gguf.dequantize(raw.reshape(2, 5, -1), GGMLQuantizationType.NVFP4))
    assert same_bits(payload.decode(), truth)
    assert payload.faults().tolist() == [False, False]
    cut = NvFp4.from_parts({".weight": torch.from_numpy(raw)}, storage="gguf", shape=(2, 5, 150))
    assert same_bits(cut.decode(), truth[..., :150].contiguous())
    raw[1, 2, 1, 3] = 0x7F  # NaN in E4M3; the package reads it as zero
    bad = NvFp4.from_parts({".weight": torch.from_numpy(raw)}, storage="gguf", shape=(2, 5, 192))
    assert bad.faults().tolist() == [False, True]


def test_grids_are_those_of_the_package() -> None:
    assert PATH.read_bytes() == packed_grids()
    for name, grid in GRIDS.items():
        values = torch.tensor(grid.values)[grid_of(name, torch.device("cpu")).int()]
        assert np.array_equal(values.numpy(), getattr(gguf.quants, name).grid[0, 0])


def test_worked_examples() -> None:
    eight = bytes.fromhex("003801fe" + "00" * 30)
    payload = Gguf.from_parts({".weight": _bytes(eight, 1)}, storage="gguf", shape=(1, 32))
    assert payload.decode()[0, :4].tolist() == [0.5, -1.0, 0.0, 0.0]
    four = (
        bytes.fromhex("003c0038" + "81828384404142c3011223f4")
        + b"\x21" * 32
        + b"\x43" * 32
        + b"\x65" * 32
        + b"\x87" * 32
    )
    values = Gguf.from_parts({".weight": _bytes(four, 1)}, storage="gguf", shape=(1, 256)).decode()
    assert values.view(8, 32).unique_consecutive(dim=1).flatten().tolist() == [
        1.0, 3.5, 8.0, 14.5, 157.0, 195.5, 236.0, 256.5
    ]  # fmt: skip
    mx = bytes.fromhex("802143650798badcfe1032547689abcdef")
    wanted = [1.0, 3.0, 6.0, 12.0, 0.0, -2.0, -4.0, -8.0, 0.0, 2.0, 4.0, 8.0, -1.0, -3.0, -6.0, -12.0,
              2.0, 4.0, 8.0, 0.0, -1.0, -3.0, -6.0, -12.0, 1.0, 3.0, 6.0, 12.0, 0.0, -2.0, -4.0, -8.0]  # fmt: skip
    for form in (Gguf, MxFp4):
        found = form.from_parts({".weight": _bytes(mx, 1)}, storage="gguf", shape=(1, 32)).decode()
        assert same_bits(found, torch.tensor([wanted]))


def _bytes(raw: bytes, rows: int) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8).view(rows, 1, -1)


def test_unknown_block_sizes_refused() -> None:
    for shape in ((2, 1, 35), (2, 2, 34), (2, 34)):
        with raises_with(TensorMismatchError, "[2, 32]", "Q8_0", "34"):
            Gguf.from_parts({".weight": torch.zeros(shape, dtype=torch.uint8)}, storage="gguf", shape=(2, 32))
    payload = Gguf.from_parts({".weight": torch.zeros(2, 2, 144, dtype=torch.uint8)}, storage="gguf", shape=(2, 512))
    with raises_with(InputError, "256"):
        payload.columns(0, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_blocks(kind: str) -> None:
    entry = KINDS[kind]
    raw = torch.from_numpy(random_blocks(np.random.default_rng(0), kind, 2, 3, 2 * entry.elements)).view(2, 3, 2, -1)
    for index in range(entry.terms or 1):
        bad = raw.clone()
        if entry.terms:
            write_half(kind, bad[1, 2, 1], index, torch.tensor(torch.inf))
        else:
            bad[1, 2, 1, 0] = 255
        payload = Gguf(shape=(2, 3, 2 * entry.elements), blocks=bad, title=kind)
        assert payload.faults().tolist() == [False, True]


# models

COMBINATIONS = [
    ("qwen3moe", ("Q8_0", "Q8_0"), "gguf"),
    ("qwen3moe", ("Q4_K", "Q6_K"), "gguf"),
    ("qwen3moe", ("Q4_K", "Q4_K"), "gguf"),
    ("llama", ("Q4_0", "Q5_0"), "gguf"),
    ("llama", ("MXFP4", "Q8_0"), "gguf"),
    ("olmoe", ("F16", "F16"), "fp16"),
    ("olmoe", ("Q4_1", "Q5_1"), "gguf"),
    ("deepseek2", ("Q5_K", "Q8_0"), "gguf"),
    ("glm4moe", ("BF16", "BF16"), "bf16"),
    ("gpt-oss", ("MXFP4", "MXFP4"), "mxfp4"),
    ("gpt-oss", ("F32", "F32"), "fp32"),
    ("qwen3moe", ("Q4_K", "F16"), "gguf"),
    ("llama", ("BF16", "Q8_0"), "bf16"),
    ("qwen3moe", ("Q2_K", "Q3_K"), "gguf"),
    ("olmoe", ("IQ4_NL", "Q4_0"), "gguf"),
    ("qwen3moe", ("IQ4_XS", "IQ4_NL"), "gguf"),
    ("qwen3moe", ("IQ2_XXS", "IQ3_S"), "gguf"),
    ("deepseek2", ("IQ1_M", "IQ2_S"), "gguf"),
    ("llama", ("TQ2_0", "Q3_K"), "gguf"),
    ("olmoe", ("IQ1_S", "TQ1_0"), "gguf"),
    ("qwen3moe", ("NVFP4", "NVFP4"), "nvfp4"),
    ("qwen3moe", ("NVFP4", "IQ2_XS"), "nvfp4"),
    ("llama", ("IQ3_XXS", "NVFP4"), "gguf"),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("arch", "kinds", "name"), COMBINATIONS)
def test_models_load_and_run(tmp_path: Path, arch: str, kinds: tuple[str, str], name: str, fused: bool) -> None:
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, arch, kinds, fused=fused)
    checkpoint = Checkpoint.open(path)
    spec = describe_checkpoint(checkpoint)
    assert (spec.weight_format, spec.hidden_size, spec.intermediate_size) == (name, D, 256)
    report = audit(checkpoint)
    assert [entry.layer for entry in report.layers] == (
        [1] if "leading_dense_block_count" in ARCHITECTURES[arch] else [0, 1]
    )
    weights = load_experts(CheckpointLayer.open(checkpoint, 1), linear(E))
    if fused:
        gate_up = truth[1, "ffn_gate_up_exps"].view(E, 2, 256, D)
    else:
        gate_up = torch.stack((truth[1, "ffn_gate_exps"], truth[1, "ffn_up_exps"]), dim=1)
    down = truth[1, "ffn_down_exps"]
    assert same_bits(weights.gate_up.decode(), gate_up)
    assert same_bits(weights.down.decode(), down)
    biases: dict[str, Tensor] = {}
    if arch == "gpt-oss":
        biases["gate_up_bias"] = torch.stack((truth[1, "gate_bias"], truth[1, "up_bias"]), dim=1)
        biases["down_bias"] = truth[1, "down_bias"]
        assert weights.gate_up_bias is not None
        assert torch.equal(weights.gate_up_bias, biases["gate_up_bias"])

    reference = Overrides(kernel="reference")
    x = torch.randn(7, D)
    layer = load_layer(path, 1, dtype="fp32", device="cpu", overrides=reference)
    problem = replace(layer.plan.problem, spec=replace(spec, weight_format="fp32", down_format=None))
    plain = MoELayer(
        ExpertWeights(
            gate_up=Fp32(values=gate_up, shape=tuple(gate_up.shape)),
            down=Fp32(values=down, shape=tuple(down.shape)),
            **biases,
        ),
        plan(problem, reference),
        router=load_router(CheckpointLayer.open(checkpoint, 1)),
        shared=_shared(truth) if spec.shared else None,
    )
    assert torch.equal(layer(x), plain(x))
    assert layer(x).isfinite().all()
    # The kernel of this machine's CPU in bfloat16, twice, for tokens of its own.
    fast, x, logits = load_layer(path, 1, device="cpu"), x.bfloat16(), torch.randn(7, E)
    assert fast.plan.kernel != "reference" or spec.weight_format == "gguf"
    found, wanted = fast(x, router_logits=logits), plain(x.float(), router_logits=logits)
    assert torch.equal(found, fast(x, router_logits=logits))
    assert float((found - wanted).norm() / wanted.norm()) < 6e-3


@pytest.mark.parametrize(("gate", "up", "down"), [
    ("Q4_K", "Q6_K", "Q6_K"), ("Q4_K", "BF16", "IQ4_XS"), ("IQ2_XXS", "TQ2_0", "Q2_K"), ("Q4_0", "IQ4_NL", "F16"),
])  # fmt: skip
def test_gate_and_up_of_two_kinds(tmp_path: Path, gate: str, up: str, down: str) -> None:
    """Gate and up become bfloat16 and down stays as it is, or all are encoded from the exact numbers."""
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, "qwen3moe", (gate, down), others={"ffn_up_exps": up})
    gate_up = torch.stack((truth[1, "ffn_gate_exps"], truth[1, "ffn_up_exps"]), dim=1)
    layer = CheckpointLayer.open(Checkpoint.open(path), 1)
    assert layer.spec.formats == ("bf16", "fp16" if down == "F16" else "gguf")
    weights = load_experts(layer, linear(E))
    assert torch.equal(weights.gate_up.decode(torch.bfloat16), gate_up.bfloat16())
    assert same_bits(weights.down.decode(), truth[1, "ffn_down_exps"])
    findings = inspect_model(str(path), device="cpu").report.findings
    assert any(gate in finding and up in finding and "bf16" in finding for finding in findings)
    fast, x = load_layer(path, 1, device="cpu"), torch.randn(5, D)
    routing = Routing(topk_ids=torch.tensor([[0, 3], [1, -1], [2, 0], [3, 1], [-1, -1]]), topk_weights=torch.rand(5, 2))
    ids, scores = routing.topk_ids, routing.topk_weights
    wanted = moe_truth(x.bfloat16().float(), gate_up, truth[1, "ffn_down_exps"], ids, scores, ActivationSpec())
    assert fast.plan.kernel != "reference"
    assert relative_error(fast(x.bfloat16(), routing=routing), wanted) < 1e-2
    exact = load_layer(path, 1, device="cpu", dtype="fp32", weight_format="fp32")
    wanted = moe_truth(x, gate_up, truth[1, "ffn_down_exps"], ids, scores, ActivationSpec())
    assert relative_error(exact(x, routing=routing), wanted) < 1e-5


@pytest.mark.parametrize(("gate", "up", "down"), [
    ("Q4_K", "Q6_K", "Q8_0"), ("IQ4_XS", "F16", "IQ4_NL"), ("Q4_0", "IQ4_NL", "BF16"), ("NVFP4", "Q8_0", "NVFP4"),
])  # fmt: skip
def test_shared_gate_up_of_two_kinds(tmp_path: Path, gate: str, up: str, down: str) -> None:
    """They become bfloat16 as those of routed experts, whose gate and up have one kind here."""
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, "deepseek2", (gate, down), others={"ffn_up_shexp": up})
    view = CheckpointLayer.open(Checkpoint.open(path), 1)
    shared: Any = load_shared(view)
    expert = _shared(truth).experts
    assert shared.experts.gate_up.name == "bf16"
    assert torch.equal(shared.experts.gate_up.decode(torch.bfloat16), expert.gate_up.values.bfloat16())
    assert same_bits(shared.experts.down.decode(), expert.down.values)
    findings = inspect_model(str(path), device="cpu").report.findings
    assert any("shared" in finding and f"{gate}, up is {up}" in finding for finding in findings)
    gate_up = torch.stack((truth[1, "ffn_gate_exps"], truth[1, "ffn_up_exps"]), dim=1)
    routing = Routing(topk_ids=torch.tensor([[0, 3], [1, -1], [2, 0], [-1, -1]]), topk_weights=torch.rand(4, 2))
    layer, x = load_layer(path, 1, device="cpu"), torch.randn(4, D).bfloat16()
    assert layer.spec.shared is not None
    assert layer.spec.shared_alone().formats[0] == "bf16"
    ids, weights = routing.topk_ids, routing.topk_weights
    wanted = moe_truth(x.float(), gate_up, truth[1, "ffn_down_exps"], ids, weights, ActivationSpec())
    once, one = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    wanted += moe_truth(x.float(), expert.gate_up.values, expert.down.values, once, one, ActivationSpec())
    assert relative_error(layer(x, routing=routing), wanted) < 1e-2


def test_kinds_differ_by_layer(tmp_path: Path) -> None:
    """Each layer of a file has its kinds, as in mixtures of llama.cpp."""
    path = tmp_path / "model.gguf"
    kinds = (("Q2_K", "Q3_K"), ("IQ4_XS", "IQ4_NL"))
    truth = write_gguf(path, "qwen3moe", (*kinds[0], *kinds[1]))
    checkpoint = Checkpoint.open(path)
    for number, (upper, down) in enumerate(kinds):
        weights: Any = load_experts(CheckpointLayer.open(checkpoint, number), linear(E))
        assert (weights.gate_up.kind.title, weights.down.kind.title) == (upper, down)
        assert same_bits(weights.down.decode(), truth[number, "ffn_down_exps"])
        assert same_bits(weights.gate_up.decode()[:, 1], truth[number, "ffn_up_exps"])
    assert [report.kinds for report in audit(checkpoint).layers] == [*kinds]
    (listed,) = [text for name, text in inspect_model(str(path), device="cpu").lines() if name == "expert format"]
    assert all(kind in listed for pair in kinds for kind in pair)


KERNELS_OF_GPU = [
    ("qwen3moe", ("Q4_K", "Q6_K"), "bf16"),
    ("llama", ("Q5_1", "MXFP4"), "fp16"),
    ("olmoe", ("Q8_0", "Q5_K"), "fp16"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs layers on the device")
@pytest.mark.parametrize(("arch", "kinds", "dtype"), KERNELS_OF_GPU)
def test_gpu_plans_compute_the_checkpoint(tmp_path: Path, arch: str, kinds: tuple[str, str], dtype: Any) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, arch, kinds)
    chosen = plan_model(str(path), device="h200")
    assert "kernel     triton_w4a16" in chosen.explain()
    assert [stretch.pipeline for stretch in chosen.token_ranges] == ["direct", "split"]
    kernel, checkpoint = kernel_named(chosen.kernel), Checkpoint.open(path)
    problem = replace(chosen.problem, dtype=dtype, activation_format=dtype).routed
    assert kernel.refuse(problem) is None
    x, weights = (torch.randn(3, D) / 64).to(DTYPES[dtype]), torch.rand(3, 2) + 0.1
    ids = torch.tensor([[3, 0], [-1, 3], [0, 3]])
    parts = {"dispatcher": Local(num_experts=E), "top_k": 2, "num_experts": E}
    found: list[Tensor] = []
    for layer in (0, 1):
        packed: Any = kernel.pack(load_experts(CheckpointLayer.open(checkpoint, layer), linear(E)), problem)
        assert f"gate_up {kinds[0]} in " in str(packed.report)
        run, routing = Split(parts=PipelineParts(experts=packed, **parts)), Routing(topk_ids=ids, topk_weights=weights)
        found.append(run(x, routing, dtype=torch.float32))
        assert torch.equal(found[-1], run(x, routing, dtype=torch.float32))
        gate_up = torch.stack((truth[layer, "ffn_gate_exps"], truth[layer, "ffn_up_exps"]), dim=1)
        wanted = moe_truth(x, gate_up, truth[layer, "ffn_down_exps"], ids, weights, problem.activation)
        assert relative_error(found[-1], wanted) < 0.015
    assert relative_error(found[0], found[1]) > 0.3


def _shared(truth: dict[tuple[int, str], Tensor]) -> Any:
    from collegium.types import SharedWeights

    gate_up = torch.stack((truth[1, "gate_shexp"], truth[1, "up_shexp"])).unsqueeze(0)
    down = truth[1, "down_shexp"].unsqueeze(0)
    experts = ExpertWeights(
        gate_up=Fp32(values=gate_up, shape=tuple(gate_up.shape)), down=Fp32(values=down, shape=tuple(down.shape))
    )
    return SharedWeights(experts=experts)


def test_only_local_experts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, "qwen3moe", ("Q8_0", "Q8_0"))
    checkpoint = Checkpoint.open(path)
    layer = CheckpointLayer.open(checkpoint, 1)
    weights = load_experts(layer, linear(E, 1, 2))
    assert same_bits(weights.down.decode(), truth[1, "ffn_down_exps"][2:])
    assert checkpoint.bytes_read == 2 * 3 * 256 * D // 32 * 34
    half = load_experts(layer, tensor_parallel(E, 1, 2))
    assert same_bits(half.down.decode(), truth[1, "ffn_down_exps"][..., 128:].contiguous())
    assert same_bits(half.gate_up.decode()[:, 1], truth[1, "ffn_up_exps"][:, 128:].contiguous())


def test_folders_inspect_and_plan(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "gpt-oss", ("MXFP4", "MXFP4"))
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    found = inspect_model(str(tmp_path), device="cpu")
    assert ("expert format", "mxfp4 (gguf)") in found.lines()
    assert found.family == "gguf_gpt_oss"
    assert (found.spec.activation.kind, found.spec.activation.limit) == ("swiglu_oai", 7.0)
    assert found.plan.kernel in ("cpu_grouped", "cpu_fused")
    assert plan_model(str(tmp_path / "model.gguf"), device="cpu").kernel == found.plan.kernel
    write_gguf(tmp_path / "other.gguf", "qwen3moe", ("Q8_0", "Q8_0"))
    with raises_with(CheckpointError, "GGUF", "model.gguf", "other.gguf"):
        Checkpoint.open(tmp_path)
    assert plan_model(str(tmp_path / "other.gguf"), device="cpu").kernel in ("cpu_fused", "reference")


def test_split_files_are_read_together(tmp_path: Path) -> None:
    truth = write_gguf(tmp_path / "model.gguf", "qwen3moe", ("Q8_0", "Q8_0"), split="parts")
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 2
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 1), linear(E))
    assert same_bits(weights.down.decode(), truth[1, "ffn_down_exps"])
    assert Checkpoint.open(parts[1]).tensors.keys() == checkpoint.tensors.keys()
    (tmp_path / "capitals").mkdir()
    loud = [shutil.copy(part, tmp_path / "capitals" / part.name.upper()) for part in parts]
    for path in (loud[0], tmp_path / "capitals"):
        assert Checkpoint.open(path).tensors.keys() == checkpoint.tensors.keys()
    content = parts[1].read_bytes()
    parts[1].unlink()
    with raises_with(HostileFileError, "['model-00002-of-00002.gguf']"):
        Checkpoint.open(tmp_path)
    parts[1].write_bytes(parts[0].read_bytes())
    with raises_with(DuplicateTensorError, parts[0].name):
        Checkpoint.open(tmp_path)
    assert content


def test_specs_are_those_of_the_models() -> None:
    """The metadata of the published models give the spec that their own config gives."""
    keys = {"embedding_length": 2048, "expert_feed_forward_length": 768, "expert_count": 128, "expert_used_count": 8}
    found = describe(_config("qwen3moe", block_count=48, **keys))
    wanted = describe(
        {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48}
    )  # fmt: skip
    assert replace(found, weight_format="bf16") == wanted
    found = describe(
        _config(
            "deepseek2", block_count=61, leading_dense_block_count=3, embedding_length=7168, expert_count=256,
            expert_used_count=8, expert_feed_forward_length=2048, expert_shared_count=1, expert_gating_func=2,
            expert_weights_norm=True, expert_weights_scale=2.5, expert_group_count=8, expert_group_used_count=4,
        )
    )  # fmt: skip
    wanted = describe(
        {"model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256,
         "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
         "first_k_dense_replace": 3, "num_hidden_layers": 61}
    )  # fmt: skip
    assert replace(found, weight_format="bf16") == wanted
    found = describe(
        _config("gpt-oss", block_count=24, embedding_length=2880, expert_feed_forward_length=2880, expert_count=32,
                expert_used_count=4)
    )  # fmt: skip
    wanted = describe(
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
         "num_experts_per_tok": 4, "num_hidden_layers": 24}
    )  # fmt: skip
    assert replace(found, weight_format="bf16") == wanted


def _config(arch: str, **keys: object) -> dict[str, object]:
    return {**keys, "model_type": f"gguf:{arch}", "quantization_config": {"quant_method": "gguf"}}


def test_unknown_routing_is_refused() -> None:
    keys = {"block_count": 2, "embedding_length": 64, "expert_feed_forward_length": 64, "expert_count": 4}
    with raises_with(ConfigError, "expert_gating_func", "9", "1"):
        describe(_config("qwen3moe", expert_used_count=2, expert_gating_func=9, **keys))
    with raises_with(ConfigError, "swiglu_clamp_exp", "array of 2"):
        describe(_config("qwen3moe", expert_used_count=2, swiglu_clamp_exp="an array of 2", **keys))
    with raises_with(ConfigError, "'gguf:mamba'", "gguf:llama"):
        describe(_config("mamba", **keys))
    known = {name.removeprefix("gguf:") for family in FAMILIES for name in family.model_types if "gguf:" in name}
    # Files of the others are in test_gguf_architectures.py.
    others = (
        "qwen2moe ernie4_5-moe hunyuan-moe bailingmoe2 minimax-m2 lfm2moe kimi-linear qwen3next qwen35moe llama4 "
        "nemotron_h_moe gemma4"
    )
    assert known == {*ARCHITECTURES, *others.split()}


def test_broken_models(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3moe", ("Q8_0", "Q8_0"))
    checkpoint = Checkpoint.open(path)
    info = checkpoint.info("blk.1.ffn_exps.2.down.weight")
    raw = bytearray(path.read_bytes())
    raw[info.start : info.start + 2] = b"\x00\x7e"
    path.write_bytes(raw)
    for read in (lambda c: audit(c), lambda c: load_experts(CheckpointLayer.open(c, 1), linear(E))):
        with raises_with(BadScaleError, "layer 1", "expert 2, down", "blk.1.ffn_exps.2.down.weight", "NaN"):
            read(Checkpoint.open(path))
    odd = replace(checkpoint.info("blk.1.ffn_gate_inp.weight"), name="blk.1.ffn_exps.bias.up")
    with raises_with(UnknownTensorError, "layer 1", "blk.1.ffn_exps.bias.up"):
        audit(Checkpoint(path, checkpoint.config, {**checkpoint.tensors, odd.name: odd}), deep=False)
    write_gguf(path, "qwen3moe", ("Q8_0", "F32"))
    stray = replace(Checkpoint.open(path).info("blk.1.ffn_gate_inp.weight"), name="blk.1.ffn_exps.1.down.weight")
    with pytest.raises(CheckpointError, match=r"down.* F32"):
        audit(Checkpoint(path, checkpoint.config, {**checkpoint.tensors, stray.name: stray}), deep=False)
    tensors = dict(checkpoint.tensors)
    del tensors["blk.1.ffn_exps.3.up.weight"]
    with raises_with(MissingTensorError, "layer 1", "expert 3, up"):
        audit(Checkpoint(path, checkpoint.config, tensors), deep=False)
    pruned = {**checkpoint.config, "expert_count": 5}
    with pytest.raises(ConfigError, match=r"num_experts=5"):
        audit(Checkpoint(path, pruned, checkpoint.tensors), deep=False)


def test_gguf_folders_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "model.gguf", "deepseek2", ("Q5_K", "Q8_0"))
    with raises_with(CheckpointError, "config.json"):
        quantize_model(str(tmp_path / "model"), "mxfp4", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# hostile headers


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(*, version: int = 3, tensors: int | None = None, entries: int | None = None,
           kv: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = ()) -> bytes:  # fmt: skip
    counts = (len(infos) if tensors is None else tensors, len(kv) if entries is None else entries)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(kv) + b"".join(infos)


def padded(raw: bytes, data: int) -> bytes:
    return raw + bytes(-len(raw) % 32 + data)


HUGE = struct.pack("<Q", 2**63)
HOSTILE: list[tuple[bytes, str]] = [
    (b"GGML" + bytes(20), r"starts with b'GGML', a GGUF file with b'GGUF'"),
    (header(version=1), "GGUF version 1, known are 2 and 3"),
    (header(version=3 << 24), "GGUF version 50331648, known are 2 and 3, little-endian"),
    (header(tensors=2**63), "9223372036854775808 tensors and 0 metadata entries"),
    (header(entries=2**40), "0 tensors and 1099511627776 metadata entries"),
    (header(entries=1) + HUGE, "a metadata key has 9223372036854775808 bytes, allowed are 1 to 4096"),
    (header(kv=(entry(b"k", 8, HUGE),)), "k needs 9223372036854775808 bytes, 0 are left"),
    (header(kv=(entry(b"k", 9, struct.pack("<IQ", 4, 2**62)),)), "k needs 18446744073709551616 bytes"),
    (header(kv=(entry(b"k", 9, struct.pack("<IQ", 8, 2**62)),)), "k needs 36893488147419103232 bytes"),
    (header(kv=(entry(b"k", 9, struct.pack("<IQ", 9, 1) * 9),)), "value type 9 at depth 4"),
    (header(kv=(entry(b"k", 13, b""),)), "k has value type 13 at depth 0, known are 0 to 12"),
    (header(kv=(entry(b"\xff", 4, b"1234"),)), "a metadata key is not UTF-8"),
    (header(kv=(entry(b"k", 4, b"1234"),) * 2), "the metadata key 'k' appears twice"),
    (header(kv=(entry(b"general.alignment", 4, struct.pack("<I", 0)),)), "general.alignment is 0"),
    (header(kv=(entry(b"general.alignment", 4, struct.pack("<I", 2**31)),)), "general.alignment is 2147483648"),
    (header(kv=(entry(b"general.alignment", 8, text(b"32")),)), "general.alignment is '32'"),
    (header(infos=(tensor(shape=(1,) * 5),)), "has 5 dimensions, allowed are 1 to 4"),
    (header(infos=(tensor(shape=()),)), "has 0 dimensions"),
    (header(infos=(tensor(shape=(2**62, 2**62)),)), "less than 2\\^63 bytes"),
    (header(infos=(tensor(shape=(32, 0)),)), "no empty axis"),
    (header(infos=(tensor(shape=(33,), kind=8),)), "rows of whole blocks of 32"),
    (header(infos=(tensor(kind=77),)), "'t' is type 77"),
    (padded(header(infos=(tensor(offset=2**63),)), 128), "is at 9223372036854775872 to"),
    (padded(header(infos=(tensor(offset=4),)), 256), "at a multiple of 32"),
    (padded(header(infos=(tensor(), tensor(b"u", offset=96))), 512), "'u' is at 192 to 320, allowed is from 224 on"),
    (padded(header(infos=(tensor(), tensor(offset=128))), 512), "each name once"),
    (padded(header(infos=(tensor(b"blk.0.ffn_up_exps.weight", (32, 4)),)), 512), r"expected \(experts, rows, colu"),
    (padded(header(infos=(tensor(b"blk.0.ffn_up_exps.weight", (32, 1, 1)),
                          tensor(b"blk.0.ffn_exps.0.up.weight", offset=128))), 512), "is stored twice"),
    (padded(header(infos=(tensor(b"blk.0.ffn_gate_up_exps.weight", (32, 3, 2)),)), 768), "expected \\(experts, rows"),
]  # fmt: skip


TRUNCATED: list[tuple[bytes, int]] = [
    (b"", 4),
    (b"GGU", 4),
    (header(entries=1), 32),
    (header(tensors=1), 32),
    (padded(header(infos=(tensor(),)), 127), 192),
    (padded(header(infos=(tensor(), tensor(b"u", offset=128))), 1), 352),
]


@pytest.mark.parametrize(("raw", "needed"), TRUNCATED)
def test_truncated_files(tmp_path: Path, raw: bytes, needed: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw)
    with raises_with(TruncatedFileError, f"{len(raw)} bytes", needed):
        Checkpoint.open(path)


@pytest.mark.parametrize(("raw", "words"), HOSTILE)
def test_hostile_headers(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(HostileFileError, match=words):
        Checkpoint.open(path)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    """The frame of the hostile cases is sound, so each is refused for its own reason."""
    path = tmp_path / "good.gguf"
    values = entry(b"general.architecture", 8, text(b"llama")), entry(b"llama.k", 4, struct.pack("<I", 7))
    path.write_bytes(padded(header(kv=values, infos=(tensor(), tensor(b"u", offset=128))), 256))
    config, infos = read_gguf(path)
    assert (config["k"], config["model_type"]) == (7, "gguf:llama")
    assert {name: (i.shape, i.nbytes) for name, i in infos.items()} == {"t": ((32,), 128), "u": ((32,), 128)}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_raise_only_documented_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    values = entry(b"general.architecture", 8, text(b"llama")), entry(b"a", 9, struct.pack("<IQ", 8, 1) + text(b"x"))
    raw = bytearray(padded(header(kv=values, infos=(tensor(), tensor(b"u", (32, 2), 8, 128))), 256))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = folder / "x.gguf"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    opened: Callable[[], Checkpoint] = lambda: Checkpoint.open(path)  # noqa: E731
    try:
        opened()
    except CheckpointError as error:
        assert "x.gguf" in str(error) or "tensor" in str(error)  # noqa: PT017
