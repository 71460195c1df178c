"""Build the class of a model type in the installed transformers without memory, and find its layers with experts."""

import importlib
import importlib.util
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ..base import is_wrapped
from .parallel_experts import check_parallel_experts, replace_parallel_experts

__all__ = [
    "ClassLayer",
    "ClassModel",
    "build",
    "class_of",
    "config_of_class",
    "has_identity_experts",
    "installed_release",
]

_MAX_COUNT = 1 << 14
_DROPPED_ENTRIES = ("model_type", "auto_map", "quantization_config", "architectures", "transformers_version")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassLayer:
    """One layer with experts of a model on the meta device.

    number: index of the layer. prefix: path of the layer in memory, with a trailing dot. experts_path: path of the
    experts module. block_path: path of the module that calls the experts.
    """

    number: int
    prefix: str
    experts_path: str
    block_path: str
    experts: Any
    block: nn.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassModel:
    """A model on the meta device with its config, and its layers with experts in order."""

    model_type: str
    model: Any
    config: Any
    layers: tuple[ClassLayer, ...]

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self.model).__name__

    @property
    def text_config(self) -> Any:
        """The config of the text model."""
        return self.config.get_text_config()


def installed_release(model_type: str) -> str | None:
    """Return the installed release of transformers if it has a config class for ``model_type``, else None."""
    if importlib.util.find_spec("transformers") is None:
        return None
    transformers = importlib.import_module("transformers")
    return str(transformers.__version__) if model_type in transformers.CONFIG_MAPPING else None


def build(model_type: str, config: Mapping[str, object]) -> ClassModel:
    """Build the class of ``model_type`` from ``config``; raises ConfigError, with the reason, if that is not possible.

    model_type: of the whole config. No weight is allocated or read, and code in a repository is not run.
    """
    transformers = importlib.import_module("transformers")
    entries = {key: value for key, value in config.items() if key not in _DROPPED_ENTRIES}
    where = f"config.json of model_type {model_type!r}"
    _refuse_large_counts(entries, where)
    with _quiet(transformers):
        try:
            class_config = transformers.AutoConfig.for_model(model_type, **entries)
            cls = class_of(transformers, class_config, config.get("architectures"))
            class_config = config_of_class(cls, class_config)
            with torch.device("meta"):
                model = cls(class_config)
        except Exception as error:  # config and model classes raise many classes
            raise ConfigError(
                f"{where}: transformers {transformers.__version__} cannot build its class: {type(error).__name__}: "
                f"{str(error).strip()[:300]}; correct the entry, or install a release of transformers that reads it"
            ) from error
    check_parallel_experts(model)
    replace_parallel_experts(model)
    for module in model.modules():
        if has_identity_experts(module):
            _mark_as_experts(module, class_config.get_text_config())
    layers = tuple(_layers_of(model, where))
    return ClassModel(model_type=model_type, model=model, config=class_config, layers=layers)


def config_of_class(cls: Any, config: Any) -> Any:
    """Return the text part of ``config`` if ``cls`` is a text model of a multimodal config, else ``config``."""
    text = getattr(config, "sub_configs", {}).get("text_config")
    return config.get_text_config() if cls.config_class is not type(config) and cls.config_class is text else config


def has_identity_experts(module: object) -> bool:
    """Return whether ``module`` holds stacks of experts and lets further ids stand for the identity (LongCat-Flash)."""
    stacks = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return hasattr(module, "identity_expert") and all(isinstance(s, nn.Parameter) and s.dim() == 3 for s in stacks)


def _mark_as_experts(module: Any, config: Any) -> None:
    """Give an experts module that cannot be exchanged the attributes of those that can; gate rows come first."""
    module.config = config
    module.is_concatenated, module.has_gate = True, True
    module.is_transposed, module.has_bias = False, False
    activation = module.act_fn

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    module._apply_gate = apply_gate


def class_of(transformers: Any, config: Any, architectures: object) -> Any:
    """Return the class of a config: of its architectures, for text generation, for images and text, or any other.

    Raises LookupError if there is none.
    """
    for name in architectures if isinstance(architectures, list) else ():  # pyright: ignore[reportUnknownVariableType]
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if getattr(cls, "config_class", None) is type(config):
            return cls
    first = ["MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"]
    others = sorted(name for name in dir(transformers) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING"))
    for name in (*first, *others, "MODEL_MAPPING"):
        table = getattr(transformers, name)
        if type(config) in table:
            cls = table[type(config)]
            return cls[0] if isinstance(cls, tuple) else cls
    raise LookupError(f"no class has the config {type(config).__name__}")


def _refuse_large_counts(entries: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for numbers of layers or experts that no model has, before a class is built from them."""
    for key, value in entries.items():
        if isinstance(value, dict):
            _refuse_large_counts(value, where)
        elif isinstance(value, int) and value > _MAX_COUNT and ("layers" in key or "experts" in key):
            raise ConfigError(f"{where}: {key} is {value}, allowed are at most {_MAX_COUNT}")


def _layers_of(model: nn.Module, where: str) -> Iterator[ClassLayer]:
    """Yield the layers of the text model that have experts; raises ConfigError where that is ambiguous."""
    by_prefix: dict[str, list[ClassLayer]] = {}
    for path, module in model.named_modules():
        pieces = path.split(".")
        position = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
        if position is None or not (hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate")):
            continue
        block_path = path.rpartition(".")[0]
        layer = ClassLayer(
            number=int(pieces[position]),
            prefix=".".join(pieces[: position + 1]) + ".",
            experts_path=path,
            block_path=block_path,
            experts=module,
            block=model.get_submodule(block_path),
        )
        by_prefix.setdefault(".".join(pieces[:position]) + ".", []).append(layer)
    if not by_prefix:
        raise ConfigError(f"{where}: {_no_experts(model)}")
    texts = [prefix for prefix in by_prefix if is_wrapped(prefix, prefix.split(".")[-2] + ".")]
    if len(by_prefix) > 1 and len(texts) != 1:
        raise ConfigError(
            f"{where}: {type(model).__name__} has experts below {', '.join(map(repr, by_prefix))}, and which of them "
            "are the text model's is not known; a family in a file has to name them"
        )
    layers = by_prefix[texts[0] if texts else next(iter(by_prefix))]
    paths = {layer.experts_path.removeprefix(layer.prefix) for layer in layers}
    if len(paths) != 1 or len({layer.number for layer in layers}) != len(layers):
        raise ConfigError(
            f"{where}: {type(model).__name__} has several experts modules in a layer, {', '.join(sorted(paths))}; a "
            "family in a file has to tell which of them a token takes"
        )
    yield from layers


def _no_experts(model: nn.Module) -> str:
    names = [name for name, _ in model.named_parameters() if "expert" in name.lower() or "router" in name.lower()]
    listed = ", ".join(dict.fromkeys(".".join("N" if p.isdigit() else p for p in n.split(".")) for n in names[:400]))
    name = type(model).__name__
    if not names:
        return f"this model is dense (no experts): transformers' class {name} has none; load it with transformers"
    return f"transformers' class {name} has no experts module that can be replaced; found {listed[:400]}"


@contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """Silence transformers' remarks about defaults while a config and a model without weights are built."""
    logging = transformers.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
