"""What the ranks of a layer agree on before a pass.

Ranks that read each other's memory run their passes in a block that all of them share, so each pass starts with an
exchange of a few words on the host. Other dispatchers need none: their handshake does nothing.
"""

from collections.abc import Hashable
from typing import Any

from ..parallel import Dispatcher, SymmetricDispatcher
from ..runtime.memory import Memory, MemoryMap

__all__ = ["Handshake", "handshake_of"]


class Handshake:
    """The handshake of dispatchers that need none.

    workspaces: lends the memory of passes; None: the layer's device does. symmetric: ranks read each other's memory.
    """

    workspaces: Any = None
    symmetric = False

    def sync_pass(self, memory: Memory, tokens: int, top_k: int) -> Hashable:
        """Agree with the other ranks on a pass in ``memory``; return a key that is equal for passes of one kind."""
        return None

    def sync_call(self, tokens: int, top_k: int) -> None:
        """Agree as ``sync_pass`` does, without a pass that follows."""


class _SymmetricHandshake(Handshake):
    """The handshake of ranks that read each other's memory; building it registers the layer, on all ranks together."""

    symmetric = True

    def __init__(self, dispatcher: SymmetricDispatcher, memory_map: MemoryMap) -> None:
        self.workspaces = dispatcher.blocks
        self._dispatcher = dispatcher
        self._layer_number = dispatcher.register_layer(memory_map)

    def sync_pass(self, memory: Memory, tokens: int, top_k: int) -> Hashable:
        return self._dispatcher.sync_pass(memory, self._layer_number, tokens, top_k)

    def sync_call(self, tokens: int, top_k: int) -> None:
        self._dispatcher.sync_call(self._layer_number, tokens, top_k)


def handshake_of(dispatcher: Dispatcher, memory_map: MemoryMap) -> Handshake:
    """Return the handshake of a layer with ``dispatcher``, whose passes use the regions of ``memory_map``.

    Raises what ``SymmetricDispatcher.register_layer`` does.
    """
    if isinstance(dispatcher, SymmetricDispatcher):
        return _SymmetricHandshake(dispatcher, memory_map)
    return Handshake()
