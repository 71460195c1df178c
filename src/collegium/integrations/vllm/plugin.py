"""The hooks: vLLM builds its layers, routes, loads with its own loaders and moves tokens between ranks; we run experts.

Once all weights of a model are loaded, what vLLM's parameters hold becomes our payloads, is audited, planned and
packed, and each layer's method is replaced by one that calls the packed layer. A model runs through Collegium in all
its MoE layers or in none.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...errors import CollegiumError, InputError, MissingExtraError, PlanError
from ...formats.unquantised import FLOAT_FORMATS
from ...layer import MoELayer
from ...planning import Plan
from ...runtime.devices import plain_torch
from ...runtime.warm_up import warm_up
from ...types import Routing
from ..extra import import_extra
from .layers import (
    LoadedShards,
    StoredAs,
    check_weights,
    fp8_core_format,
    is_padded,
    loaded_weights,
    plan_layer,
    stored_as,
)
from .served import not_served

__all__ = ["ACTIVATIONS", "MODE", "register", "vllm_experts"]

# `vllm serve` passes no arguments on to plug-ins.
MODE, ACTIVATIONS = "COLLEGIUM_VLLM", "COLLEGIUM_VLLM_ACTIVATIONS"
_MODES = ("auto", "on", "require", "off")
_LAYERS = "vllm.model_executor.layers.fused_moe"


@dataclass(kw_only=True, slots=True)
class _State:
    """What is known of one layer until its weights are packed.

    config: vLLM's own, of the whole engine. refusal: why Collegium does not run it. alone: the error with which vLLM
    refused to run it itself. was: the dtype vLLM gave to parameters that hold scales as published instead. together:
    the layers of its model.
    """

    config: Any
    refusal: str | None = None
    vllm_error: Exception | None = None
    stored: StoredAs | None = None
    plan: Plan | None = None
    loaded_shards: LoadedShards = field(default_factory=LoadedShards)
    dtypes_before: dict[Any, torch.dtype] = field(default_factory=dict[Any, torch.dtype])
    layers: list[Any] = field(default_factory=list[Any])


_waiting: list[Any] = []  # layers of the model that is being built and loaded, in order


def register() -> None:
    """Make Collegium run the experts of the models that this process loads from now on; vLLM calls it by itself.

    The option COLLEGIUM_VLLM: ``auto`` runs the recipes that have been served (``served.py``), ``on`` those that a
    kernel runs, and vLLM runs the other models; with ``require`` a model that is refused is an error; ``off``: vLLM
    runs all. Raises InputError for another mode, MissingExtraError without vLLM.
    """
    if _mode() == "off":
        return
    try:
        layers = import_extra(f"{_LAYERS}.routed_experts", "vllm 0.32 or later", group="vllm").RoutedExperts
        build, find, weights = layers.__init__, layers._get_quant_method, layers.get_expert_weights
    except (AttributeError, MissingExtraError) as error:
        if _mode() == "require":
            raise
        say = import_extra("vllm.logger", group="vllm").init_logger("vllm.collegium")
        say.warning("Collegium: vLLM's own experts run all models, this release has other classes: %s", error)
        return
    if hasattr(layers, "collegium"):
        return
    layers.collegium = None

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config = import_extra("vllm.config", group="vllm").get_current_vllm_config()
        object.__setattr__(self, "collegium", _State(config=config))
        object.__setattr__(self, "weight_loader", _recording(self, self.weight_loader))
        build(self, *args, **kwargs)
        _plan_before_loading(self, self.collegium)

    @functools.wraps(find)
    def get_quant_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find(self, *args, **kwargs)
        except Exception as error:  # of many kinds: vLLM has no kernel for this machine
            self.collegium.vllm_error = error
            with _without_kernel_check():
                return find(self, *args, **kwargs)

    @functools.wraps(weights)
    def get_expert_weights(self: Any) -> Any:
        return (
            _expert_bytes(self.quant_method.packed) if isinstance(self.quant_method, _method_class()) else weights(self)
        )

    layers.__init__, layers._get_quant_method, layers.get_expert_weights = init, get_quant_method, get_expert_weights


def _expert_bytes(packed: MoELayer) -> list[Tensor]:
    """Return the packed experts as vLLM's balancer moves them: in place, ``[local physical experts, bytes]`` each."""
    return [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in packed.experts.slots()]


def _option(name: str) -> str:
    return os.environ.get(name, "").strip()


def _mode() -> str:
    mode = _option(MODE).lower() or "auto"
    if mode not in _MODES:
        raise InputError(f"{MODE} is {mode!r}, allowed: {', '.join(_MODES)}")
    return mode


