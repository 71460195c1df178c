"""Start Triton kernels with little work on the host, where Triton can run them.

Triton binds, classifies and hashes all arguments at every call, 20 to 60 microseconds for a kernel with thirty of
them, more than 100 from release 3.7 on. ``launch`` does it once for each kind of call and afterwards passes the
arguments straight to the C function that starts the compiled kernel. ``recorded`` notes such calls, for
``runtime/replay.py`` to repeat.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "STREAM",
    "Step",
    "align_rows",
    "compile_options",
    "launch",
    "noted",
    "on_device",
    "overlaps",
    "power_at_least",
    "recorded",
    "row_contiguous",
    "watched",
]

STREAM = 3  # position of the stream in ``Step.head``
_TESTED = ("3.6.", "3.9.")  # releases of Triton with which the kernels were run on a GPU

_variants: dict[tuple[Any, ...], _Variant] = {}
_loading = threading.Lock()


class Step(NamedTuple):
    """One start of a kernel: a C function, the arguments of the launch, and those of the kernel.

    head: at ``STREAM`` is the stream. nested: ``call`` takes ``arguments`` as one sequence, its last argument.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    arguments: tuple[Any, ...]
    nested: bool = False


class _Recording(threading.local):
    steps: list[Step | None] | None = None


_recording = _Recording()


@contextmanager
def recorded() -> Generator[list[Step | None]]:
    """Note every launch of this thread inside the block; None marks one that C alone could not repeat."""
    before, steps = _recording.steps, []
    _recording.steps = steps
    try:
        yield steps
    finally:
        _recording.steps = before


def noted(step: Step | None) -> None:
    """Note what this thread started, None for what C alone could not repeat."""
    if _recording.steps is not None:
        _recording.steps.append(step)


def on_device(x: Tensor, capability: tuple[int, int] = (8, 0)) -> bool:
    """Return whether a Triton kernel for ``capability`` and later can serve ``x``; otherwise torch does."""
    return x.is_cuda and _capability(x.device) >= capability


def overlaps(x: Tensor) -> bool:
    """Return whether a kernel that reads ``x`` may start while the kernel before it ends (sm_90 and later)."""
    return x.is_cuda and on_device(x, (9, 0))


def power_at_least(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << max(0, count - 1).bit_length())


def row_contiguous(given: Tensor) -> Tensor:
    """Return ``given [R, C]`` with the elements of a row side by side; rows may be apart."""
    return given if given.stride(1) == 1 else given.contiguous()


def align_rows(given: Tensor) -> Tensor:
    """Return ``given [R, C]`` where 16 bytes divide the same addresses as in fresh memory, copied if they did not.

    Triton compiles a kernel again, for seconds, where 16 does not divide an address or a stride that it otherwise does.
    """
    columns, step = given.shape[1], given.stride(0)
    if given.shape[0] == 1 and given.stride(1) == 1 and step != columns:
        return align_rows(given.as_strided((1, columns), (columns, 1)))  # one row has whatever stride its maker left
    alike = (step % 16 == 0, step == 1) == (columns % 16 == 0, columns == 1)
    if alike and given.stride(1) == 1 and given.data_ptr() % 16 == 0:
        return given
    return given.clone(memory_format=torch.contiguous_format)


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any], **options: Any
) -> None:
    """Run ``grid`` programs of a Triton ``kernel`` on the current stream of the device of ``args[0]``, a tensor.

    args: what is not known at compile time, in the kernel's order; constants: the compile-time parameters, which are
    last in the kernel's signature. options: Triton's own, such as ``num_warps``. Always given in the same order.
    """
    key = (id(kernel), *constants.values(), *options.values())
    variant = _variants.get(key)
    if variant is None:
        variant = _variants.setdefault(key, _Variant(kernel, constants, options))
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            variant.start(grid, device.index, args)
    else:
        variant.start(grid, device.index or 0, args)


