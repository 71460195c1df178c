"""What the commands do on a GPU, in this process: no rate holds compilation, and too much is refused by its bytes.

Every command as a user types it is run by scripts/run_commands.py, alone on the machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytest.importorskip("transformers")

from triton import knobs

from collegium.checkpoint.reader import Checkpoint
from collegium.commands import demo, generate as writing
from collegium.commands.bench import bench
from collegium.commands.tune import tune
from collegium.errors import InputError
from collegium.integrations.transformers import layers_of, load_model
from collegium.runtime.warm_up import warm_up

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels compiled or read from the cache on disk so far."""
    found: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: found.append(repr))
    return found


def test_after_compiling_the_demo_compiles_nothing(monkeypatch, compiled):
    counts: list[tuple[int, int]] = []
    compiling, row = demo._compile_seconds, demo._Bench.row

    def counted(layers, progress):
        seconds = compiling(layers, progress)
        counts.append((len(compiled), len(compiled)))
        return seconds

    def measured(self, *given):
        made = row(self, *given)
        counts[-1] = (counts[-1][0], len(compiled))
        return made

    monkeypatch.setattr(demo, "_compile_seconds", counted)
    monkeypatch.setattr(demo._Bench, "row", measured)
    monkeypatch.setattr(demo, "RECIPES", (demo.RECIPES[0], demo.RECIPES[7], demo.RECIPES[10]))
    report = demo.run_demo(SHIPPED, device="cuda", tokens=12, windows=1)
    assert compiled
    assert [before for before, _ in counts[1:]] == [after for _, after in counts[1:]]
    assert all(0.97 < row.perplexity_ratio < 1.3 for row in report.rows)
    assert all(row.tokens_per_second > 0 for row in report.rows)


def test_text_is_timed_in_a_graph(compiled):
    limits = writing.prompt_limits(Checkpoint.open(SHIPPED), ["The old king"])
    assert 1 < limits.max_tokens <= 8
    model = load_model(str(SHIPPED), device="cuda", limits=limits)
    assert {buffer.device.type for buffer in model.buffers()} <= {"cuda"}
    warm_up(layers_of(model))
    writer, before = writing.Writer(model, SHIPPED), len(compiled)
    writer.write("The old king", 4)
    first, second = (writer.write("The old king", 24) for _ in range(2))
    assert writer.decoder.captured
    assert len(compiled) == before
    assert first.text == second.text
    assert first.tokens == 24
    assert first.first_token_seconds > 0
    assert first.tokens_per_second > 0


@pytest.mark.parametrize("run", [bench, tune])
def test_oversized_layer_refused_before_allocation(run):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    recipe = ("bf16", "bf16")
    with pytest.raises(InputError, match=r"needs .* GB .* free"):
        run("16384x16384x256x8", recipe if run is tune else [recipe], tokens=(1,), device="cuda")
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
