"""Whether another process is alive: each listens on a port as long as it runs, and others connect to it.

A killed process refuses connections at once, long before a wait for it would time out. The port belongs to a store,
through which the remaining processes meet when the group's store has died with its host process.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

from torch import distributed

__all__ = ["Endpoint", "is_dead", "local_endpoint", "store_at"]

_CONNECT_TIMEOUT = 1.0  # seconds
_TCP_STORE: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it


class Endpoint(NamedTuple):
    """Where a process listens: the name of its host, the host's address for others, and the port."""

    host: str
    address: str
    port: int

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Address and port for this process."""
        address = "127.0.0.1" if self.host == socket.gethostname() else self.address
        return address, self.port


@cache
def _local_store() -> Any:
    return _TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@cache
def local_endpoint() -> Endpoint:
    """Return where this process listens; the first call opens the port."""
    name = socket.gethostname()
    address = "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(name)
    return Endpoint(name, address, _local_store().port)


def is_dead(endpoint: Endpoint) -> bool:
    """Return whether connections to ``endpoint`` are refused; False if unknown, as when a host does not answer."""
    try:
        socket.create_connection(endpoint.host_and_port, timeout=_CONNECT_TIMEOUT).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return False


def store_at(endpoint: Endpoint, timeout: float) -> Any:
    """Return the store of the process at ``endpoint``; raises RuntimeError without one within ``timeout`` seconds."""
    if endpoint == local_endpoint():
        return _local_store()
    if is_dead(endpoint):  # torch would retry until the timeout
        raise RuntimeError(f"nobody listens at {endpoint.host_and_port}")
    host, port = endpoint.host_and_port
    return _TCP_STORE(host, port, is_master=False, timeout=timedelta(seconds=timeout))
