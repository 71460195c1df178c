"""What one weight costs on this CPU in each way torch offers to decode 4-bit codes, beside the product itself.

Why plain torch operations leave the 4-bit formats slower than BF16 on a CPU, and what one kernel for decoding and
product costs instead. Prints and saves nanoseconds a weight, one thread, the best of many runs.

    python benchmarks/bench_cpu_decode.py
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

import collegium
from collegium.experts.cpu.fused import pack_fused
from collegium.formats import Int4Group, MxFp4, NvFp4

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results" / "cpu-decode.csv"
ROWS, COLUMNS, COUNT = 1536, 2048, 1 << 19
MASK = -0x7E40  # sign and three magnitude bits of E2M1 where bfloat16 has them


def cost(call: Callable[[], object], weights: int, repeats: int = 30) -> float:
    """Return nanoseconds a weight, the best of ``repeats``."""
    call()
    best = min(_once(call) for _ in range(repeats))
    return best / weights * 1e9


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def products() -> list[tuple[str, float]]:
    many = torch.randn(16, ROWS, COLUMNS).bfloat16()
    out: list[tuple[str, float]] = []
    for rows in (1, 4, 32):
        x = torch.randn(COLUMNS, rows).bfloat16()
        out.append((f"bf16 product, {rows} rows", cost(lambda x=x: [torch.mm(w, x) for w in many], many.numel(), 5)))
    return out


def look_up() -> list[tuple[str, float]]:
    """Sixteen bits to four bfloat16 numbers: what ``cpu_grouped`` does."""
    codes = torch.randint(-(1 << 15), 1 << 15, (COUNT // 4,), dtype=torch.int16).view(torch.uint16)
    index, table = torch.empty(1, COUNT // 4, dtype=torch.int64), torch.randint(0, 1 << 60, (1, 1 << 16))
    values = torch.empty(1, COUNT // 4, dtype=torch.int64)
    fields = torch.ones(COUNT // 32, 1, dtype=torch.int16)
    bits = values.view(torch.int16).view(-1, 32)
    return [
        ("look-up: widen the index", cost(lambda: index.view(-1).copy_(codes), COUNT)),
        ("look-up: gather", cost(lambda: torch.gather(table, 1, index, out=values), COUNT)),
        ("look-up: add the scale to the exponent", cost(lambda: bits.add_(fields), COUNT)),
    ]


def bit_fields() -> list[tuple[str, float]]:
    """Four codes of a word moved into place by shift, mask, add and multiply; the scale must then multiply."""
    words = torch.randint(-(1 << 15), 1 << 15, (256, COUNT // 1024), dtype=torch.int16)
    bits = torch.empty(256, 4, COUNT // 1024, dtype=torch.int16)

    def move() -> None:
        torch.bitwise_right_shift(words, 3, out=bits[:, 0])
        torch.bitwise_and(words, 0x21C0, out=bits[:, 1])
        bits[:, 1].add_(0x6000)
        torch.bitwise_left_shift(words, 3, out=bits[:, 2])
        torch.bitwise_and(words, 0x4007, out=bits[:, 3])
        bits[:, 3].mul_(66)
        bits.bitwise_and_(MASK)

    scale = torch.full((COUNT // 32, 1), 2.0**120, dtype=torch.bfloat16)
    out = torch.empty(COUNT // 32, 32, dtype=torch.bfloat16)
    tiny = (torch.randint(-(1 << 15), 1 << 15, (COUNT // 32, 32), dtype=torch.int16) & MASK).view(torch.bfloat16)
    normal = (tiny.view(torch.int16) | 0x0200).view(torch.bfloat16)
    return [
        ("bit fields: move", cost(move, COUNT)),
        ("bit fields: scale, normal numbers", cost(lambda: torch.mul(normal, scale, out=out), COUNT)),
        ("bit fields: scale, E2M1's 0.5 is subnormal", cost(lambda: torch.mul(tiny, scale, out=out), COUNT, 5)),
    ]


def fused() -> list[tuple[str, float]]:
    """Torch's own uniform INT4 product; E2M1 is not uniform and would need two of them and twice the bytes."""
    codes = torch.randint(0, 15, (ROWS, COLUMNS), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.ones(COLUMNS // 32, ROWS, 2, dtype=torch.bfloat16)
    call = torch.ops.aten._weight_int4pack_mm_for_cpu
    return [
        (f"uniform INT4 product, {n} rows", cost(lambda x=x: call(x, packed, 32, scales), ROWS * COLUMNS))
        for n in (1, 4, 32)
        for x in [torch.randn(n, COLUMNS).bfloat16()]
    ]


def in_one_kernel() -> list[tuple[str, float]]:
    """``cpu_fused``, codes in memory as for the first product; nothing where it does not run."""
    if find_spec("numba") is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return []
    out: list[tuple[str, float]] = []
    for kind in (MxFp4, NvFp4, Int4Group):
        one = kind.encode(torch.randn(1, ROWS, COLUMNS) / COLUMNS**0.5)
        payload = one.repeated(64)
        for expert in range(64):
            payload.put(expert, one)
        matrix = pack_fused(payload, None, kind.name)
        for rows in (1, 4, 32):
            x, bounds = torch.randn(64 * rows, COLUMNS).bfloat16(), torch.arange(65) * rows
            time_taken = cost(
                lambda m=matrix, x=x, b=bounds: m.multiply(x, torch.arange(64), b), 64 * ROWS * COLUMNS, 5
            )
            out.append((f"cpu_fused {kind.name}, {rows} rows", time_taken))
    return out


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    rows = [*products(), *look_up(), *bit_fields(), *fused(), *in_one_kernel()]
    table = Table(title=f"ns a weight, one thread, {collegium.probe('cpu').name}", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("ns/weight", justify="right")
    for what, value in rows:
        table.add_row(what, f"{value:.3f}")
    Console().print(table)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = [collegium.probe("cpu").name, platform.python_version(), torch.__version__, commit]
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["machine", "python", "torch", "commit", "command", "what", "ns_per_weight"])
        writer.writerows([*facts, "python benchmarks/bench_cpu_decode.py", what, f"{v:.4f}"] for what, v in rows)


if __name__ == "__main__":
    main()
