"""Models of several layers compiled on a GPU: each layer runs itself, whenever and however the model is compiled."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from collegium import load_layer
from collegium.commands.bench import bench
from collegium.commands.verify import verify_model
from collegium.integrations.transformers import Decoder, experts_modules, load_model, register
from collegium.testing.compare import relative_error

transformers = pytest.importorskip("transformers")
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def qwen(layers: int = 3) -> Any:
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=parameter.shape[-1] ** -0.5)
    register()
    model = model.cuda()
    model.set_experts_implementation("collegium")
    return model


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(length)).cuda()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_compiled_model_matches_eager_logits(mode: str, first: str) -> None:
    model = qwen()
    if first == "eager":
        model(ids_of(2, 9))
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for length in (9, 4, 6, 9, 9, 4):
        ids = ids_of(2, length)
        found = compiled(ids, use_cache=False).logits.clone()
        # The compiler fuses norms and attention, which rounds otherwise; another layer's experts are 0.6 off.
        assert relative_error(found, model(ids, use_cache=False).logits) < 0.03
    other = copy.deepcopy(model)
    modules: dict[int, Any] = experts_modules(other)
    for module in modules.values():
        module.down_proj.mul_(-3)
    ids = ids_of(2, 9)
    found = torch.compile(other, mode=mode)(ids, use_cache=False).logits.clone()
    wanted = other(ids, use_cache=False).logits
    assert relative_error(found, wanted) < 0.03
    assert relative_error(wanted, model(ids, use_cache=False).logits) > 0.2


def test_copied_and_unpickled_layers_run_independently() -> None:
    made = load_layer(SHIPPED, 2, device="cuda", weight_format="mxfp4")
    x = torch.randn(5, 256, device="cuda").bfloat16()
    wanted = made(x)
    kept = io.BytesIO()
    torch.save(made, kept)
    kept.seek(0)
    copies = [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(kept, weights_only=False)]
    del made
    for own in copies:
        for run in (own, torch.compile(own, fullgraph=True), torch.compile(own, mode="reduce-overhead")):
            for _ in range(3):
                assert torch.equal(run(x).clone(), wanted)


def test_static_cache_generate_matches_decoder() -> None:
    model, ids = qwen(), ids_of(1, 7)
    wanted = Decoder(model, capture=False).generate(ids, 24)
    for _ in range(2):
        found = model.generate(ids, max_new_tokens=24, do_sample=False, cache_implementation="static")
        # Compiled code rounds otherwise, so near ties may go the other way late in a text.
        assert torch.equal(found[:, :15], wanted[:, :15])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_does_all_the_work() -> None:
    ids, texts = torch.tensor([[5, 60, 7]]), []
    for device in ("cuda:0", "cuda:1"):
        before = torch.cuda.memory_allocated(0)
        model = load_model(str(SHIPPED), device=device)
        own = (*model.parameters(), *model.buffers())
        assert {tensor.device for tensor in own if not tensor.is_meta} == {torch.device(device)}
        decoder = Decoder(model)
        texts.append(decoder.generate(ids.to(device), 16).cpu())
        assert decoder.captured
        report = bench("256x128x8x2", [("bf16", "bf16")], tokens=[64], device=device, rounds=3)
        # An empty graph, captured on the other GPU, would take no time at all.
        assert report.rows[0].seconds > 4e-6, device
        assert verify_model(str(SHIPPED), device=device, experts=1).passed
        assert device == "cuda:0" or torch.cuda.memory_allocated(0) <= before
    assert torch.equal(*texts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu() -> None:
    model = qwen()
    wanted = model(ids_of(2, 9)).logits
    moved = model.to("cuda:1")
    assert relative_error(moved(ids_of(2, 9).to("cuda:1")).logits.cpu(), wanted.cpu()) < 0.01
