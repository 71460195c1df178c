"""Generate tokens with a transformers model: a fixed-size cache, and on a GPU one CUDA graph per decode step.

A decode step of a Mixture-of-Experts model launches thousands of small kernels; replayed as one graph, the GPU does
not wait for Python. The graph contains the same kernels as an eager step, so the tokens are the same. Models with other
state than keys and values (Mamba, linear attention, compressed attention) use transformers' growing cache and no graph.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...parallel.generation_sync import GenerationSync
from ...placement import Placement
from ...planning import Plan
from ...runtime.devices import current_device, recording
from ..extra import import_extra
from .host_watch import HostWatch
from .plugin import layers_of

__all__ = ["Decoder", "Steps"]


# Eager steps before the capture. The second one is watched, when one-time work of the first is done.
_STEPS_BEFORE_CAPTURE = 2
# torch hands out 32 streams in rotation, and all threads capture on one stream: without the lock, one thread could
# prepare on the stream that another thread captures.
_capturing = threading.Lock()
# Cache layers whose only state is keys and values of fixed size; the indexed layer has additional index keys.
_FIXED_SIZE_LAYERS = {"StaticLayer", "StaticSlidingWindowLayer", "StaticIndexedLayer"}


class Decoder:
    """Text generation with a causal language model of transformers.

    capture: replay decode steps as a CUDA graph if possible; a step that synchronises with the GPU or copies from the
    host is not captured. ``captured`` is whether the last call of ``generate`` used a graph.
    """

    def __init__(self, model: Any, *, capture: bool = True) -> None:
        """Create a decoder for ``model``; raises MissingExtraError without transformers."""
        self._caches = import_extra("transformers.cache_utils", "transformers")
        self.model = model
        self.capture = capture
        self.captured = False

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 40,
        penalty: float = 1.0,
        stop: tuple[int, ...] = (),
        written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return ``ids [B, T]`` (T >= 1, no padding) continued by at most ``tokens`` tokens.

        temperature: 0 is greedy; otherwise a token is sampled from the ``top_k`` most likely ones.
        penalty: repetition penalty; divides positive and multiplies negative logits of earlier tokens.
        stop: ids that end a sequence; generation ends when all sequences have ended.
        written: called after each token with the number of generated tokens; the device may still be computing it.

        If the experts are split over ranks, all ranks must call it with the same ``tokens`` and ``stop``. Raises
        InputError for ids of another shape.
        """
        if ids.dim() != 2 or ids.shape[1] < 1 or tokens < 1:
            raise InputError(
                f"generate: ids {tuple(ids.shape)} and {tokens} tokens; allowed: [B, T >= 1] and 1 or more"
            )
        with torch.inference_mode(), current_device(ids.device):
            prompt_length = ids.shape[1]
            max_length = prompt_length + tokens
            steps = Steps(self.model, self._caches, max_length, self.capture and ids.is_cuda)
            output = torch.cat([ids, ids.new_zeros(ids.shape[0], tokens)], 1)
            ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
            logits = steps.first(ids)
            # Not before the first forward pass, which may build the layers.
            layer_plans = [layer.plan for layer in layers_of(self.model)]
            steps.capture = steps.capture and all(plan.capturable for plan in layer_plans)
            sync = GenerationSync(_shared_placement(layer_plans), (tokens, bool(stop)))
            for position in range(prompt_length, max_length):
                scores = _penalised(logits, output[:, :position], penalty)
                token = sync.choice(_pick(scores, temperature, top_k))
                output[:, position] = token
                if written is not None:
                    written(position + 1 - prompt_length)
                if stop:
                    ended |= torch.isin(token, torch.tensor(stop, device=ids.device))
                    if sync.ended(ended):
                        return output[:, : position + 1]
                if position + 1 < max_length:
                    logits = steps.next(token, position)
            self.captured = steps.graph is not None
            return output


