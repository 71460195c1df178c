"""Base class of the weight formats: a frozen dataclass of exactly the tensors that the format stores.

A payload describes a stack of matrices with logical shape ``[..., N, K]``: any number of leading dimensions, N
output rows, K input columns; groups always run along K. ``y = x @ W.T``. All tensors of a payload share the leading
dimensions, so a payload of all experts can be indexed by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import InputError
from .find_storage import check_cut

__all__ = ["Part", "Payload", "Storage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One checkpoint tensor of a quantised matrix ``[N, K]``.

    suffix: suffix of the module path, for instance ``.weight_scale_inv``.
    dtypes: allowed safetensors dtype names.
    rows_per, columns_per: logical rows and columns that one stored element covers along its axis, so the stored
        shape is ``[ceil(N / rows_per), ceil(K / columns_per), *inner]``; 0 means the axis is absent. With both 0 the
        part is one number per matrix, stored as ``[]`` or ``[1]``.
    inner: trailing stored dimensions, for instance the 16 bytes of a gpt-oss block.
    required: whether a checkpoint without it is refused.
    if_present: read if it exists although it is not required.
    transposed: stored with the axes in reverse order, input first.
    flat: stored as ``[ceil(N * K / columns_per)]``; with ``columns_per`` 0 a list of any length.
    repeats: one stored row may serve several output rows, as many as make the shape fit.
    by_dtype: dtype name to ``(columns_per, inner)`` where these depend on the dtype.
    """

    suffix: str
    dtypes: tuple[str, ...]
    rows_per: int = 1
    columns_per: int = 1
    inner: tuple[int, ...] = ()
    required: bool = True
    if_present: bool = False
    transposed: bool = False
    flat: bool = False
    repeats: bool = False
    by_dtype: Mapping[str, tuple[int, tuple[int, ...]]] | None = None

    @property
    def any_length(self) -> bool:
        """Whether the stored shape is unconstrained."""
        return self.flat and not self.columns_per

    def fitted(self, dtype: str, stored: tuple[int, ...], rows: int) -> Part:
        """Return this part adapted to a tensor of ``dtype`` and shape ``stored``, for a matrix of ``rows`` rows."""
        if self.by_dtype is not None and dtype in self.by_dtype:
            per, inner = self.by_dtype[dtype]
            return replace(self, columns_per=per, inner=inner)
        if self.repeats and len(stored) > 1 and 0 < stored[-2] < rows and rows % stored[-2] == 0:
            return replace(self, rows_per=rows // stored[-2])
        return self

    def stored_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape this part has for a logical matrix ``[rows, columns]``."""
        if self.flat:
            return (-(-rows * columns // self.columns_per) if self.columns_per else 0,)
        head = tuple(-(-n // per) for n, per in ((rows, self.rows_per), (columns, self.columns_per)) if per)
        shape = (*head, *self.inner)
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One published way to store a format: ``name`` (``modelopt``, ``compressed-tensors``, ...) and its parts."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """Base class of the weight formats; subclasses add tensor fields and set the class attributes below.

    shape: logical shape ``(..., N, K)``, without the padding that storage may have along N or K.

    Class attributes. name: the name in plans and tables. group: input columns that share a scale (0: no groups).
    row_block: output rows that share a scale (1 for row-wise formats). tolerance: bound on the relative L2 error of
    encode followed by decode for Gaussian weights. storages: the published layouts that ``from_parts`` accepts.
    read_only: the format can be read and run but not written. by_row: the tensors whose first axis after the leading
    dimensions is the output row. ordered_columns: an index assigns columns to groups, in any order. e8m0_scales: scales
    are bytes that hold a power of two.
    """

    shape: tuple[int, ...]

    name: ClassVar[str]
    group: ClassVar[int] = 0
    row_block: ClassVar[int] = 1
    tolerance: ClassVar[float] = 0.0
    storages: ClassVar[tuple[Storage, ...]]
    read_only: ClassVar[bool] = False
    by_row: ClassVar[tuple[str, ...]] = ("codes", "scales")
    ordered_columns: ClassVar[bool] = False
    e8m0_scales: ClassVar[bool] = False

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Quantise ``weight [..., N, K]`` (any floating dtype) into this format, on the weight's device.

        Raises InputError for a read-only format.
        """
        raise InputError(
            f"{cls.name} is read-only: its checkpoints are loaded and run, but {list(weight.shape)} cannot be encoded "
            "into it; encode into int4_group, mxfp4, nvfp4 or an 8-bit format"
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: the exact float32 value of every element, rounded once to ``dtype``."""
        raise NotImplementedError

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Build the payload of logical ``shape`` from checkpoint tensors keyed by part suffix, byte for byte.

        The tensors may carry leading dimensions (stacked experts); ``shape`` then has them too.
        """
        raise NotImplementedError

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True where a scale is forbidden by the format.

        NaN, infinite and negative scales and E8M0 byte 255 are forbidden, and zero scales in most formats.
        """
        raise NotImplementedError

    def _per_matrix(self, mask: Tensor) -> Tensor:
        """Reduce a bool mask ``[*leading dims, ...]`` to the leading dimensions."""
        return mask.reshape(*self.shape[:-2], -1).any(-1)

    def columns(self, start: int, stop: int) -> Self:
        """Return a view of input columns ``start:stop``; both must be on group boundaries or at the end."""
        step, runs = self._runs()
        check_cut(f"{self.name}: input columns", start, stop, self.shape[-1], step)
        cut = {
            name: getattr(self, name)[..., start // per * count : -(-stop // per) * count]
            for name, (per, count) in runs.items()
        }
        return replace(self, shape=(*self.shape[:-1], stop - start), **cut)

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        """Return the alignment of column cuts, and for each tensor (columns, number of elements that hold them)."""
        return 1, {"codes": (1, 1)}

    def rows(self, start: int, stop: int) -> Self:
        """Return a view of output rows ``start:stop``; both must be on row-block boundaries or at the end."""
        runs = self._row_runs()
        axis = len(self.shape) - 2
        check_cut(f"{self.name}: output rows", start, stop, self.shape[-2], max(runs.values()))
        ends = {name: (start // per, -(-stop // per)) for name, per in runs.items()}
        cut = {name: getattr(self, name).narrow(axis, first, last - first) for name, (first, last) in ends.items()}
        return replace(self, shape=(*self.shape[:-2], stop - start, self.shape[-1]), **cut)

    def every(self, step: int, offset: int, count: int) -> Self:
        """Return a view of ``count`` output rows from ``offset`` on, every ``step``-th.

        Raises InputError if rows share a scale block.
        """
        shared = max(self._row_runs().values())
        if shared > 1:
            raise InputError(
                f"{self.name}: rows {offset}, {offset + step}, ... of {self.shape[-2]} cannot be taken out of "
                f"blocks of {shared} rows that share a scale; export gate and up separately, or without row blocks"
            )
        axis = len(self.shape) - 2
        index = (slice(None),) * axis + (slice(offset, offset + step * count, step),)
        cut = {name: getattr(self, name)[index] for name in self._row_runs()}
        return replace(self, shape=(*self.shape[:-2], count, self.shape[-1]), **cut)

    def _row_runs(self) -> Mapping[str, int]:
        """Return the number of output rows per stored row, by tensor."""
        return dict.fromkeys(self.by_row, 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by field name."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in pairs if isinstance(value, torch.Tensor)}

    @property
    def scale_block(self) -> tuple[int, int]:
        """Output rows and input columns that share a scale; 0 columns without groups."""
        return self.row_block, self.group

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self.tensors().values())).device

    def __getitem__(self, index: int | slice) -> Self:
        """Index or slice the first leading dimension, for instance one expert."""
        selected = {name: tensor[index] for name, tensor in self.tensors().items()}
        leading = () if isinstance(index, int) else (len(range(*index.indices(self.shape[0]))),)
        return replace(self, shape=(*leading, *self.shape[1:]), **selected)

    def to(self, device: torch.device | str) -> Self:
        """Copy every tensor to ``device``."""
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    def repeated(self, count: int) -> Self:
        """Return an uninitialised payload of ``count`` payloads shaped like this one; fill it with ``put``."""
        empty = {name: tensor.new_empty((count, *tensor.shape)) for name, tensor in self.tensors().items()}
        return replace(self, shape=(count, *self.shape), **empty)

    def put(self, index: int, payload: Self) -> None:
        """Copy ``payload`` into entry ``index`` of the first leading dimension, in place."""
        for name, target in self.tensors().items():
            target[index].copy_(payload.tensors()[name])
