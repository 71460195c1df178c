"""A small serving engine, which uses Collegium as engines do: with its names, modules, shards and functions.

Each block of its model adds a gate, routed experts and a shared expert to the residual. Block 1 stores gate and up as
one tensor, and the last block runs through functions, without a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from collegium import (
    LayerBuilder,
    Limits,
    MoELayer,
    MoEOptions,
    MoESpec,
    Overrides,
    Ranks,
    RoutingSpec,
    WeightUpdater,
    encode_experts,
    moe,
    moe_batched,
)
from collegium.graphs import GraphRunner, capture_all
from collegium.parallel.placement import linear, tensor_parallel
from collegium.testing.compare import heavy_tailed, random_experts
from collegium.types import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["BATCH", "BLOCKS", "HIDDEN", "TOP_K", "BlockWeights", "Engine", "batched_experts", "random_model", "save"]

BLOCKS, EXPERTS, HIDDEN, INNER, SHARED, TOP_K = 3, 8, 128, 256, 64, 2
BATCH = 16  # tokens of a batch
BUDGETS = (1, 4, BATCH)
Mode = Literal["experts", "slices"]
# By weight format: the fields of a payload, the ends of their names in the files, and the parameters of the builder.
STORED = {
    "bf16": (("values", "weight", "weight"),),
    "fp8_block": (("codes", "weight", "weight"), ("scales", "scale", "weight_scale_inv")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWeights:
    """One block of a model: gate ``[E, H]``, routed experts, and a shared expert in BF16."""

    gate: Tensor
    experts: ExpertWeights[Any]
    shared: ExpertWeights[Any]


def random_model(weight_format: str, seed: int = 0) -> list[BlockWeights]:
    """Return the weights of all blocks."""
    return [
        BlockWeights(
            gate=heavy_tailed(EXPERTS, HIDDEN, seed=seed + block, channels=False),
            experts=encode_experts(random_experts(EXPERTS, 2, INNER, HIDDEN, seed=seed + block), weight_format),
            shared=encode_experts(random_experts(1, 2, SHARED, HIDDEN, seed=seed + block + 50), "bf16"),
        )
        for block in range(BLOCKS)
    ]


def named_tensors(model: Sequence[BlockWeights]) -> dict[str, Tensor]:
    """Return the tensors of a model by the engine's names."""
    tensors: dict[str, Tensor] = {}
    for number, block in enumerate(model):
        prefix = f"blocks.{number}."
        tensors[prefix + "gate"] = block.gate
        tensors[prefix + "shared.in"] = block.shared.gate_up.decode()[0].bfloat16()
        tensors[prefix + "shared.out"] = block.shared.down.decode()[0].bfloat16()
        for field, ending, _ in STORED[block.experts.gate_up.name]:
            upper, lower = getattr(block.experts.gate_up, field), getattr(block.experts.down, field)
            for expert in range(EXPERTS):
                name = f"{prefix}expert_{expert}."
                if number == 1:
                    tensors[f"{name}in.{ending}"] = upper[expert].flatten(0, 1)
                else:
                    tensors[f"{name}gate.{ending}"], tensors[f"{name}up.{ending}"] = upper[expert]
                tensors[f"{name}out.{ending}"] = lower[expert]
    return {name: tensor.clone() for name, tensor in tensors.items()}


def save(model: Sequence[BlockWeights], folder: Path, files: int = 3) -> None:
    """Write the tensors of a model, spread over several files without any order."""
    tensors = list(named_tensors(model).items())
    for number in range(files):
        save_file(dict(tensors[number::files]), folder / f"part-{number}.safetensors")


def mapping(block: int, weight_format: str) -> list[tuple[str, str, None, str]]:
    """Return rows (parameter, name, expert, shard) for a builder."""
    shards = {"in": "w13", "out": "w2"} if block == 1 else {"gate": "w1", "up": "w3", "out": "w2"}
    return [
        (parameter, f"blocks.{block}.expert_{{expert}}.{name}.{ending}", None, shard)
        for _, ending, parameter in STORED[weight_format]
        for name, shard in shards.items()
    ]


