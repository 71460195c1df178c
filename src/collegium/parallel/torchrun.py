"""Join the process group of torchrun while a command runs, and leave it in an orderly way."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from ..errors import InputError, RankError
from .ranks import Ranks
from .rendezvous import rendezvous_of, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Generator, MutableMapping

__all__ = ["PATIENCE", "is_first", "process_group", "ranks_started"]

PATIENCE = 120.0  # timeout in seconds: the ranks of a command read and compile at different speeds
_RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


def ranks_started(environ: MutableMapping[str, str]) -> int:
    """Return the number of processes that ``environ`` declares; raises InputError if it is not a number."""
    return _number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else 1


def is_first(environ: MutableMapping[str, str]) -> bool:
    """Return whether this process is the only or the first one, which prints."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return ranks_started(environ) < 2 or environ.get("RANK") == "0"


@contextmanager
def process_group(
    environ: MutableMapping[str, str], device: str | None, *, same_tokens: bool
) -> Generator[Ranks | str | None]:
    """Yield the device argument for loading layers: ``device`` in a single process, otherwise this rank's Ranks.

    environ: of the process, where torchrun sets the number of ranks and the rank of this process. If torch.distributed
    is already initialised, it is used and left as it is. On GPUs rank n of a machine uses GPU n. Raises InputError
    where the environment, the port or the devices do not fit a launch, and RankError where other ranks do not respond.
    """
    if distributed.is_available() and distributed.is_initialized():
        ranks = Ranks.of(same_tokens=same_tokens)
        if not ranks.device.startswith(device or ""):
            raise InputError(
                f"device {device!r} was requested, the backend of torch.distributed serves {ranks.device}; pass "
                "that, or initialise torch.distributed with another backend"
            )
        yield ranks
        return
    if ranks_started(environ) < 2:
        yield device
        return
    backend = _join(environ, device)
    previous_timeout = timeout_seconds()
    done = False
    timeout_seconds(PATIENCE)
    try:
        yield Ranks.of(same_tokens=same_tokens)
        rendezvous_of().exchange(None, "the end of the command")
        done = True
    finally:
        timeout_seconds(previous_timeout)
        if not done and "nccl" in backend:
            with suppress(RuntimeError):  # the others will not finish their collectives, so do not wait for them
                distributed.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        # A process that still has a group at exit aborts.
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _join(environ: MutableMapping[str, str], device: str | None) -> str:
    """Initialise torch.distributed; return its backend."""
    missing = [name for name in (*_RANK_VARIABLES, *_ADDRESS_VARIABLES) if not environ.get(name)]
    if missing:
        raise InputError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set and {', '.join(missing)} not; launch with torchrun, which sets "
            "them all (torchrun --nproc-per-node 2 -m collegium ...), or unset WORLD_SIZE to run in one process"
        )
    world, rank, local_rank = (_number(environ, name) for name in _RANK_VARIABLES)
    if not rank < world:
        raise InputError(f"RANK={rank} and WORLD_SIZE={world} are set; a rank is below their number")
    backend = "gloo"
    if device not in (None, "cpu", "cuda"):
        raise InputError(
            f"device {device!r} was requested on {world} ranks; allowed: cpu, or cuda for one GPU per rank"
        )
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        local_ranks = max(local_rank + 1, _number(environ, "LOCAL_WORLD_SIZE", local_rank + 1))
        gpus = torch.cuda.device_count()
        if local_ranks > gpus:
            raise InputError(
                f"{local_ranks} ranks were started on a machine where torch sees {gpus} GPUs; launch with "
                f"--nproc-per-node {gpus}, or run on the CPU with --device cpu"
            )
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(local_rank)
    if _number(environ, "LOCAL_WORLD_SIZE", 0) == world:
        # All ranks are on this machine, whose host name may not be resolvable.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        distributed.init_process_group(backend, timeout=timedelta(seconds=PATIENCE))
    except (RuntimeError, ValueError) as error:  # what torch raises for a network, a store and a value
        raise _refused(environ, world, rank, error) from error
    return backend


def _refused(environ: MutableMapping[str, str], world: int, rank: int, error: Exception) -> InputError | RankError:
    address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    message = " ".join(str(error).split())[:300]
    if "EADDRINUSE" in message or "already in use" in message:
        return InputError(
            f"rank {rank} was to open port {address}, which another program has; choose another with --master-port, or "
            "let torchrun find one (torchrun --standalone)"
        )
    return RankError(
        f"rank {rank} of {world} found no other ranks at {address} within {PATIENCE:g} s; start all of them, with the "
        f"same address and port. torch.distributed reports: {message}",
        ranks=(),
        phase="joining",
    )


def _number(environ: MutableMapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name}={text!r} is set; it has to be a number, as torchrun sets it")
    return int(text)
