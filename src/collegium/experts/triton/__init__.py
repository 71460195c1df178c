"""Experts on a GPU in Triton: one kernel a file (``bf16``, ``fp8``, ``w4a16``, ``w4a8``) over one grouped product."""
