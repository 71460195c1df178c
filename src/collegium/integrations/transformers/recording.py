"""Which experts the tokens of a whole model go to, counted on the host while transformers runs it."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...balance.load import LoadTrace
from ...errors import InputError
from ...layer import MoELayer
from .blocks import blocks_of
from .modules import experts_modules
from .plugin import layers_of

__all__ = ["Recorder", "recording"]


class Recorder:
    """Counts of the forward passes that ran while ``recording``, in the order of ``layers``, the layers' indices."""

    def __init__(self, layers: dict[int, MoELayer]) -> None:
        """Have counted nothing yet; raises InputError for layers with different numbers of experts."""
        self.layers = tuple(layers)
        self._spec = layers[self.layers[0]].spec
        self._bytes = max(layer.plan.expert_bytes for layer in layers.values())
        counts = sorted({layer.spec.num_experts for layer in layers.values()})
        if len(counts) > 1:
            raise InputError(f"recording: layers have {counts} experts; a trace is of layers with the same number")
        self._steps: list[dict[int, Tensor]] = []

    def add(self, layer: int, topk_ids: Tensor) -> None:
        """Add what ``layer`` was asked. A layer that is asked again begins the next step."""
        if not self._steps or layer in self._steps[-1]:
            self._steps.append({})
        ids, experts = topk_ids.reshape(-1), self._spec.num_experts
        known = ids[(ids >= 0) & (ids < experts)].to(torch.int64)
        self._steps[-1][layer] = torch.bincount(known, minlength=experts).cpu()

    def trace(self, model: str) -> LoadTrace:
        """Return what was counted; raises InputError where a pass did not ask every layer."""
        short = [step for step in self._steps if len(step) < len(self.layers)]
        if short or not self._steps:
            raise InputError(
                f"recording {model}: {len(short)} of {len(self._steps)} passes did not run all {len(self.layers)} "
                "layers; run whole forward passes of the plain model, one at a time, while it records"
            )
        counts = [[step[layer].numpy() for layer in self.layers] for step in self._steps]
        return LoadTrace(
            counts=np.array(counts, dtype=np.int64),
            model=model,
            layers=tuple(f"layer {index}" for index in self.layers),
            top_k=self._spec.routing.top_k,
            groups=self._spec.routing.groups,
            expert_bytes=self._bytes,
        )


@contextmanager
def recording(model: nn.Module) -> Generator[Recorder]:
    """Count what the experts of ``model`` are asked by every forward pass inside; reads the device at every layer.

    The layers have to be there: ``load_model`` makes them, ``register`` at the first call. Nothing is changed in what
    they compute. Raises InputError for layers that are not built and for blocks that route inside their layer, whose
    choice is not seen here. A compiled model calls no modules, so nothing is counted.
    """
    inside, modules = blocks_of(model), experts_modules(model)
    built = layers_of(model)
    if inside or not modules or len(built) != len(modules):
        raise InputError(
            f"recording {type(model).__name__}: {len(modules)} layers are routed by transformers, {len(built)} are "
            f"built, {len(inside)} route inside a block of Collegium; needed are layers that transformers routes, all "
            "of them built: use load_model(), or call the model once"
        )
    found = Recorder(dict(zip(sorted(modules), built, strict=True)))

    def seen(layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.add(layer, cast("Tensor", inputs[1]))

    hooks = [module.register_forward_pre_hook(partial(seen, layer)) for layer, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
