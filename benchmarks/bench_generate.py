"""Tokens a second of ``generate`` under torch.compile with a static cache, by experts implementation, as CSV.

A model of Qwen3-30B-A3B's shape with few layers and random weights, built in this process: no files are needed. Every
implementation runs the same weights, prompts and number of tokens; the steps of a run are compiled with transformers'
default, ``reduce-overhead``, which replays CUDA graphs. ``collegium_decoder`` is ``Decoder``, with a CUDA graph
and without a compiler. The logits of the prompt are compared with those of ``eager`` in float32 before a time is taken.

    python benchmarks/bench_generate.py --layers 4 --batches 1 8 32 --out generate.csv
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

import collegium
from collegium.integrations.transformers import Decoder, register

SHAPE = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"vocab_size": 211, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
IMPLEMENTATIONS = ("collegium", "collegium_decoder", "grouped_mm", "batched_mm", "sonicmoe", "deepgemm")
COLUMNS = [
    "date", "gpu", "torch", "triton", "transformers", "collegium", "commit", "command", "layers", "batch",
    "implementation", "error", "tokens_per_second", "ms_per_step", "note",
]  # fmt: skip
PROMPT = 64
LIMIT = 0.05  # largest relative error of the prompt's logits in BF16; experts of another layer are beyond 0.5


def build(layers: int, device: str, *, small: bool) -> Any:
    """Return the model with random weights of unit gain, in BF16."""
    torch.manual_seed(5)
    config = transformers.Qwen3MoeConfig(**SHAPE | (SMALL if small else {}), num_hidden_layers=layers)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False)


def relative_error(model: Any, ids: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the error of the last logits of the prompts, relative to their norm."""
    found = model(ids, use_cache=False, logits_to_keep=1).logits.float()
    return float((found - wanted).norm() / wanted.norm())


class _Watch(transformers.StoppingCriteria):
    """Notes the time at which half of the tokens are there, and never stops the generation."""

    def __init__(self, ids: torch.Tensor, half: int) -> None:
        self.ids = ids
        self.half = half
        self.time = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.written(input_ids.shape[1] - self.ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def written(self, count: int) -> None:
        if count == self.half:
            _synchronize(self.ids)
            self.time = time.perf_counter()


def seconds_per_token(model: Any, ids: torch.Tensor, tokens: int, rounds: int, *, decoder: bool) -> float:
    """Return the median time of a decode step, over the second half of the tokens."""
    watch = _Watch(ids, tokens // 2)
    steps = Decoder(model)
    compile_config = transformers.CompileConfig()
    compile_config._compile_all_devices = True
    options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static", "max_new_tokens": tokens}
    options |= {"compile_config": compile_config, "stopping_criteria": [watch]}
    times: list[float] = []
    for turn in range(rounds + 1):
        if decoder:
            steps.generate(ids, tokens, written=watch.written)
        else:
            model.generate(ids, **options)
        _synchronize(ids)
        if turn:  # the first turn compiles and captures
            times.append((time.perf_counter() - watch.time) / (tokens - tokens // 2))
    return statistics.median(times)


def _synchronize(ids: torch.Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()


def _known_name(implementation: str) -> tuple[str, str]:
    """Return the name for transformers, and why this machine cannot run it."""
    name = "collegium" if implementation.startswith("collegium") else implementation
    known = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    if name not in known.valid_keys():
        return name, f"transformers {transformers.__version__} has no experts implementation {name!r}"
    return name, ""


def measure(model: Any, implementation: str, ids: torch.Tensor, wanted: torch.Tensor, args: argparse.Namespace) -> Any:
    """Return error, seconds per token and note of one implementation; a failure is a note."""
    torch._dynamo.reset()
    vars(model).pop("_compiled_call", None)
    name, missing = _known_name(implementation)
    if missing:
        return None, None, missing
    try:
        model.set_experts_implementation(name)
        with torch.inference_mode():
            error = relative_error(model, ids, wanted)
            if not error <= LIMIT:
                return error, None, f"its logits are {error:.3f} from eager in float32, allowed are {LIMIT}"
            decoder = implementation == "collegium_decoder"
            return error, seconds_per_token(model, ids, args.tokens, args.rounds, decoder=decoder), ""
    except Exception as failure:  # what peers raise without their kernels
        return None, None, f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def truths(model: Any, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the last logits of each batch of prompts by the class's loop over experts, in float32."""
    model.set_experts_implementation("eager")
    model.float()
    with torch.inference_mode():
        logits = [model(ids, use_cache=False, logits_to_keep=1).logits.float().clone() for ids in prompts]
    model.bfloat16()
    return logits


def prompts_of(model: Any, batch: int, device: str) -> torch.Tensor:
    """Return ids ``[batch, PROMPT]``."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(5, model.config.vocab_size, (batch, PROMPT), generator=generator).to(device)


def main() -> int:
    """Measure every implementation at every batch and write one row for each."""
    args = _options()
    register(compare=False)
    model = build(args.layers, args.device, small=args.small)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    head = {
        "date": datetime.datetime.now(tz=datetime.UTC).date(), "gpu": gpu, "torch": torch.__version__,
        "triton": triton.__version__, "transformers": transformers.__version__, "collegium": collegium.__version__,
        "commit": args.commit, "command": " ".join(["python benchmarks/bench_generate.py", *sys.argv[1:]]),
        "layers": args.layers,
    }  # fmt: skip
    started = time.perf_counter()
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        prompts = [prompts_of(model, batch, args.device) for batch in args.batches]
        for batch, ids, wanted in zip(args.batches, prompts, truths(model, prompts), strict=True):
            for implementation in args.implementations:
                if time.perf_counter() - started > args.seconds:
                    error, seconds, note = None, None, "not measured: the time was over"
                else:
                    error, seconds, note = measure(model, implementation, ids, wanted, args)
                row = head | {"batch": batch, "implementation": implementation, "note": note}
                row["error"] = "" if error is None else f"{error:.5f}"
                row["tokens_per_second"] = "" if seconds is None else f"{batch / seconds:.1f}"
                row["ms_per_step"] = "" if seconds is None else f"{1e3 * seconds:.3f}"
                writer.writerow(row)
                file.flush()
                print(batch, implementation, row["error"], row["tokens_per_second"], note, flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    parser.add_argument("--commit", default=commit or "unknown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
