"""``collegium balance record``: run a model over a text and write what its experts were asked."""

import os
from pathlib import Path
from typing import Any, cast

import torch

from ..balance.report import LoadReport, look_at_load
from ..errors import InputError
from ..integrations.transformers import load_model, recording
from ..problem import Limits
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from .generate import Writer, check_writable

__all__ = ["record_load"]


def record_load(
    model: str,
    out: str,
    *,
    text: str | None = None,
    tokens: int = 256,
    steps: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Run the model in folder ``model`` over a text and write what its experts were asked to the trace ``out``.

    A step is a forward pass over the next ``tokens`` tokens of the file ``text`` (the model's ``heldout.txt`` without);
    what is left at its end is not run. steps: at most as many. Raises InputError, before the model is loaded where it
    can be known, and what ``load_model`` raises.
    """
    checkpoint, file = check_writable(model), Path(out)
    source = checkpoint.path / "heldout.txt" if text is None else Path(text)
    if not source.is_file():
        raise InputError(f"{source}: no such file; name a text to run with --text")
    if not file.parent.is_dir() or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"--out {out}: cannot be written; name a file in a folder that can")
    longest = checkpoint.config.get("max_position_embeddings")
    if isinstance(longest, int) and tokens > longest:
        raise InputError(f"--tokens {tokens}: the model was made for {longest} positions; ask for as many at most")
    loaded = load_model(checkpoint, device=probe(device).place, limits=Limits(max_tokens=tokens))
    writer = Writer(loaded, checkpoint.path)
    windows = writer.windows(source, tokens)[:steps]
    with torch.inference_mode(), recording(loaded) as found:
        for _, window in counted([*enumerate(windows, 1)], progress, "step {0[0]}".format):
            cast("Any", loaded)(window[None], use_cache=False)
    found.trace(checkpoint.path.resolve().name).save(file)
    return look_at_load(out)
