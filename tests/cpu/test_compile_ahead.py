"""Kernels compiled on a machine without a GPU are those that Triton looks for on one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def compiled_into(cache: Path, *asked: str) -> tuple[str, set[str]]:
    """Return the script's last line and the folders of ``cache`` with a kernel for the GPU."""
    run = subprocess.run(
        [sys.executable, "tests/gpu/compile_ahead.py", str(cache), "--jobs", "1", *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return run.stdout.splitlines()[-1], {found.parent.name for found in cache.rglob("*.cubin")}


def test_a_recipe_is_compiled_once(tmp_path: Path) -> None:
    asked = "--shapes", "256x128x4x2", "--recipes", "mxfp4:fp16", "--tokens", "1", "300"
    said, found = compiled_into(tmp_path, *asked)
    assert re.search(r"\b0 did not", said)
    assert len(found) >= 5
    assert compiled_into(tmp_path, *asked) == (said, found), "another process has other keys"


@pytest.mark.exhaustive
def test_what_tests_of_the_gpu_start(tmp_path: Path) -> None:
    said, found = compiled_into(
        tmp_path, "--tests", "tests/gpu/test_read_only_formats.py::test_a_layer_equals_the_cpu[Q4_K]"
    )
    assert re.search(r"\b0 did not", said)
    assert len(found) >= 5