class Gate(nn.Module):
    """The engine's router: logits in FP32, and no bias next to them, as its linear layers return it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.float() @ self.weight.T, None


class SharedExperts(nn.Module):
    """The engine's shared expert; with slices, the part of this rank's rows of gate and up and columns of down."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ half.T.to(x.dtype) for half in self.gate_up)
        return (nn.functional.silu(gate) * up) @ self.down.T.to(x.dtype)


def fused_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **arguments: Any
) -> Tensor:
    """Run experts as the engine's layers call it: ``arguments`` by the names of ``MoEOptions``."""
    return moe(hidden_states, w1, w2, topk_ids, topk_weights, options=MoEOptions(**arguments))


def batched_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **arguments: Any
) -> Tensor:
    """Run experts behind a low-latency dispatcher, which packs FP8 rows with scales by expert, and combine the rows."""
    experts, (tokens, width) = w2.shape[0], hidden_states.shape
    rows = hidden_states.new_zeros(experts, tokens, width)
    counts = torch.zeros(experts, dtype=torch.int64, device=rows.device)
    places = torch.zeros_like(topk_ids)
    for token, slot in torch.cartesian_prod(torch.arange(tokens), torch.arange(topk_ids.shape[1])).tolist():
        expert = topk_ids[token, slot]
        rows[expert, counts[expert]], places[token, slot] = hidden_states[token], counts[expert]
        counts[expert] += 1
    scale = rows.float().abs().amax(2, keepdim=True).clamp(min=1e-6) / 448
    codes = (rows.float() / scale).to(torch.float8_e4m3fn)
    options = MoEOptions(a1_scale=scale, out_dtype=hidden_states.dtype, **arguments)
    returned = moe_batched(codes, w1, w2, counts, options=options, expected=topk_ids.numel())
    return (returned[topk_ids, places].float() * topk_weights[..., None]).sum(1).to(hidden_states.dtype)


class LayerBlock(nn.Module):
    """A block whose experts are a layer, or the graphs of one."""

    def __init__(self, layer: MoELayer, gate: Gate, shared: SharedExperts) -> None:
        super().__init__()
        self.layer, self.gate, self.shared = layer, gate, shared
        self.runner: GraphRunner | None = None

    def forward(self, x: Tensor) -> Tensor:
        # Ranks that exchange tokens replay the same graph.
        budget = BATCH if self.layer.plan.groups else None
        y = self.layer(x) if self.runner is None else self.runner(x, budget=budget)
        if not self.layer.output_is_reduced:
            distributed.all_reduce(y)
        return x + y


class FunctionBlock(nn.Module):
    """A block that runs raw tensors through ``fused_experts``; with slices, each rank has a part of the experts."""

    def __init__(
        self, tensors: dict[str, Tensor], expert_map: Tensor | None, gate: Gate, shared: SharedExperts
    ) -> None:
        super().__init__()
        self.tensors, self.expert_map, self.gate, self.shared = tensors, expert_map, gate, shared

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x)[0].softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        y = fused_experts(
            x,
            topk_weights=weights,
            topk_ids=ids,
            expert_map=self.expert_map,
            global_num_experts=EXPERTS,
            **self.tensors,
        )
        y = y + self.shared(x)
        if self.expert_map is not None:
            distributed.all_reduce(y)
        return x + y


