"""Whole models whose attention and dense layers are quantised too, entered from checkpoints on disk.

The judge is the same model in float32 with the numbers that plain arithmetic makes of the stored codes, loaded by
transformers with its own experts.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import transformers

import commands
from collegium.errors import CheckpointError, InputError
from collegium.integrations.transformers import layers_of, load_model
from collegium.integrations.transformers.loading import load_model_in
from family_cases import CASES, IDS, build
from quantised_matrices import KINDS, Kind, fp8_block, fp8_tensor, mxfp4, nvfp4, plain_int8, quantise
from raising import assert_values, raises_with
from whole_models import eager, in_bf16, same_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
IDS_2 = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(2))
Q, GATE, HEAD = "model.layers.1.self_attn.q_proj", "mlp.gate", "lm_head"


def write(folder: Path, *, vocabulary: int = 104, bias: bool = True) -> Path:
    """A Qwen3-MoE of three layers, the second one dense, no size a multiple of 128, with heavy-tailed weights."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=160, intermediate_size=192, moe_intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=40, num_experts=5, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[1], attention_bias=bias, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.exp(0.7 * torch.randn(*parameter.shape[:-1], 1)) if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * spread)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def linear(path: str) -> bool:
    """Every linear layer but the router, with the head."""
    return not path.endswith((GATE, "embed_tokens"))


def close(ours: nn.Module, theirs: nn.Module) -> None:
    with torch.no_grad():
        for ids in (IDS, IDS_2):
            found, wanted = ours(ids).logits, theirs(ids).logits
            assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
            assert torch.equal(ours(ids).logits, found)


@pytest.mark.parametrize("name", list(KINDS))
def test_matches_model_of_decoded_weights(tmp_path: Path, name: str, caplog: Any) -> None:
    """Attention, dense layer, head and experts are quantised, in every storage."""
    kind = KINDS[name]
    twin = quantise(write(tmp_path / "model"), kind, linear)
    with caplog.at_level(logging.WARNING, logger="collegium"):
        ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)
    # 3 layers of 4 in attention, one dense one of 3, the head
    assert_values(caplog.text, "16 matrices", f"(16 {kind.form})", "float32")
    same_tensors(load_model(str(tmp_path / "model"), device="cpu"), eager(ours, twin, torch.bfloat16))


@pytest.mark.parametrize("name", ["fp8 tensor", "gptq zeros", "bitsandbytes", "auto-round", "ct nvfp4"])
def test_routers_are_quantised_too(tmp_path: Path, name: str) -> None:
    """In bitsandbytes' case the experts stay in bfloat16: that package replaces linear modules only."""
    experts = name != "bitsandbytes"
    twin = quantise(
        write(tmp_path / "model"), KINDS[name],
        lambda path: not path.endswith("embed_tokens") and (experts or ".experts." not in path),
    )  # fmt: skip
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)


@pytest.mark.parametrize("name", ["ct fp8 tensor", "ct fp8 channel", "ct fp8 block"])
def test_fp8_scales_in_float16(tmp_path: Path, name: str) -> None:
    def in_half(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, _ = KINDS[name].write(weight)
        scale, codes = parts["weight_scale"].half(), parts["weight"].float()
        factor = scale.float()
        if name == "ct fp8 block":
            rows, columns = codes.shape
            factor = factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {**parts, "weight_scale": scale}, codes * factor

    twin = quantise(write(tmp_path / "model"), replace(KINDS[name], write=in_half), linear)
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    close(ours, eager(ours, twin, torch.float32))
    assert commands.command("inspect", tmp_path / "model", "--device", "cpu")[::2] == (0, "")
    assert commands.command("verify", tmp_path / "model", "--device", "cpu")[::2] == (0, "")


@pytest.mark.parametrize("name", list(CASES))
def test_families_under_their_published_names(tmp_path: Path, name: str) -> None:
    """Renamed, fused and prefixed as transformers does it with plain weights; the experts are not quantised."""
    from collegium.checkpoint.index import index_of
    from collegium.checkpoint.reader import Checkpoint

    build(CASES[name], tmp_path / "model")
    index = index_of(Checkpoint.open(tmp_path / "model"))
    layers = [*index.layers()]
    routed = {info.name.removesuffix(".weight") for n in layers for info in index.expert_tensors(n).infos()}
    names, head = index.names, index.names.layer.partition("{layer}")[0]
    left = (names.router_weight, names.shared_gate, names.router_scale)
    routed |= {(each or "").format(layer=n).removesuffix(".weight") for each in left for n in layers}
    twin = quantise(tmp_path / "model", KINDS["fp8 blocks"], lambda path: path.startswith(head) and path not in routed)
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) >= 4
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)


