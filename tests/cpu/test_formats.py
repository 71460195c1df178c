"""What every weight format promises, on ugly sizes and any number of leading dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from collegium.errors import InputError, SpecError
from collegium.formats import (
    FORMATS,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Int4Group,
    MxFp4,
    MxFp8,
    NvFp4,
    Payload,
    by_name,
)
from raising import raises_with

WRITABLE = [form for form in FORMATS if not form.read_only]
ALL = pytest.mark.parametrize("form", WRITABLE, ids=lambda form: form.name)
SHAPES = pytest.mark.parametrize("shape", [(33, 90), (3, 45, 176), (2, 2, 7, 33), (1, 1), (130, 257)], ids=str)


def heavy(*shape: int) -> torch.Tensor:
    """Unit-scale weights with a heavy tail: Student's t with 3 degrees of freedom."""
    normal = torch.randn(shape)
    chi = torch.randn((3, *shape)).square().sum(0).div_(3).sqrt_().clamp_min_(0.05)
    return normal / chi


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32) if values.dtype == torch.float32 else values.view(torch.int16)


def changed(payload: Payload, **tensors: torch.Tensor) -> Any:
    return replace(payload, **tensors)


@ALL
@SHAPES
def test_decode_has_the_logical_shape(form: type[Payload], shape: tuple[int, ...]) -> None:
    weight = heavy(*shape)
    payload = form.encode(weight)
    decoded = payload.decode()
    assert payload.shape == shape
    assert decoded.shape == shape
    assert decoded.dtype == torch.float32
    assert payload.faults().shape == shape[:-2]
    assert not payload.faults().any()
    assert (decoded - weight).norm() <= 2 * form.tolerance * weight.norm()


@ALL
@SHAPES
def test_round_trip_is_bitwise(form: type[Payload], shape: tuple[int, ...]) -> None:
    first = form.encode(heavy(*shape))
    # NVFP4's own rule derives the global scale through two roundings, so it is handed on.
    again = NvFp4.encode(first.decode(), global_scale=first.global_scale) if isinstance(first, NvFp4) else None
    again = again or form.encode(first.decode())
    assert torch.equal(bits(again.decode()), bits(first.decode()))


@ALL
@pytest.mark.parametrize("spread", [1.0, 1.3, 1.7])
def test_error_is_within_tolerance(form: type[Payload], spread: float) -> None:
    weight = torch.randn(128, 512) * spread
    error = (form.encode(weight).decode() - weight).norm() / weight.norm()
    assert error <= form.tolerance
    assert form.tolerance == 0 or error >= 0.7 * form.tolerance, "the stated tolerance is far too wide"


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_decode_rounds_once(form: type[Payload], dtype: torch.dtype) -> None:
    payload = form.encode(heavy(3, 18, 70))
    assert torch.equal(payload.decode(dtype), payload.decode().to(dtype))


@ALL
def test_decode_refuses_other_dtypes(form: type[Payload]) -> None:
    with pytest.raises(InputError, match=r"int8.*allowed: torch.float32"):
        form.encode(heavy(2, 8)).decode(torch.int8)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encode_takes_any_floating_dtype(form: type[Payload], dtype: torch.dtype) -> None:
    weight = heavy(5, 64).to(dtype)
    assert torch.equal(form.encode(weight).decode(), form.encode(weight.float()).decode())


@ALL
def test_encoding_zeros_preserves_signs(form: type[Payload]) -> None:
    weight = torch.zeros(2, 5, 70)
    weight[1, :, ::3] = -0.0
    payload = form.encode(weight)
    assert not payload.faults().any()
    decoded = payload.decode()
    assert torch.equal(decoded, torch.zeros_like(weight))
    if form is not Int4Group:
        assert torch.equal(bits(decoded), bits(weight))


@ALL
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_encode_refuses_what_is_not_finite(form: type[Payload], value: float) -> None:
    weight = heavy(3, 40)
    weight[1, 7] = value
    with raises_with(InputError, "NaN", "120"):
        form.encode(weight)


@ALL
def test_encode_refuses_wrong_tensors(form: type[Payload]) -> None:
    for weight in (torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4), torch.zeros(4, 0)):
        with raises_with(InputError, "floating-point"):
            form.encode(weight)


