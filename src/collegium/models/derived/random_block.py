"""Run a block of a class on random numbers: the experts and weights that its router chose, and its output.

The block has its full size. A stack of experts is a view of overlapping windows of one buffer, so that it needs the
memory of one expert.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from .class_layers import ClassLayer

__all__ = ["BlockRun", "ExpertsRun", "run_block", "run_experts"]

_TOKENS, _MORE_TOKENS = 24, 240  # for blocks of published sizes, and for those of test models
_SMALL = 1 << 20  # elements of a projection
_SEED = 20
# Tokens by kind: plain, with outliers, and with logits shifted far down, where an epsilon of a router shows.
_SHIFTS = (0.0, 6.0, 18.0, 45.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsRun:
    """One call of an experts module with inputs ``[T, H]``, ids and weights ``[T, K]``, and its output ``[T, H]``.

    gate_up ``[E, P*I, H]``, down ``[E, H, I]``, biases or None: output-first, rows as in memory. norm: of an expert's
    output, or None.
    """

    inputs: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | None
    norm: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRun:
    """One call of a block: tokens ``x [T, D]``, its tensors by name without the experts', its experts, its output.

    output: ``[T, D]``.
    """

    x: Tensor
    tensors: dict[str, Tensor]
    experts: ExpertsRun
    output: Tensor


def run_experts(layer: ClassLayer, top_k: int) -> ExpertsRun:
    """Run a copy of ``layer``'s experts on random float32 numbers on the CPU, each expert for some token.

    Raises SpecError for a module that is called otherwise.
    """
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    experts: Any = copy.deepcopy(layer.experts)
    _fill(experts, experts, torch.zeros(0), generator)
    down = experts.down_proj
    width = down.shape[2 if experts.is_transposed else 1]
    tokens = _count(experts)
    inputs = torch.randn(tokens, width, generator=generator, device="cpu")
    inputs[1::6] *= 8
    ids = torch.rand(tokens, down.shape[0], generator=generator, device="cpu").topk(top_k, dim=1).indices
    weights = torch.rand(tokens, top_k, generator=generator, device="cpu") + 0.1
    experts.config._experts_implementation = "eager"
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            output = experts.eval()(inputs, ids, weights)
    except Exception as error:  # a module that is called with more than tokens, ids and weights
        raise SpecError(f"{type(experts).__name__} cannot be run on tokens, ids and weights: {error}"[:300]) from error
    return _experts_run(experts, (inputs, ids, weights), output)


def run_block(layer: ClassLayer, hidden_size: int) -> BlockRun:
    """Run a copy of ``layer``'s block on random float32 numbers on the CPU; raises SpecError if it cannot be run."""
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    block: Any = copy.deepcopy(layer.block)
    experts: Any = block.get_submodule(layer.experts_path.removeprefix(layer.block_path + "."))
    direction = torch.randn(hidden_size, generator=generator, device="cpu")
    direction /= direction.norm()
    _fill(block, experts, direction, generator)
    x = _tokens(_count(experts), direction, generator)
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def record(_: object, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((arguments, output))

    handle = experts.register_forward_hook(record)
    experts.config._experts_implementation = "eager"
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            result = block.eval()(x[None])
    except Exception as error:  # a block that is called with more than the hidden states
        raise SpecError(
            f"{type(block).__name__} cannot be run on hidden states alone, {type(error).__name__}: {error}"[:300]
        ) from error
    finally:
        handle.remove()
    output = result[0] if isinstance(result, tuple) else result
    if len(calls) != 1 or len(calls[0][0]) < 3 or output.numel() != x.numel():
        raise SpecError(f"{type(block).__name__} does not call its experts once with ids and weights for all tokens")
    prefix = layer.experts_path.removeprefix(layer.block_path + ".") + "."
    named = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    arguments, routed = calls[0]
    flat = tuple(argument.reshape(x.shape[0], -1) for argument in arguments[:3])
    return BlockRun(
        x=x,
        tensors={name: tensor for name, tensor in named.items() if not name.startswith(prefix)},
        experts=_experts_run(experts, flat, routed.reshape(x.shape[0], -1)),
        output=output.reshape(x.shape),
    )


def _experts_run(experts: Any, arguments: tuple[Tensor, ...], output: Tensor) -> ExpertsRun:
    inputs, ids, weights = arguments
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    gate_up, down = getattr(experts, name).detach(), experts.down_proj.detach()
    if experts.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    biases = None
    if experts.has_bias:
        biases = (getattr(experts, f"{name}_bias").detach(), experts.down_proj_bias.detach())
    return ExpertsRun(
        inputs=inputs,
        topk_ids=ids,
        topk_weights=weights.float(),
        output=output,
        gate_up=gate_up,
        down=down,
        biases=biases,
        norm=experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None,
    )


def _count(experts: Any) -> int:
    """Return the number of tokens: fewer where each takes long."""
    return _MORE_TOKENS if experts.down_proj[0].numel() < _SMALL else _TOKENS


def _tokens(count: int, direction: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``[T, D]``: normal numbers, a few tokens with large ones, and tokens shifted along ``direction``."""
    x = torch.randn(count, direction.numel(), generator=generator, device="cpu")
    x -= (x @ direction)[:, None] * direction
    x[1::6] *= 4
    x[2::6, ::7] *= 12
    shifts = torch.tensor(_SHIFTS, device="cpu").repeat_interleave(count // len(_SHIFTS))
    return x - shifts[:, None] * direction


def _fill(block: nn.Module, experts: nn.Module, direction: Tensor, generator: torch.Generator) -> None:
    """Replace parameters and buffers on the meta device by random ones; matrices of the router read ``direction``."""
    stacks = {id(tensor) for _, tensor in experts.named_parameters(recurse=False)}
    for module in block.modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not tensor.is_floating_point():
                raise SpecError(f"{type(module).__name__}.{name} holds {tensor.dtype}, no weights")
            if id(tensor) in stacks and tensor.dim() == 3:
                value = _windows(tensor.shape, generator)
            else:
                value = _random(tensor.shape, direction, generator)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
            setattr(module, name, value)


def _windows(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return a stack ``[E, N, K]`` whose experts overlap in memory and all differ."""
    experts, rows, columns = shape
    step = 8 * 13
    buffer = torch.randn(rows * columns + step * experts, generator=generator, device="cpu") / math.sqrt(columns)
    return buffer.as_strided((experts, rows, columns), (step, columns, 1))


def _random(shape: torch.Size, direction: Tensor, generator: torch.Generator) -> Tensor:
    value = torch.randn(shape, generator=generator, device="cpu")
    if len(shape) < 2:
        return 0.3 * value + 0.2  # no two roles of a vector agree by chance: neither zero nor one
    value /= math.sqrt(shape[-1])
    return value + direction if shape[-1] == direction.numel() and shape[0] < shape[-1] else value
