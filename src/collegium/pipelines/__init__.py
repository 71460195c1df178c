"""What runs a batch through the routed experts, one file each; the first row that serves a batch runs it."""

from .base import Asked, Parts, Pipeline, PipelineKind
from .direct import DirectKind
from .mega import MegaKind
from .split import SplitKind

__all__ = ["PIPELINES", "Asked", "DirectKind", "MegaKind", "Parts", "Pipeline", "PipelineKind", "SplitKind"]

PIPELINES: tuple[PipelineKind, ...] = (DirectKind(), MegaKind(), SplitKind())
