"""Facts about this machine's devices, as torch reports them."""

import os
import platform
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..problem import DeviceFacts
from .nvrtc import nvrtc_found

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # values of accelerate's device_map

__all__ = ["current_device", "plain_torch", "probe", "recording"]


def probe(device: torch.device | str | None = None) -> DeviceFacts:
    """Describe ``device``, or the best device of this machine when None.

    ``cuda`` without a number is the current CUDA device. Raises InputError for a name that torch rejects and for a CUDA
    device that does not exist.
    """
    best = "cuda" if torch.cuda.is_available() else "cpu"
    torch_device = _parse(best if device is None else device)
    if torch_device.type == "cpu":
        return DeviceFacts(kind="cpu", name=_cpu_name(), memory=_cpu_memory(), threads=torch.get_num_threads())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = _device_index(torch_device, count)
    if torch_device.type != "cuda" or index >= count:
        raise _unknown_device(torch_device, count)
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    reachable = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
    return DeviceFacts(
        kind="cuda",
        name=properties.name,
        capability=capability,
        memory=properties.total_memory,
        index=index,
        sms=properties.multi_processor_count,
        # Two transfers a clock, eight bits a byte; None where torch does not report the clock.
        bandwidth=250.0 * clock_khz * bus_bits or None,
        nvrtc=capability != (9, 0) or nvrtc_found(),  # only Hopper's kernels need it
        peers=1 + len(reachable),
    )


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA ``device`` the current one, on which new streams, events and graphs are created."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, device: torch.device, *, pool: Any = None, errors: str = "global"
) -> Generator[None]:
    """Capture work launched on ``device`` into ``graph``; pool and errors as in ``torch.cuda.graph``."""
    stream = _capture_stream(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=errors):
        yield


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # torch's default capture stream is of the first device that captured: on another device it records nothing.
    return torch.cuda.Stream(device)


@contextmanager
def plain_torch() -> Generator[None]:
    """Ignore the caller's inference mode, gradient mode, and default device and dtype inside the block."""
    default_dtype = torch.get_default_dtype()
    # A default device costs microseconds in every call of torch, so one is set only where the caller has another.
    on_cpu = torch.empty(0).device.type == "cpu"
    with torch.inference_mode(False), torch.no_grad(), nullcontext() if on_cpu else torch.device("cpu"):
        if default_dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            if default_dtype != torch.float32:
                torch.set_default_dtype(default_dtype)


def _parse(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _unknown_device(device, torch.cuda.device_count()) from error


def _device_index(device: torch.device, count: int) -> int:
    # The index of "cuda" is None, despite its type annotation.
    if ":" in str(device):
        return device.index
    return torch.cuda.current_device() if count else 0


def _unknown_device(device: torch.device | str, count: int) -> InputError:
    allowed = "cpu" if count == 0 else "cpu, cuda, " + ", ".join(f"cuda:{index}" for index in range(count))
    hint = ""
    if str(device) in _MAPS or type(device) not in (str, torch.device):
        hint = " Several GPUs are several processes: start them with torchrun and pass device=Ranks.of()."
    return InputError(
        f"device {str(device)!r}: torch {torch.__version__} sees {count} CUDA devices on this machine; "
        f"allowed: {allowed}. Leave the device out to take the best one.{hint}"
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_memory() -> int:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0
