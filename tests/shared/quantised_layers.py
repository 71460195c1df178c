"""One Qwen2-MoE layer on disk, any of its matrices quantised: experts, router, shared expert and its gate.

Truth is float64 arithmetic on the numbers that plain torch makes of the stored codes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from collegium.checkpoint import Checkpoint, audit
from collegium.commands.inspect import inspect_model
from collegium.commands.verify import verify_model
from collegium.loading import load_layer
from collegium.problem import Overrides

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from quantised_matrices import Kind

COMMANDS: tuple[Callable[[str], Any], ...] = (
    lambda path: load_layer(path, 0, device="cpu"),
    inspect_model,
    lambda path: audit(Checkpoint.open(path)),
    lambda path: verify_model(path, device="cpu"),
)
E, K, D, WIDTH, SHARED = 8, 3, 160, 96, 64
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": D, "moe_intermediate_size": WIDTH, "intermediate_size": 64,
    "shared_expert_intermediate_size": SHARED, "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": False,
    "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": 64, "dtype": "bfloat16",
}  # fmt: skip
BASE = "model.layers.0.mlp."
ROUTER, GATE = f"{BASE}gate", f"{BASE}shared_expert_gate"


@dataclass
class Written:
    """A checkpoint of one layer. values: by module path, in float32, the numbers of its matrices."""

    path: Path
    values: dict[str, Tensor]

    def truth(self, x: Tensor) -> Tensor:
        """The layer's output in float64."""
        w = {path.removeprefix(BASE): value.double() for path, value in self.values.items()}
        x = x.double()

        def expert(name: str) -> Tensor:
            gate, up, down = (w[f"{name}.{which}_proj"] for which in ("gate", "up", "down"))
            return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

        weights, chosen = torch.softmax(x @ w["gate"].T, -1).topk(K)
        factors = torch.zeros(len(x), E, dtype=torch.float64).scatter(1, chosen, weights)
        out = torch.sigmoid(x @ w["shared_expert_gate"].T) * expert("shared_expert")
        for index in range(E):
            out += factors[:, index : index + 1] * expert(f"experts.{index}")
        return out


def heavy(*shape: int) -> Tensor:
    return torch.randn(shape) * torch.exp(0.7 * torch.randn(shape[0], 1)) * shape[1] ** -0.5


def write(folder: Path, kind: Kind, wanted: Callable[[str], bool], *, skip: bool = True) -> Written:
    """Write the layer with the matrices that are ``wanted`` quantised, the others in bfloat16 and on the skip list."""
    torch.manual_seed(11)
    shapes = {ROUTER: (E, D), GATE: (1, D)}
    for name, width in (*((f"experts.{e}", WIDTH) for e in range(E)), ("shared_expert", SHARED)):
        shapes |= {f"{BASE}{name}.{p}_proj": (D, width) if p == "down" else (width, D) for p in ("gate", "up", "down")}
    written, stored = Written(path=folder, values={}), dict[str, "Tensor"]()
    plain: list[str] = []
    for path, shape in shapes.items():
        weight = heavy(*shape) * (6 if path == ROUTER else 2)
        if wanted(path):
            parts, values = kind.write(weight)
            stored |= {f"{path}.{suffix}": part.contiguous().clone() for suffix, part in parts.items()}
        else:
            stored[f"{path}.weight"] = values = weight.bfloat16()
            plain.append(path)
        written.values[path] = values.float()
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": kind.block(plain if skip else [])})
    )
    return written


def rewrite(folder: Path, changed: dict[str, Tensor | None]) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def check(written: Written) -> None:
    """Layer, inspect and verify take the checkpoint, and the layer computes the truth."""
    x = torch.randn(33, D) * torch.exp(torch.randn(33, 1))
    layer = load_layer(written.path, 0, device="cpu", dtype="fp32", overrides=Overrides(kernel="reference"))
    truth = written.truth(x)
    errors = (layer(x).double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert errors.max() < 1e-5
    assert inspect_model(str(written.path), device="cpu").report.deep
    assert verify_model(str(written.path), device="cpu", experts=2).passed


def everything(path: str) -> bool:
    return True
