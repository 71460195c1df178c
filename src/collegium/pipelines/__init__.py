"""Pipelines run a batch through the routed experts; the first row of the table that serves a batch runs it.

The last row serves any batch, so every layer builds it.
"""

from .base import Pipeline, PipelineKind, PipelineParts, PipelineQuery
from .direct import DirectKind
from .half_batches import no_half_batches
from .mega import MegaKind
from .paged import PagedKind
from .split import SplitKind

__all__ = [
    "PIPELINES",
    "DirectKind",
    "MegaKind",
    "PagedKind",
    "Pipeline",
    "PipelineKind",
    "PipelineParts",
    "PipelineQuery",
    "SplitKind",
    "no_half_batches",
]

PIPELINES: tuple[PipelineKind, ...] = (PagedKind(), DirectKind(), MegaKind(), SplitKind())
