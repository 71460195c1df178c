"""What ``load_model`` gives and refuses, entered from checkpoints on disk, for models of several layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from collegium.checkpoint.reader import Checkpoint
from collegium.errors import CheckpointError, ConfigError, InputError, MissingTensorError, TensorMismatchError
from collegium.integrations.transformers import experts_modules, layers_of, load_model
from collegium.integrations.transformers.loading import load_model_in
from commands import command
from family_cases import CASES, IDS, build
from raising import raises_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
KINDS = ("deepseek_v3", "qwen3_moe", "llama4_text")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: Any, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("whole") / request.param
    build(CASES[request.param], path)
    return path


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("whole") / "deepseek_v3"
    build(CASES["deepseek_v3"], path)
    return path


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def changed(folder: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Copy a checkpoint with other tensors."""
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def test_tensor_dtypes_match_transformers(deepseek: Path, tmp_path: Path) -> None:
    """A correction bias rounded to BF16 lets other experts win."""

    def published(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "e_score_correction_bias" not in name:
                tensors[name] = tensors[name].bfloat16()

    path = changed(deepseek, tmp_path / "bf16", published)
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    model = load_model(path, device="cpu")
    found = dict(model.named_buffers())
    names = [name for name in stored if "e_score_correction_bias" in name]
    assert len(names) == 2
    for name in names:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], stored[name])
        assert not torch.equal(found[name], stored[name].bfloat16().float())
    theirs = type(model).from_pretrained(path, dtype=torch.bfloat16, experts_implementation="eager")
    chosen: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    for kind, one in (("ours", model), ("theirs", theirs)):
        for module in one.modules():
            if type(module).__name__ == "DeepseekV3MoE":
                module.gate.register_forward_hook(lambda _m, _i, out, kind=kind: chosen[kind].append(out))
        logits(one)
    assert len(chosen["ours"]) == len(chosen["theirs"]) == 2
    first = [
        torch.cat(
            [t.reshape(-1).float() for t in out if isinstance(t, torch.Tensor)]
            if isinstance(out, tuple)
            else [out.reshape(-1).float()]
        )
        for out in (chosen["ours"][0], chosen["theirs"][0])
    ]
    assert torch.equal(*first)


@pytest.mark.parametrize("set_for_torch", ["inference_mode", "default_dtype", "default_device", "autocast"])
def test_torch_settings_do_not_change_models(folder: Path, set_for_torch: str) -> None:
    plain = load_model_in("fp32", str(folder), device="cpu")
    if set_for_torch == "inference_mode":
        with torch.inference_mode():
            model = load_model_in("fp32", str(folder), device="cpu")
    elif set_for_torch == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model = load_model_in("fp32", str(folder), device="cpu")
    elif set_for_torch == "default_dtype":
        torch.set_default_dtype(torch.float64)
        try:
            model = load_model_in("fp32", str(folder), device="cpu")
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        torch.set_default_device("meta")
        try:
            model = load_model_in("fp32", str(folder), device="cpu")
            assert torch.empty(1).is_meta
        finally:
            torch.set_default_device(None)
    mine, wanted = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, plain))
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (mine[name].dtype, mine[name].device) == (tensor.dtype, tensor.device), name
        assert not mine[name].is_inference(), name
        assert tensor.is_meta or torch.equal(mine[name], tensor), name
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("asked", ["eager", "grouped_mm", "batched_mm", {"": "collegium", "text_config": "eager"}])
def test_other_experts_implementations_refused(folder: Path, asked: Any) -> None:
    model = load_model(str(folder), device="cpu")
    before = logits(model)
    for part in (model, model.model):
        with raises_with(InputError, "'collegium'", "from_pretrained"):
            part.set_experts_implementation(asked)
    model.set_experts_implementation("collegium")
    assert torch.equal(logits(model), before)
    modules = experts_modules(model)
    for module in modules.values():
        module.config._experts_implementation = "eager"
    if modules:
        with raises_with(InputError, "experts_implementation='eager'"):
            logits(model)


