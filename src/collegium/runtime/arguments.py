"""Arguments of the loading functions: dtypes in every common spelling, and hints for arguments of other libraries."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Literal

import torch

from ..errors import InputError, SpecError

__all__ = ["Dtype", "dtype_name", "refuse_others"]

Dtype = Literal["bf16", "fp16", "fp32"]

_DTYPES: Mapping[object, Dtype] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}

_ONE_DEVICE = "pass device='cuda:0' for one device, or run under torchrun with device=Ranks.of() to split the experts"
_NO_OFFLOAD = f"nothing is offloaded; {_ONE_DEVICE}"
_WEIGHT_FORMAT = (
    "pass weight_format='mxfp4' or another name of collegium.FORMATS, or leave it out for the published one"
)
# Arguments of transformers' from_pretrained, and what to do instead.
_ALTERNATIVES: Mapping[str, str] = {
    "adapter_kwargs": "pass adapter=, the folder of a LoRA adapter",
    "attn_implementation": "leave it out, and call model.set_attn_implementation() afterwards",
    "cache_dir": "set HF_HOME, or pass the path of a folder",
    "config": "leave it out; config.json of the checkpoint is used",
    "device_map": _ONE_DEVICE,
    "device_mesh": _ONE_DEVICE,
    "distributed_config": _ONE_DEVICE,
    "experts_implementation": "leave it out; the experts always run through Collegium",
    "force_download": "leave it out; download=True fetches what the cache lacks",
    "generation_config": "leave it out, and set model.generation_config afterwards",
    "gguf_file": "pass the path of the GGUF file itself",
    "ignore_mismatched_sizes": "leave it out; a tensor of another shape is an error",
    "load_in_4bit": _WEIGHT_FORMAT,
    "load_in_8bit": _WEIGHT_FORMAT,
    "local_files_only": "leave it out; nothing is downloaded without download=True",
    "low_cpu_mem_usage": "leave it out; tensors are read one at a time",
    "max_memory": _NO_OFFLOAD,
    "offload_buffers": _NO_OFFLOAD,
    "offload_folder": _NO_OFFLOAD,
    "offload_state_dict": _NO_OFFLOAD,
    "output_loading_info": "leave it out; a missing or unknown tensor is an error",
    "quantization_config": _WEIGHT_FORMAT,
    "revision": "write it after the id: org/name@REVISION",
    "state_dict": "leave it out, and pass the path of the files or an open Checkpoint",
    "subfolder": "pass the path of the folder itself",
    "token": "run hf auth login, or pass the path of a folder",
    "torch_dtype": "pass dtype='bf16', 'fp16' or 'fp32', or a torch.dtype",
    "tp_plan": _ONE_DEVICE,
    "tp_size": _ONE_DEVICE,
    "trust_remote_code": "leave it out; code inside a checkpoint is never run",
    "use_safetensors": "leave it out; only safetensors and GGUF files are read",
    "weights_only": "leave it out; only safetensors and GGUF files are read",
}


def dtype_name(call: str, dtype: object) -> Dtype:
    """Return ``bf16``, ``fp16`` or ``fp32`` for one of these names, torch's name, or the torch.dtype.

    call: name of the function, for the error. Raises SpecError for anything else.
    """
    key = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if not isinstance(key, str | torch.dtype) or key not in _DTYPES:
        raise SpecError(
            f"{call}: dtype: found {dtype!r}, allowed: bf16, fp16, fp32, or torch.bfloat16, torch.float16, "
            "torch.float32; leave it out for bf16"
        )
    return _DTYPES[key]


def refuse_others(function: Callable[..., object], others: Mapping[str, object]) -> None:
    """Raise InputError if ``function`` was called with keyword arguments ``others``, which it does not have.

    For arguments of transformers' ``from_pretrained`` the error names the alternative.
    """
    call = function.__name__
    parameters = signature(function).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
    for name, value in others.items():
        if name in _ALTERNATIVES:
            raise InputError(f"{call}: {name}={value!r} is not an argument here; {_ALTERNATIVES[name]}")
        similar = get_close_matches(name, allowed, 1)
        closest = f"did you mean {similar[0]}? " if similar else ""
        raise InputError(f"{call}: unknown argument {name!r}; {closest}allowed: {', '.join(allowed)}")
