"""Whole models: transformers runs everything but the experts, which never pass through it."""

import logging
import os
from typing import Any, Literal, Never

import torch
from torch import nn

from ...checkpoint.adapter import with_adapter
from ...checkpoint.audit import check_outside_experts
from ...checkpoint.dense_weights import dense_weight_problems, quantised_dense_weights, sentences
from ...checkpoint.layer_view import CheckpointLayer
from ...checkpoint.problems import raise_if_any
from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError, InputError
from ...formats.unquantised import DTYPES
from ...layer import MoELayer
from ...loading import load_layer, load_routed
from ...models import family_of
from ...parallel.ranks import Ranks
from ...problem import Limits, Overrides
from ...runtime.arguments import Dtype, dtype_name, refuse_others
from ...runtime.devices import plain_torch, probe
from ...runtime.progress import Progress, counted
from ..extra import extra
from .blocks import BLOCKS, blocks_of
from .classes import class_and_config
from .dense_weights import load_outside
from .frozen_experts import seal
from .modules import experts_modules
from .plugin import NAME, attach, make_known
from .wide_linear import widen

__all__ = ["build_layers", "load_model", "load_model_in"]

_LOG = logging.getLogger(__name__)


def load_model(  # noqa: PLR0913  every option of a model that is read from disk
    path: str | os.PathLike[str] | Checkpoint,
    *,
    weight_format: str | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str | Ranks | None = None,
    dtype: Dtype | torch.dtype = "bf16",
    limits: Limits | None = None,
    adapter: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    download: bool = False,
    **others: Never,
) -> nn.Module:
    """Load a model that writes text, whose experts run through Collegium in their published format.

    path: of a folder or GGUF file, or the open checkpoint itself; also ``fables-16m``, the shipped model, and an id of
    the Hugging Face Hub (``org/name`` or ``org/name@revision``) in the local cache. An existing path wins. download:
    fetch what the cache lacks, of the model and of the adapter; code of a repository is neither fetched nor run.
    weight_format: encode the experts into this format instead. overrides: kernel or activation format. device:
    Ranks, where
    several ranks share the experts: each reads its own, and everything else. dtype: of the model, a name or a
    torch.dtype. adapter: folder or id of a LoRA adapter of PEFT,
    merged into what is read, as ``checkpoint.with_adapter`` does. progress: called with (done, total, what).
    Tensors outside the experts have this dtype, but for those transformers keeps in float32; matrices that are
    quantised there are decoded, and a line of the log says so. ``print(model)`` shows kernel and format of the experts,
    and ``model.get_memory_footprint()`` counts them as they are packed.
    It can be deep-copied and kept by ``torch.save(model)``. ``save_pretrained``, files of its ``state_dict``, other
    experts, a move, another dtype and another ``experts_implementation`` are InputErrors, and nothing needs a gradient.
    Raises CheckpointError kinds, PlanError, InputError for arguments of transformers' ``from_pretrained``, naming what
    to pass instead, and for weights beyond the range of fp16, and MissingExtraError without transformers.
    """
    refuse_others(load_model, others)
    extra("transformers")
    asked: dict[str, Any] = {
        "weight_format": weight_format,
        "overrides": overrides,
        "limits": limits,
        "progress": progress,
    }
    name = dtype_name("load_model", dtype)
    return load_model_in(name, path, device=device, adapter=adapter, download=download, **asked)


def load_model_in(
    dtype: Literal["bf16", "fp16", "fp32"],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    device: torch.device | str | Ranks | None = None,
    adapter: str | os.PathLike[str] | None = None,
    download: bool = False,
    **others: Any,
) -> nn.Module:
    """Do what ``load_model`` does in ``dtype``."""
    place = probe(device.device if isinstance(device, Ranks) else device).place
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path, download=download)
    checkpoint = checkpoint if adapter is None else with_adapter(checkpoint, adapter, download=download)
    make_known()
    cls, config = class_and_config(checkpoint)
    outside = quantised_dense_weights(checkpoint)
    raise_if_any(checkpoint, [*check_outside_experts(checkpoint), *dense_weight_problems(checkpoint, outside)])
    if family_of(checkpoint.config).name not in BLOCKS:
        config._experts_implementation = NAME
    with plain_torch():
        model, decoded = load_outside(cls, config, checkpoint, place, DTYPES[dtype], outside)
        if not isinstance(device, Ranks) or device.rank == device.slice_rank == 0:
            for said in sentences(checkpoint, decoded, DTYPES[dtype]):
                _LOG.warning("%s: %s", checkpoint.path, said)
        _check_places(model, checkpoint)
        _check_range(model, checkpoint)
        _give(model, build_layers(checkpoint, device=device, dtype=dtype, **others))
    widen(model)
    seal(model, checkpoint.path)
    return model


def build_layers(
    checkpoint: Checkpoint,
    *,
    weight_format: str | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str | Ranks | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
) -> dict[int, MoELayer]:
    """Read, audit, plan and pack the experts of every MoE layer, one layer in memory beyond the packed ones.

    The layers hold no router and no shared expert: transformers keeps those. The exception are families whose blocks
    have no experts interface in transformers (docs/families.md), whose layers hold both. dtype: of the layers' input
    and output. Other arguments and errors as ``load_model``.
    """
    family = family_of(checkpoint.config)
    wishes: Any = {
        "weight_format": weight_format,
        "overrides": overrides,
        "device": device,
        "limits": limits,
        "dtype": dtype,
    }
    indices = counted(family.moe_layers(checkpoint.config), progress, "layer {}".format, end="done")
    if family.name in BLOCKS:
        return {index: load_layer(checkpoint, index, **wishes) for index in indices}
    return {index: load_routed(CheckpointLayer.open(checkpoint, index), **wishes) for index in indices}


def _check_places(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse, before any expert is read, a model whose experts are not where the checkpoint's are."""
    wanted = family_of(checkpoint.config).moe_layers(checkpoint.config)
    found = sorted({**experts_modules(model), **blocks_of(model)})
    if found != list(wanted):
        raise ConfigError(
            f"{checkpoint.path}: config.json has experts in layers {list(wanted)}, transformers' "
            f"{type(model).__name__} takes experts of others in layers {found}; load single layers with load_layer()"
        )


def _check_range(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse weights outside the experts that are infinite in FP16; those of the experts are never rounded to it."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float16 and not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise InputError(
                f"{checkpoint.path}: {name} has weights beyond {torch.finfo(torch.float16).max}, the largest number of "
                "fp16; load the model with dtype='bf16' or 'fp32'"
            )


def _give(model: nn.Module, layers: dict[int, MoELayer]) -> None:
    blocks = blocks_of(model)
    for index, block in blocks.items():
        block.hold(layers[index])
    attach(model, {index: layer for index, layer in layers.items() if index not in blocks})
    for module in experts_modules(model).values():
        # Some classes do not pass on what their config says to the text model's.
        vars(module)["config"]._experts_implementation = NAME
