"""Codes and scales of GGUF blocks of one to four bits with grids, tables or runs of sixteen columns.

Functions take blocks ``raw``, uint8 ``[n, bytes]``. Codes are uint8 ``[n, 256]``, below 16. Steps are int8
``[n, G, 1 or 2]``, the factors of a block's half-precision numbers for each of G runs of columns.

A code of the IQ1, IQ2 and IQ3 kinds is the index of a value in its grid, plus 8 for a minus sign (IQ1: for a shift
downwards).

Sources: the ``gguf`` package, ``quants.py``, and ggml, ``ggml-common.h``.
"""

import torch
from torch import Tensor

from .gguf_grids import GRIDS, grid_of

__all__ = [
    "IQ1",
    "IQ2",
    "IQ3_S",
    "IQ3_XXS",
    "IQ4",
    "iq1_m",
    "iq1_m_half",
    "iq1_m_steps",
    "iq1_s",
    "iq1_s_steps",
    "iq2_s",
    "iq2_s_steps",
    "iq2_xs",
    "iq2_xs_steps",
    "iq2_xxs",
    "iq2_xxs_steps",
    "iq3_s",
    "iq3_s_steps",
    "iq3_xxs",
    "iq3_xxs_steps",
    "iq4_xs",
    "iq4_xs_steps",
    "nibbles",
    "q2_k",
    "q2_k_steps",
    "q3_k",
    "q3_k_steps",
    "tq1_0",
    "tq2_0",
]


def _signed(kind: str) -> tuple[int, ...]:
    """Return what the 16 codes of a grid's values mean, positive and then negative."""
    values = GRIDS[kind].values
    padded = (*values, *(0,) * (8 - len(values)))
    return (*padded, *(-value for value in padded))


# The values of IQ4_NL and IQ4_XS, ``kvalues_iq4nl`` of ggml.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Numbers of codes, in units of 1/8 (IQ2), 1/4 (IQ3_XXS) and 1 (IQ3_S).
IQ2 = _signed("IQ2_XXS")
IQ3_XXS = _signed("IQ3_XXS")
IQ3_S = _signed("IQ3_S")
# -1, 0 and 1 plus or minus 1/8, in units of 1/8.
IQ1 = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0)


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


def tq1_0(raw: Tensor) -> Tensor:
    """Return codes 0 to 2 of TQ1_0 blocks ``[n, 54]``: five in a byte, base 3, the upper eight bits of a fraction."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    digits = [
        raw[:, None, :32] * powers,
        raw[:, None, 32:48] * powers,
        raw[:, None, 48:52] * powers[:4],
    ]
    fractions = torch.cat([part.flatten(1) for part in digits], dim=1)
    return (fractions.to(torch.int16) * 3 >> 8).to(torch.uint8)


def tq2_0(raw: Tensor) -> Tensor:
    """Return codes of two bits of TQ2_0 blocks ``[n, 66]``."""
    return _fields(raw[:, :64], 2, 32)


def _entries(kind: str, index: Tensor) -> Tensor:
    """Return the grid's entries ``[n, entries, columns]`` for ``index [n, entries]``."""
    grid = grid_of(kind, index.device)
    return grid.index_select(0, index.reshape(-1).int()).view(*index.shape, -1)


def _words(raw: Tensor, size: int) -> Tensor:
    """Return bytes ``[n, b]`` as little-endian words of ``size`` bytes, int64 ``[n, b / size]``."""
    by_word = raw.reshape(raw.shape[0], -1, size).long()
    return sum((by_word[..., byte] << 8 * byte for byte in range(size)), torch.zeros_like(by_word[..., 0]))


def _split_words(words: Tensor, step: int, count: int) -> Tensor:
    """Return ``words [n, w]`` shifted by 0, step, 2 step and so on, ``[n, w * count]``."""
    return (words.unsqueeze(-1) >> torch.arange(0, step * count, step, device=words.device)).flatten(1)


