"""Layers and models that are pickled, saved and copied have the same bits, in this process and in another one."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium import (
    DeviceFacts,
    ExpertWeights,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    Ranks,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    load_layer,
    plan,
    probe,
)
from collegium.formats import FORMATS
from collegium.formats.gguf import KINDS
from collegium.parallel.local import Local
from collegium.parallel.placement import linear
from collegium.runtime.pickling import WithTensors
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from family_cases import CASES, IDS, build
from integers import encoded, random_blocks
from raising import raises_with
from rank_cases import FOLDERS, built
from ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXPERTS, WIDE, HIDDEN, TOP_K = 3, 256, 256, 2
CPU_KERNELS = ("cpu_fused", "cpu_grouped", "reference")
FORMAT_NAMES = (*(form.name for form in FORMATS if form.name != "gguf"), *KINDS)


def weights_in(name: str) -> ExpertWeights[Any]:
    if name in KINDS:
        up = random_blocks(name, EXPERTS, 2, WIDE, HIDDEN)
        return ExpertWeights(gate_up=up, down=random_blocks(name, EXPERTS, HIDDEN, WIDE))
    return encoded(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), name, 64 if name == "bnb4" else 128)


def accepts(kernel: str, name: str) -> bool:
    """Whether a kernel runs a format on this CPU."""
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format="gguf" if name in KINDS else name,
    )
    try:
        plan(Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=16)), Overrides(kernel=kernel))
    except PlanError:
        return False
    return True


def layer_in(name: str, kernel: str | None, **asked: Any) -> MoELayer:
    weights = weights_in(name)
    shared = asked.pop("shared", False)
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format=weights.down.name,
        shared=SharedSpec(intermediate_size=WIDE) if shared else None,
    )
    device = asked.pop("device", probe("cpu"))
    problem = Problem(spec=spec, device=device, limits=Limits(max_tokens=16))
    return MoELayer(
        weights,
        plan(problem, Overrides(kernel=kernel, activation_format=asked.pop("activations", None))),
        router=RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=8)),
        shared=SharedWeights(experts=encode_experts(random_experts(1, 2, WIDE, HIDDEN, seed=5), name))
        if shared
        else None,
        **asked,
    )


def saved(value: Any) -> Any:
    """Return ``value`` as ``torch.save`` and ``torch.load`` bring it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Any] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "protocol 2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "twice": lambda value: saved(pickle.loads(pickle.dumps(value))),
}


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, kernel) for name in FORMAT_NAMES for kernel in CPU_KERNELS if accepts(kernel, name)],
)
def test_every_format_and_kernel(name: str, kernel: str) -> None:
    layer = layer_in(name, kernel)
    x = heavy_tailed(7, HIDDEN, seed=2).bfloat16()
    before = {way: run(layer) for way, run in WAYS.items()}
    wanted = layer(x)
    for way, run in WAYS.items():
        for own in (before[way], run(layer)):
            assert same_bits(own(x), wanted), way
            assert own.plan == layer.plan
    # Some other experts are in the file, and not those of the layer that was saved.
    assert not same_bits(layer_in(name, kernel)(x * 2), wanted)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


HOPPER = DeviceFacts(kind="cuda", capability=(9, 0))


@pytest.mark.parametrize(
    ("name", "activations", "kernel"),
    [
        ("bf16", "bf16", "triton_bf16"),
        ("fp8_block", "fp8_group128", "triton_fp8"),
        ("mxfp4", "fp8_token", "triton_w4a8"),
        ("nvfp4", "fp8_token", "triton_w4a8"),
        ("mxfp4", "bf16", "triton_w4a16"),
        ("nvfp4", "bf16", "triton_w4a16"),
        ("int4_group", "bf16", "triton_w4a16"),
        ("int8_affine", "bf16", "triton_w8a16"),
        ("mxfp8", "bf16", None),
        ("bnb4", "bf16", None),
        ("Q4_K", "bf16", None),
    ],
)
def test_layouts_for_gpus(name: str, activations: str, kernel: str | None) -> None:
    pytest.importorskip("triton")
    layer = layer_in(name, kernel, activations=activations, device=HOPPER)
    assert layer.plan.kernel.startswith("triton")
    x = heavy_tailed(5, HIDDEN, seed=3).bfloat16()
    routing = Routing(topk_ids=uneven_ids(5, TOP_K, EXPERTS, seed=1), topk_weights=torch.rand(5, TOP_K))
    batch, _ = Local(num_experts=EXPERTS).dispatch(x, routing, block_t=layer.experts.tiling.block_t(10))
    for way, run in WAYS.items():
        own = run(layer)
        pairs = list(zip(tensors_of(own.experts), tensors_of(layer.experts), strict=True))
        assert len(pairs) >= 2
        for found, wanted in pairs:
            assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
            assert same_bits(found.contiguous(), wanted.contiguous()), way
        assert own.plan == layer.plan
        if way == "pickle":
            assert same_bits(own.experts.run(batch, None), layer.experts.run(batch, None))


