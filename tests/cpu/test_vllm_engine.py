"""Features of vLLM's engine around its MoE layers, with stand-ins: ranks, gpt-oss files, sleep, releases."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from collegium import InputError, MoELayer, PlanError, SpecError
from collegium.errors import MissingTensorError
from collegium.integrations.vllm import plugin
from collegium.integrations.vllm.layers import StoredAs, check_weights, loaded_weights, most_tokens, plan_layer
from collegium.integrations.vllm.method import method_class
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from quantised_matrices import KINDS
from raising import assert_values, raises_with
from vllm_standins import EXPERTS, HIDDEN, TOP_K, WIDE, RoutedExperts, Stand, matrices, moe, truth

if TYPE_CHECKING:
    from collections.abc import Iterator


class Group:
    """Ranks in turn: rank ``rank`` gathers the tokens of all, and its output is kept instead of summed."""

    def __init__(self, inputs: list[tuple[torch.Tensor, ...]]) -> None:
        self.inputs, self.rank = inputs, 0
        self.partial: list[torch.Tensor] = []
        self.sequence_parallel: set[bool] = set()
        self.has_sizes = False

    @contextmanager
    def sizes(self) -> Iterator[None]:
        self.has_sizes = True
        yield
        self.has_sizes = False

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, is_sequence_parallel: bool
    ) -> tuple[torch.Tensor, ...]:
        assert torch.equal(x, self.inputs[self.rank][0]), "the local tokens are gathered, routed already"
        assert torch.equal(ids, self.inputs[self.rank][2])
        assert self.has_sizes, "vLLM sets the sizes of the ranks around each call"
        self.sequence_parallel.add(is_sequence_parallel)
        return tuple(torch.cat(parts) for parts in zip(*self.inputs, strict=True))

    def combine(self, out: torch.Tensor, is_sequence_parallel: bool) -> torch.Tensor:
        self.sequence_parallel.add(is_sequence_parallel)
        self.partial.append(out)
        start = sum(len(x) for x, *_ in self.inputs[: self.rank])
        return out[start : start + len(self.inputs[self.rank][0])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "ranks",
    [
        {"dp_size": 2, "use_all2all_kernels": True},
        {"dp_size": 2},
        {"sp_size": 2, "is_sequence_parallel": True, "use_all2all_kernels": True},
        {"pcp_size": 2, "use_all2all_kernels": True},
    ],
)
def test_ranks_exchange_routed_tokens(ranks: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM routes the local tokens, with a padding mask of their number; the method gathers them afterwards."""
    stand = Stand(monkeypatch)
    experts = matrices()
    inputs: list[tuple[torch.Tensor, ...]] = []
    for rank, tokens in enumerate((5, 3)):
        ids = uneven_ids(tokens, TOP_K, EXPERTS, seed=rank)
        if rank:
            ids[-1] = -1  # a row of padding
        weights = heavy_tailed(tokens, TOP_K, seed=8 + rank, channels=False).abs()
        inputs.append((heavy_tailed(tokens, HIDDEN, seed=rank), weights, ids))
    stand.group = Group(inputs)
    found: list[torch.Tensor] = []
    for rank, (x, weights, ids) in enumerate(inputs):
        local = range(3 * rank, 3 * rank + 3)
        tensors = {
            "w13_weight": torch.stack([torch.cat(experts[e][:2]) for e in local]),
            "w2_weight": torch.stack([experts[e][2] for e in local]),
        }
        config = moe(ep_size=2, ep_rank=rank, **ranks)
        layer = RoutedExperts(tensors, config, slots=[e - 3 * rank if e in local else -1 for e in range(EXPERTS)])
        stored = StoredAs("plain", "plain")
        packed = MoELayer(loaded_weights(layer, stored, {}), plan_layer(layer, stored))
        layer.quant_method = method_class()(config, packed)
        assert layer.quant_method.supports_internal_mk, "or vLLM would gather before it routes"
        stand.group.rank = rank
        if compiled:
            runner = SimpleNamespace(routed_experts=layer, _sequence_parallel_context=stand.group.sizes)
            stand.forward_layers = {layer.layer_name: runner}
            found.append(torch.ops.collegium.vllm_experts(x, ids, weights, layer.layer_name))
        else:
            with stand.group.sizes():
                found.append(layer.quant_method.apply(layer, x, weights, ids, None, None))
    assert [len(out) for out in found] == [5, 3]
    total = torch.stack(stand.group.partial).sum(0)
    x, weights, ids = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    assert relative_error(total[:-1], truth(x, ids, weights)[:-1]) < 1e-5
    assert not total[-1].any()
    assert stand.group.sequence_parallel == {bool(ranks.get("is_sequence_parallel"))}


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        ({}, 63),
        ({"dp_size": 4}, 252),
        ({"pcp_size": 2, "dp_size": 2}, 252),
        ({"sp_size": 4, "is_sequence_parallel": True, "dp_size": 2}, 128),
    ],
)
def test_most_tokens_of_all_ranks(ranks: dict[str, int], most: int) -> None:
    config = moe(max_num_tokens=63, **ranks)
    assert most_tokens(config) == most
    tensors = {"w13_weight": torch.ones(EXPERTS, 2 * WIDE, HIDDEN), "w2_weight": torch.ones(EXPERTS, HIDDEN, WIDE)}
    assert plan_layer(RoutedExperts(tensors, config), StoredAs("plain", "plain")).problem.limits.max_tokens == most


