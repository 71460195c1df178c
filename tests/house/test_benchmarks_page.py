from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from make_benchmarks import FRONT, PAGE, PICTURES, README, front, page, pictures, readme
from tracked import ROOT, tracked

RESULTS = ROOT / "benchmarks" / "results"


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


RUN = "run: python scripts/make_benchmarks.py"


def test_the_pages_are_what_the_results_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), RUN
    assert FRONT.read_text(encoding="utf-8") == front(), RUN


def test_pictures_match_the_results() -> None:
    drawn = pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")} == drawn, RUN
    assert set(re.findall(r"\]\(pictures/([^)]+)\)", front())) == set(drawn)
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
    assert {"collegium", "peer & co", "bf16 x bf16", "times the floor", "tokens"} <= set(words)
    ours, theirs = dots[:2], dots[2:]
    assert ours[0][0] == theirs[0][0] < ours[1][0] == theirs[1][0]  # tokens grow to the right
    assert theirs[0][1] < ours[1][1] < ours[0][1] == theirs[1][1]  # 4, 2 and 1 times the floor, from above
    # Both axes are logarithmic: twice is half the way to four times.
    assert abs((ours[0][1] + theirs[0][1]) / 2 - ours[1][1]) < 0.2
    assert "| bf16 x bf16 | **10**, 40 (peer & co) | 20, 10 (peer & co) |" in front(tmp_path)


def test_every_results_file_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"## {path.name}" in text for path in RESULTS.glob("*.csv"))


def test_peers_and_absent_peers_are_listed(tmp_path: Path) -> None:
    same = {"gpu": "G", "commit": "abc", "command": "c", "shape": "s", "routing": "zipf", "tokens": 8}
    same |= {"weights": "bf16", "activations": "bf16", "floor_us": 10.0}
    write(
        tmp_path / "peers.csv",
        [
            same | {"contender": "collegium", "us": 15.0, "note": ""},
            same | {"contender": "other", "us": 120.0, "note": ""},
            same | {"contender": "third", "us": "", "routing": "", "tokens": "", "note": "absent: ImportError"},
        ],
    )
    text = page(tmp_path)
    assert "| bf16 x bf16 | collegium | **15.0 (1.50)** |" in text
    assert "| bf16 x bf16 | other | 120 (12.00) |" in text
    assert "- s: third, bf16 x bf16: absent: ImportError" in text
    assert "### s, zipf routing" in text
    assert "- commit: `abc`" in text


def test_layers_are_times_and_times_the_floor(tmp_path: Path) -> None:
    row = {"gpu": "G", "shape": "s", "format": "mxfp4:fp8_token", "tokens": 1, "layer_us": 30.0, "floor_us": 20.0}
    write(tmp_path / "layers.csv", [row])
    assert "| s | mxfp4 x fp8_token | 30.0 (1.50) |" in page(tmp_path)


def test_layers_under_several_routings(tmp_path: Path) -> None:
    row = {"gpu": "G", "shape": "s", "weights": "bf16", "activations": "bf16", "tokens": 1, "floor_us": 20.0}
    write(tmp_path / "layers.csv", [row | {"routing": r, "layer_us": t} for r, t in (("zipf", 30.0), ("hot", 40.0))])
    assert "| s | bf16 x bf16 | zipf | 30.0 (1.50) |" in page(tmp_path)
    assert "| s | bf16 x bf16 | hot | 40.0 (2.00) |" in page(tmp_path)


def test_results_with_and_without_format_columns(tmp_path: Path) -> None:
    same = {"gpu": "G", "commit": "abc", "command": "c", "shape": "s", "tokens": 8, "layer_us": 20.0, "floor_us": 10.0}
    write(tmp_path / "older.csv", [same | {"format": "mxfp4:fp8_token"}])
    write(tmp_path / "newer.csv", [same | {"weights": "nvfp4", "activations": "fp8_token"}])
    text = page(tmp_path)
    assert "| s | mxfp4 x fp8_token | 20.0 (2.00) |" in text
    assert "| s | nvfp4 x fp8_token | 20.0 (2.00) |" in text


