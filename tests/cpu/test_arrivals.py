"""Tensors handed over from memory, in any order: what they become is what the same tensors become from files."""

from __future__ import annotations

import json
import os
import random
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from collegium import Ranks, load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, TensorStream, audit, load_experts, load_router
from collegium.errors import (
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    InputError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from collegium.parallel.placement import linear
from collegium.placement import Placement
from collegium.testing.compare import activate_float64, heavy_tailed
from collegium.types import Routing
from raising import raises_with
from ranks import error_of, run_ranks
from toys import TinySize, combinations, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from collegium.formats.payload import Payload
    from toys import TinyCheckpoint

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
SMALL = TinySize(hidden=96, intermediate=64, experts=3, top_k=2)
FOLDER = "COLLEGIUM_TEST_ARRIVALS"


def shuffled(tensors: dict[str, torch.Tensor], seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    pairs = list(tensors.items())
    random.Random(seed).shuffle(pairs)
    return pairs


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    disk = Checkpoint.open(folder)
    return dict(disk.config), {name: disk.read(name) for name in disk.tensors}


def same(one: Payload, two: Payload) -> bool:
    a, b = one.tensors(), two.tensors()
    bytes_of = [[t.reshape(-1).view(torch.uint8) for t in each.values()] for each in (a, b)]
    return one.shape == two.shape and a.keys() == b.keys() and all(map(torch.equal, *bytes_of))


@pytest.mark.each_choice
@pytest.mark.parametrize(("family", "name", "storage", "stacked"), combinations())
def test_every_combination_is_what_was_written(
    tmp_path: Path, family: str, name: str, storage: str, stacked: bool
) -> None:
    tiny = write_checkpoint(tmp_path, family, name, storage, size=SMALL, stacked=stacked)
    layer, held = max(tiny.experts), Placement(expert_ids=(2, 0))
    arrived, kept = TensorStream(tiny.config, placement=held), {}
    for key, tensor in shuffled(tiny.tensors):
        kept[key] = arrived.put(key, tensor)
    # Everything but the tensors of the expert that is elsewhere.
    assert {key for key, is_kept in kept.items() if not is_kept} == {key for key in kept if ".experts.1." in key}
    assert stacked or not all(kept.values())
    opened = CheckpointLayer.open(arrived.checkpoint, layer)
    assert opened.stored == CheckpointLayer.open(Checkpoint.open(tmp_path), layer).stored
    weights = load_experts(opened, held)
    for slot, expert in enumerate(held.expert_ids):
        for half in (0, 1):
            assert same(weights.gate_up[slot][half], tiny.experts[layer][half][expert])
        assert same(weights.down[slot], tiny.experts[layer][2][expert])
    if tiny.biases:
        gate, up, down = tiny.biases[layer]
        assert weights.gate_up_bias is not None
        assert weights.down_bias is not None
        assert torch.equal(weights.gate_up_bias, torch.stack((gate, up), 1)[[2, 0]])
        assert torch.equal(weights.down_bias, down[[2, 0]])
    report, wanted = (
        audit(c) for c in (TensorStream(tiny.config, tiny.tensors.items()).checkpoint, Checkpoint.open(tmp_path))
    )
    assert (report.layers, report.roles, report.findings) == (wanted.layers, wanted.roles, wanted.findings)


def truth(tiny: TinyCheckpoint, layer: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return what the written experts make of ``x``, written out in float64."""
    gate, up, down = (payload.decode().double() for payload in tiny.experts[layer])
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights.tolist(), strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            row = x[token].double()
            inner = torch.stack((gate[expert] @ row, up[expert] @ row))
            out[token] += factor * (
                down[expert]
                @ activate_float64(inner, CheckpointLayer.open(Checkpoint.open(tiny.path), layer).spec.activation)
            )
    return out


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_moe", "bf16"), ("deepseek_v3", "fp8_block"), ("mixtral", "mxfp4")]
)
def test_streamed_layers_match_file_layers(tmp_path: Path, family: str, name: str) -> None:
    tiny = write_checkpoint(tmp_path, family, name, size=TinySize(experts=5))
    layer = max(tiny.experts)
    found, wanted = (
        load_layer(c, layer, device="cpu")
        for c in (TensorStream(tiny.config, shuffled(tiny.tensors)).checkpoint, tmp_path)
    )
    x = heavy_tailed(7, 256, seed=1).bfloat16()
    assert torch.equal(found(x), wanted(x))
    ids = torch.tensor([[at % 5, (at + 2) % 5] for at in range(7)])
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(7, 2, generator=torch.Generator().manual_seed(2)))
    alone = load_layer(TensorStream(tiny.config, tiny.tensors.items()).checkpoint, layer, device="cpu")
    alone.shared = None
    right = truth(tiny, layer, x, routing)
    assert float((alone(x, routing=routing).double() - right).norm() / right.norm()) < 0.01


FIRST = "model.layers.1.mlp.experts.2."
FAULTS: dict[str, tuple[type[CheckpointError], Callable[[dict[str, torch.Tensor]], object]]] = {
    "missing": (MissingTensorError, lambda t: t.pop(f"{FIRST}up_proj.weight")),
    "an expert is missing": (MissingTensorError, lambda t: [t.pop(n) for n in list(t) if n.startswith(FIRST)]),
    "unknown": (UnknownTensorError, lambda t: t.update({f"{FIRST}up_proj.zero": torch.zeros(2)})),
    "shape": (TensorMismatchError, lambda t: t.update({f"{FIRST}up_proj.weight": torch.zeros(64, 95).bfloat16()})),
    "dtype": (CheckpointError, lambda t: t.update({f"{FIRST}up_proj.weight": torch.zeros(64, 96, dtype=torch.int8)})),
    "router": (MissingTensorError, lambda t: t.pop("model.layers.1.mlp.gate.weight")),
    "several": (MissingTensorError, lambda t: [t.pop(f"{FIRST}{which}_proj.weight") for which in ("gate", "down")]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_name_the_file(tmp_path: Path, fault: str) -> None:
    tiny = write_checkpoint(tmp_path, size=TinySize(hidden=96, intermediate=64, experts=4))
    kind, edit = FAULTS[fault]
    edit(tiny.tensors)
    save_file(tiny.tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said: list[str] = []
    for source in (TensorStream(tiny.config, shuffled(tiny.tensors)).checkpoint, Checkpoint.open(tmp_path)):
        with pytest.raises(kind) as refused:
            load_layer(source, 1, device="cpu")
        with pytest.raises(kind):
            audit(source)
        said.append(str(refused.value).replace(str(source.path), "PATH"))
    assert said[0] == said[1]
    assert "layer 1" in said[0]


def test_put_refuses_impossible_tensors() -> None:
    arrived = TensorStream({"model_type": "mixtral"})
    assert arrived.put("x", torch.ones(2))
    with raises_with(DuplicateTensorError, "'x'"):
        arrived.put("x", torch.ones(2))

    class Part(torch.Tensor):
        """Stands for a tensor of which this process has a part."""

    for tensor, found in (
        (torch.ones(2, dtype=torch.complex128), r"Tensor of torch\.complex128 on cpu"),
        (torch.ones(2, device="meta"), r"Tensor of torch\.float32 on meta"),
        (torch.ones(2).as_subclass(Part), "Part of"),
    ):
        with pytest.raises(InputError, match=f"tensor 'y' is a {found}.*full_tensor"):
            arrived.put("y", tensor)
    with pytest.raises(ConfigError, match="model_type"):
        TensorStream({"model_type": "a clock"})


def test_put_copies_unless_memory_is_shared(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, size=SMALL)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    wanted = tiny.tensors[name].clone()
    copied, turned, shared = TensorStream(tiny.config), TensorStream(tiny.config), TensorStream(tiny.config, copy=False)
    givers = {
        copied: torch.nn.Parameter(wanted.clone()),  # which asks for gradients
        turned: wanted.mT.contiguous().mT,
        shared: wanted.clone(),
    }
    for arrived, tensor in givers.items():
        assert arrived.put(name, tensor)
        assert torch.equal(arrived.checkpoint.read(name), wanted)
        tensor.data.zero_()
    for arrived in (copied, turned):
        assert torch.equal(arrived.checkpoint.read(name), wanted)
    assert not bool(shared.checkpoint.read(name).any())
    rows = copied.checkpoint.read_slice(name, (slice(3, 9), slice(1, 5)))
    assert torch.equal(rows, wanted[3:9, 1:5])


def test_streamed_layers_release_their_memory(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "nvfp4", size=SMALL)
    arrived, left = TensorStream(tiny.config, copy=False), list[Any]()
    x = heavy_tailed(5, 96, seed=4).bfloat16()
    for number in (1, 0):
        for name, tensor in shuffled(tiny.tensors):
            if f".layers.{number}." in name:
                memory = np.frombuffer(
                    bytearray(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()), dtype=np.uint8
                )
                left.append(weakref.ref(memory))
                arrived.put(name, torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape))
                del memory
        assert all(reference() is not None for reference in left[-9:])
        layer = load_layer(arrived.checkpoint, number, device="cpu")
        arrived.release(number)
        assert not any(reference() is not None for reference in left)
        assert torch.equal(layer(x), load_layer(tmp_path, number, device="cpu")(x))
        with raises_with(InputError, "released"):
            load_router(CheckpointLayer.open(arrived.checkpoint, number))
    audit(arrived.checkpoint, deep=False)
    again = next(name for name in tiny.tensors if ".layers.1." in name)
    with pytest.raises(DuplicateTensorError, match="put twice"):
        arrived.put(again, tiny.tensors[again])


def test_partial_layers_are_skipped(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, size=SMALL)
    arrived = TensorStream(tiny.config)
    arrived.put("model.language_model.layers.0.self_attn.q_proj.weight", torch.ones(4, 4))
    for name, tensor in shuffled(tiny.tensors):
        if ".layers.1." in name:
            arrived.put(name.replace("model.layers", "model.language_model.layers"), tensor)
    x = heavy_tailed(5, 96, seed=4).bfloat16()
    layers = [load_layer(source, 1, device="cpu") for source in (arrived.checkpoint, tmp_path)]
    assert torch.equal(*(layer(x) for layer in layers))
    with raises_with(MissingTensorError, "layer 0"):
        load_layer(arrived.checkpoint, 0, device="cpu")


def test_wrapper_prefixes_are_read(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, size=SMALL)
    wrapped = {f"base_model.model.{n.replace('_proj.', '_proj.base_layer.')}": t for n, t in tiny.tensors.items()}
    moved = {n.replace("model.layers", "model.language_model.layers"): t for n, t in tiny.tensors.items()}
    for tensors in (wrapped, moved):
        arrived = TensorStream(tiny.config, placement=Placement(expert_ids=(1,)))
        kept = [name for name, tensor in shuffled(tensors) if arrived.put(name, tensor)]
        assert {name.split(".experts.")[1][0] for name in kept if ".experts." in name} == {"1"}
        weights = load_experts(CheckpointLayer.open(arrived.checkpoint, 1), Placement(expert_ids=(1,)))
        assert same(weights.down[0], tiny.experts[1][2][1])


def _on_ranks(rank: int) -> list[object]:
    """Load a layer whose tensors this rank was handed, in an order of its own; then one rank has other weights."""
    config, tensors = stored(Path(os.environ[FOLDER]))
    ranks = Ranks.of(same_tokens=True)
    held = ranks.placement(config["num_experts"])

    def layer(given: dict[str, torch.Tensor]) -> Any:
        arrived = TensorStream(config, placement=held)
        kept = sum(arrived.put(name, tensor) for name, tensor in shuffled(given, rank))
        assert kept < len(given)
        return arrived, load_layer(arrived.checkpoint, 1, device=ranks)

    x = heavy_tailed(6, config["hidden_size"], seed=9).bfloat16()
    arrived, own = layer(tensors)
    right = torch.equal(own(x), load_layer(os.environ[FOLDER], 1, device="cpu")(x))
    arrived.release(1)  # of the layer before the headers, and a few bytes, are still compared
    next_right = torch.equal(
        load_layer(arrived.checkpoint, 0, device=ranks)(x), load_layer(os.environ[FOLDER], 0, device="cpu")(x)
    )
    other = {name: tensor if rank == 0 else tensor + tensor.abs() / 64 for name, tensor in tensors.items()}
    return [right, next_right, error_of(lambda: layer(other))]


def test_ranks_are_handed_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, size=TinySize(experts=5))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for right, next_right, said in run_ranks(_on_ranks, 2):
        assert right
        assert next_right
        assert "ranks 0 and 1 differ: checkpoint" in str(said)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_slice_of_the_width(tmp_path: Path, tp_rank: int) -> None:
    tiny = write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=TinySize(hidden=96, intermediate=64, experts=3))
    held = Placement(expert_ids=(0, 2), tp_rank=tp_rank, tp_size=2)
    sources = (TensorStream(tiny.config, shuffled(tiny.tensors), placement=held).checkpoint, Checkpoint.open(tmp_path))
    found, wanted = (load_experts(CheckpointLayer.open(source, 0), held) for source in sources)
    assert same(found.gate_up, wanted.gate_up)
    assert same(found.down, wanted.down)
    assert torch.equal(found.gate_up_bias, wanted.gate_up_bias)


def test_rank_without_experts_knows_shapes(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, size=SMALL)
    held = Placement(rank=3, world_size=4, expert_ids=())
    checkpoint = TensorStream(tiny.config, tiny.tensors.items(), placement=held).checkpoint
    assert load_experts(CheckpointLayer.open(checkpoint, 0), held).down.shape == (0, 96, 64)
    with raises_with(InputError, "experts.1"):
        load_experts(CheckpointLayer.open(checkpoint, 0), linear(3))


def test_a_whole_model_is_handed_over() -> None:
    transformers = pytest.importorskip("transformers")
    from collegium.integrations.transformers import load_model

    config, tensors = stored(SHIPPED)
    assert json.loads((SHIPPED / "config.json").read_text()) == config
    found = load_model(TensorStream(config, shuffled(tensors)).checkpoint, device="cpu")
    wanted = load_model(SHIPPED, device="cpu")
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, wanted(ids).logits)
    assert isinstance(found.config, transformers.PretrainedConfig)
