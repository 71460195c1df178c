"""The plug-in for transformers on a GPU: wrong weights are refused where they lie, right ones run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import transformers

from collegium import ConfigError
from collegium.integrations.transformers import experts_modules, layers_of, load_model, refresh, register
from collegium.testing.compare import relative_error
from quantised_models import blocks, decoded, rewrite, write_model
from raising import raises_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

IDS = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    register()


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.bfloat16, "experts_implementation": "collegium"} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).to("cuda").eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS.to("cuda")).logits.float().cpu()


def one_scale(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 with one scale a matrix, as ModelOpt exports it."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def test_modelopt_fp8_refused_outside_load_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    skip = ["lm_head", "*self_attn*", "*mlp.gate"]
    rewrite(folder, one_scale, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": skip})
    model = load(folder)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"layer 0, expert 0, .*load_model\("):
            logits(model)
    truth = logits(load(decoded(folder), dtype=torch.float32, experts_implementation="eager"))
    ours = load_model(str(folder), device="cuda")
    assert relative_error(logits(ours), truth) < 0.03


def test_partial_blocks_refused_whole_blocks_run(tmp_path: Path) -> None:
    """Decoded while loading; transformers keeps FP8 as it is where it finds kernels of its own."""
    skip = ["lm_head", "mlp.gate", "q_proj", "k_proj", "v_proj", "o_proj"]
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skip}
    asked = transformers.FineGrainedFP8Config(dequantize=True)
    cut, whole = write_model(tmp_path / "cut", wide=192), write_model(tmp_path / "whole", wide=128)
    for folder in (cut, whole):
        rewrite(folder, blocks, block)
    with pytest.raises(ConfigError, match="checkpoint"):
        logits(load(cut, quantization_config=asked))
    found = logits(load(whole, quantization_config=asked))
    truth = logits(load(decoded(whole), dtype=torch.float32, experts_implementation="eager"))
    assert relative_error(found, truth) < 0.03


def test_experts_that_stay_fp8_are_compared(tmp_path: Path) -> None:
    skip = ["lm_head", "mlp.gate", "q_proj", "k_proj", "v_proj", "o_proj"]
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skip}
    folder = write_model(tmp_path / "model", wide=256, hidden=256)
    rewrite(folder, blocks, block)
    truth = logits(load(decoded(folder), dtype=torch.float32, experts_implementation="eager"))
    model = load(folder, device_map="cuda")
    assert experts_modules(model)[0].down_proj.dtype == torch.float8_e4m3fn
    assert relative_error(logits(model), truth) < 0.03
    changed = load(folder, device_map="cuda")
    experts_modules(changed)[2].get_parameter("gate_up_proj_scale_inv").data[4, -1].mul_(1.5)
    with raises_with(ConfigError, "layer 2", "expert 4", "up", "50.0%"):
        logits(changed)


def test_unchanged_weights_run_changed_row_detected(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    model = load(folder)
    found = logits(model)
    model.set_experts_implementation("eager")
    assert relative_error(found, logits(model)) < 0.02
    changed = load(folder)
    experts_modules(changed)[2].get_parameter("gate_up_proj").data[4, -1].mul_(1.1)
    with pytest.raises(ConfigError, match="layer 2, expert 4, up: "):
        logits(changed)
    register(compare=False)
    assert logits(changed).isfinite().all()


def test_refresh_picks_up_uncounted_writes(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "model"))
    before, layers = logits(model), layers_of(model)
    modules: dict[int, Any] = experts_modules(model)
    for module in modules.values():
        module.down_proj.data.mul_(-3)
    refresh(model)
    found = logits(model)
    assert all(new is not old for new, old in zip(layers_of(model), layers, strict=True))
    model.set_experts_implementation("eager")
    assert relative_error(found, logits(model)) < 0.02
    assert relative_error(found, before) > 1e-2


def test_a_dense_model_says_so(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        load(tmp_path)
