"""Write the pages and pictures of benchmarks from the CSV files in benchmarks/results.

docs/benchmarks.md has the pictures and short tables, docs/benchmark-tables.md every row of every file, and README.md
some numbers between comments that name them. ``--check`` only says whether they are up to date.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from charts import Line, Panel, chart
from comparisons import readme_layers, readme_models, readme_slower, slower
from tracked import ROOT

__all__ = ["FRONT", "PAGE", "PICTURES", "README", "front", "main", "page", "pictures", "readme"]

FRONT = ROOT / "docs" / "benchmarks.md"
PAGE = ROOT / "docs" / "benchmark-tables.md"
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
FACTS = (
    *("gpu", "machine", "cpu", "threads", "driver", "python", "torch", "triton", "transformers", "vllm"),
    *("humming-kernels", "collegium", "commit", "command", "sizes"),
)
_WRITTEN = "<!-- Written by scripts/make_benchmarks.py from benchmarks/results; do not edit. -->"
_FLOOR = """A time says something only beside another one from the same run: a peer's, or the floor. The **floor**
is the larger of bytes / bandwidth and operations / rate: the bytes are the weights of the experts that the measured
routing hits, plus input and output, each once; bandwidth and rates are measured on the same kind of GPU."""
_PROTOCOL = """[benchmarks/protocol.md](../benchmarks/protocol.md) says how times are taken; `collegium bench` takes
them on your machine."""
BEGINNING = f"""# Benchmarks

{_WRITTEN}

{_FLOOR} In the
pictures a layer at 1 takes as long as its floor; both axes are logarithmic. Machines, versions, commits, commands and
every row are in [the tables](benchmark-tables.md), which come from the files in `benchmarks/results`.

{_PROTOCOL}
"""
INTRODUCTION = f"""# Benchmark tables

{_WRITTEN}

Every row of every file in `benchmarks/results`, with the machine, the versions, the commit and the command; the
pictures are [a page of their own](benchmarks.md). {_FLOOR}
In brackets: how many times the floor.

