"""Collegium: a quantised Mixture-of-Experts layer that loads public checkpoints and explains its choices.

::

    config.json -- models.describe --> MoESpec --+
    device, limits ------------------------------+-- plan() --> Plan
    *.safetensors -- checkpoint --> ExpertWeights -- kernel.pack --> MoELayer
    x -- route --> Routing -- dispatch --> batch -- experts.run --> rows -- combine --> y

Packages: ``commands`` (the command line), ``integrations`` (transformers, vLLM), ``execution`` (how a layer runs its
calls), ``stages`` (router, shared expert and input checks of a layer), ``pipelines`` (from routed tokens to weighted
sums), ``experts`` (kernels and weight packing), ``parallel`` (placement and token exchange between ranks),
``checkpoint`` and ``models`` (files and model families), ``ops`` (route, permute, quantise, activate, sum),
``formats``, ``runtime`` (devices, launches, memory), ``kernels`` (device code). ``pyproject.toml`` defines which
package may import which, and ``make check`` verifies it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adapters import ExpertAdapter as ExpertAdapter, ExpertAdapters as ExpertAdapters, LowRankPair as LowRankPair
    from .encoding import encode_experts as encode_experts, expert_weights as expert_weights
    from .errors import *  # noqa: F403 -- every error is public
    from .formats import FORMATS as FORMATS
    from .functional import (
        MoEOptions as MoEOptions,
        moe as moe,
        moe_batched as moe_batched,
        moe_plan as moe_plan,
    )
    from .integrations.transformers import load_model as load_model
    from .layer import MoELayer as MoELayer
    from .layer_builder import LayerBuilder as LayerBuilder
    from .loading import load_adapters as load_adapters, load_layer as load_layer
    from .models import describe as describe
    from .parallel.ranks import Ranks as Ranks
    from .placement import Placement as Placement
    from .planning import Plan as Plan, plan as plan
    from .problem import (
        DeviceFacts as DeviceFacts,
        Limits as Limits,
        Overrides as Overrides,
        Problem as Problem,
        Refusal as Refusal,
    )
    from .runtime.checksum import weights_checksum as weights_checksum
    from .runtime.devices import probe as probe
    from .runtime.warm_up import warm_up as warm_up
    from .stages.shared import merge_shared as merge_shared, slice_shared as slice_shared
    from .types import (
        ActivationSpec as ActivationSpec,
        ExpertWeights as ExpertWeights,
        LatentWeights as LatentWeights,
        MoESpec as MoESpec,
        RouterModule as RouterModule,
        RouterWeights as RouterWeights,
        Routing as Routing,
        RoutingSpec as RoutingSpec,
        SharedSpec as SharedSpec,
        SharedWeights as SharedWeights,
    )
    from .weight_updater import UpdateSummary as UpdateSummary, WeightUpdater as WeightUpdater

__version__ = "0.1.0"

# The public names of each module. They are imported on first access, because importing torch takes a second.
_EXPORTS: dict[str, tuple[str, ...]] = {
    "adapters": ("ExpertAdapter", "ExpertAdapters", "LowRankPair"),
    "encoding": ("encode_experts", "expert_weights"),
    "errors": (
        "BadScaleError",
        "CheckpointError",
        "CollegiumError",
        "ConfigError",
        "DuplicateTensorError",
        "HostileFileError",
        "InputError",
        "MeasurementError",
        "MissingExtraError",
        "MissingTensorError",
        "PlanError",
        "RankError",
        "RoutingError",
        "SpecError",
        "TensorMismatchError",
        "TruncatedFileError",
        "UnknownTensorError",
    ),
    "formats": ("FORMATS",),
    "functional": ("MoEOptions", "moe", "moe_batched", "moe_plan"),
    "integrations.transformers": ("load_model",),
    "layer": ("MoELayer",),
    "layer_builder": ("LayerBuilder",),
    "loading": ("load_adapters", "load_layer"),
    "models": ("describe",),
    "parallel.ranks": ("Ranks",),
    "planning": ("Plan", "plan"),
    "placement": ("Placement",),
    "problem": ("DeviceFacts", "Limits", "Overrides", "Problem", "Refusal"),
    "runtime.checksum": ("weights_checksum",),
    "runtime.devices": ("probe",),
    "runtime.warm_up": ("warm_up",),
    "stages.shared": ("merge_shared", "slice_shared"),
    "types": (
        "ActivationSpec",
        "ExpertWeights",
        "LatentWeights",
        "MoESpec",
        "RouterModule",
        "RouterWeights",
        "Routing",
        "RoutingSpec",
        "SharedSpec",
        "SharedWeights",
    ),
    "weight_updater": ("UpdateSummary", "WeightUpdater"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = ["__version__", *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    # Public names, and modules as if they had been imported.
    module_name = _MODULE_OF.get(name, name)
    if module_name.startswith("_") or find_spec(f"{__name__}.{module_name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{module_name}", __name__)
    value = module if module_name == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
