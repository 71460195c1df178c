"""Whole models that are copied, saved, converted and given other weights: done right, or refused at once."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file

from collegium.errors import InputError
from collegium.integrations.transformers import experts_modules, layers_of, load_model, register
from family_cases import CASES, IDS, build
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


FAMILIES = ("deepseek_v3", "qwen3_moe", "llama4_text")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: Any, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("kept") / request.param
    build(CASES[request.param], path)
    return path


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.clone() for name, tensor in found.items() if not tensor.is_meta}


def test_copies_have_separate_experts(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    wanted = logits(model)
    made: Any = copy.deepcopy(model)
    assert len(layers_of(made)) == len(layers_of(model))
    assert not {id(layer) for layer in layers_of(made)} & {id(layer) for layer in layers_of(model)}
    del model
    assert torch.equal(logits(made), wanted)
    assert torch.equal(logits(torch.compile(made, backend="aot_eager")), wanted)
    with raises_with(InputError, "load_model"):
        made.half()


_READ = """
import sys, torch
for path in sys.argv[1:]:
    model, ids, wanted = torch.load(path, weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted), path
        assert torch.equal(torch.compile(model, backend="aot_eager")(ids).logits, wanted), path
"""


def test_saved_models_run_in_another_process(tmp_path: Path) -> None:
    paths: list[str] = []
    for family in FAMILIES:
        build(CASES[family], tmp_path / family)
        model = load_model(tmp_path / family, device="cpu")
        paths.append(str(tmp_path / f"{family}.pt"))
        torch.save((model, IDS, logits(model)), paths[-1])
    subprocess.run([sys.executable, "-c", _READ, *paths], check=True, timeout=240)


def test_state_dict_without_experts_not_saved(folder: Path, tmp_path: Path) -> None:
    model: Any = load_model(folder, device="cpu")
    state = model.state_dict()
    whole = "has only their shapes. torch.save.model. saves all of it"
    for save in (
        lambda: torch.save(state, tmp_path / "state.pt"),
        lambda: torch.save(copy.deepcopy(state), tmp_path / "state.pt"),
        lambda: torch.save(model.model.state_dict(), tmp_path / "state.pt"),
        lambda: torch.save(torch.nn.Sequential(model).state_dict(), tmp_path / "state.pt"),
        lambda: save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "state.safetensors"),
        lambda: {name: tensor.cpu() for name, tensor in state.items()},
    ):
        with pytest.raises(InputError, match=whole):
            save()
    # What only asks for names, shapes and dtypes gets them, and what belongs to the model can be put back.
    assert {name for name, _ in model.named_parameters()} - set(state) <= {"lm_head.weight"}
    assert all(state[name].shape == tensor.shape for name, tensor in model.named_parameters() if name in state)
    before = logits(model)
    assert not any(model.load_state_dict(copy.deepcopy(state)))
    assert torch.equal(logits(model), before)


def test_foreign_state_dict_refused_before_overwriting(folder: Path) -> None:
    model: Any = load_model(folder, device="cpu")
    before, state = held(model), load_model(folder, device="cpu").state_dict()
    numbers = {name: torch.full(tensor.shape, 7.0) for name, tensor in state.items()}
    for given in (state, numbers):
        for strict in (True, False):
            with raises_with(InputError, "load_state_dict", "load_model"):
                model.load_state_dict(given, strict=strict)
    for name, tensor in held(model).items():
        assert torch.equal(tensor, before[name]), name
    rest = {name: tensor for name, tensor in numbers.items() if not state[name].is_meta}
    model.load_state_dict(rest, strict=False)
    assert all(torch.equal(tensor, rest[name].to(tensor.dtype)) for name, tensor in held(model).items() if name in rest)


@pytest.mark.parametrize("way", ["half", "float", "double", "tensor", "named", "part", "wrapper", "type"])
def test_no_conversion_is_done_in_part(folder: Path, way: str) -> None:
    model: Any = load_model(folder, device="cpu")
    before, wanted = held(model), logits(model)
    other = torch.zeros(1, dtype=torch.float16)
    done = {
        "half": model.half,
        "float": model.float,
        "double": model.double,
        "tensor": lambda: model.to(other),
        "named": lambda: model.to(tensor=other),
        "part": lambda: model.model.half(),
        "wrapper": lambda: torch.nn.Sequential(model).half(),
        "type": lambda: model.type(torch.float16),
    }
    with raises_with(InputError, "torch.float", "torch.bfloat16"):
        done[way]()
    for name, tensor in held(model).items():
        assert tensor.dtype == before[name].dtype, name
    assert torch.equal(logits(model), wanted)


def test_same_dtype_conversion_rounds_nothing(folder: Path) -> None:
    """Frequencies of positions and correction biases are float32 in a BF16 model."""
    model: Any = load_model(folder, device="cpu")
    before, wanted = held(model), logits(model)
    assert any(tensor.dtype == torch.float32 for tensor in before.values())
    for same in (
        model.bfloat16,
        lambda: model.to(torch.zeros(1, dtype=torch.bfloat16)),
        lambda: torch.nn.Sequential(model).to(torch.bfloat16)[0],
        lambda: model.to_empty(device="cpu"),
        model.share_memory,
    ):
        assert same() is model
        for name, tensor in held(model).items():
            assert tensor.dtype == before[name].dtype, name
        assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_registered_experts_accept_every_token_dtype(tmp_path: Path, compiled: bool) -> None:
    import transformers

    build(CASES["qwen3_moe"], tmp_path)
    register()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="collegium"
    ).requires_grad_(False)
    truth: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager"
    ).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for module, judge in zip(experts_modules(model).values(), experts_modules(truth).values(), strict=True):
        experts, _, width = module.gate_up_proj.shape
        run = torch.compile(module, backend="aot_eager") if compiled else module
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
            for top_k in (2, 3, 1):
                x = torch.randn(5, width, generator=generator).to(dtype)
                ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(5)])
                weights = torch.rand(5, top_k, generator=generator)
                found, wanted = run(x, ids, weights), judge(x.float(), ids, weights)
                assert found.dtype == dtype
                assert (found.float() - wanted).norm() <= 4 * torch.finfo(dtype).eps * wanted.norm()


def test_load_hook_accepts_model_by_keyword(folder: Path) -> None:
    """As adapters are by transformers, which hands the model over by name."""
    register()
    given: list[Any] = []

    from transformers import PreTrainedModel

    from collegium.integrations.transformers import hooks, patches

    model: Any = load_model(folder, device="cpu")
    wrapped = patches.wrapper(lambda *own, **named: given.append((own, named)), partial(hooks._load, "collegium"))
    wrapped(model=model, state_dict={})
    wrapped(model, {})
    assert given == [((), {"model": model, "state_dict": {}}), ((model, {}), {})]
    assert patches.is_wrapped(PreTrainedModel._load_pretrained_model)
