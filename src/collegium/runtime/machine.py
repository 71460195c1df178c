"""Properties of a GPU that the choice of tiles depends on."""

from dataclasses import dataclass

import torch

from ..problem import DeviceFacts
from .devices import probe

__all__ = ["Machine", "machine_at", "machine_for", "machine_of"]

_SMS = 132  # of an H100 or H200
_H200_BANDWIDTH = 3.201e9 * 2 * 6144 / 8  # nominal bytes a second
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}  # of a block, by capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Properties of a GPU that the choice of tiles depends on.

    sms: multiprocessors. shared: bytes of shared memory of a block. bandwidth: bytes a microsecond, for every GPU those
    of an H200, to which the score was fitted. slower: relative extra time of its memory compared with an H200's. rate:
    bf16 FLOP a microsecond; FP8 is twice as fast. fp8: the tensor cores multiply FP8. pdl: a kernel may start before
    the previous one has finished (programmatic dependent launch). scaled: the tensor cores multiply four-bit weights
    and E4M3 rows with block scales. copies: it has Hopper's tensor memory accelerator and warpgroup products. compiles:
    it has these, and NVRTC is installed, which large batches need.
    """

    sms: int = _SMS
    shared: int = 227 * 1024
    bandwidth: float = 4.33e6
    slower: float = 0.0
    rate: float = 7.9e8
    fp8: bool = True
    pdl: bool = True
    scaled: bool = False
    copies: bool = False
    compiles: bool = False


def machine_of(capability: tuple[int, int], sms: int, bandwidth: float | None = None, *, nvrtc: bool = True) -> Machine:
    """Return the machine of a CUDA ``capability`` with ``sms`` multiprocessors; the rest as in ``DeviceFacts``."""
    shared = _SHARED_KIB.get(capability, 227 if capability >= (9, 0) else 99) * 1024
    hopper = capability == (9, 0)
    return Machine(
        sms=sms,
        shared=shared,
        slower=_H200_BANDWIDTH / (bandwidth or _H200_BANDWIDTH) - 1,
        fp8=capability >= (8, 9),
        pdl=capability >= (9, 0),
        scaled=capability[0] == 10,
        copies=hopper,
        compiles=hopper and nvrtc,
    )


def machine_for(facts: DeviceFacts) -> Machine:
    """Return the machine of a plan; unknown properties are those of an H200."""
    return machine_of(facts.capability or (9, 0), facts.sms or _SMS, facts.bandwidth, nvrtc=facts.nvrtc)


def machine_at(device: torch.device) -> Machine:
    """Return the machine of a CUDA ``device``; on a CPU (the interpreter) the defaults."""
    return machine_for(probe(device)) if device.type == "cuda" else Machine()
