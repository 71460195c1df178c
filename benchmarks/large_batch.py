"""The product of a large batch in CUDA, beside the one in Triton: the same bits, how long both take, and what takes it.

``large_batch.cu`` is compiled by NVRTC, which PyTorch brings, in about a second a variant, and called in place of
``prefill_gemm``. A time counts only where both give the same bits. With ``--ablate`` the kernel runs with parts of it
left out, which gives wrong numbers and tells what the others cost. Nothing in the library uses this kernel yet.

    python benchmarks/large_batch.py
    python benchmarks/large_batch.py --shapes dsv3 --recipes fp8_block:fp8_group128 --tokens 8192 --ablate
    PYTHONPATH=src:benchmarks python -m pytest -p large_batch tests/gpu/test_prefill.py tests/gpu/test_expanded.py

The last line runs the tests of large batches with it. Rows in memory of the CPU are multiplied there, by the same text
compiled as C++ (``sm90_on_cpu.hpp``), which is what its tests do.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from collegium.commands.bench import named_layer, planned_layer, random_inputs, random_weights, recipe_of
from collegium.commands.measure import driver_version, graph_pool, prepare_pass, take_turns, version_of
from collegium.errors import MeasurementError
from collegium.experts.triton import packed as experts, prefill
from collegium.experts.triton.grouped import bounds_of, kind_of, scales_of, tile_list
from collegium.formats.unquantised import DTYPES
from collegium.kernels.numbers import FAST_MATH, GROUP_CODES, GROUP_SCALE, POWER_CODES, ROWS
from collegium.parallel.local import Local
from collegium.planning import kernel_named
from collegium.runtime.devices import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from collegium.experts.triton.grouped import TileList
    from collegium.experts.triton.matrix import PackedMatrix
    from collegium.experts.triton.packed import PackedExperts
    from collegium.experts.triton.prefill import CodeScales
    from collegium.ops.columns import RowSums
    from collegium.planning import Plan
    from collegium.types import ActivationSpec, ContiguousBatch

SOURCE = Path(__file__).with_suffix(".cu")
INSTRUCTIONS = SOURCE.with_name("sm90.cu")
RESULTS = Path(__file__).parent / "results" / "large_batch_h100.csv"
RECIPES = ("fp8_block:fp8_group128", "bf16:bf16", "mxfp4:bf16")

_SHARED, _UNIT = 227 * 1024, 64
_COLUMNS = 64  # of 16 bits, of a step of the K loop
_triton = prefill.prefill_gemm
_OPERANDS = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float16: 2}
_RESULTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BIASES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# The driver's numbers: element types of a tensor map, and what a function's limit of shared memory is called.
_ELEMENTS = {torch.float8_e4m3fn: 0, torch.bfloat16: 9, torch.float16: 6}
_MOST_SHARED, _SWIZZLE_128, _PROMOTE_256 = 8, 3, 3

# What starts the kernel on a CPU.
_ENTRY = """
extern "C" void run(const Map* x, const Map* w, const Beside* n, const Out* o, const Lists* lists, const Sizes* z) {
    int counters[2] = {0, 0};
    run_cluster([&] { large_batch(*x, *w, counters, *n, *o, *lists, *z); });
    if (counters[0] || counters[1]) std::fprintf(stderr, "counters are left\\n"), std::abort();
}
"""

# What --ablate leaves out, by pieces of the text.
_SAME = (
    ("t.column * SPAN + SPAN / 2 * rank, units", "0 * t.column, units"),
    ("row + second, full", "row, full"),
    ("step * STEP_K, row", "step % 4 * STEP_K, row"),
    ("step / TERMS * STEP_K, t.row + half", "step % 4 * STEP_K, half"),
)
_NO_PRODUCT = (("multiply(d, x, w, k, added || k > 0);", ";"),)
_NO_SCALING = (("for (int j = 0; j < 16; j++) {\n        float2", "for (int j = 0; j < 16; j += 8) {\n        float2"),)
_NO_FACTORS = (("X_SCALE == 1 && here && i < units ?", "false ?"), ("SCALE && here &&", "false &&"))
ABLATIONS = {
    "always the same operands": _SAME,
    "no factors loaded": _NO_FACTORS,
    "no products": _NO_PRODUCT,
    "no scaling": _NO_SCALING,
    "copies alone": _NO_PRODUCT + _NO_SCALING,
    "products alone": _SAME + _NO_SCALING,
}


class Way(NamedTuple):
    """A variant of the kernel: how many groups of warps multiply, and what of its text is replaced."""

    workers: int = 2
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def tile(self) -> int:
        """Rows of a token tile at most."""
        return _UNIT * (4 if self.workers == 2 else 3)


WAYS = {"cuda": Way(), "cuda, three groups": Way(workers=3)}

_lock = threading.Lock()
_way = Way()
_kernels: dict[tuple[object, ...], ctypes.c_void_p] = {}
_counters: dict[torch.device, Tensor] = {}


class _Map(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


def _structure(of: str, kind: Any) -> type[ctypes.Structure]:
    return type("Given", (ctypes.Structure,), {"_fields_": tuple((name, kind) for name in of.split())})


_Beside = _structure("x_scale scale row_scale bias", ctypes.c_void_p)
_Out = _structure("rows row_places scale", ctypes.c_void_p)
_Lists = _structure("expert_offsets tile_expert tile_row tiles_used", ctypes.c_void_p)


class _CpuMap(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("row_bytes", "count", "stride")),
        ("box", ctypes.c_int),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("n_out", "steps", "k_blocks", "scale_rows", "group_t")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "gate_bound", "up_bound")),
    )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    """Return NVRTC, which is where PyTorch finds its own."""
    names = ["libnvrtc.so.13"]
    for folder in (Path(place) / "nvidia" / "cu13" / "lib" for place in sys.path):
        names += [str(path) for path in folder.glob("libnvrtc.so.13")]
        for path in folder.glob("libnvrtc-builtins.so.13*"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # NVRTC asks for it by name alone
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MeasurementError(f"found none of {', '.join(names)}; install nvidia-cuda-nvrtc")


def _done(code: int, what: str) -> None:
    if code:
        raise MeasurementError(f"{what}: CUDA's error {code}")


def _multiply(operand: int) -> str:
    """Return the text of a product of 64 tokens and 128 weight rows."""
    sums = range(64)
    kind, columns = {0: ("e4m3", 32), 1: ("bf16", 16), 2: ("f16", 16)}[operand]
    turned = ", 0, 0" if operand else ""
    outputs, names = ", ".join(f'"+f"(d[{i}])' for i in sums), ", ".join(f"%{i}" for i in sums)
    return (
        '{ asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\\n"'
        f'"wgmma.mma_async.sync.aligned.m64n128k{columns}.f32.{kind}.{kind} {{{names}}}, %64, %65, p, 1, 1{turned}; }}"'
        f' : {outputs} : "l"(x), "l"(w), "r"((int)added)); }}'
    )


def text_of(constants: dict[str, int], left_out: Sequence[tuple[str, str]] = ()) -> str:
    """Return the source for one kind of product; left_out: pieces of it and what replaces them."""
    text = "".join(path.read_text(encoding="utf-8") for path in (INSTRUCTIONS, SOURCE))
    for piece, instead in (("{ MULTIPLY }", _multiply(constants["OPERAND"])), *left_out):
        assert piece in text, piece
        text = text.replace(piece, instead)
    return text


def compiled(text: str, constants: dict[str, int], *more: str) -> tuple[bytes, str]:
    """Return machine code for sm_90a and what the compiler says; more: its options. Needs no GPU."""
    nvrtc, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "--diag-suppress=128", *more]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), SOURCE.name.encode(), 0, None, None)
    _done(made, "nvrtcCreateProgram")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode()
    _done(failed, f"{SOURCE.name} does not compile\n{said}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, said


def _kernel(constants: dict[str, int], device: torch.device) -> ctypes.c_void_p:
    key = (device, _way.left_out, *constants.values())
    with _lock:
        if key not in _kernels:
            cuda, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
            code, _ = compiled(text_of(constants, _way.left_out), constants)
            _done(cuda.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
            _done(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"large_batch"), "cuModuleGetFunction")
            _done(cuda.cuFuncSetAttribute(function, _MOST_SHARED, _SHARED), "cuFuncSetAttribute")
            _kernels[key] = function
        if device not in _counters:
            _counters[device] = torch.zeros(2, dtype=torch.int32, device=device)
        return _kernels[key]


def _map(rows: Tensor, count: int, columns: int, box: int) -> _Map:
    """Describe ``count`` rows of ``columns`` for copies of ``box`` rows of 128 bytes."""
    size = rows.element_size()
    room = (ctypes.c_uint64 * 24)()
    made = _Map.from_buffer(room, -ctypes.addressof(room) % 64)
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(made), _ELEMENTS[rows.dtype], 2, ctypes.c_void_p(rows.data_ptr()), (wide * 2)(columns, count),
        (wide * 1)(rows.stride(-2) * size), (narrow * 2)(128 // size, box), (narrow * 2)(1, 1), 0, _SWIZZLE_128,
        _PROMOTE_256, 0,
    )  # fmt: skip
    _done(code, "cuTensorMapEncodeTiled")
    return made


def constants_of(
    x: Tensor,
    packed: PackedMatrix,
    tiles: TileList,
    out: Tensor,
    x_scale: Tensor | RowSums | None,
    activation: ActivationSpec | None,
    codes: CodeScales | None,
) -> dict[str, int]:
    """Return what the kernel is compiled for."""
    layout = packed.layout
    n_out, kind, placed = layout.shape[2], kind_of(activation), tiles.placed(layout.shape[2])
    scale = scales_of(x_scale, packed.values)[0]
    aligned = n_out % 16 == 0 if codes is not None else n_out % 8 == 0 and out.dtype != torch.float32 and placed != 1
    return {
        "WORKERS": _way.workers,
        "OPERAND": _OPERANDS[x.dtype],
        "OUT": 1 if codes is not None else _RESULTS[out.dtype],
        "SCALE": layout.scale_kind,
        "TERMS": layout.operands,
        "X_SCALE": 0 if x_scale is None else 2 if scale.shape[1] == 1 else 1,
        "ROW_SCALE": int(packed.row_scale is not None and layout.operands == 1),
        "PARTS": layout.shape[1],
        "KIND": kind % FAST_MATH if kind >= 0 else kind,
        "FAST": int(kind >= FAST_MATH),
        "HAS_LIMIT": int(activation is not None and activation.limit is not None),
        "CODES": ROWS if codes is None else POWER_CODES if codes.power else GROUP_CODES,
        "ROUND": int(codes is not None and codes.rounded),
        "PLACED": int(placed > 0),
        "BIAS": 0 if packed.bias is None else _BIASES[packed.bias.dtype],
        "ALIGNED": int(aligned),
    }


def large_batch(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    x_scale: Tensor | RowSums | None = None,
    activation: ActivationSpec | None = None,
    codes: CodeScales | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; the contract is that of ``prefill_gemm``."""
    layout = packed.layout
    count, parts, n_out, k_in = layout.shape
    prefill._check(x, packed, tiles)  # pyright: ignore[reportPrivateUsage]  # the same rows are refused
    grouped = layout.scale_kind == GROUP_SCALE
    if grouped and layout.block_k * layout.operands != 2 * _COLUMNS:
        # Numbers that are looked up, in groups of 32.
        return _triton(x, packed, expert_offsets, tiles, out, x_scale=x_scale, activation=activation, codes=codes)
    constants = constants_of(x, packed, tiles, out, x_scale, activation, codes)
    own = tile_list(expert_offsets, x.shape[0], replace(tiles.tile, block_t=_way.tile))
    used = cast("Tensor", own.used)
    values, scale, row_scale, bias = packed.pointers
    step = 128 // x.element_size()
    steps = 2 * layout.k_blocks if grouped else -(-k_in // step)
    x_scales = scales_of(x_scale, values)[0]
    described = (x, x.shape[0], k_in, 32), (values, count * parts * n_out, layout.operands * k_in, 64)
    arguments: list[Any] = [
        _Beside(*(each.data_ptr() for each in (x_scales, scale, row_scale, bias))),
        _Out(
            out.data_ptr(),
            None if tiles.places is None else tiles.places.data_ptr(),
            None if codes is None else codes.scale.data_ptr(),
        ),
        _Lists(expert_offsets.data_ptr(), own.expert.data_ptr(), own.row.data_ptr(), used.data_ptr()),
        _Sizes(n_out, steps, layout.k_blocks, layout.scale_rows, tiles.tile.group_t, *bounds_of(activation)),
    ]
    if not x.is_cuda:
        maps = [
            _CpuMap(t.data_ptr(), c * t.element_size(), n, t.stride(-2) * t.element_size(), b)
            for t, n, c, b in described
        ]
        _on_cpu(*constants.items()).run(*(ctypes.byref(each) for each in (*maps, *arguments)))
        return out
    function = _kernel(constants, x.device)
    arguments = [*(_map(*each) for each in described), ctypes.c_void_p(_counters[x.device].data_ptr()), *arguments]
    given = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count // 2 * 2
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    code = _driver().cuLaunchKernel(
        function, blocks, 1, 1, 128 * _way.workers + 128, 1, 1, _SHARED, stream, given, None
    )
    _done(code, "cuLaunchKernel")
    return out


@cache
def _on_cpu(*constants: tuple[str, int]) -> ctypes.CDLL:
    """Return the kernel in C++, compiled for this machine by the compiler that is here."""
    options = [f"-D{name}={value}" for name, value in constants]
    text = f'#include "{SOURCE.with_name("sm90_on_cpu.hpp")}"\n#include "{SOURCE}"\n' + _ENTRY
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "large_batch.cpp").write_text(text, encoding="utf-8")
        command = ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", *options, "large_batch.cpp", "-o", "made.so"]
        subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(f"{folder}/made.so")  # which stays in memory


