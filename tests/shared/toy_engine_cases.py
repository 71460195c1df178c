"""What the toy engine serves, against float64: at the start, from graphs, and after an update of all weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from collegium import ActivationSpec
from collegium.testing.compare import heavy_tailed, relative_error
from toy_engine import (
    HIDDEN,
    TOP_K,
    Engine,
    batched_experts,
    named_tensors,
    random_model,
)
from truth import moe_truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from toy_engine import BlockWeights, Mode

__all__ = ["FOLDER", "batched_faults", "served_faults"]

FOLDER = "COLLEGIUM_TEST_ENGINE"  # where the ranks of a test find the engine's checkpoints, by weight format


def routed_truth(block: BlockWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the routed experts' output in float64."""
    return moe_truth(x, block.experts.gate_up.decode(), block.experts.down.decode(), ids, weights, ActivationSpec())


def block_truth(block: BlockWeights, x: Tensor) -> Tensor:
    """Return what a block computes for ``x [T, H]``, in float64 but for the gate's logits."""
    weights, ids = (x.float() @ block.gate.T).softmax(-1).topk(TOP_K)
    routed = routed_truth(block, x, ids, weights / weights.sum(-1, keepdim=True))
    one = torch.zeros(len(x), 1, dtype=torch.int64)
    matrices = block.shared.gate_up.decode(), block.shared.down.decode()
    return x.double() + routed + moe_truth(x, *matrices, one, torch.ones(len(x), 1), ActivationSpec())


def requests_of(rank: int, turn: int) -> list[Tensor]:
    """Return requests of one to seven tokens; other ranks have another number of them."""
    lengths = ([3, 1, 7], [1], [5, 2], [4, 4, 1])[(rank + turn) % 4]
    return [heavy_tailed(length, HIDDEN, seed=10 * turn + 100 * rank + length) for length in lengths]


def _faults(engine: Engine, model: Sequence[BlockWeights], label: str, limit: float) -> list[str]:
    """Return which blocks are off, each for the input that the engine computed for it."""
    faults: list[str] = []
    dtype = torch.float32 if engine.dtype == "fp32" else torch.bfloat16
    for turn in range(2):
        own = engine.rank if engine.mode == "experts" else 0
        requests = [request.to(engine.device, dtype) for request in requests_of(own, turn)]
        x = torch.cat(requests)
        with torch.inference_mode():
            for number, (block, weights) in enumerate(zip(engine.blocks, model, strict=True)):
                y = block(x)
                # Without the residual, which would hide errors.
                error = relative_error((y - x).cpu(), block_truth(weights, x.cpu()) - x.cpu().double())
                if not error < limit:
                    faults.append(f"{label}, turn {turn}, rank {engine.rank}: block {number} is {error} off")
                x = y
        served = engine.serve(requests)
        if [len(output) for output in served] != [len(request) for request in requests]:
            faults.append(f"{label}: {len(served)} outputs of other lengths")
        if relative_error(torch.cat(served).cpu(), x.cpu()) > limit:
            faults.append(f"{label}: a batch differs from its blocks")
    return faults


def served_faults(rank: int, *, weight_format: str, mode: Mode, device: str = "cpu") -> list[str]:
    """Return what an engine on this rank computes otherwise than its model."""
    on_gpu = device != "cpu"
    limit = 0.06 if on_gpu else 1e-4
    folder = Path(os.environ[FOLDER]) / weight_format
    place = f"cuda:{rank}" if on_gpu else "cpu"
    engine = Engine(folder, weight_format, device=place, dtype="bf16" if on_gpu else "fp32", mode=mode)
    model = random_model(weight_format)
    faults = _faults(engine, model, "eager", limit)
    layers = [block.layer for block in engine.layer_blocks]
    sliced = engine.world > 1 and mode == "slices"
    faults += [f"{layer.plan.explain()}" for layer in layers if "modules    gate Gate" not in layer.plan.explain()]
    faults += ["reduced" for layer in layers if layer.output_is_reduced == sliced]
    if all(layer.plan.capturable for layer in layers) or not on_gpu:
        engine.capture()
        faults += _faults(engine, model, "captured", limit)
    addresses = [tensor.data_ptr() for layer in layers for tensor in layer.experts.slots()]
    other = random_model(weight_format, seed=1000)
    engine.update({name: tensor.to(place) for name, tensor in named_tensors(other).items()})
    if engine.world > 1:
        distributed.barrier()
    if addresses != [tensor.data_ptr() for layer in layers for tensor in layer.experts.slots()]:
        faults.append("an update moved weights")
    faults += _faults(engine, other, "updated", limit)
    if not _faults(engine, model, "", limit):
        faults.append("new weights compute as the old ones")
    return faults


def batched_faults(device: str) -> list[str]:
    """Return where the engine's batched experts are off."""
    faults: list[str] = []
    for weight_format in ("bf16", "fp8_block"):
        block = random_model(weight_format)[0]
        tensors: dict[str, Any] = {}
        for name, payload in (("w1", block.experts.gate_up), ("w2", block.experts.down)):
            stored = payload.tensors()
            for key, suffix in (("values", ""), ("codes", ""), ("scales", "_scale")):
                if key in stored:
                    tensor = stored[key].flatten(1, 2) if name == "w1" else stored[key]
                    tensors[name + suffix] = tensor.to(device)
        x = heavy_tailed(11, HIDDEN, seed=3)
        weights, ids = (x @ block.gate.T).softmax(-1).topk(TOP_K)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        found = batched_experts(
            x.to(device, dtype), topk_weights=weights.to(device), topk_ids=ids.to(device), **tensors
        )
        error = relative_error(found.cpu(), routed_truth(block, x, ids, weights))
        if not error < 0.06:
            faults.append(f"{weight_format}: {error} off")
    return faults