@ALL
def test_experts_are_independent(form: type[Payload]) -> None:
    weight = heavy(4, 2, 19, 90) * torch.tensor([1.0, 100.0, 1e-3, 7.0]).view(4, 1, 1, 1)
    payload = form.encode(weight)
    for expert in range(4):
        alone = form.encode(weight[expert])
        assert payload[expert].shape == (2, 19, 90)
        for name, tensor in alone.tensors().items():
            assert torch.equal(payload[expert].tensors()[name].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(payload[1:3].decode(), payload.decode()[1:3])


@ALL
def test_put_fills_a_stack(form: type[Payload]) -> None:
    experts = [form.encode(heavy(2, 11, 50)) for _ in range(3)]
    stack = experts[0].repeated(3)
    for slot, expert in enumerate(experts):
        stack.put(slot, expert)
    assert stack.shape == (3, 2, 11, 50)
    assert torch.equal(stack.decode(), torch.stack([expert.decode() for expert in experts]))
    assert stack.nbytes == sum(expert.nbytes for expert in experts)
    assert torch.equal(stack.to("cpu").decode(), stack.decode())


def steps(payload: Payload) -> tuple[int, int]:
    """Row and column boundaries of a payload."""
    if isinstance(payload, Fp8Block):
        return payload.block
    return 1, max(1, payload.group)


@ALL
def test_cuts_equal_cuts_of_the_decoded(form: type[Payload]) -> None:
    payload = Fp8Block.encode(heavy(2, 50, 150), block=(16, 32)) if form is Fp8Block else form.encode(heavy(2, 50, 150))
    decoded = payload.decode()
    row, column = steps(payload)
    for start, stop in ((0, 3 * row), (row, 2 * row), (2 * row, 50)):
        cut = payload.rows(start, stop)
        assert cut.shape == (2, stop - start, 150)
        assert torch.equal(cut.decode(), decoded[:, start:stop])
        assert not cut.faults().any()
    for start, stop in ((0, column), (column, 3 * column), (2 * column, 150), (0, 150)):
        cut = payload.columns(start, stop)
        assert cut.shape == (2, 50, stop - start)
        assert torch.equal(cut.decode(), decoded[..., start:stop])
        assert not cut.faults().any()


@ALL
def test_cuts_refuse_other_boundaries(form: type[Payload]) -> None:
    payload = form.encode(heavy(300, 300))
    row, column = steps(payload)
    for start, stop in ((-1, 30), (10, 10), (0, 301), (20, 10)):
        with raises_with(InputError, f"output rows {start}:{stop}", 300):
            payload.rows(start, stop)
        with raises_with(InputError, f"input columns {start}:{stop}", 300):
            payload.columns(start, stop)
    if column > 1:
        with raises_with(InputError, f"multiples of {column}", 300):
            payload.columns(0, column + 1)
        with raises_with(InputError, f"multiples of {column}", 300):
            payload.columns(column - 1, 300)
    if row > 1:
        with raises_with(InputError, f"multiples of {row}", 300):
            payload.rows(0, row + 1)


@pytest.mark.parametrize("form", [MxFp8, MxFp4, NvFp4], ids=lambda form: form.name)
def test_padding_holds_zero_codes(form: type[Payload]) -> None:
    payload = form.encode(heavy(4, 37))
    whole = replace(payload, shape=(4, -(-37 // form.group) * form.group))
    assert torch.equal(whole.decode()[:, 37:], torch.zeros(4, whole.shape[1] - 37))
    assert torch.equal(whole.decode()[:, :37], payload.decode())


def test_int4_padding_holds_code_8() -> None:
    payload = Int4Group.encode(heavy(4, 37))
    assert payload.codes.shape == (4, 32)
    assert torch.equal(replace(payload, shape=(4, 64)).decode()[:, 37:], torch.zeros(4, 27))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_stored_bytes_round_trip(data: st.DataObject) -> None:
    """Any MXFP4 payload, and any MXFP8 payload that uses its range, encodes back to the same numbers."""
    scale = st.integers(0, 250)
    scales = torch.tensor(data.draw(st.lists(scale, min_size=2, max_size=2)), dtype=torch.uint8).view(2, 1)
    raw = torch.tensor(list(data.draw(st.binary(min_size=64, max_size=64))), dtype=torch.uint8).view(2, 32)
    four = MxFp4(shape=(2, 32), codes=raw[:, :16].contiguous(), scales=scales)
    assert torch.equal(bits(MxFp4.encode(four.decode()).decode()), bits(four.decode()))
    finite = torch.where((raw & 0x7F) == 0x7F, 0x35, raw)
    # OCP's rule puts the largest magnitude of a group between 256 and 448; a group that only reaches, say, 0.9375
    # would need 480 after the shift, which E4M3 has not.
    finite[:, 0] = 0x78 | (raw[:, 0] & 0x87) - (raw[:, 0] & 7 == 7).to(torch.uint8)
    eight = MxFp8(shape=(2, 32), codes=finite.view(torch.float8_e4m3fn), scales=scales.clamp(max=246))
    assert torch.equal(bits(MxFp8.encode(eight.decode()).decode()), bits(eight.decode()))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    form=st.sampled_from(WRITABLE),
    seed=st.integers(0, 1000),
)
def test_property_shapes(rows: int, columns: int, form: type[Payload], seed: int) -> None:
    weight = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed))
    payload = form.encode(weight)
    assert payload.decode().shape == weight.shape
    assert not payload.faults().any()
    # Rounding never moves a value by more than the largest weight of its matrix over three.
    assert ((payload.decode() - weight).abs().amax((-2, -1)) <= weight.abs().amax((-2, -1)) / 3).all()


def test_faults_name_the_matrix() -> None:
    weight = heavy(3, 2, 8, 64)
    for form, field in (
        (Fp8Block, "scales"),
        (Fp8Channel, "scales"),
        (Int4Group, "scales"),
        (Fp8Tensor, "scale"),
    ):
        for bad in (float("nan"), float("inf"), -1.0):
            payload = form.encode(weight)
            tensor = payload.tensors()[field].clone()
            tensor[1, 0].fill_(bad)
            expected = [[False, False], [True, False], [False, False]]
            assert changed(payload, **{field: tensor}).faults().tolist() == expected, (form.name, bad)


def test_zero_scale_needs_zero_codes() -> None:
    weight = heavy(2, 8, 64)
    weight[1] = 0
    for form, field in (
        (Fp8Block, "scales"),
        (Fp8Channel, "scales"),
        (Int4Group, "scales"),
        (Fp8Tensor, "scale"),
        (NvFp4, "scales"),
        (NvFp4, "global_scale"),
    ):
        payload = form.encode(weight)
        zeroed = changed(payload, **{field: torch.zeros_like(payload.tensors()[field])})
        assert zeroed.faults().tolist() == [True, False], (form.name, field)
        assert torch.equal(zeroed.decode(), torch.zeros_like(weight))


def test_faults_of_nvfp4_scales() -> None:
    payload = NvFp4.encode(heavy(2, 8, 64))
    for byte in (0x7F, 0xFF, 0xB8):
        scales = payload.scales.view(torch.uint8).clone()
        scales[1, 3, 2] = byte
        assert changed(payload, scales=scales.view(torch.float8_e4m3fn)).faults().tolist() == [False, True]
    for bad in (float("nan"), float("inf"), -1.0):
        global_scale = torch.tensor([1.0, bad])
        assert changed(payload, global_scale=global_scale).faults().tolist() == [False, True]
    divides = NvFp4.encode(torch.zeros(1, 8, 64), global_divides=True)
    assert changed(divides, global_scale=torch.zeros(1)).faults().tolist() == [True]


def test_faults_of_nan_scales_and_codes() -> None:
    for form in (MxFp8, MxFp4):
        payload = form.encode(heavy(2, 8, 64))
        scales = payload.scales.clone()
        scales[1, 7, 1] = 255
        assert changed(payload, scales=scales).faults().tolist() == [False, True]
        assert changed(payload, scales=scales).decode()[1, 7, 32:].isnan().all()
    for form in (MxFp8, Fp8Block, Fp8Tensor, Fp8Channel):
        for byte in (0x7F, 0xFF):
            payload = form.encode(heavy(2, 8, 64))
            codes = payload.codes.view(torch.uint8).clone()
            codes[0, 5, 33] = byte
            assert changed(payload, codes=codes.view(torch.float8_e4m3fn)).faults().tolist() == [True, False]


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_faults_of_plain_values(name: str) -> None:
    payload = by_name(name).encode(heavy(2, 8, 64))
    for bad in (float("nan"), float("-inf")):
        values = payload.tensors()["values"].clone()
        values[1, 2, 3] = bad
        assert changed(payload, values=values).faults().tolist() == [False, True]


def test_fp16_refuses_overflow() -> None:
    with raises_with(InputError, "1", "65504"):
        by_name("fp16").encode(torch.tensor([[1.0, 2.0], [7e4, 3.0]]))


def test_fp8_block_pow2_never_saturates() -> None:
    weight = heavy(2, 200, 300)
    payload = Fp8Block.encode(weight, power_of_two=True)
    assert torch.equal(torch.frexp(payload.scales).mantissa, torch.full_like(payload.scales, 0.5))
    tight = Fp8Block.encode(weight).scales
    assert ((payload.scales >= tight) & (payload.scales < 2 * tight)).all()


def test_int4_group_sizes() -> None:
    weight = heavy(2, 9, 200)
    for size, groups in ((32, 7), (64, 4), (128, 2), (200, 1), (4096, 1)):
        payload = Int4Group.encode(weight, group_size=size, scale_dtype=torch.float32)
        assert payload.scales.shape == (2, 9, groups)
        assert (payload.decode() - weight).norm() < 0.3 * weight.norm()
    single = Int4Group.encode(weight, group_size=200)
    assert torch.equal(single.columns(8, 96).decode(), single.decode()[..., 8:96])
    assert torch.equal(single.columns(96, 200).decode(), single.decode()[..., 96:])
    assert single.columns(8, 96).columns(16, 88).shape == (2, 9, 72)
    with pytest.raises(InputError, match=r"group_size is 12"):
        Int4Group.encode(weight, group_size=12)
    with raises_with(InputError, "65504"):
        Int4Group.encode(weight * 1e7, scale_dtype=torch.float16)


def test_by_name_lists_the_names() -> None:
    names = [form.name for form in FORMATS]
    assert len(set(names)) == len(names)
    assert [by_name(name) for name in names] == list(FORMATS)
    with pytest.raises(SpecError, match=r"'int3'.*bf16, fp16, fp32, fp8_block"):
        by_name("int3")
