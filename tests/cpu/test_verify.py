"""``collegium verify``: every format passes, and a kernel with one mistake in it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from typer.testing import CliRunner

from collegium import cli
from collegium.commands import verify as verification
from collegium.commands.verify import plain_values, tolerance_of, verify_model
from collegium.errors import InputError
from collegium.experts.cpu import decode as cpu_decode, grouped as cpu_grouped, panels
from collegium.experts.reference import ReferenceExperts
from collegium.formats import FORMATS, Fp8Block, Int4Group, NvFp4
from collegium.problem import Overrides
from commands import command
from toys import TinySize, combinations, write_checkpoint

SIZE = TinySize(hidden=192, intermediate=160, experts=5, top_k=2, layers=2)
KNOWN = [form for form in FORMATS if form.name in (*verification._DECODED_HERE, "bf16", "fp16", "fp32")]
REFERENCE = Overrides(kernel="reference")


@pytest.mark.parametrize("form", KNOWN, ids=lambda form: form.name)
@pytest.mark.parametrize("columns", [64, 176, 90])
def test_plain_values_are_the_decoded_values(form: Any, columns: int) -> None:
    weight = torch.randn(3, 150, columns) * torch.exp2(torch.randint(-6, 6, (3, 150, 1)))
    payloads = [form.encode(weight)]
    if form is NvFp4:
        payloads.append(NvFp4.encode(weight, global_divides=True))
    if form is Fp8Block:
        payloads.append(Fp8Block.encode(weight, block=(64, 32)))
    if form is Int4Group:
        payloads.append(Int4Group.encode(weight, group_size=columns))
    for payload in payloads:
        found = torch.cat([plain_values(payload[1], 0, 97), plain_values(payload[1], 97, 150)])
        torch.testing.assert_close(found.float(), payload[1].decode(), rtol=3e-7, atol=0)


@pytest.fixture(autouse=True)
def _one_kernel(monkeypatch) -> None:
    """What is broken below is broken in ``cpu_grouped``."""
    monkeypatch.setattr(panels, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("family", "name", "storage", "stacked"),
    [row for row in combinations() if row[0] in ("deepseek_v3", "gpt_oss") or row[1] in ("bf16", "nvfp4")],
)
def test_every_format_passes_on_the_cpu(tmp_path, family: str, name: str, storage: str, stacked: bool) -> None:
    write_checkpoint(tmp_path, family, name, storage, stacked=stacked, size=SIZE)
    report = verify_model(tmp_path, device="cpu", experts=2)
    assert report.passed, report.to_json()
    assert {p.kernel for p in report.checks} == {"cpu_grouped"}
    assert all(p.weight_format == name for p in report.checks if p.part == "experts")
    assert [p.part for p in report.checks if p.layer == 1] == ["experts", "shared"][: 1 + (family == "deepseek_v3")]
    assert all(0 < p.error <= p.worst_error < 0.01 for p in report.checks)


@pytest.mark.parametrize("activations", ["fp8_group128", "mxfp8", "nvfp4"])
def test_quantised_activations_have_their_own_tolerance(tmp_path, activations: str) -> None:
    write_checkpoint(tmp_path, "mixtral", "mxfp4", size=SIZE)
    force = Overrides(kernel="reference", activation_format=activations)
    report = verify_model(tmp_path, device="cpu", experts=3, overrides=force)
    assert report.passed, report.to_json()
    assert all(0.01 < p.error <= tolerance_of(activations) == p.tolerance for p in report.checks)


@pytest.mark.parametrize("activations", ["fp8_group128_pow2", "mxfp8"])
@pytest.mark.parametrize("seed", [0, 1])
def test_rounded_maxima_are_not_reported(tmp_path, activations: str, seed: int) -> None:
    write_checkpoint(tmp_path, size=TinySize(hidden=96, intermediate=64, experts=3), seed=seed)
    code, out, said = command("verify", tmp_path, "--activations", activations, "--device", "cpu")
    assert (code, said) == (0, ""), out


def test_encoded_weights_judged_by_decoded_values(tmp_path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)
    report = verify_model(tmp_path, device="cpu", experts=2, weight_format="nvfp4")
    assert report.passed
    assert {p.weight_format for p in report.checks} == {"nvfp4"}


def test_all_experts_are_checked_when_asked(tmp_path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)
    assert [p.checked for p in verify_model(tmp_path, device="cpu", experts=None).checks] == [5, 5]
    assert [p.checked for p in verify_model(tmp_path, device="cpu", experts=3).checks] == [3, 3]
    with pytest.raises(InputError, match="at least 1"):
        verify_model(tmp_path, device="cpu", experts=0)


def _swapped(inner: torch.Tensor, spec: Any) -> torch.Tensor:
    up, gate = inner.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _neighbouring_scales(payload: Any) -> Any:
    """Give every group the scale of the group before it."""
    return replace(payload, scales=payload.scales.roll(1, dims=-1))


BROKEN = {
    "gate and up swapped": ("qwen3_moe", "bf16", cpu_grouped, "fast_activate", lambda _: _swapped),
    "scale of the neighbouring group": (
        "qwen3_moe", "mxfp4", cpu_decode, "_mxfp4", lambda true: lambda p: true(_neighbouring_scales(p)),
    ),
    "global scale multiplied, not divided": (
        "qwen3_moe", "nvfp4", cpu_decode, "_nvfp4",
        lambda true: lambda p: true(replace(p, global_divides=not p.global_divides)),
    ),
    "one scale row of all dropped": (
        "deepseek_v3", "fp8_channel", cpu_decode, "_e4m3",
        lambda true: lambda p: replace(true(p), row_scale=torch.ones_like(true(p).row_scale)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_caught(tmp_path, monkeypatch, name: str) -> None:
    family, form, module, attribute, wrap = BROKEN[name]
    write_checkpoint(tmp_path, family, form, size=SIZE)
    assert verify_model(tmp_path, device="cpu", experts=2).passed
    monkeypatch.setattr(module, attribute, wrap(getattr(module, attribute)))
    report = verify_model(tmp_path, device="cpu", experts=2)
    assert not report.passed
    assert all(p.worst_error > 0.05 for p in report.checks if p.part == "experts")


def test_a_dropped_clamp_is_caught(tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=SIZE)
    true = cpu_grouped.activate
    monkeypatch.setattr(cpu_grouped, "activate", lambda x, spec: true(x, replace(spec, limit=None)))
    assert not verify_model(tmp_path, device="cpu", experts=2).passed


def test_swapped_experts_are_caught(tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)
    pack = cpu_grouped.CpuGrouped.pack

    def rotated(self: Any, weights: Any, problem: Any) -> Any:
        order = torch.tensor([0, 1, 2, 4, 3])
        values = weights.down.values[order]
        return pack(self, replace(weights, down=replace(weights.down, values=values)), problem)

    monkeypatch.setattr(cpu_grouped.CpuGrouped, "pack", rotated)
    report = verify_model(tmp_path, device="cpu", experts=None)
    assert not report.passed
    assert {p.worst for p in report.checks} <= {3, 4}


def test_unwritten_row_fails_verification(tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)
    run = ReferenceExperts.run

    def lazy(self: Any, batch: Any, memory: Any = None) -> Any:
        rows = run(self, batch, memory)
        rows[-1] = torch.nan
        return rows

    monkeypatch.setattr(ReferenceExperts, "run", lazy)
    report = verify_model(tmp_path, device="cpu", experts=2, overrides=REFERENCE)
    assert not report.passed
    assert json.loads(json.dumps(report.to_json()))["layers"][0]["worst_error"] is None


def test_exit_code_1_over_tolerance(tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", "bf16", size=SIZE)
    runner = CliRunner()
    arguments = ["verify", str(tmp_path), "--device", "cpu", "--experts", "3"]
    good = runner.invoke(cli.app, arguments)
    assert good.exit_code == 0
    assert "1 shared" in good.stdout
    found = json.loads(runner.invoke(cli.app, [*arguments, "--json"]).stdout)
    assert found["passed"] is True
    assert [row["part"] for row in found["layers"]] == ["experts", "shared"]
    monkeypatch.setattr(verification, "tolerance_of", lambda _: 1e-6)
    bad = runner.invoke(cli.app, arguments)
    assert bad.exit_code == 1
    assert "WRONG" in bad.stdout


def _step(folder: Any, limits: list[float], shared: list[float]) -> None:
    """Step-3.7, whose routed and shared experts are clamped each in layers of their own."""
    config = {
        "model_type": "step3p7_text", "hidden_size": 96, "moe_intermediate_size": 64, "share_expert_dim": 80,
        "num_hidden_layers": 4, "moe_num_experts": 4, "moe_top_k": 2, "moe_layers_enum": "2,3",
        "torch_dtype": "bfloat16",
        "swiglu_limits": [0.0, 0.0, *limits], "swiglu_limits_shared": [0.0, 0.0, *shared],
    }  # fmt: skip
    torch.manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for layer in (2, 3):
        head = f"model.layers.{layer}."
        shapes = {
            "moe.gate_proj.weight": (4, 64, 96), "moe.up_proj.weight": (4, 64, 96), "moe.down_proj.weight": (4, 96, 64),
            "moe.gate.weight": (4, 96), "share_expert.gate_proj.weight": (80, 96),
            "share_expert.up_proj.weight": (80, 96), "share_expert.down_proj.weight": (96, 80),
        }  # fmt: skip
        tensors |= {head + name: torch.randn(shape).bfloat16() * 0.3 for name, shape in shapes.items()}
        tensors[f"{head}moe.router_bias"] = torch.randn(4) * 0.1
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("limits", "shared", "part"), [([0.0, 0.0], [0.0, 0.7], "shared"), ([0.0, 0.7], [0.0, 0.0], "experts")]
)
def test_shared_expert_judged_with_its_activation(tmp_path, monkeypatch, limits, shared, part: str) -> None:
    _step(tmp_path, limits, shared)
    code, output, said = command("verify", tmp_path, "--device", "cpu", "--json")
    assert code == 0, said
    assert [(row["layer"], row["part"]) for row in json.loads(output)["layers"]] == [
        (layer, which) for layer in (2, 3) for which in ("experts", "shared")
    ]
    true = cpu_grouped.activate
    monkeypatch.setattr(
        cpu_grouped,
        "activate",
        lambda x, spec: true(x, replace(spec, kind="swiglu", limit=None) if spec.limit else spec),
    )
    code, output, _ = command("verify", tmp_path, "--device", "cpu", "--json")
    assert code == 1
    wrong = [(row["layer"], row["part"]) for row in json.loads(output)["layers"] if not row["passed"]]
    assert wrong == [(3, part)]
