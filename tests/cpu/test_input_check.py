"""Ranks that need the same inputs compare them: other tokens or routings are one RankError on every rank."""

from __future__ import annotations

import os
import struct
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from collegium import CollegiumError, Limits, Overrides, RankError, Ranks, Routing, load_layer
from collegium.parallel.bit_hash import bit_hash, one_value
from collegium.parallel.input_check import FIRST_PASSES, differing_ranks
from collegium.parallel.rendezvous import Rendezvous, timeout_seconds
from collegium.testing.compare import heavy_tailed
from grids import exhaustive
from raising import assert_values
from rank_cases import FOLDERS, built
from ranks import run_ranks

_layers: list[Any] = []  # until the process ends, as a program keeps its model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return built(tmp_path_factory.mktemp("models"), "deepseek_v3")[0]


# --- The hash -------------------------------------------------------------------------------------------------------


def _split_mix(value: int) -> int:
    whole = (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & whole
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & whole
    return value ^ (value >> 31)


def _hash_by_hand(tensor: torch.Tensor) -> int:
    """Return the hash in whole numbers of Python, from the bytes."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    total = 0
    for position, (word,) in enumerate(struct.iter_unpack("<Q", raw), start=1):
        total += _split_mix(word ^ _split_mix(position * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)))
    total &= (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (0, 7), (3,), (2, 3, 5)])
def test_hash_by_hand(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (heavy_tailed(30, 60, seed=4).flatten()[: torch.Size(shape).numel()].view(shape) * 9).to(dtype)
    assert int(bit_hash(tensor)) == _hash_by_hand(tensor)


def test_hash_of_views_and_blocks() -> None:
    rows = heavy_tailed(40, 50, seed=1).bfloat16()
    # Columns, odd offsets and a tensor cut into many blocks have the hash of a fresh copy.
    with patch("collegium.parallel.bit_hash._BLOCK_WORDS", 7):
        for view in (rows, rows.t(), rows[3:, 1:9], rows.flatten()[1:], rows[::3]):
            assert int(bit_hash(view)) == _hash_by_hand(view.clone())


def test_hash_sees_every_change() -> None:
    x = heavy_tailed(9, 12, seed=2)
    rows, columns = x.clone(), x.clone()
    rows[[2, 7]], columns[:, [3, 4]] = x[[7, 2]], x[:, [4, 3]]
    zeros, bit, nan, payload = x.clone(), x.clone(), x.clone(), x.clone()
    zeros[0, 0] = 0.0
    minus = zeros.clone()
    minus[0, 0] = -0.0
    bit.view(torch.int32)[5, 5] ^= 1
    nan.view(torch.int32)[1, 1], payload.view(torch.int32)[1, 1] = 0x7FC00000, 0x7FC00001
    # Neighbours that trade a difference.
    trade = x.clone()
    trade.view(torch.int64)[0, 0] += 5
    trade.view(torch.int64)[0, 1] -= 5
    hashes = [int(bit_hash(each)) for each in (x, rows, columns, zeros, minus, bit, nan, payload, trade)]
    assert len(set(hashes)) == len(hashes)


def test_one_value() -> None:
    assert bool(one_value(torch.zeros(4, 3)))
    assert bool(one_value(torch.full((2, 2), torch.nan)))
    assert bool(one_value(torch.empty(0, 3)))
    assert not bool(one_value(torch.tensor([0.0, -0.0])))
    assert not bool(one_value(heavy_tailed(3, 4, seed=1).t()))


def test_the_majority_is_right() -> None:
    assert differing_ranks({0: 5, 1: 5, 2: 6, 3: 5}) == ((2,), (0, 1, 3))
    assert differing_ranks({0: 6, 1: 5, 2: 5}) == ((0,), (1, 2))
    assert differing_ranks({4: "a", 1: "b"}) == ((4,), (1,))
    assert differing_ranks({0: 1, 1: 1}) == ((), (0, 1))


# --- Layers loaded from disk ----------------------------------------------------------------------------------------


def _ways(world: int) -> dict[str, tuple[Ranks, str | None]]:
    """Return ranks that need the same inputs, and the dispatcher that is forced."""
    ways: dict[str, tuple[Ranks, str | None]] = {
        "same tokens": (Ranks.of(same_tokens=True), None),
        "same tokens by all_gather": (Ranks.of(same_tokens=True), "all_gather"),
        "same tokens by all_to_all_fixed": (Ranks.of(same_tokens=True), "all_to_all_fixed"),
        "same tokens by symm_mem": (Ranks.of(same_tokens=True), "symm_mem"),
        "slices": (Ranks.of(slices=world), None),
    }
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
        ways |= {
            "slices of the same tokens": (Ranks.of(experts=2, same_tokens=True), None),
            "slices of other tokens": (Ranks.of(slices=2), None),
            "copies": (Ranks.of(mesh, experts="experts", same_tokens=True), None),
        }
    return ways


def _outcome(call: Any) -> tuple[str, tuple[int, ...], str]:
    """Return the class, the ranks and the text of what ``call`` raises."""
    try:
        call()
    except CollegiumError as error:
        return type(error).__name__, getattr(error, "ranks", ()), str(error)
    return "none", (), ""


def _load(ranks: Ranks, dispatcher: str | None = None, **asked: Any) -> Any:
    force = None if dispatcher is None else Overrides(dispatcher=dispatcher)
    layer = load_layer(os.environ[FOLDERS], 1, device=ranks, overrides=force, **asked)
    _layers.append(layer)
    return layer


def _changed(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return inputs with as many tokens that differ from ``x``."""
    rows, columns, bit = x.flip(0), x.flip(1), x.clone()
    bit.view(torch.int16)[-1, -1] ^= 1
    return {"other": heavy_tailed(*x.shape, seed=99).to(x.dtype), "rows": rows, "columns": columns, "bit": bit}


def _inputs(layer: Any, seed: int, tokens: int = 7) -> tuple[torch.Tensor, Routing]:
    x = heavy_tailed(tokens, layer.spec.hidden_size, seed=seed).to(layer.input_dtype)
    own = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, layer.spec.num_experts, generator=own)
    weights, ids = scores.topk(layer.spec.routing.top_k)
    return x, Routing(topk_ids=ids, topk_weights=weights)


