"""How many bytes one pass exchanges with other ranks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NOTHING", "OutgoingTokens", "Traffic"]


class OutgoingTokens(NamedTuple):
    """The part of one rank's tokens that other ranks receive in a pass.

    tokens: tokens of this rank. max_tokens: tokens of the rank with the most. copies: tokens, counted once for each
    other rank that receives them. rows: assignments that other ranks compute.
    """

    tokens: int
    max_tokens: int
    copies: int
    rows: int


class Traffic(NamedTuple):
    """Bytes between one rank and the others for its tokens, in each direction."""

    dispatch: int
    combine: int


NOTHING = Traffic(0, 0)
