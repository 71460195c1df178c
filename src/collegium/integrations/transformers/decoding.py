"""Write tokens with a transformers model: a cache of fixed size, and on a GPU one CUDA graph for a decode step.

A step of a Mixture-of-Experts model launches thousands of small kernels; replayed as one graph, the GPU no longer
waits for Python. The graph holds exactly the kernels that run without it, so the tokens are the same. Models with
layers that keep another state than keys and values (Mamba, linear attention, compressed attention) get the growing
cache that transformers itself gives them, and no graph.
"""

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...parallel.generation_sync import GenerationSync
from ...runtime.devices import current_device, recording
from ..extra import extra
from .host_watch import HostWatch
from .plugin import layers_of

__all__ = ["Decoder", "Steps"]


# Steps before the one that is captured: what the first does once is no longer seen in the second, which is watched.
_BEFORE = 2
# All threads capture on one stream, and after 32 new streams torch gives out the first one again: the stream of one
# thread's preparation could be the one that another captures.
_capturing = threading.Lock()
# Layers of a cache that hold keys and values alone; an index has keys of its own beside them.
_FIXED = {"StaticLayer", "StaticSlidingWindowLayer", "StaticIndexedLayer"}


class Decoder:
    """A causal language model of transformers that continues token ids.

    capture: False never replays a decode step as a CUDA graph; otherwise it is done wherever it is possible: a step
    that waits for the GPU in between, or copies from the host, is not captured.
    ``captured`` says whether the last call of ``generate`` did.
    """

    def __init__(self, model: Any, *, capture: bool = True) -> None:
        """Keep the model; raises MissingExtraError without transformers."""
        self._caches = extra("transformers.cache_utils", "transformers")
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
        """Return ``ids [B, T]`` (T >= 1, no padding) continued by ``tokens`` tokens at most.

        temperature: 0 always takes the likeliest token, else one of the ``top_k`` likeliest is drawn. penalty: divides
        positive and multiplies negative logits of tokens that were there before. stop: ids that end a sequence;
        writing ends when each sequence has ended. written: called after each token with how many there are; the device
        may not have computed it yet. Where several ranks share the experts, all call it with as many ``tokens`` and
        the same ``stop``. Raises InputError for ids of another shape.
        """
        if ids.dim() != 2 or ids.shape[1] < 1 or tokens < 1:
            raise InputError(
                f"generate: ids {tuple(ids.shape)} and {tokens} tokens; allowed: [B, T >= 1] and 1 or more"
            )
        with torch.inference_mode(), current_device(ids.device):
            length = ids.shape[1]
            step = Steps(self.model, self._caches, length + tokens, self.capture and ids.is_cuda)
            out = torch.cat([ids, ids.new_zeros(ids.shape[0], tokens)], 1)
            ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
            logits = step.first(ids)
            # Known only now: layers are built by the first forward pass.
            step.capture = step.capture and all(layer.plan.capturable for layer in layers_of(self.model))
            plans = [layer.plan for layer in layers_of(self.model) if layer.plan.groups]
            others = GenerationSync(plans[0].problem.placement if plans else None, (tokens, bool(stop)))
            for place in range(length, length + tokens):
                chosen = others.choice(_pick(_penalised(logits, out[:, :place], penalty), temperature, top_k))
                out[:, place] = chosen
                if written is not None:
                    written(place + 1 - length)
                if stop:
                    ended |= torch.isin(chosen, torch.tensor(stop, device=ids.device))
                    if others.ended(ended):
                        return out[:, : place + 1]
                if place + 1 < length + tokens:
                    logits = step.next(chosen, place)
            self.captured = step.graph is not None
            return out


