"""Run every command that README and quickstart show, on the machine that is there, and look at what it prints.

    python scripts/run_commands.py                 # all of them; fails when one fails or says something implausible
    python scripts/run_commands.py --device cpu --quick --out /tmp/commands.csv

Each command is a process of its own with a time limit, an empty cache of compiled kernels shared by all, and, where its
output is judged, ``--json``. The rows go to ``benchmarks/results/commands_<device>.csv``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy
import torch

from collegium.cli import app
from collegium.commands.measure import driver_version, version_of
from collegium.formats import FORMATS
from collegium.runtime.devices import probe
from tracked import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PAGES", "Case", "Outcome", "cases", "main", "shown", "uncovered", "write_gguf"]

PAGES = ("README.md", "docs/quickstart.md")
SHIPPED = "demo/fables-16m"
PROMPT = "Once upon a time"
_DEMO_SECONDS = 60  # with compilation, on a GPU
_SIDE_BY_SIDE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One command line behind ``collegium``. judge: returns the key figures of its JSON, or raises ValueError.

    code: the exit code it must have; says: what its output must hold. alone: it is timed, so nothing runs beside it.
    ranks: how many processes torchrun starts for it.
    """

    words: tuple[str, ...]
    judge: Callable[[Any], str] | None = None
    code: int = 0
    says: str = ""
    alone: bool = False
    limit: float = 300
    within: float = float("inf")
    ranks: int = 1

    @property
    def launch(self) -> tuple[str, ...]:
        """What torchrun is told, nothing for one process."""
        return () if self.ranks == 1 else ("--standalone", "--nproc-per-node", str(self.ranks), "-m")

    def typed(self) -> str:
        """Return the line a person types, without the machine's own paths."""
        told = ("torchrun", *self.launch) if self.launch else ()
        return shlex.join((*told, "collegium", *(re.sub(r"^/.*/", "", word) for word in self.words)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a case. fault: why it failed, or nothing."""

    case: Case
    code: int
    seconds: float
    figures: str
    fault: str


def cases(device: str, work: Path) -> list[Case]:
    """Return every case of a machine whose ``device`` is cpu or cuda; files go to ``work``."""
    gpu, small, scaled = device.startswith("cuda"), str(work / "model-mxfp4"), str(work / "model-w4a4")
    here, gguf = ("--device", device), str(work / "tiny.gguf")
    text = ("--prompt", PROMPT, "--tokens", "12", *here, "--json")
    formats = [f.name for f in FORMATS if not f.read_only]
    refused = "which has no tiles to choose"
    return [
        Case(words=("demo", *here), alone=True, says="tok/s", within=_DEMO_SECONDS if gpu else 600, limit=600),
        Case(words=("demo", *here, "--json"), alone=True, judge=_demo(gpu), limit=600),
        Case(words=("quantize", SHIPPED, "--to", "mxfp4", "--out", small), alone=True, says="mxfp4 experts"),
        Case(
            words=("quantize", SHIPPED, "--to", "nvfp4", "--out", f"{small}-not", "--json"), alone=True, judge=_quantize
        ),
        Case(
            words=("calibrate", f"{small}-not", "--out", scaled, "--steps", "2", *here), alone=True, says="nvfp4_static"
        ),
        Case(words=("generate", scaled, "--activations", "nvfp4_static", *text), judge=_text),
        Case(words=("generate", SHIPPED, "--prompt", PROMPT, *here), says=PROMPT),
        Case(words=("generate", SHIPPED, "--format", "nvfp4", "--prompt", "The old king", *here), says="The old king"),
        Case(words=("generate", SHIPPED, *text), judge=_text),
        *(Case(words=("generate", SHIPPED, *own), judge=_text, alone=True, ranks=2) for own in _split(text, gpu=gpu)),
        *(Case(words=("generate", SHIPPED, "--format", name, *text), judge=_text) for name in formats),
        Case(words=("generate", small, *text), judge=_text),
        # It has no tokenizer, and where the package is missing that would read one, that is said instead.
        Case(words=("generate", gguf, *here), code=1, says="gguf"),
        *(case for model in (SHIPPED, small, gguf) for case in _looks(model, here)),
        *_measured(here, gpu=gpu, refused=refused),
        *_balanced(here, str(work / "load.safetensors"), str(work / "load.png")),
    ]


def _split(text: tuple[str, ...], *, gpu: bool) -> list[tuple[str, ...]]:
    """Return the options of a text written by two processes: on a CPU, and on two GPUs where there are as many."""
    # Each of several processes takes its own GPU and can be given no other.
    on_cpu, each_its_own = ([kind if word.startswith("cuda") else word for word in text] for kind in ("cpu", "cuda"))
    return [tuple(on_cpu), tuple(each_its_own)] if gpu and torch.cuda.device_count() > 1 else [tuple(on_cpu)]


def _looks(model: str, here: tuple[str, ...]) -> list[Case]:
    inside = "experts" if model == SHIPPED else ""
    found: list[Case] = []
    for command, judge in (("inspect", _inspect), ("plan", _plan), ("verify", _verify)):
        found.append(Case(words=(command, model, *here, "--json"), judge=judge))
        if inside:
            found.append(Case(words=(command, model, *here), says=inside))
    return found


def _measured(here: tuple[str, ...], *, gpu: bool, refused: str) -> list[Case]:
    bench = ("bench", SHIPPED, "--tokens", "1,32", *here)
    sizes = ("bench", "1024x512x32x4", "--format", "bf16", "--format", "mxfp4", "--tokens", "1,64", *here, "--json")
    # One layer of the model that README names; on a CPU its embeddings alone would take minutes.
    model = ("bench-model", "qwen3_30b" if gpu else SHIPPED, "--layers", "1", "--batches", "1", *here)
    tune = ("tune", SHIPPED, "--format", "mxfp4", "--tokens", "1,8", "--candidates", "2", *here)
    return [
        Case(words=bench, alone=True, says="of floor"),
        Case(words=sizes, alone=True, judge=_bench),
        Case(words=model, alone=True, says="tokens/s"),
        Case(words=(*model, "--json"), alone=True, judge=_bench_model),
        Case(words=tune, alone=True, code=0 if gpu else 1, says="written to" if gpu else refused),
        *([Case(words=(*tune, "--json"), alone=True, judge=_tune)] if gpu else []),
    ]


def _balanced(here: tuple[str, ...], trace: str, picture: str) -> list[Case]:
    record = ("balance", "record", SHIPPED, "--out", trace, "--tokens", "64", "--steps", "6", *here)
    simulate = ("balance", "simulate", trace, "--ranks", "4", "--replicas", "0,8,32")
    return [
        Case(words=record, alone=True, says="6 steps"),
        Case(words=(*simulate, "--picture", picture), alone=True, says="busiest"),
        Case(words=(*simulate, "--policy", "least_moves", "--json"), judge=_simulation),
        Case(words=("balance", "heatmap", trace, "--out", picture), alone=True, says="hottest expert"),
    ]


def _quick(case: Case) -> bool:
    """Whether a case belongs to the few that CI runs."""
    words, plain = case.words, not {"nvfp4", "fp8_block"} & set(case.words)
    if words[0] == "generate":
        return case.code == 1 or words[1].endswith("-mxfp4")
    return words[0] in ("plan", "quantize") and plain and words[1] == SHIPPED


def _demo(gpu: bool) -> Callable[[Any], str]:
    def judge(found: Any) -> str:
        rows = found["rows"]
        rates = {f"{r['weights']} x {r['activations']}": r["tokens_per_second"] for r in rows}
        _need(len(rows) > 9, f"{len(rows)} recipes")
        _need(all(0.97 < r["perplexity_ratio"] < 1.3 for r in rows), "a perplexity is out of band")
        _need(all(0 < r["layer_error"] < 0.25 for r in rows), "a layer error is out of band")
        # Compilation in a time shows as a rate far below the others; the reference kernel is slow on purpose.
        quick = [r["tokens_per_second"] for r in rows if r["kernel"] != "reference"]
        factor = 5 if gpu else 50
        _need(min(quick) * factor > max(quick), f"rates differ by more than {factor} times: {rates}")
        _need(min(rates.values()) * 40 * factor > max(quick), f"a rate is far below the others: {rates}")
        return "; ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items())

    return judge


def _text(found: Any) -> str:
    _need(found["text"].startswith(PROMPT) and len(found["text"]) > len(PROMPT) + 12, f"wrote {found['text']!r}")
    _need(found["tokens"] == 12 and found["tokens_per_second"] > 0 < found["first_token_seconds"], "no rate")
    return f"{found['tokens_per_second']:.1f} tokens/s; {' '.join(found['text'].split())}"


def _quantize(found: Any) -> str:
    _need(all(0.02 < layer["error"] < 0.2 for layer in found["layers"]), "a layer's error is out of band")
    _need(found["nbytes"] < 0.6 * found["source_nbytes"], "hardly smaller")
    return f"{found['nbytes']:,} of {found['source_nbytes']:,} bytes"


def _inspect(found: Any) -> str:
    _need(found["findings"] == [] and found["num_experts"] > 1, f"findings {found['findings']}")
    return f"{len(found['moe_layers'])} layers of {found['num_experts']} experts, {found['plan']['kernel']}"


def _plan(found: Any) -> str:
    _need(found["refusals"] and found["weight_bytes"] > 0, "nothing was planned")
    return f"{found['kernel']}, {found['weight_bytes']:,} bytes"


def _verify(found: Any) -> str:
    worst = max(proof["worst_error"] for proof in found["layers"])
    _need(found["passed"] and 0 <= worst < 0.1, f"worst expert {worst}")
    return f"worst expert {worst:.3%}"


def _bench(found: Any) -> str:
    rows = found["rows"]
    _need(all(0 < row["of_floor"] < 1.1 for row in rows), f"of floor {[row['of_floor'] for row in rows]}")
    _need(all(row["error"] <= row["tolerance"] for row in rows), "an error is over its tolerance")
    return "; ".join(f"{r['weights']} at {r['tokens']}: {1e6 * r['seconds']:.0f} us" for r in rows)


def _bench_model(found: Any) -> str:
    ours = [row for row in found["rows"] if row["experts"].startswith("collegium")]
    _need(ours and all(row["seconds"] for row in ours), f"without a time: {[row['note'] for row in ours]}")
    return "; ".join(f"{r['experts']} {r['tokens_per_second']:.1f} tokens/s" for r in found["rows"] if r["seconds"])


def _tune(found: Any) -> str:
    _need(found["rows"] and all(0 < r["best_seconds"] <= r["chosen_seconds"] for r in found["rows"]), "no better tile")
    return "; ".join(f"{r['product']} at {r['tokens']}: {1e6 * r['best_seconds']:.1f} us" for r in found["rows"])


def _simulation(found: Any) -> str:
    rows = found["rows"]
    _need([row["replicas"] for row in rows] == [0, 8, 32], f"rows {[row['replicas'] for row in rows]}")
    _need(
        all(0.25 <= row[half]["after"] <= 1 for row in rows for half in ("fitted", "later")), "balancedness out of band"
    )
    return "; ".join(f"{r['replicas']} replicas: {r['later']['before']:.3f} to {r['later']['after']:.3f}" for r in rows)


def _need(fact: object, otherwise: str) -> None:
    if not fact:
        raise ValueError(otherwise)


def shown(page: str) -> list[tuple[str, ...]]:
    """Return the words behind ``collegium`` of every command line that a Markdown ``page`` shows.

    A launch has torchrun as its first word.
    """
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S))
    found = [re.fullmatch(r"(torchrun )?(?:(?<=torchrun ).*-m )?collegium\s+([a-z].*)", line) for line in lines]
    return [tuple(shlex.split((own[1] or "") + own[2], comments=True)) for own in found if own]


def uncovered(pages: Sequence[str], run: Sequence[Case]) -> list[str]:
    """Return the command lines of ``pages`` that no case of ``run`` has with all their options, and missing commands.

    Without words of their own behind the command, as in "`collegium bench` measures", any case of it counts.
    """
    wanted = [words for page in pages for words in shown(page)]
    groups = {(str(group.name),): group.typer_instance for group in app.registered_groups}
    for above, held in (((), app), *groups.items()):
        names = [str(each.name or each.callback.__name__).replace("_", "-") for each in held.registered_commands]  # type: ignore[union-attr]
        wanted += [(*above, name) for name in names]

    def covers(case: Case, words: tuple[str, ...]) -> bool:
        head, own = 2 if words[:1] in (("torchrun",), *groups) else 1, ("torchrun",) * (case.ranks > 1) + case.words
        return own[:head] == words[:head] and {w for w in words if w.startswith("-")} <= set(own)

    return sorted({" ".join(words) for words in wanted if not any(covers(case, words) for case in run)})


def run_case(case: Case, work: Path, threads: int | None = None) -> Outcome:
    """Run one case in the repository's root and judge it; threads: how many torch may use on the CPU."""
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    caches = {"TRITON_CACHE_DIR": str(work / "triton"), "XDG_CACHE_HOME": str(work / "cache")}
    more = {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **caches}
    if threads is not None:
        more["OMP_NUM_THREADS"] = str(threads)
    begin, figures = time.monotonic(), ""
    started = ("torch.distributed.run", *case.launch) if case.launch else ()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *started, "collegium", *case.words],
            cwd=ROOT,
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            timeout=case.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(case=case, code=-1, seconds=case.limit, figures="", fault=f"not done in {case.limit:.0f} s")
    seconds, fault = time.monotonic() - begin, ""
    if done.returncode != case.code or "Traceback" in done.stderr:
        fault = f"exit code {done.returncode}, expected {case.code}: {_middle_out(done.stderr.strip())}"
    elif case.says not in done.stdout + done.stderr:
        fault = f"its output has no {case.says!r}: {done.stdout[-500:]}{done.stderr[-500:]}"
    elif seconds > case.within:
        fault = f"took {seconds:.1f} s, allowed {case.within:.0f}"
    elif case.judge is not None:
        try:
            figures = case.judge(json.loads(done.stdout))
        except (ValueError, KeyError) as error:
            fault = f"implausible: {error!s:.1500}"
    return Outcome(case=case, code=done.returncode, seconds=seconds, figures=figures, fault=fault)


def _middle_out(text: str) -> str:
    """Return the beginning and the end of a long text: torchrun says what it saw behind what a process said."""
    return text if len(text) <= 2000 else f"{text[:900]}\n...\n{text[-1000:]}"


def run_all(run: Sequence[Case], work: Path, keep: Callable[[list[Outcome]], None]) -> list[Outcome]:
    """Run the cases, first those that are timed, one by one; return the outcomes in the order of ``run``.

    keep: called after each with the outcomes so far, so that what is cut off leaves what it did.
    """
    outcomes: dict[int, Outcome] = {}
    lock = Lock()

    def one(index: int, threads: int | None = None) -> None:
        outcomes[index] = found = run_case(run[index], work, threads)
        print(f"{found.seconds:6.1f} s  {found.case.typed()}  {found.fault or found.figures or 'ok'}", flush=True)
        with lock:
            keep([outcomes[at] for at in sorted(outcomes)])

    for index, case in enumerate(run):
        if case.alone:
            one(index)
    cores = os.cpu_count() or 2
    together = max(1, min(_SIDE_BY_SIDE, cores // 2))
    with ThreadPoolExecutor(together) as pool:
        # More threads than cores wait for each other in every operation.
        others = [index for index, case in enumerate(run) if not case.alone]
        list(pool.map(one, others, [max(1, cores // together // 2)] * len(others)))
    return [outcomes[index] for index in range(len(run))]


def write_gguf(path: Path, hidden: int = 64, wide: int = 32, experts: int = 4) -> None:
    """Write one Qwen3 MoE layer of random Q8_0 weights as a GGUF file."""
    rng, prefix = numpy.random.default_rng(0), "qwen3moe"
    numbers = {"block_count": 1, "embedding_length": hidden, "expert_count": experts}
    numbers |= {"expert_used_count": 2, "expert_feed_forward_length": wide}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = text("general.architecture") + struct.pack("<I", 8) + text(prefix)
    for name, value in numbers.items():
        keys += text(f"{prefix}.{name}") + struct.pack("<II", 4, value)
    shapes = {f"ffn_{name}_exps": (experts, wide, hidden) for name in ("gate", "up")}
    shapes |= {"ffn_down_exps": (experts, hidden, wide), "ffn_gate_inp": (experts, hidden)}
    infos, data = b"", b""
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(numpy.float32) * shape[-1] ** -0.5
        kind, raw = (0, values.tobytes()) if name == "ffn_gate_inp" else (8, _q8_0(values))
        infos += text(f"blk.0.{name}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), 1 + len(numbers)) + keys + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def _q8_0(values: numpy.ndarray[Any, numpy.dtype[numpy.float32]]) -> bytes:
    groups = values.reshape(-1, 32)
    scale = (numpy.abs(groups).max(axis=1, keepdims=True) / 127).astype(numpy.float16)
    codes = numpy.rint(groups / scale.astype(numpy.float32)).clip(-127, 127).astype(numpy.int8)
    return numpy.concatenate([scale.view(numpy.uint8), codes.view(numpy.uint8)], axis=1).tobytes()


def _commit(given: str | None) -> str:
    if given:
        return given
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _write(path: Path, outcomes: Sequence[Outcome], device: str, commit: str) -> None:
    place = torch.device(device)
    facts: dict[str, object] = {
        "machine": probe(device).name or device,
        "driver": driver_version(place),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "triton", "transformers")},
        "commit": commit,
        "command": "python scripts/run_commands.py",
    }
    facts["torch"] = torch.__version__
    rows = [
        facts
        | {"typed": o.case.typed(), "exit": o.code, "seconds": f"{o.seconds:.1f}", "figures": o.fault or o.figures}
        for o in outcomes
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the commands and write the results; 1 when one failed or a documented one was not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda; the best when left out")
    parser.add_argument("--out", type=Path, help="CSV file; benchmarks/results/commands_<device>.csv when left out")
    parser.add_argument("--commit", help="what was run, where git cannot say")
    parser.add_argument("--quick", action="store_true", help="a few commands only, and no coverage of the pages")
    asked = parser.parse_args(arguments)
    facts = probe(asked.device)
    name = (facts.name.split() or ["cuda"])[-1].lower() if facts.kind == "cuda" else "cpu"
    out: Path = asked.out or ROOT / "benchmarks" / "results" / f"commands_{name}.csv"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_gguf(work / "tiny.gguf")
        run = cases(facts.place, work)
        missed = [] if asked.quick else uncovered([(ROOT / page).read_text(encoding="utf-8") for page in PAGES], run)
        commit = _commit(asked.commit)
        asked_for = [case for case in run if _quick(case)] if asked.quick else run
        outcomes = run_all(asked_for, work, lambda found: _write(out, found, facts.place, commit))
    failed = [outcome for outcome in outcomes if outcome.fault]
    for line in missed:
        print(f"shown in {' or '.join(PAGES)}, but not run: collegium {line}")
    print(f"commands: {len(outcomes) - len(failed)} of {len(outcomes)} ok on {facts.name or facts.kind}; {out}")
    return bool(failed or missed)


if __name__ == "__main__":
    sys.exit(main())
