"""Determine the weight format that a config declares for a module: quantisation block, skip list, and ``dtype``."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import cast

from ..errors import ConfigError
from ..formats.unquantised import CONFIG_NAMES
from .base import NESTED, object_of
from .name_match import matches_prefix

__all__ = [
    "METHODS",
    "Declared",
    "declared_format",
    "experts_apart",
    "method_of",
    "mixed_algorithms",
    "quantization_block",
    "without_quantization",
]

METHODS = (
    "fp8",
    "mxfp4",
    "mxfp8",
    "modelopt",
    "compressed-tensors",
    "gptq",
    "awq",
    "auto-round",
    "bitsandbytes",
    "gguf",
)
_BLOCK = "quantization_config"
_ALIASES = {"intel/auto-round": "auto-round", "auto_round": "auto-round"}
_CACHE_ENTRIES = ("kv_cache_scheme", "kv_cache_quant_algo")
_MAX_COLUMNS = 1 << 24  # far larger blocks and groups would overflow
_FLOATS = {dtype: name for name, dtype in CONFIG_NAMES.items()}
# algorithm -> format, storage (None: any), activation format of static scales (None: that of the weight format)
_MODELOPT: Mapping[str, tuple[str, str | None, str | None]] = {
    "FP8": ("fp8_tensor", None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", None, None),
    "FP8_PB_WO": ("fp8_block", None, None),
    "FP8_PB_REAL": ("fp8_block", None, None),
    "FP8_BLOCK_SCALES": ("fp8_block", None, None),
    "NVFP4": ("nvfp4", None, None),
    "NVFP4_AWQ": ("nvfp4", None, None),
    "W4A16_NVFP4": ("nvfp4", None, None),
    "W4A8_NVFP4_FP8": ("nvfp4", None, "fp8_static"),
    "MXFP4": ("mxfp4", "modelopt", None),
    "W4A8_MXFP4_FP8": ("mxfp4", "modelopt", "fp8_static"),
    "MXFP8": ("mxfp8", None, None),
    "INT4_AWQ": ("int4_group", "modelopt", None),
    "W4A16_AWQ": ("int4_group", "modelopt", None),
    "W4A8_AWQ": ("int4_group", "modelopt", "fp8_static"),
    "W8A16": ("int8_affine", "int-quantized", None),
    "W8A8_SQ_PER_CHANNEL": ("int8_affine", "int-quantized", None),
}
# packing_format (backend in older releases) -> layout; only "gptq" stores zero points minus one
_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")
_KERNELS = (":exllamav2", ":tritonv2", ":triton", ":marlin")
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
    """The format that a config declares for one module.

    format: name of a format of ``collegium.formats.FORMATS``; None if the config declares none. method: its
    ``quant_method``, None for unquantised. block: rows and columns that share a scale (FP8 block). group: columns that
    share a scale (integers; None: a whole row). storage: the declared storage of the format, None for any.
    static_activations: the activation format of static scales in the files, None for the default of the weight format.
    refusal: why quantised matrices cannot be read; unquantised ones can.
    """

    format: str | None
    method: str | None = None
    block: tuple[int, int] | None = None
    group: int | None = None
    storage: str | None = None
    static_activations: str | None = None
    refusal: str = ""


def declared_format(config: Mapping[str, object], path: str) -> Declared:
    """Return the format the config declares for the module at ``path``.

    Raises ConfigError for an unknown method, algorithm or argument, with the known ones.
    """
    block, nested = _find_block(config)
    plain = Declared(format=_float_format(config))
    if block is None:
        return plain
    method = method_of(block)
    if method is None and _only_caches(block):
        return plain
    if method not in METHODS:
        raise _block_error(f"quant_method is {block.get('quant_method')!r}, known are {', '.join(METHODS)}")
    if any(_is_skipped(block, name) for name in _names(path, nested=nested)):
        return plain
    if method == "fp8":
        return _fp8(config, block, path)
    if method in ("mxfp4", "mxfp8", "gguf"):
        return Declared(format=method, method=method)
    return _METHODS[method](block, path, plain)


def _block_error(what: str) -> ConfigError:
    return ConfigError(f"quantization_config: {what}")


def quantization_block(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the quantisation block of a config or of its nested text config, None without one.

    Raises ConfigError if it is not an object, and if two parts of the config have different blocks.
    """
    return _find_block(config)[0]


