"""What the real engine answered (serve.py) with the plug-in and without.

The truth is what vLLM's own experts answer in float32, where a model is quantised with its decoded weights.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cases import ANSWERS, CASES, FORMATS, MOVED, OVER_RANKS, YARDSTICKS

SAME = 1e-4  # log-probabilities in float32
ROOM = 1.5  # of what BF16 costs vLLM's own experts


@pytest.fixture(scope="session")
def answers() -> dict[str, Any]:
    found = json.loads(ANSWERS.read_text())
    assert set(found) == set(CASES), "serve.py was run for some of the cases only"
    return found


def served(answers: dict[str, Any], name: str) -> dict[str, Any]:
    assert "error" not in answers[name], f"{name}: {answers[name].get('error')}"
    return answers[name]


def off(found: dict[str, Any], truth: dict[str, Any], which: str = "prompts") -> tuple[float, float]:
    """How far the prompts' log-probabilities are from the truth: the root of the mean square, and the worst."""
    pairs = [(a, b) for p, q in zip(found[which], truth[which], strict=True) for a, b in zip(p, q, strict=True)]
    gaps = [abs(a - b) for a, b in pairs]
    return (sum(gap**2 for gap in gaps) / len(gaps)) ** 0.5, max(gaps)


def same_text(found: dict[str, Any], truth: dict[str, Any], room: float) -> bool:
    """Whether greedy text is the same up to where the truth holds two tokens equal within ``room``."""
    for ours, theirs, gaps in zip(found["ids"], truth["ids"], truth["gaps"], strict=True):
        differs = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if differs is not None and gaps[differs] > room:
            return False
    return True


def proves(answer: dict[str, Any], kernel: str, weights: str, activations: str) -> None:
    said = f"kernel {kernel}, weights {weights}, activations {activations},"
    assert answer["log"], "Collegium said nothing"
    for line in answer["log"]:
        assert re.search(r"runs the experts of \S+ to \S+, (\d+) of \1 MoE layers", line), line
        assert said in line, line


@pytest.mark.parametrize("way", ["", ", chunked prefill", ", compiled", ", tensor parallel", ", expert parallel"])
def test_shipped_model_matches_vllm_without_plugin(answers: dict[str, Any], way: str) -> None:
    truth, found = served(answers, "shipped, vLLM's own"), served(answers, f"shipped{way}")
    assert truth["log"] == []
    proves(found, "cpu_grouped", "fp32", "fp32")
    assert found["ids"] == truth["ids"]
    assert off(found, truth)[1] < SAME
    if "parallel" in way:
        assert {re.search(r"rank \d of \d, experts [^,]*(, slice \d of 2)?", line)[0] for line in found["log"]} == (
            {"rank 0 of 1, experts 0 to 15, slice 0 of 2", "rank 0 of 1, experts 0 to 15, slice 1 of 2"}
            if "tensor" in way
            else {"rank 0 of 2, experts 0 to 7", "rank 1 of 2, experts 8 to 15"}
        )


@pytest.mark.parametrize("way", ["", ", compiled"])
def test_data_parallel_engines_share_experts(answers: dict[str, Any], way: str) -> None:
    """Each engine routes its tokens, and the experts of both run them."""
    truth, found = served(answers, "shipped, vLLM's own"), served(answers, f"shipped, data parallel{way}")
    proves(found, "cpu_grouped", "fp32", "fp32")
    assert found["ids"] == truth["ids"]
    assert off(found, truth)[1] < SAME
    assert {re.search(r"rank \d of \d, experts [^,]*", line)[0] for line in found["log"]} == (
        {"rank 0 of 2, experts 0 to 7", "rank 1 of 2, experts 8 to 15"}
    )


def test_bf16_model_is_accurate_and_deterministic(answers: dict[str, Any]) -> None:
    truth, own = served(answers, "shipped, vLLM's own"), served(answers, "shipped in BF16, vLLM's own")
    found, again = served(answers, "shipped in BF16"), served(answers, "shipped in BF16, again")
    proves(found, "cpu_grouped", "bf16", "bf16")
    assert off(found, truth)[0] <= ROOM * off(own, truth)[0]
    assert same_text(found, truth, ROOM * off(own, truth)[1])
    assert all(found[key] == again[key] for key in ("ids", "written", "prompts"))


