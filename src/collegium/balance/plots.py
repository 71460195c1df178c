"""Traces and simulations as pictures, drawn into a figure of matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import LoadTrace
    from .simulate import Simulation

__all__ = ["draw_load", "draw_simulation"]


def draw_load(figure: Any, trace: LoadTrace) -> None:
    """Draw a heat map, layers by experts, of each expert's load in times of an even share."""
    axes, shares = figure.subplots(), trace.shares()
    shown = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    figure.colorbar(shown, ax=axes, label="times an even share")
    every = max(1, len(trace.layers) // 16)
    axes.set_yticks(range(0, len(trace.layers), every), trace.layers[::every])
    axes.set(xlabel="logical expert")
    figure.suptitle(f"{trace.model}: load of experts over {trace.counts.shape[0]} steps", wrap=True)


def draw_simulation(figure: Any, report: Simulation) -> None:
    """Draw balancedness before and after for each count of replicas, of both halves of the steps."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, part, title in ((left, "seen", "the steps it was fitted to"), (right, "later", "the steps after them")):
        judged = [getattr(row, part) for row in report.rows]
        for shift, name, color in ((-0.2, "before", "0.7"), (0.2, "after", "C0")):
            at = [place + shift for place in range(len(judged))]
            axes.bar(at, [getattr(one, name) for one in judged], 0.38, color=color, label=f"{name}, mean of layers")
            axes.plot(at, [getattr(one, f"{name}_worst") for one in judged], "kv")
        axes.set_xticks(range(len(judged)), [str(row.replicas) for row in report.rows])
        axes.set(xlabel="replicas a layer", ylim=(0, 1.05), title=title)
    left.set(ylabel="balancedness (triangle: worst layer)")
    left.legend(loc="lower left")
    figure.suptitle(f"{report.model} on {report.ranks} ranks, {report.policy}", wrap=True)
