"""Serve models with the real engine, one after the other in this process: serve.py CASES.json ANSWERS.json.

A case has ``model``, ``plugin`` (what COLLEGIUM_VLLM is), ``engine`` (arguments of ``vllm.LLM``), ``env``, ``prompts``
(token ids), ``tokens`` (how many to write). Its answer has the ids and log-probabilities that were written, those of
the prompts, and the lines that Collegium logged; or the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "seed": 0,
}


def serve(case: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one case."""
    from vllm import LLM, SamplingParams

    engine = LLM(case["model"], **{**ENGINE, **case.get("engine", {})})
    options = SamplingParams(
        temperature=0,
        max_tokens=case.get("tokens", 12),
        logprobs=2,
        prompt_logprobs=1,
        detokenize=False,
        ignore_eos=True,
    )
    try:
        found = engine.generate([{"prompt_token_ids": ids} for ids in case["prompts"]], options, use_tqdm=False)
        return {
            "ids": [list(each.outputs[0].token_ids) for each in found],
            "written": [
                [step[token].logprob for step, token in zip(own.logprobs, own.token_ids, strict=True)]
                for own in (each.outputs[0] for each in found)
            ],
            "prompts": [
                [step[token].logprob for step, token in zip(each.prompt_logprobs[1:], ids[1:], strict=True)]
                for each, ids in zip(found, case["prompts"], strict=True)
            ],
        }
    finally:
        with contextlib.suppress(Exception):
            engine.llm_engine.engine_core.shutdown()


def apart(case: dict[str, Any], answer: Path) -> None:
    """Write the answer to one case, or its error, from a process of its own, which has vLLM imported already."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.environ |= {"COLLEGIUM_VLLM": case["plugin"], **case.get("env", {})}
    try:
        found = serve(case)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def main(cases: str, answers: str) -> None:
    """Answer every case, in their order; what the engines log is read from the file that stdout and stderr go to."""
    log, found = Path(f"{answers}.log"), list[dict[str, Any]]()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import vllm  # noqa: F401  once, for all

    for case in json.loads(Path(cases).read_text()):
        start, began, own = log.stat().st_size, time.monotonic(), Path(f"{answers}.one")
        own.unlink(missing_ok=True)
        apart(case, own)
        answer = json.loads(own.read_text()) if own.exists() else {"error": "the engine ended without an answer"}
        text = log.read_bytes()[start:].decode(errors="replace")
        answer["log"] = re.findall(r"(?:INFO|WARNING) .*? Collegium: (.*)", text)
        answer["seconds"] = round(time.monotonic() - began, 1)
        found.append(answer)
        Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
