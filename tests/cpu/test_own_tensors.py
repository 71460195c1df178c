"""Layers from plain tensors: every shape that ``expert_weights`` takes, custom routers, and the order of ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collegium import (
    ExpertWeights,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    SpecError,
    encode_experts,
    expert_weights,
    moe,
    plan,
    probe,
)
from collegium.formats import FORMATS, by_name
from collegium.testing.compare import heavy_tailed, relative_error
from collegium.types import ActivationSpec
from raising import raises_with

E, H, WIDE, T, K = 5, 96, 72, 9, 2
WRITTEN = [row.name for row in FORMATS if not row.read_only]


def tensors(*, wide: int = WIDE, hidden: int = H) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate ``[E, I, H]``, up ``[E, I, H]`` and down ``[E, H, I]`` in bfloat16."""
    gate = heavy_tailed(E, wide, hidden, seed=1, channels=False) * hidden**-0.5
    up = heavy_tailed(E, wide, hidden, seed=2, channels=False) * hidden**-0.5
    down = heavy_tailed(E, hidden, wide, seed=3, channels=False) * wide**-0.5
    return gate.bfloat16(), up.bfloat16(), down.bfloat16()


def biases(wide: int = WIDE, hidden: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(heavy_tailed(E, n, seed=4 + i) for i, n in enumerate((wide, wide, hidden)))  # type: ignore[return-value]


def tokens(hidden: int = H) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, ids and weights."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    return heavy_tailed(T, hidden, seed=8), ids, torch.rand(T, K, generator=generator)


def truth(parts: tuple[Any, ...], added: tuple[Tensor, ...] | None, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the layer's output in float64; parts: gate (or None), up and down."""
    gate, up, down = parts
    x = x.double()
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            above = up[expert].double() @ x[token] + (0 if added is None else added[1][expert].double())
            if gate is None:
                inner = above.clamp(min=0).square()
            else:
                left = gate[expert].double() @ x[token] + (0 if added is None else added[0][expert].double())
                inner = left / (1 + torch.exp(-left)) * above
            row = down[expert].double() @ inner + (0 if added is None else added[2][expert].double())
            out[token] += weight * row
    return out


def spec_of(weights: ExpertWeights[Any], **others: Any) -> MoESpec:
    sizes = tuple(weights.down.shape)
    return MoESpec(
        hidden_size=sizes[1],
        intermediate_size=sizes[2],
        num_experts=sizes[0],
        **{"routing": RoutingSpec(top_k=K), "weight_format": "bf16", **others},
    )


def layer_of(weights: ExpertWeights[Any], spec: MoESpec | None = None, **others: Any) -> MoELayer:
    problem = Problem(spec=spec or spec_of(weights), device=probe("cpu"), limits=Limits(max_tokens=T), dtype="fp32")
    return MoELayer(weights, plan(problem, Overrides(kernel="reference")), **others)


gate, up, down = tensors()
FORMS: dict[str, tuple[Any, Any]] = {
    "w13": (torch.cat((gate, up), 1), down),
    "four dimensions": (torch.stack((gate, up), 1), down),
    "pair": ((gate, up), down),
    "modules": ([torch.cat(pair) for pair in zip(gate, up, strict=True)], list(down)),
    "pair of lists": ((list(gate), list(up)), tuple(down)),
    "payloads": (by_name("bf16").encode(torch.stack((gate, up), 1)), by_name("bf16").encode(down)),
    "stacked payload": (by_name("bf16").encode(torch.cat((gate, up), 1)), down),
    "pair of payloads": ((by_name("bf16").encode(gate), by_name("bf16").encode(up)), down),
    "parameters": (nn.Parameter(torch.cat((gate, up), 1)), nn.Parameter(down)),
    "strided": ((gate.mT.contiguous().mT, up), down.mT.contiguous().mT),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_layer(form: str) -> None:
    x, ids, weights = tokens()
    routing = Routing(topk_ids=ids, topk_weights=weights)
    made = expert_weights(*FORMS[form])
    assert made.gate_up.shape == (E, 2, WIDE, H)
    found = layer_of(made)(x, routing=routing)
    assert relative_error(found, truth((gate, up, down), None, x, ids, weights)) < 1e-5
    assert relative_error(found, truth((up, gate, down), None, x, ids, weights)) > 0.3
    assert torch.equal(found, layer_of(expert_weights(*FORMS["pair"]))(x, routing=routing))


def test_lists_of_two_experts_not_pairs() -> None:
    joined = torch.cat((gate, up), 1)[:2]
    made = expert_weights(tuple(joined), tuple(down[:2]))
    assert torch.equal(made.gate_up.decode(), joined.unflatten(1, (2, WIDE)).float())


@pytest.mark.parametrize("joined", [False, True])
def test_biases_follow_gate_and_up(joined: bool) -> None:
    x, ids, weights = tokens()
    first, second, last = biases()
    upper = torch.cat((first, second), 1) if joined else (first, second)
    made = expert_weights((gate, up), down, gate_up_bias=upper, down_bias=last)
    found = layer_of(made, spec_of(made, expert_bias=True))(x, routing=Routing(topk_ids=ids, topk_weights=weights))
    assert relative_error(found, truth((gate, up, down), (first, second, last), x, ids, weights)) < 1e-5


def test_experts_without_a_gate() -> None:
    x, ids, weights = tokens()
    made = expert_weights(up, down)
    assert made.gate_up.shape == (E, 1, WIDE, H)
    spec = spec_of(made, activation=ActivationSpec(kind="relu2"))
    found = layer_of(made, spec)(x, routing=Routing(topk_ids=ids, topk_weights=weights))
    assert relative_error(found, truth((None, up, down), None, x, ids, weights)) < 1e-5


@pytest.mark.parametrize("name", WRITTEN)
def test_encoded_and_quantised_tensors_agree(name: str) -> None:
    one, two, three = tensors(wide=128, hidden=256)
    made = expert_weights((one, two), three, weight_format=name)
    assert (made.gate_up.name, made.down.name) == (name, name)
    target = by_name(name)
    forms = [
        (target.encode(torch.stack((one, two), 1)), target.encode(three)),
        ((target.encode(one), target.encode(two)), target.encode(three)),
    ]
    x, ids, weights = tokens(256)
    routing = Routing(topk_ids=ids, topk_weights=weights)
    spec = spec_of(made, weight_format=name)
    judged = truth((*made.gate_up.decode().unbind(1), made.down.decode()), None, x, ids, weights)
    for upper, lower in forms:
        other = expert_weights(upper, lower)
        assert torch.equal(other.gate_up.decode(), made.gate_up.decode())
        assert relative_error(layer_of(other, spec)(x, routing=routing), judged) < 1e-5
    # one payload of both halves; a scale of a whole matrix is then that of both
    stacked = expert_weights(target.encode(torch.cat((one, two), 1)), target.encode(three))
    parts = stacked.gate_up.decode()
    assert relative_error(parts[:, 0], one) < 1.5 * max(target.tolerance, 1e-6)
    assert relative_error(parts[:, 1], two) < 1.5 * max(target.tolerance, 1e-6)
    assert relative_error(layer_of(stacked, spec)(x, routing=routing), judged) < max(4 * target.tolerance, 1e-5)


def test_plain_tensors_in_the_dataclass() -> None:
    x, ids, weights = tokens()
    plain = ExpertWeights(gate_up=torch.cat((gate, up), 1), down=down)
    routing = Routing(topk_ids=ids, topk_weights=weights)
    judged = truth((gate, up, down), None, x, ids, weights)
    layer = layer_of(plain)
    assert relative_error(layer(x, routing=routing), judged) < 1e-5
    assert encode_experts(plain, "mxfp4").gate_up.name == "mxfp4"
    layer.swap(ExpertWeights(gate_up=torch.cat((up, gate), 1), down=down))
    assert relative_error(layer(x, routing=routing), truth((up, gate, down), None, x, ids, weights)) < 1e-5
    shared = SharedWeights(experts=ExpertWeights(gate_up=torch.cat((gate, up), 1)[:1], down=down[:1]))
    with_shared = layer_of(plain, spec_of(plain, shared=SharedSpec(intermediate_size=WIDE)), shared=shared)
    every = truth((gate, up, down), None, x, torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1))
    assert relative_error(with_shared(x, routing=routing), judged + every) < 1e-5


joined = torch.cat((gate, up), 1)


@pytest.mark.parametrize(
    ("arguments", "others", "names"),
    [
        ((joined.mT, down), {}, ("[5, 96, 144]", "[5, 144, 96]", "pass gate_up.mT")),
        ((joined, down.mT), {}, ("[5, 72, 96]", "pass down.mT")),
        ((joined.mT, down.mT), {}, ("[5, 96, 144]", "pass gate_up.mT and down.mT")),
        ((joined[:4], down), {}, ("[4, 2, 72, 96] bf16", "E=5")),
        ((joined[:, :100], down), {}, ("[5, 100, 96]", "[5, 144, 96]")),
        (((gate, up[:, :70]), down), {}, ("gate is [5, 72, 96] bf16", "up is [5, 70, 96] bf16")),
        (((gate, up.float()), down), {}, ("bf16", "fp32")),
        (((by_name("mxfp4").encode(gate), by_name("nvfp4").encode(up)), down), {}, ("mxfp4", "nvfp4")),
        ((joined.double(), down), {}, ("torch.float64",)),
        ((joined, down.to(torch.int8)), {}, ("torch.int8",)),
        ((joined, down[0]), {}, ("[96, 72]",)),
        (([joined[0], joined[1].float()], down[:2]), {}, ("float32", "one shape, dtype")),
        (([], down), {}, ("list of nothing",)),
        (("w13", down), {}, ("str",)),
        ((None, down), {}, ("NoneType",)),
        ((joined, down), {"down_bias": torch.ones(E, H)}, ("gate_up_bias is NoneType", "[5, 144]")),
        ((joined, down), {"gate_up_bias": torch.ones(E, WIDE), "down_bias": torch.ones(E, H)}, ("[5, 72]",)),
        (
            (joined, down),
            {"gate_up_bias": (torch.ones(E, WIDE), torch.ones(E, 3)), "down_bias": torch.ones(E, H)},
            ("[5, 3]", "[5, 72]"),
        ),
        ((up, down), {"gate_up_bias": (torch.ones(E, WIDE),) * 2, "down_bias": torch.ones(E, H)}, ("tuple of 2", "1")),
        ((joined, down), {"gate_up_bias": torch.ones(E, 2 * WIDE), "down_bias": torch.ones(H)}, ("down_bias is [96]",)),
    ],
)
def test_shapes_that_do_not_fit(arguments: Any, others: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        expert_weights(*arguments, **others)
    for name in names:
        assert name in str(caught.value)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(SpecError, match="fp7"):
        expert_weights(joined, down, weight_format="fp7")


class Nearest(nn.Module):
    """A router that chooses the experts whose centre is nearest."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(heavy_tailed(E, H, seed=20))

    def forward(self, x: Tensor, logits: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        distances, ids = torch.cdist(x.float(), self.centres).topk(top_k, largest=False)
        return ids, torch.softmax(-distances, -1)


def test_a_module_chooses_without_a_router() -> None:
    x, _, _ = tokens()
    rule = Nearest().requires_grad_(False)
    layer = layer_of(expert_weights(joined, down), choose=rule)
    ids, weights = rule(x, None, K)
    found = layer(x)
    assert relative_error(found, truth((gate, up, down), None, x, ids, weights)) < 1e-5
    assert torch.equal(layer.route(x).topk_ids, ids)
    logits = torch.randn(T, E)
    seen: list[Any] = []

    def watching(x: Tensor, given: Any, top_k: int) -> Routing:
        seen.append(given)
        return Routing(topk_ids=ids, topk_weights=weights)

    layer = layer_of(expert_weights(joined, down), choose=watching)
    assert torch.equal(layer(x, router_logits=logits), found)
    assert torch.equal(layer(x), found)
    assert seen[0] is logits
    assert seen[1] is None
    router = RouterWeights(weight=torch.randn(E, H))
    layer_of(expert_weights(joined, down), choose=watching, router=router)(x)
    torch.testing.assert_close(seen[2], x @ router.weight.T)


def test_router_requiring_grad_is_refused() -> None:
    x, _, _ = tokens()
    layer = layer_of(expert_weights(joined, down), choose=Nearest())
    with raises_with(InputError, "topk_weights"):
        layer(x)
    with torch.no_grad():
        assert layer(x).isfinite().all()


def test_swapped_ids_and_weights_are_refused() -> None:
    x, ids, weights = tokens()
    layer = layer_of(expert_weights(joined, down), choose=lambda *_: (weights, ids))
    with raises_with(InputError, "topk_ids", "topk_weights"):
        layer(x)
    with pytest.raises(InputError, match="swapped"):
        layer(x, routing=Routing(topk_ids=weights, topk_weights=ids))
    with pytest.raises(InputError, match="swapped"):
        moe(x, joined.float(), down.float(), weights, ids)
    found = moe(x, joined.float(), down.float(), ids, weights)
    assert relative_error(found, truth((gate, up, down), None, x, ids, weights)) < 1e-5
