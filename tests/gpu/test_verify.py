"""``collegium verify`` on a GPU: the portable kernels pass in every format, and a broken one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collegium.commands.verify import verify_model
from collegium.experts.triton.packing import mx
from collegium.problem import Overrides
from toys import TinySize, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZE = TinySize(hidden=512, intermediate=384, experts=6, top_k=2, layers=2)
FORMATS = ["bf16", "fp8_block", "fp8_tensor", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int4_group"]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", FORMATS)
def test_portable_kernels_pass(tmp_path, family: str, name: str) -> None:
    write_checkpoint(tmp_path, family, name, size=SIZE)
    report = verify_model(tmp_path, device="cuda", experts=4)
    assert report.passed, report.to_json()
    assert all(p.kernel.startswith("triton_") for p in report.checks), report.to_json()


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_clamped_experts_with_biases_pass(tmp_path, name: str) -> None:
    write_checkpoint(tmp_path, "gpt_oss", name, size=SIZE)
    report = verify_model(tmp_path, device="cuda", experts=4)
    assert report.passed, report.to_json()
    assert {p.kernel for p in report.checks} <= {"triton_bf16", "triton_w4a16"}


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
def test_eight_bit_activations_within_tolerance(tmp_path, name: str) -> None:
    write_checkpoint(tmp_path, "mixtral", name, size=SIZE)
    activations = "fp8_group128" if name == "fp8_block" else "fp8_token"
    force = Overrides(kernel="triton_fp8", activation_format=activations)
    report = verify_model(tmp_path, device="cuda", experts=4, overrides=force)
    assert report.passed, report.to_json()
    assert all(0.01 < p.error <= p.tolerance == 0.06 for p in report.checks)


def test_a_broken_packing_is_caught(tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path, "mixtral", "mxfp4", size=SIZE)
    true = mx.E2M1

    def swapped(codes: Any) -> Any:
        return true.pack(codes[..., [1, 0, 2, 3], :])

    monkeypatch.setattr(mx, "E2M1", true._replace(pack=swapped))
    assert not verify_model(tmp_path, device="cuda", experts=2).passed
