"""What the command ``collegium`` shows: tables and JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..balance.report import LoadReport
    from ..balance.simulate import Simulation
    from ..experts.triton.tiles.problem import TileChoice
    from ..planning import Plan
    from .bench import BenchReport
    from .bench_model import ModelReport
    from .demo import DemoReport
    from .generate import Written
    from .inspect import Inspection
    from .quantize import QuantizeReport
    from .tune import TuneReport
    from .verify import VerifyReport

__all__ = [
    "err",
    "out",
    "print_bench",
    "print_conversion",
    "print_demo",
    "print_inspection",
    "print_json",
    "print_load",
    "print_model_bench",
    "print_plan",
    "print_proofs",
    "print_simulation",
    "print_text",
    "print_tuning",
]

T = TypeVar("T")
# A table or a path in a pipe or a file is never cut or wrapped. A closed stream is None to Python.
out = Console(width=None if sys.stdout and sys.stdout.isatty() else 10_000)
err = Console(stderr=True)


def print_json(value: dict[str, object]) -> None:
    """Print one JSON object on standard output; numbers that JSON lacks are null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[T], cells: Callable[[T], Iterable[object]]
) -> None:
    """Print right-aligned columns, except those whose name ends in a space, below a title that may be wider."""
    if title:
        out.print(title, style="italic", markup=False, highlight=False)
    sides = (Column(name.strip(), justify="left" if name.endswith(" ") else "right", no_wrap=True) for name in columns)
    table = Table(*sides, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, cells(row)))
    out.print(table)


def _note(text: str) -> None:
    out.print(text, style="dim")


def print_demo(report: DemoReport) -> None:
    """Show the formats of a demo beside each other, and what each wrote."""
    _print_table(
        f"{report.model} on {report.device}",
        ("weights x activations ", "bytes/expert", "perplexity", "beside bf16", "error", "tok/s"),
        report.rows,
        lambda row: (
            f"{row.weights} x {row.activations}",
            f"{row.expert_bytes:,}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity_ratio - 1):+.2f} %",
            f"{100 * row.layer_error:.2f} %",
            f"{row.tokens_per_second:.1f}",
        ),
    )
    _note("error: relative L2 error of one layer's output against FP32 on the BF16 weights")
    for kernel in dict.fromkeys(row.kernel for row in report.rows):
        users = ", ".join(f"{r.weights} x {r.activations}" for r in report.rows if r.kernel == kernel)
        _note(f"kernel {kernel}: {users}")
    _note(f"tok/s: decode steps after compilation; text: greedy, repetition penalty {report.repetition_penalty:g}")
    for row in report.rows:
        out.print(f"\n[bold]{row.weights} x {row.activations}[/bold]")
        out.print(" ".join(row.text.split()), markup=False, highlight=False)
    _note(f"\n{report.seconds:.1f} s in all, {report.compile_seconds:.1f} s of it compiling")


def print_text(written: Written) -> None:
    """Show a text and how fast it was written."""
    out.print(written.text, markup=False, highlight=False)
    first = f"first token after {1e3 * written.first_token_seconds:.0f} ms"
    err.print(f"{first}, then {written.tokens_per_second:.1f} tokens/s", style="dim")


def print_plan(made: Plan) -> None:
    """Show a plan as it explains itself."""
    out.print(made.explain(), markup=False, highlight=False)


def print_bench(report: BenchReport) -> None:
    """Show times beside the floor, a table for each recipe."""
    out.print(f"[bold]{escape(report.shape)}[/bold] ({report.sizes}), {report.routing} routing, on {report.device}")
    for name in dict.fromkeys((row.weights, row.activations, row.kernel) for row in report.rows):
        _print_table(
            f"{name[0]} x {name[1]} ({name[2]})",
            ("tokens", "us", "floor us", "of floor", "bound", "GB/s", "TFLOP/s", "experts", "error"),
            [row for row in report.rows if (row.weights, row.activations, row.kernel) == name],
            lambda row: (
                row.tokens,
                f"{1e6 * row.seconds:.1f}" + ("" if row.cold else "*"),
                f"{1e6 * row.floor_seconds:.1f}",
                f"{100 * row.of_floor:.0f} %",
                row.bound,
                f"{row.gigabytes_per_second:.0f}",
                f"{row.teraflops:.1f}",
                f"{row.experts_hit:.0f}",
                f"{row.error:.4f}",
            ),
        )
    top = report.ceilings
    _note(
        f"ceilings: {top.bandwidth / 1e12:.3g} TB/s, {top.rate_16 / 1e12:.4g} TFLOP/s with 16-bit and "
        f"{top.rate_8 / 1e12:.4g} with 8-bit operands; torch {report.torch}, triton {report.triton}"
    )
    if not all(row.cold for row in report.rows):
        _note("*: the weights may stay in a cache; the floor is that of the operations alone")


def print_model_bench(report: ModelReport) -> None:
    """Show tokens a second by what runs the experts, and why one has none."""
    size = f"{report.parameters / 1e9:.1f} G parameters, {report.layers} layers"
    shared = f"{report.ranks} ranks of " if report.ranks > 1 else ""
    out.print(f"[bold]{escape(report.model)}[/bold] ({size}), random weights, on {shared}{report.device}")
    _print_table(
        None,
        ("experts ", "sequences", "tokens/s", "ms a step", "one graph", "error"),
        report.rows,
        lambda row: (
            row.experts,
            row.batch,
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
            "" if row.seconds is None else f"{1e3 * row.seconds:.3f}",
            "yes" if row.graph else "no",
            "" if row.error is None else f"{row.error:.4f}",
        ),
    )
    for row in report.rows:
        if row.note:
            out.print(f"{row.experts}, {row.batch} sequences: {row.note}", markup=False)
    _note(f"torch {report.torch}, triton {report.triton}, transformers {report.transformers}")


