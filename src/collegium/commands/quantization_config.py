"""What ``config.json`` says of a checkpoint whose experts were written in another format, and what it cannot say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoint.dense_weights import DenseWeight
from ..checkpoint.header import TensorInfo
from ..checkpoint.layout import stack_paths
from ..checkpoint.problems import raise_if_any
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError, InputError
from ..formats.payload import Payload, Storage
from ..formats.unquantised import CONFIG_NAMES
from ..models import Names, method_of, moe_layers, quantization_block, without_quantization
from ..types import MoESpec

__all__ = ["COMPRESSED", "ConversionJob", "described", "new_config"]

_TOKEN: dict[str, object] = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_GROUP32: dict[str, object] = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_FLOAT4: dict[str, object] = {"num_bits": 4, "type": "float"}
# compressed-tensors: its name of the format, the weights' arguments, the activations engines are to use
COMPRESSED: Mapping[str, tuple[str, dict[str, object], dict[str, object] | None]] = {
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, _TOKEN),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKEN),
    "mxfp4": ("mxfp4-pack-quantized", {**_FLOAT4, **_GROUP32}, None),
    "nvfp4": ("nvfp4-pack-quantized", {**_FLOAT4, "strategy": "tensor_group", "group_size": 16}, None),
    "int4_group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
}
# compressed-tensors' ignore list by pattern: every module outside the routed experts. transformers renames modules of
# many families when it loads them, so a list of the checkpoint's names alone would leave some of them quantised.
_NO_EXPERT = r"re:^(?!.*\.experts(?:\.|$)).*"
_FLOAT8: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True}
# The lists of modules that are not quantised: key, and how one module and everything below it is written there.
_SKIPS = {
    "fp8": ("modules_to_not_convert", "{}"),
    "mxfp8": ("modules_to_not_convert", "{}"),
    "awq": ("modules_to_not_convert", "{}"),
    "bitsandbytes": ("llm_int8_skip_modules", "{}"),
    "modelopt": ("ignore", "{}*"),
    "compressed-tensors": ("ignore", r"re:{}\..*"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionJob:
    """What is converted into what. outside: the quantised matrices outside the experts, which stay as they are."""

    checkpoint: Checkpoint
    names: Names
    spec: MoESpec
    target: type[Payload]
    storage: Storage
    stacked: bool
    outside: dict[str, DenseWeight | CheckpointError] = field(default_factory=dict)


def _block(job: ConversionJob) -> dict[str, Any]:
    """Return the quantisation block of the source, empty without one."""
    return dict(quantization_block(job.checkpoint.config) or {})


def described(job: ConversionJob, kept: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors outside the experts by the names under which the new config can describe them.

    Beside compressed-tensors' experts, scales of FP8 blocks get the name they have there. Raises InputError where no
    one config could describe both, and what is wrong with a matrix outside the experts.
    """
    raise_if_any(job.checkpoint, [entry for entry in job.outside.values() if isinstance(entry, CheckpointError)])
    entries = [entry for entry in job.outside.values() if not isinstance(entry, CheckpointError)]
    stored = {(entry.stored.name, entry.stored.storage) for entry in entries}
    method = str(method_of(_block(job)))
    packed = job.storage.name == "compressed-tensors"
    if stored == {("fp8_block", "finegrained-fp8")} and packed:
        names = {name: re.sub(r"\.weight_scale_inv$", ".weight_scale", name) for name in kept}
        return {names[name]: replace(info, name=names[name]) for name, info in kept.items()}
    if not stored or (job.storage.name == "plain" and method != "gguf") or (packed and method == "compressed-tensors"):
        return dict(kept)
    raise InputError(
        f"{job.checkpoint.path}: {len(job.outside)} matrices outside the routed experts are quantised "
        f"({next(iter(job.outside))}.weight, ...: {method}) and would be copied; one config cannot describe them "
        f"beside {job.target.name} experts. It can beside bf16, fp16 and fp32; FP8 blocks and compressed-tensors it "
        f"also can beside {', '.join(COMPRESSED)}"
    )


