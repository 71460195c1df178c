"""Collegium: a quantised Mixture-of-Experts layer that loads public checkpoints and says what it chose and why.

::

    config.json -- models.describe --> MoESpec --+
    device, limits ------------------------------+-- plan() --> Plan
    *.safetensors -- checkpoint --> ExpertWeights -- kernel.pack --> MoELayer
    x -- route --> Routing -- dispatch --> batch -- experts.run --> rows -- combine --> y

Rooms, each with its own docstring: ``commands`` (what ``collegium`` does), ``integrations`` (transformers), ``stages``
(what is around a pipeline in a layer), ``pipelines`` (from chosen experts to weighted sums), ``experts`` (kernels and
their packing), ``parallel`` (which rank holds and gets what), ``checkpoint`` and ``models`` (files and families),
``ops`` (route, permute, quantise, activate, sum), ``formats``, ``runtime`` (devices, launches, memory), ``kernels``
(device code). Who may import whom is written in ``pyproject.toml``, and ``make check`` proves it.
"""

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
    RankError,
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
from .parallel.ranks import Ranks
from .plan import Plan, plan
from .problem import Choice, DeviceFacts, Limits, Placement, Problem, Refusal
from .runtime.devices import probe
from .runtime.warming import warm_up
from .types import (
    ActivationSpec,
    ExpertWeights,
    LatentWeights,
    MoESpec,
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
    "MeasurementError",
    "MissingExtraError",
    "MissingTensorError",
    "MoELayer",
    "MoESpec",
    "Placement",
    "Plan",
    "PlanError",
    "Problem",
    "RankError",
    "Ranks",
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
