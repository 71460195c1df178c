"""Join the other processes that torchrun started, for as long as a command runs, and leave them in order."""

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

__all__ = ["PATIENCE", "is_first", "joined", "ranks_started"]

PATIENCE = 120.0  # seconds that ranks of a command wait for each other: they read and compile at different speeds
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def ranks_started(environ: MutableMapping[str, str]) -> int:
    """Return how many processes ``environ`` says were started together; raises InputError where that is no number."""
    return _number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else 1


def is_first(environ: MutableMapping[str, str]) -> bool:
    """Return whether this process is alone or the first one, which prints."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return ranks_started(environ) < 2 or environ.get("RANK") == "0"


@contextmanager
def joined(
    environ: MutableMapping[str, str], device: str | None, *, same_tokens: bool
) -> Generator[Ranks | str | None]:
    """Give what layers are to be loaded on: ``device`` in a single process, otherwise this rank's Ranks.

    environ: of the process; torchrun leaves there how many ranks there are, and which one this is. A torch.distributed
    that is already initialised is used and stays. On GPUs rank n of a machine takes GPU n. Raises InputError where the
    environment, the port or the devices are not those of a launch, and RankError where the others do not come.
    """
    if distributed.is_available() and distributed.is_initialized():
        ranks = Ranks.of(same_tokens=same_tokens)
        if not ranks.device.startswith(device or ""):
            raise InputError(f"device {device!r} was asked for, the backend of torch.distributed serves {ranks.device}")
        yield ranks
        return
    if ranks_started(environ) < 2:
        yield device
        return
    backend = _join(environ, device)
    before, done = timeout_seconds(), False
    timeout_seconds(PATIENCE)
    try:
        yield Ranks.of(same_tokens=same_tokens)
        rendezvous_of().exchange(None, "the end of the command")
        done = True
    finally:
        timeout_seconds(before)
        if not done and "nccl" in backend:
            with suppress(RuntimeError):  # what the others will never finish is not waited for
                distributed.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        # A process that still has a group when it ends aborts.
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _join(environ: MutableMapping[str, str], device: str | None) -> str:
    """Initialise torch.distributed; return its backend."""
    missing = [name for name in (*_NUMBERS, *_PLACE) if not environ.get(name)]
    if missing:
        raise InputError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set and {', '.join(missing)} not; launch with torchrun, which sets "
            "them all (torchrun --nproc-per-node 2 -m collegium ...), or unset WORLD_SIZE to run in one process"
        )
    world, rank, local = (_number(environ, name) for name in _NUMBERS)
    if not rank < world:
        raise InputError(f"RANK={rank} and WORLD_SIZE={world} are set; a rank is below their number")
    backend = "gloo"
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device {device!r} was asked for on {world} ranks; allowed: cpu, cuda, each takes its own")
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        here, seen = max(local + 1, _number(environ, "LOCAL_WORLD_SIZE", local + 1)), torch.cuda.device_count()
        if here > seen:
            raise InputError(
                f"{here} ranks were started on a machine where torch sees {seen} GPUs; launch with --nproc-per-node "
                f"{seen}, or run on the CPU with --device cpu"
            )
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(local)
    if _number(environ, "LOCAL_WORLD_SIZE", 0) == world:
        # All are on this machine, whose own name need not be one that the network knows.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        distributed.init_process_group(backend, timeout=timedelta(seconds=PATIENCE))
    except (RuntimeError, ValueError) as error:  # what torch raises for a network, a store and a value
        raise _refused(environ, world, rank, error) from error
    return backend


def _refused(environ: MutableMapping[str, str], world: int, rank: int, error: Exception) -> InputError | RankError:
    where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    said = " ".join(str(error).split())[:300]
    if "EADDRINUSE" in said or "already in use" in said:
        return InputError(
            f"rank {rank} was to open port {where}, which another program has; choose another with --master-port, or "
            "let torchrun find one (torchrun --standalone)"
        )
    return RankError(
        f"rank {rank} of {world} found no other ranks at {where} within {PATIENCE:g} s; start all of them, with the "
        f"same address and port. torch.distributed says: {said}",
        ranks=(),
        phase="joining",
    )


def _number(environ: MutableMapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise InputError(f"{name}={text!r} is set; it has to be a number, as torchrun sets it")
    return int(text)
