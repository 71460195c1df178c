"""Terminal code shared by all commands: ``--json``, exit status, error messages, progress bar."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from errno import EPIPE
from functools import wraps
from inspect import Parameter, Signature, signature
from io import TextIOWrapper
from typing import Annotated, Any, ClassVar, NoReturn, Protocol

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..errors import InputError
from ..interrupts import EXIT_CODE, was_interrupted
from .printing import err, print_json

__all__ = [
    "Report",
    "exit_with_error",
    "one_line",
    "prints",
    "progress_bar",
    "shows_progress",
    "tolerate_any_output",
    "wants_json",
]

_JSON = typer.Option("--json", help="Print one JSON object instead of tables.")


def wants_json() -> bool:
    """Return whether ``--json`` is on the command line; its usage errors are then printed as JSON too."""
    return "--json" in sys.argv[1:]


def shows_progress() -> bool:
    """Return whether this process shows download progress: not with ``--json``, and only on the first rank."""
    return not wants_json() and os.environ.get("RANK", "0") == "0"


def tolerate_any_output() -> None:
    """Escape characters that the terminal's encoding lacks, and replace a closed stream by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Report(Protocol):
    """The result of a command: a dataclass, with ``to_json`` if the JSON object differs from its fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def prints(
    show: Callable[[Any], None], *, on_ranks: bool = False, passed: Callable[[Any], bool] | None = None
) -> Callable[[Callable[..., Report]], Callable[..., None]]:
    """Add ``--json`` to a command and print its report: as one JSON object, or with ``show``.

    on_ranks: the command may run under torchrun, where only the first rank prints; otherwise several ranks are refused.
    passed: whether a report is a success; the command exits with code 1 otherwise. None: every report is.
    """

    def decorate(command: Callable[..., Report]) -> Callable[..., None]:
        @wraps(command)
        def run(*, as_json: bool, **arguments: Any) -> None:
            from ..parallel.torchrun import is_first, ranks_started

            if not on_ranks and "RANK" in os.environ and ranks_started(os.environ) > 1:
                raise InputError(
                    f"{command.__name__} was started on {os.environ['WORLD_SIZE']} ranks; generate, verify and "
                    "bench-model run on several, this command in one process: start it without torchrun"
                )
            report: Any = command(**arguments)
            if is_first(os.environ) and as_json:
                print_json(report.to_json() if hasattr(report, "to_json") else asdict(report))
            elif is_first(os.environ):
                show(report)
            sys.stdout.flush()  # here, so that a write error still prints a message
            if passed is not None and not passed(report):
                raise typer.Exit(1)

        flag = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, _JSON])
        parameters = [*signature(command, eval_str=True).parameters.values(), flag]
        wrapper: Any = run
        wrapper.__signature__ = Signature(parameters)
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


@contextmanager
def progress_bar(what: str) -> Generator[Callable[[int, int, str], None]]:
    """Show a progress bar on the error stream if it is a terminal; yields ``progress(done, total, text)``."""
    from ..parallel.torchrun import is_first

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
    hidden = not err.is_terminal or not is_first(os.environ)
    with Progress(*columns, console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task(what)

        def step(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {text}")

        yield step


def exit_with_error(kind: str, text: str, *, code: int = 1) -> NoReturn:
    """Print an error message in a single write and exit with status ``code``."""
    if was_interrupted() and code != EXIT_CODE:
        raise KeyboardInterrupt  # not an error: ``main`` reports the interrupt
    several_ranks = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    rank = f"rank {os.environ['RANK']}: " if several_ranks else ""
    message = Text.assemble(rank, (kind, "bold red"), ": ", text)
    try:
        if wants_json():
            print_json({"error": {"kind": kind, "message": text}})
        else:
            err.print(message, soft_wrap=True)
        sys.stdout.flush()
    except OSError as error:  # closed pipe or full disk; a normal exit would flush, and fail, again
        if wants_json() and error.errno != EPIPE:
            err.print(message, soft_wrap=True)
        os._exit(code)
    sys.exit(code)


def one_line(error: BaseException) -> str:
    """Return an error's text on one line, at most 500 characters."""
    return " ".join(str(error).split())[:500]