def _faults(name: str, layer: Any, whole: Any, ranks: Ranks, seed: int) -> list[str]:
    """Return what is wrong with a pass of equal inputs: its bits are those of one rank, or near them with slices."""
    x, routing = _inputs(whole, seed)
    faults: list[str] = []
    for what, asked in (("router", {}), ("routing", {"routing": routing})):
        found, wanted = layer(x, **asked), whole(x, **asked)
        near = bool((found.float() - wanted.float()).norm() <= 0.01 * wanted.float().norm())
        if not (torch.equal(found, wanted) or (ranks.slices > 1 and near)):
            faults.append(f"{name}: other numbers by the {what}")
    return faults


def _different_tokens(rank: int) -> list[str]:
    """Return what is not as promised where the last rank has other inputs than the ranks it shares tokens with."""
    world, whole, faults = distributed.get_world_size(), load_layer(os.environ[FOLDERS], 1), list[str]()
    last = world - 1
    for name, (ranks, dispatcher) in _ways(world).items():
        for checked in (False, True):
            layer = _load(ranks, dispatcher, checked=checked)
            label = f"{name}, checked={checked}"
            # "copies" know nothing of each other: the first pair goes on.
            concerned = rank >= 2 if name == "copies" else True
            # Of two ranks that differ, the lower one is taken as right.
            wanted = ("RankError", (last,)) if concerned else ("none", ())
            x, routing = _inputs(whole, seed=5)
            for change, other in _changed(x).items():
                found = _outcome(partial(layer, other if rank == last else x))
                if found[:2] != wanted or (concerned and "the values of x (bfloat16 [7, 64])" not in found[2]):
                    faults.append(f"{label}, {change}: {found}")
            ids, weights = routing.topk_ids, routing.topk_weights
            for change, other in (
                ("topk_ids", Routing(topk_ids=ids.flip(1), topk_weights=weights)),
                ("topk_weights", Routing(topk_ids=ids, topk_weights=weights * 1.5)),
            ):
                found = _outcome(partial(layer, x, routing=other if rank == last else routing))
                if found[:2] != wanted or (concerned and f"the values of {change}" not in found[2]):
                    faults.append(f"{label}, {change}: {found}")
            logits = heavy_tailed(7, whole.spec.num_experts, seed=3)
            found = _outcome(partial(layer, x, router_logits=logits + (rank == last)))
            if found[:2] != wanted or (concerned and "the values of router_logits" not in found[2]):
                faults.append(f"{label}, logits: {found}")
            found = _outcome(partial(layer, x, token_ids=torch.arange(7) + (rank == last)))
            if found[:2] != wanted or (concerned and "the values of token_ids" not in found[2]):
                faults.append(f"{label}, token ids: {found}")
            if layer.plan.problem.placement.tp_size == 1 or name == "slices":
                # Another way to call it: nothing is sent either, whichever rank compares.
                found = _outcome(partial(layer, x, routing=routing if rank == last else None))
                if found[0] != ("RankError" if concerned else "none"):
                    faults.append(f"{label}, a routing on one rank: {found}")
            faults += _faults(label, layer, whole, ranks, seed=6)
            # Later passes: compared by checked layers, and by no others.
            found = _outcome(partial(layer, x + (rank == last)))
            if found[:2] != (wanted if checked else ("none", ())):
                faults.append(f"{label}, a later pass: {found[:2]}")
            faults += _faults(label, layer, whole, ranks, seed=7)
    return faults


