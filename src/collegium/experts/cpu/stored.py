"""Checks and shapes of payloads that both CPU kernels need before they re-lay them."""

from torch import Tensor

from ...errors import BadScaleError
from ...formats import Fp8Block, Fp8Channel, Fp8Tensor, MxFp4, MxFp8, NvFp4, Payload

__all__ = ["by_row", "flat", "refuse_faults"]


def flat(stored: Tensor) -> Tensor:
    """Merge the parts of ``[E, P, N, any]`` into its rows."""
    return stored.flatten(1, 2) if stored.dim() > 3 else stored


def by_row(per_matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Repeat one number a matrix ``[E]`` or ``[E, P]`` for each of its rows: ``[E, P * N]`` float32."""
    per_row = per_matrix.reshape(*shape[:-2], 1).float().expand(shape[:-1])
    return per_row.reshape(shape[0], -1).contiguous()


def refuse_faults(payload: Payload, name: str) -> None:
    """Raise BadScaleError where decoding would turn a NaN of ``payload`` into a number; elsewhere it stays NaN."""
    hides_nan = isinstance(payload, MxFp4 | MxFp8 | NvFp4 | Fp8Tensor | Fp8Channel | Fp8Block)
    for expert in range(payload.shape[0] if hides_nan else 0):
        if bool(payload[expert].faults().any()):
            raise BadScaleError(
                f"{name}, local expert {expert}: {payload.name} holds a forbidden scale or a NaN; its result would "
                "not be a number. Check the file, or load it again with the audit on."
            )
