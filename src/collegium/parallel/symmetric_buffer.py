"""The memory of passes whose ranks read each other's: one symmetric block for all layers that share ranks and device.

Passes of different layers follow each other in one block, so each zone of it is for one kind of region in all layers.
In front is what peers write. They do so after their pull of a pass, so after every rank's post of it, which follows
this rank's last sum; and this rank's sum of the pass waits for all of them. A rank that others gave up waiting for may
still write after that, so there are no indices there, which kernels would follow. Then comes what peers read late,
after this rank may have begun its next pass: all of it is written after a pull.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, RankError
from ..runtime.memory import Arena, Region, current_stream, is_capturing, is_stream_capturing, memory_map, wait_for
from ..runtime.symmetric import SymmetricWorkspace
from .groups import group_named, world_ranks
from .peers import HEAD_BYTES, PeerBuffers
from .peers_in_torch import raise_status, release
from .rendezvous import LOOK, Rendezvous, known_to_all, rendezvous_of, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ..runtime.memory import MemoryMap

__all__ = ["LATE", "WRITTEN", "PeerArena", "SymmetricBuffers", "release_symmetric_buffers", "symmetric_buffers"]

_PHASE = "symm_mem dispatch"
_numbers = itertools.count()
# By the last product and by ``reduce``, each of any rank; or by this rank's alone, and then read late.
WRITTEN = ("experts/rows", "back/sums")
# By ``permute``, and on a CPU.
LATE = ("order", "back/rows", "back/slots")


class PeerArena(Arena):
    """The ``Memory`` of a layer's passes in the shared block. peers: of the pass that runs."""

    def __init__(self, block: torch.Tensor, places: MemoryMap) -> None:
        super().__init__(block, places)
        self.peers: PeerBuffers | None = None


class _ShmMailbox:
    """One word of every rank that all ranks of the host read: a meeting in microseconds, where a store takes hundreds.

    A word holds all that is said, so nothing has to be ordered. Two take turns: who writes the next but one has been
    answered by everybody, who therefore read this one. A rank that gives up writes ``~place`` of the one it gave up on.
    """

    def __init__(self, group: str, meeting: Rendezvous) -> None:
        space = SymmetricWorkspace(group_named(group), torch.device("cpu"), 4096)
        self._meeting, self._rank, self._count = meeting, space.rank, 0
        self._error: RankError | None = None
        self._words: list[Any] = [block.view(torch.int64).numpy() for block in space.blocks]

    def exchange(self, layer: int, tokens: int, top_k: int) -> list[tuple[int, int, int]]:
        """Return what every rank gave. Raises RankError where one does not come, and ever after."""
        if self._error is not None:  # what this rank's words say stays
            raise RankError(str(self._error), ranks=self._error.ranks, phase=_PHASE)
        self._count += 1
        turn, number, own = self._count % 2, self._count & 0x7FFFF, self._words[self._rank]
        own[turn] = number << 44 | layer << 32 | min(top_k, 0xFF) << 24 | min(tokens, 0xFFFFFF)
        found = [self._answer(rank, turn, number) for rank in range(len(self._words))]
        return [(word >> 32 & 0xFFF, word & 0xFFFFFF, word >> 24 & 0xFF) for word in found]

    def _answer(self, rank: int, turn: int, number: int) -> int:
        words, looks, started = self._words[rank], 0, time.monotonic()
        look = started + LOOK
        while words[turn] >> 44 != number:
            looks, now, ended = looks + 1, time.monotonic(), ()
            if now > look:
                look, ended = now + LOOK, self._meeting.dead_ranks()
            # Any rank that gave up will never come again, and this one would wait for nothing.
            quitter = next((place for place, own in enumerate(self._words) if own[turn] < 0), None)
            if ended or quitter is not None or now - started > timeout_seconds():
                self._give_up(rank, quitter, turn)
            if looks > 1000:
                time.sleep(2e-5)
        return int(words[turn])

    def _give_up(self, rank: int, quitter: int | None, turn: int) -> None:
        """Raise the RankError of waiting in vain for ``rank``, or because ``quitter`` gave up on some rank before."""
        lost, said = self._meeting.dead_ranks(), "has ended"
        if not lost and quitter is not None:
            named = ~int(self._words[quitter][turn])
            # Whoever was given up on is lost, unless that is this rank: then the others go on without it.
            lost, said = (quitter if named == self._rank else named,), "was given up by another rank, or gave up itself"
        elif not lost:
            lost, said = (rank,), f"did not come within {timeout_seconds():g} s; it ended, hangs or makes other calls"
        self._words[self._rank][:2] = ~lost[0]
        ranks = tuple(self._meeting.ranks[place] for place in lost)
        self._error = RankError(
            f"{_PHASE}: rank {', '.join(map(str, ranks))} {said}. Ranks that are left may plan anew "
            "(collegium.balance.elastic), or all call renew() of layer.workspaces and go on",
            ranks=ranks,
            phase=_PHASE,
        )
        raise self._error


