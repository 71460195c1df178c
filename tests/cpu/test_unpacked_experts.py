"""Experts that a tool has unpacked into one module an expert, below any wrapper: from files to a layer's output."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from collegium import Routing, load_layer
from collegium.checkpoint import Checkpoint, audit
from collegium.commands.quantize import quantize_model
from collegium.errors import (
    CheckpointError,
    DuplicateTensorError,
    InputError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from raising import raises_with

HIDDEN, WIDTH, EXPERTS, TOP_K = 96, 64, 5, 2
Parts = dict[str, Tensor]
Store = Callable[[Tensor], tuple[Parts, Tensor]]  # matrix to its tensors by suffix, and what they mean in float64


def heavy(*shape: int) -> Tensor:
    """Return heavy-tailed numbers in bfloat16."""
    return (torch.randn(*shape) * (1 + torch.randn(*shape).abs() ** 3) * 0.1).bfloat16()


def plain(matrix: Tensor) -> tuple[Parts, Tensor]:
    return {".weight": matrix}, matrix.double()


def nf4(matrix: Tensor) -> tuple[Parts, Tensor]:
    """Return bitsandbytes' NF4: flat blocks of 64, the first of two codes in the high nibble."""
    table = torch.linspace(-1, 1, 16) ** 3
    codes = torch.randint(0, 16, (matrix.numel(),), dtype=torch.uint8)
    absmax = torch.rand(matrix.numel() // 64) + 0.1
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(matrix.shape), "dtype": "bfloat16"}
    parts = {
        ".weight": (codes[0::2] << 4 | codes[1::2]).unsqueeze(1),
        ".weight.absmax": absmax,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    truth = table[codes.long()].double() * absmax.double().repeat_interleave(64)
    return parts, truth.view(matrix.shape)


def words(codes: Tensor) -> Tensor:
    """Return int32 with eight codes of the last axis each, the first lowest."""
    shifted = codes.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def packed_int4(matrix: Tensor) -> tuple[Parts, Tensor]:
    """Return compressed-tensors' symmetric INT4 in groups of 32."""
    rows, columns = matrix.shape
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // 32) * 0.1).bfloat16()
    shape = torch.tensor([rows, columns])
    truth = (codes - 8).double() * scales.double().repeat_interleave(32, 1)
    return {".weight_packed": words(codes), ".weight_scale": scales, ".weight_shape": shape}, truth


def gptq(matrix: Tensor) -> tuple[Parts, Tensor]:
    """Return GPTQ's INT4 in groups of 32 with zero points, which it stores less one, and an index of groups."""
    rows, columns = matrix.shape
    codes, zeros = torch.randint(0, 16, (rows, columns)), torch.randint(1, 16, (rows, columns // 32))
    scales = (torch.rand(rows, columns // 32) * 0.1).half()
    parts = {
        ".qweight": words(codes).t(),
        ".qzeros": words((zeros - 1).t()),
        ".scales": scales.t(),
        ".g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }
    zero, scale = (tensor.double().repeat_interleave(32, 1) for tensor in (zeros, scales))
    return parts, (codes - zero) * scale


def fp8_rows(matrix: Tensor) -> tuple[Parts, Tensor]:
    """Return compressed-tensors' FP8 with a scale a row."""
    codes = (torch.randn(matrix.shape) * 20).to(torch.float8_e4m3fn)
    scale = torch.rand(matrix.shape[0], 1) * 0.01
    return {".weight": codes, ".weight_scale": scale}, codes.double() * scale.double()


def compressed(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*router.*", "lm_head"]}


SKIPPED = ["router"]
STORES: dict[str, tuple[Store, dict[str, Any] | None]] = {
    "bf16": (plain, None),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                  "llm_int8_skip_modules": SKIPPED}),
    "int4": (packed_int4, compressed("int", 4, strategy="group", group_size=32)),
    "fp8": (fp8_rows, compressed("float", 8, strategy="channel")),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
                    "dynamic": {"-:.*router.*": {}}}),
}  # fmt: skip


def rows_apart(expert: int, matrices: Parts, biases: Parts, store: Store) -> tuple[Parts, dict[str, Tensor]]:
    """Return llm-compressor's spelling of an expert: three modules."""
    tensors, truth = Parts(), dict[str, Tensor]()
    for which in ("gate", "up", "down"):
        parts, truth[which] = store(matrices[which])
        path = f"experts.{expert}.{which}_proj"
        tensors |= {path + suffix: tensor for suffix, tensor in parts.items()}
        tensors[path + ".bias"] = biases[which]
    return tensors, truth


def rows_alternating(expert: int, matrices: Parts, biases: Parts, store: Store) -> tuple[Parts, dict[str, Tensor]]:
    """Return Unsloth's spelling: lists of modules; even rows of the first are gate, odd ones up."""
    both = torch.stack((matrices["gate"], matrices["up"]), 1).flatten(0, 1)
    parts, joined = store(both)
    tensors = {f"experts.gate_up_projs.{expert}{suffix}": tensor for suffix, tensor in parts.items()}
    tensors[f"experts.gate_up_projs.{expert}.bias"] = torch.stack((biases["gate"], biases["up"]), 1).flatten()
    parts, down = store(matrices["down"])
    tensors |= {f"experts.down_projs.{expert}{suffix}": tensor for suffix, tensor in parts.items()}
    tensors[f"experts.down_projs.{expert}.bias"] = biases["down"]
    return tensors, {"gate": joined[0::2], "up": joined[1::2], "down": down}


def write(path: Path, tensors: Parts, config: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


def gpt_oss(path: Path, spelling: Any, name: str, router: str = "router.") -> Callable[[Tensor], Tensor]:
    """Write a layer of gpt-oss and return what it computes in float64."""
    store, block = STORES[name]
    prefix = "model.layers.0.mlp."
    tensors: Parts = {router + "weight": heavy(EXPERTS, HIDDEN), router + "bias": heavy(EXPERTS)}
    experts: list[tuple[dict[str, Tensor], Parts]] = []
    for expert in range(EXPERTS):
        matrices = {"gate": heavy(WIDTH, HIDDEN), "up": heavy(WIDTH, HIDDEN), "down": heavy(HIDDEN, WIDTH)}
        biases = {which: heavy(matrix.shape[0]) for which, matrix in matrices.items()}
        more, decoded = spelling(expert, matrices, biases, store)
        tensors |= more
        experts.append((decoded, biases))
    config: dict[str, Any] = {
        "model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": 1, "swiglu_limit": 7.0, "hidden_act": "silu",
        "vocab_size": 64, "dtype": "bfloat16",
    }  # fmt: skip
    config |= {} if block is None else {"quantization_config": block}
    write(path, {prefix + key: tensor for key, tensor in tensors.items()}, config)

    def truth(x: Tensor) -> Tensor:
        logits = x.double() @ tensors[router + "weight"].double().T + tensors[router + "bias"].double()
        best = logits.topk(TOP_K)
        out = torch.zeros_like(x, dtype=torch.float64)
        for row, (ids, weights) in enumerate(zip(best.indices, best.values.softmax(-1), strict=True)):
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                matrices, biases = experts[expert]
                gate, up = (matrices[k] @ x[row].double() + biases[k].double() for k in ("gate", "up"))
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                out[row] += weight * (matrices["down"] @ inner + biases["down"].double())
        return out

    return truth


def off(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("spelling", [rows_apart, rows_alternating])
def test_gpt_oss_one_module_an_expert(tmp_path: Path, spelling: Any, name: str) -> None:
    torch.manual_seed(3)
    truth = gpt_oss(tmp_path, spelling, name)
    report = audit(Checkpoint.open(tmp_path))
    assert not report.layers[0].stored.stacked
    layer = load_layer(tmp_path, 0, dtype="fp32", device="cpu")
    for tokens in (1, 9):
        x = torch.randn(tokens, HIDDEN)
        assert off(layer(x), truth(x)) < 2e-5


def test_a_router_inside_a_linear_module(tmp_path: Path) -> None:
    torch.manual_seed(4)
    truth = gpt_oss(tmp_path, rows_alternating, "nf4", "router.linear.")
    x = torch.randn(6, HIDDEN)
    assert off(load_layer(tmp_path, 0, dtype="fp32", device="cpu")(x), truth(x)) < 2e-5


def test_interleaved_rows_with_block_scales_refused(tmp_path: Path) -> None:
    gpt_oss(tmp_path, rows_alternating, "bf16")
    checkpoint = Checkpoint.open(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name in [name for name in tensors if "_projs." in name and name.endswith(".weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 32), -(-columns // 32))
    config = json.loads((tmp_path / "config.json").read_text())
    block = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": SKIPPED}
    write(tmp_path, tensors, config | {"quantization_config": block})
    with raises_with(TensorMismatchError, "32"):
        load_layer(tmp_path, 0, device="cpu")


def test_quantizing_gate_up_modules_refused(tmp_path: Path) -> None:
    gpt_oss(tmp_path, rows_alternating, "bf16")
    with pytest.raises(InputError, match="gate_up_projs"):
        quantize_model(str(tmp_path), "fp8_channel", str(tmp_path / "out"))


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    gpt_oss(tmp_path, rows_apart, "bf16")
    tensors = {k: Checkpoint.open(tmp_path).read(k) for k in Checkpoint.open(tmp_path).tensors}
    del tensors["model.layers.0.mlp.experts.3.up_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match=r"experts\.3\.up_proj\.bias"):
        load_layer(tmp_path, 0, device="cpu")


# Family, sizes in its config, where experts are, and what its published names are not: one module an expert.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True},
    "granitemoe": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "step3_text": {"moe_num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_top_k": TOP_K,
                   "share_expert_dim": WIDTH, "moe_layers_enum": "0"},
    "dbrx": {"d_model": HIDDEN, "n_layers": 1,
             "ffn_config": {"moe_num_experts": EXPERTS, "ffn_hidden_size": WIDTH, "moe_top_k": TOP_K}},
    "llama4_text": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
}  # fmt: skip
PLACES = {
    "qwen3_vl_moe_text": ("model.layers.0.mlp.", "gate.weight", ()),
    "granitemoe": ("model.layers.0.block_sparse_moe.", "router.layer.weight", ()),
    "step3_text": ("model.layers.0.moe.", "gate.weight", ("../share_expert.",)),
    "dbrx": ("transformer.blocks.0.ffn.", "router.layer.weight", ()),
    "llama4_text": ("model.layers.0.feed_forward.", "router.weight", ("shared_expert.",)),
}
APART = "{container}{expert}.{which}_proj"
SPELLED = [
    ("qwen3_vl_moe_text", "experts.", "{container}{expert}.{which}_proj"),
    ("qwen3_vl_moe_text", "experts.", "{container}{fused}_projs.{expert}"),
    ("qwen3_vl_moe_text", "experts.", "{container}{fused}_proj.{expert}"),
    ("qwen3_vl_moe_text", "experts.", "{container}{expert}.{fused}_proj"),
    ("granitemoe", "experts.", "{container}{expert}.{which}_proj"),
    ("granitemoe", "", "{granite}.{expert}"),
    ("granitemoe", "", "{granite}.experts.{expert}"),
    ("step3_text", "", "{container}{which}_proj.{expert}"),
    ("step3_text", "experts.", "{container}{expert}.{which}_proj"),
    ("dbrx", "experts.", "{container}mlp.{expert}.{dbrx}"),
    ("dbrx", "experts.", "{container}mlp.{dbrx}_linear.{expert}"),
    ("dbrx", "experts.", "{container}{expert}.{which}_proj"),
    ("llama4_text", "experts.", "{container}{expert}.{which}_proj"),
]


def family_layer(
    path: Path, kind: str, container: str, template: str, place: str | None = None
) -> Callable[[Tensor, int, float], Tensor]:
    """Write the experts of a family under a spelling; return (x, expert, weight) to its output in float64."""
    prefix, router, shared = PLACES[kind]
    prefix = prefix if place is None else place
    tensors: Parts = {prefix + router: heavy(EXPERTS, HIDDEN)}
    for head in shared:
        inside = prefix.rsplit(".", 2)[0] + "." + head[3:] if head.startswith("../") else prefix + head
        for which, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            tensors[f"{inside}{which}_proj.weight"] = torch.zeros(shape).bfloat16()
    truth: list[Parts] = []
    for expert in range(EXPERTS):
        own = {"gate": heavy(WIDTH, HIDDEN), "up": heavy(WIDTH, HIDDEN), "down": heavy(HIDDEN, WIDTH)}
        truth.append(own)
        fused = "{fused}" in template or "{granite}" in template
        held = {"gate": torch.cat((own["gate"], own["up"])), "down": own["down"]} if fused else own
        for which, matrix in held.items():
            name = template.format(
                container=container,
                expert=expert,
                which=which,
                fused="gate_up" if which == "gate" else which,
                granite="input_linear" if which == "gate" else "output_linear",
                dbrx={"gate": "w1", "up": "v1", "down": "w2"}[which],
            )
            tensors[f"{prefix}{name}.weight"] = matrix
    config: dict[str, Any] = {
        "model_type": kind, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_experts_per_tok": TOP_K,
        "hidden_act": "silu", "dtype": "bfloat16",
    }  # fmt: skip
    if kind == "dbrx":
        config = {"model_type": kind, "dtype": "bfloat16"}
    elif kind == "step3_text":
        del config["num_experts_per_tok"]
    write(path, tensors, config | CONFIGS[kind])

    def output(x: Tensor, expert: int, weight: float) -> Tensor:
        own, rows = truth[expert], x.double()
        if kind == "llama4_text":
            rows, weight = rows * weight, 1.0
        gate, up = (rows @ own[k].double().T for k in ("gate", "up"))
        return (gate * torch.sigmoid(gate) * up) @ own["down"].double().T * weight

    return output


@pytest.mark.parametrize(("kind", "container", "template"), SPELLED)
def test_every_spelling_of_a_family(tmp_path: Path, kind: str, container: str, template: str) -> None:
    torch.manual_seed(5)
    output = family_layer(tmp_path, kind, container, template)
    audit(Checkpoint.open(tmp_path))
    layer = load_layer(tmp_path, 0, dtype="fp32", device="cpu")
    x = torch.randn(7, HIDDEN)
    for expert in (0, EXPERTS - 1):
        ids = torch.full((7, layer.spec.routing.top_k), -1)
        ids[:, 0] = expert
        weights = torch.full(ids.shape, 0.75)
        found = layer(x, routing=Routing(topk_ids=ids, topk_weights=weights))
        assert off(found, output(x, expert, 0.75)) < 2e-5


def test_ambiguous_square_matrices_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WIDTH", HIDDEN)
    monkeypatch.setitem(CONFIGS["dbrx"]["ffn_config"], "ffn_hidden_size", HIDDEN)
    family_layer(tmp_path, "dbrx", "experts.", "{container}mlp.{dbrx}_linear.{expert}")
    with pytest.raises(MissingTensorError, match="w1_linear"):
        load_layer(tmp_path, 0, device="cpu")


WRAPPERS = ("language_model.", "model.language_model.", "thinker.model.", "model.text_model.", "llm.", "model.llm.")


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "my_new_model."])
@pytest.mark.parametrize("kind", ["dbrx", "qwen3_vl_moe_text", "granitemoe"])
def test_wrappers_compose_with_prefixes(tmp_path: Path, kind: str, wrapper: str) -> None:
    torch.manual_seed(6)
    published = PLACES[kind][0]
    inner = published.removeprefix("model.") if wrapper.endswith("model.") else published
    template = next(own for family, _, own in SPELLED if family == kind)
    output = family_layer(tmp_path, kind, "experts.", template, wrapper + inner)
    layer = load_layer(tmp_path, 0, dtype="fp32", device="cpu")
    ids = torch.tensor([[2, -1]])
    x = torch.randn(1, HIDDEN)
    found = layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.ones(1, 2)))
    assert off(found, output(x, 2, 1.0)) < 2e-5


def test_nemotron_below_a_wrapper(tmp_path: Path) -> None:
    torch.manual_seed(7)
    place = "language_model.backbone.layers.0.mixer."
    tensors: Parts = {
        place + "gate.weight": heavy(EXPERTS, HIDDEN),
        place + "gate.e_score_correction_bias": torch.zeros(EXPERTS),
    }
    own = [(heavy(WIDTH, HIDDEN), heavy(HIDDEN, WIDTH)) for _ in range(EXPERTS)]
    for expert, (up, down) in enumerate(own):
        tensors[f"{place}experts.{expert}.up_proj.weight"] = up
        tensors[f"{place}experts.{expert}.down_proj.weight"] = down
    config: dict[str, Any] = {
        "model_type": "nemotron_h", "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 1, "num_hidden_layers": 1, "hybrid_override_pattern": "E", "n_shared_experts": 0,
        "moe_shared_expert_intermediate_size": 0, "mlp_hidden_act": "relu2", "dtype": "bfloat16",
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    write(tmp_path, tensors, config)
    layer, x = load_layer(tmp_path, 0, dtype="fp32", device="cpu"), torch.randn(3, HIDDEN)
    found = layer(x, routing=Routing(topk_ids=torch.tensor([[4], [0], [-1]]), topk_weights=torch.ones(3, 1)))
    for row, expert in ((0, 4), (1, 0)):
        up, down = (matrix.double() for matrix in own[expert])
        truth = down @ (up @ x[row].double()).clamp(min=0) ** 2
        assert off(found[row], truth) < 2e-5


def rewrite(path: Path, rename: Callable[[str], list[str]]) -> None:
    checkpoint = Checkpoint.open(path)
    tensors = {new: checkpoint.read(name).clone() for name in checkpoint.tensors for new in rename(name)}
    save_file(tensors, path / "model.safetensors")


def test_two_wrappers_with_experts_are_refused(tmp_path: Path) -> None:
    family_layer(tmp_path, "qwen3_vl_moe_text", "experts.", APART)
    rewrite(tmp_path, lambda name: [name, "language_model." + name])
    with pytest.raises(DuplicateTensorError) as refusal:
        load_layer(tmp_path, 0, device="cpu")
    assert "'model.layers.'" in str(refusal.value)
    assert "'language_model.model.layers.'" in str(refusal.value)


@pytest.mark.parametrize("other", ["talker.", "mtp.", "draft_model."])
def test_layers_of_other_models_ignored(tmp_path: Path, other: str) -> None:
    torch.manual_seed(8)
    output = family_layer(tmp_path, "qwen3_vl_moe_text", "experts.", APART)
    checkpoint = Checkpoint.open(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors |= {other + name: torch.randn(tensor.shape).bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(1, HIDDEN)
    routing = Routing(topk_ids=torch.tensor([[1, -1]]), topk_weights=torch.ones(1, 2))
    found = load_layer(tmp_path, 0, dtype="fp32", device="cpu")(x, routing=routing)
    assert off(found, output(x, 1, 1.0)) < 2e-5


def test_matching_prefixes_are_not_called_missing(tmp_path: Path) -> None:
    family_layer(tmp_path, "qwen3_vl_moe_text", "experts.", APART)
    rewrite(tmp_path, lambda name: [name.replace("_proj.weight", "_matrix.weight")])
    with pytest.raises(CheckpointError) as refusal:
        load_layer(tmp_path, 0, device="cpu")
    text = str(refusal.value)
    assert "starts with" not in text
    assert "model.layers.0.mlp.experts.0.gate_matrix.weight" in text


def test_the_nearest_names_are_listed(tmp_path: Path) -> None:
    family_layer(tmp_path, "qwen3_vl_moe_text", "experts.", APART)
    rewrite(tmp_path, lambda name: [name.replace("mlp.experts", "ffn.experts")])
    with pytest.raises(MissingTensorError) as refusal:
        load_layer(tmp_path, 0, device="cpu")
    text = str(refusal.value)
    prefix = "model.layers.0.mlp.experts."
    assert repr(prefix) in text
    listed = text.split("nearest names are ")[1].split(";")[0].split(", ")
    assert listed
    assert all(name in Checkpoint.open(tmp_path) and not name.startswith(prefix) for name in listed)


def test_unexpected_expert_bias_refused(tmp_path: Path) -> None:
    family_layer(tmp_path, "qwen3_vl_moe_text", "experts.", APART)
    checkpoint = Checkpoint.open(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors["model.layers.0.mlp.experts.1.up_proj.bias"] = torch.zeros(WIDTH)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnknownTensorError, match=r"experts\.1\.up_proj\.bias"):
        load_layer(tmp_path, 0, device="cpu")
