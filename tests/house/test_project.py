from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest

import collegium
from tracked import ROOT, tracked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0].lower() for line in requirements}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints" / "py311.txt").read_text(encoding="utf-8").splitlines()
    return dict(re.fullmatch(r"([\w.-]+)==([^\s;]+).*", line).groups() for line in lines if line[0] != "#")  # type: ignore[union-attr]


def test_hard_dependencies_are_the_promised_six() -> None:
    assert names(PROJECT["dependencies"]) == {"torch", "safetensors", "numpy", "typer", "rich", "triton"}


def test_every_direct_dependency_is_pinned() -> None:
    # vLLM pins a torch of its own; `make vllm-test` makes an environment for it.
    extras = {name: packages for name, packages in PROJECT["optional-dependencies"].items() if name != "vllm"}
    wanted = names(PROJECT["dependencies"]).union(*(names(extra) for extra in extras.values())) - {"collegium"}
    wanted -= {"triton"}  # a GPU build of torch brings its own; beside a CPU build the Makefile names one
    pinned = {name.lower() for name in pins()}
    assert not {name for name in wanted if name.replace("_", "-") not in pinned}


def test_the_constraints_name_no_place_to_install_from() -> None:
    for path in sorted((ROOT / "constraints").iterdir()):
        text = path.read_text(encoding="utf-8")
        assert "--" not in text
        assert "://" not in text
        assert "+cpu" not in text


def test_the_installed_version_is_the_projects() -> None:
    assert metadata.version("collegium") == collegium.__version__


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


@pytest.mark.parametrize(
    "name",
    ["README.md", "CITATION.cff", "CONTRIBUTING.md", "RELEASE.md", "SECURITY.md", "src/collegium/py.typed"],
)
def test_a_file_people_look_for_is_there(name: str) -> None:
    assert ROOT / name in tracked()


def test_ci_calls_the_one_runner() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_no_file_is_too_large_for_a_clone() -> None:
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked() if path.stat().st_size > 40e6}
    assert not large
