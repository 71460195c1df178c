"""MegaMoE of DeepGEMM on Hopper GPUs (``sgl-deep-gemm``), called as a layer of one rank, for ``bench_parallel.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.planning import Plan
    from collegium.types import ExpertWeights, Routing

__all__ = ["MegaMoe"]

_ALIGNMENT = 128  # of the tokens that a buffer is for


class MegaMoe:
    """A rank's experts in FP8 blocks of 128 x 128, tokens in FP8 with a scale for each 128 columns.

    plan: of our own layer over the same ranks. Buffers are as large as a call needs, which suits it best. Raises
    ImportError where ``deep_gemm`` cannot be imported.
    """

    def __init__(self, weights: ExpertWeights[Any], plan: Plan) -> None:
        import deep_gemm  # pyright: ignore[reportMissingImports]

        self._library: Any = deep_gemm
        self.plan, self.spec = plan, plan.problem.spec
        gate_up, down = weights.gate_up, weights.down
        # Gate's rows, then up's.
        first = gate_up.codes.flatten(1, 2), gate_up.scales.flatten(1, 2)
        self._weights = deep_gemm.transform_weights_for_mega_moe_sm90(first, (down.codes, down.scales))
        self._buffers = dict[int, Any]()

    @property
    def name(self) -> str:
        """The package and its version."""
        return f"sgl-deep-gemm {self._library.__version__}"

    @staticmethod
    def routed(routing: Routing) -> Routing:
        """Return ``routing`` in the dtypes that are taken, to be made before time is."""
        return replace(routing, topk_ids=routing.topk_ids.int(), topk_weights=routing.topk_weights.float())

    def __call__(self, x: Tensor, *, routing: Routing, out: Tensor | None = None) -> Tensor:
        """Return the experts' sums for ``x [T, H]``; all ranks bring equally many tokens."""
        tokens, spec = x.shape[0], self.spec
        out = torch.empty_like(x) if out is None else out
        room = -(-tokens // _ALIGNMENT) * _ALIGNMENT
        if room not in self._buffers:
            self._buffers.clear()
            top_k = spec.routing.top_k
            sizes = spec.num_experts, room, top_k, spec.hidden_size, spec.intermediate_size
            self._buffers[room] = self._library.get_symm_buffer_for_mega_moe(distributed.group.WORLD, *sizes)
        buffer = self._buffers[room]
        self._library.mega_moe_pre_dispatch_sm90(
            x,
            routing.topk_ids,
            routing.topk_weights,
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            tokens,
        )
        self._library.fp8_mega_moe(out, *self._weights, buffer)
        return out

    def check(self) -> None:
        """Nothing is noted that could be raised."""
