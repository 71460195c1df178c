"""The measurement measures what it says: floors from real histograms, turns in order, and no time for wrong numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from collegium import cli
from collegium.commands.bench import TOLERANCES, bench, experts_error, named_layer
from collegium.commands.measure import (
    ROUTINGS,
    Ceilings,
    cache_bytes,
    floor_of,
    input_sets,
    measure_ceilings,
    prepare_pass,
    random_routing,
    stays_cached,
    take_turns,
)
from collegium.commands.plot import draw_bench, save_picture
from collegium.dummy.weights import random_weights
from collegium.errors import ConfigError, InputError, MeasurementError, SpecError
from collegium.experts.cpu import grouped as cpu_grouped
from collegium.experts.cpu.panels import missing_requirement
from collegium.problem import DeviceFacts, Problem
from collegium.testing.compare import relative_error
from collegium.types import Routing
from raising import raises_with
from truth import moe_truth

RUNNER = CliRunner()
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
CEILINGS = Ceilings(bandwidth=1e9, rate_16=1e12, rate_8=2e12)
CPU = torch.device("cpu")


def spec(what: str = "64x32x6x2", weights: str = "bf16"):
    return replace(named_layer(what)[1], weight_format=weights)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def routing(ids: list[list[int]]) -> Routing:
    found = torch.tensor(ids)
    return Routing(topk_ids=found, topk_weights=torch.ones(found.shape))


def test_the_floor_counts_active_experts():
    # Four of six experts in the first routing, two in the second: three on average; five rows of six in the first.
    routings = [routing([[0, 1], [2, -1], [3, 0]]), routing([[4, 5], [4, 5], [5, 4]])]
    found = floor_of(spec(), "bf16", routings, CEILINGS)
    assert found.experts_hit == 3
    assert found.nbytes == 3 * 3 * 64 * 32 * 2 + 2 * 3 * 64 * 2
    assert found.flops == 2 * 5.5 * 3 * 64 * 32
    assert (found.bound, found.seconds) == ("memory", found.nbytes / 1e9)
    quick = replace(CEILINGS, bandwidth=1e15)
    assert floor_of(spec(), "bf16", routings, quick).bound == "math"
    half = floor_of(spec(), "fp8_token", routings, quick).seconds
    assert half == pytest.approx(floor_of(spec(), "bf16", routings, quick).seconds / 2)
    given = floor_of(spec(), "bf16", routings, CEILINGS, expert_nbytes=100.0)
    assert given.nbytes == 3 * 100 + 2 * 3 * 64 * 2
    small = floor_of(spec(weights="mxfp4"), "bf16", routings, CEILINGS)
    assert small.nbytes == 3 * 3 * 64 * 32 * (4.25 / 8) + 2 * 3 * 64 * 2


@pytest.mark.parametrize("style", ROUTINGS)
def test_routings_are_distinct_and_normalised(style):
    made = random_routing(50, spec(), style, generator())
    assert made.topk_ids.shape == made.topk_weights.shape == (50, 2)
    assert int(made.topk_ids.min()) >= 0
    assert int(made.topk_ids.max()) < 6
    assert all(len(set(row)) == 2 for row in made.topk_ids.tolist())
    assert torch.allclose(made.topk_weights.sum(1), torch.ones(50))


def test_routings_are_skewed_as_they_say():
    wide = spec("64x32x32x4")
    counts = {
        style: torch.bincount(random_routing(400, wide, style, generator()).topk_ids.flatten(), minlength=32)
        for style in ROUTINGS
    }
    assert int(counts["hot"][0]) == 400
    assert int((counts["half"] == 0).sum()) == 16
    assert int(counts["uniform"].min()) > 20
    ordered = counts["zipf"].sort(descending=True).values
    assert int(ordered[0]) > 300
    assert int(ordered[0]) > 4 * int(ordered[16])


@pytest.mark.parametrize(("style", "what"), [("skewed", "64x32x6x2"), ("half", "64x32x6x4")])
def test_impossible_routing_refused(style, what):
    with pytest.raises(InputError, match="half"):
        random_routing(3, spec(what), style, generator())


def test_turns_rotate_and_passes_repeat():
    order: list[str] = []
    passes = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = take_turns(passes, CPU, rounds=4)
    assert "".join(order) == "abcbcacababc"
    assert set(times) == {"a", "b", "c"}
    ran: list[int] = []
    prepare_pass([lambda: ran.append(1), lambda: ran.append(2)], CPU)()
    assert ran == [1, 2, 1, 2]


def test_recipes_alternate_per_token_count(monkeypatch):
    turns: list[list[tuple[str, str, int]]] = []

    def noted(passes, *given, **more):
        turns.append(list(passes))
        return take_turns(passes, *given, **more)

    monkeypatch.setattr("collegium.commands.bench.take_turns", noted)
    report = bench("64x32x6x2", [("bf16", "bf16"), ("mxfp4", "bf16")], tokens=(5, 2), device="cpu", rounds=2)
    assert turns == [[("bf16", "bf16", t), ("mxfp4", "bf16", t)] for t in (2, 5)]
    assert sorted(row.tokens for row in report.rows) == [2, 2, 5, 5]


def test_more_inputs_for_fewer_tokens():
    assert [input_sets(t) for t in (1, 128, 129, 512, 513)] == [8, 8, 4, 4, 2]


def test_ceilings_of_this_machine_are_plausible():
    found = measure_ceilings(CPU, nbytes=1 << 24, size=128)
    assert 1e8 < found.bandwidth < 1e13
    assert 1e8 < found.rate_16 <= found.rate_8 < 1e15
    assert cache_bytes(CPU) >= 0


def test_ceilings_ignore_disturbances(monkeypatch):
    """Seven long operations, each of which waited for other programs, made floors of 187 to 1297 % of the time."""
    seconds = iter(range(10**9))

    def disturbed(call, device):
        call()
        return 1.0 if next(seconds) % 5 else 1e-3  # four of five wait a second for somebody else

    monkeypatch.setattr("collegium.commands.measure.timed_once", disturbed)
    found = measure_ceilings(CPU, nbytes=1 << 28, size=64)
    assert found.bandwidth == pytest.approx(2 * 2**24 / 1e-3)
    assert found.rate_16 == pytest.approx(2 * 64**3 / 1e-3)


def test_cached_weights_have_no_memory_floor(monkeypatch):
    monkeypatch.setattr("collegium.commands.measure.cache_bytes", lambda _: 1 << 20)
    assert stays_cached(4 << 20, CPU)
    assert not stays_cached((4 << 20) + 1, CPU)
    rows = [routing([[0, 1]])]
    assert floor_of(spec(), "bf16", rows, CEILINGS).bound == "memory"
    kept = floor_of(spec(), "bf16", rows, CEILINGS, cached=True)
    assert (kept.bound, kept.seconds) == ("math", kept.flops / CEILINGS.rate_16)
    # 64 x 32 x 3 weights of six experts are 74 KB in BF16: four times that is the least cache they leave.
    for held, cold in ((1 << 14, True), (1 << 15, False)):
        monkeypatch.setattr("collegium.commands.measure.cache_bytes", lambda _, held=held: held)
        made = {"ceilings": CEILINGS, "device": "cpu", "rounds": 1}
        (row,) = bench("64x32x6x2", [("bf16", "bf16")], tokens=(8,), **made).rows
        assert (row.cold, row.bound) == ((True, "memory") if cold else (False, "math"))
    monkeypatch.setattr("collegium.commands.measure.cache_bytes", lambda _: 0)
    assert stays_cached(1 << 28, CPU), "a machine that hides its caches is taken to have large ones"


def test_the_caches_of_all_cores_count():
    """A processor of several dies has a cache on each, and a layer's weights lie in all of them."""
    one = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if not one.exists():
        pytest.skip("this machine hides its caches")
    assert cache_bytes(CPU) >= int(one.read_text().strip().rstrip("K")) * 1024