def _sign_bytes(seven: Tensor) -> Tensor:
    """Return eight sign bits for seven: the last one makes their number even."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return (seven | (parity << 7)).to(torch.uint8)


def _with_signs(entries: Tensor, signs: Tensor) -> Tensor:
    """Return codes ``[n, 256]`` of grid entries and of sign bytes ``[n, 32]``, a bit a column, lowest first."""
    bits = (signs.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=signs.device)) & 1
    return entries.reshape(signs.shape[0], 256) | (bits.flatten(1) << 3)


def _odd(steps: Tensor) -> Tensor:
    """Return ``2 * steps + 1`` as int8 ``[n, G, 1]``."""
    return (2 * steps + 1).to(torch.int8).unsqueeze(-1)


def iq2_xxs(raw: Tensor) -> Tensor:
    """Return codes of IQ2_XXS blocks ``[n, 66]``: of 32 columns 4 indices, and 4 times 7 signs below a scale."""
    pairs = raw[:, 2:].reshape(-1, 8, 8)
    signs = _split_words(_words(pairs[..., 4:].reshape(-1, 32), 4), 7, 4) & 127
    return _with_signs(_entries("IQ2_XXS", pairs[..., :4].reshape(-1, 32)), _sign_bytes(signs))


def iq2_xxs_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 32 columns: the upper four bits of eight bytes."""
    return _odd(raw[:, 9::8] >> 4)


def iq2_xs(raw: Tensor) -> Tensor:
    """Return codes of IQ2_XS blocks ``[n, 74]``: for 8 columns an index of nine bits and seven signs."""
    words = _words(raw[:, 2:66], 2)
    return _with_signs(_entries("IQ2_XS", words & 511), _sign_bytes(words >> 9))


def iq2_xs_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 16 columns."""
    return _odd(_fields(raw[:, 66:74], 4, 1))


def iq2_s(raw: Tensor) -> Tensor:
    """Return codes of IQ2_S blocks ``[n, 82]``: 32 bytes of indices, 32 of signs, 8 of two further bits each."""
    index = raw[:, 2:34].int() | (_fields(raw[:, 66:74], 2, 1).int() << 8)
    return _with_signs(_entries("IQ2_S", index), raw[:, 34:66])


def iq2_s_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 16 columns."""
    return _odd(_fields(raw[:, 74:82], 4, 1))


def iq3_xxs(raw: Tensor) -> Tensor:
    """Return codes of IQ3_XXS blocks ``[n, 98]``: 64 indices of 4 columns, for 32 columns 4 times 7 signs."""
    signs = _split_words(_words(raw[:, 66:98], 4), 7, 4) & 127
    return _with_signs(_entries("IQ3_XXS", raw[:, 2:66]), _sign_bytes(signs))


def iq3_xxs_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 32 columns: the upper four bits of eight words."""
    return _odd(raw[:, 69::4] >> 4)


def iq3_s(raw: Tensor) -> Tensor:
    """Return codes of IQ3_S blocks ``[n, 110]``: 64 bytes of indices, 8 of ninth bits, 32 of signs."""
    index = raw[:, 2:66].int() | (_fields(raw[:, 66:74], 1, 1).int() << 8)
    return _with_signs(_entries("IQ3_S", index), raw[:, 74:106])


def iq3_s_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 32 columns."""
    return _odd(_fields(raw[:, 106:110], 4, 1))


def iq1_s(raw: Tensor) -> Tensor:
    """Return codes of IQ1_S blocks ``[n, 50]``: 32 bytes of indices, for 32 columns 4 times 3 bits and a shift."""
    words = _words(raw[:, 34:50], 2)
    index = raw[:, 2:34].int() | ((_split_words(words, 3, 4) & 7) << 8)
    shifts = (words >> 15).to(torch.uint8).repeat_interleave(32, dim=1)
    return _entries("IQ1_S", index).flatten(1) | (shifts << 3)


def iq1_s_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 32 columns: three bits of a word."""
    return _odd((raw[:, 35:50:2] >> 4) & 7)


def iq1_m(raw: Tensor) -> Tensor:
    """Return codes of IQ1_M blocks ``[n, 56]``: 32 bytes of indices, for 8 columns three more bits and a shift."""
    more = _fields(raw[:, 32:48], 4, 1)
    index = raw[:, :32].int() | ((more & 7).int() << 8)
    return _entries("IQ1_S", index).flatten(1) | (more & 8).repeat_interleave(8, dim=1)


def iq1_m_steps(raw: Tensor) -> Tensor:
    """Return the scales of each 16 columns: 4 times three bits of four words."""
    return _odd(_split_words(_words(raw[:, 48:56], 2), 3, 4) & 7)


def iq1_m_half(raw: Tensor) -> Tensor:
    """Return the half-precision number ``[n, 1]`` of which each of the four words has four bits."""
    four = raw[:, 49:56:2] >> 4
    return (four[:, 0::2] | (four[:, 1::2] << 4)).contiguous().view(torch.float16)
