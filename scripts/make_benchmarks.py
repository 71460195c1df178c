"""Write the generated blocks of README.md and docs/benchmarks.md, and the pictures, from benchmarks/results/*.csv.

A block stands between ``<!-- NAME: written by scripts/make_benchmarks.py -->`` and ``<!-- end of NAME -->``.
``--check`` writes nothing and reports the files that are out of date.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from charts import Line, Panel, chart
from comparisons import headline_rows, readme_headline, readme_slower, slower
from tracked import ROOT

__all__ = ["HEADLINE", "PAGE", "PICTURES", "README", "main", "page", "pictures", "readme", "results_block"]

PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
HEADLINE = "headline.svg"  # the picture of README.md
RESULTS = ROOT / "benchmarks" / "results"
# The sections of the page.
ORDER = (
    "One layer compared with other projects",
    "One layer on a GPU",
    "Whole models",
    "One layer over several GPUs",
    "One layer on a CPU",
)
_SHOWN = (1, 8, 128, 2048)  # token counts of the short tables
_OURS = "collegium"

Row = dict[str, str]
Panels = dict[str, dict[str, list[tuple[float, float]]]]  # lines by name, by the title of their panel


def page(text: str, results: Path = RESULTS) -> str:
    """Return ``text``, docs/benchmarks.md, with the block of results up to date."""
    return _with_blocks(text, "docs/benchmarks.md", {"results": lambda _: results_block(results)}, {})


def readme(text: str, results: Path = RESULTS) -> str:
    """Return ``text``, README.md, with the numbers of ``results`` in each of its blocks."""
    return _with_blocks(text, "README.md", {"headline": readme_headline, "slower": readme_slower}, _files(results))


def _with_blocks(
    text: str, name: str, blocks: dict[str, Callable[[dict[str, list[Row]]], str]], files: dict[str, list[Row]]
) -> str:
    """Return ``text`` with each block written anew. Raises ValueError for a block that is not there exactly once."""
    for block, write in blocks.items():
        begin, end = f"<!-- {block}: written by scripts/make_benchmarks.py -->\n", f"<!-- end of {block} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{name}: found {text.count(begin)} of {begin!r} and {text.count(end)} of {end!r}; 1 each")
        before, after = text.partition(begin)[0], text.partition(end)[2]
        text = f"{before}{begin}{write(files)}{end}{after}"
    return text


def _files(results: Path) -> dict[str, list[Row]]:
    """Return the rows of every file that has some, by its name without ``.csv``."""
    found: dict[str, list[Row]] = {}
    for path in sorted(results.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found[path.stem] = list(csv.DictReader(file))
    return {name: rows for name, rows in found.items() if rows}


def results_block(results: Path = RESULTS) -> str:
    """Return the pictures and short tables of ``results``, and a link to each file."""
    files, drawn = _files(results), pictures(results)
    parts, previous = list[str](), ""
    placed = {name: ORDER.index(kind) for name, rows in files.items() if (kind := _heading(rows)) in ORDER}
    for name in sorted(placed, key=lambda name: (placed[name], name)):
        rows, heading = files[name], _heading(files[name])
        parts += [] if heading == previous else [f"## {heading}\n"]
        previous = heading
        parts.append(f"{_title(name, rows)} ({_link(name)})\n")
        of_file = [file for file in drawn if file.rpartition("-")[0] == name]
        parts += [f"![{_alternative(drawn[file])}](pictures/{file})\n" for file in of_file]
        parts += [_compared(rows)] if "contender" in rows[0] else []
        parts += [_tokens_a_second(rows)] if "tokens_per_second" in rows[0] else []
    parts += [slower(files)] if ORDER[0] in map(_heading, files.values()) else []
    others = ", ".join(_link(name) for name, rows in files.items() if not _heading(rows))
    return "\n".join([*parts, "## Other result files\n", f"Without a picture: {others or 'none'}.\n"])


def _link(name: str) -> str:
    return f"[{name}.csv](../benchmarks/results/{name}.csv)"


def _heading(rows: list[Row]) -> str:
    """Return the section a file is in on the page of pictures, nothing for one that is not there."""
    columns = set(rows[0])
    if "layer_us" in columns:
        return "One layer on a GPU"
    if {"contender", "us"} <= columns:
        return "One layer compared with other projects"
    if "over_floor" in columns:
        return "One layer over several GPUs"
    if "time / transformers default" in columns:
        return "One layer on a CPU"
    return "Whole models" if "tokens_per_second" in columns else ""


def _title(name: str, rows: list[Row]) -> str:
    where = rows[0].get("gpu") or rows[0].get("cpu", "")
    shapes = list(dict.fromkeys(row["shape"] for row in rows if row.get("shape")))
    return f"**{', '.join(shapes) or name}** on {where}"


def _alternative(picture: str) -> str:
    return picture.partition("<title>")[2].partition("</title>")[0]


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """Return every picture by the name of its file, which begins with the name of the file it is drawn from."""
    files = _files(results)
    drawn: dict[str, str] = {HEADLINE: _headline(rows)} if (rows := headline_rows(files)) else {}
    for name, rows in files.items():
        kind = _heading(rows)
        if kind == "One layer compared with other projects":
            measured = [row for row in rows if row["us"]]
            for routing in dict.fromkeys(row["routing"] for row in measured):
                own = [row for row in measured if row["routing"] == routing]
                title = f"{', '.join(dict.fromkeys(row['shape'] for row in own))}, {routing} routing, {own[0]['gpu']}"
                drawn[f"{name}-{routing}.svg"] = _drawn(title, _panels(own, "contender", "us"), "time / floor")
        elif kind == "One layer on a GPU":
            title = _title(name, rows).replace("*", "")
            drawn[f"{name}-layers.svg"] = _drawn(title, _panels(rows, "", "layer_us"), "time / floor")
        elif kind == "One layer over several GPUs":
            ranks = " and ".join(dict.fromkeys(row["ranks"] for row in rows))
            title = f"One layer over {ranks} {rows[0]['gpu']}: whole layer, its exchange, the same exchange with NCCL"
            drawn[f"{name}-layers.svg"] = _drawn(title, _parallel(rows), "microseconds")
        elif kind == "One layer on a CPU":
            title = f"One layer on {rows[0]['cpu']}"
            drawn[f"{name}-layers.svg"] = _drawn(title, _cpu(rows), "time / transformers' default")
    return drawn


def _headline(rows: list[Row]) -> str:
    """Draw microseconds over tokens for one layer and recipe: ours, each peer and the floor."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        lines[row["contender"]].append((float(row["tokens"]), float(row["us"])))
        lines["floor"].append((float(row["tokens"]), float(row["floor_us"])))
    weights, activations = (name.upper() for name in _formats(rows[0]))
    title = f"One Qwen3-30B-A3B layer, {weights} weights, {activations} activations, {rows[0]['gpu']}"
    return _drawn(title, {"uniform routing": lines}, "microseconds", width=720)


