from __future__ import annotations

import csv
import re
import tomllib
from importlib import metadata

import collegium
from index_page import index_page
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


def test_constraints_name_no_package_index() -> None:
    for path in sorted((ROOT / "constraints").iterdir()):
        text = path.read_text(encoding="utf-8")
        assert "--" not in text
        assert "://" not in text
        assert "+cpu" not in text


def test_the_installed_version_is_the_projects() -> None:
    assert metadata.version("collegium") == collegium.__version__


def test_no_tracked_file_is_too_large() -> None:
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked() if path.stat().st_size > 40e6}
    assert not large


def test_readme_links_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = re.findall(r"\]\((docs/[\w/-]+\.md)\)", text)
    assert pages
    for repository in ("", "https://example.org/collegium/"):
        shown = index_page(text, repository)
        assert not re.findall(r"\]\((?!https?://)", shown)
        assert all((f"]({repository}blob/main/{page})" in shown) == bool(repository) for page in pages)
    kept = "[a](https://x.org) [b](#part)"
    assert index_page(kept) == kept
    assert index_page("![c](d.png)") == ""
    assert index_page("![c](d.png)", "https://x.org") == "![c](https://x.org/raw/main/d.png)"


def test_the_wheel_holds_the_shipped_model() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    added = build["targets"]["wheel"]["force-include"]
    assert {source: (ROOT / source).is_file() for source in added} == dict.fromkeys(added, True)
    assert all(target == "collegium/shipped/" + source.removeprefix("demo/") for source, target in added.items())
    needed = {"config.json", "heldout.txt", "model.safetensors", "tokenizer.json"}
    assert needed <= {source.rpartition("/")[2] for source in added}


def test_wheel_ran_on_every_declared_python() -> None:
    with (ROOT / "benchmarks" / "results" / "wheels.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ran = {row["python"] for row in rows if not row["failure"]}
    named = [
        line.rpartition(" ")[2]
        for line in PROJECT["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    ]
    assert {version.rpartition(".")[0] for version in ran} == set(named)
    table = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert all(f"| {version} |" in table for version in ran)
    assert len({row["text"] for row in rows}) == 1, "the same model wrote another text"


def test_missing_packages_name_their_extra() -> None:
    told = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    asked = set(re.findall(r"collegium\[([a-z]+)\]", told)) | set(re.findall(r'group(?:=|: str = )"([a-z]+)"', told))
    # The other two are for work on the project.
    assert asked == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}
