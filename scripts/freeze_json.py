"""Write down which keys and types every command prints with ``--json``, of what it found and of its errors.

    python scripts/freeze_json.py     # writes tests/data/json_shapes.json, with which a test compares the commands

Programs read these objects, so a key that changes its name or type is a change that users see. Each command runs for
real, on the CPU and on the shipped model. ``tune`` has nothing to measure there: its report is made by hand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from collegium import cli
from collegium.commands import demo
from collegium.commands.tune import TuneReport, TuneRow
from collegium.dummy.encoders import ENCODERS
from collegium.experts.triton.tiles.problem import TileChoice
from tracked import ROOT

__all__ = ["FROZEN", "frozen", "main", "shape_of", "shapes"]

FROZEN = ROOT / "tests" / "data" / "json_shapes.json"
SHIPPED = ROOT / "demo" / "fables-16m"
# Objects whose keys are names of things, as many as there are.
_FREE = ("regions", "roles")
_KINDS = {str: "text", bool: "true or false", int: "whole number", float: "number", type(None): "null"}


def shape_of(value: Any, key: str = "") -> Any:
    """Return ``value`` with every text, number and null replaced by its kind; a list has the shape of all its items."""
    if isinstance(value, dict):
        if key in _FREE:
            return {"NAME": _together([shape_of(item) for item in value.values()])}
        return {name: shape_of(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_together([shape_of(item) for item in value])] if value else []
    return _KINDS[type(value)]


def _together(shapes: list[Any]) -> Any:
    """Return the one shape that all of ``shapes`` have; kinds that differ are listed."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    if all(isinstance(shape, dict) and shape.keys() == first.keys() for shape in shapes):
        return {name: _together([shape[name] for shape in shapes]) for name in first}
    kinds = {
        kind for shape in shapes for kind in (shape.split(", ") if isinstance(shape, str) else [json.dumps(shape)])
    }
    return ", ".join(sorted(kinds))


def _run(*words: object) -> tuple[int, Any]:
    """Return the exit code and the object that a command line prints."""
    before, out = sys.argv, io.StringIO()
    sys.argv = ["collegium", *map(str, words), "--json"]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            cli.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    return int(str(code or 0)), json.loads(out.getvalue())


def _remarkable(folder: Path) -> Path:
    """Make a copy of the shipped model with two equal experts, a folder, and what a killed run leaves behind."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "heldout.txt"):
        (folder / name).symlink_to(SHIPPED / name)
    tensors = load_file(SHIPPED / "model.safetensors")
    for name in [name for name in tensors if "layers.0.mlp.experts.1." in name]:
        tensors[name] = tensors[name.replace("experts.1.", "experts.0.")].clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "notes").mkdir()
    (folder.parent / ".out.partial-killed").mkdir()
    return folder


def shapes(folder: Path) -> dict[str, Any]:
    """Return the shape of every command's object by the command, run in the empty ``folder``, and what its errors are.

    Of errors: one for an option that does not exist, and one for a model or a file that is nowhere.
    """
    model, trace, cpu = _remarkable(folder / "model"), folder / "trace.npz", ("--device", "cpu")
    _run("quantize", SHIPPED, "--to", "nvfp4", "--out", folder / "four")
    lines: dict[str, tuple[object, ...]] = {
        "demo": ("--tokens", 1, *cpu),
        "generate": (SHIPPED, "--tokens", 3, *cpu),
        "inspect": (model, *cpu),
        "plan": (SHIPPED, "--device", "h200"),
        "bench": ("64x32x6x2", "--tokens", "1,8", "--ceilings", "0.1,1,1", *cpu),
        # The last format loses its encoder below: a row without a time.
        "bench-model": (SHIPPED, "--batches", 1, "--layers", 1, "--format", "bnb4", *cpu),
        "quantize": (model, "--to", "mxfp4", "--out", folder / "out"),
        "calibrate": (folder / "four", "--out", folder / "scaled", "--tokens", 32, "--steps", 1, *cpu),
        "verify": (SHIPPED, "--experts", 1, *cpu),
        "balance record": (SHIPPED, "--out", trace, "--steps", 4, *cpu),
        "balance simulate": (trace, "--ranks", 2, "--replicas", "0,2"),
        "balance heatmap": (trace, "--out", folder / "load.png"),
    }
    recipes, demo.RECIPES = demo.RECIPES, demo.RECIPES[:1]  # one row has the shape of twelve
    encoder = ENCODERS.pop("bnb4")
    found: dict[str, Any] = {}
    try:
        for name, words in lines.items():
            code, printed = _run(*name.split(), *words)
            if code:
                raise SystemExit(f"collegium {name}: {printed}")
            found[name] = shape_of(printed)
    finally:
        demo.RECIPES, ENCODERS["bnb4"] = recipes, encoder
    found["tune"] = shape_of(json.loads(json.dumps(asdict(_tuned()))))
    wrong = {name: [_run(*name.split(), "--nope"), _run(*name.split(), *_nowhere(name))] for name in found}
    found["errors"] = {
        "object": _together([shape_of(printed) for both in wrong.values() for _, printed in both]),
        "exit codes and kinds": {
            name: [f"{code} {printed['error']['kind']}" for code, printed in both] for name, both in wrong.items()
        },
    }
    return found


def _nowhere(name: str) -> tuple[object, ...]:
    """Return the words of a command line that can be read, for a model or a file that is not there."""
    if name == "demo":
        return ("--model", "nowhere")
    needed = {
        "quantize": ("--to", "mxfp4"),
        "balance record": ("--out", "trace"),
        "balance heatmap": ("--out", "x.png"),
    }
    return ("nowhere", *needed.get(name, ()))


def _tuned() -> TuneReport:
    tile = TileChoice(block_n=64, block_t=16, warps=4, stages=3)
    row = TuneRow(
        product="first",
        tokens=1,
        rows=2,
        chosen=tile,
        chosen_seconds=2e-6,
        best=tile,
        best_seconds=1e-6,
        candidates=8,
    )
    return TuneReport(
        shape="64x32x6x2", weights="mxfp4", activations="bf16", device="H200", path="tiles.json", rows=(row,)
    )


def frozen() -> dict[str, Any]:
    """Return what is written down."""
    return json.loads(FROZEN.read_text(encoding="utf-8"))


def main() -> int:
    """Write the file."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        FROZEN.write_text(json.dumps(shapes(Path(folder)), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FROZEN.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
