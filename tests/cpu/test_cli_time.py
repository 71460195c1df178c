from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from collegium.runtime.cuda_context import start_context

ROOT = Path(__file__).resolve().parents[2]
# Each takes a tenth of a second to several seconds to import.
HEAVY = ("torch._dynamo", "torch._inductor", "transformers", "sympy", "scipy", "matplotlib", "huggingface_hub")
AFTER = f"print(sorted(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"


COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}


def imported_by(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\n{AFTER}"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("plan",), ("inspect", "--no-deep")])
def test_light_commands_import_little(words: tuple[str, ...]) -> None:
    arguments = ["collegium", words[0], "fables-16m", "--device", "cpu", *words[1:]]
    program = f"from collegium import cli; sys.argv = {arguments!r}\ntry: cli.main()\nexcept SystemExit: pass"
    assert imported_by(program) == "[]"


def test_layers_need_no_compiler() -> None:
    program = """
import torch, collegium
layer = collegium.load_layer("fables-16m", 2, device="cpu")
assert layer(torch.randn(3, 256, dtype=torch.bfloat16)).isfinite().all()
"""
    assert not COMPILER & set(ast.literal_eval(imported_by(program)))


def test_layers_run_uncompiled_in_a_compiler() -> None:
    program = """
import torch, torch._dynamo, collegium
layer = collegium.load_layer("fables-16m", 2, device="cpu")
x = torch.randn(3, 256, dtype=torch.bfloat16)
eager, compiled = layer(x), torch.compile(layer, backend="eager", fullgraph=True)(x)
assert torch.equal(eager, compiled)
"""
    imported_by(program)


def test_the_context_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_context("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert start_context("cpu") is None
    devices: list[str] = []

    def zeros(*_: int, device: str, **__: object) -> torch.Tensor:
        devices.append(device)
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(torch, "zeros", zeros)
    for device, expected in ((None, "cuda"), ("cuda:1", "cuda:1")):
        thread = start_context(device)
        assert thread is not None
        thread.join()
        assert devices[-1] == expected
