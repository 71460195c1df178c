"""On ``PYTHONPATH``: kernels that ``tests/gpu/compile_ahead.py`` compiled are found, by any Python."""

from triton import __version__
from triton.runtime import cache

# A digest of all of Triton's files otherwise. The rest of the key, kernel, arguments and GPU, stays as it is.
cache.triton_key = lambda: __version__
