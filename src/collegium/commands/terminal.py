"""What every command shares at a terminal: ``--json``, its exit code, and a bar that shows how far it is."""

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
from ..interrupts import EXIT_CODE, interrupted
from .printing import err, print_json

__all__ = ["Report", "asks_json", "bar", "complain", "one_line", "prints", "show_anything", "shows_progress"]

_JSON = typer.Option("--json", help="Print one JSON object instead of tables.")


def asks_json() -> bool:
    """Return whether the command line asks for JSON, so that what is wrong with it is said in JSON too."""
    return "--json" in sys.argv[1:]


def shows_progress() -> bool:
    """Return whether this process shows how far a download is: not with ``--json``, and one of several ranks."""
    return not asks_json() and os.environ.get("RANK", "0") == "0"


def show_anything() -> None:
    """Let output that cannot show a character show its number, and a closed stream take what nobody wants."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Report(Protocol):
    """What a command found: a dataclass, with ``to_json`` where JSON says more than its fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def prints(
    show: Callable[[Any], None], *, together: bool = False
) -> Callable[[Callable[..., Report]], Callable[..., None]]:
    """Give a command ``--json``: print what it returns as one object, or with ``show``.

    together: ranks that torchrun started do it together, and the first of them prints; others are refused.
    """

    def decorate(command: Callable[..., Report]) -> Callable[..., None]:
        @wraps(command)
        def run(*, as_json: bool, **given: Any) -> None:
            from ..parallel.torchrun import is_first, ranks_started

            if not together and "RANK" in os.environ and ranks_started(os.environ) > 1:
                raise InputError(
                    f"{command.__name__} was started on {os.environ['WORLD_SIZE']} ranks; generate, verify and "
                    "bench-model run on several, this command in one process: start it without torchrun"
                )
            report: Any = command(**given)
            if is_first(os.environ) and as_json:
                print_json(report.to_json() if hasattr(report, "to_json") else asdict(report))
            elif is_first(os.environ):
                show(report)
            sys.stdout.flush()  # while what goes wrong is still told
            if not getattr(report, "passed", True):
                raise typer.Exit(1)

        taken = [*signature(command, eval_str=True).parameters.values()]
        flag = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, _JSON])
        shown: Any = run
        shown.__signature__ = Signature([*taken, flag])
        shown.__annotations__ = {each.name: each.annotation for each in (*taken, flag)}
        return run

    return decorate


@contextmanager
def bar(what: str) -> Generator[Callable[[int, int, str], None]]:
    """Show a bar at a terminal, on the error stream, while the block runs; gives ``progress(done, total, text)``."""
    from ..parallel.torchrun import is_first

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
    hidden = not err.is_terminal or not is_first(os.environ)
    with Progress(*columns, console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task(what)

        def step(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {text}")

        yield step


def complain(kind: str, text: str, *, code: int = 1) -> NoReturn:
    """Say what went wrong, in one piece, and end with ``code``."""
    if interrupted() and code != EXIT_CODE:
        raise KeyboardInterrupt  # not an error: ``main`` reports the interrupt
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    try:
        if asks_json():
            print_json({"error": {"kind": kind, "message": text}})
        else:  # in one piece, as other ranks write too
            err.print(Text.assemble(who, (kind, "bold red"), ": ", text), soft_wrap=True)
        sys.stdout.flush()
    except OSError as error:  # nobody reads it, or the disk is full: Python would try again when it ends, and complain
        if asks_json() and error.errno != EPIPE:
            err.print(Text.assemble(who, (kind, "bold red"), ": ", text), soft_wrap=True)
        os._exit(code)
    sys.exit(code)


def one_line(error: BaseException) -> str:
    """Return an error's text without its line ends, and no more of it than one reads."""
    return " ".join(str(error).split())[:500]