def test_saving_without_experts_is_refused(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), device="cpu")
    with raises_with(InputError, f"collegium quantize {folder} --to"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_moves_and_dtype_changes_refused(folder: Path) -> None:
    model = load_model(str(folder), device="cpu")
    before = logits(model)
    assert model.to("cpu") is model.to(torch.bfloat16) is model.to(device="cpu", dtype=torch.bfloat16) is model.cpu()
    for move in (
        lambda: model.to("cuda"),
        lambda: model.to("cpu", torch.float32),
        lambda: model.to(device=torch.device("cuda:1")),
        lambda: model.cuda(),
        lambda: model.cuda(1),
        lambda: model.to(dtype=torch.float16),
    ):
        with raises_with(InputError, "torch.bfloat16", "load_model"):
            move()
    assert torch.equal(logits(model), before)


def test_layers_beyond_the_config_ignored(deepseek: Path, tmp_path: Path) -> None:
    """Layers from num_hidden_layers on are read by nobody, whatever they hold."""

    def predict(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            tensors[name.replace("layers.2", "layers.3")] = torch.full_like(tensors[name], torch.nan)

    more = load_model(changed(deepseek, tmp_path / "mtp", predict), device="cpu")
    assert torch.equal(logits(more), logits(load_model(str(deepseek), device="cpu")))


def test_dense_loading_reads_no_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collegium.integrations.transformers import loading

    read: list[str] = []
    whole = Checkpoint.read

    def noted(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(Checkpoint, "read", noted)
    seen: list[list[str]] = []
    build_layers = loading.build_layers
    monkeypatch.setattr(loading, "build_layers", lambda *a, **k: (seen.append(list(read)), build_layers(*a, **k))[1])
    model = load_model(str(folder), device="cpu")
    assert len(seen) == 1
    assert [name for name in seen[0] if ".experts." in name] == []
    assert len(seen[0]) == len(set(seen[0]))
    assert all(p.is_meta for module in experts_modules(model).values() for p in module.parameters())
    assert len(layers_of(model)) == (1 if "llama4" in folder.name else 2)


def test_a_folder_without_config(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    with raises_with(ConfigError, "config.json"):
        load_model(str(tmp_path / "bare"), device="cpu")


def toy_gguf(path: Path) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path / "toy.gguf", "deepseek2")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "toy.gguf"


def test_unknown_gguf_architectures(tmp_path: Path) -> None:
    for path in (toy_gguf(tmp_path), tmp_path):
        with raises_with(ConfigError, "GGUF", "load_layer()"):
            load_model(str(path), device="cpu")


def test_single_file_with_config_loads(folder: Path) -> None:
    one = load_model(str(folder / "model.safetensors"), device="cpu")
    assert torch.equal(logits(one), logits(load_model(str(folder), device="cpu")))


def test_a_config_transformers_cannot_read(deepseek: Path, tmp_path: Path) -> None:
    shutil.copytree(deepseek, tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "num_attention_heads": "two"}))
    with raises_with(ConfigError, "'deepseek_v3'", "num_attention_heads"):
        load_model(str(tmp_path / "odd"), device="cpu")


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.gate.weight", "model.layers.2.mlp.shared_experts.up_proj.weight", "model.norm.weight"],
)
def test_mismatched_tensor_shape_is_named(deepseek: Path, tmp_path: Path, name: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1]

    with pytest.raises(TensorMismatchError, match=rf"(?s)(?=.*{name.removesuffix('.weight')}).*\(\d+.*\(\d+"):
        load_model(changed(deepseek, tmp_path / "cut", cut), device="cpu")


def test_missing_correction_bias_is_named(deepseek: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.gate.e_score_correction_bias"

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    path = changed(deepseek, tmp_path / "less", drop)
    with pytest.raises(MissingTensorError, match=name):
        load_model(path, device="cpu")


@pytest.mark.parametrize("kind", ["fp8", "packed", "int8"])
def test_what_no_config_declares_is_named(deepseek: Path, tmp_path: Path, kind: str) -> None:
    path = "model.layers.1.self_attn.o_proj"

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(f"{path}.weight")
        if kind == "fp8":
            tensors[f"{path}.weight"] = weight.to(torch.float8_e4m3fn)
            tensors[f"{path}.weight_scale_inv"] = torch.ones(1, 1)
        elif kind == "int8":
            tensors[f"{path}.weight"] = weight.to(torch.int8)
        else:
            tensors[f"{path}.weight_packed"] = torch.zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
            tensors[f"{path}.weight_scale"] = torch.ones(weight.shape[0], 2)

    with raises_with(ConfigError, path, "quantization_config"):
        load_model(changed(deepseek, tmp_path / kind, quantise), device="cpu")


def test_whole_numbers_where_a_weight_belongs(deepseek: Path, tmp_path: Path) -> None:
    def count(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int32)

    with raises_with(ConfigError, "model.norm"):
        load_model(changed(deepseek, tmp_path / "int", count), device="cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_ties_generation_settings_and_stored_dtypes(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    from dataclasses import replace

    from transformers import GenerationConfig

    case = CASES["qwen3_moe"]
    own = build(replace(case, text={**case.text, "tie_word_embeddings": tied}), tmp_path)
    own.to(dtype).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[2, 7], max_new_tokens=5).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.config.dtype == torch.bfloat16
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.lm_head.weight, own.lm_head.weight.bfloat16())
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.name_or_path == model.config.name_or_path == str(tmp_path)
    written = model.generate(IDS, do_sample=False, max_new_tokens=5)
    assert 0 < written.shape[1] - IDS.shape[1] <= 5


