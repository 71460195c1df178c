"""The memory of passes whose ranks read each other's: one symmetric block for the layers of the same ranks and device.

Passes of different layers follow each other in one block, so each zone of it holds the same kinds of regions in all
layers.

The first zone is what peers write. A peer writes after its pull of a pass, so after every rank's post of it, which
follows this rank's last sum; and this rank's sum of the pass waits for all of them. A rank that others gave up waiting
for may still write after that, so this zone holds no indices, which kernels would follow. The second zone is what peers
may still read when this rank has begun its next pass: all of it is written after a pull.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError, RankError
from ..kernels.enums import HEAD_BYTES
from ..runtime.memory import Arena, Region, current_stream, is_capturing, is_stream_capturing, memory_map, wait_for
from ..runtime.symmetric import SymmetricWorkspace
from .groups import group_named, world_ranks
from .peers import PeerBuffers
from .peers_in_torch import abort_waiting_kernels, raise_status
from .rendezvous import LOOK, Rendezvous, known_to_all, rendezvous_of, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ..runtime.memory import MemoryMap

__all__ = [
    "PEER_WRITTEN",
    "READ_LATE",
    "PeerArena",
    "SymmetricBuffers",
    "release_symmetric_buffers",
    "symmetric_buffers",
]

_PHASE = "symm_mem dispatch"
_MAILBOX_BYTES = 4096
_MAX_LAYERS = 4096  # numbers that a flag can hold
_numbers = itertools.count()
# Written by the last product or by ``reduce``: by any rank, or by this rank alone and then read late.
PEER_WRITTEN = ("experts/rows", "back/sums")
# Written by ``permute``, and on a CPU.
READ_LATE = ("order", "back/rows", "back/slots")


class PeerArena(Arena):
    """The ``Memory`` of a layer's passes in the shared block. peers: of the current pass."""

    def __init__(self, block: torch.Tensor, layout: MemoryMap) -> None:
        super().__init__(block, layout)
        self.peers: PeerBuffers | None = None


class _PassCounts(NamedTuple):
    """What a rank brings to a pass."""

    layer: int
    tokens: int
    top_k: int


class _ShmMailbox:
    """Exchanges one word between all ranks of the host in microseconds; a store takes hundreds.

    A word holds the whole message, so no memory ordering is needed. Two words alternate: a rank writes a word again
    only after everybody has answered the other one, and has therefore read this one. A rank that gives up writes
    ``~rank`` of the group rank it gave up on.
    """

    def __init__(self, group: str, rendezvous: Rendezvous) -> None:
        space = SymmetricWorkspace(group_named(group), torch.device("cpu"), _MAILBOX_BYTES)
        self._rendezvous = rendezvous
        self._rank = space.rank
        self._count = 0
        self._error: RankError | None = None
        self._words: list[Any] = [block.view(torch.int64).numpy() for block in space.blocks]

    def exchange(self, layer: int, tokens: int, top_k: int) -> list[_PassCounts]:
        """Return the counts of every rank. Raises RankError if a rank does not respond, and in all later calls."""
        if self._error is not None:  # this rank's words stay as they are
            raise RankError(str(self._error), ranks=self._error.ranks, phase=_PHASE)
        self._count += 1
        turn = self._count % 2
        number = self._count & 0x7FFFF
        word = number << 44 | layer << 32 | min(top_k, 0xFF) << 24 | min(tokens, 0xFFFFFF)
        self._words[self._rank][turn] = word
        answers = [self._wait_for(rank, turn, number) for rank in range(len(self._words))]
        return [_PassCounts(word >> 32 & 0xFFF, word & 0xFFFFFF, word >> 24 & 0xFF) for word in answers]

    def _wait_for(self, rank: int, turn: int, number: int) -> int:
        words = self._words[rank]
        polls = 0
        started = time.monotonic()
        next_check = started + LOOK
        while words[turn] >> 44 != number:
            polls += 1
            now = time.monotonic()
            dead: tuple[int, ...] = ()
            if now > next_check:
                next_check = now + LOOK
                dead = self._rendezvous.dead_ranks()
            # A rank that gave up never writes again, so waiting for it is useless.
            quitter = next((index for index, other in enumerate(self._words) if other[turn] < 0), None)
            if dead or quitter is not None or now - started > timeout_seconds():
                self._give_up(rank, quitter, turn)
            if polls > 1000:
                time.sleep(2e-5)
        return int(words[turn])

    def _give_up(self, rank: int, quitter: int | None, turn: int) -> None:
        """Raise the RankError of waiting in vain for ``rank``, or because ``quitter`` gave up on some rank before."""
        lost = self._rendezvous.dead_ranks()
        if lost:
            reason = "has ended"
        elif quitter is not None:
            named = ~int(self._words[quitter][turn])
            # The rank that was given up on is lost, unless that is this rank: then the others go on without it.
            lost = (quitter if named == self._rank else named,)
            reason = "was given up by another rank, or gave up itself"
        else:
            lost = (rank,)
            reason = f"did not come within {timeout_seconds():g} s; it ended, hangs or makes other calls"
        self._words[self._rank][:2] = ~lost[0]
        ranks = tuple(self._rendezvous.ranks[index] for index in lost)
        self._error = RankError(
            f"{_PHASE}: rank {', '.join(map(str, ranks))} {reason}. Ranks that are left may plan anew "
            "(collegium.balance.elastic), or all call renew() of layer.workspaces and go on",
            ranks=ranks,
            phase=_PHASE,
        )
        raise self._error


