"""Feed the load path broken checkpoints: every input must load or be refused by name, in time and in memory.

One input is one seed: it picks a toy checkpoint (every family, format and storage, a class of transformers without a
family file, or GGUF with every kind of block), damages its files one to three times, and takes it the whole way: open,
audit, load a layer, run it on two tokens. A fault is anything but success or an error of ``collegium.errors``: another
exception, more than DEADLINE seconds of CPU time, or memory beyond ROOM.

    python scripts/fuzz.py --seconds 3600 --first 0 --csv benchmarks/results/fuzz.csv
    python scripts/fuzz.py --first 4711 --count 1 --verbose     # one input again
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import json
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

import torch

from collegium.checkpoint import Checkpoint, audit
from collegium.errors import CollegiumError
from collegium.loading import load_layer
from collegium.models import moe_layers
from collegium.testing.compare import heavy_tailed
from fuzz_gguf import GGUF_NAME, damaged_gguf
from tiny_configs import tiny_config
from toys import TinySize, combinations, write_checkpoint

__all__ = ["DEADLINE", "ROOM", "Outcome", "Tensor", "damaged", "main", "run_one", "try_folder"]

DEADLINE = 10  # seconds of CPU time for an input of some 100 kB
ROOM = 512 << 20  # bytes of address space an input may take beyond what the process had before it

Files = dict[str, bytes]
Json = dict[str, object]
_SIZE = TinySize(hidden=64, intermediate=32, experts=3, top_k=2, layers=2)
_INDEX, _CONFIG = "model.safetensors.index.json", "config.json"
# Model types whose families are derived from classes: single and stacked experts, shared experts, scales.
_DERIVED = ("afmoe", "granitemoe_swa", "aria_text", "jetmoe", "laguna", "hy_v4")
_GGUF_SHARE, _DERIVED_SHARE = 0.2, 0.1  # of the inputs
_NUMBERS = (-1, 0, 1, 2, 3, 7, 31, 32, 33, 64, 65, 127, 128, 1 << 15, 1 << 24, 1 << 31, 1 << 32, 1 << 53, 1 << 62)
_VALUES: tuple[object, ...] = (
    *_NUMBERS, 1 << 63, 10**30, -(1 << 63), 0.5, -1.5, 1e308, None, True, False, "", "32", "auto", "\0", "x" * 5000,
    [], [0], [1, 2], [128, 128], [1, 128], [-1, 1], [1 << 40, 1], [[]], [None], {}, {"a": 1}, {"weights": None},
)  # fmt: skip
_WORDS = (
    "bfloat16", "float16", "float32", "torch.bfloat16", "float8_e4m3fn", "qwen3_moe", "mixtral", "deepseek_v3",
    "deepseek_v4", "gpt_oss", "fp8", "mxfp4", "mxfp8", "modelopt", "compressed-tensors", "gptq", "awq", "NVFP4", "FP8",
    "MXFP8", "FP8_PB_WO", "MIXED_PRECISION", "W4A16_NVFP4", "float", "int", "tensor", "channel", "group", "block",
    "tensor_group", "Linear", "lm_head", "silu", "gelu", "sigmoid", "softmax", "noaux_tc", "greedy",
)  # fmt: skip
_PATTERNS = (
    r"re:(.*)*!", r"re:([a-z_.0-9]+)+!", r"re:(.+)+\.x$", r"re:.*.*.*.*.*.*.*.*.*!", r"re:(a|a?)+$",
    r"re:((((.*)*)*)*)*!",
    r"re:(x", r"re:*", r"re:a{99999999999}", r"re:(((()){9999}){9999}){9999}", "re:" + "(" * 400, "re:" + "." * 2000,
    r"re:(?P<n>.)(?P=n)*!", r"re:(?i:MODEL).*", r"re:(?!.*shared).*experts.*", r"re:\d+", "*",
    "*.*.*.*.*.*.*.*.*.*!", "?" * 90,
    "[" * 90, "[a-" * 30, "**" * 400, "model", "experts", "gate_proj", ".", "", "model.layers.0", "re:", "re:[^a]*",
)  # fmt: skip
_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "experts_per_token", "n_shared_experts", "n_group",
    "topk_group", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
    "routed_scaling_factor", "scoring_func", "topk_method", "swiglu_limit", "swiglu_alpha", "hidden_act", "dtype",
    "torch_dtype", "text_config", "quantization_config", "quant_method", "quant_algo", "weight_block_size", "ignore",
    "ignored_layers", "modules_to_not_convert", "exclude_modules", "config_groups", "group_0", "targets", "weights",
    "num_bits", "type", "strategy", "group_size", "symmetric", "actorder", "block_structure", "expert_dtype",
    "moe_quant_algo", "quantized_layers", "scale_fmt", "activation_scheme", "fmt", "format",
)  # fmt: skip
_DTYPES = (
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "I16", "U16", "F16", "BF16", "I32",
    "U32", "F32",
    "I64", "U64", "F64", "C64", "F4", "F6_E2M3", "F9", "",
)  # fmt: skip
_SUFFIXES = (
    ".weight", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_packed", ".weight_global_scale",
    ".input_scale", ".weight_g_idx", ".g_idx", ".weight_zero_point", ".weight_shape", ".scale", ".qweight", ".qzeros",
    ".bias", "_blocks", "_scales", "_bias", ".extra",
)  # fmt: skip


class Tensor(NamedTuple):
    """One tensor of a safetensors file, with its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Outcome(NamedTuple):
    """What became of one input: ``accepted``, the class of a refusal, or ``FAULT``, and the text or traceback."""

    kind: str
    text: str = ""


