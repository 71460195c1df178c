"""Parts of a layer that the caller computes: functions or modules for the router, the shared expert and the input.

Shape letters: T tokens, E experts, D hidden size, H width of the routed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import InputError
from ..runtime.packed_module import check_tensors, refuse_gradient
from ..types import RouterModule, SharedWeights

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from ..runtime.memory import Memory

__all__ = ["InputTransform", "RowFunction", "SharedModule", "module_names", "name_of", "refuse_gradients", "rows_of"]


RowFunction = Callable[[Tensor], Any]


def rows_of(name: str, function: RowFunction, x: Tensor, width: int) -> Tensor:
    """Return what ``function`` computes for the rows ``x [T, D]``: ``[T, width]``, floating.

    A tuple stands for its first entry, since linear layers of engines return a bias next to the product. name: of the
    function, for errors. Raises InputError for another shape or device, and where the result requires a gradient.
    """
    rows = function(x)
    if isinstance(rows, tuple):
        rows = rows[0]
    check_tensors(x.device, **{name: rows})
    if tuple(rows.shape) != (x.shape[0], width) or not rows.is_floating_point():
        raise InputError(
            f"{name}: returned {tuple(rows.shape)} {rows.dtype} for x {tuple(x.shape)}; allowed: floating "
            f"({x.shape[0]}, {width}), or a tuple that begins with it"
        )
    return rows


def module_names(gate: RouterModule | None, shared: object, latent: object) -> dict[str, str]:
    """Return the names of the caller's functions and modules of a layer, by what they stand for.

    shared, latent: as the layer was built with them, or None.
    """
    functions = {
        "gate": None if gate is None else gate.gate,
        "shared_experts": None if isinstance(shared, SharedWeights) else shared,
        "routed_input_transform": latent.function if isinstance(latent, InputTransform) else None,
    }
    return {name: name_of(function) for name, function in functions.items() if function is not None}


def refuse_gradients(gate: RouterModule | None, shared: object, latent: object) -> None:
    """Raise InputError if a module of the caller has parameters that require a gradient, while gradients are enabled.

    For torch.compile, which runs the modules inside an operation whose results have no gradient: ``rows_of`` cannot
    tell there. shared, latent: of a layer.
    """
    functions = {
        "router": None if gate is None else gate.gate,
        "shared": shared.function if isinstance(shared, SharedModule) else None,
        "latent": latent.function if isinstance(latent, InputTransform) else None,
    }
    for name, function in functions.items():
        if isinstance(function, nn.Module):
            for parameter in function.parameters():
                refuse_gradient(**{name: parameter})


def name_of(function: object) -> str:
    """Return the name of a function, or of a module's class, as a plan prints it."""
    return getattr(function, "__name__", None) or type(function).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedModule:
    """A shared expert of the caller: a function of the tokens ``x [T, D]`` that returns ``[T, D]``."""

    function: RowFunction

    def __call__(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        """Return ``[T, D]``, which is added to the routed experts' sum for ``x [T, D]``."""
        return rows_of("shared", self.function, x, x.shape[1])

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return nothing: the caller compiles its kernels."""
        return frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class InputTransform:
    """A function of the tokens ``x [T, D]`` that returns the routed experts' input ``[T, H]``.

    width: H. dtype: of that input.
    """

    function: RowFunction
    width: int
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        rows = rows_of("latent", self.function, x, self.width)
        if rows.dtype != self.dtype:
            raise InputError(f"latent: returned {rows.dtype}, the layer was planned for {self.dtype}; convert it")
        return rows
