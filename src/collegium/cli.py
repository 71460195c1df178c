"""The command ``collegium``: what it does is in ``--help``. Thin: it parses, calls the library and prints."""

from __future__ import annotations

import os
import sys
from errno import EPIPE
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.text import Text

from .commands import printing
from .commands.inspect import inspect_model, plan_model
from .commands.terminal import Report, bar, prints
from .errors import CollegiumError, InputError
from .parallel.torchrun import joined
from .problem import Choice, Limits

if TYPE_CHECKING:
    from .commands.measure import Ceilings

__all__ = ["app", "main"]

app = typer.Typer(
    help="Run Mixture-of-Experts checkpoints in the format they were published in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
balance = typer.Typer(
    help="Load of experts: record it, see it, and simulate what moving experts would do.", no_args_is_help=True
)
app.add_typer(balance, name="balance")
N = TypeVar("N", int, float)
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the best device of this machine when left out.")]
Format = Annotated[str | None, typer.Option("--format", help="Encode the experts into this format first.")]
Kernel = Annotated[str | None, typer.Option(help="Force this experts kernel; it runs or refuses.")]
Activations = Annotated[str | None, typer.Option(help="Force this activation format.")]
Model = Annotated[str, typer.Argument(help="Folder with config.json and safetensors files.")]
Trace = Annotated[str, typer.Argument(help="File that `collegium balance record` wrote.")]
Steps = Annotated[int | None, typer.Option(min=2, help="Stop after so many steps.")]


@app.command()
@prints(printing.print_demo)
def demo(
    model: Annotated[str | None, typer.Option(help="Model folder; the shipped model when left out.")] = None,
    device: Device = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens written in each format.")] = 32,
) -> Report:
    """Run the shipped model in every format: bytes, perplexity, error, speed, and a few sentences."""
    from .commands.demo import find_model, run_demo

    folder = find_model(model)
    with bar("demo") as progress:
        return run_demo(folder, device=device, tokens=tokens, progress=progress)


@app.command()
@prints(printing.print_text, together=True)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "Once upon a time",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    penalty: Annotated[
        float, typer.Option(min=1.0, help="Repetition penalty: divides the logits of tokens already there; 1 is off.")
    ] = 1.0,
    weight_format: Format = None,
    device: Device = None,
) -> Report:
    """Write text: transformers runs everything but the experts, which run through Collegium.

    Under torchrun every rank holds a part of the experts.
    """
    from .commands.generate import Writer, check_writable, prompt_limits
    from .integrations.transformers import layers_of, load_model
    from .runtime.warming import warm_up

    folder = check_writable(model)
    limits = prompt_limits(folder, prompt)
    with joined(os.environ, device, same_tokens=True) as place:
        with bar("loading") as progress:
            loaded = load_model(model, weight_format=weight_format, device=place, limits=limits, progress=progress)
        writer = Writer(loaded, folder)
        with bar("compiling") as progress:
            warm_up(layers_of(loaded), progress)
            progress(1, 1, "the rest of the model")
            writer.write(prompt, min(tokens, 4), penalty=penalty)
        return writer.write(prompt, tokens, temperature=temperature, seed=seed, penalty=penalty)


@app.command()
@prints(printing.print_inspection)
def inspect(
    model: Model,
    deep: Annotated[bool, typer.Option(help="Read every scale and check it; --no-deep reads headers only.")] = True,
    device: Device = None,
) -> Report:
    """Say what a checkpoint holds (formats, sizes, audit) and what would run it here and why."""
    with bar("audit") as progress:
        return inspect_model(model, deep=deep, device=device, progress=progress)


@app.command()
@prints(printing.print_plan)
def plan(
    model: Model,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    weight_format: Format = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one forward pass.")] = 8192,
) -> Report:
    """Plan one MoE layer from config.json alone: kernel, formats, bytes, and why the others were refused."""
    return plan_model(
        model,
        device=device,
        force=Choice(kernel=kernel, activation_format=activations),
        weight_format=weight_format,
        limits=Limits(max_tokens=max_tokens),
    )


