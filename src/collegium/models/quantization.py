"""Which weight format a config declares for one module: the quantisation block, its skip list, and ``dtype``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import cast

from ..errors import ConfigError
from ..formats.unquantised import CONFIG_NAMES
from .base import object_of
from .patterns import matches_prefix

__all__ = ["METHODS", "Declared", "declared_format", "experts_apart", "mixed_algorithms"]

METHODS = ("fp8", "mxfp4", "mxfp8", "modelopt", "compressed-tensors", "gptq", "awq", "bitsandbytes", "gguf")
_MOST_COLUMNS = 1 << 24  # far larger blocks and groups overflow in what computes with them
_FLOATS = {dtype: name for name, dtype in CONFIG_NAMES.items()}
_MODELOPT = {
    "FP8": "fp8_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "FP8_PB_WO": "fp8_block",
    "FP8_BLOCK_SCALES": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP8": "mxfp8",
}
_COMPRESSED = (
    # type, bits, strategy, group size (None: any) -> format
    ("float", 8, "tensor", None, "fp8_tensor"),
    ("float", 8, "channel", None, "fp8_channel"),
    ("float", 8, "block", None, "fp8_block"),
    ("float", 8, "group", 32, "mxfp8"),
    ("float", 4, "tensor_group", 16, "nvfp4"),
    ("float", 4, "group", 32, "mxfp4"),
    ("int", 4, "group", None, "int4_group"),
    ("int", 4, "channel", None, "int4_group"),
    ("int", 8, "group", None, "int8_group"),
    ("int", 8, "channel", None, "int8_group"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What a config says of one module.

    format: name of a format of ``collegium.formats.FORMATS``; None when the config says nothing. method: the
    ``quant_method`` it is in, None for unquantised. block: rows and columns that share a scale (FP8 block).
    group: columns that share a scale (integers; None: a whole row). storage: the one storage of the format that is
    declared, None when any will do.
    """

    format: str | None
    method: str | None = None
    block: tuple[int, int] | None = None
    group: int | None = None
    storage: str | None = None


def declared_format(config: Mapping[str, object], path: str) -> Declared:
    """Return the format the config declares for the module at ``path``.

    Raises ConfigError for an unknown method, algorithm or argument, naming those known.
    """
    block = _block(config)
    plain = Declared(format=_float_format(config))
    if block is None:
        return plain
    method = str(block.get("quant_method")).lower()
    if method not in METHODS:
        raise _wrong(f"quant_method is {block.get('quant_method')!r}, known are {', '.join(METHODS)}")
    if _skipped(block, path):
        return plain
    if method == "fp8":
        return _fp8(config, block, path)
    if method in ("mxfp4", "mxfp8", "gguf"):
        return Declared(format=method, method=method)
    return _METHODS[method](block, path, plain)


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"quantization_config: {what}")


def _block(config: Mapping[str, object]) -> Mapping[str, object] | None:
    found = config.get("quantization_config") or object_of(config.get("text_config")).get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: quantization_config is {found!r}, allowed is an object")
    return cast("Mapping[str, object]", found)


def _float_format(config: Mapping[str, object]) -> str | None:
    found = config.get("dtype") or config.get("torch_dtype")
    if found is None:
        return None
    name = str(found).removeprefix("torch.")
    if name not in _FLOATS:
        raise ConfigError(f"config.json: dtype is {found!r}, known are {', '.join(_FLOATS)}")
    return _FLOATS[name]


def _texts(block: Mapping[str, object], key: str) -> list[str]:
    found = block.get(key) or []
    items = cast("list[object]", found) if isinstance(found, list) else [None]
    if any(not isinstance(item, str) for item in items):
        raise _wrong(f"{key} is {found!r:.200}, allowed is a list of module names")
    return cast("list[str]", items)


def _skipped(block: Mapping[str, object], path: str) -> bool:
    keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
    return any(_matches(entry, path) for key in keys for entry in _texts(block, key))


def _matches(entry: str, path: str) -> bool:
    """Tell whether a skip-list entry covers ``path``: ``re:`` pattern, wildcard, or consecutive path components."""
    if entry.startswith("re:"):
        return matches_prefix(entry.removeprefix("re:"), path)
    steps = path.split(".")
    if "*" in entry or "?" in entry:
        return any(fnmatchcase(".".join(steps[:stop]), entry) for stop in range(1, len(steps) + 1))
    # whole components only: "mlp.gate" is the router and must not cover "mlp.gate_proj"
    return f".{entry.strip('.')}." in f".{path}."


