"""Kernels that run experts, one file each; ``KERNELS`` lists them in order of preference."""

from .base import ExpertKernel, PackedWeights, Product, Tiling
from .cpu.fused import CpuFused
from .cpu.grouped import CpuGrouped
from .reference import Reference
from .triton.table import TritonBf16, TritonFp8, TritonFp32, TritonW4A8, TritonW4A16, TritonW8A16

__all__ = [
    "KERNELS",
    "CpuFused",
    "CpuGrouped",
    "ExpertKernel",
    "PackedWeights",
    "Product",
    "Reference",
    "Tiling",
    "TritonBf16",
    "TritonFp8",
    "TritonFp32",
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
    TritonFp32(),
    CpuFused(),
    CpuGrouped(),
    Reference(),
)
