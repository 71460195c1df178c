"""transformers runs everything but the experts: ``experts_implementation="collegium"``.

Two ways in::

    register()                                     # then any AutoModel...from_pretrained(..., experts_implementation=
    model.set_experts_implementation("collegium")  # "collegium"): the experts transformers loaded run here

    model = load_model("path/to/checkpoint")       # the experts never pass through transformers: Collegium reads,
                                                   # audits and packs them in the format they were published in
"""

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
