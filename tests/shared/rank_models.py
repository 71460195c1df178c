"""Whole models whose experts several ranks share, against the same model in one process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from collegium import Limits, Ranks
from collegium.commands import verify
from collegium.integrations.transformers import Decoder, layers_of, load_model
from collegium.parallel.rendezvous import timeout_seconds
from collegium.runtime.warm_up import warm_up
from commands import command
from rank_cases import FOLDERS
from ranks import error_of

__all__ = ["by_command", "captures", "compare_models", "one_computes_wrongly", "one_fails"]


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
    if not torch.equal(
        Decoder(model).generate(ids, 8, stop=(stop,))[:, : ids.shape[1] + 1], wanted[:, : ids.shape[1] + 1]
    ):
        faults.append("another text with a stop")
    return faults


def _sliced(rank: int, folder: str, alone: Any, device: str) -> list[str]:
    """Every rank holds a slice of all experts: numbers a little off, and the same on every rank."""
    model = load_model(folder, device=Ranks.of(slices=distributed.get_world_size()))
    ids = torch.arange(3, 10, device=device)[None]
    with torch.inference_mode():
        found, wanted = model(ids).logits, alone(ids).logits
    others: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(others, (found.cpu(), Decoder(model).generate(ids, 6).cpu()))
    same = all(torch.equal(a, b) for other in others for a, b in zip(other, others[0], strict=True))
    near = bool((found - wanted).norm() <= 0.05 * wanted.norm())
    return [] if same and near else [f"same on all ranks: {same}, near: {near}, rank {rank}"]


def compare_models(rank: int) -> list[str]:
    """Return what is wrong with the models of the environment's list."""
    device = f"cuda:{rank}" if "nccl" in distributed.get_backend_config() else "cpu"
    faults: list[str] = []
    for folder in os.environ[FOLDERS].split(os.pathsep):
        alone = load_model(folder, device=device)
        for way in (_same, _apart, _sliced):
            faults += [f"{Path(folder).name}, {way.__name__}: {fault}" for fault in way(rank, folder, alone, device)]
    return faults


def captures(rank: int) -> list[str]:
    """Return what is wrong with decoding in a CUDA graph, where ranks read each other's memory."""
    folder, faults = os.environ[FOLDERS], list[str]()
    alone = Decoder(load_model(folder, device=f"cuda:{rank}"))
    model = load_model(folder, device=Ranks.of(same_tokens=True))
    shared = Decoder(model)
    for tokens in (24, 9):
        ids = torch.arange(3, 3 + tokens, device=f"cuda:{rank}").repeat(2, 1)
        if not torch.equal(shared.generate(ids, tokens), alone.generate(ids, tokens)):
            faults.append(f"another text after {tokens} tokens")
        kinds = {(layer.plan.dispatcher, layer.plan.capturable) for layer in layers_of(model)}
        if kinds != {("symm_mem", True)} or not shared.captured:
            faults.append(f"{kinds}, captured {shared.captured}")
    for layer in layers_of(model):
        layer.check()
    return faults


def by_command(rank: int) -> Any:
    """Return what the command says, twice, in a process whose caller has joined the others already."""
    folder = os.environ[FOLDERS]
    found = [
        command("generate", folder, "--tokens", 6, "--device", "cpu", "--prompt", prompt, "--temperature", 1, "--json")
        for prompt in ("Once", "The old king")
    ]
    assert distributed.is_initialized()
    return found


def one_fails(rank: int) -> Any:
    """Return what a rank says where another one does not come to a call, and where it has no checkpoint."""
    folder = os.environ[FOLDERS]
    model: Any = load_model(folder, device=Ranks.of(same_tokens=True))
    call, started = "none", time.monotonic()
    timeout_seconds(2)
    if rank:
        with torch.inference_mode():
            call = error_of(lambda: model(torch.ones(1, 3, dtype=torch.int64)))
    load = command("generate", folder if rank else folder + "x", "--tokens", 2, "--device", "cpu")
    return call, *load, time.monotonic() - started


def one_computes_wrongly(rank: int) -> Any:
    """Return each rank's report where the experts of rank 1 are off by a twentieth."""
    right = verify._run
    if rank:
        verify._run = lambda *asked: right(*asked) * 1.05
    report = verify.verify_model(os.environ[FOLDERS], experts=4, device=Ranks.of())
    return report.passed, [(p.layer, p.part, p.worst, p.passed, p.checked) for p in report.checks]
