"""Detect GPU synchronisation and host copies in a part of a model; a CUDA graph cannot contain them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostWatch"]

# Operators whose value or output size the host needs, and lift_fresh, the last step of torch.tensor(...), which copies
# from the host. In inference mode composite operators appear under their composite names.
_SYNCHRONISING = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "argwhere",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
}
_COPYING = {"to", "_to_copy", "copy_", "copy", "cpu", "cuda"}


class HostWatch(TorchDispatchMode):
    """Watch the operators inside; ``first_sync`` is the first one that synchronises or copies, or None.

    device: device type whose tensors are watched.
    """

    def __init__(self, device: str = "cuda") -> None:
        """Create the mode; ``first_sync`` is None."""
        super().__init__()
        self.device = device
        self.first_sync: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and record it if it is the first that synchronises."""
        out = func(*args, **(kwargs or {}))
        inputs = list(_tensors(args))
        watched = any(tensor.device.type == self.device for tensor in (*inputs, *_tensors(out)))
        if watched and self._synchronises(func, inputs, out):
            self.first_sync = self.first_sync or str(func)
        return out

    def _synchronises(self, func: Any, inputs: list[torch.Tensor], out: Any) -> bool:
        name = func._schema.name.removeprefix("aten::")
        if name in _SYNCHRONISING or (name == "where" and len(inputs) == 1):
            return True
        if name in ("index", "index_put", "index_put_"):
            return any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
        if name == "repeat_interleave":
            return func._overloadname in ("Tensor", "self_Tensor")
        return name in _COPYING and len({t.device for t in (*inputs, *_tensors(out))}) > 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
