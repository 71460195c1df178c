"""Each check of ``make check`` passes here, and fails on a planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_changelog
import check_links
import check_size
import check_words
import readability
import run_snippets
from tracked import ROOT, tracked


def test_this_file_is_tracked() -> None:
    assert ROOT / "tests" / "house" / "test_checks.py" in tracked()


def test_without_git_the_files_are_found(tmp_path: Path) -> None:
    for name in ("a.md", "src/b.py", ".venv/c.py", "__pycache__/d.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [str(path.relative_to(tmp_path)) for path in tracked(tmp_path)] == ["a.md", "src/b.py"]


def test_no_broken_links() -> None:
    assert check_links.broken_links() == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("gone.md", "no such file"),
        ("../outside.md", "leads out of the repository"),
        ("#nowhere", "no heading makes the anchor 'nowhere'"),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, link: str, reason: str) -> None:
    (tmp_path / "page.md").write_text(f"# Here it is\n[ok](#here-it-is) [web](https://example.org) [bad]({link})\n")
    (fault,) = check_links.broken_links(tmp_path)
    assert reason in fault


def test_changelog_is_valid() -> None:
    assert check_changelog.changelog_fault() is None


@pytest.mark.parametrize(
    ("heading", "text"),
    [
        ("## [0.9.0] - 2026-01-31", "the package says 1.0.0"),
        ("## 1.0.0", "no line such as"),
        ("## [1.0.0] - soon", "'soon'"),
        ("## [1.0.0]", "date ''"),
    ],
)
def test_a_wrong_changelog_is_found(tmp_path: Path, heading: str, text: str) -> None:
    (tmp_path / "src" / "collegium").mkdir(parents=True)
    (tmp_path / "src" / "collegium" / "__init__.py").write_text('__version__ = "1.0.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    assert text in str(check_changelog.changelog_fault(tmp_path))


def test_no_oversized_functions() -> None:
    assert check_size.oversized() == []


@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        ("a.py", "def long():\n" + "    x = 1\n" * 60, "long has 61 lines, allowed 60"),
        ("a.py", "def wide(a, b, c, d, e, f, g, *, h, i): ...\n", "wide takes 9 parameters, allowed 8"),
        ("kernels/a.py", "def long(\n    a,\n):\n    'Text.'\n" + "    x = 1\n" * 61, "long has 61 lines, allowed 60"),
        ("a.py", "class C:\n    def wide(self, a, b, c, d, e, f, g, h, i): ...\n", "takes 9 parameters"),
    ],
)
def test_an_oversized_thing_is_found(tmp_path: Path, name: str, source: str, text: str) -> None:
    path = tmp_path / "src" / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (fault,) = check_size.oversized(tmp_path)
    assert text in fault


def test_readability_is_measured(tmp_path: Path) -> None:
    sources = {
        "README.md": "# A\n\nText.\n",
        "docs/page.md": "Four words of text.\n",
        "src/host.py": "def f(a, found):\n    if a:\n        for own in a:\n            own\n    y = 1  # fmt: skip\n",
        "src/kernels/device.py": "def g(a, b, c, d):\n    return a\n",
        "tests/test_f.py": "def test_f(): ...\ndef test_f_fails(): ...\ndef test_a_b_c_d_e_f_g(): ...\ndef g(): ...\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert readability.measure(tmp_path) == {
        "filler": pytest.approx(1000 * 2 / 8),
        "host_parameters": 2,
        "device_parameters": 4,
        "nesting": 2,
        "fmt_skip": 1,
        "readme_lines": 3,
        "guide_words": 4,
        "test_names": 2,
    }


def test_no_forbidden_words() -> None:
    assert check_words.forbidden_words() == []


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "home/someone/model",
        "in ../" + "shared/notes.md",
        "from https://" + "pypi.o" + "rg/simple",
        "made by " + "Chat" + "GPT",
    ],
)
def test_a_forbidden_word_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(f"fine\n{text}\n")
    (fault,) = check_words.forbidden_words(tmp_path)
    assert fault.startswith("page.md:2:")


def test_only_marked_shell_blocks_run() -> None:
    page = "```python\nx = 1\n```\n```bash\nfalse\n```\n<!-- run -->\n```bash\ntrue\n```\n```json\n{}\n```\n"
    assert [(s.language, s.line, s.code) for s in run_snippets.snippets("p.md", page)] == [
        ("python", 1, "x = 1\n"),
        ("bash", 8, "true\n"),
    ]


@pytest.mark.parametrize(("language", "code"), [("python", "raise SystemExit(3)"), ("bash", "exit 3")])
def test_a_failing_block_is_found(language: str, code: str) -> None:
    snippet = run_snippets.Snippet(page="p.md", line=1, language=language, code=code)
    assert run_snippets.run(snippet).returncode == 3


def test_marks_say_where_a_block_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<!-- gpu -->\n```python\nx = 1\n```\n<!-- ranks 2 -->\n```python\nx = 1\n```\n<!-- gpu -->\n```bash\n```\n"
    assert [snippet.mark for snippet in run_snippets.snippets("p.md", page)] == ["gpu", "ranks 2"]
    snippet = run_snippets.Snippet(page="p.md", line=1, language="python", code="oops", mark="gpu")
    monkeypatch.setattr(run_snippets, "_HAS_GPU", "raise SystemExit(1)")
    monkeypatch.setattr(run_snippets, "snippets", lambda *_: [snippet])
    assert run_snippets.main(["README.md"]) == 0
    assert "left out, it needs a GPU" in capsys.readouterr().out
    monkeypatch.setattr(run_snippets, "_HAS_GPU", "")
    assert run_snippets.main(["README.md"]) == 1


def test_blocks_of_several_ranks() -> None:
    # Written at once, as the lines of ranks may meet.
    code = "import os\nos.write(1, ('rank %(RANK)s of %(WORLD_SIZE)s\\n' % os.environ).encode())"
    snippet = run_snippets.Snippet(page="p.md", line=1, language="python", code=code, mark="ranks 2")
    assert sorted(run_snippets.run(snippet).stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


def test_no_block_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_snippets.main([]) == 1
    assert "no block" in capsys.readouterr().out


def test_snippets_find_commands_of_this_environment() -> None:
    snippet = run_snippets.Snippet(page="p.md", line=1, language="bash", code="python -c 'import torch'")
    assert run_snippets.run(snippet).returncode == 0
