"""Recorded launches: what is repeated, what is not, and that both give the same.

A stand-in for a compiled kernel multiplies float32 numbers at the addresses it is given, as Triton's C function would
start a kernel with them; it needs no GPU, and it reads an address that should have been exchanged as it stands there.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from collegium.runtime import launch as launching, nvrtc
from collegium.runtime.launch import launch
from collegium.runtime.memory import Region, Workspace, memory_map
from collegium.runtime.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
PLACES = memory_map((Region("middle", 1 << 10),))
STREAM = 7
triton: Any = pytest.importorskip("triton")


class Kernel:
    """``out[i] = x[i] * w[i]`` for ``count`` numbers; ``scratch``: bytes of memory that Triton allocates for it."""

    arg_names = ("x", "w", "out", "count", "FACTOR")

    def __init__(self, scratch: int = 0, launcher: str = "3.6") -> None:
        self.scratch = scratch
        self.launcher = launcher
        self.streams: list[int] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def through_triton(*args: Any, FACTOR: int, num_warps: int, enable_fp_fusion: bool) -> Any:
            assert enable_fp_fusion
            self._multiply(*args)
            launcher = {"3.6": Launcher36, "3.9": Launcher39, "unknown": UnknownLauncher}[self.launcher]
            run = launcher(self._from_c, self.scratch)
            return SimpleNamespace(run=run, function=11, packed_metadata=(num_warps, 1, 0))

        return through_triton

    def _from_c(self, *passed: Any) -> None:
        x, y, z, stream, function, *rest = passed
        assert (x, y, z, function) == (3, 1, 1, 11)
        rest = tuple(rest)
        if self.launcher == "3.6":
            assert rest[2:8] == (self.scratch or None, None, (4, 1, 0), None, None, None)
            arguments = rest[8:]
        else:
            assert rest[2:10] == ((4, 1, 0), None, None, None, self.scratch or None, None, b"annotations", b"signature")
            (arguments,) = rest[10:]
        assert rest[:2] == (False, True)
        assert arguments[4:] in ((5,), [5])
        self.streams.append(stream)
        self._multiply(*arguments[:4])

    def _multiply(self, x: Any, w: Any, out: Any, count: int) -> None:
        given, weights, result = (_numbers(place, count) for place in (x, w, out))
        for i in range(count):
            result[i] = given[i] * weights[i]


class Launcher36:
    """Triton's launcher in Python up to release 3.6: the C function takes a kernel's arguments one by one."""

    def __init__(self, launch: Callable[..., None], scratch: int) -> None:
        self.launch = launch
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        scratch = self.global_scratch_size or None
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, scratch, None, *rest)


class Launcher39(Launcher36):
    """From 3.7 on the C function takes a kernel's arguments as one sequence, after what describes them."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        ways = (self.launch_cooperative_grid, self.launch_pdl)
        scratch = self.global_scratch_size or None
        describing = (b"annotations", b"signature")
        self.launch(x, y, z, stream, function, *ways, *rest[:4], scratch, None, *describing, rest[4:])


class UnknownLauncher(Launcher36):
    """A launcher of a later release, which takes other arguments itself."""

    def __call__(self, grid: tuple[int, int, int], stream: int, function: int) -> None:
        raise AssertionError("only Triton knows what it takes")


def _numbers(place: Any, count: int) -> Any:
    address = place if isinstance(place, int) else place.data_ptr()
    return (ctypes.c_float * count).from_address(address)


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_direct", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)


class Pass:
    """x * w * w through a buffer of a workspace, with ``extra`` in between; counts how often it is called."""

    def __init__(self, extra: Callable[..., object] = lambda *_: None, scratch: int = 0, launcher: str = "3.6") -> None:
        self.kernel = Kernel(scratch, launcher)
        self.weight = torch.full((64,), 2.0)
        self.space = Workspace(CPU, PLACES.nbytes)
        self.extra = extra
        self.calls = 0

    def __call__(self, inputs: Any) -> None:
        x, _, out = inputs
        self.calls += 1
        middle = self.space.memory(PLACES).alloc("middle", (x.numel(),), torch.float32)
        self._multiply(x, middle)
        self.extra(x, middle)
        self._multiply(middle, out)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        launch(self.kernel, (3,), (x, self.weight, out, x.numel()), {"FACTOR": 5}, num_warps=4)


def give(replay: Replay, one: Pass, x: torch.Tensor, out: torch.Tensor | None = None) -> None:
    made = torch.empty(x.shape) if out is None else out
    wanted = x * 4
    replay(one, (x, None, made))
    assert torch.equal(made, wanted)


