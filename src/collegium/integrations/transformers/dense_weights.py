"""Load everything outside the experts with transformers, from the tensors of a checkpoint.

transformers gets lazy readers for all tensors of the checkpoint and a model whose experts have no parameters. It
decides names, splits, ties, dtypes and buffers, and never reads an expert. A quantised matrix is passed as a reader of
the decoded weight, so that none of transformers' quantisers runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.dense_weights import DenseWeight
from ...checkpoint.reader import TORCH_DTYPES, Checkpoint
from ...errors import CheckpointError, CollegiumError, ConfigError, MissingTensorError, TensorMismatchError
from ...formats.unquantised import FLOAT_FORMATS
from ...models.derived import ParallelExpertsBlock, replace_parallel_experts
from ..extra import import_extra
from .blocks import replace_blocks
from .gguf import transformers_tensor
from .identity_experts import replace_identity_experts
from .image_experts import image_expert_stacks
from .modules import text_experts
from .parallel_experts import RunParallelExperts
from .patches import progress_silenced, restore_class, temporary_subclass
from .text_models import name_in_memory, remove_towers, text_only

__all__ = ["load_dense_weights", "random_dense_weights"]

_SEED = 0

_INTEGER_DTYPES = (torch.int64, torch.int32, torch.bool)


class _LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed with ``...``, from any thread.

    An error is also appended to ``errors``, because transformers replaces it by another one.
    """

    def __init__(self, read: Callable[[], Tensor], errors: list[CollegiumError]) -> None:
        self.read = read
        self.errors = errors

    def __getitem__(self, index: object) -> Tensor:
        try:
            return self.read()
        except CollegiumError as error:
            self.errors.append(error)
            raise


def _read_plain(checkpoint: Checkpoint, name: str) -> Tensor:
    stored_dtype = checkpoint.info(name).dtype
    dtype = TORCH_DTYPES.get(stored_dtype)
    if dtype not in FLOAT_FORMATS and dtype not in _INTEGER_DTYPES:
        raise _undeclared_format(name, str(dtype or stored_dtype))
    return checkpoint.read(name)


def _read_decoded(
    weight: DenseWeight | CheckpointError, decoded: list[DenseWeight], dtype: torch.dtype, device: str
) -> Tensor:
    if isinstance(weight, CheckpointError):
        raise weight
    decoded.append(weight)
    return weight.read(dtype, device)


def load_dense_weights(
    cls: Any,
    config: Any,
    checkpoint: Checkpoint,
    device: str,
    dtype: torch.dtype,
    quantised: Mapping[str, DenseWeight | CheckpointError],
) -> tuple[nn.Module, list[DenseWeight]]:
    """Return the model of ``cls`` on ``device`` without its experts, whose parameters are on ``meta``.

    dtype: of all tensors except those that transformers keeps in another dtype.
    quantised: quantised matrices outside the experts, by module; the decoded ones are returned too.

    Blocks without an experts interface are replaced by ``Block``. Raises MissingTensorError, TensorMismatchError,
    BadScaleError and ConfigError, each naming the tensor.
    """
    errors: list[CollegiumError] = []
    decoded: list[DenseWeight] = []
    readers = {name: partial(_read_plain, checkpoint, name) for name in checkpoint.tensors}
    for path, weight in quantised.items():
        readers[f"{path}.weight"] = partial(_read_decoded, weight, decoded, dtype, device)
    state: dict[str, _LazyTensor] = {}
    model_type = str(checkpoint.config.get("model_type"))
    for checkpoint_name, reader in image_expert_stacks(checkpoint, readers).items():
        translated, read = transformers_tensor(checkpoint, checkpoint_name, reader)
        name = name_in_memory(model_type, config, translated)
        if name is not None:
            state[name] = _LazyTensor(read, errors)
    model, loading_info = _without_experts(cls, config, state, dtype, device, errors, checkpoint)
    _check_loading_info(model, loading_info, checkpoint)
    return model, decoded


