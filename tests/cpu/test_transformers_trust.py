"""The plug-in runs the experts of the checkpoint or refuses, whatever transformers made of them."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from collegium import ConfigError
from collegium.integrations.transformers import experts_modules, layers_of, load_model, refresh, register
from collegium.testing.compare import relative_error
from quantised_models import decoded, write_model
from raising import raises_with

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(7))
# What transformers reads wrongly: method, format, width of an expert, what the config alone gives away.
MISREAD = {
    "compressed-tensors nvfp4": ("compressed-tensors", "nvfp4", 96, "drops the global scale"),
    "modelopt fp8": ("modelopt", "fp8_tensor", 96, "no reader for this method"),
    "modelopt fp8 per channel": ("modelopt", "fp8_channel", 96, "no reader for this method"),
    "modelopt mxfp8": ("modelopt", "mxfp8", 96, "no reader for this method"),
    "fp8 half a block": ("fp8", "fp8_block", 192, None),
    "fp8 quarter of a block": ("fp8", "fp8_block", 160, None),
}
READ = {
    "bf16": (None, None, 96),
    "compressed-tensors fp8 per channel": ("compressed-tensors", "fp8_channel", 96),
    "compressed-tensors int4": ("compressed-tensors", "int4_group", 96),
    "fp8 whole blocks": ("fp8", "fp8_block", 128),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated.*"),
    pytest.mark.filterwarnings("ignore:Defining your `__torch_dispatch__`"),
]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    register()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = {name: row[:3] for name, row in MISREAD.items()} | READ
    made: dict[str, Path] = {}
    for name, (method, form, wide) in kinds.items():
        torch.manual_seed(11)
        made[name] = write_model(root / name.replace(" ", "-"), method, form, wide=wide)
    return made


def load(folder: Path | str, **options: Any) -> Any:
    options = {"dtype": torch.bfloat16, "experts_implementation": "collegium"} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.parametrize("name", sorted(MISREAD))
def test_misread_experts_refused_outside_load_model(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    model = load(folder)
    for _ in range(2):
        with raises_with(ConfigError, "layer 0", "expert 0", "load_model"):
            logits(model)
    model.set_experts_implementation("eager")
    truth = logits(load(decoded(folder), dtype=torch.float32, experts_implementation="eager"))
    assert relative_error(logits(model), truth) > 0.05, "transformers reads it right: take it off the list"
    ours = load_model(str(folder))
    for _ in range(2):
        assert relative_error(logits(ours), truth) < 0.03


@pytest.mark.parametrize("name", sorted(name for name, row in MISREAD.items() if row[3]))
def test_misread_experts_refused_by_config_alone(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    shutil.copytree(folders[name], tmp_path / "gone")
    model = load(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(ConfigError, match=rf"model\.layers\.0\.mlp\.experts: .*{MISREAD[name][3]}.*load_model"):
        logits(model)


def test_unquantised_experts_are_accepted(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["bf16"], tmp_path / "gone")
    config = tmp_path / "gone" / "config.json"
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.experts.*"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": block}))
    model = load(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", sorted(READ))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_that_are_read_right_run(folders: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model = load(folders[name], dtype=dtype)
    model.to(dtype)
    found = logits(model)
    model.set_experts_implementation("eager")
    assert relative_error(found, logits(model)) < (2e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("changed", ["down_proj", "gate_up_proj"])
@pytest.mark.parametrize("expert", [0, 2, 4])
def test_changed_row_is_detected(folders: dict[str, Path], changed: str, expert: int) -> None:
    """Written as an adapter is merged: behind the back of torch's write counter."""
    model = load(folders["bf16"])
    experts_modules(model)[2].get_parameter(changed).data[expert, -1].mul_(1.1)
    which = "down" if changed == "down_proj" else "up"
    with pytest.raises(ConfigError, match=rf"layer 2, expert {expert}, {which}: .*compare=False"):
        logits(model)
    register(compare=False)
    found = logits(model)
    model.set_experts_implementation("eager")
    assert relative_error(found, logits(model)) < 0.02


def test_modified_weights_are_not_compared(folders: dict[str, Path]) -> None:
    model = load(folders["bf16"])
    with torch.no_grad():
        for module in experts_modules(model).values():
            module.down_proj.mul_(-3)
    found = logits(model)
    model.set_experts_implementation("eager")
    assert relative_error(found, logits(model)) < 0.02


