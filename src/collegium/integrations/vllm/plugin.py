"""Hooks into vLLM: vLLM builds and loads its layers, and routes; Collegium runs the experts.

When all weights of a model are loaded, they are audited, planned and packed, and the method of each MoE layer is
replaced by one that calls the packed layer. Collegium runs all MoE layers of a model or none.

``RoutedExperts`` is patched, since ``PluggableLayer.register_oot`` replaces a class by its exact name and so leaves out
subclasses such as that of gpt-oss.
"""

import functools
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...errors import CollegiumError, InputError, PlanError
from ...formats.unquantised import FLOAT_FORMATS
from ...layer import MoELayer
from ...planning import Plan
from ...runtime.devices import plain_torch
from ...runtime.warm_up import warm_up
from ..extra import import_extra
from .layers import (
    FP8,
    LoadedShards,
    StoredAs,
    check_weights,
    fp8_core_format,
    is_padded,
    loaded_weights,
    lost_declaration,
    plan_layer,
    stored_as,
)
from .method import method_class, refuse_discarding
from .options import ACTIVATIONS, MODE, RELEASES, mode, option
from .served import not_served

__all__ = ["register"]

_LAYERS = "vllm.model_executor.layers.fused_moe"
# vLLM's loader of gpt-oss names both halves of w13 at once, rows of gate and up interleaved.
_GPT_OSS_SHARDS = {"gpt_oss_w13": ("w1", "w3"), "gpt_oss_w2": ("w2",)}


@dataclass(kw_only=True, slots=True)
class _State:
    """State of one layer until its weights are packed.

    config: vLLM's config of the engine. refusal: why Collegium does not run the layer. vllm_error: the error with which
    vLLM refused to run it. loaded_shards: by parameter, what was loaded. dtypes_before: vLLM's dtype of parameters that
    were converted to the published dtype of their scales. layers: all MoE layers of the model.
    """

    config: Any
    refusal: str | None = None
    vllm_error: Exception | None = None
    stored: StoredAs | None = None
    plan: Plan | None = None
    loaded_shards: LoadedShards = field(default_factory=LoadedShards)
    dtypes_before: dict[Any, torch.dtype] = field(default_factory=dict[Any, torch.dtype])
    layers: list[Any] = field(default_factory=list[Any])


_waiting: list[Any] = []  # layers of the model that is being loaded, in order


def register() -> None:
    """Run the experts of models loaded from now on through Collegium. vLLM calls this function for its plug-ins.

    The environment variable COLLEGIUM_VLLM: ``auto`` runs recipes that have been served (``served.py``), ``on`` all
    recipes that a kernel supports; vLLM runs the other models. With ``require`` an unsupported model is an error; with
    ``off`` vLLM runs all models. Unknown releases of vLLM run all models themselves, and are an error with ``require``.
    Raises InputError for another mode or release, MissingExtraError without vLLM.
    """
    if mode() == "off":
        return
    release = str(import_extra("vllm", group="vllm").__version__)
    if ".".join(release.split(".")[:2]) not in RELEASES:
        text = f"vLLM {release} is not known; known releases: {', '.join(RELEASES)}"
        if mode() == "require":
            raise InputError(f"{text}; install one of them, or use {MODE}=off")
        logger = import_extra("vllm.logger", group="vllm").init_logger("vllm.collegium")
        logger.warning("Collegium: vLLM's own experts run all models; %s", text)
        return
    layers = import_extra(f"{_LAYERS}.routed_experts", group="vllm").RoutedExperts
    if hasattr(layers, "collegium"):
        return
    layers.collegium = None
    original_init = layers.__init__
    original_get_quant_method = layers._get_quant_method
    original_get_expert_weights = layers.get_expert_weights

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config = import_extra("vllm.config", group="vllm").get_current_vllm_config()
        object.__setattr__(self, "collegium", _State(config=config))
        object.__setattr__(self, "weight_loader", _recording(self, self.weight_loader))
        original_init(self, *args, **kwargs)
        _plan_before_loading(self, self.collegium)

    @functools.wraps(original_get_quant_method)
    def get_quant_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_get_quant_method(self, *args, **kwargs)
        except Exception as error:  # of many classes: vLLM has no kernel for this machine
            self.collegium.vllm_error = error
            with _without_kernel_check():
                return original_get_quant_method(self, *args, **kwargs)

    @functools.wraps(original_get_expert_weights)
    def get_expert_weights(self: Any) -> Any:
        if isinstance(self.quant_method, method_class()):
            return _expert_bytes(self.quant_method.packed)
        return original_get_expert_weights(self)

    layers.__init__ = init
    layers._get_quant_method = get_quant_method
    layers.get_expert_weights = get_expert_weights


