"""List every model type of the installed transformers that has experts: in a file, derived from its class, or refused.

    python scripts/list_model_types.py --out model-types.csv [--table] [TYPE ...]

For each type a tiny random model of its class is saved and loaded again: ``whole`` is the largest difference between
the outputs of ``load_model`` in float32 and of the class with its loop over experts in float64, relative to the largest
output; ``layer`` is the same for a layer of ``load_layer`` and the class's block. The class runs in float64 because
Collegium's float32 kernel on a CPU multiplies with the matmul of the class, and equal bits would prove little; the note
names classes that run in float32 alone. Types whose class does not build from a tiny config are derived from the
defaults of their config, at full size, without weights. The models of families in files are those of
tests/shared/family_cases.py.
"""

import argparse
import copy
import csv
import datetime
import importlib
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from collegium.errors import CollegiumError, ConfigError
from collegium.integrations.transformers.loading import load_model_in
from collegium.loading import load_layer
from collegium.models import FAMILIES, DerivedFamily, family_of
from collegium.models.derived import class_of, config_of_class
from tiny_configs import tiny_config

_COLUMNS = ("model_type", "status", "class", "layer", "whole", "note")
_LIMIT = 6 << 30  # bytes; default towers of some configs are large
_LARGEST = 60_000_000  # parameters of a tiny model; towers of some classes cannot be made small
_ABOUT = re.compile(r"expert|moe|router", re.IGNORECASE)
_IDS = torch.tensor([[3, 9, 27, 5, 40, 11, 62, 8, 33, 21, 4, 17]])
_IN_FILES = {kind for family in FAMILIES for kind in family.model_types}


