"""Replay the kernel launches of a pass without recomputing their arguments.

A pass computes tiles, buffers, strides and compile-time parameters from the caller's tensors. All of these depend only
on dtype, shape and alignment of the tensors, and the workspace provides the same buffers to every pass of one kind. So
the launches of one pass serve all passes of its kind: only the caller's addresses differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import STREAM, Step, recorded, watched
from .profiler_ranges import shown

__all__ = ["Replay"]

_MAX_KINDS = 256  # kinds of call that are stored, about 10 KB each; the oldest is dropped first


class Replay:
    """The launches of a function that only launches kernels in a workspace.

    The first call of a kind compiles kernels and allocates buffers, the second is recorded, later ones are replayed. A
    function that calls torch for more than views, or a kernel that allocates memory, is called every time.
    """

    def __init__(self) -> None:
        # True: record the next call; False: never record.
        self._kinds: dict[tuple[Any, ...], tuple[_Launch, ...] | bool] = {}

    def __reduce__(self) -> tuple[type[Replay], tuple[()]]:
        """Copy as empty: the recorded addresses are of the tensors of one layer."""
        return Replay, ()

    def __call__(
        self, compute: Callable[[Any], None], inputs: tuple[Tensor, *tuple[Tensor | None, ...]], memory: Hashable = 0
    ) -> None:
        """Do what ``compute(inputs)`` does. inputs: may be a named tuple.

        Inputs of one kind agree in dtype, device, shape, strides and addresses modulo 16. memory: identifies the
        workspace in which ``compute`` allocates buffers; a recording is valid in one workspace only.
        """
        if watched() or shown():
            compute(inputs)
            return
        kind: list[Any] = [memory]
        addresses: list[int] = []
        for tensor in inputs:
            address = 0 if tensor is None else tensor.data_ptr()
            addresses.append(address)
            if tensor is None:
                kind.append(None)
            else:
                kind.append((tensor.dtype, tensor.device, tensor.shape, tensor.stride(), address % 16))
        key = tuple(kind)
        recording = self._kinds.get(key)
        if isinstance(recording, tuple):
            _start(recording, addresses, inputs[0].device)
        elif recording:
            self._kinds[key] = _record(compute, inputs) or False
        else:
            compute(inputs)
            if recording is None:
                if len(self._kinds) >= _MAX_KINDS:
                    # Another thread may have removed it already.
                    self._kinds.pop(next(iter(self._kinds), key), None)
                self._kinds[key] = True


class _Hole(NamedTuple):
    """Where the address of the caller's tensor number ``source`` belongs in a launch.

    position: of the argument. field: within it, if the argument is a tuple; otherwise None.
    """

    position: int
    field: int | None
    source: int


class _Launch(NamedTuple):
    """A launch with addresses in place of tensors.

    holes: where addresses of the caller's tensors belong. nested: as in ``Step``. alive: tensors that must live as long
    as their addresses are used.
    """

    call: Callable[..., None]
    head: list[Any]
    arguments: list[Any]
    nested: bool
    holes: tuple[_Hole, ...]
    alive: tuple[Tensor, ...]


class _StorageTracker(TorchDispatchMode):
    """Detects whether torch does anything else than create views of existing memory."""

    def __init__(self) -> None:
        super().__init__()
        self.only_views = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Not by the operation's schema: reshape and contiguous promise a view and sometimes copy.
        outputs = result if isinstance(result, list | tuple) else (result,)
        base = args[0] if args else None
        same_storage = isinstance(base, torch.Tensor) and all(
            isinstance(output, torch.Tensor) and _storage(output) == _storage(base) for output in outputs
        )
        self.only_views &= same_storage and not func._schema.is_mutable
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _record(compute: Callable[[Any], None], inputs: tuple[Tensor | None, ...]) -> tuple[_Launch, ...]:
    """Do ``compute(inputs)`` and return its launches; none if a replay of them would not do the same."""
    with recorded() as steps, _StorageTracker() as tracker:
        compute(inputs)
    launches: list[_Launch] = []
    for step in steps:
        launch = None if step is None else _with_holes(step, inputs)
        if launch is not None:
            launches.append(launch)
    return tuple(launches) if tracker.only_views and len(launches) == len(steps) else ()


def _with_holes(step: Step, inputs: tuple[Tensor | None, ...]) -> _Launch | None:
    """Return ``step`` with holes for the caller's tensors, or None if it is ambiguous which arguments those are."""
    tensors = [(index, tensor) for index, tensor in enumerate(inputs) if tensor is not None]
    index_of = {id(tensor): index for index, tensor in tensors}
    storages = {_storage(tensor) for _, tensor in tensors}
    if len(index_of) != len(tensors):
        return None
    holes: list[_Hole] = []
    alive: list[Tensor] = []
    for position, field, tensor in _tensors_of(step.arguments):
        if id(tensor) in index_of:
            holes.append(_Hole(position, field, index_of[id(tensor)]))
        elif _storage(tensor) in storages:
            return None  # another view of the caller's memory
        else:
            alive.append(tensor)
    arguments = [_addresses(argument) for argument in step.arguments]
    return _Launch(step.call, list(step.head), arguments, step.nested, tuple(holes), tuple(alive))


def _tensors_of(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int | None, Tensor]]:
    """Yield every tensor of a launch with its position and, inside a tuple, its field."""
    for position, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            yield position, None, argument
        elif isinstance(argument, tuple):
            for field, value in enumerate(argument):
                if isinstance(value, torch.Tensor):
                    yield position, field, value


def _addresses(argument: Any) -> Any:
    """Return a tensor's address, a tuple with the addresses of its tensors, or any other argument as it is."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return tuple(map(_addresses, argument))
    return argument


def _start(launches: tuple[_Launch, ...], addresses: list[int], device: torch.device) -> None:
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _start(launches, addresses, device)
    stream = torch._C._cuda_getCurrentRawStream(device.index or 0)  # pyright: ignore[reportPrivateUsage]
    for call, recorded_head, recorded_arguments, nested, holes, _ in launches:
        head = recorded_head.copy()
        head[STREAM] = stream
        arguments = recorded_arguments.copy()
        for position, field, source in holes:
            if field is None:
                arguments[position] = addresses[source]
            else:
                fields = list(arguments[position])
                fields[field] = addresses[source]
                arguments[position] = tuple(fields)
        if nested:
            call(*head, arguments)
        else:
            call(*head, *arguments)
    return None
