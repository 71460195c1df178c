"""Threads that call a layer or a whole model on a CPU get the bits of a single caller."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from collegium import Overrides, load_layer
from collegium.testing.compare import heavy_tailed

if TYPE_CHECKING:
    from collections.abc import Callable

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def from_four_threads(run: Callable[[int], torch.Tensor], times: int) -> list[list[torch.Tensor]]:
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(lambda: [run(number) for number in range(times)]) for _ in range(4)]
        return [each.result() for each in found]


@pytest.mark.parametrize("kernel", ["cpu_grouped", "reference"])
def test_a_layer_called_from_four_threads(kernel: str) -> None:
    layer = load_layer(SHIPPED, 2, device="cpu", weight_format="mxfp4", overrides=Overrides(kernel=kernel))
    inputs = [heavy_tailed(tokens, 256, seed=tokens).bfloat16() for tokens in (1, 7, 40)]
    found = from_four_threads(lambda number: layer(inputs[number % 3]), 9)
    for own in found:
        assert all(torch.equal(out, layer(inputs[number % 3])) for number, out in enumerate(own))


@pytest.mark.parametrize("how", ["load_model", "register"])
def test_whole_model_on_four_threads(how: str) -> None:
    transformers = pytest.importorskip("transformers")
    from collegium.integrations.transformers import load_model, register

    register()
    if how == "load_model":
        model = load_model(str(SHIPPED), device="cpu")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, experts_implementation="collegium")
    inputs = [torch.randint(5, 4000, (2, length)) for length in (9, 4)]

    def logits(number: int) -> torch.Tensor:
        with torch.inference_mode():
            return model(inputs[number % 2]).logits

    found = from_four_threads(logits, 4)
    for own in found:
        assert all(torch.equal(out, logits(number)) for number, out in enumerate(own))