def _pair(block: Mapping[str, object], key: str) -> tuple[int, int]:
    found = block.get(key)
    items = cast("list[object]", found) if isinstance(found, list | tuple) else []
    if len(items) != 2 or not all(_is_size(n) for n in items):
        raise _wrong(f"{key} is {found!r}, allowed are two integers from 1 to {_MOST_COLUMNS}, for instance [128, 128]")
    rows, columns = cast("list[int]", items)
    return rows, columns


def experts_apart(config: Mapping[str, object]) -> bool:
    """Tell whether entries beside the quantisation block say how the routed experts are stored (DeepSeek-V4)."""
    fp8 = str((_block(config) or {}).get("quant_method")).lower() == "fp8"
    return fp8 and config.get("model_type") == "deepseek_v4"


def _fp8(config: Mapping[str, object], block: Mapping[str, object], path: str) -> Declared:
    # DeepSeek-V4's block speaks of everything but the routed experts; "shared_experts" is another component
    if experts_apart(config) and "experts" in path.split("."):
        kind, algorithm = config.get("expert_dtype") or "fp4", block.get("moe_quant_algo") or "MXFP4"
        named = {"MXFP4": "mxfp4", "NVFP4": "nvfp4"}.get(str(algorithm).upper())
        if kind not in ("fp4", "fp8") or (kind == "fp4" and named is None):
            msg = f"config.json: expert_dtype is {kind!r} and quantization_config has moe_quant_algo {algorithm!r}; "
            raise ConfigError(msg + "allowed are expert_dtype fp8, or fp4 with moe_quant_algo NVFP4 or none")
        if kind == "fp4":
            return Declared(format=named, method="fp8")
    if block.get("weight_block_size") is None:
        return Declared(format="fp8_tensor", method="fp8")
    return Declared(format="fp8_block", method="fp8", block=_pair(block, "weight_block_size"))


