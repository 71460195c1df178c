"""Launch Triton kernels with little work on the host.

Triton binds, classifies and hashes all arguments in every call, which takes 20 to 60 microseconds for a kernel with
thirty arguments, and more than 100 from release 3.7 on. ``launch`` does this once for each kind of call and then passes
the arguments directly to the C function that starts the compiled kernel. ``recorded`` collects such calls for
``runtime/replay.py``.
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
_import_lock = threading.Lock()


class Step(NamedTuple):
    """One launch of a kernel: a C function, its arguments for the launch, and those for the kernel.

    head: has the stream at ``STREAM``. nested: ``call`` takes ``arguments`` as one sequence, its last argument.
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
    """Record every launch of this thread inside the block; None stands for one that C alone could not repeat."""
    outer = _recording.steps
    steps: list[Step | None] = []
    _recording.steps = steps
    try:
        yield steps
    finally:
        _recording.steps = outer


def noted(step: Step | None) -> None:
    """Add a launch of this thread to the recording; None for one that C alone could not repeat."""
    if _recording.steps is not None:
        _recording.steps.append(step)


def on_device(x: Tensor, capability: tuple[int, int] = (8, 0)) -> bool:
    """Return whether a Triton kernel for ``capability`` and later can process ``x``; otherwise torch does."""
    return x.is_cuda and _capability(x.device) >= capability


def overlaps(x: Tensor) -> bool:
    """Return whether a kernel that reads ``x`` may start while the previous one ends (sm_90 and later)."""
    return x.is_cuda and on_device(x, (9, 0))


def power_at_least(count: int, minimum: int = 1) -> int:
    """Return the smallest power of two that is at least ``count`` and ``minimum``, itself a power of two."""
    return max(minimum, 1 << max(0, count - 1).bit_length())