def _drawn(title: str, panels: Panels, what: str, **size: int) -> str:
    """Draw panels of lines by name; ours are drawn, coloured and named first."""
    made = [
        Panel(
            title=head,
            # A count that was measured twice has its last time.
            lines=[Line(name=n, points=[*dict(lines[n]).items()], dashed=n == "floor") for n in _first(lines)],
        )
        for head, lines in panels.items()
    ]
    return chart(title, made, x="tokens", y=what, **size)


def _first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != _OURS, name))


def _panels(rows: list[Row], who: str, time: str) -> Panels:
    """Times the floor over tokens: a panel for a pair of formats and a line for each of ``who``, or one for a shape."""
    panels: Panels = defaultdict(lambda: defaultdict(list))
    shapes, routings = ({row.get(name, "") for row in rows} for name in ("shape", "routing"))
    for row in rows:
        recipe = row["format"].replace(":", " x ") if "format" in row else " x ".join(_formats(row))
        place = [row["shape"]] * (len(shapes) > 1 or not who) + [row.get("routing", "")] * (len(routings) > 1)
        head, line = (", ".join([*place, recipe]), row[who]) if who else (", ".join(place), recipe)
        panels[head][line].append((float(row["tokens"]), float(row[time]) / float(row["floor_us"])))
    return {head: panels[head] for head in sorted(panels)}


