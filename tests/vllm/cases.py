"""What the real engine is asked: model, way of starting it, and prompts of mixed lengths, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # this is read in vLLM's environment too, which has no path to scripts/
FOLDER = ROOT / "build" / "vllm"
MODELS, ANSWERS = FOLDER / "models", FOLDER / "answers.json"
SHIPPED = str(ROOT / "demo" / "fables-16m")
PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11],
    [3],
    [40, 41, *range(2, 11), *range(12, 18), *range(20, 36)],
    [60, 2, 61, 3, 62, 4, 63, 5, 64, 6],
]
F32: dict[str, Any] = {"dtype": "float32"}
BF16: dict[str, Any] = {"dtype": "bfloat16"}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True}
TENSORS: dict[str, Any] = {"tensor_parallel_size": 2}
EXPERTS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
DATA: dict[str, Any] = {"enable_expert_parallel": True, "worker_extension_cls": "dp_on_cpu.Extension"}
# model to what the log must say of kernel and weights
FORMATS = {
    "fp8_block": ("cpu_grouped", "fp8_block"),
    "fp8_block_compressed": ("cpu_grouped", "fp8_block"),
    "fp8_channel": ("cpu_grouped", "fp8_channel"),
    "fp8_tensor": ("cpu_grouped", "fp8_tensor"),
    "mxfp8": ("cpu_grouped", "mxfp8"),
    "mxfp4_compressed": ("cpu_fused", "mxfp4"),
    "gpt_oss_mxfp4": ("cpu_fused", "mxfp4"),
    "nvfp4_compressed": ("cpu_fused", "nvfp4"),
    "nvfp4_modelopt": ("cpu_fused", "nvfp4"),
    "int4_group": ("cpu_fused", "int4_group"),
    "int4_affine": ("cpu_fused", "int4_affine"),
    "int8_group": ("cpu_fused", "int8_affine"),
    "gptq": ("cpu_fused", "int4_group"),
    "awq": ("cpu_fused", "int4_affine"),
}
OVER_RANKS = {
    "gpt_oss_mxfp4": (TENSORS, EXPERTS),
    "fp8_block": (TENSORS,),
    "nvfp4_modelopt": (EXPERTS,),
    "awq": (TENSORS,),
}
# vLLM moves experts after every second step, while prompts are read too; 16 experts and 5 have replicas.
BALANCED = {"window_size": 2, "step_interval": 2}
MOVED = ("fp8_block", "nvfp4_modelopt")
# These models are also served by vLLM's own experts in BF16, to see what rounding costs.
YARDSTICKS = ("fp8_block", "int4_group", "gpt_oss_mxfp4")


def _case(model: str, plugin: str, engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    path = model if model == SHIPPED else str(MODELS / model)
    return {"model": path, "plugin": plugin, "engine": engine, "prompts": PROMPTS, **more}


def _cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    ways = {
        "": {},
        ", chunked prefill": CHUNKED,
        ", compiled": {"enforce_eager": False},
        ", tensor parallel": TENSORS,
        ", expert parallel": EXPERTS,
    }
    found["shipped, vLLM's own"] = _case(SHIPPED, "off", F32)
    for way, engine in ways.items():
        found[f"shipped{way}"] = _case(SHIPPED, "require" if way else "auto", {**F32, **engine})
    for way, engine in (("", {}), (", compiled", {"enforce_eager": False})):
        found[f"shipped, data parallel{way}"] = _case(SHIPPED, "require", {**F32, **DATA, **engine}, ranks=2)
    found["shipped in BF16, vLLM's own"] = _case(SHIPPED, "off", BF16)
    for again in ("", ", again"):
        found[f"shipped in BF16{again}"] = _case(SHIPPED, "require", BF16)
    for model in FORMATS:
        found[f"{model}, decoded, vLLM's own"] = _case(f"{model}-decoded", "off", F32)
        found[model] = _case(model, "require", BF16)
    for model in YARDSTICKS:
        found[f"{model}, decoded in BF16, vLLM's own"] = _case(f"{model}-decoded", "off", BF16)
    for model, engines in OVER_RANKS.items():
        for engine in engines:
            way = "expert" if engine is EXPERTS else "tensor"
            found[f"{model}, {way} parallel"] = _case(model, "require", {**BF16, **engine})
    found["shipped, balanced"] = _case(
        SHIPPED, "require", {**F32, **EXPERTS, **CHUNKED}, balanced={**BALANCED, "num_redundant_experts": 2}
    )
    for model in MOVED:
        found[f"{model}, balanced"] = _case(
            model, "require", {**BF16, **EXPERTS, **CHUNKED}, balanced={**BALANCED, "num_redundant_experts": 1}
        )
    found["gpt_oss, vLLM's own"] = _case("gpt_oss", "off", F32)
    found["gpt_oss"] = _case("gpt_oss", "require", F32)
    activations = {"COLLEGIUM_VLLM_ACTIVATIONS": "fp8_group128"}
    found["fp8_block, FP8 activations"] = _case("fp8_block", "require", BF16, env=activations)
    unknown = {"COLLEGIUM_VLLM_ACTIVATIONS": "fp3"}
    found["refused, auto"] = _case(SHIPPED, "auto", F32, env=unknown)
    found["refused, require"] = _case(SHIPPED, "require", F32, env=unknown)
    found["refused by both, auto"] = _case("awq", "auto", BF16, env=unknown)
    found["an expert is missing, auto"] = _case("missing", "auto", F32)
    found["an expert is missing, require"] = _case("missing", "require", F32)
    found["shipped, expert parallel, vLLM's own"] = _case(SHIPPED, "off", {**F32, **EXPERTS})
    found["an expert is missing on one of two ranks, auto"] = _case("missing", "auto", {**F32, **EXPERTS})
    found["a scale is infinite, require"] = _case("infinite", "require", BF16)
    found["unknown mode"] = _case(SHIPPED, "perhaps", F32)
    return found


CASES = _cases()
