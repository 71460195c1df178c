"""Collegium: a quantised Mixture-of-Experts layer that loads public checkpoints and says what it chose and why.

::

    config.json -- models.describe --> MoESpec --+
    device, limits ------------------------------+-- plan() --> Plan
    *.safetensors -- checkpoint --> ExpertWeights -- kernel.pack --> MoELayer
    x -- route --> Routing -- dispatch --> batch -- experts.run --> rows -- combine --> y

Rooms, each with its own docstring: ``commands`` (what ``collegium`` does), ``integrations`` (transformers, vLLM),
``stages`` (what is around a pipeline in a layer), ``pipelines`` (from chosen experts to weighted sums), ``experts``
(kernels and their packing), ``parallel`` (which rank holds and gets what), ``checkpoint`` and ``models`` (files and
families), ``ops`` (route, permute, quantise, activate, sum), ``formats``, ``runtime`` (devices, launches, memory),
``kernels`` (device code). Who may import whom is written in ``pyproject.toml``, and ``make check`` proves it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .encoding import encode_experts as encode_experts, expert_weights as expert_weights
    from .errors import *  # noqa: F403 -- every error is public
    from .formats import FORMATS as FORMATS
    from .functional import moe as moe
    from .integrations.transformers import load_model as load_model
    from .layer import MoELayer as MoELayer
    from .loading import load_layer as load_layer
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
    from .runtime.devices import probe as probe
    from .runtime.warm_up import warm_up as warm_up
    from .types import (
        ActivationSpec as ActivationSpec,
        ExpertWeights as ExpertWeights,
        LatentWeights as LatentWeights,
        MoESpec as MoESpec,
        RouterWeights as RouterWeights,
        Routing as Routing,
        RoutingSpec as RoutingSpec,
        SharedSpec as SharedSpec,
        SharedWeights as SharedWeights,
    )

__version__ = "0.1.0"

# Each public name and its room, which is imported when the name is first asked for: torch alone takes a second.
_ROOMS = {
    "encoding": "encode_experts expert_weights",
    "errors": "BadScaleError CheckpointError CollegiumError ConfigError DuplicateTensorError HostileFileError "
    "InputError MeasurementError MissingExtraError MissingTensorError PlanError RankError RoutingError SpecError "
    "TensorMismatchError TruncatedFileError UnknownTensorError",
    "formats": "FORMATS",
    "functional": "moe",
    "integrations.transformers": "load_model",
    "layer": "MoELayer",
    "loading": "load_layer",
    "models": "describe",
    "parallel.ranks": "Ranks",
    "planning": "Plan plan",
    "placement": "Placement",
    "problem": "DeviceFacts Limits Overrides Problem Refusal",
    "runtime.devices": "probe",
    "runtime.warm_up": "warm_up",
    "types": "ActivationSpec ExpertWeights LatentWeights MoESpec RouterWeights Routing RoutingSpec SharedSpec "
    "SharedWeights",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}
__all__ = ["__version__", *_ROOM_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    # Rooms are attributes as well, as if all of them had been imported.
    room = _ROOM_OF.get(name, name)
    if room.startswith("_") or find_spec(f"{__name__}.{room}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(f".{room}", __name__)
    globals()[name] = value = found if room == name else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
