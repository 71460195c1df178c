"""What travels between ranks, as bytes: one message for each row, so that one collective carries all of it.

A token's message is the token or its codes and scales, the places of its assignments, and their weights where the
receiver needs them. Each part starts at a multiple of 16 bytes and a message has a multiple of 64, so that rows which
arrive are as aligned as rows in fresh memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..formats.unquantised import DTYPES
from ..ops.quantize import activation_format, quantize_rows
from ..types import Routing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..problem import Problem

__all__ = [
    "EMPTY",
    "Columns",
    "ReceivedTokens",
    "TokenMessage",
    "joined",
    "message_bytes",
    "parted",
    "sent_words",
    "there_bytes",
]

EMPTY = 255  # the byte of a message that holds no token: all its places are -1

Columns = tuple[torch.dtype, int]  # dtype and columns of a part of a message


class ReceivedTokens(NamedTuple):
    """Tokens ``[N, H]`` or their codes with ``scale [N, G]`` float32, places ``[N, K]`` int64, weights or None."""

    x: Tensor
    scale: Tensor | None
    places: Tensor
    weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMessage:
    """How tokens of one layer travel. form: of their codes, None: as they are. weighted: their weights travel too."""

    dtype: torch.dtype
    hidden: int
    form: str | None
    weighted: bool

    @classmethod
    def of(cls, problem: Problem) -> TokenMessage:
        """Return the wire of ``problem``; weights travel where the receiver multiplies by them."""
        return cls(
            dtype=DTYPES[problem.dtype],
            hidden=problem.spec.expert_hidden_size,
            form=problem.sent_as,
            weighted=problem.spec.routing.weight_on_input or problem.combine != "exact",
        )

    def messages(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return ``[T, B]`` uint8 for ``x [T, H]``, ``places [T, K]`` and ``weights [T, K]``."""
        x = x.to(self.dtype)
        parts: list[Tensor | None] = [x, None]
        if self.form is not None:
            rows = quantize_rows(x, self.form)
            parts = [rows.codes, rows.scales]
        parts += [places.to(torch.int32), weights.float() if self.weighted else None]
        return joined([part for part in parts if part is not None])

    def columns(self, top_k: int) -> list[Columns]:
        """Return the parts of a message of ``top_k`` assignments."""
        head: list[Columns] = [(self.dtype, self.hidden)]
        if self.form is not None:
            made = activation_format(self.form).buffers(1, self.hidden)
            head = [(dtype, shape[1]) for shape, dtype in (made["codes"], made["scales"])]
        return head + [(torch.int32, top_k)] + [(torch.float32, top_k)] * self.weighted

    def read(self, messages: Tensor, top_k: int) -> ReceivedTokens:
        """Return what ``messages [N, B]`` of ``top_k`` assignments each hold; x is a view."""
        x, *found = parted(messages, self.columns(top_k))
        scale = found.pop(0).contiguous() if self.form is not None else None
        return ReceivedTokens(x, scale, found[0].to(torch.int64), found[1] if self.weighted else None)

    def routing(self, arrived: ReceivedTokens, slots: Tensor) -> Routing:
        """Return the routing of what arrived to this rank's ``slots [N, K]``; weights of nothing where none came."""
        weights = slots.new_empty(slots.shape, dtype=torch.float32) if arrived.weights is None else arrived.weights
        return Routing(topk_ids=slots, topk_weights=weights)


def sent_words(problem: Problem) -> str:
    """Return in words what a token travels as."""
    return f"tokens in {problem.dtype}" if problem.sent_as is None else f"tokens as {problem.sent_as} codes and scales"


def message_bytes(columns: Sequence[Columns]) -> int:
    """Return how many bytes ``joined`` makes of a row of parts."""
    whole = sum(-(-count * dtype.itemsize // 16) * 16 for dtype, count in columns)
    return -(-whole // 64) * 64


def there_bytes(problem: Problem) -> int:
    """Return the bytes of a token's message."""
    return message_bytes(TokenMessage.of(problem).columns(problem.spec.routing.top_k))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return ``[N, B]`` uint8: the rows of ``parts [N, C]`` side by side; what is between them means nothing."""
    size = message_bytes([(part.dtype, part.shape[1]) for part in parts])
    messages = parts[0].new_empty((parts[0].shape[0], size), dtype=torch.uint8)
    for part, place in zip(parts, parted(messages, [(part.dtype, part.shape[1]) for part in parts]), strict=True):
        place.copy_(part)
    return messages


def parted(messages: Tensor, columns: Sequence[Columns]) -> list[Tensor]:
    """Return views of the parts ``[N, C]`` that ``joined`` put into ``messages``."""
    found: list[Tensor] = []
    start = 0
    for dtype, count in columns:
        size = count * dtype.itemsize
        found.append(messages[:, start : start + size].view(dtype))
        start += size + -size % 16
    return found
