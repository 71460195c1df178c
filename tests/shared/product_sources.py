"""Compile-time variants of the product kernels from flat tables of constants, for the tests of what is compiled."""

from __future__ import annotations

from typing import Any

from triton.compiler import ASTSource

from collegium.kernels.arguments import (
    ActivationBounds,
    AdapterRows,
    OperandFormat,
    Projections,
    RowOrder,
    Tile,
    Tokens,
    Weights,
    WeightStrides,
)

__all__ = ["product_source"]

_ALIGNED = [["tt.divisibility", 16]]
_BOUNDS = ActivationBounds("fp32", "fp32", "fp32", "fp32")  # type: ignore[arg-type]
_STRUCTS: dict[str, tuple[str, ...]] = {
    "tokens": Tokens._fields,
    "weights": Weights._fields,
    "strides": WeightStrides._fields,
    "adapters": AdapterRows._fields,
}
_ADAPTER_TYPES = {"ids": "*i64", "source": "*i64", "inner": "*fp32", "a": "*bf16", "b": "*bf16", "table": "*i64"}


def product_source(kernel: Any, constants: dict[str, Any], types: dict[str, str], even: set[str]) -> ASTSource:
    """Return the variant of ``kernel`` with ``constants``, by the names of the tests' tables.

    types: of the fields of arguments and of plain arguments; others are int32. even: numbers that 16 divides.
    """
    fixed = _structs(constants)
    types = types | {f"adapters.{field}": kind for field, kind in _ADAPTER_TYPES.items()}
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name == "bounds":
            signature[name] = _BOUNDS
        elif name in _STRUCTS:
            kinds = [types.get(f"{name}.{field}", "i32") for field in _STRUCTS[name]]
            signature[name] = tuple(kinds)
            for field, kind in enumerate(kinds):
                if kind.startswith("*") or f"{name}.{_STRUCTS[name][field]}" in even:
                    attributes[place, field] = _ALIGNED
        else:
            signature[name] = types.get(name, "i32")
            if signature[name].startswith("*") or name in even:
                attributes[(place,)] = _ALIGNED
    named = {"tokens": Tokens, "weights": Weights, "strides": WeightStrides, "adapters": AdapterRows}
    signature = {
        name: named[name](*kinds) if name in named and name not in fixed else kinds for name, kinds in signature.items()
    }
    return ASTSource(kernel, signature, fixed, attributes)


def _structs(constants: dict[str, Any]) -> dict[str, Any]:
    """Return the compile-time arguments of a product kernel."""
    value = constants.get
    return {
        "row_map": None,
        **({} if value("ADAPTER_RANK") else {"adapters": None}),
        "FORMAT": OperandFormat(
            weight=constants["WEIGHT"],
            scale=value("SCALE", 0),
            words=value("WORDS", 1),
            x_scale=constants["X_SCALE"],
            row_scale=value("ROW_SCALE", False),
            bias=constants["BIAS"],
            k_blocks=constants["K_BLOCKS"],
            block_k=constants["BLOCK_K"],
            even_k=value("EVEN_K", True),
        ),
        "PROJ": Projections(
            constants["PROJECTIONS"],
            constants["ACTIVATION"],
            constants["HAS_LIMIT"],
            value("ADAPTER_RANK", 0),
            value("STORED", False),
        ),
        "TILE": Tile(
            block_n=constants["BLOCK_N"],
            block_t=constants["BLOCK_T"],
            group_t=constants["GROUP_T"],
            narrow=constants["NARROW"],
            depth=constants["DEPTH"],
            stages=constants["STAGES"],
            interleave_gate_up=value("INTERLEAVED", False),
            fuse_k_block=value("FUSED", False),
            warps=value("WARPS", 4),
        ),
        "ROWS": RowOrder(constants["GATHER"], constants["TOP_K"], 0),
        **{name: constants[name] for name in ("ASM", "EARLY", "PDL")},
    }
