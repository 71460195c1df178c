"""Generate text with a whole model: tokenizer, generation speed, perplexity."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint, gguf_file
from ..errors import ConfigError, InputError
from ..integrations.extra import import_extra
from ..integrations.transformers import Decoder, choose_adapters
from ..integrations.transformers.classes import class_and_config
from ..problem import Limits
from .gpu_memory import layer_gpu_bytes

__all__ = ["AdapterTexts", "Writer", "Written", "check_seed", "check_writable", "prompt_limits", "prompts_of"]

_STEADY = 3  # tokens before decode steps replay a CUDA graph: from the prompt, a plain step and the capturing step


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A generated text, including its prompt, and its timing.

    tokens_per_second: speed of the decode steps after the first token; on a GPU, of the steps that replay a CUDA graph.
    If there are no such steps, the speed of all tokens including the prompt's pass.
    """

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTexts:
    """A text for each adapter of one model; adapters: their folders, prompts: what each continued."""

    adapters: tuple[str, ...]
    prompts: tuple[str, ...]
    texts: tuple[Written, ...]


class Writer:
    """A model with its tokenizer; generates text and measures perplexity."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Read the tokenizer of a folder or GGUF file; raises MissingExtraError if an optional package is missing."""
        self.model: Any = model
        self.tokenizer = _tokenizer(folder)
        self.decoder = Decoder(model)
        self.device = next(p.device for p in model.parameters() if p.device.type != "meta")

    def encode(self, text: str) -> Tensor:
        """Return token ids ``[1, T]``; raises InputError for a text without tokens and for an id outside the model."""
        ids = self.tokenizer.encode(text).ids
        if not ids:
            raise InputError(f"the text {text!r} has no tokens; give at least one word")
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        if max(ids) >= vocab_size:
            raise InputError(
                f"the tokenizer returned token id {max(ids)}, the model has embeddings for 0 to {vocab_size - 1}; put "
                "the tokenizer.json that the model was published with into its folder"
            )
        return torch.tensor([ids], device=self.device)

    def windows(self, source: Path, size: int, min_windows: int = 1) -> Tensor:
        """Return the token ids of a text file as windows ``[N, size]``, without the remainder.

        Raises InputError for a file that is not UTF-8 text, and for fewer than ``min_windows`` windows.
        """
        try:
            ids = self.encode(source.read_text(encoding="utf-8"))[0]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: cannot be read as UTF-8 text: {error}; give another text") from error
        count = len(ids) // size
        if count < min_windows:
            raise InputError(
                f"{source}: has {len(ids)} tokens, {min_windows} times {size} tokens are needed; give a longer text or "
                "a smaller --tokens"
            )
        return ids[: count * size].view(count, size)

    def write(
        self, prompt: str, tokens: int, *, temperature: float = 0.0, seed: int = 0, penalty: float = 1.0
    ) -> Written:
        """Continue ``prompt`` by at most ``tokens`` tokens. temperature, penalty: see ``Decoder.generate``."""
        ids = self.encode(prompt)
        times: dict[int, float] = {}  # by number of generated tokens

        def record_time(count: int) -> None:
            if count in (1, _STEADY):
                self._synchronize()
                times[count] = time.perf_counter()

        torch.manual_seed(seed)
        self._synchronize()
        start = time.perf_counter()
        output = self.decoder.generate(
            ids, tokens, temperature=temperature, penalty=penalty, stop=self._stop_ids(), written=record_time
        )
        output_ids = output.tolist()[0]
        end = time.perf_counter()
        count = len(output_ids) - ids.shape[1]
        warm_up_tokens = _STEADY if self.decoder.captured else 1
        if count > warm_up_tokens:
            tokens_per_second = (count - warm_up_tokens) / (end - times[warm_up_tokens])
        else:
            tokens_per_second = count / (end - start)
        return Written(
            text=self.tokenizer.decode(output_ids),
            tokens=count,
            first_token_seconds=times[1] - start,
            tokens_per_second=tokens_per_second,
        )

    def write_with_adapters(
        self, prompts: Sequence[str], tokens: int, adapters: Sequence[str], **options: Any
    ) -> AdapterTexts:
        """Continue each of ``prompts`` with the adapter in its place; options: as ``write`` takes them."""
        texts: list[Written] = []
        for number, prompt in enumerate(prompts):
            choose_adapters(self.model, [number])
            texts.append(self.write(prompt, tokens, **options))
        choose_adapters(self.model, None)
        return AdapterTexts(adapters=tuple(adapters), prompts=tuple(prompts), texts=tuple(texts))

    def _stop_ids(self) -> tuple[int, ...]:
        end_ids: Any = getattr(self.model, "generation_config", self.model.config).eos_token_id
        if end_ids is None:
            return ()
        return tuple(end_ids) if isinstance(end_ids, list | tuple) else (end_ids,)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def perplexity(self, ids: Tensor) -> float:
        """Return the perplexity of windows ``ids [B, T]``: exp of the mean negative log likelihood."""
        with torch.inference_mode():
            logits = self.model(ids[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return float(loss.double().exp())


def check_writable(path: str, *, dummy: bool = False) -> Checkpoint:
    """Open the checkpoint at ``path`` and check that it is a text model with a tokenizer; tensors are not read.

    dummy: open only the config, for random weights. Raises the errors of ``Checkpoint.open`` and ``class_and_config``,
    ConfigError for a model without a head, and InputError for a missing tokenizer.
    """
    checkpoint = Checkpoint.open_config(path) if dummy else Checkpoint.open(path)
    cls, config = class_and_config(checkpoint)
    if not hasattr(cls, "generate"):
        raise ConfigError(
            f"{checkpoint.path}: architectures is {config.architectures}, a model without a head, which writes no "
            "text; give the checkpoint with lm_head.weight, or load this one with load_model()"
        )
    _tokenizer(checkpoint.path)
    return checkpoint


def prompts_of(prompts: Sequence[str], adapters: Sequence[str]) -> list[str]:
    """Return the prompts as text, one for each adapter where there are several; one prompt is for all of them.

    Raises InputError for another number of prompts than adapters, and for several prompts without adapters.
    """
    # Bytes that are invalid in the locale's encoding are decoded as UTF-8; other bytes become replacement characters.
    texts = [prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for prompt in prompts]
    if len(texts) == 1:
        return texts * max(1, len(adapters))
    if len(adapters) < 2 or len(texts) != len(adapters):
        raise InputError(
            f"--prompt: found {len(texts)} prompts and {len(adapters)} adapters; allowed: one prompt, or with several "
            "adapters one for each, in their order"
        )
    return texts


def check_seed(seed: int) -> None:
    """Raise InputError for a seed that torch does not take."""
    if not -(1 << 63) <= seed < 1 << 63:
        raise InputError(f"--seed: {seed} is not a 64-bit integer; allowed: -2^63 to 2^63 - 1")


def prompt_limits(checkpoint: Checkpoint, prompts: Sequence[str], gpu_memory: str | None = None) -> Limits:
    """Return the smallest power of two that fits the prompts, at most 512: small passes need fewer compiled kernels.

    gpu_memory: of ``--gpu-memory``, for the experts of all layers.
    """
    gpu_bytes = layer_gpu_bytes(gpu_memory, checkpoint.config)
    tokens = max(len(_tokenizer(checkpoint.path).encode(prompt).ids) for prompt in prompts)
    return Limits(max_tokens=min(512, 1 << max(0, tokens - 1).bit_length()), gpu_bytes=gpu_bytes)


def _tokenizer(path: Path) -> Any:
    """Return the tokenizer.json in the folder of the weights, or else the tokenizer in a GGUF file's metadata."""
    gguf = gguf_file(path)
    tokenizer_path = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if gguf is not None and not tokenizer_path.is_file():
        import_extra("gguf", group="gguf")
        tokenizer_path = gguf
    elif not tokenizer_path.is_file():
        raise InputError(f"{path}: no tokenizer.json; text needs the tokenizer that the model was published with")
    return _read_tokenizer(tokenizer_path, tokenizer_path.stat().st_mtime_ns)


def _gguf_tokenizer(transformers: Any, path: Path) -> Any:
    from_pretrained = transformers.AutoTokenizer.from_pretrained
    return from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False).backend_tokenizer


@lru_cache(maxsize=1)
def _read_tokenizer(path: Path, _modified: int) -> Any:
    """Read a tokenizer file, which can have megabytes; cached until the file is modified."""
    package = import_extra("transformers" if path.suffix == ".gguf" else "tokenizers")
    try:
        if path.suffix == ".gguf":
            return _gguf_tokenizer(package, path)
        return package.Tokenizer.from_file(str(path))
    except Exception as error:  # the packages raise plain Exception
        raise InputError(
            f"{path}: its tokenizer cannot be read: {error}; download it again, or put the tokenizer.json that the "
            "model was published with into the same folder"
        ) from error
