"""LoRA adapters of every model class: what transformers loads from the merged files against the model merged in memory.

The adapters are written by PEFT's rule, and by PEFT itself where it is installed.
"""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from collegium.checkpoint import Checkpoint, with_adapter
from collegium.errors import ConfigError
from collegium.integrations.transformers.loading import load_model_in
from collegium.models import family_of
from family_cases import CASES, IDS, build
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

RANK, STACK_RANK, ALPHA, STACK_ALPHA = 3, 5, 7.0, 4.0
# Loaded by transformers only as another model type, or without a class that loads the files it saved.
# ERNIE-4.5-VL splits one list of experts into two stacks, whose adapters are refused.
CLASSES = {name: case for name, case in CASES.items() if case.published is None and name != "ernie4_5_vl_moe"}
# In one tensor of the files with rows in another order, or refused by PEFT for the model.
PROJECTIONS = ("gate", "gate_proj", "up_proj", "down_proj")
NOT_MATRICES = ("vision_tower.layers.0.attn.", "vision_model.layers.0.self_attn.", "out_proj", "conv1d")


def sized(case: Any, width: int) -> Any:
    """Return the case with experts of another width; the model is 32 wide."""
    text = copy.deepcopy(case.text)
    if "ffn_config" in text:
        text["ffn_config"]["ffn_hidden_size"] = width
    else:
        text["moe_intermediate_size" if "moe_intermediate_size" in text else "intermediate_size"] = width
    return replace(case, text=text)


def targets(model: Any) -> tuple[list[str], list[str]]:
    """Return the paths of all linear modules, and of the parameters that are matrices or stacks of them."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linear = [name for name in linear if not any(part in name for part in NOT_MATRICES)]
    shared = model.get_input_embeddings().weight.data_ptr()
    linear = [name for name in linear if model.get_submodule(name).weight.data_ptr() != shared]
    parameters: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            stacked = parameter.dim() == 3 and "experts" in path
            matrix = parameter.dim() == 2 and (name in ("w1", "v1", "w2") or (name == "weight" and "layers" in path))
            if stacked or matrix:
                parameters.append(f"{path}.{name}")
    return linear, parameters


def random_pairs(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return an adapter by PEFT's rule, what it adds to every parameter, and ``adapter_config.json``."""
    generator = torch.Generator().manual_seed(5)
    linear, parameters = targets(model)
    tensors, added = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def pair(path: str, into: tuple[int, int], out: tuple[int, int]) -> tuple[Tensor, Tensor]:
        a, b = torch.randn(into[0], into[1], generator=generator), torch.randn(*out, generator=generator)
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
        return a.double(), b.double()

    for path in linear:
        out, into = model.get_submodule(path).weight.shape
        a, b = pair(path, (RANK, into), (out, RANK))
        added[f"{path}.weight"] = ALPHA / RANK * (b @ a)
    for at, key in enumerate(parameters):
        path, _, name = key.rpartition(".")
        module = model.get_submodule(path)
        parameter = module.get_parameter(name)
        after = [other for other in parameters[at + 1 :] if other.rpartition(".")[0] == path]
        nested = path + ".base_layer" * len(after)
        if parameter.dim() == 2:
            out, into = parameter.shape
            a, b = pair(nested, (STACK_RANK, into), (out, STACK_RANK))
            added[key] = STACK_ALPHA / STACK_RANK * (b @ a)
            continue
        experts, second, third = parameter.shape
        swapped = not getattr(module, "is_transposed", False)
        into, out = (third, second) if swapped else (second, third)
        if experts == 1:
            # A matrix to PEFT, added as it is.
            a, b = pair(nested, (STACK_RANK, into), (out, STACK_RANK))
            added[key] = STACK_ALPHA / STACK_RANK * (b @ a)[None]
            continue
        a, b = pair(nested, (experts * STACK_RANK, into), (out, experts * STACK_RANK))
        a, b = a.reshape(experts, -1, into), b.reshape(out, -1, experts)
        form = "o r e, e r i -> e o i" if swapped else "o r e, e r i -> e i o"
        added[key] = STACK_ALPHA / STACK_RANK * torch.einsum(form, b, a)
    return tensors, added, adapter_config(linear, parameters)


def converted(model: Any) -> bool:
    """Tell whether PEFT rewrites the targets of this class, whose experts were modules in transformers 4."""
    table = importlib.import_module("transformers.conversion_mapping")._MODEL_TO_CONVERSION_PATTERN
    kind = model.config.model_type
    return table.get(kind, kind) in ("mixtral", "qwen2_moe")


def adapter_config(linear: list[str], parameters: list[str]) -> dict[str, Any]:
    import re

    patterns = [re.escape(name) for name in parameters]
    return {
        "peft_type": "LORA", "peft_version": "0.21.2", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": linear, "target_parameters": parameters,
        "rank_pattern": dict.fromkeys(patterns, STACK_RANK), "alpha_pattern": dict.fromkeys(patterns, STACK_ALPHA),
    }  # fmt: skip


