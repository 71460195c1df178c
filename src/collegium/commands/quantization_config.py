"""Write ``config.json`` for a converted checkpoint, or refuse a conversion that no config can describe."""

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

__all__ = ["COMPRESSED", "ConversionJob", "describable_tensors", "new_config"]

_TOKEN: dict[str, object] = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_GROUP32: dict[str, object] = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_FLOAT4: dict[str, object] = {"num_bits": 4, "type": "float"}
# compressed-tensors: name of the format, arguments of the weights, activations that inference engines should use
COMPRESSED: Mapping[str, tuple[str, dict[str, object], dict[str, object] | None]] = {
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, _TOKEN),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKEN),
    "mxfp4": ("mxfp4-pack-quantized", {**_FLOAT4, **_GROUP32}, None),
    "nvfp4": ("nvfp4-pack-quantized", {**_FLOAT4, "strategy": "tensor_group", "group_size": 16}, None),
    "int4_group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
}
# compressed-tensors' ignore pattern for every module outside the routed experts. transformers renames modules of many
# families while loading, so that a list of the checkpoint's names alone would miss some of them.
_NON_EXPERT_PATTERN = r"re:^(?!.*\.experts(?:\.|$)).*"
_FLOAT8: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True}
# By quantisation method, the list of modules that are not quantised: its key, and the form of an entry that covers a
# module and everything below it.
_IGNORE_LISTS = {
    "fp8": ("modules_to_not_convert", "{}"),
    "mxfp8": ("modules_to_not_convert", "{}"),
    "awq": ("modules_to_not_convert", "{}"),
    "bitsandbytes": ("llm_int8_skip_modules", "{}"),
    "modelopt": ("ignore", "{}*"),
    "compressed-tensors": ("ignore", r"re:{}\..*"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionJob:
    """One conversion: source and target. outside: quantised matrices outside the experts, which are copied."""

    checkpoint: Checkpoint
    names: Names
    spec: MoESpec
    target: type[Payload]
    storage: Storage
    stacked: bool
    outside: dict[str, DenseWeight | CheckpointError] = field(default_factory=dict)


def _source_block(job: ConversionJob) -> dict[str, Any]:
    """Return the quantisation block of the source config, empty if there is none."""
    return dict(quantization_block(job.checkpoint.config) or {})


def describable_tensors(job: ConversionJob, copied_tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors outside the experts, by names under which the new config can describe them.

    With compressed-tensors experts, the scales of FP8 blocks are renamed to compressed-tensors' name. Raises InputError
    if no config can describe both, and the error of an invalid matrix outside the experts.
    """
    raise_if_any(job.checkpoint, [entry for entry in job.outside.values() if isinstance(entry, CheckpointError)])
    entries = [entry for entry in job.outside.values() if not isinstance(entry, CheckpointError)]
    stored = {(entry.stored.name, entry.stored.storage) for entry in entries}
    method = str(method_of(_source_block(job)))
    packed = job.storage.name == "compressed-tensors"
    if stored == {("fp8_block", "finegrained-fp8")} and packed:
        new_names = {name: re.sub(r"\.weight_scale_inv$", ".weight_scale", name) for name in copied_tensors}
        return {new_names[name]: replace(info, name=new_names[name]) for name, info in copied_tensors.items()}
    plain_experts = job.storage.name == "plain" and method != "gguf"
    if not stored or plain_experts or (packed and method == "compressed-tensors"):
        return dict(copied_tensors)
    raise InputError(
        f"{job.checkpoint.path}: {len(job.outside)} matrices outside the routed experts are quantised "
        f"({next(iter(job.outside))}.weight, ...: {method}) and would be copied; no config can describe them together "
        f"with {job.target.name} experts. Possible targets are bf16, fp16 and fp32, and for FP8 blocks and "
        f"compressed-tensors also {', '.join(COMPRESSED)}"
    )


def new_config(job: ConversionJob, copied_tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    """Return the config of the converted checkpoint; copied_tensors: its tensors outside the experts."""
    config = dict(job.checkpoint.config)
    block = _source_block(job)
    if job.storage.name == "deepseek-v4":
        config["quantization_config"] = {key: value for key, value in block.items() if key != "moe_quant_algo"}
        return {**config, "expert_dtype": "fp8" if job.target.name == "fp8_block" else "fp4"}
    config = without_quantization(config)
    linear = [
        name.removesuffix(".weight")
        for name, info in copied_tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2
    ]
    ignore = sorted({*linear, "lm_head"} - job.outside.keys())
    target = job.target.name
    if job.storage.name == "plain":
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = CONFIG_NAMES[target]
        if job.outside:
            config["quantization_config"] = _without_experts(job, block)
    elif job.storage.name == "gpt-oss":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    elif job.storage.name in ("finegrained-fp8", "minimax-m3"):
        config["quantization_config"] = _fp8_block_config(target, ignore)
    else:
        if not job.outside:
            ignore.append(_NON_EXPERT_PATTERN)
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            **_compressed_groups(job, block),
            "ignore": ignore,
        }
    return config


def _fp8_block_config(target: str, ignore: list[str]) -> dict[str, object]:
    """Return transformers' block for FP8 blocks or MXFP8; the order of the keys is that of published configs."""
    config: dict[str, object] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    if target == "mxfp8":
        config.update(quant_method="mxfp8", weight_block_size=[1, 32], scale_fmt="ue8m0")
    config["modules_to_not_convert"] = ignore
    return config


def _expert_paths(job: ConversionJob) -> list[str]:
    """Return the module paths of the routed experts in all MoE layers."""
    names = job.names
    paths = stack_paths(names.stacked).values() if job.stacked else [names.experts.removesuffix(".")]
    return [path.format(layer=layer) for layer in moe_layers(job.checkpoint.config) for path in paths]


def _without_experts(job: ConversionJob, block: dict[str, Any]) -> dict[str, Any]:
    """Return the source's quantisation block with the routed experts added to the modules that are not quantised."""
    method = str(method_of(block))
    paths = _expert_paths(job)
    if method == "gptq":
        excluded = {f"-:{re.escape(path)}": {} for path in paths}
        return {**block, "dynamic": {**excluded, **(block.get("dynamic") or {})}}
    if method == "auto-round":
        excluded = {rf"^{re.escape(path)}(\..*)?$": {"bits": 16} for path in paths}
        return {**block, "extra_config": {**excluded, **(block.get("extra_config") or {})}}
    key, entry_form = _IGNORE_LISTS[method]
    if key == "ignore" and "exclude_modules" in block:
        key = "exclude_modules"
    entries = [entry_form.format(re.escape(path) if entry_form.startswith("re:") else path) for path in paths]
    return {**block, key: [*(block.get(key) or []), *entries]}


def _compressed_groups(job: ConversionJob, block: dict[str, Any]) -> dict[str, Any]:
    """Return compressed-tensors' config groups: one for the experts, then those of the other matrices."""
    format_name, weights, activations = COMPRESSED[job.target.name]
    weights = {"symmetric": True, "dynamic": False, **weights}
    experts_group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    if not job.outside:
        groups = {"group_0": experts_group}
        return {"format": format_name, "quantization_status": "compressed", "config_groups": groups}
    before, after = job.names.experts.split("{layer}")
    layers = "|".join(map(str, moe_layers(job.checkpoint.config)))
    experts_group["targets"] = [f"re:{re.escape(before)}(?:{layers}){re.escape(after)}.*"]
    experts_group["format"] = format_name
    source_groups = block.get("config_groups") or {}
    other_groups = [{"format": block.get("format"), **group} for group in source_groups.values()]
    if not other_groups:
        other_groups = [_fp8_block_group(block["weight_block_size"])]
    groups = {f"group_{index}": group for index, group in enumerate([experts_group, *other_groups])}
    rest = block if source_groups else {}
    return {**rest, "format": "mixed-precision", "quantization_status": "compressed", "config_groups": groups}


def _fp8_block_group(block_size: list[int]) -> dict[str, Any]:
    weights = {**_FLOAT8, "strategy": "block", "block_structure": block_size, "dynamic": False}
    activations = {**_FLOAT8, "strategy": "group", "group_size": block_size[1], "dynamic": True}
    return {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "format": "float-quantized",
    }