def test_transformers_errors_name_the_checkpoint(deepseek: Path, tmp_path: Path) -> None:
    shutil.copytree(deepseek, tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    changes = {"hidden_act": "silu", "rope_parameters": {"rope_type": "unheard", "rope_theta": 1e4}}
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match="odd"):
        load_model(str(tmp_path / "odd"), device="cpu")


@pytest.mark.parametrize("name", ["dbrx", "llama4", "step3p7"])
def test_router_logits_of_replaced_blocks_refused(tmp_path: Path, name: str) -> None:
    build(CASES[name], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["output_router_logits"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path), device="cpu")
    assert torch.isfinite(logits(model)).all()
    with raises_with(InputError, "output_router_logits"):
        model(IDS, output_router_logits=True)


def test_configs_with_bare_infinity(tmp_path: Path) -> None:
    build(CASES["nemotron_h_mamba"], tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "published")
    file = tmp_path / "published" / "config.json"
    entries = json.loads(file.read_text()) | {"time_step_limit": [0.0, float("inf")]}
    file.write_text(json.dumps(entries))
    assert "Infinity\n" in json.dumps(entries, indent=2)
    wanted, found = (load_model(str(tmp_path / name), device="cpu") for name in ("own", "published"))
    assert torch.equal(logits(found), logits(wanted))
    for arguments in (["inspect"], ["quantize", "--to", "mxfp8", "--out", tmp_path / "mxfp8"]):
        assert command(arguments[0], tmp_path / "published", *arguments[1:])[0] == 0
    again = load_model(str(tmp_path / "mxfp8"), device="cpu")
    assert 0 < float((logits(again) - logits(wanted)).norm() / logits(wanted).norm()) < 0.5


@pytest.mark.parametrize("gone", [False, True])
def test_replaced_blocks_name_router_faults(tmp_path: Path, gone: bool) -> None:
    build(CASES["dbrx"], tmp_path / "own")
    name = "transformer.blocks.1.ffn.router.layer.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(name)
        if not gone:
            tensors[name] = weight[:-1]

    with pytest.raises(MissingTensorError if gone else TensorMismatchError, match=name):
        load_model(changed(tmp_path / "own", tmp_path / "spoilt", spoil), device="cpu")


@pytest.mark.parametrize("name", ["ernie4_5_moe", "granitemoe", "minimax", "nemotron_h", "dbrx", "llama4", "phimoe"])
def test_generate_runs_published_family_names(tmp_path: Path, name: str) -> None:
    from dataclasses import replace

    from typer.testing import CliRunner

    from collegium import cli

    case = CASES[name]
    build(replace(case, text={**case.text, "vocab_size": 4096}), tmp_path)
    for file in SHIPPED.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    arguments = ["generate", str(tmp_path), "--tokens", "4", "--device", "cpu", "--prompt", "The king", "--json"]
    texts = []
    for _ in range(2):
        result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    assert texts[0] == texts[1]
    assert texts[0].startswith("The king")


@pytest.mark.parametrize("kind", ["gguf", "bare", "arctic"])
def test_generate_explains_unloadable_models(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from collegium import cli

    path, said = tmp_path, "no config.json"
    if kind == "gguf":
        path, said = toy_gguf(tmp_path), "a GGUF file of the architecture 'deepseek2'"
    else:
        save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    if kind == "arctic":
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_local_experts": 6}
        config = {"model_type": "arctic", **sizes, "num_experts_per_tok": 2, "moe_layer_frequency": 2}
        (tmp_path / "config.json").write_text(json.dumps(config))
        shutil.copy(SHIPPED / "tokenizer.json", tmp_path)
        said = "model_type 'arctic' cannot be loaded as a whole model"
    monkeypatch.setattr("sys.argv", ["collegium", "generate", str(path), "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert said in " ".join(capsys.readouterr().err.split())
