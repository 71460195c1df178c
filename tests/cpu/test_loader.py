"""The loader: every family, format and storage, compared byte by byte with what was written."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from collegium.checkpoint import (
    Checkpoint,
    CheckpointLayer,
    describe_checkpoint,
    load_all,
    load_experts,
    load_router,
    load_shared,
)
from collegium.errors import InputError
from collegium.parallel.placement import linear, tensor_parallel
from collegium.placement import Placement
from raising import raises_with
from toys import TinySize, combinations, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from collegium.formats.payload import Payload
    from toys import TinyCheckpoint

SMALL = TinySize(hidden=96, intermediate=64, experts=3, top_k=2)


def same(a: Payload, b: Payload) -> bool:
    """Compare two payloads byte by byte."""
    if a.shape != b.shape or a.tensors().keys() != b.tensors().keys():
        return False
    pairs = [(t, b.tensors()[name]) for name, t in a.tensors().items()]
    return all(
        t.dtype == u.dtype and torch.equal(t.reshape(-1).view(torch.uint8), u.reshape(-1).view(torch.uint8))
        for t, u in pairs
    )


def expected(tiny: TinyCheckpoint, layer: int, expert: int, projection: int) -> Payload:
    return tiny.experts[layer][projection][expert]


@pytest.mark.each_choice
@pytest.mark.parametrize(("family", "name", "storage", "stacked"), combinations())
def test_every_combination_loads_byte_for_byte(
    tmp_path: Path, family: str, name: str, storage: str, stacked: bool
) -> None:
    tiny = write_checkpoint(tmp_path, family, name, storage, size=SMALL, stacked=stacked, shards=2)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe_checkpoint(checkpoint)
    assert spec.weight_format == name
    layer = max(tiny.experts)
    weights = load_experts(CheckpointLayer.open(checkpoint, layer), Placement(expert_ids=(2, 0)))
    assert weights.gate_up.shape == (2, 2, 64, 96)
    assert weights.down.shape == (2, 96, 64)
    for slot, expert in enumerate((2, 0)):
        for half in (0, 1):
            assert same(weights.gate_up[slot][half], expected(tiny, layer, expert, half))
        assert same(weights.down[slot], expected(tiny, layer, expert, 2))
    # the two halves and the experts differ, so a swap could not have passed
    assert not torch.equal(weights.gate_up[0][0].decode(), weights.gate_up[0][1].decode())
    assert not torch.equal(weights.down[0].decode(), weights.down[1].decode())
    if tiny.biases:
        gate, up, down = tiny.biases[layer]
        assert weights.gate_up_bias is not None
        assert weights.down_bias is not None
        assert torch.equal(weights.gate_up_bias, torch.stack((gate, up), 1)[[2, 0]])
        assert torch.equal(weights.down_bias, down[[2, 0]])


@pytest.mark.each_choice
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("family", "name", "storage", "stacked"), [r for r in combinations() if r[0] in ("mixtral", "gpt_oss")]
)
def test_slices_reassemble(tmp_path: Path, family: str, name: str, storage: str, stacked: bool, tp_size: int) -> None:
    wide = 128 * tp_size if name == "fp8_block" else 32 * tp_size
    size = TinySize(hidden=160, intermediate=wide, experts=2, top_k=1, layers=1)
    tiny = write_checkpoint(tmp_path, family, name, storage, size=size, stacked=stacked)
    checkpoint = Checkpoint.open(tmp_path)
    ranks = [load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(2, r, tp_size)) for r in range(tp_size)]
    gate, up, down = (p.decode() for p in tiny.experts[0])
    assert torch.equal(torch.cat([r.gate_up.decode()[:, 0] for r in ranks], 1), gate)
    assert torch.equal(torch.cat([r.gate_up.decode()[:, 1] for r in ranks], 1), up)
    assert torch.equal(torch.cat([r.down.decode() for r in ranks], 2), down)
    if tiny.biases:
        biases = [r.gate_up_bias for r in ranks]
        assert torch.equal(torch.cat([b for b in biases if b is not None], 2), torch.stack(tiny.biases[0][:2], 1))
        sums = torch.stack([r.down_bias for r in ranks if r.down_bias is not None]).sum(0)
        assert torch.equal(sums, tiny.biases[0][2])


def test_splits_inside_a_group(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "mxfp4", size=TinySize(hidden=64, intermediate=192, layers=1))
    checkpoint = Checkpoint.open(tmp_path)
    with raises_with(InputError, "tp_size=4", "intermediate_size=192", "48", "32", "[1, 2, 3, 6]"):
        load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(4, 0, 4))


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_moe", "bf16"), ("mixtral", "nvfp4"), ("gpt_oss", "mxfp4"), ("gpt_oss", "bf16")],
)
def test_one_rank_of_eight_reads_eighth(tmp_path: Path, family: str, name: str) -> None:
    write_checkpoint(tmp_path, family, name, size=TinySize(hidden=64, intermediate=64, experts=16, layers=1))
    checkpoint = Checkpoint.open(tmp_path)
    total = sum(i.nbytes for n, i in checkpoint.tensors.items() if ".experts." in n)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(16, 3, 8))
    held = weights.gate_up.nbytes + weights.down.nbytes
    assert 0.9 * held <= checkpoint.bytes_read <= 0.14 * total


def test_tensor_parallel_reads_its_share(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "bf16", size=TinySize(hidden=64, intermediate=64, experts=4, layers=1))
    checkpoint = Checkpoint.open(tmp_path)
    total = sum(i.nbytes for n, i in checkpoint.tensors.items() if ".experts." in n)
    load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(4, 3, 4))
    assert checkpoint.bytes_read == total // 4


def test_no_local_experts_gives_empty_payloads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, size=SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(3, 4, 5))
    assert weights.gate_up.shape == (0, 2, 64, 96)
    assert weights.down.shape == (0, 96, 64)


def test_partial_blocks_load(tmp_path: Path) -> None:
    size = TinySize(hidden=176, intermediate=90, experts=3, layers=1)
    tiny = write_checkpoint(tmp_path, "mixtral", "fp8_block", size=size)
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(3))
    assert torch.equal(weights.down.decode(), tiny.experts[0][2].decode())
    assert torch.equal(weights.gate_up.decode()[:, 1], tiny.experts[0][1].decode())


def test_wrong_layer_and_expert_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", size=SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    for number in (True, 1.0):
        with pytest.raises(InputError, match=rf"layer {number} .*\(1,\)"):
            CheckpointLayer.open(checkpoint, number)  # type: ignore[arg-type]
    with raises_with(InputError, "layer 0", "(1,)"):
        CheckpointLayer.open(checkpoint, 0)
    with raises_with(InputError, "[3]", "0", "2"):
        load_experts(CheckpointLayer.open(checkpoint, 1), Placement(expert_ids=(1, 3)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_absent_devices_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", size=SMALL)
    layer = CheckpointLayer.open(Checkpoint.open(tmp_path))
    parts = (partial(load_experts, layer, linear(3)), partial(load_router, layer), partial(load_shared, layer))
    for load in parts:
        with raises_with(InputError, "'cuda'", "0", "CUDA", "cpu"):
            load(device="cuda")


def test_opened_layer_reports_its_storage(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "deepseek_v3", "fp8_block", size=SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    layer = CheckpointLayer.open(checkpoint)
    assert layer == CheckpointLayer.open(checkpoint, 1)
    assert (layer.number, layer.stored.name, layer.stored.stacked) == (1, "fp8_block", False)
    assert layer.spec == describe_checkpoint(checkpoint, 1)
    assert layer.source(2, "up").path == "model.layers.1.mlp.experts.2.up_proj"
    assert {info.name for info in layer.expert_tensors.infos()} == {n for n in tiny.tensors if ".1.mlp.experts." in n}
    assert checkpoint.bytes_read == 0


def test_router_and_shared_expert(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "deepseek_v3", "nvfp4", size=SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    layer = CheckpointLayer.open(checkpoint, 1)
    router = load_router(layer)
    assert torch.equal(router.weight, tiny.tensors["model.layers.1.mlp.gate.weight"])
    assert router.bias is None
    assert router.correction_bias is not None
    assert torch.equal(router.correction_bias, tiny.tensors["model.layers.1.mlp.gate.e_score_correction_bias"])
    shared = load_shared(layer)
    assert shared is not None
    path = "model.layers.1.mlp.shared_experts."
    for half, name in enumerate(("gate_proj", "up_proj")):
        assert torch.equal(shared.experts.gate_up.decode()[0, half], tiny.tensors[f"{path}{name}.weight"].float())
    assert torch.equal(shared.experts.down.decode()[0], tiny.tensors[f"{path}down_proj.weight"].float())


def test_router_bias_of_gpt_oss(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    router = load_router(CheckpointLayer.open(checkpoint, 1))
    assert router.bias is not None
    assert torch.equal(router.bias, tiny.tensors["model.layers.1.mlp.router.bias"])
    assert load_shared(CheckpointLayer.open(checkpoint, 1)) is None


def test_load_all_reports_progress(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "mxfp8", size=SMALL)
    seen: list[tuple[int, int, str]] = []
    loaded = dict(load_all(Checkpoint.open(tmp_path), linear(3), lambda *args: seen.append(args)))
    assert seen == [(0, 2, "layer 0 (mxfp8)"), (1, 2, "layer 1 (mxfp8)"), (2, 2, "2 layers loaded")]
    for layer, weights in loaded.items():
        assert torch.equal(weights.down.decode(), tiny.experts[layer][2].decode())


_PEAK = """
import resource, sys
import torch
from collegium.checkpoint import Checkpoint, CheckpointLayer, load_experts
from collegium.parallel.placement import linear
small, big = (Checkpoint.open(p) for p in sys.argv[1:])
torch.set_num_threads(1)
load_experts(CheckpointLayer.open(small, 0), linear(16, 3, 8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = load_experts(CheckpointLayer.open(big, 0), linear(16, 3, 8))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024, weights.gate_up.nbytes + weights.down.nbytes)
"""


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)])
def test_peak_memory_near_local_weights(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path / "small", family, size=TinySize(hidden=64, intermediate=64, experts=16, layers=1))
    big = TinySize(hidden=1024, intermediate=1024, experts=16, layers=1)
    write_checkpoint(tmp_path / "big", family, size=big)
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path / "small"), str(tmp_path / "big")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, local = map(int, result.stdout.split())
    matrix = 2 * 1024 * 1024
    assert local == 2 * 3 * matrix
    # 100 MB lie in the file; allowed are the local 12.6 MB, the stored tensor of one expert and its checks
    stored = matrix * (2 if family == "gpt_oss" else 1)
    assert grown < local + 2 * stored + 6e6
