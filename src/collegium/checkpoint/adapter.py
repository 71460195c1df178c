"""A LoRA adapter of PEFT, merged into a checkpoint's plain weights as they are read.

Experts that are separate modules have a pair of matrices each; a stack of experts (``target_parameters``) has one pair
for all. Every other matrix that the adapter names is merged too. ``adapter_config`` holds PEFT's rules, and
``adapter_names`` finds the tensors.
"""

import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, uint8

from ..errors import BadScaleError, ConfigError, DuplicateTensorError, MissingTensorError, TensorMismatchError
from ..locate import locate
from ..models.base import text_of
from ..ops.low_rank import LowRank, pairs_of_stack
from .adapter_config import AdapterConfig
from .adapter_names import ExpertModule, NamesInMemory, StackModule, StackParameter
from .header import FLOATS, read_header
from .index import index_of
from .layer_view import CheckpointLayer
from .layout import part_name
from .reader import TORCH_DTYPES, Checkpoint, bounds_of

__all__ = ["MERGE", "AdapterCollector", "AdapterFiles", "Pair", "open_adapter", "with_adapter"]

_LOG = logging.getLogger(__name__)
# The adapter's name, "default", is part of tensor names that were not saved by PEFT itself.
_PAIR_NAME = re.compile(r"(?:base_model\.model\.)*(.+)\.lora_([AB])(?:\.default)?\.weight")
_FULL_NAME = re.compile(r"(?:base_model\.model\.)*((?:(?!\blora_|\bbase_layer\b).)+?)(\.base_layer)?\.(weight|bias)")
# What torch.compile, checkpointing of activations and FSDP put into names.
_WRAPPERS = re.compile(r"\b(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_NESTED = re.compile(r"(?:\.base_layer)*\Z")
_EMBEDDINGS = ("embed_tokens", "lm_head")
_TIED = (*_EMBEDDINGS, "embed", "head")  # names in files of modules whose weights config.json may tie
MERGE = "Merge the adapter with PEFT (merge_and_unload) and load the model that it saves"


class _MergedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged into its weights in float32, rounded once to the stored dtype.

    changes: low-rank updates by tensor name. replaced: tensors that the adapter stores in full.
    """

    def __init__(
        self, base: Checkpoint, changes: Mapping[str, Sequence[LowRank]], replaced: Mapping[str, Tensor], digest: str
    ) -> None:
        super().__init__(base.path, base.config, base.tensors, complete=base.complete)
        earlier_changes: Mapping[str, Sequence[LowRank]] = {}
        earlier_replaced: Mapping[str, Tensor] = {}
        if isinstance(base, _MergedCheckpoint):
            earlier_changes = {name: change for name, change in base.changes.items() if name not in replaced}
            earlier_replaced = base.replaced
        self.replaced = {**earlier_replaced, **replaced}
        self.changes = {
            name: (*earlier_changes.get(name, ()), *changes.get(name, ()))
            for name in earlier_changes.keys() | changes.keys()
        }
        self.merged = base.merged + digest

    def read_slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        if name in self.replaced:
            bounds = bounds_of(self.info(name), slices)
            tensor = self.replaced[name][tuple(slice(start, stop) for start, stop in bounds)]
            stored = TORCH_DTYPES[self.info(name).dtype]
        else:
            tensor = super().read_slice(name, slices)
            stored = tensor.dtype
        if name in self.changes:
            tensor = tensor.float().clone()
            for change in self.changes[name]:
                change.add_to(tensor, bounds_of(self.info(name), slices))
        return tensor.to(stored)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A ``[r, K]`` and B ``[N, r]`` of one module or parameter. path: its module path in memory, for errors."""

    path: str
    a: Tensor
    b: Tensor

    def check(self, a: tuple[int, int], b: tuple[int, int], why: str = "") -> None:
        """Raise TensorMismatchError unless A and B have the given shapes."""
        shapes = tuple(self.a.shape), tuple(self.b.shape)
        if shapes != (a, b):
            raise TensorMismatchError(
                f"{self.path}: lora_A and lora_B are {shapes[0]} and {shapes[1]}, r and the checkpoint's sizes need "
                f"{a} and {b}{why}; is the adapter of another model?"
            )


@dataclass(kw_only=True, slots=True)
class _Summary:
    """Summary of a merge, for the log.

    experts: (layer, expert). modules, replaced: last path component of the other merged and replaced modules.
    untargeted: paths that ``adapter_config.json`` does not target.
    """

    experts: set[tuple[int, int]]
    modules: set[str]
    replaced: set[str]
    ranks: set[int]
    scales: set[float]
    untargeted: list[str]

    def line(self) -> str:
        """Return the log message."""
        into: list[str] = []
        if self.experts:
            layers = [layer for layer, _ in self.experts]
            into.append(f"{len(self.experts)} experts of layers {min(layers)} to {max(layers)}")
        if self.modules:
            into.append(f"outside the experts {', '.join(sorted(self.modules))}")
        if self.replaced:
            into.append(f"in place of {', '.join(sorted(self.replaced))}")
        ranks = ", ".join(map(str, sorted(self.ranks)))
        scales = ", ".join(f"{scale:g}" for scale in sorted(self.scales))
        return f"rank {ranks}, scale {scales}, merged into {' and '.join(into)}"


class AdapterCollector:
    """Collects the changes of one adapter to tensors of the checkpoint, module by module.

    ``change_expert``, ``add_flat``, ``add_matrix`` and ``replace`` receive the changes. names: of the model in memory.
    """

    def __init__(self, checkpoint: Checkpoint, config: AdapterConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.names = NamesInMemory(checkpoint)
        self._in_memory = index_of(checkpoint).family.in_memory
        self.open_layer = cache(partial(CheckpointLayer.open, checkpoint))  # a layer has hundreds of pairs
        self.changes = defaultdict[str, list[LowRank]](list)
        self.replaced: dict[str, Tensor] = {}
        self._paths: dict[tuple[str, int, int, int | None], str] = {}
        self.summary = _Summary(experts=set(), modules=set(), replaced=set(), ranks=set(), scales=set(), untargeted=[])

    def add(self, path: str, levels: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the pairs of the module at ``path``, those of the innermost of PEFT's nested wrappers last."""
        experts = self.names.experts(path)
        if isinstance(experts, StackModule):
            self._add_stacks(path, experts, levels)
            return
        if len(levels) != 1:
            raise ConfigError(
                f"{self.config.path}: {path} has {len(levels)} nested pairs, known of stacked experts only"
            )
        pair = Pair(path=path, a=levels[0][0], b=levels[0][1])
        if isinstance(experts, ExpertModule):
            self._check_module(path)
            self._add_expert(experts, pair, *self._rank_and_scale(path))
            return
        self.add_matrix(pair)

    def replace(self, path: str, parameter: str, copied: bool, tensor: Tensor) -> None:
        """Use ``tensor`` instead of the stored parameter of the module at ``path``.

        copied: the parameter is a wrapped module's base weight, which PEFT saves without an entry in the config, as it
        does with embeddings.
        """
        config = self.config.path
        automatic = copied or path.rpartition(".")[2] in _EMBEDDINGS
        if not automatic and not self.config.saves_module(path):
            raise ConfigError(
                f"{config}: the adapter has {path}.{parameter}, and modules_to_save does not name it; correct the entry"
            )
        if self.names.experts(path) is not None:
            raise ConfigError(f"{config}: the adapter has {path}.{parameter} of routed experts in full. {MERGE}")
        (piece, *others) = self.names.rows(path, parameter)
        info = self.checkpoint.info(piece.name)
        if others or piece.stored or info.dtype not in FLOATS:
            raise ConfigError(
                f"{config}: the adapter has {path}.{parameter} in full, and the checkpoint {piece.name} in "
                f"{info.dtype} {info.shape}; only BF16, F16 and F32 of the same rows are replaced. {MERGE}"
            )
        if info.shape != tuple(tensor.shape):
            raise TensorMismatchError(
                f"{path}.{parameter}: the adapter has {tuple(tensor.shape)}, the checkpoint {info.shape} "
                f"({piece.name}); is the adapter of another model, or was its vocabulary enlarged? {MERGE}"
            )
        if torch.equal(self.checkpoint.read(piece.name), tensor.to(TORCH_DTYPES[info.dtype])):
            return
        self._refuse_tied(piece.name, path)
        self.replaced[piece.name] = tensor
        self.summary.replaced.add(path.rpartition(".")[2])

    def check_saved(self, paths: Sequence[str]) -> None:
        """Raise MissingTensorError if the adapter lacks a module of ``modules_to_save`` that the checkpoint has."""
        modules = {name.rpartition(".")[0] for name in self.checkpoint.tensors}
        for name in self.config.saved:
            if any(self.config.saves_module(path, name) for path in paths):
                continue
            missing = next((path for path in sorted(modules) if self.config.saves_module(path, name)), None)
            if missing is not None:
                raise MissingTensorError(
                    f"{self.config.path}: modules_to_save names {name}, the checkpoint has {missing}, and the "
                    "adapter no such tensor; download the adapter again"
                )

    def _rank_and_scale(self, key: str) -> tuple[int, float]:
        rank, scale = self.config.rank_and_scale(key)
        self.summary.ranks.add(rank)
        self.summary.scales.add(scale)
        return rank, scale

    def _check_module(self, path: str) -> None:
        """Raise ConfigError for a module that an entry excludes, and note one that no entry targets."""
        entry = self.config.excluded_by(path)
        if entry:
            raise ConfigError(
                f"{self.config.path}: the adapter has {path}, which {entry} excludes; correct the entry, or remove "
                f"the tensors {path}.lora_A.weight and lora_B.weight"
            )
        if not self.config.changes_module(path):
            self.summary.untargeted.append(path)

    def _add_expert(self, module: ExpertModule, pair: Pair, rank: int, scale: float) -> None:
        spec = self.open_layer(module.layer).spec
        rows, columns = spec.intermediate_size, spec.expert_hidden_size
        if module.projection == "down":
            rows, columns = columns, rows
        pair.check((rank, columns), (rows, rank))
        self.change_expert(module, pair, scale)

    def change_expert(self, module: ExpertModule, pair: Pair, scale: float) -> None:
        """Change one projection of one expert; A and B are ``[r, columns]`` and ``[rows, r]``."""
        layer = self.open_layer(module.layer)
        source = layer.source(module.expert, module.projection)
        name = part_name(source, layer.stored_as(source).layout.parts[0])
        _float_matrix_shape(self.checkpoint, name, pair.path)
        if source.flat:
            raise ConfigError(f"{pair.path}: {name} holds experts along its rows, and the adapter one expert at a time")
        rows = range(source.offset, source.offset + source.step * source.rows, source.step)
        index = None if source.experts is None else module.expert
        change = LowRank(a=pair.a, b=pair.b, scale=scale, rows=rows, index=index, transposed=source.transposed)
        self._change(name, pair.path, change)
        self.summary.experts.add((module.layer, module.expert))

    def _change(self, name: str, path: str, change: LowRank) -> None:
        """Add ``change`` to tensor ``name``; raises DuplicateTensorError if another module has changed these rows."""
        rows = (name, change.rows.start, change.rows.step, change.index)
        other = self._paths.setdefault(rows, path)
        if other != path:
            raise DuplicateTensorError(
                f"{self.config.path}: {other} and {path} are both {name} of the checkpoint; keep one of them"
            )
        self.changes[name].append(change)

    def add_matrix(self, pair: Pair) -> None:
        """Change a matrix outside the routed experts: a module's weight, or a two-dimensional parameter."""
        path = pair.path
        parameter = "weight"
        key = path
        if not self.config.changes_module(path):
            names = [name for name in self.names.parameters(path) if self.config.changes_parameter(f"{path}.{name}")]
            if len(names) > 1:
                raise ConfigError(f"{self.config.path}: {path} is one pair of {' or '.join(names)}. {MERGE}")
            if names:
                parameter = names[0]
                key = f"{path}.{parameter}"
            else:
                self._check_module(path)
        pieces = self.names.rows(path, parameter)
        rank, scale = self._rank_and_scale(key)
        for piece in pieces:
            shape = _float_matrix_shape(self.checkpoint, piece.name, path)
            if len(shape) != 2:
                raise ConfigError(f"the adapter has {path}, and {piece.name} is {shape}, which is no matrix. {MERGE}")
            pair.check((rank, shape[1]), (piece.height, rank))
            start, stop = piece.rows
            rows = range(piece.stored, piece.stored + stop - start)
            self._refuse_tied(piece.name, path)
            self._change(piece.name, path, LowRank(a=pair.a, b=pair.b[start:stop], scale=scale, rows=rows))
        self.summary.modules.add(path.rpartition(".")[2])

    def _refuse_tied(self, name: str, path: str) -> None:
        """Raise ConfigError for a head tied to the embeddings: which of the two tensors is read is not known here."""
        config = self.checkpoint.config
        tied = config.get("tie_word_embeddings", text_of(config).get("tie_word_embeddings"))
        if tied is True and name.rpartition(".")[0].rpartition(".")[2] in _TIED:
            raise ConfigError(
                f"{self.config.path}: the adapter has {path}, and config.json has tie_word_embeddings: true, so its "
                f"weight is also that of the embeddings. {MERGE}"
            )

    def _add_stacks(self, path: str, module: StackModule, levels: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Change the stacks of one layer.

        PEFT wraps the module once for each targeted parameter, in the order in which they are registered, so the
        innermost pair is of the first one.
        """
        keys = {parameter: f"{path}.{parameter.name}" for parameter in module.parameters}
        targeted = [parameter for parameter, key in keys.items() if self.config.changes_parameter(key)]
        matrices = [parameter for parameter in module.parameters if parameter.projections]
        if len(targeted) != len(levels) == len(matrices):
            # With one pair for each matrix the assignment is unique, whatever target_parameters names.
            self.summary.untargeted += [keys[parameter] for parameter in matrices if parameter not in targeted]
            targeted = matrices
        if len(targeted) != len(levels):
            names = ", ".join(parameter.name for parameter in targeted) or "none"
            raise ConfigError(
                f"{self.config.path}: the adapter has {len(levels)} pairs of {path}, whose parameters are "
                f"{', '.join(parameter.name for parameter in module.parameters)}, and target_parameters names "
                f"{names} of them; correct target_parameters, or download the adapter again"
            )
        for parameter, (a, b) in zip(targeted, reversed(levels), strict=True):
            pair = Pair(path=keys[parameter], a=a, b=b)
            if not parameter.projections:
                raise ConfigError(f"{self.config.path}: the adapter has {pair.path}, a bias of experts. {MERGE}")
            rank, scale = self._rank_and_scale(pair.path)
            if parameter.flat:
                self.add_flat(module, parameter, pair, rank, scale)
            else:
                self._add_stack(module, parameter, pair, rank, scale)

    def add_flat(self, module: StackModule, parameter: StackParameter, pair: Pair, rank: int, scale: float) -> None:
        """Change a two-dimensional parameter that holds all experts; PEFT treats it as a plain matrix."""
        layer = self.open_layer(module.layer)
        source = layer.source(0, parameter.projections[0])
        name = part_name(source, layer.stored_as(source).layout.parts[0])
        height, columns = _float_matrix_shape(self.checkpoint, name, pair.path)
        pair.check((rank, columns), (height, rank))
        self._change(name, pair.path, LowRank(a=pair.a, b=pair.b, scale=scale, rows=range(height)))
        self.summary.experts |= {(module.layer, expert) for expert in range(layer.spec.num_experts)}

    def _add_stack(self, module: StackModule, parameter: StackParameter, pair: Pair, rank: int, scale: float) -> None:
        """Change a stack ``[E, N, K]``, which some classes hold as ``[E, K, N]``.

        PEFT takes the second dimension for the input and the third for the output, or the reverse where it swaps them.
        Which one depends on the class and on PEFT's release, never on the sizes, which may be equal.
        """
        spec = self.open_layer(module.layer).spec
        projections = parameter.projections
        experts = spec.num_experts
        if projections[-1] == "down":
            rows = spec.expert_hidden_size
            columns = spec.intermediate_size
        else:
            rows = len(projections) * spec.intermediate_size
            columns = spec.expert_hidden_size
        transposed = self._in_memory.transposed
        swapped = self._swaps_in_out(pair.path)
        second, third = (columns, rows) if transposed else (rows, columns)
        in_features, out_features = (third, second) if swapped else (second, third)
        rule = f" (PEFT {'swaps' if swapped else 'does not swap'} in and out of [{experts}, {second}, {third}])"
        pair.check((experts * rank, in_features), (out_features, experts * rank), rule)
        # B @ A is [out, in]. PEFT adds it untransposed where it swapped them or the stack has a single expert.
        upright = swapped or (experts == 1 and self._check_single_expert(pair.path, second, third))
        for expert, (a, b) in enumerate(zip(*pairs_of_stack(pair.a, pair.b, experts), strict=True)):
            # upright: B @ A is a matrix of [E, second, third]; it is transposed where the projection is
            if upright == transposed:
                a, b = b.mT, a.mT
            halves = (
                b.unflatten(0, (-1, len(projections))).unbind(1) if parameter.interleaved else b.chunk(len(projections))
            )
            for projection, half in zip(projections, halves, strict=True):
                target = ExpertModule(layer=module.layer, expert=expert, projection=projection)
                self.change_expert(target, Pair(path=pair.path, a=a, b=half), scale)

    def _swaps_in_out(self, path: str) -> bool:
        """Return whether PEFT swapped input and output of a stack; raises ConfigError where that is undecidable."""
        swapped = self.config.swapped
        inner_type = str(text_of(self.checkpoint.config).get("model_type"))
        outer_type = str(self.checkpoint.config.get("model_type"))
        if swapped is None:
            raise ConfigError(
                f"{self.config.path}: the adapter has {path}, a stack of experts, and peft_version is no release; "
                "PEFT swaps A and B of stacks from 0.19.0 on. Enter the release that wrote the adapter. " + MERGE
            )
        if not swapped and {inner_type, outer_type} & {*self._in_memory.turned_since_4}:
            raise ConfigError(
                f"{self.config.path}: the adapter has {path}, a stack of experts that transformers 4 and 5 hold in "
                "different orientations, and was written by a PEFT before 0.19.0, which supports both. " + MERGE
            )
        return swapped and not self._in_memory.marked

    def _check_single_expert(self, path: str, second: int, third: int) -> bool:
        """Return True for a stack of one expert, which PEFT treats as a square matrix; raises ConfigError otherwise."""
        if second != third:
            raise ConfigError(
                f"{self.config.path}: {path} has one expert, [1, {second}, {third}], which PEFT cannot merge"
            )
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFiles:
    """The files of an adapter. full: names of tensors that replace a parameter, with the parts of the name.

    modules: the names of A and B by module, the outermost of nested wrappers first.
    """

    root: Path
    config: AdapterConfig
    tensors: Checkpoint
    full: dict[str, re.Match[str]]
    modules: dict[str, list[dict[str, str]]]

    def read(self, name: str) -> Tensor:
        """Return a tensor; raises BadScaleError for NaN and infinity."""
        return _require_finite(self.root, name, self.tensors.read(name))

    def pairs(self, levels: Sequence[Mapping[str, str]]) -> list[tuple[Tensor, Tensor]]:
        """Return A and B of a module; raises BadScaleError for NaN and infinity."""
        return [(self.read(halves["A"]), self.read(halves["B"])) for halves in levels]


def open_adapter(adapter: str | os.PathLike[str], *, download: bool = False) -> AdapterFiles:
    """Open the adapter in folder ``adapter``, or with this Hub id; its matrices are not read yet.

    Raises ConfigError for an option that is not implemented and for a pickle, MissingTensorError where A or B is
    missing.
    """
    root = locate(adapter, download=download)
    config = AdapterConfig.read(root / "adapter_config.json")
    if (root / "adapter_model.bin").exists() and not (root / "adapter_model.safetensors").exists():
        raise ConfigError(
            f"{root}: holds adapter_model.bin, a pickle, which can run code and is not read; load it with PEFT and "
            "save it again (save_pretrained), which writes adapter_model.safetensors"
        )
    tensors = Checkpoint(root, {}, read_header(root / "adapter_model.safetensors"))
    full = {
        name: match for name in tensors.tensors if (match := _FULL_NAME.fullmatch(_WRAPPERS.sub("", name))) is not None
    }
    return AdapterFiles(root=root, config=config, tensors=tensors, full=full, modules=_modules(tensors, full))


def with_adapter(checkpoint: Checkpoint, adapter: str | os.PathLike[str], *, download: bool = False) -> Checkpoint:
    """Return ``checkpoint`` with the LoRA adapter in folder ``adapter`` merged into its BF16, FP16 and FP32 weights.

    adapter: a folder, or an id of the Hugging Face Hub in the local cache. download: fetch what the cache lacks.

    ``scale * B @ A`` is added in float32 and rounded once; one log message lists the changes. Modules may have the
    names of the files or those that transformers gives them in memory. Adapters can be merged one after the other. A
    pair that ``adapter_config.json`` does not target is merged with a warning.

    Raises ConfigError for an option that is not implemented, a pair that an entry excludes, and a target that the
    checkpoint lacks or stores quantised; MissingTensorError where A or B is missing; TensorMismatchError for a wrong
    rank or size; BadScaleError for NaN.
    """
    if checkpoint.is_gguf:
        raise ConfigError(f"{adapter}: adapters are merged into safetensors, {checkpoint.path} is a GGUF file")
    files = open_adapter(adapter, download=download)
    root = files.root
    collector = AdapterCollector(checkpoint, files.config)
    digest = hashlib.sha256()
    for name, match in files.full.items():
        tensor = files.read(name)
        digest.update(name.encode() + tensor.view(-1).view(uint8).numpy().tobytes())
        collector.replace(match[1], match[3], match[2] is not None, tensor)
    collector.check_saved([match[1] for match in files.full.values()])
    for path, levels in files.modules.items():
        pairs = files.pairs(levels)
        for a, b in pairs:
            digest.update(b"".join(half.view(uint8).numpy().tobytes() for half in (a, b)))
        collector.add(path, pairs)
    digest.update(repr([(name, [c.scale for c in changes]) for name, changes in collector.changes.items()]).encode())
    _LOG.warning("%s: %s", root, collector.summary.line())
    if collector.summary.untargeted:
        first, *others = collector.summary.untargeted
        more = f" and {len(others)} more" if others else ""
        message = "%s: adapter_config.json does not target %s%s; PEFT would not load what is merged here"
        _LOG.warning(message, root, first, more)
    return _MergedCheckpoint(checkpoint, collector.changes, collector.replaced, digest.hexdigest())


def _require_finite(root: Path, path: str, tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise BadScaleError(f"{root}: {path} holds NaN or infinity; train or download the adapter again")
    return tensor


def _modules(adapter: Checkpoint, full: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """Return the names of A and B by module, the outermost of nested wrappers first."""
    levels_by_path = defaultdict[str, dict[int, dict[str, str]]](lambda: defaultdict(dict))
    for path, halves in _pairs(adapter, set(full)).items():
        nested = _NESTED.search(path)
        depth = 0 if nested is None else nested[0].count(".base_layer")
        levels_by_path[path.replace(".base_layer", "")][depth] = halves
    return {path: [levels[depth] for depth in sorted(levels)] for path, levels in levels_by_path.items()}


def _pairs(adapter: Checkpoint, full: set[str]) -> dict[str, dict[str, str]]:
    """Return the names of A and B by module. full: names of tensors that are no half of a pair."""
    pairs = defaultdict[str, dict[str, str]](dict)
    for name, info in adapter.tensors.items():
        if name in full:
            continue
        match = _PAIR_NAME.fullmatch(_WRAPPERS.sub("", name))
        if match is None or info.dtype not in FLOATS or len(info.shape) != 2:
            allowed = "matrices lora_A.weight and lora_B.weight in BF16, F16 or F32"
            raise ConfigError(
                f"{adapter.path}: {name}, {info.dtype} {info.shape}, is in the adapter; known are {allowed}"
            )
        other = pairs[match[1]].setdefault(match[2], name)
        if other != name:
            raise DuplicateTensorError(f"{adapter.path}: {other} and {name} are the same half of one pair; keep one")
    missing = [f"{path}.lora_{half}.weight" for path, halves in pairs.items() for half in "AB" if half not in halves]
    if missing or not pairs:
        problem = f"{missing[0]} missing, its other half is present" if missing else "holds no lora_A and lora_B"
        raise MissingTensorError(f"{adapter.path}: {problem}; download the adapter again")
    return dict(sorted(pairs.items()))


def _float_matrix_shape(checkpoint: Checkpoint, name: str, path: str) -> tuple[int, ...]:
    """Return the shape of the weight to change; raises ConfigError unless it is a BF16, F16 or F32 matrix."""
    if name not in checkpoint:
        raise ConfigError(f"the adapter has {path}, the checkpoint no {name}; is the adapter of another model?")
    info = checkpoint.info(name)
    if info.dtype not in FLOATS or len(info.shape) < 2:
        raise ConfigError(
            f"the adapter has {path}, and {name} is {info.dtype} {info.shape}; adapters are merged into matrices in "
            f"BF16, F16 and F32. To decode the experts: collegium quantize {checkpoint.path} --to bf16"
        )
    return info.shape
