"""One matrix in every published quantised storage: its tensors by suffix, and the numbers they are, by arithmetic.

Codes are rounded, packed and multiplied out here in plain torch, without the package's formats.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Stored = tuple[dict[str, Tensor], Tensor]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
GROUP = 32


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values.unsqueeze(-1) - table).abs().argmin(-1)


def _spread(scale: Tensor, columns: int, *, size: int) -> Tensor:
    return scale.repeat_interleave(size, 1)[:, :columns]


def _pairs(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes along the last axis into int32, the first in the lowest bits; the last word is filled up with zeros."""
    per = 32 // bits
    full = functional.pad(codes.long(), (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    word = (full << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def fp8_block(weight: Tensor, suffix: str = "weight_scale_inv", *, power: bool = False) -> Stored:
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    scale = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if power else scale
    factor = _spread(scale.repeat_interleave(128, 0)[:rows], columns, size=128)
    codes = (weight / factor).to(torch.float8_e4m3fn)
    stored = (torch.log2(scale) + 127).to(torch.uint8).view(torch.float8_e8m0fnu) if power else scale
    return {"weight": codes, suffix: stored}, codes.float() * factor


def fp8_modelopt(weight: Tensor) -> Stored:
    parts, values = fp8_block(weight, "weight_scale")
    return {**parts, "weight_scale": parts["weight_scale"][:, None, :, None]}, values


def fp8_tensor(weight: Tensor) -> Stored:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    return stored, codes.float() * scale


def fp8_named(weight: Tensor, scale: str, activation: str) -> Stored:
    """One scale a matrix under the names of transformers (``weight_scale_inv``) or of Mistral (``qscale_weight``)."""
    parts, values = fp8_tensor(weight)
    return {"weight": parts["weight"], scale: parts["weight_scale"], activation: parts["input_scale"]}, values


def fp8_channel(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.bfloat16()}, codes.float() * scale.bfloat16().float()


def mxfp8(weight: Tensor) -> Stored:
    exponent = torch.ceil(torch.log2(weight.unflatten(1, (-1, 32)).abs().amax(2) / 448))
    factor = _spread(torch.exp2(exponent), weight.shape[1], size=32)
    codes = (weight / factor).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": (exponent + 127).to(torch.uint8)}, codes.float() * factor


def mxfp4(weight: Tensor) -> Stored:
    exponent = torch.ceil(torch.log2(weight.unflatten(1, (-1, 32)).abs().amax(2) / 6))
    factor = _spread(torch.exp2(exponent), weight.shape[1], size=32)
    codes = _nearest(weight / factor, E2M1)
    return {"weight_packed": _pairs(codes), "weight_scale": (exponent + 127).to(torch.uint8)}, E2M1[codes] * factor


def mxfp4_modelopt(weight: Tensor) -> Stored:
    parts, values = mxfp4(weight)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, values


def int4_modelopt(weight: Tensor) -> Stored:
    """Two rows a byte, signed codes, one scale for a row and a group of columns."""
    made = integers(weight, 4, symmetric=True)
    codes = (made.codes - 8).long() & 15
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)
    stored = {"weight": packed, "weight_scale": made.scales.float(), "weight_scale_2": torch.tensor(0.03)}
    return stored, made.values


def int8_modelopt(weight: Tensor) -> Stored:
    parts, values = plain_int8(weight)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale"][:, 0]}, values


def nvfp4(weight: Tensor, *, divides: bool) -> Stored:
    """divides: as compressed-tensors; otherwise as ModelOpt, whose global scale multiplies."""
    whole = weight.abs().amax() / (6 * 448)
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    step = scale.float() / (1 / whole) if divides else scale.float() * whole
    factor = _spread(step, weight.shape[1], size=16)
    codes = _nearest(weight / factor, E2M1)
    if divides:
        stored = {"weight_packed": _pairs(codes), "weight_scale": scale, "weight_global_scale": (1 / whole)[None]}
        return {**stored, "input_global_scale": torch.ones(1)}, E2M1[codes] * factor
    stored = {"weight": _pairs(codes), "weight_scale": scale, "weight_scale_2": whole}
    return {**stored, "input_scale": torch.tensor(0.5)}, E2M1[codes] * factor


@dataclass
class Integers:
    """codes ``[N, K]``, scales and zeros ``[N, G]``, group of each column, and the numbers."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor
    values: Tensor


def integers(weight: Tensor, bits: int, *, symmetric: bool, ordered: bool = False) -> Integers:
    columns = weight.shape[1]
    order = torch.arange(columns) // GROUP
    order = order[torch.randperm(columns)] if ordered else order
    groups = columns // GROUP
    members = torch.stack([weight[:, order == group] for group in range(groups)], 1)  # [N, G, GROUP]
    low, high, most = members.amin(2), members.amax(2), 2**bits - 1
    if symmetric:
        scales = (torch.maximum(low.abs(), high.abs()) / (most // 2)).half()
        zeros = torch.full_like(low, 2 ** (bits - 1))
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(1, most)
    codes = (weight / scales.float()[:, order] + zeros[:, order]).round().clamp(0, most)
    values = (codes - zeros[:, order]) * scales.float()[:, order]
    return Integers(codes=codes, scales=scales, zeros=zeros, order=order, values=values)


def compressed(weight: Tensor, bits: int, *, symmetric: bool = True, ordered: bool = False) -> Stored:
    made = integers(weight, bits, symmetric=symmetric, ordered=ordered)
    stored = {
        "weight_packed": _words(made.codes, bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = _words(made.zeros.T, bits).T
    if ordered:
        stored["weight_g_idx"] = made.order.int()
    return stored, made.values


def plain_int8(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def gptq(weight: Tensor, bits: int = 4, *, symmetric: bool = True, ordered: bool = False, less: int = 1) -> Stored:
    """Input first; zero points are stored minus one (``less``)."""
    made = integers(weight, bits, symmetric=symmetric, ordered=ordered)
    stored = {
        "qweight": _words(made.codes, bits).T,
        "qzeros": _words((made.zeros - less).T, bits),
        "scales": made.scales.T,
        "g_idx": made.order.int(),
    }
    return stored, made.values


def awq(weight: Tensor) -> Stored:
    """Input first, eight output columns a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    made = integers(weight, 4, symmetric=False)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: Tensor) -> Tensor:  # [rows, N]
        return _words(codes.unflatten(1, (-1, 8))[:, :, places].flatten(1), 4)

    return {"qweight": words(made.codes.T), "qzeros": words(made.zeros.T), "scales": made.scales.T}, made.values


def nf4(weight: Tensor) -> Stored:
    """bitsandbytes: blocks of 64 run over the ends of rows, the first code of a byte is in its high half."""
    flat = functional.pad(weight.flatten(), (0, -weight.numel() % 64)).unflatten(0, (-1, 64))
    scale = flat.abs().amax(1)
    codes = _nearest(flat / scale[:, None], NF4)
    values = (NF4[codes] * scale[:, None]).flatten()[: weight.numel()].view(weight.shape)
    codes = codes.flatten()[: weight.numel()]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {
        "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": scale,
        "weight.quant_map": NF4,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, values


def _ct(arguments: dict[str, Any], skip: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": arguments}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": skip}


def _float(bits: int, strategy: str, **more: Any) -> Callable[[list[str]], dict[str, Any]]:
    return lambda skip: _ct({"type": "float", "num_bits": bits, "strategy": strategy, **more}, skip)


def _int(bits: int, strategy: str = "group", **more: Any) -> Callable[[list[str]], dict[str, Any]]:
    sized = {"group_size": GROUP} if strategy == "group" else {}
    return lambda skip: _ct({"type": "int", "num_bits": bits, "strategy": strategy, **sized, **more}, skip)


def _gptq(**more: Any) -> Callable[[list[str]], dict[str, Any]]:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    return lambda skip: {**plain, **more, "dynamic": {rf"-:{name}$": {} for name in skip}}


def _auto_round(packing: str, **more: Any) -> Callable[[list[str]], dict[str, Any]]:
    """AutoRound lists what stays in 16 bits among its overrides."""
    plain = {
        "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int",
        "packing_format": packing,
    }  # fmt: skip
    return lambda skip: {**plain, **more, "extra_config": {name: {"bits": 16, "data_type": "float"} for name in skip}}


@dataclass
class Kind:
    """form: name of the format here. write: a matrix to its tensors. block: a skip list to ``quantization_config``."""

    form: str
    write: Callable[[Tensor], Stored]
    block: Callable[[list[str]], dict[str, Any]]


def _modelopt(algorithm: str, **more: Any) -> Callable[[list[str]], dict[str, Any]]:
    return lambda skip: {"quant_method": "modelopt", "quant_algo": algorithm, **more, "ignore": skip}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KINDS = {
    "fp8 blocks": Kind("fp8_block", fp8_block, lambda skip: {**FP8, "modules_to_not_convert": skip}),
    "fp8 tensor": Kind(
        "fp8_tensor", lambda w: fp8_named(w, "weight_scale_inv", "activation_scale"),
        lambda skip: {
            **FP8, "activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": skip,
        },
    ),
    "mistral fp8": Kind(
        "fp8_tensor", lambda w: fp8_named(w, "qscale_weight", "qscale_act"),
        lambda skip: {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": skip},
    ),
    "mxfp8": Kind("mxfp8", mxfp8, lambda skip: {"quant_method": "mxfp8", "modules_to_not_convert": skip}),
    "ct fp8 tensor": Kind("fp8_tensor", fp8_tensor, _float(8, "tensor")),
    "ct fp8 channel": Kind("fp8_channel", fp8_channel, _float(8, "channel")),
    "ct fp8 block": Kind(
        "fp8_block", lambda w: fp8_block(w, "weight_scale"), _float(8, "block", block_structure=[128, 128])
    ),
    "ct nvfp4": Kind("nvfp4", lambda w: nvfp4(w, divides=True), _float(4, "tensor_group", group_size=16)),
    "ct mxfp4": Kind("mxfp4", mxfp4, _float(4, "group", group_size=32)),
    "ct int4": Kind("int4_group", lambda w: compressed(w, 4), _int(4)),
    "ct int4 zeros": Kind("int4_affine", lambda w: compressed(w, 4, symmetric=False), _int(4, symmetric=False)),
    "ct int4 order": Kind("int4_ordered", lambda w: compressed(w, 4, ordered=True), _int(4, actorder="group")),
    "ct int8": Kind("int8_affine", lambda w: compressed(w, 8), _int(8)),
    "ct int8 zeros": Kind("int8_affine", lambda w: compressed(w, 8, symmetric=False), _int(8, symmetric=False)),
    "ct int8 plain": Kind("int8_affine", plain_int8, _int(8, "channel")),
    "modelopt fp8": Kind("fp8_tensor", fp8_tensor, _modelopt("FP8")),
    "modelopt blocks": Kind("fp8_block", fp8_modelopt, _modelopt("FP8_PB_WO")),
    "modelopt nvfp4": Kind("nvfp4", lambda w: nvfp4(w, divides=False), _modelopt("NVFP4")),
    "modelopt nvfp4 w4a8": Kind("nvfp4", lambda w: nvfp4(w, divides=False), _modelopt("W4A8_NVFP4_FP8", group_size=16)),
    "modelopt mxfp4 w4a8": Kind("mxfp4", mxfp4_modelopt, _modelopt("W4A8_MXFP4_FP8", group_size=32)),
    "modelopt int4 w4a8": Kind(
        "int4_group", int4_modelopt, _modelopt("W4A8_AWQ", group_size=GROUP, has_zero_point=False, pre_quant_scale=True)
    ),
    "modelopt int8": Kind("int8_affine", int8_modelopt, _modelopt("W8A16")),
    "gptq": Kind("int4_group", gptq, _gptq()),
    "auto-round": Kind("int4_group", gptq, _auto_round("auto_round:auto_gptq")),
    "auto-round zeros": Kind(
        "int4_affine", lambda w: gptq(w, symmetric=False, less=0), _auto_round("auto_round", sym=False)
    ),
    "auto-round 8 bits": Kind(
        "int8_affine", lambda w: gptq(w, 8, symmetric=False), _auto_round("auto_round:gptq", bits=8, sym=False)
    ),
    "auto-round awq": Kind("int4_affine", awq, _auto_round("auto_round:auto_awq", sym=False)),
    "gptq zeros": Kind("int4_affine", lambda w: gptq(w, symmetric=False), _gptq(sym=False)),
    "gptq order": Kind("int4_ordered", lambda w: gptq(w, ordered=True), _gptq(desc_act=True)),
    "gptq 8 bits": Kind("int8_affine", lambda w: gptq(w, 8, symmetric=False), _gptq(bits=8, sym=False)),
    "awq": Kind(
        "int4_affine", awq,
        lambda skip: {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": skip,
        },
    ),
    "bitsandbytes": Kind(
        "bnb4", nf4,
        lambda skip: {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "llm_int8_skip_modules": skip,
        },
    ),
}  # fmt: skip


def quantise(
    folder: Path,
    kind: Kind,
    wanted: Callable[[str], bool],
    other: Callable[[str], Callable[[Tensor], Stored] | None] | None = None,
) -> Path:
    """Quantise in place the matrices of a saved model whose module path is ``wanted``, all others are on the skip list.

    other: what writes a module's matrix in the place of ``kind``, where it is not None.
    Returns the folder of the same model in float32, with the numbers that the quantised ones are.
    """
    file, config = folder / "model.safetensors", folder / "config.json"
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    skip: list[str] = []
    for name, tensor in load_file(file).items():
        path = name.removesuffix(".weight")
        plain[name] = tensor.float() if tensor.is_floating_point() else tensor
        if path != name and tensor.dim() == 2 and wanted(path):
            own = None if other is None else other(path)
            parts, plain[name] = (own or kind.write)(tensor.float())
            stored |= {f"{path}.{suffix}": part.contiguous().clone() for suffix, part in parts.items()}
        else:
            stored[name] = tensor
            skip += [path] if tensor.dim() > 1 else []
    twin = folder.with_name(f"{folder.name}-decoded")
    shutil.copytree(folder, twin)
    save_file({n: t.contiguous() for n, t in plain.items()}, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, file, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": kind.block(skip)}))
    return twin
