"""The command ``collegium``, one function a subcommand. Thin: it parses, calls the library and prints."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import CollegiumError
from .inspection import inspect_model, plan_model
from .types import Choice, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .conversion import QuantizeReport
    from .demo import DemoReport
    from .inspection import Inspection
    from .verification import VerifyReport

__all__ = ["app", "main"]

app = typer.Typer(
    help="Run Mixture-of-Experts checkpoints in the format they were published in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the best device of this machine when left out.")]
Format = Annotated[str | None, typer.Option("--format", help="Encode the experts into this format first.")]
Kernel = Annotated[str | None, typer.Option(help="Force this experts kernel; it runs or refuses.")]
Activations = Annotated[str | None, typer.Option(help="Force this activation format.")]
Model = Annotated[str, typer.Argument(help="Folder with config.json and safetensors files.")]


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Model folder; the shipped model when left out.")] = None,
    device: Device = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens written in each format.")] = 32,
    as_json: Json = False,
) -> None:
    """Run the shipped model in every format: bytes, perplexity, error, speed, and a few sentences."""
    from .demo import find_model, run_demo

    folder = find_model(model)
    with _bar("formats") as progress:
        report = run_demo(folder, device=device, tokens=tokens, progress=progress)
    if as_json:
        _print_json(report.to_json())
    else:
        _print_demo(report)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "Once upon a time",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    weight_format: Format = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write text: transformers runs everything but the experts, which run through Collegium."""
    from .demo import Writer
    from .integrations.transformers import load_model

    with _bar("loading") as progress:
        loaded = load_model(model, weight_format=weight_format, device=device, progress=progress)
    text, speed = Writer(loaded, Path(model)).write(prompt, tokens, temperature=temperature, seed=seed)
    if as_json:
        _print_json({"text": text, "tokens_per_second": speed})
    else:
        out.print(text, markup=False, highlight=False)
        out.print(f"[dim]{speed:.1f} tokens/s[/dim]")


