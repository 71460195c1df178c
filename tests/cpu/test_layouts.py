"""Layouts named before any weight is there are those that packing makes, and say how large its tensors are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from collegium.experts import KERNELS
from collegium.experts.triton import layout as tables, packed as packing, table
from collegium.experts.triton.layout import Words
from collegium.experts.triton.matrix import PackedMatrix
from collegium.formats import Int4Group
from collegium.formats.unquantised import DTYPES
from collegium.kernels import numbers
from collegium.problem import DeviceFacts, Problem
from collegium.runtime.machine import Machine
from collegium.testing.compare import random_experts
from collegium.types import SCORE_FUNCTIONS, ActivationSpec, MoESpec, RoutingSpec
from integers import encoded

FOUR = ("mxfp4", "nvfp4", "int4_group")
EIGHT = ("fp8_block", "fp8_tensor", "fp8_channel")
ROWS = ("fp8_group128", "fp8_group128_pow2", "fp8_token")
CASES = [
    *(("triton_bf16", dtype, dtype) for dtype in ("bf16", "fp16")),
    *(("triton_fp8", weights, act) for weights in EIGHT for act in ("bf16", *ROWS)),
    ("triton_fp8", "mxfp8", "bf16"),
    *(("triton_w4a16", weights, "bf16") for weights in FOUR),
    *(("triton_w4a16", weights, "fp16") for weights in ("int4_group", "int4_affine", "int4_ordered")),
    *(("triton_w8a16", weights, dtype) for weights in ("int8_affine", "int8_ordered") for dtype in ("bf16", "fp16")),
    *(("triton_w4a8", weights, act) for weights in FOUR for act in ROWS),
]


@dataclass(frozen=True)
class Given:
    """What a plan knows of a layer."""

    weight_format: str
    activation_format: str
    dtype: str
    parts: int
    experts: int = 3
    intermediate: int = 200
    hidden: int = 336


def packed(name: str, given: Given, group_size: int = 128) -> tuple[Any, Any]:
    kernel: Any = next(kernel for kernel in KERNELS if kernel.name == name)
    spec = MoESpec(
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_experts=given.experts,
        routing=RoutingSpec(top_k=2),
        weight_format=given.weight_format,
        activation=ActivationSpec(kind="swiglu" if given.parts == 2 else "silu"),
    )
    dtype: Any = given.dtype
    problem = Problem(
        spec=spec, device=DeviceFacts(kind="cuda"), dtype=dtype, activation_format=given.activation_format
    )
    assert kernel.refuse(problem.routed) is None
    plain = random_experts(given.experts, given.parts, given.intermediate, given.hidden, seed=1)
    if given.weight_format == "int4_group":
        both = (Int4Group.encode(part.decode(), group_size=group_size) for part in (plain.gate_up, plain.down))
        gate_up, down = both
        return kernel, kernel.pack(replace(plain, gate_up=gate_up, down=down), problem.routed)
    return kernel, kernel.pack(encoded(plain, given.weight_format), problem.routed)


def check_sizes(matrix: PackedMatrix) -> None:
    layout = matrix.layout
    assert matrix.values.shape == layout.values_shape
    assert matrix.values.dtype == (layout.row_dtype if layout.weight == numbers.PLAIN else layout.stored)
    assert matrix.values.nbytes == layout.nbytes
    if isinstance(layout, Words):
        assert matrix.scale is not None
        assert matrix.scale.dtype == layout.scale_dtype
        assert (matrix.row_scale is not None) == layout.row_scaled
    elif layout.scale_block > 1:
        assert matrix.scale is not None
        assert matrix.scale.shape[2:] == (layout.scale_rows, layout.k_blocks)
    elif matrix.scale is not None:
        assert matrix.scale.shape[2:] == (layout.k_blocks, layout.words, layout.shape[2])
    else:
        assert layout.scale_kind == numbers.NO_SCALE
    assert (layout.operand == torch.float8_e4m3fn) == layout.scaled_rows
    if not isinstance(layout, Words):
        assert layout.steps[2] * layout.shape[0] * layout.shape[1] == matrix.values.numel()


@pytest.mark.parametrize(("name", "weights", "act"), CASES)
@pytest.mark.parametrize("parts", [1, 2])
def test_layouts_are_those_that_packing_makes(name: str, weights: str, act: str, parts: int) -> None:
    dtype = act if act in DTYPES else "bf16"
    given = Given(weight_format=weights, activation_format=act, dtype=dtype, parts=parts)
    kernel, found = packed(name, given)
    assert kernel.layouts(given, Machine()) == (found.gate_up.layout, found.down.layout)
    check_sizes(found.gate_up)
    check_sizes(found.down)


@pytest.mark.parametrize("act", ROWS)
@pytest.mark.parametrize("weights", FOUR)
def test_layouts_for_tensor_cores_that_decode(monkeypatch: pytest.MonkeyPatch, weights: str, act: str) -> None:
    machine = Machine(scaled=True)
    for module in (packing, table):
        monkeypatch.setattr(module, "machine_at", lambda _: machine)
    given = Given(weight_format=weights, activation_format=act, dtype="bf16", parts=2)
    kernel, found = packed("triton_w4a8", given)
    assert kernel.layouts(given, machine) == (found.gate_up.layout, found.down.layout)
    assert (found.gate_up.layout.weight == numbers.E2M1_SCALED) == (weights == "mxfp4" and act == "fp8_token")
    check_sizes(found.gate_up)
    check_sizes(found.down)


@pytest.mark.parametrize(("name", "act"), [("triton_w4a16", "bf16"), ("triton_w4a8", "fp8_token")])
def test_small_int4_groups_have_a_layout_of_their_own(name: str, act: str) -> None:
    given = Given(weight_format="int4_group", activation_format=act, dtype="bf16", parts=2)
    kernel, found = packed(name, given, group_size=32)
    assert found.gate_up.layout != kernel.layouts(given, Machine())[0]
    assert found.gate_up.layout.words == 2
    check_sizes(found.gate_up)
    check_sizes(found.down)


def test_a_layout_is_not_equal_to_another_format_of_its_sizes() -> None:
    known = [*tables.ROWS.values(), *tables.LANES.values(), *tables.WORDS.values()]
    assert len({layout.of((2, 1, 64, 128)) for layout in known}) == len(known) > 15
    # MXFP8 differs from other E4M3 lanes by its scales; all others by their number too.
    assert len({(own.weight, own.scale_kind, own.words, own.block_k, own.operand) for own in known}) == len(known)


def test_no_two_formats_share_a_number() -> None:
    named: dict[str, int] = {name: getattr(numbers, name) for name in numbers.__all__}
    scales = [value for name, value in named.items() if name.endswith("_SCALE")]
    assert sorted(scales) == list(range(7))
    others = ("SCALE", "CODES", "ACTIVATION", "ROWS", "NOWHERE")
    weights = [value for name, value in named.items() if not name.endswith(others)]
    assert len(set(weights)) == len(weights) == 12


def test_score_functions_have_the_numbers_of_the_routing_kernel() -> None:
    pytest.importorskip("triton")
    from collegium.kernels import route

    for place, name in enumerate(SCORE_FUNCTIONS[:-1]):  # the last one has no kernel
        assert getattr(route, name.upper()).value == place
