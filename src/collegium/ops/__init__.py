"""Operations around the products of experts: argument checks, a reference in PyTorch, and the launch of a kernel.

Kernels are tested against the reference. It runs on CPU and GPU, has a fixed order of every sum, and outside checked
mode never waits for the device: no ``.item()``, no ``nonzero``, no shape that depends on data. It runs where no kernel
can, in memory that torch allocates.

A kernel writes to buffers that the caller's ``memory`` hands out by name, or to fresh ones without it. For each
operation a function whose name ends in ``_regions`` declares the most bytes of each name, for the plan.
"""
