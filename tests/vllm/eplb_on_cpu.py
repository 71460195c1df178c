"""What vLLM 0.32 lacks to balance experts (EPLB) on a CPU: its configuration refuses, and pieces are for GPUs only.

Balancing itself stays vLLM's: replicas, loads, policy, moves and maps. Here are the switch that its configuration does
not let through, the router's map from logical to physical experts (on GPUs a kernel), the state that its runner for
CPUs does not make, and events that take no time. Workers import this before they load a model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.parallel import EPLBConfig
from vllm.distributed.eplb import eplb_state
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

__all__ = ["Extension", "asked"]

_KNUTH = 2654435769  # token by token, as vLLM's kernel spreads them over the replicas of an expert


def asked(**options: Any) -> None:
    """Let engines of this process balance experts with these options, as ``--eplb-config`` has them."""
    build: Any = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = build(self, *args, **kwargs)
        own = EPLBConfig(use_async=False, communicator="torch_nccl", **options)  # torch's messages, through gloo here
        for name, value in {
            "enable_eplb": True,
            "eplb_config": own,
            "worker_extension_cls": "eplb_on_cpu.Extension",
        }.items():
            object.__setattr__(config.parallel_config, name, value)
        return config

    EngineArgs.create_engine_config = create_engine_config


class Extension:
    """Nothing is added to a worker: its module is imported for its name."""


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    wait = synchronize = record

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens = torch.arange(len(topk_ids))[:, None]
    ids = topk_ids.long()
    which = (tokens * _KNUTH & 0xFFFFFFFF) % logical_replica_count[ids]
    found = logical_to_physical_map[ids].gather(-1, which[..., None])[..., 0]
    real = tokens < (len(ids) if num_unpadded_tokens is None else num_unpadded_tokens)
    counted = (real & record_enabled).expand(found.shape).to(expert_load_view.dtype)
    expert_load_view.index_add_(0, found.flatten(), counted.flatten())
    return found.to(topk_ids.dtype)


def _load_model(self: Any, *args: Any, **kwargs: Any) -> None:
    _loaded(self, *args, **kwargs)
    if self.parallel_config.enable_eplb:
        self._moe_model = get_mixture_of_experts_model(self.model)
        self.eplb_state = eplb_state.EplbState(self.parallel_config, self.device)
        self.eplb_state.add_model(self._moe_model, self.model_config)


def _rearrange(old: torch.Tensor, new: torch.Tensor, *rest: Any) -> None:
    _moved(old, new, *rest)
    slots = new.shape[1] // torch.distributed.get_world_size()
    where = torch.arange(new.shape[1]) // slots
    came = sum(
        int(not ((before == expert) & (where == rank)).any())
        for before, after in zip(old.cpu(), new, strict=True)
        for expert, rank in zip(after.tolist(), where.tolist(), strict=True)
    )
    say = init_logger("vllm.eplb_on_cpu")
    say.info(
        "EPLB: %d of %d slots hold another expert, %d from another rank", (old.cpu() != new).sum(), new.numel(), came
    )


_loaded: Any = CPUModelRunner.load_model
_moved: Any = eplb_state.rearrange_expert_weights_inplace
torch.Event = _Event  # type: ignore[misc, assignment]
base_router.eplb_map_to_physical_and_record = _physical
CPUModelRunner.load_model = _load_model
eplb_state.rearrange_expert_weights_inplace = _rearrange
