from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

from make_benchmarks import FRONT, PAGE, PICTURES, front, page, pictures
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


def test_the_pictures_are_what_the_results_say_and_each_is_shown() -> None:
    drawn = pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")} == drawn, RUN
    assert set(re.findall(r"\]\(pictures/([^)]+)\)", front())) == set(drawn)
    assert {PICTURES / name for name in drawn} <= set(tracked())
    # Light, and nothing is loaded from elsewhere.
    for name, text in drawn.items():
        assert len(text) < 40_000, name
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name


def test_a_picture_has_a_point_for_each_row_that_was_measured(tmp_path: Path) -> None:
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


def test_peers_stand_beside_each_other_and_the_absent_are_listed(tmp_path: Path) -> None:
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


def test_layers_under_several_routings_stand_in_lines_of_their_own(tmp_path: Path) -> None:
    row = {"gpu": "G", "shape": "s", "weights": "bf16", "activations": "bf16", "tokens": 1, "floor_us": 20.0}
    write(tmp_path / "layers.csv", [row | {"routing": r, "layer_us": t} for r, t in (("zipf", 30.0), ("hot", 40.0))])
    assert "| s | bf16 x bf16 | zipf | 30.0 (1.50) |" in page(tmp_path)
    assert "| s | bf16 x bf16 | hot | 40.0 (2.00) |" in page(tmp_path)


def test_layers_are_read_with_and_without_a_column_for_each_format(tmp_path: Path) -> None:
    same = {"gpu": "G", "commit": "abc", "command": "c", "shape": "s", "tokens": 8, "layer_us": 20.0, "floor_us": 10.0}
    write(tmp_path / "older.csv", [same | {"format": "mxfp4:fp8_token"}])
    write(tmp_path / "newer.csv", [same | {"weights": "nvfp4", "activations": "fp8_token"}])
    text = page(tmp_path)
    assert "| s | mxfp4 x fp8_token | 20.0 (2.00) |" in text
    assert "| s | nvfp4 x fp8_token | 20.0 (2.00) |" in text


def test_the_models_of_the_readme_stand_in_their_file() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("| whole model")[1].split("\n\n")[0].splitlines()
    names = {"gpt-oss-20b": "gpt_oss_20b", "Qwen3-30B-A3B": "qwen3_30b"}
    ways = ("grouped_mm", "collegium bf16", "collegium mxfp4", "collegium mxfp4:fp8_token")
    with (ROOT / "benchmarks/results/models_h200.csv").open(encoding="utf-8") as file:
        found = {(r["model"], r["batch"], r["experts"]): float(r["tokens_per_second"]) for r in csv.DictReader(file)}
    said = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert len(said) == 4
    for model, batch, *cells in said:
        assert cells == [f"{found[names[model], batch, way]:.0f}" for way in ways]


def test_the_numbers_of_the_readme_stand_in_their_file() -> None:
    pairs = {"BF16": "bf16", "FP8 blocks": "fp8_block", "FP8": "fp8", "MXFP4": "mxfp4", "NVFP4": "nvfp4"}
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## How fast")[1].split("## ")[0]
    with (ROOT / "benchmarks/results/peers_qwen3_30b_h200.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["routing"] == "uniform"]
    lines = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| BF", "| FP", "| MX", "| NV"))
    ]
    assert len(lines) == 6
    for what, *cells in lines:
        weights, _, activations = what.partition(" x ")
        asked = pairs[weights], pairs[activations or weights]
        for tokens, (ours, peer, floor) in (("1", cells[:3]), ("8", cells[3:])):
            found = [r for r in rows if r["tokens"] == tokens and r["weights"] == asked[0]]
            found = [r for r in found if r["activations"].startswith(asked[1])]
            mine = min((r for r in found if r["contender"] == "collegium"), key=lambda r: float(r["us"]))
            others = [float(r["us"]) for r in found if r["contender"] != "collegium"]
            assert float(f"{float(mine['us']):.3g}") == float(ours)
            assert float(f"{float(mine['floor_us']):.3g}") == float(f"{float(floor):.3g}")
            best = peer.split(" ")[0]
            assert (float(f"{min(others):.3g}") == float(best)) if others else best == "none"


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
