"""Activation formats against exhaustive nearest-even searches written in float64."""

from __future__ import annotations

import math

import pytest
import torch

from collegium.errors import InputError
from collegium.ops.quantize import ACTIVATION_FORMATS, QuantizedRows, activation_format, formats_within
from raising import raises_with

NAMES = [f.name for f in ACTIVATION_FORMATS]
SCALED = ["fp8_group128", "fp8_group128_pow2", "fp8_group128_e8m0", "fp8_token", "mxfp8", "nvfp4"]
GROUP = {"mxfp8": 32} | {name: 128 for name in SCALED if name.startswith("fp8_group128")}
EIGHT = SCALED[:5]
POWERS = ("fp8_group128_pow2", "fp8_group128_e8m0", "mxfp8")
STATIC = ["fp8_static", "nvfp4_static", "nvfp4_expert"]
# Bounds on the relative L2 error of a Gaussian: half a step of the format's mantissa, and a scale rounding.
BOUNDS = {"fp32": 0, "bf16": 0.002, "fp16": 0.0003, **dict.fromkeys(EIGHT, 0.03), "nvfp4": 0.1}
BOUNDS |= {"fp8_static": 0.03, "nvfp4_static": 0.1, "nvfp4_expert": 0.1}

E4M3 = [(byte & 7) * 2.0**-9 if byte < 8 else (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 7) for byte in range(127)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_even(x, table):
    """Codes of float64 ``x`` in a table of non-negative values, by searching all of it; saturating."""
    values = torch.tensor(table, dtype=torch.float64)
    distance = (x.abs()[..., None] - values).abs()
    best = distance.min(dim=-1, keepdim=True).values
    codes = torch.arange(len(table))
    # Among the nearest (two in a tie) the even code wins: odd ones are pushed behind all even ones.
    cost = torch.where(distance == best, codes + (codes % 2) * 1000, 10**6)
    code = cost.argmin(dim=-1)
    return code, torch.copysign(values[code], x)


def heavy(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.randn(1, columns, generator=generator).exp() * torch.randn(rows, 1, generator=generator).exp()


def form_of(name, reach=256.0):
    """The format, calibrated for numbers up to ``reach`` where it is static: that of one expert where each has some."""
    form = activation_format(name)
    return form.within(reach) if form.static else form


def groups_of(x, size):
    return [slice(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size)]


def power_up(amax):
    """Smallest power of two that is at least amax / 448, found by trying; floor 2^-126."""
    return next(2.0**e for e in range(-126, 128) if 448 * 2.0**e >= amax)


def single(x):
    """Round a Python float to float32."""
    return torch.tensor(x, dtype=torch.float64).float()


def fp8_judge(x, name):
    """Codes' values and scales of one format, group by group, scalar arithmetic."""
    size = GROUP.get(name, x.shape[1])
    values, scales = torch.empty(x.shape, dtype=torch.float64), []
    for row in range(x.shape[0]):
        for span in groups_of(x, size):
            part = x[row, span]
            amax = part.abs().max().item()
            scale = power_up(amax) if name in POWERS else max(single(amax / 448).item(), 2.0**-126)
            scaled = (part * single(1 / scale)).double()
            values[row, span] = nearest_even(scaled, E4M3)[1]
            scales.append(scale)
    return values, torch.tensor(scales, dtype=torch.float64).view(x.shape[0], -1), size


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("columns", [1, 33, 90, 128, 176, 300])
def test_fp8_codes_and_scales_match_oracle(name, columns):
    x = heavy(5, columns)
    found = form_of(name).quantize(x)
    values, scales, size = fp8_judge(x, name)
    assert found.codes.dtype == torch.float8_e4m3fn
    assert found.shape == tuple(x.shape) == tuple(found.codes.shape)
    assert torch.equal(found.codes.double(), values)
    stored = found.scales.double()
    if name in ("mxfp8", "fp8_group128_e8m0"):
        assert found.scales.dtype == torch.uint8
        stored = 2.0 ** (stored - 127)
    assert torch.equal(stored, scales)
    spread = scales.repeat_interleave(size, dim=1)[:, :columns]
    back = form_of(name).round_trip(x)
    assert back.dtype == torch.float32
    assert torch.equal(back, (values * spread).float())


@pytest.mark.parametrize("name", EIGHT)
def test_fp8_rounding_is_nearest_even_everywhere(name):
    steps = torch.tensor(E4M3, dtype=torch.float64)
    middle = (steps[:-1] + steps[1:]) / 2
    near = torch.cat([steps, middle, middle * (1 + 2.0**-20), middle * (1 - 2.0**-20)]).float()
    row = torch.cat([near, -near])
    for chunk in row.split(31):  # with 448 in front the scale is 1 in every format
        x = torch.cat([torch.tensor([448.0]), chunk])[None]
        found = form_of(name).quantize(x)
        assert torch.equal(found.codes.double(), nearest_even(x.double(), E4M3)[1])
        assert torch.equal(found.codes.view(torch.uint8) >> 7, x.signbit().to(torch.uint8))


def test_pow2_scales_use_the_full_range():
    amax = torch.cat(
        [torch.logspace(-30, 30, 200), torch.tensor([448.0, 448.00003, 224.0, 449.0, 1.0, 1.75, 1.7500001])]
    )
    for name in POWERS:
        rows = form_of(name).quantize(amax[:, None])
        scale = rows.scales.double() if name == "fp8_group128_pow2" else 2.0 ** (rows.scales.double() - 127)
        ratio = amax.double()[:, None] / scale
        assert (ratio <= 448).all()
        assert (ratio > 224).all()
        assert (scale.log2() % 1 == 0).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 640), (4, 512), (21, 7168)])
