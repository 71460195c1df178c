"""Write docs/command-line.md from the commands themselves; a test compares the two."""

from __future__ import annotations

import sys
from typing import Any

import typer

from collegium.cli import app
from tracked import ROOT

__all__ = ["PAGE", "main", "page"]

PAGE = ROOT / "docs" / "command-line.md"
INTRODUCTION = """# The command line

<!-- Written by scripts/make_command_line.py; do not edit. -->

`collegium COMMAND --help` prints the same texts; `python -m collegium` is the same command. Every command accepts
`--json`, which prints one JSON object instead of tables, also for an error. Otherwise errors are printed on the error
stream. The exit status is 1 after an error and 2 after a usage error.

`generate`, `verify` and `bench-model` also run [under torchrun](several-gpus.md); the other commands do not.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *_sections("collegium", typer.main.get_command(app))])


def _sections(name: str, group: Any) -> list[str]:
    found = [_section(name, group)]
    for word, command in group.commands.items():
        full = f"{name} {word}"
        found += _sections(full, command) if hasattr(command, "commands") else [_section(full, command)]
    return found


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-") and p.name != "as_json"]
    below = getattr(command, "commands", {})
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments] + ["COMMAND"] * bool(below)
    usage = " ".join([name, *words, *(["[OPTIONS]"] if arguments or options else [])])
    lines = [f"## {name}", "", f"```text\n{usage}\n```", "", " ".join(command.help.split())]
    if arguments or options:
        lines += ["", "| argument or option | default | description |", "| --- | --- | --- |"]
    lines += [_row(p) for p in [*arguments, *options]]
    if below:
        lines += ["", "| command | description |", "| --- | --- |"]
    # The first paragraph of its help, as a list of commands shows it.
    lines += [f"| `{word}` | {' '.join(own.help.partition(chr(10) * 2)[0].split())} |" for word, own in below.items()]
    return "\n".join(lines) + "\n"


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if not parameter.opts[0].startswith("-"):
        names = f"`{parameter.name.upper()}`"
    given = parameter.default
    default = "required" if parameter.required else "" if given is None else "off" if given is False else f"`{given}`"
    default = "on" if given is True else default
    low, high = parameter.min, parameter.max
    limits = f" At least {low:g}." if low is not None and high is None else ""
    limits = f" From {low:g} to {high:g}." if low is not None and high is not None else limits
    return f"| {names} | {default} | {parameter.help}{limits} |"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
