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
def test_greedy_tokens_are_those_of_the_model_without_a_cache(model, penalty):
    ids = ids_of(2, 7)
    found = Decoder(model).generate(ids, 8, penalty=penalty)
    assert torch.equal(found, without_cache(model, ids, 8, penalty))


def test_it_stops_when_every_sequence_has_ended(model):
    ids = ids_of(2, 5)
    free = Decoder(model).generate(ids, 6)
    ends = tuple(free[:, 7].tolist())
    stopped = Decoder(model).generate(ids, 6, stop=ends)
    assert stopped.shape[1] <= 8
    assert torch.equal(stopped, free[:, : stopped.shape[1]])


def test_sampling_draws_among_the_likeliest_and_repeats_with_the_seed(model):
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
