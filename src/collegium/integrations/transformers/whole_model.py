"""Whole models: transformers runs everything but the experts, which never pass through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from ...checkpoint.audit import check_outside_experts
from ...checkpoint.problems import refuse
from ...checkpoint.reader import Checkpoint
from ...devices import probe
from ...errors import ConfigError, MissingTensorError
from ...formats.unquantised import FLOAT_FORMATS
from ...loading import load_routed
from ...models import family_of
from ..extra import extra
from .modules import experts_modules
from .plugin import NAME, attach, register

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ...layer import MoELayer
    from ...types import Choice, Limits

__all__ = ["build_layers", "load_model"]

# Where transformers names a module otherwise than the published checkpoint does: family -> {theirs: published}.
RENAMED: dict[str, dict[str, str]] = {"mixtral": {".mlp.": ".block_sparse_moe."}}


def load_model(
    path: str,
    *,
    weight_format: str | None = None,
    force: Choice | None = None,
    device: str | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Load a causal language model whose experts run through Collegium in their published format.

    weight_format: encode the experts into this format instead. force: kernel or activation format. progress: called
    with (done, total, what). Raises CheckpointError kinds, PlanError, and MissingExtraError without transformers.
    """
    checkpoint = Checkpoint.open(path)
    refuse(checkpoint, check_outside_experts(checkpoint))
    model = _skeleton(path)
    _load_rest(model, checkpoint, probe(device).place)
    attach(
        model,
        build_layers(
            checkpoint,
            weight_format=weight_format,
            force=force,
            device=device,
            limits=limits,
            progress=progress,
        ),
    )
    return model


def build_layers(
    checkpoint: Checkpoint,
    *,
    weight_format: str | None = None,
    force: Choice | None = None,
    device: str | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[int, MoELayer]:
    """Read, audit, plan and pack the routed experts of every MoE layer, one layer in memory beyond the packed ones.

    The layers hold no router and no shared expert: transformers keeps those. Arguments and errors as ``load_model``.
    """
    indices = family_of(checkpoint.config).moe_layers(checkpoint.config)
    layers: dict[int, MoELayer] = {}
    for done, index in enumerate(indices):
        if progress is not None:
            progress(done, len(indices), f"layer {index}")
        layers[index] = load_routed(
            checkpoint, index, weight_format=weight_format, force=force, device=device, limits=limits
        )
    if progress is not None:
        progress(len(indices), len(indices), "done")
    return layers


def _skeleton(path: str) -> nn.Module:
    """Build the model with every parameter on the meta device and every buffer real."""
    register()
    transformers, accelerate = extra("transformers"), extra("accelerate")
    config = transformers.AutoConfig.from_pretrained(path)
    config._experts_implementation = NAME
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return cast("nn.Module", model.eval())


def _load_rest(model: Any, checkpoint: Checkpoint, device: str) -> None:
    """Fill every parameter outside the experts, refusing missing and quantised ones."""
    renames = RENAMED.get(family_of(checkpoint.config).name, {})
    experts = {id(p) for m in experts_modules(model).values() for p in m.parameters()}
    state: dict[str, Tensor] = {}
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    for name, parameter in model.named_parameters():
        if id(parameter) in experts or name in tied:
            continue
        stored = name
        for theirs, published in renames.items():
            stored = stored.replace(theirs, published)
        if stored not in checkpoint:
            raise MissingTensorError(
                f"{name}: transformers' {type(model).__name__} needs it, the checkpoint has no {stored!r}; "
                "is the download complete?"
            )
        state[name] = _plain(checkpoint.read(stored), stored).to(device=device, dtype=torch.bfloat16)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name in checkpoint:
            buffer.copy_(checkpoint.read(name).to(buffer.dtype))
    generation = extra("transformers").GenerationConfig
    if (checkpoint.path / "generation_config.json").exists():
        model.generation_config = generation.from_pretrained(checkpoint.path)


def _plain(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype in FLOAT_FORMATS:
        return tensor
    raise ConfigError(
        f"{name}: stored as {tensor.dtype}; outside the experts only {', '.join(map(str, FLOAT_FORMATS))} are read. "
        "Run this model in an engine that quantises its other layers too, and use Collegium for the experts there"
    )
