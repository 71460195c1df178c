"""``adapter_config.json`` of PEFT: which modules and parameters a LoRA adapter changes, with which rank and scale.

Source of the rules: PEFT 0.17 to 0.21, ``check_target_module_exists`` and ``_inject_parameters`` in
``tuners/tuners_utils.py``, ``get_pattern_key`` in ``utils/other.py``, ``_create_and_replace`` in
``tuners/lora/model.py`` and ``ParamWrapper`` in ``tuners/lora/layer.py``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

from ..errors import ConfigError
from ..models.name_match import matches_prefix
from .header import read_json

__all__ = ["AdapterConfig"]

# Entries that are read here or change no weight; any other must be empty or false.
_KNOWN_ENTRIES = frozenset(
    (
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    )
)
# Other initialisations, such as "pissa", move a part of the base weights into the adapter.
_ALLOWED_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "use_rslora": (False, True),
}
_DEFAULT_RANK = 8  # of r and lora_alpha, where adapter_config.json lacks them
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_PLAIN = re.compile(r"(?:\w|\.|\\\.)*")  # a pattern that cannot backtrack
_MERGE = "Merge the adapter with PEFT (merge_and_unload) and load the model that it saves"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """The checked contents of ``adapter_config.json`` at ``path``; create it with ``AdapterConfig.read``.

    rank, alpha: ``r`` and ``lora_alpha``. ranks, alphas: the same by pattern (``rank_pattern``, ``alpha_pattern``).
    root_scale: the scale is ``alpha / sqrt(rank)`` instead of ``alpha / rank``. modules: names of targeted modules or
    one regular expression, None where PEFT chose them by the model's class. parameters: names of targeted parameters.
    saved: modules whose weights the adapter replaces (``modules_to_save``).
    excluded: modules that are not targeted, or one regular expression. layers: of ``modules``, None for all of them.
    swapped: whether PEFT swaps input and output of three-dimensional parameters whose class has no ``is_transposed``,
    None where the file does not record the release of PEFT that decides it.
    """

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root_scale: bool
    modules: tuple[str, ...] | str | None
    parameters: tuple[str, ...] | None
    saved: tuple[str, ...]
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layer_patterns: tuple[str, ...]
    swapped: bool | None

    @classmethod
    def read(cls, path: Path) -> "AdapterConfig":
        """Read and check the file; raises ConfigError naming every entry that is not implemented."""
        config = read_json(path)
        unsupported = {key: value for key, value in config.items() if value and key not in _KNOWN_ENTRIES}
        for key, allowed in _ALLOWED_VALUES.items():
            if config.get(key, allowed[0]) not in allowed:
                unsupported[key] = config[key]
        if config.get("eva_config") and config.get("init_lora_weights") != "eva":
            unsupported["eva_config"] = config["eva_config"]
        rank = config.get("r", _DEFAULT_RANK)
        alpha = config.get("lora_alpha", _DEFAULT_RANK)
        ranks = _table(config, "rank_pattern")
        alphas = _table(config, "alpha_pattern")
        if not _is_rank(rank):
            unsupported["r"] = rank
        if not _is_alpha(alpha):
            unsupported["lora_alpha"] = alpha
        if not all(map(_is_rank, ranks.values())):
            unsupported["rank_pattern"] = ranks
        if not all(map(_is_alpha, alphas.values())):
            unsupported["alpha_pattern"] = alphas
        if unsupported:
            listed = ", ".join(f"{key}={value!r:.100}" for key, value in unsupported.items())
            raise ConfigError(
                f"{path}: {listed} is not implemented; allowed is plain LoRA without biases, with r from 1 on and a "
                f"finite lora_alpha, and rank_pattern and alpha_pattern. {_MERGE}"
            )
        modules = _names(config, "target_modules")
        layers = config.get("layers_to_transform")
        if isinstance(modules, str) and layers is not None:
            raise ConfigError(f"{path}: layers_to_transform needs a list of target_modules, found {modules!r:.100}")
        layer_patterns = _names(config, "layers_pattern") or ()
        return cls(
            path=path,
            rank=cast("int", rank),
            alpha=float(cast("float", alpha)),
            ranks=cast("Mapping[str, int]", ranks),
            alphas=cast("Mapping[str, float]", alphas),
            root_scale=bool(config.get("use_rslora")),
            modules=modules,
            parameters=_list(config, "target_parameters"),
            saved=_list(config, "modules_to_save") or (),
            excluded=_names(config, "exclude_modules") or (),
            layers=_layers(path, layers),
            layer_patterns=(layer_patterns,) if isinstance(layer_patterns, str) else layer_patterns,
            swapped=_swaps_in_out(str(config.get("peft_version"))),
        )

    def changes_module(self, key: str) -> bool:
        """Return whether module ``key``, its path in the model in memory, is targeted."""
        return self._targets(key) and not self.excluded_by(key)

    def excluded_by(self, key: str) -> str:
        """Return the name of the entry that excludes module ``key``, empty where none does."""
        if self.saves_module(key):
            return "modules_to_save"
        if isinstance(self.excluded, str):
            return "exclude_modules" if self._matches(f"(?:{self.excluded})\\Z", key) else ""
        if key in self.excluded or _ends_in(key, self.excluded):
            return "exclude_modules"
        named_in_list = isinstance(self.modules, tuple) and key not in self.modules and _ends_in(key, self.modules)
        return "layers_to_transform" if named_in_list and not self._in_layers(key) else ""

    def changes_parameter(self, key: str) -> bool:
        """Return whether parameter ``key``, its path in the model in memory, is targeted."""
        names = self.parameters or ()
        return key in names or _ends_in(key, names)

    def saves_module(self, key: str, *names: str) -> bool:
        """Return whether the weights of module ``key`` are replaced; names: entries to check, by default all."""
        return any(self._matches(f"(?:.*\\.)?(?:{name})(?:\\Z|\\.)", key, name) for name in names or self.saved)

    def rank_and_scale(self, key: str) -> tuple[int, float]:
        """Return rank and scale of the module or parameter at path ``key``."""
        rank = self.ranks.get(self._pattern(tuple(self.ranks), key), self.rank)
        alpha = self.alphas.get(self._pattern(tuple(self.alphas), key), self.alpha)
        return rank, alpha / (rank**0.5 if self.root_scale else rank)

    def _targets(self, key: str) -> bool:
        modules = self.modules
        if modules is None:
            return self.parameters is None
        if isinstance(modules, str):
            return modules.lower() == "all-linear" or self._matches(f"(?:{modules})\\Z", key)
        return key in modules or _ends_in(key, modules)

    def _in_layers(self, key: str) -> bool:
        if self.layers is None:
            return True
        if not self.layer_patterns:
            match = _LAYER.match(key)
            return match is not None and int(match[1]) in self.layers
        pieces = key.split(".")
        numbered = [at for at, piece in enumerate(pieces[:-1]) if piece.isdigit()]
        for pattern in self.layer_patterns:
            for at in numbered:
                if self._matches(f"(?:.*\\.)?(?:{pattern})\\Z", ".".join(pieces[:at])):
                    return int(pieces[at]) in self.layers
        return False

    def _pattern(self, patterns: tuple[str, ...], key: str) -> str:
        """Return the first pattern that matches the end of ``key`` from a dot or its beginning on, else ``key``."""
        return next((pattern for pattern in patterns if self._matches(f"(.*\\.)?({pattern})$", key, pattern)), key)

    def _matches(self, pattern: str, key: str, inner: str = "*") -> bool:
        return _matches(pattern, key, str(self.path), plain=_PLAIN.fullmatch(inner) is not None)


@lru_cache(maxsize=1 << 16)
def _matches(pattern: str, text: str, where: str, *, plain: bool) -> bool:
    return re.match(pattern, text) is not None if plain else matches_prefix(pattern, text, where=where)


def _ends_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key.endswith(f".{name}") for name in names)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 24


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _table(config: Mapping[str, object], entry: str) -> dict[str, object]:
    table = config.get(entry) or {}
    return cast("dict[str, object]", table) if isinstance(table, dict) else {entry: table}


def _list(config: Mapping[str, object], entry: str) -> tuple[str, ...] | None:
    entries = config.get(entry)
    if entries is None:
        return None
    names = cast("list[object]", entries) if isinstance(entries, list) else []
    if not isinstance(entries, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"adapter_config.json: {entry} is {entries!r:.100}, allowed is a list of names")
    return tuple(str(name) for name in names)


def _names(config: Mapping[str, object], entry: str) -> tuple[str, ...] | str | None:
    """Return a list of names, or the text of a regular expression."""
    names = config.get(entry)
    return names if isinstance(names, str) else _list(config, entry)


def _layers(path: Path, entry: object) -> tuple[int, ...] | None:
    """Return the layers of ``layers_to_transform``, None for every layer."""
    numbers = cast("list[object]", entry) if isinstance(entry, list) else [entry]
    if entry is None or not numbers:
        return None
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ConfigError(f"{path}: layers_to_transform is {entry!r:.100}, allowed are numbers of layers")
    return tuple(cast("list[int]", numbers))


def _swaps_in_out(version: str) -> bool | None:
    """Return whether this release of PEFT swaps input and output; 0.19.0 was the first to do so.

    Returns None for builds between 0.18.0 and 0.19.0, which may or may not, and for text that is no release.
    """
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(\.?(?:dev|rc|a|b))?", version)
    if match is None:
        return None
    number = int(match[1]), int(match[2]), int(match[3])
    if match[4] and (0, 18, 1) <= number <= (0, 19, 0):
        return None
    return number >= (0, 19, 0)
