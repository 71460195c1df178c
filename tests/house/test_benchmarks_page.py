from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from charts import Line, Panel, chart
from make_benchmarks import HEADLINE, PAGE, PICTURES, README, page, pictures, readme, results_block
from tracked import ROOT, tracked

RESULTS = ROOT / "benchmarks" / "results"


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


RUN = "run: python scripts/make_benchmarks.py"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), RUN
    with pytest.raises(ValueError, match="results"):
        page(text.replace("<!-- end of results -->", ""))


def test_pictures_match_the_results() -> None:
    drawn = pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")} == drawn, RUN
    assert {*re.findall(r"\]\(pictures/([^)]+)\)", results_block()), HEADLINE} == set(drawn)
    assert f"](docs/pictures/{HEADLINE})" in README.read_text(encoding="utf-8")
    assert {PICTURES / name for name in drawn} <= set(tracked())
    # Light, and nothing is loaded from elsewhere.
    for name, text in drawn.items():
        assert len(text) < 40_000, name
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name


def test_pictures_have_every_measured_point(tmp_path: Path) -> None:
    same = {"gpu": "G", "shape": "s", "routing": "uniform", "weights": "bf16", "activations": "bf16", "floor_us": 10.0}
    times = {("collegium", 1): 10.0, ("collegium", 8): 20.0, ("peer & co", 1): 40.0, ("peer & co", 8): 10.0}
    rows = [same | {"contender": who, "tokens": t, "us": us, "note": ""} for (who, t), us in times.items()]
    write(tmp_path / "peers.csv", [*rows, same | {"contender": "third", "tokens": "", "us": "", "note": "absent"}])
    ((name, text),) = pictures(tmp_path).items()
    assert name == "peers-uniform.svg"
    root = ElementTree.fromstring(text)
    kind = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in root.iter(f"{kind}circle")]
    assert len(dots) == len(rows)
    words = ["".join(found.itertext()) for found in root.iter(f"{kind}text")]
    assert {"collegium", "peer & co", "bf16 x bf16", "time / floor", "tokens"} <= set(words)
    ours, theirs = dots[:2], dots[2:]
    assert ours[0][0] == theirs[0][0] < ours[1][0] == theirs[1][0]  # tokens grow to the right
    assert theirs[0][1] < ours[1][1] < ours[0][1] == theirs[1][1]  # 4, 2 and 1 times the floor, from above
    # Both axes are logarithmic: twice is half the way to four times.
    assert abs((ours[0][1] + theirs[0][1]) / 2 - ours[1][1]) < 0.2
    assert "| bf16 x bf16 | **10**, 40 (peer & co) | 20, 10 (peer & co) |" in results_block(tmp_path)


def test_long_titles_wrap_into_lines() -> None:
    drawn = chart(
        "several words " * 12, [Panel(title="p", lines=[Line(name="a", points=[(1, 1), (2, 2)])])], x="x", y="y"
    )
    lines = re.findall(r'font-size="15"[^>]*>([^<]+)<', drawn)
    assert " ".join(lines) == ("several words " * 12).strip()
    assert all(8.6 * len(line) < 330 for line in lines)


def test_every_results_file_is_linked() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [path.name for path in RESULTS.glob("*.csv") if f"(../benchmarks/results/{path.name})" not in text] == []


def test_the_readme_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == readme(text), RUN
    with pytest.raises(ValueError, match="slower"):
        readme(text.replace("<!-- end of slower -->", ""))


def block_of(text: str, name: str) -> str:
    return " ".join(
        text.partition(f"<!-- {name}: written by")[2].partition("-->")[2].partition("<!-- end of")[0].split()
    )