def numbers(count: int) -> torch.Tensor:
    """Fresh numbers at the start of memory that is aligned like the allocator's."""
    return torch.rand(count)


@pytest.mark.parametrize("launcher", ["3.6", "3.9"])
def test_third_call_is_repeated(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, one = Replay(), Pass(launcher=launcher)
    for _ in range(2):
        give(replay, one, numbers(8))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM + 1, raising=False)
    kept = [(numbers(8), torch.empty(8)) for _ in range(5)]
    for x, out in kept:
        give(replay, one, x, out)
    assert one.calls == 2
    assert one.kernel.streams[-10:] == [STREAM + 1] * 10
    assert all(torch.equal(out, x * 4) for x, out in kept)


class Operands(NamedTuple):
    x: Any
    w: Any
    scale: Any


class TupleKernel(Kernel):
    """The same kernel, whose operands, and output and count, are tuples."""

    arg_names = ("operands", "result", "FACTOR")

    def _from_c(self, *passed: Any) -> None:
        operands, result, factor = passed[-1] if self.launcher == "3.9" else passed[-3:]
        assert type(operands) is tuple or isinstance(operands, Operands)
        assert operands[2] is None
        assert factor == 5
        self.streams.append(passed[3])
        self._multiply(operands, result)

    def _multiply(self, *passed: Any) -> None:
        operands, (out, count) = passed
        super()._multiply(operands[0], operands[1], out, count)


class TuplePass(Pass):
    def __init__(self, launcher: str) -> None:
        super().__init__(launcher=launcher)
        self.kernel = TupleKernel(launcher=launcher)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        args = (Operands(x, self.weight, None), (out, x.numel()))
        launch(self.kernel, (3,), args, {"FACTOR": 5}, num_warps=4)


@pytest.mark.parametrize("launcher", ["3.6", "3.9"])
def test_tensors_in_tuples_are_exchanged(launcher: str) -> None:
    replay, one = Replay(), TuplePass(launcher)
    results = []
    for _ in range(6):
        x, out = numbers(8), torch.empty(8)
        give(replay, one, x, out)
        results.append((x, out))
    assert one.calls == 2
    assert all(torch.equal(out, x * 4) for x, out in results)


def test_kinds_in_tuples_are_compiled_apart() -> None:
    one = TuplePass("3.6")
    block = torch.rand(64)
    for x in (numbers(8), block[1:9], numbers(8), block[2:10], numbers(9)):
        one._multiply(x, torch.empty(x.shape))
    (variant,) = [variant for variant in launching._variants.values() if variant._kernel is one.kernel]
    assert len(variant._launchers) == 2  # with an aligned and an unaligned address


@pytest.mark.parametrize("launcher", ["3.6", "3.9"])
def test_aliases_in_tuples_are_never_repeated(launcher: str) -> None:
    one = TuplePass(launcher)
    one.extra = lambda x, middle: one._multiply(x[:4], middle[:4])
    replay = Replay()
    for _ in range(5):
        x, out = numbers(8), torch.empty(8)
        replay(one, (x, None, out))
        assert torch.equal(out, x * 4)
    assert one.calls == 5


def test_calls_may_write_to_their_input() -> None:
    replay, one = Replay(), Pass()
    for _ in range(4):
        x = numbers(8)
        give(replay, one, x, x.view(8))
        give(replay, one, numbers(8))
    assert one.calls == 2


def test_every_kind_is_recorded_by_itself() -> None:
    replay, one = Replay(), Pass()
    block = torch.rand(64)
    kinds = [lambda: numbers(8), lambda: numbers(9), lambda: block[1:9], lambda: block[2:10], lambda: block.view(8, 8)]
    for count, make in enumerate(kinds, start=1):
        for _ in range(4):
            give(replay, one, make())
        assert one.calls == 2 * count
    for count, other in enumerate((block[:16:2], numbers(8).view(torch.int32)), start=1):
        replay(one, (other, None, torch.empty(8)))
        assert one.calls == 2 * len(kinds) + count