def _modelopt(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    algorithm = str(block.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        found = _mixed(block, path)
        if found is None:
            return plain
        algorithm = found
    if algorithm not in _MODELOPT:
        raise _wrong(f"quant_algo is {algorithm!r}, known are {', '.join(_MODELOPT)}, MIXED_PRECISION")
    name = _MODELOPT[algorithm]
    return Declared(format=name, method="modelopt", block=(128, 128) if name == "fp8_block" else None)


def _mixed(block: Mapping[str, object], path: str) -> str | None:
    """Return the algorithm that a table of mixed precision gives the module, or the longest part of its path."""
    layers, steps = object_of(block.get("quantized_layers")), path.split(".")
    for stop in range(len(steps), 0, -1):
        if (name := ".".join(steps[:stop])) in layers:
            entry = layers[name]
            return str(object_of(entry).get("quant_algo")).upper() if isinstance(entry, dict) else ""
    return None


def mixed_algorithms(config: Mapping[str, object], paths: Iterable[str]) -> dict[str, str]:
    """Return the algorithms ModelOpt's mixed precision gives the modules, each with the first module that has it.

    A module it does not list has ``none``. Empty for every other method.
    """
    block = _block(config) or {}
    method, algorithm = str(block.get("quant_method")).lower(), str(block.get("quant_algo")).upper()
    if (method, algorithm) != ("modelopt", "MIXED_PRECISION"):
        return {}
    seen: dict[str, str] = {}
    for path in paths:
        seen.setdefault(_mixed(block, path) or "none", path)
    return seen


def _compressed(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    groups, turned = block.get("config_groups"), object_of(block.get("transform_config")).get("config_groups")
    if turned:
        raise _wrong(f"transform_config is {turned!r:.200}, allowed is none: inputs would have to be transformed too")
    schemes = [object_of(entry) for entry in object_of(groups).values() if isinstance(entry, dict)]
    if not schemes:
        raise _wrong(f"config_groups is {groups!r:.200}, expected at least one group with 'weights'")
    weights = object_of(_targeting(schemes, path)).get("weights")
    return _arguments(object_of(weights)) if isinstance(weights, dict) else plain


def _targeting(schemes: Sequence[Mapping[str, object]], path: str) -> Mapping[str, object] | None:
    kind = "Embedding" if "embed" in path.rpartition(".")[2] else "Linear"
    # a pattern or a name is more specific than the class name
    classes = ("Linear", "Embedding")
    named = (s for s in schemes if any(_matches(t, path) for t in _texts(s, "targets") if t not in classes))
    general = (s for s in schemes if kind in (_texts(s, "targets") or [kind]))
    return next(chain(named, general), None)


def _arguments(weights: Mapping[str, object]) -> Declared:
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    size, symmetric, order = weights.get("group_size"), weights.get("symmetric", True), weights.get("actorder")
    if symmetric not in (True, False) or order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise _wrong(
            f"weights with symmetric={symmetric!r} and actorder={order!r}; allowed are true and "
            "false, and group, dynamic, weight, static or null"
        )
    ordered = strategy == "group" and order in (True, "group", "dynamic")
    for row_kind, row_bits, row_strategy, row_size, name in _COMPRESSED:
        if (kind, bits, strategy) == (row_kind, row_bits, row_strategy) and row_size in (None, size):
            return Declared(
                format=_integers(name, symmetric=symmetric is True, ordered=ordered) if kind == "int" else name,
                method="compressed-tensors",
                block=_pair(weights, "block_structure") if name == "fp8_block" else None,
                group=_columns(weights) if strategy == "group" and size is not None else None,
                storage="compressed-tensors-asymmetric" if kind == "int" and not symmetric else None,
            )
    known = "; ".join(f"{k} {b} bits {s}{f' of {g}' if g else ''}" for k, b, s, g, _ in _COMPRESSED)
    raise _wrong(f"weights are {kind} {bits} bits {strategy} of {size}, known are {known}")


def _integers(name: str, *, symmetric: bool, ordered: bool) -> str:
    """Return the format of integers of a width: the plain one has no zero points and columns in order."""
    if name == "int4_group" and symmetric and not ordered:
        return name
    return name.replace("_group", "_ordered" if ordered else "_affine")


def _only(block: Mapping[str, object], key: str, allowed: tuple[object, ...]) -> object:
    """Return an entry whose value is one of ``allowed``; the first of them where it is missing."""
    found = block.get(key)
    found = allowed[0] if found is None else found
    if found not in allowed:
        raise _wrong(f"{key} is {found!r}, allowed are {', '.join(map(repr, allowed))}")
    return allowed[allowed.index(found)]  # 4.0 is 4, and 1 is True


def _columns(block: Mapping[str, object]) -> int | None:
    """Return the group size, None where it is -1, a whole row."""
    size = block.get("group_size", -1)
    if size != -1 and not _is_size(size):
        raise _wrong(f"group_size is {size!r}, allowed: 1 to {_MOST_COLUMNS}, or -1 for a whole row")
    return None if size == -1 else cast("int", size)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_COLUMNS


def _gptq(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    for pattern, change in object_of(block.get("dynamic")).items():
        # the first pattern that matches decides: "-:" leaves the module alone, "+:" or nothing changes its entries
        if matches_prefix(pattern.removeprefix("+:").removeprefix("-:").removeprefix("re:"), path):
            if pattern.startswith("-:"):
                return plain
            block = {**block, **object_of(change)}
            break
    size = _columns(block)
    bits = _only(block, "bits", (4, 8))
    symmetric = _only(block, "sym", (True, False)) is True
    ordered = _only(block, "desc_act", (False, True)) is True and size is not None
    name = _integers(f"int{bits}_group", symmetric=symmetric, ordered=ordered)
    # GPTQModel and transformers have both names, and the older one decides.
    layout = "format" if block.get("checkpoint_format") is None else "checkpoint_format"
    storage = str(_only(block, layout, ("gptq", "gptq_v2")))
    return Declared(format=name, method="gptq", group=size, storage=storage)


def _awq(block: Mapping[str, object], _path: str, _plain: Declared) -> Declared:
    _only(block, "bits", (4,))
    for layout in ("version", "format", "checkpoint_format"):
        _only(block, layout, ("gemm", "GEMM"))
    _only(block, "zero_point", (True,))
    return Declared(format="int4_affine", method="awq", group=_columns(block), storage="awq")


def _bitsandbytes(block: Mapping[str, object], _path: str, _plain: Declared) -> Declared:
    _only({"load_in_4bit": False, **block}, "load_in_4bit", (True,))
    kind = str(_only({"bnb_4bit_quant_type": "fp4", **block}, "bnb_4bit_quant_type", ("nf4", "fp4")))
    return Declared(format="bnb4", method="bitsandbytes", storage=kind)


_METHODS: Mapping[str, Callable[[Mapping[str, object], str, Declared], Declared]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
