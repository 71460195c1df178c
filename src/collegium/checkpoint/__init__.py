"""Checkpoints on disk or in memory: read lazily, detect formats, audit, and load ``ExpertWeights``."""

from .adapter import with_adapter
from .audit import AuditReport, LayerReport, audit
from .layer_parameters import LoadSummary
from .layer_view import CheckpointLayer
from .loader import describe_checkpoint, load_all, load_experts
from .name_mapping import MappedTensor
from .non_expert_weights import load_latent, load_router, load_shared
from .reader import Checkpoint
from .stored_format import StoredFormat
from .tensor_stream import TensorStream

__all__ = [
    "AuditReport",
    "Checkpoint",
    "CheckpointLayer",
    "LayerReport",
    "LoadSummary",
    "MappedTensor",
    "StoredFormat",
    "TensorStream",
    "audit",
    "describe_checkpoint",
    "load_all",
    "load_experts",
    "load_latent",
    "load_router",
    "load_shared",
    "with_adapter",
]
