"""Name tables of experts that a quantiser or a trainer has unpacked from a stack into one module per expert.

Tools that work on ``nn.Linear`` unpack the experts of families that publish stacks. The spellings are derived from the
stack's names, so that every family has them:

- ``experts.N.gate_proj`` and ``experts.N.w1``: llm-compressor, ModelOpt, GPTQModel, AutoRound; separate gate and up.
- ``experts.gate_up_projs.N``: Unsloth, GPTQModel; lists of modules with the row order of the stack, so that gate and up
  of gpt-oss alternate. ``input_linear.experts.N`` and ``w1_linear.N`` are the same by AutoGPTQ for Granite-MoE and by
  ModelOpt for DBRX.
- ``experts.N.gate_up_proj`` and ``experts.mlp.N.w1``: the names of the stack below each expert, only for stacks that
  store gate before up or separately.
"""

from collections.abc import Iterator
from dataclasses import replace

from .base import W123, Names, projections_of

__all__ = ["either_way", "unpacked"]

_TURNABLE = "_linear.{expert}"  # releases of ModelOpt differ in which axis comes first

_LISTS = ("s.{expert}", ".{expert}", ".experts.{expert}", _TURNABLE)


def unpacked(table: Names) -> Iterator[Names]:
    """Yield ``table`` with its experts under every unpacked spelling, each with the router's two spellings."""
    for variant in _expert_spellings(table):
        yield variant
        module, _, kind = table.router_weight.rpartition(".")
        if kind == "weight":  # Unsloth wraps the router of gpt-oss in a module that holds a linear layer
            bias = None if table.router_bias is None else f"{module}.linear.bias"
            yield replace(variant, router_weight=f"{module}.linear.weight", router_bias=bias)


def either_way(table: Names) -> bool:
    """Return whether the orientation of a table's matrices is known only from their shape, if not square."""
    return (table.down or "").endswith(_TURNABLE)


def _expert_spellings(table: Names) -> Iterator[Names]:
    stack = table.stacked
    gated = table.gate is not None or table.up is None
    container = table.experts if table.experts.endswith("experts.") else table.experts + "experts."
    for names in (projections_of(""), W123) if gated else ():
        paths = tuple(f"{container}{{expert}}.{name}" for name in names)
        if paths != (table.gate, table.up, table.down):
            yield _with_expert_paths(table, paths)
    upper = (stack.gate_up,) if stack.up is None else (stack.gate_up, stack.up)
    for ending in _LISTS:
        yield _with_expert_paths(table, tuple(path + ending for path in (*upper, stack.down)))
    if not stack.interleaved:
        leaves = (path.rpartition(".") for path in (*upper, stack.down))
        yield _with_expert_paths(table, tuple(f"{parent}.{{expert}}.{leaf}" for parent, _, leaf in leaves))


def _with_expert_paths(table: Names, paths: tuple[str, ...]) -> Names:
    """Return ``table`` with other module paths of an expert: gate, up and down, or gate_up and down."""
    gated = table.gate is not None or table.up is None
    first, *rest = paths
    if len(rest) == 2:
        return replace(table, gate=first, up=rest[0], down=rest[1])
    return replace(table, gate=first if gated else None, up=first, down=rest[0])