def test_readme_headline_matches_results() -> None:
    """Our time and the fastest peer's, each with the same recipe, routing and token count."""
    text = block_of(README.read_text(encoding="utf-8"), "headline")
    with (RESULTS / "peers_qwen3_30b_h200.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["routing"] == "uniform" and row["us"]]
    of_recipe = [row for row in rows if (row["weights"], row["activations"]) == ("mxfp4", "bf16")]
    shown = [float(time) for time in re.findall(r"([\d.]+)(?:&nbsp;| )µs", text)]
    wanted = [
        {row["contender"]: float(row["us"]) for row in of_recipe if row["tokens"] == tokens} for tokens in ("1", "128")
    ]
    ours = [times.pop("collegium") for times in wanted]
    assert shown == [float(f"{time:.3g}") for time in (*ours, *(min(times.values()) for times in wanted))]


def test_every_slower_comparison_is_listed() -> None:
    """Each row of ours that a peer beats in the same run, whatever its routing, with the ratio."""
    text = PAGE.read_text(encoding="utf-8").partition("## Where a peer is faster")[2].partition("## ")[0]
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line]
    wanted = 0
    for path in RESULTS.glob("peers_*.csv"):
        with path.open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["us"]]
        for row in rows:
            if row["contender"] != "collegium":
                continue
            same = ("shape", "routing", "tokens", "weights", "activations", "commit")
            peers = [r for r in rows if r["contender"] != "collegium" and all(r[name] == row[name] for name in same)]
            ratio = min((float(r["us"]) for r in peers), default=1e9) / float(row["us"])
            cell = [row["shape"], row["routing"], f"{int(row['tokens']):,}", f"{row['weights']} x {row['activations']}"]
            if ratio < 1:
                wanted += 1
                assert [*cell, f"{ratio:.3f}"] in [[*own[1:5], own[7]] for own in listed]
    assert wanted == len([own for own in listed if not own[0][0].isdigit()]) > 20
    assert {"zipf", "hot", "half", "uniform"} <= {own[2] for own in listed}


def test_the_worst_are_in_the_readme(tmp_path: Path) -> None:
    """The README has the worst ratio; the list keeps a comparison that a later commit turned."""
    text = block_of(README.read_text(encoding="utf-8"), "slower")
    listed = PAGE.read_text(encoding="utf-8").partition("## Where a peer is faster")[2]
    rows = [row.split(" | ") for row in listed.partition("On several GPUs")[0].splitlines() if "| `" in row]
    worst = min(float(cells[7]) for cells in rows)
    assert f"at most {1 / worst:.2f}x" in text
    same = {"gpu": "NVIDIA G 1", "shape": "s", "tokens": 8, "floor_us": 1.0, "weights": "mxfp4", "note": ""}
    runs = [
        ("zipf", "fp8_token", "old", {"collegium": 20.0, "p": 15.0}),
        ("zipf", "fp8_token", "new", {"collegium": 10.0, "q": 12.0}),
        ("zipf", "fp8_group128", "new", {"collegium": 10.0, "p": 9.0}),
        ("uniform", "fp8_token", "new", {"collegium": 10.0, "p": 11.0}),
    ]
    write(
        tmp_path / "peers.csv",
        [
            same | {"routing": routing, "activations": form, "commit": commit, "contender": who, "us": us}
            for routing, form, commit, times in runs
            for who, us in times.items()
        ],
    )
    text = results_block(tmp_path).partition("## Where a peer is faster")[2].partition("## ")[0]
    assert "On one GPU: 2 of 4 comparisons" in text
    assert "| G | s | zipf | 8 | mxfp4 x fp8_token | 20 | 15 (p) | 0.750 | `old` |" in text
    assert "| G | s | zipf | 8 | mxfp4 x fp8_group128 | 10 | 9 (p) | 0.900 | `new` |" in text


def test_balancing_page_matches_results() -> None:
    text = (ROOT / "docs/balancing.md").read_text(encoding="utf-8")
    with (ROOT / "benchmarks/results/balance.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of_trace, of_random = ([r for r in rows if (r["load"] == "60 random") == random] for random in (False, True))
    said = [
        f"| {r['replicas']} | {float(r['before']):.3f} | {float(r['after']):.3f} | {r['busiest_percent']} % | "
        f"{r['moved']} | {r['moved_mb']} |"
        for r in of_trace
        if r["policy"] == "greedy"
    ]
    said += [
        f"| `{r['policy']}` | {float(r['before']):.3f} | {float(r['after']):.3f} | {r['moved']} |" for r in of_random
    ]
    assert len(said) == 5
    assert [line for line in said if line not in text] == []
    few = next(r for r in of_trace if (r["policy"], r["replicas"]) == ("least_moves", "0"))
    assert f"{few['busiest_percent']} % with {few['moved']} experts moved" in " ".join(text.split())
