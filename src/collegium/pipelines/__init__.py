"""What runs a batch through the routed experts, one file each; the first row that serves a batch runs it."""

from .base import Pipeline, PipelineKind, PipelineParts, PipelineQuery
from .direct import DirectKind
from .mega import MegaKind
from .split import SplitKind

__all__ = [
    "PIPELINES",
    "DirectKind",
    "MegaKind",
    "Pipeline",
    "PipelineKind",
    "PipelineParts",
    "PipelineQuery",
    "SplitKind",
]

PIPELINES: tuple[PipelineKind, ...] = (DirectKind(), MegaKind(), SplitKind())