@pytest.mark.parametrize("world", [2, *exhaustive(4)])
def test_different_tokens_raise_on_every_rank(folder: Path, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    assert run_ranks(_different_tokens, world, seconds=300) == [[]] * world


def _odd_calls(layer: Any, *, odd: bool) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return calls of which one rank's is ``odd``, and the errors that the other ranks may get."""
    x, _ = _inputs(layer, seed=5)
    logits = heavy_tailed(7, layer.spec.num_experts, seed=3)
    counts = ("InputError",)
    return {
        "dtype": (lambda: layer(x.float() if odd else x), ("RankError",)),
        "width": (lambda: layer(x[:, :-1] if odd else x), ("RankError",)),
        # Ranks that read each other's memory compare numbers of tokens first, and this has none.
        "no tensor": (lambda: layer([1.0] if odd else x), ("RankError", "InputError")),
        "rows of logits": (lambda: layer(x, router_logits=logits[: 7 - odd]), ("RankError",)),
        "fewer tokens": (lambda: layer(x[: 7 - odd]), counts),
        "no tokens": (lambda: layer(x[:0] if odd else x), counts),
    }


def _unlike_inputs(rank: int) -> list[str]:
    """Return what is not as promised where rank 1 brings another dtype, shape, kind of call or number of tokens."""
    world, whole, faults = distributed.get_world_size(), load_layer(os.environ[FOLDERS], 1), list[str]()
    timeout_seconds(20)
    for name, (ranks, dispatcher) in _ways(world).items():
        if name in ("copies", "slices of other tokens"):
            continue
        layer = _load(ranks, dispatcher)
        for case, (call, allowed) in _odd_calls(layer, odd=rank == 1).items():
            kind, named, text = _outcome(call)
            if kind not in (("InputError",) if rank == 1 else allowed) or (kind == "RankError" and named != (1,)):
                faults.append(f"{name}, {case}, rank {rank}: {kind} {named} {text}")
        faults += _faults(name, layer, whole, ranks, seed=6)
    return faults


@pytest.mark.parametrize("world", [2, *exhaustive(4)])
def test_rank_with_unlike_inputs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    assert run_ranks(_unlike_inputs, world, seconds=300) == [[]] * world


def _bad_routing(rank: int) -> list[str]:
    """Return what is wrong with checked layers, one rank of which has NaN logits or repeated experts."""
    world, whole, faults = distributed.get_world_size(), load_layer(os.environ[FOLDERS], 1), list[str]()
    timeout_seconds(20)
    ways = {"own tokens": (Ranks.of(), None), "own tokens by symm_mem": (Ranks.of(), "symm_mem")} | _ways(world)
    for name, (ranks, dispatcher) in ways.items():
        if name == "copies":
            continue
        layer = _load(ranks, dispatcher, checked=True)
        x, routing = _inputs(whole, seed=5)
        nan, twice = x.clone(), routing.topk_ids.clone()
        nan[2, 3] = torch.nan
        twice[4, 1] = twice[4, 0]
        for case, call in (
            ("NaN", lambda layer=layer, x=x, nan=nan: layer(nan if rank == 1 else x)),
            (
                "an expert twice",
                lambda layer=layer, x=x, ids=twice if rank == 1 else routing.topk_ids, weights=routing.topk_weights: (
                    layer(x, routing=Routing(topk_ids=ids, topk_weights=weights))
                ),
            ),
        ):
            kind, named, text = _outcome(call)
            if (kind, named) != (("RoutingError", ()) if rank == 1 else ("RankError", (1,))):
                faults.append(f"{name}, {case}: {kind} {named} {text}")
        faults += _faults(name, layer, whole, ranks, seed=6)
    return faults


def test_bad_routing_reported_to_checked_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    assert run_ranks(_bad_routing, 2, seconds=200) == [[], []]


def _exchanges(call: Any) -> int:
    """Return how many times this rank exchanges values on the host in ``call``."""
    count, right = 0, Rendezvous.exchange

    def counted(self: Any, value: Any, phase: str) -> Any:
        nonlocal count
        count += 1
        return right(self, value, phase)

    with patch.object(Rendezvous, "exchange", counted):
        call()
    return count


def _first_passes(rank: int) -> list[str]:
    """Return what is wrong with when a layer compares."""
    faults: list[str] = []
    for ranks, steady in ((Ranks.of(same_tokens=True), 2), (Ranks.of(slices=2), 1)):
        layer = _load(ranks)
        x, routing = _inputs(layer, seed=5)
        zeros = torch.zeros_like(x)
        # A dummy batch is the same everywhere by chance, so more than one is compared, and no more than a few.
        counts = [_exchanges(lambda layer=layer, zeros=zeros: layer(zeros)) for _ in range(FIRST_PASSES + 1)]
        if counts != [steady + 1] * FIRST_PASSES + [steady]:
            faults.append(f"{ranks}: zeros {counts}")
        for what, call in (
            ("one token", lambda layer=layer, x=x: layer(x[:1])),
            ("a routing", lambda layer=layer, x=x, routing=routing: layer(x, routing=routing)),
        ):
            counts = [_exchanges(call) for _ in range(3)]
            if counts != [steady + 1, steady, steady]:
                faults.append(f"{ranks}: {what} {counts}")
        # Warming up compares nothing, and leaves the first pass to be compared.
        layer = _load(ranks, limits=Limits(max_tokens=16))
        layer.warm_up()
        if _outcome(partial(layer, x + rank))[:2] != ("RankError", (1,)):
            faults.append(f"{ranks}: not compared after warming up")
        layer(x)
        # Other experts, or another plan, are wired anew.
        layer.replan(layer.plan, layer.experts)
        if _outcome(partial(layer, x + rank))[:2] != ("RankError", (1,)):
            faults.append(f"{ranks}: not compared after a new plan")
        layer(x)
        layer.checked = True
        if _outcome(partial(layer, x + rank))[:2] != ("RankError", (1,)):
            faults.append(f"{ranks}: not compared when checked")
        # A graph cannot read tensors: nothing is compared while one is captured, and the next pass is.
        with patch("collegium.execution.executor.is_capturing", lambda device: True):
            captured = _outcome(partial(layer, x + rank))[0]
        eager = _outcome(partial(layer, x + rank))[0]
        if (captured, eager) != ("none", "RankError"):
            faults.append(f"{ranks}: {captured} in a graph, {eager} after it")
    # Ranks with tokens of their own compare none.
    layer = _load(Ranks.of())
    x, _ = _inputs(layer, seed=rank)
    if _exchanges(lambda: layer(x)) != 1:
        faults.append("own tokens are compared")
    return faults


def test_only_first_passes_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    assert run_ranks(_first_passes, 2, seconds=200) == [[], []]


def _half_compared(rank: int) -> list[str]:
    """Return what is wrong where one rank compares a pass and the other does not: another layer, or a checked one."""
    faults: list[str] = []
    timeout_seconds(20)
    for name, (ranks, dispatcher) in _ways(2).items():
        old, new = _load(ranks, dispatcher), _load(ranks, dispatcher)
        x, _ = _inputs(old, seed=5)
        right = old(x)
        found = _outcome(partial(new if rank else old, x))
        if found[0] not in ("RankError", "InputError"):
            faults.append(f"{name}: another layer, {found}")
        if not torch.equal(old(x), right):
            faults.append(f"{name}: other bits afterwards")
        if "symm_mem" in name:
            continue  # a rank that compares waits for one that does not: give all ranks the same value of checked
        old.checked = bool(rank)
        old(x[:5])  # a first pass again, which both compare
        if (found := _outcome(partial(old, x[:5])))[0] != "RankError":
            faults.append(f"{name}: checked on one rank, {found}")
    return faults


def test_comparison_on_one_rank_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    assert run_ranks(_half_compared, 2, seconds=200) == [[], []]


def _raises_alone(rank: int) -> list[str]:
    """Return what later passes do after rank 1 alone refused a call, in a pass that was not compared."""
    timeout_seconds(6)
    layer = _load(Ranks.of(same_tokens=True))
    x, _ = _inputs(layer, seed=5)
    layer(x)
    classes = []
    for attempt in range(3):
        narrow = rank == 1 and attempt == 0
        classes.append(_outcome(partial(layer, x[:, :3] if narrow else x + attempt))[0])
    return classes


def test_ranks_out_of_step_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    first, second = run_ranks(_raises_alone, 2, seconds=200)
    assert second[0] == "InputError"
    assert first[0] == second[1] == "RankError"  # rank 0 is in its first call while rank 1 is in its second
    assert "none" not in (*first, *second)


def _chooses(rank: int) -> Any:
    """Return the errors of a routing function that fails on a rank, chooses otherwise there, and is right."""
    layer = _load(Ranks.of(same_tokens=True))
    x, routing = _inputs(layer, seed=5)

    def fails(x: torch.Tensor, logits: torch.Tensor, top_k: int) -> Any:
        if rank:
            raise ZeroDivisionError("a fault of the user's")
        return routing.topk_ids, routing.topk_weights

    layer.choose = fails
    try:
        layer(x)
        found = ["none"]
    except (RankError, ZeroDivisionError) as error:
        found = [type(error).__name__]
    layer.choose = lambda x, logits, top_k: (routing.topk_ids + rank, routing.topk_weights)
    found.append(str(_outcome(partial(layer, x))[:2]))
    layer.choose = lambda x, logits, top_k: (routing.topk_ids, routing.topk_weights)
    return found, torch.equal(layer(x), load_layer(os.environ[FOLDERS], 1)(x, routing=routing))


def test_routing_functions_have_to_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    (first, right), (other, also) = run_ranks(_chooses, 2)
    assert (first, other) == (["RankError", "('RankError', (1,))"], ["ZeroDivisionError", "('RankError', (1,))"])
    assert (right, also) == (True, True)


def _compiled(rank: int) -> Any:
    """Return what a compiled layer raises for other tokens, and whether it has the bits of one rank afterwards."""
    layer = _load(Ranks.of(same_tokens=True))
    x, _ = _inputs(layer, seed=5)
    run: Any = torch.compile(layer, backend="aot_eager")
    with torch.inference_mode():
        found = _outcome(partial(run, x + rank))[:2]
        return found, torch.equal(run(x), load_layer(os.environ[FOLDERS], 1)(x))


def test_compiled_layers_compare_their_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folder))
    assert run_ranks(_compiled, 2) == [(("RankError", (1,)), True)] * 2


