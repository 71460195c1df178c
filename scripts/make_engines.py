"""Write what the engines' CSV files show: the tables of docs/engines.md, and the recipes that ``auto`` replaces.

    python scripts/make_engines.py [--check]

``benchmarks/results/vllm_*.csv``: files with a column ``capability`` have speeds (``benchmarks/bench_vllm.py``),
the others are runs on a CPU (``make vllm-test``). ``--check`` writes nothing and reports what is out of date.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

from tracked import ROOT

__all__ = ["PAGE", "RESULTS", "SERVED", "main", "page", "recipes", "served"]

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "engines.md"
SERVED = ROOT / "src" / "collegium" / "integrations" / "vllm" / "served.py"
BY_VLLM = ("vLLM", "nobody")  # of the column "experts run by"
BLOCKS = {
    "speeds": ("<!-- speeds: written by scripts/make_engines.py -->\n", "<!-- end of speeds -->\n"),
    "recipes": ("<!-- recipes: written by scripts/make_engines.py -->\n", "<!-- end of recipes -->\n"),
}
TABLE = ("# begin of the table written by scripts/make_engines.py\n", "# end of the table\n")
MEASURES = ("decode 1", "decode 8", "decode 32", "decode 128", "prefill 8x1024", "prefill 1x8192", "start")
# The columns that two rows of one line of the table share.
RUN = ("model", "layers", "engine", "weights", "activations", "gpu", "date", "commit")

Row = dict[str, str]


def rows(results: Path = RESULTS) -> list[Row]:
    """Return the rows of all runs of vLLM, with the device class of each under ``device``: ``cpu`` or ``sm_90``."""
    found: list[Row] = []
    for path in sorted(results.glob("vllm_*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found += [
                {**row, "device": row.get("capability", "cpu"), "file": path.name} for row in csv.DictReader(file)
            ]
    return found


def recipes(runs: Iterable[Row]) -> dict[str, list[tuple[str, str]]]:
    """Return (weights, activations) that Collegium ran without an error, sorted, by device class."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in runs:
        if row["experts run by"] not in BY_VLLM and not row["error"]:
            found.setdefault(row["device"], set()).add((row["weights"], row["activations"]))
    return {device: sorted(pairs) for device, pairs in sorted(found.items())}


def served(text: str, results: Path = RESULTS) -> str:
    """Return ``text``, served.py, with its table written anew."""
    lines = ["SERVED: dict[str, frozenset[tuple[str, str]]] = {\n"]
    for device, pairs in recipes(rows(results)).items():
        members = "".join(f'            ("{weights}", "{activations}"),\n' for weights, activations in pairs)
        lines.append(f'    "{device}": frozenset(\n        {{\n{members}        }}\n    ),\n')
    return between(text, *TABLE, "".join(lines) + "}\n")


def page(text: str, results: Path = RESULTS) -> str:
    """Return ``text``, docs/engines.md, with both tables written anew."""
    runs = rows(results)
    for name, table in (("speeds", speed_table(runs)), ("recipes", recipe_table(runs))):
        text = between(text, *BLOCKS[name], table)
    return text


def between(text: str, begin: str, end: str, block: str) -> str:
    """Return ``text`` with ``block`` between its only ``begin`` and its only ``end``; raises ValueError otherwise."""
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"found {text.count(begin)} of {begin!r} and {text.count(end)} of {end!r}; 1 each")
    return text.partition(begin)[0] + begin + block + end + text.partition(end)[2]


def speed_table(runs: list[Row]) -> str:
    """Return a line per model and recipe: how many times as fast the engine is with the plug-in, by measure."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in runs:
        if "measure" in row and (row["error"] or row["measure"] in MEASURES):
            lines.setdefault(tuple(row[name] for name in RUN), {})[row["measure"]] = cell(row)
    if not lines:
        return "No run on a GPU is committed yet.\n"
    head = ["model (layers)", "engine", "weights x activations", *MEASURES, "GPU", "date, commit"]
    table = [f"| {' | '.join(head)} |\n", f"| {' | '.join(['---'] * len(head))} |\n"]
    for (model, layers, engine, weights, activations, gpu, date, commit), cells in sorted(lines.items()):
        recipe = f"{weights} x {activations}" if weights else cells.get("", "")
        values = [cells.get(measure, "") for measure in MEASURES]
        line = [f"{model} ({layers})", engine, recipe, *values, gpu, f"{date}, `{commit[:8]}`"]
        table.append(f"| {' | '.join(line)} |\n")
    return "".join(table)


def cell(row: Row) -> str:
    """Return the ratio of a row with both values, or its error."""
    if row["error"]:
        return row["error"]
    return f"**{float(row['times as fast']):.2f}** ({shown(row['without'])}, {shown(row['with'])})"


def shown(value: str) -> str:
    """Return a number with three digits, and none after the point from 100 on."""
    number = float(value)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def recipe_table(runs: list[Row]) -> str:
    """Return a line per device class and weight format, with the activations that were served."""
    table = ["| device | weights | activations |\n", "| --- | --- | --- |\n"]
    for device, pairs in recipes(runs).items():
        by_weights: dict[str, list[str]] = {}
        for weights, activations in pairs:
            by_weights.setdefault(weights, []).append(f"`{activations}`")
        table += [f"| {device} | `{weights}` | {', '.join(names)} |\n" for weights, names in by_weights.items()]
    return "".join(table)


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` return 1 if one is out of date."""
    stale = 0
    for path, made in ((PAGE, page), (SERVED, served)):
        before = path.read_text(encoding="utf-8")
        after = made(before)
        if after == before:
            continue
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is out of date; run: python scripts/make_engines.py")
            stale = 1
        else:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