@pytest.mark.parametrize(
    ("what", "recipe", "tokens"),
    [
        ("64x32x6x2", ("bf16", "bf16"), (1, 64)),
        ("1024x512x8x2", ("mxfp4", "bf16"), (1, 32)),
        pytest.param("1024x1024x48x4", ("bf16", "bf16"), (1, 16, 256), marks=pytest.mark.exhaustive),
    ],
)
def test_layers_are_not_below_floor(what, recipe, tokens):
    report = bench(what, [recipe], tokens=tokens, device="cpu", rounds=3)
    assert all(row.of_floor < 1.1 for row in report.rows), [(r.tokens, r.of_floor, r.bound) for r in report.rows]


@pytest.mark.parametrize("weights", ["bf16", "mxfp4", "nvfp4"])
def test_reference_agrees_with_hand_written_truth(weights):
    own = spec(weights=weights)
    made = random_weights(own, CPU)
    problem = Problem(spec=own, device=DeviceFacts(kind="cpu"))
    case = (torch.randn(5, 64, generator=generator()).bfloat16(), random_routing(5, own, "uniform", generator()))
    upper, lower = (torch.stack([m[e].decode() for e in range(6)]) for m in (made.gate_up, made.down))
    ids, weight = case[1].topk_ids, case[1].topk_weights
    truth = moe_truth(case[0], upper, lower, ids, weight, own.activation)
    assert experts_error(truth, problem, made, case) < 1e-5
    wrong = moe_truth(case[0], upper.flip(1), lower, ids, weight, own.activation)
    assert experts_error(wrong, problem, made, case) > 0.3
    assert experts_error(truth.index_fill(0, torch.tensor([3]), float("nan")), problem, made, case) == float("inf")
    assert relative_error(wrong, truth) > 0.3


def test_inputs_differ_from_weight_rows(monkeypatch):
    """One seed for both once made a row of gate equal to the first input, and one product larger than all others."""
    seen: list[float] = []

    def gate(what, layer, weights, case):
        x, rows = case[0].float(), weights.gate_up.decode().float().flatten(0, 2)
        seen.append(float(torch.nn.functional.cosine_similarity(rows, x[:1]).abs().max()))
        return 0.0

    monkeypatch.setattr("collegium.commands.bench.check_output", gate)
    bench("256x64x4x2", [("bf16", "bf16")], tokens=(1, 8), rounds=1, device="cpu")
    assert len(seen) == 2
    assert max(seen) < 0.5


