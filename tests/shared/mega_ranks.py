"""Ranks that pass tokens through one kernel each: virtual ones of this process, on any device, against one rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import distributed

from collegium import (
    ActivationSpec,
    DeviceFacts,
    Limits,
    MoESpec,
    Overrides,
    Placement,
    Problem,
    RankError,
    Routing,
    RoutingSpec,
    encode_experts,
    plan,
)
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.kernels.enums import PHASE_COMBINE, PHASE_PUBLISH
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.groups import group_named
from collegium.parallel.local import Local
from collegium.parallel.peers import HEAD_BYTES, PeerBuffers
from collegium.parallel.rendezvous import rendezvous_of, timeout_seconds
from collegium.parallel.symm_mem import SymmMem
from collegium.parallel.symmetric_buffer import PeerArena, symmetric_buffers
from collegium.pipelines import PipelineParts
from collegium.pipelines.mega import Mega
from collegium.pipelines.split import Split
from collegium.planning import kernel_named
from collegium.runtime.memory import Region, memory_map
from collegium.runtime.symmetric import SymmetricWorkspace
from collegium.testing.compare import random_experts
from rough_tokens import rough_tokens, same, unmet
from split_layers import EXPERTS, replicated, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from collegium.runtime.memory import MemoryMap

__all__ = [
    "CASES",
    "MOST",
    "Case",
    "Ranks",
    "crowded",
    "deserted",
    "encoded",
    "given",
    "parts_of",
    "planned",
    "together",
]

MOST = 70
SMALL = TileChoice(block_n=64, block_t=16, warps=4, stages=2)


@dataclass(frozen=True)
class Case:
    """Sizes of a layer of EXPERTS experts and E4M3 tokens, and what is special about it."""

    hidden: int
    wide: int
    top_k: int
    activation: ActivationSpec = field(default_factory=ActivationSpec)
    bias: bool = True
    weights: str = "mxfp4"
    tokens: str = "fp8_token"

    @property
    def spec(self) -> MoESpec:
        """The layer."""
        return MoESpec(
            hidden_size=self.hidden,
            intermediate_size=self.wide,
            num_experts=EXPERTS,
            routing=RoutingSpec(top_k=self.top_k),
            activation=self.activation,
            weight_format=self.weights,
            expert_bias=self.bias,
        )


CASES = (
    Case(176, 96, 3),
    Case(90, 160, 2, ActivationSpec(kind="swiglu_oai", limit=0.8), bias=False),  # 16 does not divide the width
    Case(64, 70, 1, ActivationSpec(kind="relu2")),
    Case(176, 90, 2, weights="fp8_block", tokens="fp8_group128"),
    Case(272, 130, 3, ActivationSpec(kind="relu2"), weights="fp8_block", tokens="fp8_group128", bias=False),
    Case(208, 144, 3, weights="nvfp4"),
)


def planned(case: Case, placed: Placement | None, most: int = MOST, **choice: Any) -> Any:
    """Return the plan of ``case`` on a Hopper GPU, of this rank or of one that holds every expert."""
    facts = DeviceFacts(kind="cuda", name="pretended", capability=(9, 0), memory=1 << 36, sms=132)
    problem = Problem(spec=case.spec, device=facts, limits=Limits(max_tokens=most), placement=placed)
    return plan(problem, Overrides(activation_format=case.tokens, **choice))


def encoded(case: Case, device: torch.device, *, swapped: bool = False) -> Any:
    """Return the experts of all ranks; swapped: gate and up have changed places."""
    parts = case.spec.gate_up_parts
    plain = random_experts(EXPERTS, parts, case.wide, case.hidden, seed=1, bias=case.bias)
    if swapped:
        gate_up = replace(plain.gate_up, values=plain.gate_up.values.flip(1))
        bias = None if plain.gate_up_bias is None else plain.gate_up_bias.flip(1)
        plain = replace(plain, gate_up=gate_up, gate_up_bias=bias)
    made = encode_experts(plain, case.weights)
    moved = {n: None if (b := getattr(made, n)) is None else b.to(device) for n in ("gate_up_bias", "down_bias")}
    return replace(made, gate_up=made.gate_up.to(device), down=made.down.to(device), **moved)


def parts_of(weights: Any, made: Any, dispatcher: Any, *, small: bool) -> PipelineParts:
    """Return what a pipeline of the plan ``made`` is built from. small: with the least tiles."""
    packed: Any = kernel_named(made.kernel).pack(weights, made.problem.routed)
    if small:
        packed = replace(packed, tiles=(SMALL, SMALL))
    return PipelineParts(
        experts=packed,
        dispatcher=dispatcher,
        top_k=made.problem.spec.routing.top_k,
        num_experts=made.problem.slots,
    )


def given(case: Case, seed: int, tokens: int, *, hot: bool = False) -> tuple[Tensor, Routing]:
    """Return tokens and a routing with ids of -1 and of nobody; hot: every token has expert 0."""
    x, routing = rough_tokens(tokens, EXPERTS, case.top_k, case.hidden, seed=seed, hot=hot)
    return x.bfloat16(), routing


class Ranks:
    """``world`` ranks of this process on one device, each with a block that the others reach, and one that has all."""

    def __init__(self, case: Case, world: int, device: str = "cpu", *, most: int = MOST, swapped: bool = False) -> None:
        self.case, self.world, self.device = case, world, torch.device(device)
        placed = [replicated(EXPERTS, rank, world) for rank in range(world)]
        plans = [planned(case, own, most, pipeline="mega") for own in placed]
        assert len({made.regions for made in plans}) == 1, "one map of memory on all ranks"
        self.places = memory_map((Region("head", HEAD_BYTES), *plans[0].regions))
        weights = encoded(case, self.device, swapped=swapped)
        self.tables = [ExpertMap(own, EXPERTS, self.device) for own in placed]
        self.blocks = [torch.zeros(self.places.nbytes, dtype=torch.uint8, device=device) for _ in placed]
        self.heads = [block[:HEAD_BYTES].view(torch.int64) for block in self.blocks]
        self.mirrors = [torch.zeros(1, dtype=torch.int64, device=device) for _ in placed]
        self.memories = [PeerArena(block, self.places) for block in self.blocks]
        self.pipelines: list[Mega] = []
        for made, own, table in zip(plans, placed, self.tables, strict=True):
            inner = Local(num_experts=made.problem.slots)
            blocks: Any = None
            reach = SymmMem(inner=inner, expert_map=table, limit=most, blocks=blocks, on_gpu=True)
            self.pipelines.append(Mega(parts=parts_of(taken_by(weights, own), made, reach, small=False)))
        whole = planned(case, None, most)
        self.one = Split(parts=parts_of(weights, whole, Local(num_experts=EXPERTS), small=self.device.type == "cpu"))

    def begin(self, counts: list[int], *, seconds: float | None = None, layers: tuple[int, ...] = ()) -> None:
        """Poison all memory and let the next pass be one of as many tokens on each rank."""
        if seconds is None:  # interpreted, a wait that is not over at once never is
            seconds = 30.0 if self.device.type == "cuda" else 1e-3
        for rank, (memory, block) in enumerate(zip(self.memories, self.blocks, strict=True)):
            block[HEAD_BYTES:] = 255
            deltas = [other.data_ptr() - block.data_ptr() for other in self.blocks]
            memory.peers = PeerBuffers(
                rank=rank,
                ranks=tuple(range(self.world)),
                layer=layers[rank] if layers else 5,
                bound=max(counts),
                timeout=seconds,
                head=self.heads[rank],
                deltas=torch.tensor([*deltas, self.mirrors[rank].data_ptr()], device=self.device),
            )

    def forget(self) -> None:
        """Begin anew after a pass in which a rank gave up."""
        for head in self.heads:
            head.zero_()

    def phase(
        self, rank: int, inputs: tuple[Tensor, Routing], out: Tensor, phases: tuple[int, int], *, shared: bool = True
    ) -> None:
        """Let a rank go through some phases of a pass."""
        x, routing = inputs
        self.pipelines[rank].run(x, routing, self.memories[rank], out, x if shared else None, phases=phases)

    def everybody(self, inputs: list[tuple[Tensor, Routing]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return what a pass gives each rank, whose phases follow each other."""
        self.begin([x.shape[0] for x, _ in inputs])
        outs = [torch.full(x.shape, torch.inf, dtype=dtype, device=self.device) for x, _ in inputs]
        for phase in range(PHASE_PUBLISH, PHASE_COMBINE + 1):
            for rank, own in enumerate(inputs):
                self.phase(rank, own, outs[rank], (phase, phase))
        return outs

    def wanted(self, inputs: tuple[Tensor, Routing], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return what one rank that has all experts gives."""
        x, routing = inputs
        return self.one(x, routing, dtype=dtype, shared=lambda: x)

    def each(self, make: Callable[[int], tuple[Tensor, Routing]]) -> list[tuple[Tensor, Routing]]:
        """Return what ``make`` gives for each rank, on the device."""
        found = [make(rank) for rank in range(self.world)]
        return [
            (
                x.to(self.device),
                Routing(topk_ids=r.topk_ids.to(self.device), topk_weights=r.topk_weights.to(self.device)),
            )
            for x, r in found
        ]


@dataclass(frozen=True)
class _Process:
    """One rank of a process of its own."""

    case: Case
    reach: SymmMem
    number: int
    places: MemoryMap
    mega: Mega
    one: Split

    def run(self, x: Tensor, routing: Routing, *, seconds: float | None = None) -> Tensor:
        """Return a whole pass in one launch; with ``seconds`` of one that the ranks did not agree on, of 4 tokens."""
        out = torch.full(x.shape, torch.inf)
        space = self.reach.blocks.acquire()
        memory = space.memory(self.places)
        assert isinstance(memory, PeerArena)
        if seconds is None:
            self.reach.sync_pass(memory, self.number, *routing.topk_ids.shape)
        else:
            memory.peers = unmet(space, self.reach.blocks.ranks, layer=0, seconds=seconds)
        self.mega.run(x, routing, memory, out, x)
        self.reach.blocks.release(space)
        return out


def _process(case: Case, rank: int, world: int) -> _Process:
    placed, cpu = replicated(EXPERTS, rank, world), torch.device("cpu")
    made, whole, weights = planned(case, placed, pipeline="mega"), planned(case, None), encoded(case, cpu)
    places, blocks = memory_map(made.regions), symmetric_buffers("", cpu)
    inner, table = Local(num_experts=made.problem.slots), ExpertMap(placed, EXPERTS, cpu)
    reach = SymmMem(inner=inner, expert_map=table, limit=MOST, blocks=blocks, on_gpu=True)
    mega = Mega(parts=parts_of(taken_by(weights, placed), made, reach, small=False))
    one = Split(parts=parts_of(weights, whole, Local(num_experts=EXPERTS), small=True))
    return _Process(case, reach, blocks.register_layer(places), places, mega, one)


def together(rank: int) -> list[str]:
    """Return where one launch of each process gives other bits than one rank, in several passes of several layers."""
    world, faults = distributed.get_world_size(), list[str]()
    layers = [_process(CASES[index], rank, world) for index in (0, 1, 3)]
    for turn, counts in enumerate(((3, 1, 0, 6), (0, 0, 0, 0), (0, 5, 2, 1), (17, 2, 9, 4), (1, 1, 1, 1))):
        for layer in layers:
            x, routing = given(layer.case, 100 * turn + rank, counts[rank], hot=turn == 3)
            out = layer.run(x, routing)
            wanted = layer.one(x, routing, dtype=torch.float32, shared=lambda x=x: x)
            if not same(out, wanted):
                faults.append(f"{layer.case}, {counts[:world]}: other bits than one rank")
    layers[0].reach.blocks.check()
    return faults


def deserted(rank: int) -> list[str]:
    """Return errors and output where the last rank does not come to a pass, then where all go on with a new block."""
    world, found = distributed.get_world_size(), list[str]()
    timeout_seconds(30)
    layer = _process(CASES[0], rank, world)
    blocks = layer.reach.blocks
    inputs = given(CASES[0], rank, 4)

    def finite() -> bool:
        return same(layer.run(*inputs), layer.one(*inputs, dtype=torch.float32, shared=lambda: inputs[0]))

    assert finite()
    # A look at the clock is a microsecond in the interpreter.
    for last, seconds in ((False, 5e-6), (True, 30.0)):
        if last == (rank == world - 1):
            found.append(f"all NaN {bool(layer.run(*inputs, seconds=seconds).isnan().all())}")
        rendezvous_of().exchange(None, "everybody who came has given up")
    try:
        blocks.check()
        found.append("no error")
    except RankError as error:
        found.append(f"{error.phase}; ranks {error.ranks}; {error}")
    blocks.renew()
    found.append(f"renewed {finite()}")
    blocks.check()
    return found


def crowded(process: int, programs: int) -> list[str]:
    """Return where ``programs`` processes a rank, its programs, which run at once, give other bits than one rank.

    Triton's interpreter runs a grid's programs one after the other; here each process runs one of them, in memory that
    all map.
    """
    case, cpu, faults = CASES[0], torch.device("cpu"), list[str]()
    world, (rank, program) = distributed.get_world_size() // programs, divmod(process, programs)
    placed = replicated(EXPERTS, rank, world)
    made, whole, weights = planned(case, placed, pipeline="mega"), planned(case, None), encoded(case, cpu)
    places = memory_map((Region("head", HEAD_BYTES), *made.regions, Region("out", 4 * MOST * case.hidden)))
    found = SymmetricWorkspace(group_named(""), cpu, places.nbytes).blocks[::programs]
    head, own = found[rank][:HEAD_BYTES].view(torch.int64), found[rank]
    deltas = [block.data_ptr() - own.data_ptr() for block in found]
    mirror = torch.zeros(1, dtype=torch.int64)
    table, inner, nobody = ExpertMap(placed, EXPERTS, cpu), Local(num_experts=made.problem.slots), None
    reach = SymmMem(inner=inner, expert_map=table, limit=MOST, blocks=nobody, on_gpu=True)  # pyright: ignore[reportArgumentType]
    mega = Mega(parts=parts_of(taken_by(weights, placed), made, reach, small=False))
    one = Split(parts=parts_of(weights, whole, Local(num_experts=EXPERTS), small=True))
    interpreter: Any = import_module("triton.runtime.interpreter").interpreter_builder
    size, place = interpreter.set_grid_dim, interpreter.set_grid_idx
    for turn, counts in enumerate(((3, 1), (0, 5), (24, 9), (1, 0))):
        memory = PeerArena(own, places)
        peers = PeerBuffers(
            rank=rank,
            ranks=tuple(range(world)),
            layer=3,
            bound=max(counts),
            timeout=1.0,
            head=head,
            deltas=torch.tensor([*deltas, mirror.data_ptr()]),
        )
        memory.peers = peers
        rendezvous_of().exchange(None, "nobody reads the pass before")
        if program == 0:
            own[HEAD_BYTES * (turn > 0) :] = 255 * (turn > 0)
        rendezvous_of().exchange(None, "memory is poisoned")
        x, routing = given(case, 10 * turn + rank, counts[rank], hot=turn == 2)
        out = memory.alloc("out", tuple(x.shape), torch.float32)
        time.sleep(0.1 * ((turn + process) % 3))  # any of them may be late
        with (
            patch.object(interpreter, "set_grid_dim", lambda *_: size(programs, 1, 1)),
            patch.object(interpreter, "set_grid_idx", lambda *_: place(program, 0, 0)),
        ):
            mega.run(x, routing, memory, out, x)
        rendezvous_of().exchange(None, "all programs have ended")
        if not same(out, one(x, routing, dtype=torch.float32, shared=lambda x=x: x)):
            faults.append(f"{counts}, rank {rank}")
        if head[133] != 0:
            faults.append(f"{counts}, rank {rank}: {head[128:136].tolist()}")
    return faults
