"""Read the spec and the loaded weights of a vLLM MoE layer.

In vLLM, the method of a layer creates, loads and runs the weights of one format. w13 is gate and up of all local
experts, w2 is down.
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
    "FP8",
    "LoadedShards",
    "StoredAs",
    "activation_of",
    "check_weights",
    "exchanges_tokens",
    "fp8_core_format",
    "is_padded",
    "loaded_weights",
    "lost_declaration",
    "most_tokens",
    "plan_layer",
    "stored_as",
]

FP8 = "fp8"  # the value of the option for activations that leaves the FP8 format to the weight format
# The FP8 formats of activations with a kernel for FP8 tensor cores, fastest first; for other weights fp8_group128.
_FP8_FORMATS = {"mxfp4": ("fp8_token", "fp8_group128")}
LoadedShards = dict[int, set[tuple[int, str]]]  # id of a parameter to the (local expert, shard) loaded into it
# Formats in which vLLM pads a rank's slice with zeros. The padding is kept if slices have unequal width.
_PADDED_FORMATS = ("mxfp4", "fp8_block")
# Classes of vLLM's layer whose experts compute what those of the base class do. Others change their output:
# SubstitutedRoutedExperts adds constants, MuseSparkRoutedExperts normalises the output of each expert.
_LAYER_CLASSES = ("RoutedExperts", "GptOssRoutedExperts", "TransformersRoutedExperts", "DbrxExperts")
_KINDS = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "swiglustep": "swiglu_step",
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu",
    "relu2_no_mul": "relu2",
}


class StoredAs(NamedTuple):
    """How a vLLM method stores weights, as arguments of ``Payload.from_parts``. Format ``plain``: the tensor's dtype.

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
    """Return how a vLLM method stores the weights it loads; raises SpecError for an unknown method."""
    name: str = type(method).__name__
    quant: Any = getattr(method, "weight_quant", None)
    config: Any = getattr(method, "quant_config", None)
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
            options = {"block": tuple(method.weight_block_size)} if strategy == "block" else {}
            activations = _declared_e4m3(getattr(method, "input_quant", None))
            return StoredAs(f"fp8_{strategy}", "compressed-tensors", options, activations)
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
            raise SpecError(f"vLLM stores its weights in a {name}, whose tensors Collegium cannot read")


def _declared_e4m3(arguments: Any) -> str | None:
    """Return the format of E4M3 activations that compressed-tensors declares, None if their scales are static."""
    if arguments is None or arguments.dynamic is False:
        return None
    strategy = str(getattr(arguments.strategy, "value", arguments.strategy))
    # "tensor" becomes a scale per token: with one scale per batch, a token's bits would depend on the other tokens.
    return {"group": "fp8_group128", "token": "fp8_token", "tensor": "fp8_token"}.get(strategy)


def _integers(storage: str, bits: int, group: int | None, order: Any, *, symmetric: bool) -> StoredAs:
    if getattr(order, "value", order) in ("group", "dynamic", True):
        raise SpecError("its columns are in activation order, and vLLM does not keep the index")
    name = "int4_group" if bits == 4 and symmetric else f"int{bits}_affine"
    return StoredAs(name, storage, {"group_size": None if group == -1 else group})


def activation_of(moe: Any) -> ActivationSpec:
    """Return the activation of a vLLM layer; raises SpecError for an unsupported one."""
    name = str(moe.activation.value)
    limit = moe.swiglu_limit
    alpha = moe.swiglu_alpha
    beta = moe.swiglu_beta
    if name == "swigluoai":
        limit = limit or 7.0
        alpha = alpha or 1.702
        beta = 1.0 if beta is None else beta
    if name.startswith("swigluoai") and limit and beta is not None:
        return ActivationSpec(kind="swiglu_oai", limit=limit, alpha=1.0 if alpha is None else alpha, beta=beta)
    gate_bound = moe.activation_situ_beta
    up_bound = moe.activation_situ_linear_beta
    if name == "situ" and gate_bound is not None and up_bound is not None:
        return ActivationSpec(kind="situ", gate_bound=gate_bound, up_bound=up_bound)
    if name not in _KINDS or alpha not in (None, 1) or beta:
        supported = f"{', '.join(_KINDS)}, situ, and swigluoai with a limit and a beta"
        raise SpecError(
            f"its activation is {name} with limit={limit}, alpha={alpha}, beta={beta}; allowed: {supported}"
        )
    if name == "swiglustep":
        limit = limit or 7.0
    return ActivationSpec(kind=cast("Any", _KINDS[name]), limit=limit or None)