def _split(raw: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length], raw[8 + length :]


def _join(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _tensors(raw: bytes) -> list[Tensor]:
    header, data = _split(raw)
    out: list[Tensor] = []
    for name, entry in cast("dict[str, Json]", json.loads(header)).items():
        if name != "__metadata__":
            start, stop = cast("list[int]", entry["data_offsets"])
            shape = tuple(cast("list[int]", entry["shape"]))
            out.append(Tensor(name, str(entry["dtype"]), shape, data[start:stop]))
    return out


def _file(tensors: list[Tensor]) -> bytes:
    header: Json = {}
    at = 0
    for tensor in tensors:
        offsets = [at, at + len(tensor.data)]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += len(tensor.data)
    return _join(json.dumps(header).encode(), b"".join(t.data for t in tensors))


@lru_cache(maxsize=512)
def _base(index: int, shards: int) -> tuple[tuple[str, bytes], ...]:
    family, name, storage, stacked = combinations()[index]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, family, name, storage, stacked=stacked, size=_SIZE, shards=shards, seed=index)
        return tuple(sorted((p.name, p.read_bytes()) for p in Path(folder).iterdir()))


@lru_cache(maxsize=1)
def _derived_types() -> tuple[str, ...]:
    """Return those of the types that the installed transformers has; loads it, which takes seconds."""
    if importlib.util.find_spec("transformers") is None:
        return ()
    transformers = importlib.import_module("transformers")
    return tuple(kind for kind in _DERIVED if kind in transformers.CONFIG_MAPPING)


