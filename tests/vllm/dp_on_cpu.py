"""What vLLM 0.32 lacks for data parallelism on a CPU: collectives for ranks with different numbers of tokens.

Workers import this before they load a model (``worker_extension_cls``). The exchange itself stays vLLM's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed import all_reduce, broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

__all__ = ["Extension", "join"]


class Extension:
    """Nothing is added to a worker: its module is imported for its name."""


def join(rank: int, ranks: int, port: int) -> None:
    """Make engines of this process rank ``rank`` of ``ranks`` that share their experts."""
    os.environ |= {
        "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip


def _gather(self: Any, x: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    for rank, size in enumerate(sizes or [len(x)] * self.world_size):
        part = x.clone() if rank == self.rank_in_group else x.new_empty(size, *x.shape[1:])
        broadcast(part, src=self.ranks[rank], group=self.device_group)
        parts.append(part)
    return torch.cat(parts)


def _all_gatherv(self: Any, x: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    return [_gather(self, each, sizes) for each in x] if isinstance(x, list) else _gather(self, x, sizes)


def _reduce_scatterv(self: Any, x: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    total = x.clone()
    all_reduce(total, group=self.device_group)
    return total.split(sizes or [len(x) // self.world_size] * self.world_size)[self.rank_in_group]


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
