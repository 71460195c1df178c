"""Experts kernels, one file each; the tuple's order is the order of preference."""

from __future__ import annotations

from .base import ExpertKernel
from .cpu_grouped import CpuGrouped
from .reference import Reference

__all__ = ["KERNELS", "CpuGrouped", "ExpertKernel", "Reference"]

KERNELS: tuple[ExpertKernel, ...] = (CpuGrouped(), Reference())
