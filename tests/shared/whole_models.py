"""A whole model of ``load_model`` beside what transformers itself makes of the same files."""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def eager(model: nn.Module, path: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return what transformers makes of the files with its own experts."""
    import transformers

    cls: Any = type(model)
    kind = json.loads((path / "config.json").read_text())["model_type"]
    # A model type that transformers does not know it reads as the class's only when it is given the config.
    given = {} if kind in transformers.CONFIG_MAPPING else {"config": copy.deepcopy(model.config)}
    return cls.from_pretrained(path, dtype=dtype, experts_implementation="eager", device_map={"": device}, **given)


def same_tensors(ours: nn.Module, theirs: nn.Module) -> None:
    """Everything outside the experts is what transformers makes of it: names, dtypes, devices and bits."""
    from collegium.integrations.transformers.blocks import Block

    blocks = tuple(name + "." for name, module in ours.named_modules() if isinstance(module, Block))
    experts = re.compile(r"(?<!vision_moe\.)\bexperts\.(?!.*norm)")  # those of image tokens are transformers' own
    mine = {name: tensor for name, tensor in _tensors(ours).items() if not tensor.is_meta and "collegium" not in name}
    wanted = {n: t for n, t in _tensors(theirs).items() if not n.startswith(blocks or ("-",)) and not experts.search(n)}
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].device == tensor.device, name
        assert torch.equal(mine[name], tensor), name


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer, persistent or not."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def in_bf16(path: Path) -> None:
    """Round the tensors of a checkpoint to BF16, but for correction biases, which are published in float32."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 and "correction_bias" not in name:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config))


def as_near_as(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """Logits in BF16 are as near to float32 truth as those of transformers in BF16.

    By the median: a token whose experts change with the last bit of a router says nothing of the rest.
    """
    off = [(t.float() - truth).norm(dim=-1) / truth.norm(dim=-1) for t in (ours, theirs)]
    assert torch.isfinite(off[0]).all()
    assert off[0].median() <= 1.5 * off[1].median() + 1e-3
