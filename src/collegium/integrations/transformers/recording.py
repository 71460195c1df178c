"""Record the expert load of a whole model while transformers runs it."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from ...balance.recorder import Recorder
from ...errors import InputError
from .blocks import blocks_of
from .modules import experts_modules
from .plugin import layers_of

__all__ = ["Recorder", "recording"]


@contextmanager
def recording(model: nn.Module) -> Generator[Recorder]:
    """Count the tokens of each expert of ``model`` in every forward pass inside the block.

    Counting synchronises with the device at every layer; outputs do not change. The layers must be built:
    ``load_model`` does so, ``register`` at the first call. Raises InputError for layers that are not built and for
    blocks that route inside a Collegium layer. In a compiled model nothing is counted, because no module is called.
    """
    modules = experts_modules(model)
    blocks = blocks_of(model)
    built = layers_of(model)
    if blocks or not modules or len(built) != len(modules):
        raise InputError(
            f"recording {type(model).__name__}: {len(modules)} layers are routed by transformers, {len(built)} are "
            f"built, {len(blocks)} route inside a block of Collegium; transformers must route all layers, and all must "
            "be built: use load_model(), or call the model once"
        )
    with Recorder(dict(zip(sorted(modules), built, strict=True))).watching(modules) as recorder:
        yield recorder
