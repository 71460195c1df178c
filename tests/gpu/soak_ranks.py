"""Random calls of layers over the GPUs of this host, each compared bit by bit with a layer of one rank.

``python tests/gpu/soak_ranks.py --calls 10000`` runs five layers in turns, four of the pipeline mega and one of split:
ranks bring different numbers of tokens, often none, and in every third call all tokens have expert 0.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

import torch
from torch import distributed

from collegium import Routing
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of
from collegium.testing.compare import heavy_tailed, uneven_ids
from ranks import run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, kept, layer_of

MOST, POOL = 64, 4096  # tokens of a rank; of all inputs
FOUR_BITS = ("mxfp4", "fp8_token", "bf16")
KINDS = (
    ("plain", FOUR_BITS, "mega"),
    ("shared", FOUR_BITS, "mega"),
    ("latent", FOUR_BITS, "mega"),
    ("plain", RECIPES[3], "mega"),
    ("plain", FOUR_BITS, "split"),
)


def soaked(rank: int, *, calls: int, seed: int) -> list[int]:
    """Return how many calls of each layer gave other bits than one rank's layer gives."""
    world, device, chance = distributed.get_world_size(), torch.device("cuda", rank), random.Random(seed)
    placed: dict[str, Any] = {"placement": linear(EXPERTS, rank, world), "dispatcher": "symm_mem"}
    layers = [layer_of(kind, recipe, str(device), pipeline=way, **placed) for kind, recipe, way in KINDS]
    judges = [layer_of(kind, recipe, str(device)) for kind, recipe, _ in KINDS]
    kept.extend(layers)
    pool = heavy_tailed(POOL, HIDDEN, seed=rank).to(device, torch.bfloat16)
    ids = uneven_ids(POOL, 3, EXPERTS, seed=rank)
    ids[1::17, 0], ids[2::29, -1] = -1, EXPERTS + 2
    hot = ids.clone()
    hot[:, 0] = 0
    routed, given = (ids.to(device), hot.to(device)), torch.rand(POOL, 3, device=device)
    wrong = torch.zeros(len(KINDS), dtype=torch.int64, device=device)
    with torch.inference_mode():
        for call in range(calls):
            which = chance.randrange(len(KINDS))
            counts = [chance.choice((0, 0, 1, 1, 2, 3, 8, chance.randint(0, MOST), MOST)) for _ in range(world)]
            first = chance.randrange(POOL - MOST)
            span, top_k = slice(first, first + counts[rank]), layers[which].spec.routing.top_k
            routing = Routing(topk_ids=routed[call % 3 == 2][span, :top_k], topk_weights=given[span, :top_k])
            found, wanted = (each(pool[span], routing=routing) for each in (layers[which], judges[which]))
            same = (found == wanted) | (found.isnan() & wanted.isnan())
            wrong[which] += ~same.all()
            if call % 500 == 499:
                for layer in layers:
                    layer.check()
    rendezvous_of().exchange(None, "all calls are made")
    return wrong.tolist()


def main() -> int:
    """Run the calls and print what differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500, help="give up after this long")
    args, world = parser.parse_args(), torch.cuda.device_count()
    if world < 2:
        print(f"found {world} GPUs, needed are two or more")
        return 1
    started = time.monotonic()
    found = run_ranks(partial(soaked, calls=args.calls, seed=args.seed), world, "nccl", seconds=args.seconds)
    for place, (kind, recipe, way) in enumerate(KINDS):
        print(f"{way} {kind} {recipe[0]} x {recipe[1]}: {sum(own[place] for own in found)} calls differ")
    print(f"{args.calls} calls of {world} ranks in {time.monotonic() - started:.0f} s")
    return int(any(map(sum, found)))


if __name__ == "__main__":
    sys.exit(main())
