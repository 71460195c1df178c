"""Checkpoints, on disk or handed over from memory: read lazily, detected, audited, and loaded as ``ExpertWeights``."""

from .adapter import with_adapter
from .arrivals import Arrivals
from .audit import AuditReport, LayerReport, audit
from .beside import load_latent, load_router, load_shared
from .loader import describe_checkpoint, load_all, load_experts
from .opened import CheckpointLayer
from .reader import Checkpoint
from .stored import StoredFormat

__all__ = [
    "Arrivals", "AuditReport", "Checkpoint", "CheckpointLayer", "LayerReport", "StoredFormat", "audit",
    "describe_checkpoint", "load_all", "load_experts", "load_latent", "load_router", "load_shared", "with_adapter",
]  # fmt: skip