class Engine:
    """Serves a model from the files of a folder, on one rank or several.

    mode: with several ranks, ``experts`` sends each rank's requests to the ranks of their experts; with ``slices`` all
    ranks have the same requests, each returns a part of every sum, and the engine adds the parts.
    """

    def __init__(self, folder: Path, weight_format: str, *, device: str, dtype: str, mode: Mode) -> None:
        in_group = distributed.is_available() and distributed.is_initialized()
        self.rank, self.world = (distributed.get_rank(), distributed.get_world_size()) if in_group else (0, 1)
        self.weight_format, self.device, self.dtype, self.mode = weight_format, device, dtype, mode
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        self.blocks = [self._block(number, tensors) for number in range(BLOCKS)]

    def _block(self, number: int, tensors: dict[str, Tensor]) -> LayerBlock | FunctionBlock:
        gate, shared = (
            Gate(tensors[f"blocks.{number}.gate"].to(self.device)),
            SharedExperts(*self._shared(number, tensors)),
        )
        if number == BLOCKS - 1:
            return FunctionBlock(*self._raw(number, tensors), gate, shared)
        spec = MoESpec(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_experts=EXPERTS,
            routing=RoutingSpec(top_k=TOP_K),
            weight_format=self.weight_format,
        )
        where: dict[str, Any] = {"device": self.device}
        if self.world > 1 and self.mode == "experts":
            where = {"device": Ranks.of()}
        elif self.world > 1:
            overrides = Overrides(dispatcher="partial", shared="sliced")
            where |= {"placement": tensor_parallel(EXPERTS, self.rank, self.world), "overrides": overrides}
        builder = LayerBuilder(
            spec, router=gate, shared=shared, limits=Limits(max_tokens=BATCH), dtype=self.dtype, **where
        )
        builder.load_all(tensors.items(), mapping(number, self.weight_format))
        return LayerBlock(builder.finish(), gate, shared)

    def _shared(self, number: int, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        gate_up, down = (tensors[f"blocks.{number}.shared.{name}"].to(self.device) for name in ("in", "out"))
        if self.world > 1 and self.mode == "slices":
            gate_up, down = gate_up.chunk(self.world, 1)[self.rank], down.chunk(self.world, 1)[self.rank]
        return gate_up, down

    def _raw(self, number: int, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return w1, w2 and their scales for ``fused_experts``, and which experts these are, None for all of them."""
        local, expert_map = list(range(EXPERTS)), None
        if self.world > 1 and self.mode == "slices":
            local = list(linear(EXPERTS, self.rank, self.world).expert_ids)
            expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device=self.device)
            expert_map[local] = torch.arange(len(local), dtype=torch.int32, device=self.device)
        raw: dict[str, Tensor] = {}
        for _, ending, _ in STORED[self.weight_format]:
            suffix = "_scale" if ending == "scale" else ""
            names = [f"blocks.{number}.expert_{expert}." for expert in local]
            upper = [torch.cat([tensors[f"{name}{part}.{ending}"] for part in ("gate", "up")]) for name in names]
            raw["w1" + suffix] = torch.stack(upper).to(self.device)
            raw["w2" + suffix] = torch.stack([tensors[f"{name}out.{ending}"] for name in names]).to(self.device)
        return raw, expert_map

    @property
    def layer_blocks(self) -> list[LayerBlock]:
        """The blocks with a layer."""
        return [block for block in self.blocks if isinstance(block, LayerBlock)]

    def capture(self) -> None:
        """Capture the layers; on a CPU their runners pad batches, and nothing more."""
        runners = capture_all([block.layer for block in self.layer_blocks], BUDGETS)
        for block, runner in zip(self.layer_blocks, runners, strict=True):
            block.runner = runner

    def serve(self, requests: Sequence[Tensor]) -> list[Tensor]:
        """Return the output for each request ``[N, H]``, which run together in one batch."""
        x = torch.cat([*requests])
        with torch.inference_mode():
            for block in self.blocks:
                x = block(x)
        return list(x.split([len(request) for request in requests]))

    def update(self, tensors: dict[str, Tensor]) -> None:
        """Take new weights of all blocks, in the memory of the old ones."""
        for number, block in enumerate(self.blocks):
            block.gate.weight.copy_(tensors[f"blocks.{number}.gate"])
            for parameter, tensor in zip(block.shared.parameters(), self._shared(number, tensors), strict=True):
                parameter.copy_(tensor)
            if isinstance(block, LayerBlock):
                updater = WeightUpdater(block.layer)
                updater.load_all(tensors.items(), mapping(number, self.weight_format))
                updater.finish()
                continue
            for name, tensor in self._raw(number, tensors)[0].items():
                block.tensors[name].copy_(tensor)