def test_plan_reports_what_is_compared() -> None:
    from collegium import MoESpec, Problem, RoutingSpec, plan, probe

    def explained(dispatcher: str | None = None, **asked: Any) -> str:
        spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=8, routing=RoutingSpec(top_k=2))
        problem = Problem(spec=spec, device=probe("cpu"), placement=Ranks(**asked).placement(8))
        return plan(problem, Overrides(dispatcher=dispatcher)).explain()

    ways: tuple[dict[str, Any], ...] = ({"world_size": 2, "same_tokens": True}, {"slices": 2})
    for asked in ways:
        assert "\ninputs" in explained(**asked)
    assert "\ninputs" not in explained(world_size=2)
    assert "checked=True" in explained("partial", world_size=2)


def _whole_model(rank: int) -> Any:
    """Return the error of a model called with other tokens on each rank, and whether it is right afterwards."""
    from collegium.integrations.transformers import load_model

    model: Any = load_model(os.environ[FOLDERS], device=Ranks.of(same_tokens=True))
    ids = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    with torch.inference_mode():
        # The typical mistake: each rank has a row of the batch.
        found = _outcome(lambda: model(ids[rank : rank + 1]))
        wanted = load_model(os.environ[FOLDERS])(ids).logits
        return found, torch.equal(model(ids).logits, wanted)


