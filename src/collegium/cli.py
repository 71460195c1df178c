"""The command line ``collegium``: parse options, call the library, print the report.

Each command imports what needs torch when it runs, so that help and usage errors are fast.
"""

from . import interrupt_hook, interrupts

# isort: split
import atexit
import gc
import os
import sys
from errno import EPIPE
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

from . import __version__
from .commands import printing
from .commands.options import (
    DEFAULT_PROMPT,
    HELP,
    Activations,
    Adapters,
    Device,
    Download,
    Dummy,
    Format,
    GpuMemory,
    Kernel,
    Model,
    Prompts,
    ShapeOrModel,
    Steps,
    Trace,
    UnequalScales,
    WholeModel,
    WrittenFormat,
    ceilings_of,
    comma_separated,
    complete_model,
    find_model,
    formats_of,
)
from .commands.terminal import (
    Report,
    exit_with_error,
    one_line,
    prints,
    progress_bar,
    tolerate_any_output,
    wants_json,
)
from .errors import CollegiumError, InputError
from .locate import SHIPPED
from .problem import Limits, Overrides

__all__ = ["app", "main", "run_process"]

assert interrupt_hook  # imported first: Ctrl-C during the imports above prints one line too

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP)
balance = typer.Typer(
    help="Record the load of experts, draw it, and simulate moving experts between ranks.",
    no_args_is_help=True,
    context_settings=HELP,
)
app.add_typer(balance, name="balance")
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # base class of all parser errors; it has no public name


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"collegium {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run Mixture-of-Experts checkpoints in the format they were published in."""


@app.command()
@prints(printing.print_demo)
def demo(
    model: Annotated[
        str, typer.Option(autocompletion=complete_model, help="Model folder or Hub id. Default: the bundled model.")
    ] = SHIPPED,
    device: Device = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each format.")] = 32,
    download: Download = False,
) -> Report:
    """Compare weight formats on the bundled model: size, perplexity, error, speed and sample text."""
    from .commands.demo import run_demo

    folder = Path(find_model(model, download))
    with progress_bar("demo") as progress:
        return run_demo(folder, device=device, tokens=tokens, progress=progress)


@app.command()
@prints(printing.print_texts, on_ranks=True)
def generate(
    model: Model,
    prompt: Prompts = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 0,
    penalty: Annotated[
        float, typer.Option(min=1.0, help="Repetition penalty, applied to logits of earlier tokens; 1 is off.")
    ] = 1.0,
    adapter: Adapters = None,
    weight_format: Format = None,
    kernel: Kernel = None,
    activations: Activations = None,
    unequal_scales: UnequalScales = None,
    dummy: Dummy = False,
    gpu_memory: GpuMemory = None,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Generate text with transformers; Collegium runs the experts.

    Under torchrun the experts are split across the ranks.
    """
    from .runtime.cuda_context import start_context

    if "RANK" not in os.environ:  # under torchrun each rank chooses its device later
        start_context(device)  # in parallel with the import of transformers
    from .commands.generate import Writer, check_seed, check_writable, prompt_limits, prompts_of
    from .integrations.transformers import layers_of, load_model
    from .parallel.torchrun import process_group
    from .runtime.warm_up import warm_up

    check_seed(seed)
    checkpoint = check_writable(find_model(model, download, weights=not dummy), dummy=dummy)
    adapters = [find_model(path, download) for path in adapter or ()]
    texts = prompts_of(prompt or [DEFAULT_PROMPT], adapters)
    limits = prompt_limits(checkpoint, texts, gpu_memory)
    overrides = Overrides(kernel=kernel, activation_format=activations, unequal_scales=cast("Any", unequal_scales))
    with process_group(os.environ, device, same_tokens=True) as place:
        with progress_bar("loading") as progress:
            loaded = load_model(
                checkpoint,
                weight_format=weight_format,
                overrides=overrides,
                device=place,
                limits=limits,
                adapter=adapters[0] if len(adapters) == 1 else None,
                adapters=adapters if len(adapters) > 1 else (),
                progress=progress,
                weights="dummy" if dummy else "files",
            )
        writer = Writer(loaded, checkpoint.path)
        with progress_bar("compiling") as progress:
            warm_up(layers_of(loaded), progress)
            progress(1, 1, "the rest of the model")
            writer.write(texts[0], min(tokens, 4), penalty=penalty)
        options: Any = {"temperature": temperature, "seed": seed, "penalty": penalty}
        if len(adapters) > 1:
            return writer.write_with_adapters(texts, tokens, adapters, **options)
        return writer.write(texts[0], tokens, **options)


@app.command()
@prints(printing.print_inspection)
def inspect(
    model: Model,
    deep: Annotated[
        bool, typer.Option(help="Read and check every scale; --no-deep reads only the file headers.")
    ] = True,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Show a checkpoint's formats, sizes and audit, and the plan that would run it on this machine."""
    from .commands.inspect import inspect_model

    folder = find_model(model, download)
    with progress_bar("audit") as progress:
        return inspect_model(folder, deep=deep, device=device, progress=progress)


@app.command()
@prints(printing.print_plan)
def plan(
    model: Model,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    weight_format: Format = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per forward pass.")] = 8192,
    gpu_memory: GpuMemory = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Trace of `collegium balance record`, for the misses to expect with --gpu-memory."),
    ] = None,
    download: Download = False,
) -> Report:
    """Plan one MoE layer from config.json: kernel, formats, memory, and why other kernels were refused.

    --device also accepts a100, h100, h200, b200, l40s and rtx4090: plan for a GPU that this machine does not have.
    """
    from .commands.inspect import plan_model

    return plan_model(
        find_model(model, download, weights=False),
        device=device,
        overrides=Overrides(kernel=kernel, activation_format=activations),
        weight_format=weight_format,
        limits=Limits(max_tokens=max_tokens),
        gpu_memory=gpu_memory,
        trace=trace,
    )