def new_config(job: ConversionJob, kept: Mapping[str, TensorInfo]) -> dict[str, object]:
    """Return the config of the converted checkpoint, whose other tensors are ``kept``."""
    config, block = dict(job.checkpoint.config), _block(job)
    if job.storage.name == "deepseek-v4":
        config["quantization_config"] = {k: v for k, v in block.items() if k != "moe_quant_algo"}
        return {**config, "expert_dtype": "fp8" if job.target.name == "fp8_block" else "fp4"}
    config = without_quantization(config)
    linear = [n.removesuffix(".weight") for n, i in kept.items() if n.endswith(".weight") and len(i.shape) == 2]
    ignore = sorted({*linear, "lm_head"} - job.outside.keys())
    name = job.target.name
    if job.storage.name == "plain":
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = CONFIG_NAMES[name]
        if job.outside:
            config["quantization_config"] = _without_experts(job, block)
    elif job.storage.name == "gpt-oss":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    elif job.storage.name in ("finegrained-fp8", "minimax-m3"):
        wide = name == "fp8_block"
        config["quantization_config"] = {
            "quant_method": "fp8" if wide else "mxfp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128] if wide else [1, 32],
            **({} if wide else {"scale_fmt": "ue8m0"}),
            "modules_to_not_convert": ignore,
        }
    else:
        if not job.outside:
            ignore.append(_NO_EXPERT)
        config["quantization_config"] = {"quant_method": "compressed-tensors", **_groups(job, block), "ignore": ignore}
    return config


def _experts(job: ConversionJob) -> list[str]:
    """Return the module paths of all routed experts of the layers that were converted."""
    names = job.names
    paths = stack_paths(names.stacked).values() if job.stacked else [names.experts.removesuffix(".")]
    return [path.format(layer=layer) for layer in moe_layers(job.checkpoint.config) for path in paths]


def _without_experts(job: ConversionJob, block: dict[str, Any]) -> dict[str, Any]:
    """Return the source's block with the routed experts among what is not quantised."""
    method, experts = str(method_of(block)), _experts(job)
    if method == "gptq":
        left_out = {f"-:{re.escape(path)}": {} for path in experts}
        return {**block, "dynamic": {**left_out, **(block.get("dynamic") or {})}}
    if method == "auto-round":
        left_out = {rf"^{re.escape(path)}(\..*)?$": {"bits": 16} for path in experts}
        return {**block, "extra_config": {**left_out, **(block.get("extra_config") or {})}}
    key, form = _SKIPS[method]
    key = "exclude_modules" if key == "ignore" and "exclude_modules" in block else key
    listed = [form.format(re.escape(path) if form.startswith("re:") else path) for path in experts]
    return {**block, key: [*(block.get(key) or []), *listed]}


def _groups(job: ConversionJob, block: dict[str, Any]) -> dict[str, Any]:
    """Return compressed-tensors' groups: of the experts, then what the other matrices are in."""
    form, weights, activations = COMPRESSED[job.target.name]
    weights = {"symmetric": True, "dynamic": False, **weights}
    first: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    if not job.outside:
        return {"format": form, "quantization_status": "compressed", "config_groups": {"group_0": first}}
    before, after = job.names.experts.split("{layer}")
    layers = "|".join(map(str, moe_layers(job.checkpoint.config)))
    first |= {"targets": [f"re:{re.escape(before)}(?:{layers}){re.escape(after)}.*"], "format": form}
    others = [{"format": block.get("format"), **group} for group in (block.get("config_groups") or {}).values()]
    if not others:
        sizes = {"strategy": "block", "block_structure": block["weight_block_size"], "dynamic": False}
        tokens = {"strategy": "group", "group_size": block["weight_block_size"][1], "dynamic": True}
        group = {"targets": ["Linear"], "weights": _FLOAT8 | sizes, "input_activations": _FLOAT8 | tokens}
        others = [{**group, "format": "float-quantized"}]
    groups = {f"group_{at}": group for at, group in enumerate([first, *others])}
    rest = block if block.get("config_groups") else {}
    return {**rest, "format": "mixed-precision", "quantization_status": "compressed", "config_groups": groups}
