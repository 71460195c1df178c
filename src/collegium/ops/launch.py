"""Start Triton kernels with little work on the host, where Triton can run them.

Triton binds, classifies and hashes all arguments at every call, 20 to 60 microseconds for a kernel with thirty of
them. ``launch`` does it once for each kind of call and afterwards hands the arguments straight to the launcher of the
compiled kernel.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["dense_rows", "launch", "on_device", "power_of_two"]

_TESTED = ("3.6.",)  # releases of Triton whose launcher takes the arguments as ``_Variant`` passes them

_variants: dict[tuple[Any, ...], _Variant] = {}


def on_device(x: Tensor, capability: tuple[int, int] = (8, 0)) -> bool:
    """Return whether a Triton kernel for ``capability`` and later can serve ``x``; otherwise torch does."""
    return x.is_cuda and _capability(x.device) >= capability


def power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << max(0, count - 1).bit_length())


def dense_rows(given: Tensor) -> Tensor:
    """Return ``given [R, C]`` with the elements of a row side by side; rows may stand apart."""
    return given if given.stride(1) == 1 else given.contiguous()


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any], **options: Any
) -> None:
    """Run ``grid`` programs of a Triton ``kernel`` on the current stream of the device of ``args[0]``, a tensor.

    args: what is not known at compile time, in the kernel's order; constants: the compile-time parameters, which stand
    last in the kernel's signature. options: Triton's own, such as ``num_warps``. Always given in the same order.
    """
    key = (id(kernel), *constants.values(), *options.values())
    variant = _variants.get(key)
    if variant is None:
        variant = _variants[key] = _Variant(kernel, constants, options)
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            variant.start(grid, device.index, args)
    else:
        variant.start(grid, device.index or 0, args)


class _Variant:
    """One kernel with fixed compile-time arguments, and what was compiled of it."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        triton: Any = import_module("triton")
        names = tuple(kernel.arg_names)
        assert set(names[-len(constants) :]) == set(constants), f"{names}: compile-time parameters stand last"
        self._kernel = kernel
        # The interpreter knows no such option, and a kernel that does not wait must not have it.
        overlap = {"launch_pdl": True} if constants.get("PDL") else {}
        self._keywords = {**constants, **options, **overlap}
        self._tail = tuple(constants[name] for name in names[-len(constants) :])
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._hooks = triton.knobs.runtime
        self._direct = triton.__version__.startswith(_TESTED) and not self._hooks.interpret

    def start(self, grid: tuple[int, ...], device: int, args: tuple[Any, ...]) -> None:
        # The same kinds that Triton compiles for: dtypes, pointers and integers that 16 divides, 1, 32 or 64 bits.
        key = (device, *[_kind(argument) for argument in args])
        compiled = self._compiled.get(key) if self._direct else None
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*args, **self._keywords)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage]
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        watched = None if enter is None else compiled.launch_metadata(grid, stream, *args, *self._tail)
        function, packed = compiled.function, compiled.packed_metadata
        compiled.run(x, y, z, stream, function, packed, watched, enter, leave, *args, *self._tail)


def _kind(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, -(2**31) <= argument < 2**31
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if find_spec("triton") is not None else (0, 0)
