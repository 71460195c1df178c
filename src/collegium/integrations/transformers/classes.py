"""Which class of transformers a checkpoint is, and the config it is built from."""

from typing import Any

from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError
from ...models import family_of
from ..extra import extra
from .gguf import config_of

__all__ = ["class_and_config"]

# Published under a model type of their own, with code that is that of a class transformers has.
_SAME = {"kimi_k2": "deepseek_v3"}
_NOT_OF_THE_CLASS = ("model_type", "auto_map", "quantization_config")
# The class holds experts apart from those of the text model.
_MORE_EXPERTS = {
    "qwen3_omni_moe": "its class in transformers also has a speech model with experts of its own, which are not read"
}


def class_and_config(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return the model class of transformers and its config, without a quantisation block.

    Raises ConfigError for a checkpoint without ``config.json``, for a GGUF file of an architecture that is not known,
    and where transformers has no class that writes text for the model type, naming what to use instead.
    """
    folder, kind = checkpoint.folder, checkpoint.config.get("model_type")
    if not checkpoint.config:
        raise ConfigError(
            f"{folder}: has no config.json; a whole model is loaded from a folder with config.json and safetensors. "
            "Give the folder that holds both, or download config.json into it"
        )
    family_of(checkpoint.config)
    if kind in _MORE_EXPERTS:
        raise ConfigError(_cannot(str(kind), _MORE_EXPERTS[str(kind)]))
    config = _config(checkpoint)
    transformers = extra("transformers")
    for table in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in table:
            return _fitting(table[type(config)], config)
    has = f"transformers {transformers.__version__} has no class that writes text for it"
    raise ConfigError(_cannot(str(kind), has))


def _config(checkpoint: Checkpoint) -> Any:
    transformers, kind = extra("transformers"), str(checkpoint.config.get("model_type"))
    folder = checkpoint.folder
    if checkpoint.is_gguf:
        kind, entries = config_of(checkpoint)
        return transformers.AutoConfig.for_model(kind, **entries)
    try:
        if kind in _SAME or not (folder / "config.json").exists():
            entries = {key: value for key, value in checkpoint.config.items() if key not in _NOT_OF_THE_CLASS}
            config = transformers.AutoConfig.for_model(_SAME.get(kind, kind), **entries)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and its config classes raise errors of many kinds
        if kind not in transformers.CONFIG_MAPPING:
            has = f"transformers {transformers.__version__} does not know this model type"
            raise ConfigError(_cannot(kind, has)) from error
        raise ConfigError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it as {kind!r}: "
            f"{str(error).strip()}; correct the entry, or install a release of transformers that reads it"
        ) from error
    _drop_quantization(config)
    return config


def _drop_quantization(config: Any) -> None:
    """Remove the quantisation block from a config and its nested configs: the weights that it is given are decoded."""
    vars(config).pop("quantization_config", None)
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for part in parts:
        if part is not None and not isinstance(part, dict):
            _drop_quantization(part)


def _fitting(cls: Any, config: Any) -> tuple[Any, Any]:
    """Return the class with the config it asks for: the text part, where the class is of the text model alone."""
    parts = getattr(config, "sub_configs", {})
    if cls.config_class is not type(config) and cls.config_class is parts.get("text_config"):
        config = config.get_text_config()
    return cls, config


def _cannot(kind: str, reason: str) -> str:
    return (
        f"model_type {kind!r} cannot be loaded as a whole model: {reason}; load its layers with load_layer(), "
        "and see docs/families.md for the families that load whole"
    )
