"""Train the small Mixture-of-Experts language model of this folder from scratch.

The model is a small `Qwen3MoeForCausalLM` of Hugging Face Transformers. The script reads the token files
and the tokenizer that `prepare_data.py` wrote, trains for a given time on one CUDA device (or, for a trial,
on the CPU), and writes a BF16 checkpoint with one tensor for each expert matrix, `loss.csv` and `loss.png`.

The stock expert layer loops over experts in Python, which is slow for experts this small. Training therefore
evaluates all experts on all tokens as two batched matrix products and weighs them by the router's top-k
probabilities, zero for experts that were not chosen; the result is the same function.

Example:
    python train.py data/ --output fables-16m/
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import shutil
import time
import types
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LOG = logging.getLogger("train")


def build_config(aux_coefficient: float) -> Qwen3MoeConfig:
    """Return the configuration of the 16-million-parameter model."""
    return Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        output_router_logits=True,
        router_aux_loss_coef=aux_coefficient,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def dense_experts(
    self: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Evaluate every expert on every token, weighing each by its (possibly zero) routing weight."""
    experts = self.gate_up_proj.shape[0]
    weights = hidden.new_zeros(hidden.shape[0], experts)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    batch = hidden.unsqueeze(0).expand(experts, -1, -1)
    gate, up = torch.bmm(batch, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up * weights.t().unsqueeze(-1)
    inner = inner.transpose(0, 1).reshape(hidden.shape[0], -1)
    down = self.down_proj.transpose(1, 2).reshape(inner.shape[1], -1)
    return torch.mm(inner, down).to(hidden.dtype)


def make_optimizer(model: torch.nn.Module, weight_decay: float, fused: bool) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def learning_rate(progress: float, peak: float, warm_up: float) -> float:
    """Linear warm-up to the peak, then a cosine to zero; progress runs from 0 to 1."""
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * min((progress - warm_up) / (1 - warm_up), 1.0)))


@torch.no_grad()
def evaluate(model: torch.nn.Module, tokens: torch.Tensor, length: int) -> float:
    """Return the mean next-token cross-entropy in nats over non-overlapping windows of the held-out text."""
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    total = 0.0
    model.eval()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        for start in range(0, count, 32):
            logits = model(input_ids=inputs[start : start + 32], output_router_logits=False).logits.float()
            target = targets[start : start + 32].flatten()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum").item()
    model.train()
    return total / (count * length)


def save(model: Qwen3MoeForCausalLM, data: Path, output: Path) -> None:
    """Write a BF16 checkpoint with published Qwen3-MoE tensor names, and the tokenizer."""
    copy = Qwen3MoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.config.output_router_logits = False
    copy.generation_config.eos_token_id = 0
    copy.generation_config.pad_token_id = 0
    copy.to(torch.bfloat16).save_pretrained(output)
    model.config.use_cache = False
    model.config.output_router_logits = True
    path = output / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["num_experts"] = settings.pop("num_local_experts", model.config.num_experts)
    settings["rope_theta"] = settings.get("rope_parameters", {}).get("rope_theta", 10000.0)
    path.write_text(json.dumps(dict(sorted(settings.items())), indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / name, output / name)


def plot(rows: list[tuple[int, int, float, float | None]], path: Path) -> None:
    """Draw the loss curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([r[1] / 1e6 for r in rows], [r[2] for r in rows], label="training", linewidth=1)
    held = [(r[1] / 1e6, r[3]) for r in rows if r[3] is not None]
    axes.plot(*zip(*held, strict=True), "o-", markersize=3, label="held-out books")
    axes.set_xlabel("training tokens seen (millions)")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.set_ylim(top=min(6.5, max(r[2] for r in rows)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Run the training from the command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("data", type=Path, help="folder written by prepare_data.py")
    parser.add_argument("--output", type=Path, default=Path("fables-16m"))
    parser.add_argument("--minutes", type=float, default=3.4, help="wall-clock time of the training loop")
    parser.add_argument("--batch", type=int, default=128, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warm-up", type=float, default=0.03, help="fraction of the run")
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.1, help="after embedding, attention and experts")
    parser.add_argument("--aux", type=float, default=0.01, help="coefficient of the load-balancing loss")
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=int, default=50, help="steps between rows of loss.csv")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.output.mkdir(parents=True, exist_ok=True)

    train, heldout = (
        torch.from_numpy(np.fromfile(args.data / name, dtype="<u2").astype(np.int64)).to(device)
        for name in ("train.bin", "heldout.bin")
    )
    model = Qwen3MoeForCausalLM(build_config(args.aux)).to(device)
    model.train()

    def drop(module: torch.nn.Module, _: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        """Apply dropout to a module's output while training."""
        return torch.nn.functional.dropout(out, args.dropout, training=module.training)

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.forward = types.MethodType(dense_experts, module)
        if args.dropout and name.endswith(("mlp.experts", "o_proj", "embed_tokens")):
            module.register_forward_hook(drop)
    LOG.info("%d parameters, %d training tokens", sum(p.numel() for p in model.parameters()), len(train))
    optimizer = make_optimizer(model, args.weight_decay, fused=device.type == "cuda")
    offsets = torch.arange(args.length, device=device)

    def loss_of(ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cross-entropy and the load-balancing loss of one batch."""
        out = model(input_ids=ids, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
        probabilities = torch.stack([r.float().softmax(-1) for r in out.router_logits])
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(4, dim=-1).indices, 1.0)
        balance = (chosen.mean(1) * probabilities.mean(1)).sum(-1).mean() * probabilities.shape[-1]
        return loss, balance

    step_loss = torch.compile(loss_of) if args.compile and device.type == "cuda" else loss_of
    rows: list[tuple[int, int, float, float | None]] = []
    step, begun, saved = 0, 0.0, 0.0
    recent: list[torch.Tensor] = []
    while True:
        progress = (time.monotonic() - begun) / (60 * args.minutes) if begun else 0.0
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.rate, args.warm_up)
        starts = torch.randint(len(train) - args.length - 1, (args.batch, 1), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss, balance = step_loss(train[starts + offsets], train[starts + offsets + 1])
        (loss + args.aux * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        step += 1
        if step == 3:  # The clock starts once compilation is over.
            begun = saved = time.monotonic()
        if step % args.log_every == 0:
            mean = torch.stack(recent).mean().item()
            recent.clear()
            held = evaluate(model, heldout, args.length) if step % (10 * args.log_every) == 0 else None
            rows.append((step, step * args.batch * args.length, mean, held))
            speed = (step - 3) * args.batch * args.length / max(time.monotonic() - begun, 1e-3)
            LOG.info("step %d, %.0f%%, loss %.4f, held-out %s, %.0f/s", step, 100 * progress, mean, held, speed)
            if time.monotonic() - saved > 60 * args.save_every:
                save(model, args.data, args.output)
                saved = time.monotonic()
    held = evaluate(model, heldout, args.length)
    tokens = step * args.batch * args.length
    rows.append((step, tokens, torch.stack(recent).mean().item() if recent else rows[-1][2], held))
    LOG.info("finished: %d steps, %d tokens, held-out %.4f, balance %.3f", step, tokens, held, balance.item())
    save(model, args.data, args.output)
    with (args.output / "loss.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["step", "tokens", "training_loss", "heldout_loss"])
        writer.writerows([(s, t, f"{x:.4f}", "" if h is None else f"{h:.4f}") for s, t, x, h in rows])
    plot(rows, args.output / "loss.png")


if __name__ == "__main__":
    main()