def test_shared_expert_and_options() -> None:
    layer = layer_in("nvfp4", None, shared=True, checked=True)
    x = heavy_tailed(4, HIDDEN, seed=2).bfloat16()
    wanted = layer(x)
    for way, run in WAYS.items():
        own = run(layer)
        assert same_bits(own(x), wanted), way
        assert own.checked
        with pytest.raises(InputError):
            own(x * torch.nan)
    copied = copy.copy(layer)
    assert copied.experts is layer.experts
    assert copy.deepcopy(layer).experts is not layer.experts


def test_memory_is_written_once() -> None:
    whole = torch.arange(1 << 20, dtype=torch.int16).view(torch.float16)
    views = {"rows": whole[: 1 << 10].view(32, 32), "turned": whole.view(1 << 10, 1 << 10).t(), "none": whole[:0]}
    written = pickle.dumps(WithTensors(views))
    assert len(written) < 1.1 * whole.numel() * 2
    found = pickle.loads(written)
    for name, view in views.items():
        assert found[name].stride() == view.stride()
        assert torch.equal(found[name].view(torch.int16), view.view(torch.int16))
    # They share memory as before.
    found["rows"][0, 1] = 7.0
    assert float(found["turned"][1, 0]) == 7.0


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64]
)
def test_dtypes_that_plain_pickle_cannot_read(dtype: torch.dtype) -> None:
    tensor = torch.arange(48, dtype=torch.uint8).view(dtype)[1:]
    found = pickle.loads(pickle.dumps(WithTensors([tensor])))[0]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_other_devices_are_refused() -> None:
    file = io.BytesIO()
    torch.save(layer_in("nvfp4", "reference"), file)
    file.seek(0)
    with raises_with(InputError, "cpu", "meta"):
        torch.load(file, weights_only=False, map_location="meta")


_READ = """
import pickle, sys, torch
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        value, x, wanted = pickle.load(file) if path.endswith(".pickle") else torch.load(file, weights_only=False)
    with torch.no_grad():
        found = value(x)
        found = getattr(found, "logits", found)
        assert torch.equal(found, wanted), (path, (found - wanted).abs().max())
"""


def _write_saved(value: Any, path: Path) -> str:
    """Write ``value`` as the suffix of ``path`` says, by pickle or by ``torch.save``, and return the path."""
    with path.open("wb") as file:
        (pickle.dump if path.suffix == ".pickle" else torch.save)(value, file)
    return str(path)


def _run_in_another_process(paths: list[str]) -> None:
    """Compare the saved modules with their results in a new process."""
    subprocess.run([sys.executable, "-c", _READ, *paths], check=True, timeout=240)


def test_loaded_layers_in_another_process(tmp_path: Path) -> None:
    build(CASES["deepseek_v3"], tmp_path / "model")
    layers = [load_layer(tmp_path / "model", 1, weight_format=name) for name in ("mxfp4", "nvfp4", "int4_group")]
    x = heavy_tailed(6, layers[0].spec.hidden_size, seed=4).to(layers[0].input_dtype)
    model = torch.nn.Sequential(*layers)
    value = (model, x, model(x))
    _run_in_another_process([_write_saved(value, tmp_path / name) for name in ("layers.pickle", "layers.pt")])


def test_whole_models_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from collegium.integrations.transformers import layers_of, load_model

    paths: list[str] = []
    for family, suffix in (("qwen3_moe", "pickle"), ("gpt_oss", "pt")):
        build(CASES[family], tmp_path / family)
        model: Any = load_model(tmp_path / family, device="cpu", weight_format="nvfp4")
        with torch.no_grad():
            wanted = model(IDS).logits
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(copied(IDS).logits, wanted)
                assert {layer.plan.problem.spec.weight_format for layer in layers_of(copied)} == {"nvfp4"}
        paths.append(_write_saved((model, IDS, wanted), tmp_path / f"{family}.{suffix}"))
    _run_in_another_process(paths)


def _over_ranks(rank: int) -> list[str]:
    import os

    found: list[str] = []
    layer = load_layer(os.environ[FOLDERS], 1, device=Ranks.of())
    for name, run in {"pickle": pickle.dumps, "torch.save": saved}.items():
        try:
            run(layer)
            found.append(f"{name}: none")
        except InputError as error:
            if "a layer over ranks cannot be pickled (rank" not in str(error):
                found.append(f"{name}: {error}")
    x = heavy_tailed(3 + rank, layer.spec.hidden_size, seed=rank).to(layer.input_dtype)
    wanted = layer(x)
    if not torch.equal(copy.copy(layer)(x), wanted):
        found.append("a copy has other bits")
    return found


def test_layers_over_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(built(tmp_path, "deepseek_v3")[0]))
    assert run_ranks(_over_ranks, 2) == [[], []]


def test_parts_of_sums_are_pickled() -> None:
    spec = MoESpec(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_experts=6, routing=RoutingSpec(top_k=2), weight_format="nvfp4"
    )
    problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=16), placement=linear(6, 1, 2))
    layer = MoELayer(weights_in("nvfp4"), plan(problem, Overrides(dispatcher="partial")))
    x, logits = heavy_tailed(5, HIDDEN, seed=2).bfloat16(), heavy_tailed(5, 6, seed=3)
    for run in WAYS.values():
        assert same_bits(run(layer)(x, router_logits=logits), layer(x, router_logits=logits))
