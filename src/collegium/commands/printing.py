"""Print reports: tables and JSON."""

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
    from .calibrate import CalibrationReport
    from .demo import DemoReport
    from .generate import AdapterTexts, Written
    from .inspect import Inspection
    from .quantize import QuantizeReport
    from .tune import TuneReport
    from .verify import VerifyReport

__all__ = [
    "err",
    "out",
    "print_bench",
    "print_calibration",
    "print_conversion",
    "print_demo",
    "print_inspection",
    "print_json",
    "print_load",
    "print_model_bench",
    "print_plan",
    "print_simulation",
    "print_text",
    "print_texts",
    "print_tuning",
    "print_verification",
]

T = TypeVar("T")
# Lines in a pipe or a file are not cut or wrapped. Python sets a closed stream to None.
out = Console(width=None if sys.stdout and sys.stdout.isatty() else 10_000)
err = Console(stderr=True)


def print_json(value: dict[str, object]) -> None:
    """Print one JSON object on standard output; NaN and infinity become null."""
    sys.stdout.write(json.dumps(_null_if_not_finite(value), indent=2, allow_nan=False) + "\n")


def _null_if_not_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_if_not_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_if_not_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[T], cells: Callable[[T], Iterable[object]]
) -> None:
    """Print a table below its title; columns are right-aligned unless their name ends in a space."""
    if title:
        out.print(title, style="italic", markup=False, highlight=False)
    sides = (Column(name.strip(), justify="left" if name.endswith(" ") else "right", no_wrap=True) for name in columns)
    table = Table(*sides, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, cells(row)))
    out.print(table)


def _print_note(text: str) -> None:
    out.print(text, style="dim")


