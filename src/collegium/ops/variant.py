"""Start a Triton kernel with little work on the host.

Triton binds, classifies and hashes all arguments at every call, 20 to 60 microseconds for a kernel with thirty of
them. A ``Variant`` does it once for each kind of call and afterwards hands the arguments straight to the launcher of
the compiled kernel.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Variant", "direct_launch"]

_TESTED = ("3.6.",)  # releases of Triton whose launcher takes the arguments as ``_start`` passes them


def direct_launch() -> bool:
    """Whether the installed Triton is one whose launcher may be called without its own argument binding."""
    triton: Any = import_module("triton")
    return triton.__version__.startswith(_TESTED) and not triton.knobs.runtime.interpret


class Variant:
    """One kernel with fixed compile-time arguments, launched many times.

    The kernel's compile-time parameters must follow its other parameters. constants: their values by name. options:
    Triton's own (``num_warps``, ``launch_pdl``). Both are copied.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._options = options
        self._tail = tuple(self._constants[name] for name in kernel.arg_names if name in self._constants)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = direct_launch()
        self._hooks: Any = import_module("triton").knobs.runtime

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launch ``grid`` programs on the current stream of the device of the first argument, a tensor."""
        device = args[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(grid, device.index or 0, args)
        else:
            self._start(grid, device.index or 0, args)

    def _start(self, grid: tuple[int, ...], device: int, args: tuple[Any, ...]) -> None:
        if not self._direct:
            self._kernel[grid](*args, **self._constants, **self._options)
            return
        # What Triton specialises on: dtypes, pointers and integers divisible by 16, integers that are 1.
        kind = tuple(
            (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor)
            # An integer's width is part of its type too.
            else (a % 16 == 0, a == 1, -(2**31) <= a < 2**31) if isinstance(a, int)
            else None
            for a in args
        )  # fmt: skip
        compiled = self._compiled.get((device, kind))
        if compiled is None:
            self._compiled[device, kind] = self._kernel[grid](*args, **self._constants, **self._options)
            return
        hooks = self._hooks
        width = len(grid)
        stream = torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        compiled.run(
            grid[0],
            grid[1] if width > 1 else 1,
            grid[2] if width > 2 else 1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            compiled.launch_metadata(grid, stream, *args, *self._tail),
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *args,
            *self._tail,
        )
