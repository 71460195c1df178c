"""Toy checkpoints: four families in every format and storage, small enough to write in a test.

``write_checkpoint`` encodes random heavy-tailed weights and writes them under the family's names; what it returns
holds the payloads it wrote, so that a test compares bytes and values with what a loader gives back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from collegium.errors import InputError
from collegium.formats import FORMATS, Fp8Block, Int4Group, NvFp4, by_name
from collegium.formats.unquantised import CONFIG_NAMES, DTYPES
from collegium.models import FAMILIES, Family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from collegium.formats.payload import Payload, Storage

__all__ = ["TinyCheckpoint", "TinySize", "combinations", "tiny_config", "write_checkpoint", "written_storages"]

_FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
_COMPRESSED: Mapping[str, Mapping[str, object]] = {
    "fp8_tensor": {"type": "float", "num_bits": 8, "strategy": "tensor"},
    "fp8_channel": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "fp8_block": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "mxfp8": {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32},
    "mxfp4": {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32},
    "nvfp4": {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "int4_group": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32},
}
_MODELOPT = {
    "fp8_tensor": "FP8",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_block": "FP8_PB_WO",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "int4_group": "W4A16_AWQ",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySize:
    """Sizes of a toy model: D, I, E, top-k and layers (the first DeepSeek-V3 layer is dense)."""

    hidden: int = 256
    intermediate: int = 128
    experts: int = 4
    top_k: int = 2
    layers: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyCheckpoint:
    """What was written.

    experts: layer to (gate ``[E, I, H]``, up ``[E, I, H]``, down ``[E, H, I]``) payloads. biases: layer to
    (gate ``[E, I]``, up ``[E, I]``, down ``[E, H]``), only where the family has them. tensors: everything by name.
    """

    path: Path
    config: dict[str, object]
    experts: dict[int, tuple[Payload, Payload, Payload]]
    biases: dict[int, tuple[Tensor, Tensor, Tensor]]
    tensors: dict[str, Tensor]


def written_storages(cls: type[Payload]) -> list[Storage]:
    """Return the storages of a format that toy checkpoints are written in: those that keep the payload's axes."""
    if cls.read_only:
        return []
    return [s for s in cls.storages if s.name != "gguf" and not any(part.transposed for part in s.parts)]


def combinations() -> list[tuple[str, str, str, bool]]:
    """Return every (family, format, storage, stacked) that can be written."""
    rows: list[tuple[str, str, str, bool]] = []
    for family in (f for f in FAMILIES if f.name in _FAMILIES):
        for cls in FORMATS:
            for storage in written_storages(cls):
                whole = storage.name == "gpt-oss" or storage.name.endswith("-stack")
                interleaved = family.names.gate is None
                if storage.name == "plain" or (whole and interleaved == (storage.name == "gpt-oss")):
                    rows.append((family.name, cls.name, storage.name, True))
                if not interleaved and not whole:
                    rows.append((family.name, cls.name, storage.name, False))
    return rows


def _quantization(format_name: str, storage: str) -> dict[str, object] | None:
    if storage == "plain":
        return None
    if storage == "compressed-tensors":
        group: dict[str, object] = {"targets": ["Linear"], "weights": dict(_COMPRESSED[format_name])}
        ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.gate$"]
        return {"quant_method": storage, "config_groups": {"group_0": group}, "ignore": ignore}
    if storage == "modelopt":
        exclude = ["lm_head", "*self_attn*", "*.shared_experts*"]
        group = {"group_size": 32} if format_name == "int4_group" else {}
        return {"quant_method": storage, "quant_algo": _MODELOPT[format_name], **group, "exclude_modules": exclude}
    if format_name in ("mxfp4", "mxfp8"):
        return {"quant_method": format_name, "modules_to_not_convert": ["lm_head", "shared_experts"]}
    block: dict[str, object] = {"weight_block_size": [128, 128]} if format_name == "fp8_block" else {}
    return {"quant_method": "fp8", **block, "modules_to_not_convert": ["lm_head", "mlp.gate", "shared_experts"]}