def test_one_rank_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    for layer in stand.model():
        assert not layer.quant_method.exchanges
        x, ids = heavy_tailed(5, HIDDEN, seed=1), torch.tensor([[0, 1]] * 5)
        layer.quant_method.apply(layer, x, torch.ones(5, 2), ids, None, None)  # group is None


def gpt_oss_layer() -> tuple[Any, list[tuple[str, str, int, torch.Tensor]]]:
    """Return a layer as GptOssRoutedExperts keeps it, and its tensors by name, shard and expert as the files have."""
    write = KINDS["ct mxfp4"].write
    shapes = {"w13_weight": (2 * WIDE, HIDDEN // 2), "w13_weight_scale": (2 * WIDE, HIDDEN // 32)}
    shapes |= {"w2_weight": (HIDDEN, WIDE // 2), "w2_weight_scale": (HIDDEN, WIDE // 32)}
    tensors = {name: torch.zeros(EXPERTS, *shape, dtype=torch.uint8) for name, shape in shapes.items()}
    tensors |= {"w13_bias": torch.zeros(EXPERTS, 2 * WIDE), "w2_bias": torch.zeros(EXPERTS, HIDDEN)}
    loads: list[tuple[str, str, int, torch.Tensor]] = []
    for expert, parts in enumerate(matrices()):
        gate, up, down = (write(weight)[0] for weight in parts)
        for name, suffix in (("weight_packed", "weight"), ("weight_scale", "weight_scale")):
            rows = torch.stack([gate[name], up[name]], 1).flatten(0, 1)
            for which, codes in (("w13", rows), ("w2", down[name])):
                blocks = codes.unflatten(-1, (-1, 16)) if suffix == "weight" else codes  # [rows, groups, 16]
                loads.append((f"{which}_{suffix}", f"gpt_oss_{which}", expert, blocks))
        loads.append(("w13_bias", "gpt_oss_w13", expert, heavy_tailed(1, 2 * WIDE, seed=expert)[0]))
        loads.append(("w2_bias", "gpt_oss_w2", expert, heavy_tailed(1, HIDDEN, seed=expert)[0]))
    config = moe(activation=SimpleNamespace(value="swigluoai"), has_bias=True)
    layer: Any = type("GptOssRoutedExperts", (RoutedExperts,), {})(tensors, config)
    layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
    layer.collegium = plugin._State(config=layer.collegium.config)
    return layer, loads


@pytest.mark.parametrize("missing", [None, "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "w2_bias"])
def test_gpt_oss_experts_one_by_one(missing: str | None) -> None:
    """A file with a tensor per expert: all of them, or the error names the tensor and the expert."""
    layer, loads = gpt_oss_layer()

    def copy(param: Any, weight: torch.Tensor, name: str, shard: str, expert_id: int) -> None:
        param.data[expert_id].copy_(weight.reshape(param.data[expert_id].shape))

    loader = plugin._recording(layer, copy)
    for name, shard, expert, tensor in loads:
        if (name, expert) != (missing, 4):
            loader(getattr(layer, name), tensor, name, shard_id=shard, expert_id=expert)
    stored = StoredAs("mxfp4", "compressed-tensors")
    if missing is None:
        weights = check_weights(loaded_weights(layer, stored, layer.collegium.loaded_shards))
        for expert, parts in enumerate(matrices()):
            gate, up, down = (KINDS["ct mxfp4"].write(weight)[1] for weight in parts)
            assert torch.equal(weights.gate_up[expert].decode(), torch.stack([gate, up]))
            assert torch.equal(weights.down[expert].decode(), down)
    else:
        with raises_with(MissingTensorError, missing, "expert 4"):
            loaded_weights(layer, stored, layer.collegium.loaded_shards)


def test_stacked_experts_are_not_counted() -> None:
    """Stacked files call vLLM's loader without an expert, by keyword."""
    layer, _ = gpt_oss_layer()
    seen: list[Any] = []
    loader = plugin._recording(layer, lambda *given, **named: seen.append((len(given), named)))
    loader(layer.w13_weight, torch.zeros(EXPERTS, 2 * WIDE, 6, 16), "w13_weight", shard_id=None, expert_id=None)
    loader(layer.w13_weight, torch.zeros(2 * WIDE, 6), "transformer.blocks.0.ffn.experts.mlp.w1", "w13_weight")
    assert seen == [(4, {"expert_id": None}), (4, {})]
    assert not layer.collegium.loaded_shards


def test_changed_expert_outputs_are_refused() -> None:
    tensors = {"w13_weight": torch.ones(EXPERTS, 2 * WIDE, HIDDEN), "w2_weight": torch.ones(EXPERTS, HIDDEN, WIDE)}
    for name in ("SubstitutedRoutedExperts", "MuseSparkRoutedExperts"):
        layer = type(name, (RoutedExperts,), {})(tensors, moe())
        with raises_with(SpecError, name, "GptOssRoutedExperts"):
            plan_layer(layer, StoredAs("plain", "plain"))


@pytest.mark.parametrize("mode", ["on", "require"])
def test_weight_cache_is_left_to_vllm(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", mode)
    stand = Stand(monkeypatch)
    stand.processed = True
    if mode == "require":
        with raises_with(PlanError, "ipc_cache"):
            stand.model()
        return
    stand.model()
    assert_values(stand.said[0], "3 of 3", "--load-format ipc_cache")
    assert stand.said[1:] == [f"vLLM finished layers.{n}" for n in range(3)]


def test_weights_are_not_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    packed, plain = nn.ModuleList(stand.model()), nn.ModuleList([nn.Linear(2, 2)])
    stand.model()  # the worker is patched once
    for worker in (stand.worker(packed), stand.worker(plain, draft=packed)):
        stand.calls.clear()
        worker.sleep()
        worker.sleep(level=1)
        worker.discard(("kv_cache",))
        assert stand.calls == [1, 1, ("kv_cache",)]
        with raises_with(InputError, "sleep level 2", "level 1", "COLLEGIUM_VLLM=off"):
            worker.sleep(2)
        with raises_with(InputError, "discard", "weights"):
            worker.discard(("weights", "kv_cache"))
        assert len(stand.calls) == 3
    stand.worker(plain).sleep(2)  # of an engine that vLLM runs alone
    assert stand.calls[-1] == 2


@pytest.mark.parametrize("release", ["0.31.2", "0.34.0", "0.34.0rc1.dev7+g12ab", "dev"])
def test_unknown_releases_are_left_alone(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "on")
    stand = Stand(monkeypatch, release)
    assert len(stand.said) == 2, "one line each time that vLLM calls the plug-in"
    assert_values(stand.said[0], release, "0.32, 0.33")
    assert not hasattr(stand.layer, "collegium")
    monkeypatch.setenv("COLLEGIUM_VLLM", "require")
    with raises_with(InputError, release, "0.32, 0.33", "COLLEGIUM_VLLM=off"):
        plugin.register()


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0", "0.33.1.post2", "0.33.0+cpu"])
def test_known_releases(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "require")
    assert hasattr(Stand(monkeypatch, release).layer, "collegium")
