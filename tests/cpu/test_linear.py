"""Rows times a weight: as exact as float32, the same bits in any batch, and nothing that is seen in another row.

Kernels run in Triton's interpreter, which shows that they are right; ``tests/gpu/test_linear.py`` compares bits.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch

from by_kernel import by_kernel
from collegium.errors import InputError
from collegium.ops import linear as products
from collegium.ops.linear import linear
from collegium.testing.compare import heavy_tailed, relative_error
from memories import Poisoned
from raising import raises_with

if TYPE_CHECKING:
    from collections.abc import Iterator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Pair = tuple[torch.dtype, torch.dtype]  # of x and of the weight
PAIRS: tuple[Pair, ...] = ((BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP16))
# columns in and out
SIZES = ((256, 16), (33, 1), (1, 5), (130, 7), (1000, 60), (300, 129), (2048, 1), (64, 257))

kernels = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="tests/gpu makes these comparisons on the device" if torch.cuda.is_available() else "needs Triton",
)


linear_on_device = by_kernel(linear)


def made(tokens: int, k_in: int, n_out: int, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    x = heavy_tailed(tokens, k_in, seed=tokens + k_in).to(pair[0])
    return x, (heavy_tailed(n_out, k_in, seed=n_out) / k_in**0.5).to(pair[1])


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.int32 if rows.dtype == FP32 else torch.int16)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.each_choice
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's bits are compared in tests/gpu")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("k_in", "n_out"), SIZES)
def test_rows_are_batch_invariant(k_in: int, n_out: int, pair: Pair) -> None:
    """Blocks cost one token of a router of 2048 x 128 some 80 us instead of 18, of 7168 x 256 0.5 ms instead of 0.3.

    1024 tokens cost 1.2 to 2 plain products (256 x 16: 3, 0.3 ms), one BF16 token into a latent width less.
    (One thread of a Xeon with AMX, torch 2.13, November 2026. A token of the demo's model, six layers, takes the same
    9 ms as before.)
    """
    x, weight = made(70, k_in, n_out, pair)
    alone = bits(torch.cat([linear(row[None], weight) for row in x]))
    for tokens in range(1, 71):  # the last rows come to every place in a block
        assert torch.equal(bits(linear(x[:tokens], weight)), alone[:tokens])
        assert torch.equal(bits(linear(x[70 - tokens :], weight)), alone[70 - tokens :])


@pytest.mark.parametrize("pair", PAIRS)
def test_linear_against_float64(pair: Pair) -> None:
    for tokens, k_in, n_out in ((5, 7168, 64), (33, 130, 7), (1, 2048, 1), (0, 40, 3)):
        x, weight = made(tokens, k_in, n_out, pair)
        found, truth = linear(x, weight), x.double() @ weight.double().T
        assert (found.shape, found.dtype) == ((tokens, n_out), pair[1])
        assert tokens == 0 or relative_error(found, truth) < {FP32: 2e-6, BF16: 3e-3, FP16: 4e-4}[pair[1]]


@pytest.mark.each_choice
@kernels
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("tokens", "k_in", "n_out"),
    [(1, 2048, 70), (5, 7168, 64), (17, 130, 7), (33, 65, 129), (16, 1, 1), (0, 40, 3), (70, 450, 1)],
)
def test_kernels_against_truth(
    tokens: int, k_in: int, n_out: int, pair: Pair, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:  # as many tokens are multiplied: a program adds its parts itself
        monkeypatch.setattr(products, "_SPLIT_LIMIT", 0)
    x, weight = made(tokens, k_in, n_out, pair)
    memory = Poisoned()
    found, truth = linear_on_device(x, weight, memory=memory), x.double() @ weight.double().T
    assert (found.shape, found.dtype) == ((tokens, n_out), pair[1])
    assert set(memory.taken) == ({"out"} if whole or k_in <= 64 else {"out", "sums"})
    assert found.data_ptr() == memory.taken["out"].data_ptr()
    # Float32 needs every term: the last alone is 2**-17 of a value. The interpreter cuts bfloat16 off.
    assert tokens == 0 or relative_error(found, truth) < {FP32: 3e-7, BF16: 4e-3, FP16: 4e-4}[pair[1]]


def ways() -> list[Any]:
    return [linear, pytest.param(linear_on_device, marks=kernels)]


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("whole", [False, True])
def test_addend_and_out_argument(way: Any, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if whole:
        monkeypatch.setattr(products, "_SPLIT_LIMIT", 0)
    x, weight = made(20, 300, 70, (BF16, FP32))
    truth, one = x.double() @ weight.double().T, heavy_tailed(70, seed=2)
    for added in (one, one.bfloat16(), heavy_tailed(20, 70, seed=3), heavy_tailed(20, 140, seed=4)[:, ::2].half()):
        assert relative_error(way(x, weight, added), truth + added.double()) < 1e-6
        out = torch.full((20, 70), torch.nan, dtype=FP16)
        assert way(x, weight, added, out=out) is out
        assert relative_error(out, truth + added.double()) < 8e-4
    wide = torch.full((20, 700), torch.nan, dtype=BF16)
    wide[:, 5:305] = x
    assert relative_error(way(wide[:, 5:305], weight), truth) < 1e-6
    assert relative_error(way(x.T.contiguous().T, weight), truth) < 1e-6


@pytest.mark.each_choice
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_stay_in_their_row(way: Any, pair: Pair, odd: float) -> None:
    x, weight = made(37, 130, 9, pair)
    wanted = way(x, weight)
    x[3, 129], x[21, 0] = odd, odd
    found, lost = way(x, weight), torch.zeros(37, dtype=torch.bool)
    lost[[3, 21]] = True
    assert not found[lost].isfinite().any()
    assert torch.equal(found[~lost], wanted[~lost])
    weight[4, 7] = odd
    found = way(x, weight)
    assert not found[:, 4].isfinite().any()
    assert torch.equal(found[~lost][:, [0, 8]], wanted[~lost][:, [0, 8]])


@pytest.mark.parametrize("way", ways())
def test_every_bit_of_a_weight_counts(way: Any) -> None:
    x = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0], [2.0**60, 0.0, -3 * 2.0**-90]])
    weight = torch.tensor([[1.0, 1 + 2.0**-23, 1.0], [2.0**-100, 7.0, 1 - 2.0**-24]])
    assert way(x, weight).tolist() == [[-(2.0**-23), 2.0**-100 - 7], [1.0, 1 - 2.0**-24], [2.0**60, 2.0**-40]]


def test_linear_refuses_inputs() -> None:
    x, weight = torch.zeros(4, 8), torch.zeros(3, 8)
    for given, text in (
        (
            (x, weight.bfloat16()),
            r"weight is \(3, 8\) torch.bfloat16, allowed with x of .*: \[N, K\] of torch.float32",
        ),
        ((x.half(), weight.bfloat16()), "torch.bfloat16, allowed .* of torch.float16 or torch.float32"),
        ((x.double(), weight.double()), "torch.float64, allowed .* of torch.float32"),
        ((x, weight[0]), r"weight is \(8,\)"),
        ((x[:, :7], weight), r"x is \(4, 7\) torch.float32, allowed: \[T, 8\]"),
        ((x, weight, torch.zeros(4)), r"added is \(4,\) torch.float32, allowed: floating \(3,\) or \(4, 3\)"),
    ):
        with pytest.raises(InputError, match=text):
            linear(*given)
    with raises_with(InputError, "(4, 8)", "(4, 3)"):
        linear(x, weight, out=x)