@pytest.mark.parametrize("registered", [True, False])
def test_later_switches_are_compared(folders: dict[str, Path], registered: bool) -> None:
    """Also of a model that was loaded before ``register`` was called."""
    model = load(folders["modelopt fp8"], experts_implementation="eager")
    del model.config.quantization_config
    for module in experts_modules(model).values() if not registered else ():
        del module._collegium_origin
    model.set_experts_implementation("collegium")
    for candidate in (copy.deepcopy(model), model.half(), model.float()):
        with raises_with(ConfigError, "layer 0", "expert"):
            logits(candidate)


def test_cached_hub_repository_is_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--something"
    shutil.copytree(folders["fp8 half a block"], repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    model = load("someone/something", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(ConfigError, match=rf"{revision}"):
        logits(model)


def test_unknown_families_by_config(folders: dict[str, Path], tmp_path: Path) -> None:
    """No names of tensors, no comparison; and transformers has deleted the entry of a model it decoded."""
    shutil.copytree(folders["fp8 half a block"], tmp_path / "model")
    model = load(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "unheard_of"}))
    for module in experts_modules(model).values():
        module.config.model_type = "unheard_of"
    with raises_with(ConfigError, "(128, 128)", "192"):
        logits(model)


def test_experts_that_stay_fp8_are_compared(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where transformers keeps codes and scales; only there would it run them itself."""
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_torch_xpu_available", lambda: True)
    folder = folders["fp8 whole blocks"]
    truth = logits(load(decoded(folder), dtype=torch.float32, experts_implementation="eager"))
    model = load(folder)
    assert experts_modules(model)[0].down_proj.dtype == torch.float8_e4m3fn
    assert relative_error(logits(model), truth) < 0.03
    changed = load(folder)
    experts_modules(changed)[2].gate_up_proj_scale_inv.data[4, -1].mul_(1.5)
    with raises_with(ConfigError, "layer 2", "expert 4, up", "50.0"):
        logits(changed)


def test_sliced_experts_are_not_compared(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    model = load(folders["bf16"])
    for module in experts_modules(model).values():
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(parameter.data[1:4].clone(), requires_grad=False))
    with caplog.at_level("INFO", logger="collegium.integrations.transformers.trust"):
        logits(model)
    assert "(3, 2, 96, 128)" in caplog.text


def test_passed_state_dict_is_not_compared(folders: dict[str, Path]) -> None:
    state = {name: tensor * 2 for name, tensor in load(folders["bf16"]).state_dict().items()}
    config = transformers.AutoConfig.from_pretrained(folders["bf16"])
    config._experts_implementation = "collegium"
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.bfloat16
    )
    model.config.name_or_path = str(folders["bf16"])
    model.set_experts_implementation("collegium")
    assert logits(model.eval()).isfinite().all()


def test_weights_quantised_on_load_not_compared(folders: dict[str, Path]) -> None:
    model = load(folders["bf16"])
    model.hf_quantizer = type("Quantizer", (), {"pre_quantized": False})()
    for module in experts_modules(model).values():
        del module._collegium_origin
        module.down_proj.data.mul_(1.05)
    model.config._experts_implementation = "eager"
    model.set_experts_implementation("collegium")
    assert logits(model).isfinite().all()


def test_rewritten_checkpoint_is_reread(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["bf16"], folder)
    first = logits(load(folder))
    model = load(folder, experts_implementation="eager")
    for module in experts_modules(model).values():
        module.down_proj.data.mul_(3)
    model.save_pretrained(folder)
    assert relative_error(logits(load(folder)), first) > 1e-2


def test_refresh_picks_up_uncounted_writes(folders: dict[str, Path]) -> None:
    """Through ``.data`` torch counts no write and a checksum would make the device wait: documented, with a way out.

    A layer of the CPU may read the parameters where they are; what is shown is that it is built again.
    """
    model = load(folders["bf16"])
    before, layers = logits(model), layers_of(model)
    for module in experts_modules(model).values():
        module.down_proj.data.mul_(-3)
    logits(model)
    assert all(new is old for new, old in zip(layers_of(model), layers, strict=True)), "it is noticed: change the page"
    refresh(model)
    found = logits(model)
    assert all(new is not old for new, old in zip(layers_of(model), layers, strict=True))
    model.set_experts_implementation("eager")
    assert relative_error(found, logits(model)) < 0.02
    assert relative_error(found, before) > 1e-2


@pytest.mark.parametrize("name", ["bf16", "fp8 half a block"])
def test_compiled_model_compared_on_first_call(folders: dict[str, Path], name: str) -> None:
    torch._dynamo.reset()
    model = load(folders[name])
    compiled = torch.compile(model, backend="aot_eager")
    if name == "bf16":
        assert relative_error(logits(compiled), logits(load(folders[name]))) < 0.02
        return
    for _ in range(2):
        with raises_with(ConfigError, "layer 0", "expert"):
            logits(compiled)


@pytest.mark.parametrize("name", ["bf16", "fp8 half a block"])
def test_many_threads_make_the_first_call(folders: dict[str, Path], name: str) -> None:
    model, results, start = load(folders[name]), list[Any](), threading.Barrier(4)

    def call() -> None:
        start.wait()
        try:
            results.append(logits(model))
        except ConfigError as error:
            results.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if name == "bf16":
        assert all(torch.equal(result, results[0]) for result in results)
    else:
        assert [type(result) for result in results] == [ConfigError] * 4


SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_INTERFACE = {
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL, intermediate_size=48, intermediate_size_mlp=48, num_local_experts=4, num_key_value_heads=2, head_dim=16
    ),
    "dbrx": lambda: transformers.DbrxConfig(
        vocab_size=97, d_model=64, n_layers=2, n_heads=4, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NO_INTERFACE))
def test_model_without_experts_interface_refused(tmp_path: Path, name: str) -> None:
    config = NO_INTERFACE[name]()
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path)
    match = r"requested for \w+, which has no experts with an exchangeable implementation.*load_model"
    for asked in ("collegium", {"": "collegium"}):
        with pytest.raises(ConfigError, match=match):
            load(tmp_path, experts_implementation=asked)
        with pytest.raises(ConfigError, match=match):
            plain.set_experts_implementation(asked)
    with pytest.raises(ConfigError, match=match):
        transformers.AutoModelForCausalLM.from_config(config, experts_implementation="collegium")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ConfigError, match=match):  # before a byte of the weights is read
        load(tmp_path)


def test_composite_model_without_experts_interface_refused(tmp_path: Path) -> None:
    text = NO_INTERFACE["llama"]()
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    transformers.LlavaForConditionalGeneration._from_config(config).save_pretrained(tmp_path)
    with raises_with(ConfigError, "LlavaForConditionalGeneration"):
        transformers.LlavaForConditionalGeneration.from_pretrained(
            tmp_path, experts_implementation={"text_config": "collegium"}
        )


class Derived(transformers.Qwen3MoeForCausalLM):
    """A class of a user's own: transformers looks for its interface in this file's source."""


def test_ignored_implementation_switch_raises(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for parent in Derived.__mro__:  # what another test made it remember
        if "_can_set_experts_implementation_cached_value" in vars(parent):
            monkeypatch.delattr(parent, "_can_set_experts_implementation_cached_value")
    model = Derived.from_pretrained(folders["bf16"], dtype=torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.mlp\.experts still has '(eager|grouped_mm)'.*from_pretrained"
    ):
        model.set_experts_implementation("collegium")
    model = Derived.from_pretrained(folders["bf16"], dtype=torch.bfloat16, experts_implementation="collegium")
    logits(model)
    assert len(layers_of(model)) == 3


def test_unrelated_models_and_implementations_unchanged(tmp_path: Path) -> None:
    base = transformers.PreTrainedModel
    methods = ("from_pretrained", "_from_config", "set_experts_implementation", "_load_pretrained_model")
    before = [base.__dict__[name] for name in methods]
    register()
    assert [base.__dict__[name] for name in methods] == before, "wrapped twice"
    assert base.from_pretrained.__doc__
    model = transformers.AutoModelForCausalLM.from_config(NO_INTERFACE["llama"]())
    model.save_pretrained(tmp_path)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    again.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, again.eval()(IDS).logits)


def test_new_weights_under_a_published_config() -> None:
    """A model built from the config of a folder has none of the weights in it, and bench-model builds such models."""
    folder = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
    register()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    ids = torch.tensor([[5, 60, 7]])
    model.set_experts_implementation("eager")
    wanted = model(ids).logits
    model.set_experts_implementation("collegium")
    assert relative_error(model(ids).logits, wanted) < 2e-5
