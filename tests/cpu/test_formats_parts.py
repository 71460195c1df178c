"""Checkpoint parts become payloads byte for byte, or are refused with a reason."""

from __future__ import annotations

import pytest
import torch

from collegium.errors import InputError, MissingTensorError, SpecError, TensorMismatchError, UnknownTensorError
from collegium.formats import FORMATS, Fp8Block, Fp8Channel, Fp8Tensor, Int4Group, MxFp4, MxFp8, NvFp4, Payload
from collegium.formats.find_storage import SAFETENSORS_DTYPES
from raising import raises_with
from toys import written_storages

CASES = [(form, storage.name) for form in FORMATS for storage in written_storages(form)]
IDS = [f"{form.name}-{name}" for form, name in CASES]


def random_parts(form: type[Payload], storage: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random bytes of the declared shapes that are no NaN and no zero scale in any of the dtypes."""
    layout = next(s for s in form.storages if s.name == storage)
    parts = {}
    for part in layout.parts:
        if not part.required:
            continue
        dtype = SAFETENSORS_DTYPES[part.dtypes[0]]
        size = (*shape[:-2], *part.stored_shape(shape[-2], shape[-1]))
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            parts[part.suffix] = (torch.rand(size) + 0.5).to(dtype)
        else:
            width = torch.empty((), dtype=dtype).element_size()
            raw = torch.randint(1, 0x70, (*size[:-1], size[-1] * width), dtype=torch.uint8)
            parts[part.suffix] = raw.view(dtype)
    return parts


@pytest.mark.parametrize(("form", "storage"), CASES, ids=IDS)
@pytest.mark.parametrize("shape", [(5, 64), (3, 7, 160), (2, 3, 129, 96)], ids=str)
def test_from_parts_keeps_every_byte(form: type[Payload], storage: str, shape: tuple[int, ...]) -> None:
    parts = random_parts(form, storage, shape)
    payload = form.from_parts(parts, storage=storage, shape=shape)
    stored = sorted(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in parts.values())
    held = sorted(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in payload.tensors().values())
    # ModelOpt's bytes hold two rows, payloads' two columns: its codes are in ``test_quantization_blocks.py``
    assert held == stored or (form, storage) == (Int4Group, "modelopt")
    assert not payload.faults().any()
    assert payload.decode().shape == shape
    if len(shape) > 2:
        alone = form.from_parts({k: v[1] for k, v in parts.items()}, storage=storage, shape=shape[1:])
        assert torch.equal(alone.decode(), payload.decode()[1])


@pytest.mark.parametrize(("form", "storage"), CASES, ids=IDS)
def test_from_parts_refuses_mismatched_parts(form: type[Payload], storage: str) -> None:
    parts = random_parts(form, storage, (4, 64))
    for suffix, tensor in parts.items():
        with raises_with(MissingTensorError, suffix):
            form.from_parts({k: v for k, v in parts.items() if k != suffix}, storage=storage, shape=(4, 64))
        with raises_with(TensorMismatchError, "torch.float64"):
            form.from_parts({**parts, suffix: tensor.float().double()}, storage=storage, shape=(4, 64))
        wrong = {**parts, suffix: tensor.new_empty((9, 11))}
        with pytest.raises(TensorMismatchError, match=r"\[4, 64\]|K=64"):
            form.from_parts(wrong, storage=storage, shape=(4, 64))
    with raises_with(UnknownTensorError, "'.weight_foo'"):
        form.from_parts({**parts, ".weight_foo": torch.zeros(1)}, storage=storage, shape=(4, 64))
    with raises_with(SpecError, form.name, "'tape'", form.storages[0].name):
        form.from_parts(parts, storage="tape", shape=(4, 64))
    with pytest.raises(InputError, match=r"logical shape \[..., N, K\]"):
        form.from_parts(parts, storage=storage, shape=(64,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("stored", [(2, 3), (2, 1, 3, 1)])
def test_fp8_block_scales_are_promoted(dtype: torch.dtype, stored: tuple[int, ...]) -> None:
    codes = torch.randint(0, 0x7F, (150, 300), dtype=torch.uint8).view(torch.float8_e4m3fn)
    exponents = torch.tensor([[-3, 0, 5], [1, -127, 2]])
    powers = torch.exp2(exponents.float())
    scales = (exponents + 127).to(torch.uint8).view(dtype) if dtype.itemsize == 1 else powers.to(dtype)
    parts = {".weight": codes, ".weight_scale": scales.reshape(stored)}
    payload = Fp8Block.from_parts(parts, storage="modelopt", shape=(150, 300))
    assert torch.equal(payload.scales, powers)
    assert payload.scales.dtype == torch.float32
    spread = powers.repeat_interleave(128, 0)[:150].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(payload.decode(), codes.float() * spread)


def test_fp8_scales_for_other_blocks_refused() -> None:
    codes = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    parts = {".weight": codes, ".weight_scale_inv": torch.ones(4, 4)}
    with raises_with(TensorMismatchError, "[4, 4]", "[256, 256]", "[2, 2]"):
        Fp8Block.from_parts(parts, storage="finegrained-fp8", shape=(256, 256))
    payload = Fp8Block.from_parts(parts, storage="finegrained-fp8", shape=(256, 256), block=(64, 64))
    assert payload.block == (64, 64)
    with raises_with(InputError, "(0, 64)"):
        Fp8Block.from_parts(parts, storage="finegrained-fp8", shape=(256, 256), block=(0, 64))


@pytest.mark.parametrize("stored", [(), (1,)])
def test_scalars_may_be_stored_as_vectors(stored: tuple[int, ...]) -> None:
    codes = torch.ones(3, 32).to(torch.float8_e4m3fn)
    parts = {".weight": codes, ".weight_scale": torch.full(stored, 0.5), ".input_scale": torch.ones(stored)}
    assert Fp8Tensor.from_parts(parts, storage="modelopt", shape=(3, 32)).scale.shape == ()
    four = {
        ".weight_packed": torch.full((3, 16), 0x22, dtype=torch.uint8),
        ".weight_scale": torch.ones(3, 2).to(torch.float8_e4m3fn),
        ".weight_global_scale": torch.full(stored, 4.0),
        ".input_global_scale": torch.ones(stored),
    }
    payload = NvFp4.from_parts(four, storage="compressed-tensors", shape=(3, 32))
    assert payload.decode().unique().tolist() == [0.25]


def test_single_global_scale_broadcast_to_experts() -> None:
    parts = {
        ".weight": torch.full((5, 3, 16), 0x22, dtype=torch.uint8),
        ".weight_scale": torch.ones(5, 3, 2).to(torch.float8_e4m3fn),
        ".weight_scale_2": torch.tensor([0.5]),
    }
    payload = NvFp4.from_parts(parts, storage="modelopt", shape=(5, 3, 32))
    assert payload.global_scale.tolist() == [0.5] * 5
    assert payload[4].decode().unique().tolist() == [0.5]
    with raises_with(TensorMismatchError, "weight_scale_2", "[4]", "[5, 3, 32]", "[5]"):
        NvFp4.from_parts({**parts, ".weight_scale_2": torch.ones(4)}, storage="modelopt", shape=(5, 3, 32))


def test_channel_scales_bf16_and_wrong_length() -> None:
    codes = torch.ones(3, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0, 3.0], dtype=torch.bfloat16)
    payload = Fp8Channel.from_parts({".weight": codes, ".weight_scale": scales}, storage="modelopt", shape=(3, 32))
    assert payload.scales.dtype == torch.float32
    assert payload.decode()[:, 0].tolist() == [0.5, 2.0, 3.0]
    with raises_with(TensorMismatchError, "[2]", "[3, 32]", "[3]"):
        Fp8Channel.from_parts({".weight": codes, ".weight_scale": scales[:2]}, storage="modelopt", shape=(3, 32))


def test_mxfp8_scale_row_for_several_rows() -> None:
    codes = torch.ones(6, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    payload = MxFp8.from_parts({".weight": codes, ".weight_scale": scales}, storage="modelopt", shape=(6, 64))
    assert payload.decode()[:, 0].tolist() == [1, 1, 1, 4, 4, 4]
    assert payload.decode()[:, 32].tolist() == [2, 2, 2, 8, 8, 8]


def test_stored_padding_is_cleared() -> None:
    """Whatever lies beyond K in the file, the payload holds zeros there."""
    mx = {
        "_blocks": torch.full((2, 2, 16), 0x77, dtype=torch.uint8),
        "_scales": torch.full((2, 2), 127, dtype=torch.uint8),
    }
    payload = MxFp4.from_parts(mx, storage="gpt-oss", shape=(2, 45))
    assert payload.decode().unique().tolist() == [6.0]
    assert MxFp4(shape=(2, 64), codes=payload.codes, scales=payload.scales).decode()[:, 45:].abs().max() == 0
    words = {
        ".weight_packed": torch.full((2, 6), -1, dtype=torch.int32),
        ".weight_scale": torch.ones(2, 2, dtype=torch.bfloat16),
        ".weight_shape": torch.tensor([2, 45]),
    }
    four = Int4Group.from_parts(words, storage="compressed-tensors", shape=(2, 45))
    assert four.group_size == 32
    assert four.decode().unique().tolist() == [7.0]
    wide = Int4Group(shape=(2, 64), codes=four.codes, scales=four.scales, group_size=32)
    assert wide.decode()[:, 45:].abs().max() == 0


def int4_parts(columns: int, stored: int) -> dict[str, torch.Tensor]:
    return {
        ".weight_packed": torch.randint(-(2**31), 2**31 - 1, (2, -(-columns // 8)), dtype=torch.int32),
        ".weight_scale": torch.rand(2, stored) + 0.5,
    }


@pytest.mark.parametrize(
    ("columns", "stored", "group"),
    [(256, 8, 32), (256, 2, 128), (256, 1, 256), (300, 3, 128), (2880, 90, 32), (240, 5, 48), (77, 1, 77)],
)
def test_int4_group_size_follows_the_scales(columns: int, stored: int, group: int) -> None:
    parts = int4_parts(columns, stored)
    payload = Int4Group.from_parts(parts, storage="compressed-tensors", shape=(2, columns))
    assert payload.group_size == group
    codes = parts[".weight_packed"].view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :columns].float() - 8
    truth = codes * parts[".weight_scale"].repeat_interleave(group, 1)[:, :columns]
    assert torch.equal(payload.decode(), truth)


def test_int4_group_size_is_not_guessed() -> None:
    parts = int4_parts(720, 6)
    with raises_with(TensorMismatchError, "6", "K=720", "120", "128"):
        Int4Group.from_parts(parts, storage="compressed-tensors", shape=(2, 720))
    for group in (120, 128):
        payload = Int4Group.from_parts(parts, storage="compressed-tensors", shape=(2, 720), group_size=group)
        assert payload.group_size == group
    with raises_with(TensorMismatchError, "weight_scale", "[2, 6]", "[2, 720]", "[2, 23]"):
        Int4Group.from_parts(parts, storage="compressed-tensors", shape=(2, 720), group_size=32)
    with pytest.raises(TensorMismatchError, match=r"K="):
        Int4Group.from_parts(int4_parts(720, 7), storage="compressed-tensors", shape=(2, 720))


def test_int4_refuses_zeros_and_column_order() -> None:
    parts = random_parts(Int4Group, "compressed-tensors", (8, 64))
    zero = {**parts, ".weight_zero_point": torch.zeros(1, 2, dtype=torch.int32)}
    with raises_with(UnknownTensorError, "'.weight_zero_point'"):
        Int4Group.from_parts(zero, storage="compressed-tensors", shape=(8, 64))
    backwards = torch.arange(63, -1, -1, dtype=torch.int32) // 32
    order = {**parts, ".weight_g_idx": backwards}
    with raises_with(TensorMismatchError, "g_idx", "0", "1"):
        Int4Group.from_parts(order, storage="compressed-tensors", shape=(8, 64))
    trivial = Int4Group.from_parts(
        {**parts, ".weight_g_idx": backwards.flip(0)}, storage="compressed-tensors", shape=(8, 64)
    )
    assert torch.equal(trivial.codes, Int4Group.from_parts(parts, storage="compressed-tensors", shape=(8, 64)).codes)
    lies = {**parts, ".weight_shape": torch.tensor([8, 60])}
    with raises_with(TensorMismatchError, "[8, 60]", "[8, 64]"):
        Int4Group.from_parts(lies, storage="compressed-tensors", shape=(8, 64))
