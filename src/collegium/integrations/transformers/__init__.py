"""transformers integration: Collegium runs the experts, transformers all other modules.

Two entry points. ``register`` adds an experts implementation, which packs the experts that transformers loaded::

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="collegium")

``load_model`` reads the experts itself, audits them and packs them in their published format::

    model = load_model("path/to/checkpoint")

What replaces or wraps code of transformers is in ``patches.py``.
"""

from .adapters import choose_adapters
from .decoding import Decoder
from .loading import build_layers, load_model
from .modules import experts_modules, routed_weights, spec_of
from .plugin import attach, experts_forward, layers_of, refresh, register
from .recording import Recorder, recording

__all__ = [
    "Decoder",
    "Recorder",
    "attach",
    "build_layers",
    "choose_adapters",
    "experts_forward",
    "experts_modules",
    "layers_of",
    "load_model",
    "recording",
    "refresh",
    "register",
    "routed_weights",
    "spec_of",
]
