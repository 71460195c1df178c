"""docs/engines.md and the recipes that COLLEGIUM_VLLM=auto replaces are what the committed files show."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

from collegium.integrations.vllm.served import SERVED as RECIPES
from make_engines import PAGE, SERVED, page, recipes, rows, served

if TYPE_CHECKING:
    from pathlib import Path

RUN = "run: python scripts/make_engines.py"
ROW = {
    "gpu": "G", "capability": "sm_90", "date": "2026-11-28", "commit": "0123456789abcdef", "model": "m", "layers": "24",
    "engine": "vLLM 0.33.0", "experts run by": "triton_w4a16", "weights": "mxfp4", "activations": "bf16",
    "measure": "decode 1", "unit": "tokens/s", "without": "100", "with": "250.4", "times as fast": "2.504", "error": "",
}  # fmt: skip


def write(path: Path, found: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def test_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), RUN
    with pytest.raises(ValueError, match="recipes"):
        page(text.replace("<!-- end of recipes -->", ""))


def test_served_recipes_have_committed_runs() -> None:
    text = SERVED.read_text(encoding="utf-8")
    assert text == served(text), RUN
    assert recipes(rows()) == {device: sorted(pairs) for device, pairs in RECIPES.items()}


def test_runs_become_table_and_recipes(tmp_path: Path) -> None:
    failed = {**ROW, "activations": "fp8_token", "without": "", "with": "", "times as fast": "", "error": "too far off"}
    slower = {**ROW, "measure": "prefill 8x1024", "without": "50000", "with": "40000", "times as fast": "0.8"}
    blackwell = {**ROW, "capability": "sm_100", "gpu": "B", "weights": "nvfp4"}
    left = {**ROW, "model": "n", "experts run by": "vLLM", "weights": "", "activations": ""}
    write(tmp_path / "vllm_g.csv", [ROW, slower, failed, blackwell, left])
    write(tmp_path / "other_g.csv", [{**ROW, "weights": "bf16"}])
    cpu = {"cpu": "C", "experts run by": "cpu_fused", "weights": "int4_group", "activations": "bf16", "error": ""}
    write(tmp_path / "vllm_cpu.csv", [cpu, {**cpu, "weights": "fp8_block", "error": "refused"}])
    assert recipes(rows(tmp_path)) == {
        "cpu": [("int4_group", "bf16")],
        "sm_100": [("nvfp4", "bf16")],
        "sm_90": [("mxfp4", "bf16")],
    }
    text = page(PAGE.read_text(encoding="utf-8"), tmp_path)
    assert "| mxfp4 x bf16 | **2.50** (100, 250) |  |  |  | **0.80** (50,000, 40,000) |  |  | G |" in text
    assert "| mxfp4 x fp8_token | too far off |" in text
    assert "| sm_90 | `mxfp4` | `bf16` |" in text
    names: dict[str, object] = {}
    exec(served(SERVED.read_text(encoding="utf-8"), tmp_path).replace("from ...", "from collegium."), names)
    assert names["SERVED"] == {device: frozenset(pairs) for device, pairs in recipes(rows(tmp_path)).items()}
