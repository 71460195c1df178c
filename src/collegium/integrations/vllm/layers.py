"""What a MoE layer of vLLM computes and what its loaded parameters hold, read from the layer itself.

A layer's method is vLLM's word for what creates, loads and runs the weights of one format. w13 is gate and up of all
local experts, w2 is down.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...errors import BadScaleError, MissingTensorError, PlanError, SpecError
from ...formats import by_name
from ...formats.find_storage import find_storage
from ...formats.payload import Part, Payload
from ...formats.unquantised import DTYPES, FLOAT_FORMATS
from ...ops.quantize import formats_within
from ...placement import Placement
from ...planning import Plan, plan
from ...problem import Limits, Overrides, Problem
from ...runtime.devices import probe
from ...types import ActivationSpec, ExpertWeights, MoESpec, RoutingSpec

__all__ = [
    "LoadedShards",
    "StoredAs",
    "activation_of",
    "check_weights",
    "plan_layer",
    "fp8_core_format",
    "loaded_weights",
    "is_padded",
    "stored_as",
]

LoadedShards = dict[int, set[tuple[int, str]]]  # id of a parameter to the (local expert, shard) loaded into it
# What vLLM adds to a rank's slice is zeros here. It may have to be kept, because slices are of unequal width.
_PADDED_FORMATS = ("mxfp4", "fp8_block")
_KINDS = {
    "silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "swiglustep": "swiglu_step",
    "silu_no_mul": "silu", "gelu_no_mul": "gelu", "relu2_no_mul": "relu2",
}  # fmt: skip


class StoredAs(NamedTuple):
    """How a method of vLLM keeps weights, as arguments of ``Payload.from_parts``. Format ``plain``: as their dtype.

    activations: the format of dynamically scaled activations that the checkpoint declares, None for 16 bits.
    """

    format: str
    storage: str
    options: Mapping[str, Any] = {}
    activations: str | None = None


_STORED = {
    "UnquantizedFusedMoEMethod": StoredAs("plain", "plain"),
    "ModelOptFp8MoEMethod": StoredAs("fp8_tensor", "modelopt"),
    "ModelOptMxFp8FusedMoE": StoredAs("mxfp8", "modelopt", activations="mxfp8"),
    "ModelOptNvFp4FusedMoE": StoredAs("nvfp4", "modelopt"),
    "CompressedTensorsW8A8Mxfp8MoEMethod": StoredAs("mxfp8", "compressed-tensors", activations="mxfp8"),
    "CompressedTensorsW4A4Mxfp4MoEMethod": StoredAs("mxfp4", "compressed-tensors"),
    "CompressedTensorsW4A4Nvfp4MoEMethod": StoredAs("nvfp4", "compressed-tensors"),
    "GptOssMxfp4MoEMethod": StoredAs("mxfp4", "compressed-tensors"),
    "Mxfp4MoEMethod": StoredAs("mxfp4", "compressed-tensors"),
}


def stored_as(method: Any) -> StoredAs:
    """Return how a method of vLLM keeps the weights it loads; raises SpecError for one that is not known."""
    name: str = type(method).__name__
    quant, config = (cast("Any", getattr(method, what, None)) for what in ("weight_quant", "quant_config"))
    if getattr(config, "is_checkpoint_fp8_serialized", True) is False:
        raise SpecError("vLLM quantises its weights while it loads them; quantise the checkpoint instead")
    match name:
        case "Fp8MoEMethod":
            dynamic = getattr(config, "activation_scheme", None) == "dynamic"
            if not method.block_quant:
                return StoredAs("fp8_tensor", "finegrained-fp8", activations="fp8_token" if dynamic else None)
            block = method.moe_block_shape if method.weight_scale_refine else method.weight_block_size
            activations = "fp8_group128" if dynamic else None
            return StoredAs("fp8_block", "finegrained-fp8", {"block": tuple(block)}, activations)
        case "CompressedTensorsW8A8Fp8MoEMethod":
            strategy = str(getattr(quant.strategy, "value", quant.strategy))
            more = {"block": tuple(method.weight_block_size)} if strategy == "block" else {}
            activations = _declared_e4m3(getattr(method, "input_quant", None))
            return StoredAs(f"fp8_{strategy}", "compressed-tensors", more, activations)
        case "CompressedTensorsWNA16MoEMethod":
            storage = "compressed-tensors" if quant.symmetric else "compressed-tensors-asymmetric"
            return _integers(storage, quant.num_bits, quant.group_size, quant.actorder, symmetric=quant.symmetric)
        case "AutoGPTQMoEMethod":
            storage = str(config.full_config.get("checkpoint_format") or config.full_config.get("format") or "gptq")
            return _integers(storage, config.weight_bits, config.group_size, config.desc_act, symmetric=config.is_sym)
        case "AutoAWQMoEMethod":
            return _integers("awq", 4, config.group_size, None, symmetric=False)
        case _ if name in _STORED:
            return _STORED[name]
        case _:
            raise SpecError(f"vLLM keeps its weights in a {name}, whose tensors Collegium does not know")


def _declared_e4m3(arguments: Any) -> str | None:
    """Return the format of E4M3 activations that compressed-tensors declares, None where their scales are static."""
    if arguments is None or arguments.dynamic is False:
        return None
    strategy = str(getattr(arguments.strategy, "value", arguments.strategy))
    # No format has one scale for all tokens of a batch, in which a token's bits would depend on the others.
    return {"group": "fp8_group128", "token": "fp8_token", "tensor": "fp8_token"}.get(strategy)


def _integers(storage: str, bits: int, group: int | None, order: Any, *, symmetric: bool) -> StoredAs:
    if getattr(order, "value", order) in ("group", "dynamic", True):
        raise SpecError("its columns are in activation order, of which vLLM keeps no index")
    name = "int4_group" if bits == 4 and symmetric else f"int{bits}_affine"
    return StoredAs(name, storage, {"group_size": None if group == -1 else group})


def activation_of(moe: Any) -> ActivationSpec:
    """Return what vLLM computes between the projections of a layer; raises SpecError for what we do not compute."""
    name, limit, alpha, beta = str(moe.activation.value), moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta
    if name == "swigluoai":
        limit, alpha, beta = limit or 7.0, alpha or 1.702, 1.0 if beta is None else beta
    if name.startswith("swigluoai") and limit and beta is not None:
        return ActivationSpec(kind="swiglu_oai", limit=limit, alpha=1.0 if alpha is None else alpha, beta=beta)
    bounds = moe.activation_situ_beta, moe.activation_situ_linear_beta
    if name == "situ" and None not in bounds:
        return ActivationSpec(kind="situ", gate_bound=bounds[0], up_bound=bounds[1])
    if name not in _KINDS or alpha not in (None, 1) or beta:
        known = f"{', '.join(_KINDS)}, situ, and swigluoai with a limit and a beta"
        raise SpecError(f"its activation is {name} with limit={limit}, alpha={alpha}, beta={beta}; known are {known}")
    return ActivationSpec(kind=cast("Any", _KINDS[name]), limit=limit or (7.0 if name == "swiglustep" else None))


def _refuse(layer: Any) -> None:
    """Raise SpecError for what vLLM was asked to do with a layer that only its own experts do."""
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    way, device = parallel.all2all_backend, str(moe.device).partition(":")[0]
    refusals = {
        f"it is on {device}, and Collegium runs on CPUs and NVIDIA's GPUs": device not in ("cpu", "cuda"),
        "its GPU is AMD's, and Collegium runs on CPUs and NVIDIA's GPUs": device == "cuda" and bool(torch.version.hip),
        "its ranks may change; leave out --enable-elastic-ep": layer.collegium.config.parallel_config.enable_elastic_ep,
        "LoRA adapters may be added to its experts; leave out --enable-lora": moe.is_lora_enabled,
        f"--moe-backend {moe.moe_backend} was asked for; leave it out": moe.moe_backend != "auto",
        f"tokens travel by {way}, inside vLLM's own kernels; ask for --all2all-backend allgather_reducescatter": (
            parallel.use_all2all_kernels and way != "allgather_reducescatter"
        ),
        "vLLM fuses shared experts into its experts": layer.expert_map_manager.num_fused_shared_experts > 0,
    }
    for reason, holds in refusals.items():
        if holds:
            raise SpecError(reason)


def is_padded(layer: Any) -> bool:
    """Return whether vLLM made the parameters of a layer larger than its experts."""
    moe, allocated = layer.moe_config, (layer.intermediate_size_per_partition, layer.hidden_size)
    return allocated != (moe.intermediate_size_per_partition_unpadded, moe.hidden_dim_unpadded)


def _sizes(layer: Any, stored: StoredAs) -> tuple[int, int]:
    """Return the intermediate width of this rank's experts and their hidden size."""
    moe = layer.moe_config
    if stored.format in _PADDED_FORMATS and (moe.tp_size > 1 or moe.tp_shard_with_padding):
        return layer.intermediate_size_per_partition, moe.hidden_dim_unpadded
    return moe.intermediate_size_per_partition_unpadded, moe.hidden_dim_unpadded


