"""What the CUDA driver receives from repeated launches, and from Triton's launcher: printed as JSON, a line each.

Runs on a machine without a GPU, with ``stub_libcuda.c`` in place of the driver, in a process of its own
(``tests/cpu/test_driver_launches.py`` starts it). Each line has the case, and for each launch of a pass the grid, the
attributes, the stream and the parameters, once as Triton passes them and once as the replay does.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from collegium import ActivationSpec, MoESpec, Routing, RoutingSpec
from collegium.runtime import launch as launching, replay as replaying
from collegium.runtime.machine import machine_of
from collegium.runtime.memory import Workspaces
from launches import layer_on

if TYPE_CHECKING:
    from collections.abc import Generator

    from collegium.layer import MoELayer

RECIPES = (("mxfp4", "fp8_token"), ("fp8_block", "fp8_group128"))
TOKENS = (1, 16)  # a pass without and with sorting by expert
CAPABILITY = (9, 0)
STREAM = 7
SCRATCH_POINTERS = 2  # parameters that Triton adds to every kernel
MACHINE_MODULES = ("collegium.runtime.launch", "collegium.runtime.machine")

stub = ctypes.CDLL("libcuda.so.1")


class StubDriver(nvidia.CudaDriver):
    """Triton's driver on the stub: one GPU and one stream."""

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher
        self.get_current_stream = lambda device: STREAM
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_device_capability = lambda device: CAPABILITY

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)


@contextmanager
def gpu_tensors() -> Generator[None]:
    """Let tensors of the CPU count as a GPU's inside the block."""
    machine = machine_of(CAPABILITY, 132)
    replacements: dict[str, Any] = {
        "on_device": lambda _, least=(8, 0): least <= CAPABILITY,
        "overlaps": lambda _: True,
        "machine_at": lambda _: machine,
    }
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("collegium.")]
    modules = [module for module in modules if module.__name__ not in MACHINE_MODULES]
    with ExitStack() as stack:
        for module in modules:
            for name, value in replacements.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", True))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, create=True))
        stack.enter_context(torch.inference_mode())
        yield


def received(widths: list[int]) -> list[Any]:
    """Return what the driver got with the last launch: grid and attributes, stream, parameters of ``widths`` bytes."""
    parameters, config, handles = (ctypes.c_uint64 * 256)(), (ctypes.c_uint * 12)(), (ctypes.c_uint64 * 2)()
    stub.stub_get(parameters, config, handles)
    values = [value & ((1 << 8 * width) - 1) for value, width in zip(parameters, widths, strict=False)]
    return [list(config[:7]), handles[0], values]


def parameter_widths(compiled: Any) -> list[int]:
    """Return the bytes of each parameter of a compiled kernel."""
    types = [kind for kind in flattened(compiled.src.signature.values()) if kind != "constexpr"]
    widths = {"i64": 8, "u64": 8, "i32": 4, "u32": 4, "fp32": 4, "i1": 1, "u1": 1}
    return [8 if kind.startswith("*") else widths[kind] for kind in types] + [8] * SCRATCH_POINTERS


def flattened(kinds: Any) -> list[str]:
    """Return the kinds of all parameters, fields of tuples one by one."""
    return [each for kind in kinds for each in (flattened(kind) if isinstance(kind, tuple) else [kind])]


def triton_launches(call: Any) -> tuple[list[list[Any]], list[list[int]]]:
    """Return what the driver receives when Triton makes every launch of ``call``, and the parameters' widths."""
    launches: list[list[Any]] = []
    widths: list[list[int]] = []

    def start(self: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...]) -> None:
        compiled = self._kernel.warmup(*args, grid=grid, **self._keywords)
        widths.append(parameter_widths(compiled))
        stub.stub_set(len(widths[-1]))
        self._kernel[grid](*args, **self._keywords)
        launches.append(received(widths[-1]))
        launching.noted(None)

    with patch.object(launching._Variant, "start", start), patch.object(replaying, "watched", lambda: True):
        call()
    return launches, widths


def repeated_launches(layer: MoELayer, call: Any, widths: list[list[int]]) -> list[list[Any]]:
    """Return what the driver receives when the pass is repeated from its record."""
    launches: list[list[Any]] = []
    remaining = iter(widths)

    def start(steps: Any, addresses: list[int], device: torch.device) -> None:
        for step in steps:
            width = next(remaining)
            stub.stub_set(len(width))
            one_by_one((step,), addresses, device)
            launches.append(received(width))

    one_by_one = replaying._start
    with patch.object(replaying, "_start", start):
        call()
    return launches


def main() -> None:
    triton.runtime.driver.set_active(StubDriver())
    torch.set_num_threads(1)
    with gpu_tensors():
        for weights, activations in RECIPES:
            spec = MoESpec(
                hidden_size=256,
                intermediate_size=128,
                num_experts=8,
                routing=RoutingSpec(top_k=2),
                activation=ActivationSpec(kind="swiglu"),
                weight_format=weights,
            )
            layer = layer_on(spec, activations, limit=64)
            layer.workspaces = Workspaces(torch.device("cpu"))
            layer.workspaces.reserve(layer.plan.workspace_bytes)
            for tokens in TOKENS:
                x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
                out = torch.empty_like(x)
                ids = torch.tensor([[0, 1]]).expand(tokens, 2).contiguous()
                routing = Routing(topk_ids=ids, topk_weights=torch.ones(tokens, 2))

                def call(layer: MoELayer = layer, x: Any = x, routing: Any = routing, out: Any = out) -> None:
                    layer(x, routing=routing, out=out)

                stub.stub_set(0)  # no parameters of these launches are read: how many there are is not known yet
                for _ in range(3):
                    call()
                by_triton, widths = triton_launches(call)
                by_replay = repeated_launches(layer, call, widths)
                case = f"{weights} {activations} {tokens}"
                launches = {"case": case, "triton": by_triton, "replay": by_replay}
                sys.stdout.write(json.dumps(launches) + "\n")


if __name__ == "__main__":
    main()
