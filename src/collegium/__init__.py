"""Collegium: a quantised Mixture-of-Experts layer that loads public checkpoints and says what it chose and why.

::

    config.json -- models.describe --> MoESpec --+
    device, limits ------------------------------+-- plan() --> Plan
    *.safetensors -- checkpoint --> ExpertWeights -- kernel.pack --> MoELayer
    x -- route --> Routing -- dispatch --> batch -- experts.run --> rows -- combine --> y

Import rule, higher may import lower only, names on one line never import each other::

    cli > demo | inspection | verification | conversion > integrations > loading > layer > plan | pipeline
        > experts | parallel | checkpoint > models > ops > formats | devices > kernels > types > errors
"""

from .devices import probe
from .errors import (
    BadScaleError,
    CheckpointError,
    CollegiumError,
    ConfigError,
    DuplicateTensorError,
    HostileFileError,
    InputError,
    MissingExtraError,
    MissingTensorError,
    PlanError,
    RoutingError,
    SpecError,
    TensorMismatchError,
    UnknownTensorError,
)
from .formats import FORMATS
from .layer import MoELayer, encode_experts, moe
from .loading import load_layer
from .models import describe
from .plan import Plan, plan
from .types import (
    ActivationSpec,
    Choice,
    DeviceFacts,
    ExpertWeights,
    LatentWeights,
    Limits,
    MoESpec,
    Placement,
    Problem,
    Refusal,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
)

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "ActivationSpec",
    "BadScaleError",
    "CheckpointError",
    "Choice",
    "CollegiumError",
    "ConfigError",
    "DeviceFacts",
    "DuplicateTensorError",
    "ExpertWeights",
    "HostileFileError",
    "InputError",
    "LatentWeights",
    "Limits",
    "MissingExtraError",
    "MissingTensorError",
    "MoELayer",
    "MoESpec",
    "Placement",
    "Plan",
    "PlanError",
    "Problem",
    "Refusal",
    "RouterWeights",
    "Routing",
    "RoutingError",
    "RoutingSpec",
    "SharedSpec",
    "SharedWeights",
    "SpecError",
    "TensorMismatchError",
    "UnknownTensorError",
    "__version__",
    "describe",
    "encode_experts",
    "load_layer",
    "moe",
    "plan",
    "probe",
]
