"""Refuse operations on a model of ``load_model`` that would need its unpacked experts."""

import weakref
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...layer import MoELayer
from ...runtime.packed_module import refuse_backward
from ...stages.latent import Latent
from .blocks import blocks_of
from .modules import experts_modules
from .patches import override_methods
from .plugin import NAME, layers_of

__all__ = ["PackedPlaceholder", "freeze_experts"]

_NO_STATE = (
    "state_dict: the experts of a model loaded by load_model() are packed in Collegium's layers, so it has only their "
    "shapes. torch.save(model) saves all of it; the files of the model are those it was loaded from"
)


class PackedPlaceholder(Tensor):
    """Entry of a ``state_dict`` for experts: it has shape and dtype, and raises InputError if values are needed.

    owner: the parameter that it represents.
    """

    owner: weakref.ref[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; raises InputError if it needs values."""
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        except NotImplementedError as error:
            raise InputError(_NO_STATE) from error

    def __deepcopy__(self, memo: object) -> "PackedPlaceholder":
        """Return the placeholder itself, which is immutable."""
        return self

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        """Raise InputError: a placeholder cannot be saved."""
        raise InputError(_NO_STATE)


def freeze_experts(model: Any, path: object) -> None:
    """Let ``model``, loaded from ``path``, raise InputError when it is saved in parts, moved, converted or trained.

    The parameters of its experts are on the meta device; the weights are in the packed layers.
    """
    for module in model.modules():
        if hasattr(module, "set_experts_implementation"):
            override_methods(
                module,
                set_experts_implementation=_refuse_set_implementation,
                save_pretrained=partial(_refuse_to_save, str(path)),
                get_memory_footprint=partial(_memory_footprint, module),
                num_parameters=partial(_num_parameters, module),
            )
        if _packed_parameters(module):
            # On every module with experts below it, so that a call on a part raises before it changes anything.
            override_methods(module, _apply=partial(_refuse_move, module, model.dtype, model.device))
            module.register_state_dict_post_hook(_name_packed)
            module.register_load_state_dict_pre_hook(_refuse_other_experts)
    model.register_forward_hook(_refuse_training)
    for experts in experts_modules(model).values():
        experts.register_forward_pre_hook(_refuse_other_implementation)
    if blocks_of(model):
        for config in (model.config, model.config.get_text_config()):
            config.output_router_logits = False
        model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)


def _memory_footprint(module: nn.Module, return_buffers: bool = True) -> int:
    """Return the bytes of parameters, buffers and packed experts on this rank."""
    parameters = sum(parameter.nbytes for parameter in module.parameters() if not parameter.is_meta)
    buffers = sum(buffer.nbytes for buffer in module.buffers()) if return_buffers else 0
    return parameters + buffers + sum(layer.nbytes for layer in layers_of(module))


def _num_parameters(module: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Return the number of weights of ``module`` in the checkpoint, independent of their packed size."""
    count = type(module).num_parameters(module, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
    if only_trainable:
        return count
    # The count includes experts on the meta device; a Block has no parameters.
    return count + sum(_weight_count(block.layer) for block in blocks_of(module).values())


def _weight_count(layer: MoELayer) -> int:
    """Return the number of weights of a layer: experts, router, shared expert, latent projections.

    Correction biases and hash tables are not included; they are buffers in transformers, which it does not count.
    """
    spec = layer.spec
    router = layer.router
    latent = layer.latent
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
    if isinstance(latent, Latent):
        others += [latent.down, latent.up, latent.norm]
    return total + sum(tensor.numel() for tensor in others if tensor is not None)


def _refuse_training(model: nn.Module, _: object, output: Any) -> Any:
    """Let a backward pass of a model in training mode raise InputError: every weight is frozen."""
    if not model.training:
        return output
    if isinstance(output, tuple):
        return tuple(_without_backward(value) for value in output)
    if isinstance(output, dict):
        for name in ("loss", "logits"):
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
        placeholder = parameter.detach().as_subclass(PackedPlaceholder)
        placeholder.owner = weakref.ref(parameter)
        state[prefix + name] = placeholder


def _refuse_other_experts(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Raise InputError for experts in a state_dict, except for the placeholders of this module."""
    for name, parameter in _packed_parameters(module).items():
        entry = state.get(prefix + name)
        if entry is not None and (not isinstance(entry, PackedPlaceholder) or entry.owner() is not parameter):
            raise InputError(
                f"load_state_dict: {name} cannot be loaded into a model from load_model(), whose experts are packed. "
                "Load a checkpoint with these experts, or leave them out and pass strict=False"
            )


def _refuse_move(module: Any, dtype: torch.dtype, device: torch.device, fn: Any, recurse: bool = True) -> Any:
    """Return the module if ``fn`` changes neither device nor dtype; otherwise raise InputError."""
    moved = None
    with suppress(AssertionError, RuntimeError):  # a device that this process does not have
        moved = fn(torch.empty(0, dtype=dtype, device=device))
    if moved is None or (moved.dtype, moved.device) != (dtype, device):
        target = "to another device" if moved is None else f"to {moved.dtype} on {moved.device}"
        raise InputError(
            f"a model loaded by load_model() cannot be moved or converted {target}; it is {dtype} on {device}, and its "
            "experts are packed. Load it again with load_model(..., device=...)"
        )
    return module


def _refuse_set_implementation(experts_implementation: str | dict[str, str]) -> None:
    if isinstance(experts_implementation, dict):
        others = set(experts_implementation.values()) - {NAME}
    else:
        others = {experts_implementation} - {NAME}
    if others:
        raise _implementation_error(min(map(str, others)))


def _refuse_other_implementation(module: Any, _: object) -> None:
    if module.config._experts_implementation != NAME:
        raise _implementation_error(module.config._experts_implementation)


def _refuse_router_logits(_: Any, __: object, others: dict[str, Any]) -> None:
    if others.get("output_router_logits"):
        raise InputError(
            "output_router_logits=True is not supported by a model whose blocks are Collegium layers, which return no "
            "router logits; leave it out, or load the model with from_pretrained()"
        )


def _implementation_error(implementation: str) -> InputError:
    return InputError(
        f"experts_implementation={implementation!r} was requested for a model loaded by load_model(), whose experts "
        f"are packed; allowed: {NAME!r}. For another one load the model with "
        "from_pretrained(..., experts_implementation=...)"
    )


def _refuse_to_save(path: str, *_: object, **__: object) -> NoReturn:
    raise InputError(
        "save_pretrained: the experts of a model loaded by load_model() are packed and would be missing in the files. "
        f"Copy {path}, or write it in another format with: collegium quantize {path} --to FORMAT"
    )