@lru_cache(maxsize=64)
def _derived_base(kind: str) -> tuple[tuple[str, bytes], ...]:
    """Return the files of a tiny model of a class, with random weights."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(transformers, kind))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        names = ("config.json", "model.safetensors")
        return tuple((name, (Path(folder) / name).read_bytes()) for name in names)


def _shard(rng: random.Random, files: Files) -> str:
    return rng.choice(sorted(name for name in files if name.endswith(".safetensors")))


def _flip(rng: random.Random, raw: bytes) -> bytes:
    if not raw:
        return raw
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        out[rng.randrange(len(out))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(out)


# Damage to bytes and headers: what a reader must notice before it believes anything.


def flip_header(rng: random.Random, files: Files) -> None:
    name = _shard(rng, files)
    header, data = _split(files[name])
    files[name] = _join(_flip(rng, header), data)


def flip_anywhere(rng: random.Random, files: Files) -> None:
    name = rng.choice(sorted(files))
    files[name] = _flip(rng, files[name])


def truncate(rng: random.Random, files: Files) -> None:
    name = rng.choice(sorted(files))
    files[name] = files[name][: rng.randrange(len(files[name]) + 1)]


def extend(rng: random.Random, files: Files) -> None:
    name = rng.choice(sorted(files))
    files[name] += rng.randbytes(rng.choice((1, 7, 8, 4096)))


def header_length(rng: random.Random, files: Files) -> None:
    name = _shard(rng, files)
    length = rng.choice((0, 1, 2, 7, 8, 1 << 20, 100_000_000, 100_000_001, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    files[name] = struct.pack("<Q", length) + files[name][8:]


def header_entry(rng: random.Random, files: Files) -> None:
    name = _shard(rng, files)
    header, data = _split(files[name])
    entries = cast("dict[str, Json]", json.loads(header))
    entry = entries[rng.choice(sorted(entries))]
    key = rng.choice(("dtype", "shape", "data_offsets", "extra"))
    value: object = rng.choice(_VALUES)
    if key == "dtype" and rng.random() < 0.8:
        value = rng.choice(_DTYPES)
    elif key in ("shape", "data_offsets") and rng.random() < 0.8:
        held = list(cast("list[int]", entry[key])) or [1]
        at = rng.randrange(len(held))
        held[at] = rng.choice((held[at] + 1, held[at] - 1, held[at] * 2, *_NUMBERS))
        value = held
    entry[key] = value
    files[name] = _join(json.dumps(entries).encode(), data)


def header_text(rng: random.Random, files: Files) -> None:
    name = _shard(rng, files)
    header, data = _split(files[name])
    text = rng.choice(
        (
            b"{}", b"[]", b"{", b"null", b"{" + b'"a":{' * 5000, b'{"__metadata__": {"a": 1}}', header + b"}",
            header[:-1] + b', "a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
            header.replace(b":", b"::", 1),
            header.replace(b"[", b"[" * 3000, 1), header.replace(b"0", b"NaN", 1), header[:-1] + b"," + header[1:],
            header.replace(b"0", b"9" * 5000, 1), b"\xff" + header, header.replace(b'"', b"'"),
        )
    )  # fmt: skip
    files[name] = _join(text, data)


# Damage to the index.


def index_entry(rng: random.Random, files: Files) -> None:
    if _INDEX not in files:
        names = [t.name for t in _tensors(files["model.safetensors"])]
        files[_INDEX] = json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}).encode()
    index = cast("Json", json.loads(files[_INDEX]))
    table = cast("Json", index["weight_map"])
    name = rng.choice(sorted(table))
    match rng.randrange(6):
        case 0:
            del table[name]
        case 1:
            table[name] = rng.choice(
                ("../x", "/etc/passwd", "absent.safetensors", "", ".", "config.json", _INDEX, "a\0b")
            )
        case 2:
            table[name] = rng.choice(sorted(files))
        case 3:
            table[name + rng.choice(_SUFFIXES)] = table[name]
        case 4:
            table[name] = rng.choice(_VALUES)
        case _:
            index["weight_map"] = rng.choice(_VALUES)
    files[_INDEX] = json.dumps(index).encode()


# Damage to the config.


def _places(value: object) -> list[tuple[Json | list[object], object]]:
    """Return every (container, key) below ``value``."""
    found: list[tuple[Json | list[object], object]] = []
    if isinstance(value, dict):
        table = cast("Json", value)
        found += [(table, key) for key in table]
        for child in table.values():
            found += _places(child)
    elif isinstance(value, list):
        items = cast("list[object]", value)
        found += [(items, at) for at in range(len(items))]
        for child in items:
            found += _places(child)
    return found


def _read_config(files: Files) -> Json:
    try:
        value: object = json.loads(files[_CONFIG])
    except (ValueError, RecursionError):
        return {}
    return cast("Json", value) if isinstance(value, dict) else {}


def _any(rng: random.Random) -> object:
    return rng.choice((rng.choice(_VALUES), rng.choice(_WORDS), rng.choice(_NUMBERS), rng.choice(_PATTERNS)))


def config_value(rng: random.Random, files: Files) -> None:
    config = _read_config(files)
    places = _places(config)
    if places:
        where, key = rng.choice(places)
        where[key] = _any(rng)  # type: ignore[index]
    files[_CONFIG] = json.dumps(config).encode()


def config_key(rng: random.Random, files: Files) -> None:
    config = _read_config(files)
    below = [w[k] for w, k in _places(config)]  # type: ignore[index]
    tables = [config, *(cast("Json", value) for value in below if isinstance(value, dict))]
    table = rng.choice(tables)
    if table and rng.random() < 0.4:
        del table[rng.choice(sorted(table))]
    else:
        table[rng.choice(_KEYS)] = _any(rng)
    files[_CONFIG] = json.dumps(config).encode()


def config_pattern(rng: random.Random, files: Files) -> None:
    config = _read_config(files)
    block = config.get("quantization_config")
    if not isinstance(block, dict):
        block = {"quant_method": rng.choice(_WORDS)}
        config["quantization_config"] = block
    table = cast("Json", block)
    key = rng.choice(("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"))
    table[key] = [rng.choice(_PATTERNS) for _ in range(rng.choice((1, 2, 5)))]
    files[_CONFIG] = json.dumps(config).encode()


def config_of_another(rng: random.Random, files: Files) -> None:
    other = dict(_base(rng.randrange(len(combinations())), 1))
    config, theirs = _read_config(files), _read_config(other)
    if rng.random() < 0.5:
        config["quantization_config"] = theirs.get("quantization_config")
    else:
        config = theirs
    files[_CONFIG] = json.dumps(config).encode()


def config_twice(rng: random.Random, files: Files) -> None:
    block = _read_config(dict(_base(rng.randrange(len(combinations())), 1))).get("quantization_config", {})
    value = {"quantization": rng.choice((block, None, [], {"quant_algo": rng.choice(_WORDS)}))}
    files["hf_quant_config.json"] = json.dumps(value).encode()
    config = _read_config(files)
    config.pop("quantization_config", None)
    files[_CONFIG] = json.dumps(config).encode()


# Damage to tensors that keeps every file well formed: only meaning can be wrong.


def _with_tensors(rng: random.Random, files: Files, change: Callable[[list[Tensor]], None]) -> None:
    name = _shard(rng, files)
    try:
        tensors = _tensors(files[name])
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError, MemoryError):
        return  # an earlier damage left nothing to parse
    if tensors:
        change(tensors)
        files[name] = _file(tensors)


def payload(rng: random.Random, files: Files) -> None:
    def change(tensors: list[Tensor]) -> None:
        scales = [i for i, t in enumerate(tensors) if "scale" in t.name]
        at = rng.choice(scales) if scales and rng.random() < 0.6 else rng.randrange(len(tensors))
        size = len(tensors[at].data)
        special = (
            b"\0",
            b"\xff",
            b"\x7f",
            b"\x80",
            b"\x00\x00\xc0\x7f",
            b"\x00\x00\x80\x7f",
            b"\x00\x00\x80\xff",
            b"\x88",
        )
        fill = rng.choice(special)
        data = rng.choice(((fill * size)[:size], rng.randbytes(size), _flip(rng, tensors[at].data)))
        tensors[at] = tensors[at]._replace(data=data)

    _with_tensors(rng, files, change)


def exchange(rng: random.Random, files: Files) -> None:
    """Permute or duplicate experts, or give a tensor the bytes of another layer's."""

    def change(tensors: list[Tensor]) -> None:
        at = rng.randrange(len(tensors))
        like = [
            i for i, t in enumerate(tensors) if len(t.data) == len(tensors[at].data) and t.dtype == tensors[at].dtype
        ]
        other, mine = rng.choice(like), tensors[at]
        tensors[at] = mine._replace(data=tensors[other].data)
        if rng.random() < 0.5:
            tensors[other] = tensors[other]._replace(data=mine.data)

    _with_tensors(rng, files, change)