@pytest.mark.parametrize(
    "extra",
    [
        lambda x, _: x + 1,
        lambda x, _: x.sum().item(),
        lambda _, middle: middle.mul_(1.0),
        lambda x, _: torch.cat([x, x]),
        lambda x, _: torch.zeros(3),
        lambda x, _: x.view(2, 4).t().contiguous(),
        lambda x, _: x.view(2, 4).t().reshape(8),
        lambda x, _: x.to(torch.float64),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_passes_through_torch_are_not_recorded(extra: Callable[..., object], inference: bool) -> None:
    replay, one = Replay(), Pass(extra)
    with torch.inference_mode(inference):
        for _ in range(5):
            give(replay, one, numbers(8))
    assert one.calls == 5


@pytest.mark.parametrize("inference", [False, True])
def test_views_are_no_computation(inference: bool) -> None:
    def extra(x: torch.Tensor, middle: torch.Tensor) -> None:
        assert x.view(2, 4).reshape(8).contiguous()[1:].split([3, 4])[0].is_contiguous()
        assert middle.view(torch.int32).flatten().to(torch.int32).detach().dtype == torch.int32

    replay, one = Replay(), Pass(extra)
    with torch.inference_mode(inference):
        for _ in range(5):
            give(replay, one, numbers(8))
    assert one.calls == 2


def test_views_of_caller_memory_not_replayed() -> None:
    one = Pass()
    one.extra = lambda x, middle: one._multiply(x[:4], middle[:4])
    replay = Replay()
    for _ in range(5):
        x, out = numbers(8), torch.empty(8)
        replay(one, (x, None, out))
        assert torch.equal(out, x * 4)
    assert one.calls == 5


def test_aliased_arguments_are_not_replayed() -> None:
    replay, one = Replay(), Pass()
    for _ in range(5):
        x = numbers(8)
        give(replay, one, x, x)
    assert one.calls == 5


@pytest.mark.parametrize("launcher", ["3.6", "3.9"])
def test_scratch_memory_prevents_repetition(launcher: str) -> None:
    replay, one = Replay(), Pass(scratch=128, launcher=launcher)
    for _ in range(5):
        give(replay, one, numbers(8))
    assert one.calls == 5


def test_unknown_launcher_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    launching._warn_once.cache_clear()
    replay, one = Replay(), Pass(launcher="unknown")
    for _ in range(5):
        give(replay, one, numbers(8))
    assert one.calls == 5
    assert len(caplog.records) == 1


def test_started_kernels_are_kept() -> None:
    # Triton 3.8 and later unload the code of a compiled kernel that is freed.
    kernel, x = Kernel(), numbers(8)
    launch(kernel, (3,), (x, x, torch.empty(8), 8), {"FACTOR": 5}, num_warps=4)
    (variant,) = [variant for variant in launching._variants.values() if variant._kernel is kernel]
    (started,) = variant._launchers.values()
    assert started.compiled.function == 11


def test_kernels_compile_once_across_threads() -> None:
    inside: list[int] = []
    most: list[int] = []

    class Slow(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            through_triton = super().__getitem__(grid)

            def compiling(*args: Any, **options: Any) -> Any:
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.02)
                inside.pop()
                return through_triton(*args, **options)

            return compiling

    kernel, x = Slow(), numbers(8)
    outs = [torch.zeros_like(x) for _ in range(6)]

    def start(out: torch.Tensor) -> None:
        launch(kernel, (3,), (x, x, out, 8), {"FACTOR": 5}, num_warps=4)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(start, outs))
    assert max(most) == 1
    assert all(torch.equal(out, x * x) for out in outs)


def test_hooks_see_every_launch(monkeypatch) -> None:
    replay, one = Replay(), Pass()
    for _ in range(3):
        give(replay, one, numbers(8))
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda _: None)
    streams = len(one.kernel.streams)
    give(replay, one, numbers(8))
    assert one.calls == 3
    assert len(one.kernel.streams) == streams, "Triton launches and calls its hooks"
    monkeypatch.undo()


def test_failed_recordings_are_repeated() -> None:
    replay, one = Replay(), Pass()
    give(replay, one, numbers(8))
    kept, one.extra = one.extra, lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        give(replay, one, numbers(8))
    one.extra = kept
    for _ in range(3):
        give(replay, one, numbers(8))
    assert one.calls == 3


def test_recorded_buffers_outlive_the_workspace() -> None:
    replay, one = Replay(), Pass()
    for _ in range(2):
        give(replay, one, numbers(8))
    larger = memory_map((Region("before", 1 << 20), *PLACES.regions))
    one.space = Workspace(CPU, larger.nbytes)
    one.space.memory(larger).alloc("before", (1 << 20,), torch.uint8).fill_(255)
    give(replay, one, numbers(8))
    one.space, one.weight = Workspace(CPU, PLACES.nbytes), torch.empty(0)
    taken = [torch.full((64,), torch.nan) for _ in range(50)]
    for _ in range(3):
        give(replay, one, numbers(8))
    assert one.calls == 2
    assert all(bool(tensor.isnan().all()) for tensor in taken)


