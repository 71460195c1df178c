"""Defects of the five systems that Collegium set out to replace, each as a test of what a user meets here.

``docs/developer/seeds.md`` has the list, and the tests elsewhere that rule out the rest of it. Kernels for GPUs run
in Triton's interpreter, in workspaces of exactly the planned size.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from collegium import (
    ActivationSpec,
    DeviceFacts,
    ExpertWeights,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    Routing,
    RoutingSpec,
    encode_experts,
    moe,
    plan,
)
from collegium.formats.unquantised import DTYPES, as_stored
from collegium.ops.quantize import ACTIVATION_FORMATS, activation_format
from collegium.parallel import rendezvous
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of
from collegium.parallel.symmetric_buffer import symmetric_buffers
from collegium.runtime.memory import MemoryMap, Region, Workspaces, memory_map
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from ranks import run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, equal, layer_of
from truth import moe_truth

if TYPE_CHECKING:
    from torch import Tensor

CPU, HOPPER = DeviceFacts(kind="cpu", threads=1), DeviceFacts(kind="cuda", name="H200", capability=(9, 0), sms=132)
LIMITED: Any = ("swiglu", "swiglu_oai", "swiglu_step")
ROOT = Path(__file__).parents[2]
TRITON = importlib.util.find_spec("triton") is not None
# Weights, activations, kernel, relative L2 error against float64 on the decoded weights.
CASES = [
    ("fp32", "fp32", "reference", 1e-5),
    ("bf16", "bf16", "cpu_grouped", 0.01),
    ("mxfp4", "bf16", "cpu_grouped", 0.01),
    ("bf16", "bf16", "triton_bf16", 0.01),
    ("mxfp4", "bf16", "triton_w4a16", 0.01),
    ("mxfp4", "fp8_token", "triton_w4a8", 0.06),
    ("fp8_block", "fp8_group128", "triton_fp8", 0.06),
]
if importlib.util.find_spec("numba") is not None and "AVX" in torch.backends.cpu.get_cpu_capability():
    CASES.insert(3, ("mxfp4", "bf16", "cpu_fused", 0.01))
CASES = [case for case in CASES if TRITON or not case[2].startswith("triton")]


def named(case: tuple[str, str, str, float]) -> str:
    return f"{case[2]}-{case[0]}-{case[1]}"


each_kernel = pytest.mark.parametrize("case", CASES, ids=named)


def built(
    case: tuple[str, str, str, float], *, experts: int, top_k: int, most: int, wide: int = 128, **more: Any
) -> tuple[MoELayer, ExpertWeights[Any]]:
    """Return a layer with workspaces of what its plan asks for, and its weights."""
    weights, activations, kernel, _ = case
    activation = more.pop("activation", ActivationSpec())
    spec = MoESpec(
        hidden_size=more.pop("hidden", 128),
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=top_k),
        activation=activation,
        weight_format=weights,
    )
    dtype: Any = more.pop("dtype", "fp32" if activations == "fp32" else "bf16")
    device = HOPPER if kernel.startswith("triton") else CPU
    problem = Problem(spec=spec, device=device, limits=Limits(max_tokens=most), dtype=dtype, **more)
    made = encode_experts(random_experts(len(problem.local_experts), 2, wide, spec.hidden_size, seed=1), weights)
    dispatcher = None if problem.alone else "partial"
    chosen = plan(problem, Overrides(kernel=kernel, activation_format=activations, dispatcher=dispatcher))
    layer = MoELayer(made, chosen)
    layer.workspaces = Workspaces(torch.device("cpu"))
    layer.workspaces.reserve(MemoryMap(layer.plan.regions).nbytes)
    return layer, made


def tokens_of(layer: MoELayer, count: int, *, seed: int = 2) -> Tensor:
    return heavy_tailed(count, layer.spec.hidden_size, seed=seed).to(DTYPES[layer.plan.problem.dtype])


def error_of(
    made: ExpertWeights[Any], x: Tensor, routing: Routing, found: Tensor, activation: ActivationSpec | None = None
) -> float:
    gate_up, down = made.gate_up.decode(), made.down.decode()
    truth = moe_truth(x, gate_up, down, routing.topk_ids, routing.topk_weights, activation or ActivationSpec())
    return relative_error(found, truth)


@pytest.mark.parametrize("case", [case for case in CASES if "w4a" not in case[2]], ids=named)
def test_uneven_routing_at_full_capacity(case: Any) -> None:
    """257 + 255 rows fill the 512 planned ones, where experts padded to 128 rows each would take 640."""
    layer, made = built(case, experts=2, top_k=1, most=512, hidden=64, wide=64)
    for first in (257, 512):
        ids = (torch.arange(512) >= first).long()[torch.randperm(512, generator=torch.Generator().manual_seed(first))]
        routing = Routing(topk_ids=ids[:, None], topk_weights=torch.rand(512, 1) + 0.5)
        x = tokens_of(layer, 512)
        assert error_of(made, x, routing, layer(x, routing=routing)) < case[3]


def _full(rank: int, name: str) -> list[str]:
    """Return what is wrong where two ranks send each other as many tokens as were planned, and one more than that."""
    room = 257 if name == "all_to_all_fixed" else None
    spec = MoESpec(
        hidden_size=64, intermediate_size=64, num_experts=2, routing=RoutingSpec(top_k=1), weight_format="fp32"
    )
    limits, placed = Limits(max_tokens=512, rank_tokens=room), linear(2, rank, 2)
    problem = Problem(spec=spec, device=CPU, limits=limits, dtype="fp32", placement=placed)
    whole = random_experts(2, 2, 64, 64, seed=1)
    held = replace(whole, gate_up=whole.gate_up[rank : rank + 1], down=whole.down[rank : rank + 1])
    layer, faults = MoELayer(held, plan(problem, Overrides(dispatcher=name))), list[str]()
    x, ones = heavy_tailed(512, 64, seed=rank), torch.ones(512, 1)
    for first in (257, 512):
        ids = (torch.arange(512) >= first).long()[torch.randperm(512, generator=torch.Generator().manual_seed(rank))]
        routing = Routing(topk_ids=ids[:, None], topk_weights=ones)
        if room is not None and first > room:
            try:
                layer(x, routing=routing)
                faults.append("more tokens than there is room for")
            except InputError:
                continue
        elif error_of(whole, x, routing, layer(x, routing=routing)) > 1e-5:
            faults.append(f"{first} tokens of every rank")
    return faults


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "all_to_all_fixed", "symm_mem"])
def test_full_capacity_loses_no_token(name: str) -> None:
    """Every rank brings 512 tokens, of which 257, then all go to one rank; a fixed room is for 257."""
    assert run_ranks(partial(_full, name=name), 2) == [[], []]


@each_kernel
def test_assignments_of_other_ranks(case: Any) -> None:
    """A token of this rank's experts has its bits, whatever tokens of other ranks and their weights hold."""
    ids = uneven_ids(12, 2, 6, seed=4)
    ids[:4] = torch.tensor([[0, 5], [1, 4], [5, 0], [4, 1]])  # of other ranks alone
    ids[4:8] = torch.tensor([[2, 5], [0, 3], [3, 2], [2, 3]])
    here, sizes = (ids == 2) | (ids == 3), {"top_k": 2, "most": 32, "hidden": 64, "wide": 64}
    own = torch.where(here, ids - 2, -1)
    if case[2].startswith("triton"):  # the interpreter has no GPU to put the table of places on
        layer, made = built(case, experts=2, **sizes)
        ids = own
    else:
        layer, made = built(case, experts=6, placement=linear(6, 1, 3), **sizes)
    x, weights = tokens_of(layer, 12), torch.rand(12, 2) + 0.5
    clean = layer(x, routing=Routing(topk_ids=ids, topk_weights=weights))
    batch, _ = layer.dispatcher.dispatch(x, Routing(topk_ids=ids, topk_weights=weights))
    assert int(batch.expert_offsets[-1]) == int(here.sum()), "a row for each assignment of this rank and no other"
    assert error_of(made, x, Routing(topk_ids=own, topk_weights=weights), clean) < case[3]
    poisoned = x.clone()
    poisoned[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan], dtype=x.dtype)[:, None]
    found = layer(poisoned, routing=Routing(topk_ids=ids, topk_weights=weights.masked_fill(~here, torch.nan)))
    assert torch.equal(found, clean)
    assert bool((found[:4] == 0).all())


