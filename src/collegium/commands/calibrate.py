"""``collegium calibrate``: find the scales of a checkpoint's static activation formats from a sample of text.

The model runs the text with unquantised activations. The largest input and the largest row between the products are
recorded for each expert; the scales that represent them are written next to the weights, by the names and in the units
of ModelOpt or compressed-tensors, whichever stored the weights.
"""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..checkpoint.activation_scales import static_format
from ..checkpoint.audit import audit
from ..checkpoint.layer_view import CheckpointLayer
from ..checkpoint.layout import Source
from ..checkpoint.non_expert_weights import load_shared, shared_sources
from ..checkpoint.reader import INDEX, Checkpoint
from ..checkpoint.stored_format import ACTIVATION_SCALES, StoredFormat
from ..checkpoint.writer import Shard, copy_other_files, entry_of, whole_folder
from ..errors import ConfigError, InputError
from ..experts.reference import Reference, ReferenceExperts
from ..integrations.transformers import layers_of, load_model
from ..layer import MoELayer
from ..models import moe_layers
from ..ops.quantize import activation_format
from ..problem import Limits, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from ..types import ContiguousBatch
from .generate import Writer, check_writable

__all__ = ["CalibratedLayer", "CalibrationReport", "calibrate_model"]

_SCALES_FILE = "model-input-scales.safetensors"
Ranges = dict[str, Tensor]  # projection to the largest inputs of the experts, float32 [E]


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedLayer:
    """The largest inputs of one layer's experts: before gate and up, and before down.

    unreached: experts that no token of the text reached; they get the layer's largest inputs.
    """

    layer: int
    gate_up: float
    down: float
    experts: int
    unreached: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationReport:
    """The written checkpoint.

    activations: the activation formats that use the scales. linked: files of weights that are hard links to those of
    the source. copied, skipped: files copied unchanged, and entries that were not copied.
    """

    path: str
    activations: tuple[str, ...]
    tokens: int
    scales: int
    layers: tuple[CalibratedLayer, ...]
    linked: tuple[str, ...]
    copied: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorder:
    """The largest inputs of the experts of one layer, and of its shared expert."""

    view: CheckpointLayer
    routed: Ranges
    shared: Ranges = field(default_factory=dict)

    def named_scales(self) -> dict[str, Tensor]:
        """Return the tensors to write, by name."""
        sources = [(source, self.view.stored_as(source), self.routed, expert) for expert, source in self.view.sources()]
        if self.shared:
            sources += [(source, stored, self.shared, 0) for source, stored in shared_sources(self.view)]
        multipliers: dict[str, list[Tensor]] = {}
        formats: dict[str, StoredFormat] = {}
        for source, stored, ranges, expert in sources:
            name = _scale_name(self.view.checkpoint, source, stored)
            form = activation_format(str(static_format(stored)))
            inputs = _filled(self.view, ranges["down" if source.projection == "down" else "gate_up"])
            # One tensor of a stack serves all experts, and gate and up read one input.
            multipliers.setdefault(name, []).append(inputs[expert] / form.max_value)
            formats[name] = stored
        return {name: _stored_scale(name, formats[name], torch.stack(values)) for name, values in multipliers.items()}

    def report(self) -> CalibratedLayer:
        """Return what is printed of the layer."""
        gate_up, down = self.routed["gate_up"], self.routed["down"]
        return CalibratedLayer(
            layer=self.view.number,
            gate_up=float(gate_up.max()),
            down=float(down.max()),
            experts=gate_up.numel(),
            unreached=tuple((gate_up == 0).nonzero().flatten().tolist()),
        )


