"""Counts of what layers were asked, step by step, while a model runs; a trace when it is done."""

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
    def watching(self, modules: Mapping[int, nn.Module]) -> Generator[Recorder]:
        """Count what ``modules``, by layer, are called with as their second argument while the block runs."""

        def seen(layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.add(layer, inputs[1])

        hooks = [module.register_forward_pre_hook(partial(seen, layer)) for layer, module in modules.items()]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
