"""What machine is this: the one place that asks torch about devices."""

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

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # what accelerate calls a map of devices

__all__ = ["current_device", "plain_torch", "probe", "recording"]


def probe(device: torch.device | str | None = None) -> DeviceFacts:
    """Describe ``device``, or the best device of this machine when None.

    ``cuda`` without a number is the current CUDA device. Raises InputError for a name torch does not know and for a
    CUDA device that is not there.
    """
    best = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = _named(best if device is None else device)
    if wanted.type == "cpu":
        return DeviceFacts(kind="cpu", name=_cpu_name(), memory=_cpu_memory(), threads=torch.get_num_threads())
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # torch says None for "cuda", whatever its annotation says.
    numbered = ":" in str(wanted)
    index = wanted.index if numbered else torch.cuda.current_device() if seen else 0
    if wanted.type == "cuda" and index < seen:
        facts = torch.cuda.get_device_properties(index)
        return DeviceFacts(
            kind="cuda",
            name=facts.name,
            capability=(facts.major, facts.minor),
            memory=facts.total_memory,
            index=index,
            sms=facts.multi_processor_count,
            # Kilohertz, twice a clock, and bits; None where torch does not tell.
            bandwidth=250.0 * getattr(facts, "memory_clock_rate", 0) * getattr(facts, "memory_bus_width", 0) or None,
            nvrtc=(facts.major, facts.minor) != (9, 0) or nvrtc_found(),  # nothing else asks for it
            peers=1 + sum(torch.cuda.can_device_access_peer(index, other) for other in range(seen) if other != index),
        )
    raise _refused(wanted, seen)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA ``device`` the current one: streams, events and graphs without a device of their own are its."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, device: torch.device, *, pool: Any = None, errors: str = "global"
) -> Generator[None]:
    """Capture into ``graph`` what is launched on ``device``; pool and errors as ``torch.cuda.graph`` has them."""
    stream = _capture_stream(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=errors):
        yield


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # torch's own is of the device that captured first: on another one it would record nothing, without an error.
    return torch.cuda.Stream(device)


@contextmanager
def plain_torch() -> Generator[None]:
    """Load and build as outside of what a caller may have set: inference mode, gradients, a default device or dtype."""
    before = torch.get_default_dtype()
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        if before != torch.float32:
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            if before != torch.float32:
                torch.set_default_dtype(before)


def _named(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _refused(device, torch.cuda.device_count()) from error


def _refused(device: torch.device | str, seen: int) -> InputError:
    allowed = "cpu" if seen == 0 else "cpu, cuda, " + ", ".join(f"cuda:{index}" for index in range(seen))
    several = ""
    if str(device) in _MAPS or type(device) not in (str, torch.device):
        several = " Several GPUs are several processes: start them with torchrun and pass device=Ranks.of()."
    return InputError(
        f"device {str(device)!r}: torch {torch.__version__} sees {seen} CUDA devices on this machine; "
        f"allowed: {allowed}. Leave the device out to take the best one.{several}"
    )


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_memory() -> int:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0
