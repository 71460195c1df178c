"""Find the transformers class and config of a checkpoint."""

from typing import Any

from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError
from ...models import DerivedFamily, family_of
from ...models.derived import config_of_class
from ..extra import import_extra
from .gguf import config_of
from .text_models import multimodal_config, text_config_of

__all__ = ["class_and_config"]

# Model types of checkpoints whose code is identical to that of another model type in transformers.
_SAME_CLASS = {"kimi_k2": "deepseek_v3", "minimax_m3": "minimax_m3_vl_text", "step3p7_text": "step3p5"}
_DROPPED_ENTRIES = ("model_type", "auto_map", "quantization_config")
_ROTARY = "its attention rotates rotary_dim of each head's columns, transformers' class for minimax all of them"
# Model types whose files transformers cannot run, although it may have a similar class.
_OTHER_CODE = {
    "kimi_k3": "transformers has KimiLinearForCausalLM, without the latent width, the norm and the SiTU of Kimi-K3",
    "minimax_m1": _ROTARY,
    "minimax_text_01": _ROTARY,
    "minimax_vl_01": _ROTARY,
}


def class_and_config(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return the model class of transformers and its config, without a quantisation block.

    A text model whose class has no head gets the multimodal class around it, see ``text_models``, unless its
    ``architectures`` is the class without a head, whose output is the last hidden state.

    Raises ConfigError for a checkpoint without ``config.json``, for a GGUF file of an unsupported architecture, and if
    transformers has no text generation class for the model type; the message names the alternative.
    """
    folder = checkpoint.folder
    model_type = str(checkpoint.config.get("model_type"))
    if not checkpoint.config:
        raise ConfigError(
            f"{folder}: has no config.json; a whole model is loaded from a folder with config.json and safetensors. "
            "Give the folder that has both, or download config.json into it"
        )
    family = family_of(checkpoint.config)
    if model_type in _OTHER_CODE:
        raise ConfigError(_not_loadable(model_type, _OTHER_CODE[model_type]))
    config = text_config_of(_config(checkpoint))
    transformers = import_extra("transformers")
    if isinstance(family, DerivedFamily) and config.model_type == family.name:
        cls = getattr(transformers, family.class_name)
        return cls, config_of_class(cls, config)
    for table in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in table:
            cls = table[type(config)]
            return cls, config_of_class(cls, config)
    headless = transformers.MODEL_MAPPING.get(type(config), None)
    if headless is not None and config.architectures == [headless.__name__]:
        return headless, config
    wrapped = multimodal_config(config)
    if wrapped is not None:
        return transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(wrapped)], wrapped
    reason = f"transformers {transformers.__version__} has no text generation class for it"
    raise ConfigError(_not_loadable(model_type, reason))


def _config(checkpoint: Checkpoint) -> Any:
    transformers = import_extra("transformers")
    folder = checkpoint.folder
    if checkpoint.is_gguf:
        gguf_type, entries = config_of(checkpoint)
        return transformers.AutoConfig.for_model(gguf_type, **entries)
    model_type = str(checkpoint.config.get("model_type"))
    try:
        if model_type in _SAME_CLASS or not (folder / "config.json").exists():
            entries = {key: value for key, value in checkpoint.config.items() if key not in _DROPPED_ENTRIES}
            config = transformers.AutoConfig.for_model(_SAME_CLASS.get(model_type, model_type), **entries)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and its config classes raise many classes
        if model_type not in transformers.CONFIG_MAPPING:
            reason = f"transformers {transformers.__version__} does not support this model type"
            raise ConfigError(_not_loadable(model_type, reason)) from error
        raise ConfigError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it as {model_type!r}: "
            f"{str(error).strip()}; correct the entry, or install a release of transformers that reads it"
        ) from error
    _drop_quantization(config)
    return config


def _drop_quantization(config: Any) -> None:
    """Remove the quantisation block from a config and its nested configs, since transformers gets decoded weights."""
    vars(config).pop("quantization_config", None)
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for part in parts:
        if part is not None and not isinstance(part, dict):
            _drop_quantization(part)


def _not_loadable(model_type: str, reason: str) -> str:
    return (
        f"model_type {model_type!r} cannot be loaded as a whole model: {reason}; load its layers with load_layer(). "
        "docs/families.md lists the families that load as whole models"
    )