def _expert_bytes(packed: MoELayer) -> list[Tensor]:
    """Return the packed tensors as vLLM's balancer moves them: views ``[local physical experts, bytes]``."""
    return [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in packed.experts.slots()]


@contextmanager
def _without_kernel_check() -> Generator[None]:
    """Let vLLM build its methods, which load the weights, on a machine for which it has no kernel."""

    def none(*_: object, **__: object) -> tuple[None, None]:
        return None, None

    quantization = "vllm.model_executor.layers.quantization"
    selectors = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(quantization)
        for name, value in vars(module).items()
        if re.fullmatch(r"select_\w+_moe_backend", name)
    ]
    try:
        for module, name, _ in selectors:
            setattr(module, name, none)
        yield
    finally:
        for module, name, value in selectors:
            setattr(module, name, value)


def _recording(layer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's loader of one tensor, which also records what it loaded and keeps the published dtype of scales."""

    def loader(param: Any, loaded_weight: Tensor, weight_name: str, shard_id: Any, *rest: Any, **options: Any) -> Any:
        expert_id = rest[0] if rest else options.get("expert_id")
        state: _State = layer.collegium
        if "scale" in weight_name and _loses_precision(loaded_weight.dtype, param.dtype):
            state.dtypes_before[param] = param.dtype
            param.data = param.data.to(loaded_weight.dtype)
        one_expert = shard_id in _GPT_OSS_SHARDS or loaded_weight.dim() < max(param.dim(), 2)
        if expert_id is not None and one_expert:
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            shards = _GPT_OSS_SHARDS.get(shard_id, (str(shard_id),))
            state.loaded_shards.setdefault(id(param), set()).update((local, shard) for shard in shards)
        return load(param, loaded_weight, weight_name, shard_id, *rest, **options)

    loader.supports_moe_loading = True  # type: ignore[attr-defined]
    return loader


def _loses_precision(source: torch.dtype, target: torch.dtype) -> bool:
    if source not in FLOAT_FORMATS or target not in FLOAT_FORMATS:
        return False
    return torch.promote_types(source, target) != target


def _plan_before_loading(layer: Any, state: _State) -> None:
    """Plan one layer before its weights are loaded, and wrap the call with which vLLM finishes loading it."""
    method = layer.quant_method
    try:
        state.stored = stored_as(method)
        state.plan = plan_layer(layer, state.stored, option(ACTIVATIONS) or None)
        reason = not_served(state.plan) if mode() == "auto" else None
        if reason is not None:
            raise PlanError(reason)
        if state.stored.format == "plain" and not is_padded(layer):
            for name in ("w13_weight", "w2_weight"):
                getattr(layer, name).data.fill_(torch.nan)  # so that the audit detects tensors missing in the files
    except CollegiumError as error:
        state.refusal = str(error)
        if mode() == "require" or state.vllm_error is not None:
            text = f"{layer.layer_name} cannot run through Collegium: {error}"
            if state.vllm_error is not None:
                text += f"; nor does vLLM itself run it here: {state.vllm_error}"
            raise PlanError(text) from state.vllm_error
    method.process_weights_after_loading = functools.partial(_pack_or_finish, method.process_weights_after_loading)
    _waiting.append(layer)


@plain_torch()
def _pack_or_finish(original: Callable[[Any], None], layer: Any) -> None:
    """Pack a layer, or let vLLM finish it; the first layer of a model decides for all of them."""
    state: _State = layer.collegium
    if layer in _waiting:
        # Without the layers of a model that failed to load.
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
        del layer.quant_method  # some methods are modules, which cannot be replaced by another object
        layer._replace_quant_method(method_class()(layer.moe_config, packed))
        methods = [other.quant_method for other in state.layers]
        if all(isinstance(method, method_class()) for method in methods):
            warm_up([method.packed for method in methods])
    state.dtypes_before.clear()


def _decide_model(layers: list[Any]) -> None:
    """Audit and plan the loaded layers of a model, decide whether all of them run through Collegium, and log it."""
    _refuse_processed_weights(layers)
    layers_by_plan = _plan_loaded(layers)
    if layers[0].moe_config.moe_parallel_config.enable_eplb:
        for others in list(layers_by_plan.values())[1:]:
            for layer in others:
                layer.collegium.refusal = (
                    "packed unlike others; vLLM moves all through one buffer; leave out --enable-eplb"
                )
    logger = import_extra("vllm.logger", group="vllm").init_logger("vllm.collegium")
    config = layers[0].collegium.config
    refused = _refused_layers(layers, config)
    if refused:
        text = f"{len(refused)} of {len(layers)} MoE layers are refused: {_refusal_text(refused)}"
        vllm_errors = [layer.collegium.vllm_error for layer in layers if layer.collegium.vllm_error is not None]
        if vllm_errors:
            raise PlanError(f"{text}; nor does vLLM itself run them here: {vllm_errors[0]}")
        if mode() == "require":
            raise PlanError(text)
        for layer in layers:
            layer.collegium.plan = None
        logger.warning("Collegium: vLLM's own experts run this model; %s", text)
        return
    refuse_discarding()
    if isinstance(config.additional_config, dict):
        config.additional_config["collegium"] = __version__  # part of the key of vLLM's compilation cache
    _report(logger, layers_by_plan, len(layers))


def _refuse_processed_weights(layers: list[Any]) -> None:
    """Refuse layers whose weights come from vLLM's weight cache, in the layout of the kernels that vLLM selected."""
    if import_extra("vllm.model_executor.utils", group="vllm").is_weights_pre_processed():
        for layer in layers:
            layer.collegium.refusal = (
                "its weights are in the layout of vLLM's kernels; leave out --load-format ipc_cache"
            )


def _plan_loaded(layers: list[Any]) -> dict[str, list[Any]]:
    """Audit and plan every layer from its loaded weights; return the accepted layers by summary of their plan."""
    layers_by_plan: dict[str, list[Any]] = {}
    for layer in layers:
        state: _State = layer.collegium
        state.layers = layers
        if state.refusal is None and state.stored is not None:
            try:
                weights = check_weights(loaded_weights(layer, state.stored, state.loaded_shards))
                state.plan = plan_layer(layer, state.stored, option(ACTIVATIONS) or None, weights)
                layers_by_plan.setdefault(_plan_summary(state.plan), []).append(layer)
            except CollegiumError as error:
                state.refusal = str(error)
    return layers_by_plan


def _refused_layers(layers: list[Any], config: Any) -> list[tuple[str, str]]:
    """Return (name, reason) of the refused layers; if this rank has none, those of the other ranks."""
    refused = [(layer.layer_name, layer.collegium.refusal) for layer in layers if layer.collegium.refusal is not None]
    if config.parallel_config.world_size_across_dp == 1:
        return refused
    group = import_extra("vllm.distributed.parallel_state", group="vllm").get_ep_group()
    refused_by_rank: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(refused_by_rank, refused, group=group.cpu_group)
    if refused:
        return refused
    return [(f"on another rank {name}", reason) for others in refused_by_rank for name, reason in others]


def _report(logger: Any, layers_by_plan: dict[str, list[Any]], count: int) -> None:
    """Log the plans of all layers, activations that no kernel runs as declared, and the option ``fp8`` if it helps."""
    for summary, layers in layers_by_plan.items():
        names = f"{layers[0].layer_name} to {layers[-1].layer_name}, {len(layers)} of {count} MoE layers"
        logger.info("Collegium: runs the experts of %s: %s", names, summary)
    if option(ACTIVATIONS):
        return
    states: list[_State] = [layers[0].collegium for layers in layers_by_plan.values()]
    for state in states:
        declared = lost_declaration(state.plan, state.stored) if state.plan and state.stored else None
        if declared is not None:
            text = "Collegium: the checkpoint declares %s activations, which no kernel for FP8 tensor cores takes"
            logger.info(text, declared)
    suggested = [fp8_core_format(state.plan) for state in states if state.plan is not None]
    name = next((name for name in suggested if name is not None), None)
    if name is not None:
        text = "Collegium: %s=%s runs experts on FP8 tensor cores and rounds activations to %s"
        logger.info(text, ACTIVATIONS, FP8, name)


def _refusal_text(refused: list[tuple[str, str]]) -> str:
    """Return the refused layers grouped by reason: the first name, how many more, and the reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in refused:
        names_by_reason.setdefault(reason, []).append(name)
    groups: list[str] = []
    for reason, names in names_by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        groups.append(f"{names[0]}{more}: {reason}")
    return "; ".join(groups)


def _plan_summary(layer_plan: Plan) -> str:
    """Return a one-line summary of a plan; layers with the same summary are packed alike."""
    spec = layer_plan.problem.spec
    limits = layer_plan.problem.limits
    placement = layer_plan.problem.placement or f"all {spec.num_experts} experts"
    biases = " with biases" if spec.expert_bias else ""
    return (
        f"kernel {layer_plan.kernel}, weights {spec.weight_format}, activations {layer_plan.activation_format}, "
        f"{placement}, {spec.intermediate_size} wide{biases}, at most {limits.max_tokens} tokens a pass"
    )
