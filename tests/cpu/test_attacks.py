"""Well-formed files with wrong content: what the audit refuses, what it remarks on, and what no audit can see."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from collegium import load_layer
from collegium.checkpoint import Checkpoint, audit
from collegium.errors import BadScaleError, CheckpointError, ConfigError
from collegium.models.base import Config
from collegium.models.name_match import matches_prefix
from collegium.models.quantization import declared_format
from raising import assert_values, raises_with
from toys import TinySize, write_checkpoint

SIZE = TinySize(hidden=256, intermediate=128, experts=4, top_k=2, layers=2)
HEAD = "model.layers.{}.mlp.experts.{}.{}_proj"
PARTS = ("gate", "up", "down")
Tensors = dict[str, torch.Tensor]


def attacked(folder: Path, change: Callable[[Tensors], None], name: str = "mxfp4", storage: str | None = None) -> Path:
    """Write a checkpoint, change its tensors in place, and write it again, well formed."""
    tiny = write_checkpoint(folder, "qwen3_moe", name, storage, size=SIZE)
    change(tiny.tensors)
    save_file({n: t.contiguous().clone() for n, t in tiny.tensors.items()}, folder / "model.safetensors")
    return folder


def findings(path: Path) -> tuple[str, ...]:
    """Return the audit's findings, but for what toy NVFP4 checkpoints have on purpose: two kinds of scales."""
    meant = ("different global scales", "have static activation scales, which")
    return tuple(text for text in audit(Checkpoint.open(path)).findings if not any(part in text for part in meant))


def fill(name: str, value: float | int) -> Callable[[Tensors], None]:
    """Set one element of a tensor, in the middle, to a number or to a raw byte."""

    def change(tensors: Tensors) -> None:
        flat = tensors[name].reshape(-1).clone()
        raw = flat if flat.dtype in (torch.float32, torch.bfloat16, torch.float16) else flat.view(torch.uint8)
        raw[raw.numel() // 2] = value
        tensors[name] = flat.view(tensors[name].shape)

    return change


NAN, INF = float("nan"), float("inf")
REFUSED = [
    ("bf16", None, ".weight", NAN),
    ("bf16", None, ".weight", INF),
    ("fp16", None, ".weight", -INF),
    ("fp8_block", "finegrained-fp8", ".weight_scale_inv", NAN),
    ("fp8_block", "finegrained-fp8", ".weight_scale_inv", INF),
    ("fp8_block", "finegrained-fp8", ".weight_scale_inv", -1.0),
    ("fp8_block", "finegrained-fp8", ".weight_scale_inv", 0.0),
    ("fp8_block", "finegrained-fp8", ".weight", 0x7F),
    ("fp8_channel", "compressed-tensors", ".weight_scale", NAN),
    ("fp8_channel", "compressed-tensors", ".weight_scale", 0.0),
    ("fp8_tensor", "modelopt", ".weight_scale", INF),
    ("mxfp8", "modelopt", ".weight_scale", 0xFF),
    ("mxfp8", "modelopt", ".weight", 0xFF),
    ("mxfp4", "compressed-tensors", ".weight_scale", 0xFF),
    ("nvfp4", "modelopt", ".weight_scale", 0x7F),
    ("nvfp4", "modelopt", ".weight_scale", 0x00),
    ("nvfp4", "modelopt", ".weight_scale", 0xB8),
    ("nvfp4", "modelopt", ".weight_scale_2", NAN),
    ("nvfp4", "modelopt", ".weight_scale_2", 0.0),
    ("nvfp4", "compressed-tensors", ".weight_global_scale", 0.0),
    ("nvfp4", "compressed-tensors", ".weight_global_scale", -3.0),
    ("int4_group", "compressed-tensors", ".weight_scale", INF),
    ("int4_group", "compressed-tensors", ".weight_scale", 0.0),
]


@pytest.mark.parametrize("which", ["gate", "down"])
@pytest.mark.parametrize(("name", "storage", "suffix", "value"), REFUSED)
def test_forbidden_numbers_are_refused_by_name(tmp_path, name, storage, suffix, value, which: str) -> None:
    path = attacked(tmp_path, fill(HEAD.format(1, 2, which) + suffix, value), name, storage)
    for attempt in (lambda: audit(Checkpoint.open(path)), lambda: load_layer(path, 1, device="cpu")):
        with pytest.raises(BadScaleError, match=f"layer 1, expert 2, {which}"):
            attempt()


@pytest.mark.parametrize("suffix", [".weight_g_idx", ".weight_zero_point"])
def test_out_of_range_column_order_refused(tmp_path, suffix: str) -> None:
    order = torch.full((256,), 1 << 30, dtype=torch.int32)
    path = attacked(
        tmp_path, lambda t: t.update({HEAD.format(0, 1, "up") + suffix: order}), "int4_group", "compressed-tensors"
    )
    for attempt in (lambda: audit(Checkpoint.open(path)), lambda: load_layer(path, 0, device="cpu")):
        with pytest.raises(CheckpointError, match=r"g_idx|zero_point"):
            attempt()


def copy(source: str, target: str, *suffixes: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for suffix in suffixes:
            tensors[target + suffix] = tensors[source + suffix]

    return change


def test_a_clean_checkpoint_has_no_findings(tmp_path) -> None:
    for name in ("bf16", "mxfp4", "nvfp4", "int4_group", "fp8_block", "fp8_tensor"):
        assert findings(attacked(tmp_path / name, lambda _: None, name)) == ()


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "int4_group"])
def test_copied_experts_are_found(tmp_path, name: str) -> None:
    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            if ".layers.1.mlp.experts.3." in key:
                tensors[key] = tensors[key.replace("experts.3.", "experts.0.")]

    found = findings(attacked(tmp_path, change, name))
    wanted = [f"layer 1, expert 3, {p}: its weights are, byte for byte, those of layer 1, expert 0, {p}" for p in PARTS]
    assert list(found) == wanted


