"""Write docs/benchmarks.md from the CSV files in benchmarks/results; ``--check`` only says whether it is up to date."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

from tracked import ROOT

__all__ = ["PAGE", "main", "page"]

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
FACTS = (
    *("gpu", "machine", "cpu", "threads", "driver", "python", "torch", "triton", "transformers", "vllm"),
    *("humming-kernels", "collegium", "commit", "command", "sizes"),
)
INTRODUCTION = """# Benchmarks

<!-- Written by scripts/make_benchmarks.py from benchmarks/results; do not edit. -->

Every number comes from a file in `benchmarks/results`, which names the machine, the versions, the commit and the
command. A time says something only beside another one from the same run: a peer's, or the floor. The **floor** is the
larger of bytes / bandwidth and operations / rate: the bytes are the weights of the experts that the measured routing
hits, plus input and output, each once; bandwidth and rates are measured on the same kind of GPU. In brackets: how many
times the floor.

[benchmarks/protocol.md](../benchmarks/protocol.md) says how times are taken; `collegium bench` takes them on your
machine.
"""

Row = dict[str, str]


def page(results: Path = RESULTS) -> str:
    """Return the page for the CSV files in ``results``."""
    parts = [INTRODUCTION]
    for path in sorted(results.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if rows:
            parts.append(_section(path.name, rows))
    return "\n".join(parts)


def _section(name: str, rows: list[Row]) -> str:
    columns = set(rows[0])
    if {"contender", "us", "floor_us"} <= columns:
        body = _peers(rows)
    elif {"shape", "tokens", "layer_us", "floor_us"} <= columns:
        body = _layers(rows)
    else:
        kept = [column for column in rows[0] if column not in FACTS]
        body = _table(kept, [[row[column] for column in kept] for row in rows])
    return f"## {name}\n\n{_facts(rows)}\n\n{body}"


def _facts(rows: list[Row]) -> str:
    """Return the facts that say where the numbers come from, each value once."""
    lines: list[str] = []
    for fact in FACTS:
        values = list(dict.fromkeys(row[fact] for row in rows if row.get(fact)))
        if values:
            lines.append(f"- {fact}: " + ", ".join(f"`{v}`" if fact in ("command", "commit") else v for v in values))
    return "\n".join(lines)


def _layers(rows: list[Row]) -> str:
    """One line a shape, format and routing, one column a token count: microseconds of the layer and times the floor."""
    tokens = sorted({int(row["tokens"]) for row in rows})
    more = ["routing"] if len({row.get("routing") for row in rows}) > 1 else []
    groups: dict[tuple[str, ...], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        recipe = row["format"].replace(":", " x ") if "format" in row else " x ".join(_formats(row))
        groups[(row["shape"], recipe, *(row[name] for name in more))][int(row["tokens"])] = row
    body = [
        [*key, *(_time(found[t]["layer_us"], found[t]["floor_us"]) if t in found else "" for t in tokens)]
        for key, found in sorted(groups.items())
    ]
    head = ["shape", "weights x activations", *more, *(f"T={t}" for t in tokens)]
    return "Microseconds of the whole layer.\n\n" + _table(head, body)


def _peers(rows: list[Row]) -> str:
    """A table a shape and routing; the fastest of each pair of formats is bold, what could not run is listed below."""
    text: list[str] = []
    measured = [row for row in rows if row["tokens"]]
    for shape, routing in dict.fromkeys((row["shape"], row["routing"]) for row in measured):
        own = [row for row in measured if (row["shape"], row["routing"]) == (shape, routing)]
        tokens = sorted({int(row["tokens"]) for row in own})
        at = {(*_formats(row), row["contender"], int(row["tokens"])): row for row in own}
        body: list[list[str]] = []
        for weights, activations, contender in dict.fromkeys((*_formats(row), row["contender"]) for row in own):
            cells: list[str] = []
            for t in tokens:
                row = at.get((weights, activations, contender, t))
                if row is None or not row["us"]:
                    cells.append("")
                    continue
                beside = [r for key, r in at.items() if key[:2] == (weights, activations) and key[3] == t and r["us"]]
                best = min(float(r["us"]) for r in beside)
                cell = _time(row["us"], row["floor_us"])
                cells.append(f"**{cell}**" if float(row["us"]) == best and len(beside) > 1 else cell)
            body.append([f"{weights} x {activations}", contender, *cells])
        head = ["weights x activations", "who", *(f"T={t}" for t in tokens)]
        text.append(
            f"### {shape}, {routing} routing\n\nMicroseconds of the whole layer.\n\n{_table(head, sorted(body))}"
        )
    notes = dict.fromkeys(
        f"- {row['shape']}: {row['contender']}, {row['weights']} x {row['activations']}"
        + (f", T={row['tokens']}" if row["tokens"] else "")
        + f": {row['note']}"
        for row in rows
        if row.get("note")
    )
    if notes:
        text.append("Not measured:\n\n" + "\n".join(notes) + "\n")
    return "\n".join(text)


def _formats(row: Row) -> tuple[str, str]:
    return row["weights"], row["activations"]


def _time(taken: str, floor: str) -> str:
    value = float(taken)
    return f"{value:.0f} ({value / float(floor):.2f})" if value >= 100 else f"{value:.1f} ({value / float(floor):.2f})"


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"


def main() -> int:
    """Write the page, or with ``--check`` say whether it differs; 1 when it does."""
    wanted = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == wanted
        print("benchmarks: up to date" if same else "docs/benchmarks.md differs: run python scripts/make_benchmarks.py")
        return not same
    PAGE.write_text(wanted, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
