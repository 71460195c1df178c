from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType

from collegium import experts, formats, models
from collegium.formats.payload import Payload
from tracked import ROOT

SOURCE = ROOT / "src" / "collegium"


def rows(table: object) -> list[object]:
    assert isinstance(table, tuple | Mapping)
    return list(table.values() if isinstance(table, Mapping) else table)


def files(room: str) -> list[ModuleType]:
    paths = [p.relative_to(SOURCE).with_suffix("") for p in sorted((SOURCE / room).rglob("*.py"))]
    return [importlib.import_module(f"collegium.{'.'.join(p.parts)}") for p in paths if p.name != "__init__"]


def classes(module: ModuleType) -> list[type]:
    found = [value for value in vars(module).values() if inspect.isclass(value)]
    return [c for c in found if c.__module__ == module.__name__ and not c.__name__.startswith("_")]


def test_every_format_is_in_its_table() -> None:
    written = {c for module in files("formats") for c in classes(module) if issubclass(c, Payload) and c is not Payload}
    concrete = {c for c in written if "name" in vars(c)}
    assert concrete == set(rows(formats.FORMATS))
    assert concrete


def test_format_names_are_unique() -> None:
    names = [row.name for row in rows(formats.FORMATS)]  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)


def test_kernel_table_lists_every_kernel() -> None:
    written = {
        c
        for m in files("experts")
        for c in classes(m)
        if {"refuse", "pack"} <= set(dir(c)) and "name" in vars(c) and not protocol(c)
    }
    assert written == {type(kernel) for kernel in experts.KERNELS}
    assert written


def protocol(c: type) -> bool:
    return bool(getattr(c, "_is_protocol", False))


def test_kernel_names_are_unique() -> None:
    names = [kernel.name for kernel in experts.KERNELS]
    assert len(set(names)) == len(names)


def test_family_table_lists_every_family() -> None:
    written = [module.FAMILY for module in files("models") if hasattr(module, "FAMILY")]
    assert {id(family) for family in written} == {id(family) for family in models.FAMILIES}
    assert written


def test_no_model_type_has_two_families() -> None:
    names = [name for family in models.FAMILIES for name in family.model_types]
    assert len(set(names)) == len(names)
