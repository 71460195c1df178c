"""``collegium quantize``: what is written loads back to the same values, here and elsewhere, whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from collegium import cli, load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts, writer
from collegium.commands.quantize import quantize_model
from collegium.errors import CheckpointError, ConfigError, InputError, SpecError
from collegium.formats import FORMATS, NvFp4, by_name
from collegium.models import moe_layers
from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed
from commands import command
from family_cases import CASES, Case, build
from raising import raises_with
from toys import TinySize, write_checkpoint

SIZE = TinySize(hidden=256, intermediate=128, experts=4, top_k=2, layers=2)
TARGETS = ["fp8_block", "fp8_tensor", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int4_group", "bf16", "fp16", "fp32"]
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def experts_of(path: Any, layer: int) -> Any:
    opened = CheckpointLayer.open(Checkpoint.open(path), layer)
    return load_experts(opened, linear(opened.spec.num_experts))


def in_whole_blocks(case: Case) -> Case:
    """Return the case with hidden and intermediate sizes of 128, in which every format has whole groups."""

    def larger(entries: dict[str, Any]) -> dict[str, Any]:
        sizes = {key for key in entries if "intermediate" in key or key in ("hidden_size", "moe_latent_size")}
        return {key: 128 if key in sizes and entries[key] in (16, 24, 32) else entries[key] for key in entries}

    return replace(case, text=larger(case.text))


def expected(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Encode one expert's ``[P, N, K]`` as the file is meant to hold it, and decode it."""
    form = by_name(name)
    if name == "nvfp4":
        flat = weight.flatten(0, 1)
        return NvFp4.encode(flat, global_divides=True).decode().view(weight.shape)
    if name == "fp8_tensor":
        return form.encode(weight.flatten(0, 1)).decode().view(weight.shape)
    return torch.stack([form.encode(part).decode() for part in weight])


def check_values(source: Any, out: Any, name: str) -> None:
    for layer in moe_layers(Checkpoint.open(source).config):
        before, after = experts_of(source, layer), experts_of(out, layer)
        assert after.down.name == after.gate_up.name == name
        for expert in range(before.down.shape[0]):
            wanted = expected(name, before.gate_up[expert].decode())
            assert torch.equal(after.gate_up[expert].decode(), wanted)
            wanted = expected(name, before.down[expert].decode()[None])[0]
            assert torch.equal(after.down[expert].decode(), wanted)
        if before.down_bias is not None:
            assert torch.equal(before.down_bias, after.down_bias)
            assert torch.equal(before.gate_up_bias, after.gate_up_bias)


@pytest.mark.parametrize("asked", [".", "..", "../model", "../model/"])
def test_default_output_folder(tmp_path, monkeypatch, asked: str) -> None:
    write_checkpoint(tmp_path / "model", size=SIZE)
    (tmp_path / "model" / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "model" / ("inner" if asked == ".." else "."))
    code, out, said = command("quantize", asked, "--to", "mxfp8", "--json")
    assert (code, said) == (0, ""), out
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "model-mxfp8"}
    assert Path(json.loads(out)["path"]).resolve() == tmp_path / "model-mxfp8"
    check_values(tmp_path / "model", tmp_path / "model-mxfp8", "mxfp8")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("family", "source"), [("mixtral", "fp32"), ("deepseek_v3", "bf16"), ("qwen3_moe", "mxfp4")])