def _zoned(regions: tuple[Region, ...]) -> list[tuple[Region, ...]]:
    """Return the regions of each zone, the front one first."""
    zones = [WRITTEN, LATE, tuple(own.name for own in regions if own.name not in (*WRITTEN, *LATE))]
    return [tuple(own for own in regions if own.name in zone) for zone in zones]


class _SymmetricBuffer:
    """One symmetric block, its flags, and the addresses of the others'. zones: bytes of each.

    It holds no process group: a process that still holds one when it ends aborts.
    """

    def __init__(self, group: str, device: torch.device, zones: tuple[int, ...]) -> None:
        self.device, self.zones = device, zones
        self.mail = _ShmMailbox(group, rendezvous_of(group))
        space = SymmetricWorkspace(group_named(group), device, HEAD_BYTES + sum(zones))
        self.rank, self.nbytes, self.blocks, self.handle = space.rank, space.nbytes, space.blocks, space.handle
        own = self.blocks[self.rank]
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            own[:HEAD_BYTES].zero_()
            self.heads = [block[:HEAD_BYTES].view(torch.int64) for block in self.blocks]
            self.head = self.heads[self.rank]
            # What kernels tell the host, and what the host tells kernels.
            self.mirror = torch.tensor([0, -1], pin_memory=device.type == "cuda")
            self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
            deltas = [block.data_ptr() - own.data_ptr() for block in self.blocks] + [self.mirror.data_ptr()]
            self.deltas = torch.tensor(deltas, device=device)
        self.failed: Any = self.mirror.numpy()  # read at every call, without torch
        self.captured = False
        self.number = next(_numbers)
        self.stream = current_stream(device)
        self.arenas: dict[MemoryMap, PeerArena] = {}

    def memory(self, places: MemoryMap) -> PeerArena:
        """Return the block as the memory of passes with the regions of ``places``."""
        found = self.arenas.get(places)
        if found is None:
            regions = [Region("head", HEAD_BYTES)]
            for size, own in zip(self.zones, _zoned(places.regions), strict=True):
                regions += [*own, Region(f"gap {len(regions)}", size - memory_map(own).nbytes)]
            found = self.arenas[places] = PeerArena(self.blocks[self.rank], memory_map(tuple(regions)))
        return found