def test_gate_copied_to_up_is_detected(tmp_path) -> None:
    change = copy(HEAD.format(0, 2, "gate"), HEAD.format(0, 2, "up"), ".weight")
    (found,) = findings(attacked(tmp_path, change, "bf16"))
    assert_values(found, "expert 2, up: its weights", "layer 0, expert 2, gate")


def test_a_copied_layer_is_found(tmp_path) -> None:
    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            if ".layers.1.mlp.experts." in key:
                tensors[key] = tensors[key.replace("layers.1.", "layers.0.")]

    found = findings(attacked(tmp_path, change, "nvfp4"))
    assert len(found) == 12
    assert all(re.match(r"layer 1, .* those of layer 0, ", text) for text in found)


@pytest.mark.parametrize(("name", "suffix"), [("mxfp4", ".weight_scale"), ("nvfp4", ".weight_scale")])
def test_scales_copied_across_layers_detected(tmp_path, name: str, suffix: str) -> None:
    change = copy(HEAD.format(0, 2, "down"), HEAD.format(1, 2, "down"), suffix)
    found = findings(attacked(tmp_path, change, name, "compressed-tensors"))
    assert_values(found[0], "layer 1, expert 2, down: its scales", "layer 0, expert 2, down")


def test_constant_weights_are_found(tmp_path) -> None:
    def change(tensors: Tensors) -> None:
        for expert, value in ((0, 0.0), (1, 0.5), (3, 0.5)):
            tensors[HEAD.format(0, expert, "up") + ".weight"].fill_(value)

    found = findings(attacked(tmp_path, change, "bf16"))
    assert [text for text in found if "all its weights are the same" in text] == [
        f"layer 0, expert {expert}, up: all its weights are the same" for expert in (0, 1, 3)
    ]


@pytest.mark.parametrize(
    ("name", "storage", "suffix", "value"),
    [
        ("mxfp4", "compressed-tensors", ".weight_scale", 200),
        ("fp8_block", "finegrained-fp8", ".weight_scale_inv", 1e6),
        ("nvfp4", "modelopt", ".weight_scale_2", 1e6),
        ("nvfp4", "compressed-tensors", ".weight_global_scale", 1e-6),
        ("fp8_tensor", "modelopt", ".weight_scale", 1e-9),
        ("bf16", None, ".weight", 1e30),
    ],
)
def test_outlier_expert_magnitude_is_detected(tmp_path, name, storage, suffix, value) -> None:
    found = findings(attacked(tmp_path, fill(HEAD.format(0, 3, "up") + suffix, value), name, storage))
    assert any(
        re.search(r"layer 0, expert 3, up: its largest scale is .* usual for layer 0, up", text) for text in found
    )


