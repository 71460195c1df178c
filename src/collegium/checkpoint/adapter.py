"""A LoRA adapter of PEFT, merged into a checkpoint's plain weights as they are read.

Experts that are modules of their own have a pair of matrices each; a stack of experts (``target_parameters``) has one
pair for all. Every other matrix that the adapter names is merged too. Source: PEFT 0.21, ``tuners/lora/config.py``.
"""

import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from torch import Tensor, uint8

from ..errors import BadScaleError, ConfigError, MissingTensorError, TensorMismatchError
from ..models import PREFIXES, Names
from ..ops.low_rank import LowRank, pairs_of_stack
from .header import FLOATS, read_header, read_json
from .index import index_of
from .layout import Projection, part_name, projections
from .opened import CheckpointLayer
from .reader import Checkpoint, bounds_of

__all__ = ["with_adapter"]

_LOG = logging.getLogger(__name__)
# Entries of adapter_config.json that are read or change no weight; any other must be empty or false.
_KNOWN = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "revision", "target_modules", "target_parameters", "task_type",
    "use_rslora",
))  # fmt: skip
# Other ways to begin, such as "pissa", take a part out of the base weights.
_ONLY = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal")}
_HALF = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_PLACE = re.compile(r"((?:[A-Za-z_]\w*\.)+)(\d+)\.(.+)")
_Place = tuple[int, Projection] | Names


class _Merged(Checkpoint):
    """A checkpoint that returns changed weights: added in float32, rounded once to the dtype they are stored in."""

    def __init__(self, base: Checkpoint, changes: Mapping[str, Sequence[LowRank]], digest: str) -> None:
        super().__init__(base.path, base.config, base.tensors)
        self._changes, self.merged = changes, digest

    def read_slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        tensor = super().read_slice(name, slices)
        if name not in self._changes:
            return tensor
        out = tensor.float().clone()
        for change in self._changes[name]:
            change.add_to(out, bounds_of(self.info(name), slices))
        return out.to(tensor.dtype)


def with_adapter(checkpoint: Checkpoint, adapter: str | os.PathLike[str]) -> Checkpoint:
    """Return ``checkpoint`` with the LoRA adapter in folder ``adapter`` merged into its BF16, FP16 and FP32 weights.

    Added is ``scale * B @ A`` in float32, rounded once; a line of the log says to what. Raises ConfigError for an
    option that is not implemented, a target that the checkpoint does not have and one that is quantised,
    MissingTensorError where A or B is missing, TensorMismatchError for another rank or size, BadScaleError for NaN.
    """
    root = Path(adapter)
    rank, scale = _settings(root / "adapter_config.json")
    own = Checkpoint(root, {}, read_header(root / "adapter_model.safetensors"))
    changes, digest = defaultdict[str, list[LowRank]](list), hashlib.sha256(f"{rank} {scale}".encode())
    experts, others, (places, heads) = set[tuple[int, int]](), set[str](), _places(checkpoint)
    opened = cache(partial(CheckpointLayer.open, checkpoint))  # a layer has hundreds of pairs
    for path, halves in _pairs(own).items():
        a, b = (own.read(halves[half]) for half in "AB")
        digest.update(b"".join(half.view(uint8).numpy().tobytes() for half in (a, b)))
        if not bool(a.isfinite().all() and b.isfinite().all()):
            raise BadScaleError(f"{root}: {path} holds NaN or infinity; train or download the adapter again")
        match = _PLACE.fullmatch(path.replace(".base_layer", ""))
        # Layers below another prefix, a speech model's or a draft model's, are not those of the text model.
        place = places.get(match[3]) if match and match[1] + "{layer}." in heads else None
        if match is None or place is None:
            others.add(path.rpartition(".")[2])
            name = path.replace(".base_layer", "") + ".weight"
            height, width = _plain(checkpoint, name, path)[-2:]
            _fit(path, (a, b), (rank, width), (height, rank))
            changes[name].append(LowRank(a=a, b=b, scale=scale, rows=range(height)))
            continue
        layer = opened(int(match[2]))
        for expert, which, one, two in _experts(layer, place, path, (a, b), rank):
            at = layer.source(expert, which)
            name, index = part_name(at, layer.stored_as(at).layout.parts[0]), None if at.experts is None else expert
            _plain(checkpoint, name, path)
            rows = range(at.offset, at.offset + at.step * at.rows, at.step)
            changes[name].append(LowRank(a=one, b=two, scale=scale, rows=rows, index=index, transposed=at.transposed))
            experts.add((layer.number, expert))
    into = [f"{len(experts)} experts of layers {min(experts)[0]} to {max(experts)[0]}"] if experts else []
    into += [f"outside the experts {', '.join(sorted(others))}"] if others else []
    _LOG.warning("%s: rank %d, scale %g, merged into %s", root, rank, scale, " and ".join(into))
    return _Merged(checkpoint, changes, digest.hexdigest())


