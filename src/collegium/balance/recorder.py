"""Record the experts that tokens choose, layer by layer and step by step, while a model runs."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import InputError
from .load import LoadTrace

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor, nn

    from ..layer import MoELayer

__all__ = ["Recorder"]


class Recorder:
    """Counts of assignments in the forward passes of ``layers``, by index of the layer."""

    def __init__(self, layers: dict[int, MoELayer]) -> None:
        """Start without counts; raises InputError for layers with different numbers of experts."""
        self.layers = tuple(layers)
        self._spec = layers[self.layers[0]].spec
        self._bytes = max(layer.plan.expert_bytes for layer in layers.values())
        counts = sorted({layer.spec.num_experts for layer in layers.values()})
        if len(counts) > 1:
            raise InputError(f"recording: layers have {counts} experts; a trace is of layers with the same number")
        self._steps: list[dict[int, Tensor]] = []

    def add(self, layer: int, topk_ids: Tensor) -> None:
        """Add a pass of ``layer``. A second pass of the same layer begins the next step."""
        if not self._steps or layer in self._steps[-1]:
            self._steps.append({})
        ids = topk_ids.reshape(-1)
        experts = self._spec.num_experts
        valid = ids[(ids >= 0) & (ids < experts)].to(torch.int64)
        self._steps[-1][layer] = torch.bincount(valid, minlength=experts).cpu()

    def trace(self, model: str) -> LoadTrace:
        """Return the counts; raises InputError for passes that did not run every layer."""
        incomplete = [step for step in self._steps if len(step) < len(self.layers)]
        if incomplete or not self._steps:
            raise InputError(
                f"recording {model}: {len(incomplete)} of {len(self._steps)} passes did not run all {len(self.layers)} "
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
    def watching(self, modules: Mapping[int, nn.Module]) -> Generator[Recorder]:
        """Count the expert ids, the second argument of calls of ``modules`` by layer, while the block runs."""

        def count(layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.add(layer, inputs[1])

        hooks = [module.register_forward_pre_hook(partial(count, layer)) for layer, module in modules.items()]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