class _Variant:
    """One kernel with fixed compile-time arguments, and what was compiled of it."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        names = tuple(kernel.arg_names)
        assert set(names[-len(constants) :]) == set(constants), f"{names}: compile-time parameters are last"
        self._kernel = kernel
        self._keywords = {**constants, **compile_options(constants, options)}
        self._tail = tuple(constants[name] for name in names[-len(constants) :])
        self._started: dict[tuple[Any, ...], _Started] = {}
        self._first = threading.RLock()

    def start(self, grid: tuple[int, ...], device: int, args: tuple[Any, ...]) -> None:
        # The same kinds that Triton compiles for: dtypes, pointers and integers that 16 divides, 1, 32 or 64 bits.
        key = (device, *[_kind(argument) for argument in args])
        known = self._started.get(key) if _direct() and not watched() else None
        if known is None:
            # Warming up runs batches side by side, and Triton lets every thread compile what one of them does already.
            with self._first:
                if _direct():
                    made = self._kernel.warmup(*args, grid=grid, **self._keywords)
                    # Triton imports what starts a kernel as a module, all of one name: a second thread that imports
                    # then would replace the function before this one has it, by that of another kernel.
                    with _loading:
                        _ = made.run
                compiled = self._kernel[grid](*args, **self._keywords)
            started = _started(compiled, len(args) + len(self._tail)) if _direct() else None
            if started is not None:
                self._started[key] = started
            noted(None)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage]
        step = Step(known.call, (x, y, z, stream, *known.middle), (*args, *self._tail), known.nested)
        if known.nested:
            step.call(*step.head, step.arguments)
        else:
            step.call(*step.head, *step.arguments)
        noted(step if known.repeatable else None)


def compile_options(constants: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Triton's options for a kernel with ``constants``: ``options``, and those that every kernel needs."""
    # Triton 3.10 no longer fuses multiplications and additions by default.
    every = {"enable_fp_fusion": True, **options}
    # The interpreter rejects this option, and a kernel that does not wait must not have it.
    return {**every, "launch_pdl": True} if constants.get("PDL") else every


class _Started(NamedTuple):
    """How to start a compiled kernel.

    middle: the arguments between the stream and the kernel's. nested: as in ``Step``. repeatable: whether ``call`` is
    the C function, which allocates nothing. compiled: kept, since Triton 3.8 unloads the code of a kernel it frees.
    """

    call: Callable[..., None]
    middle: tuple[Any, ...]
    nested: bool
    repeatable: bool
    compiled: Any


def _started(compiled: Any, count: int) -> _Started | None:
    """Return how to start ``compiled``, a kernel of ``count`` arguments, if possible without Triton's Python launcher.

    That launcher gives each launch scratch memory and runs hooks, and then calls a C function. Where a kernel needs
    neither, the C function is called directly, with the arguments that the launcher passes to it. None: the launcher is
    not known, and Triton makes every launch itself.
    """
    try:
        passed = _arguments_passed(compiled, count)
        scratch = compiled.run.global_scratch_size or compiled.run.profile_scratch_size
    except (AttributeError, TypeError):
        passed, scratch = None, 0
    if passed is None:
        _warn_once("the launcher of this release of Triton is not known; eager calls take several times as long")
        return None
    if scratch:
        middle = (compiled.function, compiled.packed_metadata, None, None, None)
        return _Started(compiled.run, middle, nested=False, repeatable=False, compiled=compiled)
    middle, nested = passed
    return _Started(compiled.run.launch, middle, nested, True, compiled)


def _arguments_passed(compiled: Any, count: int) -> tuple[tuple[Any, ...], bool] | None:
    """Return what Triton's launcher passes to its C function between the stream and the kernel's arguments.

    Also returns whether it passes those as one sequence (Triton 3.7 and later) or one by one (3.6). The launcher itself
    is run, with a stand-in for the C function, so a release that passes something else is noticed: then the result is
    None.
    """
    calls: list[tuple[Any, ...]] = []

    def stand_in(*passed: Any) -> None:
        calls.append(passed)

    run = copy.copy(compiled.run)
    if getattr(run, "gsan_enabled", False):
        return None  # Triton's race detector adds arguments to every launch
    run.launch = stand_in
    run.global_scratch_size = run.profile_scratch_size = 0
    leading = (1, 1, 1, 0)  # the grid and the stream
    arguments = tuple(object() for _ in range(count))
    run(*leading, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    if len(calls) != 1 or calls[0][: len(leading)] != leading:
        return None
    (passed,) = calls
    if passed[-count:] == arguments:
        return passed[len(leading) : -count], False
    if isinstance(passed[-1], tuple) and passed[-1] == arguments:
        return passed[len(leading) : -1], True
    return None


def watched() -> bool:
    """Return whether Triton is to call somebody at every launch, as its profiler asks; then Triton itself launches."""
    hooks = _runtime()
    return any(h is not None and getattr(h, "calls", True) for h in (hooks.launch_enter_hook, hooks.launch_exit_hook))


@cache
def _direct() -> bool:
    """Return whether compiled kernels run on an NVIDIA GPU, so that their C function may be called."""
    triton: Any = import_module("triton")
    if not triton.__version__.startswith(_TESTED):
        releases = " and ".join(release.rstrip(".") for release in _TESTED)
        _warn_once(f"Triton {triton.__version__} is installed; the kernels were tested with {releases}")
    return torch.version.hip is None and not _runtime().interpret


@cache
def _warn_once(text: str) -> None:
    logging.getLogger(__name__).warning("%s, see docs/compatibility.md", text)


@cache
def _runtime() -> Any:
    triton: Any = import_module("triton")
    return triton.knobs.runtime


def _kind(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, -(2**31) <= argument < 2**31
    return type(argument)  # a number, or nothing


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if find_spec("triton") is not None else (0, 0)