def plan_layer(
    layer: Any, stored: StoredAs, activations: str | None = None, weights: ExpertWeights[Payload] | None = None
) -> Plan:
    """Plan a layer of vLLM. weights: once they are loaded.

    activations: their format; None: what the checkpoint declares where a kernel for FP8 tensor cores runs it, else the
    model's dtype. Raises InputError, SpecError and PlanError, which say why Collegium does not run it.
    """
    _refuse(layer)
    moe, (intermediate_size, hidden) = layer.moe_config, _sizes(layer, stored)
    weight = next(param for name, param in layer.named_parameters(recurse=False) if name.startswith("w13_"))
    kind = FLOAT_FORMATS.get(weight.dtype) if stored.format == "plain" else by_name(stored.format)
    facts = probe(weight.device)
    if kind is None or moe.in_dtype not in FLOAT_FORMATS:
        raise SpecError(f"its weights are {weight.dtype} and its tokens {moe.in_dtype}")
    problem = Problem(
        spec=MoESpec(
            hidden_size=hidden,
            intermediate_size=intermediate_size if moe.tp_size == 1 else moe.intermediate_size,
            num_experts=moe.num_experts,
            routing=RoutingSpec(top_k=moe.experts_per_token, weight_on_input=bool(layer.apply_router_weight_on_input)),
            activation=activation_of(moe),
            weight_format=kind.name,
            expert_bias=moe.has_bias if weights is None else weights.down_bias is not None,
        ),
        device=facts,
        # where vLLM gathers the tokens of several engines, all of them come
        limits=Limits(max_tokens=moe.max_num_tokens * moe.dp_size * moe.pcp_size),
        dtype=cast("Any", FLOAT_FORMATS[moe.in_dtype].name),
        placement=_placement(layer, intermediate_size),
        graph=facts.kind == "cuda",
    )
    formats_within(activations or problem.dtype, None)  # refuses static ones before anything is loaded
    dispatcher = None if problem.placement is None else "partial"
    if activations is None and stored.activations is not None and _fp8_cores(problem):
        with suppress(PlanError):
            return plan(problem, Overrides(activation_format=stored.activations, dispatcher=dispatcher))
    return plan(problem, Overrides(activation_format=activations, dispatcher=dispatcher))


