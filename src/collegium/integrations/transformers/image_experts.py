"""Experts of image tokens, whose class keeps them next to the experts of text (ERNIE-4.5-VL): loaded for the class.

Collegium runs the experts of text. transformers' conversion makes both stacks from one list of experts in the files,
and skips it because the experts of text have no parameters.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...checkpoint.index import index_of
from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError
from ...models import describe, moe_layers

__all__ = ["image_expert_stacks"]

Readers = Mapping[str, Callable[[], Tensor]]


def image_expert_stacks(checkpoint: Checkpoint, readers: Readers) -> dict[str, Callable[[], Tensor]]:
    """Return ``readers`` with stacks of the experts of image tokens in place of the tensors of single experts.

    readers: by name in the files; returned unchanged for files without such experts. Raises ConfigError where they
    are quantised.
    """
    names = index_of(checkpoint).names
    if not names.image_experts:
        return dict(readers)
    kept = {name: read for name, read in readers.items() if ".mlp.experts." not in name}
    for layer in moe_layers(checkpoint.config):
        first = describe(checkpoint.config, layer).num_experts
        paths = [
            {which: names.projection(which).format(layer=layer, expert=expert) for which in ("gate", "up", "down")}
            for expert in range(first, 2 * first)
        ]
        missing = next((path for each in paths for path in each.values() if f"{path}.weight" not in readers), None)
        if missing is not None:
            raise ConfigError(
                f"{checkpoint.path}: {missing}.weight, of an expert of image tokens, is missing or quantised; whole "
                "models need these experts unquantised. Load the layers with load_layer()"
            )
        stack = f"model.language_model.layers.{layer}.mlp.vision_moe.experts."
        kept[f"{stack}gate_up_proj"] = partial(_stack, readers, paths, ("gate", "up"))
        kept[f"{stack}down_proj"] = partial(_stack, readers, paths, ("down",))
    return kept


def _stack(readers: Readers, paths: list[dict[str, str]], projections: tuple[str, ...]) -> Tensor:
    """Read the experts' projections ``[E, rows of all projections, columns]``."""
    return torch.stack([torch.cat([readers[f"{each[which]}.weight"]() for which in projections]) for each in paths])
