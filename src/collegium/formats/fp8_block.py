"""FP8 blocks: E4M3 codes with one float32 scale per block of rows and columns, 128 x 128 unless stated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import InputError
from .codecs import as_float32, e4m3_codes, e4m3_values, fp8_scales
from .find_storage import find_storage, promote_scales, take
from .grouped import Scaled
from .payload import Part, Storage

__all__ = ["Fp8Block"]

_BLOCK = (128, 128)


def _storage(name: str, suffix: str) -> Storage:
    scale = Part(
        suffix=suffix, dtypes=("F32", "BF16", "F16", "F8_E8M0", "U8"), rows_per=_BLOCK[0], columns_per=_BLOCK[1]
    )
    return Storage(name=name, parts=(Part(suffix=".weight", dtypes=("F8_E4M3",)), scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Block(Scaled):
    """FP8 blocks: ``codes [..., N, K]`` float8_e4m3fn, ``scales [..., ceil(N/b0), ceil(K/b1)]`` float32.

    block: (b0, b1), rows and columns of one block; the last block of either axis may be partial.
    """

    block: tuple[int, int] = _BLOCK

    name: ClassVar[str] = "fp8_block"
    group: ClassVar[int] = _BLOCK[1]
    row_block: ClassVar[int] = _BLOCK[0]
    tolerance: ClassVar[float] = 0.03
    storages: ClassVar[tuple[Storage, ...]] = (
        _storage("finegrained-fp8", ".weight_scale_inv"),
        _storage("finegrained-fp8-stack", "_scale_inv"),
        _storage("mistral", ".qscale_weight"),
        _storage("deepseek-v4", ".scale"),
        _storage("compressed-tensors", ".weight_scale"),
        _storage("modelopt", ".weight_scale"),
    )

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns of one block."""
        return self.block

    @classmethod
    def encode(cls, weight: Tensor, *, power_of_two: bool = False, block: tuple[int, int] = _BLOCK) -> Self:
        """Quantise ``weight [..., N, K]``: scale amax / 448 of the block, codes to nearest even.

        power_of_two: round the scale up to a power of two, so that no code saturates. A block of zeros gets scale 1.
        Raises InputError for NaN or infinite weights.
        """
        values = as_float32(weight, cls.name)
        *lead, rows, columns = weight.shape
        padded = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
        blocks = padded.view(*lead, -1, block[0], padded.shape[-1] // block[1], block[1])
        scales = fp8_scales(blocks.abs().amax((-3, -1)), exponent_only=power_of_two)
        codes = e4m3_codes(blocks / scales[..., None, :, None]).view(padded.shape)
        codes = codes[..., :rows, :columns].contiguous()
        return cls(shape=tuple(weight.shape), codes=codes, scales=scales, block=block)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e4m3(code) * scale as one float32 product, rounded once to ``dtype``."""
        spread = self.scales.repeat_interleave(self.block[0], dim=-2)[..., : self.shape[-2], :]
        spread = spread.reshape(-1, spread.shape[-1])
        return self._decode(dtype, e4m3_values(self.codes.device), lambda span: spread[span], self.block[1])

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...], block: tuple[int, int] = _BLOCK
    ) -> Self:
        """Take codes as stored and convert F32, BF16, F16 or E8M0 scales (U8 holds E8M0) to exact float32.

        block: the config's ``weight_block_size``. ModelOpt's scales ``[N/128, 1, K/128, 1]`` are accepted.
        """
        if min(block) < 1:
            raise InputError(f"{cls.name}: block is {block}, allowed: two positive sizes, usually (128, 128)")
        layout = find_storage(cls, storage)
        weight, scale = layout.parts
        layout = replace(layout, parts=(weight, replace(scale, rows_per=block[0], columns_per=block[1])))
        codes, scales = take(cls, layout, parts, shape).values()
        return cls(shape=tuple(shape), codes=codes, scales=promote_scales(scales), block=(block[0], block[1]))

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        return self.block[1], {"codes": (1, 1), "scales": (self.block[1], 1)}

    def _row_runs(self) -> Mapping[str, int]:
        return {"codes": 1, "scales": self.block[0]}
