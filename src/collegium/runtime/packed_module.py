"""Base of modules with packed weights: a unique handle, and clear errors for unsupported operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from ..errors import InputError
from .custom_op import announce
from .pickling import WithTensors

__all__ = ["PackedModule", "check_tensors", "refuse_backward", "refuse_gradient", "stored_bytes"]

_NO_STATE = (
    "a packed layer has no state_dict: its weights are laid out for one kernel. Keep the checkpoint it was loaded from "
    "and load it again; torch.save(layer) keeps the layer itself"
)


class PackedModule(nn.Module):
    """A module whose weights are neither parameters nor buffers, so that torch's methods do not change them.

    handle: a tensor on the module's device; its address tells a compiled graph which module to run. Copies and
    unpickled modules get a new handle.
    """

    handle: Tensor
    packed_names: ClassVar[tuple[str, ...]] = ()  # attributes that hold the packed tensors

    def __init__(self) -> None:
        """Start in evaluation mode; after ``train()`` a backward pass through the module raises InputError."""
        super().__init__()
        self.training = False

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of the module's input."""
        return self._input_dtype

    def identify(self, device: torch.device, dtype: torch.dtype) -> None:
        """Create the handle on ``device``; called once, by the constructor. dtype: of the module's input."""
        self._input_dtype = dtype
        # An inference tensor could not be an input of a compiled graph outside inference mode.
        with torch.inference_mode(False):
            self.register_buffer("handle", torch.zeros(1, dtype=torch.uint8, device=device), persistent=False)
        announce(self)

    def _state(self) -> dict[str, Any]:
        """Return the state without the handle: sending a tensor to another process changes its address."""
        buffers = {name: tensor for name, tensor in self._buffers.items() if name != "handle"}
        return {**self.__dict__, "_buffers": buffers, "_handle_device": self.handle.device}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; copies do not use it."""
        state = self._state()
        state["_packed"] = WithTensors({name: state.pop(name) for name in self.packed_names})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled module with a new handle."""
        state = {**state, **state.get("_packed", {})}
        state.pop("_packed", None)
        device = state.pop("_handle_device")
        super().__setstate__(state)
        self.identify(device, self._input_dtype)

    def __copy__(self) -> Self:
        """Return a module that shares the packed weights."""
        module = type(self).__new__(type(self))
        module.__setstate__(self._state())
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a module with a copy of the packed weights."""
        module = type(self).__new__(type(self))
        memo[id(self)] = module
        module.__setstate__(copy.deepcopy(self._state(), memo))
        return module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        """Accept functions that change nothing; raises InputError for another device or dtype."""
        probe = torch.empty(0, dtype=self._input_dtype, device=self.handle.device)
        result = fn(probe)
        if (result.device, result.dtype) != (probe.device, probe.dtype):
            raise InputError(
                f"{type(self).__name__} is packed for {probe.dtype} input on {probe.device} and cannot become "
                f"{result.dtype} on {result.device}; a packed layer does not move, load it again with device= and "
                "dtype="
            )
        return self

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: a packed layer has no state_dict."""
        raise InputError(f"state_dict: {_NO_STATE}")

    def _load_from_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(f"load_state_dict: {_NO_STATE}")


def check_tensors(device: torch.device, **tensors: object) -> None:
    """Raise InputError unless all ``tensors`` are tensors on ``device``, and none requires a gradient."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.device != device:
            actual = f"on {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise InputError(
                f"{name} is {actual}, allowed: a tensor on {device}, where the packed weights are; move it, or build "
                "the layer with weights where it is (a packed layer does not move)"
            )
        if tensor.requires_grad:
            refuse_gradient(**{name: tensor})


class _RefusedBackward(torch.autograd.Function):
    """The identity, without a backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, _anchor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Not a view: views could not be modified in place.
        return rows.new_empty(0).set_(rows)  # pyright: ignore[reportArgumentType, reportCallIssue]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise InputError(
            "inference only: backward() through packed experts, which have no gradient; call eval() and "
            "torch.no_grad(), and train with the experts of transformers or torch"
        )


def refuse_backward(rows: Tensor) -> Tensor:
    """Return ``rows`` such that a backward pass through them raises InputError.

    Otherwise a loss of frozen weights fails with torch's error about tensors without ``grad_fn``.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return rows
    anchor = torch.empty(0, requires_grad=True)
    return cast("Tensor", _RefusedBackward.apply(rows, anchor))


def refuse_gradient(**tensors: Tensor | None) -> None:
    """Raise InputError if any of ``tensors`` requires a gradient while gradients are enabled."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"inference only: {name} requires a gradient, and none passes through packed experts; call inside "
                "torch.no_grad() or torch.inference_mode(), or set requires_grad_(False) on the model"
            )


def stored_bytes(*owners: object) -> int:
    """Return the bytes of the storages of all tensors of ``owners``; shared storages count once."""
    blocks = (tensor.untyped_storage() for tensor in _tensors_of(owners))
    return sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


def _tensors_of(owner: object) -> Generator[Tensor]:
    """Yield the tensors of nested dataclasses, tuples, lists and dicts."""
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, tuple | list):
        for part in cast("tuple[object, ...]", owner):
            yield from _tensors_of(part)
    elif isinstance(owner, dict):
        yield from _tensors_of(tuple(cast("dict[object, object]", owner).values()))
    elif is_dataclass(owner) and not isinstance(owner, type):
        yield from _tensors_of(tuple(getattr(owner, field.name) for field in fields(owner)))