def _refuse(layer: Any) -> None:
    """Raise SpecError for options of vLLM that only its kernels support."""
    name = type(layer).__name__
    if name not in _LAYER_CLASSES:
        raise SpecError(f"vLLM runs it as {name}; allowed: {', '.join(_LAYER_CLASSES)}")
    _refuse_offload(layer.collegium.config.offload_config)
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    backend = parallel.all2all_backend
    device = str(moe.device).partition(":")[0]
    if device not in ("cpu", "cuda"):
        raise SpecError(f"it is on {device}; Collegium runs on CPUs and NVIDIA GPUs")
    if device == "cuda" and torch.version.hip:
        raise SpecError("its GPU is from AMD; Collegium runs on CPUs and NVIDIA GPUs")
    if layer.collegium.config.parallel_config.enable_elastic_ep:
        raise SpecError("its ranks may change; leave out --enable-elastic-ep")
    if moe.is_lora_enabled:
        raise SpecError("LoRA adapters may be added to its experts; leave out --enable-lora")
    if moe.moe_backend != "auto":
        raise SpecError(f"--moe-backend {moe.moe_backend} selects kernels of vLLM; leave it out")
    if parallel.use_all2all_kernels and backend != "allgather_reducescatter":
        raise SpecError(
            f"vLLM's kernels dispatch the tokens with {backend}; use --all2all-backend allgather_reducescatter"
        )
    if layer.expert_map_manager.num_fused_shared_experts > 0:
        raise SpecError("vLLM fuses shared experts into its experts")


def _refuse_offload(offload: Any) -> None:
    """Raise SpecError if vLLM may move weights to the CPU: the packed weights would stay on the GPU."""
    options = {
        "--cpu-offload-gb": offload.uva.cpu_offload_gb,
        "--offload-group-size": offload.prefetch.offload_group_size,
    }
    for option, value in options.items():
        if value:
            raise SpecError(f"{option} {value} moves weights to the CPU, packed experts stay on the GPU; leave it out")


def exchanges_tokens(moe: Any) -> bool:
    """Return whether the ranks of a vLLM layer have different tokens, so that its method exchanges them."""
    parallel = moe.moe_parallel_config
    return bool(parallel.use_all2all_kernels or moe.dp_size > 1 or moe.is_sequence_parallel)


