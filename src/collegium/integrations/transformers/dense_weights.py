"""Everything outside the experts, loaded by transformers itself from the tensors of a checkpoint.

transformers is offered every tensor of the checkpoint, each read only when it is asked for, and a model whose experts
have no parameters. So the names, splits, ties, dtypes and buffers are its own, and no expert passes through it. A
quantised matrix is offered as the plain weight it decodes to, so that none of its readers of quantised formats runs.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.dense_weights import DenseWeight
from ...checkpoint.reader import TORCH_DTYPES, Checkpoint
from ...errors import CheckpointError, CollegiumError, ConfigError, MissingTensorError, TensorMismatchError
from ...formats.unquantised import FLOAT_FORMATS
from ..extra import import_extra
from .blocks import replace_blocks
from .gguf import transformers_tensor
from .modules import experts_modules

__all__ = ["load_dense_weights"]

_INTEGER_DTYPES = (torch.int64, torch.int32, torch.bool)


class _LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed with ``...``, from any thread.

    A tensor that is refused leaves its error in ``faults``: what transformers makes of an error is another one.
    """

    def __init__(self, read: Callable[[], Tensor], faults: list[CollegiumError]) -> None:
        self.read, self.faults = read, faults

    def __getitem__(self, index: object) -> Tensor:
        try:
            return self.read()
        except CollegiumError as error:
            self.faults.append(error)
            raise


def _read_plain(checkpoint: Checkpoint, name: str) -> Tensor:
    stored = checkpoint.info(name).dtype
    dtype = TORCH_DTYPES.get(stored)
    if dtype not in FLOAT_FORMATS and dtype not in _INTEGER_DTYPES:
        raise _undeclared_format(name, str(dtype or stored))
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
    """Return the model of ``cls`` on ``device`` with everything but its experts, whose parameters lie on ``meta``.

    dtype: of the tensors that transformers does not keep in another one. outside: quantised matrices by module; those
    that were decoded are returned too. Blocks without an experts interface are replaced by ``Block``. Raises
    MissingTensorError, TensorMismatchError, BadScaleError, ConfigError, each naming the tensor.
    """
    errors, decoded = list[CollegiumError](), list[DenseWeight]()
    reads = {name: partial(_read_plain, checkpoint, name) for name in checkpoint.tensors}
    reads |= {
        f"{path}.weight": partial(_read_decoded, found, decoded, dtype, device) for path, found in quantised.items()
    }
    state = {
        name: _LazyTensor(read, errors)
        for name, read in (transformers_tensor(checkpoint, *own) for own in reads.items())
    }
    expert_parameters: dict[str, dict[str, nn.Parameter]] = {}

    class Emptied(cls):
        """The class itself, whose experts give their parameters away as soon as they exist."""

        def __init__(self, config: Any, *args: Any, **others: Any) -> None:
            super().__init__(config, *args, **others)
            replace_blocks(self)
            expert_parameters.update(_detach_expert_parameters(self))

    Emptied.__name__, Emptied.__qualname__, Emptied.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    with _transformers_silenced():
        try:
            model, found = Emptied.from_pretrained(
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
                f"{checkpoint.path}: transformers' {cls.__name__} cannot be built from config.json and the tensors "
                f"outside the experts: {type(error).__name__}: {str(error).strip()}; correct the entry it names, or "
                "compare the tensors with config.json"
            ) from error
    model.__class__ = cls
    if errors:
        raise errors[0]
    _check_loading_info(model, found, checkpoint)
    _restore_expert_parameters(model, expert_parameters)
    model.name_or_path = model.config.name_or_path = str(checkpoint.folder)
    if (checkpoint.folder / "generation_config.json").exists():
        model.generation_config = _generation_config(checkpoint.folder)
    return model.requires_grad_(False).eval(), decoded


def _generation_config(folder: Path) -> Any:
    try:
        generation_config = import_extra("transformers").GenerationConfig.from_pretrained(folder)
        ends = generation_config.eos_token_id
        torch.tensor([] if ends is None else ends, dtype=torch.int64)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'generation_config.json'}: cannot be used ({type(error).__name__}: {error}); correct the "
            "entry, or take the file away: nothing else needs it"
        ) from error
    return generation_config


def _detach_expert_parameters(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Take the parameters of every experts module away and return them by the module's path."""
    modules = {id(module) for module in experts_modules(model).values()}
    taken: dict[str, dict[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        if id(module) in modules:
            taken[path] = dict(module.named_parameters(recurse=False))
            for name in taken[path]:
                delattr(module, name)
                # Code that fills new weights looks for them, and leaves alone what is marked so.
                vars(module)[name] = stand_in = torch.empty(0)
                stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
    return taken


def _restore_expert_parameters(model: nn.Module, taken: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
    for path, parameters in taken.items():
        module = model.get_submodule(path)
        for name, parameter in parameters.items():
            del vars(module)[name]
            module.register_parameter(name, parameter)


def _check_loading_info(model: Any, loading_info: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Refuse a model that lacks a tensor or found one of another shape or kind."""
    owner = type(model).__name__
    for name, stored, wanted in sorted(loading_info["mismatched_keys"]):
        raise TensorMismatchError(
            f"{name}: the checkpoint has shape {tuple(stored)}, transformers' {owner} needs {tuple(wanted)}; "
            "compare config.json with the tensors, is one of them from another model?"
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise MissingTensorError(
            f"{missing[0]}: transformers' {owner} needs it, the checkpoint has no tensor that becomes it"
            + (f" (nor {len(missing) - 1} others: {', '.join(missing[1:4])} ...)" if len(missing) > 1 else "")
            + "; is the download complete?"
        )
    floats = {name for name, p in model.named_parameters() if p.is_floating_point()}
    for name in sorted(floats & set(checkpoint.tensors)):
        if TORCH_DTYPES.get(checkpoint.info(name).dtype) in _INTEGER_DTYPES:
            raise _undeclared_format(name, checkpoint.info(name).dtype)


def _undeclared_format(name: str, dtype: str) -> ConfigError:
    return ConfigError(
        f"{name}: stored as {dtype}, which transformers would take for numbers; allowed outside the experts are "
        f"{', '.join(map(str, FLOAT_FORMATS))} and matrices in a format that quantization_config declares"
    )


@contextmanager
def _transformers_silenced() -> Generator[None]:
    """Silence transformers' list of tensors it does not know, the experts, and its progress bar."""
    logging = import_extra("transformers.utils.logging")
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
