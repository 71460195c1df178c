"""Time one Qwen3-30B-A3B-shaped experts layer on this CPU: transformers' paths against our kernels.

E=128 experts, top-8, H=2048, I=768, bfloat16 activations, random weights and uniform random routing. Each
contender first has to pass against a float32 loop over its own weights (relative L2 error at most 1 %); then all
are timed in turn, the order rotated each round, and the median is printed with its ratio to transformers'
default and to our BF16. The timed part is dispatch, experts and combine: what transformers' experts class does.
Formats that are only read are asked for by name: int4_affine, int8_affine, int4_ordered, int8_ordered; as random
bytes bnb4 and kinds of GGUF blocks, by their title. With ``--dtype fp16`` tokens are float16, as in most checkpoints of
AWQ and GPTQ, transformers' weights too, and the reference kernel is timed beside the others.
"""

from __future__ import annotations

import argparse
import csv
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from collegium.dummy.encoders import ENCODERS, random_blocks
from collegium.experts import CpuFused, CpuGrouped
from collegium.experts.reference import Reference
from collegium.formats import Bf16, Bnb4, by_name
from collegium.formats.gguf import KINDS
from collegium.formats.unquantised import DTYPES
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.types import ExpertWeights, MoESpec, Routing, RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from collegium.formats import Payload

