"""Options that several commands take, and what their texts mean. Nothing here needs torch until a text is read."""

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
    "FORMATS",
    "HELP",
    "KERNELS",
    "Activations",
    "Device",
    "Download",
    "Format",
    "Kernel",
    "Model",
    "ShapeOrModel",
    "Steps",
    "Trace",
    "WholeModel",
    "WrittenFormat",
    "ceilings_of",
    "comma_separated_ints",
    "complete_model",
    "find_model",
    "formats_of",
]

HELP = {"help_option_names": ["-h", "--help"]}
N = TypeVar("N", int, float)
# Their values are written out, as looking them up would take a second; a test compares them.
FORMATS = "bf16, fp16, fp32, fp8_block, fp8_tensor, fp8_channel, mxfp8, mxfp4, nvfp4 or int4_group"
ACTIVATIONS = (
    "fp32, bf16, fp16, fp8_group128, fp8_group128_pow2, fp8_group128_e8m0, fp8_token, fp8_static, mxfp8, nvfp4 or "
    "nvfp4_static"
)
KERNELS = "triton_fp8, triton_w4a8, triton_w4a16, triton_w8a16, triton_bf16, cpu_fused, cpu_grouped or reference"


def complete_model(incomplete: str) -> list[str]:
    """Return the names of models that begin so: the shipped one and those in the Hugging Face cache."""
    return [name for name in (SHIPPED, *cached_ids()) if name.startswith(incomplete)]


def _complete(values: str) -> Callable[[str], list[str]]:
    """Return what completes one of ``values``, a list as in a help text."""
    names = values.replace(" or ", ", ").split(", ")

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


Device = Annotated[
    str | None,
    typer.Option(
        autocompletion=_complete("cpu, cuda"), help="cpu or cuda; the best device of this machine when left out."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", autocompletion=_complete(FORMATS), help=f"Encode the experts into this format first: {FORMATS}."
    ),
]
WrittenFormat = Annotated[
    str, typer.Option(autocompletion=_complete(FORMATS), help=f"Weight format of the experts to write: {FORMATS}.")
]
Kernel = Annotated[
    str | None,
    typer.Option(autocompletion=_complete(KERNELS), help=f"Force this experts kernel; it runs or refuses: {KERNELS}."),
]
Activations = Annotated[
    str | None,
    typer.Option(autocompletion=_complete(ACTIVATIONS), help=f"Force this activation format: {ACTIVATIONS}."),
]
NAMES_A_MODEL = (
    "Folder with config.json and safetensors files, fables-16m for the shipped model, or the id of a model in "
    "the Hugging Face cache, org/name or org/name@revision. An existing folder wins."
)
Model = Annotated[str, typer.Argument(help=NAMES_A_MODEL, autocompletion=complete_model)]
Download = Annotated[
    bool, typer.Option("--download", help="Download what the Hugging Face cache lacks: safetensors, JSON, tokenizer.")
]
ShapeOrModel = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_model,
        help="dsv3, v4_flash, gptoss120b, qwen3_30b, HxIxExK, or a model's folder, name or id.",
    ),
]
WholeModel = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_model,
        help="qwen3_30b, gpt_oss_20b, or the folder, name or id of a model transformers knows.",
    ),
]
Trace = Annotated[str, typer.Argument(help="File that `collegium balance record` wrote.")]
Steps = Annotated[int | None, typer.Option(min=2, help="Stop after so many steps.")]


def find_model(name: str, download: bool, *, weights: bool = True) -> str:
    """Return the folder or file of a model, as ``locate`` finds it; a path as it was typed.

    weights: False for commands that read config.json alone. Progress bars are shown by one process, without ``--json``.
    """
    found = locate(name, download=download, weights=weights, progress=shows_progress())
    return name if found == Path(name) else str(found)


def comma_separated_ints(option: str, text: str, kind: type[N], *, least: int | None = None) -> list[N]:
    """Return the numbers in ``text``, positive or at least ``least``; raises InputError, which names ``option``."""
    try:
        found = [kind(piece) for piece in text.split(",")]
    except ValueError as error:
        raise InputError(f"{option} {text!r}: numbers separated by commas are needed") from error
    if not all(number > 0 if least is None else number >= least for number in found):
        allowed = "positive" if least is None else f"at least {least}"
        raise InputError(f"{option} {text!r}: every number must be {allowed}")
    return found


def formats_of(text: str) -> tuple[str, str]:
    """Return the formats that ``weights[:activations]`` names; raises SpecError and InputError for unknown ones."""
    from ..formats import by_name
    from ..ops.quantize import activation_format
    from .bench import recipe_of

    weights, activations = recipe_of(text)
    return by_name(weights).name, activation_format(activations).name


def ceilings_of(text: str) -> Ceilings:
    """Return what a machine can do at most, from three numbers as in ``--help``; raises InputError."""
    from .measure import Ceilings

    given = comma_separated_ints("--ceilings", text, float)
    if len(given) != 3:
        raise InputError(f"--ceilings {text!r}: three numbers are needed, such as 4.6,797,1329")
    return Ceilings(bandwidth=given[0] * 1e12, rate_16=given[1] * 1e12, rate_8=given[2] * 1e12)