{_PROTOCOL}
"""
# The sections of the page with pictures.
ORDER = (
    "One layer beside other projects",
    "One layer on a GPU",
    "Whole models",
    "One layer over several GPUs",
    "One layer on a CPU",
)
_SHOWN = (1, 8, 128, 2048)  # token counts of the short tables
_OURS = "collegium"

Row = dict[str, str]
Panels = dict[str, dict[str, list[tuple[float, float]]]]  # lines by name, by the title of their panel


def page(results: Path = RESULTS) -> str:
    """Return the page for the CSV files in ``results``."""
    return "\n".join([INTRODUCTION, *(_section(f"{name}.csv", rows) for name, rows in _files(results).items())])


def _files(results: Path) -> dict[str, list[Row]]:
    """Return the rows of every file that has some, by its name without ``.csv``."""
    found: dict[str, list[Row]] = {}
    for path in sorted(results.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found[path.stem] = list(csv.DictReader(file))
    return {name: rows for name, rows in found.items() if rows}


def front(results: Path = RESULTS) -> str:
    """Return the page with the pictures and short tables."""
    files, drawn = _files(results), pictures(results)
    parts, last = [BEGINNING], ""
    placed = {name: ORDER.index(kind) for name, rows in files.items() if (kind := _heading(rows)) in ORDER}
    for name in sorted(placed, key=lambda name: (placed[name], name)):
        rows, heading = files[name], _heading(files[name])
        own = [file for file in drawn if file.rpartition("-")[0] == name]
        parts += [] if heading == last else [f"## {heading}\n"]
        last = heading
        anchor = f"{name}.csv".replace(".", "").lower()
        parts.append(f"{_title(name, rows)} ([rows and versions](benchmark-tables.md#{anchor}))\n")
        parts += [f"![{_alternative(drawn[file])}](pictures/{file})\n" for file in own]
        parts += [_beside(rows)] if "contender" in rows[0] else []
        parts += [_tokens_a_second(rows)] if "tokens_per_second" in rows[0] else []
    parts += [slower(files)] if "One layer beside other projects" in map(_heading, files.values()) else []
    others = [name for name, rows in files.items() if not _heading(rows)]
    links = (f"[{name}](benchmark-tables.md#{name.lower()}csv)" for name in others)
    return "\n".join([*parts, "## Everything else\n", "Tables alone: " + ", ".join(links) + ".\n"])


def readme(text: str, results: Path = RESULTS) -> str:
    """Return ``text``, README.md, with the numbers of ``results`` in each of its marked blocks.

    A block is between ``<!-- NAME: written by scripts/make_benchmarks.py -->`` and ``<!-- end of NAME -->``. Raises
    ValueError where one is missing.
    """
    files = _files(results)
    for name, made in (("layers", readme_layers), ("models", readme_models), ("slower", readme_slower)):
        begin, end = f"<!-- {name}: written by scripts/make_benchmarks.py -->\n", f"<!-- end of {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(
                f"README.md: found {text.count(begin)} of {begin!r} and {text.count(end)} of {end!r}; 1 each"
            )
        before, after = text.partition(begin)[0], text.partition(end)[2]
        text = f"{before}{begin}{made(files)}{end}{after}"
    return text


def _heading(rows: list[Row]) -> str:
    """Return the section a file is in on the page of pictures, nothing for one that is not there."""
    columns = set(rows[0])
    if "layer_us" in columns:
        return "One layer on a GPU"
    if {"contender", "us"} <= columns:
        return "One layer beside other projects"
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
    drawn: dict[str, str] = {}
    for name, rows in _files(results).items():
        kind = _heading(rows)
        if kind == "One layer beside other projects":
            measured = [row for row in rows if row["us"]]
            for routing in dict.fromkeys(row["routing"] for row in measured):
                own = [row for row in measured if row["routing"] == routing]
                title = f"{', '.join(dict.fromkeys(row['shape'] for row in own))}, {routing} routing, {own[0]['gpu']}"
                drawn[f"{name}-{routing}.svg"] = _drawn(title, _panels(own, "contender", "us"), "times the floor")
        elif kind == "One layer on a GPU":
            title = f"Layers on {rows[0]['gpu']}"
            drawn[f"{name}-layers.svg"] = _drawn(title, _panels(rows, "", "layer_us"), "times the floor")
        elif kind == "One layer over several GPUs":
            ranks = " and ".join(dict.fromkeys(row["ranks"] for row in rows))
            title = f"A layer over {ranks} {rows[0]['gpu']}: all of it, its exchange, the same with NCCL"
            drawn[f"{name}-layers.svg"] = _drawn(title, _parallel(rows), "microseconds")
        elif kind == "One layer on a CPU":
            title = f"A layer on {rows[0]['cpu']}"
            drawn[f"{name}-layers.svg"] = _drawn(title, _cpu(rows), "times transformers' default")
    return drawn


def _drawn(title: str, panels: Panels, what: str) -> str:
    """Draw panels of lines by name; ours are drawn, coloured and named first."""
    made = [
        Panel(
            title=head,
            # A count that was measured twice has its last time.
            lines=[Line(name=n, points=[*dict(lines[n]).items()], dashed=n == "floor") for n in _first(lines)],
        )
        for head, lines in panels.items()
    ]
    return chart(title, made, x="tokens", y=what)


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


def _beside(rows: list[Row]) -> str:
    """Our microseconds at a few token counts, uniform routing, and those of the fastest other."""
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
    said = "Microseconds under uniform routing, ours and the fastest other's; ours is bold where it is the faster."
    return f"{said}\n\n{_table(head, body)}"


def _short(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tokens_a_second(rows: list[Row]) -> str:
    ways = list(dict.fromkeys(row["experts"] for row in rows))
    found = {(row["model"], row["batch"], row["experts"]): row["tokens_per_second"] for row in rows}
    body = [
        [model, batch, *(found.get((model, batch, way), "") or "none" for way in ways)]
        for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows)
    ]
    return "Tokens a second of all sequences, by what runs the experts.\n\n" + _table(
        ["model", "sequences", *ways], body
    )


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
    """Write pages and pictures, or with ``--check`` say whether any differs; 1 when one does."""
    written = {FRONT: front(), PAGE: page(), README: readme(README.read_text(encoding="utf-8"))}
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
