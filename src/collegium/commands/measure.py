"""Times, ceilings and floors: what every measurement of this package is made of.

A time is the median of rounds in which all contenders take turns, the order rotated each round. One pass walks
through several inputs and routings, in one CUDA graph where that is possible, so that weights come from memory. A
turn on a GPU is several passes in a row, so that the time of one starts when the one before it ends.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.quantize import activation_format
from ..planning import expert_bytes
from ..runtime.devices import current_device, recording
from ..types import MoESpec, Routing

__all__ = [
    "ROUTINGS",
    "Ceilings",
    "Floor",
    "cache_bytes",
    "ceiling_bytes",
    "driver_version",
    "floor_of",
    "graph_pool",
    "input_sets",
    "measure_ceilings",
    "prepare_pass",
    "random_routing",
    "stays_cached",
    "take_turns",
    "timed_once",
    "version_of",
]

K = TypeVar("K")
ROUTINGS = ("uniform", "zipf", "hot", "half")
_ZIPF = 1.2
_CPU = torch.device("cpu")
_HIDDEN_CACHE = 1 << 28  # taken for the caches of a CPU that hides their size
_PIECE = 1 << 24  # bytes read or copied at a time on a CPU
_PRODUCTS = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 64))
_BURST, _PAUSE = 0.12, 0.1  # seconds each contender runs, and idle seconds before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What the machine can do at best: bytes a second, and FLOP a second with 16-bit and with 8-bit operands."""

    bandwidth: float
    rate_16: float
    rate_8: float

    def raised(self, other: Ceilings) -> Ceilings:
        """Return the better of two measurements, number by number."""
        return Ceilings(**{name: max(value, getattr(other, name)) for name, value in asdict(self).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """What a layer must at least move and compute for its inputs, on average over them.

    seconds: the larger of the two times; bound: ``memory`` or ``math``, whichever it is. experts_hit: how many
    experts' weights are read.
    """

    nbytes: float
    flops: float
    experts_hit: float
    seconds: float
    bound: str


def floor_of(
    spec: MoESpec,
    activations: str,
    routings: Sequence[Routing],
    ceilings: Ceilings,
    *,
    cached: bool = False,
    each: float | None = None,
) -> Floor:
    """Return the floor of ``spec`` with these routings; ``activations`` names the format products are computed in.

    Bytes: weights, scales and biases of the experts that each routing really hits, once, and 2 bytes for each element
    of input and output, once. What is between the projections need not reach memory and is not counted. cached:
    the weights may come from a cache, so that no time follows from the bytes and the floor is that of the operations.
    each: bytes of an expert, where the spec's format does not say them (kinds of GGUF blocks).
    """
    hits = [torch.unique(r.topk_ids[r.topk_ids >= 0]).numel() for r in routings]
    rows = [int((r.topk_ids >= 0).sum()) for r in routings]
    tokens = statistics.fmean(r.topk_ids.shape[0] for r in routings)
    hidden, wide = spec.expert_hidden_size, spec.intermediate_size
    nbytes = statistics.fmean(hits) * (each or expert_bytes(spec)) + 4 * tokens * hidden
    flops = 2.0 * statistics.fmean(rows) * (spec.gate_up_parts + 1) * hidden * wide
    rate = ceilings.rate_8 if activation_format(activations).bits <= 8 else ceilings.rate_16
    memory, work = 0.0 if cached else nbytes / ceilings.bandwidth, flops / rate
    return Floor(
        nbytes=nbytes,
        flops=flops,
        experts_hit=statistics.fmean(hits),
        seconds=max(memory, work),
        bound="memory" if memory >= work else "math",
    )


def random_routing(tokens: int, spec: MoESpec, style: str, generator: torch.Generator) -> Routing:
    """Return distinct random experts for each token, on the generator's device.

    style: ``uniform``; ``zipf``: expert i is drawn with weight i ** -1.2; ``hot``: expert 0 gets every token;
    ``half``: half of the experts get nothing. Raises InputError for another style or too few experts left.
    """
    experts, top_k, device = spec.num_experts, spec.routing.top_k, generator.device
    alive = experts // 2 if style == "half" else experts
    if style not in ROUTINGS or top_k > max(1, alive):
        raise InputError(
            f"routing {style!r} with top-{top_k} of {experts} experts: allowed are {', '.join(ROUTINGS)}, and half "
            f"needs top_k at most {experts // 2}"
        )
    weight = torch.ones(experts, device=device)
    if style == "zipf":
        weight = torch.arange(1, experts + 1, device=device).float() ** -_ZIPF
    if style == "half":
        weight[max(1, alive) :] = 0
    weight = weight[torch.randperm(experts, device=device, generator=generator)]
    ids = torch.multinomial(weight.expand(tokens, experts), top_k, generator=generator)
    if style == "hot":
        ids = torch.where(ids == 0, ids[:, :1], ids)
        ids[:, 0] = 0
    weights = torch.rand(tokens, top_k, device=device, generator=generator) + 0.1
    return Routing(topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


def input_sets(tokens: int) -> int:
    """Return how many inputs one pass walks through: enough that its weights come from memory."""
    return 8 if tokens <= 128 else 4 if tokens <= 512 else 2


def take_turns(
    passes: Mapping[K, Callable[[], object]], device: torch.device, *, rounds: int = 9, queued: bool = True
) -> dict[K, float]:
    """Return the median seconds of each of ``passes`` (made by ``prepare_pass``) over at most ``rounds`` rounds.

    All take one turn a round, in an order that is rotated each round. queued: on CUDA, after a pause, a turn is one
    pass that is not timed and one or more that are, launched without waiting, some 0.12 s for each of ``passes`` in
    all: so launching takes no time, and the device is as warm as a burst of that length makes it. Otherwise a turn is
    one pass on an idle device.
    """
    keys = list(passes)
    times: dict[K, list[float]] = {key: [] for key in keys}
    with torch.inference_mode(), current_device(device):
        counts = dict.fromkeys(keys, 0)
        if queued and device.type == "cuda" and rounds and keys:
            rounds, counts = _burst(passes, device, rounds)
            time.sleep(_PAUSE)
        for turn in range(rounds if keys else 0):
            shift = turn % len(keys)
            for key in keys[shift:] + keys[:shift]:
                times[key] += _timed_turn(passes[key], device, counts[key])
    return {key: statistics.median(values) for key, values in times.items()}


def _burst(passes: Mapping[K, Callable[[], object]], device: torch.device, rounds: int) -> tuple[int, dict[K, int]]:
    """Return how many rounds, and how many timed passes a turn of each, make a burst of ``_BURST`` seconds of each."""
    seconds = {key: timed_once(call, device) for key, call in passes.items()}
    rounds = max(3, min(rounds, int(_BURST / 2 / max(seconds.values()))))
    return rounds, {key: max(1, min(7, int(_BURST / rounds / each) - 1)) for key, each in seconds.items()}


def _timed_turn(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    if not count:
        return [timed_once(call, device)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for mark in marks:
        call()
        mark.record()
    marks[-1].synchronize()
    return [1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)]


def timed_once(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, by the device's own clock on CUDA."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with current_device(device):
        begin.record()
        call()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def prepare_pass(
    calls: Sequence[Callable[[], object]], device: torch.device, *, capture: bool = True, pool: Any = None
) -> Callable[[], object]:
    """Return a call that runs all ``calls`` once, after running them once: one CUDA graph where ``capture`` allows.

    pool: ``graph_pool(device)``, for passes that take turns: then they take their temporary memory from one place.
    """

    def eager() -> None:
        with torch.inference_mode():
            for call in calls:
                call()

    if device.type != "cuda":
        eager()
        return eager
    with current_device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if not capture:
            return eager
        graph = torch.cuda.CUDAGraph()
        with recording(graph, device, pool=pool):
            eager()
        kept = (graph, calls)  # a graph knows addresses; the calls hold the tensors that live there

        def replay() -> None:
            kept[0].replay()

        replay()
        torch.cuda.synchronize()
        return replay


def graph_pool(device: torch.device) -> Any:
    """Return a memory pool that the graphs of one run may share, as none needs what another one left."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def measure_ceilings(device: torch.device, *, nbytes: int | None = None, size: int | None = None) -> Ceilings:
    """Measure what ``device`` can do at best; takes about a second.

    Bandwidth: the best of reading and of copying ``nbytes`` (4 GiB on a GPU; on a CPU 256 MiB, or more where its caches
    hold much of that). Rates: square products of ``size`` (8192; several sizes on a CPU), bfloat16 and, where torch
    has it, E4M3 with a scale a row.
    """
    if device.type != "cuda":
        return _cpu_ceilings(nbytes or ceiling_bytes(device), size)
    with current_device(device):
        return _gpu_ceilings(device, nbytes, size)


def _gpu_ceilings(device: torch.device, nbytes: int | None, size: int | None) -> Ceilings:
    words = torch.zeros((nbytes or ceiling_bytes(device)) // 4, dtype=torch.int32, device=device)
    half, other = words.chunk(2)
    bandwidth = max(words.nbytes / _best(lambda: other.copy_(half), device), *_read_rates(words, device))
    side = size or 8192
    a = torch.randn(side, side, device=device).bfloat16()
    rate_16 = 2 * side**3 / _best(lambda: a @ a.T, device)
    rate_8 = rate_16
    if torch.cuda.get_device_capability(device) >= (8, 9):
        codes, one = a.to(torch.float8_e4m3fn), torch.ones(side, 1, device=device)
        product: Any = torch._scaled_mm  # type: ignore[attr-defined]
        made = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        rate_8 = 2 * side**3 / _best(lambda: product(codes, codes.T, one, one.T, **made), device)
    return Ceilings(bandwidth=bandwidth, rate_16=rate_16, rate_8=max(rate_8, rate_16))


def ceiling_bytes(device: torch.device) -> int:
    """Return the bytes that ``measure_ceilings`` takes."""
    return 1 << 32 if device.type == "cuda" else max(1 << 28, 4 * cache_bytes(device))


def _cpu_ceilings(nbytes: int, size: int | None) -> Ceilings:
    """Measure short pieces of work and take the best: where others work too, no long one runs undisturbed.

    One thread is tried as well, as more of them than free cores wait for each other in all that they share.
    """
    own = torch.get_num_threads()
    words = torch.ones(nbytes // 4, dtype=torch.int32)  # zeros would share one page of memory
    pieces = words.split(min(_PIECE, nbytes // 2) // 4)
    pairs = list(zip(pieces[::2], pieces[1::2], strict=False))
    bandwidth = rate = 0.0
    try:
        for threads in sorted({own, 1}):
            torch.set_num_threads(threads)
            reads = (p.nbytes / timed_once(p.amax, _CPU) for p in pieces)
            copies = (2 * a.nbytes / timed_once(partial(a.copy_, b), _CPU) for a, b in pairs)
            bandwidth = max(bandwidth, *reads, *copies)
            rate = max(rate, *_cpu_rates(_PRODUCTS if size is None else ((size, size, size),)))
    finally:
        torch.set_num_threads(own)
    return Ceilings(bandwidth=bandwidth, rate_16=rate, rate_8=rate)


def _cpu_rates(sizes: Sequence[tuple[int, int, int]]) -> Iterator[float]:
    for rows, inner, columns in sizes:
        # With AVX2 alone torch takes a hundred times as long in bfloat16.
        for dtype in (torch.bfloat16, torch.float32)[torch.backends.cpu.get_cpu_capability() == "AVX2" :]:
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
            yield 2 * rows * inner * columns / _best(partial(torch.mm, a, b), _CPU, repeats=12)


def _read_rates(words: Tensor, device: torch.device) -> list[float]:
    """Return bytes a second of reading ``words`` with a few shapes of one kernel."""
    if find_spec("triton") is None:
        return [words.nbytes / _best(words.amax, device)]
    from ..kernels.read import read_kernel

    launch: Any = read_kernel
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(processors * 16, dtype=torch.int32, device=device)
    rates: list[float] = []
    for block, unroll, warps, each in ((1024, 4, 4, 8), (2048, 4, 4, 8), (2048, 4, 8, 4), (4096, 4, 8, 4)):
        programs = processors * each
        stride = programs * block * unroll
        steps = words.numel() // stride
        constants = {"BLOCK": block, "UNROLL": unroll, "num_warps": warps}
        taken = _best(partial(launch[(programs,)], words, out, steps, stride, **constants), device)
        rates.append(4 * steps * stride / taken)
    return rates


def _best(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    call()
    return min(timed_once(call, device) for _ in range(repeats))


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the caches before memory, all that this process's cores have; 0 if the machine hides them.

    On a GPU the last cache; on a CPU the second level and those behind it, since one may hold what the other has not.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[tuple[str, str], int] = {}
    for core in cores:
        for cache in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            try:
                level, shared, size = ((cache / n).read_text().strip() for n in ("level", "shared_cpu_list", "size"))
            except OSError:
                continue
            factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            if level != "1" and size.rstrip("KMG").isdigit():
                found[level, shared] = int(size.rstrip("KMG")) * factor
    return sum(found.values())


def stays_cached(nbytes: float, device: torch.device) -> bool:
    """Whether a part that matters of ``nbytes`` read again and again may come from the caches of ``device``.

    A CPU's caches replace lines nearly at random: of twice their size they still have a fifth, of four times 2 %.
    """
    held = cache_bytes(device)
    return nbytes <= 2 * held if device.type == "cuda" else nbytes <= 4 * (held or _HIDDEN_CACHE)


def driver_version(device: torch.device) -> str:
    """Return the version of the GPU driver, or the operating system's on a CPU."""
    if device.type != "cuda":
        return f"{platform.system()} {os.uname().release}" if hasattr(os, "uname") else platform.system()
    listed = Path("/sys/module/nvidia/version")
    return listed.read_text().strip() if listed.exists() else "unknown"


def version_of(package: str) -> str:
    """Return the version of an installed package, or ``absent``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
