"""The method of a vLLM layer that runs packed experts, and the operation that the compiler sees."""

import functools
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...layer import MoELayer
from ...types import Routing
from ..extra import import_extra
from .layers import exchanges_tokens
from .options import MODE

__all__ = ["method_class", "refuse_discarding", "vllm_experts"]


@functools.cache
def method_class() -> Any:
    """Return the class that replaces the method of a vLLM layer."""
    base: Any = import_extra(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base", group="vllm"
    ).FusedMoEMethodBase

    class CollegiumMoEMethod(base):
        """Method of a layer with packed experts. vLLM routes, and sums the outputs of the ranks."""

        skip_forward_padding = True

        def __init__(self, moe: Any, packed: MoELayer) -> None:
            super().__init__(moe)
            self.packed = packed
            self.exchanges = exchanges_tokens(moe)

        @property
        def supports_internal_mk(self) -> bool:
            """True: vLLM routes the local tokens, whose padding it knows, and ``run`` exchanges them afterwards."""
            return True

        def create_weights(self, *_: Any, **__: Any) -> None:
            raise InputError(f"weights of packed experts cannot be changed; restart the engine, or use {MODE}=off")

        process_weights_after_loading = create_weights

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            return None

        # vLLM passes weights before ids, Collegium ids before weights.
        def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            if torch.compiler.is_compiling():
                return torch.ops.collegium.vllm_experts(x, topk_ids, topk_weights, layer.layer_name)
            return self.run(x, topk_ids, topk_weights)

        def run(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            """Return the output for the local tokens ``x [T, H]``, summed over the ranks that exchange tokens."""
            if not self.exchanges:
                return self.packed(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))
            group = import_extra("vllm.distributed.parallel_state", group="vllm").get_ep_group()
            x, topk_weights, topk_ids = group.dispatch(x, topk_weights, topk_ids, self.moe.is_sequence_parallel)
            out = self.packed(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))
            return group.combine(out, self.moe.is_sequence_parallel)

    return CollegiumMoEMethod


@torch.library.custom_op("collegium::vllm_experts", mutates_args=())
def vllm_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer_name: str) -> Tensor:
    """Return the output of the experts of vLLM's layer ``layer_name`` for ``x [T, H]``."""
    layer = import_extra("vllm.forward_context", group="vllm").get_forward_context().no_compile_layers[layer_name]
    with layer._sequence_parallel_context():  # which was traced away; it has the sizes of the ranks' tokens
        return layer.routed_experts.quant_method.run(x, topk_ids, topk_weights)


@vllm_experts.register_fake
def _vllm_experts_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def refuse_discarding() -> None:
    """Make calls that discard the weights on a GPU an error: packed experts cannot be loaded again.

    Sleep level 1 copies the weights to the CPU and back, packed experts included.
    """
    worker = import_extra("vllm.v1.worker.gpu_worker", group="vllm").Worker
    original_sleep, original_discard = worker.sleep, worker.discard
    if getattr(worker, "collegium", False):
        return

    @functools.wraps(original_sleep)
    def sleep(self: Any, level: int = 1) -> None:
        if level > 1 and _has_packed_experts(self):
            raise _discarding_error(f"sleep level {level}")
        original_sleep(self, level)

    @functools.wraps(original_discard)
    def discard(self: Any, tags: tuple[str, ...]) -> None:
        if "weights" in tags and _has_packed_experts(self):
            raise _discarding_error(f"discard({tags})")
        original_discard(self, tags)

    worker.sleep, worker.discard, worker.collegium = sleep, discard, True


def _has_packed_experts(worker: Any) -> bool:
    """Return whether a layer of the worker's model, or of its draft model, has packed experts."""
    models = [model for model in (worker.model_runner.model, worker.get_draft_model()) if model is not None]
    modules = [module for model in models for module in model.modules()]
    return any(isinstance(getattr(module, "quant_method", None), method_class()) for module in modules)


def _discarding_error(call: str) -> InputError:
    return InputError(
        f"{call} discards the weights, and packed experts cannot be loaded again; allowed: sleep level 1, which keeps "
        f"them on the CPU, or {MODE}=off"
    )