def test_split_batch_with_same_tokens_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv(FOLDERS, str(folder))
    for (kind, ranks, text), right in run_ranks(_whole_model, 2):
        assert (kind, ranks) == ("RankError", (1,))
        assert_values(text, "rank 1", "rank 0", "x (bfloat16 [4, 64])")
        assert "same_tokens=False" in text
        assert right


def _parts_of_sums(rank: int) -> list[str]:
    """Return what is wrong with checked layers whose parts of the sum a caller adds."""
    from collegium.parallel.placement import linear
    from split_layers import EXPERTS, RECIPES, layer_of

    found: list[str] = []
    layer = layer_of("plain", RECIPES[1], "cpu", linear(EXPERTS, rank, 2), dispatcher="partial")
    whole = layer_of("plain", RECIPES[1], "cpu")
    x = heavy_tailed(5, layer.spec.hidden_size, seed=1)
    if _outcome(partial(layer, x + rank))[0] != "none":
        found.append("compared unasked")
    layer.checked = True
    if _outcome(partial(layer, x + rank))[:2] != ("RankError", (1,)):
        found.append("not compared")
    total = layer(x)
    distributed.all_reduce(total)
    if not torch.allclose(total, whole(x), rtol=1e-4, atol=1e-5):
        found.append("parts do not add up")
    return found


def test_checked_parts_of_sums_are_compared() -> None:
    assert run_ranks(_parts_of_sums, 2) == [[], []]