@contextmanager
def _without_kernel_check() -> Generator[None]:
    """Let vLLM's methods be built, and load weights, on a machine for which vLLM has no kernel."""

    def none(*_: object, **__: object) -> tuple[None, None]:
        return None, None

    modules = [m for name, m in sys.modules.items() if name.startswith("vllm.model_executor.layers.quantization")]
    selectors = [(m, n, v) for m in modules for n, v in vars(m).items() if re.fullmatch(r"select_\w+_moe_backend", n)]
    try:
        for module, name, _ in selectors:
            setattr(module, name, none)
        yield
    finally:
        for module, name, value in selectors:
            setattr(module, name, value)


def _recording(layer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's loader of one tensor, which also remembers what it loaded and keeps scales as published."""

    def loader(
        param: Any, loaded_weight: Tensor, weight_name: str, shard_id: Any, expert_id: Any, *rest: Any, **more: Any
    ) -> Any:
        state, dtypes = layer.collegium, (loaded_weight.dtype, param.dtype)
        if "scale" in weight_name and set(dtypes) <= set(FLOAT_FORMATS) and torch.promote_types(*dtypes) != param.dtype:
            state.dtypes_before[param] = param.dtype
            param.data = param.data.to(loaded_weight.dtype)
        if expert_id is not None and loaded_weight.dim() < max(param.dim(), 2):
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            state.loaded_shards.setdefault(id(param), set()).add((local, str(shard_id)))
        return load(param, loaded_weight, weight_name, shard_id, expert_id, *rest, **more)

    loader.supports_moe_loading = True  # type: ignore[attr-defined]
    return loader


def _plan_before_loading(layer: Any, state: _State) -> None:
    """Plan one layer from what is known before its weights are, and make its method hand the weights to us."""
    method = layer.quant_method
    try:
        state.stored = stored_as(method)
        state.plan = plan_layer(layer, state.stored, _option(ACTIVATIONS) or None)
        reason = not_served(state.plan) if _mode() == "auto" else None
        if reason is not None:
            raise PlanError(reason)
        if state.stored.format == "plain" and not is_padded(layer):
            for name in ("w13_weight", "w2_weight"):
                getattr(layer, name).data.fill_(torch.nan)  # what no file fills is seen
    except CollegiumError as error:
        state.refusal = str(error)
        if _mode() == "require" or state.vllm_error is not None:
            own = "" if state.vllm_error is None else f"; nor does vLLM itself run it here: {state.vllm_error}"
            raise PlanError(f"{layer.layer_name} cannot run through Collegium: {error}{own}") from state.vllm_error
    method.process_weights_after_loading = functools.partial(_pack_or_finish, method.process_weights_after_loading)
    _waiting.append(layer)


@plain_torch()
def _pack_or_finish(original: Callable[[Any], None], layer: Any) -> None:
    """Pack a layer, or let vLLM finish it; with the first layer of a model it is decided for all of them."""
    state: _State = layer.collegium
    if layer in _waiting:
        # a model that failed to load may have left some
        layers = [other for other in _waiting if other.collegium.config is state.config]
        _waiting.clear()
        _decide_model(layers)
    if state.plan is None or state.stored is None:
        for param, dtype in state.dtypes_before.items():
            param.data = param.data.to(dtype)
        original(layer)
    else:
        packed = MoELayer(loaded_weights(layer, state.stored, state.loaded_shards), state.plan)
        for name, param in layer.named_parameters(recurse=False):
            if name.startswith(("w13_", "w2_")):
                param.data = param.data.new_empty(0)
        del layer.quant_method  # some methods are modules, which no other object may replace
        layer._replace_quant_method(_method_class()(layer.moe_config, packed))
        done = [each.quant_method for each in state.layers if isinstance(each.quant_method, _method_class())]
        if len(done) == len(state.layers):
            warm_up([each.packed for each in done])
    state.dtypes_before.clear()


def _decide_model(layers: list[Any]) -> None:
    """Audit the loaded weights of a model's layers, settle whether all of them run through Collegium, and say so."""
    kinds: dict[str, list[Any]] = {}
    for layer in layers:
        state: _State = layer.collegium
        state.layers = layers
        if state.refusal is None and state.stored is not None:
            try:
                weights = check_weights(loaded_weights(layer, state.stored, state.loaded_shards))
                state.plan = plan_layer(layer, state.stored, _option(ACTIVATIONS) or None, weights)
                kinds.setdefault(_plan_summary(state.plan), []).append(layer)
            except CollegiumError as error:
                state.refusal = str(error)
    if layers[0].moe_config.moe_parallel_config.enable_eplb:
        for layer in (each for others in list(kinds.values())[1:] for each in others):
            layer.collegium.refusal = "packed unlike others; vLLM moves all through one buffer; leave out --enable-eplb"
    say = import_extra("vllm.logger", group="vllm").init_logger("vllm.collegium")
    refused = [(each.layer_name, each.collegium.refusal) for each in layers if each.collegium.refusal is not None]
    config = layers[0].collegium.config
    if config.parallel_config.world_size_across_dp > 1:
        group = import_extra("vllm.distributed.parallel_state", group="vllm").get_ep_group()
        refused_by_rank: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(refused_by_rank, refused, group=group.cpu_group)
        refused = refused or [
            (f"on another rank {name}", reason) for others in refused_by_rank for name, reason in others
        ]
    if refused:
        listed = f"{len(refused)} of {len(layers)} MoE layers are refused: {_refusal_text(refused)}"
        alone = next((each.collegium.vllm_error for each in layers if each.collegium.vllm_error is not None), None)
        if _mode() == "require" or alone is not None:
            raise PlanError(listed if alone is None else f"{listed}; nor does vLLM itself run them here: {alone}")
        for layer in layers:
            layer.collegium.plan = None
        say.warning("Collegium: vLLM's own experts run this model; %s", listed)
        return
    if isinstance(config.additional_config, dict):
        config.additional_config["collegium"] = __version__  # part of the key under which vLLM keeps what it compiles
    _report(say, kinds, len(layers))


def _report(say: Any, kinds: dict[str, list[Any]], count: int) -> None:
    """Log what runs, by kind of layer, and once the option that would be faster."""
    for text, those in kinds.items():
        of = f"{those[0].layer_name} to {those[-1].layer_name}, {len(those)} of {count} MoE layers"
        say.info("Collegium: runs the experts of %s: %s", of, text)
    if _option(ACTIVATIONS):
        return
    forms = (fp8_core_format(those[0].collegium.plan) for those in kinds.values())
    form = next((form for form in forms if form is not None), None)
    if form is not None:
        say.info("Collegium: %s=%s runs experts on FP8 tensor cores and rounds activations to FP8", ACTIVATIONS, form)


def _refusal_text(refused: list[tuple[str, str]]) -> str:
    """Return names of layers and the reasons why they are refused, each reason once."""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    more = {reason: f" and {len(group) - 1} more" if len(group) > 1 else "" for reason, group in names.items()}
    return "; ".join(f"{group[0]}{more[reason]}: {reason}" for reason, group in names.items())


def _plan_summary(layer_plan: Plan) -> str:
    """Return what is said of a plan; layers of which the same is said are packed alike."""
    spec, where = (
        layer_plan.problem.spec,
        layer_plan.problem.placement or f"all {layer_plan.problem.spec.num_experts} experts",
    )
    text = (
        f"kernel {layer_plan.kernel}, weights {spec.weight_format}, activations {layer_plan.activation_format}, {where}"
    )
    biases = " with biases" if spec.expert_bias else ""
    return (
        f"{text}, {spec.intermediate_size} wide{biases}, at most {layer_plan.problem.limits.max_tokens} tokens a pass"
    )


@functools.cache
def _method_class() -> Any:
    base: Any = import_extra(f"{_LAYERS}.fused_moe_method_base", group="vllm").FusedMoEMethodBase

    class CollegiumMoEMethod(base):
        """The method of a layer whose experts are packed. vLLM routes, and adds what ranks return."""

        skip_forward_padding = True

        def __init__(self, moe: Any, packed: MoELayer) -> None:
            super().__init__(moe)
            self.packed = packed

        def create_weights(self, *_: Any, **__: Any) -> None:
            raise InputError(f"weights of packed experts cannot be changed; start the engine anew, or with {MODE}=off")

        process_weights_after_loading = create_weights

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            return None

        # vLLM passes weights before ids; everything of Collegium takes ids first.
        def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            if torch.compiler.is_compiling():
                return torch.ops.collegium.vllm_experts(x, topk_ids, topk_weights, layer.layer_name)
            return self.packed(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))

    return CollegiumMoEMethod


@torch.library.custom_op("collegium::vllm_experts", mutates_args=())
def vllm_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer_name: str) -> Tensor:
    """Return what the experts of the layer that vLLM calls ``layer_name`` make of ``x [T, H]``."""
    layers = import_extra("vllm.forward_context", group="vllm").get_forward_context().no_compile_layers
    packed: MoELayer = layers[layer_name].routed_experts.quant_method.packed
    return packed(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))


@vllm_experts.register_fake
def _vllm_experts_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)
