"""The products around the experts on a GPU: the same bits in every batch, as exact as float32, rows apart."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium.ops import linear as products
from collegium.ops.linear import linear
from collegium.testing.compare import heavy_tailed, relative_error
from memories import Poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Pair = tuple[torch.dtype, torch.dtype]  # of x and of the weight
PAIRS: tuple[Pair, ...] = ((BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP16))
# Columns in and out: routers, latent projections, gates, and sizes that nothing divides.
SIZES = ((7168, 256), (2048, 128), (2880, 32), (4096, 1024), (1024, 4096), (2048, 1), (1000, 60), (33, 7))
COUNTS = (*range(1, 301), 511, 512, 513, 1024, 1025, 2048, 4096)


def made(tokens: int, k_in: int, n_out: int, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    x = heavy_tailed(tokens, k_in, seed=k_in).cuda().to(pair[0])
    return x, (heavy_tailed(n_out, k_in, seed=n_out) / k_in**0.5).cuda().to(pair[1])


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.int32 if rows.dtype == FP32 else torch.int16)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("k_in", "n_out"), SIZES)
def test_rows_are_batch_invariant(k_in: int, n_out: int, pair: Pair) -> None:
    x, weight = made(4096, k_in, n_out, pair)
    alone = bits(torch.cat([linear(row[None], weight) for row in x]))
    for tokens in COUNTS:
        assert torch.equal(bits(linear(x[:tokens], weight)), alone[:tokens]), tokens
        assert torch.equal(bits(linear(x[4096 - tokens :], weight)), alone[4096 - tokens :]), tokens
    wide = torch.full((300, k_in + 24), torch.nan, device="cuda", dtype=pair[0])
    wide[:, 8:-16] = x[:300]
    assert torch.equal(bits(linear(wide[:, 8:-16], weight)), alone[:300])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("k_in", "n_out"), SIZES)
def test_linear_against_float64(k_in: int, n_out: int, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for apart in (products._SPLIT_LIMIT, 0):
        monkeypatch.setattr(products, "_SPLIT_LIMIT", apart)
        for tokens in (0, 1, 13, 300, 4096):
            x, weight = made(4096, k_in, n_out, pair)
            x = x[:tokens]
            truth, bound = x.double() @ weight.double().T, {FP32: 3e-7, BF16: 2.5e-3, FP16: 4e-4}[pair[1]]
            for added in (None, heavy_tailed(n_out, seed=1).cuda(), heavy_tailed(tokens, n_out, seed=2).cuda()):
                found = linear(x, weight, added, memory=Poisoned("cuda"))
                wanted = truth if added is None else truth + added.double()
                # Of the size that a sum of such products has: one sum alone may be much smaller.
                usual = (x.double().square() @ weight.double().T.square()).sum().sqrt()
                assert tokens == 0 or (found.double() - wanted).norm() < bound * max(usual, wanted.norm()), (
                    apart,
                    tokens,
                )


def test_fp32_error_not_above_torch() -> None:
    x, weight = made(512, 7168, 256, (BF16, FP32))
    truth = x.double() @ weight.double().T
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = relative_error(x.float() @ weight.T, truth)
    torch.backends.cuda.matmul.allow_tf32 = before
    found = relative_error(linear(x, weight), truth)
    assert found < max(3e-7, plain), (found, plain)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tokens", [3, 40, 3000])
def test_nonfinite_values_stay_in_their_row(pair: Pair, odd: float, tokens: int) -> None:
    x, weight = made(tokens, 2048, 130, pair)
    wanted = linear(x, weight)
    x[1, 2047], x[tokens - 1, 0] = odd, odd
    found, lost = linear(x, weight), torch.zeros(tokens, dtype=torch.bool, device="cuda")
    lost[[1, tokens - 1]] = True
    assert not found[lost].isfinite().any()
    assert torch.equal(found[~lost], wanted[~lost])


def test_every_bit_of_a_weight_counts() -> None:
    x = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0], [2.0**60, 0.0, -3 * 2.0**-90]])
    weight = torch.tensor([[1.0, 1 + 2.0**-23, 1.0], [2.0**-100, 7.0, 1 - 2.0**-24]])
    wanted = [[-(2.0**-23), 2.0**-100 - 7], [1.0, 1 - 2.0**-24], [2.0**60, 2.0**-40]]
    assert linear(x.cuda(), weight.cuda()).tolist() == wanted


def test_a_graph_replays_it() -> None:
    x, weight = made(4096, 2048, 128, (BF16, FP32))
    for tokens in (1, 5, 300, 4096):
        seen, out = x[:tokens].clone(), torch.empty(tokens, 128, device="cuda")
        linear(seen, weight, out=out)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):  # one behind the other, and each writes what the one before wrote
                linear(seen, weight, out=out)
        for turn in range(3):
            seen.copy_(x[turn : turn + tokens] if tokens < 4096 else x.roll(turn, 0))
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(bits(out), bits(linear(seen, weight)))
