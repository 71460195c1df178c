"""Broken GGUF files for ``fuzz.py``: toy models of every kind of block, damaged in their entries and in their bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from collegium.checkpoint.gguf import GGML_TYPES
from collegium.dummy.encoders import write_half
from collegium.formats.gguf import KINDS

__all__ = ["GGUF_NAME", "damaged_gguf"]

GGUF_NAME = "model.gguf"
_HIDDEN, _WIDE, _EXPERTS, _LAYERS = 256, 256, 3, 2
_TYPE_IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_NUMBERS = (0, 1, 2, 3, 5, 31, 32, 33, 255, 256, 1 << 15, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_ARCHITECTURES: dict[str, dict[str, tuple[int, object]]] = {
    "qwen3moe": {"expert_feed_forward_length": (_U32, _WIDE)},
    "llama": {"feed_forward_length": (_U32, _WIDE)},
    "deepseek2": {
        "expert_feed_forward_length": (_U32, _WIDE),
        "expert_gating_func": (_U32, 2),
        "expert_weights_scale": (_F32, 2.5),
        "expert_weights_norm": (_BOOL, True),
    },
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One entry of a GGUF file. shape: fastest axis first, as stored. offset: None behind the tensor before it."""

    name: str
    kind: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None


@dataclass(slots=True)
class _Gguf:
    """A GGUF file: metadata as (key, type, value), and its tensors."""

    entries: list[tuple[str, int, object]]
    tensors: list[_Tensor]


def damaged_gguf(rng: random.Random) -> tuple[bytes, list[str]]:
    """Return a GGUF file with one to three damages, and their names."""
    model = _toy(rng)
    done: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        damage = rng.choice(_DAMAGES)
        damage(rng, model)
        done.append(damage.__name__)
    raw = _bytes_of(model)
    for _ in range(rng.choice((0, 0, 1)) if done else 1):
        change = rng.choice(_BYTE_DAMAGES)
        raw = change(rng, raw)
        done.append(change.__name__)
    return raw, done


def _toy(rng: random.Random) -> _Gguf:
    """Return a sound model; gate and up may have different kinds."""
    arch = rng.choice(sorted(_ARCHITECTURES))
    sizes = {
        "block_count": (_U32, _LAYERS),
        "embedding_length": (_U32, _HIDDEN),
        "expert_count": (_U32, _EXPERTS),
        "expert_used_count": (_U32, 2),
        **_ARCHITECTURES[arch],
    }
    entries: list[tuple[str, int, object]] = [("general.architecture", _STRING, arch)]
    entries += [(f"{arch}.{key}", kind, value) for key, (kind, value) in sizes.items()]
    kinds = (*KINDS, "NVFP4", *_FLOATS)
    gate = rng.choice(kinds)
    up = rng.choice((gate, gate, rng.choice(kinds)))
    down = rng.choice(kinds)
    tensors: list[_Tensor] = []
    for layer in range(_LAYERS):
        block = f"blk.{layer}.ffn_"
        tensors += [
            _tensor(rng, f"{block}gate_exps.weight", gate, (_HIDDEN, _WIDE, _EXPERTS)),
            _tensor(rng, f"{block}up_exps.weight", up, (_HIDDEN, _WIDE, _EXPERTS)),
            _tensor(rng, f"{block}down_exps.weight", down, (_WIDE, _HIDDEN, _EXPERTS)),
            _tensor(rng, f"{block}gate_inp.weight", "F32", (_HIDDEN, _EXPERTS)),
        ]
        if arch == "deepseek2":
            tensors.append(_tensor(rng, f"blk.{layer}.exp_probs_b.bias", "F32", (_EXPERTS,)))
    return _Gguf(entries, tensors)


def _tensor(rng: random.Random, name: str, kind: str, shape: tuple[int, ...]) -> _Tensor:
    return _Tensor(name, _TYPE_IDS[kind], shape, _data(rng, kind, shape))


