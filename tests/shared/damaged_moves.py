"""A Balancer whose arriving experts can be damaged before their checksum is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from collegium.balance.balancer import Balancer
from collegium.balance.mover import Mover

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["DamagingBalancer"]


class DamagingMover(Mover):
    """Calls ``damage`` with the tensors of each expert that arrives, if set."""

    damage: Callable[[tuple[Tensor, ...]], None] | None = None

    def _verify(self, parts: tuple[Tensor, ...], expected: Tensor) -> Tensor:
        if self.damage is not None:
            self.damage(parts)
        return super()._verify(parts, expected)


class DamagingBalancer(Balancer):
    """A Balancer for tests of the checksums."""

    mover_type: ClassVar[type[Mover]] = DamagingMover

    def damage(self, change: Callable[[tuple[Tensor, ...]], None] | None) -> None:
        """Let ``change`` modify what arrives on this rank before it is verified; None: nothing."""
        assert isinstance(self._mover, DamagingMover)
        self._mover.damage = change
