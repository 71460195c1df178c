from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import collegium
from tracked import ROOT

SOURCE = ROOT / "src" / "collegium"
OPTIONAL = {"vllm", "transformers", "prometheus_client", "matplotlib", "triton", "llvmlite", "numba"}

# The public surface: adding a name takes a line in CHANGELOG.md, removing one a minor release of warning.
PUBLIC = {
    "FORMATS",
    "ActivationSpec",
    "BadScaleError",
    "CheckpointError",
    "Overrides",
    "CollegiumError",
    "ConfigError",
    "DeviceFacts",
    "DuplicateTensorError",
    "ExpertAdapter",
    "ExpertAdapters",
    "ExpertWeights",
    "HostileFileError",
    "InputError",
    "LayerBuilder",
    "UpdateSummary",
    "WeightUpdater",
    "weights_checksum",
    "LatentWeights",
    "Limits",
    "LowRankPair",
    "MeasurementError",
    "MissingExtraError",
    "MissingTensorError",
    "MoELayer",
    "MoEOptions",
    "MoESpec",
    "Placement",
    "Plan",
    "PlanError",
    "RankError",
    "Ranks",
    "Problem",
    "Refusal",
    "RouterModule",
    "RouterWeights",
    "Routing",
    "RoutingError",
    "RoutingSpec",
    "SharedSpec",
    "SharedWeights",
    "SpecError",
    "TensorMismatchError",
    "TruncatedFileError",
    "UnknownTensorError",
    "__version__",
    "describe",
    "encode_experts",
    "expert_weights",
    "load_adapters",
    "load_layer",
    "load_model",
    "merge_shared",
    "slice_shared",
    "moe",
    "moe_batched",
    "moe_plan",
    "plan",
    "probe",
    "warm_up",
}


def modules() -> list[str]:
    paths = (path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names)


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        # An engine's plug-in needs its engine; everything of ours must import.
        if missing.name in OPTIONAL:
            pytest.skip(f"{name} needs the optional package {missing.name}")
        raise


def source_of(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


def is_command(node: ast.stmt) -> bool:
    """Whether a function is public for the command line, not for Python."""
    wrappers = getattr(node, "decorator_list", [])
    return any(re.fullmatch(r"(app|balance)\.(command|callback)\(.*\)", ast.unparse(wrapper)) for wrapper in wrappers)


def test_the_modules_are_found() -> None:
    assert {"collegium", "collegium.types", "collegium.formats", "collegium.formats.payload"} <= set(modules())


@pytest.mark.parametrize("name", modules())
def test_exported_names_are_exactly_all(name: str) -> None:
    module = load(name)
    tree = source_of(module)
    if not any(isinstance(node, ast.ClassDef | ast.FunctionDef | ast.ImportFrom | ast.Assign) for node in tree.body):
        assert not hasattr(module, "__all__"), f"{name} is empty and needs no __all__"
        return
    listed = module.__all__
    assert len(set(listed)) == len(listed), f"{name}: a name stands twice in __all__"
    made = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") and not is_command(node)
    }
    assert made <= set(listed), f"{name}: public but not in __all__: {sorted(made - set(listed))}"
    absent = [public for public in listed if not hasattr(module, public)]
    assert not absent, f"{name}: in __all__ but not there: {absent}"


@pytest.mark.parametrize("name", [name for name in modules() if (SOURCE.parent / name.replace(".", "/")).is_dir()])
def test_a_package_exports_everything_it_imports(name: str) -> None:
    tree = source_of(load(name))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    hidden = {public for public in imported if not public.startswith("_")} - set(getattr(load(name), "__all__", ()))
    submodules = {path.stem for path in (SOURCE.parent / name.replace(".", "/")).glob("*.py")}
    assert not hidden - submodules, f"{name} imports but does not export {sorted(hidden - submodules)}"


def test_the_public_surface_is_frozen() -> None:
    assert set(collegium.__all__) == PUBLIC


def test_docstring_tree_shows_every_error() -> None:
    from collegium import errors

    drawn = set(re.findall(r"\b[A-Z]\w+Error\b", str(errors.__doc__)))
    assert set(errors.__all__) <= drawn
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.CollegiumError)
