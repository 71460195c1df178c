"""Start a pass again without computing anew what its launches follow from.

Between the caller's tensors and the arguments of its kernels a pass decides much: tiles, buffers, strides, compile-time
parameters. All of it follows from the kinds of the caller's tensors, and the workspace gives every pass of one kind
the same buffers. So the launches of one pass serve all others of its kind: only the caller's addresses differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import STREAM, Step, recorded, watched
from .profiler_ranges import shown

__all__ = ["Replay"]

_KEPT = 256  # kinds of call remembered, some 10 KB each; the oldest goes first


class Replay:
    """The launches of a function that starts kernels in a workspace and does nothing else.

    The first call of a kind compiles kernels and takes buffers, the second is recorded, later ones are repeated. A
    function that calls torch for more than views, or a kernel that takes memory, is called every time.
    """

    def __init__(self) -> None:
        # True: to be recorded next time; False: to be called every time.
        self._kinds: dict[tuple[Any, ...], tuple[_Launch, ...] | bool] = {}

    def __reduce__(self) -> tuple[type[Replay], tuple[()]]:
        """Copy as empty: the addresses are those of the tensors of one layer."""
        return Replay, ()

    def __call__(
        self, compute: Callable[[Any], None], inputs: tuple[Tensor, *tuple[Tensor | None, ...]], memory: Hashable = 0
    ) -> None:
        """Do what ``compute(inputs)`` does. inputs: may be a named tuple.

        Inputs of one kind agree in dtype, device, shape, strides and in their addresses modulo 16. memory: what
        tells apart the workspaces that ``compute`` takes buffers from; what was recorded in one is no good in another.
        """
        if watched() or shown():
            compute(inputs)
            return
        kind: list[Any] = [memory]
        addresses: list[int] = []
        for tensor in inputs:
            address = 0 if tensor is None else tensor.data_ptr()
            addresses.append(address)
            own = None if tensor is None else (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), address % 16)
            kind.append(own)
        key = tuple(kind)
        found = self._kinds.get(key)
        if isinstance(found, tuple):
            _start(found, addresses, inputs[0].device)
        elif found:
            self._kinds[key] = _record(compute, inputs) or False
        else:
            compute(inputs)
            if found is None:
                if len(self._kinds) >= _KEPT:
                    # Another thread may have been faster.
                    self._kinds.pop(next(iter(self._kinds), key), None)
                self._kinds[key] = True


class _Launch(NamedTuple):
    """A launch with addresses in place of tensors.

    holes: (position in ``arguments``, which of the caller's tensors) to be filled in. nested: as in ``Step``.
    """

    call: Callable[..., None]
    head: list[Any]
    arguments: list[Any]
    nested: bool
    holes: tuple[tuple[int, int], ...]
    kept: tuple[Tensor, ...]  # alive as long as their addresses


class _StorageTracker(TorchDispatchMode):
    """Sees whether torch did anything but name memory that is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.only_views = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # Not by the operation's schema: reshape and contiguous promise a view and sometimes copy.
        views, base = made if isinstance(made, list | tuple) else (made,), args[0] if args else None
        same = isinstance(base, torch.Tensor) and all(
            isinstance(view, torch.Tensor) and _storage(view) == _storage(base) for view in views
        )
        self.only_views &= same and not func._schema.is_mutable
        return made


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _record(compute: Callable[[Any], None], inputs: tuple[Tensor | None, ...]) -> tuple[_Launch, ...]:
    """Do ``compute(inputs)`` and return its launches, none where they are not all there is to it."""
    with recorded() as steps, _StorageTracker() as witness:
        compute(inputs)
    launches = [None if step is None else _open(step, inputs) for step in steps]
    found = tuple([launch for launch in launches if launch is not None])
    return found if witness.only_views and len(found) == len(steps) else ()


def _open(step: Step, inputs: tuple[Tensor | None, ...]) -> _Launch | None:
    """Return ``step`` with holes for the caller's tensors, or None where it is not clear which those are."""
    given = [(which, tensor) for which, tensor in enumerate(inputs) if tensor is not None]
    places = {id(tensor): which for which, tensor in given}
    storages = {_storage(tensor) for _, tensor in given}
    arguments = list(step.arguments)
    holes: list[tuple[int, int]] = []
    kept: list[Tensor] = []
    for place, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            arguments[place] = argument.data_ptr()
            if id(argument) in places:
                holes.append((place, places[id(argument)]))
            elif _storage(argument) in storages:
                return None  # another view of the caller's memory
            else:
                kept.append(argument)
    if len(places) != len(given):
        return None
    return _Launch(step.call, list(step.head), arguments, step.nested, tuple(holes), tuple(kept))


def _start(launches: tuple[_Launch, ...], addresses: list[int], device: torch.device) -> None:
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _start(launches, addresses, device)
    stream = torch._C._cuda_getCurrentRawStream(device.index or 0)  # pyright: ignore[reportPrivateUsage]
    for call, fixed_head, fixed, nested, holes, _ in launches:
        head = fixed_head.copy()
        head[STREAM] = stream
        arguments = fixed.copy()
        for place, which in holes:
            arguments[place] = addresses[which]
        if nested:
            call(*head, arguments)
        else:
            call(*head, *arguments)
    return None
