"""Test inputs that expose swapped operands, activations that share no code with the library, and an error measure."""

import math

import torch
from torch import Tensor

from ..formats.unquantised import Fp32
from ..types import ActivationSpec, ExpertWeights

__all__ = ["activate_float64", "heavy_tailed", "random_experts", "relative_error", "uneven_ids"]


def heavy_tailed(*shape: int, seed: int, channels: bool = True) -> Tensor:
    """Return float32 values of unit root mean square with heavy tails (Student t, 4 degrees of freedom).

    channels: scale one column in sixteen by eight, as in the hidden states of trained models. The unit scale matters:
    near zero, silu(a) * b is almost silu(b) * a, and a test could not distinguish gate from up.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    chi = torch.randn(4, *shape, generator=generator).square().mean(0)
    values = normal / torch.sqrt(chi)
    if channels and shape[-1] >= 16:
        values[..., ::16] *= 8
    if not values.numel():
        return values
    return values / values.square().mean().sqrt().clamp(min=1e-30)


def uneven_ids(tokens: int, top_k: int, experts: int, *, seed: int) -> Tensor:
    """Return ids ``[T, K]``, distinct per token, with one expert in every token and a third of the experts unused."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(experts, generator=generator)[: max(top_k, experts - experts // 3)]
    hot = used[0]
    others = used[1:]
    rows = [others[torch.randperm(len(others), generator=generator)[: top_k - 1]] for _ in range(tokens)]
    if not rows:
        return torch.empty(0, top_k, dtype=torch.int64)
    ids = torch.stack([torch.cat([hot[None], row]) for row in rows])
    return ids.gather(1, torch.rand(ids.shape, generator=generator).argsort(1))


def random_experts(
    experts: int, parts: int, intermediate_size: int, hidden: int, *, seed: int, bias: bool = False
) -> ExpertWeights[Fp32]:
    """Return heavy-tailed float32 experts, scaled so that intermediate values have unit size.

    gate_up ``[experts, parts, intermediate_size, hidden]``, down ``[experts, hidden, intermediate_size]``; bias: add
    biases of unit size. The input reach of static activations covers such values and their outliers.
    """
    down = heavy_tailed(experts, hidden, intermediate_size, seed=seed + 1, channels=False) * intermediate_size**-0.5
    gate_up = heavy_tailed(experts, parts, intermediate_size, hidden, seed=seed, channels=False) * hidden**-0.5
    gate_up_bias = heavy_tailed(experts, parts, intermediate_size, seed=seed + 2)
    down_bias = heavy_tailed(experts, hidden, seed=seed + 3)
    return ExpertWeights(
        gate_up=Fp32(values=gate_up, shape=tuple(gate_up.shape)),
        down=Fp32(values=down, shape=tuple(down.shape)),
        gate_up_bias=gate_up_bias if bias else None,
        down_bias=down_bias if bias else None,
        input_reach=(256.0, 256.0),
        expert_reach=torch.full((experts, 2), 256.0),
    )


def relative_error(output: Tensor, truth: Tensor) -> float:
    """Return the relative L2 error in float64; infinity if ``output`` has NaN or infinity."""
    output = output.double()
    truth = truth.double()
    if not bool(torch.isfinite(output).all()):
        return math.inf
    return float((output - truth).norm() / truth.norm().clamp(min=1e-300))


def activate_float64(projected: Tensor, spec: ActivationSpec) -> Tensor:
    """Return the activation of float64 ``projected [P, ...]``, gate first, written directly from its formula."""
    gate, up = projected[0], projected[-1]
    if spec.kind == "swiglu_step":
        step = gate / (1 + torch.exp(-gate))
        return step.clamp(max=spec.limit) * up.clamp(-spec.limit, spec.limit) if spec.limit else step * up
    if spec.limit is not None:
        gate = gate.clamp(max=spec.limit)
        up = up.clamp(-spec.limit, spec.limit)
    sigmoid = 1 / (1 + torch.exp(-gate))
    cube = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return {
        "swiglu": lambda: gate * sigmoid * up,
        "swiglu_oai": lambda: (up + spec.beta) * gate / (1 + torch.exp(-spec.alpha * gate)),
        "situ": lambda: (
            spec.gate_bound
            * torch.tanh(gate / spec.gate_bound)
            * sigmoid
            * spec.up_bound
            * torch.tanh(up / spec.up_bound)
        ),
        "geglu": lambda: 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up,
        "geglu_tanh": lambda: 0.5 * gate * (1 + torch.tanh(cube)) * up,
        "relu2": lambda: up.clamp(min=0) ** 2,
        "silu": lambda: up / (1 + torch.exp(-up)),
        "gelu": lambda: 0.5 * up * (1 + torch.erf(up / math.sqrt(2))),
    }[spec.kind]()
