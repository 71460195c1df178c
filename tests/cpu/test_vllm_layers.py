"""What a MoE layer of vLLM computes and holds, read from stand-ins; tests/vllm serves models with vLLM itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collegium import DeviceFacts, InputError, MissingExtraError, MoELayer, PlanError, Routing, SpecError
from collegium.errors import BadScaleError, MissingTensorError, TensorMismatchError
from collegium.integrations.vllm import layers, plugin, served
from collegium.integrations.vllm.layers import (
    StoredAs,
    activation_of,
    check_weights,
    fp8_core_format,
    loaded_weights,
    lost_declaration,
    plan_layer,
    stored_as,
)
from collegium.integrations.vllm.served import not_served
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from collegium.types import ActivationSpec
from quantised_matrices import KINDS
from raising import assert_values, raises_with
from vllm_standins import EXPERTS, HIDDEN, TOP_K, WIDE, RoutedExperts as Layer, Stand, matrices, moe, truth


def method(name: str, **held: Any) -> Any:
    return type(name, (), held)()


CONFIG = SimpleNamespace(
    weight_bits=4, group_size=32, desc_act=False, is_sym=True, full_config={}, is_checkpoint_fp8_serialized=True
)
INTEGERS = {"num_bits": 4, "group_size": 32, "actorder": None, "symmetric": True}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 blocks": (
        "Fp8MoEMethod",
        {"block_quant": True, "weight_scale_refine": None, "weight_block_size": [128, 128], "quant_config": CONFIG},
    ),
    "ct fp8 tensor": (
        "CompressedTensorsW8A8Fp8MoEMethod",
        {"weight_quant": SimpleNamespace(strategy="tensor"), "weight_block_size": None},
    ),
    "ct fp8 channel": (
        "CompressedTensorsW8A8Fp8MoEMethod",
        {"weight_quant": SimpleNamespace(strategy="channel"), "weight_block_size": None},
    ),
    "ct nvfp4": ("CompressedTensorsW4A4Nvfp4MoEMethod", {}),
    "modelopt nvfp4": ("ModelOptNvFp4FusedMoE", {"quant_config": CONFIG}),
    "ct mxfp4": ("CompressedTensorsW4A4Mxfp4MoEMethod", {}),
    "ct int4": ("CompressedTensorsWNA16MoEMethod", {"weight_quant": SimpleNamespace(**INTEGERS)}),
    "ct int4 zeros": (
        "CompressedTensorsWNA16MoEMethod",
        {"weight_quant": SimpleNamespace(**{**INTEGERS, "symmetric": False})},
    ),
    "ct int8": ("CompressedTensorsWNA16MoEMethod", {"weight_quant": SimpleNamespace(**{**INTEGERS, "num_bits": 8})}),
    "gptq": ("AutoGPTQMoEMethod", {"quant_config": CONFIG}),
    "awq": ("AutoAWQMoEMethod", {"quant_config": CONFIG}),
}


def as_vllm_loads(kind: str) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    """The parameters that vLLM's loader fills, and the numbers they are: w13 has gate and up along the output axis."""
    found: dict[str, list[torch.Tensor]] = {}
    numbers: list[list[torch.Tensor]] = []
    input_first = kind in ("gptq", "awq")
    for expert in matrices():
        (gate, a), (up, b), (down, c) = (KINDS[kind].write(weight) for weight in expert)
        numbers.append([a, b, c])
        for suffix in gate:
            if suffix in ("weight_shape", "g_idx") or "input" in suffix:
                continue
            single = gate[suffix].numel() == 1
            both = torch.stack([gate[suffix].reshape(()), up[suffix].reshape(())]) if single else None
            both = torch.cat([gate[suffix], up[suffix]], 1 if input_first else 0) if both is None else both
            found.setdefault(f"w13_{suffix}", []).append(both)
            found.setdefault(f"w2_{suffix}", []).append(down[suffix].reshape(()) if single else down[suffix])
    return {name: torch.stack(rows) for name, rows in found.items()}, numbers


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_gptq_layout_has_two_keys(key: str) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "full_config": {key: "gptq_v2"}})
    assert stored_as(method("AutoGPTQMoEMethod", quant_config=config)).storage == "gptq_v2"


