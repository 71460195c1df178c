"""One table of the weights and tokens that each kernel in Triton takes, their layout, and what packs them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ...formats import by_name
from ...formats.unquantised import DTYPES
from ...kernels.enums import STEP_SCALE, ZERO_SCALE
from ...problem import ExpertsProblem
from ...runtime.machine import Machine, machine_at, machine_for
from ...runtime.memory import Regions
from ...types import ExpertWeights
from .layout import LANES, ROWS, WORDS, Layout, float_rows
from .matrix import PackedMatrix
from .pack_experts import pack_both
from .packed import PackedExperts
from .packing import (
    pack_bnb4,
    pack_float32,
    pack_fp8_block,
    pack_fp8_rows,
    pack_gguf,
    pack_int,
    pack_mx,
    pack_nvfp4,
    pack_plain,
    pack_w4a8,
)
from .tiling import CODES, DECODED, ProductTiling, operand_format, product_regions, refuse_machine

__all__ = ["TABLE", "TritonBf16", "TritonFp8", "TritonFp32", "TritonKernel", "TritonW4A8", "TritonW4A16", "TritonW8A16"]


class _Row(NamedTuple):
    """Weights of a format with tokens in one of some activation formats.

    layout: without sizes; integers are taken to have 16-bit scales of 128 columns and blocks of GGUF to be Q4_K, the
    most common ones; packing sees the actual ones. scaled: for tensor cores that decode the weights. passes_half: pack
    takes ``half``, whether tokens are float16.
    """

    weights: str
    tokens: tuple[str, ...]
    layout: Layout
    pack: Callable[..., PackedMatrix]
    scaled: bool = False
    passes_half: bool = False


_EITHER = ("bf16", "fp16")
_MX = (*_EITHER, "mxfp8")  # mxfp8 rows are bfloat16 numbers without scales
_NVFP4 = tuple(name for name in DECODED if name != "mxfp8")
_ZEROED = {name: replace(LANES[name], scale_kind=ZERO_SCALE) for name in ("int4", "int8")}
_Q4_K = replace(LANES["int4"], scale_kind=STEP_SCALE, words=3)


# By kernel; the first row that takes a pair of formats runs it.
TABLE = {
    "triton_bf16": (
        _Row("bf16", _EITHER, ROWS["plain"], pack_plain, passes_half=True),
        _Row("fp16", ("fp16",), ROWS["plain"], pack_plain, passes_half=True),
        _Row("fp16", ("bf16",), replace(ROWS["plain"], halved=True), pack_plain),
    ),
    "triton_fp32": tuple(_Row(name, ("fp32",), float_rows(dtype), pack_float32) for name, dtype in DTYPES.items()),
    "triton_fp8": (
        _Row("fp8_block", CODES, ROWS["fp8_block"], partial(pack_fp8_block, native=True)),
        _Row("fp8_tensor", CODES, ROWS["fp8_rows"], partial(pack_fp8_rows, native=True)),
        _Row("fp8_channel", CODES, ROWS["fp8_rows"], partial(pack_fp8_rows, native=True)),
        _Row("fp8_block", _MX, LANES["fp8_block"], pack_fp8_block, passes_half=True),
        _Row("fp8_tensor", _EITHER, LANES["fp8_rows"], partial(pack_fp8_rows, native=False)),
        _Row("fp8_channel", _EITHER, LANES["fp8_rows"], partial(pack_fp8_rows, native=False)),
        _Row("mxfp8", _MX, LANES["mxfp8"], pack_mx, passes_half=True),
    ),
    "triton_w4a8": (
        # Triton 3.6 compiles no product that is scaled by the tensor core and again by the tokens' groups.
        _Row("mxfp4", ("fp8_token",), WORDS["mxfp4_pairs"], partial(pack_w4a8, scaled=True), scaled=True),
        _Row("mxfp4", CODES, WORDS["mxfp4"], pack_w4a8),
        _Row("nvfp4", CODES, WORDS["nvfp4"], pack_w4a8),
        _Row("int4_group", CODES, WORDS["int4_1"], pack_w4a8),
    ),
    "triton_w4a16": (
        _Row("mxfp4", _MX, LANES["mxfp4"], pack_mx, passes_half=True),
        _Row("nvfp4", _EITHER, LANES["nvfp4"], pack_nvfp4, passes_half=True),
        _Row("nvfp4", _NVFP4, LANES["nvfp4_rows"], partial(pack_nvfp4, scaled_rows=True)),
        _Row("int4_group", _EITHER, LANES["int4"], pack_int),
        _Row("int4_affine", _EITHER, _ZEROED["int4"], pack_int),
        _Row("int4_ordered", _EITHER, _ZEROED["int4"], pack_int),
        _Row("bnb4", _EITHER, LANES["table"], pack_bnb4, passes_half=True),
        _Row("gguf", _EITHER, _Q4_K, pack_gguf, passes_half=True),
    ),
    "triton_w8a16": (
        _Row("int8_affine", _EITHER, _ZEROED["int8"], pack_int),
        _Row("int8_ordered", _EITHER, _ZEROED["int8"], pack_int),
    ),
}


def _either(names: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


class TritonKernel:
    """The common part of the kernels, which differ in their rows of the table."""

    name: str
    capturable = True
    takes_codes = True
    pages = True

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse weights and tokens that no row has, and machines Triton does not support.

        Tokens are quantised from any input, or the 16-bit input itself. Down may have weights of another format, which
        the kernel of that format multiplies.
        """
        weights, tokens = problem.weight_format, problem.activation_format
        dtype = problem.dtype
        known_weights = dict.fromkeys(row.weights for row in TABLE[self.name])
        if weights not in known_weights:
            return f"the weights are {weights}; supported: {_either(known_weights)}"
        known_tokens = dict.fromkeys(name for row in TABLE[self.name] if row.weights == weights for name in row.tokens)
        if tokens not in known_tokens or (tokens in DTYPES and tokens != dtype):
            same = [name for name in known_tokens if name in DTYPES]
            allowed = [f"{_either(same)} for both"] if same else []
            allowed += [name for name in known_tokens if name not in DTYPES]
            return (
                f"activation format {tokens} was requested for {dtype} input; supported with {weights} weights: "
                f"{_either(allowed)}"
            )
        if problem.mixed and (reason := _refuse_down(problem)):
            return reason
        if "bnb4" in problem.formats and (problem.hidden % 32 or problem.intermediate % 32):
            widths = f"{problem.hidden} and {problem.intermediate}"
            return f"the weights are bnb4 of widths {widths}; supported: multiples of 32"
        return refuse_machine(problem)

    def refuse_adapters(self, problem: ExpertsProblem) -> str | None:
        """Refuse weights that permute the columns between the products, in which adapters' matrices would be wrong."""
        ordered = next((form for form in problem.formats if by_name(form).ordered_columns), None)
        if ordered is None:
            return None
        return f"the weights are {ordered}, whose columns between the products are permuted; supported: other formats"

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
        """Take weights that are multiplied as they are, re-lay others, a few rows at a time.

        Raises InputError for blocks, groups and scales that the kernel cannot take.
        """
        half = problem.activation_format == "fp16"
        rows = self._rows(problem, machine_at(weights.down.device))
        first, second = (partial(row.pack, half=half) if row.passes_half else row.pack for row in rows)
        return pack_both((first, second), weights, problem)

    def layouts(self, problem: ExpertsProblem, machine: Machine) -> tuple[Layout, Layout]:
        """Return the layouts of gate_up and down that ``pack`` gives the weights of ``problem`` on ``machine``."""
        first, second = self._rows(problem, machine)
        half = problem.activation_format == "fp16"
        gate_up = first.layout.of((problem.experts, problem.parts, problem.intermediate, problem.hidden), half=half)
        return gate_up, second.layout.of((problem.experts, 1, problem.hidden, problem.intermediate), half=half)

    def slot_bytes(self, problem: ExpertsProblem) -> int:
        """Return the most bytes of a packed expert, with blocks of GGUF as the table takes them to be stored."""
        layouts = self.layouts(replace(problem, experts=1), machine_for(problem.device))
        form = operand_format(problem.activation_format)
        scales = 2 * 4 if form is not None and form.by_expert else 0
        return sum(layout.expert_bytes(bias=problem.bias) for layout in layouts) + scales

    def kernels(self, problem: ExpertsProblem) -> tuple[str, str]:
        """Return this kernel, and the one that takes the format of down."""
        return self.name, (_kernel_of_down(problem) if problem.mixed else None) or self.name

    def repacks(self, weight_format: str, activation_format: str) -> bool:
        """Return whether a kernel decodes the weights, which needs them in another layout."""
        return any(row.layout.decoded for row in TABLE[self.name] if _takes(row, weight_format, activation_format))

    def multiplied_as(self, activation_format: str) -> str | None:
        """Return how tensor cores multiply what is not multiplied as it is stored.

        As BF16, which holds the numbers of NVFP4 and MXFP8 rows, and float32 as three products of TF32 numbers.
        """
        if activation_format == "fp32":
            return "TF32x3"
        return "bf16 without rounding" if activation_format in DECODED else None

    def tiling(self, problem: ExpertsProblem) -> ProductTiling:
        """Return how batches of ``problem`` will be cut."""
        machine = machine_for(problem.device)
        gate_up, down = self.layouts(problem, machine)
        activations = operand_format(problem.activation_format)
        return ProductTiling(gate_up=gate_up, down=down, machine=machine, activations=activations, forced=problem.tiles)

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Return the memory of both products of a batch at most."""
        return product_regions(problem, self.tiling(problem))

    def _rows(self, problem: ExpertsProblem, machine: Machine) -> tuple[_Row, _Row]:
        """Return the table rows of gate_up and of down."""
        kernels = self.kernels(problem)
        tokens = problem.activation_format
        gate_up, down = problem.formats
        return _row(kernels[0], gate_up, tokens, machine), _row(kernels[1], down, tokens, machine)


def _row(name: str, weights: str, tokens: str, machine: Machine) -> _Row:
    fitting = (row for row in TABLE[name] if _takes(row, weights, tokens))
    return next(row for row in fitting if machine.scaled or not row.scaled)


def _takes(row: _Row, weights: str, tokens: str) -> bool:
    return row.weights == weights and tokens in row.tokens


def _kernel_of_down(problem: ExpertsProblem) -> str | None:
    """Return the first kernel that takes the weights of down with the activations of ``problem``."""
    down, tokens = problem.formats[1], problem.activation_format
    return next((name for name, rows in TABLE.items() if any(_takes(row, down, tokens) for row in rows)), None)


def _refuse_down(problem: ExpertsProblem) -> str | None:
    """Return why no kernel in Triton runs down in a format that gate_up does not have, or None."""
    ordered = next((form for form in problem.formats if by_name(form).ordered_columns), None)
    if ordered is not None:
        return f"one of gate_up and down is {ordered}; supported: {ordered} for both, since its columns are permuted"
    if _kernel_of_down(problem) is not None:
        return None
    down = problem.formats[1]
    tokens = dict.fromkeys(
        token for rows in TABLE.values() for row in rows if row.weights == down for token in row.tokens
    )
    return (
        f"activation format {problem.activation_format} was requested, and the weights of down are {down}; supported "
        f"with {down} weights: {_either(tokens) if tokens else 'none'}"
    )


class TritonBf16(TritonKernel):
    """Plain 16-bit weights and tokens, sums in float32; weights of the tokens' dtype are used in place."""

    name = "triton_bf16"


class TritonFp32(TritonKernel):
    """Unquantised weights and float32 tokens, multiplied as three products of TF32 numbers (TF32x3)."""

    name = "triton_fp32"


class TritonFp8(TritonKernel):
    """FP8 weights: E4M3 products with E4M3 tokens, or decoded to the dtype of 16-bit tokens."""

    name = "triton_fp8"


class TritonW4A8(TritonKernel):
    """Four-bit weights decoded to E4M3 in registers, for the E4M3 activation formats."""

    name = "triton_w4a8"


class TritonW4A16(TritonKernel):
    """Weights of four bits, of GGUF up to eight, whose products with 16-bit tokens are exact before the float32 sum.

    Those of bitsandbytes have 16 bits of each number in its table, 22 with FP16 tokens.
    """

    name = "triton_w4a16"


class TritonW8A16(TritonKernel):
    """Integers of eight bits, whose products with 16-bit tokens are exact before the float32 sum."""

    name = "triton_w8a16"
