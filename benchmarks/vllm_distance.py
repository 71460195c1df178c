"""Whether Collegium's experts are further from vLLM's kernels than these are from each other, layer by layer.

    python benchmarks/vllm_distance.py qwen3_fp8 --layers 24 --out distance.csv

Engines with random weights answer one prompt, eagerly, each in a process: vLLM's Triton experts (the reference), other
kernels of vLLM, and Collegium. Each records, of every MoE layer, its input and routing, and its output for *the
reference's* input and routing. Two questions are thus told apart:

- ``same input``: the distance of a layer's outputs for equal inputs. A fault shows here.
- ``input``, ``routed otherwise``: how far the inputs of the running model are apart, and for which share of the tokens
  the router selected other experts. With random routers, small differences grow from layer to layer until tokens visit
  other experts: chaos, which another kernel of vLLM shows as well.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_models import MODELS

# By name: COLLEGIUM_VLLM, COLLEGIUM_VLLM_ACTIVATIONS and vLLM's --moe-backend.
ENGINES = {
    "triton": ("off", "", "triton"),
    "marlin": ("off", "", "marlin"),
    "collegium": ("require", "", ""),
    "collegium, 16 bits": ("require", "bf16", ""),
    "vllm": ("off", "", ""),  # its default
}
ALLOWED = 1.2  # times the distance of vLLM's kernels from each other
HEAD = ("layer", "engine", "same input", "allowed", "input", "routed otherwise")

Call = dict[str, Tensor]  # x [T, H], weights and ids [T, k] of a layer; out, and replayed for the reference's x
Calls = dict[str, Call]  # by layer


def kept(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def patch(calls: Calls, reference: Calls | None, recording: list[bool]) -> None:
    """Have vLLM's layers record their calls while ``recording`` is not empty."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    original = RoutedExperts.forward_modular

    def forward_modular(self: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **shared: Any) -> Tensor:
        if not recording:
            return original(self, x, topk_weights, topk_ids, **shared)
        # Copies: kernels may write to their input, or return memory that the next call uses.
        call = {name: kept(tensor) for name, tensor in (("x", x), ("weights", topk_weights), ("ids", topk_ids))}
        out = original(self, x, topk_weights, topk_ids, **shared).clone()
        call["out"] = kept(out)
        if reference is not None:
            inputs = (reference[self.layer_name][name].to(x.device, copy=True) for name in ("x", "weights", "ids"))
            call["replayed"] = kept(original(self, *inputs))
        calls[self.layer_name] = call
        return out

    RoutedExperts.forward_modular = forward_modular


def record(asked: argparse.Namespace) -> None:
    """Start one engine, answer the prompt, and save its calls."""
    from vllm import SamplingParams

    from vllm_engine import prompt, start

    reference = torch.load(asked.reference) if asked.reference else None
    calls: Calls = {}
    recording: list[bool] = []
    patch(calls, reference, recording)
    backend = ENGINES[asked.engine][2]
    engine = start(asked.model, asked.folder, layers=asked.layers, tiny=asked.tiny, eager=True, backend=backend)
    recording.append(True)
    engine.generate([prompt(asked.tokens, 7)], SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    if not calls:
        raise SystemExit(f"{asked.engine}: no MoE layer was called with a routing; its kernels route by themselves")
    torch.save(calls, asked.out)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def distance(found: Tensor, truth: Tensor) -> float:
    """Return the relative L2 distance."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def routed_otherwise(found: Tensor, truth: Tensor) -> float:
    """Return the share of tokens with another set of experts; ids ``[T, k]``."""
    return float((found.sort(-1).values != truth.sort(-1).values).any(-1).double().mean())


def compared(by_engine: dict[str, Calls], reference: str) -> list[dict[str, Any]]:
    """Return a row per layer and engine. allowed: a multiple of the largest distance of vLLM's other kernels."""
    others = [name for name in by_engine if name != reference]
    peers = [name for name in others if ENGINES[name][0] == "off"]
    found: list[dict[str, Any]] = []
    for layer, truth in by_engine[reference].items():
        same = {name: distance(by_engine[name][layer]["replayed"], truth["out"]) for name in others}
        allowed = ALLOWED * max((same[name] for name in peers), default=float("nan"))
        for name in others:
            call = by_engine[name][layer]
            row = {"layer": layer, "engine": name, "same input": same[name], "allowed": allowed}
            row |= {"input": distance(call["x"], truth["x"])}
            found.append({**row, "routed otherwise": routed_otherwise(call["ids"], truth["ids"])})
    return found


def verdict(rows: list[dict[str, Any]]) -> str:
    """Return what the rows show: a fault, chaos, or that nothing judges."""
    ours = [row for row in rows if row["engine"].startswith("collegium")]
    if any(row["allowed"] != row["allowed"] for row in ours):
        return "no other kernel of vLLM ran, so nothing says which distance is ordinary"
    faults = [row for row in ours if not row["same input"] <= row["allowed"]]
    if faults:
        row = max(faults, key=lambda row: row["same input"] / row["allowed"])
        return (
            f"fault: {row['engine']} in {row['layer']} is {row['same input']:.3g} off for the same input, "
            f"allowed {row['allowed']:.3g}; {len(faults)} of {len(ours)} layers"
        )
    last = rows[-1]["layer"]
    shares = ", ".join(f"{row['engine']} {row['routed otherwise']:.0%}" for row in rows if row["layer"] == last)
    return f"no fault: every layer is near for the same input; tokens routed otherwise in {last}: {shares}"


def run(engine: str, reference: Path | None, asked: argparse.Namespace) -> Calls:
    """Return the calls of one engine from a process that runs it."""
    out = asked.folder / f"{engine}.pt"
    plugin, activations, _ = ENGINES[engine]
    command = [sys.executable, __file__, asked.model, "--engine", engine, "--folder", str(asked.folder)]
    command += ["--out", str(out), "--tokens", str(asked.tokens)]
    command += ["--layers", str(asked.layers)] if asked.layers else []
    command += ["--tiny"] if asked.tiny else []
    command += ["--reference", str(reference)] if reference else []
    environment = {**os.environ, "COLLEGIUM_VLLM": plugin, "COLLEGIUM_VLLM_ACTIVATIONS": activations}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not out.exists():
        raise RuntimeError(f"{engine}:\n{done.stderr[-3000:]}")
    return torch.load(out)


def main() -> int:
    """Print and write the rows and the verdict; 1 for a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--engines", nargs="*", default=["triton", "marlin", "collegium", "collegium, 16 bits"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=256, help="of the prompt")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--out", type=Path, default=Path("distance.csv"))
    parser.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        record(asked)
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = Path(folder)
        first, *others = asked.engines
        by_engine = {first: run(first, None, asked)}
        for name in others:
            try:
                by_engine[name] = run(name, asked.folder / f"{first}.pt", asked)
            except RuntimeError as error:  # vLLM has no such kernel for this model
                print(error, file=sys.stderr)
    rows = compared(by_engine, first)
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **{k: f"{row[k]:.4g}" for k in HEAD[2:]}} for row in rows)
    for row in rows:
        print(row["layer"], row["engine"], *(f"{name} {row[name]:.4g}" for name in HEAD[2:]), sep="  ")
    print(verdict(rows))
    return int(verdict(rows).startswith("fault"))


if __name__ == "__main__":
    sys.exit(main())
