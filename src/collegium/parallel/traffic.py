"""How many bytes a pass takes to other ranks and back: what of its tokens goes there, and what that is in bytes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NOTHING", "OutgoingTokens", "Traffic"]


class OutgoingTokens(NamedTuple):
    """What of one rank's tokens other ranks get in a pass.

    tokens: that it brings. most: that any rank brings. copies: tokens, once for each other rank they go to. rows:
    assignments that other ranks compute.
    """

    tokens: int
    most: int
    copies: int
    rows: int


class Traffic(NamedTuple):
    """Bytes between one rank and the others for its tokens: there, and back."""

    dispatch: int
    combine: int


NOTHING = Traffic(0, 0)