def _parallel(rows: list[Row]) -> Panels:
    """Microseconds over tokens: layers by dispatcher, with their floor, and the exchange of the first dispatcher."""
    panels: Panels = defaultdict(lambda: defaultdict(list))
    measured = [row for row in rows if row["what"] in ("layer", "exchange", "nccl")]
    ways, ranks = (list(dict.fromkeys(row[name] for row in measured)) for name in ("dispatcher", "ranks"))
    for row in measured:
        way, point = row["dispatcher"], (float(row["tokens"]), float(row["us"]))
        place = [f"{row['ranks']} ranks"] * (len(ranks) > 1)
        lines = panels[", ".join([row["shape"], *place, " x ".join(_formats(row))])]
        if row["what"] == "layer":
            lines[f"layer, {way}" if len(ways) > 1 else "layer"].append(point)
        elif way == ways[0]:
            lines[row["what"]].append(point)
        if row["what"] == "layer" and way == ways[0]:
            lines["floor"].append((point[0], point[1] / float(row["over_floor"])))
    return panels


def _cpu(rows: list[Row]) -> Panels:
    panels: Panels = defaultdict(lambda: defaultdict(list))
    for row in rows:
        kind, _, what = row["format"].partition(" ")
        if row["time / transformers default"] == "-":
            continue
        panels[kind][what].append((float(row["T"]), float(row["time / transformers default"])))
    return panels


def _compared(rows: list[Row]) -> str:
    """Return our microseconds and the fastest peer's at a few token counts, uniform routing."""
    measured = [row for row in rows if row["us"] and row["routing"] == "uniform" and int(row["tokens"]) in _SHOWN]
    counts = sorted({int(row["tokens"]) for row in measured})
    several = len({row["shape"] for row in measured}) > 1
    body: list[list[str]] = []
    for shape, weights, activations in dict.fromkeys((row["shape"], *_formats(row)) for row in measured):
        cells: list[str] = []
        for count in counts:
            key = (shape, weights, activations, str(count))
            own = [row for row in measured if (row["shape"], *_formats(row), row["tokens"]) == key]
            ours = min((float(row["us"]) for row in own if row["contender"] == _OURS), default=math.inf)
            others = min(((float(r["us"]), r["contender"]) for r in own if r["contender"] != _OURS), default=None)
            said = _short(ours) if others is None or ours > others[0] else f"**{_short(ours)}**"
            cells.append(said if others is None else f"{said}, {_short(others[0])} ({others[1]})")
        body.append([*([shape] if several else []), f"{weights} x {activations}", *cells])
    head = [*(["shape"] if several else []), "weights x activations", *(f"T={count}" for count in counts)]
    caption = "Microseconds with uniform routing: ours, then the fastest peer's. Bold: ours is faster."
    return f"{caption}\n\n{_table(head, body)}"


def _short(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tokens_a_second(rows: list[Row]) -> str:
    ways = list(dict.fromkeys(row["experts"] for row in rows))
    found = {(row["model"], row["batch"], row["experts"]): row["tokens_per_second"] for row in rows}
    body = [
        [model, batch, *(found.get((model, batch, way), "") or "none" for way in ways)]
        for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows)
    ]
    return "Decoded tokens per second, all sequences together. Columns: what runs the experts.\n\n" + _table(
        ["model", "sequences", *ways], body
    )


def _formats(row: Row) -> tuple[str, str]:
    return row["weights"], row["activations"]


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"


def main() -> int:
    """Write pages and pictures; with ``--check`` report those that are out of date and return 1 if there are any."""
    written = {PAGE: page(PAGE.read_text(encoding="utf-8")), README: readme(README.read_text(encoding="utf-8"))}
    wanted = {**written, **{PICTURES / name: drawn for name, drawn in pictures().items()}}
    stale = set(PICTURES.glob("*.svg")) - wanted.keys() if PICTURES.is_dir() else set[Path]()
    if "--check" in sys.argv[1:]:
        differ = [
            path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        differ += stale
        names = ", ".join(str(path.relative_to(ROOT)) for path in differ)
        print(f"{names}: run python scripts/make_benchmarks.py" if differ else "benchmarks: up to date")
        return bool(differ)
    PICTURES.mkdir(exist_ok=True)
    for path in stale:
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
