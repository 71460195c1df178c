"""Collectives of rows on a busy machine, where a wait may give up in the moment in which what it waits for ends."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

from collegium import RankError
from collegium.parallel.collectives import all_to_all_rows
from ranks import run_ranks


class _Late:
    """Work that ends, well or not, between a wait that gives up and the look at whether it has ended."""

    def __init__(self, work: Any, error: str = "") -> None:
        self.work, self.error, self.waits = work, error, 0

    def wait(self, bound: Any = None) -> None:
        self.work.wait()
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _ends_late(rank: int) -> list[Any]:
    real, found = distributed.all_to_all_single, list[Any]()
    own = torch.arange(8.0).view(4, 2) + 100 * rank
    for error in ("", "a connection was reset"):

        def late(*tensors: Any, error: str = error, **others: Any) -> _Late:
            return _Late(real(*tensors, **others), error)

        with patch.object(distributed, "all_to_all_single", late):
            try:
                found.append(all_to_all_rows(own, [1, 3], [1 + 2 * rank] * 2, group="", phase="rows")[:, 0].tolist())
            except RankError as raised:
                found.append(str(raised))
    return found


def test_rows_that_arrive_at_the_timeout() -> None:
    zero, one = run_ranks(_ends_late, 2)
    assert zero[0] == [0, 100]
    assert one[0] == [2, 4, 6, 102, 104, 106]
    for said in (zero[1], one[1]):
        assert said == "rows: every rank responds, and torch.distributed reports: a connection was reset"
