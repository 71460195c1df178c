"""Projections around routed experts that have a separate, latent width (latent MoE)."""

from dataclasses import dataclass

from torch import Tensor

from ..errors import InputError
from ..formats.unquantised import DTYPES
from ..ops.linear import linear
from ..ops.rms_norm import rms_norm
from ..problem import Problem
from ..runtime.memory import Memory, part
from ..types import LatentWeights
from .checks import check_latent
from .modules import InputTransform, RowFunction

__all__ = ["Latent", "latent_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent(LatentWeights):
    """The projections of a layer: ``down`` in the dtype of x, ``up`` and ``norm`` in float32."""

    def enter(self, x: Tensor, memory: Memory | None) -> Tensor:
        """Return ``[T, H]`` for ``x [T, D]``."""
        return linear(x, self.down, memory=part(memory, "enter"))

    def leave(self, rows: Tensor, shared: Tensor | None, out: Tensor, memory: Memory | None) -> None:
        """Write ``out [T, D]`` for the experts' sums ``[T, H]`` in float32, and add ``shared [T, D]``."""
        if self.norm is not None:
            rows = rms_norm(rows, self.norm, self.norm_eps, memory=memory)
        linear(rows, self.up, shared, out=out, memory=part(memory, "leave"))


def latent_of(problem: Problem, latent: LatentWeights | RowFunction | None) -> Latent | InputTransform | None:
    """Return the projections of a layer, each in the dtype it is computed in, or the caller's function.

    Raises InputError where the spec needs others.
    """
    spec, dtype = problem.spec, DTYPES[problem.dtype]
    if latent is not None and not isinstance(latent, LatentWeights):
        if not callable(latent) or spec.latent_norm_eps is not None:
            raise InputError(
                f"latent: found a {type(latent).__name__} with latent_norm_eps={spec.latent_norm_eps}; allowed: "
                "LatentWeights, or a function or module that returns the experts' input, without a norm of their sums"
            )
        return InputTransform(function=latent, width=spec.expert_hidden_size, dtype=dtype)
    check_latent(spec, latent)
    if latent is None:
        return None
    return Latent(
        down=latent.down.detach().to(dtype),
        up=latent.up.detach().float(),
        norm=None if latent.norm is None else latent.norm.detach().float(),
        norm_eps=latent.norm_eps,
    )