def tiny_config(family: str, format_name: str, storage: str, size: TinySize) -> dict[str, object]:
    """Return the ``config.json`` of a toy model; raises InputError for an unknown family."""
    common: dict[str, object] = {
        "model_type": family,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_experts_per_tok": size.top_k,
        "hidden_act": "silu",
        "dtype": CONFIG_NAMES.get(format_name, "bfloat16"),
    }
    wide = {"moe_intermediate_size": size.intermediate, "intermediate_size": 2 * size.intermediate}
    tables: dict[str, dict[str, object]] = {
        "qwen3_moe": {**wide, "num_experts": size.experts, "norm_topk_prob": True, "decoder_sparse_step": 1},
        "mixtral": {"intermediate_size": size.intermediate, "num_local_experts": size.experts},
        "deepseek_v3": {
            **wide,
            "n_routed_experts": size.experts,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        "gpt_oss": {"intermediate_size": size.intermediate, "num_local_experts": size.experts, "swiglu_limit": 7.0},
    }
    if family not in tables:
        raise InputError(f"toy checkpoints exist for {', '.join(tables)}, asked was {family!r}")
    quantization = _quantization(format_name, storage)
    block = {} if quantization is None else {"quantization_config": quantization}
    return {**common, **tables[family], **block}


def _heavy(generator: torch.Generator, *shape: int) -> Tensor:
    """Return unit-scale values with heavy tails: a normal number over a root of a uniform one."""
    normal = torch.randn(shape, generator=generator)
    return normal / torch.rand(shape, generator=generator).clamp(min=0.05).sqrt()


def _encode(cls: type[Payload], storage: str, weight: Tensor) -> Payload:
    if cls is NvFp4:
        return NvFp4.encode(weight, global_divides=storage == "compressed-tensors")
    return cls.encode(weight)


def _parts(payload: Payload, storage: Storage) -> dict[str, Tensor]:
    """Return the checkpoint tensors of a payload ``[E, N, K]`` by suffix, the stack dimension kept."""
    tensors, (count, rows, columns) = payload.tensors(), payload.shape
    first = storage.parts[0]
    if "values" in tensors:
        return {first.suffix: tensors["values"]}
    codes = tensors["codes"]
    scales = tensors["scale"] if "scale" in tensors else tensors["scales"]
    out: dict[str, Tensor] = {}
    if isinstance(payload, Int4Group) and storage.name == "modelopt":
        nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)[..., :columns] ^ 8
        codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    elif isinstance(payload, Int4Group):
        codes = codes[..., : 4 * -(-columns // 8)].contiguous().view(torch.int32)
        out[".weight_shape"] = torch.tensor([rows, columns]).repeat(count, 1)
    elif first.suffix == "_blocks":
        codes = codes.unflatten(-1, (-1, 16))
    elif first.columns_per == 2:
        codes = codes[..., : -(-columns // 2)]
        codes = codes.view(torch.int8) if first.dtypes[0] == "I8" else codes
    else:
        codes = codes[..., :columns]
    if isinstance(payload, Fp8Block) and storage.name == "modelopt":
        scales = scales[..., :, None, :, None]
    elif storage.name == "deepseek-v4" and scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    elif storage.parts[1].inner and scales.dim() == 2:
        scales = scales.unsqueeze(-1)
    out[first.suffix] = codes
    out[storage.parts[1].suffix] = scales
    if isinstance(payload, NvFp4):
        out[storage.parts[2].suffix] = payload.global_scale
        out[storage.parts[3].suffix] = torch.ones(count)
    return out


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def _stacked(
    family: Family, layer: int, storage: Storage, payloads: tuple[Payload, Payload, Payload]
) -> dict[str, Tensor]:
    gate, up, down = (_parts(payload, storage) for payload in payloads)
    table, out = family.names.stacked, dict[str, "Tensor"]()
    for suffix in gate:
        pair = (gate[suffix], up[suffix])
        if table.interleaved:
            both = _interleave(*pair)
        else:
            # one number for a matrix becomes two for an expert
            both = torch.stack(pair, 1) if pair[0].dim() == 1 else torch.cat(pair, 1)
        plain = suffix == ".weight"
        flip = plain and table.transposed
        name = "" if plain else suffix
        out[table.gate_up.format(layer=layer) + name] = both.mT if flip else both
        out[table.down.format(layer=layer) + name] = down[suffix].mT if flip else down[suffix]
    return out


def _single(
    family: Family, layer: int, storage: Storage, payloads: tuple[Payload, Payload, Payload]
) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for which, payload in zip(("gate", "up", "down"), payloads, strict=True):
        template = family.names.projection(which)
        for suffix, tensor in _parts(payload, storage).items():
            for expert in range(payload.shape[0]):
                out[template.format(layer=layer, expert=expert) + suffix] = tensor[expert]
    return out


def _dense_parts(
    family: Family, layer: int, size: TinySize, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return router and shared expert, unquantised."""
    names, out = family.names, dict[str, "Tensor"]()
    out[names.router_weight.format(layer=layer)] = _heavy(generator, size.experts, size.hidden).to(dtype)
    for template in (names.router_bias, names.correction_bias):
        if template is not None:
            out[template.format(layer=layer)] = _heavy(generator, size.experts)
    up = (size.intermediate, size.hidden)
    for template, shape in zip(names.shared or (), (up, up, up[::-1]), strict=False):
        out[template.format(layer=layer) + ".weight"] = _heavy(generator, *shape).to(dtype)
    return out


def _save(path: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], shards: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    names = sorted(tensors)
    if shards == 1:
        save_file({n: tensors[n].contiguous().clone() for n in names}, path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        # neighbours land in different files, so weight and scale of one expert are parted on purpose
        own = names[shard::shards]
        save_file({n: tensors[n].contiguous().clone() for n in own}, path / file)
        weight_map |= dict.fromkeys(own, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_checkpoint(
    path: str | Path,
    family: str = "qwen3_moe",
    format_name: str = "bf16",
    storage: str | None = None,
    *,
    size: TinySize | None = None,
    stacked: bool | None = None,
    shards: int = 1,
    seed: int = 0,
) -> TinyCheckpoint:
    """Write a toy checkpoint (``config.json`` and safetensors) into the folder ``path``.

    storage: default the format's first one the family can hold. stacked: default False where the family stores
    experts one by one. Raises InputError for a combination that ``combinations()`` does not list.
    """
    size = size if size is not None else TinySize()
    choices = [row for row in combinations() if row[:2] == (family, format_name)]
    choices = [row for row in choices if storage in (None, row[2]) and stacked in (None, row[3])]
    if not choices:
        msg = f"no toy checkpoint for {family}, {format_name}, storage={storage}, stacked={stacked}; see combinations()"
        raise InputError(msg)
    _, _, storage, stacked = min(choices, key=lambda row: row[3])
    table = next(f for f in FAMILIES if f.name == family)
    cls = by_name(format_name)
    layout = next(s for s in cls.storages if s.name == storage)
    config = tiny_config(family, format_name, storage, size)
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (size.experts, size.intermediate, size.hidden), (size.experts, size.hidden, size.intermediate)
    dtype = DTYPES.get(format_name, torch.bfloat16)
    out = TinyCheckpoint(path=Path(path), config=config, experts={}, biases={}, tensors={})
    for layer in table.moe_layers(config):
        payloads = (
            _encode(cls, storage, _heavy(generator, *wide)),
            _encode(cls, storage, _heavy(generator, *wide)),
            _encode(cls, storage, _heavy(generator, *narrow)),
        )
        out.experts[layer] = payloads
        out.tensors.update((_stacked if stacked else _single)(table, layer, layout, payloads))
        out.tensors.update(_dense_parts(table, layer, size, generator, dtype))
        if table.describe(config).expert_bias:
            gate, up = (_heavy(generator, *wide[:2]).to(torch.bfloat16) for _ in range(2))
            down = _heavy(generator, *narrow[:2]).to(torch.bfloat16)
            out.biases[layer] = (gate, up, down)
            out.tensors[table.names.stacked.gate_up.format(layer=layer) + "_bias"] = _interleave(gate, up)
            out.tensors[table.names.stacked.down.format(layer=layer) + "_bias"] = down
    out.tensors["model.embed_tokens.weight"] = _heavy(generator, 16, size.hidden).to(dtype)
    _save(out.path, config, out.tensors, shards)
    return out
