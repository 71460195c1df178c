"""Reports as pictures, and among them latency beside its floor with the roofline."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError
from ..integrations.extra import extra
from .bench import BenchReport

__all__ = ["check_picture", "draw_bench", "save_picture"]

T = TypeVar("T")


def check_picture(path: str, option: str = "--plot") -> None:
    """Raise InputError where no picture file ``path`` can be written, MissingExtraError without matplotlib."""
    kinds = _figure().canvas.get_supported_filetypes()
    file = Path(path)
    if file.suffix.lstrip(".").lower() not in kinds:
        raise InputError(f"{option} {path}: its ending names no kind of picture; allowed: {', '.join(sorted(kinds))}")
    if not file.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {file.parent}; make it first")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"{option} {path}: cannot be written; name a file in a folder that can")


def save_picture(path: str, draw: Callable[[Any, T], None], report: T) -> None:
    """Let ``draw`` draw ``report`` into a figure and write it to ``path``; raises MissingExtraError."""
    figure = _figure()
    draw(figure, report)
    figure.savefig(path, dpi=120)


def draw_bench(figure: Any, report: BenchReport) -> None:
    """Draw latency over tokens with each floor beside it, and the roofline."""
    latency, roof = figure.subplots(1, 2)
    for index, key in enumerate(dict.fromkeys((row.weights, row.activations) for row in report.rows)):
        rows = [row for row in report.rows if (row.weights, row.activations) == key]
        tokens, color = [row.tokens for row in rows], f"C{index}"
        latency.plot(tokens, [1e6 * r.seconds for r in rows], "o-", color=color, label=f"{key[0]} x {key[1]}")
        latency.plot(tokens, [1e6 * r.floor_seconds for r in rows], "--", color=color)
        roof.plot([r.intensity for r in rows], [r.teraflops for r in rows], "o", color=color)
    latency.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds a layer (dashed: floor)")
    # Above both panels and wrapped: names of shapes and devices are longer than one panel.
    figure.suptitle(f"{report.shape}, {report.routing} routing, {report.device}", wrap=True)
    latency.set_title("latency")
    latency.legend()
    top = report.ceilings
    at = [min((r.intensity for r in report.rows), default=1.0) / 2, 4 * top.rate_8 / top.bandwidth]
    for rate, label in ((top.rate_16, "16-bit"), (top.rate_8, "8-bit")):
        knee = rate / top.bandwidth
        points = [at[0], knee, max(at[1], 2 * knee)]
        roof.plot(points, [min(p * top.bandwidth, rate) / 1e12 for p in points], "-", color="0.5", label=label)
    roof.set(xscale="log", yscale="log", xlabel="FLOP a byte that must be moved", ylabel="TFLOP a second")
    roof.set_title("roofline")


def _figure() -> Any:
    return extra("matplotlib.figure", "matplotlib", group="plot").Figure(figsize=(12, 5), layout="constrained")
