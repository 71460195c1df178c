"""Whether another process still lives: each keeps a port open for as long as it runs, and others knock.

A process that was killed refuses at once, long before a wait for it would end. Behind the door is a store of its own,
through which the processes that are left find each other when the group's store died with its host.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

from torch import distributed

__all__ = ["Endpoint", "is_dead", "local_endpoint", "store_at"]

_KNOCK = 1.0  # seconds
_TCP: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it


class Endpoint(NamedTuple):
    """Where a process listens: the name of its host, the host's address for others, and the port."""

    host: str
    address: str
    port: int

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Address and port for this process."""
        return ("127.0.0.1" if self.host == socket.gethostname() else self.address), self.port


@cache
def _store() -> Any:
    return _TCP("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@cache
def local_endpoint() -> Endpoint:
    """Return where this process listens, opening its port at the first call."""
    name, address = socket.gethostname(), "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(name)
    return Endpoint(name, address, _store().port)


def is_dead(door: Endpoint) -> bool:
    """Return whether nobody listens there any more; False where that cannot be said, as when a host does not answer."""
    try:
        socket.create_connection(door.host_and_port, timeout=_KNOCK).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return False


def store_at(door: Endpoint, seconds: float) -> Any:
    """Return the store of the process at ``door``; raises RuntimeError where there is none within ``seconds``."""
    if door == local_endpoint():
        return _store()
    if is_dead(door):  # torch would try for as long as it may
        raise RuntimeError(f"nobody listens at {door.host_and_port}")
    host, port = door.host_and_port
    return _TCP(host, port, is_master=False, timeout=timedelta(seconds=seconds))