def main() -> None:
    """Write one row for each model type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", required=True)
    parser.add_argument("--table", action="store_true", help="print the table of an existing list instead")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(Path(options.out))))
        return
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "shared"))
    resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT, _LIMIT))
    torch.set_num_threads(1)
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    types = options.types or [kind for kind in transformers.CONFIG_MAPPING if _has_experts(transformers, kind)]
    with Path(options.out).open("w", newline="") as file:
        date = datetime.datetime.now(tz=datetime.UTC).date()
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        file.write(f"# {date}, {versions}, CPU, commit {_commit()}: python scripts/list_model_types.py --out FILE\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for kind in types:
            for row in _rows(transformers, kind):
                writer.writerow(row)
                file.flush()
                print(*row, sep="  ", file=sys.stderr)


def _commit() -> str:
    git = shutil.which("git") or "git"
    command = [git, "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def table(path: Path) -> list[str]:
    """Return the Markdown table of docs/families.md: the rows of a list that are derived or refused."""
    lines = ["| `model_type` | class | layer | whole model |", "| --- | --- | --- | --- |"]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for row in rows:
        if row["status"] in ("derived", "refused"):
            refused = row["status"] == "refused"
            alone = "refused" if refused or "whole models only" in row["note"] else row["layer"] or "block checked"
            whole = "refused" if refused else row["whole"] or "not built"
            lines.append(f"| `{row['model_type']}` | `{row['class'] or '-'}` | {alone} | {whole} |")
    return lines


def _has_experts(transformers: Any, kind: str) -> bool:
    """Return whether ``kind`` has a file here, or a class with parameters of experts or a router."""
    if kind in _IN_FILES:
        return True
    name = importlib.import_module("transformers.models.auto.configuration_auto").model_type_to_module_name(kind)
    folder = Path(transformers.__file__).parent / "models" / name
    if not any("experts" in path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py")):
        return False
    try:
        config = transformers.CONFIG_MAPPING[kind]()
        cls = class_of(transformers, config, None)
    except Exception:  # a config without defaults, or without a model of it alone
        return False
    try:
        with torch.device("meta"):
            model = cls(config_of_class(cls, config))
        return any(_ABOUT.search(name) for name, _ in model.named_parameters())
    except Exception:  # defaults from which the class does not build
        return True


def _rows(transformers: Any, kind: str) -> Iterator[tuple[str, ...]]:
    status = "file" if kind in _IN_FILES else "derived"
    name, layer, whole, note = "", "", "", ""
    try:
        model, save = _tiny_model(transformers, kind)
        name = type(model).__name__
        wanted, note = _truth(model)
    except Exception as error:  # what classes raise for a tiny config
        note = f"tiny model: {type(error).__name__}: {str(error).strip()[:120]}"
        if status == "derived":
            status, note = _without_weights(transformers, kind, note)
        yield (kind, status, name, layer, whole, " ".join(note.split()))
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        _drop_identities(Path(folder), model.config.get_text_config())
        try:
            if not isinstance(family_of(json.loads((Path(folder) / "config.json").read_text())), DerivedFamily):
                status = "file"  # of the text part
            layer, whole, reason = _compare(model, wanted, folder)
            note = "; ".join(part for part in (note, reason) if part)
        except CollegiumError as error:
            status, note = ("file, layers only" if status == "file" else "refused"), str(error)
    yield (kind, status, name, layer, whole, " ".join(note.replace(folder, "FOLDER").split())[:400])


def _tiny_model(transformers: Any, kind: str) -> tuple[Any, Callable[[Path], object]]:
    """Return a tiny model and how it is saved: the case of tests/shared for families in files, else from defaults."""
    torch.manual_seed(8)
    cases = importlib.import_module("family_cases")
    parts = importlib.import_module("text_parts")
    with tempfile.TemporaryDirectory() as folder:
        if kind in ("qwen3_omni_moe", "qwen3_omni_moe_text"):
            model = parts.save_speaking_model(Path(folder))
            return model, partial(_save_speaking_model, parts, kind)
        name = parts.TEXT_OF.get(kind, kind)
        if name in cases.CASES:
            model = cases.build(cases.CASES[name], Path(folder))
            if hasattr(model, "set_experts_implementation") and model.config._experts_implementation is not None:
                model.set_experts_implementation("eager")
            return model, partial(_save_case, cases, parts, kind, model)
    config = tiny_config(transformers, kind)
    cls = class_of(transformers, config, None)
    config = config_of_class(cls, config)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > _LARGEST:
        raise ValueError(f"it has {count:,} parameters")
    model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    _fill(model)
    return model, model.save_pretrained


def _save_speaking_model(parts: Any, kind: str, folder: Path) -> None:
    parts.save_speaking_model(folder)  # the same weights each time
    if kind == "qwen3_omni_moe_text":
        parts.to_text_of_speaking_model(folder)


def _save_case(cases: Any, parts: Any, kind: str, model: Any, folder: Path) -> None:
    cases.save(cases.CASES[parts.TEXT_OF.get(kind, kind)], model, folder)
    if kind in parts.TEXT_OF:
        parts.to_text_checkpoint(folder, kind)


def _truth(model: Any) -> tuple[torch.Tensor, str]:
    """Return the output of the class with its loop over experts in float64, and what is different where it cannot."""
    note = ""
    try:
        with torch.no_grad():
            return _run(copy.deepcopy(model).double()), note
    except RuntimeError as error:  # a class that mixes dtypes
        note = f"class in float32: {str(error).strip()[:80]}"
    with torch.no_grad():
        return _run(model), note


def _run(model: Any) -> torch.Tensor:
    try:
        return model(_IDS)[0]
    except AttributeError:  # Llama-4 in transformers 5.24 needs an image
        return model.language_model(_IDS)[0]


def _compare(model: Any, wanted: torch.Tensor, folder: str) -> tuple[str, str, str]:
    """Return the errors of a layer and of the whole model, and why a layer is refused."""
    family = family_of(json.loads((Path(folder) / "config.json").read_text()))
    number = family.moe_layers(model.config.to_dict())[-1]
    layer, note = "", ""
    reason = family.refusal(number)
    if reason is None and isinstance(family, DerivedFamily):
        layer = f"{_layer_error(model, folder, number):.1e}"
    elif reason is not None:
        note = f"whole models only: {reason}"
    ours = load_model_in("fp32", folder, device="cpu")
    with torch.no_grad():
        found = _run(ours)
    return layer, f"{_error(found, wanted):.1e}", note


def _layer_error(model: Any, folder: str, number: int) -> float:
    blocks = [m for n, m in model.named_modules() if f"layers.{number}." in n and hasattr(m, "experts")]
    x = torch.randn(1, 24, model.config.get_text_config().hidden_size)
    with torch.no_grad():
        try:
            wanted = copy.deepcopy(blocks[0]).double()(x.double())
        except RuntimeError:  # a class that mixes dtypes
            wanted = blocks[0](x)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        found = load_layer(folder, number, dtype="fp32", device="cpu")(x)
    return _error(found, wanted.reshape(x.shape))


def _drop_identities(folder: Path, config: Any) -> None:
    """Remove what the class saves for expert ids that stand for the identity; published files have no such tensors."""
    if not getattr(config, "zero_expert_num", None):
        return
    path = folder / "model.safetensors"
    number = re.compile(r"\.experts\.(\d+)\.")
    tensors = load_file(path)
    routed = {k: v for k, v in tensors.items() if not (m := number.search(k)) or int(m[1]) < config.n_routed_experts}
    save_file(routed, path, metadata={"format": "pt"})


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _without_weights(transformers: Any, kind: str, note: str) -> tuple[str, str]:
    """Return status and note of a type of which no tiny model is built: derived from a tiny config, or the defaults."""
    refusal = ""
    for make, size in ((lambda: tiny_config(transformers, kind), "tiny"), (transformers.CONFIG_MAPPING[kind], "full")):
        try:
            family = family_of({**make().to_dict(), "model_type": kind})
        except ConfigError as error:
            refusal = refusal or str(error)
            continue
        except Exception as error:  # what config classes raise
            refusal = refusal or str(error)
            continue
        reason = family.refusal(family.moe_layers({})[-1])
        block = "checked" if reason is None else f"whole models only: {reason}"
        return "derived", f"block of {size} size: {block}; {note}"[:400]
    return "refused", refusal[:400]


def _fill(model: Any) -> None:
    """Fill a model with numbers for which every rule of a router counts."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.normal_(0, 0.3) if tensor.dim() > 1 else tensor.uniform_(0.4, 1.2)


if __name__ == "__main__":
    main()