def drop(rng: random.Random, files: Files) -> None:
    _with_tensors(rng, files, lambda tensors: tensors.pop(rng.randrange(len(tensors))) and None)


def rename(rng: random.Random, files: Files) -> None:
    def change(tensors: list[Tensor]) -> None:
        at = rng.randrange(len(tensors))
        digit = str(rng.choice((0, 1, 2, 3, 9, 99, 10**8, 10**12)))
        old = tensors[at].name
        new = rng.choice(
            (
                old + ".x", old.replace(".0.", f".{digit}."), old.replace("experts.1", f"experts.{digit}"),
                old.upper(), "",
                old.replace("weight", rng.choice(_SUFFIXES)[1:]), "\ud800" if rng.random() < 0.1 else old * 50,
                "__metadata__",
                old.rpartition(".")[0] + rng.choice(_SUFFIXES),
            )
        )  # fmt: skip
        tensors[at] = tensors[at]._replace(name=new)

    _with_tensors(rng, files, change)


def retype(rng: random.Random, files: Files) -> None:
    widths = {
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E8M0": 1,
        "BOOL": 1,
        "BF16": 2,
        "F16": 2,
        "I16": 2,
        "F32": 4,
        "I32": 4,
    }

    def change(tensors: list[Tensor]) -> None:
        at = rng.randrange(len(tensors))
        old = tensors[at]
        dtype = rng.choice(sorted(widths))
        count = 1
        for n in old.shape:
            count *= n
        size = count * widths[dtype]
        tensors[at] = old._replace(dtype=dtype, data=(old.data * 8)[:size].ljust(size, b"\1"))

    _with_tensors(rng, files, change)