def fp8_core_format(layer_plan: Plan) -> str | None:
    """Return the activation format with which FP8 tensor cores would run the experts of ``made``, or None.

    Only for activations that are not in FP8 already.
    """
    if layer_plan.activation_format not in DTYPES or not _fp8_cores(layer_plan.problem):
        return None
    with suppress(PlanError):
        return plan(
            layer_plan.problem, replace(layer_plan.overrides, activation_format="fp8_group128")
        ).activation_format
    return None


def _fp8_cores(problem: Problem) -> bool:
    capability = problem.device.capability
    return capability is not None and capability >= (8, 9)


def _placement(layer: Any, intermediate_size: int) -> Placement | None:
    """Return what this rank holds; vLLM adds the ranks' parts of the sum itself."""
    moe = layer.moe_config
    if moe.ep_size == 1 and moe.tp_size == 1:
        return None
    slots: list[int] = list(range(moe.num_experts)) if layer._expert_map is None else layer._expert_map.tolist()
    local_slots = sorted((slot, expert) for expert, slot in enumerate(slots) if slot >= 0)
    ids, slices = tuple(expert for _, expert in local_slots), {"tp_rank": moe.tp_rank, "tp_size": moe.tp_size}
    return Placement(rank=moe.ep_rank, world_size=moe.ep_size, expert_ids=ids, slice_size=intermediate_size, **slices)


