"""Timing, hardware ceilings and floors: the basis of all benchmarks.

A time is the median over rounds in which all candidates take turns, in an order that rotates each round. One pass
processes several inputs and routings, in one CUDA graph if possible, so that weights come from memory. A turn on a GPU
is several passes in a row, each timed from the end of the previous one.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.paging import copy_experts, new_tables, segments_of
from ..ops.quantize import activation_format
from ..planning import expert_bytes
from ..runtime.devices import current_device, recording
from ..runtime.launch import launch
from ..runtime.pinned import PinnedBlock
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
    "measure_host_bandwidth",
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
_ASSUMED_CACHE = 1 << 28  # bytes of cache assumed for a CPU that does not report its caches
_CPU_CHUNK = 1 << 24  # bytes read or copied at a time on a CPU
_PRODUCTS = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 64))  # M, K, N
_BURST = 0.12  # seconds that each candidate runs
_PAUSE = 0.1  # idle seconds before the burst


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Peak rates of a machine: bytes/s, and FLOP/s with 16-bit and with 8-bit operands."""

    bandwidth: float
    rate_16: float
    rate_8: float

    def raised(self, other: Ceilings) -> Ceilings:
        """Return the elementwise maximum of two measurements."""
        return Ceilings(
            bandwidth=max(self.bandwidth, other.bandwidth),
            rate_16=max(self.rate_16, other.rate_16),
            rate_8=max(self.rate_8, other.rate_8),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Minimum memory traffic, arithmetic and time of a layer, averaged over its inputs.

    seconds: the larger of memory and arithmetic time; bound: ``memory`` or ``math``, the larger one. experts_hit:
    number of active experts, whose weights are read.
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
    expert_nbytes: float | None = None,
) -> Floor:
    """Return the floor of ``spec`` with these routings.

    Bytes: weights, scales and biases of the active experts of each routing, once, and 2 bytes for each element of input
    and output, once. Intermediate values need not reach memory and are not counted.

    activations: the activation format, which decides between 16-bit and 8-bit peak rates.
    cached: whether the weights may come from a cache; the floor then counts only the arithmetic.
    expert_nbytes: bytes of one expert, if they do not follow from the spec's format (GGUF block types).
    """
    active_experts = [torch.unique(r.topk_ids[r.topk_ids >= 0]).numel() for r in routings]
    rows = [int((r.topk_ids >= 0).sum()) for r in routings]
    tokens = statistics.fmean(r.topk_ids.shape[0] for r in routings)
    hidden_size = spec.expert_hidden_size
    nbytes = statistics.fmean(active_experts) * (expert_nbytes or expert_bytes(spec)) + 4 * tokens * hidden_size
    flops = 2.0 * statistics.fmean(rows) * (spec.gate_up_parts + 1) * hidden_size * spec.intermediate_size
    rate = ceilings.rate_8 if activation_format(activations).bits <= 8 else ceilings.rate_16
    memory_seconds = 0.0 if cached else nbytes / ceilings.bandwidth
    math_seconds = flops / rate
    return Floor(
        nbytes=nbytes,
        flops=flops,
        experts_hit=statistics.fmean(active_experts),
        seconds=max(memory_seconds, math_seconds),
        bound="memory" if memory_seconds >= math_seconds else "math",
    )


