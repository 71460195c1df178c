"""The names of a class's tensors in published files, from transformers' conversion mapping.

transformers converts published tensors while it loads them, and converts them back when a model is saved. The second
direction is run here on small marked tensors: every number encodes the tensor, expert, row and column that it stands
for. What arrives in a file tensor shows which projection it holds, of which expert, in which order and orientation.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import ConfigError
from .class_layers import ClassLayer, ClassModel

__all__ = ["StoredNames", "stored_names"]

_EXPERTS, _ROWS, _COLUMNS = 3, 4, 5  # sizes of a marked stack; of gate and up, two rows each
_UNIT = 1 << 40  # numbers of one tensor

Which = Literal["gate", "up", "gate_up", "down"]


@dataclass(kw_only=True, slots=True)
class StoredNames:
    """The tensors of a layer as files name them, with the placeholder ``{layer}``.

    prefix: of the layer. single, stacked: module path of each projection, with ``{expert}`` in single. plain: suffix of
    a stack. transposed, interleaved, flat: as ``StackedNames``. biases: name of each projection's bias. in_memory:
    names below the block in memory, each to (name below the layer in the files, first row, rows) of its parts. others:
    names in the files of the layer's tensors that are not the block's.
    """

    prefix: str
    memory_prefix: str
    single: dict[str, str] = field(default_factory=dict)
    stacked: dict[str, str] = field(default_factory=dict)
    plain: str = ""
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    biases: dict[str, str] = field(default_factory=dict)
    in_memory: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def file_name(self, memory_name: str, start: int = 0, rows: int | None = None) -> str | None:
        """Return the file tensor with rows ``start`` to ``start + rows`` of a tensor below the layer, None if none."""
        for name, first, count in self.in_memory.get(memory_name, ()):
            if first == start and (rows is None or count == rows):
                return name
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """What a marked tensor stands for: a name below the layer, and the projection of a stack or its bias."""

    name: str
    which: Literal["gate_up", "down"] | None = None
    bias: bool = False


def stored_names(model: ClassModel, layer: ClassLayer) -> StoredNames:
    """Return the names of ``layer``'s tensors in published files; raises ConfigError if they cannot be derived."""
    marks: list[_Mark] = []
    state: dict[str, Tensor] = {}
    own = {name: tensor for name, tensor in model.model.state_dict().items() if name.startswith(layer.prefix)}
    stacks = {name for name, _ in layer.experts.named_parameters(recurse=False)}
    for name, tensor in own.items():
        leaf = name.removeprefix(layer.experts_path + ".")
        mark = _Mark(name=name.removeprefix(layer.prefix))
        if name.startswith(layer.experts_path + ".") and leaf in stacks:
            mark = _Mark(name=mark.name, which="down" if "down" in leaf else "gate_up", bias=leaf.endswith("_bias"))
        base = len(marks) * _UNIT
        marks.append(mark)
        inside = name.startswith(layer.block_path + ".") and tensor.dim() <= 2
        state[name] = (
            _marked(mark, tensor, base, turned=layer.experts.is_transposed) if inside or mark.which else tensor
        )
    revert: Any = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    try:
        files: Mapping[str, Tensor] = revert(model.model, state)
    except Exception as error:  # operations of the mapping raise many classes
        raise _refusal(model, layer, f"its conversion cannot be run back: {type(error).__name__}: {error}") from error
    renames = {
        f"{layer.experts_path}.{leaf}": f"{layer.block_path}.{name}"
        for leaf, name in getattr(layer.experts, "file_names", {}).items()
    }
    files = {renames.get(name, name): tensor for name, tensor in files.items()}
    marked = {name: tensor for name, tensor in files.items() if not tensor.is_meta}
    of_experts = [name for name, tensor in marked.items() if marks[_number(tensor) // _UNIT].which is not None]
    found = StoredNames(prefix=_prefix(model, layer, of_experts), memory_prefix=layer.prefix)
    prefix = found.prefix.replace("{layer}", str(layer.number))
    found.others = [name.removeprefix(prefix) for name in files if name.startswith(prefix) and name not in marked]
    singles: dict[str, dict[int, str]] = {}
    for name, tensor in marked.items():
        if not name.startswith(prefix):
            continue
        below = name.removeprefix(prefix)
        first = _number(tensor)
        mark = marks[first // _UNIT]
        numbers = tensor - first // _UNIT * _UNIT
        if mark.which is None:
            rows = tensor.shape[0] if tensor.dim() else 1
            found.in_memory.setdefault(mark.name, []).append((below, _number(numbers), rows))
            continue
        try:
            _sort_expert_tensor(found, mark, below, numbers, singles, layer.experts)
        except ValueError as error:
            raise _refusal(model, layer, f"{below} in the files: {error}") from None
    for which, names in singles.items():
        target, kind = (found.biases, which.removesuffix("_bias")) if which.endswith("_bias") else (found.single, which)
        target[kind] = _template(model, layer, names)
    if not {"down"} < {*found.single, *found.stacked}:
        raise _refusal(model, layer, f"no projections of an expert are among {', '.join(files)[:600]}")
    return found


def _marked(mark: _Mark, tensor: Tensor, base: int, *, turned: bool) -> Tensor:
    """Return numbers from ``base`` on that encode positions: small for stacks of experts, the row for all others."""
    if mark.which is not None and mark.bias:
        rows = _ROWS if mark.which == "gate_up" else _COLUMNS
        return (base + torch.arange(_EXPERTS * rows, dtype=torch.float64, device="cpu")).view(_EXPERTS, rows)
    if mark.which is not None:
        shape = (_ROWS, _COLUMNS) if mark.which == "gate_up" else (_COLUMNS, _ROWS)
        numbers = base + torch.arange(_EXPERTS * _ROWS * _COLUMNS, dtype=torch.float64, device="cpu")
        stack = numbers.view(_EXPERTS, *shape)
        return stack.mT.contiguous() if turned else stack
    if not tensor.dim():
        return torch.full((), base, dtype=torch.float64, device="cpu")
    rows = base + torch.arange(tensor.shape[0], dtype=torch.float64, device="cpu")
    return rows.view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape)


def _refusal(model: ClassModel, layer: ClassLayer, why: str) -> ConfigError:
    parameters = ", ".join(
        name.removeprefix(layer.prefix) for name, _ in model.model.named_parameters() if name.startswith(layer.prefix)
    )
    return ConfigError(
        f"model_type {model.model_type!r}: names cannot be derived from transformers' class {model.name}: {why}; in "
        f"memory layer {layer.number} has {parameters[:600]}"
    )


def _number(tensor: Tensor) -> int:
    """Return the first number of a marked tensor."""
    return int(tensor[(0,) * tensor.dim()].item())


def _prefix(model: ClassModel, layer: ClassLayer, files: Sequence[str]) -> str:
    """Return the prefix of the layer in the files, with ``{layer}`` in the place of its number."""
    heads: set[str] = set()
    for name in files:
        pieces = name.split(".")
        position = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
        if position is not None and int(pieces[position]) == layer.number:
            heads.add("".join(f"{piece}." for piece in (*pieces[:position], "{layer}")))
    if len(heads) != 1:
        raise _refusal(model, layer, f"its tensors in the files are {', '.join(files)[:600]}, not below one layer")
    return heads.pop()


def _sort_expert_tensor(
    found: StoredNames, mark: _Mark, name: str, numbers: Tensor, singles: dict[str, dict[int, str]], experts: Any
) -> None:
    """Record which projection, experts, rows and orientation a file tensor of experts has; raises ValueError."""
    rows, columns = (_COLUMNS, _ROWS) if mark.which == "down" else (_ROWS, _COLUMNS)
    if mark.bias:
        columns = 1
    positions = numbers.long()
    if not mark.bias and positions.dim() == 2 and positions.shape[0] > rows:  # experts follow each other
        positions = positions.view(_EXPERTS, -1, positions.shape[1])
        found.flat = True
    matrix_dims = 1 if mark.bias else 2
    stacked = positions.dim() == matrix_dims + 1
    if positions.dim() not in (matrix_dims, matrix_dims + 1):
        raise ValueError(f"it has {positions.dim()} dimensions")
    one = positions[1] if stacked else positions
    if stacked and not torch.equal(positions - positions[:1], _expert_steps(positions, rows * columns)):
        raise ValueError("its experts are in another order")
    expert = _number(one) // (rows * columns)
    row, column = one // columns % rows, one % columns
    turned = not mark.bias and bool((column != column[:1]).any())
    turned = turned and bool((column[:, :1] != column[:1, :1]).any())
    if turned:
        row = row.mT
    sequence = row.reshape(-1, 1)[:, 0].tolist() if mark.bias else row[:, 0].tolist()
    which, alternate = _projection(mark, sequence, experts)
    if turned and not stacked:
        raise ValueError("a matrix of one expert is stored input-first")
    if alternate and not mark.bias:
        found.interleaved = True
    if not stacked:
        key = f"{which}_bias" if mark.bias else which
        singles.setdefault(key, {})[expert] = name
        return
    if mark.bias:
        found.biases[which] = name
        return
    found.plain = ".weight" if name.endswith(".weight") else ""
    found.transposed = turned
    found.stacked[which] = name.removesuffix(".weight")


def _expert_steps(positions: Tensor, size: int) -> Tensor:
    steps = torch.arange(positions.shape[0]) * size
    return steps.view(-1, *[1] * (positions.dim() - 1)).expand(positions.shape)


def _projection(mark: _Mark, rows: Sequence[int], experts: Any) -> tuple[str, bool]:
    """Return the projection that has these rows of a stack in memory, and whether gate and up rows alternate."""
    if mark.which == "down":
        if list(rows) != list(range(_COLUMNS)):
            raise ValueError("its rows are in another order")
        return "down", False
    if not experts.has_gate:
        return "up", False
    half = _ROWS // 2
    every = [(row < half, row % half) if experts.is_concatenated else (row % 2 == 0, row // 2) for row in rows]
    gate, up = [(True, i) for i in range(half)], [(False, i) for i in range(half)]
    orders: dict[str, tuple[list[tuple[bool, int]], bool]] = {
        "gate": (gate, False),
        "up": (up, False),
        "gate_up": (gate + up, False),
    }
    orders["gate_up alternating"] = ([pair for both in zip(gate, up, strict=True) for pair in both], True)
    for which, (order, alternate) in orders.items():
        if every == order:
            return which.partition(" ")[0], alternate
    raise ValueError("gate and up rows are in another order")


def _template(model: ClassModel, layer: ClassLayer, names: Mapping[int, str]) -> str:
    """Return the path of one projection with ``{expert}``, from the names of three experts."""
    pieces = [names[expert].split(".") for expert in sorted(names)]
    if sorted(names) == list(range(_EXPERTS)) and len({len(one) for one in pieces}) == 1:
        differing = [i for i, parts in enumerate(zip(*pieces, strict=True)) if len(set(parts)) > 1]
        if len(differing) == 1 and [one[differing[0]] for one in pieces] == [str(i) for i in range(_EXPERTS)]:
            path = ".".join((*pieces[0][: differing[0]], "{expert}", *pieces[0][differing[0] + 1 :]))
            return path.removesuffix(".weight") if path.endswith(".weight") else path
    raise _refusal(model, layer, f"the names of experts are {', '.join(names.values())}")