def test_random_experts_differ_and_match_spec():
    own = replace(spec("64x32x9x2", "nvfp4"), expert_bias=True)
    made = random_weights(own, CPU)
    assert made.gate_up.shape == (9, 2, 32, 64)
    assert made.down.shape == (9, 64, 32)
    assert made.gate_up_bias is not None
    assert made.gate_up_bias.shape == (9, 2, 32)
    decoded = [made.down[e].decode() for e in range(9)]
    assert all(not torch.equal(decoded[0], other) for other in decoded[1:7])
    assert torch.equal(decoded[0], decoded[7])
    # gate and up share NVFP4's global scale, which some peers need
    scales = made.gate_up.global_scale
    assert torch.equal(scales[:, 0], scales[:, 1])


def test_specs_from_names_sizes_and_configs():
    assert named_layer("dsv3")[1].num_experts == 256
    name, found = named_layer("64x32x6x2")
    assert (name, found.hidden_size, found.intermediate_size) == ("64x32x6x2", 64, 32)
    assert (found.num_experts, found.routing.top_k) == (6, 2)
    config = json.loads((SHIPPED / "config.json").read_text())
    name, found = named_layer(str(SHIPPED))
    assert name == "fables-16m"
    assert found.num_experts == config["num_experts"]
    assert found.shared is None


@pytest.mark.parametrize("what", ["dsv5", "64x32x6", "64x32x6x2x1", "64xwidex6x2", "0x32x6x2", "64x32x6x7"])
def test_meaningless_shape_refused(what):
    with pytest.raises((InputError, SpecError)):
        named_layer(what)


def test_folder_without_config_refused(tmp_path):
    with raises_with(ConfigError, "config.json"):
        named_layer(str(tmp_path))


def arguments(*more: str) -> list[str]:
    return ["bench", "64x32x6x2", "--tokens", "1,5", "--device", "cpu", "--ceilings", "0.01,0.1,0.2", *more]


RECIPES = (("bf16", "bf16"), ("nvfp4", "nvfp4"), ("int4_group", "fp16"))


def test_reports_all_recipes_and_token_counts():
    result = RUNNER.invoke(
        cli.app, [*arguments(), "--format", "bf16", "--format", "nvfp4:nvfp4", "--format", "int4_group:fp16", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ceilings"] == {"bandwidth": 0.01e12, "rate_16": 0.1e12, "rate_8": 0.2e12}
    rows = {(r["weights"], r["activations"], r["tokens"]): r for r in found["rows"]}
    assert set(rows) == {(w, a, t) for w, a in RECIPES for t in (1, 5)}
    one = rows["bf16", "bf16", 1]
    assert one["experts_hit"] == 2
    # Weights so small stay in the cache: no time follows from their bytes.
    assert one["floor_seconds"] == pytest.approx(2 * 2 * 3 * 64 * 32 / 0.1e12)
    assert one["bound"] == "math"
    assert one["of_floor"] == pytest.approx(one["floor_seconds"] / one["seconds"])
    assert one["error"] < TOLERANCES[16]
    # Tokens are fp16 too.
    assert rows["int4_group", "fp16", 5]["kernel"] == ("cpu_grouped" if missing_requirement() else "cpu_fused")
    assert 0.01 < rows["nvfp4", "nvfp4", 5]["error"] < TOLERANCES[4]
    assert not one["cold"]


def test_the_table_says_what_was_measured():
    result = RUNNER.invoke(cli.app, arguments("--routing", "hot"), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for word in ("bf16 x bf16", "cpu_grouped", "hot routing", "of floor", "0.01 TB/s", "may be in a cache"):
        assert word in result.output


def test_a_wrong_layer_gets_no_time(monkeypatch, capsys):
    right = cpu_grouped.fast_activate
    monkeypatch.setattr(
        cpu_grouped, "fast_activate", lambda inner, kind: right(torch.cat(inner.chunk(2, -1)[::-1], -1), kind)
    )
    with pytest.raises(MeasurementError, match="against FP32"):
        bench("64x32x6x2", [("bf16", "bf16")], tokens=(1, 5), ceilings=CEILINGS, device="cpu", rounds=1)
    monkeypatch.setattr("sys.argv", ["collegium", *arguments()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 1
    assert said.out == ""
    assert "MeasurementError" in said.err


@pytest.mark.parametrize("text", ["1,x", "0", "-3", ""])
def test_token_counts_are_positive_numbers(text, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["collegium", "bench", "64x32x6x2", "--tokens", text])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--tokens" in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report = bench(
        "64x32x6x2", [("bf16", "bf16"), ("mxfp4", "bf16")], tokens=(1, 5), ceilings=CEILINGS, device="cpu", rounds=1
    )
    save_picture(str(tmp_path / "bench.png"), draw_bench, report)
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