class SymmetricBuffers:
    """The block that all layers of this process with the ranks of ``group`` on ``device`` run in, one pass at a time.

    A block that a CUDA graph of any rank uses is kept when a larger one takes its place.
    """

    def __init__(self, group: str, device: torch.device) -> None:
        self.group, self.device = group, device
        self.ranks = world_ranks(group)
        self.meeting = rendezvous_of(group)
        self._layers = 0
        self._block: _SymmetricBuffer | None = None
        self._kept: list[_SymmetricBuffer] = []
        self._one = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle as what all layers of the ranks and the device share."""
        return symmetric_buffers, (self.group, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's block."""
        return 0 if self._block is None else self._block.nbytes

    def register_layer(self, places: MemoryMap) -> int:
        """Make room for a layer with the regions of ``places`` and return its number; all ranks ask at the same time.

        Raises InputError on every rank where the ranks have other regions or are on several hosts, or where their
        memory cannot be shared.
        """
        self.meeting.agree(places.regions, "symm_mem: regions of a layer")
        zones = tuple(memory_map(own).nbytes for own in _zoned(places.regions))
        if self._block is not None:
            zones = tuple(map(max, zones, self._block.zones))
        if self._block is None or zones != self._block.zones:
            self._renew(zones)
        self._layers += 1
        return (self._layers - 1) % 4096

    def acquire(self) -> _SymmetricBuffer:
        """Return the block for one pass on the current stream, which waits for the stream of the last one."""
        self._one.acquire()
        block = self._block
        if block is None:
            self._one.release()
            raise InputError("symm_mem: this process has no block for the ranks; build the layer here, on every rank")
        if self.device.type == "cuda":
            stream = current_stream(self.device)
            if is_capturing(self.device):
                # What a graph follows is for whoever replays it to say.
                block.captured = True
            elif stream != block.stream:
                if not is_stream_capturing(self.device, block.stream):
                    wait_for(block.stream, self.device)
                block.stream = stream
        return block

    def release(self, block: _SymmetricBuffer) -> None:
        """Take back what ``take`` returned, once everything that uses it is on its stream."""
        self._one.release()

    def sync_pass(
        self, layer: int, tokens: int, top_k: int, limit: int, *, shares: int = 1
    ) -> tuple[PeerBuffers, Hashable]:
        """Return what the pass that begins knows of its peers, and what it has in common with passes like it.

        shares: above 1 every rank has the same ``tokens``, and brings one of so many shares of them. Raises InputError
        on every rank where one brings more than ``limit`` tokens, another top-k, or calls another layer, and RankError
        where one does not come or gave up before.
        """
        block = self._block
        assert block is not None
        if block.failed[0] and is_capturing(self.device):
            lost = self.ranks[int(block.failed[0]) >> 16]
            raise RankError(
                f"{_PHASE}: a pass before this capture failed, waiting for rank {lost}, and the device tells no more "
                "while a CUDA graph captures; leave the capture and call layer.check()",
                ranks=(lost,),
                phase=_PHASE,
            )
        if block.failed[0]:
            self.check()
        try:
            said = block.mail.exchange(layer, tokens, top_k)
        except RankError as error:
            if block.side is not None and not is_capturing(self.device):
                places = [self.ranks.index(rank) for rank in error.ranks]
                release(block.head, places, block.mirror[1:], block.side)
            raise
        counts = [count for _, count, _ in said]
        if shares > 1 and len(set(counts)) > 1 and all(own == layer for own, _, _ in said):
            text = (
                f"same_tokens: every rank has to be called with the same tokens, found {counts} of them by rank; give "
                "all ranks the same input, or make the ranks with same_tokens=False"
            )
            raise known_to_all(InputError(text))
        if any(-(-count // shares) > limit or (own, k) != (layer, top_k) for own, count, k in said):
            found = "; ".join(
                f"rank {rank}: {count} tokens, top-{k}, layer {own}"
                for rank, (own, count, k) in zip(self.ranks, said, strict=True)
            )
            raise known_to_all(
                InputError(
                    f"symm_mem: every rank needs the same layer and top-k and at most max_tokens={limit} tokens, found "
                    f"{found}; plan for more tokens, or call with fewer on every rank"
                )
            )
        # Of the same tokens the word may not hold the whole number; this rank knows it.
        bound, seconds = (-(-tokens // shares) if shares > 1 else max(counts)), timeout_seconds()
        peers = PeerBuffers(
            rank=block.rank,
            ranks=self.ranks,
            layer=layer,
            bound=bound,
            seconds=seconds,
            head=block.head,
            deltas=block.deltas,
            blocks=tuple(block.blocks),
            gone=self.meeting.dead_ranks,
        )
        return peers, (bound, seconds)

    def check(self) -> None:
        """Wait for the device, and raise the RankError of a pass in which a rank gave up."""
        block = self._block
        if block is not None:
            raise_status(block.heads, self.ranks, block.rank, self.meeting.dead_ranks)

    def renew(self) -> None:
        """Begin anew after a RankError, with a block as large as before; all ranks call it at the same time.

        Graphs that were captured before cannot be used again.
        """
        if self._block is not None:
            self._renew(self._block.zones)

    def _renew(self, zones: tuple[int, ...]) -> None:
        before = self._block
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # Nobody reads a block any more once every rank is here.
        used = self.meeting.exchange(before is not None and before.captured, "symm_mem: a new block")
        if before is not None and any(used):
            self._kept.append(before)
        made, fault = None, ""
        try:
            made = _SymmetricBuffer(self.group, self.device, zones)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except (RuntimeError, InputError) as error:
            fault = str(error)
        faults = self.meeting.exchange(fault, "symm_mem: the new block is ready")
        if any(faults):
            said = "; ".join(f"rank {rank}: {own}" for rank, own in zip(self.ranks, faults, strict=True) if own)
            raise InputError(
                f"symm_mem: {HEAD_BYTES + sum(zones):,} bytes that peers reach were asked of {self.device}, found "
                f"{said}; plan with Overrides(dispatcher='all_gather'), or for fewer tokens"
            )
        self._block = made


_shared: dict[tuple[str, torch.device], SymmetricBuffers] = {}
_making = threading.Lock()


def symmetric_buffers(group: str, device: torch.device) -> SymmetricBuffers:
    """Return what all layers with the ranks of the process group ``group`` on ``device`` share."""
    device = torch.empty(0, device=device).device  # with its index, as tensors name it
    with _making:
        found = _shared.get((group, device))
        # A group that was destroyed and made again has the same name, another meeting, and blocks of its own.
        if found is None or found.meeting is not rendezvous_of(group):
            found = _shared[group, device] = SymmetricBuffers(group, device)
        return found


def release_symmetric_buffers() -> None:
    """Forget all blocks, for process groups that end: one is given back once the last layer that runs in it is gone."""
    with _making:
        _shared.clear()
