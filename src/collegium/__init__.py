"""Collegium: a quantised Mixture-of-Experts layer that loads public checkpoints and says what it chose and why.

::

    config.json -- models.describe --> MoESpec --+
    device, limits ------------------------------+-- plan() --> Plan
    *.safetensors -- checkpoint --> ExpertWeights -- kernel.pack --> MoELayer
    x -- route --> Routing -- dispatch --> batch -- experts.run --> rows -- combine --> y

Import rule, higher may import lower only, names on one line never import each other::

    cli > printing > demo | inspection | tuning | verification | conversion | model_bench > bench > measure
        > integrations > loading | functional > layer > packed_module
        > plan | pipeline | compiled | warming | weight_checks | encoding
        > experts | parallel | checkpoint > models > ops > formats | devices | workspace > kernels > types > errors
"""

from .devices import probe
from .encoding import encode_experts
from .errors import (
    BadScaleError,
    CheckpointError,
    CollegiumError,
    ConfigError,
    DuplicateTensorError,
    HostileFileError,
    InputError,
    MeasurementError,
    MissingExtraError,
    MissingTensorError,
    PlanError,
    RoutingError,
    SpecError,
    TensorMismatchError,
    UnknownTensorError,
)
from .formats import FORMATS
from .functional import moe
from .layer import MoELayer
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
from .warming import warm_up

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
    "MeasurementError",
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
    "warm_up",
]