def test_what_is_written_loads_back(tmp_path, family: str, source: str, name: str) -> None:
    if name == source:
        return
    tiny = write_checkpoint(tmp_path / "in", family, source, size=SIZE, shards=2)
    (tmp_path / "in" / "tokenizer.json").write_text('{"a": 1}')
    report = quantize_model(str(tmp_path / "in"), name, str(tmp_path / "out"))
    audited = audit(Checkpoint.open(tmp_path / "out"))
    assert {layer.stored.name for layer in audited.layers} == {name}
    check_values(tmp_path / "in", tmp_path / "out", name)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    old, new = Checkpoint.open(tmp_path / "in"), Checkpoint.open(tmp_path / "out")
    others = [n for n in tiny.tensors if ".experts." not in n]
    assert len(others) >= 3
    for tensor in others:
        assert new.info(tensor).dtype == old.info(tensor).dtype
        assert torch.equal(new.read(tensor).view(torch.uint8), old.read(tensor).view(torch.uint8))
    layer = audited.layers[-1].layer
    loaded = load_layer(tmp_path / "out", layer, device="cpu")
    assert loaded(heavy_tailed(3, SIZE.hidden, seed=1).bfloat16()).isfinite().all()
    # MXFP8 holds every MXFP4 number.
    plain = name in ("bf16", "fp16", "fp32") or (source, name) == ("mxfp4", "mxfp8")
    assert all((row.error < 0.005) if plain else (0.005 < row.error <= row.worst_error < 0.2) for row in report.layers)


@pytest.mark.parametrize("source", ["bf16", "mxfp4"])
@pytest.mark.parametrize("name", ["mxfp4", "bf16", "fp32"])
def test_stacked_families_stay_stacked(tmp_path, source: str, name: str) -> None:
    if name == source:
        return
    write_checkpoint(tmp_path / "in", "gpt_oss", source, size=SIZE)
    quantize_model(str(tmp_path / "in"), name, str(tmp_path / "out"))
    check_values(tmp_path / "in", tmp_path / "out", name)
    held = Checkpoint.open(tmp_path / "out").tensors
    assert ("model.layers.0.mlp.experts.gate_up_proj_blocks" in held) == (name == "mxfp4")


def test_stacked_experts_are_written_singly(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "qwen3_moe", "bf16", size=SIZE, stacked=True)
    quantize_model(str(tmp_path / "in"), "mxfp8", str(tmp_path / "out"))
    check_values(tmp_path / "in", tmp_path / "out", "mxfp8")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("nemotron_h", name) for name in ("mxfp8", "nvfp4", "fp8_tensor", "int4_group", "fp16")),
        *((family, name) for family in ("granitemoe", "step3p7") for name in ("mxfp4", "fp16")),
    ],
)
def test_ungated_experts_and_stacks_are_written(tmp_path, family: str, name: str) -> None:
    build(in_whole_blocks(CASES[family]), tmp_path / "in")
    quantize_model(str(tmp_path / "in"), name, str(tmp_path / "out"))
    check_values(tmp_path / "in", tmp_path / "out", name)


def test_row_concatenated_experts_refused(tmp_path) -> None:
    build(CASES["dbrx"], tmp_path / "in")
    with raises_with(InputError, "dbrx"):
        quantize_model(str(tmp_path / "in"), "fp16")