@app.command()
@prints(printing.print_bench)
def bench(
    what: Annotated[str, typer.Argument(help="dsv3, v4_flash, gptoss120b, qwen3_30b, HxIxExK, or a model's folder.")],
    recipes: Annotated[
        list[str] | None, typer.Option("--format", help="weights or weights:activations, such as mxfp4; repeatable.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = "1,8,32,128,512,2048,8192",
    routing: Annotated[str, typer.Option(help="uniform, zipf, hot (one expert) or half (half empty).")] = "uniform",
    device: Device = None,
    ceilings: Annotated[
        str | None, typer.Option(help="TB/s,TFLOP/s of 16 bits,TFLOP/s of 8 bits; measured when left out.")
    ] = None,
    picture: Annotated[str | None, typer.Option("--plot", help="Draw latency and roofline into this PNG.")] = None,
) -> Report:
    """Time one MoE layer on random weights, beside the least this machine could take; wrong results get no time."""
    from .commands.bench import bench
    from .commands.picture import check_picture, plot

    if picture is not None:
        check_picture(picture)
    counts = _numbers("--tokens", tokens, int)
    with bar("bench") as progress:
        report = bench(
            what,
            [_recipe(recipe) for recipe in recipes or ["bf16"]],
            tokens=counts,
            routing=routing,
            device=device,
            ceilings=None if ceilings is None else _ceilings(ceilings),
            progress=progress,
        )
    if picture is not None:
        plot(report, picture)
    return report


@app.command()
@prints(printing.print_model_bench, together=True)
def bench_model(
    what: Annotated[str, typer.Argument(help="qwen3_30b, gpt_oss_20b, or the folder of a model transformers knows.")],
    recipes: Annotated[
        list[str] | None,
        typer.Option("--format", help="Ours beside BF16: weights or weights:activations; repeatable."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences decoded at once, separated by commas.")] = "1,32",
    layers: Annotated[int | None, typer.Option(min=1, help="Build the model with this many layers at most.")] = None,
    parallel: Annotated[str, typer.Option(help="Under torchrun: same or data, sequences of its own on each rank.")] = (
        "same"
    ),
    device: Device = None,
) -> Report:
    """Time decode steps of a whole model with random weights, our experts beside those of transformers."""
    from .commands.bench_model import RECIPES, bench_model

    if parallel not in ("same", "data"):
        raise InputError(f"--parallel {parallel!r}: allowed are same (every rank decodes the same sequences) and data")
    with joined(os.environ, device, same_tokens=parallel == "same") as place, bar("bench-model") as progress:
        return bench_model(
            what,
            [_recipe(recipe) for recipe in recipes or []] or RECIPES,
            batches=_numbers("--batches", batches, int),
            layers=layers,
            device=place,
            progress=progress,
        )


@app.command()
@prints(printing.print_tuning)
def tune(
    what: Annotated[str, typer.Argument(help="dsv3, v4_flash, gptoss120b, qwen3_30b, HxIxExK, or a model's folder.")],
    recipe: Annotated[str, typer.Option("--format", help="weights or weights:activations, such as mxfp4.")] = "bf16",
    tokens: Annotated[str | None, typer.Option(help="Token counts; powers of two up to 8192 when left out.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Tiles tried for each product and token count.")] = 8,
    device: Device = None,
) -> Report:
    """Measure the tiles of one layer on this GPU and keep the best in your cache directory."""
    from .commands.tune import TUNED_TOKENS, tune

    with bar("tune") as progress:
        return tune(
            what,
            _recipe(recipe),
            tokens=TUNED_TOKENS if tokens is None else _numbers("--tokens", tokens, int),
            most=most,
            device=device,
            progress=progress,
        )


@app.command()
@prints(printing.print_conversion)
def quantize(
    model: Model,
    to: Annotated[str, typer.Option(help="Weight format of the experts to write.")],
    target: Annotated[str | None, typer.Option("--out", help="New folder; MODEL-FORMAT when left out.")] = None,
) -> Report:
    """Write a checkpoint with its experts in another format; all else is copied. The folder appears when complete."""
    from .commands.quantize import quantize_model

    with bar("quantize") as progress:
        return quantize_model(model, to, target, progress=progress)


@app.command()
@prints(printing.print_proofs, together=True)
def verify(
    model: Model,
    experts: Annotated[int, typer.Option(min=1, help="Experts of each layer to recompute.")] = 8,
    every: Annotated[bool, typer.Option("--all", help="Recompute every expert.")] = False,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    weight_format: Format = None,
) -> Report:
    """Recompute experts as they run here beside plain FP32 code; exit code 1 when one is over tolerance.

    Under torchrun every rank recomputes experts that it holds.
    """
    from .commands.verify import verify_model

    with joined(os.environ, device, same_tokens=False) as place, bar("verify") as progress:
        return verify_model(
            model,
            experts=None if every else experts,
            device=place,
            force=Choice(kernel=kernel, activation_format=activations),
            weight_format=weight_format,
            progress=progress,
        )


@balance.command()
@prints(printing.print_load)
def record(
    model: Model,
    target: Annotated[str, typer.Option("--out", help="File to write the trace to.")],
    text: Annotated[str | None, typer.Option(help="Text to run; heldout.txt of the model when left out.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step, which is one forward pass.")] = 256,
    steps: Steps = None,
    device: Device = None,
) -> Report:
    """Run a model over a text and write which experts its tokens went to, step by step."""
    from .commands.balance import record_load

    with bar("record") as progress:
        return record_load(model, target, text=text, tokens=tokens, steps=steps, device=device, progress=progress)


@balance.command()
@prints(printing.print_simulation)
def simulate(
    trace: Trace,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks that split the experts.")] = 4,
    replicas: Annotated[str, typer.Option(help="Slots of a layer beyond one an expert; several with commas.")] = "0",
    policy: Annotated[str, typer.Option(help="greedy or least_moves.")] = "greedy",
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of the ranks; groups of experts stay on one.")] = 1,
    picture: Annotated[str | None, typer.Option(help="Draw balancedness before and after into this PNG.")] = None,
) -> Report:
    """Let a policy place experts for the first half of a trace, and judge it on both halves."""
    from .commands.balance import simulate_file
    from .commands.picture import check_picture, plot_simulation

    if picture is not None:
        check_picture(picture, "--picture")
    counts = _numbers("--replicas", replicas, int, least=0)
    report = simulate_file(trace, ranks, counts, policy=policy, hosts=hosts)
    if picture is not None:
        plot_simulation(report, picture)
    return report


@balance.command()
@prints(printing.print_load)
def heatmap(
    trace: Trace, target: Annotated[str, typer.Option("--out", help="Draw layers by experts into this PNG.")]
) -> Report:
    """Draw the load of every expert of every layer, and say which are hottest and coldest."""
    from .balance.load import LoadTrace
    from .commands.balance import look_at_load
    from .commands.picture import check_picture, plot_load

    check_picture(target, "--out")
    report = look_at_load(trace)
    plot_load(LoadTrace.open(trace), target)
    return report


def main() -> None:
    """Run the command; what the library or the machine refuses becomes one message and exit code 1."""
    try:
        app()
    except CollegiumError as error:
        _complain(type(error).__name__, str(error))
    except OSError as error:
        if error.errno == EPIPE:  # whoever read the output has what they wanted
            os._exit(0)
        _complain(type(error).__name__, _one_line(error))
    except MemoryError as error:
        _complain("MemoryError", f"{_one_line(error) or 'no memory is left'}; close other programs or ask for less")
    except RuntimeError as error:
        # torch.OutOfMemoryError on a GPU; on a CPU it is a plain RuntimeError of the allocator.
        if "out of memory" not in str(error).lower() and "can't allocate memory" not in str(error):
            raise
        _complain("MemoryError", f"{_one_line(error)}; close other programs or ask for less")


def _complain(kind: str, text: str) -> NoReturn:
    several = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"rank {os.environ['RANK']}: " if several else ""
    # In one piece, as other ranks write too.
    printing.err.print(Text.assemble(who, (kind, "bold red"), ": ", text), soft_wrap=True)
    sys.exit(1)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _numbers(option: str, text: str, kind: type[N], *, least: int | None = None) -> list[N]:
    try:
        found = [kind(piece) for piece in text.split(",")]
    except ValueError as error:
        raise InputError(f"{option} {text!r}: numbers separated by commas are needed") from error
    if not all(number > 0 if least is None else number >= least for number in found):
        allowed = "positive" if least is None else f"at least {least}"
        raise InputError(f"{option} {text!r}: every number must be {allowed}")
    return found


def _recipe(text: str) -> tuple[str, str]:
    """Return the formats that ``weights[:activations]`` names; raises SpecError and InputError for unknown ones."""
    from .commands.bench import recipe_of
    from .formats import by_name
    from .ops.quantize import activation_format

    weights, activations = recipe_of(text)
    return by_name(weights).name, activation_format(activations).name


def _ceilings(text: str) -> Ceilings:
    from .commands.measure import Ceilings

    given = _numbers("--ceilings", text, float)
    if len(given) != 3:
        raise InputError(f"--ceilings {text!r}: three numbers are needed, such as 4.6,797,1329")
    return Ceilings(bandwidth=given[0] * 1e12, rate_16=given[1] * 1e12, rate_8=given[2] * 1e12)