def test_many_remarks_are_counted_not_listed(tmp_path) -> None:
    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            if ".experts." in key:
                tensors[key] = torch.zeros_like(tensors[key])

    found = findings(attacked(tmp_path, change, "bf16"))
    assert len(found) == 21
    assert found[-1] == "4 more findings of these kinds"


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_exchanged_experts_cannot_be_seen(tmp_path, name: str) -> None:
    """Both hold good weights: nothing in a file says which expert is which. docs/hostile-files.md says so."""

    def change(tensors: Tensors) -> None:
        for key in [k for k in tensors if ".layers.0.mlp.experts.1." in k]:
            other = key.replace("experts.1.", "experts.2.")
            tensors[key], tensors[other] = tensors[other], tensors[key]

    assert findings(attacked(tmp_path, change, name)) == ()


HANGING = [
    r"(.*)*!",
    r"([a-z_.0-9]+)+!",
    ".*" * 12 + "!",
    r"(a|a?)+$",
    "((((.*)*)*)*)*!",
    "(((()){9999}){9999}){9999}!",
]


@pytest.mark.parametrize("pattern", HANGING)
def test_no_pattern_can_hang_a_load(pattern: str) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "ignored_layers": [f"re:{pattern}"]}}
    assert declared_format(config, "model.layers.12.mlp.experts.127.gate_proj").format == "fp8_tensor"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(" * 600, "cannot be used"),
        ("a{99999999999999}", "cannot be used"),
        ("(", "cannot be used"),
        ("x" * 1001, "1001 characters"),
        (r"(a)\1", "groupref"),
        ("(?i:model)", "uses flags"),
        ("(?i)model", "uses flags"),
        ("(?<=x)model", "assert"),
        ("(?>a+)b", "atomic"),
    ],
)
def test_unusable_patterns_are_named(pattern: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        matches_prefix(pattern, "aamodel")


PATTERNS = [
    r"re", r".*mlp\.(gate|up|gate_up|down)_proj.*", r".*self_attn.*", r"model\.layers\.\d+\.mlp\.gate$",
    r"[^.]+\.layers",
    r"(?!.*shared).*experts.*", r"(?=model)m", r"model\b", r"\w+\.\w+\.1\d?\.", r"lm_head|model", r"(model\.)?layers",
    r"^model.*proj$", r"[\w.]*?experts\.(\d{1,3})\.up", r"model\.layers\.[0-5]\.", r"a*?b?", r"(m|mo|mod)+el\Z",
    r"\S+\Bodel", r"(?:model|language_model)\.\D+12", r"[^\d]*12", "", r"\s|\W|m",
    r"(model\.layers\.12\.mlp\.experts\.127\.up_proj){2}", r"model{,1}", r"mode{x}|\x6d\157del", r"[]m][^]x]",
    r"(?#text)(?P<name>lm)_(?:head){,}", r"(?u)m{1}o{0,2}?",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_re_does(pattern: str) -> None:
    for text in (
        "model.layers.12.mlp.experts.127.up_proj", "model.layers.1.mlp.gate", "lm_head",
        "model.layers.3.self_attn.q_proj",
        "language_model.model.layers.0.mlp.shared_experts.down_proj", "model", "a", "\n", "model\n",
    ):  # fmt: skip
        assert matches_prefix(pattern, text) == (re.match(pattern, text) is not None), text


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_experts", "hidden_size", "block_count", "nextn_predict_layers"]
)
@pytest.mark.parametrize("value", [1 << 31, 10**30, -(10**30)])
def test_absurd_config_sizes_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .*[0-9]+") as caught:
        Config({key: value}).integer(key)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("number", ["9" * 5000, "²", "٣"])
def test_strange_numbers_in_names_and_lists(tmp_path: Path, number: str) -> None:
    """Python reads some digits that are no number, and refuses numbers of thousands of digits."""

    def add(tensors: Tensors) -> None:
        tensors[f"model.layers.{number}.self_attn.q_proj.weight"] = torch.zeros(3, 5)

    audit(Checkpoint.open(attacked(tmp_path, add, "bf16")))
    assert Config({"moe_layers": f"1, {number}"}).items("moe_layers") == [1, number]


@pytest.mark.parametrize("value", [1 << 24, -(1 << 24)])
@pytest.mark.parametrize("key", ["n_routed_experts", "block_count", "nextn_predict_layers"])
def test_counts_have_smaller_limits_than_widths(key: str, value: int) -> None:
    assert Config({"embedding_length": value}).integer("embedding_length") == value
    with raises_with(ConfigError, key, value, 1 << 14):
        Config({key: value}).integer(key)


def test_unreadable_file_name_raises_checkpoint_error(tmp_path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "' + "x" * 5000 + '"}}')
    with raises_with(CheckpointError, "model.safetensors.index.json") as caught:
        Checkpoint.open(tmp_path)
    assert len(str(caught.value)) < 1000