def random_dense_weights(cls: Any, config: Any, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> nn.Module:
    """Return the model of ``cls`` as ``load_dense_weights`` does, with the random numbers that its class starts with.

    They are made on ``device``, are the same in every run, and do not change torch's state of random numbers. Raises
    CheckpointError for a config that transformers cannot build.
    """
    place = torch.device(device)
    devices = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(_SEED)
        model = _without_experts(cls, config, {}, dtype, device, [], checkpoint)[0]
    for block in model.modules():
        if isinstance(block, ParallelExpertsBlock):  # which the class does not know and so does not initialise
            block.bias.zero_()
    return model


def _without_experts(
    cls: Any,
    config: Any,
    state: Mapping[str, _LazyTensor],
    dtype: torch.dtype,
    device: str,
    errors: Sequence[CollegiumError],
    checkpoint: Checkpoint,
) -> tuple[Any, Mapping[str, Any]]:
    """Return a model whose experts' parameters stay on ``meta``, ready for inference, and transformers' loading info.

    Parameters that ``state`` lacks are initialised by transformers. Raises the first of ``errors``.
    """
    expert_parameters: dict[str, dict[str, nn.Parameter]] = {}

    def remove_experts(model: nn.Module) -> None:
        if text_only(config):
            remove_towers(model)
        replace_blocks(model)
        replace_identity_experts(model)
        replace_parallel_experts(model, RunParallelExperts)
        expert_parameters.update(_detach_expert_parameters(model))

    built_class = temporary_subclass(cls, remove_experts)
    model, loading_info = _from_pretrained(built_class, config, state, dtype, device, errors, checkpoint.path)
    restore_class(model, cls)
    if errors:
        raise errors[0]
    _restore_expert_parameters(model, expert_parameters)
    model.name_or_path = model.config.name_or_path = str(checkpoint.folder)
    if (checkpoint.folder / "generation_config.json").exists():
        model.generation_config = _generation_config(checkpoint.folder)
    return model.requires_grad_(False).eval(), loading_info


def _from_pretrained(
    cls: Any,
    config: Any,
    state: Mapping[str, _LazyTensor],
    dtype: torch.dtype,
    device: str,
    errors: Sequence[CollegiumError],
    path: Path,
) -> tuple[Any, Any]:
    """Return the loaded model and transformers' loading info; raises the first of the tensors' ``errors``."""
    try:
        with progress_silenced():
            return cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                device_map={"": device},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        if errors:
            raise errors[0] from error
        if isinstance(error, CollegiumError | torch.OutOfMemoryError):
            raise
        raise CheckpointError(
            f"{path}: transformers' {cls.__name__} cannot be built from config.json and the tensors outside the "
            f"experts: {type(error).__name__}: {str(error).strip()}; correct the entry it names, or compare the "
            "tensors with config.json"
        ) from error


def _generation_config(folder: Path) -> Any:
    try:
        generation_config = import_extra("transformers").GenerationConfig.from_pretrained(folder)
        end_ids = generation_config.eos_token_id
        torch.tensor([] if end_ids is None else end_ids, dtype=torch.int64)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'generation_config.json'}: cannot be used ({type(error).__name__}: {error}); correct the "
            "entry, or remove the file, which nothing else needs"
        ) from error
    return generation_config


def _detach_expert_parameters(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Remove the parameters of every experts module and return them by module path.

    Raises ConfigError for two experts modules in layers of one number: Collegium would run only one of them.
    """
    experts = text_experts(model)
    # As in experts_modules: the last one of a layer.
    paths = {index: name for name, index, _ in experts}
    for name, index, _ in experts:
        if paths[index] != name:
            raise ConfigError(
                f"transformers' {type(model).__name__} has experts at {name} and at {paths[index]}, which both are "
                f"layer {index}; load_model() runs models with experts in one list of layers"
            )
    modules = {id(module) for _, _, module in experts}
    detached: dict[str, dict[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        if id(module) in modules:
            detached[path] = dict(module.named_parameters(recurse=False))
            for name in detached[path]:
                delattr(module, name)
                # Weight initialisation code looks for the attribute, and skips tensors with this mark.
                placeholder = torch.empty(0)
                placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
                vars(module)[name] = placeholder
    return detached


def _restore_expert_parameters(model: nn.Module, detached: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
    for path, parameters in detached.items():
        module = model.get_submodule(path)
        for name, parameter in parameters.items():
            del vars(module)[name]
            module.register_parameter(name, parameter)


def _check_loading_info(model: Any, loading_info: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise for missing tensors and for tensors of another shape or dtype than the model's parameters."""
    class_name = type(model).__name__
    for name, stored_shape, shape in sorted(loading_info["mismatched_keys"]):
        raise TensorMismatchError(
            f"{name}: the checkpoint has shape {tuple(stored_shape)}, transformers' {class_name} needs {tuple(shape)}; "
            "compare config.json with the tensors, is one of them from another model?"
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        others = f" (nor {len(missing) - 1} others: {', '.join(missing[1:4])} ...)" if len(missing) > 1 else ""
        raise MissingTensorError(
            f"{missing[0]}: transformers' {class_name} needs it, the checkpoint has no tensor for it{others}; is the "
            "download complete?"
        )
    float_names = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    for name in sorted(float_names & set(checkpoint.tensors)):
        if TORCH_DTYPES.get(checkpoint.info(name).dtype) in _INTEGER_DTYPES:
            raise _undeclared_format(name, checkpoint.info(name).dtype)


def _undeclared_format(name: str, dtype: str) -> ConfigError:
    return ConfigError(
        f"{name}: stored as {dtype}, which transformers would read as plain values; allowed outside the experts are "
        f"{', '.join(map(str, FLOAT_FORMATS))} and matrices in a format that quantization_config declares"
    )