def _settings(path: Path) -> tuple[int, float]:
    """Return rank and scale."""
    config = read_json(path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    wrong = {key: value for key, value in config.items() if value and key not in _KNOWN}
    wrong |= {key: config[key] for key, allowed in _ONLY.items() if config.get(key, allowed[0]) not in allowed}
    if config.get("target_parameters") and not re.match(r"0\.[2-9]\d|[1-9]", str(config.get("peft_version"))):
        wrong["target_parameters"] = "stacks written before PEFT 0.20, whose A and B may be swapped"
    if wrong or not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        wrong = wrong or {"r": rank, "lora_alpha": alpha}
        listed = ", ".join(f"{key}={value!r:.100}" for key, value in wrong.items())
        raise ConfigError(
            f"{path}: {listed} is not implemented; allowed is plain LoRA without biases, with one r and one lora_alpha "
            "for all modules. Merge the adapter with PEFT (merge_and_unload) and load the model that it saves"
        )
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _pairs(own: Checkpoint) -> dict[str, dict[str, str]]:
    """Return the names of A and B of each module."""
    found = defaultdict[str, dict[str, str]](dict)
    for name, info in own.tensors.items():
        match = _HALF.fullmatch(name)
        if match is None or info.dtype not in FLOATS or len(info.shape) != 2:
            known = "matrices lora_A.weight and lora_B.weight in BF16, F16 or F32"
            raise ConfigError(f"{own.path}: {name}, {info.dtype} {info.shape}, is in the adapter; known are {known}")
        found[match[1]][match[2]] = name
    missing = [f"{path}.lora_{half}.weight" for path, halves in found.items() for half in "AB" if half not in halves]
    if missing or not found:
        what = f"{missing[0]} missing beside its other half" if missing else "holds no lora_A and lora_B"
        raise MissingTensorError(f"{own.path}: {what}; download the adapter again")
    return dict(sorted(found.items()))


def _places(checkpoint: Checkpoint) -> tuple[dict[str, _Place], set[str]]:
    """Return what the modules below a layer are to an adapter: a projection of an expert, or all experts in a stack.

    And the prefixes that a layer may have.
    """
    family, spec = index_of(checkpoint).family, CheckpointLayer.open(checkpoint).spec
    places: dict[str, _Place] = {}
    for names in (family.names, *family.others):
        if names.stacked.up is None:
            places.setdefault(names.stacked.gate_up.removeprefix(names.layer).rpartition(".")[0], names)
        for which in projections(spec) if names.up else ():
            path = names.projection(which).removeprefix(names.layer)
            places |= {path.format(expert=expert): (expert, which) for expert in range(spec.num_experts)}
    return places, {*PREFIXES, *(names.layer for names in (family.names, *family.others))}


def _experts(
    layer: CheckpointLayer, place: _Place, path: str, pair: tuple[Tensor, Tensor], rank: int
) -> Iterator[tuple[int, Projection, Tensor, Tensor]]:
    """Yield (expert, projection, A, B) of one module of the adapter."""
    (a, b), experts = pair, layer.spec.num_experts
    *upper, lower = projections(layer.spec)
    wide, hidden = layer.spec.intermediate_size, layer.spec.expert_hidden_size
    if isinstance(place, tuple):
        rows, columns = (hidden, wide) if place[1] == lower else (wide, hidden)
        _fit(path, pair, (rank, columns), (rows, rank))
        yield *place, a, b
        return
    # PEFT does not say which parameter of a module a pair is of; gate_up and down differ in size where there is a gate.
    if (hidden, wide) == (len(upper) * wide, hidden):
        msg = f"{path}: an expert's up and down are both {hidden} by {wide}, and its name does not say which it is of"
        raise ConfigError(f"{msg}. Merge the adapter with PEFT (merge_and_unload) and load the model that it saves")
    down = (b.shape[0], a.shape[1]) == (hidden, wide)
    rows, columns = (hidden, wide) if down else (len(upper) * wide, hidden)
    which: list[Projection] = [lower] if down else upper
    _fit(path, pair, (experts * rank, columns), (rows, experts * rank))
    for expert, (one, two) in enumerate(zip(*pairs_of_stack(a, b, experts), strict=True)):
        apart = two.unflatten(0, (-1, len(which))).unbind(1) if place.stacked.interleaved else two.chunk(len(which))
        for projection, half in zip(which, apart, strict=True):
            yield expert, projection, one, half


def _fit(path: str, pair: tuple[Tensor, Tensor], a: tuple[int, int], b: tuple[int, int]) -> None:
    found = tuple(pair[0].shape), tuple(pair[1].shape)
    if found != (a, b):
        msg = f"{path}: lora_A and lora_B are {found[0]} and {found[1]}, r and the checkpoint's sizes need {a} and {b}"
        raise TensorMismatchError(f"{msg}; is the adapter of another model, or were its parameters never swapped?")


def _plain(checkpoint: Checkpoint, name: str, path: str) -> tuple[int, ...]:
    """Return the shape of the weight that is changed."""
    if name not in checkpoint:
        raise ConfigError(f"the adapter has {path}, the checkpoint no {name}; is the adapter of another model?")
    info = checkpoint.info(name)
    if info.dtype not in FLOATS or len(info.shape) < 2:
        raise ConfigError(
            f"the adapter has {path}, and {name} is {info.dtype} {info.shape}; adapters are merged into matrices in "
            f"BF16, F16 and F32. Experts are written so by: collegium quantize {checkpoint.path} --to bf16"
        )
    return info.shape