@contextmanager
def multiplying(product: Callable[..., Tensor], way: Way | None = None) -> Generator[None]:
    """Multiply large batches by ``product`` inside the block, this one's kernel in one of its ways."""
    global _way
    before = experts.prefill_gemm, _way
    experts.prefill_gemm, _way = product, way or Way()
    try:
        yield
    finally:
        experts.prefill_gemm, _way = before


def pytest_configure() -> None:
    """Multiply every large batch of a test run by this kernel: what ``-p large_batch`` does."""
    experts.prefill_gemm = prefill.prefill_gemm = large_batch


def packed_as(plan: Plan) -> PackedExperts:
    """Return random experts for a plan, which a kernel in Triton runs."""
    weights = random_weights(plan.problem.spec, torch.device("cuda"))
    return cast("PackedExperts", kernel_named(plan.kernel).pack(weights, plan.problem.routed))


def batch_of(plan: Plan, tokens: int) -> ContiguousBatch:
    """Return random tokens, each at random experts."""
    spec = plan.problem.spec
    x, routing = random_inputs(tokens, spec, "uniform", torch.Generator("cuda").manual_seed(0))[0]
    return Local(num_experts=spec.num_experts).dispatch(x.to(DTYPES[plan.problem.dtype]), routing)[0]


def measured(packed: PackedExperts, batch: ContiguousBatch, *, ablate: bool) -> dict[str, tuple[float, bool]]:
    """Return microseconds of both products of a batch, and whether the bits are Triton's, for every way to run them."""
    device, stop = batch.x.device, int(batch.expert_offsets[-1])
    run, pool = partial(packed.run, batch), graph_pool(device)
    wanted = run()[:stop].clone()
    passes, same = {"triton": prepare_pass([run], device, pool=pool)}, {"triton": True}
    less = {name: Way(left_out=pieces) for name, pieces in ABLATIONS.items()} if ablate else {}
    for name, way in (WAYS | less).items():
        with multiplying(large_batch, way):
            passes[name] = prepare_pass([run], device, pool=pool)
            same[name] = torch.equal(run()[:stop], wanted)
    return {name: (1e6 * time, same[name]) for name, time in take_turns(passes, device).items()}


