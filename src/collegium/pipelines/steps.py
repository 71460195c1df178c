"""Steps that pipelines of separate launches have in common."""

from torch import Tensor

from ..experts import PackedWeights
from ..runtime.memory import Memory, part
from ..types import ContiguousBatch
from .base import PipelineParts

__all__ = ["listed_tiles", "run_experts"]


def listed_tiles(experts: PackedWeights, rows: int, x: Tensor) -> tuple[int, ...]:
    """Return the tile heights whose token tile lists the launch that sorts the rows writes too."""
    return experts.tiling.block_t(rows) if x.is_cuda else ()


def run_experts(parts: PipelineParts, batch: ContiguousBatch, memory: Memory | None) -> Tensor:
    """Return the experts' rows ``[R, H]``, after ``after_expert``."""
    rows = parts.experts.run(batch, part(memory, "experts"))
    return rows if parts.after_expert is None else parts.after_expert(rows)
