"""Map the module and parameter names of an adapter, those of the model in memory, to the tensors of a checkpoint.

The files may use other names, split a fused module or fuse separate ones, and store a stack of experts as one tensor
per expert. ``models.in_memory`` lists the differences by family.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from ..errors import ConfigError
from ..models import Names
from ..models.in_memory import text_path
from ..types import MoESpec
from .index import index_of
from .layout import Projection, projections
from .reader import Checkpoint

__all__ = ["ExpertModule", "NamesInMemory", "Rows", "StackModule", "StackParameter"]

_LAYER = re.compile(r"(?:layers|blocks)\.(0|[1-9]\d{0,8})\.(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A range of rows of a module's weight and the tensor that stores it.

    name: the tensor. rows: the range within the module's weight, half-open. stored: the first of these rows in the
    tensor. height: number of rows of the whole module.
    """

    name: str
    rows: tuple[int, int]
    stored: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertModule:
    """A projection of one expert that is a module in memory."""

    layer: int
    expert: int
    projection: Projection


@dataclass(frozen=True, kw_only=True, slots=True)
class StackParameter:
    """A parameter of a module that holds the experts of a layer.

    projections: the projections it holds, in halves where there are two; none for biases. interleaved: gate and up
    alternate. flat: two-dimensional, experts follow each other along the rows.
    """

    name: str
    projections: tuple[Projection, ...]
    interleaved: bool = False
    flat: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StackModule:
    """A module in memory whose parameters are stacks of the experts of one layer, in the order of registration.

    tail: its path below the layer.
    """

    layer: int
    tail: str
    parameters: tuple[StackParameter, ...]