def print_tuning(report: TuneReport) -> None:
    """Show the tiles measured and what they gain."""
    out.print(f"[bold]{escape(report.shape)}[/bold] in {report.weights} x {report.activations} on {report.device}")
    _print_table(
        None,
        ("product", "tokens", "chosen us", "best us", "gain", "tile", "tried"),
        report.rows,
        lambda row: (
            row.product,
            row.tokens,
            f"{1e6 * row.chosen_seconds:.1f}",
            f"{1e6 * row.best_seconds:.1f}",
            f"{100 * (1 - row.best_seconds / row.chosen_seconds):.0f} %",
            _tile(row.best),
            row.candidates,
        ),
    )
    out.print(f"written to {report.path}", style="dim", soft_wrap=True, markup=False)


def _tile(tile: TileChoice) -> str:
    more = {f"d{tile.depth}": tile.depth > 1, f"r{tile.registers}": tile.registers}
    more |= {"stacked": tile.stacked, "joined": tile.joined}
    sizes = f"{tile.block_n}x{tile.block_t} w{tile.warps} s{tile.stages}"
    return " ".join([sizes, *(name for name, given in more.items() if given)])


def print_load(report: LoadReport) -> None:
    """Show the extremes of a load trace, layer by layer."""
    out.print(
        f"{report.path}: {report.model}, {report.steps} steps, {report.assignments:,} assignments to {report.experts} "
        f"experts a layer, top-{report.top_k}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    _print_table(
        None,
        ("layer ", "hottest expert", "of an even share", "coldest", "of an even share", "idle"),
        report.layers,
        lambda own: (escape(own.layer), own.expert, f"{own.most:.2f}", own.coldest, f"{own.least:.2f}", own.idle),
    )


def print_simulation(report: Simulation) -> None:
    """Show what a policy would have done to a trace."""
    out.print(
        f"[bold]{escape(report.model)}[/bold]: {report.layers} layers of {report.experts} experts on {report.ranks} "
        f"ranks, {report.policy}, {report.steps} steps"
    )
    for part, title in (
        ("seen", "the first half of the steps, which it was fitted to"),
        ("later", "the half after it"),
    ):
        _print_table(
            title,
            ("replicas", "slots", "before", "worst", "after", "worst", "busiest", "moved", "MB"),
            [
                (
                    row.replicas,
                    row.slots,
                    *(f"{value:.3f}" for value in (own.before, own.before_worst, own.after, own.after_worst)),
                    f"{-100 * own.saved:+.1f} %",
                    row.moved_experts,
                    f"{row.moved_bytes / 1e6:,.1f}",
                )
                for row, own in ((row, getattr(row, part)) for row in report.rows)
            ],
            tuple,
        )
    _note(
        "before, after: balancedness (mean over busiest rank, step by step; 1 is even), mean and worst of the layers; "
        "busiest: change of the busiest ranks' work; moved: experts, in all layers"
    )


def print_inspection(found: Inspection) -> None:
    """Show what a checkpoint holds and what would run here."""
    out.print(found.path, style="italic", markup=False, highlight=False)
    table = Table(Column("what", style="bold"), "found", show_header=False)
    for what, value in found.lines():
        table.add_row(what, Text(value))
    out.print(table)
    out.print("what would run here", style="bold")
    out.print(found.plan.explain(), markup=False, highlight=False)


def print_proofs(report: VerifyReport) -> None:
    """Show the error of every layer and the verdict."""
    kernels = ", ".join(dict.fromkeys(proof.kernel for proof in report.proofs))
    _print_table(
        f"{report.path} on {report.device}, kernel {kernels}",
        ("layer ", "formats ", "experts ", "error ", "worst expert ", "allowed ", "verdict "),
        report.proofs,
        lambda proof: (
            f"{proof.layer}" if proof.part == "experts" else f"{proof.layer} {proof.part}",
            f"{proof.weight_format} x {proof.activation_format}",
            f"{proof.checked} of {proof.held}",
            f"{proof.error:.3%}",
            f"{proof.worst}: {proof.worst_error:.3%}",
            f"{proof.tolerance:.0%}, {2 * proof.tolerance:.0%}",
            "[green]ok[/green]" if proof.passed else "[bold red]WRONG[/bold red]",
        ),
    )


def print_conversion(report: QuantizeReport) -> None:
    """Show the error of every converted layer and what was copied."""
    _print_table(
        f"{report.path}: {report.weight_format} experts as {report.storage} stores them",
        ("layer ", "was ", "error ", "worst expert "),
        report.layers,
        lambda own: (own.layer, own.source_format, f"{own.error:.3%}", f"{own.worst}: {own.worst_error:.3%}"),
    )
    rows = [f"bytes    {report.nbytes:,}, were {report.source_nbytes:,}"]
    for what, names in (("copied", report.copied), ("skipped", report.skipped), ("removed", report.removed)):
        rows += [f"{what:<8} {', '.join(names)}"] if names else []
    out.print("\n".join(rows), markup=False, highlight=False, soft_wrap=True)