def near(answers: dict[str, Any], name: str, model: str) -> None:
    """Not much further from the truth than vLLM's own experts in BF16 are."""
    truth, found = served(answers, f"{model}, decoded, vLLM's own"), served(answers, name)
    costs = [
        off(served(answers, f"{each}, decoded in BF16, vLLM's own"), served(answers, f"{each}, decoded, vLLM's own"))
        for each in YARDSTICKS
        if each == model or model not in YARDSTICKS
    ]
    mean, worst = (max(cost[n] for cost in costs) for n in range(2))
    assert off(found, truth)[0] <= ROOM * mean
    assert same_text(found, truth, ROOM * worst)


@pytest.mark.parametrize("model", list(FORMATS))
def test_quantised_experts_match_checkpoint_values(answers: dict[str, Any], model: str) -> None:
    proves(served(answers, model), *FORMATS[model], "bf16")
    near(answers, model, model)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        for model in OVER_RANKS
        if name in (f"{model}, {w} parallel" for w in ("tensor", "expert"))
    ],
)
def test_quantised_experts_over_two_ranks(answers: dict[str, Any], name: str) -> None:
    model = name.partition(",")[0]
    proves(served(answers, name), *FORMATS[model], "bf16")
    assert len(answers[name]["log"]) == 2
    near(answers, name, model)


@pytest.mark.parametrize("model", ["shipped", *MOVED])
def test_vllm_moves_packed_experts_between_ranks(answers: dict[str, Any], model: str) -> None:
    found = served(answers, f"{model}, balanced")
    moves, slots, came = zip(*found["moved"], strict=True)
    assert moves[0] >= slots[0] / 3
    assert came[0] > 0
    if model == "shipped":
        assert min(came) > slots[0] / 3  # every second step
        truth = served(answers, "shipped, vLLM's own")
        proves(found, "cpu_grouped", "fp32", "fp32")
        assert found["ids"] == truth["ids"]
        assert max(off(found, truth)[1], off(found, truth, "written")[1]) < SAME
        assert {re.search(r"rank \d of \d, experts [^,]*", line)[0] for line in found["log"]} == (
            {"rank 0 of 2, experts 0 to 8", "rank 1 of 2, experts 9 to 17"}
        )
    else:
        proves(found, *FORMATS[model], "bf16")
        near(answers, f"{model}, balanced", model)


def test_gpt_oss_preserves_activation_and_biases(answers: dict[str, Any]) -> None:
    truth, found = served(answers, "gpt_oss, vLLM's own"), served(answers, "gpt_oss")
    proves(found, "cpu_grouped", "fp32", "fp32")
    assert found["ids"] == truth["ids"]
    assert off(found, truth)[1] < SAME


def test_activations_by_option(answers: dict[str, Any]) -> None:
    found = served(answers, "fp8_block, FP8 activations")
    assert "activations fp8_group128" in found["log"][0]
    truth, plain = served(answers, "fp8_block, decoded, vLLM's own"), served(answers, "fp8_block")
    assert off(plain, truth)[0] < off(found, truth)[0] < 1


def test_auto_falls_back_and_require_raises(answers: dict[str, Any]) -> None:
    truth, found = served(answers, "shipped, vLLM's own"), served(answers, "refused, auto")
    assert re.match(r"vLLM's own experts run this model; 6 of 6 MoE layers are refused: .*fp3", found["log"][0])
    assert (found["ids"], found["prompts"]) == (truth["ids"], truth["prompts"])
    assert re.search(r"PlanError: model\.layers\.0\.mlp\.experts cannot run.*fp3", answers["refused, require"]["error"])
    both = answers["refused by both, auto"]["error"]
    assert re.search(r"cannot run through Collegium.*fp3.*; nor does vLLM itself run it here: No WNA16", both)


def test_bad_weights_detected_before_running(answers: dict[str, Any]) -> None:
    found = served(answers, "an expert is missing, auto")
    assert re.match(r"vLLM's own experts run this model; 1 of 6 .*w3 of local expert 5", found["log"][0])
    assert "w3 of local expert 5" in answers["an expert is missing, require"]["error"]
    # What runs then is vLLM's: its experts on a CPU read no expert map, and release 0.32.0 ends with a fault.
    ranks = answers["an expert is missing on one of two ranks, auto"]
    assert len(ranks["log"]) == 2
    assert all("vLLM's own experts run this model; 1 of 6 MoE layers" in line for line in ranks["log"])
    assert re.search(r"BadScaleError|down of local experts \[2\]", answers["a scale is infinite, require"]["error"])


def test_an_unknown_mode_ends_the_engine(answers: dict[str, Any]) -> None:
    assert "COLLEGIUM_VLLM is 'perhaps', allowed: auto, on, require, off" in answers["unknown mode"]["error"]
