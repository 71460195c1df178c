"""The demo: one real model, every format, measured beside BF16."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from .checkpoint.loader import describe_checkpoint, load_experts
from .checkpoint.reader import Checkpoint
from .devices import probe
from .errors import InputError, MissingExtraError
from .functional import moe
from .integrations.transformers import Decoder, attach, build_layers, experts_modules, load_model
from .parallel.placement import linear
from .types import Choice, Limits, Routing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from .layer import MoELayer

__all__ = ["RECIPES", "DemoReport", "DemoRow", "Recipe", "Writer", "find_model", "run_demo"]

SHIPPED = Path("demo") / "fables-16m"
PROMPT = "Once upon a time there was a"
WINDOW = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A weight format and the format activations take before each multiplication."""

    weights: str
    activations: str = "bf16"


RECIPES = (
    Recipe(weights="bf16"),
    Recipe(weights="fp16"),
    Recipe(weights="fp8_block"),
    Recipe(weights="fp8_channel"),
    Recipe(weights="fp8_tensor"),
    Recipe(weights="mxfp8"),
    Recipe(weights="int4_group"),
    Recipe(weights="mxfp4"),
    Recipe(weights="nvfp4"),
    Recipe(weights="fp8_block", activations="fp8_group128"),
    Recipe(weights="mxfp4", activations="fp8_group128"),
    Recipe(weights="nvfp4", activations="nvfp4"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRow:
    """One line of the table. layer_error: relative L2 error of one layer against FP32 on the BF16 weights."""

    weights: str
    activations: str
    kernel: str
    expert_bytes: int
    perplexity: float
    perplexity_ratio: float
    layer_error: float
    tokens_per_second: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """Everything the demo measured."""

    model: str
    device: str
    seconds: float
    rows: tuple[DemoRow, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for ``--json``."""
        return asdict(self)


class Writer:
    """A model and its tokenizer: text in, text and perplexity out."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Read tokenizer.json of ``folder``; raises MissingExtraError without the transformers extra."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingExtraError(
                "tokenizers is not installed; install it with: pip install 'collegium[transformers]'"
            ) from error
        if not (folder / "tokenizer.json").exists():
            raise InputError(f"{folder}: no tokenizer.json; text needs the tokenizer that the model was published with")
        self.model: Any = model
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.decoder = Decoder(model)
        self.device = next(p.device for p in model.parameters() if p.device.type != "meta")

    def encode(self, text: str) -> Tensor:
        """Return token ids ``[1, T]``."""
        return torch.tensor([self.tokenizer.encode(text).ids], device=self.device)

    def write(self, prompt: str, tokens: int, *, temperature: float = 0.0, seed: int = 0) -> tuple[str, float]:
        """Continue ``prompt`` by at most ``tokens`` tokens; return the text and the tokens written per second."""
        ids = self.encode(prompt)
        ends: Any = getattr(self.model, "generation_config", self.model.config).eos_token_id
        stop = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = self.decoder.generate(ids, tokens, temperature=temperature, penalty=1.2, stop=stop).tolist()[0]
        elapsed = time.perf_counter() - start
        return self.tokenizer.decode(out), (len(out) - ids.shape[1]) / elapsed

    def perplexity(self, ids: Tensor) -> float:
        """Return exp of the mean negative log likelihood of windows ``ids [B, T]``."""
        with torch.inference_mode():
            logits = self.model(ids[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return math.exp(float(loss))


def find_model(path: str | None) -> Path:
    """Return ``path``, or the shipped model of the checkout this package runs from. Raises InputError."""
    if path is not None:
        return Path(path)
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / SHIPPED / "config.json").exists():
            return root / SHIPPED
    raise InputError(
        f"demo: the shipped model {SHIPPED} is in neither the current folder nor the checkout of this package; "
        "run it from a clone of the repository, or name a model folder with --model"
    )


def run_demo(
    folder: Path,
    *,
    device: str | None = None,
    tokens: int = 32,
    windows: int = 6,
    progress: Callable[[int, int, str], None] | None = None,
) -> DemoReport:
    """Measure every recipe on the model in ``folder`` (which ships ``heldout.txt``)."""
    start = time.perf_counter()
    checkpoint = Checkpoint.open(folder)
    model = load_model(str(folder), device=device)
    writer = Writer(model, folder)
    ids = _windows(writer, folder / "heldout.txt", windows)
    case = _Case.capture(model, checkpoint, ids[:1])
    rows: list[DemoRow] = []
    for done, recipe in enumerate(RECIPES):
        if progress is not None:
            progress(done, len(RECIPES), f"{recipe.weights} x {recipe.activations}")
        layers = build_layers(
            checkpoint,
            weight_format=recipe.weights,
            force=Choice(activation_format=recipe.activations),
            device=device,
            limits=Limits(max_tokens=4096),
        )
        attach(model, layers)
        perplexity = writer.perplexity(ids)
        text, speed = writer.write(PROMPT, tokens)
        chosen = layers[case.layer].plan
        rows.append(
            DemoRow(
                weights=recipe.weights,
                activations=recipe.activations,
                kernel=chosen.kernel,
                expert_bytes=chosen.expert_bytes,
                perplexity=perplexity,
                perplexity_ratio=perplexity / (rows[0].perplexity if rows else perplexity),
                layer_error=case.error(layers[case.layer]),
                tokens_per_second=speed,
                text=text,
            )
        )
    if progress is not None:
        progress(len(RECIPES), len(RECIPES), "done")
    facts = probe(device)
    return DemoReport(
        model=folder.name,
        device=facts.name or facts.kind,
        seconds=time.perf_counter() - start,
        rows=tuple(rows),
    )


def _windows(writer: Writer, held_out: Path, windows: int) -> Tensor:
    if not held_out.exists():
        raise InputError(f"{held_out}: not found; the demo needs held-out text beside the model to measure perplexity")
    ids = writer.encode(held_out.read_text(encoding="utf-8"))[0]
    needed = windows * WINDOW
    if len(ids) < needed:
        raise InputError(f"{held_out}: holds {len(ids)} tokens; {windows} windows of {WINDOW} need {needed}")
    return ids[:needed].view(windows, WINDOW)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Real inputs of one layer, and its FP32 output on the BF16 weights."""

    layer: int
    x: Tensor
    routing: Routing
    truth: Tensor

    @classmethod
    def capture(cls, model: nn.Module, checkpoint: Checkpoint, ids: Tensor) -> _Case:
        """Run ``ids [1, T]`` through the model and keep what the middle layer's experts were asked."""
        modules = experts_modules(model)
        index = sorted(modules)[len(modules) // 2]
        asked: list[tuple[Tensor, Tensor, Tensor]] = []
        hook = modules[index].register_forward_pre_hook(lambda _, inputs: asked.append(inputs))
        with torch.inference_mode():
            cast("Any", model)(ids, use_cache=False)
        hook.remove()
        x, topk_ids, topk_weights = (t.clone() for t in asked[0])
        routing = Routing(topk_ids=topk_ids, topk_weights=topk_weights)
        spec = describe_checkpoint(checkpoint)
        weights = load_experts(checkpoint, spec, index, linear(spec.num_experts, 0, 1), device=x.device.type)
        truth = moe(
            x.float(),
            weights.gate_up,
            weights.down,
            topk_ids,
            topk_weights,
            activation=spec.activation,
            force=Choice(kernel="reference"),
        )
        return cls(layer=index, x=x, routing=routing, truth=truth)

    def error(self, layer: MoELayer) -> float:
        """Return the relative L2 error of ``layer`` on the captured inputs."""
        found = layer(self.x, routing=self.routing).float()
        return float((found - self.truth).norm() / self.truth.norm())