@each_kernel
@pytest.mark.parametrize("kind", LIMITED)
def test_kernels_clamp_by_the_formula(case: Any, kind: Any) -> None:
    """SwiGLU and its limits are those of ``between``, which clamps before SiLU or, for SwiGLU-step, after it."""
    activation = ActivationSpec(kind=kind, limit=0.5)
    layer, made = built(case, experts=3, top_k=2, most=16, hidden=64, wide=64, activation=activation)
    x, routing = tokens_of(layer, 5), Routing(topk_ids=uneven_ids(5, 2, 3, seed=4), topk_weights=torch.rand(5, 2) + 0.5)
    found = layer(x, routing=routing)
    assert error_of(made, x, routing, found, activation) < case[3]
    for other in (ActivationSpec(kind=kind), *(ActivationSpec(kind=k, limit=0.5) for k in LIMITED if k != kind)):
        assert error_of(made, x, routing, found, other) > 2 * case[3], f"the truth of {other} would pass too"


@pytest.mark.parametrize("recipe", [form.name for form in ACTIVATION_FORMATS])
def test_activation_scales_separate_per_expert(recipe: str) -> None:
    """Tokens of one expert are a million times those of another, and so are the rows between the products."""
    if recipe == "fp16" or activation_format(recipe).static:
        pytest.skip("its range is smaller than that")
    layer, made = built(
        ("mxfp4", recipe, "reference", 0), experts=5, top_k=1, most=40, hidden=128, wide=96, dtype="fp32"
    )
    ids = torch.arange(40).remainder(5)[:, None]
    size = 10.0 ** (torch.arange(5) * 1.5 - 3)[ids]
    x, routing = tokens_of(layer, 40) * size, Routing(topk_ids=ids, topk_weights=torch.ones(40, 1))
    found = layer(x, routing=routing)
    bound = {"fp32": 1e-5, "bf16": 0.01, "nvfp4": 0.35}.get(recipe, 0.08)
    for expert in range(5):
        rows = ids[:, 0] == expert
        own = Routing(topk_ids=ids[rows], topk_weights=routing.topk_weights[rows])
        assert error_of(made, x[rows], own, found[rows]) < bound, expert


