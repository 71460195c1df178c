"""Print the seconds of every phase of ``collegium generate``, and of the packages it imports.

    python scripts/profile_cli.py                      # fables-16m on the best device
    python scripts/profile_cli.py MODEL --device cuda --format mxfp4 --repeat 3

Every measurement is a fresh process. First the command as users run it, from start to exit; then its phases one after
the other, without what the command overlaps (it creates the CUDA context while transformers is imported); then the
time of the imports by package (``-X importtime``). The first run also fills disk caches: see the later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["main"]

_START = "COLLEGIUM_PROFILE_START"
_IMPORT = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \| *(\S+)")
Phases = list[tuple[str, float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="fables-16m")
    parser.add_argument("--device")
    parser.add_argument("--format", help="weight format of the experts")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each kind")
    parser.add_argument("--packages", type=int, default=12, help="packages listed with their import time")
    parser.add_argument("--phases", action="store_true", help=argparse.SUPPRESS)  # this process is measured
    options = parser.parse_args()
    if options.phases:
        _run_phases(options)
        return
    command = [sys.executable, "-m", "collegium", *_words(options)]
    for number in range(options.repeat):
        print(f"collegium generate, run {number + 1}: {_seconds(command):.2f} s")
    own = [sys.executable, __file__, *sys.argv[1:], "--phases"]
    for number in range(options.repeat):
        print(f"\nphases, run {number + 1}")
        _print_phases(own)
    print("\nimports, seconds in modules of a package")
    _print_imports([sys.executable, "-X", "importtime", *command[1:]], options.packages)


def _words(options: argparse.Namespace) -> list[str]:
    words = ["generate", options.model, "--tokens", str(options.tokens), "--prompt", options.prompt]
    words += [] if options.device is None else ["--device", options.device]
    return words + ([] if options.format is None else ["--format", options.format])


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _print_phases(command: list[str]) -> None:
    start = time.time()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {_START: str(start)})
    total = time.time() - start
    measured = json.loads(done.stdout.splitlines()[-1])
    phases: Phases = [tuple(pair) for pair in measured["phases"]]
    phases.append(("exit", start + total - measured["end"]))
    for name, seconds in [*phases, ("total", total)]:
        print(f"{seconds:8.2f}  {name}")
    print("          " + ", ".join(f"{name} {value}" for name, value in measured["facts"].items()))


def _print_imports(command: list[str], count: int) -> None:
    done = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    by_package: defaultdict[str, int] = defaultdict(int)
    for match in _IMPORT.finditer(done.stderr):
        by_package[match[3].partition(".")[0]] += int(match[1])
    heaviest = sorted(by_package.items(), key=lambda pair: -pair[1])
    for name, microseconds in [*heaviest[:count], ("all", sum(by_package.values()))]:
        print(f"{microseconds / 1e6:8.2f}  {name}")


def _run_phases(options: argparse.Namespace) -> None:
    """Do what the command does, step by step, and print one line of JSON."""
    phases: Phases = [("start of Python", time.time() - float(os.environ[_START]))]

    @contextmanager
    def phase(name: str) -> Generator[None]:
        begin = time.perf_counter()
        yield
        phases.append((name, time.perf_counter() - begin))

    facts: dict[str, Any] = {"Python": sys.version.split()[0]}
    with phase("import torch"):
        import torch
    place = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = place.startswith("cuda")
    facts |= {"torch": torch.__version__, "device": torch.cuda.get_device_name(place) if on_gpu else place}
    if on_gpu:
        with phase("CUDA context and cuBLAS"):
            square = torch.zeros(16, 16, dtype=torch.bfloat16, device=place)
            torch.mm(square, square)
            torch.cuda.synchronize()
        with phase("import Triton and load its driver"):
            triton: Any = import_module("triton")
            triton.runtime.driver.active.get_current_device()
            facts["Triton"] = triton.__version__
    _generate(options, place, phase, facts)
    print(json.dumps({"phases": phases, "facts": facts, "end": time.time()}))


def _generate(options: argparse.Namespace, place: str, phase: Callable[[str], Any], facts: dict[str, Any]) -> None:
    with phase("import collegium"):
        from collegium.checkpoint import Checkpoint
        from collegium.commands.generate import Writer, check_writable, prompt_limits
        from collegium.integrations.transformers import layers_of, load_model
        from collegium.integrations.transformers.classes import class_and_config
        from collegium.runtime import launch
        from collegium.runtime.warm_up import warm_up
    with phase("import transformers"):
        import transformers

        facts["transformers"] = transformers.__version__
    with phase("open the checkpoint"):
        checkpoint = Checkpoint.open(options.model)
    with phase("import the model's class, read its config"):
        class_and_config(checkpoint)
    with phase("read the tokenizer, check once more"):
        check_writable(options.model)
        limits = prompt_limits(checkpoint, [options.prompt])
    with phase("read, pack and build the model"):
        model = load_model(checkpoint, device=place, weight_format=options.format, limits=limits)
        writer = Writer(model, checkpoint.path)
    with phase("warm up the layers"):
        facts["warm-up batches"] = warm_up(layers_of(model))
        facts["kernel variants"] = len(launch._variants)  # pyright: ignore[reportPrivateUsage]
    with phase("write 4 tokens (compiles the rest)"):
        writer.write(options.prompt, min(options.tokens, 4))
    with phase(f"write {options.tokens} tokens"):
        written = writer.write(options.prompt, options.tokens)
    facts |= {"CUDA graph": writer.decoder.captured, "first token s": round(written.first_token_seconds, 3)}


if __name__ == "__main__":
    main()
