"""Threads that start kernels for the first time: what Triton loads for them is loaded one after the other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collegium.runtime import launch as launching


class _Triton:
    """Compiles as slowly as it likes, and hands out what it loaded last, as Triton's importer does."""

    def __init__(self) -> None:
        self.loaded: Any = None
        self.compiling = 0
        self.most = 0
        self.lock = threading.Lock()


class _Launcher:
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Any) -> None:
        self.launch = launch

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


class _Compiled:
    def __init__(self, triton: _Triton, name: int) -> None:
        self.triton, self.name, self.function, self.packed_metadata = triton, name, name, None
        self._run: Any = None

    @property
    def run(self) -> Any:
        if self._run is None:
            self.triton.loaded = self.name
            time.sleep(0.002)
            found = self.triton.loaded

            def start(*arguments: Any) -> None:
                assert found == self.name, f"kernel {self.name} is started by the function of {found}"

            self._run = _Launcher(start)
        return self._run


class _Kernel:
    arg_names = ("x", "SIZE")

    def __init__(self, triton: _Triton, name: int) -> None:
        self.triton, self.compiled, self.name = triton, _Compiled(triton, name), name
        self.made = False

    def warmup(self, *args: Any, grid: tuple[int, ...], **keywords: Any) -> _Compiled:
        if not self.made:
            with self.triton.lock:
                self.triton.compiling += 1
                self.triton.most = max(self.triton.most, self.triton.compiling)
            time.sleep(0.02)
            with self.triton.lock:
                self.triton.compiling -= 1
            self.made = True
        return self.compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **keywords: Any) -> _Compiled:
            made = self.warmup(*args, grid=grid, **keywords)
            made.run.launch(*args)
            return made

        return run


def test_kernels_compile_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_direct", lambda: True)
    monkeypatch.setattr(launching, "watched", lambda: False)
    monkeypatch.setattr(launching, "_variants", {})
    monkeypatch.setattr(launching.torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    triton = _Triton()
    kernels = [_Kernel(triton, number) for number in range(32)]
    x = torch.zeros(4)

    def start(kernel: _Kernel) -> None:
        for _ in range(3):
            launching.launch(kernel, (1,), (x,), {"SIZE": 4})

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(start, kernels))
    assert triton.most > 1


@pytest.mark.parametrize(("version", "warnings"), [("3.6.0", 0), ("3.9.1", 0), ("3.10.0", 1), ("3.60.0", 1)])
def test_untested_triton_is_named_once(version: str, warnings: int, monkeypatch: Any, caplog: Any) -> None:
    stand_in = SimpleNamespace(__version__=version, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    monkeypatch.setattr(launching, "import_module", lambda _: stand_in)
    cached = (launching._direct, launching._runtime, launching._warn_once)
    for function in cached:
        function.cache_clear()
    try:
        assert [launching._direct() for _ in range(3)] == [True] * 3
    finally:
        for function in cached:
            function.cache_clear()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == warnings
    assert all(version in line for line in lines)
