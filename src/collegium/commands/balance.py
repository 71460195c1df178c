"""``collegium balance record``: run a model on a text and record the load of its experts."""

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
    """Run the model in folder ``model`` on a text and write the load of its experts to the trace file ``out``.

    A step is one forward pass over the next ``tokens`` tokens of the file ``text`` (default: the model's
    ``heldout.txt``); a remainder shorter than a step is not run. steps: maximum number of steps. Raises InputError,
    before the model is loaded where possible, and the errors of ``load_model``.
    """
    checkpoint = check_writable(model)
    file = Path(out)
    source = checkpoint.path / "heldout.txt" if text is None else Path(text)
    if not source.is_file():
        raise InputError(f"{source}: no such file; name a text to run with --text")
    if not file.parent.is_dir() or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"--out {out}: cannot be written; name a file in a writable folder")
    max_positions = checkpoint.config.get("max_position_embeddings")
    if isinstance(max_positions, int) and tokens > max_positions:
        raise InputError(f"--tokens {tokens}: the model supports {max_positions} positions; request at most that many")
    loaded = load_model(checkpoint, device=probe(device).place, limits=Limits(max_tokens=tokens))
    writer = Writer(loaded, checkpoint.path)
    windows = writer.windows(source, tokens)[:steps]
    with torch.inference_mode(), recording(loaded) as recorder:
        for _, window in counted([*enumerate(windows, 1)], progress, "step {0[0]}".format):
            cast("Any", loaded)(window[None], use_cache=False)
    recorder.trace(checkpoint.path.resolve().name).save(file)
    return look_at_load(out)
