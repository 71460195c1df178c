from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

# Triton's interpreter multiplies with NumPy. OpenBLAS's products for Haswell and Zen add in an order that depends on
# how many columns there are; these do not. Read when NumPy is first loaded.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent
collect_ignore = ["vllm"]  # `make vllm-test` runs them, in an environment of their own


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill fresh memory so that a row or a scale nobody wrote cannot pass for a result.

    Floats become NaN (also every float8, and E8M0 byte 255), integers their maximum, booleans True. Torch does
    it for every way of making an empty tensor, from Python or C++, in its deterministic mode; only the packed
    four-bit dtype cannot be filled. Tests of the CPU only: on a GPU that mode refuses operations that are
    deterministic for our inputs.
    """
    if not request.path.is_relative_to(_HERE / "cpu"):
        yield
        return
    fill, mode = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
