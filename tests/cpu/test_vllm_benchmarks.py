"""What the benchmarks of vLLM do without vLLM: models, rows, distances of layers, and what a log says."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import bench_vllm
import vllm_distance
import vllm_engine
import vllm_models
from collegium.formats import by_name
from collegium.testing.compare import heavy_tailed
from vllm_standins import Stand

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(vllm_models.MODELS))
def test_models_have_published_names(name: str) -> None:
    config = vllm_models.config_of(name, tiny=True)
    made = list(vllm_models.tensors(config, CPU))
    names = [key for key, _ in made]
    assert len(set(names)) == len(names)
    assert all(tensor.is_contiguous() for _, tensor in made)
    again = dict(vllm_models.tensors(config, CPU))
    assert all(torch.equal(tensor, again[key]) for key, tensor in made), "the same numbers in every process"
    assert vllm_models.config_of(name, 7)["num_hidden_layers"] == 7
    layers = {key.split(".")[2] for key in names if key.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("name", "form", "storage", "options"),
    [
        ("qwen3_fp8", "fp8_block", "finegrained-fp8", {"block": (128, 128)}),
        ("qwen3_nvfp4", "nvfp4", "modelopt", {}),
        ("qwen3_int4", "int4_group", "compressed-tensors", {"group_size": 128}),
    ],
)
def test_quantised_weights_have_unit_gain(name: str, form: str, storage: str, options: dict[str, Any]) -> None:
    made = dict(vllm_models.tensors(vllm_models.config_of(name, tiny=True), CPU))
    stem = "model.layers.0.mlp.experts.3.gate_proj"
    parts = {key.removeprefix(stem): tensor for key, tensor in made.items() if key.startswith(f"{stem}.")}
    wanted = {f".{name}" for name in ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2")}
    payload = by_name(form).from_parts(
        {key: tensor for key, tensor in parts.items() if key in wanted}, storage=storage, shape=(128, 256), **options
    )
    decoded = payload.decode()
    assert decoded.shape == (128, 256)
    assert float(decoded.square().mean().sqrt()) == pytest.approx(256**-0.5, rel=0.1)


def answer(**measures: float) -> dict[str, Any]:
    return {"measures": {name.replace("_", " "): value for name, value in measures.items()}, "logprobs": [-1.0, -2.0]}


def test_rows_compare_speeds_and_seconds() -> None:
    before = answer(start=10, decode_8=100, decode_8_kernels=0.004)
    after = {**answer(start=5, decode_8=150, decode_8_kernels=0.002), "experts run by": "triton_w4a16"}
    after |= {"weights": "mxfp4", "activations": "bf16", "logprobs": [-1.0, -2.2]}
    rows = bench_vllm.rows_of(before, after)
    assert {row["measure"]: row.get("times as fast") for row in rows} == {
        "start": "2.000", "decode 8": "1.500", "decode 8 kernels": "2.000", "distance": None
    }  # fmt: skip
    assert rows[-1]["with"] == "0.1414"
    assert {(row["experts run by"], row["weights"], row["error"]) for row in rows} == {("triton_w4a16", "mxfp4", "")}
    assert set().union(*rows) <= set(bench_vllm.RESULT)


def test_engine_without_answer_is_one_row() -> None:
    (row,) = bench_vllm.rows_of({"error": "no kernel"}, {"error": "out of memory"})
    assert row["error"] == "without: no kernel; with: out of memory"
    assert row["experts run by"] == "nobody"
    (row,) = bench_vllm.rows_of({"error": "no kernel"}, {**answer(start=1), "experts run by": "cpu_fused"})
    assert row["error"] == "without: no kernel"


def test_experts_are_read_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    stand.model()
    assert vllm_engine.experts_of(["Using FLASH_ATTN", *stand.said]) == ("cpu_grouped", "fp32", "fp32")
    monkeypatch.setenv("COLLEGIUM_VLLM_ACTIVATIONS", "fp3")
    stand.said.clear()
    stand.model()
    assert vllm_engine.experts_of(stand.said) == ("vLLM", "", "")


def test_decoding_time_is_without_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts take 3 s and a step 0.5 s; tokens that are missing are an error."""
    vllm = ModuleType("vllm")
    vars(vllm)["SamplingParams"] = lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    clock = [0.0]
    monkeypatch.setattr(vllm_engine.time, "perf_counter", lambda: clock[0])

    def generate(prompts: list[Any], options: Any, use_tqdm: bool) -> Iterator[Any]:
        clock[0] += 3 + 0.5 * (options.max_tokens - 1)
        written = min(options.max_tokens, 20)
        assert len({tuple(sent["prompt_token_ids"]) for sent in prompts}) == len(prompts)
        return (SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(written))]) for _ in prompts)

    engine = SimpleNamespace(generate=generate)
    assert vllm_engine.decode_seconds(engine, 4, 16, 2) == 0.5
    with pytest.raises(RuntimeError, match="33"):
        vllm_engine.decode_seconds(engine, 4, 32, 2)


