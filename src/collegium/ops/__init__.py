"""Host side of every operation: the PyTorch reference, which judges the kernels, and argument checks.

Every reference runs on CPU and GPU, has a fixed order of every sum, and outside checked mode never waits for
the device: no ``.item()``, no ``nonzero``, no shape that depends on data.
"""
