"""Stand-ins of vLLM for tests: a layer's config and tensors, and an engine that builds, loads and finishes layers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collegium.integrations.vllm import method, plugin
from collegium.ops.activation import activate
from collegium.testing.compare import heavy_tailed
from collegium.types import ActivationSpec

if TYPE_CHECKING:
    import pytest

EXPERTS, HIDDEN, WIDE, TOP_K = 6, 192, 96, 3


def moe(**changed: Any) -> Any:
    """What vLLM calls the config of a MoE layer."""
    parallel = {"enable_eplb": False, "use_all2all_kernels": False, "all2all_backend": "allgather_reducescatter"}
    moved = {"cpu_offload_gb": 0, "offload_group_size": 0}
    moved |= {key: changed.pop(key) for key in list(changed) if key in moved}
    own: dict[str, Any] = {
        "activation": SimpleNamespace(value="silu"), "swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None,
        "activation_situ_beta": None, "activation_situ_linear_beta": None, "is_lora_enabled": False,
        "moe_backend": "auto", "num_experts": EXPERTS, "experts_per_token": TOP_K, "w13_num_shards": 2,
        "hidden_dim_unpadded": HIDDEN, "intermediate_size": WIDE, "has_bias": False, "in_dtype": torch.float32,
        "intermediate_size_per_partition_unpadded": WIDE, "tp_shard_with_padding": False, "max_num_tokens": 64,
        "dp_size": 1, "pcp_size": 1, "tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0,
        "sp_size": 1, "is_sequence_parallel": False, "device": torch.device("cpu"), "enable_elastic_ep": False,
        "offload": SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=moved["cpu_offload_gb"]),
            prefetch=SimpleNamespace(offload_group_size=moved["offload_group_size"]),
        ),
    }  # fmt: skip
    parallel |= {key: changed.pop(key) for key in list(changed) if key in parallel}
    return SimpleNamespace(**{**own, **changed}, moe_parallel_config=SimpleNamespace(**parallel))


class RoutedExperts(nn.Module):
    """A layer of vLLM with the parameters ``tensors``."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: Any, slots: list[int] | None = None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.moe_config, self.layer_name = config, "model.layers.0.mlp.experts"
        self.hidden_size, self.apply_router_weight_on_input = config.hidden_dim_unpadded, False
        self.intermediate_size_per_partition = config.intermediate_size_per_partition_unpadded
        self.local_num_experts = next(iter(tensors.values())).shape[0]
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        engine = SimpleNamespace(enable_elastic_ep=config.enable_elastic_ep)
        self.collegium = SimpleNamespace(config=SimpleNamespace(parallel_config=engine, offload_config=config.offload))
        self._expert_map = None if slots is None else torch.tensor(slots)


def matrices(count: int = EXPERTS) -> list[list[torch.Tensor]]:
    """Gate, up and down of each expert."""
    return [
        [
            heavy_tailed(*shape, seed=3 * e + n)
            for n, shape in enumerate(((WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)))
        ]
        for e in range(count)
    ]


