"""Plots of traces and simulations, drawn into a figure of matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import LoadTrace
    from .simulate import Simulation

__all__ = ["draw_load", "draw_simulation"]


def draw_load(figure: Any, trace: LoadTrace) -> None:
    """Draw a heat map, layers by experts, of each expert's load as a multiple of an even share."""
    axes = figure.subplots()
    image = axes.imshow(trace.shares(), aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    figure.colorbar(image, ax=axes, label="times an even share")
    step = max(1, len(trace.layers) // 16)
    axes.set_yticks(range(0, len(trace.layers), step), trace.layers[::step])
    axes.set(xlabel="logical expert")
    figure.suptitle(f"{trace.model}: load of experts over {trace.counts.shape[0]} steps", wrap=True)


def draw_simulation(figure: Any, report: Simulation) -> None:
    """Draw balancedness before and after for each number of replicas, for both halves of the steps."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, part, title in ((left, "fitted", "the steps it was fitted to"), (right, "later", "the steps after them")):
        halves = [getattr(row, part) for row in report.rows]
        for shift, name, color in ((-0.2, "before", "0.7"), (0.2, "after", "C0")):
            x = [index + shift for index in range(len(halves))]
            axes.bar(x, [getattr(half, name) for half in halves], 0.38, color=color, label=f"{name}, mean of layers")
            axes.plot(x, [getattr(half, f"{name}_worst") for half in halves], "kv")
        axes.set_xticks(range(len(halves)), [str(row.replicas) for row in report.rows])
        axes.set(xlabel="replicas a layer", ylim=(0, 1.05), title=title)
    left.set(ylabel="balancedness (triangle: worst layer)")
    left.legend(loc="lower left")
    figure.suptitle(f"{report.model} on {report.ranks} ranks, {report.policy}", wrap=True)
