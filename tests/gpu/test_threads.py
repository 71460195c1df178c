"""A second of ``stress_threads.py`` for a few recipes; the program itself runs all of them, as long as it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
sys.path.insert(0, str(Path(__file__).parent))


SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def from_four_threads(run: Callable[[], torch.Tensor], times: int) -> list[torch.Tensor]:
    """Return what ``run`` gave, four times ``times``; whatever it raised is raised here."""
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(lambda: [run() for _ in range(times)]) for _ in range(4)]
        return [out for each in found for out in each.result()]


@pytest.mark.parametrize("how", ["load_model", "register"])
def test_whole_model_on_four_threads(how: str) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from collegium.integrations.transformers import Decoder, load_model, register

    register()
    if how == "load_model":
        model = load_model(str(SHIPPED), device="cuda")
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(
            SHIPPED, dtype=torch.bfloat16, experts_implementation="collegium"
        )
        model = model.cuda()
        model.requires_grad_(False)
    ids = torch.randint(5, 4000, (2, 40), generator=torch.Generator().manual_seed(3)).cuda()

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model(ids).logits

    first = from_four_threads(logits, 8)
    wanted = logits()
    assert all(torch.equal(out, wanted) for out in first)
    decoder = Decoder(model)
    text = decoder.generate(ids[:1], 24)
    assert decoder.captured
    assert all(torch.equal(out, text) for out in from_four_threads(lambda: Decoder(model).generate(ids[:1], 24), 3))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("recipe", [("bf16", "bf16"), ("fp8_block", "fp8_group128"), ("mxfp4", "fp8_token")])
def test_threads_match_single_caller_bitwise(recipe: tuple[str, str], own_streams: bool, layers: int) -> None:
    from stress_threads import stress

    calls, different, error = stress(*recipe, own_streams, layers, 2.0)
    assert (different, error) == (0, "")
    assert calls > 16


def test_threads_load_kernels_concurrently(tmp_path: Path) -> None:
    """Each starts its own kernel by that kernel's function, however often Python changes threads."""
    program = Path(__file__).with_name("stress_threads.py")
    text = "import runpy, sys; sys.setswitchinterval(1e-6); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], "
    command = [sys.executable, "-c", text + "run_name='__main__')", str(program), "--seconds", "1"]
    jobs = [
        subprocess.Popen(
            [*command, "--recipe", "fp8_tensor", activations],
            env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / activations), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for activations in ("fp8_token", "fp8_group128")
    ]
    for job in jobs:
        said, _ = job.communicate(timeout=240)
        assert job.returncode == 0, said