def truth(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out, experts = torch.zeros_like(x), matrices()
    for token in range(len(x)):
        for slot in range(TOP_K):
            gate, up, down = experts[int(ids[token, slot])]
            middle = activate(torch.stack([gate @ x[token], up @ x[token]])[None], ActivationSpec())[0]
            out[token] += weights[token, slot] * (down @ middle)
    return out


class Worker:
    """The worker of an engine, with the calls that reach vLLM."""

    calls: list[object]

    def __init__(self, model: nn.Module, draft: nn.Module | None = None) -> None:
        self.model_runner, self.draft = SimpleNamespace(model=model), draft

    def get_draft_model(self) -> nn.Module | None:
        return self.draft

    def sleep(self, level: int = 1) -> None:
        self.calls.append(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(tags)


class Stand:
    """What the plug-in uses of vLLM, made of stand-ins: layers are built, loaded one expert at a time, and finished."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, release: str = "0.33.0") -> None:
        self.said: list[str] = []
        self.calls: list[object] = []  # of the worker
        self.processed = False  # whether the weight cache hands the weights over
        self.group: Any = None  # of the ranks that exchange tokens
        self.forward_layers: dict[str, Any] = {}  # that the compiled operation finds
        self.config = SimpleNamespace(
            additional_config={},
            parallel_config=SimpleNamespace(world_size_across_dp=1, enable_elastic_ep=False),
            offload_config=moe().offload,
        )
        self.worker: Any = type("Worker", (Worker,), {"calls": self.calls})
        outer = self

        class RoutedExperts(nn.Module):
            local_num_experts, layer_name = 2, ""
            fails = False

            def __init__(self, name: str, config: Any, scales: torch.dtype = torch.bfloat16) -> None:
                super().__init__()
                self.layer_name, self.moe_config, self._expert_map = name, config, None
                self.hidden_size, self.apply_router_weight_on_input = HIDDEN, False
                self.intermediate_size_per_partition = WIDE
                self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
                self.quant_method = self._get_quant_method()
                for which, rows in (("w13", 2 * WIDE), ("w2", HIDDEN)):
                    columns = HIDDEN if which == "w13" else WIDE
                    weight = nn.Parameter(torch.zeros(2, rows, columns), requires_grad=False)
                    weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
                    self.register_parameter(f"{which}_weight", weight)
                    self.register_parameter(
                        f"{which}_scale", nn.Parameter(torch.ones(2, dtype=scales), requires_grad=False)
                    )

            def _get_quant_method(self) -> Any:
                return UnquantizedFusedMoEMethod()

            def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
                return expert

            def weight_loader(
                self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int
            ) -> bool:
                half = {"w1": slice(0, WIDE), "w3": slice(WIDE, None), "w2": slice(None)}[shard_id]
                own = param.data[expert_id]
                (own if own.dim() == 0 else own[half]).copy_(loaded_weight)
                return True

            def _replace_quant_method(self, new: Any) -> None:
                self.quant_method = new

            def get_expert_weights(self) -> list[torch.Tensor]:
                return [param.view(2, -1) for param in self.parameters()]

        class UnquantizedFusedMoEMethod(nn.Module):
            def process_weights_after_loading(self, layer: Any) -> None:
                outer.said.append(f"vLLM finished {layer.layer_name}")

        class Base:
            supports_internal_mk = False

            def __init__(self, config: Any) -> None:
                self.moe = config

        self._install(monkeypatch, release, RoutedExperts, Base)
        method.method_class.cache_clear()
        monkeypatch.setattr(plugin, "_waiting", [])
        self.layer: Any = RoutedExperts
        plugin.register()
        plugin.register()  # vLLM may call it several times

    def _install(self, monkeypatch: pytest.MonkeyPatch, release: str, layer: type, base: type) -> None:
        """Put the modules of vLLM that the plug-in imports where it finds them."""

        def log(text: str, *values: object) -> None:
            self.said.append(text % values)

        fused_moe = "vllm.model_executor.layers.fused_moe"
        for name, held in {
            "vllm": {"__version__": release},
            "vllm.model_executor.utils": {"is_weights_pre_processed": lambda: self.processed},
            "vllm.v1.worker.gpu_worker": {"Worker": self.worker},
            "vllm.distributed.parallel_state": {"get_ep_group": lambda: self.group},
            "vllm.forward_context": {
                "get_forward_context": lambda: SimpleNamespace(no_compile_layers=self.forward_layers)
            },
            f"{fused_moe}.routed_experts": {"RoutedExperts": layer},
            f"{fused_moe}.fused_moe_method_base": {"FusedMoEMethodBase": base},
            "vllm.config": {"get_current_vllm_config": lambda: self.config},
            "vllm.logger": {"init_logger": lambda _: SimpleNamespace(info=log, warning=log)},
        }.items():
            module = ModuleType(name)
            vars(module).update(held)
            monkeypatch.setitem(sys.modules, name, module)

    def model(self, *, without: tuple[int, int, str] | None = None, last: Any = None, **changed: Any) -> list[Any]:
        """Three layers; last: what vLLM's config says otherwise of the last one."""
        sizes = {"num_experts": 2, "experts_per_token": 2}
        kinds = [changed, changed, {**changed, **(last or {})}]
        built = [self.layer(f"layers.{n}", moe(**sizes, **kind)) for n, kind in enumerate(kinds)]
        for number, layer in enumerate(built):
            for expert, (gate, up, down) in enumerate(matrices(2)):
                for shard, weight in (("w1", gate), ("w3", up), ("w2", down)):
                    if (number, expert, shard) != without:
                        param = layer.w2_weight if shard == "w2" else layer.w13_weight
                        param.weight_loader(param, weight, "w_weight", shard, expert)
        for layer in built:
            layer.quant_method.process_weights_after_loading(layer)
        return built