def test_recordings_belong_to_one_workspace() -> None:
    replay, one = Replay(), Pass()
    for count, number in enumerate((1, 2), start=1):
        one.space = Workspace(CPU, PLACES.nbytes)
        middle = one.space.memory(PLACES).alloc("middle", (8,), torch.float32)
        for _ in range(4):
            x, out = numbers(8), torch.empty(8)
            middle.fill_(torch.nan)
            replay(one, (x, None, out), number)
            assert torch.equal(out, x * 4)
            assert torch.equal(middle, x * 2)
        assert one.calls == 2 * count


def test_the_oldest_kinds_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr("collegium.runtime.replay._MAX_KINDS", 3)
    replay, one = Replay(), Pass()
    for count in (1, 2, 3, 4, 5):
        for _ in range(3):
            give(replay, one, numbers(count))
    assert len(replay._kinds) == 3
    assert one.calls == 10
    give(replay, one, numbers(1))
    assert one.calls == 11


def test_copies_drop_recordings() -> None:
    replay, one = Replay(), Pass()
    for _ in range(3):
        give(replay, one, numbers(8))
    assert replay._kinds
    assert not copy.deepcopy(replay)._kinds
    assert not copy.copy(replay)._kinds
    assert not pickle.loads(pickle.dumps(replay))._kinds


def test_inside_an_operation_of_torch_library() -> None:
    replay, one = Replay(), Pass()

    @torch.library.custom_op("collegium_test::four_times", mutates_args=("out",))
    def four_times(x: torch.Tensor, out: torch.Tensor) -> None:
        replay(one, (x, None, out))

    for _ in range(5):
        x, out = numbers(8), torch.empty(8)
        four_times(x, out)
        assert torch.equal(out, x * 4)
    assert one.calls == 2


class Driver:
    """Starts ``out[i] = x[i] * w[i]``: x as a tensor map, whose first number is the address here."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.maps = 0

    def cuTensorMapEncodeTiled(self, made: Any, kind: int, rank: int, address: Any, *sizes: Any) -> int:
        self.maps += 1
        ctypes.c_uint64.from_address(made.value).value = address.value
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:
        found = config._obj
        assert (function.value, [*found.blocks], [*found.threads]) == (11, [3, 1, 1], [32, 1, 1])
        assert (found.shared, found.attribute_count) == (64, 1)
        attribute = found.attributes[0]
        assert (attribute.name, attribute.value[0]) == (6, 1), "it starts while the kernel before it ends"
        self.streams.append(found.stream)
        (x,) = (ctypes.c_uint64 * 1).from_address(arguments[0])
        w, nothing, out = (ctypes.c_void_p * 3).from_address(arguments[1])
        (count,) = (ctypes.c_int * 1).from_address(arguments[2])
        assert nothing is None
        found, weights, result = (_numbers(place, count) for place in (x, w, out))
        for i in range(count):
            result[i] = found[i] * weights[i]
        return 0


class _Count(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int),)


@pytest.mark.parametrize("between", [False, True])
def test_a_kernel_in_cuda_is_repeated(monkeypatch: pytest.MonkeyPatch, between: bool) -> None:
    """With memory of the caller it copies from and writes to, or with the workspace's between two other kernels."""
    driver, one = Driver(), Pass()
    nvrtc._tensor_maps.cache_clear()  # maps of other drivers
    kernel: Any = SimpleNamespace(shared=64, on=lambda *_: ctypes.c_void_p(11))
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())

    def start(x: torch.Tensor, out: torch.Tensor) -> None:
        boxes = nvrtc.Boxes(torch.bfloat16, 1, x.numel(), 256, 8)
        nvrtc.start(kernel, {}, (3, 32), (x, one.weight, None, out), (boxes, 3, _Count(x.numel())))

    if between:
        one.extra = lambda _, middle: start(middle, middle)
    else:
        one._multiply = start
    replay = Replay()
    kept = [(numbers(8), torch.empty(8)) for _ in range(6)]
    for x, out in kept:
        replay(one, (x, None, out))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM + 1, raising=False)
    x, out = kept[3]
    replay(one, (x.fill_(3.0), None, out))
    assert one.calls == 2
    each = 1 if between else 2
    assert driver.streams == [STREAM] * 6 * each + [STREAM + 1] * each
    assert driver.maps == (1 if between else 7), "each address is described once: six of callers, one of the workspace"
    assert all(torch.equal(out, x * (8 if between else 4)) for x, out in kept)
