"""Without a GPU, kernels run in Triton's interpreter; Triton must know before anything imports it."""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

from interpreting import hasten

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        hasten()
    importlib.import_module("prefill_on_cpu").install()
