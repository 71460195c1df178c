"""The command ``collegium``: what it does is in ``--help``. Thin: it parses, calls the library and prints.

What needs torch is imported by the command that runs: help and mistakes of a command line do not wait for it.
"""

from . import interrupt_hook, interrupts

# isort: split
import atexit
import gc
import os
import sys
from errno import EPIPE
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .commands import printing
from .commands.options import (
    HELP,
    Activations,
    Device,
    Download,
    Format,
    Kernel,
    Model,
    ShapeOrModel,
    Steps,
    Trace,
    WholeModel,
    WrittenFormat,
    ceilings_of,
    comma_separated_ints,
    complete_model,
    find_model,
    formats_of,
)
from .commands.terminal import Report, asks_json, bar, complain, one_line, prints, show_anything
from .errors import CollegiumError, InputError
from .locate import SHIPPED
from .problem import Limits, Overrides

__all__ = ["app", "main"]

assert interrupt_hook  # imported first: Ctrl-C during the imports above is one line too

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP)
balance = typer.Typer(
    help="Load of experts: record it, see it, and simulate what moving experts would do.",
    no_args_is_help=True,
    context_settings=HELP,
)
app.add_typer(balance, name="balance")
_USAGE: Any = typer.BadParameter.__bases__[0]  # the parser's error of any command line, which has no public name


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"collegium {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Run Mixture-of-Experts checkpoints in the format they were published in."""