def _zones(regions: tuple[Region, ...]) -> list[tuple[Region, ...]]:
    """Return the regions of each zone, the front zone first."""
    return [
        tuple(region for region in regions if region.name in PEER_WRITTEN),
        tuple(region for region in regions if region.name in READ_LATE),
        tuple(region for region in regions if region.name not in (*PEER_WRITTEN, *READ_LATE)),
    ]


class _SymmetricBuffer:
    """One symmetric block with its flags, and the addresses of the other ranks' blocks. zones: bytes of each zone.

    Holds no process group: a process that still holds one at exit aborts.
    """

    def __init__(self, group: str, device: torch.device, zones: tuple[int, ...]) -> None:
        self.device = device
        self.zones = zones
        self.mail = _ShmMailbox(group, rendezvous_of(group))
        space = SymmetricWorkspace(group_named(group), device, HEAD_BYTES + sum(zones))
        self.rank = space.rank
        self.nbytes = space.nbytes
        self.blocks = space.blocks
        self.handle = space.handle
        block = self.blocks[self.rank]
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            block[:HEAD_BYTES].zero_()
            self.heads = [peer_block[:HEAD_BYTES].view(torch.int64) for peer_block in self.blocks]
            self.head = self.heads[self.rank]
            # Word 0: kernels to host, the status. Word 1: host to kernels, the -1 that aborts them.
            self.mirror = torch.tensor([0, -1], pin_memory=device.type == "cuda")
            self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            deltas = [peer_block.data_ptr() - block.data_ptr() for peer_block in self.blocks]
            self.deltas = torch.tensor([*deltas, self.mirror.data_ptr()], device=device)
        self.status: Any = self.mirror.numpy()  # read in every call, without torch
        self.captured = False
        self.number = next(_numbers)
        self.stream = current_stream(device)
        self.arenas: dict[MemoryMap, PeerArena] = {}

    def memory(self, layout: MemoryMap) -> PeerArena:
        """Return the block as the memory of passes with the regions of ``layout``."""
        arena = self.arenas.get(layout)
        if arena is None:
            regions = [Region("head", HEAD_BYTES)]
            for size, zone in zip(self.zones, _zones(layout.regions), strict=True):
                gap = Region(f"gap {len(regions)}", size - memory_map(zone).nbytes)
                regions += [*zone, gap]
            arena = PeerArena(self.blocks[self.rank], memory_map(tuple(regions)))
            self.arenas[layout] = arena
        return arena