@app.command()
def inspect(
    model: Model,
    deep: Annotated[bool, typer.Option(help="Read every scale and check it; --no-deep reads headers only.")] = True,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds (formats, sizes, audit) and what would run it here and why."""
    with _bar("audit") as progress:
        found = inspect_model(model, deep=deep, device=device, progress=progress)
    if as_json:
        _print_json(found.to_json())
    else:
        _print_inspection(found)


@app.command()
def plan(
    model: Model,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    weight_format: Format = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one forward pass.")] = 8192,
    as_json: Json = False,
) -> None:
    """Plan one MoE layer from config.json alone: kernel, formats, bytes, and why the others were refused."""
    made = plan_model(
        model,
        device=device,
        force=Choice(kernel=kernel, activation_format=activations),
        weight_format=weight_format,
        limits=Limits(max_tokens=max_tokens),
    )
    if as_json:
        _print_json(made.to_json())
    else:
        out.print(made.explain(), markup=False, highlight=False)


@app.command()
def quantize(
    model: Model,
    to: Annotated[str, typer.Option(help="Weight format of the experts to write.")],
    target: Annotated[str | None, typer.Option("--out", help="New folder; MODEL-FORMAT when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with its experts in another format; all else is copied. The folder appears when complete."""
    from .conversion import quantize_model

    with _bar("quantize") as progress:
        report = quantize_model(model, to, target, progress=progress)
    if as_json:
        _print_json(report.to_json())
    else:
        _print_conversion(report)


@app.command()
def verify(
    model: Model,
    experts: Annotated[int, typer.Option(min=1, help="Experts of each layer to recompute.")] = 8,
    every: Annotated[bool, typer.Option("--all", help="Recompute every expert.")] = False,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    weight_format: Format = None,
    as_json: Json = False,
) -> None:
    """Recompute experts as they run here beside plain FP32 code; exit code 1 when one is over tolerance."""
    from .verification import verify_model

    with _bar("verify") as progress:
        report = verify_model(
            model,
            experts=None if every else experts,
            device=device,
            force=Choice(kernel=kernel, activation_format=activations),
            weight_format=weight_format,
            progress=progress,
        )
    if as_json:
        _print_json(report.to_json())
    else:
        _print_proofs(report)
    if not report.passed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command; errors of the library become one message and exit code 1."""
    try:
        app()
    except CollegiumError as error:
        err.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="", soft_wrap=True)
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


@contextmanager
def _bar(what: str) -> Generator[Callable[[int, int, str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what)

        def step(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {text}")

        yield step


def _print_json(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _titled(title: str) -> Table:
    """Print a title, which may be wider than its table, and return the table."""
    out.print(title, style="italic", markup=False, highlight=False)
    return Table(box=None, pad_edge=False)


def _print_proofs(report: VerifyReport) -> None:
    kernels = ", ".join(dict.fromkeys(proof.kernel for proof in report.proofs))
    table = _titled(f"{report.path} on {report.device}, kernel {kernels}")
    for name in ("layer", "formats", "experts", "error", "worst expert", "allowed", "verdict"):
        table.add_column(name, no_wrap=True)
    for proof in report.proofs:
        table.add_row(
            f"{proof.layer}" if proof.part == "experts" else f"{proof.layer} {proof.part}",
            f"{proof.weight_format} x {proof.activation_format}",
            f"{proof.checked} of {proof.held}",
            f"{proof.error:.3%}",
            f"{proof.worst}: {proof.worst_error:.3%}",
            f"{proof.tolerance:.0%}, {2 * proof.tolerance:.0%}",
            "[green]ok[/green]" if proof.passed else "[bold red]WRONG[/bold red]",
        )
    out.print(table)


def _print_conversion(report: QuantizeReport) -> None:
    table = _titled(f"{report.path}: {report.weight_format} experts as {report.storage} stores them")
    for name in ("layer", "was", "error", "worst expert"):
        table.add_column(name, no_wrap=True)
    for layer in report.layers:
        worst = f"{layer.worst}: {layer.worst_error:.3%}"
        table.add_row(str(layer.layer), layer.source_format, f"{layer.error:.3%}", worst)
    out.print(table)
    rows = [f"bytes    {report.nbytes:,}, were {report.source_nbytes:,}"]
    for what, names in (("copied", report.copied), ("skipped", report.skipped), ("removed", report.removed)):
        rows += [f"{what:<8} {', '.join(names)}"] if names else []
    out.print("\n".join(rows), markup=False, highlight=False, soft_wrap=True)


def _print_demo(report: DemoReport) -> None:
    table = Table(title=f"{report.model} on {report.device}", title_justify="left", box=None, pad_edge=False)
    table.add_column("weights x activations", no_wrap=True)
    for name in ("bytes/expert", "perplexity", "beside bf16", "error", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            f"{row.weights} x {row.activations}",
            f"{row.expert_bytes:,}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity_ratio - 1):+.2f} %",
            f"{100 * row.layer_error:.2f} %",
            f"{row.tokens_per_second:.1f}",
        )
    out.print(table)
    out.print("error: relative L2 error of one layer's output against FP32 on the BF16 weights", style="dim")
    for kernel in dict.fromkeys(row.kernel for row in report.rows):
        users = ", ".join(f"{r.weights} x {r.activations}" for r in report.rows if r.kernel == kernel)
        out.print(f"kernel {kernel}: {users}", style="dim")
    for row in report.rows:
        out.print(f"\n[bold]{row.weights} x {row.activations}[/bold]")
        out.print(" ".join(row.text.split()), markup=False, highlight=False)
    out.print(f"\n[dim]{report.seconds:.1f} s in all[/dim]")


def _print_inspection(found: Inspection) -> None:
    table = Table(title=found.path, title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("found")
    for what, value in found.lines():
        table.add_row(what, value)
    out.print(table)
    out.print("what would run here", style="bold")
    out.print(found.plan.explain(), markup=False, highlight=False)