def loaded(model: Any, base: Path, adapter: Path, merged: Path) -> dict[str, Tensor]:
    """Return the parameters that transformers has after loading the merged tensors as files."""
    checkpoint = with_adapter(Checkpoint.open(base), adapter)
    shutil.copytree(base, merged, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(
        {name: checkpoint.read(name) for name in checkpoint.tensors},
        merged / "model.safetensors",
        metadata={"format": "pt"},
    )
    found = type(model).from_pretrained(merged, dtype=torch.float32)
    return dict(found.state_dict())


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], changed: set[str]) -> None:
    assert changed
    for name, tensor in wanted.items():
        if not tensor.is_floating_point():
            continue
        far = (found[name].double() - tensor.double()).abs().max()
        assert far <= 1e-5 * tensor.double().abs().max().clamp(min=1.0), name


@pytest.mark.each_choice
@pytest.mark.parametrize(("original", "width"), [(True, 32), (True, 16), (False, 24)])
@pytest.mark.parametrize("name", CLASSES)
def test_every_module_of_every_class(name: str, original: bool, width: int, tmp_path: Path) -> None:
    model = build(sized(CLASSES[name], width), tmp_path / "base", original=original)
    tensors, added, config = random_pairs(model)
    adapter = write(tmp_path / "adapter", tensors, config)
    wanted = {n: t.double() + added.get(n, 0.0) for n, t in model.state_dict().items()}
    compare(loaded(model, tmp_path / "base", adapter, tmp_path / "merged"), wanted, set(added))


SINGLE = ["mixtral", "gpt_oss", "llama4_text"]


def single(name: str, width: int) -> Any:
    """Return the case with one expert."""
    case = sized(CASES[name], width)
    return replace(case, text=case.text | {"num_local_experts": 1, "num_experts_per_tok": 1})


@pytest.mark.parametrize("name", ["mixtral", "llama4_text"])
def test_a_stack_of_one_expert(name: str, tmp_path: Path) -> None:
    model = build(single(name, 24), tmp_path / "base")
    tensors, added, config = random_pairs(model)
    adapter = write(tmp_path / "adapter", tensors, config)
    wanted = {n: t.double() + added.get(n, 0.0) for n, t in model.state_dict().items()}
    compare(loaded(model, tmp_path / "base", adapter, tmp_path / "merged"), wanted, set(added))


def test_stack_peft_cannot_merge_refused(tmp_path: Path) -> None:
    """One expert, [in, out] and not square: PEFT takes it for a matrix [out, in]."""
    model = build(single("gpt_oss", 32), tmp_path / "base")
    tensors, _, config = random_pairs(copy.deepcopy(model))
    with raises_with(ConfigError, "gate_up_proj", "[1, 32, 64]"):
        with_adapter(Checkpoint.open(tmp_path / "base"), write(tmp_path / "adapter", tensors, config))
    down = {name: tensor for name, tensor in tensors.items() if "experts.base_layer" not in name}
    config["target_parameters"] = [name for name in config["target_parameters"] if "gate_up_proj" not in name]
    base = Checkpoint.open(tmp_path / "base")
    found = with_adapter(base, write(tmp_path / "down", down, config))
    a, b = (down[f"base_model.model.model.layers.0.mlp.experts.lora_{half}.weight"].double() for half in "AB")
    name = "model.layers.0.mlp.experts.down_proj"
    step = found.read(name).double() - base.read(name)
    assert (step - STACK_ALPHA / STACK_RANK * (b @ a)).abs().max() < 1e-4


