"""The byte format of what travels between ranks: one message for each row, so that one collective sends all of it.

A token's message holds the token (or its codes and scales), the physical ids of its assignments, and their weights
where the receiver needs them. Each column block starts at a multiple of 16 bytes and a message has a multiple of 64, so
that received rows are aligned like rows in fresh memory.
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
    "code_columns",
    "describe_tokens",
    "dispatch_bytes",
    "message_bytes",
    "pack_columns",
    "unpack_columns",
]

EMPTY = 255  # the byte that fills a message without a token: all its physical ids are -1

Columns = tuple[torch.dtype, int]  # dtype and number of columns of one block of a message


class ReceivedTokens(NamedTuple):
    """Tokens of other ranks.

    x: ``[N, H]``, or codes with ``scale [N, G]`` float32. physical_ids: ``[N, K]`` int64. weights: ``[N, K]`` or None.
    """

    x: Tensor
    scale: Tensor | None
    physical_ids: Tensor
    weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMessage:
    """The message format of one layer's tokens.

    code_format: activation format of the tokens, None: unquantised in ``dtype``. weighted: router weights travel too.
    """

    dtype: torch.dtype
    hidden: int
    code_format: str | None
    weighted: bool

    @classmethod
    def of(cls, problem: Problem) -> TokenMessage:
        """Return the format of ``problem``; weights travel where the receiver multiplies by them."""
        return cls(
            dtype=DTYPES[problem.dtype],
            hidden=problem.spec.expert_hidden_size,
            code_format=problem.sent_as,
            weighted=problem.spec.routing.weight_on_input or problem.combine != "exact",
        )

    def pack(self, x: Tensor, physical_ids: Tensor, weights: Tensor) -> Tensor:
        """Return messages ``[T, B]`` uint8 for ``x [T, H]``, ``physical_ids [T, K]`` and ``weights [T, K]``."""
        x = x.to(self.dtype)
        blocks = [x]
        if self.code_format is not None:
            quantized = quantize_rows(x, self.code_format)
            blocks = [quantized.codes]
            if quantized.scales is not None:
                blocks.append(quantized.scales)
        blocks.append(physical_ids.to(torch.int32))
        if self.weighted:
            blocks.append(weights.float())
        return pack_columns(blocks)

    def columns(self, top_k: int) -> list[Columns]:
        """Return the column blocks of a message with ``top_k`` assignments."""
        columns: list[Columns] = [(self.dtype, self.hidden)]
        if self.code_format is not None:
            columns = code_columns(self.code_format, self.hidden)
        columns.append((torch.int32, top_k))
        if self.weighted:
            columns.append((torch.float32, top_k))
        return columns

    def unpack(self, messages: Tensor, top_k: int) -> ReceivedTokens:
        """Return the contents of ``messages [N, B]`` with ``top_k`` assignments each; x is a view."""
        blocks = unpack_columns(messages, self.columns(top_k))
        x = blocks.pop(0)
        scale = None if self.code_format is None else blocks.pop(0).contiguous()
        physical_ids = blocks.pop(0).to(torch.int64)
        return ReceivedTokens(x, scale, physical_ids, blocks.pop(0) if self.weighted else None)

    def routing(self, received: ReceivedTokens, slots: Tensor) -> Routing:
        """Return the routing of received tokens to local ``slots [N, K]``; weights are uninitialised if none came."""
        weights = received.weights
        if weights is None:
            weights = slots.new_empty(slots.shape, dtype=torch.float32)
        return Routing(topk_ids=slots, topk_weights=weights)


def describe_tokens(problem: Problem) -> str:
    """Describe the form in which tokens travel."""
    return f"tokens in {problem.dtype}" if problem.sent_as is None else f"tokens as {problem.sent_as} codes and scales"


def code_columns(code_format: str, hidden: int) -> list[Columns]:
    """Return the column blocks of a row of ``hidden`` elements in an activation format: codes and scales."""
    buffers = activation_format(code_format).buffers(1, hidden)
    return [(dtype, shape[1]) for shape, dtype in (buffers["codes"], buffers["scales"])]


def message_bytes(columns: Sequence[Columns]) -> int:
    """Return the bytes of one message with these column blocks."""
    total = sum(-(-count * dtype.itemsize // 16) * 16 for dtype, count in columns)
    return -(-total // 64) * 64


def dispatch_bytes(problem: Problem) -> int:
    """Return the bytes of one token's message."""
    return message_bytes(TokenMessage.of(problem).columns(problem.spec.routing.top_k))


def pack_columns(blocks: Sequence[Tensor]) -> Tensor:
    """Return messages ``[N, B]`` uint8 that hold the rows of ``blocks [N, C]`` side by side; padding is undefined."""
    columns = [(block.dtype, block.shape[1]) for block in blocks]
    messages = blocks[0].new_empty((blocks[0].shape[0], message_bytes(columns)), dtype=torch.uint8)
    for block, target in zip(blocks, unpack_columns(messages, columns), strict=True):
        target.copy_(block)
    return messages


def unpack_columns(messages: Tensor, columns: Sequence[Columns]) -> list[Tensor]:
    """Return views of the blocks ``[N, C]`` that ``pack_columns`` wrote into ``messages``."""
    blocks: list[Tensor] = []
    start = 0
    for dtype, count in columns:
        size = count * dtype.itemsize
        blocks.append(messages[:, start : start + size].view(dtype))
        start += size + -size % 16
    return blocks
