"""Layouts named before any weight is there are those that packing makes, and say how large its tensors are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from collegium.experts import KERNELS
from collegium.experts.triton import layout as tables, pack_experts as packing, table
from collegium.experts.triton.layout import Words
from collegium.experts.triton.matrix import PackedMatrix
from collegium.experts.triton.packing import pack_gguf
from collegium.formats import Int4Group
from collegium.formats.unquantised import DTYPES
from collegium.kernels import enums
from collegium.problem import DeviceFacts, Problem
from collegium.runtime.machine import Machine
from collegium.testing.compare import random_experts
from collegium.types import ACTIVATION_KINDS, SCORE_FUNCTIONS, ActivationSpec, ExpertWeights, MoESpec, RoutingSpec
from integers import encoded, random_blocks

FOUR = ("mxfp4", "nvfp4", "int4_group")
EIGHT = ("fp8_block", "fp8_tensor", "fp8_channel")
# Stored bits of a weight on a GPU.
BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5, "Q4_K": 4.75, "Q5_K": 8.75, "Q6_K": 9, "MXFP4": 4.25,
    "Q2_K": 10, "Q3_K": 5, "IQ4_NL": 8.5, "IQ4_XS": 9, "IQ3_XXS": 9, "IQ3_S": 9, "IQ2_XXS": 9,
    "IQ2_XS": 10, "IQ2_S": 10, "IQ1_S": 9, "IQ1_M": 10, "TQ1_0": 4.5, "TQ2_0": 4.5,
}  # fmt: skip
# With BF16 tokens.
LOW_BITS = {"Q2_K": 2.625, "Q3_K": 3.5625, "IQ1_S": 2.5625, "IQ1_M": 2.5625, "TQ1_0": 2.0625, "TQ2_0": 2.0625}
ROWS = ("fp8_group128", "fp8_group128_pow2", "fp8_token")
CASES = [
    *(("triton_bf16", dtype, dtype) for dtype in ("bf16", "fp16")),
    *(("triton_fp8", weights, act) for weights in EIGHT for act in ("bf16", *ROWS)),
    ("triton_fp8", "mxfp8", "bf16"),
    *(("triton_w4a16", weights, "bf16") for weights in FOUR),
    *(("triton_w4a16", weights, "fp16") for weights in ("int4_group", "int4_affine", "int4_ordered")),
    *(("triton_w4a16", "gguf", dtype) for dtype in ("bf16", "fp16")),
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
    problem = question(given)
    assert kernel.refuse(problem.routed) is None
    plain = random_experts(given.experts, given.parts, given.intermediate, given.hidden, seed=1)
    if given.weight_format == "int4_group":
        both = (Int4Group.encode(part.decode(), group_size=group_size) for part in (plain.gate_up, plain.down))
        gate_up, down = both
        return kernel, kernel.pack(replace(plain, gate_up=gate_up, down=down), problem.routed)
    return kernel, kernel.pack(encoded(plain, given.weight_format), problem.routed)


def question(given: Given) -> Problem:
    spec = MoESpec(
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_experts=given.experts,
        routing=RoutingSpec(top_k=2),
        weight_format=given.weight_format,
        activation=ActivationSpec(kind="swiglu" if given.parts == 2 else "silu"),
    )
    dtype: Any = given.dtype
    return Problem(spec=spec, device=DeviceFacts(kind="cuda"), dtype=dtype, activation_format=given.activation_format)


def check_sizes(matrix: PackedMatrix) -> None:
    layout = matrix.layout
    assert matrix.values.shape == layout.values_shape
    assert matrix.values.dtype == (layout.row_dtype if layout.weight == enums.PLAIN else layout.stored)
    assert matrix.values.nbytes == layout.nbytes
    if isinstance(layout, Words):
        assert matrix.scale is not None
        assert matrix.scale.dtype == layout.scale_dtype
        assert (matrix.row_scale is not None) == layout.row_scaled
    elif layout.scale_block > 1:
        assert matrix.scale is not None
        assert matrix.scale.shape[2:] == (layout.scale_rows, layout.k_blocks)
    elif layout.low_bits:
        assert matrix.scale is not None
        assert matrix.scale.shape[2:] == (layout.k_blocks, layout.scale_words)
        # The numbers of two rows share a word, in multiples of four words.
        extra = 0 if layout.scale_kind == enums.MINIMUM_STEPS else 4 * 3
        stored = layout.bits * layout.shape[2] * layout.block_k / 8
        assert stored <= 4 * layout.scale_words + matrix.values[0, 0, 0].nbytes <= stored + extra
    elif matrix.scale is not None:
        assert matrix.scale.shape[2:] == (layout.k_blocks, layout.words, layout.shape[2])
    else:
        assert layout.scale_kind == enums.NO_SCALE
        if layout.code_bits == 4 or layout.scale_kind != enums.NO_SCALE:
            stored = 8 * (matrix.values.nbytes + matrix.scale.nbytes)
            padded = matrix.values.numel() * 16 // layout.code_bits
            assert stored == layout.bits * padded
    assert (layout.operand == torch.float8_e4m3fn) == layout.scaled_rows
    if not isinstance(layout, Words):
        assert layout.steps[2] * layout.shape[0] * layout.shape[1] == matrix.values.numel()


@pytest.mark.each_choice
@pytest.mark.parametrize(("name", "weights", "act"), CASES)
@pytest.mark.parametrize("parts", [1, 2])
def test_layouts_are_those_that_packing_makes(name: str, weights: str, act: str, parts: int) -> None:
    dtype = act if act in DTYPES else "bf16"
    given = Given(weight_format=weights, activation_format=act, dtype=dtype, parts=parts)
    kernel, found = packed(name, given)
    assert kernel.layouts(question(given).routed, Machine()) == (found.gate_up.layout, found.down.layout)
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
    assert kernel.layouts(question(given).routed, machine) == (found.gate_up.layout, found.down.layout)
    assert (found.gate_up.layout.weight == enums.E2M1_SCALED) == (weights == "mxfp4" and act == "fp8_token")
    check_sizes(found.gate_up)
    check_sizes(found.down)


@pytest.mark.parametrize(("name", "act"), [("triton_w4a16", "bf16"), ("triton_w4a8", "fp8_token")])
def test_small_int4_groups_have_separate_layout(name: str, act: str) -> None:
    given = Given(weight_format="int4_group", activation_format=act, dtype="bf16", parts=2)
    kernel, found = packed(name, given, group_size=32)
    assert found.gate_up.layout != kernel.layouts(question(given).routed, Machine())[0]
    assert found.gate_up.layout.words == 2
    check_sizes(found.gate_up)
    check_sizes(found.down)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("kind", "bits"), BITS.items())
def test_gguf_packed_size_matches_layout(kind: str, bits: float, half: bool) -> None:
    if not half:
        bits = LOW_BITS.get(kind, bits)
    made = pack_gguf(random_blocks(kind, 2, 2, 40, 320), None, half=half)
    check_sizes(made)
    assert made.layout.bits == bits
    assert made.report == f"{kind} in {made.layout.bits:g} bits a weight"
    # Gate and up may be of another kind than down, and what is shown says so.
    kernel: Any = next(kernel for kernel in KERNELS if kernel.name == "triton_w4a16")
    act = "fp16" if half else "bf16"
    given = Given(weight_format="gguf", activation_format=act, dtype=act, parts=2)
    weights = ExpertWeights(gate_up=random_blocks(kind, 2, 2, 40, 320), down=random_blocks("Q6_K", 2, 320, 40))
    found = kernel.pack(weights, question(given).routed)
    assert str(found.report) == f"gate_up {kind} in {bits:g} bits a weight, down Q6_K in 9 bits a weight"


def test_layouts_of_formats_differ() -> None:
    known = [*tables.ROWS.values(), *tables.LANES.values(), *tables.WORDS.values()]
    assert len({layout.of((2, 1, 64, 128)) for layout in known}) == len(known) > 15
    # MXFP8 differs from other E4M3 lanes by its scales, NVFP4 by those of rows; all others by their number too.
    assert len(
        {(own.weight, own.scale_kind, own.words, own.block_k, own.operand, own.scaled_rows) for own in known}
    ) == len(known)


def test_no_two_formats_share_a_number() -> None:
    # Numbers of row scales (X_), and of faults, phases and header words between peers, are compared among themselves.
    others = ("X_", "FAULT_", "HEAD_", "PHASE_", "MAX_PEERS")
    numbers: dict[str, int] = {n: getattr(enums, n) for n in enums.__all__ if not n.startswith(others)}
    scales = [value for name, value in numbers.items() if name.endswith("_SCALE")]
    scales += [value for name, value in numbers.items() if name.endswith("_STEPS")]
    assert sorted(scales) == list(range(13))
    endings = ("SCALE", "CODES", "ACTIVATION", "ROWS", "NOWHERE", "MATH", "STEPS")
    weights = [value for name, value in numbers.items() if not name.endswith(endings)]
    assert len(set(weights)) == len(weights) == 15


def test_score_function_numbers_match_routing_kernel() -> None:
    pytest.importorskip("triton")
    from collegium.kernels import route

    for place, name in enumerate(SCORE_FUNCTIONS):
        assert getattr(route, name.upper()).value == place


def test_activation_numbers_match_kernels() -> None:
    pytest.importorskip("triton")
    from collegium.kernels import activation

    for number, name in enumerate(ACTIVATION_KINDS):
        assert getattr(activation, name.upper()).value == number