def without_quantization(config: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of the config without its quantisation block, at the top and in nested parts."""
    copy = {key: value for key, value in config.items() if key != _BLOCK}
    for key in NESTED:
        if isinstance(copy.get(key), dict):
            copy[key] = without_quantization(object_of(copy[key]))
    return copy


def method_of(block: Mapping[str, object]) -> str | None:
    """Return the normalised ``quant_method`` in lower case, None if the block has none.

    Blocks of tools that do not write the entry are recognised by other entries.
    """
    named = block.get("quant_method")
    if named is not None:
        name = str(getattr(named, "value", named)).lower()
        return _ALIASES.get(name, name)
    if object_of(block.get("producer")).get("name") == "modelopt":
        return "modelopt"
    return "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & block.keys() else None


def _only_caches(block: Mapping[str, object]) -> bool:
    """Return whether a block describes only the KV cache and no weight format."""
    return any(block.get(key) for key in _CACHE_ENTRIES) and not block.get("quant_algo")


def _find_block(config: Mapping[str, object]) -> tuple[Mapping[str, object] | None, bool]:
    """Return the quantisation block, and whether it is in a nested part, whose module names may be relative to it."""
    blocks = {where: block for where, block in _blocks(config) if block}
    for where, block in blocks.items():
        if not isinstance(block, dict):
            raise ConfigError(f"config.json: {where} is {block!r:.200}, allowed is an object")
    if not blocks:
        return None, False
    where, block = next(iter(blocks.items()))
    if any(other != block for other in blocks.values()):
        raise ConfigError(f"config.json: {' and '.join(blocks)} differ; keep the one that describes the tensors")
    return object_of(block), where != _BLOCK


def _blocks(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield name and value of the entry at the top and in each nested part up to the text model's (``text_of``)."""
    yield _BLOCK, config.get(_BLOCK)
    head = ""
    for key in NESTED:
        if isinstance(config.get(key), dict):
            config = object_of(config[key])
            head = f"{head}{key}."
            yield head + _BLOCK, config.get(_BLOCK)


def _names(path: str, *, nested: bool) -> tuple[str, ...]:
    """Return the names that a block may use for a module; a nested block may omit the wrapper of the text model."""
    _, separator, rest = path.partition("layers.")
    return (path, f"model.layers.{rest}", f"layers.{rest}") if nested and separator else (path,)


def _float_format(config: Mapping[str, object]) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise ConfigError(f"config.json: dtype is {dtype!r}, known are {', '.join(_FLOATS)}")
    return _FLOATS[name]


def _module_names(block: Mapping[str, object], key: str) -> list[str]:
    names = block.get(key) or []
    items = cast("list[object]", names) if isinstance(names, list) else [None]
    if any(not isinstance(item, str) for item in items):
        raise _block_error(f"{key} is {names!r:.200}, allowed is a list of module names")
    return cast("list[str]", items)


def _is_skipped(block: Mapping[str, object], path: str) -> bool:
    keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
    return any(_matches(entry, path) for key in keys for entry in _module_names(block, key))


def _matches(entry: str, path: str) -> bool:
    """Return whether a skip-list entry covers ``path``: ``re:`` pattern, wildcard, or consecutive path components."""
    if entry.startswith("re:"):
        return matches_prefix(entry.removeprefix("re:"), path)
    steps = path.split(".")
    if "*" in entry or "?" in entry:
        return any(fnmatchcase(".".join(steps[:stop]), entry) for stop in range(1, len(steps) + 1))
    # Whole components only: "mlp.gate" is the router and must not cover "mlp.gate_proj".
    return f".{entry.strip('.')}." in f".{path}."


def _block_size(block: Mapping[str, object], key: str) -> tuple[int, int]:
    size = block.get(key)
    items = cast("list[object]", size) if isinstance(size, list | tuple) else []
    if len(items) != 2 or not all(_is_size(n) for n in items):
        raise _block_error(
            f"{key} is {size!r}, allowed are two integers from 1 to {_MAX_COLUMNS}, for instance [128, 128]"
        )
    rows, columns = cast("list[int]", items)
    return rows, columns


def experts_apart(config: Mapping[str, object]) -> bool:
    """Return whether the format of the experts is declared apart from that of all other modules (DeepSeek-V4)."""
    fp8 = method_of(quantization_block(config) or {}) == "fp8"
    return fp8 and config.get("model_type") in ("deepseek_v4", "deepseek_v41")


def _fp8(config: Mapping[str, object], block: Mapping[str, object], path: str) -> Declared:
    # DeepSeek-V4's block does not cover the routed experts; "shared_experts" is a different path component.
    if experts_apart(config) and "experts" in path.split("."):
        dtype = config.get("expert_dtype") or block.get("expert_dtype") or "fp4"
        algorithm = block.get("moe_quant_algo") or "MXFP4"
        fp4_format = {"MXFP4": "mxfp4", "NVFP4": "nvfp4"}.get(str(algorithm).upper())
        if dtype not in ("fp4", "fp8") or (dtype == "fp4" and fp4_format is None):
            raise ConfigError(
                f"config.json: expert_dtype is {dtype!r} and quantization_config has moe_quant_algo {algorithm!r}; "
                "allowed are expert_dtype fp8, or fp4 with moe_quant_algo NVFP4 or none"
            )
        if dtype == "fp4":
            return Declared(format=fp4_format, method="fp8")
    if block.get("weight_block_size") is None:
        return Declared(format="fp8_tensor", method="fp8")
    return Declared(format="fp8_block", method="fp8", block=_block_size(block, "weight_block_size"))


def _modelopt(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    if block.get("quant_algo") is None and _only_caches(block):
        return plain
    entry = block
    algorithm = str(block.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        mixed = _mixed_entry(block, path)
        if mixed is None:
            return plain
        entry = mixed
        algorithm = str(mixed.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        raise _block_error(f"quant_algo is {algorithm!r}, known are {', '.join(_MODELOPT)}, MIXED_PRECISION")
    name, storage, activations = _MODELOPT[algorithm]
    if entry.get("has_zero_point"):
        raise _block_error(f"quant_algo {algorithm} has has_zero_point={entry['has_zero_point']!r}, allowed is false")
    return Declared(
        format=name,
        method="modelopt",
        block=(128, 128) if name == "fp8_block" else None,
        group=_group_size(entry) if name == "int4_group" else None,
        storage=storage,
        static_activations=activations,
    )


def _mixed_entry(block: Mapping[str, object], path: str) -> Mapping[str, object] | None:
    """Return the entry of a mixed-precision table for the module, or for the longest prefix of its path."""
    layers = object_of(block.get("quantized_layers"))
    steps = path.split(".")
    for stop in range(len(steps), 0, -1):
        name = ".".join(steps[:stop])
        if name in layers:
            return object_of(layers[name], {"quant_algo": ""})
    return None


def mixed_algorithms(config: Mapping[str, object], paths: Iterable[str]) -> dict[str, str]:
    """Return the algorithms that ModelOpt's mixed precision declares for modules: algorithm to first module path.

    The algorithm of an unlisted module is ``none``. Returns an empty dict for every other method.
    """
    block = quantization_block(config) or {}
    algorithm = str(block.get("quant_algo")).upper()
    if (method_of(block), algorithm) != ("modelopt", "MIXED_PRECISION"):
        return {}
    algorithms: dict[str, str] = {}
    for path in paths:
        entry = _mixed_entry(block, path)
        algorithms.setdefault("none" if entry is None else str(entry.get("quant_algo")).upper(), path)
    return algorithms


def _compressed_tensors(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    groups = block.get("config_groups")
    transforms = object_of(block.get("transform_config")).get("config_groups")
    if transforms:
        raise _block_error(
            f"transform_config is {transforms!r:.200}, allowed is none: inputs would have to be transformed too"
        )
    schemes = [object_of(entry) for entry in object_of(groups).values() if isinstance(entry, dict)]
    if not groups and _only_caches(block):
        return plain
    if not schemes:
        raise _block_error(f"config_groups is {groups!r:.200}, expected at least one group with 'weights'")
    weights = object_of(_find_scheme(schemes, path)).get("weights")
    return _weight_arguments(object_of(weights)) if isinstance(weights, dict) else plain


def _find_scheme(schemes: Sequence[Mapping[str, object]], path: str) -> Mapping[str, object] | None:
    """Return the scheme for a module: the first with a matching name or pattern, else by the module's class."""
    kind = "Embedding" if "embed" in path.rpartition(".")[2] else "Linear"
    classes = ("Linear", "Embedding")
    named = (s for s in schemes if any(_matches(t, path) for t in _module_names(s, "targets") if t not in classes))
    general = (s for s in schemes if kind in (_module_names(s, "targets") or [kind]))
    return next(chain(named, general), None)


def _weight_arguments(weights: Mapping[str, object]) -> Declared:
    kind = weights.get("type", "int")
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    order = weights.get("actorder")
    if symmetric not in (True, False) or order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise _block_error(
            f"weights with symmetric={symmetric!r} and actorder={order!r}; allowed are true and "
            "false, and group, dynamic, weight, static or null"
        )
    ordered = strategy == "group" and order in (True, "group", "dynamic")
    for row_kind, row_bits, row_strategy, row_size, name in _COMPRESSED:
        if (kind, bits, strategy) == (row_kind, row_bits, row_strategy) and row_size in (None, size):
            return Declared(
                format=_integer_format(name, symmetric=symmetric is True, ordered=ordered) if kind == "int" else name,
                method="compressed-tensors",
                block=_block_size(weights, "block_structure") if name == "fp8_block" else None,
                group=_group_size(weights) if strategy == "group" and size is not None else None,
                storage="compressed-tensors-asymmetric" if kind == "int" and not symmetric else None,
            )
    known = "; ".join(f"{k} {b} bits {s}{f' of {g}' if g else ''}" for k, b, s, g, _ in _COMPRESSED)
    raise _block_error(f"weights are {kind} {bits} bits {strategy} of {size}, known are {known}")


def _integer_format(name: str, *, symmetric: bool, ordered: bool) -> str:
    """Return the format of integers: ``name`` if symmetric INT4 in column order, else the affine or ordered one."""
    if name == "int4_group" and symmetric and not ordered:
        return name
    return name.replace("_group", "_ordered" if ordered else "_affine")


def _one_of(block: Mapping[str, object], key: str, allowed: tuple[object, ...]) -> object:
    """Return an entry whose value is one of ``allowed``; the first of them if it is missing."""
    value = block.get(key)
    if value is None:
        value = allowed[0]
    if value not in allowed:
        raise _block_error(f"{key} is {value!r}, allowed are {', '.join(map(repr, allowed))}")
    return allowed[allowed.index(value)]  # normalise 4.0 to 4 and 1 to True


def _group_size(block: Mapping[str, object]) -> int | None:
    """Return the group size, None for -1, a whole row."""
    size = block.get("group_size", -1)
    if size != -1 and not _is_size(size):
        raise _block_error(f"group_size is {size!r}, allowed: 1 to {_MAX_COLUMNS}, or -1 for a whole row")
    return None if size == -1 else cast("int", size)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_COLUMNS


def _gptq(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    for pattern, change in object_of(block.get("dynamic")).items():
        # The first matching pattern decides: "-:" excludes the module, "+:" or no prefix overrides its entries.
        if matches_prefix(pattern.removeprefix("+:").removeprefix("-:").removeprefix("re:"), path):
            if pattern.startswith("-:"):
                return plain
            block = {**block, **object_of(change)}
            break
    if not _is_listed(block, "modules_in_block_to_quantize", path):
        return plain
    ordered = _one_of(block, "desc_act", (False, True)) is True
    # GPTQModel and transformers use both names; the older one takes precedence.
    layout = "format" if block.get("checkpoint_format") is None else "checkpoint_format"
    storage = str(_one_of(block, layout, ("gptq", "gptq_v2")))
    return _gptq_integers(block, "gptq", storage, ordered=ordered)


def _gptq_integers(block: Mapping[str, object], method: str, storage: str, *, ordered: bool = False) -> Declared:
    size = _group_size(block)
    bits = _one_of(block, "bits", (4, 8))
    symmetric = _one_of(block, "sym", (True, False)) is True
    name = _integer_format(f"int{bits}_group", symmetric=symmetric, ordered=ordered and size is not None)
    return Declared(format=name, method=method, group=size, storage=storage)


def _is_listed(block: Mapping[str, object], key: str, path: str) -> bool:
    """Return whether the list of quantised modules covers ``path``; without a list all modules are quantised.

    The list may be nested, or text with commas.
    """
    names = block.get(key)
    if not names:
        return True
    entries = names.split(",") if isinstance(names, str) else [*_flatten(names)]
    if not all(isinstance(entry, str) for entry in entries):
        raise _block_error(f"{key} is {names!r:.200}, allowed is a list of module names")
    return any(_matches(entry.strip(), path) for entry in cast("list[str]", entries))


def _flatten(entry: object) -> Iterator[object]:
    """Yield the leaves of nested lists."""
    if isinstance(entry, list):
        for child in cast("list[object]", entry):
            yield from _flatten(child)
    else:
        yield entry


def _auto_round(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    override = _override(block, path)
    if override is None and not (
        _is_block_listed(block, path) and _is_listed(block, "modules_in_block_to_quantize", path)
    ):
        return plain
    block = {**block, **(override or {})}
    if block.get("bits") in (16, 32):
        return plain
    _one_of(block, "data_type", ("int",))
    _one_of(block, "act_bits", (None, 16, 32))
    for key in ("super_bits", "super_group_size", "transform_config", "hadamard_config", "rotation_config"):
        _one_of(block, key, (None, {}))
    storage = _AUTO_ROUND[_packing(block)]
    if storage != "awq":
        return _gptq_integers(block, "auto-round", storage)
    _one_of(block, "bits", (4,))
    _one_of(block, "sym", (True, False))
    return Declared(format="int4_affine", method="auto-round", group=_group_size(block), storage="awq")


def _packing(block: Mapping[str, object]) -> str:
    """Return AutoRound's packing format, which older releases store in ``backend``."""
    key = "packing_format" if block.get("packing_format") is not None else "backend"
    packing = block.get(key)
    if key == "backend" and not str(packing).startswith("auto_round"):
        packing = None  # a preferred kernel; the packing is the default
    name = str(packing or "auto_round:auto_gptq")
    for kernel in _KERNELS:
        name = name.removesuffix(kernel)
    if name not in _AUTO_ROUND:
        raise _block_error(f"{key} is {packing!r}, allowed are {', '.join(map(repr, _AUTO_ROUND))}")
    return name


def _is_block_listed(block: Mapping[str, object], path: str) -> bool:
    keys = ("block_name_to_quantize", "to_quant_block_names")
    return _is_listed(block, next((key for key in keys if block.get(key)), keys[0]), path)


def _override(block: Mapping[str, object], path: str) -> Mapping[str, object] | None:
    """Return the entries that ``extra_config`` overrides for a module, None without an override.

    Precedence: the module's name or the longest prefix of its path, then the longest name of consecutive path
    components, then the first regular expression that matches anywhere in the path.
    """
    extra_config = block.get("extra_config")
    entries = object_of(extra_config)
    if extra_config and not entries:
        raise _block_error(f"extra_config is {extra_config!r:.200}, allowed is an object of module names")
    name = _override_name(entries, path)
    if name is None:
        return None
    change = entries[name]
    if not isinstance(change, dict):
        raise _block_error(f"extra_config[{name!r}] is {change!r:.200}, allowed is an object")
    return object_of(cast("dict[str, object]", change))


def _override_name(entries: Mapping[str, object], path: str) -> str | None:
    """Return the entry of ``extra_config`` that applies to the module at ``path``, None without one."""
    components = path.split(".")
    for stop in range(len(components), 0, -1):
        prefix = ".".join(components[:stop])
        if prefix in entries:
            return prefix
    patterns = [name for name in entries if _PATTERN.search(name)]
    inside = [name for name in entries if f".{name}." in f".{path}."]
    if inside:
        return max(inside, key=len)
    return next((name for name in patterns if matches_prefix(f".*(?:{name})", path)), None)


def _awq(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    _one_of(block, "bits", (4,))
    for layout in ("version", "format", "checkpoint_format"):
        _one_of(block, layout, ("gemm", "GEMM"))
    _one_of(block, "zero_point", (True,))
    return Declared(format="int4_affine", method="awq", group=_group_size(block), storage="awq")


def _bitsandbytes(block: Mapping[str, object], path: str, plain: Declared) -> Declared:
    if block.get("load_in_8bit") is True and block.get("load_in_4bit") is not True:
        refusal = "the config declares load_in_8bit (bitsandbytes), which is not read; allowed is load_in_4bit"
        return Declared(format=None, method="bitsandbytes", refusal=refusal)
    _one_of({"load_in_4bit": False, **block}, "load_in_4bit", (True,))
    kind = str(_one_of({"bnb_4bit_quant_type": "fp4", **block}, "bnb_4bit_quant_type", ("nf4", "fp4")))
    return Declared(format="bnb4", method="bitsandbytes", storage=kind)


_METHODS: Mapping[str, Callable[[Mapping[str, object], str, Declared], Declared]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
}