# PEFT compares the patterns of ranks with modules alone, and warns of those that are of parameters.
@pytest.mark.each_choice
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("width", [24, 32, 16])
@pytest.mark.parametrize("name", [*CLASSES, *(f"{name} of one expert" for name in SINGLE)])
def test_saved_adapters_merge_like_peft(name: str, width: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    kind, _, one = name.partition(" of ")
    model = build(single(kind, width) if one else sized(CLASSES[kind], width), tmp_path / "base")
    linear, parameters = targets(model)
    if one and kind == "gpt_oss":
        if width != 32:
            pytest.skip("PEFT cannot merge it")
        parameters = [name for name in parameters if "gate_up_proj" not in name]
    if converted(model):
        # PEFT takes these names for experts that it has to convert, wherever they are.
        linear = [path for path in linear if path.rpartition(".")[2] not in PROJECTIONS]
    entries = adapter_config(linear, parameters)
    for key in ("peft_type", "peft_version"):
        del entries[key]
    wrapped = peft.get_peft_model(copy.deepcopy(model).double(), peft.LoraConfig(**entries))
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if ".lora_" in key:
                parameter.copy_(torch.randn(parameter.shape).float().double())
    wrapped.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n: t.float() for n, t in load_file(file).items()}, file)
    wanted = wrapped.merge_and_unload().state_dict()
    if name == "qwen3_vl_moe" and peft.__version__ < "0.19":
        with pytest.raises(ConfigError, match="orientations"):
            with_adapter(Checkpoint.open(tmp_path / "base"), tmp_path / "adapter")
        return
    changed = {n for n, t in wanted.items() if not torch.equal(t, model.state_dict()[n].double())}
    assert set(parameters) <= changed
    compare(loaded(model, tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"), wanted, changed)


@pytest.mark.parametrize("name", CLASSES)
def test_families_declare_what_their_classes_are(name: str, tmp_path: Path) -> None:
    """The orientation that a family declares is that of the installed class, and so is its ``is_transposed``."""
    model = build(CLASSES[name], tmp_path / "base")
    declared = family_of(json.loads((tmp_path / "base" / "config.json").read_text())).in_memory
    found = set[tuple[bool, bool]]()
    for path, module in model.named_modules():
        parameter = getattr(module, "down_proj", None)
        if "experts" in path and isinstance(parameter, nn.Parameter):
            found.add((parameter.shape[1] == 24, bool(getattr(module, "is_transposed", False))))
    assert found == ({(declared.transposed, declared.marked)} if name != "dbrx" else set())


@pytest.mark.parametrize("name", ["nemotron_h", "kimi_linear", "deepseek_v4", "minimax_m3_vl", "step3p7", "hy_v3"])
def test_published_names_match_resaved_checkpoints(name: str, tmp_path: Path) -> None:
    """Code published with a model names modules as the files do; a copy saved by transformers names them otherwise."""
    build(CASES[name], tmp_path / "published")
    build(CASES[name], tmp_path / "saved", original=False)
    published, saved = (Checkpoint.open(tmp_path / folder) for folder in ("published", "saved"))
    matrices = [
        key
        for key in published.tensors
        if key.endswith(".weight") and len(published.info(key).shape) == 2 and ".experts." not in key
    ]
    matrices = [key for key in matrices if "vision" not in key and "embed" not in key and ".moe." not in key]
    merged = []
    for base in (published, saved):
        tensors = dict[str, torch.Tensor]()
        for at, key in enumerate(matrices):
            generator = torch.Generator().manual_seed(at)
            rows, columns = published.info(key).shape
            path = f"base_model.model.{key.removesuffix('.weight')}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
        adapter = write(
            tmp_path / f"adapter_{len(merged)}", tensors, adapter_config(["all"], []) | {"target_modules": "all-linear"}
        )
        merged.append(with_adapter(base, adapter))
    folders = []
    for at, checkpoint in enumerate(merged):
        folder = tmp_path / f"merged_{at}"
        shutil.copytree(checkpoint.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        state = {key: checkpoint.read(key) for key in checkpoint.tensors}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    kind = type(build(CASES[name], tmp_path / "again"))
    one, two = (dict(kind.from_pretrained(folder, dtype=torch.float32).state_dict()) for folder in folders)
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key


@pytest.mark.parametrize("width", [24, 32, 16])
def test_granite_stacks_as_transformers_4_modules(width: int, tmp_path: Path) -> None:
    """Granite's stacks were weights of two modules; each has one pair."""
    model = build(sized(CASES["granitemoe"], width), tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    tensors, wanted = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    base = Checkpoint.open(tmp_path / "base")
    for which in ("input_linear", "output_linear"):
        key = f"model.layers.1.block_sparse_moe.{which}"
        weight = base.read(f"{key}.weight").double()
        experts, out, into = weight.shape
        a, b = (
            torch.randn(experts * RANK, into, generator=generator),
            torch.randn(out, experts * RANK, generator=generator),
        )
        tensors |= {f"base_model.model.{key}.lora_A.weight": a, f"base_model.model.{key}.lora_B.weight": b}
        step = torch.einsum("ore,eri->eoi", b.double().view(out, RANK, experts), a.double().view(experts, RANK, into))
        wanted[f"{key}.weight"] = weight + ALPHA / RANK * step
    config = adapter_config([], ["input_linear.weight", "output_linear.weight"])
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    found = with_adapter(base, write(tmp_path / "adapter", tensors, config))
    for key, tensor in wanted.items():
        assert (found.read(key).double() - tensor).abs().max() < 1e-4
    assert type(model).__name__ == "GraniteMoeForCausalLM"


RENAMED = [
    "nemotron_h",
    "kimi_linear",
    "deepseek_v4",
    "minimax_m3_vl",
    "step3p7",
    "glm5_next",
    "llama4_text",
    "gpt_oss",
    "dbrx",
]


@pytest.mark.parametrize("name", RENAMED)
def test_whole_models_accept_in_memory_names(name: str, tmp_path: Path) -> None:
    model = build(CASES[name], tmp_path / "base")
    tensors, added, config = random_pairs(model)
    # Small enough that activations stay finite and few tokens change their experts in the last bit.
    small = {key: tensor * (0.05 if "lora_B" in key else 1.0) for key, tensor in tensors.items()}
    adapter = write(tmp_path / "adapter", small, config)
    with torch.no_grad():
        plain = model(input_ids=IDS, use_cache=False).logits
        for key, step in added.items():
            parameter = model.get_parameter(key)
            parameter.copy_((parameter.double() + 0.05 * step).float())
        wanted = model(input_ids=IDS, use_cache=False).logits
        found = load_model_in("fp32", tmp_path / "base", device="cpu", adapter=adapter)
        logits = found(input_ids=IDS, use_cache=False).logits
    far = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert far.median() < 1e-4
    assert ((plain - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() > 0.05