def reshape(rng: random.Random, files: Files) -> None:
    def change(tensors: list[Tensor]) -> None:
        at = rng.randrange(len(tensors))
        old = tensors[at]
        shape = list(old.shape)
        match rng.randrange(5):
            case 0:
                shape.reverse()
            case 1:
                shape.insert(rng.randrange(len(shape) + 1), 1)
            case 2:
                shape = [len(old.data) // max(1, len(old.data) // max(1, shape[0] if shape else 1)), -1]
            case 3:
                shape = []
            case _:
                shape = [n * rng.choice((1, 1, 2)) for n in shape]
        total = 1
        for n in old.shape:
            total *= n
        width = len(old.data) // total if total else 1
        fixed = [max(n, 1) for n in shape]
        count = 1
        for n in fixed:
            count *= n
        size = count * width
        tensors[at] = old._replace(shape=tuple(fixed), data=(old.data * 8)[:size].ljust(size, b"\1"))

    _with_tensors(rng, files, change)


def insert(rng: random.Random, files: Files) -> None:
    def change(tensors: list[Tensor]) -> None:
        near = rng.choice(tensors).name.rpartition(".")[0]
        kind = rng.choice(("g_idx", "any", "duplicate"))
        if kind == "duplicate":
            tensors.append(rng.choice(tensors))  # the same key twice is lost in the header: a hole is left
            return
        values = [rng.choice((0, 1, -1, 31, 1 << 30, -(1 << 31))) for _ in range(64)]
        suffix = rng.choice((".weight_g_idx", ".g_idx")) if kind == "g_idx" else rng.choice(_SUFFIXES)
        tensors.append(Tensor(near + suffix, "I32", (64,), struct.pack("<64i", *values)))

    _with_tensors(rng, files, change)


_DAMAGES = (
    flip_header, flip_anywhere, truncate, extend, header_length, header_entry, header_text, index_entry, config_value,
    config_value, config_key, config_key, config_pattern, config_of_another, config_twice, payload, payload, payload,
    exchange, exchange, drop, rename, retype, reshape, insert,
)  # fmt: skip


def damaged(seed: int) -> tuple[Files, list[str]]:
    """Return the files of input ``seed`` and the names of what was done to them."""
    rng = random.Random(seed)
    share = rng.random()
    if share < _GGUF_SHARE:
        raw, done = damaged_gguf(rng)
        return {GGUF_NAME: raw}, done
    if share < _GGUF_SHARE + _DERIVED_SHARE and _derived_types():
        files = dict(_derived_base(rng.choice(_derived_types())))
    else:
        files = dict(_base(rng.randrange(len(combinations())), rng.choice((1, 1, 2))))
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        damage = rng.choice(_DAMAGES)
        try:
            damage(rng, files)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError, MemoryError):
            continue  # an earlier damage left nothing this one can work on
        done.append(damage.__name__)
    return files, done


