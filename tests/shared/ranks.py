"""Run a function in several processes that form a group of torch.distributed."""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from multiprocessing import forkserver, get_context
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import distributed

import prefill_on_cpu
from collegium import CollegiumError
from collegium.parallel.rendezvous import timeout_seconds
from interpreting import hasten

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["error_of", "run_ranks"]


# Ranks on a CPU are forked from a process that imports these once; each rank would import for seconds otherwise.
_IMPORTED = [
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "transformers",
    "hypothesis",
    "scipy.linalg",
    "rank_cases",
    "collegium.balance",
    "collegium.layer",
    "collegium.layer_builder",
    "collegium.pipelines",
    "collegium.testing.compare",
    "collegium.experts.triton.prefill",
    "collegium.kernels.cpu_fused",
    "collegium.kernels.grouped_gemm",
    "collegium.kernels.mega",
    "collegium.kernels.peer",
    "collegium.kernels.permute",
    "collegium.kernels.quantize",
    "collegium.kernels.w4a8",
    "collegium.kernels.weighted_sum",
]


def _rank(
    function: Callable[..., Any], rank: int, world: int, where: tuple[int, str, dict[str, str]], answers: Any
) -> None:
    port, backend, environ = where
    try:
        os.environ.update(environ)
        torch.set_num_threads(1)
        timeout_seconds(60)  # several processes share few cores, and one may still compile
        if "nccl" not in backend:
            # Fresh memory is poisoned, as tests/conftest.py does it.
            poison: Any = torch.utils.deterministic
            poison.fill_uninitialized_memory = True
            torch.use_deterministic_algorithms(True)
        if os.environ.get("TRITON_INTERPRET") == "1":
            hasten()
            prefill_on_cpu.install()
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        store = distributed.TCPStore("localhost", port, is_master=False)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
        answers.put((rank, function(rank), None))
        distributed.barrier()
        distributed.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


@cache
def _start_forkserver() -> None:
    """Start the process that ranks are forked from, with this process's import path, which Python 3.11 drops."""
    get_context("forkserver").set_forkserver_preload(_IMPORTED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()


def run_ranks(function: Callable[[int], Any], world: int, backend: str = "gloo", seconds: float = 120) -> list[Any]:
    """Return what ``function(rank)``, of a module, gives in each of ``world`` processes; raises what a rank raised."""
    # A copy of a process must not find CUDA in use.
    context = get_context("spawn" if "nccl" in backend else "forkserver")
    if "nccl" not in backend:
        _start_forkserver()
    answers: Any = context.Queue()
    # Here, so that no rank has to be the last one, and no port is picked that another program takes meanwhile.
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    where = store.port, backend, {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    jobs = [context.Process(target=_rank, args=(function, r, world, where, answers), daemon=True) for r in range(world)]
    for job in jobs:
        job.start()
    found: dict[int, Any] = {}
    try:
        for _ in range(world):
            rank, value, error = answers.get(timeout=seconds)
            if error is not None:
                raise AssertionError(f"rank {rank}:\n{error}")
            found[rank] = value
    finally:
        for job in jobs:
            # Who has answered may still wait, on a busy machine, for the others to leave.
            job.join(timeout=60 if len(found) == world else 1)
            job.kill()
    ended = [job.exitcode for job in jobs]
    assert ended == [0] * world, f"ranks ended with {ended}"
    return [found[rank] for rank in range(world)]


def error_of(ask: Any) -> str:
    """Return what ``ask`` raises, with its class."""
    try:
        ask()
    except CollegiumError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
