"""Compile what benchmarks and tests start on a GPU on a machine without one, whose time costs less.

    python tests/gpu/compile_ahead.py CACHE --recipes mxfp4:bf16 gguf@Q8_0:bf16 --shapes qwen3_30b --tokens 1 512
    python tests/gpu/compile_ahead.py CACHE --tests tests/gpu/test_experts.py tests/gpu/test_layer.py

Host code runs as it would beside an H100 or H200, on tensors of the CPU (``tests/shared/launches.py``), and what it
would start is compiled into the folder CACHE. With CACHE there, under the same path, a machine with the GPU and the
same release of Triton finds it:

    TRITON_CACHE_DIR=CACHE PYTHONPATH=src:tests/gpu/ahead python -m pytest tests/gpu

Tests that look at results fail here, and what only their later lines would start is compiled there, as ever.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from pkgutil import walk_packages
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/gpu/ahead", "src", "tests/shared", "benchmarks")]
os.environ |= {"TRITON_INTERPRET": "0", "TRITON_STORE_BINARY_ONLY": "1"}

import sitecustomize  # noqa: F401  (Triton's key)
import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

import collegium
from launches import Launches, Variant, layer_on, pretending

__all__ = ["main", "noted_of_recipe", "noted_of_tests"]

_TARGET = GPUTarget("cuda", 90, 32)
_GPU = types.SimpleNamespace(
    name="pretended", major=9, minor=0, total_memory=150 << 30, multi_processor_count=132, L2_cache_size=50 << 20
)
Noted = tuple[str, str, dict[str, Any], list[Any], dict[str, Any]]  # module and name of a kernel, and how it is called


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are on the CPU, and results that were not computed are as they should be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "equal":
            return True
        if name == "isfinite":
            return torch.ones_like(args[0], dtype=torch.bool)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*(map(_on_cpu, args) if name == "to" else args), **kwargs)


def _on_cpu(given: Any) -> Any:
    return torch.device("cpu") if str(given).startswith("cuda") else given


def noted_of_tests(paths: list[str]) -> list[Noted]:
    """Return what the GPU tests in ``paths`` would start, as far as they come."""
    import pytest

    class _Pretended:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self) -> Any:
            with _OnCpu():
                yield

    for module in walk_packages(collegium.__path__, "collegium."):
        if "integrations" not in module.name and "__main__" not in module.name:
            import_module(module.name)
    seen: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0}
    seen |= {"get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: _GPU}
    seen |= {"synchronize": lambda *_: None, "empty_cache": lambda: None, "get_device_name": lambda *_: _GPU.name}
    patches = [patch.object(torch.cuda, name, new) for name, new in seen.items()]
    patches.append(patch.object(import_module("collegium.testing.compare"), "relative_error", lambda *_: 0.0))
    with pretending() as launches:
        # Rows are really put in order, or no batch would have sizes.
        patches.append(patch.object(import_module("collegium.ops.permute"), "on_device", lambda *_: False))
        for each in patches:
            each.start()
        options = ["-q", "-o", "addopts=", "-W", "ignore", "--tb=no", "-p", "no:cacheprovider", *paths]
        pytest.main(options, plugins=[_Pretended()])
        for each in patches:
            each.stop()
    return _rows(launches)


def noted_of_recipe(shape: str, recipe: str, tokens: list[int]) -> list[Noted]:
    """Return what ``benchmarks/bench_layer.py`` would start for a recipe."""
    from bench_layer import encoded_as
    from collegium.commands import bench
    from collegium.formats.unquantised import DTYPES
    from collegium.types import Routing

    interleave = import_module("collegium.experts.triton.packing.interleave")
    dummy_weights = import_module("collegium.dummy.weights")
    weights, activations = bench.recipe_of(recipe)
    _, spec = bench.named_layer(shape)
    spec = replace(spec, weight_format=encoded_as(weights))

    def clear(lanes: torch.Tensor, *_: Any) -> None:
        lanes.zero_()

    # Which numbers there are does not matter: one expert is made, and no code is re-laid.
    with (
        pretending() as launches,
        patch.object(dummy_weights, "_DISTINCT_EXPERTS", 1),
        patch.object(interleave, "_fill", clear),
    ):
        layer = layer_on(spec, activations, limit=max(tokens))
        for count in tokens:
            ids = torch.rand(count, spec.num_experts).topk(spec.routing.top_k).indices
            routing = Routing(topk_ids=ids, topk_weights=torch.rand(ids.shape))
            with torch.inference_mode():
                layer(torch.zeros(count, spec.hidden_size, dtype=DTYPES[layer.plan.problem.dtype]), routing=routing)
    return _rows(launches)


def _rows(launches: Launches) -> list[Noted]:
    made = (v for v in launches.found.values() if isinstance(v, Variant))  # NVRTC takes a second beside the GPU
    return [(v.kernel.__module__, v.kernel.__name__, v.arguments, v.kinds, v.options) for v in made]


def _compile(noted: Noted) -> str:
    """Compile one kernel; return what is wrong with it, or nothing."""
    module, name, arguments, kinds, options = noted
    kernel = getattr(import_module(module), name)
    try:
        Variant(kernel=kernel, arguments=arguments, kinds=kinds, options=options).compile(_TARGET)
    except Exception as fault:  # the others are still compiled
        return f"{name}: {type(fault).__name__}: {fault}"[:300]
    return ""


def main() -> int:
    """Compile what is asked for; 1 when a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--tests", nargs="+", default=[], help="files of tests/gpu")
    parser.add_argument("--recipes", nargs="+", default=[], help="as benchmarks/bench_layer.py takes them")
    parser.add_argument("--shapes", nargs="+", default=["qwen3_30b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(asked.cache.resolve())
    noted = noted_of_tests(asked.tests) if asked.tests else []
    for shape in asked.shapes:
        for recipe in asked.recipes:
            noted += noted_of_recipe(shape, recipe, asked.tokens)
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(_compile, noted, chunksize=4) if fault]
    print(*faults, f"{len(noted)} kernels, {len(faults)} did not compile", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
