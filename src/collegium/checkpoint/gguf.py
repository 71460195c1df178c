"""Read the header of a GGUF file; every byte of it is checked before it is used.

A GGUF file has no ``config.json``: the metadata of its architecture become the config. Every expert of a stack becomes
a separate tensor, ``blk.L.ffn_exps.E.gate.weight``, without a copy, because the experts of a stack are contiguous in
the file.

Sources: the GGUF specification (ggml, ``docs/gguf.md``) and the ``gguf`` package, ``constants.py``.
"""

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import BinaryIO, NoReturn

from ..errors import DuplicateTensorError, HostileFileError
from .header import MAX_HEADER_BYTES, TensorInfo, truncated

__all__ = ["GGML_TYPES", "read_gguf"]

# type id -> name, elements and bytes of a block
GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
_BLOCKS = {name for name, elements, _ in GGML_TYPES.values() if elements > 1}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_NAME = 4096
_MAX_TEXT = 1 << 16  # longer texts (chat templates) are skipped
_MAX_ENTRIES = 1 << 20
_MAX_DEPTH = 4
_MAX_LAYERS = 1 << 10
# Entries that converters write as an array if layers differ.
_PER_LAYER = (".feed_forward_length", ".attention.head_count_kv")
_EXPERTS = re.compile(r"(blk\.\d{1,6}\.ffn_)(gate|up|down|gate_up)_exps\.(\w+)")
_SHARED_GATE = re.compile(r"blk\.\d{1,6}\.ffn_gate_inp_shexp\.weight")
_CORRECTION_BIAS = re.compile(r"blk\.\d{1,6}\.exp_probs_b\.bias")