class _Group:
    """A process group as far as it is asked for."""


def test_new_group_at_reused_address() -> None:
    """Its name may be the same, as torch hashes some, and so may the store."""
    alive, store = [_Group()], distributed.HashStore()
    with (
        patch.object(rendezvous, "_rendezvous", {}),
        patch.object(rendezvous, "group_named", lambda _: alive[0]),
        patch.object(rendezvous, "world_ranks", lambda _: (0,)),
        patch.object(distributed, "get_rank", lambda _: 0),
        patch.object(distributed, "get_world_size", lambda _: 1),
        patch.object(distributed.distributed_c10d, "_get_default_store", lambda: store),
    ):
        first, address = rendezvous_of("tp"), id(alive.pop())
        made = [_Group() for _ in range(1000)]
        alive += [own for own in made if id(own) == address]
        assert len(alive) == 1, "nothing came to stand there; the test needs another way"
        second = rendezvous_of("tp")
        assert second is not first
        assert rendezvous_of("tp") is second
        assert second.exchange("one", "turn") == ["one"]


def test_new_layer_memory_at_reused_address() -> None:
    """Layers over ranks are built and forgotten; the block that they ran in goes on."""
    assert run_ranks(_forgotten, 2) == [[], []]


def _forgotten(rank: int) -> list[str]:
    blocks, faults = symmetric_buffers("", torch.device("cpu")), list[str]()
    blocks.register_layer(memory_map((Region("x", 1 << 16), Region("rows", 1 << 16))))
    space = blocks.acquire()
    for _ in range(20):
        small = MemoryMap((Region("x", 64), Region("rows", 64)))
        space.memory(small)
        address = id(small)
        del small
        for large in [MemoryMap((Region("x", 256), Region("rows", 512))) for _ in range(100)]:
            if id(large) == address:
                try:
                    space.memory(large).alloc("rows", (512,), torch.uint8)
                except AssertionError as error:
                    faults.append(str(error))
    blocks.release(space)
    return faults


@each_kernel
def test_layers_of_other_sizes_share_buffers(case: Any) -> None:
    """In one workspace of the largest, in every order, with results that nobody writes again."""
    made = [built(case, experts=e, top_k=2, most=8, hidden=h, wide=w) for e, h, w in ((3, 64, 128), (5, 128, 64))]
    lent = max((layer.workspaces for layer, _ in made), key=lambda own: own.nbytes)
    for layer, _ in made:
        layer.workspaces = lent
    kept: list[tuple[int, Tensor, Tensor]] = []
    for turn, which in enumerate((0, 1, 1, 0)):
        layer, weights = made[which]
        x = tokens_of(layer, 3 + turn, seed=turn)
        ids = uneven_ids(len(x), 2, layer.spec.num_experts, seed=turn)
        routing = Routing(topk_ids=ids, topk_weights=torch.rand(ids.shape) + 0.5)
        found = layer(x, routing=routing)
        assert error_of(weights, x, routing, found) < case[3]
        kept.append((which, found, found.clone()))
    assert all(torch.equal(found, copy) for _, found, copy in kept)
    assert lent.acquire().nbytes == lent._size, "one workspace served all of them"  # pyright: ignore[reportPrivateUsage]


