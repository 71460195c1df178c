"""Kernels in CUDA are compiled where they run, kept in the cache of the user, and missed by name without NVRTC."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from collegium.errors import PlanError
from collegium.planning import plan
from collegium.problem import DeviceFacts, Problem
from collegium.runtime import nvrtc
from collegium.runtime.machine import machine_for
from collegium.runtime.user_cache import cache_folder
from collegium.types import MoESpec, RoutingSpec
from raising import raises_with

TEXT = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }\n'
NEEDED = pytest.mark.skipif(not nvrtc.nvrtc_found(), reason="needs NVRTC")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "collegium" / "kernels"


def code_of(factor: int = 2) -> bytes:
    return nvrtc._cached_code(TEXT, "twice", {"FACTOR": factor})


@NEEDED
def test_compiled_code_is_cached_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of()
    assert code.startswith(b"\x7fELF")
    (path,) = folder.iterdir()
    monkeypatch.setattr(nvrtc, "compiled", lambda *_: pytest.fail("it is compiled again"))
    assert code_of() == code
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    assert code_of(3) != code
    assert len(list(folder.iterdir())) == 2
    # A file that was cut off is another one.
    path.write_bytes(path.read_bytes()[:-7])
    assert code_of() == code


@NEEDED
def test_read_only_cache_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert code_of().startswith(b"\x7fELF")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert not cache_folder("kernels").exists()
    assert code_of().startswith(b"\x7fELF")


@NEEDED
def test_error_includes_compiler_output(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"does not compile twice: (.|\n)*FACTOR(.|\n)*error"):
        nvrtc._cached_code(TEXT, "twice", {})
    assert not folder.exists()


def test_without_nvrtc_small_tiles_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MoESpec(hidden_size=512, intermediate_size=256, num_experts=8, routing=RoutingSpec(top_k=2))
    found = {}
    for there in (True, False):
        facts = DeviceFacts(kind="cuda", name="a GPU", capability=(9, 0), nvrtc=there)
        assert machine_for(facts).compiles == there
        found[there] = plan(Problem(spec=spec, device=facts))
    assert {stretch.tiles for stretch in found[True].token_ranges} == {"small tiles", "large tiles"}
    assert {stretch.tiles for stretch in found[False].token_ranges} == {"small tiles"}
    assert re.search("a GPU.*NVRTC.*nvidia-cuda-nvrtc", found[False].explain())
    assert "NVRTC" not in found[True].explain()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: None)
    assert not nvrtc.nvrtc_found()
    with raises_with(PlanError, "CUDA", "NVRTC", "nvidia-cuda-nvrtc"):
        nvrtc.compiled(TEXT, "twice", {})


def test_nvrtc_located_in_wheel_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of CUDA 13 and of CUDA 12 have other folders; only the one that torch was built for is taken."""
    for name in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    asked: list[str] = []

    def load(name: str, *_: int) -> None:
        asked.append(name)
        raise OSError(name)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr(nvrtc, "find_spec", lambda _: spec)
    for version, wanted in (("12.8", "cuda_nvrtc/lib/libnvrtc.so.12"), ("13.0", "cu13/lib/libnvrtc.so.13")):
        asked.clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        assert nvrtc._nvrtc.__wrapped__() is None
        assert asked == [str(tmp_path / "nvidia" / wanted), f"libnvrtc.so.{version[:2]}"]
