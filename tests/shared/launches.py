"""Which kernels a layer would start on a GPU, with which arguments, found on a machine without one.

Host code runs as it would there, on tensors of the CPU that say they are on a GPU; launches are noted instead of
started. What is noted of a launch is what Triton compiles for: its own code decides which arguments are alike. Needs
a process where Triton's interpreter does not stand in (``compile_apart``).
"""

from __future__ import annotations

import sys
import threading
import types
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from collegium.commands.bench import planned_layer
from collegium.dummy.weights import random_weights
from collegium.layer import MoELayer
from collegium.problem import DeviceFacts
from collegium.runtime.launch import compile_options
from collegium.runtime.machine import machine_of
from collegium.runtime.nvrtc import compiled
from collegium.types import MoESpec

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from collegium.runtime.nvrtc import CudaKernel

__all__ = ["CudaVariant", "Launches", "Variant", "layer_on", "pretending"]

_HOMES = ("collegium.runtime.launch", "collegium.runtime.machine")  # ask torch, and are asked through others


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What Triton compiles once: a kernel and what it knows of the arguments."""

    kernel: Any
    arguments: dict[str, Any]
    kinds: list[Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name, its compile-time arguments and what is special about the others."""
        pairs = zip(self.kernel.params, self.kinds, strict=True)
        fixed = {p.name: self.arguments[p.name] if kind[0] == "constexpr" else kind for p, kind in pairs}
        said = (f"{name}={_text_of(value)}" for name, value in fixed.items())
        return f"{self.kernel.__name__}({', '.join(said)})"

    def compile(self, target: GPUTarget) -> Any:
        """Return what Triton makes of it; raises what Triton raises."""
        packed = self.kernel._pack_args(make_backend(target), self.options, self.arguments, self.kinds, None)
        options, signature, fixed, attributes = packed
        return triton.compile(ASTSource(self.kernel, signature, fixed, attributes), target, options.__dict__)


def _text_of(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(map(_text_of, value))


def _without_tensors(value: Any) -> Any:
    """Return an argument without its tensors, also those in a named tuple."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple):
        fields = map(_without_tensors, value)
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    return value


@dataclass(frozen=True, kw_only=True)
class CudaVariant:
    """What NVRTC compiles once: a kernel of large batches, and its constants."""

    cuda: CudaKernel
    arguments: dict[str, int]
    options: tuple[()] = ()

    @property
    def kernel(self) -> Any:
        """What has the kernel's name and module."""
        return types.SimpleNamespace(__name__=self.cuda.name, __module__=f"collegium.kernels.{self.cuda.name}")

    @property
    def name(self) -> str:
        """The kernel's name and constants."""
        return f"{self.cuda.name}({', '.join(f'{name}={value}' for name, value in self.arguments.items())})"

    def compile(self, _: GPUTarget) -> Any:
        """Return what NVRTC makes of it; raises what it says."""
        source = self.cuda.source(self.arguments)
        return types.SimpleNamespace(asm={"cubin": compiled(source, self.cuda.name, self.arguments)[0]})


class Launches:
    """Every launch since it was made, alike ones once."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        self.found: dict[tuple[Any, ...], Variant | CudaVariant] = {}
        self._binders: dict[int, Any] = {}
        self._lock = threading.Lock()

    def note(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any], **options: Any
    ) -> None:
        """Take the place of ``runtime.launch.launch``."""
        assert all(size > 0 for size in grid), (kernel.__name__, grid)
        keywords = compile_options(constants, options)
        with self._lock:
            bind = self._binders.get(id(kernel))
            if bind is None:
                bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(self.target))
                self._binders[id(kernel)] = bind
            arguments, kinds, _ = bind(*args, **constants, **keywords)
            key = (kernel.__name__, *kinds, *keywords.items())
            if key not in self.found:
                held = {name: _without_tensors(value) for name, value in arguments.items()}
                self.found[key] = Variant(kernel=kernel, arguments=held, kinds=kinds, options=keywords)

    def note_cuda(
        self,
        kernel: CudaKernel,
        constants: Mapping[str, int],
        sizes: tuple[int, int],
        tensors: Sequence[Any],
        forms: Sequence[Any],
    ) -> None:
        """Take the place of ``runtime.nvrtc.start``."""
        maps = sum(isinstance(form, tuple) for form in forms)
        assert len(tensors) == maps + sum(form for form in forms if isinstance(form, int))
        assert len(forms) == maps + 5
        assert sizes[0] % 2 == 0
        with self._lock:
            self.found[kernel.name, *constants.items()] = CudaVariant(cuda=kernel, arguments=dict(constants))

    def names(self) -> set[str]:
        """Return the name of every variant noted."""
        return {variant.name for variant in self.found.values()}


@contextmanager
def pretending(capability: tuple[int, int] = (9, 0), sms: int = 132) -> Generator[Launches]:
    """Let every tensor seem to be on a GPU of ``capability`` inside the block, and note launches."""
    launches = Launches(capability)
    machine = machine_of(capability, sms)
    replaced: dict[str, Any] = {
        "launch": launches.note,
        "start": launches.note_cuda,
        "on_device": lambda _, least=(8, 0): capability >= least,
        "overlaps": lambda _: capability >= (9, 0),
        "machine_at": lambda _: machine,
    }
    rooms = [room for name, room in list(sys.modules.items()) if name.startswith("collegium.")]
    rooms = [room for room in rooms if room.__name__ not in _HOMES]
    patches = [patch.object(room, name, new) for room in rooms for name, new in replaced.items() if hasattr(room, name)]
    patches.append(patch.object(torch.Tensor, "is_cuda", True))
    for each in patches:
        each.start()
    try:
        yield launches
    finally:
        for each in patches:
            each.stop()


def layer_on(
    spec: MoESpec, activations: str, capability: tuple[int, int] = (9, 0), *, limit: int = 8192, **parts: Any
) -> MoELayer:
    """Return a layer of ``spec`` packed for a GPU of ``capability``, whose tensors are on the CPU."""
    facts = DeviceFacts(kind="cuda", name="pretended", capability=capability, memory=1 << 36)
    chosen = planned_layer(spec, (spec.weight_format, activations), facts, limit)
    layer = MoELayer(random_weights(spec, torch.device("cpu")), chosen, **parts)
    # Warming up makes its batches where the plan says the layer is.
    asked = replace(layer.plan.problem, device=replace(facts, kind="cpu"))
    layer.plan = replace(layer.plan, problem=asked)
    return layer
