"""Plot reports to image files; the plot of ``collegium bench`` (latency, floor, roofline) is defined here."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError
from ..integrations.extra import import_extra
from .bench import BenchReport

__all__ = ["check_picture", "draw_bench", "save_picture"]

T = TypeVar("T")


def check_picture(path: str, option: str = "--plot") -> None:
    """Raise InputError if ``path`` cannot be written as an image, MissingExtraError without matplotlib."""
    kinds = _figure().canvas.get_supported_filetypes()
    file = Path(path)
    if file.suffix.lstrip(".").lower() not in kinds:
        raise InputError(f"{option} {path}: unknown image file extension; allowed: {', '.join(sorted(kinds))}")
    if not file.parent.is_dir():
        raise InputError(f"{option} {path}: the folder {file.parent} does not exist; create it first")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"{option} {path}: cannot be written; name a file in a writable folder")


def save_picture(path: str, draw: Callable[[Any, T], None], report: T) -> None:
    """Draw ``report`` with ``draw`` and write the image to ``path``; raises MissingExtraError without matplotlib."""
    figure = _figure()
    draw(figure, report)
    figure.savefig(path, dpi=120)


def draw_bench(figure: Any, report: BenchReport) -> None:
    """Draw latency and floor over token counts, and the roofline."""
    latency, roof = figure.subplots(1, 2)
    for index, key in enumerate(dict.fromkeys((row.weights, row.activations) for row in report.rows)):
        rows = [row for row in report.rows if (row.weights, row.activations) == key]
        tokens = [row.tokens for row in rows]
        color = f"C{index}"
        latency.plot(tokens, [1e6 * r.seconds for r in rows], "o-", color=color, label=f"{key[0]} x {key[1]}")
        latency.plot(tokens, [1e6 * r.floor_seconds for r in rows], "--", color=color)
        roof.plot([r.intensity for r in rows], [r.teraflops for r in rows], "o", color=color)
    latency.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds per layer (dashed: floor)")
    # Above both panels and wrapped: the names of shapes and devices can be longer than one panel is wide.
    figure.suptitle(f"{report.shape}, {report.routing} routing, {report.device}", wrap=True)
    latency.set_title("latency")
    latency.legend()
    ceilings = report.ceilings
    left = min((row.intensity for row in report.rows), default=1.0) / 2
    right = 4 * ceilings.rate_8 / ceilings.bandwidth
    for rate, label in ((ceilings.rate_16, "16-bit"), (ceilings.rate_8, "8-bit")):
        knee = rate / ceilings.bandwidth
        intensities = [left, knee, max(right, 2 * knee)]
        teraflops = [min(intensity * ceilings.bandwidth, rate) / 1e12 for intensity in intensities]
        roof.plot(intensities, teraflops, "-", color="0.5", label=label)
    roof.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s")
    roof.set_title("roofline")


def _figure() -> Any:
    return import_extra("matplotlib.figure", "matplotlib", group="plot").Figure(figsize=(12, 5), layout="constrained")
