"""Tokens a second of whole models with random weights: Collegium's experts beside transformers' own.

Everything but the experts is the same module in the same process. Decoding is greedy with a cache of fixed size; a
step is one CUDA graph where the experts allow it. Before a time is taken, the experts of the middle layer must agree
with FP32 truth on what the prompt brings them (relative L2 error at most 0.01 with 16-bit activations). Logits are no
judge: in a random model a router near a tie takes another expert after any rounding, and transformers' own ways differ
by a tenth. Implementations take turns in rotated order; a time is the median over rounds of one decode step. What
fails is a row with the reason; rows are written as they come.

    python benchmarks/bench_model.py qwen3_30b gpt_oss_20b --batches 1 32 --layers 24

``--tiny`` shrinks the widths, to try the program out on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.cache_utils import StaticCache

import collegium
from collegium.bench import TOLERANCES, experts_error, random_weights
from collegium.devices import probe
from collegium.errors import MeasurementError
from collegium.integrations import transformers as plugin
from collegium.layer import MoELayer
from collegium.measure import driver_version, prepare_pass, take_turns, version_of
from collegium.ops.quantize import activation_format
from collegium.plan import plan
from collegium.types import ActivationSpec, Choice, Limits, MoESpec, Problem, Routing, RoutingSpec
from collegium.warming import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RESULTS = Path(__file__).parent / "results" / "models_h200.csv"
# Facts of the published configurations; layers can be cut, which scales both sides alike.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_30b": {
        "config": "Qwen3MoeConfig",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "gpt_oss_20b": {
        "config": "GptOssConfig",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
    },
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
TRANSFORMERS = ("eager", "grouped_mm")
NO_GRAPH = ("eager",)  # it asks the device which experts are hit


class Stepper:
    """A prompt in a cache of its own, and the decode step that follows it, always at the same position."""

    def __init__(self, model: Any, batch: int, prompt: int) -> None:
        """Run the prompt; the logits of its last token stay in ``logits``."""
        self.model = model
        generator = torch.Generator(DEVICE).manual_seed(batch)
        self.ids = torch.randint(0, 1000, (batch, prompt), device=DEVICE, generator=generator)
        self.cache = StaticCache(config=model.config, max_cache_len=prompt + 64)
        self.position = torch.full((1, 1), prompt, device=DEVICE)
        self.token = self.ids[:, -1:].clone()
        # transformers makes a mask by copying a number from the host, which no graph can hold.
        self.mask = torch.zeros(batch, 1, 1, prompt + 64, dtype=model.dtype, device=DEVICE)
        self.mask[..., prompt + 1 :] = torch.finfo(model.dtype).min
        with torch.inference_mode():
            places = torch.arange(prompt, device=DEVICE)[None]
            self.logits = self._run(self.ids, places, None)

    def _run(self, ids: Tensor, places: Tensor, mask: Tensor | None) -> Tensor:
        kept = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        made = self.model(ids, attention_mask=mask, position_ids=places, **kept)
        return made.logits[:, -1].float()

    def step(self) -> Tensor:
        """Decode one token; the cache grows by one and is set back, so that every step costs the same."""
        self.token.copy_(self._run(self.token, self.position, self.mask).argmax(-1, keepdim=True))
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self.ids.shape[1]
        return self.token


def build(name: str, layers: int | None, tiny: bool) -> Any:
    facts = dict(MODELS[name])
    kind = getattr(transformers, facts.pop("config"))
    if tiny:
        facts |= {key: value for key, value in TINY.items() if key in facts}
    if layers is not None:
        facts["num_hidden_layers"] = min(layers, facts["num_hidden_layers"])
    config = kind(**facts, max_position_embeddings=4096)
    plugin.register()
    torch.manual_seed(0)
    with DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def spec_of_module(model: Any, module: Any, weights: str) -> MoESpec:
    plain = plugin.routed_weights(module)
    experts, _, wide, hidden = plain.gate_up.shape
    oai = ActivationSpec(kind="swiglu_oai", limit=7.0)
    return MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=model.config.num_experts_per_tok),
        activation=ActivationSpec() if plain.down_bias is None else oai,
        weight_format=weights,
        expert_bias=plain.down_bias is not None,
    )


def attach(model: Any, weights: str, activations: str) -> None:
    """Let the experts of ``model`` be fresh random ones in a format of ours, router and the rest being the model's."""
    layers: dict[int, MoELayer] = {}
    for index, module in plugin.experts_modules(model).items():
        spec = spec_of_module(model, module, weights)
        problem = Problem(spec=spec, device=probe(DEVICE), limits=Limits(max_tokens=2048))
        made = plan(problem, Choice(activation_format=activations))
        layers[index] = MoELayer(random_weights(spec, DEVICE, seed=index), made)
    plugin.attach(model, layers)


def formats_of(way: str) -> tuple[str, str]:
    """Return the weights and activations that ``way`` names: ``collegium WEIGHTS[:ACTIVATIONS]``, or transformers'."""
    weights, _, activations = way.partition(" ")[2].partition(":")
    return weights or "bf16", activations or "bf16"


def use(model: Any, way: str) -> None:
    model.set_experts_implementation(way.split()[0])