@app.command()
@prints(printing.print_bench)
def bench(
    what: ShapeOrModel,
    recipes: Annotated[
        list[str] | None,
        typer.Option("--format", help="Format to measure, as weights or weights:activations; repeatable."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Comma-separated token counts. Default: up to 512 on a CPU, up to 8192 on a GPU."),
    ] = None,
    routing: Annotated[
        str, typer.Option(help="Routing: uniform, zipf, hot (one expert gets every token) or half (half get none).")
    ] = "uniform",
    device: Device = None,
    ceilings: Annotated[
        str | None,
        typer.Option(help="Hardware limits as TB/s,16-bit TFLOP/s,8-bit TFLOP/s. Default: measured."),
    ] = None,
    picture: Annotated[str | None, typer.Option("--plot", help="Plot latency and roofline to this PNG file.")] = None,
    download: Download = False,
) -> Report:
    """Benchmark one MoE layer with random weights against the hardware limits; outputs are checked first."""
    from .commands.bench import bench
    from .commands.plot import check_picture, draw_bench, save_picture

    if picture is not None:
        check_picture(picture)
    shape = find_model(what, download, weights=False)
    with progress_bar("bench") as progress:
        report = bench(
            shape,
            [formats_of(recipe) for recipe in recipes or ["bf16"]],
            tokens=None if tokens is None else comma_separated("--tokens", tokens, int),
            routing=routing,
            device=device,
            ceilings=None if ceilings is None else ceilings_of(ceilings),
            progress=progress,
        )
    if picture is not None:
        save_picture(picture, draw_bench, report)
    return report


@app.command()
@prints(printing.print_model_bench, on_ranks=True)
def bench_model(
    what: WholeModel,
    recipes: Annotated[
        list[str] | None,
        typer.Option("--format", help="Format to compare with BF16, as weights or weights:activations; repeatable."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes, in sequences.")] = "1,32",
    layers: Annotated[int | None, typer.Option(min=1, help="Build at most this many layers of the model.")] = None,
    parallel: Annotated[
        str,
        typer.Option(help="Under torchrun: same (all ranks decode the same sequences) or data (each rank its share)."),
    ] = "same",
    device: Device = None,
    download: Download = False,
) -> Report:
    """Benchmark decode steps of a whole model with random weights, with Collegium's and transformers' experts."""
    from .commands.bench_model import RECIPES, bench_model
    from .parallel.torchrun import process_group

    if parallel not in ("same", "data"):
        raise InputError(f"--parallel {parallel!r}: allowed are same (every rank decodes the same sequences) and data")
    model = find_model(what, download, weights=False)
    with (
        process_group(os.environ, device, same_tokens=parallel == "same") as place,
        progress_bar("bench-model") as progress,
    ):
        return bench_model(
            model,
            [formats_of(recipe) for recipe in recipes or []] or RECIPES,
            batches=comma_separated("--batches", batches, int),
            layers=layers,
            device=place,
            progress=progress,
        )


@app.command()
@prints(printing.print_tuning)
def tune(
    what: ShapeOrModel,
    recipe: Annotated[
        str, typer.Option("--format", help="Format to tune, as weights or weights:activations.")
    ] = "bf16",
    tokens: Annotated[
        str | None, typer.Option(help="Comma-separated token counts. Default: powers of two up to 8192.")
    ] = None,
    candidates: Annotated[
        int, typer.Option(min=1, help="Maximum tile sizes to measure per matrix product and token count.")
    ] = 8,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Measure tile sizes for one layer on this GPU and save the fastest in the cache directory."""
    from .commands.tune import TUNED_TOKENS, tune

    shape = find_model(what, download, weights=False)
    with progress_bar("tune") as progress:
        return tune(
            shape,
            formats_of(recipe),
            tokens=TUNED_TOKENS if tokens is None else comma_separated("--tokens", tokens, int),
            candidates=candidates,
            device=device,
            progress=progress,
        )


@app.command()
@prints(printing.print_conversion)
def quantize(
    model: Model,
    to: WrittenFormat,
    target: Annotated[str | None, typer.Option("--out", help="Output folder. Default: MODEL-FORMAT.")] = None,
    download: Download = False,
) -> Report:
    """Convert the experts of a checkpoint to another format and copy all other tensors unchanged."""
    from .commands.quantize import quantize_model

    folder = find_model(model, download)
    if target is None and folder != model:
        target = f"{Path(model).name}-{to}"  # in the current folder, not in the cache or the package
    with progress_bar("quantize") as progress:
        return quantize_model(folder, to, target, progress=progress)


@app.command()
@prints(printing.print_calibration)
def calibrate(
    model: Model,
    text: Annotated[str | None, typer.Option(help="Text file to run. Default: heldout.txt of the model.")] = None,
    target: Annotated[str | None, typer.Option("--out", help="Output folder. Default: MODEL-calibrated.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per step (one forward pass).")] = 256,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps.")] = None,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Find the activation scales of a checkpoint in FP8 or NVFP4 from a text, and write the checkpoint with them."""
    from .commands.calibrate import calibrate_model

    folder = find_model(model, download)
    if target is None and folder != model:
        target = f"{Path(model).name}-calibrated"  # in the current folder, not in the cache or the package
    with progress_bar("calibrate") as progress:
        return calibrate_model(folder, text, target, tokens=tokens, steps=steps, device=device, progress=progress)


@app.command()
@prints(printing.print_verification, on_ranks=True, passed=lambda report: report.passed)
def verify(
    model: Model,
    experts: Annotated[int, typer.Option(min=1, help="Experts to check per layer.")] = 8,
    every: Annotated[bool, typer.Option("--all", help="Check every expert.")] = False,
    device: Device = None,
    kernel: Kernel = None,
    activations: Activations = None,
    unequal_scales: UnequalScales = None,
    weight_format: Format = None,
    download: Download = False,
) -> Report:
    """Check the experts' outputs on this machine against independent reference code; exit with 1 on a failure.

    Under torchrun each rank checks its local experts.
    """
    from .commands.verify import verify_model
    from .parallel.torchrun import process_group

    overrides = Overrides(kernel=kernel, activation_format=activations, unequal_scales=cast("Any", unequal_scales))
    folder = find_model(model, download)
    with process_group(os.environ, device, same_tokens=False) as place, progress_bar("verify") as progress:
        return verify_model(
            folder,
            experts=None if every else experts,
            device=place,
            overrides=overrides,
            weight_format=weight_format,
            progress=progress,
        )


@balance.command()
@prints(printing.print_load)
def record(
    model: Model,
    target: Annotated[str, typer.Option("--out", help="Output file for the trace.")],
    text: Annotated[str | None, typer.Option(help="Text file to run. Default: heldout.txt of the model.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per step (one forward pass).")] = 256,
    steps: Steps = None,
    device: Device = None,
    download: Download = False,
) -> Report:
    """Run a model on a text and record how many tokens each expert receives in each step."""
    from .commands.balance import record_load

    folder = find_model(model, download)
    with progress_bar("record") as progress:
        return record_load(folder, target, text=text, tokens=tokens, steps=steps, device=device, progress=progress)


@balance.command()
@prints(printing.print_simulation)
def simulate(
    trace: Trace,
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 4,
    replicas: Annotated[
        str, typer.Option(help="Extra expert slots per layer, for replicas; comma-separated to compare several.")
    ] = "0",
    policy: Annotated[str, typer.Option(help="Placement policy: greedy or least_moves.")] = "greedy",
    hosts: Annotated[int, typer.Option(min=1, help="Number of hosts; a group of experts stays on one host.")] = 1,
    picture: Annotated[str | None, typer.Option(help="Plot balancedness before and after to this PNG file.")] = None,
) -> Report:
    """Place experts by the first half of a trace and report the balance of both halves."""
    from .balance.plots import draw_simulation
    from .balance.report import simulate_file
    from .commands.plot import check_picture, save_picture

    if picture is not None:
        check_picture(picture, "--picture")
    slots = comma_separated("--replicas", replicas, int, minimum=0)
    report = simulate_file(trace, ranks, slots, policy=policy, hosts=hosts)
    if picture is not None:
        save_picture(picture, draw_simulation, report)
    return report


@balance.command()
@prints(printing.print_load)
def heatmap(
    trace: Trace, target: Annotated[str, typer.Option("--out", help="Output PNG file: layers by experts.")]
) -> Report:
    """Plot the load of every expert in every layer and list the most and least loaded experts."""
    from .balance.load import LoadTrace
    from .balance.plots import draw_load
    from .balance.report import look_at_load
    from .commands.plot import check_picture, save_picture

    check_picture(target, "--out")
    report = look_at_load(trace)
    save_picture(target, draw_load, LoadTrace.open(trace))
    return report


def _collect_rarely() -> None:
    """Run the cycle collector 70 times less often.

    Importing torch and transformers creates 600,000 objects, none of them garbage; scanning them takes a quarter of the
    import time.
    """
    gc.set_threshold(50_000, 20, 50)


def main() -> None:
    """Run the command; an error of the library or the machine prints one message and exits with status 1."""
    _collect_rarely()
    tolerate_any_output()
    with interrupts.interrupt_once():
        try:
            _run()
        except BaseException as error:
            # An interrupted import or thread pool can raise any exception.
            if interrupts.was_interrupted() or isinstance(error, KeyboardInterrupt | typer.Abort):
                exit_with_error("Interrupted", interrupts.TEXT, code=interrupts.EXIT_CODE)
            raise


def run_process() -> None:
    """Run ``main`` as the whole process, which ends without the interpreter's shutdown.

    The shutdown would scan all objects for a second, and libraries would print which of them were left.
    """
    status = [1]  # of an exception, whose traceback Python prints
    # Registered before the functions of libraries, so that it runs after them.
    atexit.register(_end_process, status)
    try:
        main()
        status[0] = 0
    except SystemExit as error:
        status[0] = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        if interrupts.was_interrupted():
            _end_process([interrupts.EXIT_CODE])


def _end_process(status: list[int]) -> NoReturn:
    """Write what is left of the output, and end the process with the exit status in ``status``."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if error.errno != EPIPE:  # a closed pipe is no failure, a full disk is one
            status[0] = status[0] or 1
    os._exit(status[0])


def _run() -> None:
    try:
        # The parser prints usage errors itself, unless JSON was requested.
        sys.exit(app(prog_name="collegium", standalone_mode=not wants_json()))
    except typer.Abort:
        raise
    except _USAGE_ERROR as error:
        exit_with_error("UsageError", error.format_message(), code=error.exit_code)
    except CollegiumError as error:
        exit_with_error(type(error).__name__, str(error))
    except OSError as error:
        if error.errno == EPIPE:  # the reader closed the pipe, as head does
            os._exit(0)
        exit_with_error(type(error).__name__, one_line(error))
    except MemoryError as error:
        text = one_line(error) or "out of memory"
        exit_with_error("MemoryError", f"{text}; close other programs or request less")
    except RuntimeError as error:
        # torch.OutOfMemoryError on a GPU; on a CPU the allocator raises a plain RuntimeError.
        if "out of memory" not in str(error).lower() and "can't allocate memory" not in str(error):
            raise
        exit_with_error("MemoryError", f"{one_line(error)}; close other programs or request less")
