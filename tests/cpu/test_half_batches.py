"""Two halves of a batch run beside each other over ranks on a CPU."""

from __future__ import annotations

from functools import partial

import pytest

from half_batches import halves
from ranks import run_ranks


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "all_to_all_fixed", "symm_mem"])
def test_half_batches_run_concurrently(name: str) -> None:
    assert run_ranks(partial(halves, name=name), 2) == [[], []]
