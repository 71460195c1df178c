"""Formats that are only read decode on a GPU to the bits of the CPU, and run there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium import load_layer
from collegium.formats import Bnb4, Int4Affine, Int4Ordered, Int8Affine, Int8Ordered, Payload
from collegium.formats.gguf import KINDS
from collegium.layer import MoELayer
from collegium.planning import plan
from collegium.problem import Overrides, Problem
from collegium.runtime.devices import probe
from collegium.testing.compare import relative_error
from collegium.types import ExpertWeights, MoESpec, Routing, RoutingSpec
from integers import random_blocks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ["int4_affine", "int8_affine", "int4_ordered", "int8_ordered", "bnb4", *KINDS]

ON_GPU = {f"int{bits}_{kind}": f"triton_w{bits}a16" for bits in (4, 8) for kind in ("affine", "ordered")}
ON_GPU |= dict.fromkeys((*KINDS, "bnb4"), "triton_w4a16")


def integers(name: str, *shape: int) -> Payload:
    *lead, columns = shape
    groups, bits = -(-columns // 32), int(name[3])
    form = {"int4_affine": Int4Affine, "int8_affine": Int8Affine, "int4_ordered": Int4Ordered,
            "int8_ordered": Int8Ordered}[name]  # fmt: skip
    # Whole groups in an order an expert, which its parts share.
    order = torch.stack([(torch.arange(columns) // 32)[torch.randperm(columns)].int() for _ in range(lead[0])])
    order = order.view(lead[0], *(1 for _ in lead[1:-1]), columns).repeat(1, *lead[1:-1], 1)
    return form(
        shape=shape,
        codes=torch.randint(0, 256, (*lead, -(-columns * bits // 8)), dtype=torch.uint8),
        scales=(torch.rand(*lead, groups) + 0.1).half() / (2**bits * columns**0.5),
        zeros=torch.randint(0, 2**bits, (*lead, groups), dtype=torch.uint8),
        group_size=32,
        **({"group_of": order} if "ordered" in name else {}),
    )


def payload(name: str, *shape: int) -> Payload:
    *lead, columns = shape
    if name.startswith("int"):
        return integers(name, *shape)
    if name == "bnb4":
        return Bnb4(
            shape=shape,
            codes=torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8),
            scales=torch.rand(*lead, columns // 64) / columns**0.5,
            table=torch.linspace(-1, 1, 16).expand(*lead[:-1], 16).contiguous(),
            group_size=64,
        )
    return random_blocks(name, *shape)


@pytest.mark.parametrize("name", NAMES)
def test_decode_equals_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    here = payload(name, 3, 2, 40, 512)
    there = here.to("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(there.decode(dtype).cpu().view(torch.uint8), here.decode(dtype).view(torch.uint8))
    assert there.faults().tolist() == here.faults().tolist()
    assert torch.equal(there.columns(256, 512).decode().cpu(), here.columns(256, 512).decode())


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_equals_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    gate_up, down = payload(name, 3, 2, 256, 512), payload(name, 3, 512, 256)
    spec = MoESpec(
        hidden_size=512, intermediate_size=256, num_experts=3, routing=RoutingSpec(top_k=2), weight_format=down.name
    )  # fmt: skip
    x, ids = torch.randn(9, 512).bfloat16(), torch.stack((torch.zeros(9), torch.arange(9) % 2 + 1), dim=1).long()
    out = {}
    for kind in ("cpu", "cuda"):
        made = plan(Problem(spec=spec, device=probe(kind)), Overrides(kernel="reference") if kind == "cpu" else None)
        assert made.kernel == ("reference" if kind == "cpu" else ON_GPU.get(name, "reference"))
        layer = MoELayer(ExpertWeights(gate_up=gate_up.to(kind), down=down.to(kind)), made)
        routing = Routing(topk_ids=ids.to(kind), topk_weights=torch.full((9, 2), 0.5, device=kind))
        out[kind] = layer(x.to(kind), routing=routing).cpu()
    # sums are ordered differently, and h is rounded to bfloat16 in between
    assert relative_error(out["cuda"], out["cpu"]) < 0.01
    assert out["cpu"].float().norm() > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("arch", "kinds"), [
    ("qwen3moe", ("Q4_K", "Q6_K")), ("llama", ("Q5_1", "MXFP4")), ("qwen3moe", ("IQ2_XS", "Q2_K")),
    ("olmoe", ("IQ3_XXS", "IQ4_NL")), ("llama", ("TQ1_0", "Q3_K")),
])  # fmt: skip
def test_gguf_file_runs_on_gpu(tmp_path: Path, arch: str, kinds: tuple[str, str], dtype: Any) -> None:
    pytest.importorskip("gguf")
    from gguf_files import D, write_gguf

    path = tmp_path / "model.gguf"
    write_gguf(path, arch, kinds)
    for number in (0, 1):
        layer = load_layer(path, number, dtype=dtype, device="cuda")
        assert layer.plan.kernel == "triton_w4a16"
        assert f"gate_up {kinds[0]} in " in str(layer)
        judge = load_layer(path, number, dtype="fp32", device="cuda", overrides=Overrides(kernel="reference"))
        # One token, a few that are not sorted, tiles of every height.
        for tokens in (1, 2, 9, 300, 4096):
            x = (torch.randn(tokens, D, device="cuda") / 64).to(layer.input_dtype)
            logits = torch.randn(tokens, layer.spec.num_experts, device="cuda")
            found = layer(x, router_logits=logits)
            assert torch.equal(found, layer(x, router_logits=logits))
            assert relative_error(found, judge(x.float(), router_logits=logits)) < 0.01
