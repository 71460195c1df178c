"""Load whole models: Collegium loads and runs the experts, transformers everything else."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Never

import torch
from torch import nn

from ...checkpoint.adapter import with_adapter
from ...checkpoint.audit import check_outside_experts
from ...checkpoint.dense_weights import dense_weight_problems, quantised_dense_weights, sentences
from ...checkpoint.expert_adapters import read_expert_adapters
from ...checkpoint.layer_view import CheckpointLayer
from ...checkpoint.problems import raise_if_any
from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError, InputError
from ...formats.unquantised import DTYPES
from ...layer import MoELayer
from ...loading import dummy_routed, load_layer, load_routed
from ...models import family_of
from ...parallel.ranks import Ranks
from ...problem import Limits, Overrides
from ...runtime.arguments import Dtype, dtype_name, refuse_others
from ...runtime.devices import plain_torch, probe
from ...runtime.progress import Progress, counted
from ..extra import import_extra
from .adapters import set_model_adapters
from .blocks import BLOCKS, blocks_of
from .classes import class_and_config
from .dense_weights import load_dense_weights, random_dense_weights
from .frozen_experts import freeze_experts
from .modules import expert_norms, experts_modules
from .plugin import NAME, attach, install
from .text_models import unread_parts
from .wide_linear import widen

__all__ = ["build_layers", "load_model", "load_model_in"]

_LOG = logging.getLogger(__name__)


def load_model(  # noqa: PLR0913  flat: calls pass few of these, and an options object would lengthen each
    path: str | os.PathLike[str] | Checkpoint,
    *,
    weight_format: str | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str | Ranks | None = None,
    dtype: Dtype | torch.dtype = "bf16",
    limits: Limits | None = None,
    adapter: str | os.PathLike[str] | None = None,
    adapters: Sequence[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
    download: bool = False,
    weights: Literal["files", "dummy"] = "files",
    **others: Never,
) -> nn.Module:
    """Load a text generation model whose experts run through Collegium in their published format.

    path: folder, GGUF file or open checkpoint; ``fables-16m`` for the bundled model; or a Hugging Face Hub id
    (``org/name`` or ``org/name@revision``) in the local cache. An existing path takes precedence.
    weight_format: convert the experts to this format.
    overrides: kernel or activation format.
    device: a device, or Ranks to split the experts over several ranks; each rank loads all other modules.
    dtype: of the model, as a name or torch.dtype. Tensors outside the experts have this dtype, except those that
    transformers keeps in float32. Quantised matrices outside the experts are decoded, with a warning in the log.
    adapter: folder or id of a PEFT LoRA adapter, merged while loading as ``checkpoint.with_adapter`` does.
    adapters: adapters of the routed experts that are not merged; ``choose_adapters(model, ids)`` chooses one for each
    sequence. The weights may be quantised.
    progress: called with (done, total, text).
    download: fetch missing files of the model and the adapter; code in a repository is neither fetched nor run.
    weights: ``dummy`` reads only ``config.json``, and fills the model with random numbers, the same in every run: for
    start-up tests and benchmarks without files. Experts have the config's format; all else is in ``dtype``.

    ``print(model)`` shows kernel and format of the experts, and ``model.get_memory_footprint()`` includes the packed
    experts. The model can be deep-copied and saved by ``torch.save(model)``; no parameter requires a gradient. It
    raises InputError on ``save_pretrained``, saving its ``state_dict``, loading other experts, moving, converting, and
    changing ``experts_implementation``.

    Raises subclasses of CheckpointError, PlanError, InputError for arguments of transformers' ``from_pretrained``
    (naming the replacement) and for weights beyond the range of fp16, and MissingExtraError without transformers.
    """
    refuse_others(load_model, others)
    import_extra("transformers")
    return load_model_in(
        dtype_name("load_model", dtype),
        path,
        device=device,
        adapter=adapter,
        adapters=adapters,
        download=download,
        weight_format=weight_format,
        overrides=overrides,
        limits=limits,
        progress=progress,
        weights=weights,
    )


def load_model_in(
    dtype: Literal["bf16", "fp16", "fp32"],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    device: torch.device | str | Ranks | None = None,
    adapter: str | os.PathLike[str] | None = None,
    adapters: Sequence[str | os.PathLike[str]] = (),
    download: bool = False,
    weights: Literal["files", "dummy"] = "files",
    **layer_options: Any,
) -> nn.Module:
    """Load a model as ``load_model`` does, in ``dtype``; layer_options: see ``build_layers``."""
    place = probe(device.device if isinstance(device, Ranks) else device).place
    checkpoint = _open(path, weights, (*(() if adapter is None else (adapter,)), *adapters), download=download)
    if adapter is not None:
        checkpoint = with_adapter(checkpoint, adapter, download=download)
    # Before anything large is read.
    by_layer = read_expert_adapters(checkpoint, adapters, download=download) if adapters else {}
    install()
    cls, config = class_and_config(checkpoint)
    if family_of(checkpoint.config).name not in BLOCKS:
        config._experts_implementation = NAME
    warns = not isinstance(device, Ranks) or device.rank == device.slice_rank == 0
    with plain_torch():
        if weights == "dummy":
            model = random_dense_weights(cls, config, checkpoint, place, DTYPES[dtype])
        else:
            model = _read_dense_weights(cls, config, checkpoint, place, DTYPES[dtype], warns=warns)
        _check_layer_indices(model, checkpoint)
        _check_fp16_range(model, checkpoint)
        layer_options |= {"device": device, "dtype": dtype, "after_expert": expert_norms(model)}
        layers = build_layers(checkpoint, weights=weights, **layer_options)
        _attach_layers(model, layers)
        if by_layer:
            set_model_adapters(model, {**experts_modules(model), **blocks_of(model)}, layers, by_layer)
    widen(model)
    freeze_experts(model, checkpoint.path)
    return model


def _open(
    path: str | os.PathLike[str] | Checkpoint, weights: str, adapters: Sequence[object], *, download: bool
) -> Checkpoint:
    """Open the checkpoint, or only its config for random weights; raises InputError for a wrong ``weights``."""
    if weights not in ("files", "dummy"):
        raise InputError(f"load_model: weights={weights!r} was passed; allowed: 'files', 'dummy'")
    if weights == "dummy" and adapters:
        raise InputError(
            f"load_model: weights='dummy' and adapters {', '.join(map(str, adapters))} were passed; an adapter changes "
            "the weights of files. Leave out one of them"
        )
    if isinstance(path, Checkpoint):
        return path
    return (Checkpoint.open_config if weights == "dummy" else Checkpoint.open)(path, download=download)


def _read_dense_weights(
    cls: Any, config: Any, checkpoint: Checkpoint, device: str, dtype: torch.dtype, *, warns: bool
) -> nn.Module:
    """Check and load everything outside the experts.

    warns: log which quantised matrices were decoded, and which parts of the model are not loaded.
    """
    quantised = quantised_dense_weights(checkpoint)
    raise_if_any(checkpoint, [*check_outside_experts(checkpoint), *dense_weight_problems(checkpoint, quantised)])
    model, decoded = load_dense_weights(cls, config, checkpoint, device, dtype, quantised)
    unread = unread_parts(str(checkpoint.config.get("model_type")))
    for sentence in (*sentences(checkpoint, decoded, dtype), *unread) if warns else ():
        _LOG.warning("%s: %s", checkpoint.path, sentence)
    return model


def build_layers(
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
    weights: Literal["files", "dummy"] = "files",
    after_expert: Mapping[int, nn.Module] | None = None,
    **options: Any,
) -> dict[int, MoELayer]:
    """Read, audit, plan and pack the experts of every MoE layer; unpacked weights of one layer are in memory at a time.

    The layers have no router and no shared expert, which transformers runs, except in families whose blocks have no
    experts interface in transformers (docs/families.md). after_expert: modules that run on an expert's output, by
    layer. options: weight_format, overrides, device, limits, and dtype, a name, of the layers' input and output. Other
    arguments and errors: see ``load_model``.
    """
    family = family_of(checkpoint.config)
    indices = counted(family.moe_layers(checkpoint.config), progress, "layer {}".format, end="done")
    if family.name in BLOCKS:
        return {index: load_layer(checkpoint, index, weights=weights, **options) for index in indices}
    layers: dict[int, MoELayer] = {}
    for index in indices:
        norm = (after_expert or {}).get(index)
        if weights == "dummy":
            layers[index] = dummy_routed(checkpoint.config, index, after_expert=norm, **options)
        else:
            layers[index] = load_routed(CheckpointLayer.open(checkpoint, index), after_expert=norm, **options)
    return layers


def _check_layer_indices(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ConfigError, before any expert is read, if model and checkpoint have experts in different layers."""
    checkpoint_layers = family_of(checkpoint.config).moe_layers(checkpoint.config)
    model_layers = sorted({**experts_modules(model), **blocks_of(model)})
    if model_layers != list(checkpoint_layers):
        raise ConfigError(
            f"{checkpoint.path}: config.json has experts in layers {list(checkpoint_layers)}, transformers' "
            f"{type(model).__name__} accepts experts in layers {model_layers}; load single layers with load_layer()"
        )


def _check_fp16_range(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise InputError for weights outside the experts that overflow FP16; experts are not rounded to FP16."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float16 and not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise InputError(
                f"{checkpoint.path}: {name} has weights beyond {torch.finfo(torch.float16).max}, the largest number of "
                "fp16; load the model with dtype='bf16' or 'fp32'"
            )


def _attach_layers(model: nn.Module, layers: dict[int, MoELayer]) -> None:
    blocks = blocks_of(model)
    for index, block in blocks.items():
        block.set_layer(layers[index])
    attach(model, {index: layer for index, layer in layers.items() if index not in blocks})
    for module in experts_modules(model).values():
        # Some classes do not pass the setting from their config on to the text model's.
        vars(module)["config"]._experts_implementation = NAME