def random_routing(tokens: int, spec: MoESpec, style: str, generator: torch.Generator) -> Routing:
    """Return distinct random experts for each token, on the generator's device.

    style: ``uniform``; ``zipf``: expert i is drawn with weight i ** -1.2; ``hot``: expert 0 gets every token;
    ``half``: half of the experts get no tokens. Raises InputError for another style or too few experts for top-k.
    """
    experts = spec.num_experts
    top_k = spec.routing.top_k
    device = generator.device
    eligible = experts // 2 if style == "half" else experts
    if style not in ROUTINGS or top_k > max(1, eligible):
        raise InputError(
            f"routing {style!r} with top-{top_k} of {experts} experts: allowed are {', '.join(ROUTINGS)}, and half "
            f"needs top_k at most {experts // 2}"
        )
    weight = torch.ones(experts, device=device)
    if style == "zipf":
        weight = torch.arange(1, experts + 1, device=device).float() ** -_ZIPF
    if style == "half":
        weight[max(1, eligible) :] = 0
    weight = weight[torch.randperm(experts, device=device, generator=generator)]
    ids = torch.multinomial(weight.expand(tokens, experts), top_k, generator=generator)
    if style == "hot":
        ids = torch.where(ids == 0, ids[:, :1], ids)
        ids[:, 0] = 0
    weights = torch.rand(tokens, top_k, device=device, generator=generator) + 0.1
    return Routing(topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


def input_sets(tokens: int) -> int:
    """Return how many inputs one pass processes: enough that the weights come from memory."""
    if tokens <= 128:
        return 8
    return 4 if tokens <= 512 else 2


def take_turns(
    passes: Mapping[K, Callable[[], object]], device: torch.device, *, rounds: int = 9, queued: bool = True
) -> dict[K, float]:
    """Return the median seconds of each of ``passes`` (from ``prepare_pass``) over at most ``rounds`` rounds.

    Each pass takes one turn per round, in an order that rotates each round.

    queued: on CUDA, after a pause, a turn is one untimed pass and one or more timed ones, launched back to back, about
    0.12 s per candidate in total. Launch overhead is hidden, and the device is in the thermal state of a short burst.
    Otherwise a turn is one pass on an idle device.
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
    """Return the number of rounds, and of timed passes per turn, for ``_BURST`` seconds of each candidate."""
    seconds = {key: timed_once(call, device) for key, call in passes.items()}
    rounds = max(3, min(rounds, int(_BURST / 2 / max(seconds.values()))))
    counts = {key: max(1, min(7, int(_BURST / rounds / duration) - 1)) for key, duration in seconds.items()}
    return rounds, counts


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
    """Return the seconds of one call; measured by CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    with current_device(device):
        begin.record()
        call()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def prepare_pass(
    calls: Sequence[Callable[[], object]], device: torch.device, *, capture: bool = True, pool: Any = None
) -> Callable[[], object]:
    """Run ``calls`` once and return a function that runs them again: as one CUDA graph if ``capture``.

    pool: ``graph_pool(device)``, with which passes that take turns share temporary memory.
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
        replay = partial(_replay, graph, calls)
        replay()
        torch.cuda.synchronize()
        return replay


def _replay(graph: torch.cuda.CUDAGraph, _calls: Sequence[Callable[[], object]]) -> None:
    """Replay ``graph``. The calls are arguments because they own the tensors whose addresses the graph contains."""
    graph.replay()


def graph_pool(device: torch.device) -> Any:
    """Return a memory pool for the graphs of one run; they may share it because no graph reads another's results."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def measure_ceilings(device: torch.device, *, nbytes: int | None = None, size: int | None = None) -> Ceilings:
    """Measure the peak rates of ``device``; takes about a second.

    Bandwidth: the best of reading and of copying ``nbytes`` (4 GiB on a GPU; on a CPU 256 MiB, or four times its
    caches). Rates: square matrix products of ``size`` (8192; several sizes on a CPU) in bfloat16 and, if the GPU
    supports it, in E4M3 with one scale per row.
    """
    if device.type != "cuda":
        return _cpu_ceilings(nbytes or ceiling_bytes(device), size)
    with current_device(device):
        return _gpu_ceilings(device, nbytes, size)


def measure_host_bandwidth(device: torch.device, nbytes: int = 256 << 20) -> float:
    """Return the bytes a second at which a kernel of ``device`` copies experts from page-locked host memory."""
    block = PinnedBlock(nbytes, device)
    count = 16
    target = torch.empty(count, nbytes // count, dtype=torch.uint8, device=device)
    segments = segments_of([block.data.view(target.shape)], [target])
    tables = new_tables(count, count, device)
    tables.round_start[1] = count
    for table in (tables.copy_expert, tables.copy_slot):
        table.copy_(torch.arange(count))
    with current_device(device):
        return nbytes / _best_seconds(partial(copy_experts, segments, tables, 0), device)


def _gpu_ceilings(device: torch.device, nbytes: int | None, size: int | None) -> Ceilings:
    words = torch.zeros((nbytes or ceiling_bytes(device)) // 4, dtype=torch.int32, device=device)
    source, target = words.chunk(2)
    copy_rate = words.nbytes / _best_seconds(lambda: target.copy_(source), device)
    bandwidth = max(copy_rate, *_read_rates(words, device))
    side = size or 8192
    a = torch.randn(side, side, device=device).bfloat16()
    rate_16 = 2 * side**3 / _best_seconds(lambda: a @ a.T, device)
    rate_8 = rate_16
    if torch.cuda.get_device_capability(device) >= (8, 9):
        codes = a.to(torch.float8_e4m3fn)
        scales = torch.ones(side, 1, device=device)
        scaled_mm: Any = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)  # type: ignore[attr-defined]
        rate_8 = 2 * side**3 / _best_seconds(lambda: scaled_mm(codes, codes.T, scales, scales.T), device)
    return Ceilings(bandwidth=bandwidth, rate_16=rate_16, rate_8=max(rate_8, rate_16))


def ceiling_bytes(device: torch.device) -> int:
    """Return the bytes that ``measure_ceilings`` allocates."""
    return 1 << 32 if device.type == "cuda" else max(1 << 28, 4 * cache_bytes(device))


def _cpu_ceilings(nbytes: int, size: int | None) -> Ceilings:
    """Time short pieces of work and take the best, because a long one would be disturbed by other programs.

    One thread is tried as well: on a busy machine, more threads than free cores are slower.
    """
    threads_before = torch.get_num_threads()
    words = torch.ones(nbytes // 4, dtype=torch.int32)  # zeros could all map to one physical page
    pieces = words.split(min(_CPU_CHUNK, nbytes // 2) // 4)
    pairs = list(zip(pieces[::2], pieces[1::2], strict=False))
    bandwidth = rate = 0.0
    try:
        for threads in sorted({threads_before, 1}):
            torch.set_num_threads(threads)
            read_rates = (piece.nbytes / timed_once(piece.amax, _CPU) for piece in pieces)
            copy_rates = (2 * a.nbytes / timed_once(partial(a.copy_, b), _CPU) for a, b in pairs)
            bandwidth = max(bandwidth, *read_rates, *copy_rates)
            rate = max(rate, *_cpu_rates(_PRODUCTS if size is None else ((size, size, size),)))
    finally:
        torch.set_num_threads(threads_before)
    return Ceilings(bandwidth=bandwidth, rate_16=rate, rate_8=rate)


def _cpu_rates(sizes: Sequence[tuple[int, int, int]]) -> Iterator[float]:
    dtypes = [torch.bfloat16, torch.float32]
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        dtypes = [torch.float32]  # without AVX-512, torch is about 100x slower in bfloat16
    for rows, inner, columns in sizes:
        for dtype in dtypes:
            a = torch.randn(rows, inner).to(dtype)
            b = torch.randn(inner, columns).to(dtype)
            yield 2 * rows * inner * columns / _best_seconds(partial(torch.mm, a, b), _CPU, repeats=12)


def _read_rates(words: Tensor, device: torch.device) -> list[float]:
    """Return the bytes/s of reading ``words`` with a few configurations of one kernel."""
    if find_spec("triton") is None:
        return [words.nbytes / _best_seconds(words.amax, device)]
    from ..kernels.read import read_kernel

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(processors * 16, dtype=torch.int32, device=device)
    rates: list[float] = []
    for block, unroll, warps, programs_per_sm in (
        (1024, 4, 4, 8),
        (2048, 4, 4, 8),
        (2048, 4, 8, 4),
        (4096, 4, 8, 4),
    ):
        programs = processors * programs_per_sm
        stride = programs * block * unroll
        steps = words.numel() // stride
        constants = {"BLOCK": block, "UNROLL": unroll}
        args = (words, out, steps, stride)
        read = partial(launch, read_kernel, (programs,), args, constants, num_warps=warps)
        seconds = _best_seconds(read, device)
        rates.append(4 * steps * stride / seconds)
    return rates


def _best_seconds(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    call()
    return min(timed_once(call, device) for _ in range(repeats))


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level caches of this process's cores; 0 if the machine does not report them.

    On a GPU the L2 cache; on a CPU all levels from the second, which may hold different lines.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    caches: dict[tuple[str, str], int] = {}
    for core in cores:
        for cache in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            try:
                level = (cache / "level").read_text().strip()
                sharing_cores = (cache / "shared_cpu_list").read_text().strip()
                size = (cache / "size").read_text().strip()
            except OSError:
                continue
            factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            if level != "1" and size.rstrip("KMG").isdigit():
                caches[level, sharing_cores] = int(size.rstrip("KMG")) * factor
    return sum(caches.values())


def stays_cached(nbytes: float, device: torch.device) -> bool:
    """Return whether a relevant part of ``nbytes``, read repeatedly, may come from the caches of ``device``.

    A CPU's caches replace lines nearly at random: reading twice their size still hits 20 %, four times their size 2 %.
    """
    cache_size = cache_bytes(device)
    if device.type == "cuda":
        return nbytes <= 2 * cache_size
    return nbytes <= 4 * (cache_size or _ASSUMED_CACHE)


def driver_version(device: torch.device) -> str:
    """Return the version of the GPU driver; on a CPU that of the operating system."""
    if device.type != "cuda":
        return f"{platform.system()} {os.uname().release}" if hasattr(os, "uname") else platform.system()
    file = Path("/sys/module/nvidia/version")
    return file.read_text().strip() if file.exists() else "unknown"


def version_of(package: str) -> str:
    """Return the version of an installed package, or ``absent``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