def row_contiguous(x: Tensor) -> Tensor:
    """Return ``x [R, C]`` with the elements of each row contiguous; rows may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def align_rows(x: Tensor) -> Tensor:
    """Return ``x [R, C]`` with the alignment of a fresh tensor, as a copy if necessary.

    Triton compiles a kernel again, for seconds, if an address or stride is no longer divisible by 16.
    """
    columns = x.shape[1]
    stride = x.stride(0)
    if x.shape[0] == 1 and x.stride(1) == 1 and stride != columns:
        return align_rows(x.as_strided((1, columns), (columns, 1)))  # the stride of a single row is arbitrary
    same_kind = (stride % 16 == 0, stride == 1) == (columns % 16 == 0, columns == 1)
    if same_kind and x.stride(1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any], **options: Any
) -> None:
    """Run ``grid`` programs of a Triton ``kernel`` on the current stream of the device of its first tensor.

    args: the runtime arguments, in the kernel's order: tensors, numbers, None, or named tuples of such arguments
    (``kernels/arguments.py``), which contain no further tuples. The first one is a tensor or begins with one.
    constants: the compile-time parameters, which are last in the kernel's signature. options: of Triton, such as
    ``num_warps``. A caller passes both always in the same order.
    """
    key = (id(kernel), *constants.values(), *options.values())
    variant = _variants.get(key)
    if variant is None:
        variant = _variants.setdefault(key, _Variant(kernel, constants, options))
    first = args[0]
    device = first[0].device if isinstance(first, tuple) else first.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            variant.start(grid, device.index, args)
    else:
        variant.start(grid, device.index or 0, args)


class _Variant:
    """One kernel with fixed compile-time arguments, and its compiled variants."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        names = tuple(kernel.arg_names)
        assert set(names[-len(constants) :]) == set(constants), f"{names}: compile-time parameters are last"
        self._kernel = kernel
        self._keywords = {**constants, **compile_options(constants, options)}
        self._tail = tuple(constants[name] for name in names[-len(constants) :])
        self._launchers: dict[tuple[Any, ...], _Launcher] = {}
        self._compile_lock = threading.RLock()

    def start(self, grid: tuple[int, ...], device: int, args: tuple[Any, ...]) -> None:
        # The kinds of arguments that Triton specialises for: dtypes, divisibility by 16, the integer 1, 32 or 64 bits.
        key = (device, *_kinds(args))
        launcher = self._launchers.get(key) if _direct() and not watched() else None
        if launcher is None:
            launcher = self._launch_by_triton(grid, args)
            if launcher is not None:
                self._launchers[key] = launcher
            noted(None)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage]
        step = Step(launcher.call, (x, y, z, stream, *launcher.middle), (*args, *self._tail), launcher.nested)
        if launcher.nested:
            step.call(*step.head, step.arguments)
        else:
            step.call(*step.head, *step.arguments)
        noted(step if launcher.repeatable else None)

    def _launch_by_triton(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> _Launcher | None:
        """Compile and launch through Triton; return the launcher for further calls of this kind, if possible."""
        # Warm-up runs batches in parallel, and Triton would compile the same kernel in several threads.
        with self._compile_lock:
            if _direct():
                kernel = self._kernel.warmup(*args, grid=grid, **self._keywords)
                # Triton imports the launcher of every kernel as a module of the same name: a thread that imports
                # another one meanwhile would replace it before this thread has its function.
                with _import_lock:
                    _ = kernel.run
            compiled = self._kernel[grid](*args, **self._keywords)
        return _launcher_of(compiled, len(args) + len(self._tail)) if _direct() else None


def compile_options(constants: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Triton's options for a kernel with ``constants``: ``options``, and those that every kernel needs."""
    # Triton 3.10 no longer fuses multiplications and additions by default.
    result = {"enable_fp_fusion": True, **options}
    # The interpreter rejects this option, and a kernel that does not wait must not have it.
    if constants.get("PDL"):
        result["launch_pdl"] = True
    return result


class _Launcher(NamedTuple):
    """How to launch a compiled kernel.

    middle: the arguments between the stream and those of the kernel. nested: as in ``Step``. repeatable: ``call`` is
    the C function, which allocates nothing. compiled: a reference, since Triton 3.8 unloads kernels that it frees.
    """

    call: Callable[..., None]
    middle: tuple[Any, ...]
    nested: bool
    repeatable: bool
    compiled: Any


def _launcher_of(compiled: Any, count: int) -> _Launcher | None:
    """Return how to launch ``compiled``, a kernel of ``count`` arguments, if possible without Triton's Python launcher.

    That launcher allocates scratch memory, runs hooks, and then calls a C function. For a kernel that needs neither,
    the C function is called directly, with the arguments that the launcher would pass. None: the launcher has an
    unknown form, and every launch goes through Triton.
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
        return _Launcher(compiled.run, middle, nested=False, repeatable=False, compiled=compiled)
    middle, nested = passed
    return _Launcher(compiled.run.launch, middle, nested, True, compiled)


def _arguments_passed(compiled: Any, count: int) -> tuple[tuple[Any, ...], bool] | None:
    """Return what Triton's launcher passes to its C function between the stream and the kernel's arguments.

    Also returns whether it passes those as one sequence (Triton 3.7 and later) or one by one (3.6). The launcher is run
    with a stand-in for the C function, so that a release that passes something else is detected: then the result is
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
    """Return whether Triton has launch hooks, as its profiler installs; then every launch goes through Triton."""
    hooks = _runtime()
    return any(
        hook is not None and getattr(hook, "calls", True) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook)
    )


@cache
def _direct() -> bool:
    """Return whether compiled kernels run on an NVIDIA GPU, so that their C function can be called."""
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


def _kinds(arguments: tuple[Any, ...]) -> list[object]:
    """Return the kind of each argument, fields of tuples one by one: a kernel has the same tuples in every call."""
    # Most of the host's time for a launch: no call for each argument, and isinstance(argument, Tensor), which is five
    # times as slow for other types, comes last.
    kinds: list[object] = []
    for argument in arguments:
        if isinstance(argument, int):
            kinds.append((argument % 16 == 0, argument == 1, -(2**31) <= argument < 2**31))
        elif isinstance(argument, tuple):
            kinds += _kinds(argument)  # pyright: ignore[reportUnknownArgumentType]
        elif argument is None or isinstance(argument, float):
            kinds.append(type(argument))
        else:
            kinds.append((argument.dtype, argument.data_ptr() % 16 == 0))
    return kinds


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if find_spec("triton") is not None else (0, 0)