def most_tokens(moe: Any) -> int:
    """Return the most tokens that one call of a vLLM layer has, with those gathered from other ranks.

    With sequence parallelism every rank has an equal part of an engine's tokens, rounded up.
    """
    parts = moe.sp_size
    return -(-moe.max_num_tokens // parts) * parts * moe.dp_size * moe.pcp_size


def is_padded(layer: Any) -> bool:
    """Return whether vLLM padded the parameters of a layer."""
    moe = layer.moe_config
    allocated = (layer.intermediate_size_per_partition, layer.hidden_size)
    return allocated != (moe.intermediate_size_per_partition_unpadded, moe.hidden_dim_unpadded)


def _sizes(layer: Any, stored: StoredAs) -> tuple[int, int]:
    """Return the intermediate size of this rank's slice of the experts, and their hidden size."""
    moe = layer.moe_config
    if stored.format in _PADDED_FORMATS and (moe.tp_size > 1 or moe.tp_shard_with_padding):
        return layer.intermediate_size_per_partition, moe.hidden_dim_unpadded
    return moe.intermediate_size_per_partition_unpadded, moe.hidden_dim_unpadded


def plan_layer(
    layer: Any, stored: StoredAs, activations: str | None = None, weights: ExpertWeights[Payload] | None = None
) -> Plan:
    """Plan a vLLM layer. weights: the loaded weights, if they are loaded.

    activations: activation format, or ``fp8`` for the FP8 format with the fastest kernel; by default the format that
    the checkpoint declares if a kernel for FP8 tensor cores supports it, else the model's dtype. Raises InputError,
    SpecError and PlanError with the reason if Collegium cannot run the layer.
    """
    _refuse(layer)
    moe = layer.moe_config
    intermediate_size, hidden_size = _sizes(layer, stored)
    weight = next(param for name, param in layer.named_parameters(recurse=False) if name.startswith("w13_"))
    kind = FLOAT_FORMATS.get(weight.dtype) if stored.format == "plain" else by_name(stored.format)
    facts = probe(weight.device)
    if kind is None or moe.in_dtype not in FLOAT_FORMATS:
        raise SpecError(f"its weights are {weight.dtype} and its tokens {moe.in_dtype}")
    problem = Problem(
        spec=MoESpec(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size if moe.tp_size == 1 else moe.intermediate_size,
            num_experts=moe.num_experts,
            routing=RoutingSpec(top_k=moe.experts_per_token, weight_on_input=bool(layer.apply_router_weight_on_input)),
            activation=activation_of(moe),
            weight_format=kind.name,
            expert_bias=moe.has_bias if weights is None else weights.down_bias is not None,
        ),
        device=facts,
        limits=Limits(max_tokens=most_tokens(moe)),
        dtype=cast("Any", FLOAT_FORMATS[moe.in_dtype].name),
        placement=_placement(layer, intermediate_size),
        graph=facts.kind == "cuda",
    )
    dispatcher = None if problem.placement is None else "partial"
    *preferred, last = _formats_to_try(problem, stored, activations)
    formats_within(last or problem.dtype, None)  # refuses static formats before anything is loaded
    for name in preferred:
        with suppress(PlanError):
            return plan(problem, Overrides(activation_format=name, dispatcher=dispatcher))
    return plan(problem, Overrides(activation_format=last, dispatcher=dispatcher))


def _formats_to_try(problem: Problem, stored: StoredAs, activations: str | None) -> list[str | None]:
    """Return the activation formats of a layer, best first; None is the model's dtype."""
    if activations not in (None, FP8):
        return [activations]
    if not _fp8_cores(problem):
        return [None]
    declared = [stored.activations] if stored.activations is not None else []
    faster = _FP8_FORMATS.get(problem.spec.weight_format, ("fp8_group128",)) if activations == FP8 else ()
    return [*declared, *faster, None]


def fp8_core_format(layer_plan: Plan) -> str | None:
    """Return the activation format that the option ``fp8`` would choose instead of the plan's, or None.

    None also for a plan whose activations are FP8 already.
    """
    if layer_plan.activation_format not in DTYPES or not _fp8_cores(layer_plan.problem):
        return None
    for name in _FP8_FORMATS.get(layer_plan.problem.spec.weight_format, ("fp8_group128",)):
        with suppress(PlanError):
            return plan(layer_plan.problem, replace(layer_plan.overrides, activation_format=name)).activation_format
    return None


def lost_declaration(layer_plan: Plan, stored: StoredAs) -> str | None:
    """Return the FP8 format that the checkpoint declares if a GPU with FP8 tensor cores has no kernel for it."""
    if stored.activations in (None, layer_plan.activation_format) or not _fp8_cores(layer_plan.problem):
        return None
    return stored.activations


def _fp8_cores(problem: Problem) -> bool:
    capability = problem.device.capability
    return capability is not None and capability >= (8, 9)


def _placement(layer: Any, intermediate_size: int) -> Placement | None:
    """Return this rank's experts and slice, None on one rank. vLLM sums the outputs of the ranks."""
    moe = layer.moe_config
    if moe.ep_size == 1 and moe.tp_size == 1:
        return None
    slots: list[int] = list(range(moe.num_experts)) if layer._expert_map is None else layer._expert_map.tolist()
    local_experts = sorted((slot, expert) for expert, slot in enumerate(slots) if slot >= 0)
    return Placement(
        rank=moe.ep_rank,
        world_size=moe.ep_size,
        expert_ids=tuple(expert for _, expert in local_experts),
        slice_size=intermediate_size,
        tp_rank=moe.tp_rank,
        tp_size=moe.tp_size,
    )


def loaded_weights(layer: Any, stored: StoredAs, loaded_shards: LoadedShards) -> ExpertWeights[Payload]:
    """Return the weights that vLLM has loaded into a layer, as views if possible; raises CheckpointError subclasses."""
    moe = layer.moe_config
    intermediate_size, hidden_size = _sizes(layer, stored)
    kind = FLOAT_FORMATS[layer.w13_weight.dtype] if stored.format == "plain" else by_name(stored.format)
    shapes = {
        "w13": (moe.w13_num_shards, intermediate_size, hidden_size),
        "w2": (hidden_size, intermediate_size),
    }
    payloads: dict[str, Payload] = {}
    for which, shape in shapes.items():
        parts: dict[str, Tensor] = {}
        for part in find_storage(kind, stored.storage).parts:
            if not part.required:
                continue
            parameter = _loaded_parameter(layer, which, part.suffix[1:], loaded_shards)
            tensor = _logical(layer, which, parameter, part)
            if is_padded(layer) and not stored.options:  # with options (integers, blocks) vLLM does not pad
                tensor = tensor[(..., *(slice(0, size) for size in part.stored_shape(*shape[-2:])))]
            parts[part.suffix] = tensor
        full_shape = (layer.local_num_experts, *shape)
        payloads[which] = kind.from_parts(parts, storage=stored.storage, shape=full_shape, **stored.options)
    weights = ExpertWeights(gate_up=payloads["w13"], down=payloads["w2"])
    if not moe.has_bias and "w13_bias" not in getattr(layer, "_loaded_expert_biases", ()):
        return weights
    gate_up_bias = _loaded_parameter(layer, "w13", "bias", loaded_shards)
    gate_up_bias = _logical(layer, "w13", gate_up_bias, None)[..., :intermediate_size]
    down_bias = _loaded_parameter(layer, "w2", "bias", loaded_shards)[..., :hidden_size]
    if moe.tp_rank:  # the sum over slices must include the bias once
        down_bias = torch.zeros_like(down_bias)
    return replace(weights, gate_up_bias=gate_up_bias, down_bias=down_bias)


def _loaded_parameter(layer: Any, which: str, name: str, loaded_shards: LoadedShards) -> Tensor:
    """Return a parameter of vLLM; raises MissingTensorError if it, or one of its experts, was not loaded."""
    param = getattr(layer, f"{which}_{name}", getattr(layer, f"{which}_{name.removesuffix('_packed')}", None))
    if param is None:
        raise MissingTensorError(
            f"{which}_{name} is missing in this release of vLLM; docs/vllm.md lists the tested releases"
        )
    shards = ("w2",) if which == "w2" else ("w1", "w3")[: layer.moe_config.w13_num_shards]
    loaded = loaded_shards.get(id(param), set())
    if any(shard in shards for _, shard in loaded):
        expected = {(expert, shard) for expert in range(layer.local_num_experts) for shard in shards}
        missing = ", ".join(f"{shard} of local expert {expert}" for expert, shard in sorted(expected - loaded)[:8])
        if missing:
            raise MissingTensorError(f"{which}_{name}: no file has {missing}; download the checkpoint again")
    return param.detach()


def _logical(layer: Any, which: str, tensor: Tensor, part: Part | None) -> Tensor:
    """View w13 ``[E, P*N, ...]`` as ``[E, P, N, ...]``; tensors without rows already have the axis P."""
    parts = layer.moe_config.w13_num_shards
    input_first = part is not None and part.transposed
    if which == "w2" or (part is not None and not part.rows_per):
        return tensor
    if str(layer.moe_config.activation.value) != "swigluoai":
        if input_first:
            return tensor.unflatten(-1, (parts, -1)).movedim(-2, 1)
        return tensor.unflatten(1, (parts, -1))
    if part is not None and (part.rows_per > 1 or input_first):
        raise SpecError("rows of gate and up are interleaved and share scales")
    return tensor.unflatten(1, (-1, parts)).movedim(2, 1)


def check_weights(weights: ExpertWeights[Payload]) -> ExpertWeights[Payload]:
    """Return ``weights``; raises BadScaleError for NaN, infinity or an invalid scale, such as one never loaded."""
    for name, payload in (("gate_up", weights.gate_up), ("down", weights.down)):
        bad = payload.faults().nonzero()[:, 0].unique()[:8].tolist()
        if bad:
            raise BadScaleError(
                f"{name} of local experts {bad} has NaN, infinity or a scale that {payload.name} forbids, or is "
                "missing in the files; download the checkpoint again"
            )
    biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    if not all(bool(bias.isfinite().all()) for bias in biases):
        raise BadScaleError("a bias of the experts has NaN or infinity; download the checkpoint again")
    return weights
