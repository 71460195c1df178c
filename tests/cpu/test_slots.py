"""Packed experts one slot at a time: put in any order, they are the bits that packing in that order makes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from collegium.encoding import encode_experts
from collegium.errors import InputError
from collegium.experts import KERNELS, PackedWeights
from collegium.experts.triton import table
from collegium.formats import Bnb4, Gguf, Int4Affine, Int4Group, Int4Ordered, Int8Affine, Int8Ordered, by_name
from collegium.formats.unquantised import DTYPES
from collegium.problem import DeviceFacts, Problem
from collegium.runtime.machine import Machine
from collegium.testing.compare import random_experts
from collegium.types import ExpertWeights, MoESpec, RoutingSpec
from raising import raises_with
from split_layers import taken

EXPERTS, WIDE, HIDDEN = 5, 96, 160
WRITTEN = ("bf16", "fp16", "fp32", "fp8_block", "fp8_tensor", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int4_group")
READ = ("int4_affine", "int4_ordered", "int8_affine", "int8_ordered", "bnb4", "gguf")
FOUR = ("mxfp4", "nvfp4", "int4_group")
CASES = [
    *(("reference", name, "bf16") for name in WRITTEN + READ),
    *(("cpu_grouped", name, "bf16") for name in (*WRITTEN, "int4_affine")),
    *(("triton_bf16", name, name) for name in ("bf16", "fp16")),
    *(("triton_fp8", n, a) for n in ("fp8_block", "fp8_tensor", "fp8_channel") for a in ("bf16", "fp8_token")),
    ("triton_fp8", "mxfp8", "bf16"),
    *(("triton_w4a16", name, "bf16") for name in (*FOUR, "int4_affine", "gguf")),
    ("triton_w8a16", "int8_affine", "bf16"),
    *(("triton_w4a8", name, "fp8_group128") for name in FOUR),
    ("triton_w4a8", "mxfp4", "scaled"),
]


def _read_only(name: str, rows: tuple[int, ...], columns: int) -> Any:
    """Return a payload ``[*rows, columns]`` of a format that is only read, of random bytes with finite scales."""
    shape, lead = (*rows, columns), rows[:-1]

    def codes(width: int) -> torch.Tensor:
        return torch.randint(0, 256, (*rows, width), dtype=torch.uint8)

    if name == "gguf":
        blocks = codes(-(-columns // 32) * 34).unflatten(-1, (-1, 34))
        blocks[..., 1] = 0x20  # the high byte of a float16 scale
        return Gguf(shape=shape, blocks=blocks)
    scales = torch.rand(*rows, columns // 32).half()
    if name == "bnb4":
        return Bnb4(
            shape=shape, codes=codes(columns // 2), scales=scales.float(), table=torch.randn(*lead, 16), group_size=32
        )
    wide = columns if "8" in name else columns // 2
    common: Any = {
        "shape": shape, "codes": codes(wide), "scales": scales, "zeros": codes(columns // 32) & 15, "group_size": 32,
    }  # fmt: skip
    kinds: Any = {"int4_affine": Int4Affine, "int8_affine": Int8Affine}
    if name in kinds:
        return kinds[name](**common)
    order = torch.randint(0, columns // 32, (*lead, columns), dtype=torch.int32)
    return {"int4_ordered": Int4Ordered, "int8_ordered": Int8Ordered}[name](**common, group_of=order)


def _weights(name: str) -> ExpertWeights[Any]:
    biases = {"gate_up_bias": torch.randn(EXPERTS, 2, WIDE), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    if name in READ:
        gate_up, down = _read_only(name, (EXPERTS, 2, WIDE), HIDDEN), _read_only(name, (EXPERTS, HIDDEN), WIDE)
        return ExpertWeights(gate_up=gate_up, down=down, **biases)
    made = random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1)
    if name == "int4_group":  # groups that Triton's kernels step through; bfloat16 scales of 32 columns
        gate_up, down = (Int4Group.encode(part.decode(), group_size=32) for part in (made.gate_up, made.down))
        return replace(made, gate_up=gate_up, down=down, **biases)
    return replace(encode_experts(made, name), **biases)


def _packed(kernel: Any, weights: ExpertWeights[Any], act: str) -> PackedWeights:
    dtype: Any = act if act in DTYPES else "bf16"
    experts = weights.down.shape[0]
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=experts,
        routing=RoutingSpec(top_k=1),
        weight_format=weights.down.name,
        expert_bias=True,
    )
    on = DeviceFacts(kind="cuda" if kernel.name.startswith("triton") else "cpu")
    act = "fp8_token" if act == "scaled" else act
    problem = Problem(spec=spec, device=on, dtype=dtype, activation_format=act)
    assert kernel.refuse(problem.routed) is None
    return kernel.pack(weights, problem.routed)


def _bits(packed: PackedWeights) -> list[torch.Tensor]:
    return [tensor.contiguous().reshape(tensor.shape[0], -1).view(torch.uint8) for tensor in packed.slots()]


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor that ``value`` is made of, but the table that all experts of a CPU layout share."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not is_dataclass(value):
        return []
    names = [own.name for own in fields(value) if own.name != "table" or isinstance(value, Bnb4)]
    return [tensor for name in names for tensor in _tensors(getattr(value, name))]


@pytest.mark.each_choice
@pytest.mark.parametrize(("name", "form", "act"), CASES)
def test_slot_by_slot_equals_packed(monkeypatch: pytest.MonkeyPatch, name: str, form: str, act: str) -> None:
    assert by_name(form).name == form
    if act == "scaled":
        monkeypatch.setattr(table, "machine_at", lambda _: Machine(scaled=True))
    kernel = next(row for row in KERNELS if row.name == name)
    weights = _weights(form)
    whole = _packed(kernel, weights, act)
    before = [tensor.clone() for tensor in _bits(whole)]
    # No tensor of the packed experts is left behind.
    assert sorted(t.data_ptr() for t in whole.slots()) == sorted(t.data_ptr() for t in _tensors(whole))
    assert whole.slot_bytes * EXPERTS == sum(bits.numel() for bits in before)

    @given(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=7))
    @settings(max_examples=8, deadline=None)
    def check(order: list[int]) -> None:
        wanted = _packed(kernel, taken(weights, order), act)
        room = whole.resized(len(order))
        for slot in reversed(range(len(order))):
            room.put(slot, whole.take(order[slot]))
        for found, own in zip(_bits(room), _bits(wanted), strict=True):
            assert torch.equal(found, own)
        for matrix in ("gate_up", "down") if name.startswith("triton") else ():
            assert getattr(room, matrix).layout == getattr(wanted, matrix).layout
        assert room.tiling == wanted.tiling

    check()
    assert all(torch.equal(a, b) for a, b in zip(_bits(whole), before, strict=True))


def test_packing_that_shares_memory_is_refused() -> None:
    class Mixed(PackedWeights):
        pass

    with raises_with(InputError, "Mixed"):
        Mixed().slots()
    kernel: Any = next(row for row in KERNELS if row.name == "cpu_grouped")
    weights = _weights("bf16")
    values = weights.down.values[:1].expand_as(weights.down.values)
    shared = replace(weights.down, values=values)
    with raises_with(InputError, "CpuExperts", "(5, "):
        _packed(kernel, replace(weights, down=shared), "bf16").slots()
