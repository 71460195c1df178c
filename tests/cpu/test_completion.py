from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collegium.experts import KERNELS
from collegium.formats import FORMATS

PROGRAM = """
import sys
from collegium.cli import main
sys.argv = ["collegium"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
WRITTEN = [form.name for form in FORMATS if not form.read_only]


def completed(line: str, cache: Path) -> list[str]:
    """Return what bash would offer for the last word of ``line``."""
    settings = {
        "_COLLEGIUM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        "HF_HUB_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("collegium inspect fab", ["fables-16m"]),
        ("collegium generate org/f", ["org/fables"]),
        ("collegium generate fables-16m --adapter me", ["me/lora--two"]),
        ("collegium quantize fables-16m --to ", WRITTEN),
        ("collegium plan fables-16m --kernel cpu_", [row.name for row in KERNELS if row.name.startswith("cpu_")]),
        ("collegium balance h", ["heatmap"]),
        ("collegium inspect some/folder/", []),
    ],
)
def test_words_are_completed(tmp_path: Path, line: str, expected: list[str]) -> None:
    for name in ("models--org--fables", "models--me--lora--two", "datasets--org--words"):
        (tmp_path / name).mkdir()
    assert sorted(completed(line, tmp_path)) == sorted(expected)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_the_command(shell: str) -> None:
    # Without the variable the shell is found among the parent processes, and there may be none.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "collegium", "--show-completion", shell]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "_COLLEGIUM_COMPLETE" in done.stdout
    assert "python" not in done.stdout