def _sizes(rank: int) -> list[str]:
    """Return what differs where a layer and a latent one, half as wide, run in one block of two ranks."""
    faults, kinds = list[str](), ("plain", "latent")
    placed = linear(EXPERTS, rank, 2)
    layers = [layer_of(kind, RECIPES[1], "cpu", placed, dispatcher="symm_mem") for kind in kinds]
    alone = [layer_of(kind, RECIPES[1], "cpu") for kind in kinds]
    kept: list[tuple[str, Tensor, Tensor]] = []
    for turn in range(3):
        for kind, layer, one in zip(kinds, layers, alone, strict=True):
            x = heavy_tailed(5, HIDDEN, seed=10 * turn + rank)
            found = layer(x)
            kept.append((kind, found, one(x)))
    faults += [kind for kind, found, wanted in kept if not equal(found, wanted, exact=False)]
    return faults


def test_layers_share_symmetric_memory() -> None:
    assert run_ranks(_sizes, 2) == [[], []]


SHAPES = {"E": 3, "P": 2, "I": 40, "H": 64, "T": 5, "K": 2}


def _documented(name: str, text: str) -> list[tuple[int, ...]]:
    """Return every shape that the docstring ``text`` gives right after ``name``, in the sizes of ``SHAPES``."""
    said = re.search(rf"\b{name}\b:? [^.]*?(?=\. |$)", " ".join(text.split()))
    assert said is not None, name
    shapes = re.findall(r"``\[([A-Z*, ]+)\]``", said[0])
    return [tuple(math.prod(SHAPES[one] for one in size.split("*")) for size in shape.split(", ")) for shape in shapes]


def test_weights_must_have_documented_shapes() -> None:
    """What the docstrings of ``moe`` and ``ExpertWeights`` say is read from them; transposed weights are refused."""
    text = inspect.getdoc(moe) or ""
    gate_up, down = (torch.randn(shape) / 8 for shape in ((3, 2, 40, 64), (3, 64, 40)))
    assert _documented("gate_up", text) == [(3, 2, 40, 64), (3, 80, 64)]
    assert _documented("down", text) == [(3, 64, 40)]
    text = inspect.getdoc(ExpertWeights) or ""
    assert _documented("gate_up", text) == [(3, 2, 40, 64)]
    assert _documented("down", text) == [(3, 64, 40)]
    x, ids, ones = heavy_tailed(5, 64, seed=1), uneven_ids(5, 2, 3, seed=2), torch.ones(5, 2)
    truth = moe_truth(x, gate_up, down, ids, ones, ActivationSpec())
    for first in (gate_up.flatten(1, 2), as_stored(gate_up)):
        assert relative_error(moe(x, first, down, ids, ones), truth) < 1e-5
    for first, second in ((gate_up.flatten(1, 2).mT, down), (gate_up.flatten(1, 2), down.mT)):
        with pytest.raises(InputError, match=r"\(3, \d+(, \d+)*\).* (needs|allowed).*(E=3|E, )"):
            moe(x, first.contiguous(), second.contiguous(), ids, ones)


# Wrong calls, wrong specs, wrong plans, wrong routings and wrong files, by tests that wait for an error.
OPTIMISED = (
    "test_layer.py::test_wrong_input_names_what_is_allowed",
    "test_layer.py::test_weights_contradicting_the_spec_refused",
    "test_plan.py::test_specs_that_contradict_themselves",
    "test_plan.py::test_forced_choices_are_never_replaced",
    "test_route.py::test_route_refusals",
    "test_route.py::test_given_routing_refusals",
    "test_route.py::test_bad_caller_routing_refused_when_checked",
    "test_activation.py::test_activate_refuses_wrong_shapes",
    "test_placement.py::test_placement_refuses_ranks",
    "test_formats.py::test_encode_refuses_wrong_tensors",
    "test_audit.py::test_broken_experts",
    "test_audit.py::test_unknown_tensors",
    "test_hostile.py::test_broken_headers",
    "test_workspace.py::test_missing_and_small_regions_are_refused",
)


def test_errors_raised_without_python_assertions() -> None:
    """Under -O a test's own assertions are gone too, and what remains of it is that an error has to be raised."""
    asked = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    asked += ["-W", "ignore::pytest.PytestConfigWarning", *(f"tests/cpu/{name}" for name in OPTIMISED)]
    done = subprocess.run(asked, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 90, "so many errors are waited for"
