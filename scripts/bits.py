"""The bits of every recipe, hashed: what a change of structure must not change.

``python scripts/bits.py --device cuda --out bits.csv`` writes one row a layer and number of tokens;
``python scripts/bits.py --device cuda --check bits.csv`` computes them again and fails on every difference, on a row
that is missing and on one that is new. Rows are of one machine and one torch: a check on another says so and fails.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from collegium import (
    ActivationSpec,
    InputError,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    SpecError,
    encode_experts,
    load_layer,
    plan,
    probe,
)
from collegium.commands.measure import version_of
from collegium.formats import FORMATS
from collegium.formats.unquantised import DTYPES
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from toys import TinySize, combinations, write_checkpoint

ACTIVATIONS = ("bf16", "fp16", "fp32", "fp8_group128", "fp8_group128_pow2", "fp8_token", "mxfp8", "nvfp4")
# Calls of one token to several passes; the largest reach the tiles of large batches.
TOKENS = {"cuda": (1, 2, 5, 17, 64, 200, 513, 1500), "cpu": (1, 5, 64, 200)}
LIMITS = Limits(max_tokens=1024)
HEAD = ("layer", "weights", "activations", "tokens", "kernel", "bits", "device", "torch", "triton", "commit", "command")


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A layer's spec, and whether it is called with a routing instead of a router."""

    spec: MoESpec
    given: bool = False


LAYERS = {
    "plain": Made(
        spec=MoESpec(
            hidden_size=256,
            intermediate_size=128,
            num_experts=8,
            routing=RoutingSpec(top_k=2),
            shared=SharedSpec(intermediate_size=128),
        )
    ),
    "biased": Made(
        spec=MoESpec(
            hidden_size=384,
            intermediate_size=160,
            num_experts=12,
            routing=RoutingSpec(top_k=4, score="topk_softmax", renormalize=False),
            activation=ActivationSpec(kind="swiglu_oai", limit=7.0),
            expert_bias=True,
        )
    ),
    "grouped": Made(
        spec=MoESpec(
            hidden_size=256,
            intermediate_size=256,
            num_experts=32,
            routing=RoutingSpec(
                top_k=6,
                score="sigmoid",
                groups=4,
                topk_groups=2,
                group_score="top2_sum",
                scale=2.5,
                correction_bias=True,
            ),
            shared=SharedSpec(intermediate_size=256, gated=True, activation=ActivationSpec(kind="swiglu", limit=2.0)),
        )
    ),
    "latent": Made(
        spec=MoESpec(
            hidden_size=320,
            intermediate_size=128,
            num_experts=5,
            routing=RoutingSpec(top_k=3),
            activation=ActivationSpec(kind="relu2"),
            latent_size=128,
            latent_norm_eps=1e-5,
        )
    ),
    "weight_on_input": Made(
        spec=MoESpec(
            hidden_size=128,
            intermediate_size=128,
            num_experts=4,
            routing=RoutingSpec(top_k=1, score="sigmoid", renormalize=False, weight_on_input=True),
            activation=ActivationSpec(kind="geglu"),
        )
    ),
    "given": Made(
        spec=MoESpec(hidden_size=256, intermediate_size=128, num_experts=9, routing=RoutingSpec(top_k=3)), given=True
    ),
}


def digest(out: torch.Tensor) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the bytes."""
    return hashlib.sha256(out.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def built(made: Made, weights: str, activations: str, device: str) -> MoELayer:
    """Build the layer; raises PlanError, SpecError and InputError where the pair of formats does not fit it."""
    spec = replace(made.spec, weight_format=weights)
    dtype: Any = activations if activations in DTYPES else "bf16"
    facts = probe(device)
    chosen = plan(
        Problem(spec=spec, device=facts, limits=LIMITS, dtype=dtype), Overrides(activation_format=activations)
    )

    def coded(experts: int, wide: int, inner: int, bias: bool, seed: int):
        own = encode_experts(random_experts(experts, spec.gate_up_parts, wide, inner, seed=seed, bias=bias), weights)
        sent = {name: getattr(own, name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
        return replace(own, **{name: None if part is None else part.to(device) for name, part in sent.items()})

    hidden, inner, count = spec.hidden_size, spec.expert_hidden_size, spec.num_experts
    shared, latent = None, None
    if spec.shared is not None:
        gate = heavy_tailed(1, hidden, seed=40).to(device) / hidden**0.5 if spec.shared.gated else None
        own = coded(1, spec.shared.intermediate_size, hidden, False, 20)
        shared = SharedWeights(experts=own, gate=gate)
    if spec.latent_size is not None:
        down, up = heavy_tailed(inner, hidden, seed=50), heavy_tailed(hidden, inner, seed=51)
        norm = heavy_tailed(inner, seed=52).to(device)
        latent = LatentWeights(
            down=down.to(device) / hidden**0.5, up=up.to(device) / inner**0.5, norm=norm, norm_eps=1e-5
        )
    bias = heavy_tailed(count, seed=31).to(device) if spec.routing.correction_bias else None
    router = RouterWeights(weight=heavy_tailed(count, hidden, seed=30).to(device), correction_bias=bias)
    return MoELayer(
        coded(count, spec.intermediate_size, inner, spec.expert_bias, 10),
        chosen,
        router=None if made.given else router,
        shared=shared,
        latent=latent,
    )


def called(layer: MoELayer, made: Made, tokens: int, device: str) -> str:
    """Return the digest of the layer's output for seeded tokens; every batch runs twice and must repeat itself."""
    spec, dtype = made.spec, DTYPES[layer.plan.problem.dtype]
    x = heavy_tailed(tokens, spec.hidden_size, seed=tokens).to(device, dtype)
    routing = None
    if made.given:
        ids = uneven_ids(tokens, spec.routing.top_k, spec.num_experts, seed=tokens)
        ids[::5, -1] = -1
        shares = heavy_tailed(*ids.shape, seed=tokens + 1, channels=False).abs()
        routing = Routing(topk_ids=ids.to(device), topk_weights=shares.to(device))
    with torch.inference_mode():
        first, second = digest(layer(x, routing=routing)), digest(layer(x, routing=routing))
    return first if first == second else f"differs from itself: {first} {second}"