def check(model: Any, way: str, stepper: Stepper) -> float:
    """Return the error of the middle layer's experts on the inputs of the prompt; raises when it is too large."""
    modules = sorted(plugin.experts_modules(model).items())
    index, module = modules[len(modules) // 2]
    asked: list[tuple[Any, ...]] = []
    hook = module.register_forward_hook(lambda _, inputs, out: asked.append((*inputs, out)))
    with torch.inference_mode():
        model(stepper.ids, use_cache=False, logits_to_keep=1)
        hook.remove()
        x, ids, topk_weights, found = asked[0]
        weights, activations = formats_of(way)
        spec = spec_of_module(model, module, weights)
        own = plugin.routed_weights(module) if weights == "bf16" else random_weights(spec, DEVICE, seed=index)
        case = (x.view(-1, x.shape[-1]), Routing(topk_ids=ids, topk_weights=topk_weights.float()))
        error = experts_error(found.view(-1, x.shape[-1]), Problem(spec=spec, device=probe(DEVICE)), own, case)
    allowed = TOLERANCES[activation_format(activations).bits]
    if not error <= allowed:
        raise MeasurementError(f"the experts of layer {index} are {error:.4f} away from FP32 truth, allowed {allowed}")
    return error


def prepare(model: Any, way: str, stepper: Stepper) -> tuple[Callable[[], object], bool]:
    """Return a decode step of ``way`` and whether it is a graph."""
    if DEVICE.type == "cuda" and way not in NO_GRAPH:
        try:
            return prepare_pass([stepper.step], DEVICE), True
        except Exception as fault:
            torch.cuda.synchronize()
            print(f"    {way}: no graph: {_reason(fault)}", flush=True)

    def eager() -> object:
        use(model, way)
        with torch.inference_mode():
            return stepper.step()

    eager()
    return eager, False


def _reason(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"


class Table:
    """The CSV file, written row by row so that a run that is cut short keeps what it measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        said = ["--batches", *map(str, args.batches), *(["--layers", str(args.layers)] if args.layers else [])]
        self.head = {"gpu": probe(DEVICE).name or DEVICE.type, "driver": driver_version(DEVICE)}
        self.head |= {name: version_of(name) for name in ("torch", "triton", "transformers")}
        self.head |= {"collegium": collegium.__version__, "commit": args.commit}
        self.head |= {"command": " ".join(["python benchmarks/bench_model.py", *args.models, *said])}
        self.file = args.out.open("w", newline="", encoding="utf-8")
        self.writer: csv.DictWriter[str] | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Write a row with what is the same for all, and show it."""
        full = self.head | row
        if self.writer is None:
            self.writer = csv.DictWriter(self.file, list(full), lineterminator="\n")
            self.writer.writeheader()
        self.writer.writerow(full)
        self.file.flush()
        print("   ", row, flush=True)


def main() -> int:
    args = _options()
    started = time.time()
    table = Table(args)
    for name in args.models:
        model = build(name, args.layers, args.tiny)
        count = sum(p.numel() for p in model.parameters()) / 1e9
        depth = f"{model.config.num_hidden_layers} of {MODELS[name]['num_hidden_layers']}"
        print(f"{name}: {count:.1f} G parameters, {depth} layers, {time.time() - started:.0f} s", flush=True)
        for ways in ([*TRANSFORMERS, "collegium bf16"], *([f"collegium {f}"] for f in args.formats)):
            reason = _attached(model, ways[0]) if ways[0] not in TRANSFORMERS else ""
            for batch in args.batches:
                if time.time() - started > args.seconds:
                    reason = reason or "no time left"
                for row in _turns(model, ways, batch, args, reason):
                    table.add({"model": name, "layers": depth, "batch": batch} | row)
            print(f"{time.time() - started:.0f} s", flush=True)
        del model
        _tidy()
    print(f"done after {time.time() - started:.0f} s")
    return 0


def _attached(model: Any, way: str) -> str:
    """Attach fresh experts in the formats of ``way``; return why not, or nothing."""
    try:
        attach(model, *formats_of(way))
    except Exception as fault:
        return f"absent: {_reason(fault)}"
    return ""


def _turns(model: Any, ways: list[str], batch: int, args: argparse.Namespace, reason: str) -> list[dict[str, Any]]:
    ready: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for way in ways:
        row = {"experts": way, "graph": "", "error": "", "ms_per_step": "", "tokens_per_second": "", "note": reason}
        rows[way] = row
        if reason:
            continue
        try:
            use(model, way)
            if not way.startswith(TRANSFORMERS):
                _warm(model)
            stepper = Stepper(model, batch, args.prompt)
            row["error"] = round(check(model, way, stepper), 5)
            ready[way], row["graph"] = prepare(model, way, stepper)
        except Exception as fault:
            row["note"] = f"failed: {_reason(fault)}"
    try:
        for way, seconds in take_turns(ready, DEVICE, rounds=args.rounds, queued=False).items():
            rows[way] |= {"ms_per_step": round(1e3 * seconds, 3), "tokens_per_second": round(batch / seconds, 1)}
    except Exception as fault:
        for way in ready:
            rows[way]["note"] = f"failed: {_reason(fault)}"
    ready.clear()
    _tidy()
    return list(rows.values())


def _warm(model: Any) -> None:
    """Build our layers with one token, unless they are attached already, and compile the rest side by side."""
    if not plugin.layers_of(model):
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), use_cache=False, logits_to_keep=1)
    warm_up(plugin.layers_of(model))


def _tidy() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument(
        "--formats", nargs="*", default=["mxfp4", "mxfp4:fp8_token"], help="ours besides bf16, weights:activations"
    )
    parser.add_argument("--layers", type=int, help="at most this many layers")
    parser.add_argument("--tiny", action="store_true", help="small widths and two layers")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