def calls(**outputs: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """One engine's calls: ``out`` of each layer, for equal inputs and routings."""
    x, ids = heavy_tailed(6, 8, seed=1), torch.tensor([[0, 1]] * 6)
    return {name: {"x": x, "weights": x, "ids": ids, "out": out, "replayed": out} for name, out in outputs.items()}


def test_distances_tell_fault_from_chaos() -> None:
    truth, noise = heavy_tailed(6, 8, seed=2), heavy_tailed(6, 8, seed=3)
    engines = {
        "triton": calls(a=truth, b=truth),
        "marlin": calls(a=truth + 0.01 * noise, b=truth + 0.01 * noise),
        "collegium": calls(a=truth + 0.011 * noise, b=truth - 0.009 * noise),
    }
    rows = vllm_distance.compared(engines, "triton")
    assert [(row["layer"], row["engine"]) for row in rows] == [
        (layer, engine) for layer in "ab" for engine in ("marlin", "collegium")
    ]
    ordinary = 0.01 * float(noise.norm() / truth.norm())
    assert rows[1]["same input"] == pytest.approx(1.1 * ordinary, rel=1e-3)
    assert rows[1]["allowed"] == pytest.approx(1.2 * ordinary, rel=1e-3)
    assert vllm_distance.verdict(rows).startswith("no fault")

    engines["collegium"]["b"]["ids"] = torch.tensor([[1, 0], [2, 1], [1, 0], [1, 0], [0, 3], [0, 1]])
    engines["collegium"]["b"]["x"] = 1.5 * engines["triton"]["b"]["x"]
    rows = vllm_distance.compared(engines, "triton")
    assert rows[3]["routed otherwise"] == pytest.approx(2 / 6), "the order of experts does not matter"
    assert rows[3]["input"] == pytest.approx(0.5)
    assert vllm_distance.verdict(rows).startswith("no fault"), "other inputs are no fault"

    engines["collegium"]["b"]["replayed"] = truth + 0.03 * noise
    text = vllm_distance.verdict(vllm_distance.compared(engines, "triton"))
    assert text.startswith("fault: collegium in b")
    assert "1 of 2 layers" in text
    engines["collegium"]["b"]["replayed"] = truth * float("nan")
    assert vllm_distance.verdict(vllm_distance.compared(engines, "triton")).startswith("fault")
    del engines["marlin"]
    text = vllm_distance.verdict(vllm_distance.compared(engines, "triton"))
    assert not text.startswith(("fault", "no fault"))


def test_layers_are_recorded_before_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of vLLM may write to their input, and return memory that the next call uses."""
    memory = torch.zeros(4, 8)

    class RoutedExperts:
        layer_name = "layer"

        def forward_modular(
            self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared_experts: Any = None
        ) -> torch.Tensor:
            memory.copy_(2 * x + topk_weights.sum() + topk_ids.sum())
            x.zero_()
            return memory

    name = "vllm.model_executor.layers.fused_moe.routed_experts"
    module = ModuleType(name)
    vars(module)["RoutedExperts"] = RoutedExperts
    monkeypatch.setitem(sys.modules, name, module)
    other, x, weights, ids = (heavy_tailed(4, 8, seed=n) for n in range(4))
    reference = {"layer": {"x": other, "weights": 2 * weights, "ids": 2 * ids}}
    found: vllm_distance.Calls = {}
    recording: list[bool] = []
    vllm_distance.patch(found, reference, recording)
    layer: Any = RoutedExperts()
    layer.forward_modular(x=x.clone(), topk_weights=weights, topk_ids=ids, shared_experts=None)
    assert not found, "warm-up is not recorded"
    recording.append(True)
    out = layer.forward_modular(x=x.clone(), topk_weights=weights, topk_ids=ids, shared_experts=object())
    call = found["layer"]
    assert torch.equal(call["x"], x)
    assert torch.equal(call["out"], 2 * x + weights.sum() + ids.sum())
    assert torch.equal(out, call["out"])
    assert torch.equal(call["replayed"], 2 * other + (2 * weights).sum() + (2 * ids).sum())
