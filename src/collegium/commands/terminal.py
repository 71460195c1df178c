"""What every command shares at a terminal: ``--json``, its exit code, and a bar that shows how far it is."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .printing import err, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Report", "bar", "prints"]

_JSON = typer.Option("--json", help="Print one JSON object instead of tables.")


class Report(Protocol):
    """What a command found."""

    def to_json(self) -> dict[str, object]:
        """Return it as plain values."""
        ...


def prints(show: Callable[[Any], None]) -> Callable[[Callable[..., Report]], Callable[..., None]]:
    """Give a command ``--json``: print what it returns as one object, or with ``show``."""

    def decorate(command: Callable[..., Report]) -> Callable[..., None]:
        @wraps(command)
        def run(*, as_json: bool, **given: Any) -> None:
            report = command(**given)
            if as_json:
                print_json(report.to_json())
            else:
                show(report)
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
    """Show a bar on the error stream while the block runs; gives ``progress(done, total, text)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what)

        def step(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {text}")

        yield step