class _Cursor:
    """A read position in the header; every read is checked against the file size and the largest allowed header."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise HostileFileError(f"{self.path}: {what} (at byte {self.at} of {self.size}); download the file again")

    def check(self, count: int, what: str) -> None:
        remaining = min(self.size, MAX_HEADER_BYTES) - self.at
        if count > remaining and self.at + count <= MAX_HEADER_BYTES:
            raise truncated(self.path, self.size, self.at + count, f"inside its header, at {what}")
        if count > remaining:
            self.fail(f"{what} needs {count} bytes, {remaining} are left in the header")

    def take(self, count: int, what: str) -> bytes:
        self.check(count, what)
        raw = self.file.read(count)
        if len(raw) != count:
            self.fail(f"{what} has {len(raw)} of {count} bytes")
        self.at += count
        return raw

    def skip(self, count: int, what: str) -> None:
        self.check(count, what)
        self.at += count
        self.file.seek(self.at)

    def number(self, code: str, what: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def name(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if not 1 <= length <= _MAX_NAME:
            self.fail(f"{what} has {length} bytes, allowed are 1 to {_MAX_NAME}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def value(self, kind: int, key: str, depth: int = 0) -> object:
        """Read one metadata value.

        Long texts and arrays are skipped and replaced by a text with their length, except numbers with one for each
        layer.
        """
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            length = self.number("Q", f"the length of {key}")
            if length > _MAX_TEXT or depth:
                self.skip(length, key)
                return f"a text of {length} bytes"
            return self.take(length, key).decode("utf-8", errors="replace")
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            self.fail(f"{key} has value type {kind} at depth {depth}, known are 0 to 12, {_MAX_DEPTH} deep")
        inner = self.number("I", key)
        count = self.number("Q", f"the length of {key}")
        if inner in _SCALARS and count <= _MAX_LAYERS and key.endswith(_PER_LAYER):
            return [self.number(_SCALARS[inner], key) for _ in range(count)]
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[inner]}"), key)
            return f"an array of {count}"
        # Each element has at least 8 bytes, so a length beyond the file is refused here.
        self.check(8 * count, key)
        for _ in range(count):
            self.value(inner, key, depth + 1)
        return f"an array of {count}"


def read_gguf(path: Path) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    """Read and check one GGUF file, with its other parts if it is split; return config and tensors.

    Raises HostileFileError, TruncatedFileError and DuplicateTensorError.
    """
    config, infos = _read_file(path)
    count = config.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        match = re.fullmatch(r"(.+-)\d{5}(-of-\d{5}\.gguf)", path.name, re.IGNORECASE)
        names = [f"{match[1]}{i:05d}{match[2]}" for i in range(1, count + 1)] if match and count < 10**5 else []
        others = [path.with_name(name) for name in names if name != path.name]
        missing = [other.name for other in others if not other.is_file()]
        if missing or not others:
            raise HostileFileError(f"{path}: one of {count} parts; missing next to it: {missing[:8] or 'all others'}")
        for other in others:
            more_config, more = _read_file(other)
            config = {**more_config, **config} if "general.architecture" in config else {**config, **more_config}
            duplicates = sorted(infos.keys() & more.keys())
            if duplicates:
                raise DuplicateTensorError(
                    f"tensor {duplicates[0]!r} is in {path.name} and in {other.name}; keep one of them"
                )
            infos.update(more)
    architecture = config.get("general.architecture", "unknown")
    prefix = f"{architecture}."
    entries = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
    for token in ("bos", "eos"):
        entries[f"{token}_token_id"] = config.get(f"tokenizer.ggml.{token}_token_id")
    vocab_size = _array_length(config.get("tokenizer.ggml.tokens"))
    if entries.get("vocab_size") is None and vocab_size is not None:
        entries["vocab_size"] = vocab_size
    # The correction bias changes the routing, and no entry of the metadata states whether there is one.
    entries["exp_probs_b"] = any(_CORRECTION_BIAS.fullmatch(name) for name in infos)
    entries["model_type"] = f"gguf:{architecture}"
    entries["quantization_config"] = {"quant_method": "gguf"}
    return entries, infos


def _array_length(value: object) -> int | None:
    """Return the length of an array as ``_Cursor.value`` describes it, None for anything else."""
    match = re.fullmatch(r"an array of (\d{1,9})", value) if isinstance(value, str) else None
    return None if match is None else int(match[1])


def _read_file(path: Path) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    with path.open("rb") as file:
        cursor = _Cursor(path, file)
        magic = cursor.take(4, "the magic")
        if magic != b"GGUF":
            cursor.fail(f"starts with {magic!r}, a GGUF file with b'GGUF'")
        version = cursor.number("I", "the version")
        if version not in (2, 3):
            cursor.fail(f"GGUF version {version}, known are 2 and 3, little-endian")
        count = cursor.number("Q", "the tensor count")
        entries = cursor.number("Q", "the metadata count")
        if max(count, entries) > _MAX_ENTRIES:
            cursor.fail(f"{count} tensors and {entries} metadata entries, at most {_MAX_ENTRIES} are allowed")
        config: dict[str, object] = {}
        for _ in range(entries):
            key = cursor.name("a metadata key")
            if key in config:
                cursor.fail(f"the metadata key {key!r} appears twice")
            config[key] = cursor.value(cursor.number("I", key), key)
        infos = [_read_info(cursor) for _ in range(count)]
        step = config.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step % 8 or step > 1 << 20:
            cursor.fail(f"general.alignment is {step!r}, allowed are multiples of 8 up to {1 << 20}")
        base = -(-cursor.at // step) * step
    placed: dict[str, TensorInfo] = {}
    at = base
    before = "the header"
    for info in sorted(infos, key=lambda i: i.start):
        start = base + info.start
        stop = base + info.stop
        if start < at or info.start % step or stop > 2**63 or info.name in placed:
            cursor.fail(
                f"tensor {info.name!r} is at {start} to {stop}, allowed is from {at} on, after {before}, at a "
                f"multiple of {step}, each name once"
            )
        at = stop
        before = repr(info.name)
        placed[info.name] = replace(info, start=start, stop=stop)
    if at > cursor.size:
        first = next(info for info in placed.values() if info.stop > cursor.size)
        raise truncated(path, cursor.size, at, f"at tensor {first.name!r}")
    tensors: dict[str, TensorInfo] = {}
    for info in (piece for whole in placed.values() for piece in _split_experts(cursor, whole)):
        if info.name in tensors:
            cursor.fail(f"tensor {info.name!r} is stored twice, alone and in a stack or fused and apart")
        tensors[info.name] = info
    return config, tensors


def _read_info(cursor: _Cursor) -> TensorInfo:
    """Read one tensor's entry; offsets are relative to the start of the data, the shape is outermost first."""
    name = cursor.name("a tensor name")
    rank = cursor.number("I", name)
    if not 1 <= rank <= 4:
        cursor.fail(f"tensor {name!r} has {rank} dimensions, allowed are 1 to 4")
    shape = tuple(cursor.number("Q", name) for _ in range(rank))[::-1]
    kind = cursor.number("I", name)
    offset = cursor.number("Q", name)
    dtype, elements, nbytes = GGML_TYPES.get(kind, (f"type {kind}", 1, 0))
    total = math.prod(max(n, 1) for n in shape) // elements * nbytes
    if not nbytes or 0 in shape or shape[-1] % elements or total >= 2**63:
        cursor.fail(
            f"tensor {name!r} is {dtype} {shape}, allowed are the known types, no empty axis, rows of whole blocks of "
            f"{elements}, and less than 2^63 bytes"
        )
    if elements > 1:
        shape = (*shape[:-1], shape[-1] // elements, nbytes)
    if rank == 1 and _SHARED_GATE.fullmatch(name):  # a matrix of one row, which converters squeeze
        shape = (1, *shape)
    return TensorInfo(name=name, dtype=dtype, shape=shape, file=cursor.path, start=offset, stop=offset + total)


def _split_experts(cursor: _Cursor, info: TensorInfo) -> Iterable[TensorInfo]:
    """Split a stack of experts into one tensor per expert, and a fused gate_up into gate and up.

    Other tensors of the experts, such as biases, are renamed to follow the experts' prefix.
    """
    match = _EXPERTS.fullmatch(info.name)
    if match is None:
        return (info,)
    if match[3] != "weight":
        return (replace(info, name=f"{match[1]}exps.{match[3]}.{match[2]}"),)
    halves = ("gate", "up") if match[2] == "gate_up" else (match[2],)
    experts = info.shape[0]
    dimensions = 4 if info.dtype in _BLOCKS else 3
    rows = info.shape[1] if len(info.shape) == dimensions else 0
    if not rows or rows % len(halves) or experts > _MAX_ENTRIES:
        cursor.fail(f"tensor {info.name!r} has shape {info.shape}, expected (experts, rows, columns)")
    shape = (rows // len(halves), *info.shape[2:])
    size = info.nbytes // (experts * len(halves))
    starts = range(info.start, info.stop, size)
    return [
        replace(info, name=f"{match[1]}exps.{e}.{half}.weight", shape=shape, start=start, stop=start + size)
        for (e, half), start in zip(product(range(experts), halves), starts, strict=True)
    ]
