"""What may be wrong in a call of a layer, and what must be seen of it: a NaN row, and the bits of all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from collegium import Routing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from collegium import MoELayer

NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True, kw_only=True)
class Poison:
    """Arguments of a call, the same without the poison, and the token whose row must not be finite.

    same: its assignments are the same in both calls. nan: the row must be NaN throughout.
    """

    name: str
    call: dict[str, Any]
    clean: dict[str, Any]
    token: int
    same: bool = False
    nan: bool = True


def poisons(layer: MoELayer, x: torch.Tensor, token: int, seed: int) -> Iterator[Poison]:
    """Yield every kind for ``x [T, H]`` and a layer without a correction bias of its own."""
    tokens, experts, top_k = x.shape[0], layer.spec.num_experts, layer.spec.routing.top_k
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    weights, logits = torch.rand(tokens, top_k, generator=generator) + 0.1, torch.randn(tokens, experts)
    order, weights, logits = (t.to(x.device) for t in (order, weights, logits))
    clean = {"x": x, "routing": Routing(topk_ids=order, topk_weights=weights)}
    slot = token % top_k
    for value in (NAN, INFINITY, -INFINITY):
        bad = weights.clone()
        bad[token, slot] = value
        call = {"x": x, "routing": Routing(topk_ids=order, topk_weights=bad)}
        yield Poison(name=f"weight {value}", call=call, clean=clean, token=token, same=True, nan=value != value)
    for value in (-2, experts, 2**31 - 1, 2**40 + 1):
        bad = order.clone() if value > 2**31 else order.int()
        bad[token, slot] = value
        call = {"x": x, "routing": Routing(topk_ids=bad, topk_weights=weights)}
        yield Poison(name=f"id {value}", call=call, clean=clean, token=token)
    for value in (NAN, INFINITY, -INFINITY):
        bad = x.clone()
        bad[token, x.shape[1] // 3] = value
        yield Poison(
            name=f"x {value}", call=clean | {"x": bad}, clean=clean, token=token, same=True, nan=value != value
        )
    given = {"x": x, "router_logits": logits}
    for value in (NAN, INFINITY):
        bad = logits.clone()
        bad[token, experts // 2] = value
        yield Poison(name=f"logit {value}", call={"x": x, "router_logits": bad}, clean=given, token=token)


def check_seen(layer: MoELayer, poison: Poison, *, exact: bool = True) -> None:
    """Run both calls. exact: other tokens have the same bits also where other rows go to their experts."""
    found, wanted = layer(**poison.call), layer(**poison.clean)
    row = found[poison.token]
    assert wanted.isfinite().all(), poison.name
    assert row.isnan().all() if poison.nan else not row.isfinite().any(), (poison.name, row)
    others = torch.arange(found.shape[0], device=found.device) != poison.token
    if exact or poison.same:
        assert torch.equal(found[others], wanted[others]), poison.name
    else:
        torch.testing.assert_close(found[others], wanted[others], rtol=0.02, atol=0.02, msg=poison.name)


def check_not_here(layer: MoELayer, x: torch.Tensor) -> None:
    """An id of -1 adds nothing, whatever its weight is, and a token without experts gets zeros."""
    tokens, top_k = x.shape[0], layer.spec.routing.top_k
    ids = torch.arange(top_k, device=x.device).repeat(tokens, 1)
    ids[:, 0], ids[tokens - 1] = -1, -1
    weights = torch.rand(tokens, top_k, device=x.device)
    wanted = layer(x, routing=Routing(topk_ids=ids, topk_weights=weights))
    assert wanted.isfinite().all()
    assert not wanted[-1].any()
    for value in (NAN, INFINITY):
        odd = weights.masked_fill(ids < 0, value)
        assert torch.equal(layer(x, routing=Routing(topk_ids=ids, topk_weights=odd)), wanted)
