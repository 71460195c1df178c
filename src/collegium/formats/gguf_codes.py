"""Codes and scales of GGUF blocks of one to four bits with tables or runs of sixteen columns.

Functions take blocks ``raw``, uint8 ``[n, bytes]``. Codes are uint8 ``[n, 256]``, below 16. Steps are int8
``[n, G, 1 or 2]``, the factors of a block's half-precision numbers for each of G runs of columns.

Sources: the ``gguf`` package, ``quants.py``, and ggml, ``ggml-common.h``.
"""

import torch
from torch import Tensor

__all__ = ["IQ4", "iq4_xs", "iq4_xs_steps", "nibbles", "q2_k", "q2_k_steps", "q3_k", "q3_k_steps"]

# The values of IQ4_NL and IQ4_XS, ``kvalues_iq4nl`` of ggml.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def nibbles(raw: Tensor) -> Tensor:
    """Return ``[n, 2b]``: the low nibbles of ``[n, b]`` bytes, then the high ones."""
    return torch.cat((raw & 0xF, raw >> 4), dim=-1)


def _fields(raw: Tensor, bits: int, run: int) -> Tensor:
    """Return the fields of ``bits`` bits of bytes ``[n, b]``: of each ``run`` bytes the lowest, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    return ((raw.reshape(raw.shape[0], -1, 1, run) >> shifts) & ((1 << bits) - 1)).flatten(1)


def q2_k(raw: Tensor) -> Tensor:
    """Return codes of two bits of Q2_K blocks ``[n, 84]``: 32 columns, the lowest two bits of 32 bytes, then more."""
    return _fields(raw[:, 16:80], 2, 32)


def q2_k_steps(raw: Tensor) -> Tensor:
    """Return the scale and the minimum of each 16 columns, ``[n, 16, 2]``, from the nibbles of 16 bytes."""
    return torch.stack((raw[:, :16] & 15, raw[:, :16] >> 4), dim=-1)


def q3_k(raw: Tensor) -> Tensor:
    """Return codes 0 to 7 of Q3_K blocks ``[n, 110]``: two bits as in Q2_K, the third in the first 32 bytes."""
    return _fields(raw[:, 32:96], 2, 32) | (_fields(raw[:, :32], 1, 32) << 2)


def q3_k_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 16 columns, -32 to 31: nibbles of 8 bytes, and their upper two bits in 4 more."""
    scales = nibbles(raw[:, 96:104]) | (_fields(raw[:, 104:108], 2, 4) << 4)
    return (scales - 32).unsqueeze(-1)


def iq4_xs(raw: Tensor) -> Tensor:
    """Return the codes of IQ4_XS blocks ``[n, 136]``: 16 bytes hold 32 columns."""
    return nibbles(raw[:, 8:].reshape(-1, 16)).view(-1, 256)


def iq4_xs_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 32 columns, -32 to 31: four bits in one of 4 bytes, two bits in one of 2 bytes."""
    scales = _fields(raw[:, 4:8], 4, 1) | (_fields(raw[:, 2:4], 2, 1) << 4)
    return (scales - 32).unsqueeze(-1)
