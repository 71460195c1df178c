"""Projections around routed experts that have a separate, latent width (latent MoE)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.linear import linear
from ..ops.rms_norm import rms_norm
from ..runtime.memory import Memory, part
from ..types import LatentWeights

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


def latent_of(latent: LatentWeights, dtype: torch.dtype) -> Latent:
    """Return the projections of a layer with inputs of ``dtype``, each in the dtype it is computed in."""
    return Latent(
        down=latent.down.detach().to(dtype),
        up=latent.up.detach().float(),
        norm=None if latent.norm is None else latent.norm.detach().float(),
        norm_eps=latent.norm_eps,
    )
