"""What Prometheus is told, read back in its text format; and everything else without its package."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch

from collegium.balance import balancedness, moves
from collegium.balance.metrics import Metrics
from collegium.errors import InputError, MissingExtraError
from collegium.runtime import profiler_ranges
from raising import raises_with


def lines(metrics: Metrics) -> dict[str, float]:
    found = (line.rsplit(" ", 1) for line in metrics.text().splitlines() if not line.startswith("#"))
    return {name.removeprefix("collegium_"): float(value) for name, value in found}


def test_what_is_observed_is_exposed():
    pytest.importorskip("prometheus_client")
    metrics, slots = Metrics(), ((0, 1, 2), (3, 0, -1))
    for _ in range(2):
        metrics.observe_load(7, [10, 0, 3, 4], slots)
        metrics.observe_load(8, torch.tensor([1, 1, 1, 2]))
    metrics.observe_exchange("dispatch", 3e-5, 1000)
    new = ((0, 1, 3), (3, 2, -1))
    metrics.observe_rebalance(7, moves(slots, new), 2048, 0.25)
    metrics.observe_checksum_failure(7)
    found = lines(metrics)
    assert found['expert_tokens_total{expert="0",layer="7"}'] == 20
    assert found['expert_tokens_total{expert="3",layer="8"}'] == 4
    assert 'expert_tokens_total{expert="1",layer="7"}' not in found
    assert found['rank_tokens_total{layer="7",rank="0"}'] == 16
    assert found['rank_tokens_total{layer="7",rank="1"}'] == 18
    assert found['balancedness{layer="7"}'] == balancedness([10, 0, 3, 4], slots) == 8.5 / 9
    assert found['exchange_seconds_count{phase="dispatch"}'] == 1
    assert found['exchange_seconds_bucket{le="2e-05",phase="dispatch"}'] == 0
    assert found['exchange_seconds_bucket{le="5e-05",phase="dispatch"}'] == 1
    assert found['exchange_bytes_total{phase="dispatch"}'] == 1000
    assert found['exchange_seconds_count{phase="combine"}'] == 0
    assert found['rebalances_total{layer="7"}'] == 1
    assert found['moved_experts_total{layer="7"}'] == 2
    assert found['moved_bytes_total{layer="7"}'] == 2048
    assert found["stall_seconds_total"] == 0.25
    assert found['checksum_failures_total{layer="7"}'] == 1


def test_engines_have_separate_metrics():
    pytest.importorskip("prometheus_client")
    one, other = Metrics(), Metrics()
    one.observe_rebalance(0, (), 5, 0.0)
    assert 'rebalances_total{layer="0"}' not in lines(other)
    with pytest.raises(ValueError, match="collegium_"):
        Metrics(one.registry)
    with raises_with(InputError, "[E]"):
        one.observe_load(0, [[1, 2]])
    with raises_with(InputError, "rank"):
        one.observe_load(0, [1, 2], ((0,), (-1,)))
    assert not [name for name in lines(one) if name.startswith("expert_tokens_total")], "half of it was counted"


def test_missing_metrics_extra_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with raises_with(MissingExtraError, "'collegium[metrics]'"):
        Metrics()


def test_ranges_are_named_on_a_gpu(monkeypatch):
    seen: list[str] = []

    @contextmanager
    def nvtx(name: str):
        seen.append(name)
        yield
        seen.append("end")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    with profiler_ranges.named("dispatch", torch.device("cpu")):
        assert seen == []
    with profiler_ranges.named("dispatch", torch.device("cuda")):
        assert seen == ["collegium: dispatch"]
    assert seen[1:] == ["end"]


def test_profiler_ranges_only_while_shown(monkeypatch):
    seen: list[str] = []

    @contextmanager
    def nvtx(name: str):
        seen.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    device = torch.device("cuda")
    with profiler_ranges.step("combine", device):
        assert seen == []
    profiler_ranges.show()
    try:
        assert profiler_ranges.shown()
        with profiler_ranges.step("combine", device):
            assert seen == ["collegium: combine"]
    finally:
        profiler_ranges.show(False)
    with profiler_ranges.step("experts", device):
        assert seen == ["collegium: combine"]
