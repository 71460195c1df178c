"""``collegium.load_model``: its arguments, what ``print`` shows of a model, and the bytes and numbers it counts."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import collegium
from collegium import InputError, MissingExtraError, Overrides, SpecError, load_layer
from family_cases import CASES, build
from quantised_models import write_model

pytest.importorskip("transformers")
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
IDS = torch.tensor([[1, 2, 3, 500]])


def stored_bytes(folder: Path, *, experts: bool) -> int:
    """Return the bytes of a checkpoint's experts, or of everything else."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = (file.get_tensor(name) for name in file.keys() if (".experts." in name) == experts)  # noqa: SIM118
            total += sum(tensor.nbytes for tensor in tensors)
    return total


def buffer_bytes(model: Any) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "fp32", torch.float16, "bfloat16", torch.bfloat16])
def test_every_spelling_of_a_dtype(dtype: Any) -> None:
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.float32 if "32" in dtype else torch.bfloat16
    model: Any = collegium.load_model(SHIPPED, dtype=dtype, device="cpu")
    logits = model(IDS).logits
    assert {model.dtype, logits.dtype} == {wanted}
    truth = collegium.load_model(SHIPPED, dtype="fp32", device="cpu")(IDS).logits
    bound = {torch.float32: 0, torch.float16: 0.01, torch.bfloat16: 0.05}[wanted]
    assert (logits.float() - truth).norm() <= bound * truth.norm()
    layer = load_layer(SHIPPED, 2, dtype=dtype, device="cpu")
    assert layer.input_dtype == wanted


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ({"device_map": "auto"}, "device="),
        ({"device_map": {"": 0}}, "device="),
        ({"torch_dtype": torch.float16}, "dtype="),
        ({"dtype": "auto"}, "torch.bfloat16"),
        ({"dtype": torch.int8}, "torch.int8"),
        ({"dtype": None}, "None"),
        ({"device": "auto"}, "Ranks"),
        ({"device": {"": "cpu"}}, "Ranks"),
        ({"load_in_4bit": True}, "weight_format="),
        ({"quantization_config": object()}, "weight_format="),
        ({"attn_implementation": "sdpa"}, "set_attn_implementation"),
        ({"trust_remote_code": True}, "never run"),
        ({"tp_plan": "auto"}, "Ranks"),
        ({"max_memory": {0: "10GB"}}, "nothing is offloaded"),
        ({"weight_fromat": "mxfp4"}, "weight_format"),
        ({"nonsense": 1}, "'nonsense'"),
    ],
)
def test_arguments_of_others_are_answered(arguments: dict[str, Any], instead: str) -> None:
    for call in (collegium.load_model, lambda path, **others: load_layer(path, 2, **others)):
        with pytest.raises(SpecError if "dtype" in arguments else InputError) as caught:
            call(SHIPPED, **arguments)
        assert instead in str(caught.value)


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][0, 0] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert collegium.load_model(folder, device="cpu").get_parameter(name)[0, 0] > 9e4
    with pytest.raises(InputError, match=rf"{name} .*65504.*bf16"):
        collegium.load_model(folder, dtype="fp16", device="cpu")


@pytest.mark.parametrize(("form", "kernel"), [(None, "cpu_grouped"), ("mxfp4", "reference"), ("int4_group", None)])
def test_print_names_what_runs(tmp_path: Path, form: str | None, kernel: str | None) -> None:
    folder = write_model(tmp_path / "model", form and "compressed-tensors", form)
    model = collegium.load_model(folder, device="cpu", overrides=Overrides(kernel=kernel) if kernel else None)
    for shown in (model, copy.deepcopy(model), repickled(model)):
        lines = [line for line in repr(shown).splitlines() if "Collegium" in line]
        assert lines
        for line in lines:
            assert f"weight_format={form or 'bf16'}" in line
            assert f"kernel={kernel or 'cpu_'}" in line
            assert "experts=5" in line


def test_print_names_attached_and_built_layers() -> None:
    from transformers import AutoModelForCausalLM

    from collegium.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, experts_implementation="collegium", dtype=torch.bfloat16)
    assert "Collegium" not in repr(model)
    with torch.no_grad():
        model(IDS)
    assert repr(model).count("Collegium: kernel=cpu_grouped, weight_format=bf16") in (1, 6)  # equal ones in one line
    model.set_experts_implementation("eager")
    assert "Collegium" not in repr(model)


def repickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("form", [None, "mxfp4", "nvfp4", "int4_group", "fp8_channel"])
def test_packed_experts_are_counted(tmp_path: Path, form: str | None) -> None:
    folder = write_model(tmp_path / "model", form and "compressed-tensors", form)
    # The reference keeps experts as they are stored.
    model: Any = collegium.load_model(folder, device="cpu", overrides=Overrides(kernel="reference"))
    experts = stored_bytes(folder, experts=True)
    if form == "int4_group":
        experts -= 3 * 5 * 3 * 16  # weight_shape, two int64 a matrix
    rest = stored_bytes(folder, experts=False)
    assert model.get_memory_footprint() == experts + rest + buffer_bytes(model)
    assert model.get_memory_footprint(return_buffers=False) == experts + rest
    assert (
        repickled(model).get_memory_footprint()
        == copy.deepcopy(model).get_memory_footprint()
        == (model.get_memory_footprint())
    )
    assert model.num_parameters() == write_count(tmp_path)
    # The text model alone has everything but the head.
    head = model.lm_head.weight
    assert model.model.get_memory_footprint(return_buffers=False) == experts + rest - head.nbytes
    assert model.num_parameters(only_trainable=True) == 0


def write_count(tmp_path: Path) -> int:
    """Return how many weights the unquantised twin of ``write_model`` has."""
    folder = write_model(tmp_path / "plain")
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("family", ["llama4_text", "dbrx", "step3p7"])
def test_whole_blocks_are_counted(tmp_path: Path, family: str) -> None:
    source: Any = build(CASES[family], tmp_path / "model")
    model: Any = collegium.load_model(tmp_path / "model", dtype="fp32", device="cpu")
    assert model.num_parameters() == source.num_parameters()
    assert "Collegium: kernel=" in repr(model)
    assert model.get_memory_footprint(return_buffers=False) >= 4 * source.num_parameters()


def test_smaller_formats_shrink_the_model() -> None:
    sizes = {
        name: collegium.load_model(SHIPPED, weight_format=name, device="cpu").get_memory_footprint()
        for name in ("bf16", "mxfp8", "mxfp4")
    }
    experts = 6 * 16 * 3 * 192 * 256
    assert sizes["bf16"] - sizes["mxfp4"] == pytest.approx(experts * (2 - 0.53125), rel=0.03)
    assert sizes["bf16"] - sizes["mxfp8"] == pytest.approx(experts * (2 - 1.03125), rel=0.03)


WITHOUT = """
    import sys
    sys.modules["transformers"] = None  # as if it were not installed
    import collegium
    from collegium import load_model
    try:
        load_model("demo/fables-16m")
    except collegium.MissingExtraError as error:
        print(type(error).__name__, error)
"""


def test_missing_transformers_names_the_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=SHIPPED.parents[1],
    )
    assert done.stdout.startswith(MissingExtraError.__name__), done.stderr
    assert "pip install 'collegium[transformers]'" in done.stdout