class Steps:
    """The forward passes of one text: the prompt, then one token at a time.

    token ``[B, 1]``, position ``[1, 1]`` and mask, None where the model makes its own: what ``run`` reads.
    """

    def __init__(self, model: Any, caches: Any, length: int, capture: bool) -> None:
        """Make a cache of ``length`` positions; caches: transformers' module of them. capture: steps as a graph."""
        self.model = model
        # transformers 5.24 renamed past_key_values to cache; classes of a checkpoint's code may keep the old name.
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        # Where there is none, the model makes the cache it needs in the first pass.
        self.cache = fixed = _fixed_cache(caches, model.config, length)
        # A sliding window's cache runs other Python code once it is full, which a graph cannot follow.
        slides = fixed is not None and any(layer.is_sliding and layer.max_cache_len < length for layer in fixed.layers)
        self.masked = fixed is not None and not slides
        self.capture = capture and self.masked
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def first(self, ids: Tensor) -> Tensor:
        """Run the prompt ``[B, T]``; return the logits ``[B, V]`` of what follows."""
        self.token = ids.new_zeros(ids.shape[0], 1)
        self.position = ids.new_zeros(1, 1)
        logits = self._forward(ids, torch.arange(ids.shape[1], device=ids.device)[None], None)
        # Ours for the steps: making one copies a number from the host, which no graph can hold.
        self.mask: Tensor | None = None
        if self.masked:
            length, dtype = self.cache.layers[0].max_cache_len, self.model.dtype
            hidden = torch.full((1, 1, 1, length), torch.finfo(dtype).min, dtype=dtype, device=ids.device)
            self.mask = hidden.repeat(ids.shape[0], 1, 1, 1)
            self.mask[..., : ids.shape[1]] = 0
        return logits

    def next(self, token: Tensor, position: int) -> Tensor:
        """Run ``token [B]`` at ``position``; the result is overwritten by the next call."""
        self.token.copy_(token[:, None])
        self.position.fill_(position)
        if self.mask is not None:
            self.mask[..., position] = 0
        if not self.capture:
            return self.run()
        if self.done < _BEFORE:
            with _capturing:
                return self._prepare()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # What other threads do meanwhile is none of the graph's.
            with _capturing, recording(self.graph, self.token.device, errors="thread_local"):
                self.logits = self.run()
        self.graph.replay()
        return self.logits

    def _prepare(self) -> Tensor:
        """Make a real step on another stream: it compiles and allocates what a graph must not."""
        stream, watch = torch.cuda.Stream(), HostWatch()
        stream.wait_stream(torch.cuda.current_stream())
        self.done += 1
        with torch.cuda.stream(stream), watch if self.done == _BEFORE else nullcontext():
            out = self.run()
        torch.cuda.current_stream().wait_stream(stream)
        if watch.seen is not None:
            self.capture = False
        return out

    def run(self) -> Tensor:
        """Run ``token`` at ``position``; return the logits ``[B, V]`` of what follows."""
        return self._forward(self.token, self.position, self.mask)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        options = {self.cache_name: self.cache, "use_cache": True, "logits_to_keep": 1}
        out = self.model(ids, attention_mask=mask, position_ids=positions, **options)
        self.cache = getattr(out, self.cache_name)
        if self.cache is None:
            raise InputError(
                f"generate: {type(self.model).__name__} returns no cache ({self.cache_name}) to write with"
            )
        return out.logits[:, -1].float()


def _fixed_cache(caches: Any, config: Any, length: int) -> Any:
    """Return a cache of fixed size, or None where a layer keeps another state than keys and values."""
    try:
        cache = caches.StaticCache(config=config, max_cache_len=length)
    except KeyError:  # a kind of layer that transformers has a growing cache for only
        return None
    return cache if all(type(layer).__name__ in _FIXED for layer in cache.layers) else None


def _penalised(logits: Tensor, before: Tensor, penalty: float) -> Tensor:
    if penalty == 1.0:
        return logits
    seen = logits.gather(1, before)
    return logits.scatter(1, before, torch.where(seen > 0, seen / penalty, seen * penalty))


def _pick(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    if temperature <= 0:
        return logits.argmax(-1)
    best = logits.topk(min(top_k, logits.shape[-1]), -1)
    drawn = torch.multinomial(torch.softmax(best.values / temperature, -1), 1)
    return best.indices.gather(1, drawn)[:, 0]
