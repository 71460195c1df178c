"""A repeated launch reaches the CUDA driver with the arguments that the installed Triton passes, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1] / "shared"
triton = pytest.importorskip("triton")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds the stand-in for the driver")
def test_repeated_launches_equal_tritons(tmp_path: Path) -> None:
    include = Path(triton.__path__[0]) / "backends" / "nvidia" / "include"
    library = tmp_path / "libcuda.so.1"
    source = SHARED / "stub_libcuda.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-I", include, source, "-o", library], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join((str(SHARED), *filter(None, [os.environ.get("PYTHONPATH")]))),
    }
    program = [sys.executable, SHARED / "driver_launches.py"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 4
    for case in cases:
        assert len(case["replay"]) >= 4, f"{case['case']} was not repeated"
        assert case["replay"] == case["triton"], case["case"]
