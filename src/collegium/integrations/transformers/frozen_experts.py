"""What a model of ``load_model`` refuses, because its experts are in layers that transformers does not see."""

import weakref
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...layer import MoELayer
from ...runtime.packed_module import refuse_backward
from .blocks import blocks_of
from .modules import experts_modules
from .plugin import NAME, layers_of

__all__ = ["PackedPlaceholder", "freeze_experts"]

_NO_STATE = (
    "state_dict: the experts of a model loaded by load_model() are packed in Collegium's layers, so it has their "
    "shapes alone. torch.save(model) keeps all of it; the files of the model are those it was loaded from"
)


class PackedPlaceholder(Tensor):
    """What a ``state_dict`` has in the place of experts: shape and dtype, and InputError where numbers are needed.

    owner: the parameter it stands for.
    """

    owner: weakref.ref[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what a tensor does, as far as it needs no numbers."""
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        except NotImplementedError as error:
            raise InputError(_NO_STATE) from error

    def __deepcopy__(self, memo: object) -> "PackedPlaceholder":
        """Return itself, which nothing can change."""
        return self

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        """Refuse to be saved."""
        raise InputError(_NO_STATE)


def freeze_experts(model: Any, path: object) -> None:
    """Let ``model``, loaded from ``path``, refuse to be saved in parts, moved, and to run its experts otherwise.

    All are InputErrors: its experts' own parameters hold nothing.
    """
    for module in model.modules():
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation = _refuse_set_implementation  # type: ignore[assignment]
            module.save_pretrained = partial(_refuse_to_save, str(path))  # type: ignore[assignment]
            module.get_memory_footprint = partial(_memory_footprint, module)  # type: ignore[assignment]
            module.num_parameters = partial(_num_parameters, module)  # type: ignore[assignment]
        if _packed_parameters(module):
            # On all that hold experts: a part or a wrapper that is asked changes nothing before it is refused.
            module._apply = partial(_refuse_move, module, model.dtype, model.device)  # type: ignore[assignment]
            module.register_state_dict_post_hook(_name_packed)
            module.register_load_state_dict_pre_hook(_refuse_other_experts)
    model.register_forward_hook(_refuse_training)
    for experts in experts_modules(model).values():
        experts.register_forward_pre_hook(_refuse_other_implementation)
    if blocks_of(model):
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.output_router_logits = False
        model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)


def _memory_footprint(module: nn.Module, return_buffers: bool = True) -> int:
    """Return the bytes of parameters, buffers and packed experts on this rank."""
    parameters = sum(parameter.nbytes for parameter in module.parameters() if not parameter.is_meta)
    buffers = sum(buffer.nbytes for buffer in module.buffers()) if return_buffers else 0
    return parameters + buffers + sum(layer.nbytes for layer in layers_of(module))


def _num_parameters(module: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Return how many numbers the checkpoint has for ``module``, however few bits the packed ones take."""
    counted = type(module).num_parameters(module, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
    # Parameters of experts are on the meta device and are counted by their shapes; a Block has none.
    return (
        counted if only_trainable else counted + sum(_weight_count(block.layer) for block in blocks_of(module).values())
    )


def _weight_count(layer: MoELayer) -> int:
    """Return how many weights a layer has before it is packed: experts, router, shared expert, latent projections.

    Correction biases and hash tables are buffers in transformers, which it does not count.
    """
    spec, router, latent = layer.spec, layer.router, layer.latent
    expert = (spec.gate_up_parts + 1) * spec.intermediate_size * spec.expert_hidden_size
    if spec.expert_bias:
        expert += spec.gate_up_parts * spec.intermediate_size + spec.expert_hidden_size
    total = spec.num_experts * expert
    if spec.shared is not None:
        shared = spec.shared_alone()
        total += (shared.gate_up_parts + 1) * shared.intermediate_size * shared.hidden_size
        total += spec.hidden_size if spec.shared.gated else 0
    others: list[Tensor | None] = []
    if router is not None:
        others += [router.weight, router.bias, router.expert_scale]
    if latent is not None:
        others += [latent.down, latent.up, latent.norm]
    return total + sum(tensor.numel() for tensor in others if tensor is not None)


def _refuse_training(model: nn.Module, _: object, output: Any) -> Any:
    """Let a backward pass through a model in training mode raise InputError: every weight is frozen."""
    if not model.training:
        return output
    if isinstance(output, tuple):
        return tuple(_without_backward(value) for value in output)
    for name in ("loss", "logits") if isinstance(output, dict) else ():
        if output.get(name) is not None:
            output[name] = _without_backward(output[name])
    return output


def _without_backward(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return refuse_backward(value) if floats and not value.requires_grad else value


def _packed_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.is_meta}


def _name_packed(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, parameter in _packed_parameters(module).items():
        state[prefix + name] = parameter.detach().as_subclass(PackedPlaceholder)
        state[prefix + name].owner = weakref.ref(parameter)


def _refuse_other_experts(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse the experts of others; what the module itself named changes nothing."""
    for name, parameter in _packed_parameters(module).items():
        entry = state.get(prefix + name)
        if entry is not None and (not isinstance(entry, PackedPlaceholder) or entry.owner() is not parameter):
            raise InputError(
                f"load_state_dict: {name} was given to a model loaded by load_model(), whose experts are packed and do "
                "not change so. Load a checkpoint that has them, or leave them out and say strict=False"
            )


def _refuse_move(module: Any, dtype: torch.dtype, device: torch.device, fn: Any, recurse: bool = True) -> Any:
    """Return the module where ``fn`` changes neither device nor dtype, else refuse."""
    moved = None
    with suppress(AssertionError, RuntimeError):  # a device that this process does not have
        moved = fn(torch.empty(0, dtype=dtype, device=device))
    if moved is None or (moved.dtype, moved.device) != (dtype, device):
        target = "elsewhere" if moved is None else f"to {moved.dtype} on {moved.device}"
        raise InputError(
            f"a model loaded by load_model() was to be moved or converted {target}; it is {dtype} on {device}, and "
            "packed experts do neither. Load it again with load_model(..., device=...)"
        )
    return module


def _refuse_set_implementation(experts_implementation: str | dict[str, str]) -> None:
    requested = experts_implementation
    others = {*(requested.values() if isinstance(requested, dict) else [requested])} - {NAME}
    if others:
        raise _implementation_error(min(map(str, others)))


def _refuse_other_implementation(module: Any, _: object) -> None:
    if module.config._experts_implementation != NAME:
        raise _implementation_error(module.config._experts_implementation)


def _refuse_router_logits(_: Any, __: object, others: dict[str, Any]) -> None:
    if others.get("output_router_logits"):
        raise InputError(
            "output_router_logits=True was asked of a model whose blocks are layers of Collegium, which return no "
            "router logits; leave it out, or load the model with from_pretrained()"
        )


def _implementation_error(implementation: str) -> InputError:
    return InputError(
        f"experts_implementation={implementation!r} was asked of a model loaded by load_model(), whose experts are packed; "
        f"allowed: {NAME!r}. For another one load the model with from_pretrained(..., experts_implementation=...)"
    )


def _refuse_to_save(path: str, *_: object, **__: object) -> NoReturn:
    raise InputError(
        "save_pretrained: the experts of a model loaded by load_model() are packed and would be missing in the files. "
        f"This model's are those of {path}: copy them, or write other ones with: collegium quantize {path} --to FORMAT"
    )