def main() -> int:
    """Measure every case, write and print the rows; 1 where the kernel gave other bits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3_30b", "dsv3"])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--ablate", action="store_true", help="also leave out parts of the kernel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    asked = parser.parse_args()
    device = torch.device("cuda")
    about = [torch.cuda.get_device_name(), driver_version(device), torch.__version__, version_of("triton")]
    about += [asked.commit, " ".join(["python", "benchmarks/large_batch.py", *sys.argv[1:]])]
    wrong = 0
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        head = ["gpu", "driver", "torch", "triton", "commit", "command", "shape", "weights", "activations", "tokens"]
        writer.writerow([*head, "product", "us", "same bits"])
        for shape in asked.shapes:
            for recipe in map(recipe_of, asked.recipes):
                plan = planned_layer(named_layer(shape)[1], recipe, probe(device), max(asked.tokens))
                packed = packed_as(plan)
                for tokens in asked.tokens:
                    batch = batch_of(plan, tokens)
                    if packed.tiling.large(batch.source.numel()) is None:
                        print(shape, *recipe, tokens, "runs small tiles", flush=True)
                        continue
                    for name, (time, same) in measured(packed, batch, ablate=asked.ablate).items():
                        counts = same or name in ABLATIONS
                        wrong += not counts
                        row = [shape, *recipe, tokens, name, f"{time:.1f}" if counts else "", same]
                        writer.writerow([*about, *row])
                        file.flush()
                        print(*row, flush=True)
                del packed
                torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
