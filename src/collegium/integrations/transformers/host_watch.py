"""Does a piece of a model wait for the GPU, or copy between it and the host? No CUDA graph can hold that."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostWatch"]

# Operators whose result the host has to know, a number or the length of the output, and the last part of
# torch.tensor(...), which copies from the host. In inference mode those made of others are seen under their own names.
_WAITING = {
    "item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "lift_fresh", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip
_COPYING = {"to", "_to_copy", "copy_", "copy", "cpu", "cuda"}


class HostWatch(TorchDispatchMode):
    """Runs what is inside unchanged; ``seen`` names the first operator that waits or copies, or is None.

    device: kind of device whose tensors are watched.
    """

    def __init__(self, device: str = "cuda") -> None:
        """Have seen nothing yet."""
        super().__init__()
        self.device = device
        self.seen: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and look at it."""
        out = func(*args, **(kwargs or {}))
        given = list(_tensors(args))
        if any(t.device.type == self.device for t in (*given, *_tensors(out))) and self._waits(func, given, out):
            self.seen = self.seen or str(func)
        return out

    def _waits(self, func: Any, given: list[torch.Tensor], out: Any) -> bool:
        name = func._schema.name.removeprefix("aten::")
        if name in _WAITING or (name == "where" and len(given) == 1):
            return True
        if name in ("index", "index_put", "index_put_"):
            return any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])
        if name == "repeat_interleave":
            return func._overloadname in ("Tensor", "self_Tensor")
        return name in _COPYING and len({t.device for t in (*given, *_tensors(out))}) > 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
