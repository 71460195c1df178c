"""Text from a whole model: its tokenizer, what it writes and how fast, and whether it can be loaded at all."""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint, gguf_file
from ..errors import InputError
from ..integrations.extra import extra
from ..integrations.transformers import Decoder
from ..integrations.transformers.classes import class_and_config
from ..problem import Limits

__all__ = ["Writer", "Written", "check_writable", "prompt_limits"]

_STEADY = 3  # tokens until a decode step is one CUDA graph: the prompt's, one of a plain step, one with the capture


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A text with its prompt, and how long it took.

    tokens_per_second: of the decode steps after the first token, on a GPU of those that are replayed as a CUDA graph;
    of all tokens, the prompt's pass included, where there are no such steps.
    """

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float


class Writer:
    """A model and its tokenizer: text in, text and perplexity out."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Read the tokenizer of a folder or GGUF file; raises MissingExtraError without the extra it needs."""
        self.model: Any = model
        self.tokenizer = _tokenizer(folder)
        self.decoder = Decoder(model)
        self.device = next(p.device for p in model.parameters() if p.device.type != "meta")

    def encode(self, text: str) -> Tensor:
        """Return token ids ``[1, T]``; raises InputError for a text that has none, and ids the model does not know."""
        ids = self.tokenizer.encode(text).ids
        if not ids:
            raise InputError(f"the text {text!r} has no token to begin with; give at least a word")
        known = self.model.get_input_embeddings().weight.shape[0]
        if max(ids) >= known:
            why = f"the tokenizer gives the text the token id {max(ids)}, the model has embeddings for 0 to {known - 1}"
            raise InputError(f"{why}; put the tokenizer.json that the model was published with into its folder")
        return torch.tensor([ids], device=self.device)

    def windows(self, source: Path, size: int, least: int = 1) -> Tensor:
        """Return the token ids of a text file as windows ``[N, size]``; what is left at its end is dropped.

        Raises InputError for what is no text and for less than ``least`` windows.
        """
        try:
            ids = self.encode(source.read_text(encoding="utf-8"))[0]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: is no UTF-8 text that can be read: {error}; give another text") from error
        count = len(ids) // size
        if count < least:
            need = f"{least} times {size} tokens at once are needed"
            raise InputError(f"{source}: has {len(ids)} tokens, {need}; give a longer text or ask for fewer --tokens")
        return ids[: count * size].view(count, size)

    def write(
        self, prompt: str, tokens: int, *, temperature: float = 0.0, seed: int = 0, penalty: float = 1.0
    ) -> Written:
        """Continue ``prompt`` by at most ``tokens`` tokens. temperature, penalty: as ``Decoder.generate``."""
        ids = self.encode(prompt)
        ends: Any = getattr(self.model, "generation_config", self.model.config).eos_token_id
        stop = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        marks: dict[int, float] = {}

        def mark(count: int) -> None:
            if count in (1, _STEADY):
                self._wait()
                marks[count] = time.perf_counter()

        torch.manual_seed(seed)
        self._wait()
        start = time.perf_counter()
        out = self.decoder.generate(
            ids, tokens, temperature=temperature, penalty=penalty, stop=stop, written=mark
        ).tolist()[0]
        end = time.perf_counter()
        count = len(out) - ids.shape[1]
        since = _STEADY if self.decoder.captured else 1
        steady = count > since
        return Written(
            text=self.tokenizer.decode(out),
            tokens=count,
            first_token_seconds=marks[1] - start,
            tokens_per_second=(count - since) / (end - marks[since]) if steady else count / (end - start),
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def perplexity(self, ids: Tensor) -> float:
        """Return exp of the mean negative log likelihood of windows ``ids [B, T]``."""
        with torch.inference_mode():
            logits = self.model(ids[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return float(loss.double().exp())


def check_writable(path: str) -> Checkpoint:
    """Open the checkpoint at ``path`` if a model that writes text is there; only headers and a tokenizer are read.

    Raises what ``Checkpoint.open`` and ``class_and_config`` raise, and InputError for a missing tokenizer.
    """
    checkpoint = Checkpoint.open(path)
    class_and_config(checkpoint)
    _tokenizer(checkpoint.path)
    return checkpoint


def prompt_limits(folder: Path, prompt: str) -> Limits:
    """Return the least power of two that a prompt fits in, at most 512: fewer kinds of batches are fewer kernels."""
    return Limits(max_tokens=min(512, 1 << max(0, len(_tokenizer(folder).encode(prompt).ids) - 1).bit_length()))


def _tokenizer(where: Path) -> Any:
    """Return the tokenizer beside the weights, of a GGUF file without one that of its metadata."""
    file = gguf_file(where)
    path = (where if where.is_dir() else where.parent) / "tokenizer.json"
    if file is not None and not path.is_file():
        extra("gguf", group="gguf")
        path = file
    elif not path.is_file():
        raise InputError(f"{where}: no tokenizer.json; text needs the tokenizer that the model was published with")
    return _read_tokenizer(path, path.stat().st_mtime_ns)


def _gguf_tokenizer(transformers: Any, path: Path) -> Any:
    read = transformers.AutoTokenizer.from_pretrained
    return read(path.parent, gguf_file=path.name, trust_remote_code=False).backend_tokenizer


@lru_cache(maxsize=1)
def _read_tokenizer(path: Path, _written: int) -> Any:
    """Read the file once for all that ask, again when it was written since: megabytes for a large vocabulary."""
    package = extra("transformers" if path.suffix == ".gguf" else "tokenizers")
    try:
        if path.suffix == ".gguf":
            return _gguf_tokenizer(package, path)
        return package.Tokenizer.from_file(str(path))
    except Exception as error:  # the packages raise plain Exception
        raise InputError(
            f"{path}: its tokenizer cannot be read: {error}; download it again, or put the tokenizer.json that the "
            "model was published with beside it"
        ) from error
