"""What a model of ``load_model`` refuses, because its experts are in layers that transformers does not see."""

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...errors import InputError
from .blocks import blocks_of
from .modules import experts_modules
from .plugin import NAME

__all__ = ["seal"]


def seal(model: Any, path: Path) -> None:
    """Let ``model``, loaded from ``path``, refuse to be saved, moved, and to run its experts otherwise.

    All are InputErrors: its experts' own parameters hold nothing.
    """
    for way, named in (("to", None), ("cuda", "cuda"), ("cpu", "cpu")):
        setattr(model, way, partial(_stay, model, named))
    for module in model.modules():
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation = _keep_implementation  # type: ignore[assignment]
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = partial(_refuse_to_save, str(path))  # type: ignore[assignment]
    for experts in experts_modules(model).values():
        experts.register_forward_pre_hook(_refuse_other_ways)
    if blocks_of(model):
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.output_router_logits = False
        model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)


def _keep_implementation(experts_implementation: str | dict[str, str]) -> None:
    asked = experts_implementation
    names = set(asked.values()) if isinstance(asked, dict) else {asked}
    if names - {NAME}:
        raise _only_ours(sorted(map(str, names - {NAME}))[0])


def _stay(model: Any, named: str | None, *asked: Any, **others: Any) -> Any:
    """Return the model where it is asked to be where and what it is, else refuse."""
    for one in [*asked, *others.values()] or [named]:
        if isinstance(one, torch.dtype):
            same = one == model.dtype
        elif isinstance(one, torch.device | str | int) and not isinstance(one, bool):
            same = (f"cuda:{one}" if isinstance(one, int) else str(one)) in (str(model.device), model.device.type)
        else:
            continue
        if not same:
            raise InputError(
                f"a model loaded by load_model() was to be moved or converted to {one}; it is {model.dtype} on "
                f"{model.device}, and packed experts do neither. Load it again with load_model(..., device=...)"
            )
    return model


def _refuse_other_ways(module: Any, _: object) -> None:
    if module.config._experts_implementation != NAME:
        raise _only_ours(module.config._experts_implementation)


def _refuse_router_logits(_: Any, __: object, others: dict[str, Any]) -> None:
    if others.get("output_router_logits"):
        raise InputError(
            "output_router_logits=True was asked of a model whose blocks are layers of Collegium, which return no "
            "router logits; leave it out, or load the model with from_pretrained()"
        )


def _only_ours(asked: str) -> InputError:
    return InputError(
        f"experts_implementation={asked!r} was asked of a model loaded by load_model(); allowed: {NAME!r}. Its experts "
        "are packed in Collegium's layers and transformers holds no weights of them; load the model with "
        f"from_pretrained(..., experts_implementation={asked!r}) to run them in another way"
    )


def _refuse_to_save(path: str, *_: object, **__: object) -> NoReturn:
    raise InputError(
        "save_pretrained was called on a model loaded by load_model(), whose experts are packed in Collegium's layers "
        f"and would be missing in the files. The files of this model are those of {path}: copy them, or write its "
        f"experts in another format with: collegium quantize {path} --to FORMAT"
    )