def test_gate_and_up_share_global_scale(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    quantize_model(str(tmp_path / "in"), "nvfp4", str(tmp_path / "out"))
    assert audit(Checkpoint.open(tmp_path / "out")).findings == ()


def refused(tmp_path, text: str, name: str, error: Any = InputError) -> None:
    with pytest.raises(error, match=text):
        quantize_model(str(tmp_path / "in"), name, str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_impossible_conversions_leave_nothing(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "gpt_oss", "bf16", size=SIZE)
    refused(tmp_path, "experts of gpt_oss .* can be written as: bf16, fp16, fp32, mxfp4", "nvfp4")
    refused(tmp_path, "weight format 'fp7' is not known", "fp7", SpecError)
    refused(tmp_path, "are bf16 already", "bf16")
    (tmp_path / "in" / "config.json").unlink()
    refused(tmp_path, "needs a model's folder", "mxfp4", ConfigError)


def test_partial_blocks_are_refused(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=TinySize(hidden=256, intermediate=192))
    refused(tmp_path, r"\(256, 192\); both must be multiples of 128", "fp8_block")


def test_quantised_weights_elsewhere_are_refused(tmp_path) -> None:
    tiny = write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    tiny.tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    from safetensors.torch import save_file

    save_file({n: t.contiguous().clone() for n, t in tiny.tensors.items()}, tmp_path / "in" / "model.safetensors")
    text = r"model.layers.0.self_attn.q_proj, which quantization_config .*does not name: .* F8_E4M3"
    refused(tmp_path, text, "mxfp4", ConfigError)


def test_nothing_is_overwritten(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    (tmp_path / "out").mkdir()
    with raises_with(InputError, tmp_path / "out"):
        quantize_model(str(tmp_path / "in"), "mxfp4", str(tmp_path / "out"))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        refused(tmp_path, r"needs about [\d,]+ bytes, 1,000 are free", "mxfp4", CheckpointError)

    def full(self: Any, name: str, tensor: Any, index: int = 0) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.Shard, "put", full)
    refused(tmp_path, "cannot be written.*No space left", "mxfp4", CheckpointError)


def test_leftovers_of_killed_runs_are_removed(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    for name in (".out.partial-dead", ".out.partial-live", ".other.partial-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    with (
        writer._folder_lock(tmp_path / ".out.partial-live"),
        raises_with(InputError, "out: another run"),
    ):
        quantize_model(str(tmp_path / "in"), "mxfp4", str(tmp_path / "out"))
    assert (tmp_path / ".out.partial-live" / "model.safetensors").read_bytes() == b"half"
    report = quantize_model(str(tmp_path / "in"), "mxfp4", str(tmp_path / "out"))
    assert sorted(report.removed) == [".out.partial-dead", ".out.partial-live"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.partial-dead", "in", "out"]


def test_side_files_that_cannot_be_copied(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    (tmp_path / "in" / "tokenizer.json").symlink_to("nothing")
    done: list[int] = []
    with raises_with(CheckpointError, "tokenizer.json"):
        quantize_model(
            str(tmp_path / "in"), "mxfp4", str(tmp_path / "out"), progress=lambda experts, *_: done.append(experts)
        )
    assert not done


def test_folders_of_failed_runs_are_removed(tmp_path) -> None:
    write_checkpoint(tmp_path / "in", "mixtral", "bf16", size=SIZE)
    (tmp_path / "in" / "tokenizer.json").symlink_to("nothing")
    (tmp_path / "mine").mkdir()
    with raises_with(CheckpointError, "tokenizer.json"):
        quantize_model(str(tmp_path / "in"), "mxfp4", str(tmp_path / "mine" / "a" / "b" / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "mine"]
    assert not [*(tmp_path / "mine").iterdir()]
    (tmp_path / "in" / "tokenizer.json").unlink()
    quantize_model(str(tmp_path / "in"), "mxfp4", str(tmp_path / "mine" / "a" / "b" / "out"))
    assert (tmp_path / "mine" / "a" / "b" / "out" / "config.json").exists()


KILLER = textwrap.dedent("""
    import os, random, shutil, signal, sys, time
    from pathlib import Path
    import torch
    from collegium.commands.quantize import quantize_model
    torch.set_num_threads(1)
    room, rounds = Path(sys.argv[1]), int(sys.argv[2])

    def child():
        pid = os.fork()
        if pid == 0:
            try:
                quantize_model(str(room / "in"), "nvfp4", str(room / "out"))
            finally:
                os._exit(0)
        return pid

    begun = time.monotonic()
    os.waitpid(child(), 0)
    whole = time.monotonic() - begun
    (room / "out").rename(room / "good")
    rng, killed, complete = random.Random(7), 0, 0
    while killed < rounds:
        pid = child()
        time.sleep(rng.uniform(0, 1.2 * whole))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            assert (room / "out").exists()
            whole *= 0.8  # this machine was slower before
        if (room / "out").exists():
            complete += 1
            good = {p.name: p.read_bytes() for p in (room / "good").iterdir()}
            assert {p.name: p.read_bytes() for p in (room / "out").iterdir()} == good
            shutil.rmtree(room / "out")
    print(killed, complete)
""")


def test_killed_runs_leave_all_or_nothing(tmp_path) -> None:
    write_checkpoint(
        tmp_path / "in", "mixtral", "bf16", size=TinySize(hidden=256, intermediate=256, experts=8, layers=3)
    )
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), "25"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    killed, _ = map(int, done.stdout.split())
    assert killed == 25
    # What the kills left is removed by the next run.
    assert len([p for p in tmp_path.iterdir() if ".partial-" in p.name]) <= 1
    report = quantize_model(str(tmp_path / "in"), "nvfp4", str(tmp_path / "out"))
    assert len(report.removed) <= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "in", "out"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint that transformers itself wrote: Qwen3-MoE with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=64,
        decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "fp8_channel", "mxfp8", "mxfp4", "int4_group", "fp16"])
def test_transformers_loads_the_same_weights(saved: Path, tmp_path, name: str) -> None:
    # Not nvfp4: transformers 5.23 leaves the global scale out when it unpacks the experts.
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    quantize_model(str(saved), name, str(out))
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    for layer in range(2):
        ours = experts_of(out, layer)
        theirs = model.model.layers[layer].mlp.experts
        gate_up, down = ours.gate_up.decode(dtype).flatten(1, 2), ours.down.decode(dtype)
        # Ours round once; a product of bfloat16 scale and code in their unpacking may round twice.
        torch.testing.assert_close(theirs.gate_up_proj.detach(), gate_up, rtol=8e-3, atol=0)
        torch.testing.assert_close(theirs.down_proj.detach(), down, rtol=8e-3, atol=0)
        assert torch.equal(model.model.layers[layer].mlp.gate.weight, plain.model.layers[layer].mlp.gate.weight)
    same = "self_attn.q_proj.weight"
    assert torch.equal(model.model.layers[1].get_parameter(same), plain.model.layers[1].get_parameter(same))


# Hidden and intermediate size, and the formats whose readers need whole groups in both.
UGLY = {
    (100, 72): (),
    (96, 80): ("nvfp4",),
    (144, 48): ("nvfp4",),
    (104, 96): (),
    (96, 104): (),
    (33, 35): (),
    (64, 20): ("mxfp8",),  # one group, as wide as the row
    (160, 96): ("nvfp4", "mxfp4", "mxfp8", "int4_group"),
    (128, 384): ("nvfp4", "mxfp4", "mxfp8", "int4_group", "fp8_block"),
}
GROUPS = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "int4_group": 32, "nvfp4": 16}


def qwen_of(folder: Path, hidden: int, wide: int) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden, intermediate_size=64, moe_intermediate_size=wide, num_experts=3, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for seed, parameter in enumerate(model.model.layers[0].mlp.experts.parameters()):
            parameter.copy_(heavy_tailed(parameter.shape.numel(), 1, seed=seed).view(parameter.shape) / hidden**0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("sizes", "grouped"), UGLY.items())
def test_odd_sizes_refused_or_read_identically(tmp_path, sizes: tuple[int, int], grouped: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    source = qwen_of(tmp_path / "in", *sizes)
    for name, group in GROUPS.items():
        if name in grouped:
            continue
        refused(tmp_path, rf"{name}: .*\({sizes[0]}, {sizes[1]}\).* multiples of {group}.*sizes: .*fp8_channel", name)
    for name in ("fp8_tensor", "fp8_channel", *grouped):
        out = tmp_path / name
        quantize_model(str(source), name, str(out))
        if name == "nvfp4":
            assert_compressed_tensors_reads(out)
            continue
        model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
        ours, theirs = experts_of(out, 0), model.model.layers[0].mlp.experts
        # Scales of int4_group are bfloat16, and so is their product with a code.
        tolerance = 8e-3 if name == "int4_group" else 0
        gate_up = ours.gate_up.decode().flatten(1, 2)
        torch.testing.assert_close(theirs.gate_up_proj.detach().float(), gate_up, rtol=tolerance, atol=0)
        torch.testing.assert_close(theirs.down_proj.detach().float(), ours.down.decode(), rtol=tolerance, atol=0)


def assert_compressed_tensors_reads(out: Path) -> None:
    """Unpack every matrix with compressed-tensors; transformers 5.23 leaves out the global scale of NVFP4."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    checkpoint = Checkpoint.open(out)
    config = QuantizationConfig.model_validate(checkpoint.config["quantization_config"])
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    ours = experts_of(out, 0)
    for expert in range(ours.down.shape[0]):
        matrices = (*ours.gate_up[expert].decode(), ours.down[expert].decode())
        for projection, wanted in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True):
            path = f"model.layers.0.mlp.experts.{expert}.{projection}."
            names = [name for name in checkpoint.tensors if name.startswith(path)]
            parts = {name.removeprefix(path): checkpoint.read(name) for name in names}
            found = compressor.decompress(parts, config.config_groups["group_0"])["weight"]
            torch.testing.assert_close(found.float(), wanted, rtol=8e-3, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        # transformers renames dense modules of these when it loads them
        *(("phimoe", name) for name in ("fp8_tensor", "mxfp4", "int4_group")),
        *((family, name) for family in ("nemotron_h", "hy_v3", "deepseek_v4") for name in ("fp8_channel", "mxfp4")),
        # it reads these from stacks alone
        *((family, "bf16") for family in ("qwen3_vl_moe", "llama4_text", "gemma4_text", "gpt_oss", "step3p7")),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_transformers_reads_other_families(tmp_path, family: str, name: str) -> None:
    source = build(in_whole_blocks(CASES[family]), tmp_path / "in")
    quantize_model(str(tmp_path / "in"), name, str(tmp_path / "out"))
    cls: Any = type(source)
    model, info = cls.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    bound = {"bf16": 0.003, "fp8_tensor": 0.04, "fp8_channel": 0.04}.get(name, 0.15)
    found = model.state_dict()
    for parameter, tensor in source.state_dict().items():
        if ".experts." not in parameter or tensor.dim() != 3:
            torch.testing.assert_close(found[parameter], tensor, rtol=0, atol=0, msg=parameter)
        else:
            assert (found[parameter].float() - tensor).norm() < bound * tensor.norm(), parameter


@pytest.mark.parametrize("name", [t for t in TARGETS if t not in ("bf16", "fp16", "fp32")])
def test_every_config_is_one_transformers_parses(tmp_path, name: str) -> None:
    auto = pytest.importorskip("transformers.quantizers.auto")
    write_checkpoint(tmp_path / "in", "deepseek_v3", "bf16", size=SIZE)
    quantize_model(str(tmp_path / "in"), name, str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = auto.AutoQuantizationConfig.from_dict(dict(config))
    assert str(getattr(parsed.quant_method, "value", parsed.quant_method)) == config["quant_method"]
    listed = config.get("ignore") or config["modules_to_not_convert"]
    assert "model.layers.1.mlp.shared_experts.gate_proj" in listed
    assert "lm_head" in listed
    assert not any(".experts." in entry for entry in listed if not entry.startswith("re:"))


def test_the_command_reports_errors_and_files(tmp_path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model" / "original").mkdir()
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"the same numbers once more")
    (tmp_path / "model" / "consolidated.safetensors.index.json").write_text("{}")
    done = CliRunner().invoke(cli.app, ["quantize", str(tmp_path / "model"), "--to", "mxfp4", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["path"].endswith("model-mxfp4")
    assert found["skipped"] == ["consolidated.safetensors", "consolidated.safetensors.index.json", "original"]
    assert "tokenizer.json" in found["copied"]
    assert all(0.1 < layer["error"] < 0.13 for layer in found["layers"])
    assert found["nbytes"] < 0.4 * found["source_nbytes"]
    shown = CliRunner().invoke(cli.app, ["quantize", str(tmp_path / "model-mxfp4"), "--to", "bf16"])
    assert shown.exit_code == 0
    assert str(tmp_path / "model-mxfp4-bf16") in shown.stdout.replace("\n", "")
    assert audit(Checkpoint.open(tmp_path / "model-mxfp4-bf16")).layers[0].stored.name == "bf16"


def test_unknown_targets_list_what_is_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        quantize_model(str(SHIPPED), "mxpf4", str(tmp_path / "out"))
    listed = str(caught.value).partition("allowed: ")[2].partition(";")[0].split(", ")
    assert listed == [form.name for form in FORMATS if not form.read_only]
    assert str(caught.value).endswith("mxfp4, mxfp8")
