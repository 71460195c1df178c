"""What programs read: the keys and types of every command's ``--json``, and of its errors, are those written down."""

from __future__ import annotations

import pytest
import typer

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from collegium.cli import app
from freeze_json import frozen, shape_of, shapes

HOW = "users read these objects: a change of them is a line in CHANGELOG.md; then run: python scripts/freeze_json.py"


def test_json_matches_the_frozen_shapes(tmp_path) -> None:
    found, written = shapes(tmp_path), frozen()
    changed = {name for name in found.keys() | written.keys() if found.get(name) != written.get(name)}
    assert not changed, f"{changed}: {[(found.get(name), written.get(name)) for name in sorted(changed)]}; {HOW}"


def test_no_command_is_left_out() -> None:
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    names = {f"balance {name}" for name in commands.pop("balance").commands} | set(commands)
    assert names | {"errors"} == set(frozen())
    assert names == set(frozen()["errors"]["exit codes and kinds"])


def test_json_shapes_show_every_change() -> None:
    assert shape_of({"a": [{"b": 1}, {"b": None}], "roles": {"x": 1.0}, "c": []}) == {
        "a": [{"b": "null, whole number"}],
        "roles": {"NAME": "number"},
        "c": [],
    }
    assert shape_of({"a": 1}) != shape_of({"a": 1.0}) != shape_of({"b": 1.0})
    assert shape_of([True]) != shape_of([1]) != shape_of(["1"])
    assert shape_of([{"a": 1}, {"b": 1}]) != shape_of([{"a": 1}, {"a": 1}])
