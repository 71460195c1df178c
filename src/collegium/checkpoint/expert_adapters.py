"""LoRA adapters of PEFT for experts, read without being merged: the pairs of each expert, stacked by projection."""

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..adapters import ExpertAdapter, ExpertAdapters, LowRankPair
from ..errors import ConfigError, DuplicateTensorError
from .adapter import MERGE, AdapterCollector, Pair, open_adapter
from .adapter_names import ExpertModule, StackModule, StackParameter
from .layer_view import CheckpointLayer
from .layout import Projection
from .reader import Checkpoint

__all__ = ["read_expert_adapters"]

_LOG = logging.getLogger(__name__)

_Scaled = tuple[Tensor, Tensor, float]  # A [r, K], B [N, r] and scale of one expert


class _PairCollector(AdapterCollector):
    """Collects the pairs of routed experts, and the names of modules outside them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # pyright: ignore[reportArgumentType]
        self.pairs = defaultdict[int, dict[tuple[Projection, int], _Scaled]](dict)
        self._origin: dict[tuple[int, int, Projection], str] = {}

    def change_expert(self, module: ExpertModule, pair: Pair, scale: float) -> None:
        """Store the pair of one projection of one expert; raises DuplicateTensorError for a second one."""
        key = module.layer, module.expert, module.projection
        other = self._origin.setdefault(key, pair.path)
        if other != pair.path:
            raise DuplicateTensorError(
                f"{self.config.path}: {other} and {pair.path} both change {module.projection} of expert "
                f"{module.expert} in layer {module.layer}; keep one of them"
            )
        self.pairs[module.layer][module.projection, module.expert] = (pair.a, pair.b, scale)
        self.summary.experts.add((module.layer, module.expert))

    def add_flat(self, module: StackModule, parameter: StackParameter, pair: Pair, rank: int, scale: float) -> None:
        """Raise ConfigError: one pair changes the rows of all experts together."""
        raise ConfigError(
            f"{self.config.path}: the adapter has {pair.path}, a matrix of rank {rank} for all experts of layer "
            f"{module.layer} together; only pairs of one expert, or stacks of pairs, stay unmerged. {MERGE}"
        )

    def add_matrix(self, pair: Pair) -> None:
        """Note a module outside the routed experts."""
        self.summary.modules.add(pair.path)

    def replace(self, path: str, parameter: str, copied: bool, tensor: Tensor) -> None:
        """Note a parameter outside the routed experts that the adapter replaces by another one."""
        super().replace(path, parameter, copied, tensor)
        if self.replaced:
            self.summary.modules.add(path)

    def layer_of(self, path: str) -> int | None:
        """Return the layer whose routed experts the module at ``path`` holds, None for another module."""
        experts = self.names.experts(path)
        return None if experts is None else experts.layer


def read_expert_adapters(
    checkpoint: Checkpoint,
    adapters: Sequence[str | os.PathLike[str]],
    *,
    layer: int | None = None,
    experts_only: bool = False,
    download: bool = False,
) -> dict[int, ExpertAdapters]:
    """Return by layer the adapters of the experts of ``checkpoint``, whose weights may be quantised.

    adapters: folders, or ids of the Hugging Face Hub in the local cache; their order is that of adapter ids, and a
    layer that one of them leaves alone has zeros in its place. layer: of which pairs are read; None: of all.
    experts_only: leave out what adapters change outside the routed experts, with a warning in the log, instead of
    raising ConfigError. download: fetch what the cache lacks.

    Raises the errors of ``with_adapter``, and ConfigError for an adapter that changes no routed experts.
    """
    if isinstance(adapters, str | os.PathLike):
        raise ConfigError(f"adapters={adapters!r} was passed; allowed: a list of folders or ids")
    pairs: list[Mapping[int, Mapping[tuple[Projection, int], _Scaled]]] = []
    names: list[str] = []
    for adapter in adapters:
        collector = _collect(checkpoint, adapter, layer, download=download)
        _refuse_others(collector, experts_only=experts_only)
        pairs.append(collector.pairs)
        names.append(os.fspath(adapter))
    layers = sorted({number for by_layer in pairs for number in by_layer})
    counts = {number: CheckpointLayer.open(checkpoint, number).spec.num_experts for number in layers}
    return {
        number: ExpertAdapters(
            tuple(
                _stacked(name, by_layer.get(number, {}), counts[number], pairs, number)
                for name, by_layer in zip(names, pairs, strict=True)
            )
        )
        for number in layers
    }


def _collect(
    checkpoint: Checkpoint, adapter: str | os.PathLike[str], layer: int | None, *, download: bool
) -> _PairCollector:
    files = open_adapter(adapter, download=download)
    collector = _PairCollector(checkpoint, files.config)
    for name, match in files.full.items():
        collector.replace(match[1], match[3], match[2] is not None, files.read(name))
    collector.check_saved([match[1] for match in files.full.values()])
    found = False
    for path, levels in files.modules.items():
        number = collector.layer_of(path)
        if number is None:
            collector.summary.modules.add(path)
            continue
        found = True
        if layer in (None, number):
            collector.add(path, files.pairs(levels))
    if not found:
        raise ConfigError(
            f"{files.root}: the adapter changes {len(files.modules)} modules, none of them routed experts of "
            f"{checkpoint.path}; only adapters of experts stay unmerged. {MERGE}"
        )
    return collector


def _refuse_others(collector: _PairCollector, *, experts_only: bool) -> None:
    """Raise ConfigError for modules outside the experts, or report them in the log."""
    paths = sorted(collector.summary.modules)
    if not paths:
        return
    kinds = ", ".join(sorted({path.rpartition(".")[2] for path in paths}))
    text = f"{collector.config.path}: the adapter changes {len(paths)} modules outside the routed experts ({kinds})"
    if not experts_only:
        raise ConfigError(f"{text}; unmerged adapters change experts alone. {MERGE}, or pass experts_only=True")
    _LOG.warning("%s, which are left out", text)


def _stacked(
    name: str,
    pairs: Mapping[tuple[Projection, int], _Scaled],
    experts: int,
    every: Sequence[Mapping[int, Mapping[tuple[Projection, int], _Scaled]]],
    layer: int,
) -> ExpertAdapter:
    """Return one adapter of a layer; an adapter without pairs gets zeros in the sizes of another one's."""
    projections: set[Projection] = {projection for projection, _ in pairs}
    if not projections:
        (projection, _), (a, b, _) = next(item for other in every for item in other.get(layer, {}).items())
        zero = LowRankPair(a=a.new_zeros(experts, 1, a.shape[1]), b=b.new_zeros(experts, b.shape[0], 1))
        return ExpertAdapter(name=name, **{projection: zero})
    stacks = {projection: _stack(pairs, projection, experts) for projection in projections}
    return ExpertAdapter(name=name, gate=stacks.get("gate"), up=stacks.get("up"), down=stacks.get("down"))


def _stack(pairs: Mapping[tuple[Projection, int], _Scaled], projection: Projection, experts: int) -> LowRankPair:
    """Return the pairs of a projection, with zeros for experts without one and in ranks that an expert lacks."""
    by_expert = {expert: scaled for (name, expert), scaled in pairs.items() if name == projection}
    a, b, _ = next(iter(by_expert.values()))
    rank = max(a.shape[0] for a, _, _ in by_expert.values())
    dtype = a.dtype
    for other, _, _ in by_expert.values():
        dtype = torch.promote_types(dtype, other.dtype)
    stacked_a = torch.zeros(experts, rank, a.shape[1], dtype=dtype, device="cpu")
    stacked_b = torch.zeros(experts, b.shape[0], rank, dtype=dtype, device="cpu")
    scales = torch.zeros(experts, dtype=torch.float32, device="cpu")
    for expert, (a, b, scale) in by_expert.items():
        stacked_a[expert, : a.shape[0]] = a
        stacked_b[expert, :, : b.shape[1]] = b
        scales[expert] = scale
    return LowRankPair(a=stacked_a, b=stacked_b, scale=scales)