def calibrate_model(
    model: str,
    text: str | None = None,
    out: str | None = None,
    *,
    tokens: int = 256,
    steps: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Write the checkpoint ``model`` with calibrated activation scales of its experts to the new folder ``out``.

    The model runs windows of ``tokens`` tokens of the file ``text`` (default: the model's ``heldout.txt``) with the
    kernel ``reference``; a remainder shorter than a window is not run. steps: maximum number of windows. out: default
    ``model-calibrated``. Earlier scales are replaced. Weights are hard links where the file system has them, otherwise
    copies. Raises InputError for formats without static activation scales and for a text that leaves a layer without
    an input, and the errors of ``load_model`` and of writing.
    """
    place = probe(device).place
    checkpoint = check_writable(model)
    if not checkpoint.path.is_dir() or checkpoint.is_gguf:
        raise ConfigError(f"{model}: calibrate needs a model's folder with config.json and safetensors files")
    views = [CheckpointLayer.open(checkpoint, layer) for layer in moe_layers(checkpoint.config)]
    formats = [_require_static(view) for view in views]
    source = checkpoint.path / "heldout.txt" if text is None else Path(text)
    if not source.is_file():
        raise InputError(f"{source}: no such file; name a text to run with --text")
    folder = Path(out) if out is not None else Path(f"{os.path.abspath(model)}-calibrated")
    if folder.exists():
        raise InputError(f"{folder} exists; nothing is overwritten, name another folder or remove it")
    loaded = load_model(
        checkpoint,
        device=place,
        limits=Limits(max_tokens=tokens),
        overrides=Overrides(kernel="reference"),
    )
    windows = Writer(loaded, checkpoint.path).windows(source, tokens)[:steps]
    with torch.inference_mode(), _recording(dict(zip(views, layers_of(loaded), strict=True))) as recorders:
        for _, window in counted([*enumerate(windows, 1)], progress, "step {0[0]}".format):
            cast("Any", loaded)(window[None], use_cache=False)
    scales = {name: scale for recorder in recorders for name, scale in recorder.named_scales().items()}
    linked, copied, skipped = _write(checkpoint, folder, scales)
    return CalibrationReport(
        path=str(folder),
        activations=tuple(dict.fromkeys(name for pair in formats for name in pair)),
        tokens=windows.numel(),
        scales=len(scales),
        layers=tuple(recorder.report() for recorder in recorders),
        linked=linked,
        copied=copied,
        skipped=skipped,
    )


def _require_static(view: CheckpointLayer) -> list[str]:
    """Return the static activation formats of a layer; raises InputError for weights whose checkpoints have none."""
    names: list[str] = []
    for stored in view.both_stored:
        name = static_format(stored)
        if name is None:
            raise InputError(
                f"layer {view.number}: the experts are {stored.name}, whose checkpoints have no activation scales; "
                "calibrate needs fp8_tensor, fp8_channel or nvfp4 (collegium quantize writes them)"
            )
        names.append(name)
    return names


@contextmanager
def _recording(layers: dict[CheckpointLayer, MoELayer]) -> Generator[list[_Recorder]]:
    """Record the inputs of every layer while the block runs. The layers have the kernel ``reference``."""
    recorders: list[_Recorder] = []
    removers: list[Any] = []
    for view, layer in layers.items():
        recorder = _Recorder(view=view, routed=_no_inputs(layer.spec.num_experts, layer.device))
        experts = layer.experts
        assert isinstance(experts, ReferenceExperts)
        layer.replan(layer.plan, _watched(experts, recorder.routed))
        removers.append(_watch_shared(layer, recorder))
        recorders.append(recorder)
    try:
        yield recorders
    finally:
        for hook in removers:
            if hook is not None:
                hook.remove()


def _watch_shared(layer: MoELayer, recorder: _Recorder) -> Any:
    """Run the shared expert with every input of ``layer`` and record its inputs too, where its format has scales.

    transformers runs the shared expert of most models itself, with decoded weights. Returns the hook, or None.
    """
    view = recorder.view
    stored = [form for _, form in shared_sources(view)]
    if not stored or any(static_format(form) is None for form in stored):
        return None
    shared = load_shared(view, device=layer.device)
    if shared is None or view.spec.shared is None:
        return None
    spec = replace(view.spec, shared=replace(view.spec.shared, **shared.experts.formats))
    problem = Problem(spec=spec, device=layer.plan.problem.device, dtype=layer.plan.problem.dtype)
    recorder.shared.update(_no_inputs(1, layer.device))
    packed = _watched(Reference().pack(shared.experts, problem.shared()), recorder.shared)

    def run(_: object, arguments: tuple[Any, ...]) -> None:
        x = arguments[0].reshape(-1, view.spec.hidden_size)
        rows = torch.arange(x.shape[0], device=x.device)
        packed.run(ContiguousBatch(x=x, source=rows, expert_offsets=torch.tensor([0, x.shape[0]], device=x.device)))

    return layer.register_forward_pre_hook(run)


def _no_inputs(experts: int, device: torch.device) -> Ranges:
    return {name: torch.zeros(experts, dtype=torch.float32, device=device) for name in ("gate_up", "down")}


def _watched(experts: ReferenceExperts, ranges: Ranges) -> ReferenceExperts:
    """Return ``experts`` that record their largest inputs in ``ranges``."""

    def observe(expert: int, rows: Tensor, middle: Tensor) -> None:
        for name, values in (("gate_up", rows), ("down", middle)):
            # NaN wins, and is refused when the scale is written.
            ranges[name][expert] = torch.maximum(ranges[name][expert], values.abs().amax())

    return replace(experts, observer=observe)


def _filled(view: CheckpointLayer, inputs: Tensor) -> Tensor:
    """Return the largest inputs of the experts, the layer's where no token reached an expert; raises InputError."""
    largest = float(inputs.max())
    if not 0 < largest < float("inf"):
        raise InputError(
            f"layer {view.number}: the largest input of its experts is {largest:g}, allowed are finite and positive "
            "numbers; give another text"
        )
    return torch.where(inputs > 0, inputs, largest).cpu()


def _scale_name(checkpoint: Checkpoint, source: Source, stored: StoredFormat) -> str:
    """Return the name of the tensor that holds, or will hold, the scale of a projection's input."""
    names = [source.path + suffix for suffix in ACTIVATION_SCALES]
    present = [name for name in names if name in checkpoint]
    if present:
        return present[0]
    optional = [part.suffix for part in stored.layout.parts if part.suffix in ACTIVATION_SCALES]
    return source.path + (optional[0] if optional else ".input_scale")


def _stored_scale(name: str, stored: StoredFormat, multipliers: Tensor) -> Tensor:
    """Return the largest multiplier as it is stored: a scalar, ``[1]`` or a divisor in compressed-tensors."""
    scale = multipliers.max()
    if name.endswith("_global_scale"):
        scale = scale.reciprocal()
    return scale.reshape([1]) if stored.storage == "compressed-tensors" else scale


def _write(
    checkpoint: Checkpoint, folder: Path, scales: dict[str, Tensor]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Write the checkpoint with ``scales``; return the linked, copied and skipped files."""
    files = sorted({info.file for info in checkpoint.tensors.values()})
    weight_map = {info.name: info.file.name for info in checkpoint.tensors.values() if info.name not in scales}
    weight_map |= dict.fromkeys(scales, _SCALES_FILE)
    with whole_folder(folder.absolute(), sum(file.stat().st_size for file in files)) as (partial_folder, _):
        replaced = {file.name for file in files} | {INDEX, _SCALES_FILE}
        copied, skipped = copy_other_files(checkpoint.path, partial_folder, replaced)
        linked = [file.name for file in files if _write_weights(checkpoint, file, partial_folder, scales)]
        with Shard(partial_folder / _SCALES_FILE, {name: entry_of(scale) for name, scale in scales.items()}) as shard:
            for name, scale in scales.items():
                shard.put(name, scale)
        total = sum(info.nbytes for info in checkpoint.tensors.values() if info.name not in scales)
        total += sum(scale.nbytes for scale in scales.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial_folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        audit(Checkpoint.open(partial_folder), deep=False)
    return tuple(linked), copied, skipped


def _write_weights(checkpoint: Checkpoint, file: Path, folder: Path, scales: dict[str, Tensor]) -> bool:
    """Link or copy a file of weights, without ``scales`` it may hold; return whether it was linked."""
    infos = [info for info in checkpoint.tensors.values() if info.file == file]
    remaining = [info for info in infos if info.name not in scales]
    if len(remaining) < len(infos):
        if remaining:
            with Shard(folder / file.name, {info.name: (info.dtype, info.shape) for info in remaining}) as shard:
                for info in remaining:
                    shard.copy(info)
        return False
    try:
        os.link(file.resolve(), folder / file.name)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, folder / file.name)
        return False
    return True
