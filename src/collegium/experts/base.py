"""Interface of a kernel that runs experts: it refuses with a reason, packs weights once, and runs batches.

A kernel is a row of ``KERNELS``. Before any weight is loaded it returns how batches will be cut (``tiling``) and the
memory they take (``regions``); ``pack`` returns the experts in the kernel's layout, with the same tiling. Defaults
below do nothing: a kernel without tiles lists none, warms nothing up and is not tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..errors import InputError
from ..ops.quantize import ActivationFormat, activation_format
from ..problem import ExpertsProblem
from ..runtime.memory import Memory, Regions
from ..runtime.pass_order import PassOrder
from ..types import ActivationSpec, ContiguousBatch, ExpertWeights

__all__ = [
    "ExpertKernel",
    "PackedWeights",
    "Product",
    "Tiling",
    "map_tensors",
    "refuse_codes",
    "refuse_fast",
    "refuse_other_layout",
    "require_expert_reach",
]


class Tiling:
    """How batches of one kernel are cut: a pure function of sizes, the same before and after packing."""

    __slots__ = ()

    def family(self, rows: int, *, unsorted: bool = False) -> str:
        """Return the printed name of the tiles of a batch of ``rows`` rows; empty without tiles."""
        return ""

    def block_t(self, rows: int) -> tuple[int, ...]:
        """Return the row counts whose token tile lists ``run`` needs with a batch of ``rows`` rows, at most two."""
        return ()

    def unsorted_tokens(self, top_k: int) -> int:
        """Return the most tokens of ``top_k`` assignments for which ``run_unsorted`` is faster; 0: none."""
        return 0

    def variants(self, rows: int, *, unsorted: bool) -> frozenset[Hashable]:
        """Return keys of the kernel variants that a batch of ``rows`` rows needs; equal keys are compiled once."""
        return frozenset()

    def variants_with_adapters(self, rows: int) -> frozenset[Hashable]:
        """Return the ``variants`` that a sorted batch of ``rows`` rows with adapters needs."""
        return self.variants(rows, unsorted=False)


NO_TILES = Tiling()


class Product(Protocol):
    """One product of packed experts whose tile, a frozen dataclass of plain numbers, can be measured."""

    @property
    def name(self) -> str:
        """Name of the product in the file of measured tiles."""
        ...

    def default_tile(self, rows: int) -> Any:
        """Return the tile chosen for ``rows`` rows from the sizes alone."""
        ...

    def candidates(self, rows: int) -> tuple[Any, ...]:
        """Return every tile that may run ``rows`` rows, the most promising first."""
        ...

    def runner(self, batch: ContiguousBatch) -> Callable[[Any], Tensor]:
        """Return this product of ``batch`` as a function of the tile; it returns ``[R, N]``."""
        ...


class PackedWeights:
    """The experts of one layer in a kernel's layout.

    report: what packing rounded, or None; printed with the layer. input_reach: of the weights, where activations are
    static.
    """

    __slots__ = ()
    report: object | None = None
    input_reach: tuple[float, float] | None = None

    def summary(self, activations: str) -> str:
        """Return printed lines: scales of static ``activations``, and the report."""
        report = "" if self.report is None else f"\nweights    {self.report}"
        if self.input_reach is None:
            return report
        form = activation_format(activations)
        first, second = (form.within(reach).scale for reach in self.input_reach)
        note = "maximum over the experts" + ("; each expert has separate ones" if form.by_expert else "")
        return f"\nscales     {first:g} before gate_up, {second:g} before down ({note}){report}"

    def reach_of(self, slot: int) -> tuple[float, float] | None:
        """Return the largest inputs of gate_up and down that do not saturate in ``slot``, None where none do."""
        return self.input_reach

    @property
    def tiling(self) -> Tiling:
        """How batches are cut."""
        return NO_TILES

    @property
    def pass_order(self) -> PassOrder | None:
        """The order of passes that change these experts' slots; None: passes may run at the same time."""
        return None

    @property
    def input_codes(self) -> tuple[str, int] | None:
        """Format and order of columns of the codes that ``run`` multiplies, None where it takes only tokens."""
        return None

    def output_spec(self, dtype: torch.dtype) -> tuple[int, torch.dtype] | None:
        """Return width and dtype of the rows that ``run`` stores at ``batch.remote`` for tokens of ``dtype``.

        None where the kernel cannot store rows remotely: its batches have no ``remote``.
        """
        return None

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]``, row r being its expert's output for ``x[source[r]]``, or ``batch.remote.rows``.

        float32, or the dtype the kernel rounds its sums to. memory: where buffers come from. Raises InputError for a
        batch of codes that the kernel does not multiply (``refuse_codes``).
        """
        raise NotImplementedError

    def run_unsorted(
        self, x: Tensor, ids: Tensor, memory: Memory | None = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Return ``[T * K, H]``, the rows of ``x [T, H]`` in the order of ``ids [T, K]``, with the bits of ``run``.

        adapters: of the tokens. Called for up to ``tiling.unsorted_tokens`` tokens. Rows of ids outside ``0..E-1`` are
        uninitialised.
        """
        raise NotImplementedError

    @property
    def key(self) -> Hashable:
        """Everything besides the tiling that selects kernel variants: equal keys, the same variants."""
        return None

    def products(self) -> tuple[Product, ...]:
        """Return the products whose tiles can be measured."""
        return ()

    def with_measured(self, tables: Mapping[str, Any]) -> PackedWeights:
        """Return the same experts with tiles measured by ``collegium tune``: product to ((rows, tile), ...)."""
        raise NotImplementedError

    def with_activation(self, activation: ActivationSpec) -> PackedWeights:
        """Return the same experts with another activation between the products, of the same parts."""
        return replace(cast("Any", self), activation=activation)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedWeights:
        """Return these experts with ``change(tensor)`` for every tensor that has a row for each slot.

        A kernel whose packing mixes experts does not override this; its experts cannot be moved.
        """
        raise InputError(f"{type(self).__name__} mixes experts in its packing; none of them can be moved separately")

    def slots(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the experts, whose first dimension is the local slot; they are not copied.

        Raises InputError where slots share memory.
        """
        tensors = self.stored()
        shared = [tuple(t.shape) for t in tensors if t.shape[0] > 1 and t.stride(0) < t[0].numel()]
        if shared:
            raise InputError(
                f"{type(self).__name__}: the slots of a tensor {shared[0]} share memory, so none can be moved "
                "separately; pass weights whose experts are contiguous"
            )
        return tensors

    def stored(self) -> tuple[Tensor, ...]:
        """Return the tensors of ``slots``, also where slots share memory."""
        tensors: list[Tensor] = []

        def record(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        self._map_tensors(record)
        return tuple(tensors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.slots())

    def take(self, slot: int) -> tuple[Tensor, ...]:
        """Return the packed expert in ``slot``, a view of each tensor of ``slots``."""
        return tuple(tensor[slot] for tensor in self.slots())

    def put(self, slot: int, expert: tuple[Tensor, ...]) -> None:
        """Copy a packed ``expert``, from ``take`` of experts packed like these, into ``slot``, bit by bit."""
        with torch.inference_mode():
            for target, source in zip(self.take(slot), expert, strict=True):
                target.copy_(source)

    def put_all(self, slots: Sequence[int], experts: PackedWeights) -> None:
        """Copy ``experts``, packed by the same kernel, into ``slots``, one each; addresses of tensors stay.

        Raises InputError, and copies nothing, where they are laid out unlike these.
        """
        refuse_other_layout(self, experts)
        first, count = slots[0], len(slots)
        with torch.inference_mode():
            for target, source in zip(self.slots(), experts.slots(), strict=True):
                if list(slots) == list(range(first, first + count)):
                    target[first : first + count].copy_(source)
                    continue
                for slot, expert in zip(slots, source, strict=True):
                    target[slot].copy_(expert)

    def note_report(self, report: object) -> None:
        """Print ``report`` with these experts from now on; only for experts that were packed with one."""
        object.__setattr__(self, "report", report)

    def resized(self, count: int) -> PackedWeights:
        """Return ``count`` uninitialised experts packed like these, to be filled by ``put``."""
        with torch.inference_mode(False):
            return self._map_tensors(lambda tensor: tensor.new_empty((count, *tensor.shape[1:])))


def refuse_other_layout(packed: PackedWeights, other: PackedWeights) -> None:
    """Raise InputError unless an expert of ``other`` is laid out as one of ``packed``.

    Everything that kernels read besides the contents of slots is compared: types, shapes, dtypes and options.
    """
    difference = _difference(type(packed).__name__, packed.resized(0), other.resized(0))
    if difference is not None:
        raise InputError(
            f"new experts are laid out unlike those of the layer: {difference}; send them in the format and storage of "
            "the old ones, or use MoELayer.swap or another layer"
        )


# What differs between packings of the same layout: a report, measured tiles, and the reach of calibrated inputs.
_CONTENTS = frozenset(("report", "tiles", "measured", "input_reach", "activations", "forms"))


def _difference(name: str, first: Any, second: Any) -> str | None:
    """Return the first difference between two packings without experts, as text, or None."""
    if type(first) is not type(second):
        return f"{name} is {type(second).__name__}, not {type(first).__name__}"
    if isinstance(first, Tensor):
        layouts = [(tuple(tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in (first, second)]
        return None if layouts[0] == layouts[1] else f"{name} is {layouts[1]}, not {layouts[0]}"
    if isinstance(first, tuple):
        items = enumerate(zip(first, second, strict=False))
        unlike = [_difference(f"{name}[{index}]", *pair) for index, pair in items]
        unlike.append(None if len(first) == len(second) else f"{name} has {len(second)} entries, not {len(first)}")
        return next((text for text in unlike if text is not None), None)
    if is_dataclass(first):
        names = [
            field.name for field in fields(first) if field.name not in _CONTENTS and not field.name.startswith("_")
        ]
        unlike = [_difference(f"{name}.{entry}", getattr(first, entry), getattr(second, entry)) for entry in names]
        return next((text for text in unlike if text is not None), None)
    return None if first == second else f"{name} is {second}, not {first}"


def map_tensors(owner: Any, change: Callable[[Tensor], Tensor], *names: str) -> Any:
    """Return the dataclass ``owner`` with ``change(tensor)`` for its tensors ``names`` that are not None."""
    tensors = {name: getattr(owner, name) for name in names}
    return replace(owner, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


def refuse_codes(batch: ContiguousBatch, kernel: str, format_name: str | None = None) -> None:
    """Raise InputError for a batch of codes that ``kernel`` would read as numbers, or could no longer weight.

    format_name: of the codes that it multiplies, None for a kernel that takes only tokens.
    """
    if batch.scale is None:
        return
    if format_name is None:
        raise InputError(f"{kernel}: the batch is {batch.x.dtype} codes with scales, this kernel takes only tokens")
    if batch.x.dtype != torch.float8_e4m3fn or batch.input_weights is not None:
        weighted = "" if batch.input_weights is None else " and weights"
        raise InputError(
            f"{kernel}: the batch is {batch.x.dtype} with scales{weighted}; allowed are E4M3 codes of {format_name}, "
            "weighted before they are quantised"
        )


def require_expert_reach(weights: ExpertWeights[Any], form: ActivationFormat) -> None:
    """Raise InputError where ``form`` has a scale per expert and ``weights`` have not the reach of each expert."""
    if not form.by_expert:
        return
    experts, reach = weights.down.shape[0], weights.expert_reach
    if reach is None or reach.shape != (experts, 2):
        found = "none" if reach is None else f"{tuple(reach.shape)}"
        raise InputError(
            f"activation format {form.name}: found expert_reach {found}, allowed: ({experts}, 2); load weights with "
            "calibrated scales, pass ExpertWeights(expert_reach=...), or take nvfp4_static or nvfp4"
        )


def refuse_fast(problem: ExpertsProblem) -> str | None:
    """Return why a kernel without approximate activation functions cannot run ``problem``, or None."""
    if problem.activation.fast:
        return "fast=True was requested for the activation; it has only the exact functions. Plan with fast=False"
    return None


class ExpertKernel(Protocol):
    """One row of ``KERNELS``.

    capturable: by a CUDA graph; False where sizes are read on the host. takes_codes: also runs batches of E4M3 codes
    with scales, where the activations are such. pages: its packing keeps experts apart, and rows are stored wherever a
    batch requires, so that slots can hold any experts.
    """

    name: str
    capturable: bool = False
    takes_codes: bool = False
    pages: bool = False

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Return why this kernel cannot run ``problem``, with numbers, or None when it can."""
        return None

    def refuse_adapters(self, problem: ExpertsProblem) -> str | None:
        """Return why ``run`` cannot add the changes of adapters for ``problem``, or None when it can."""
        return None

    def kernels(self, problem: ExpertsProblem) -> tuple[str, str]:
        """Return the names of the kernels that run gate_up and down of ``problem``."""
        return self.name, self.name

    def repacks(self, weight_format: str, activation_format: str) -> bool:
        """Return whether packing copies the codes of ``weight_format`` into new tensors."""
        return False

    def multiplied_as(self, activation_format: str) -> str | None:
        """Return as what tensor cores multiply activations of ``activation_format``; None: as they are stored."""
        return None

    def tiling(self, problem: ExpertsProblem) -> Tiling:
        """Return how batches of ``problem`` will be cut, as far as that follows from the problem."""
        return NO_TILES

    def slot_bytes(self, problem: ExpertsProblem) -> int:
        """Return the most bytes of a packed expert, for kernels with ``pages``."""
        raise AssertionError(f"{self.name} has no pages")

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Return the temporary memory that ``run`` and ``run_unsorted`` take at most, by name."""
        ...

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedWeights:
        """Bring logical weights into the kernel's layout; the source may be dropped afterwards."""
        ...