def test_deepseek_v4_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, everything else in FP8 blocks with powers of two as scales, both named ``.scale``."""

    def experts(path: str) -> Any:
        def written(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            parts, values = mxfp4(weight)
            scale = parts["weight_scale"].view(torch.float8_e8m0fnu)
            return {"weight": parts["weight_packed"].view(torch.int8), "scale": scale}, values

        return written if ".ffn.experts." in path else None

    case = CASES["deepseek_v4"]
    build(replace(case, text={**case.text, "moe_intermediate_size": 32}), tmp_path / "model")
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    kind = Kind("fp8_block", lambda weight: fp8_block(weight, "scale", power=True), lambda _: block)
    names = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    twin = quantise(tmp_path / "model", kind, lambda path: path.endswith(names) and "compressor" not in path, experts)
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)


def test_modelopt_per_module_algorithms(tmp_path: Path, caplog: Any) -> None:
    layers = {}

    def other(path: str) -> Any:
        fp8 = "self_attn" in path
        layers[path] = {"quant_algo": "FP8" if fp8 else "NVFP4"}
        return fp8_tensor if fp8 else None

    def block(_: list[str]) -> dict[str, Any]:
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    kind = Kind("nvfp4", lambda weight: nvfp4(weight, divides=False), block)
    twin = quantise(write(tmp_path / "model"), kind, linear, other)
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)
    assert_values(caplog.text, "16 matrices", "(12 fp8_tensor, 4 nvfp4)", "float32")
    assert (
        "16 scales of activations or caches outside the experts are not used (lm_head.input_scale, ...)" in caplog.text
    )


def test_down_format_differs_from_gate_up(tmp_path: Path) -> None:
    """Of routed experts NVFP4 with FP8, as ModelOpt mixes them."""
    layers = {}

    def other(path: str) -> Any:
        fp8 = path.endswith("down_proj")
        layers[path] = {"quant_algo": "FP8" if fp8 else "NVFP4"}
        return fp8_tensor if fp8 else None

    def block(_: list[str]) -> dict[str, Any]:
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    kind = Kind("nvfp4", lambda weight: nvfp4(weight, divides=False), block)
    twin = quantise(write(tmp_path / "model"), kind, lambda path: ".experts." in path, other)
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    found = [layer.spec.formats for layer in layers_of(ours)]
    assert found
    assert set(found) == {("nvfp4", "fp8_tensor")}
    close(ours, eager(ours, twin, torch.float32))


@pytest.mark.parametrize("target", ["re:.*embed_tokens$", "Embedding"])
def test_compressed_tensors_groups_with_embeddings(tmp_path: Path, target: str) -> None:
    """Names in targets decide before classes, of which there are two."""
    eight = {
        "targets": [target, "lm_head"],
        "weights": {"type": "int", "num_bits": 8, "strategy": "channel"},
    }
    four = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": four}, "group_1": eight}

    def block(skip: list[str]) -> dict[str, Any]:
        return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": skip}

    kind = Kind("nvfp4", lambda weight: nvfp4(weight, divides=True), block)
    twin = quantise(
        write(tmp_path / "model"),
        kind,
        lambda path: not path.endswith(GATE),
        lambda path: plain_int8 if path.endswith(("embed_tokens", HEAD)) else None,
    )
    ours = load_model_in("fp32", str(tmp_path / "model"), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)


def refused(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None], kind: str, *, said: str) -> None:
    """A checkpoint with one fault is refused with an error that says ``said``, and nothing is logged as done."""
    quantise(write(folder / "model", bias=False), KINDS[kind], lambda path: linear(path) and ".experts." not in path)
    tensors = load_file(folder / "model" / "model.safetensors")
    config = json.loads((folder / "model" / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model" / "model.safetensors")
    (folder / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        load_model(str(folder / "model"), device="cpu")


def without(suffix: str) -> Any:
    return lambda tensors, _: tensors.pop(f"{Q}.{suffix}")


def put(suffix: str, make: Callable[[Tensor], Tensor], module: str = Q) -> Any:
    """Change a tensor, or add one made of the codes."""

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        name = f"{module}.{suffix}"
        tensors[name] = make(tensors[name] if name in tensors else next(iter(tensors.values())))

    return change


def skipping(module: str) -> Any:
    def change(_: dict[str, Tensor], block: dict[str, Any]) -> None:
        block["modules_to_not_convert"].append(module)

    return change


def unquantised(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors[f"{Q}.weight"] = tensors.pop(f"{Q}.weight").bfloat16()
    del tensors[f"{Q}.weight_scale_inv"]


def left_over(tensors: dict[str, Tensor], block: dict[str, Any]) -> None:
    tensors[f"{Q}.weight"] = tensors.pop(f"{Q}.weight").bfloat16()
    skipping(Q)(tensors, block)


def lie_as(shape: bytes) -> Any:
    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
        state = bytes(tensors[name].tolist()).replace(b"[160, 160]", shape)
        tensors[name] = torch.tensor(list(state), dtype=torch.uint8)

    return change


def turned(_: dict[str, Tensor], block: dict[str, Any]) -> None:
    block["transform_config"] = {"config_groups": {"R4": {"type": "hadamard"}}}


FAULTS = {
    "no scale": ("fp8 blocks", without("weight_scale_inv"), rf"{Q}: .* are \.weight F8_E4M3; .* needs \.weight \+"),
    "no codes": ("fp8 blocks", without("weight"), rf"{Q}: .* are \.weight_scale_inv F32; .* declares fp8_block"),
    "scale of another shape": (
        "fp8 blocks", put("weight_scale_inv", lambda t: t[:1]),
        rf"{Q}: scale is \(1, 2\), fp8_block with N=160 and K=160 needs \(2, 2\)",
    ),
    "skipped but stored so": (
        "fp8 blocks", skipping(Q), rf"{Q}, which quantization_config skips .*F8_E4M3.*looks like fp8_block"
    ),
    "skipped head": ("fp8 blocks", skipping(HEAD), rf"{HEAD}, which quantization_config skips .*F8_E4M3"),
    "plain among others": (
        "fp8 blocks", unquantised,
        rf"{Q}: its weight is not quantised, config.json declares fp8_block .* model\.layers\.0\.self_attn\.q_proj is",
    ),
    "a scale left over": ("fp8 blocks", left_over, rf"{Q}, which .* skips .*: \.weight_scale_inv next to \.weight"),
    "a scale that is NaN": (
        "fp8 blocks", put("weight_scale_inv", lambda t: t * torch.nan), rf"{Q}: a scale of fp8_block is forbidden"
    ),
    "another format": (
        "fp8 blocks",
        put("weight", lambda t: t.view(torch.uint8)),
        rf"{Q}: the tensors are \.weight U8.*declares fp8_block",
    ),
    "fewer rows": (
        "ct fp8 channel", put("weight_scale", lambda t: t[:-32]), rf"{Q}: scale is \(128, 1\), fp8_channel with N=160"
    ),
    "another model": (
        "ct fp8 tensor", put("weight", lambda t: t[:-32]), r"q_proj\.weight: .* \(128, 160\), .* \(160, 160\)"
    ),
    "inputs are scaled": (
        "modelopt nvfp4", put("pre_quant_scale", lambda t: torch.ones(160)), rf"{Q}: \.pre_quant_scale next to .*nvfp4"
    ),
    "inputs are turned": ("ct int4", turned, "transform_config is .*R4.*, allowed is none"),
    "a shape that is not": ("ct int4", put("weight_shape", lambda t: t * 2), rf"{Q}: .*N=320 and K=320 needs"),
    "no shape": ("ct int4", put("weight_shape", lambda t: t[:1]), rf"{Q}: .*weight_shape.* gives no shape"),
    "a shape that is text": ("bitsandbytes", lie_as(b'"rows"'), rf"{Q}: .*quant_state.* gives no shape"),
    "a shape without end": ("bitsandbytes", lie_as(b"[1e400, 1]"), rf"{Q}: .*quant_state.* gives no shape"),
    "a shape below zero": ("bitsandbytes", lie_as(b"[-160, -160]"), rf"{Q}: .*quant_state.* gives no shape"),
    "no matrix": ("ct fp8 tensor", put("weight", lambda t: t[None]), rf"{Q}: .*\(1, 160, 160\), gives no shape"),
    "columns are permuted": ("gptq", put("g_idx", lambda t: t.flip(0)), rf"{Q}: .*g_idx permutes the columns"),
    "not symmetric": ("gptq", put("qzeros", lambda t: t + 1), rf"{Q}: .*symmetric weights, the zero points are"),
    "zero points where none are declared": (
        "ct int4", put("weight_zero_point", lambda _: torch.zeros(20, 5).int()), rf"{Q}: \.weight_zero_point"
    ),
    "another matrix": ("bitsandbytes", lie_as(b"[320, 80]"), r"q_proj\.weight: .* \(320, 80\), .* \(160, 160\)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_contradictory_checkpoints_refused_by_name(tmp_path: Path, fault: str) -> None:
    kind, change, said = FAULTS[fault]
    refused(tmp_path, change, kind, said=rf"(?s){said}")


@pytest.mark.parametrize("name", ["fp8 blocks", "ct nvfp4", "gptq order"])
def test_commands_accept_published_quantised_models(tmp_path: Path, name: str) -> None:
    """The text is that of the decoded numbers; the experts are not quantised, so their kernels are the same."""
    from typer.testing import CliRunner

    from collegium import cli

    def outside(path: str) -> bool:
        return linear(path) and ".experts." not in path

    twin = quantise(write(tmp_path / "model", vocabulary=4096, bias=False), KINDS[name], outside)
    in_bf16(twin)
    said: dict[str, Any] = {}
    for folder in (tmp_path / "model", twin):
        for file in SHIPPED.glob("tokenizer*"):
            shutil.copy(file, folder)
        for command in (["generate", "--tokens", "6", "--prompt", "The king"], ["inspect"], ["plan"], ["verify"]):
            arguments = [command[0], str(folder), *command[1:], "--device", "cpu", "--json"]
            for _ in range(2 if command[0] == "generate" else 1):
                result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
                assert result.exit_code == 0, result.output
                said.setdefault(f"{command[0]} {folder.name}", []).append(json.loads(result.stdout))
    texts = {one["text"] for key, found in said.items() if key.startswith("generate") for one in found}
    assert len(texts) == 1
    assert texts.pop().startswith("The king")
    # 16 matrices of 160 by 160, 160 by 80 and 160 by 192, and the head, in two bytes each
    taken = 2 * 160 * (3 * (2 * 160 + 2 * 80) + 3 * 192 + 4096)
    found = [text for text in said["inspect model"][0]["findings"] if "outside the experts" in text]
    assert found[0].startswith(f"16 matrices outside the experts (16 {KINDS[name].form}) run decoded to bfloat16")
    assert f": {taken:,} bytes" in found[0]
    assert not any("outside the experts" in text for text in said["inspect model-decoded"][0]["findings"])


def test_inspect_explains_unloadable_whole_model(tmp_path: Path) -> None:
    """Its layers are read as before."""
    from collegium.checkpoint import Checkpoint, audit

    folder = write(tmp_path / "model", bias=False)
    quantise(folder, KINDS["fp8 blocks"], lambda path: linear(path) and ".experts." not in path)
    tensors = load_file(folder / "model.safetensors")
    unquantised(tensors, {})
    save_file(tensors, folder / "model.safetensors")
    (told,) = [text for text in audit(Checkpoint.open(folder)).findings if "not loaded" in text]
    assert told.startswith(f"not loaded as a whole model: {Q}: its weight is not quantised")


@pytest.mark.parametrize(
    ("name", "target"),
    [("fp8 blocks", "mxfp4"), ("fp8 blocks", "bf16"), ("ct nvfp4", "int4_group"), ("ct fp8 channel", "nvfp4")]
    + [
        (name, "bf16")
        for name in ("ct int4 zeros", "modelopt nvfp4", "gptq", "awq", "auto-round", "bitsandbytes", "mxfp8")
    ],
)
def test_quantize_copies_it(tmp_path: Path, name: str, target: str) -> None:
    """The written checkpoint is a whole model: its other matrices are as they were, its experts in the new format."""
    from compressed_tensors.quantization import QuantizationConfig

    from collegium.checkpoint import Checkpoint, audit
    from collegium.commands.quantize import quantize_model

    twin = quantise(write(tmp_path / "model"), KINDS[name], linear)
    quantize_model(str(tmp_path / "model"), target, str(tmp_path / "out"))
    before, after = Checkpoint.open(tmp_path / "model"), Checkpoint.open(tmp_path / "out")
    for old in [old for old in before.tensors if ".experts." not in old]:
        new = old.replace("_scale_inv", "_scale") if (name, target) == ("fp8 blocks", "mxfp4") else old
        assert after.info(new).dtype == before.info(old).dtype
        bits = [held.read(name).reshape(-1).view(torch.uint8) for held, name in ((after, new), (before, old))]
        assert torch.equal(*bits)
    block: Any = after.config["quantization_config"]
    if block["quant_method"] == "compressed-tensors":
        QuantizationConfig.model_validate(block)
    assert {layer.stored.name for layer in audit(after).layers} == {target}
    ours = load_model_in("fp32", str(tmp_path / "out"), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    with torch.no_grad():
        found, wanted = ours(IDS).logits, theirs(IDS).logits
    # four bits are some percent away in the experts alone
    assert (found - wanted).norm() <= (0.01 if target == "bf16" else 0.25) * wanted.norm()


@pytest.mark.parametrize("name", ["gptq", "awq", "modelopt fp8", "bitsandbytes", "mxfp8"])
def test_quantize_refuses_inexpressible_configs(tmp_path: Path, name: str) -> None:
    from collegium.commands.quantize import quantize_model

    quantise(write(tmp_path / "model"), KINDS[name], linear)
    with raises_with(InputError, "16", "lm_head.weight"):
        quantize_model(str(tmp_path / "model"), "mxfp4", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_separate_modelopt_quantisation_config(tmp_path: Path) -> None:
    """ModelOpt's ``hf_quant_config.json``, whose exclusions are wildcards; the last attention is plain."""
    folder = write(tmp_path / "model")
    twin = quantise(folder, KINDS["modelopt nvfp4"], lambda path: linear(path) and "2.self_attn" not in path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    exclude = ["model.layers.2.self_attn*", "*mlp.gate", "model.embed*"]
    block = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": exclude}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(block))
    ours = load_model_in("fp32", str(folder), device="cpu")
    theirs = eager(ours, twin, torch.float32)
    same_tensors(ours, theirs)
    close(ours, theirs)
    block["quantization"]["exclude_modules"] = exclude[1:]
    (folder / "hf_quant_config.json").write_text(json.dumps(block))
    with raises_with(CheckpointError, "layers.2.self_attn.k_proj", "nvfp4"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("name", ["gptq", "gptq zeros", "gptq order", "gptq 8 bits", "ct int4 zeros", "awq"])
def test_configs_of_older_exporters(tmp_path: Path, name: str) -> None:
    """AutoGPTQ's and AutoAWQ's own files, which name no method, and the first key of compressed-tensors."""
    folder = write(tmp_path / "model")
    twin = quantise(folder, KINDS[name], linear)
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config")
    if name == "ct int4 zeros":
        config["compression_config"] = block
    elif name == "awq":
        older = {"zero_point": True, "q_group_size": block["group_size"], "w_bit": 4, "version": "GEMM"}
        (folder / "quant_config.json").write_text(json.dumps(older))
    else:
        older = {**block, "damp_percent": 0.01, "true_sequential": True, "model_name_or_path": None}
        (folder / "quantize_config.json").write_text(
            json.dumps({k: v for k, v in older.items() if k != "quant_method"})
        )
    (folder / "config.json").write_text(json.dumps(config))
    ours = load_model_in("fp32", str(folder), device="cpu")
    close(ours, eager(ours, twin, torch.float32))
    assert commands.command("inspect", folder, "--device", "cpu")[::2] == (0, "")


@pytest.mark.parametrize("name", ["gptq", "awq", "ct int4"])
def test_quantize_drops_older_quantisation_config(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model")
    twin = quantise(folder, KINDS[name], lambda path: ".experts." in path)
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config")
    if name in ("gptq", "awq"):
        (folder / ("quantize_config.json" if name == "gptq" else "quant_config.json")).write_text(json.dumps(block))
    else:
        config["compression_config"] = block
    (folder / "config.json").write_text(json.dumps(config))
    assert commands.command("quantize", folder, "--to", "fp32")[::2] == (0, "")
    ours = load_model_in("fp32", f"{folder}-fp32", device="cpu")
    close(ours, eager(ours, twin, torch.float32))


def test_layers_that_predict_further_tokens(tmp_path: Path, caplog: Any) -> None:
    """They are read by no whole model, whatever is in them, and copied with the experts they have."""
    from collegium.checkpoint import Checkpoint
    from collegium.checkpoint.dense_weights import DenseWeight, quantised_dense_weights
    from collegium.commands.quantize import quantize_model

    folder = write(tmp_path / "model")
    twin = quantise(folder, KINDS["fp8 blocks"], linear)
    tensors = load_file(folder / "model.safetensors")
    further = {name.replace("layers.2", "layers.3"): tensor.clone() for name, tensor in tensors.items()}
    further = {name: tensor for name, tensor in further.items() if ".layers.3." in name}
    save_file({**tensors, **further}, folder / "model.safetensors")
    ours = load_model_in("fp32", str(folder), device="cpu")
    close(ours, eager(ours, twin, torch.float32))
    assert_values(caplog.text, "16 matrices", "(16 fp8_block)")
    quantize_model(str(folder), "mxfp4", str(tmp_path / "out"))
    found = quantised_dense_weights(Checkpoint.open(tmp_path / "out"))
    formats = {path: entry.stored.name for path, entry in found.items() if isinstance(entry, DenseWeight)}
    assert formats.keys() == found.keys()
    assert set(formats.values()) == {"fp8_block"}
    assert len([path for path in formats if path.startswith("model.layers.3.mlp.experts.")]) == 15
    again = load_model_in("fp32", str(tmp_path / "out"), device="cpu")
    same_tensors(again, eager(again, twin, torch.float32))
    # the third layer's own are in no format that the config of it declares, which only their reader would notice
    del further["model.layers.3.self_attn.q_proj.weight_scale_inv"]
    save_file({**tensors, **further}, folder / "model.safetensors")
    close(load_model_in("fp32", str(folder), device="cpu"), eager(ours, twin, torch.float32))


def test_faults_are_reported_together_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collegium.checkpoint.reader import Checkpoint

    folder = write(tmp_path / "model", bias=False)
    quantise(folder, KINDS["fp8 blocks"], linear)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{Q}.weight_scale_inv"]
    del tensors["model.layers.2.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(Checkpoint, "read_slice", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError, match=rf"(?s)2 problems:.*- {Q}: .*- model\.layers\.2\.self_attn\.o_proj: "):
        load_model(str(folder), device="cpu")


def test_scales_of_caches_are_left_aside(tmp_path: Path, caplog: Any) -> None:
    """Wherever they are: below a quantised projection, or below attention."""
    folder = write(tmp_path / "model")
    twin = quantise(folder, KINDS["ct int4"], linear)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        base = f"model.layers.{layer}.self_attn."
        tensors |= {f"{base}k_proj.k_scale": torch.tensor(0.5), f"{base}v_scale": torch.tensor([0.25])}
    save_file(tensors, folder / "model.safetensors")
    ours = load_model_in("fp32", str(folder), device="cpu")
    close(ours, eager(ours, twin, torch.float32))
    assert_values(caplog.text, "6 scales", "(model.layers.0.")


@pytest.mark.parametrize("entry", ["model.layers.0.", "model.layers.0"])
def test_a_skipped_layer(tmp_path: Path, entry: str) -> None:
    folder = write(tmp_path / "model")
    twin = quantise(folder, KINDS["awq"], lambda path: linear(path) and ".layers.0." not in path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [entry, "embed_tokens", GATE]
    (folder / "config.json").write_text(json.dumps(config))
    ours = load_model_in("fp32", str(folder), device="cpu")
    close(ours, eager(ours, twin, torch.float32))


PACKED = {
    "ct fp8 tensor": "float-quantized", "ct fp8 channel": "float-quantized", "ct fp8 block": "float-quantized",
    "ct nvfp4": "nvfp4-pack-quantized", "ct mxfp4": "mxfp4-pack-quantized", "ct int4": "pack-quantized",
    "ct int4 zeros": "pack-quantized", "ct int8": "pack-quantized", "ct int8 zeros": "pack-quantized",
    "ct int8 plain": "int-quantized",
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), PACKED.items())
def test_stored_values_match_compressed_tensors(name: str, form: str) -> None:
    """What the tests above write and take for truth is what compressed-tensors reads."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind = KINDS[name]
    stored, values = kind.write(torch.randn(160, 160) * torch.exp(torch.randn(160, 1)))
    group = kind.block([])["config_groups"]["group_0"]
    scheme = QuantizationScheme.model_validate({**group, "format": form})
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    read = compressor.decompress({k: t for k, t in stored.items() if "input" not in k}, scheme)["weight"]
    step = 2 * torch.finfo(read.dtype).eps
    assert (read.float() - values).abs().max() <= step * values.abs().max()
