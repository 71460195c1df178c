"""Options shared by several commands, and parsers for their values. Torch is imported only when a value is parsed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ..errors import InputError
from ..locate import SHIPPED, cached_ids, locate
from .terminal import shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from .measure import Ceilings

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PROMPT",
    "FORMATS",
    "HELP",
    "KERNELS",
    "Activations",
    "Adapters",
    "Device",
    "Download",
    "Dummy",
    "Format",
    "GpuMemory",
    "Kernel",
    "Model",
    "Prompts",
    "ShapeOrModel",
    "Steps",
    "Trace",
    "UnequalScales",
    "WholeModel",
    "WrittenFormat",
    "ceilings_of",
    "comma_separated",
    "complete_model",
    "find_model",
    "formats_of",
]

HELP = {"help_option_names": ["-h", "--help"]}
N = TypeVar("N", int, float)
# Literal lists: looking the values up would import torch, which takes a second. A test keeps them in sync.
FORMATS = "bf16, fp16, fp32, fp8_block, fp8_tensor, fp8_channel, mxfp8, mxfp4, nvfp4 or int4_group"
ACTIVATIONS = (
    "fp32, bf16, fp16, fp8_group128, fp8_group128_pow2, fp8_group128_e8m0, fp8_token, fp8_static, mxfp8, nvfp4, "
    "nvfp4_static or nvfp4_expert"
)
UNEQUAL_SCALES = "refuse or largest"
KERNELS = (
    "triton_fp8, triton_w4a8, triton_w4a16, triton_w8a16, triton_bf16, triton_fp32, cpu_fused, cpu_grouped or reference"
)


def complete_model(incomplete: str) -> list[str]:
    """Return the model names that start with ``incomplete``: the bundled model and the Hugging Face cache."""
    return [name for name in (SHIPPED, *cached_ids()) if name.startswith(incomplete)]


def _complete(values: str) -> Callable[[str], list[str]]:
    """Return a completion function for ``values``, a list as written in the help text."""
    names = values.replace(" or ", ", ").split(", ")

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


Device = Annotated[
    str | None,
    typer.Option(autocompletion=_complete("cpu, cuda"), help="cpu or cuda. Default: cuda if available."),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", autocompletion=_complete(FORMATS), help=f"Convert the experts to this format on loading: {FORMATS}."
    ),
]
DEFAULT_PROMPT = "Once upon a time"
Prompts = Annotated[
    list[str] | None,
    typer.Option(help=f"Text to continue; repeatable with several adapters. Default: {DEFAULT_PROMPT}."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        autocompletion=complete_model,
        help="Folder or Hub id of a PEFT LoRA adapter. One is merged while loading. Several stay separate: each "
        "continues the prompt, or with as many prompts, the first continues the first prompt, and so on.",
    ),
]
WrittenFormat = Annotated[
    str, typer.Option(autocompletion=_complete(FORMATS), help=f"Target weight format of the experts: {FORMATS}.")
]
Kernel = Annotated[
    str | None,
    typer.Option(
        autocompletion=_complete(KERNELS), help=f"Use this experts kernel, or fail if it cannot run: {KERNELS}."
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(autocompletion=_complete(ACTIVATIONS), help=f"Use this activation format, or fail: {ACTIVATIONS}."),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="GPU memory for the experts of all layers, such as 24GiB or 900MB; experts beyond it stay in host memory "
        "and are copied when needed. Default: all experts are on the GPU."
    ),
]
UnequalScales = Annotated[
    str | None,
    typer.Option(
        autocompletion=_complete(UNEQUAL_SCALES),
        help="Where gate and up of an expert have different calibrated activation scales: refuse (default) or largest.",
    ),
]
MODEL_HELP = (
    "Folder with config.json and safetensors files, GGUF file, fables-16m (the bundled model), or Hugging Face Hub id "
    "(org/name or org/name@revision). An existing path takes precedence."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=complete_model)]
Download = Annotated[
    bool, typer.Option("--download", help="Download missing files (safetensors, JSON, tokenizer) from the Hub.")
]
Dummy = Annotated[
    bool, typer.Option("--dummy", help="Use random weights: only config.json and the tokenizer are read.")
]
ShapeOrModel = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_model,
        help="Layer shape: dsv3, v4_flash, gptoss120b, qwen3_30b, HxIxExK, or a model folder or id.",
    ),
]
WholeModel = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_model,
        help="qwen3_30b, gpt_oss_20b, or the folder or id of a model that transformers supports.",
    ),
]
Trace = Annotated[str, typer.Argument(help="Trace file written by `collegium balance record`.")]
Steps = Annotated[int | None, typer.Option(min=2, help="Stop after this many steps.")]


def find_model(name: str, download: bool, *, weights: bool = True) -> str:
    """Return the folder or file of a model, as ``locate`` finds it; an existing path is returned unchanged.

    weights: False for commands that read only config.json. Only the first rank shows progress, and not with ``--json``.
    """
    path = locate(name, download=download, weights=weights, progress=shows_progress())
    return name if path == Path(name) else str(path)


def comma_separated(option: str, text: str, kind: type[N], *, minimum: int | None = None) -> list[N]:
    """Parse comma-separated numbers, each positive or at least ``minimum``; raises InputError naming ``option``."""
    try:
        numbers = [kind(piece) for piece in text.split(",")]
    except ValueError as error:
        raise InputError(f"{option} {text!r}: numbers separated by commas are needed") from error
    if minimum is None:
        valid = all(number > 0 for number in numbers)
        requirement = "positive"
    else:
        valid = all(number >= minimum for number in numbers)
        requirement = f"at least {minimum}"
    if not valid:
        raise InputError(f"{option} {text!r}: every number must be {requirement}")
    return numbers


def formats_of(text: str) -> tuple[str, str]:
    """Parse ``weights[:activations]`` into two format names; raises SpecError and InputError for unknown names."""
    from ..formats import by_name
    from ..ops.quantize import activation_format
    from .bench import recipe_of

    weights, activations = recipe_of(text)
    return by_name(weights).name, activation_format(activations).name


def ceilings_of(text: str) -> Ceilings:
    """Parse the hardware limits given as three numbers, in the units of ``--help``; raises InputError."""
    from .measure import Ceilings

    numbers = comma_separated("--ceilings", text, float)
    if len(numbers) != 3:
        raise InputError(f"--ceilings {text!r}: three numbers are needed, such as 4.6,797,1329")
    return Ceilings(bandwidth=numbers[0] * 1e12, rate_16=numbers[1] * 1e12, rate_8=numbers[2] * 1e12)
