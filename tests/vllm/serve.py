"""Serve the cases with the real engine, each in a separate process: serve.py [NAME ...].

An answer has the tokens that were written, their log-probabilities and the gap to the second best, the
log-probabilities of the prompts, and what Collegium logged; or the error.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from cases import ANSWERS, CASES, FOLDER

if TYPE_CHECKING:
    from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(FOLDER / "cache"),
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

    if "balanced" in case:
        import eplb_on_cpu

        eplb_on_cpu.asked(**case["balanced"])
    engine = LLM(case["model"], **{**ENGINE, **case["engine"]})
    options = SamplingParams(
        temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1, detokenize=False, ignore_eos=True
    )
    found = engine.generate([{"prompt_token_ids": ids} for ids in case["prompts"]], options, use_tqdm=False)
    answer: dict[str, Any] = {"ids": [], "written": [], "gaps": [], "prompts": []}
    for each, prompt in zip(found, case["prompts"], strict=True):
        own = each.outputs[0]
        answer["ids"].append(list(own.token_ids))
        steps = list(zip(own.logprobs, own.token_ids, strict=True))
        answer["written"].append([step[token].logprob for step, token in steps])
        answer["gaps"].append(
            [step[token].logprob - min(two.logprob for two in step.values()) for step, token in steps]
        )
        pairs = zip(each.prompt_logprobs[1:], prompt[1:], strict=True)
        answer["prompts"].append([step[token].logprob for step, token in pairs])
    if "ranks" not in case:  # the other engines may still need this one
        with contextlib.suppress(Exception):
            engine.llm_engine.engine_core.shutdown()
    return answer


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one case, or its error, from a process per engine, which has vLLM imported already.

    Data-parallel engines answer a part of the prompts each.
    """
    ranks = case.get("ranks", 1)
    files = [FOLDER / f"engine{rank}.json" for rank in range(ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    share = -(-len(case["prompts"]) // ranks)
    children: list[int] = []
    for rank in range(ranks):
        prompts = case["prompts"][rank * share : (rank + 1) * share]
        child = os.fork()
        if not child:
            _answer({**case, "prompts": prompts, "rank": rank}, files)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    answers = [
        json.loads(file.read_text()) if file.exists() else {"error": "the engine ended without an answer"}
        for file in files
    ]
    failed = next((answer for answer in answers if "error" in answer), None)
    return failed or {key: [one for answer in answers for one in answer[key]] for key in answers[0]}


def _answer(case: dict[str, Any], files: list[Path]) -> NoReturn:
    """Write the answer of this process, and end once all engines have theirs: they take their steps together."""
    os.environ |= {"COLLEGIUM_VLLM": case["plugin"], **case.get("env", {})}
    try:
        if len(files) > 1:
            import dp_on_cpu

            dp_on_cpu.join(case["rank"], len(files), port=29500 + os.getppid() % 1000)
        found = serve(case)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    files[case["rank"]].write_text(json.dumps(found))
    until = time.monotonic() + 60
    while not all(file.exists() for file in files) and time.monotonic() < until:
        time.sleep(0.2)
    for process in multiprocessing.active_children():  # of an engine that was not shut down before
        process.terminate()
        process.join(10)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(names: list[str]) -> None:
    """Answer the cases of these names, or all; what engines log goes to a file, and is read from there."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Any] = json.loads(ANSWERS.read_text()) if names and ANSWERS.exists() else {}
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    terminal, log = os.fdopen(os.dup(1), "w"), FOLDER / "engines.log"
    log.write_bytes(b"")
    with log.open("a") as file:  # appends, since several processes write to it
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import vllm  # noqa: F401  once, for all

    for name in names or CASES:
        start, began = log.stat().st_size, time.monotonic()
        answer = apart(CASES[name])
        text = log.read_bytes()[start:].decode(errors="replace")
        answer["log"] = re.findall(r"(?:INFO|WARNING) .*? Collegium: (.*)", text)
        moved = re.findall(r"EPLB: (\d+) of (\d+) slots hold another expert, (\d+) from another rank", text)
        answer["moved"] = [[int(number) for number in numbers] for numbers in moved]
        answer["commit"] = head
        answer["seconds"] = round(time.monotonic() - began, 1)
        answers[name] = answer
        ANSWERS.write_text(json.dumps(answers, indent=1))
        terminal.write(f"{name}: {answer.get('error', 'served')[:300]} in {answer['seconds']} s\n")
        terminal.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