def test_the_readme_is_what_the_results_say() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == readme(text), RUN
    for block in ("layers", "models", "slower"):
        assert len(block_of(text, block)) > 200
    with pytest.raises(ValueError, match="slower"):
        readme(text.replace("<!-- end of slower -->", ""))


def block_of(text: str, name: str) -> str:
    return text.partition(f"<!-- {name}: written by")[2].partition("-->")[2].partition("<!-- end of")[0]


def test_a_row_of_the_readme_has_one_recipe() -> None:
    """Every number is that of its row's own weights and activations, ours, the fastest peer's and the floor."""
    with (RESULTS / "peers_qwen3_30b_h200.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["routing"] == "uniform" and row["us"]]
    lines = block_of(README.read_text(encoding="utf-8"), "layers").strip().splitlines()[2:]
    assert len(lines) == len({(row["weights"], row["activations"]) for row in rows}) >= 7
    for line in lines:
        recipe, *cells = line.strip("| ").split(" | ")
        for tokens, (ours, peer, floor) in (("1", cells[:3]), ("8", cells[3:])):
            found = [r for r in rows if (f"`{r['weights']} x {r['activations']}`", r["tokens"]) == (recipe, tokens)]
            (mine,) = [r for r in found if r["contender"] == "collegium"]
            others = {r["contender"]: float(r["us"]) for r in found if r["contender"] != "collegium"}
            assert float(ours) == float(f"{float(mine['us']):.3g}")
            assert float(floor) == float(f"{float(mine['floor_us']):.3g}")
            if not others:
                assert peer == "none"
                continue
            time, _, name = peer.rstrip(")").partition(" (")
            assert float(time) == float(f"{min(others.values()):.3g}")
            assert others[name] == min(others.values())


def test_the_models_of_the_readme_stand_in_their_file() -> None:
    lines = block_of(README.read_text(encoding="utf-8"), "models").strip().splitlines()
    ways = ("grouped_mm", "collegium bf16", "collegium mxfp4", "collegium mxfp4:fp8_token")
    with (RESULTS / "models_h200.csv").open(encoding="utf-8") as file:
        found = {(r["model"], r["batch"], r["experts"]): float(r["tokens_per_second"]) for r in csv.DictReader(file)}
    assert "mxfp4 x fp8_token" in lines[0]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert len(rows) == 4
    for model, batch, *cells in rows:
        assert cells == [f"{found[model, batch, way]:.0f}" for way in ways]


def test_every_slower_comparison_is_listed() -> None:
    """Each row of ours that a peer beats in the same run, whatever its routing, with the ratio."""
    text = FRONT.read_text(encoding="utf-8").partition("## Where a peer is faster")[2].partition("## ")[0]
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
    """The worst comparison is named with its routing and recipe, and one that a later commit turned is still there."""
    text = block_of(README.read_text(encoding="utf-8"), "slower")
    listed = FRONT.read_text(encoding="utf-8").partition("## Where a peer is faster")[2]
    rows = [row.split(" | ") for row in listed.partition("On several GPUs")[0].splitlines() if "| `" in row]
    worst = min(float(cells[7]) for cells in rows)
    assert f": {worst:.2f} (" in text
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
    text = front(tmp_path).partition("## Where a peer is faster")[2].partition("## ")[0]
    assert "On one GPU: 2 of 4 comparisons" in text
    assert "| G | s | zipf | 8 | mxfp4 x fp8_token | 20 | 15 (p) | 0.750 | `old` |" in text
    assert "| G | s | zipf | 8 | mxfp4 x fp8_group128 | 10 | 9 (p) | 0.900 | `new` |" in text


def test_the_numbers_of_balancing_stand_in_their_file() -> None:
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