@pytest.mark.parametrize("kind", list(METHODS))
def test_vllm_weights_match_checkpoint_values(kind: str) -> None:
    tensors, numbers = as_vllm_loads(kind)
    name, held = METHODS[kind]
    stored = stored_as(method(name, **held))
    layer = Layer(tensors, moe())
    for _ in range(2):  # nothing is changed in place
        weights = check_weights(loaded_weights(layer, stored, {}))
        for expert, (gate, up, down) in enumerate(numbers):
            torch.testing.assert_close(weights.gate_up[expert].decode(), torch.stack([gate, up]), rtol=1e-6, atol=0)
            torch.testing.assert_close(weights.down[expert].decode(), down, rtol=1e-6, atol=0)
    made = plan_layer(layer, stored, weights=weights)
    assert made.problem.spec.weight_format == KINDS[kind].form
    assert made.problem.spec.num_experts == EXPERTS


def test_gpt_oss_interleaved_padded_with_biases() -> None:
    """MXFP4 as vLLM's gpt-oss keeps it: gate and up by turns, zeros beyond the rank's width and the hidden size."""
    write = KINDS["ct mxfp4"].write
    room_i, room_h = WIDE + 32, HIDDEN + 64
    w13, s13 = (
        torch.zeros(EXPERTS, 2 * room_i, room_h // 2).byte(),
        torch.zeros(EXPERTS, 2 * room_i, room_h // 32).byte(),
    )
    w2, s2 = torch.zeros(EXPERTS, room_h, room_i // 2).byte(), torch.zeros(EXPERTS, room_h, room_i // 32).byte()
    numbers: list[list[torch.Tensor]] = []
    for e, expert in enumerate(matrices()):
        (gate, a), (up, b), (down, c) = (write(weight) for weight in expert)
        numbers.append([a, b, c])
        for row, part in enumerate((gate, up)):
            w13[e, row : 2 * WIDE : 2, : HIDDEN // 2] = part["weight_packed"]
            s13[e, row : 2 * WIDE : 2, : HIDDEN // 32] = part["weight_scale"]
        w2[e, :HIDDEN, : WIDE // 2], s2[e, :HIDDEN, : WIDE // 32] = down["weight_packed"], down["weight_scale"]
    bias = torch.zeros(EXPERTS, 2 * room_i)
    bias[:, : 2 * WIDE] = heavy_tailed(EXPERTS, 2 * WIDE, seed=1)
    tensors = {"w13_weight": w13, "w13_weight_scale": s13, "w2_weight": w2, "w2_weight_scale": s2}
    config = moe(activation=SimpleNamespace(value="swigluoai"), has_bias=True)
    layer = Layer({**tensors, "w13_bias": bias, "w2_bias": heavy_tailed(EXPERTS, room_h, seed=2)}, config)
    layer.hidden_size, layer.intermediate_size_per_partition = room_h, room_i
    weights = check_weights(loaded_weights(layer, stored_as(method("GptOssMxfp4MoEMethod")), {}))
    for expert, (gate, up, down) in enumerate(numbers):
        assert torch.equal(weights.gate_up[expert].decode(), torch.stack([gate, up]))
        assert torch.equal(weights.down[expert].decode(), down)
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    assert torch.equal(weights.gate_up_bias[:, 1], bias[:, 1 : 2 * WIDE : 2])
    assert weights.down_bias.shape == (EXPERTS, HIDDEN)
    config.tp_size, config.tp_rank, config.intermediate_size = 2, 1, 2 * WIDE
    slices = loaded_weights(layer, StoredAs("mxfp4", "compressed-tensors"), {})
    assert slices.down.shape == (EXPERTS, HIDDEN, room_i)  # slices are of unequal width: the zeros belong to it
    assert slices.down_bias is not None
    assert not slices.down_bias.any()  # the sum over ranks holds it once


@pytest.mark.parametrize("split", ["whole", "experts", "experts in turn", "slices", "replicas"])
def test_partial_sums_of_ranks_add_up(split: str) -> None:
    experts = matrices()
    w13 = torch.stack([torch.cat(expert[:2]) for expert in experts])
    w2 = torch.stack([expert[2] for expert in experts])
    maps = {"experts": [0, 1, 2, -1, -1, -1], "experts in turn": [-1, 1, -1, 0, 2, -1]}
    parts: list[Layer] = []
    for rank in range(1 if split == "whole" else 2):
        if split in maps:
            own = maps[split]
            if rank:
                others = [expert for expert, slot in enumerate(own) if slot < 0]
                own = [others.index(expert) if expert in others else -1 for expert in range(EXPERTS)]
            held = [own.index(slot) for slot in range(3)]
            parts.append(
                Layer({"w13_weight": w13[held], "w2_weight": w2[held]}, moe(ep_size=2, ep_rank=rank), slots=own)
            )
        elif split == "replicas":  # physical experts 6 and 7 are 0 and 1 again
            held = [0, 1, 2, 3] if rank == 0 else [4, 5, 0, 1]
            slots = [0, 1, 2, 3, -1, -1, -1, -1] if rank == 0 else [-1, -1, -1, -1, 0, 1, 2, 3]
            config = moe(ep_size=2, ep_rank=rank, num_experts=8, enable_eplb=True)
            parts.append(Layer({"w13_weight": w13[held], "w2_weight": w2[held]}, config, slots=slots))
        elif split == "slices":
            cut = slice(rank * WIDE // 2, (rank + 1) * WIDE // 2)
            upper = w13.unflatten(1, (2, -1))[:, :, cut].flatten(1, 2)
            config = moe(tp_size=2, tp_rank=rank, intermediate_size_per_partition_unpadded=WIDE // 2)
            parts.append(Layer({"w13_weight": upper, "w2_weight": w2[:, :, cut]}, config))
        else:
            parts.append(Layer({"w13_weight": w13, "w2_weight": w2}, moe()))
    stored = stored_as(method("UnquantizedFusedMoEMethod"))
    built = [MoELayer(loaded_weights(p, stored, {}), plan_layer(p, stored)) for p in parts]
    for tokens in (0, 1, 13):
        x, ids = heavy_tailed(tokens, HIDDEN, seed=9), uneven_ids(tokens, TOP_K, EXPERTS, seed=tokens)
        weights = heavy_tailed(tokens, TOP_K, seed=8, channels=False).abs()
        again = (torch.arange(tokens) % 2 == 1)[:, None] & (ids < 2) & (split == "replicas")
        routing = Routing(topk_ids=torch.where(again, ids + EXPERTS, ids), topk_weights=weights)
        found = torch.stack([layer(x, routing=routing) for layer in built]).sum(0)
        assert found.shape == x.shape
        assert tokens == 0 or relative_error(found, truth(x, ids, weights)) < 1e-5


@pytest.mark.parametrize("kind", [*METHODS, "plain"])
def test_vllm_moves_whole_experts(kind: str) -> None:
    """Experts change places as vLLM's balancer moves them; with the new numbers a layer has the bits it had."""
    if kind == "plain":
        experts, stored = matrices(), StoredAs("plain", "plain")
        tensors = {"w13_weight": torch.stack([torch.cat(e[:2]) for e in experts]).bfloat16()}
        tensors["w2_weight"] = torch.stack([e[2] for e in experts]).bfloat16()
    else:
        tensors, stored = as_vllm_loads(kind)[0], stored_as(method(METHODS[kind][0], **METHODS[kind][1]))
    tensors["w13_bias"], tensors["w2_bias"] = (heavy_tailed(EXPERTS, n, seed=n) for n in (2 * WIDE, HIDDEN))
    layer = Layer(tensors, moe(in_dtype=torch.bfloat16, has_bias=True, enable_eplb=True))
    packed = MoELayer(loaded_weights(layer, stored, {}), plan_layer(layer, stored))
    x, ids = heavy_tailed(13, HIDDEN, seed=9).bfloat16(), uneven_ids(13, TOP_K, EXPERTS, seed=3)
    weights = heavy_tailed(13, TOP_K, seed=8, channels=False).abs()
    before = packed(x, routing=Routing(topk_ids=ids, topk_weights=weights))
    place = torch.tensor([4, 2, 0, 5, 1, 3])  # where each expert goes
    for tensor in plugin._expert_bytes(packed):
        assert tensor.dtype == torch.uint8
        assert tensor.shape[0] == EXPERTS
        assert tensor.is_contiguous()
        tensor[place] = tensor.clone()
    assert not torch.equal(packed(x, routing=Routing(topk_ids=ids, topk_weights=weights)), before)
    assert torch.equal(packed(x, routing=Routing(topk_ids=place[ids], topk_weights=weights)), before)


def test_missing_tensor_is_named() -> None:
    tensors, _ = as_vllm_loads("ct mxfp4")
    layer, stored = Layer(tensors, moe()), StoredAs("mxfp4", "compressed-tensors")
    whole = {(expert, shard) for expert in range(EXPERTS) for shard in ("w1", "w3")}
    seen = {id(layer.w13_weight_packed): whole - {(4, "w3")}}
    with raises_with(MissingTensorError, "w13_weight_packed", "w3", "expert 4"):
        loaded_weights(layer, stored, seen)
    loaded_weights(layer, stored, {id(layer.w13_weight_packed): whole})
    del layer.w2_weight_scale
    with raises_with(MissingTensorError, "w2_weight_scale"):
        loaded_weights(layer, stored, {})


def test_nonfinite_expert_values_are_named() -> None:
    tensors, _ = as_vllm_loads("ct mxfp4")
    tensors["w2_weight_scale"][3, 5, 1] = 255
    with raises_with(BadScaleError, "[3]"):
        check_weights(loaded_weights(Layer(tensors, moe()), StoredAs("mxfp4", "compressed-tensors"), {}))
    plain = {"w13_weight": torch.full((2, 2 * WIDE, HIDDEN), torch.nan), "w2_weight": torch.ones(2, HIDDEN, WIDE)}
    with raises_with(BadScaleError, "gate_up", "[0, 1]"):
        check_weights(loaded_weights(Layer(plain, moe()), StoredAs("plain", "plain"), {}))
    one = {"w13_weight": torch.ones(2, 2 * WIDE, HIDDEN), "w2_weight": torch.ones(2, HIDDEN, WIDE)}
    biases = {"w13_bias": torch.zeros(2, 2 * WIDE), "w2_bias": torch.full((2, HIDDEN), torch.inf)}
    with pytest.raises(BadScaleError, match="a bias"):
        check_weights(loaded_weights(Layer({**one, **biases}, moe(has_bias=True)), StoredAs("plain", "plain"), {}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"enable_elastic_ep": True}, "its ranks may change; leave out --enable-elastic-ep"),
        ({"is_lora_enabled": True}, "--enable-lora"),
        ({"cpu_offload_gb": 4}, "--cpu-offload-gb 4"),
        ({"offload_group_size": 8}, "--offload-group-size 8"),
        ({"moe_backend": "triton"}, "--moe-backend triton"),
        ({"use_all2all_kernels": True, "all2all_backend": "deepep_low_latency"}, "deepep_low_latency"),
        ({"in_dtype": torch.float64}, "float64"),
        ({"device": "xpu:0"}, "on xpu"),
        ({"activation": SimpleNamespace(value="relu2")}, "its activation is relu2"),
        ({"activation": SimpleNamespace(value="swigluoai_uninterleave")}, "swigluoai_uninterleave with limit=None"),
        ({"swiglu_alpha": 1.5}, "alpha=1.5"),
    ],
)
def test_vllm_only_features_refused_by_name(changed: dict[str, Any], said: str) -> None:
    tensors = {"w13_weight": torch.ones(EXPERTS, 2 * WIDE, HIDDEN), "w2_weight": torch.ones(EXPERTS, HIDDEN, WIDE)}
    plan_layer(Layer(tensors, moe()), StoredAs("plain", "plain"))
    with pytest.raises(SpecError, match=said):
        plan_layer(Layer(tensors, moe(**changed)), StoredAs("plain", "plain"))


def test_unknown_methods_refused_by_name() -> None:
    for made, said in (
        (method("MoeWNA16Method"), "MoeWNA16Method"),
        (method("AutoGPTQMoEMethod", quant_config=SimpleNamespace(**{**vars(CONFIG), "desc_act": True})), "order"),
        (
            method(
                "CompressedTensorsWNA16MoEMethod", weight_quant=SimpleNamespace(**{**INTEGERS, "actorder": "group"})
            ),
            "order",
        ),
        (
            method("Fp8MoEMethod", quant_config=SimpleNamespace(is_checkpoint_fp8_serialized=False), block_quant=False),
            "while it loads",
        ),
    ):
        with pytest.raises(SpecError, match=said):
            stored_as(made)


def test_activations_are_vllms() -> None:
    def named(value: str, **more: Any) -> ActivationSpec:
        return activation_of(moe(activation=SimpleNamespace(value=value), **more))

    assert named("silu") == ActivationSpec()
    assert named("silu", swiglu_limit=10.0) == ActivationSpec(limit=10.0)
    assert named("swigluoai") == ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.702)
    uninterleaved = named("swigluoai_uninterleave", swiglu_limit=7.0, swiglu_alpha=1.7, swiglu_beta=0.5)
    assert uninterleaved == ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.7, beta=0.5)
    assert named("swiglustep") == ActivationSpec(kind="swiglu_step", limit=7.0)
    assert named("relu2_no_mul") == ActivationSpec(kind="relu2")
    situ = named("situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0)
    assert situ == ActivationSpec(kind="situ", gate_bound=4.0, up_bound=25.0)
    with raises_with(SpecError, "swigluoai_uninterleave", "limit=7.0", "beta=None"):
        named("swigluoai_uninterleave", swiglu_limit=7.0)


HOPPER = DeviceFacts(kind="cuda", name="NVIDIA H200", capability=(9, 0), memory=141 << 30, index=0, sms=132)
# Methods whose checkpoint declares dynamic FP8 activations, and what vLLM has of that.
DECLARED = {
    "fp8 blocks": ({"quant_config": SimpleNamespace(**vars(CONFIG), activation_scheme="dynamic")}, "fp8_group128"),
    "ct fp8 tensor": ({"input_quant": SimpleNamespace(strategy="tensor", dynamic=True)}, "fp8_token"),
    "ct fp8 channel": ({"input_quant": SimpleNamespace(strategy="token", dynamic=True)}, "fp8_token"),
}


def test_activations_are_those_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic FP8 where the checkpoint declares it and a GPU has FP8 tensor cores, otherwise 16 bits."""
    for capability, fp8 in (((9, 0), True), ((8, 9), True), ((8, 0), False), (None, False)):
        if capability is not None:
            monkeypatch.setattr(layers, "probe", lambda _, found=capability: replace(HOPPER, capability=found))
        else:
            monkeypatch.undo()
        for kind, (name, held) in METHODS.items():
            layer = Layer(as_vllm_loads(kind)[0], moe(in_dtype=torch.bfloat16))
            made = plan_layer(layer, stored_as(method(name, **held)))
            assert made.activation_format == "bf16", "nothing is declared"
            if kind in DECLARED:
                more, form = DECLARED[kind]
                made = plan_layer(layer, stored_as(method(name, **(held | more))))
                assert made.activation_format == (form if fp8 else "bf16")
                assert plan_layer(layer, stored_as(method(name, **(held | more))), "bf16").activation_format == "bf16"


def test_fp8_option_keeps_declared_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "probe", lambda _: HOPPER)
    for kind, (more, form) in DECLARED.items():
        name, held = METHODS[kind]
        layer = Layer(as_vllm_loads(kind)[0], moe(in_dtype=torch.bfloat16))
        assert plan_layer(layer, stored_as(method(name, **(held | more))), "fp8").activation_format == form


def test_lost_declarations_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A declared format without a kernel leaves 16 bits, which the log says on a GPU with FP8 tensor cores."""
    name, held = METHODS["fp8 blocks"]
    layer = Layer(as_vllm_loads("fp8 blocks")[0], moe(in_dtype=torch.bfloat16))
    stored = stored_as(method(name, **held))._replace(activations="nvfp4")
    assert lost_declaration(plan_layer(layer, stored), stored) is None, "a CPU has no FP8 tensor cores"
    monkeypatch.setattr(layers, "probe", lambda _: HOPPER)
    made = plan_layer(layer, stored)
    assert made.activation_format == "bf16"
    assert lost_declaration(made, stored) == "nvfp4"
    declared = stored._replace(activations="fp8_group128")
    assert lost_declaration(plan_layer(layer, declared), declared) is None


def test_static_scales_are_not_declared() -> None:
    for kind, more in (
        ("fp8 blocks", {"quant_config": SimpleNamespace(**vars(CONFIG), activation_scheme="static")}),
        ("ct fp8 tensor", {"input_quant": SimpleNamespace(strategy="tensor", dynamic=False)}),
    ):
        name, held = METHODS[kind]
        assert stored_as(method(name, **(held | more))).activations is None


def test_the_option_names_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = as_vllm_loads("ct mxfp4")
    layer, stored = Layer(tensors, moe(in_dtype=torch.bfloat16)), StoredAs("mxfp4", "compressed-tensors")
    assert plan_layer(layer, stored, "fp8_token").activation_format == "fp8_token"
    with pytest.raises(Exception, match="fp3"):
        plan_layer(layer, stored, "fp3")
    with raises_with(InputError, "fp8_static"):
        plan_layer(layer, stored, "fp8_static")
    assert fp8_core_format(plan_layer(layer, stored)) is None, "a CPU has no FP8 tensor cores"
    monkeypatch.setattr(layers, "probe", lambda _: HOPPER)
    assert plan_layer(layer, stored).kernel == "triton_w4a16"
    made = plan_layer(layer, stored, "fp8_group128")
    assert (made.kernel, made.activation_format, made.capturable) == ("triton_w4a8", "fp8_group128", True)


def test_a_faster_mode_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, cores in (((9, 0), True), ((8, 0), False)):
        monkeypatch.setattr(layers, "probe", lambda _, found=capability: replace(HOPPER, capability=found))
        for kind, (name, held) in METHODS.items():
            layer = Layer(as_vllm_loads(kind)[0], moe(in_dtype=torch.bfloat16))
            # No kernel has FP8 tensor cores for zero points and integers of eight bits.
            plain = KINDS[kind].form in ("int4_affine", "int8_affine") or not cores
            suggested = "fp8_token" if KINDS[kind].form == "mxfp4" else "fp8_group128"
            stored = stored_as(method(name, **held))
            assert fp8_core_format(plan_layer(layer, stored)) == (None if plain else suggested)
            made = plan_layer(layer, stored, "fp8")
            assert made.activation_format == ("bf16" if plain else suggested)
            if not plain:
                assert fp8_core_format(made) is None


def test_three_layers_run_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLLEGIUM_VLLM", raising=False)
    stand = Stand(monkeypatch)
    for _ in range(2):
        stand.said.clear()
        built = stand.model()
        assert len(stand.said) == 1
        assert_values(stand.said[0], "layers.0 to layers.2", "3 of 3", "cpu_grouped")
        assert stand.config.additional_config["collegium"]
        x, ids = heavy_tailed(5, HIDDEN, seed=1), torch.tensor([[0, 1]] * 5)
        weights = heavy_tailed(5, 2, seed=2, channels=False).abs()
        full = torch.cat([weights, torch.zeros(5, 1)], 1)
        for layer in built:
            assert layer.w13_weight.numel() == layer.w2_weight.numel() == 0
            found = layer.quant_method.apply(layer, x, weights, ids, None, None)
            assert relative_error(found, truth(x, torch.cat([ids, ids[:, :1]], 1), full)) < 1e-5
        with raises_with(InputError, "COLLEGIUM_VLLM=off"):
            built[0].quant_method.process_weights_after_loading(built[0])


def test_one_missing_expert_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "auto")
    stand = Stand(monkeypatch)
    stand.model(without=(1, 0, "w3"))
    assert "vLLM's own experts run this model; 1 of 3 MoE layers are refused: layers.1: w13_weight" in stand.said[0]
    assert stand.said[1:] == [f"vLLM finished layers.{n}" for n in range(3)]
    monkeypatch.setenv("COLLEGIUM_VLLM", "require")
    with raises_with(PlanError, "w3", "expert 0"):
        stand.model(without=(1, 0, "w3"))
    monkeypatch.setattr(plugin, "_waiting", [])
    monkeypatch.setenv("COLLEGIUM_VLLM_ACTIVATIONS", "fp3")
    with raises_with(PlanError, "layers.0", "fp3"):
        stand.model()


@pytest.mark.parametrize("mode", ["auto", "on", "require"])
def test_recipes_that_were_not_served(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run where the user switches them on; by default vLLM's own experts run them, and a line names the switch."""
    monkeypatch.setattr(served, "SERVED", {"cpu": frozenset({("bf16", "bf16")})})
    monkeypatch.setenv("COLLEGIUM_VLLM", mode)
    stand = Stand(monkeypatch)
    built = stand.model()
    if mode == "auto":
        assert len(stand.said) == 4
        for part in ("vLLM's own experts run this model", "3 of 3", "fp32", "COLLEGIUM_VLLM=on", "cpu_grouped"):
            assert part in stand.said[0]
        assert stand.said[0].count("COLLEGIUM_VLLM=on") == 1, "a reason is told once for all layers"
        assert stand.said[1:] == [f"vLLM finished layers.{n}" for n in range(3)]
        assert all(layer.w13_weight.isfinite().all() and layer.w13_weight.numel() for layer in built)
    else:
        assert "layers.0 to layers.2" in stand.said[0]
    monkeypatch.setattr(served, "SERVED", {"cpu": frozenset({("fp32", "fp32")}), "sm_90": frozenset()})
    monkeypatch.setattr(plugin, "_waiting", [])
    stand.said.clear()
    stand.model()
    assert "layers.0 to layers.2" in stand.said[0]


def test_faster_option_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "on")
    monkeypatch.setattr(plugin, "fp8_core_format", lambda _: "fp8_group128")
    stand = Stand(monkeypatch)
    stand.model()
    assert ["COLLEGIUM_VLLM_ACTIVATIONS=fp8 " in line for line in stand.said] == [False, True]
    stand.said.clear()
    monkeypatch.setenv("COLLEGIUM_VLLM_ACTIVATIONS", "fp32")
    stand.model()
    assert len(stand.said) == 1


def test_default_serves_only_listed_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on one GPU says nothing of another capability."""
    name, held = METHODS["ct mxfp4"]
    layer = Layer(as_vllm_loads("ct mxfp4")[0], moe(in_dtype=torch.bfloat16))
    monkeypatch.setattr(served, "SERVED", {"sm_90": frozenset({("mxfp4", "bf16")})})
    for capability, listed in (((9, 0), True), ((10, 0), False), ((8, 0), False)):
        monkeypatch.setattr(layers, "probe", lambda _, found=capability: replace(HOPPER, capability=found))
        made = plan_layer(layer, stored_as(method(name, **held)))
        reason = not_served(made)
        if listed:
            assert reason is None
        else:
            assert reason is not None
            assert_values(reason, made.kernel, f"sm_{capability[0]}{capability[1]}", "COLLEGIUM_VLLM=on")
    monkeypatch.setattr(layers, "probe", lambda _: HOPPER)
    assert not_served(plan_layer(layer, stored_as(method(name, **held)), "fp8")) is not None, "other activations"


def test_vllm_moves_experts_between_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "on")
    stand = Stand(monkeypatch)
    size = matrices(1)[0][0].numel() * 4
    for layer in stand.model(enable_eplb=True):
        assert [tuple(tensor.shape) for tensor in layer.get_expert_weights()] == [(2, 2 * size), (2, size)]
    stand.said.clear()
    built = stand.model(enable_eplb=True, last={"in_dtype": torch.bfloat16})
    assert_values(stand.said[0], "1 of 3", "layers.2: ")
    assert stand.said[1:] == [f"vLLM finished layers.{n}" for n in range(3)]
    assert built[0].get_expert_weights()[0].dtype == torch.float32  # vLLM's own
    stand.said.clear()
    stand.model(last={"in_dtype": torch.bfloat16})
    assert_values(stand.said[0], "layers.0 to layers.1", "2 of 3")
    assert_values(stand.said[1], "layers.2 to layers.2", "1 of 3")


def test_scales_stay_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "auto")
    layer = Stand(monkeypatch).layer("layers.0", moe(num_experts=2, experts_per_token=2))
    scale = torch.tensor(1.0009765625, dtype=torch.float16)  # no BF16 number
    layer.weight_loader(layer.w2_scale, scale, "w2_scale", "w2", 1)
    assert layer.w2_scale.dtype == torch.float16
    assert layer.w2_scale[1] == scale


def test_plugin_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLEGIUM_VLLM", "perhaps")
    with pytest.raises(InputError, match="auto, on, require, off"):
        plugin.register()
    monkeypatch.setenv("COLLEGIUM_VLLM", "off")
    plugin.register()
    monkeypatch.setenv("COLLEGIUM_VLLM", "auto")
    Stand(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"collegium\[vllm\]"):
        plugin.register()


def test_integers_of_another_shape_are_refused() -> None:
    tensors, _ = as_vllm_loads("awq")
    tensors["w2_scales"] = tensors["w2_scales"][:, :1]
    with pytest.raises(TensorMismatchError, match="scales"):
        loaded_weights(Layer(tensors, moe()), stored_as(method(*METHODS["awq"][:1], **METHODS["awq"][1])), {})
