"""Passes whose experts store each row at its owner's: Triton's, with files that all ranks map, against one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed

from collegium import DeviceFacts, Limits, MoESpec, Overrides, Problem, Routing, RoutingSpec, encode_experts, plan
from collegium.experts.triton import tiling
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.ops import permute as ordering
from collegium.parallel import symm_mem
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.local import Local
from collegium.parallel.rendezvous import rendezvous_of
from collegium.parallel.symm_mem import SymmMem
from collegium.parallel.symmetric_buffer import PeerArena, symmetric_buffers
from collegium.pipelines import PipelineParts
from collegium.pipelines.base import Pipeline
from collegium.pipelines.split import SplitKind
from collegium.planning import kernel_named
from collegium.runtime.memory import MemoryMap, memory_map
from collegium.testing.compare import heavy_tailed, random_experts
from prefill_on_cpu import TILE
from rough_tokens import same
from split_layers import EXPERTS, replicated, taken_by

__all__ = ["store"]

MOST, WIDE = 9, 96
TURNS = ((3, 1, 0, 9), (0, 4, 2, 1), (0, 0, 0, 0), (9, 2, 5, 0))
SMALL = TileChoice(block_n=64, block_t=16, warps=4, stages=2)


@dataclass(frozen=True)
class Case:
    """carried: the router weight multiplies the input. large: the tiles of large batches."""

    weights: str
    activations: str
    hidden: int
    top_k: int
    carried: bool = False
    large: bool = False


CASES = (
    Case("bf16", "bf16", 90, 3),  # 16 does not divide the width
    Case("mxfp4", "fp8_token", 176, 2),
    Case("fp8_block", "fp8_group128", 272, 2, large=True),
    Case("bf16", "bf16", 64, 1, carried=True),
)


@dataclass(frozen=True)
class _Layer:
    case: Case
    reach: SymmMem
    number: int
    places: MemoryMap
    split: Pipeline
    alone: Pipeline

    def run(self, x: Tensor, routing: Routing, *, stored: bool = True) -> tuple[Tensor, Tensor]:
        """Return the layer's output in a pass of kernels, and what came to this rank's rows, poisoned before."""
        # The interpreter rounds to bfloat16 otherwise than torch.
        (tokens, top_k), out = routing.topk_ids.shape, torch.full(x.shape, torch.inf)
        space = self.reach.blocks.acquire()
        memory = space.memory(self.places)
        assert isinstance(memory, PeerArena)
        self.reach.sync_pass(memory, self.number, tokens, top_k)
        assert memory.peers is not None
        memory.peers = replace(memory.peers, blocks=())
        shape = memory.peers.bound * top_k, self.case.hidden
        rows = memory.part("experts").alloc("rows", shape, torch.bfloat16)
        rendezvous_of().exchange(None, "no peer reads rows of the pass before")
        rows.fill_(torch.nan)
        # Kernels order the rows too, in memory that peers reach.
        with patch.object(symm_mem, "STORE_REMOTE", new=stored), patch.object(ordering, "on_device", _everywhere):
            self.split(x, routing, memory, dtype=torch.float32, shared=lambda: x, out=out)
        self.reach.blocks.release(space)
        self.reach.blocks.check()
        return out, rows.clone()


def _tiles(case: Case) -> Any:
    """Let few rows be a large batch where the case asks for it."""
    return patch.object(tiling, "prefill_tile", _large if case.large else tiling.prefill_tile)


def _large(*_: object, **__: object) -> TileChoice:
    return TILE


def _everywhere(_: Tensor) -> bool:
    return True


def _layer(case: Case, rank: int, world: int) -> _Layer:
    rule = RoutingSpec(top_k=case.top_k, weight_on_input=case.carried, renormalize=not case.carried)
    spec = MoESpec(
        hidden_size=case.hidden,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=rule,
        weight_format=case.weights,
        expert_bias=True,
    )
    facts = DeviceFacts(kind="cuda", name="pretended", capability=(9, 0), memory=1 << 36, sms=132)
    placed = replicated(EXPERTS, rank, world)
    asked = Problem(spec=spec, device=facts, limits=Limits(max_tokens=MOST), placement=placed)
    choice = Overrides(activation_format=case.activations)
    with _tiles(case):
        chosen, whole = plan(asked, choice), plan(replace(asked, placement=None), choice)
    assert chosen.dispatcher == "symm_mem"
    plain = random_experts(EXPERTS, 2, WIDE, case.hidden, seed=1, bias=True)
    made = encode_experts(plain, case.weights)

    def packed(weights: Any, planned: Any) -> Any:
        own: Any = kernel_named(planned.kernel).pack(weights, planned.problem.routed)
        return own if case.large else replace(own, tiles=(SMALL, SMALL))

    places, blocks = memory_map(chosen.regions), symmetric_buffers("", torch.device("cpu"))
    reach = SymmMem(
        inner=Local(num_experts=chosen.problem.slots, weight_on_input=case.carried),
        expert_map=ExpertMap(placed, EXPERTS, "cpu"),
        limit=MOST,
        blocks=blocks,
        on_gpu=True,
    )
    own = PipelineParts(
        experts=packed(taken_by(made, placed), chosen),
        dispatcher=reach,
        top_k=case.top_k,
        num_experts=chosen.problem.slots,
    )
    local = Local(num_experts=EXPERTS, weight_on_input=case.carried)
    one = PipelineParts(experts=packed(made, whole), dispatcher=local, top_k=case.top_k, num_experts=EXPERTS)
    return _Layer(case, reach, blocks.register_layer(places), places, SplitKind().build(own), SplitKind().build(one))


def _given(case: Case, turn: int, rank: int, tokens: int) -> tuple[Tensor, Routing]:
    seed = 100 * turn + rank
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, : case.top_k]
    ids[:2] = torch.arange(case.top_k)  # hot experts
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.05, (1 << 40) + 1)
    weights = heavy_tailed(max(1, tokens), case.top_k, seed=seed + 7, channels=False)[:tokens]
    x = heavy_tailed(max(1, tokens), case.hidden, seed=seed)[:tokens].bfloat16()
    return x, Routing(topk_ids=ids, topk_weights=weights)


def store(rank: int) -> list[str]:
    """Return what passes give otherwise than one rank, and otherwise than where peers read the rows."""
    world, faults, seen = distributed.get_world_size(), list[str](), list[bool]()
    layers = [_layer(case, rank, world) for case in CASES]
    collect = symm_mem.collect

    def noted(*args: Any) -> Tensor:
        seen.append(args[2].stored)
        return collect(*args)

    for turn, counts in enumerate(TURNS):
        for layer in layers:
            case, tokens = layer.case, counts[rank]
            where = f"{case}, {counts[:world]}"
            x, routing = _given(case, turn, rank, tokens)
            with patch.object(symm_mem, "collect", noted), _tiles(case):
                out, rows = layer.run(x, routing)
                read, _ = layer.run(x, routing, stored=False)
                wanted = layer.alone(x, routing, dtype=torch.float32, shared=lambda x=x: x)
            for what, other in (("one rank", wanted), ("rows that peers read", read)):
                if not same(out, other):
                    faults.append(f"{where}: other bits than {what}")
            known = (routing.topk_ids >= 0) & (routing.topk_ids < EXPERTS)
            stored = ~rows.isnan().all(dim=1)
            if stored.nonzero().flatten().tolist() != known.flatten().nonzero().flatten().tolist():
                faults.append(f"{where}: rows stored for others than the assignments of this rank")
    if seen != [True, False] * (len(seen) // 2) or len(seen) != 2 * len(CASES) * sum(any(c[:world]) for c in TURNS):
        faults.append(f"stored: {seen}")
    return faults