class NamesInMemory:
    """Looks up the tensors of a checkpoint by the in-memory names of an adapter's modules and parameters."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._index = index_of(checkpoint)
        self._family = self._index.family
        self._layers = frozenset(self._family.moe_layers(checkpoint.config))
        tables = (self._family.names, *self._family.others)
        self._stacks = _stack_parameters(tables, checkpoint)
        self._experts = _expert_modules(tables, checkpoint)
        self._files = defaultdict[str, set[str]](set)
        self._below = defaultdict[str, set[str]](set)
        for name in checkpoint.tensors:
            for known in {text_path(name), text_path(self._family.in_memory.name(name))}:
                self._files[known].add(name)
                module, _, parameter = known.rpartition(".")
                self._below[module].add(parameter)

    def experts(self, path: str) -> ExpertModule | StackModule | None:
        """Return the routed experts that the module at ``path`` holds, None for another module."""
        match = _LAYER.fullmatch(text_path(path))
        if match is None or int(match[1]) not in self._layers:
            return None
        layer = int(match[1])
        tail = match[2]
        if tail in self._experts:
            expert, projection = self._experts[tail]
            return ExpertModule(layer=layer, expert=expert, projection=projection)
        parameters = self._stacks.get(tail)
        return None if parameters is None else StackModule(layer=layer, tail=tail, parameters=parameters)

    def parameters(self, path: str) -> list[str]:
        """Return the names of the parameters of the module at ``path``."""
        module, _, _ = text_path(f"{path}.weight").rpartition(".")
        return sorted(self._below.get(module, ()))

    def rows(self, path: str, parameter: str = "weight") -> list[Rows]:
        """Return the tensors that hold the rows of a matrix.

        Raises ConfigError if there are none or the name is ambiguous.
        """
        # The files may be a copy saved by transformers while the adapter uses the published names.
        renamed = self._family.in_memory.name(f"{path}.{parameter}")
        for known, _, last in (name.rpartition(".") for name in dict.fromkeys((f"{path}.{parameter}", renamed))):
            rows = self._rows(known, last)
            if rows:
                return rows
        parts = self.parameters(path)
        if parts:
            raise ConfigError(
                f"the adapter has {path}, and the checkpoint holds {', '.join(parts)} of it; adapters are merged into "
                "matrices in BF16, F16 and F32. Take the model that is not quantised"
            )
        raise ConfigError(
            f"the adapter has {path}, the checkpoint no {path}.{parameter}, nor a tensor that transformers names so in "
            f"memory for {self._family.name}; is the adapter of another model?"
        )

    def _rows(self, path: str, parameter: str) -> list[Rows]:
        name = self._unique_tensor(path, parameter)
        if name is None:
            return self._from_parts(path, parameter) or self._from_joined(path, parameter)
        height = self._height(name)
        return [Rows(name=name, rows=(0, height), stored=0, height=height)]

    def _unique_tensor(self, path: str, parameter: str) -> str | None:
        exact = f"{path}.{parameter}"
        names = self._files.get(text_path(exact), set[str]())
        if len(names) > 1 and exact in names:
            # Names of two parts of a model may differ in their prefix alone.
            names = {exact} | {name for name in names if self._family.in_memory.name(name) == exact}
        if len(names) > 1:
            listed = " and ".join(sorted(names))
            raise ConfigError(f"the adapter has {path}, which may be {listed} of the checkpoint; rename the others")
        return next(iter(names), None)

    def _from_parts(self, path: str, parameter: str) -> list[Rows]:
        """Return the rows of a fused module that the files store as separate tensors."""
        head, _, last = path.rpartition(".")
        for parts, whole in self._family.in_memory.joined:
            names = [self._unique_tensor(f"{head}.{part}", parameter) for part in parts] if last == whole else []
            present = [name for name in names if name is not None]
            if present and len(present) == len(parts):
                heights = [self._height(name) for name in present]
                starts = [sum(heights[:at]) for at in range(len(heights))]
                return [
                    Rows(name=name, rows=(start, start + height), stored=0, height=sum(heights))
                    for name, start, height in zip(present, starts, heights, strict=True)
                ]
        return []

    def _from_joined(self, path: str, parameter: str) -> list[Rows]:
        """Return the rows of a module that the files store as part of a fused one."""
        head, _, last = path.rpartition(".")
        for parts, whole in self._family.in_memory.joined:
            name = self._unique_tensor(f"{head}.{whole}", parameter) if last in parts else None
            if name is not None and self._height(name) % len(parts) == 0:
                height = self._height(name) // len(parts)
                return [Rows(name=name, rows=(0, height), stored=height * parts.index(last), height=height)]
        return []

    def _height(self, name: str) -> int:
        shape = self._checkpoint.info(name).shape
        return shape[0] if len(shape) == 2 else 0


def _expert_modules(tables: tuple[Names, ...], checkpoint: Checkpoint) -> dict[str, tuple[int, Projection]]:
    """Return the modules below a layer that are a projection of one expert."""
    spec = _spec(checkpoint)
    modules: dict[str, tuple[int, Projection]] = {}
    for names in tables:
        for projection in projections(spec) if names.up else ():
            path = names.projection(projection).removeprefix(names.layer)
            for expert in range(spec.num_experts):
                modules[path.format(expert=expert)] = (expert, projection)
    return modules


def _stack_parameters(tables: tuple[Names, ...], checkpoint: Checkpoint) -> dict[str, tuple[StackParameter, ...]]:
    """Return the modules below a layer that hold stacks of experts, with their parameters as they are registered."""
    spec = _spec(checkpoint)
    *upper, lower = projections(spec)
    parameters_by_module: dict[str, tuple[StackParameter, ...]] = {}
    for names in tables:
        table = names.stacked
        modules: dict[str, list[StackParameter]] = {}
        stacks: list[tuple[str, tuple[Projection, ...]]] = [(table.gate_up, tuple(upper))]
        if table.up is not None:
            stacks = [(table.gate_up, ("gate",)), (table.up, ("up",))]
        stacks.append((table.down, (lower,)))
        for path, stacked in stacks:
            module, _, name = (path.removeprefix(names.layer) + table.plain).rpartition(".")
            interleaved = table.interleaved and len(stacked) == 2
            parameter = StackParameter(name=name, projections=stacked, interleaved=interleaved, flat=table.flat)
            modules.setdefault(module, []).append(parameter)
            if spec.expert_bias and not table.plain:
                modules[module].append(StackParameter(name=f"{name}_bias", projections=()))
        for module, parameters in modules.items():
            parameters_by_module.setdefault(module, tuple(parameters))
    return parameters_by_module


def _spec(checkpoint: Checkpoint) -> MoESpec:
    return index_of(checkpoint).family.describe(checkpoint.config)