E, K, H, WIDE = 128, 8, 2048, 768
DISTINCT = 8  # different experts; the others repeat them, so that encoding takes seconds, not minutes
GATE = 0.01
ALL = "bf16,mxfp4,nvfp4,int4_group,fp8_block,fp8_tensor,fp8_channel,mxfp8,fp16,fp32"
BASELINE, OURS = "transformers grouped_mm", "cpu_grouped bf16"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """name: row of the table. call: (x, ids, weights) -> y. weights: what the truth is computed from."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    weights: ExpertWeights[Payload]
    nbytes: int


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    experts = [
        (_random(2 * WIDE * H, H).view(2, WIDE, H), _random(H * WIDE, WIDE).view(H, WIDE)) for _ in range(DISTINCT)
    ]
    order = [e % DISTINCT for e in range(E)]
    plain = ExpertWeights(
        gate_up=Bf16(shape=(E, 2, WIDE, H), values=torch.stack([experts[e][0] for e in order])),
        down=Bf16(shape=(E, H, WIDE), values=torch.stack([experts[e][1] for e in order])),
    )
    contenders = [own for name in options.formats.split(",") for own in _ours(name, plain, options.dtype)]
    contenders = [*_transformers(plain, options.dtype), *contenders]
    rows: list[list[str]] = []
    for tokens in (int(t) for t in options.tokens.split(",")):
        case = _case(tokens, options.dtype)
        for contender in contenders:
            _check(contender, case)
        times = _measure(contenders, case, options)
        rows += [_row(c, tokens, times) for c in contenders]
    _show(rows)
    _write(rows, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,64,512")
    parser.add_argument("--formats", default=ALL)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="of the tokens")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three repeats")
    options = parser.parse_args()
    options.repeats = 3 if options.quick else options.repeats
    return options


def _random(count: int, fan_in: int) -> Tensor:
    return (torch.randn(count) / fan_in**0.5).to(torch.bfloat16)


def _encode(name: str, values: Tensor) -> Payload:
    """Encode the distinct experts and repeat them."""
    encode = ENCODERS[name] if name in ENCODERS else by_name(name).encode
    distinct = [encode(own) for own in values[:DISTINCT]]
    room = distinct[0].repeated(values.shape[0])
    for expert in range(values.shape[0]):
        room.put(expert, distinct[expert % DISTINCT])
    return room


def _read(name: str, shape: tuple[int, ...]) -> Payload:
    """Return random bytes of about unit gain, in blocks of a GGUF kind or as bitsandbytes."""
    *lead, columns = shape
    if name in KINDS:
        return random_blocks(name, torch.empty(shape, dtype=torch.bfloat16))
    return Bnb4(
        shape=shape,
        codes=torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8),
        scales=torch.rand(*lead, columns // 64) / 1000,
        table=torch.linspace(-1, 1, 16).expand(*lead[:-1], 16).contiguous(),
        group_size=64,
    )


def _ours(name: str, plain: ExpertWeights[Bf16], dtype: str) -> list[Contender]:
    """Every kernel that takes the format."""
    made: list[Payload] = []
    for own in (plain.gate_up, plain.down):
        if name == "bf16":
            made.append(own)
        elif name in KINDS or name == Bnb4.name:
            made.append(_read(name, tuple(own.shape)))
        else:
            made.append(_encode(name, own.values))
    weights: ExpertWeights[Payload] = ExpertWeights(gate_up=made[0], down=made[1])
    weight_format = weights.down.name
    spec = MoESpec(
        hidden_size=H, intermediate_size=WIDE, num_experts=E, routing=RoutingSpec(top_k=K), weight_format=weight_format
    )
    problem = Problem(spec=spec, device=probe("cpu"), dtype=dtype, activation_format=dtype)
    local = Local(num_experts=E)
    kernels = (CpuGrouped(), CpuFused(), *((Reference(),) if dtype == "fp16" else ()))
    taken = [kernel for kernel in kernels if kernel.refuse(problem.routed) is None]
    if not taken:
        sys.exit(f"{name}: no kernel takes it")

    def contender(kernel: CpuGrouped | CpuFused | Reference) -> Contender:
        packed = kernel.pack(weights, problem.routed)

        def call(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
            batch, handle = local.dispatch(x, Routing(topk_ids=ids, topk_weights=topk_weights))
            return local.combine(packed.run(batch), handle).to(x.dtype)

        return Contender(name=f"{kernel.name} {name}", call=call, weights=weights, nbytes=packed.slot_bytes * E)

    return [contender(kernel) for kernel in taken]


def _transformers(plain: ExpertWeights[Bf16], dtype: str) -> list[Contender]:
    config = Qwen3MoeConfig(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, moe_intermediate_size=WIDE, hidden_act="silu"
    )
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    gate_up, down = plain.gate_up.values.view(E, 2 * WIDE, H).to(DTYPES[dtype]), plain.down.values.to(DTYPES[dtype])
    config_of_experts: Any = experts.config
    experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(down, requires_grad=False)

    def path(name: str) -> Contender:
        def call(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
            config_of_experts._experts_implementation = name
            return experts(x, ids, topk_weights.to(x.dtype))

        return Contender(name=f"transformers {name}", call=call, weights=plain, nbytes=plain.gate_up.nbytes * 3 // 2)

    return [path(name) for name in ("grouped_mm", "eager", "batched_mm")]


def _case(tokens: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, H).to(DTYPES[dtype])
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)])
    return x, ids, torch.softmax(torch.randn(tokens, K), -1)


def _skipped(contender: Contender, tokens: int) -> bool:
    # It copies the weights of every assignment: 4.7 million times 2 bytes each.
    return contender.name.endswith("batched_mm") and tokens > 16


def _truth(weights: ExpertWeights[Payload], case: tuple[Tensor, Tensor, Tensor], tokens: list[int]) -> Tensor:
    """Float32 throughout, one expert at a time, for some tokens."""
    x, ids, topk_weights = case
    result = torch.zeros(len(tokens), H)
    for expert in range(E):
        hits = [(i, k) for i, t in enumerate(tokens) for k in range(K) if int(ids[t, k]) == expert]
        if not hits:
            continue
        gate, up = weights.gate_up[expert].decode(torch.float32)
        down = weights.down[expert].decode(torch.float32)
        for i, k in hits:
            row = x[tokens[i]].float()
            inner = functional.silu(gate @ row) * (up @ row)
            result[i] += topk_weights[tokens[i], k] * (down @ inner)
    return result


def _check(contender: Contender, case: tuple[Tensor, Tensor, Tensor]) -> None:
    x = case[0]
    if _skipped(contender, len(x)):
        return
    tokens = sorted({0, len(x) - 1})
    truth = _truth(contender.weights, case, tokens)
    with torch.inference_mode():
        found = contender.call(*case)[tokens].float()
    error = float((found - truth).norm() / truth.norm())
    if not error <= GATE:
        sys.exit(f"{contender.name}, T={len(x)}: relative L2 error {error:.4f} is above {GATE}; nothing is timed")


def _measure(
    contenders: list[Contender], case: tuple[Tensor, Tensor, Tensor], options: argparse.Namespace
) -> dict[str, float]:
    # At T=1 the same eight experts would stay in the cache; fresh routing each round reads them from memory.
    active = [c for c in contenders if not _skipped(c, len(case[0]))]
    times: dict[str, list[float]] = {c.name: [] for c in active}
    with torch.inference_mode():
        # A step of one token takes milliseconds: more rounds tell it from the noise of the machine.
        for turn in range(options.repeats * (4 if len(case[0]) == 1 else 1)):
            order = active[turn % len(active) :] + active[: turn % len(active)]
            x, ids, topk_weights = case if len(case[0]) > 1 else _case(1, options.dtype)
            for contender in order:
                start = time.perf_counter()
                contender.call(x, ids, topk_weights)
                times[contender.name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def _row(contender: Contender, tokens: int, times: dict[str, float]) -> list[str]:
    if contender.name not in times:
        return [str(tokens), contender.name, "-", "-", "-", "-"]
    own, ours = times[contender.name], times.get(OURS)
    to_ours = "-" if ours is None else f"{own / ours:.2f}"
    return [
        str(tokens),
        contender.name,
        f"{own:.2f}",
        f"{own / times[BASELINE]:.2f}",
        to_ours,
        f"{contender.nbytes / 2**20:.0f}",
    ]


COLUMNS = ("T", "format", "median ms", "time / transformers default", "time / our bf16", "weights MiB")


def _show(rows: list[list[str]]) -> None:
    table = Table(title=f"Experts of one layer, E={E}, top-{K}, H={H}, I={WIDE}; {_cpu()}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"peak RSS of all contenders together {peak:.2f} GiB")


def _cpu() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    kinds = [kind for kind in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {kind} " in f"{flags} "]
    return f"{names[0] if names else platform.machine()} ({kinds[0] if kinds else 'no AVX2'})"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "uncommitted"


def _write(rows: list[list[str]], options: argparse.Namespace) -> None:
    RESULTS.mkdir(exist_ok=True)
    name = "all" if options.formats == ALL else options.formats.replace(",", "-")
    name = name if options.dtype == "bf16" else f"{options.dtype}-{name}"
    facts = [_cpu(), torch.get_num_threads(), torch.__version__, transformers.__version__, _commit()]
    with (RESULTS / f"cpu-{name}.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["cpu", "threads", "torch", "transformers", "commit", "command", *COLUMNS])
        out.writerows([*facts, " ".join(["python", *sys.argv]), *row] for row in rows)


if __name__ == "__main__":
    main()
