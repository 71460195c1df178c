"""vLLM with and without Collegium's experts, in one run: start, decoding, prefill, kernel time, distance of outputs.

    python benchmarks/bench_vllm.py --models qwen3_fp8 gptoss20b --activations "" fp8 --out vllm_h100.csv --commit HASH

Random weights of published sizes (``vllm_models.py``). Each engine has a process: without the plug-in, then with it for
each of ``--activations`` ("" is the default). A row has one measure of both; a failure is a row with the error.
``scripts/make_engines.py`` makes the table of docs/engines.md. ``--tiny`` tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vllm_models import MODELS, config_of

BATCHES = (1, 8, 32, 128)
PREFILLS = ((8, 1024), (1, 8192))
MACHINE = ("gpu", "capability", "driver", "python", "torch", "triton", "engine")
RUN = ("date", "commit", "command", "model", "layers")
RESULT = (
    "experts run by", "weights", "activations", "measure", "unit", "without", "with", "times as fast", "error"
)  # fmt: skip

Answer = dict[str, Any]


def measured(asked: argparse.Namespace) -> Answer:
    """Start one engine and return its measures by name, in seconds or tokens per second."""
    from vllm_engine import Log, decode_seconds, experts_of, kernel_seconds, logprobs, run_seconds, start

    log, began = Log(), time.perf_counter()
    engine = start(asked.one, asked.folder, layers=asked.layers, tiny=asked.tiny, eager=asked.eager)
    measures: dict[str, float] = {"start": time.perf_counter() - began}
    kernel, weights, activations = experts_of(log.lines)
    answer: Answer = {"measures": measures, "experts run by": kernel, "weights": weights, "activations": activations}
    answer["machine"] = machine()
    answer["logprobs"] = logprobs(engine, (5, 17, 33, 64, 100, 129, 200, 255))
    for batch in asked.batches:
        measures[f"decode {batch}"] = batch / decode_seconds(engine, batch, asked.new, asked.repeats)
        if torch.cuda.is_available():
            steps = kernel_seconds(engine, batch, 32, 9) - kernel_seconds(engine, batch, 32, 1)
            measures[f"decode {batch} kernels"] = steps / 8
    for batch, length in asked.prefills:
        run_seconds(engine, batch, length, 1, 0)
        taken = min(run_seconds(engine, batch, length, 1, 1 + n) for n in range(asked.repeats))
        measures[f"prefill {batch}x{length}"] = batch * length / taken
        if torch.cuda.is_available():
            measures[f"prefill {batch}x{length} kernels"] = kernel_seconds(engine, batch, length, 1)
    return answer


def answer_of(model: str, plugin: str, activations: str, asked: argparse.Namespace) -> Answer:
    """Return the answer of one engine from a process that runs it, or its error."""
    out = asked.folder / "answer.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", model, "--folder", str(asked.folder), *asked.passed]
    environment = {**os.environ, "COLLEGIUM_VLLM": plugin, "COLLEGIUM_VLLM_ACTIVATIONS": activations}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=asked.timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {asked.timeout} s"}
    if out.exists():
        return json.loads(out.read_text())
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": (lines or ["the engine ended without an answer"])[-1][:200]}


def rows_of(without: Answer, with_plugin: Answer) -> list[dict[str, object]]:
    """Return a row per measure of both answers; one row with the error if one of them has none."""
    experts = {name: with_plugin.get(name, "") for name in ("experts run by", "weights", "activations")}
    errors = [
        f"{name}: {answer['error']}"
        for name, answer in (("without", without), ("with", with_plugin))
        if "error" in answer
    ]
    if errors:
        return [{**experts, "experts run by": experts["experts run by"] or "nobody", "error": "; ".join(errors)}]
    found: list[dict[str, object]] = []
    for measure, before in without["measures"].items():
        after = with_plugin["measures"][measure]
        seconds = measure == "start" or measure.endswith("kernels")
        ratio = before / after if seconds else after / before
        unit = "s" if seconds else "tokens/s"
        row = {"measure": measure, "unit": unit, "without": f"{before:.6g}", "with": f"{after:.6g}"}
        found.append({**experts, **row, "times as fast": f"{ratio:.3f}", "error": ""})
    distance = rms(without["logprobs"], with_plugin["logprobs"])
    return [
        *found,
        {**experts, "measure": "distance", "unit": "log-probability", "with": f"{distance:.4g}", "error": ""},
    ]


def rms(a: list[float], b: list[float]) -> float:
    """Return the root mean square of the differences."""
    return (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)) ** 0.5


def machine() -> dict[str, str]:
    """Return what this process runs on."""
    import triton
    import vllm

    versions = (sys.version.split()[0], torch.__version__, triton.__version__, f"vLLM {vllm.__version__}")
    if not torch.cuda.is_available():
        return dict(zip(MACHINE, ("", "cpu", "", *versions), strict=True))
    major, minor = torch.cuda.get_device_capability()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return dict(zip(MACHINE, (torch.cuda.get_device_name(), f"sm_{major}{minor}", driver, *versions), strict=True))


def arguments() -> argparse.Namespace:
    """Return the options; ``passed``: those that a process with one engine has too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--activations", nargs="*", default=[""], help="COLLEGIUM_VLLM_ACTIVATIONS of the runs")
    parser.add_argument("--out", type=Path, default=Path("vllm.csv"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one engine")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    engine = parser.add_argument_group("the engine")
    engine.add_argument("--layers", type=int)
    engine.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    engine.add_argument("--prefills", nargs="*", default=[f"{b}x{n}" for b, n in PREFILLS])
    engine.add_argument("--new", type=int, default=128, help="decoding steps")
    engine.add_argument("--repeats", type=int, default=2)
    engine.add_argument("--eager", action="store_true")
    engine.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    asked = parser.parse_args()
    asked.passed = ["--batches", *map(str, asked.batches), "--prefills", *asked.prefills]
    asked.passed += ["--new", str(asked.new), "--repeats", str(asked.repeats)]
    asked.passed += ["--layers", str(asked.layers)] if asked.layers else []
    asked.passed += [f"--{name}" for name in ("eager", "tiny") if getattr(asked, name)]
    asked.prefills = [tuple(map(int, text.split("x"))) for text in asked.prefills]
    return asked


def main() -> None:
    """Write the CSV file, a model at a time."""
    asked = arguments()
    if asked.one:
        answer = measured(asked)
        (asked.folder / "answer.json").write_text(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)  # the engine's threads do not end by themselves
    with tempfile.TemporaryDirectory() as folder, asked.out.open("w", newline="", encoding="utf-8") as file:
        asked.folder = Path(folder)
        writer = csv.DictWriter(file, (*MACHINE, *RUN, *RESULT), restval="", lineterminator="\n")
        writer.writeheader()
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        command = f"python benchmarks/bench_vllm.py {' '.join(sys.argv[1:])}"
        for model in asked.models:
            layers = config_of(model, asked.layers, tiny=asked.tiny)["num_hidden_layers"]
            without = answer_of(model, "off", "", asked)
            for activations in asked.activations:
                with_plugin = answer_of(model, "require", activations, asked)
                shared = with_plugin.get("machine") or without.get("machine", {})
                shared |= dict(zip(RUN, (date, asked.commit, command, model, layers), strict=True))
                for row in rows_of(without, with_plugin):
                    writer.writerow({**shared, **row})
                    print(model, *(row.get(name, "") for name in RESULT), flush=True)
                file.flush()


if __name__ == "__main__":
    main()
