"""Weights as the kernels read them: ``pack_*`` re-lays a payload, ``unpack_*`` returns codes in logical order.

One module per family of formats. Packing goes row by row in small chunks: temporary memory stays under 64 MiB whatever
the layer's size.
"""

from .bnb4 import pack_bnb4, unpack_bnb4
from .common import Unpacked, add_projection_dim
from .fp8 import pack_fp8_block, pack_fp8_rows, unpack_fp8
from .gguf import pack_gguf, unpack_gguf
from .integers import column_order, pack_int, unpack_int
from .mx import pack_mx, pack_nvfp4, unpack_mx, unpack_nvfp4
from .plain import pack_float32, pack_plain, unpack_plain
from .w4a8 import pack_w4a8, unpack_w4a8

__all__ = [
    "Unpacked",
    "add_projection_dim",
    "column_order",
    "pack_bnb4",
    "pack_float32",
    "pack_fp8_block",
    "pack_fp8_rows",
    "pack_gguf",
    "pack_int",
    "pack_mx",
    "pack_nvfp4",
    "pack_plain",
    "pack_w4a8",
    "unpack_bnb4",
    "unpack_fp8",
    "unpack_gguf",
    "unpack_int",
    "unpack_mx",
    "unpack_nvfp4",
    "unpack_plain",
    "unpack_w4a8",
]
