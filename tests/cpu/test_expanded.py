"""Weights decoded once for a large batch: the numbers and factors themselves, and both products, in the interpreter."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

from collegium.dummy.encoders import nf4
from collegium.experts.triton import layout
from collegium.experts.triton.dequantized import dequantize_experts
from collegium.experts.triton.packing import pack_bnb4, pack_gguf, pack_int, pack_mx
from collegium.experts.triton.tiles import choice as tiles
from collegium.experts.triton.tiles.choice import prefill_tile
from collegium.experts.triton.tiles.problem import TileProblem
from collegium.formats import MxFp8
from collegium.planning import plan
from collegium.problem import DeviceFacts, Limits, Problem
from collegium.runtime.devices import probe
from collegium.runtime.machine import Machine, machine_at, machine_for, machine_of
from collegium.testing.compare import relative_error
from collegium.types import MoESpec, RoutingSpec
from decoded_layers import decoded_layer
from grids import exhaustive
from integers import affine, random_blocks

if TYPE_CHECKING:
    from collegium.experts.triton.matrix import PackedMatrix

HOPPER = Machine(copies=True, compiles=True)


def expand(packed: PackedMatrix) -> PackedMatrix:
    return dequantize_experts(packed, torch.empty(packed.layout.dequantized_bytes, dtype=torch.int8))


def numbers_of(packed: PackedMatrix) -> torch.Tensor:
    """Return float32 ``[E, P, N, K]`` of the numbers and factors that decoding makes."""
    own = expand(packed)
    values = own.values.float()
    if own.layout.words:
        assert own.scale is not None
        factors = own.scale[:, :, :, 0].transpose(2, 3).repeat_interleave(own.layout.block_k, dim=3)
        values = values * factors[..., : values.shape[3]]
    return values if own.row_scale is None else values * own.row_scale[..., None]


@pytest.mark.parametrize("group", [32, 128, 272])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_never_dequantised(bits: int, group: int) -> None:
    made = pack_int(affine(torch.randn(3, 2, 40, 272), bits, group), None)
    assert (made.layout.runs_large, made.layout.dequantized_bytes) == (bits == 4, 0)
    assert not replace(made.layout, half=True).runs_large


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "Q4_1", "Q4_K", "Q5_K", "Q2_K", "Q3_K"])
def test_blocks_stay_with_the_small_tiles(kind: str) -> None:
    made = pack_gguf(random_blocks(kind, 2, 1, 24, 512), None).layout
    assert (made.runs_large, made.dequantized_bytes) == (False, 0)


def test_pow2_scales_need_no_factors() -> None:
    payload: Any = MxFp8.encode(torch.randn(3, 2, 40, 272))
    packed = pack_mx(payload, None)
    assert packed.layout.dequantized.words == 0
    assert torch.equal(numbers_of(packed), payload.decode())


def test_looked_up_groups_keep_small_tiles() -> None:
    made = pack_bnb4(nf4(torch.randn(3, 2, 40, 96)), None).layout
    assert (made.runs_large, made.dequantized_bytes) == (False, 0)


@pytest.mark.parametrize("half", [False, True])
def test_codebook_values_become_two_terms(half: bool) -> None:
    payload = nf4(torch.randn(3, 2, 40, 192))
    payload.table.mul_(torch.rand(3, 2, 16))  # of its own for each matrix
    packed = pack_bnb4(payload, None, half=half)
    own = expand(replace(packed, layout=replace(packed.layout, half=half)))
    group = own.layout.block_k
    assert (group, own.values.shape[3]) == (64, 384)
    large, small = own.values.float().unflatten(3, (-1, 2, group)).unbind(4)
    assert own.scale is not None
    factors = own.scale[:, :, :, 0].transpose(2, 3)[..., None]
    assert relative_error(((large + small) * factors).flatten(3), payload.decode()) < (1e-7 if half else 1e-5)
    assert relative_error((large * factors).flatten(3), payload.decode()) > (1e-5 if half else 1e-4)


# All formats run on a GPU; here one of each way to scale, which the interpreter takes seconds for.
@pytest.mark.parametrize(
    ("name", "act", "group"),
    [
        ("nvfp4", "fp16", 128),
        ("fp8_block", "bf16", 128),
        ("bnb4", "bf16", 64),
        ("nvfp4", "nvfp4_expert", 128),
        *exhaustive(
            ("mxfp8", "bf16", 128), ("nvfp4", "nvfp4", 128), ("mxfp4", "fp16", 128), ("fp8_block", "fp16", 128)
        ),
    ],
)
def test_large_batches_equal_small_tiles(name: str, act: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "dequantize_threshold", lambda *_: 1)
    monkeypatch.setattr(tiles, "_MIN_K", 8)
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    packed, batch, truth = decoded_layer(name, act, group, device, tokens=6, sizes=(3, 72, 136))
    stop = int(batch.expert_offsets[-1])
    large = replace(packed, machine=HOPPER)
    assert packed.tiling.large(12) is None
    assert large.tiling.large(12) is not None
    assert relative_error(large.run(batch)[:stop], truth[:stop]) < 4e-3
    assert relative_error(packed.run(batch)[:stop], truth[:stop]) < 0.02
    # An expert at a time, with weighted rows.
    weighted = replace(batch, input_weights=torch.rand(12) + 0.5)
    whole = large.run(weighted)[:stop]
    assert relative_error(whole, packed.run(weighted)[:stop]) < 0.02
    monkeypatch.setattr(layout, "_MAX_DEQUANTIZED_BYTES", 1)
    assert torch.equal(large.run(weighted)[:stop], whole)


def test_which_batches_are_decoded_first() -> None:
    def asked(each: int, **changes: Any) -> TileProblem:
        sizes = {"experts": 8, "n_out": 2048, "k_in": 4096, "parts": 2, "block_k": 128, "weight_bits": 4.25}
        return TileProblem(rows=8 * each, decoded=True, **(sizes | changes))

    hopper = machine_of((9, 0), 132)
    assert prefill_tile(asked(4096), hopper) is not None
    assert prefill_tile(asked(4096), replace(hopper, compiles=False)) is None
    assert prefill_tile(asked(4096), machine_of((8, 0), 108)) is None
    assert prefill_tile(asked(4096, k_in=4100), hopper) is None
    assert prefill_tile(asked(4096, k_in=256), hopper) is None
    assert prefill_tile(asked(4096, x_bits=8, promoted=True), hopper) is None, "scales of groups of E4M3 rows"
    assert prefill_tile(asked(56), hopper) is None
    # Eight bits gain sooner.
    assert prefill_tile(asked(512), hopper) is None
    assert prefill_tile(asked(512, weight_bits=8.25), hopper) is not None
    assert prefill_tile(asked(384, weight_bits=8.25), hopper) is None
    looked_up: dict[str, Any] = {"quartered": True, "promoted": True, "operands": 2}
    assert prefill_tile(asked(192, **looked_up), hopper) is None
    assert prefill_tile(asked(208, **looked_up), hopper) is not None
    # On an H100, whose memory is slower, all of them gain later.
    slower = machine_of((9, 0), 132, 3.35e12)
    eight: dict[str, Any] = {"weight_bits": 8.25}
    for changes, rows, later in (({}, 800, 1324), (eight, 400, 662), (looked_up, 208, 345)):
        assert prefill_tile(asked(rows, **changes), hopper) is not None
        assert prefill_tile(asked(later - 16, **changes), slower) is None
        assert prefill_tile(asked(later, **changes), slower) is not None


def test_plan_reserves_dequantised_weights() -> None:
    spec = MoESpec(
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        routing=RoutingSpec(top_k=8),
        weight_format="nvfp4",
    )
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    cases: list[tuple[Any, int, int]] = [
        ("bf16", 12288, 0),  # decoded in registers
        ("fp16", 8192, 0),
        ("fp16", 12288, (2 * 2048 + 32 * 16) * 128 * 1536),
    ]
    for dtype, tokens, nbytes in cases:
        limits = Limits(max_tokens=tokens)
        made = plan(Problem(spec=spec, device=device, limits=limits, dtype=dtype, activation_format=dtype))
        found = {region.name: region.nbytes for region in made.regions}
        assert found.get("experts/expanded", 0) == nbytes


def test_device_properties_reach_tile_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an H100 as torch describes it, for the plan and where weights are packed; and a torch that does not."""
    sizes = {"name": "a GPU", "major": 9, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for more, bandwidth in (({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}, 3.352e12), ({}, None)):
        told = types.SimpleNamespace(**sizes, **more)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, told=told: told)
        facts = probe("cuda:0")
        assert facts.bandwidth == (bandwidth if bandwidth is None else pytest.approx(bandwidth, rel=1e-3))
        assert machine_at(torch.device("cuda:0")) == machine_for(facts)
        assert machine_for(facts).slower == (0 if bandwidth is None else pytest.approx(0.467, abs=2e-3))
