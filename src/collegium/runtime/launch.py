"""Start Triton kernels with little work on the host, where Triton can run them.

Triton binds, classifies and hashes all arguments at every call, 20 to 60 microseconds for a kernel with thirty of
them. ``launch`` does it once for each kind of call and afterwards hands the arguments straight to the C function that
starts the compiled kernel. ``recorded`` notes such calls, for ``runtime/replay.py`` to repeat.
"""

from __future__ import annotations

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
    "STREAM", "Step", "dense_rows", "launch", "noted", "on_device", "overlaps", "power_at_least", "recorded",
    "usual_rows", "watched",
]  # fmt: skip

STREAM = 3  # place of the stream among the arguments of Triton's C function
_TESTED = ("3.6.",)  # releases of Triton whose launcher takes what ``_started`` prepares

_variants: dict[tuple[Any, ...], _Variant] = {}
_loading = threading.Lock()


class Step(NamedTuple):
    """One start of a kernel: a C function and all of its arguments."""

    call: Callable[..., None]
    arguments: tuple[Any, ...]


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


def dense_rows(given: Tensor) -> Tensor:
    """Return ``given [R, C]`` with the elements of a row side by side; rows may be apart."""
    return given if given.stride(1) == 1 else given.contiguous()


def usual_rows(given: Tensor) -> Tensor:
    """Return ``given [R, C]`` where 16 bytes divide the same addresses as in fresh memory, copied if they did not.

    Triton compiles a kernel again, for seconds, where 16 does not divide an address or a stride that it otherwise does.
    """
    columns, step = given.shape[1], given.stride(0)
    if given.shape[0] == 1 and given.stride(1) == 1 and step != columns:
        return usual_rows(given.as_strided((1, columns), (columns, 1)))  # one row has whatever stride its maker left
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
        # The interpreter knows no such option, and a kernel that does not wait must not have it.
        overlap = {"launch_pdl": True} if constants.get("PDL") else {}
        self._keywords = {**constants, **options, **overlap}
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
            if _direct():
                self._started[key] = _started(compiled)
            noted(None)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage]
        step = Step(known.call, (x, y, z, stream, *known.middle, *args, *self._tail))
        step.call(*step.arguments)
        noted(step if known.alone else None)


class _Started(NamedTuple):
    """What starts a compiled kernel: ``middle`` comes between the stream and the kernel's own arguments."""

    call: Callable[..., None]
    middle: tuple[Any, ...]
    alone: bool  # whether call is C, which takes no memory


def _started(compiled: Any) -> _Started:
    """Leave out of Triton's launcher what a kernel does not need: memory for each program, and hooks."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return _Started(run, (compiled.function, compiled.packed_metadata, None, None, None), alone=False)
    asked = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return _Started(run.launch, (compiled.function, *asked, compiled.packed_metadata, None, None, None), alone=True)


def watched() -> bool:
    """Return whether Triton is to call somebody at every launch, as its profiler asks; then Triton itself launches."""
    hooks = _runtime()
    return any(h is not None and getattr(h, "calls", True) for h in (hooks.launch_enter_hook, hooks.launch_exit_hook))


@cache
def _direct() -> bool:
    """Return whether kernels run on an NVIDIA GPU by a release of Triton whose launcher is known here."""
    triton: Any = import_module("triton")
    tested = triton.__version__.startswith(_TESTED)
    if not tested:  # once a process: the answer is kept
        said = "Triton %s is installed; the kernels were run with 3.6 alone, see docs/compatibility.md"
        logging.getLogger(__name__).warning(said, triton.__version__)
    return tested and torch.version.hip is None and not _runtime().interpret


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
