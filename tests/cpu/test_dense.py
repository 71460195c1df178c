"""Dense layers in bfloat16 on a CPU with AVX2 alone: many rows are multiplied in float32."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from collegium.commands.generate import Writer
from collegium.integrations.transformers import Decoder, load_model, wide_linear
from collegium.integrations.transformers.loading import load_model_in
from collegium.integrations.transformers.wide_linear import WideLinear, widen
from collegium.testing.compare import heavy_tailed

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def layer(columns: int, rows: int, *, bias: bool) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    made.weight.copy_(heavy_tailed(rows, columns, seed=1) / columns**0.5)
    if bias:
        made.bias.copy_(heavy_tailed(rows, seed=2))
    return made.bfloat16()


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (11,), (12,), (2, 7), (3, 4, 6), (0,)])
def test_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch, lead: tuple[int, ...], bias: bool) -> None:
    monkeypatch.setattr(wide_linear, "_TILE", 7 * 96)  # 131 rows are cut into 19 tiles, the last one of 5
    plain = layer(96, 131, bias=bias)
    model = nn.Sequential(copy.deepcopy(plain))
    widen(model)
    assert type(model[0]) is WideLinear
    x = heavy_tailed(*lead, 96, seed=3).bfloat16()
    found, wanted = (
        model(x),
        nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None),
    )
    assert (found.dtype, found.shape) == (torch.bfloat16, (*lead, 131))
    if found.numel() >= 12 * 131:
        # Half a unit in the last place, and what float32 sums are off.
        assert bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-5).all())
    else:
        assert torch.equal(found, plain(x))


@pytest.mark.usefixtures("avx2")
def test_only_plain_bfloat16_layers_change() -> None:
    class Own(nn.Linear):
        """A layer of somebody else's."""

    model = nn.ModuleList([Own(8, 8).bfloat16(), nn.Linear(8, 8), nn.Linear(8, 8).half(), nn.Linear(8, 8).bfloat16()])
    widen(model)
    assert [type(module) for module in model] == [Own, nn.Linear, nn.Linear, WideLinear]


@pytest.mark.parametrize("found", ["AVX512", "DEFAULT", "AVX2"])
def test_models_on_a_cpu_with_avx2(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: found)
    model = load_model(SHIPPED)
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {WideLinear if found == "AVX2" else nn.Linear}


@pytest.mark.usefixtures("avx2")
def test_long_prompts_and_copies_match_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, truth = load_model(SHIPPED), load_model_in("fp32", SHIPPED)
    ids = Writer(model, SHIPPED).windows(SHIPPED / "heldout.txt", 128, 3)[:3]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with torch.inference_mode():
        wide, plain, wanted = (each(ids).logits.float() for each in (model, load_model(SHIPPED), truth))
    assert not torch.equal(wide, plain), "nothing was multiplied in float32"
    # Of the median token: where two experts are nearly alike, either rounding may choose the other one.
    mine, theirs = (float((each - wanted).norm(dim=-1).median()) for each in (wide, plain))
    assert mine <= 1.1 * theirs, (mine, theirs)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert torch.equal(Decoder(other).generate(ids, 6), Decoder(model).generate(ids, 6))
