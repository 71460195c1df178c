"""Gated rows and norms as kernels: the numbers that torch computes on a CPU, and the terms of their definitions.

Kernels run in Triton's interpreter; ``tests/gpu/test_small_kernels.py`` compares bits on a device.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from by_kernel import by_kernel
from collegium import DeviceFacts, InputError, Limits, MoESpec, Problem, RoutingSpec, SharedSpec
from collegium.ops import linear as products
from collegium.ops.linear import sigmoid_gate
from collegium.ops.rms_norm import rms_norm
from collegium.testing.compare import heavy_tailed, relative_error
from memories import Noted, Poisoned

kernels = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="tests/gpu makes these comparisons on the device" if torch.cuda.is_available() else "needs Triton",
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def ways(run: Any) -> list[Any]:
    return [run, pytest.param(by_kernel(run), marks=kernels)]


def gate_truth(x: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.double() / (1.0 + (-(x.double() @ gate.double().T)).exp())


@pytest.mark.each_choice
@pytest.mark.parametrize("way", ways(sigmoid_gate))
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP32), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("tokens", "k_in", "width"), [(1, 2048, 2048), (5, 450, 7), (70, 130, 300), (3, 40, 33)])
def test_gated_rows(
    way: Any,
    dtypes: tuple[torch.dtype, torch.dtype],
    whole: bool,
    tokens: int,
    k_in: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if whole:  # as many tokens are multiplied: a program adds its parts itself
        monkeypatch.setattr(products, "_SPLIT_LIMIT", 0)
    x, rows = heavy_tailed(tokens, k_in, seed=1).to(dtypes[0]), heavy_tailed(tokens, width, seed=2).to(dtypes[1])
    gate = heavy_tailed(1, k_in, seed=3) / k_in**0.5
    memory = Poisoned()
    found, truth = way(x, gate, rows, memory=memory), gate_truth(x, gate, rows)
    assert (found.shape, found.dtype) == ((tokens, width), FP32)
    factors = truth / rows.double()
    assert tokens == 1 or factors.max() - factors.min() > 0.1, "a gate that is the same for all tokens shows nothing"
    assert relative_error(found, truth) < 2e-6
    if memory.taken:
        assert set(memory.taken) == {"sums", "rows"}
        assert found.data_ptr() == memory.taken["rows"].data_ptr()


@pytest.mark.parametrize("way", ways(sigmoid_gate))
def test_gated_rows_apart(way: Any) -> None:
    """Rows that are columns of a wider tensor, and none at all."""
    x, wide, gate = heavy_tailed(4, 300, seed=1), heavy_tailed(4, 99, seed=2), heavy_tailed(1, 300, seed=3) / 17
    for rows in (wide[:, 5:70], wide[:, ::3], wide.T.contiguous().T):
        assert relative_error(way(x, gate, rows), gate_truth(x, gate, rows)) < 2e-6
    assert way(x[:0], gate, wide[:0]).shape == (0, 99)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", ways(sigmoid_gate))
def test_gate_keeps_nan_in_its_row(way: Any) -> None:
    x, rows, gate = heavy_tailed(9, 130, seed=1), heavy_tailed(9, 40, seed=2), heavy_tailed(1, 130, seed=3) / 11
    wanted = way(x, gate, rows)
    x[3, 129] = torch.nan
    rows[5, 7] = torch.inf
    found = way(x, gate, rows)
    assert found[3].isnan().all()
    assert found[5].isfinite().tolist() == [column != 7 for column in range(40)]
    kept = [row for row in range(9) if row not in (3, 5)]
    assert torch.equal(found[kept], wanted[kept])


@kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gate_closes_and_opens() -> None:
    """Logits at which the sigmoid is 0, subnormal, a half and 1 in float32, as torch rounds them from float64."""
    logits = torch.tensor([-1000.0, -110.0, -95.0, -17.5, -0.0, 0.0, 17.5, 1000.0])
    x, rows = logits[:, None] * torch.ones(1, 3) / 3, torch.full((8, 5), 1.5)
    x[:, 1:], x[:, 0] = 0.0, logits
    gate = torch.tensor([[1.0, 7.0, -3.0]])
    assert torch.equal(by_kernel(sigmoid_gate)(x, gate, rows), torch.sigmoid(logits.double()).float()[:, None] * rows)


def test_gate_refusals() -> None:
    x, gate, rows = torch.zeros(4, 8), torch.zeros(1, 8), torch.zeros(4, 5)
    for given, value in (
        ((x, torch.zeros(2, 8), rows), "(2, 8)"),
        ((x, gate, rows[:3]), "(3, 5)"),
        ((x, gate, rows.long()), "torch.int64"),
        ((x, torch.zeros(1, 7), rows), "(4, 8)"),
    ):
        with pytest.raises(InputError) as raised:
            sigmoid_gate(*given)
        assert value in str(raised.value)


def problem_of(tokens: int) -> Problem:
    """A layer whose gate, latent width and router have everything that a pass computes around the experts."""
    spec = MoESpec(
        hidden_size=130,
        intermediate_size=64,
        num_experts=4,
        routing=RoutingSpec(top_k=2, input_norm_eps=1e-6),
        shared=SharedSpec(intermediate_size=64, gated=True),
        latent_size=72,
        latent_norm_eps=1e-5,
    )
    hopper = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
    return Problem(spec=spec, device=hopper, limits=Limits(max_tokens=tokens))


@kernels
@pytest.mark.parametrize("tokens", [1, 17, 70])
@pytest.mark.parametrize("whole", [False, True])
def test_declared_memory(tokens: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = products.regions_of(problem_of(70))
    if whole:  # more tokens than parts are made apart for
        monkeypatch.setattr(products, "_SPLIT_LIMIT", 16)
        declared = products.regions_of(problem_of(70))
    memory, x = Noted(), torch.ones(tokens, 130)
    by_kernel(sigmoid_gate)(x, torch.ones(1, 130), x, memory=memory.part("gate"))
    by_kernel(rms_norm)(x, None, 1e-6, memory=memory.part("router"))
    by_kernel(rms_norm)(x[:, :72], torch.ones(72), 1e-6, memory=memory.part("latent"))
    assert set(memory.sizes) == {"gate/sums", "gate/rows", "router/norm", "latent/norm"}
    for name, size in memory.sizes.items():
        assert size <= declared[name], name
        assert tokens < 70 or whole or size == declared[name], name


@pytest.mark.each_choice
@pytest.mark.parametrize("way", ways(rms_norm))
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 33), (70, 300), (2, 4097), (1, 9000)])
def test_rms_norm(way: Any, dtype: torch.dtype, weighted: bool, tokens: int, columns: int) -> None:
    x = (heavy_tailed(tokens, columns, seed=1) * torch.logspace(-3, 3, tokens)[:, None]).to(dtype)
    weight = heavy_tailed(1, columns, seed=2)[0] if weighted else None
    memory, eps = Poisoned(), 1e-5
    found = way(x, weight, eps, memory=memory)
    truth = x.double() / (x.double().square().mean(1, keepdim=True) + eps).sqrt()
    truth = truth if weight is None else truth * weight.double()
    assert found.dtype == FP32
    # Each row by itself: small ones would vanish next to large ones.
    assert all(relative_error(one, other) < 1e-6 for one, other in zip(found, truth, strict=True))
    assert set(memory.taken) <= {"norm"}


@pytest.mark.parametrize("way", ways(rms_norm))
def test_rms_norm_rows_apart(way: Any) -> None:
    wide = heavy_tailed(5, 99, seed=1)
    for x in (wide[:, 5:70], wide[:, ::3]):
        assert relative_error(way(x, None, 1e-6), x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()) < 1e-6
    assert way(wide[:0], None, 1e-6).shape == (0, 99)
    wide[2, 3] = torch.nan
    assert way(wide, None, 1e-6).isnan().all(dim=1).tolist() == [row == 2 for row in range(5)]
    for weight in (torch.ones(98), torch.ones(99).bfloat16()):
        with pytest.raises(InputError):
            way(wide, weight, 1e-6)