def loaded_weights(layer: Any, stored: StoredAs, loaded_shards: LoadedShards) -> ExpertWeights[Payload]:
    """Return what vLLM has loaded into a layer as our payloads, views where it can be; raises CheckpointErrors."""
    moe, (intermediate_size, hidden) = layer.moe_config, _sizes(layer, stored)
    payloads: list[Payload] = []
    for which, shape in (("w13", (moe.w13_num_shards, intermediate_size, hidden)), ("w2", (hidden, intermediate_size))):
        kind = FLOAT_FORMATS[layer.w13_weight.dtype] if stored.format == "plain" else by_name(stored.format)
        parts: dict[str, Tensor] = {}
        for part in find_storage(kind, stored.storage).parts:
            if part.required:
                parameter = _logical(
                    layer, which, _loaded_parameter(layer, which, part.suffix[1:], loaded_shards), part
                )
                # vLLM adds nothing to integers and blocks before they are loaded
                cut = part.stored_shape(*shape[-2:]) if is_padded(layer) and not stored.options else ()
                parts[part.suffix] = parameter[(..., *(slice(0, size) for size in cut))]
        full = (layer.local_num_experts, *shape)
        payloads.append(kind.from_parts(parts, storage=stored.storage, shape=full, **stored.options))
    if not moe.has_bias and "w13_bias" not in getattr(layer, "_loaded_expert_biases", ()):
        return ExpertWeights(gate_up=payloads[0], down=payloads[1])
    upper = _logical(layer, "w13", layer.w13_bias.detach(), None)[..., :intermediate_size]
    lower = layer.w2_bias.detach()[..., :hidden]
    lower = torch.zeros_like(lower) if moe.tp_rank else lower  # the sum over slices holds it once
    return ExpertWeights(gate_up=payloads[0], down=payloads[1], gate_up_bias=upper, down_bias=lower)


def _loaded_parameter(layer: Any, which: str, name: str, loaded_shards: LoadedShards) -> Tensor:
    """Return a parameter of vLLM; raises MissingTensorError where it, or an expert of it, was not loaded."""
    param = getattr(layer, f"{which}_{name}", getattr(layer, f"{which}_{name.removesuffix('_packed')}", None))
    if param is None:
        raise MissingTensorError(f"{which}_{name} is missing in this release of vLLM; docs/vllm.md names those tested")
    shards = ("w2",) if which == "w2" else ("w1", "w3")[: layer.moe_config.w13_num_shards]
    loaded = loaded_shards.get(id(param), set())
    if any(shard in shards for _, shard in loaded):
        wanted = {(expert, shard) for expert in range(layer.local_num_experts) for shard in shards}
        missing = ", ".join(f"{shard} of local expert {expert}" for expert, shard in sorted(wanted - loaded)[:8])
        if missing:
            raise MissingTensorError(f"{which}_{name}: in no file are {missing}; download the checkpoint again")
    return param.detach()


def _logical(layer: Any, which: str, tensor: Tensor, part: Part | None) -> Tensor:
    """Bring w13 ``[E, P*N, ...]`` to ``[E, P, N, ...]``, as a view; what has no rows has P as an axis already."""
    parts, input_first = layer.moe_config.w13_num_shards, part is not None and part.transposed
    if which == "w2" or (part is not None and not part.rows_per):
        return tensor
    if str(layer.moe_config.activation.value) != "swigluoai":
        return tensor.unflatten(-1, (parts, -1)).movedim(-2, 1) if input_first else tensor.unflatten(1, (parts, -1))
    if part is not None and (part.rows_per > 1 or input_first):
        raise SpecError("rows of gate and up alternate and share scales")
    return tensor.unflatten(1, (-1, parts)).movedim(2, 1)


def check_weights(weights: ExpertWeights[Payload]) -> ExpertWeights[Payload]:
    """Return ``weights``; raises BadScaleError for a number no expert may have, such as one that was never loaded."""
    for name, payload in (("gate_up", weights.gate_up), ("down", weights.down)):
        bad = payload.faults().nonzero()[:, 0].unique()[:8].tolist()
        if bad:
            what = f"{name} of local experts {bad} holds NaN, infinity or a scale that {payload.name} forbids"
            raise BadScaleError(f"{what}, or is in no file; download the checkpoint again")
    if not all(bool(b.isfinite().all()) for b in (weights.gate_up_bias, weights.down_bias) if b is not None):
        raise BadScaleError("a bias of the experts holds NaN or infinity; download the checkpoint again")
    return weights
