"""What machine is this: the one place that asks torch about devices."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .errors import InputError
from .types import DeviceFacts

__all__ = ["probe"]


def probe(device: torch.device | str | None = None) -> DeviceFacts:
    """Describe ``device``, or the best device of this machine when None.

    Raises InputError when a CUDA device is asked for and torch sees none.
    """
    wanted = torch.device(device) if device is not None else torch.device(_best())
    if wanted.type == "cpu":
        return DeviceFacts(kind="cpu", name=_cpu_name(), memory=_cpu_memory(), threads=torch.get_num_threads())
    if wanted.type == "cuda" and torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(wanted)
        return DeviceFacts(
            kind="cuda", name=facts.name, capability=(facts.major, facts.minor), memory=facts.total_memory
        )
    raise InputError(
        f"device {wanted}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices on this machine; "
        "allowed: cpu, or cuda where torch.cuda.is_available(). Leave the device out to take the best one."
    )


def _best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
