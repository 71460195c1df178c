"""What is wrong in a model is seen in its logits at the places where transformers' own eager experts show it."""

from __future__ import annotations

import pytest
import torch
import transformers

from collegium.integrations.transformers import load_model, register

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=96, moe_intermediate_size=48, num_experts=7, num_experts_per_tok=3
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2
    ),
}  # fmt: skip
NAN, INFINITY = float("nan"), float("inf")


def random_model(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.3 if "bias" in key else parameter.shape[-1] ** -0.5)
            if "norm" in key:
                parameter.fill_(1.0)
    return model


def named(model: torch.nn.Module, part: str, layer: int) -> torch.Tensor:
    """Return the one parameter of a layer's router or norm, whatever the family calls it."""
    words = {"router": ("mlp.gate.weight", "mlp.router.weight"), "norm": ("post_attention_layernorm.weight",)}[part]
    (found,) = (p for n, p in model.named_parameters() if f"layers.{layer}." in n and n.endswith(words))
    return found.data


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize(("part", "value"), [("router", NAN), ("norm", NAN), ("norm", INFINITY)])
@pytest.mark.parametrize("layer", [0, 1])
def test_broken_router_or_norm_is_visible(name: str, part: str, value: float, layer: int) -> None:
    register()
    model = random_model(name)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(2))
    named(model, part, layer).view(-1)[5] = value
    with torch.inference_mode():
        model.set_experts_implementation("eager")
        eager = model(ids).logits
        assert not eager.isfinite().any(), "transformers' own experts show it everywhere"
        model.set_experts_implementation("collegium")
        for _ in range(2):
            assert not model(ids).logits.isfinite().any()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_broken_checkpoint_router_is_visible(name: str, tmp_path) -> None:
    model = random_model(name)
    named(model, "router", 1).view(-1)[5] = NAN
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert not loaded(ids).logits.isfinite().any()
        assert not loaded(ids).logits.isfinite().any()


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_broken_tokens_stay_alone(name: str, value: float) -> None:
    register()
    model = random_model(name)
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(2))
    bad: list[int] = []

    def spoil(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # Behind the last attention, which shows a NaN to every token.
        return (inputs[0].index_fill(1, torch.tensor(bad, dtype=torch.int64), value), *inputs[1:])

    model.model.layers[-1].mlp.register_forward_pre_hook(spoil)
    with torch.inference_mode():
        for implementation in ("eager", "collegium"):
            model.set_experts_implementation(implementation)
            bad[:] = []
            clean = model(ids).logits
            bad[:] = [2, 6]
            found = model(ids).logits
            lost = ~found[0].isfinite().any(dim=1)
            assert lost.nonzero().flatten().tolist() == [2, 6], implementation
            torch.testing.assert_close(found[0, ~lost], clean[0, ~lost], rtol=1e-4, atol=1e-5)


def test_remote_expert_ids_are_skipped() -> None:
    """With expert parallelism transformers gives the experts of other ranks ids from num_experts on."""
    register()
    model = random_model("mixtral")
    model.set_experts_implementation("collegium")
    experts = model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(4, 64), torch.tensor([[0, 6], [1, 2], [6, 6], [5, 3]]), torch.rand(4, 2)
    with torch.inference_mode():
        assert experts(x, ids, weights).isnan().all(dim=1).tolist() == [True, False, True, False]
        experts._is_expert_parallel = True
        found, wanted = experts(x, ids, weights), experts(x, ids.masked_fill(ids == 6, -1), weights)
    assert torch.equal(found, wanted)
    assert found.isfinite().all()
    assert not found[2].any()
