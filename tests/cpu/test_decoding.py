"""Decoding with a cache of fixed size writes what the model writes without any cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from collegium.errors import InputError
from collegium.integrations.transformers import Decoder, load_model

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


@pytest.fixture(scope="module")
def model():
    return load_model(str(SHIPPED), device="cpu")


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(5, 4000, (rows, length), generator=torch.Generator().manual_seed(3))


def without_cache(model, ids, tokens, penalty=1.0):
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(ids, use_cache=False).logits[:, -1].float()
            for row in range(ids.shape[0]):
                for seen in set(ids[row].tolist()):
                    value = logits[row, seen]
                    logits[row, seen] = value / penalty if value > 0 else value * penalty
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_greedy_tokens_without_a_cache(model, penalty):
    ids = ids_of(2, 7)
    found = Decoder(model).generate(ids, 8, penalty=penalty)
    assert torch.equal(found, without_cache(model, ids, 8, penalty))


def test_stops_when_all_sequences_end(model):
    ids = ids_of(2, 5)
    free = Decoder(model).generate(ids, 6)
    ends = tuple(free[:, 7].tolist())
    stopped = Decoder(model).generate(ids, 6, stop=ends)
    assert stopped.shape[1] <= 8
    assert torch.equal(stopped, free[:, : stopped.shape[1]])


def test_sampling_repeats_with_the_seed(model):
    ids = ids_of(1, 5)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(Decoder(model).generate(ids, 12, temperature=1.0))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    torch.manual_seed(0)
    one = Decoder(model).generate(ids, 6, temperature=1.0, top_k=1)
    assert torch.equal(one, Decoder(model).generate(ids, 6))


def test_nothing_is_captured_without_a_gpu(model):
    decoder = Decoder(model, capture=True)
    decoder.generate(ids_of(1, 3), 4)
    assert not decoder.captured


@pytest.mark.parametrize(("shape", "tokens"), [((3,), 2), ((1, 0), 2), ((1, 3), 0)])
def test_other_ids_are_refused(model, shape, tokens):
    with pytest.raises(InputError, match="generate"):
        Decoder(model).generate(torch.zeros(shape, dtype=torch.int64), tokens)


@pytest.mark.parametrize(
    ("work", "seen"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.where(x > 0), "where"),
        (lambda x: float(x[0]), "item"),
        (lambda x: torch.tensor([2.0], device=x.device), "lift_fresh"),
        (lambda x: [1] if (x > 0).all() else [2], "is_nonzero"),
        (lambda x: x.to("meta"), "to"),
        (lambda x: torch.repeat_interleave(x, torch.ones(4, dtype=torch.int64)), "repeat_interleave"),
        (lambda x: x.expand(3, 4).clone().masked_fill_(x > 0, 1) @ torch.ones(4), None),
        (lambda x: x[torch.arange(2)], None),
    ],
)
def test_device_synchronisation_is_detected(work, seen):
    from collegium.integrations.transformers.host_watch import HostWatch

    x = torch.randn(4)
    with torch.inference_mode(), HostWatch("cpu") as watch:
        work(x)
    assert (watch.first_sync or "").split(".")[1:2] == ([] if seen is None else [seen])


@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid_mamba", "jamba_mamba", "nemotron_h_mamba", "minimax", "qwen3_next", "qwen3_5_moe", "gemma4",
        "deepseek_v4", "kimi_linear", "glm_moe_dsa", "llama4", "dbrx", "step3p7", "kimi_k25", "gpt_oss", "mixtral",
    ],
)  # fmt: skip
def test_caches_do_not_change_the_text(name, tmp_path):
    from collegium.integrations.transformers.loading import load_model_in
    from family_cases import CASES, build

    build(CASES[name], tmp_path)
    one = load_model_in("fp32", str(tmp_path), device="cpu")
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(3))
    wanted = without_cache(one, ids, 10)
    for _ in range(2):
        assert torch.equal(Decoder(one).generate(ids, 10), wanted)
