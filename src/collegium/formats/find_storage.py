"""Turn checkpoint tensors into payload fields: look up the storage, check names, dtypes and shapes, cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InputError, MissingTensorError, TensorMismatchError, UnknownTensorError
from ..types import named
from .codecs import e8m0_values, look_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .payload import Part, Payload, Storage

__all__ = ["SAFETENSORS_DTYPES", "check_cut", "find_storage", "pad_last", "promote_scales", "take"]

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


def find_storage(cls: type[Payload], name: str) -> Storage:
    """Return the storage of ``cls`` called ``name``; SpecError lists the known ones."""
    return named(cls.storages, name, f"{cls.name}: storage {name!r} is not known, allowed: ")


def take(
    cls: type[Payload], storage: Storage, parts: Mapping[str, Tensor], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return the parts as ``[*leading, *part shape]`` in the storage's order, output-first.

    Size-1 dimensions are ignored (scalars as ``[1]``, row scales as ``[N]`` or ``[N, 1]``), and a number per matrix may
    be stored once for all matrices. Raises MissingTensorError, UnknownTensorError and TensorMismatchError.
    """
    if len(shape) < 2 or min(shape) < 1:
        raise InputError(f"{cls.name}: from_parts needs a logical shape [..., N, K], found {list(shape)}")
    known = {part.suffix: part for part in storage.parts}
    for suffix in parts:
        if suffix not in known:
            raise UnknownTensorError(
                f"{cls.name} in {storage.name} storage has no part {suffix!r}, allowed: {', '.join(known)}"
            )
    taken: dict[str, Tensor] = {}
    for suffix, part in known.items():
        if suffix in parts:
            fitted = _fit(f"{cls.name} {suffix}", part, parts[suffix], shape)
            taken[suffix] = fitted.mT if part.transposed else fitted
        elif part.required:
            present = ", ".join(parts) or "nothing"
            raise MissingTensorError(
                f"{cls.name} in {storage.name} storage needs the part {suffix!r}, found: {present}"
            )
    return taken


def _fit(what: str, part: Part, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    # A GGUF block type is not in the table; it is stored as bytes.
    if tensor.dtype not in [SAFETENSORS_DTYPES.get(name, torch.uint8) for name in part.dtypes]:
        raise TensorMismatchError(f"{what} is {tensor.dtype}, allowed: {', '.join(part.dtypes)}")
    lead = shape[:-2]
    rows, columns = shape[-2:]
    if part.repeats and tensor.dim() == len(shape):
        part = part.fitted("", tuple(tensor.shape), rows)
    expected = (*lead, *part.stored_shape(rows, columns))
    if tuple(tensor.shape) == expected or part.any_length:
        return tensor
    if [n for n in tensor.shape if n != 1] == [n for n in expected if n != 1]:
        return tensor.reshape(expected)
    if expected == lead and tensor.numel() == 1:
        return tensor.reshape(()).repeat(lead)
    raise TensorMismatchError(
        f"{what} is {list(tensor.shape)}, a logical {list(shape)} needs {list(expected)}; "
        "check the sizes in the config and the format of this tensor"
    )


def promote_scales(scales: Tensor) -> Tensor:
    """Return BF16, FP16, FP32 or E8M0 scales (also as bytes) as exact float32."""
    if scales.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return look_up(e8m0_values(scales.device), scales.view(torch.uint8))
    return scales.float()


def pad_last(codes: Tensor, size: int, valid: int, fill: int) -> Tensor:
    """Return uint8 ``codes [..., n]`` as ``[..., size]``, with the elements from ``valid`` on set to ``fill``."""
    if codes.shape[-1] == size == valid:
        return codes
    padded = codes.new_full((*codes.shape[:-1], size), fill)
    padded[..., :valid] = codes[..., :valid]
    return padded


def check_cut(what: str, start: int, stop: int, size: int, step: int) -> None:
    """Raise InputError unless ``0 <= start < stop <= size`` and both are multiples of ``step`` or the end."""
    inside = 0 <= start < stop <= size
    if not inside or start % step or (stop % step and stop != size):
        raise InputError(
            f"{what} {start}:{stop} cannot be cut out of {size}: both ends must be multiples of {step} or "
            f"the end {size}, and the cut not empty; choose other boundaries or another tensor-parallel size"
        )
