"""Weights decoded once for a large batch on a Hopper GPU: the bits of the tiles that decode in registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from collegium.experts.triton import layout
from collegium.experts.triton.tiles import choice as tiles
from collegium.runtime.devices import probe
from collegium.runtime.machine import machine_at, machine_for
from collegium.testing.compare import relative_error
from decoded_layers import DECODED, decoded_layer


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "dequantize_threshold", lambda *_: 8)
    monkeypatch.setattr(tiles, "_MIN_K", 8)


@pytest.mark.parametrize(("name", "act", "group"), DECODED)
@pytest.mark.parametrize("sizes", [(7, 176, 336), (16, 512, 1024)])
def test_bits_of_the_small_tiles(
    name: str, act: str, group: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, batch, truth = decoded_layer(name, act, group, probe("cuda"), tokens=1100, sizes=sizes, where="cuda")
    rows, stop = batch.source.numel(), int(batch.expert_offsets[-1])
    small = replace(packed, machine=replace(packed.machine, compiles=False))
    if not (packed.gate_up.layout.runs_large and packed.down.layout.runs_large):
        assert packed.tiling.large(rows) is None
        return
    assert packed.tiling.large(rows) is not None
    assert small.tiling.large(rows) is None
    for weights in (None, torch.rand(rows, device="cuda") + 0.5):
        given = replace(batch, input_weights=weights)
        wanted = small.run(given)[:stop]
        assert torch.equal(packed.run(given)[:stop], wanted)
        assert torch.equal(packed.run(given)[:stop], wanted), "another run"
        if weights is None:
            assert relative_error(wanted, truth[:stop]) < 0.01
    with monkeypatch.context() as patch:
        # Two experts or so at a time.
        patch.setattr(layout, "_MAX_DEQUANTIZED_BYTES", 5 * 2 * sizes[1] * sizes[2])
        assert torch.equal(packed.run(replace(batch, input_weights=None))[:stop], small.run(batch)[:stop])


def test_a_graph_of_layers() -> None:
    packed, batch, _ = decoded_layer("nvfp4", "bf16", 128, probe("cuda"), tokens=600, where="cuda")
    other, wider, _ = decoded_layer("bnb4", "bf16", 64, probe("cuda"), tokens=600, sizes=(5, 256, 512), where="cuda")
    calls = ((packed, batch), (other, wider))
    stop = int(batch.expert_offsets[-1])
    assert stop == int(wider.expert_offsets[-1])
    wanted = [layer.run(given)[:stop].clone() for layer, given in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer.run(given) for layer, given in calls]
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(rows[:stop], right) for rows, right in zip(found, wanted, strict=True))


def test_driver_reports_memory_bandwidth() -> None:
    facts = probe("cuda")
    assert facts.bandwidth is not None
    assert 1.5e12 < facts.bandwidth < 6e12, "no Hopper GPU has that"
    assert machine_at(torch.device("cuda")) == machine_for(facts)
