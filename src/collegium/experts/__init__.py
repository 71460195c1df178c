"""Experts kernels, one file each; the tuple's order is the order of preference."""

from __future__ import annotations

from .base import ExpertKernel, Packed, Product, Tiling
from .cpu.grouped import CpuGrouped
from .cpu.w4a16 import CpuW4A16
from .reference import Reference
from .triton.bf16 import TritonBf16
from .triton.fp8 import TritonFp8
from .triton.w4a8 import TritonW4A8
from .triton.w4a16 import TritonW4A16, TritonW8A16

__all__ = [
    "KERNELS",
    "CpuGrouped",
    "CpuW4A16",
    "ExpertKernel",
    "Packed",
    "Product",
    "Reference",
    "Tiling",
    "TritonBf16",
    "TritonFp8",
    "TritonW4A8",
    "TritonW4A16",
    "TritonW8A16",
]

KERNELS: tuple[ExpertKernel, ...] = (
    TritonFp8(),
    TritonW4A8(),
    TritonW4A16(),
    TritonW8A16(),
    TritonBf16(),
    CpuW4A16(),
    CpuGrouped(),
    Reference(),
)
