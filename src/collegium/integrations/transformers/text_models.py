"""Text models that are published alone, or inside a model with speech, and have no text generation class.

transformers has only a multimodal class with a head for them. Its towers for images and sound are removed before the
weights are loaded, and the tensors are renamed.
"""

from typing import Any

from ...models.in_memory import text_path
from ..extra import import_extra

__all__ = ["multimodal_config", "name_in_memory", "remove_towers", "text_config_of", "text_only", "unread_parts"]

# By the model type of the text model: the model type around it.
_AROUND = {
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe",
    "glm4v_moe_text": "glm4v_moe",
    "glm5_next_text": "glm5_next",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "step3p5": "step3p7",
}
# By the model type of a model that also speaks: the entry and the prefix of the part that writes text.
_WRITES = {"qwen3_omni_moe": ("thinker_config", "thinker.")}
_MARK = "collegium_text_only"


def text_config_of(config: Any) -> Any:
    """Return the config of the part that writes text for a model that also speaks, else ``config``."""
    entry, _ = _WRITES.get(config.model_type, ("", ""))
    return getattr(config, entry) if entry else config


def unread_parts(model_type: str) -> tuple[str, ...]:
    """Return a sentence about the parts of a model type that are not loaded, if there are any."""
    if model_type not in _WRITES:
        return ()
    prefix = _WRITES[model_type][1]
    return (f"only tensors below {prefix!r} are loaded, which write text; the model does not speak",)


def multimodal_config(config: Any) -> Any | None:
    """Return the config of the multimodal model around a text model's, None if there is none; see ``remove_towers``."""
    outer = _AROUND.get(config.model_type)
    if outer is None:
        return None
    cls = import_extra("transformers").CONFIG_MAPPING[outer]
    wrapped = cls(text_config=config.to_dict(), tie_word_embeddings=getattr(config, "tie_word_embeddings", False))
    if not hasattr(wrapped, "vision_start_token_id"):
        wrapped.vision_start_token_id = -1  # no token starts an image; generation with Qwen3-Omni reads the entry
    setattr(wrapped, _MARK, True)
    return wrapped


def text_only(config: Any) -> bool:
    """Return whether ``config`` was made by ``multimodal_config``."""
    return hasattr(config, _MARK)


def remove_towers(model: Any) -> None:
    """Remove everything but the text model and the head from a multimodal model."""
    body = model.model
    for parent, kept in ((model, {"model", "lm_head"}), (body, {"language_model"})):
        if hasattr(body, "language_model"):
            for name in [name for name, _ in parent.named_children() if name not in kept]:
                setattr(parent, name, None)


def name_in_memory(model_type: str, config: Any, name: str) -> str | None:
    """Return the name of tensor ``name`` of the files for the class, None for a part that is not loaded.

    model_type: of the files. config: of the class.
    """
    if model_type in _WRITES:
        prefix = _WRITES[model_type][1]
        return name.removeprefix(prefix) if name.startswith(prefix) else None
    if not text_only(config):
        return name
    path = text_path(name)
    return path if path.startswith("lm_head.") else f"model.language_model.{path}"
