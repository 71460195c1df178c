"""Weight formats: one payload class per file, with exact encode and decode and the published storages."""

from ..types import named
from .bnb4 import Bnb4
from .fp8_block import Fp8Block
from .fp8_channel import Fp8Channel
from .fp8_tensor import Fp8Tensor
from .from_scales import payload_from_scales
from .gguf import Gguf
from .int4_group import Int4Group
from .int_affine import Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from .mxfp4 import MxFp4
from .mxfp8 import MxFp8
from .nvfp4 import NvFp4
from .payload import Part, Payload, Storage
from .unquantised import Bf16, Fp16, Fp32

__all__ = [
    "FORMATS",
    "Bf16",
    "Bnb4",
    "Fp8Block",
    "Fp8Channel",
    "Fp8Tensor",
    "Fp16",
    "Fp32",
    "Gguf",
    "Int4Affine",
    "Int4Group",
    "Int4Ordered",
    "Int8Affine",
    "Int8Ordered",
    "MxFp4",
    "MxFp8",
    "NvFp4",
    "Part",
    "Payload",
    "Storage",
    "by_name",
    "payload_from_scales",
]

FORMATS: tuple[type[Payload], ...] = (
    Bf16,
    Fp16,
    Fp32,
    Fp8Block,
    Fp8Tensor,
    Fp8Channel,
    MxFp8,
    MxFp4,
    NvFp4,
    Int4Group,
    Int4Affine,
    Int4Ordered,
    Int8Affine,
    Int8Ordered,
    Bnb4,
    Gguf,
)


def by_name(name: str, *, to_write: bool = False) -> type[Payload]:
    """Return the format called ``name``.

    to_write: exclude read-only formats. Raises SpecError, which lists the known names.
    """
    known = [form for form in FORMATS if form.name == name or not (to_write and form.read_only)]
    return named(known, name, f"weight format {name!r} is not known, allowed: ")
