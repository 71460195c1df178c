"""Compare our times with those of other projects in the committed results, for README.md and docs/benchmarks.md.

A ratio is the fastest peer's time divided by ours for the same GPU, layer, routing, number of tokens and recipe: below
1 we are slower. Nothing is left out: skewed routing, every run of a cell, and several GPUs count too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = [
    "HEADLINE",
    "Comparison",
    "headline_rows",
    "one_gpu",
    "readme_headline",
    "readme_slower",
    "several_gpus",
    "slower",
]

Row = dict[str, str]
OURS = "collegium"
# Dispatchers of this package; a layer over ranks with another one is a peer's.
_DISPATCHERS = ("symm_mem", "all_to_all", "all_gather")
HEADLINE = "peers_qwen3_30b_h200"  # the file of README's measurement and picture
_HEADLINE_RECIPE, _HEADLINE_TOKENS = ("mxfp4", "bf16"), (1, 128)
_NAMES = {"vllm marlin": "Marlin in vLLM", "vllm triton": "Triton in vLLM", "humming": "Humming"}
_HEAD = ["GPU", "layer", "routing", "tokens", "weights x activations", "ours, us", "peer, us", "peer / ours", "commit"]


class Comparison(NamedTuple):
    """Our time and the fastest peer's, microseconds, of one layer in one run."""

    gpu: str
    shape: str
    routing: str
    tokens: int
    recipe: str
    ours: float
    peer: float
    name: str
    commit: str

    @property
    def ratio(self) -> float:
        """The peer's time divided by ours."""
        return self.peer / self.ours

    @property
    def cells(self) -> list[str]:
        """What a table shows."""
        ours, peer = f"{_short(self.ours)}", f"{_short(self.peer)} ({self.name})"
        return [
            self.gpu, self.shape, self.routing, f"{self.tokens:,}", self.recipe, ours, peer, f"{self.ratio:.3f}",
            f"`{self.commit}`",
        ]  # fmt: skip


def one_gpu(files: Mapping[str, list[Row]]) -> list[Comparison]:
    """Return every comparison of a layer on one GPU, the worst first.

    A cell that two commits measured is compared twice. Peers are those of the same run, or of the cell's other runs
    where it has none.
    """
    found: list[Comparison] = []
    for rows in files.values():
        if not {"contender", "us", "routing"} <= rows[0].keys():
            continue
        cells: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if row["us"]:
                key = (row["gpu"], row["shape"], row["routing"], row["tokens"], row["weights"], row["activations"])
                cells[key].append(row)
        for (gpu, shape, routing, tokens, weights, activations), measured in cells.items():
            for commit, ours, (peer, name) in _by_commit(measured):
                place = _card(gpu), shape, routing, int(tokens), f"{weights} x {activations}"
                found.append(Comparison(*place, ours, peer, name, commit))
    return sorted(found, key=lambda one: one.ratio)


def _by_commit(measured: list[Row]) -> list[tuple[str, float, tuple[float, str]]]:
    """Return commit, our time and the fastest peer with its name, for each commit that measured ours."""
    found: list[tuple[str, float, tuple[float, str]]] = []
    for commit in dict.fromkeys(row.get("commit", "") for row in measured):
        same_run = [row for row in measured if row.get("commit", "") == commit]
        ours = [float(row["us"]) for row in same_run if row["contender"] == OURS]
        peers = [row for row in same_run if row["contender"] != OURS]
        peers = peers or [row for row in measured if row["contender"] != OURS]
        times = [(float(row["us"]), row["contender"]) for row in peers]
        if ours and times:
            found.append((commit, min(ours), min(times)))
    return found


def several_gpus(files: Mapping[str, list[Row]]) -> list[Comparison]:
    """Return every comparison of a layer over several GPUs, the worst first; ours is the faster pipeline of the run."""
    found: list[Comparison] = []
    for rows in files.values():
        if not {"dispatcher", "ranks", "what"} <= rows[0].keys():
            continue
        cells: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if row["what"] == "layer":
                names = ("gpu", "shape", "ranks", "tokens", "weights", "activations", "commit")
                cells[_routing(row), *(row[name] for name in names)].append(row)
        for (routing, gpu, shape, ranks, tokens, weights, activations, commit), measured in cells.items():
            times = [(float(row["us"]), row["dispatcher"]) for row in measured]
            ours = [time for time, name in times if name.startswith(_DISPATCHERS)]
            peers = [own for own in times if not own[1].startswith(_DISPATCHERS)]
            if ours and peers:
                peer, name = min(peers)
                place = f"{ranks} {_card(gpu)}", shape, routing, int(tokens), f"{weights} x {activations}"
                found.append(Comparison(*place, min(ours), peer, name, commit))
    return sorted(found, key=lambda one: one.ratio)