@app.command()
@prints(printing.print_demo)
def demo(
    model: Annotated[
        str, typer.Option(autocompletion=complete_model, help="Folder or id of a model; the shipped one when left out.")
    ] = SHIPPED,
    device: Device = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens written in each format.")] = 32,
    download: Download = False,
) -> Report:
    """Run the shipped model in every format: bytes, perplexity, error, speed, and a few sentences."""
    from .commands.demo import run_demo

    folder = Path(find_model(model, download))
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
    adapter: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_model, help="Folder or id of a LoRA adapter of PEFT, merged as it is read."
        ),
    ] = None,
    weight_format: Format = None,
    kernel: Kernel = None,
    activations: Activations = None,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Write text: transformers runs everything but the experts, which run through Collegium.

    Under torchrun every rank holds a part of the experts.
    """
    from .runtime.cuda_context import start_context

    if "RANK" not in os.environ:  # ranks of torchrun choose their device later
        start_context(device)  # while transformers is imported
    from .commands.generate import Writer, check_writable, prompt_limits
    from .integrations.transformers import layers_of, load_model
    from .parallel.torchrun import joined
    from .runtime.warm_up import warm_up

    if not -(1 << 63) <= seed < 1 << 63:
        raise InputError(f"--seed: found {seed}, allowed are whole numbers of 64 bits")
    checkpoint = check_writable(find_model(model, download))
    adapter = None if adapter is None else find_model(adapter, download)
    # Bytes that the locale does not know are those of UTF-8, or nobody's.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    limits = prompt_limits(checkpoint.path, prompt)
    with joined(os.environ, device, same_tokens=True) as place:
        with bar("loading") as progress:
            wishes: Any = {"weight_format": weight_format, "limits": limits, "adapter": adapter}
            wishes["overrides"] = Overrides(kernel=kernel, activation_format=activations)
            loaded = load_model(checkpoint, device=place, progress=progress, **wishes)
        writer = Writer(loaded, checkpoint.path)
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
    download: Download = False,
) -> Report:
    """Say what a checkpoint holds (formats, sizes, audit) and what would run it here and why."""
    from .commands.inspect import inspect_model

    folder = find_model(model, download)
    with bar("audit") as progress:
        return inspect_model(folder, deep=deep, device=device, progress=progress)


@app.command()
@prints(printing.print_plan)
def plan(
    model: Model,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    weight_format: Format = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one forward pass.")] = 8192,
    download: Download = False,
) -> Report:
    """Plan one MoE layer from config.json alone: kernel, formats, bytes, and why the others were refused.

    --device also takes a100, h100, h200, b200, l40s and rtx4090: a machine that is not here.
    """
    from .commands.inspect import plan_model

    return plan_model(
        find_model(model, download, weights=False),
        device=device,
        overrides=Overrides(kernel=kernel, activation_format=activations),
        weight_format=weight_format,
        limits=Limits(max_tokens=max_tokens),
    )


@app.command()
@prints(printing.print_bench)
def bench(
    what: ShapeOrModel,
    recipes: Annotated[
        list[str] | None, typer.Option("--format", help="weights or weights:activations, such as mxfp4; repeatable.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Token counts, separated by commas; up to 512 on a CPU, 8192 on a GPU if left out."),
    ] = None,
    routing: Annotated[str, typer.Option(help="uniform, zipf, hot (one expert) or half (half empty).")] = "uniform",
    device: Device = None,
    ceilings: Annotated[
        str | None, typer.Option(help="TB/s,TFLOP/s of 16 bits,TFLOP/s of 8 bits; measured when left out.")
    ] = None,
    picture: Annotated[str | None, typer.Option("--plot", help="Draw latency and roofline into this PNG.")] = None,
    download: Download = False,
) -> Report:
    """Time one MoE layer on random weights, beside the least this machine could take; wrong results get no time."""
    from .commands.bench import bench
    from .commands.plot import check_picture, draw_bench, save_picture

    if picture is not None:
        check_picture(picture)
    shape = find_model(what, download, weights=False)
    with bar("bench") as progress:
        report = bench(
            shape,
            [formats_of(recipe) for recipe in recipes or ["bf16"]],
            tokens=None if tokens is None else comma_separated_ints("--tokens", tokens, int),
            routing=routing,
            device=device,
            ceilings=None if ceilings is None else ceilings_of(ceilings),
            progress=progress,
        )
    if picture is not None:
        save_picture(picture, draw_bench, report)
    return report


@app.command()
@prints(printing.print_model_bench, together=True)
def bench_model(
    what: WholeModel,
    recipes: Annotated[
        list[str] | None, typer.Option("--format", help="Ours beside BF16: weights or weights:activations; repeatable.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences decoded at once, separated by commas.")] = "1,32",
    layers: Annotated[int | None, typer.Option(min=1, help="Build the model with this many layers at most.")] = None,
    parallel: Annotated[str, typer.Option(help="Under torchrun: same or data, sequences of its own on each rank.")] = (
        "same"
    ),
    device: Device = None,
    download: Download = False,
) -> Report:
    """Time decode steps of a whole model with random weights, our experts beside those of transformers."""
    from .commands.bench_model import RECIPES, bench_model
    from .parallel.torchrun import joined

    if parallel not in ("same", "data"):
        raise InputError(f"--parallel {parallel!r}: allowed are same (every rank decodes the same sequences) and data")
    model = find_model(what, download, weights=False)
    with joined(os.environ, device, same_tokens=parallel == "same") as place, bar("bench-model") as progress:
        return bench_model(
            model,
            [formats_of(recipe) for recipe in recipes or []] or RECIPES,
            batches=comma_separated_ints("--batches", batches, int),
            layers=layers,
            device=place,
            progress=progress,
        )


@app.command()
@prints(printing.print_tuning)
def tune(
    what: ShapeOrModel,
    recipe: Annotated[str, typer.Option("--format", help="weights or weights:activations, such as mxfp4.")] = "bf16",
    tokens: Annotated[str | None, typer.Option(help="Token counts; powers of two up to 8192 when left out.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Tiles tried for each product and token count.")] = 8,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Measure the tiles of one layer on this GPU and keep the best in your cache directory."""
    from .commands.tune import TUNED_TOKENS, tune

    shape = find_model(what, download, weights=False)
    with bar("tune") as progress:
        return tune(
            shape,
            formats_of(recipe),
            tokens=TUNED_TOKENS if tokens is None else comma_separated_ints("--tokens", tokens, int),
            most=most,
            device=device,
            progress=progress,
        )