def test_scale_bytes_packed_four_per_word(rows, columns):
    x = heavy(rows, columns)
    x[0, 0] = torch.nan
    made = activation_format("fp8_group128_e8m0").quantize(x)
    groups, found = made.scales.shape[1], made.packed_scales()
    assert found.dtype == torch.int32
    assert found.shape == (rows, -(-groups // 4))
    assert found.stride(0) == 1
    assert found.shape[1] == 1 or found.stride(1) == -(-rows // 4) * 4
    for group in range(groups):
        assert torch.equal((found[:, group // 4] >> 8 * (group % 4)) & 255, made.scales[:, group].int())
    if groups % 4:
        assert (found[:, -1].long() & 0xFFFFFFFF < 1 << 8 * (groups % 4)).all()
    for name in ("fp8_group128_pow2", "bf16"):
        with raises_with(InputError, "mxfp8", "fp8_group128_e8m0"):
            activation_format(name).quantize(x).packed_scales()


def nvfp4_judge(x):
    values, totals = torch.empty(x.shape, dtype=torch.float64), []
    for row in range(x.shape[0]):
        whole = max(single(x[row].abs().max().item() / 2688).item(), 2.0**-117)
        for span in groups_of(x, 16):
            part = x[row, span]
            ratio = single(part.abs().max().item() / single(6 * whole).item()).double()
            scale = max(nearest_even(ratio, E4M3)[1].item(), 2.0**-9)
            total = single(scale * whole).item()
            values[row, span] = nearest_even((part * single(1 / total)).double(), E2M1)[1]
            totals.append(total)
    return values, torch.tensor(totals, dtype=torch.float64).view(x.shape[0], -1)


@pytest.mark.parametrize("columns", [1, 15, 16, 33, 90, 176])
def test_nvfp4_codes_and_scales_match_oracle(columns):
    x = heavy(6, columns)
    x[3, : min(16, columns)] *= 1e-6  # a group far below its row
    found = activation_format("nvfp4").quantize(x)
    values, totals = nvfp4_judge(x)
    assert found.codes.dtype == torch.uint8
    assert tuple(found.codes.shape) == (6, -(-columns // 2))
    assert found.scales.dtype == torch.float8_e4m3fn
    assert torch.equal((found.scales.float() * found.global_scale).double(), totals)
    back = activation_format("nvfp4").round_trip(x)
    assert torch.equal(back, (values * totals.repeat_interleave(16, dim=1)[:, :columns]).float())
    assert torch.equal(back.signbit(), x.signbit())
    if columns % 2:
        assert (found.codes[:, -1] >> 4 == 0).all()


def test_nvfp4_rounding_is_nearest_even_everywhere():
    steps = torch.tensor(E2M1)
    middle = (steps[:-1] + steps[1:]) / 2
    near = torch.cat([steps, middle, middle + 1e-6, middle - 1e-6])
    for chunk in torch.cat([near, -near]).split(15):
        # Behind 6 the group scale is 448 and the global scale 1/448, and their product is 1.
        x = torch.cat([torch.tensor([6.0]), chunk])[None]
        rows = activation_format("nvfp4").quantize(x)
        assert (rows.scales.float() * rows.global_scale).item() == 1.0
        low_first = torch.stack([rows.codes & 15, rows.codes >> 4], dim=2).flatten(1)[:, : x.shape[1]]
        code, _ = nearest_even(x.double(), E2M1)
        assert torch.equal(low_first.long(), code + 8 * x.signbit())


def test_nvfp4_decodes_the_worked_example():
    rows = QuantizedRows(
        codes=torch.tensor([[0x5A]], dtype=torch.uint8),
        shape=(1, 2),
        scales=torch.tensor([[0x4A]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        global_scale=torch.tensor([[0.001]]),
    )
    found = activation_format("nvfp4").dequantize(rows)
    assert [v & 0xFFFFFFFF for v in found.view(torch.int32)[0].tolist()] == [0xBBA3D70B, 0x3C75C290]


def test_mxfp8_decodes_the_worked_example():
    codes = torch.tensor([[0x38, 0xC4, 0x7E, 0x01]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    rows = QuantizedRows(codes=codes, shape=(1, 4), scales=torch.tensor([[0x7D]], dtype=torch.uint8))
    assert activation_format("mxfp8").dequantize(rows).tolist() == [[0.25, -0.75, 112.0, 0.00048828125]]


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (0x7B, 0.0625), (254, 2.0**127)])
def test_mxfp8_scale_bytes(byte, value):
    codes = torch.tensor([[0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    rows = QuantizedRows(codes=codes, shape=(1, 1), scales=torch.tensor([[byte]], dtype=torch.uint8))
    assert activation_format("mxfp8").dequantize(rows).item() == value
    rows = QuantizedRows(codes=codes, shape=(1, 1), scales=torch.tensor([[255]], dtype=torch.uint8))
    assert math.isnan(activation_format("mxfp8").dequantize(rows).item())


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_error_matches_format(name):
    x = torch.randn(64, 176, generator=torch.Generator().manual_seed(0))
    error = (form_of(name).round_trip(x) - x).norm() / x.norm()
    assert BOUNDS[name] / 4 <= error <= BOUNDS[name]


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_batch_invariant(name):
    x, form = heavy(9, 90), form_of(name)
    whole = form.round_trip(x)
    assert torch.equal(whole, torch.cat([form.round_trip(row[None]) for row in x]))
    assert torch.equal(whole, form.round_trip(x.T.contiguous().T))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_poison_visible_only_in_its_row(name, value):
    x, form = heavy(4, 300), form_of(name)
    clean = form.round_trip(x)
    x[2, 140] = value
    found = form.round_trip(x)
    keep = torch.ones(4, 300, dtype=torch.bool)
    width = GROUP.get(name, 1 if name in BOUNDS and BOUNDS[name] < 0.01 else 300)
    start = 140 // width * width
    keep[2, start : start + width] = False
    assert torch.equal(found[keep], clean[keep])
    if name in SCALED + STATIC:
        assert found[~keep].isnan().all()
        rows = form.quantize(x)
        codes = (
            rows.codes.float() if form.bits == 8 else torch.stack([rows.codes & 7, rows.codes >> 4 & 7], 2).flatten(1)
        )
        assert (codes[~keep] == 0).all()
    else:
        assert found[2, 140].isnan() if math.isnan(value) else found[2, 140] == value


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_get_finite_scales(name):
    form = form_of(name)
    x = torch.zeros(3, 90)
    x[1, 40:] = heavy(1, 50)[0]
    rows = form.quantize(x)
    back = form.dequantize(rows)
    assert (back[x == 0] == 0).all()
    assert back[1, 40:].abs().max() > 0
    for scales in (rows.scales, rows.global_scale):
        if scales is not None:
            assert scales.float().isfinite().all()
            assert (scales.float() > 0).all()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1.2e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_extreme_rows_stay_finite(name, size):
    x = torch.full((2, 33), size)
    x[1, ::2] = -size
    form = form_of(name)
    rows, back = form.quantize(x), form.round_trip(x)
    # Rounding up may carry the largest numbers beyond float32, as it does in bfloat16; NaN never appears.
    assert not back.isnan().any()
    assert ((back == 0) | (back.sign() == x.sign())).all()
    if rows.codes.dtype == torch.float8_e4m3fn:
        assert not rows.codes.float().isnan().any()
    if 1e-36 <= size <= 1e30:
        torch.testing.assert_close(back, x, rtol=0.26 if name == "nvfp4" else 0.07, atol=0)


@pytest.mark.parametrize("name", EIGHT)
def test_saturation_never_makes_nan(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4000, 8, generator=generator).exp2() * torch.randn(4000, 1, generator=generator).exp()
    codes = form_of(name).quantize(x).codes.view(torch.uint8) & 0x7F
    assert codes.max() == 0x7E
    assert (codes.amax(dim=1) >= 0x76).all()  # at least 224: no scale is too large by a binade


def test_plain_dtypes_round_to_nearest_even():
    x = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8, 65519.0, 65520.0]])
    assert activation_format("bf16").round_trip(x)[0, :2].tolist() == [1.0, 1 + 2.0**-6]
    assert activation_format("fp16").round_trip(x)[0, 2:].tolist() == [65504.0, math.inf]
    assert torch.equal(activation_format("fp32").round_trip(x), x)
    assert activation_format("bf16").quantize(x).codes.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_inputs_are_read_exactly(name):
    x, form = heavy(3, 90).bfloat16(), form_of(name)
    assert torch.equal(form.round_trip(x), form.round_trip(x.float()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 90])
def test_no_rows(name, columns):
    assert form_of(name).round_trip(torch.empty(0, columns)).shape == (0, columns)


def test_activation_format_names():
    assert NAMES == [
        "fp32",
        "bf16",
        "fp16",
        "fp8_group128",
        "fp8_group128_pow2",
        "fp8_group128_e8m0",
        "fp8_token",
        "fp8_static",
        "mxfp8",
        "nvfp4",
        "nvfp4_static",
        "nvfp4_expert",
    ]
    assert [f.bits for f in ACTIVATION_FORMATS] == [32, 16, 16, 8, 8, 8, 8, 8, 8, 4, 4, 4]
    assert [f.group for f in ACTIVATION_FORMATS] == [0, 0, 0, 128, 128, 128, 0, 0, 32, 16, 16, 16]
    assert [f.name for f in ACTIVATION_FORMATS if f.static] == STATIC
    with raises_with(InputError, "'fp8'", "fp32", "nvfp4"):
        activation_format("fp8")


@pytest.mark.parametrize("name", NAMES)
def test_quantize_refusals(name):
    form = form_of(name)
    for x in (torch.zeros(4), torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(1, 2, 3)):
        with pytest.raises(InputError, match=f"quantize to {name}: found"):
            form.quantize(x)
    if name in SCALED + STATIC:
        with raises_with(InputError, name):
            form.dequantize(QuantizedRows(codes=torch.zeros(1, 2, dtype=torch.uint8), shape=(1, 4)))


def static_judge(x, scale):
    """Values of codes of a calibrated scale, by searching the table."""
    return nearest_even((x * single(1 / scale)).double(), E4M3)[1] * scale


@pytest.mark.parametrize("reach", [1e-3, 5.0, 700.0])
def test_calibrated_scales_saturate(reach):
    scale = single(reach / 448).item()
    x = heavy(9, 90) * torch.logspace(-9, 6, 9)[:, None] * reach
    found = form_of("fp8_static", reach).quantize(x)
    assert torch.equal(found.scales, torch.full((9, 1), scale))
    size = found.codes.float().abs()
    assert (size[-1] == 448).all(), "no row is too large for the scale"
    assert (size[0] == 0).all(), "no row is too small for it"
    assert torch.equal(form_of("fp8_static", reach).round_trip(x), static_judge(x, scale).float())


def test_calibrated_global_scales():
    x = heavy(5, 90) * torch.logspace(-4, 4, 5)[:, None]
    form = form_of("nvfp4_static", 2688.0)
    assert form.scale == 1.0
    found = form.quantize(x)
    assert torch.equal(found.global_scale, torch.ones(5, 1))
    for row in range(5):
        for place, span in enumerate(groups_of(x, 16)):
            part = x[row, span]
            wanted = nearest_even(torch.tensor(part.abs().max().item() / 6).float().double(), E4M3)[1].item()
            wanted = max(wanted, 2.0**-9)
            assert found.scales[row, place].item() == wanted
            values = nearest_even((part * single(1 / wanted)).double(), E2M1)[1] * wanted
            assert torch.equal(form.round_trip(x)[row, span], values.float())
    assert {2.0**-9, 448.0} <= set(found.scales.float().flatten().tolist()), "neither end of the scales is reached"


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("reach", [math.nan, math.inf, 0.0, -1.0, 1e-40])
def test_impossible_static_scales_refused(name, reach):
    with raises_with(InputError, name, "scale", "finite"):
        form_of(name, reach)


@pytest.mark.parametrize("name", STATIC)
def test_static_format_without_scale_refused(name):
    form = activation_format(name)
    for call in (lambda: formats_within(name, None), lambda: form.round_trip(torch.ones(2, 32))):
        with raises_with(InputError, name, "calibrated", "fp8_token", "nvfp4"):
            call()
