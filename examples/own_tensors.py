"""A layer from plain tensors: a custom router, four bits, and two ranks that share the experts."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import Tensor, distributed, nn

from collegium import (
    Limits,
    MoELayer,
    MoESpec,
    Problem,
    Ranks,
    RoutingSpec,
    expert_weights,
    plan,
    probe,
)

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 256, 192, 2


class CosineRouter(nn.Module):
    """Choose the experts whose embeddings point most nearly in the direction of the token."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(experts, hidden), requires_grad=False)

    def forward(self, x: Tensor, logits: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        """Return ids ``[T, K]``, then weights ``[T, K]``; logits are None, as the layer has no router."""
        scores = nn.functional.normalize(x.float(), dim=-1) @ nn.functional.normalize(self.embeddings, dim=-1).T
        weights, ids = scores.topk(top_k)
        return ids, torch.softmax(weights, dim=-1)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return gate ``[E, I, H]``, up ``[E, I, H]`` and down ``[E, H, I]``, as ``nn.Linear`` has its weights."""
    torch.manual_seed(0)
    gate, up = torch.randn(2, EXPERTS, INTERMEDIATE, HIDDEN).div(HIDDEN**0.5).bfloat16()
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).div(INTERMEDIATE**0.5).bfloat16()
    return gate, up, down


def layer_of(weight_format: str, ranks: Ranks | None = None) -> MoELayer:
    """Return the layer with its experts in ``weight_format``; ranks: this rank's part of it."""
    gate, up, down = tensors()
    router = CosineRouter(EXPERTS, HIDDEN)
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format=weight_format,
    )
    placement = None if ranks is None else ranks.placement(EXPERTS)
    if placement is not None:
        local = list(placement.expert_ids)
        gate, up, down = gate[local], up[local], down[local]
    problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=64), placement=placement)
    return MoELayer(expert_weights((gate, up), down, weight_format=weight_format), plan(problem), choose=router)


def tokens(rank: int = 0) -> Tensor:
    """Return the tokens of a rank, ``[5, H]``."""
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()


def two_ranks() -> None:
    """Run one of two processes that torchrun started; each brings its own tokens and holds half of the experts."""
    distributed.init_process_group("gloo")
    ranks = Ranks.of()
    layer, whole = layer_of("mxfp4", ranks), layer_of("mxfp4")
    x = tokens(ranks.rank)
    same = torch.equal(layer(x), whole(x))
    print(f"rank {ranks.rank}: experts {layer.plan.problem.local_experts}, the bits of one rank: {same}")
    distributed.destroy_process_group()
    if not same:
        raise SystemExit(1)


def main() -> None:
    if "LOCAL_RANK" in os.environ:
        two_ranks()
        return
    x = tokens()
    plain, packed = layer_of("bf16"), layer_of("mxfp4")
    error = (packed(x) - plain(x)).float().norm() / plain(x).float().norm()
    print(packed.plan.explain(), "\n")
    print(f"{packed.nbytes:,} bytes instead of {plain.nbytes:,}, {100 * error:.1f} % from BF16 weights", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