class _TooLongError(BaseException):
    """Not an Exception: no handler of the library may swallow it."""


def _stop(number: int, frame: object) -> None:
    raise _TooLongError


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def try_folder(folder: Path) -> None:
    """Take a checkpoint the whole way; raises whatever goes wrong."""
    checkpoint = Checkpoint.open(folder)
    audit(checkpoint)
    layer = moe_layers(checkpoint.config)[-1]
    loaded = load_layer(folder, layer, device="cpu")
    loaded(heavy_tailed(2, loaded.spec.hidden_size, seed=1).bfloat16())


def run_one(seed: int, folder: Path) -> Outcome:
    """Write input ``seed`` into the empty folder, try it, and say what became of it."""
    files, done = damaged(seed)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    signal.signal(signal.SIGPROF, _stop)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + ROOM, before[1]))
    signal.setitimer(signal.ITIMER_PROF, DEADLINE)
    try:
        try_folder(folder)
    except CollegiumError as error:
        try:
            text = str(error)
            text.encode()
        except UnicodeEncodeError:
            text = ascii(str(error))
        return Outcome(type(error).__name__, f"{'+'.join(done)}: {text}")
    except _TooLongError:
        return Outcome("FAULT", f"{'+'.join(done)}: more than {DEADLINE} s of CPU time\n{traceback.format_exc()}")
    except Exception:  # the hunt is for every other class
        return Outcome("FAULT", f"{'+'.join(done)}: {traceback.format_exc()}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
    return Outcome("accepted", "+".join(done))


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def _record(path: Path, commit: str, seeds: tuple[int, int], kinds: Counter[str], seconds: float) -> None:
    """Write the row of the run that began at seed ``seeds[0]``, in place of its earlier row."""
    columns = (
        "commit",
        "first_seed",
        "last_seed",
        "inputs",
        "accepted",
        "refused",
        "faults",
        "cpu_seconds",
        "refusals",
    )
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    refusals = {k: n for k, n in sorted(kinds.items()) if k not in ("accepted", "FAULT")}
    row = {
        "commit": commit, "first_seed": seeds[0], "last_seed": seeds[1], "inputs": kinds.total(),
        "accepted": kinds["accepted"],
        "refused": sum(refusals.values()), "faults": kinds["FAULT"], "cpu_seconds": f"{seconds:.0f}",
        "refusals": " ".join(f"{k}={n}" for k, n in refusals.items()),
    }  # fmt: skip
    kept = [r for r in rows if int(r["first_seed"]) != seeds[0]]
    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, row])


def main() -> int:
    """Run seeds from ``--first`` on until the count or the time is used up; 1 when there was a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 40)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    commit = _commit()
    kinds: Counter[str] = Counter()
    begun, recorded = time.process_time(), time.monotonic()
    stop_at = time.monotonic() + asked.seconds
    seed = asked.first
    with tempfile.TemporaryDirectory() as room:
        while seed < asked.first + asked.count and time.monotonic() < stop_at:
            folder = Path(room) / "model"
            folder.mkdir()
            outcome = run_one(seed, folder)
            shutil.rmtree(folder)
            kinds[outcome.kind] += 1
            if asked.verbose or outcome.kind == "FAULT":
                print(
                    f"seed {seed}: {outcome.kind} {ascii(outcome.text)[:3000] if asked.verbose else outcome.text}",
                    flush=True,
                )
            seed += 1
            if asked.csv and time.monotonic() > recorded + 60:
                recorded = time.monotonic()
                _record(asked.csv, commit, (asked.first, seed - 1), kinds, time.process_time() - begun)
    if asked.csv:
        _record(asked.csv, commit, (asked.first, seed - 1), kinds, time.process_time() - begun)
    print(f"{kinds.total()} inputs, seeds {asked.first} to {seed - 1}: {dict(kinds)}")
    return bool(kinds["FAULT"])


if __name__ == "__main__":
    sys.exit(main())