def _data(rng: random.Random, kind: str, shape: tuple[int, ...]) -> bytes:
    """Return random numbers or blocks of a kind with finite halves."""
    count = 1
    for size in shape:
        count *= size
    if kind in _FLOATS:
        values = torch.randn(count, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        return values.to(_FLOATS[kind]).view(torch.uint8).numpy().tobytes()
    _, elements, nbytes = GGML_TYPES[_TYPE_IDS[kind]]
    blocks = torch.frombuffer(bytearray(rng.randbytes(count // elements * nbytes)), dtype=torch.uint8).view(-1, nbytes)
    if kind == "NVFP4":
        blocks[:, :4] = blocks[:, :4] % 24 + 8
    elif not KINDS[kind].terms:
        blocks[:, 0] = blocks[:, 0] % 18 + 110
    else:
        for index in range(KINDS[kind].terms):
            write_half(kind, blocks, index, torch.tensor(0.01 * (index + 1)))
    return blocks.numpy().tobytes()


def _bytes_of(model: _Gguf) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(model.tensors), len(model.entries))
    for key, kind, value in model.entries:
        head += _text(key) + struct.pack("<I", kind) + _value(kind, value)
    body = b""
    for tensor in model.tensors:
        offset = len(body) if tensor.offset is None else tensor.offset
        name = _text(tensor.name)
        head += name + struct.pack("<I", len(tensor.shape)) + struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        head += struct.pack("<IQ", tensor.kind, offset)
        body += tensor.data + bytes(-len(tensor.data) % 32)
    return head + bytes(-len(head) % 32) + body


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: object) -> bytes:
    if kind == _STRING:
        return _text(str(value))
    if kind == _ARRAY:
        return struct.pack("<IQ", _U32, 2) + struct.pack("<2I", 1, 2)
    code = {_U32: "<I", _F32: "<f", _BOOL: "<?"}[kind]
    return struct.pack(code, value)


# Damage to entries: every offset and length stays true, only meaning can be wrong.


def entry_value(rng: random.Random, model: _Gguf) -> None:
    at = rng.randrange(len(model.entries))
    key, _, _ = model.entries[at]
    kind = rng.choice((_U32, _U32, _U32, _F32, _BOOL, _STRING, _ARRAY))
    floats = (0.0, -1.0, 1e-30, 3e38, float("inf"), float("nan"))
    texts = (*_ARCHITECTURES, "gpt-oss", "glm4moe", "olmoe", "", "x" * 70_000, "general")
    values: dict[int, tuple[object, ...]] = {_U32: _NUMBERS, _F32: floats, _BOOL: (True, False), _STRING: texts}
    model.entries[at] = key, kind, rng.choice(values.get(kind, (None,)))


def entry_name(rng: random.Random, model: _Gguf) -> None:
    at = rng.randrange(len(model.entries))
    _, kind, value = model.entries[at]
    other = model.entries[rng.randrange(len(model.entries))][0]
    model.entries[at] = rng.choice((other, "general.alignment", "split.count", "x", "k" * 5000)), kind, value


def entry_dropped(rng: random.Random, model: _Gguf) -> None:
    if model.entries:
        model.entries.pop(rng.randrange(len(model.entries)))


def tensor_kind(rng: random.Random, model: _Gguf) -> None:
    """Give a tensor another type, with as many bytes as it needs or those of before."""
    at = rng.randrange(len(model.tensors))
    old = model.tensors[at]
    kind = rng.choice((*GGML_TYPES, 4, 31, 36, 77))
    data = old.data
    name, elements, _ = GGML_TYPES.get(kind, ("", 1, 1))
    known = name in KINDS or name in _FLOATS or name == "NVFP4"
    if rng.random() < 0.7 and known and old.shape[0] % elements == 0:
        data = _data(rng, name, old.shape)
    model.tensors[at] = replace(old, kind=kind, data=data)


def tensor_shape(rng: random.Random, model: _Gguf) -> None:
    at = rng.randrange(len(model.tensors))
    shape = list(model.tensors[at].shape)
    axis = rng.randrange(len(shape))
    match rng.randrange(4):
        case 0:
            shape.reverse()
        case 1:
            shape.insert(axis, 1)
        case 2:
            shape.pop(axis)
        case _:
            shape[axis] = rng.choice((shape[axis] * 2, shape[axis] // 2, shape[axis] + 1, *_NUMBERS, 1 << 62))
    model.tensors[at] = replace(model.tensors[at], shape=tuple(shape))


def tensor_name(rng: random.Random, model: _Gguf) -> None:
    at = rng.randrange(len(model.tensors))
    old = model.tensors[at].name
    digit = str(rng.choice((0, 1, 2, 9, 999_999, 10**12)))
    other = rng.choice(model.tensors).name
    names = (other, old.upper(), old + ".x", old.replace("blk.1", f"blk.{digit}"), "", "\ud800", old.replace("_", "."))
    more = (old.replace("gate_exps", "gate_up_exps"), old.replace("exps", "shexp"), old.replace("weight", "bias"))
    model.tensors[at] = replace(model.tensors[at], name=rng.choice((*names, *more)))


def tensor_dropped(rng: random.Random, model: _Gguf) -> None:
    model.tensors.pop(rng.randrange(len(model.tensors)))


def tensor_offset(rng: random.Random, model: _Gguf) -> None:
    at = rng.randrange(len(model.tensors))
    offset = rng.choice((0, 1, 31, 32, 64, 1 << 20, 1 << 40, (1 << 64) - 32))
    model.tensors[at] = replace(model.tensors[at], offset=offset)


def tensor_data(rng: random.Random, model: _Gguf) -> None:
    at = rng.randrange(len(model.tensors))
    size = len(model.tensors[at].data)
    fill = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"))
    data = rng.choice(((fill * size)[:size], rng.randbytes(size)))
    model.tensors[at] = replace(model.tensors[at], data=data)


# Damage to bytes.


def flipped_head(rng: random.Random, raw: bytes) -> bytes:
    return _flipped(rng, raw, min(len(raw), 1500))


def flipped_bytes(rng: random.Random, raw: bytes) -> bytes:
    return _flipped(rng, raw, len(raw))


def _flipped(rng: random.Random, raw: bytes, reach: int) -> bytes:
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(reach)] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(out)


def cut_file(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.choice((rng.randrange(len(raw)), rng.randrange(2000)))]


def longer_file(rng: random.Random, raw: bytes) -> bytes:
    return raw + rng.randbytes(rng.choice((1, 31, 32, 4096)))


_DAMAGES: tuple[Callable[[random.Random, _Gguf], None], ...] = (
    entry_value,
    entry_value,
    entry_name,
    entry_dropped,
    tensor_kind,
    tensor_kind,
    tensor_shape,
    tensor_name,
    tensor_dropped,
    tensor_offset,
    tensor_data,
    tensor_data,
)
_BYTE_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flipped_head,
    flipped_bytes,
    cut_file,
    longer_file,
)
