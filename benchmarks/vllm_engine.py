"""One vLLM engine in this process, for ``bench_vllm.py`` and ``vllm_distance.py``: start it, time it, read its log."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import torch

from vllm_models import config_of, register, write_config

__all__ = ["Log", "decode_seconds", "experts_of", "kernel_seconds", "logprobs", "prompt", "run_seconds", "start"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where it can be profiled
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128]  # batch sizes of CUDA graphs
SHORT = 32  # tokens of a prompt before decoding


class Log:
    """The lines that vLLM and Collegium log: vLLM sets its handlers when an engine starts, so records are watched."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        make = logging.getLogRecordFactory()

        def factory(*arguments: Any, **options: Any) -> logging.LogRecord:
            record = make(*arguments, **options)
            if record.name.startswith("vllm"):
                with contextlib.suppress(Exception):  # a record that cannot be formatted
                    self.lines.append(record.getMessage())
            return record

        logging.setLogRecordFactory(factory)


def experts_of(lines: list[str]) -> tuple[str, str, str]:
    """Return kernel, weights and activations of the experts from the log; vLLM and nothing if it runs them itself."""
    for line in lines:
        found = re.search(r"Collegium: runs the experts .*kernel (\w+), weights (\w+), activations (\w+)", line)
        if found:
            return found[1], found[2], found[3]
    return "vLLM", "", ""


def start(model: str, folder: Path, *, layers: int | None, tiny: bool, eager: bool, backend: str = "") -> Any:
    """Start an engine with random weights; backend: vLLM's ``--moe-backend``."""
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    from vllm import LLM

    register()
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "model": write_config(folder / model, config_of(model, layers, tiny=tiny)),
        "load_format": "random", "generation_config": "vllm", "skip_tokenizer_init": True, "seed": 0,
        "max_model_len": 8320 if on_gpu else 320, "max_num_batched_tokens": 8192 if on_gpu else 320,
        "max_num_seqs": 128 if on_gpu else 8, "enable_prefix_caching": False, "gpu_memory_utilization": 0.88,
    }  # fmt: skip
    if eager or not on_gpu:
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {"cudagraph_capture_sizes": CAPTURED}
    if backend:
        options["moe_backend"] = backend
    return LLM(**options)


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    """Return a prompt of random tokens, the same for the same seed."""
    chance = random.Random(seed)
    return {"prompt_token_ids": [chance.randrange(5, 500) for _ in range(length)]}


def run_seconds(engine: Any, batch: int, length: int, new: int, seed: int) -> float:
    """Return the seconds of ``batch`` prompts of ``length`` tokens with ``new`` tokens each."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    prompts = [prompt(length, 1000 * seed + n) for n in range(batch)]
    _wait()
    began = time.perf_counter()
    answers = engine.generate(prompts, options, use_tqdm=False)
    _wait()
    taken = time.perf_counter() - began
    written = {len(answer.outputs[0].token_ids) for answer in answers}
    if written != {new}:
        raise RuntimeError(f"{new} new tokens were requested, the engine wrote {sorted(written)}")
    return taken


def decode_seconds(engine: Any, batch: int, new: int, repeats: int) -> float:
    """Return the seconds of a decoding step: 1 + ``new`` tokens less 1 token, each the best of ``repeats``."""
    run_seconds(engine, batch, SHORT, 4, 0)  # compiles
    first = min(run_seconds(engine, batch, SHORT, 1, 1 + n) for n in range(repeats))
    all_steps = min(run_seconds(engine, batch, SHORT, 1 + new, 11 + n) for n in range(repeats))
    return (all_steps - first) / new


def kernel_seconds(engine: Any, batch: int, length: int, new: int) -> float:
    """Return the seconds of all GPU kernels of a run, without the gaps between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run_seconds(engine, batch, length, new, 21)
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.time_range.elapsed_us() for event in profile.events() or () if event.device_type == cuda) / 1e6


def logprobs(engine: Any, lengths: tuple[int, ...]) -> list[float]:
    """Return the log-probabilities of the tokens of prompts of these lengths."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    prompts = [prompt(length, length) for length in lengths]
    found: list[float] = []
    for answer, sent in zip(engine.generate(prompts, options, use_tqdm=False), prompts, strict=True):
        pairs = zip(answer.prompt_logprobs[1:], sent["prompt_token_ids"][1:], strict=True)
        found += [step[token].logprob for step, token in pairs]
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
