"""Load traces: recorded from a real model, kept in a file, simulated, drawn; and the commands that do it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

pytest.importorskip("transformers")

from collegium.balance import LoadTrace, balancedness, policy_named
from collegium.balance.simulate import simulate
from collegium.errors import InputError
from collegium.integrations.transformers import load_model, recording
from commands import command
from raising import raises_with
from tracked import ROOT

SHIPPED, TRACE = ROOT / "demo" / "fables-16m", ROOT / "benchmarks" / "traces" / "fables-16m.safetensors"


def made(counts, **more) -> LoadTrace:
    counts = np.array(counts, dtype=np.int64)
    names = tuple(f"layer {n}" for n in range(counts.shape[1]))
    return LoadTrace(
        **{"counts": counts, "model": "m", "layers": names, "top_k": 1, "groups": 1, "expert_bytes": 10} | more
    )


def skewed(steps=6, layers=3, experts=8, seed=0) -> LoadTrace:
    rng = np.random.default_rng(seed)
    return made(np.floor(rng.pareto(1.0, (1, layers, experts)) * 100 * rng.uniform(0.7, 1.3, (steps, layers, experts))))


@pytest.fixture(scope="module")
def model():
    return load_model(str(SHIPPED), device="cpu")


def chosen(model, ids):
    """What the routers choose, computed from what they read, without the experts."""
    found = {}

    def seen(index, module, inputs):
        logits = torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), module.weight).float()
        found[index] = torch.bincount(logits.topk(4, -1).indices.reshape(-1), minlength=16).tolist()

    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_pre_hook(lambda m, i, n=n: seen(n, m, i)) for n, gate in enumerate(gates)]
    with torch.inference_mode():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [found[n] for n in range(len(gates))]


def test_recorded_counts_match_router_choices(model):
    torch.manual_seed(0)
    batches = [torch.randint(0, 4096, shape) for shape in ((1, 33), (3, 7), (1, 1))]
    with recording(model) as found, torch.inference_mode():
        before = [model(ids, use_cache=False).logits for ids in batches]
    trace = found.trace("fables")
    assert trace.counts.tolist() == [chosen(model, ids) for ids in batches]
    assert trace.counts.sum(axis=2).tolist() == [[4 * ids.numel()] * 6 for ids in batches]
    assert (trace.layers[5], trace.top_k, trace.groups) == ("layer 5", 4, 1)
    assert trace.expert_bytes == 3 * 256 * 192 * 2
    with torch.inference_mode():
        assert all(torch.equal(model(ids, use_cache=False).logits, b) for ids, b in zip(batches, before, strict=True))
    assert found.trace("fables").counts.shape[0] == 3, "it counts after it ended"


def test_incomplete_passes_refused(model):
    with recording(model) as found:
        pass
    with pytest.raises(InputError, match="0 of 0 passes"):
        found.trace("m")
    found.add(0, torch.tensor([[1, 2]]))
    found.add(0, torch.tensor([[1, -1]]))
    with raises_with(InputError, "2 of 2", "6 layers"):
        found.trace("m")
    with raises_with(InputError, "0 layers"), recording(torch.nn.Linear(2, 2)):
        pass


def test_trace_round_trips_through_file(tmp_path):
    trace = skewed()
    trace.save(tmp_path / "load")
    trace.save(tmp_path / "again")
    found = LoadTrace.open(tmp_path / "load")
    assert np.array_equal(found.counts, trace.counts)
    assert (found.model, found.layers, found.top_k) == (trace.model, trace.layers, trace.top_k)
    assert (tmp_path / "load").read_bytes() == (tmp_path / "again").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "load"]


def rewritten(path: Path, **more: object) -> None:
    (kind,) = ["collegium load trace 1"]
    said = {"model": "m", "layers": ["a", "b", "c"], "top_k": 1, "groups": 1, "expert_bytes": 10} | more
    save_file(load_file(path), path, metadata={kind: json.dumps(said)})


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: f.unlink(), "no such file"),
        (lambda f: f.write_bytes(f.read_bytes()[:-7]), "cannot be read"),
        (lambda f: f.write_bytes(b"PK\x03\x04" * 99), "cannot be read"),
        (lambda f: f.write_bytes(b""), "cannot be read"),
        (lambda f: shutil.copy(SHIPPED / "model.safetensors", f), "needed are 'collegium load trace 1'"),
        (lambda f: save_file({"counts": np.zeros((1, 1, 1))}, f), "needed are 'collegium load trace 1'"),
        (lambda f: rewritten(f, top_k=9), "top-9"),
        (lambda f: rewritten(f, groups=3), "3 groups"),
        (lambda f: rewritten(f, groups=0), "0 groups"),
        (lambda f: rewritten(f, expert_bytes=-1), "-1 bytes"),
        (lambda f: rewritten(f, expert_bytes=None), "cannot be read"),
        (lambda f: rewritten(f, layers=["a"]), "1 names of layers"),
        (lambda f: rewritten(f, layers=7), "cannot be read"),
    ],
)
def test_damaged_trace_gives_clear_error(damage, text, tmp_path):
    file = tmp_path / "load"
    skewed().save(file)
    damage(file)
    with raises_with(InputError, "collegium balance record") as error:
        LoadTrace.open(file)
    assert text in str(error.value)
    assert str(file) in str(error.value)


def test_flipped_bytes_raise_or_change_counts(tmp_path):
    file, rng = tmp_path / "load", np.random.default_rng(0)
    skewed().save(file)
    whole = bytearray(file.read_bytes())
    for _ in range(300):
        spoiled = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            spoiled[at] = int(rng.integers(256))
        file.write_bytes(spoiled)
        try:
            assert LoadTrace.open(file).counts.min() >= 0
        except InputError:
            continue


@pytest.mark.parametrize(
    ("counts", "more", "text"),
    [
        ([[[1, -1]]], {}, "counts are -1 to 1"),
        ([[[1, 1 << 60]]], {}, "allowed are 0 to"),
        ([[[1, 1]]], {"counts": np.ones((1, 1, 2))}, "float64"),
        ([[[1, 1]]], {"counts": np.ones((0, 1, 2), dtype=np.int64)}, "none of them 0"),
    ],
)
def test_counts_that_are_none_are_refused(counts, more, text):
    with pytest.raises(InputError, match=text):
        replace(made([[[1, 1]]]), **({"counts": np.array(counts)} | more))


def test_simulate_by_hand():
    """Two steps seen, two later. Experts 0 and 1 share rank 0; the policy parts them, and later they are equal."""
    trace = made([[[9, 9, 1, 1]], [[9, 9, 1, 1]], [[4, 6, 6, 4]], [[8, 2, 2, 8]]])
    (row,) = simulate(trace, ((0, 1), (2, 3)), [0]).rows
    assert (row.fitted.before, row.fitted.after, row.fitted.saved) == (10 / 18, 1.0, 1 - 10 / 18)
    assert (row.later.before, row.later.before_worst) == (1.0, 1.0)
    (own,) = [policy_named("greedy").place([18, 18, 2, 2], ((0, 1), (2, 3)))]
    assert row.later.after == balancedness(trace.counts[2:, 0], own)
    assert row.later.saved <= 0, "what was right for the steps before costs in these, and is shown"
    assert (row.moved_experts, row.moved_bytes, row.slots) == (2, 20, 2)


def test_replicas_help_a_load_that_stays():
    trace = skewed()
    rows = simulate(trace, tuple(map(tuple, np.arange(8).reshape(4, 2).tolist())), [0, 4, 24]).rows
    assert [row.slots for row in rows] == [2, 3, 8]
    assert rows[0].later.after < rows[1].later.after < rows[2].later.after == pytest.approx(1.0)
    assert all(row.fitted.after >= row.fitted.before for row in rows)
    # Every expert that is asked is on every rank; one that nobody asks needs no copy.
    asked = int((trace.counts[:3].sum(axis=0) > 0).sum())
    assert 3 * asked <= rows[2].moved_experts <= 3 * asked + (24 - asked) < 3 * 24
    with raises_with(InputError, "25", "8", "4"):
        simulate(trace, ((0, 1), (2, 3), (4, 5), (6, 7)), [25])
    with pytest.raises(InputError, match="has 1 step"):
        simulate(skewed(steps=1), ((0, 1, 2, 3), (4, 5, 6, 7)), [0])


def test_the_commands_record_simulate_and_draw(tmp_path):
    pytest.importorskip("matplotlib")
    words = ("balance", "record", SHIPPED, "--tokens", "64", "--steps", "4", "--device", "cpu", "--json")
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        code, out, _ = command(*words, "--out", file)
        assert code == 0
        assert (json.loads(out)["steps"], json.loads(out)["assignments"]) == (4, 4 * 6 * 64 * 4)
    assert files[0].read_bytes() == files[1].read_bytes()
    for policy in ("greedy", "least_moves"):
        asked = ("balance", "simulate", files[0], "--ranks", "3", "--replicas", "0,8,32", "--policy", policy)
        code, out, _ = command(*asked, "--picture", tmp_path / "s.png", "--json")
        rows = json.loads(out)["rows"]
        assert code == 0
        assert [row["replicas"] for row in rows] == [0, 8, 32]
        assert all(row["fitted"]["after"] >= row["fitted"]["before"] - 0.1 for row in rows)
        assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    for trace in files:
        code, out, _ = command("balance", "heatmap", trace, "--out", tmp_path / "h.png")
        assert code == 0
        assert "layer 5" in out
        assert (tmp_path / "h.png").stat().st_size > 5000


def test_committed_trace_matches_shipped_model(model):
    """Its first steps are computed again; another processor may round a router's score to the other side."""
    from collegium.commands.generate import Writer

    kept = LoadTrace.open(TRACE)
    ids = Writer(model, SHIPPED).encode((SHIPPED / "heldout.txt").read_text(encoding="utf-8"))[0]
    assert kept.counts.shape == (len(ids) // 256, 6, 16)
    assert (kept.counts.sum(axis=2) == 256 * 4).all()
    with recording(model) as found, torch.inference_mode():
        for start in (0, 256):
            model(ids[None, start : start + 256], use_cache=False)
    assert abs(found.trace("m").counts - kept.counts[:2]).sum() <= 0.02 * kept.counts[:2].sum()


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (("simulate", "absent"), "InputError", "absent: no such file; record it again"),
        (("simulate", TRACE, "--ranks", "17"), "InputError", "allowed are 2 to 16 ranks"),
        (("simulate", TRACE, "--replicas", "49"), "InputError", "allowed are 0 to 48"),
        (("simulate", TRACE, "--replicas", "-1"), "InputError", "at least 0"),
        (("simulate", TRACE, "--replicas", "many"), "InputError", "numbers separated by commas"),
        (("simulate", TRACE, "--policy", "best"), "InputError", "known: greedy, least_moves"),
        (("simulate", TRACE, "--picture", "x.doc"), "InputError", "--picture x.doc"),
        (("simulate", TRACE, "--hosts", "3"), "InputError", "4 ranks were requested on 3 hosts"),
        (("heatmap", TRACE, "--out", "absent/x.png"), "InputError", "the folder absent does not exist"),
        (("heatmap", SHIPPED / "model.safetensors", "--out", "x.png"), "InputError", "collegium load trace 1"),
        (("record", SHIPPED, "--out", "absent/x"), "InputError", "--out absent/x: cannot be written"),
        (("record", SHIPPED, "--out", "x", "--text", "absent"), "InputError", "absent: no such file"),
        (("record", SHIPPED, "--out", "x", "--tokens", "1025"), "InputError", "supports 1024 positions"),
        (("record", "absent", "--out", "x"), "CheckpointError", "absent: no such folder"),
    ],
)
def test_user_errors_are_single_messages(words, kind, text, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, out, said = command("balance", *words)
    assert (code, out) == (1, "")
    assert said.startswith(kind), said
    assert text in said
    assert list(tmp_path.iterdir()) == []


def test_short_texts_are_refused(tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("Once upon a time")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for name, text in (("short.txt", "smaller --tokens"), ("bytes.txt", "as UTF-8 text")):
        asked = ("balance", "record", SHIPPED, "--out", tmp_path / "x", "--text", tmp_path / name, "--device", "cpu")
        code, _, said = command(*asked)
        assert code == 1
        assert text in said
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, said = command("balance", "heatmap", TRACE, "--out", tmp_path / "x.png")
    assert (code, "pip install 'collegium[plot]'" in said) == (1, True)