class Steps:
    """The forward passes of one generation: the prompt, then one token at a time.

    Inputs of ``run``: token ``[B, 1]``, position ``[1, 1]`` and mask, which is None if the model builds its mask.
    """

    def __init__(self, model: Any, caches: Any, length: int, capture: bool) -> None:
        """Create a cache of ``length`` positions.

        caches: transformers' ``cache_utils`` module. capture: replay steps as a CUDA graph.
        """
        self.model = model
        # transformers 5.24 renamed past_key_values to cache; model code in a checkpoint may keep the old name.
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        # If it is None, the model creates a cache in the first pass.
        self.cache = _fixed_cache(caches, model.config, length)
        # A sliding-window cache runs other Python code once it is full, which a graph cannot follow.
        self.masked = self.cache is not None and not any(
            layer.is_sliding and layer.max_cache_len < length for layer in self.cache.layers
        )
        self.capture = capture and self.masked
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def first(self, ids: Tensor) -> Tensor:
        """Run the prompt ``[B, T]``; return the logits ``[B, V]`` of the next token."""
        self.token = ids.new_zeros(ids.shape[0], 1)
        self.position = ids.new_zeros(1, 1)
        logits = self._forward(ids, torch.arange(ids.shape[1], device=ids.device)[None], None)
        # The steps pass a mask, because a model that builds one copies a number from the host, as no graph can.
        self.mask: Tensor | None = None
        if self.masked:
            length = self.cache.layers[0].max_cache_len
            dtype = self.model.dtype
            masked = torch.full((1, 1, 1, length), torch.finfo(dtype).min, dtype=dtype, device=ids.device)
            self.mask = masked.repeat(ids.shape[0], 1, 1, 1)
            self.mask[..., : ids.shape[1]] = 0
        return logits

    def next(self, token: Tensor, position: int) -> Tensor:
        """Run ``token [B]`` at ``position``; return logits that the next call overwrites."""
        self.token.copy_(token[:, None])
        self.position.fill_(position)
        if self.mask is not None:
            self.mask[..., position] = 0
        if not self.capture:
            return self.run()
        if self.done < _STEPS_BEFORE_CAPTURE:
            with _capturing:
                return self._prepare()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use CUDA during the capture.
            with _capturing, recording(self.graph, self.token.device, errors="thread_local"):
                self.logits = self.run()
        self.graph.replay()
        return self.logits

    def _prepare(self) -> Tensor:
        """Run an eager step on another stream, for compilation and allocations that a capture cannot contain."""
        stream = torch.cuda.Stream()
        watch = HostWatch()
        stream.wait_stream(torch.cuda.current_stream())
        self.done += 1
        with torch.cuda.stream(stream), watch if self.done == _STEPS_BEFORE_CAPTURE else nullcontext():
            out = self.run()
        torch.cuda.current_stream().wait_stream(stream)
        if watch.first_sync is not None:
            self.capture = False
        return out

    def run(self) -> Tensor:
        """Run ``token`` at ``position``; return the logits ``[B, V]`` of the next token."""
        return self._forward(self.token, self.position, self.mask)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        options = {self.cache_name: self.cache, "use_cache": True, "logits_to_keep": 1}
        out = self.model(ids, attention_mask=mask, position_ids=positions, **options)
        self.cache = getattr(out, self.cache_name)
        if self.cache is None:
            raise InputError(
                f"generate: {type(self.model).__name__} returns no cache ({self.cache_name}), so it cannot decode"
            )
        return out.logits[:, -1].float()


def _fixed_cache(caches: Any, config: Any, length: int) -> Any:
    """Return a fixed-size cache, or None if a layer has other state than keys and values."""
    try:
        cache = caches.StaticCache(config=config, max_cache_len=length)
    except KeyError:  # transformers has only a growing cache for this type of layer
        return None
    return cache if all(type(layer).__name__ in _FIXED_SIZE_LAYERS for layer in cache.layers) else None


def _shared_placement(plans: Sequence[Plan]) -> Placement | None:
    """Return the placement of experts that are split over ranks, None if all are local."""
    return next((plan.problem.placement for plan in plans if plan.groups), None)


def _penalised(logits: Tensor, before: Tensor, penalty: float) -> Tensor:
    if penalty == 1.0:
        return logits
    scores = logits.gather(1, before)
    return logits.scatter(1, before, torch.where(scores > 0, scores / penalty, scores * penalty))


def _pick(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    if temperature <= 0:
        return logits.argmax(-1)
    candidates = logits.topk(min(top_k, logits.shape[-1]), -1)
    index = torch.multinomial(torch.softmax(candidates.values / temperature, -1), 1)
    return candidates.indices.gather(1, index)[:, 0]
