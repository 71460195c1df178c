"""Whole models whose experts several ranks share, against the same model in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from collegium import Limits, Ranks
from collegium.integrations.transformers import Decoder, layers_of, load_model
from collegium.runtime.warming import warm_up
from rank_cases import FOLDERS

__all__ = ["compare_models"]


def _same(rank: int, folder: str, alone: Any, device: str) -> list[str]:
    """Attention replicated: logits, and text, have the bits of one process, whatever the seeds of the ranks."""
    ranks, faults = Ranks.of(same_tokens=True), list[str]()
    # Fewer than the prompt has: passes are cut on every rank alike.
    model = load_model(folder, device=ranks, limits=Limits(max_tokens=8))
    layers = layers_of(model)
    held = {len(layer.plan.problem.local_experts) for layer in layers}
    assert len(layers) >= 2 - ("llama4" in folder)
    assert max(held) < layers[0].spec.num_experts
    assert {layer.plan.problem.placement.same_tokens for layer in layers} == {True}
    warm_up(layers)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (2, 9), generator=generator).to(device)
    with torch.inference_mode():
        if not torch.equal(model(ids).logits, alone(ids).logits):
            faults.append("other logits")
    for asked in ({}, {"penalty": 1.3, "stop": (5,)}):
        wanted = Decoder(alone).generate(ids, 9, **asked)
        if not torch.equal(Decoder(model).generate(ids, 9, **asked), wanted):
            faults.append(f"another text, {asked}")
    torch.manual_seed(rank)
    drawn = Decoder(model).generate(ids, 9, temperature=1.5)
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, drawn.cpu())
    if not all(torch.equal(each, found[0]) for each in found):
        faults.append("ranks draw different tokens")
    return faults


def _apart(rank: int, folder: str, alone: Any, device: str) -> list[str]:
    """Every rank writes a text of its own, which ends when it ends."""
    model, faults = load_model(folder, device=Ranks.of(order="round_robin")), list[str]()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 60, (1, 3 + rank), generator=generator).to(device)
    wanted = Decoder(alone).generate(ids, 8)
    if not torch.equal(Decoder(model).generate(ids, 8), wanted):
        faults.append("another text")
    # Rank 0 would stop after its first token; the others' experts still need it.
    stop = int(wanted[0, ids.shape[1]]) if rank == 0 else 63
    if not torch.equal(Decoder(model).generate(ids, 8, stop=(stop,))[:, : ids.shape[1] + 1], wanted[:, : ids.shape[1] + 1]):
        faults.append("another text with a stop")
    return faults


def compare_models(rank: int) -> list[str]:
    """Return what is wrong with the models of the environment's list."""
    device = f"cuda:{rank}" if distributed.get_backend() == "nccl" else "cpu"
    faults: list[str] = []
    for folder in os.environ[FOLDERS].split(os.pathsep):
        alone = load_model(folder, device=device)
        for way in (_same, _apart):
            faults += [f"{Path(folder).name}, {way.__name__}: {fault}" for fault in way(rank, folder, alone, device)]
    return faults
