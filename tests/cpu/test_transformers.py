"""transformers with Collegium's experts against transformers' own eager experts."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from collegium import InputError, MissingTensorError, Overrides, SpecError
from collegium.integrations.transformers import (
    attach,
    build_layers,
    experts_modules,
    load_model,
    register,
    routed_weights,
)
from collegium.testing.compare import relative_error
from raising import raises_with

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
}


def random_model(name: str):
    torch.manual_seed(1)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.3 if "bias" in key else parameter.shape[-1] ** -0.5)
            if "norm" in key:
                parameter.fill_(1.0)
    return model


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param)
    model.to(torch.bfloat16).save_pretrained(folder)
    return request.param, folder


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_agree_with_eager(name):
    register()
    model = random_model(name)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(2))
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        eager = model(ids).logits
        model.set_experts_implementation("collegium")
        ours = model(ids).logits
    assert relative_error(ours, eager) < 2e-5


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_changed_parameters_are_seen(name):
    """A layer that was packed once must not outlive the weights it was packed from."""
    register()
    model = random_model(name)
    ids = torch.randint(0, 97, (1, 5), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        model.set_experts_implementation("collegium")
        before = model(ids).logits.clone()
    with torch.no_grad():
        for module in experts_modules(model).values():
            module.down_proj.mul_(-3)
    with torch.inference_mode():
        ours = model(ids).logits
        model.set_experts_implementation("eager")
        eager = model(ids).logits
    assert relative_error(ours, eager) < 2e-5
    assert relative_error(before, eager) > 1e-2


def test_load_model_reads_what_transformers_saved(saved):
    _, folder = saved
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(4))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    ours = load_model(str(folder))
    with torch.inference_mode():
        found, plain, wanted = ours(ids).logits, theirs(ids).logits, copy.deepcopy(theirs).float()(ids).logits.double()
    # One rounding can decide which expert is chosen: of mixtral's logits it is theirs that are 0.022 off on some CPUs.
    assert min(relative_error(found, plain.double()), relative_error(found, wanted)) < 0.02
    assert all(p.device.type == "meta" for m in experts_modules(ours).values() for p in m.parameters())


def test_checkpoint_experts_match_module_parameters(saved):
    _, folder = saved
    from collegium.checkpoint.layer_view import CheckpointLayer
    from collegium.checkpoint.loader import load_experts
    from collegium.checkpoint.reader import Checkpoint
    from collegium.models import describe
    from collegium.parallel.placement import linear

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    checkpoint = Checkpoint.open(folder)
    spec = describe(checkpoint.config)
    for index, module in experts_modules(theirs).items():
        ours, wanted = (
            load_experts(CheckpointLayer.open(checkpoint, index), linear(spec.num_experts, 0, 1)),
            routed_weights(module),
        )
        assert torch.equal(ours.gate_up.decode(), wanted.gate_up.decode())
        assert torch.equal(ours.down.decode(), wanted.down.decode())
        if spec.expert_bias:
            assert torch.equal(ours.gate_up_bias.float(), wanted.gate_up_bias.float())
            assert torch.equal(ours.down_bias.float(), wanted.down_bias.float())


def test_every_weight_format_can_be_attached(saved):
    _, folder = saved
    from collegium.checkpoint.reader import Checkpoint

    ids = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(5))
    model = load_model(str(folder))
    with torch.inference_mode():
        base = model(ids).logits.double()
    for name, bound in (("mxfp8", 0.15), ("fp8_block", 0.15), ("nvfp4", 0.45), ("mxfp4", 0.6)):
        attach(model, build_layers(Checkpoint.open(folder), weight_format=name))
        with torch.inference_mode():
            error = relative_error(model(ids).logits, base)
        assert 1e-4 < error < bound, name


def test_attach_wants_every_layer(saved):
    _, folder = saved
    from collegium.checkpoint.reader import Checkpoint

    model = load_model(str(folder))
    layers = build_layers(Checkpoint.open(folder), overrides=Overrides(kernel="reference"))
    layers[17] = layers.pop(max(layers))
    with pytest.raises(InputError, match="17"):
        attach(model, layers)


def test_an_unknown_gate_function_is_refused():
    register()
    model = random_model("qwen3_moe")
    for module in experts_modules(model).values():
        module.act_fn = torch.nn.Tanh()
    model.set_experts_implementation("collegium")
    with torch.no_grad(), raises_with(SpecError, "Qwen3MoeExperts", "swiglu", "geglu_tanh"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_missing_dense_tensor_is_named(saved, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    _, folder = saved
    shutil.copytree(folder, tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MissingTensorError, match=r"model\.norm\.weight"):
        load_model(str(tmp_path / "broken"))