class SymmetricBuffers:
    """Lends the block of all local layers with the ranks of ``group`` on ``device`` to one pass at a time.

    A block that a CUDA graph of any rank uses is kept alive when a larger one replaces it.
    """

    def __init__(self, group: str, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.ranks = world_ranks(group)
        self.rendezvous = rendezvous_of(group)
        self._layers = 0
        self._block: _SymmetricBuffer | None = None
        self._retired: list[_SymmetricBuffer] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle as the pool that all layers of these ranks and this device share."""
        return symmetric_buffers, (self.group, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's block."""
        return 0 if self._block is None else self._block.nbytes

    def register_layer(self, layout: MemoryMap) -> int:
        """Reserve the regions of ``layout`` for a layer and return its number; all ranks call it together.

        Raises InputError on every rank where the ranks have other regions or are on several hosts, or where their
        memory cannot be shared.
        """
        self.rendezvous.agree(layout.regions, "symm_mem: regions of a layer")
        zones = tuple(memory_map(regions).nbytes for regions in _zones(layout.regions))
        if self._block is not None:
            zones = tuple(map(max, zones, self._block.zones))
        if self._block is None or zones != self._block.zones:
            self._renew(zones)
        self._layers += 1
        return (self._layers - 1) % _MAX_LAYERS

    def acquire(self) -> _SymmetricBuffer:
        """Return the block for one pass on the current stream, which waits for the stream of the last pass."""
        self._lock.acquire()
        block = self._block
        if block is None:
            self._lock.release()
            raise InputError("symm_mem: this process has no block for the ranks; build the layer here, on every rank")
        if self.device.type == "cuda":
            stream = current_stream(self.device)
            if is_capturing(self.device):
                # Whoever replays the graph orders it after other passes.
                block.captured = True
            elif stream != block.stream:
                if not is_stream_capturing(self.device, block.stream):
                    wait_for(block.stream, self.device)
                block.stream = stream
        return block

    def release(self, block: _SymmetricBuffer) -> None:
        """Take back what ``acquire`` returned, once everything that uses it is queued on its stream."""
        self._lock.release()

    def sync_pass(
        self, layer: int, tokens: int, top_k: int, limit: int, *, shares: int = 1
    ) -> tuple[PeerBuffers, Hashable]:
        """Agree with the peers on a pass; return what it needs to reach them, and a key that equal passes share.

        shares: above 1, all ranks have the same ``tokens`` and each brings one of ``shares`` shares of them. Raises
        InputError on every rank where one brings more than ``limit`` tokens, another top-k, or calls another layer, and
        RankError where a rank does not respond or gave up before.
        """
        block = self._block
        assert block is not None
        self._raise_failed_pass(block)
        try:
            counts = block.mail.exchange(layer, tokens, top_k)
        except RankError as error:
            if block.side_stream is not None and not is_capturing(self.device):
                lost = [self.ranks.index(rank) for rank in error.ranks]
                abort_waiting_kernels(block.head, lost, block.mirror[1:], block.side_stream)
            raise
        self._check_counts(counts, layer, top_k, limit, shares)
        # With the same tokens everywhere the word may be too small for their number, which this rank has.
        bound = -(-tokens // shares) if shares > 1 else max(entry.tokens for entry in counts)
        timeout = timeout_seconds()
        peers = PeerBuffers(
            rank=block.rank,
            ranks=self.ranks,
            layer=layer,
            bound=bound,
            timeout=timeout,
            head=block.head,
            deltas=block.deltas,
            blocks=tuple(block.blocks),
            dead_ranks=self.rendezvous.dead_ranks,
        )
        return peers, (bound, timeout)

    def _raise_failed_pass(self, block: _SymmetricBuffer) -> None:
        """Raise the RankError of an earlier pass, if one failed."""
        if not block.status[0]:
            return
        if is_capturing(self.device):
            lost = self.ranks[int(block.status[0]) >> 16]
            raise RankError(
                f"{_PHASE}: a pass before this capture failed, waiting for rank {lost}, and the device reports no more "
                "while a CUDA graph captures; leave the capture and call layer.check()",
                ranks=(lost,),
                phase=_PHASE,
            )
        self.check()

    def _check_counts(self, counts: list[_PassCounts], layer: int, top_k: int, limit: int, shares: int) -> None:
        """Raise InputError unless the ranks make the same call, within the limit."""
        tokens = [entry.tokens for entry in counts]
        if shares > 1 and len(set(tokens)) > 1 and all(entry.layer == layer for entry in counts):
            text = (
                f"same_tokens: every rank has to be called with the same tokens, found {tokens} of them by rank; give "
                "all ranks the same input, or make the ranks with same_tokens=False"
            )
            raise known_to_all(InputError(text))
        expected = (layer, top_k)
        if any(-(-entry.tokens // shares) > limit or (entry.layer, entry.top_k) != expected for entry in counts):
            brought = "; ".join(
                f"rank {rank}: {entry.tokens} tokens, top-{entry.top_k}, layer {entry.layer}"
                for rank, entry in zip(self.ranks, counts, strict=True)
            )
            text = (
                f"symm_mem: every rank needs the same layer and top-k and at most max_tokens={limit} tokens, found "
                f"{brought}; plan for more tokens, or call with fewer on every rank"
            )
            raise known_to_all(InputError(text))

    def check(self) -> None:
        """Wait for the device, and raise the RankError of a pass in which a rank gave up."""
        block = self._block
        if block is not None:
            raise_status(block.heads, self.ranks, block.rank, self.rendezvous.dead_ranks)

    def renew(self) -> None:
        """Start over after a RankError, with a block of the same size; all ranks call it together.

        Graphs that were captured before cannot be used any more.
        """
        if self._block is not None:
            self._renew(self._block.zones)

    def _renew(self, zones: tuple[int, ...]) -> None:
        previous = self._block
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # Once every rank is here, nobody reads the previous block.
        captured = self.rendezvous.exchange(previous is not None and previous.captured, "symm_mem: a new block")
        if previous is not None and any(captured):
            self._retired.append(previous)
        block = None
        fault = ""
        try:
            block = _SymmetricBuffer(self.group, self.device, zones)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except (RuntimeError, InputError) as error:
            fault = str(error)
        faults = self.rendezvous.exchange(fault, "symm_mem: the new block is ready")
        if any(faults):
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self.ranks, faults, strict=True) if text)
            raise InputError(
                f"symm_mem: cannot allocate {HEAD_BYTES + sum(zones):,} bytes that peers reach on {self.device}: "
                f"{reasons}; plan with Overrides(dispatcher='all_gather'), or for fewer tokens"
            )
        self._block = block


_pools: dict[tuple[str, torch.device], SymmetricBuffers] = {}
_pools_lock = threading.Lock()


def symmetric_buffers(group: str, device: torch.device) -> SymmetricBuffers:
    """Return the pool that all layers with the ranks of the process group ``group`` on ``device`` share."""
    device = torch.empty(0, device=device).device  # with its index, as tensors name it
    with _pools_lock:
        pool = _pools.get((group, device))
        # A group that was destroyed and created again has the same name, but another rendezvous and other blocks.
        if pool is None or pool.rendezvous is not rendezvous_of(group):
            pool = SymmetricBuffers(group, device)
            _pools[group, device] = pool
        return pool


def release_symmetric_buffers() -> None:
    """Forget all pools when process groups end; a block is freed with the last layer that runs in it."""
    with _pools_lock:
        _pools.clear()
