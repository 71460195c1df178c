"""A decode step replayed as a CUDA graph writes the same tokens as the same steps launched one by one."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium.integrations.transformers import Decoder, attach, experts_modules, layers_of, register, routed_weights
from collegium.layer import MoELayer
from collegium.planning import plan
from collegium.problem import Overrides, Problem
from collegium.runtime.devices import probe


def tiny(family: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    }
    if family == "gpt_oss":
        config = transformers.GptOssConfig(**sizes, num_local_experts=8, sliding_window=32)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=8, moe_intermediate_size=192, decoder_sparse_step=1)
    register()
    config._experts_implementation = "collegium"
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("family", "tokens"), [("qwen3_moe", 40), ("gpt_oss", 20)])
def test_the_graph_writes_the_same_tokens(family, tokens, rows):
    model = tiny(family)
    ids = torch.randint(0, 512, (rows, 9), device="cuda")
    plain, graph = Decoder(model, capture=False), Decoder(model)
    wanted = plain.generate(ids, tokens, penalty=1.1)
    found = graph.generate(ids, tokens, penalty=1.1)
    assert torch.equal(found, wanted)
    assert graph.captured
    assert not plain.captured
    assert len(set(wanted[0, 9:].tolist())) > 3, "a model that repeats one token would hide a stuck position"
    other = torch.randint(0, 512, (rows, 9), device="cuda")
    assert torch.equal(graph.generate(other, tokens), plain.generate(other, tokens))


def test_uncapturable_kernel_is_not_captured():
    model = tiny("qwen3_moe")
    ids = torch.randint(0, 512, (1, 9), device="cuda")
    decoder = Decoder(model)
    decoder.generate(ids, 4)
    assert decoder.captured
    layers = {}
    for index, module in experts_modules(model).items():
        spec = layers_of(model)[index].spec
        made = plan(Problem(spec=spec, device=probe("cuda")), Overrides(kernel="reference"))
        layers[index] = MoELayer(routed_weights(module), made)
    attach(model, layers)
    decoder.generate(ids, 4)
    assert not decoder.captured


def test_sliding_cache_is_not_captured():
    decoder = Decoder(tiny("gpt_oss"))
    decoder.generate(torch.randint(0, 512, (1, 9), device="cuda"), 40)
    assert not decoder.captured