def rows_of(job: tuple[str, str, str, str]) -> list[tuple[str, str, str, int, str, str]]:
    """Return the rows of one layer and pair of formats, or of one toy checkpoint."""
    name, weights, activations, device = job
    torch.set_num_threads(1)
    if name.startswith("checkpoint "):
        return _checkpoint_rows(name, weights, device)
    made = LAYERS[name]
    try:
        layer = built(made, weights, activations, device)
    except (PlanError, SpecError, InputError) as error:
        return [(name, weights, activations, 0, "", f"refused: {type(error).__name__}")]
    kernel = layer.plan.kernel
    return [(name, weights, activations, n, kernel, called(layer, made, n, device)) for n in TOKENS[device]]


def _checkpoint_rows(name: str, weights: str, device: str) -> list[tuple[str, str, str, int, str, str]]:
    _, family, storage, stacked = name.split()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, family, weights, storage, stacked=stacked == "stacked", size=TinySize(layers=2))
        dtype: Any = weights if weights in DTYPES else "bf16"
        layer = load_layer(folder, 1, device=device, dtype=dtype, limits=LIMITS)
    made = Made(spec=layer.spec)
    kernel, read = layer.plan.kernel, layer.plan.activation_format
    return [(name, weights, read, n, kernel, called(layer, made, n, device)) for n in (1, 40)]


def jobs(device: str) -> list[tuple[str, str, str, str]]:
    """Return every layer, pair of formats and toy checkpoint."""
    formats = [f.name for f in FORMATS if not f.read_only]
    made = [(name, w, a, device) for w in formats for a in ACTIVATIONS for name in LAYERS]
    words = {True: "stacked", False: "apart"}
    found = [(f"checkpoint {family} {s} {words[k]}", w, "", device) for family, w, s, k in combinations()]
    return made + found


def main() -> int:
    """Write the rows, or compare them with a file's; return 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    # A user's measured tiles would change which kernels run.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    facts = [probe(asked.device).name, torch.__version__, version_of("triton")]
    commit = asked.commit
    if not commit:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip()
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        rows = [row for found in pool.map(rows_of, jobs(asked.device), chunksize=1) for row in found]
    wrong = [row for row in rows if row[5].startswith("differs")]
    for row in wrong:
        print("DIFFERS", *row)
    if asked.out:
        with asked.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(HEAD)
            command = f"python scripts/bits.py --device {asked.device}"
            writer.writerows([*row, *facts, commit, command] for row in rows)
    if asked.check:
        wrong += compare(rows, asked.check, facts)
    print(f"{len(rows)} rows, {len(wrong)} wrong")
    return int(bool(wrong))


def compare(rows: list[tuple[str, str, str, int, str, str]], path: Path, facts: list[str]) -> list[object]:
    """Print and return what differs between the rows and a file."""
    with path.open() as file:
        old = list(csv.DictReader(file))
    theirs = sorted({(row["device"], row["torch"], row["triton"]) for row in old})
    if theirs != [tuple(facts)]:
        print(f"{path} is of {theirs}, this machine is {facts}: bits of two machines need not be equal")
        return [theirs]
    before = {(r["layer"], r["weights"], r["activations"], r["tokens"]): (r["kernel"], r["bits"]) for r in old}
    after = {(*row[:3], str(row[3])): row[4:] for row in rows}
    wrong: list[object] = []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            print("DIFFERS", *key, "before", before.get(key), "now", after.get(key))
            wrong.append(key)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