def print_demo(report: DemoReport) -> None:
    """Print a table of the demo's formats and the text that each generated."""
    _print_table(
        f"{report.model} on {report.device}",
        ("weights x activations ", "bytes/expert", "perplexity", "vs bf16", "error", "tok/s"),
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
    _print_note("error: relative L2 error of one layer's output against FP32 arithmetic on the BF16 weights")
    for kernel in dict.fromkeys(row.kernel for row in report.rows):
        users = ", ".join(f"{r.weights} x {r.activations}" for r in report.rows if r.kernel == kernel)
        _print_note(f"kernel {kernel}: {users}")
    _print_note(
        f"tok/s: decode steps after compilation; text: greedy, repetition penalty {report.repetition_penalty:g}"
    )
    for row in report.rows:
        out.print(f"\n[bold]{row.weights} x {row.activations}[/bold]")
        out.print(" ".join(row.text.split()), markup=False, highlight=False)
    _print_note(f"\n{report.seconds:.1f} s in total, including {report.compile_seconds:.1f} s of compilation")


def print_texts(report: Written | AdapterTexts) -> None:
    """Print a generated text and its speed, or those of each adapter."""
    from .generate import AdapterTexts

    if not isinstance(report, AdapterTexts):
        print_text(report)
        return
    for adapter, written in zip(report.adapters, report.texts, strict=True):
        out.print(f"[bold]{escape(adapter)}[/bold]")
        print_text(written)


def print_text(written: Written) -> None:
    """Print a generated text and its speed."""
    out.print(written.text, markup=False, highlight=False)
    first = f"first token after {1e3 * written.first_token_seconds:.0f} ms"
    err.print(f"{first}, then {written.tokens_per_second:.1f} tokens/s", style="dim")


def print_plan(plan: Plan) -> None:
    """Print ``plan.explain()``."""
    out.print(plan.explain(), markup=False, highlight=False)


def print_bench(report: BenchReport) -> None:
    """Print one table per recipe: times, floors and errors."""
    out.print(f"[bold]{escape(report.shape)}[/bold] ({report.sizes}), {report.routing} routing, on {report.device}")
    for weights, activations, kernel in dict.fromkeys((r.weights, r.activations, r.kernel) for r in report.rows):
        _print_table(
            f"{weights} x {activations} ({kernel})",
            ("tokens", "us", "floor us", "of floor", "bound", "GB/s", "TFLOP/s", "experts", "error"),
            [r for r in report.rows if (r.weights, r.activations, r.kernel) == (weights, activations, kernel)],
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
    ceilings = report.ceilings
    _print_note(
        f"ceilings: {ceilings.bandwidth / 1e12:.3g} TB/s, {ceilings.rate_16 / 1e12:.4g} TFLOP/s with 16-bit and "
        f"{ceilings.rate_8 / 1e12:.4g} with 8-bit operands; torch {report.torch}, triton {report.triton}"
    )
    if not all(row.cold for row in report.rows):
        _print_note("*: the weights may be in a cache; the floor counts only the arithmetic")


def print_model_bench(report: ModelReport) -> None:
    """Print tokens per second for each implementation of the experts, or the reason for a missing result."""
    size = f"{report.parameters / 1e9:.1f} G parameters, {report.layers} layers"
    ranks = f"{report.ranks} ranks of " if report.ranks > 1 else ""
    out.print(f"[bold]{escape(report.model)}[/bold] ({size}), random weights, on {ranks}{report.device}")
    _print_table(
        None,
        ("experts ", "sequences", "tokens/s", "ms/step", "CUDA graph", "error"),
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
    _print_note(f"torch {report.torch}, triton {report.triton}, transformers {report.transformers}")


def print_tuning(report: TuneReport) -> None:
    """Print the measured tiles and their speedup."""
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
    words = [f"{tile.block_n}x{tile.block_t} w{tile.warps} s{tile.stages}"]
    if tile.depth > 1:
        words.append(f"d{tile.depth}")
    if tile.registers:
        words.append(f"r{tile.registers}")
    if tile.interleave_gate_up:
        words.append("interleaved")
    if tile.fuse_k_block:
        words.append("fused")
    return " ".join(words)


def print_load(report: LoadReport) -> None:
    """Print the most and least loaded expert of each layer of a trace."""
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
        lambda load: (
            escape(load.layer),
            load.expert,
            f"{load.max_share:.2f}",
            load.coldest,
            f"{load.min_share:.2f}",
            load.idle,
        ),
    )


def print_simulation(report: Simulation) -> None:
    """Print the balance that a policy would have reached on a trace."""
    out.print(
        f"[bold]{escape(report.model)}[/bold]: {report.layers} layers of {report.experts} experts on {report.ranks} "
        f"ranks, {report.policy}, {report.steps} steps"
    )
    for part, title in (
        ("fitted", "first half of the steps (the policy was fitted to it)"),
        ("later", "second half of the steps"),
    ):
        _print_table(
            title,
            ("replicas", "slots", "before", "worst", "after", "worst", "busiest", "moved", "MB"),
            [
                (
                    row.replicas,
                    row.slots,
                    f"{half.before:.3f}",
                    f"{half.before_worst:.3f}",
                    f"{half.after:.3f}",
                    f"{half.after_worst:.3f}",
                    f"{-100 * half.saved:+.1f} %",
                    row.moved_experts,
                    f"{row.moved_bytes / 1e6:,.1f}",
                )
                for row, half in ((row, getattr(row, part)) for row in report.rows)
            ],
            tuple,
        )
    _print_note(
        "before, after: balancedness (mean load / load of the busiest rank, per step; 1 is even), mean and worst over "
        "the layers; busiest: change of the busiest ranks' load; moved: experts in all layers"
    )


def print_inspection(inspection: Inspection) -> None:
    """Print the contents of a checkpoint and its plan on this machine."""
    out.print(inspection.path, style="italic", markup=False, highlight=False)
    table = Table(Column("property", style="bold"), "value", show_header=False)
    for name, value in inspection.lines():
        table.add_row(name, Text(value))
    out.print(table)
    out.print("plan for this machine", style="bold")
    out.print(inspection.plan.explain(), markup=False, highlight=False)


def print_verification(report: VerifyReport) -> None:
    """Print the error of every layer and the verdict."""
    kernels = ", ".join(dict.fromkeys(check.kernel for check in report.checks))
    _print_table(
        f"{report.path} on {report.device}, kernel {kernels}",
        ("layer ", "formats ", "experts ", "error ", "worst expert ", "allowed ", "verdict "),
        report.checks,
        lambda check: (
            f"{check.layer}" if check.part == "experts" else f"{check.layer} {check.part}",
            f"{check.weight_format} x {check.activation_format}",
            f"{check.checked} of {check.num_experts}",
            f"{check.error:.3%}",
            f"{check.worst}: {check.worst_error:.3%}",
            f"{check.tolerance:.0%}, {2 * check.tolerance:.0%}",
            "[green]ok[/green]" if check.passed else "[bold red]WRONG[/bold red]",
        ),
    )


def print_calibration(report: CalibrationReport) -> None:
    """Print the largest inputs of every layer's experts and the files that were linked, copied or skipped."""
    _print_table(
        f"{report.path}: {report.scales:,} activation scales from {report.tokens:,} tokens, for "
        f"{' and '.join(report.activations)}",
        ("layer ", "largest input ", "before down ", "experts not reached "),
        report.layers,
        lambda layer: (
            layer.layer,
            f"{layer.gate_up:.5g}",
            f"{layer.down:.5g}",
            f"{len(layer.unreached)} of {layer.experts}",
        ),
    )
    lines = [
        f"{action:<8} {', '.join(names)}"
        for action, names in (("linked", report.linked), ("copied", report.copied), ("skipped", report.skipped))
        if names
    ]
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def print_conversion(report: QuantizeReport) -> None:
    """Print the error of every converted layer and the files that were copied, skipped or removed."""
    _print_table(
        f"{report.path}: {report.weight_format} experts as {report.storage} stores them",
        ("layer ", "from ", "error ", "worst expert "),
        report.layers,
        lambda layer: (
            layer.layer,
            layer.source_format,
            f"{layer.error:.3%}",
            f"{layer.worst}: {layer.worst_error:.3%}",
        ),
    )
    lines = [f"bytes    {report.nbytes:,}, previously {report.source_nbytes:,}"]
    for action, names in (("copied", report.copied), ("skipped", report.skipped), ("removed", report.removed)):
        if names:
            lines.append(f"{action:<8} {', '.join(names)}")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