@app.command()
@prints(printing.print_conversion)
def quantize(
    model: Model,
    to: WrittenFormat,
    target: Annotated[str | None, typer.Option("--out", help="New folder; MODEL-FORMAT when left out.")] = None,
    download: Download = False,
) -> Report:
    """Write a checkpoint with its experts in another format; all else is copied. The folder appears when complete."""
    from .commands.quantize import quantize_model

    folder = find_model(model, download)
    if target is None and folder != model:
        target = f"{Path(model).name}-{to}"  # into the current folder, neither the cache nor the package
    with bar("quantize") as progress:
        return quantize_model(folder, to, target, progress=progress)


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
    download: Download = False,
) -> Report:
    """Recompute experts as they run here beside plain FP32 code; exit code 1 when one is over tolerance.

    Under torchrun every rank recomputes experts that it holds.
    """
    from .commands.verify import verify_model
    from .parallel.torchrun import joined

    folder = find_model(model, download)
    with joined(os.environ, device, same_tokens=False) as place, bar("verify") as progress:
        return verify_model(
            folder,
            experts=None if every else experts,
            device=place,
            overrides=Overrides(kernel=kernel, activation_format=activations),
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
    download: Download = False,
) -> Report:
    """Run a model over a text and write which experts its tokens went to, step by step."""
    from .commands.balance import record_load

    folder = find_model(model, download)
    with bar("record") as progress:
        return record_load(folder, target, text=text, tokens=tokens, steps=steps, device=device, progress=progress)


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
    from .balance.plots import draw_simulation
    from .balance.report import simulate_file
    from .commands.plot import check_picture, save_picture

    if picture is not None:
        check_picture(picture, "--picture")
    report = simulate_file(
        trace, ranks, comma_separated_ints("--replicas", replicas, int, least=0), policy=policy, hosts=hosts
    )
    if picture is not None:
        save_picture(picture, draw_simulation, report)
    return report


@balance.command()
@prints(printing.print_load)
def heatmap(
    trace: Trace, target: Annotated[str, typer.Option("--out", help="Draw layers by experts into this PNG.")]
) -> Report:
    """Draw the load of every expert of every layer, and say which are hottest and coldest."""
    from .balance.load import LoadTrace
    from .balance.plots import draw_load
    from .balance.report import look_at_load
    from .commands.plot import check_picture, save_picture

    check_picture(target, "--out")
    report = look_at_load(trace)
    save_picture(target, draw_load, LoadTrace.open(trace))
    return report


def _collect_rarely() -> None:
    """Let Python look for reference cycles 70 times less often, and not at all at exit.

    Torch and transformers make 600,000 objects while they are imported, and none of them is garbage: looking at them
    again and again is a quarter of the import, and at exit another second.
    """
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)


def main() -> None:
    """Run the command; what the library or the machine refuses becomes one message and exit code 1."""
    _collect_rarely()
    show_anything()
    with interrupts.one_interrupt():
        try:
            _run()
        except BaseException as error:
            # Half an import, or a pool of threads that is torn down, raises anything.
            if interrupts.interrupted() or isinstance(error, KeyboardInterrupt | typer.Abort):
                complain("Interrupted", interrupts.TEXT, code=interrupts.EXIT_CODE)
            raise


def _run() -> None:
    try:
        # What a command line lacks is told by the parser, in its own words, unless JSON is wanted.
        sys.exit(app(prog_name="collegium", standalone_mode=not asks_json()))
    except typer.Abort:
        raise
    except _USAGE as error:
        complain("UsageError", error.format_message(), code=error.exit_code)
    except CollegiumError as error:
        complain(type(error).__name__, str(error))
    except OSError as error:
        if error.errno == EPIPE:  # whoever read the output has what they wanted
            os._exit(0)
        complain(type(error).__name__, one_line(error))
    except MemoryError as error:
        complain("MemoryError", f"{one_line(error) or 'no memory is left'}; close other programs or ask for less")
    except RuntimeError as error:
        # torch.OutOfMemoryError on a GPU; on a CPU it is a plain RuntimeError of the allocator.
        if "out of memory" not in str(error).lower() and "can't allocate memory" not in str(error):
            raise
        complain("MemoryError", f"{one_line(error)}; close other programs or ask for less")