def _routing(row: Row) -> str:
    """Return the routing of a layer over ranks, which only the command of its row names."""
    words = row["command"].split()
    return words[words.index("--routing") + 1] if "--routing" in words else "uniform"


def slower(files: Mapping[str, list[Row]]) -> str:
    """Return the section of docs/benchmarks.md with every comparison in which a peer is faster."""
    parts = [
        "## Where a peer is faster\n",
        "Every comparison in the files in which a peer's time is below ours, skewed routing included. A cell measured"
        "\nat several commits counts once per commit.\n",
    ]
    for where, every in (("one GPU", one_gpu(files)), ("several GPUs, tokens per rank", several_gpus(files))):
        lost = [one for one in every if one.ratio < 1]
        if every:
            parts.append(f"On {where}: {len(lost)} of {len(every)} comparisons.\n")
            parts.append(_table(_HEAD, [one.cells for one in lost]))
    return "\n".join(parts)


def readme_slower(files: Mapping[str, list[Row]]) -> str:
    """Return README's item about faster peers: how many comparisons, and the worst of one GPU and of several."""
    single, several = one_gpu(files), several_gpus(files)
    lost, lost_ranks = ([one for one in every if one.ratio < 1] for every in (single, several))
    worst, worst_ranks = lost[0], lost_ranks[0]
    return _wrapped(
        f"- Another project is faster in {len(lost)} of {len(single)} comparisons on one GPU "
        f"(at most {1 / worst.ratio:.2f}x: {worst.name}, {worst.shape}, `{worst.recipe}`, {worst.tokens:,} tokens, "
        f"{worst.gpu}) and in {len(lost_ranks)} of {len(several)} on several GPUs, all at "
        f"{min(one.tokens for one in lost_ranks):,} tokens per rank or more (at most {1 / worst_ranks.ratio:.2f}x: "
        f"{worst_ranks.name}, {worst_ranks.gpu}). [List](docs/benchmarks.md#where-a-peer-is-faster)."
    )


def headline_rows(files: Mapping[str, list[Row]]) -> list[Row]:
    """Return the rows of README's measurement and picture: one layer and recipe, uniform routing, all contenders."""
    return [
        row
        for row in files.get(HEADLINE, [])
        if row["us"] and row["routing"] == "uniform" and (row["weights"], row["activations"]) == _HEADLINE_RECIPE
    ]


def readme_headline(files: Mapping[str, list[Row]]) -> str:
    """Return README's measurement: our time and the fastest peer's at two token counts."""
    rows = headline_rows(files)
    ours, peers = list[str](), list[str]()
    for tokens in _HEADLINE_TOKENS:
        times = {row["contender"]: float(row["us"]) for row in rows if int(row["tokens"]) == tokens}
        ours.append(f"**{_short(times.pop(OURS))} µs** for {tokens} token{'s' * (tokens > 1)}")
        fastest = min(times, key=times.__getitem__)
        peers.append(f"{_short(times[fastest])} µs ({_NAMES.get(fastest, fastest)})")
    weights, activations = (name.upper() for name in _HEADLINE_RECIPE)
    return _wrapped(
        f"One Qwen3-30B-A3B layer on an {_card(rows[0]['gpu'])}, {weights} weights, {activations} activations: "
        f"{' and '.join(ours)}. The fastest other project [in the same run](benchmarks/results/{HEADLINE}.csv) takes "
        f"{' and '.join(peers)}.",
        indent="",
    )


def _card(gpu: str) -> str:
    """Return the name of a GPU in short: H100 80GB HBM3 of NVIDIA is an H100."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(head: list[str], body: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _wrapped(text: str, width: int = 140, indent: str = "  ") -> str:
    """Return ``text`` in lines of at most ``width`` characters; words and code stay whole."""
    parts = text.split("`")
    parts[1::2] = [code.replace(" ", "\0") for code in parts[1::2]]
    first, *words = "`".join(parts).split(" ")
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append(f"{indent}{word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines).replace("\0", " ") + "\n"
