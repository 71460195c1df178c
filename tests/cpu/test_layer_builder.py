"""Layers built and updated as a serving engine does it: one tensor at a time, by parameter, shard and global expert."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collegium import (
    DeviceFacts,
    LayerBuilder,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    Problem,
    Ranks,
    RoutingSpec,
    SharedSpec,
    WeightUpdater,
    load_layer,
    plan,
    weight_updater,
    weights_checksum,
)
from collegium.checkpoint import Checkpoint, CheckpointLayer, StoredFormat, load_experts
from collegium.dummy.weights import random_latent, random_router, random_weights
from collegium.errors import (
    BadScaleError,
    ConfigError,
    DuplicateTensorError,
    InputError,
    MissingTensorError,
    PlanError,
    TensorMismatchError,
    UnknownTensorError,
)
from collegium.experts import KERNELS
from collegium.formats import FORMATS, Gguf
from collegium.formats.gguf import KINDS as GGUF_KINDS
from collegium.parallel.placement import tensor_parallel
from collegium.runtime import checksum
from collegium.runtime.checksum import tensor_checksum, tensor_checksums
from collegium.types import ActivationSpec
from collegium.weight_updater import experts_between
from integers import random_blocks
from quantised_layers import BASE, SHARED, D, E, K, write
from quantised_matrices import KINDS
from raising import assert_values, raises_with
from ranks import error_of, run_ranks
from toys import TinySize, combinations, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

SIZE = TinySize(hidden=128, intermediate=96, experts=4)
SHARD_OF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
EXPERTS, HIDDEN, WIDTH = 5, 64, 32
ROWS = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w13": (2 * WIDTH, HIDDEN)}
Item = tuple[str, "Tensor", Any, "int | None"]


def stored_bytes(layer: MoELayer) -> list[Tensor]:
    """Return the bytes of everything that a layer packed."""
    packed = [*layer.experts.slots()]
    if layer.shared is not None:
        packed += [*layer.shared.experts.slots(), *([] if layer.shared.gate is None else [layer.shared.gate])]
    for owner, names in ((layer.router, ("weight", "bias", "correction_bias")), (layer.latent, ("down", "up", "norm"))):
        packed += [getattr(owner, name) for name in names if getattr(owner, name, None) is not None]
    return [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in packed]


def addresses(layer: MoELayer) -> list[int]:
    packed = [*layer.experts.slots(), *(() if layer.shared is None else layer.shared.experts.slots())]
    router = [] if layer.router is None else [layer.router.weight]
    return [tensor.data_ptr() for tensor in (*packed, *router)]


def same(one: MoELayer, other: MoELayer) -> bool:
    first, second = stored_bytes(one), stored_bytes(other)
    x = torch.randn(9, one.spec.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16()
    alike = len(first) == len(second) and all(map(torch.equal, first, second))
    return alike and (one.router is None or torch.equal(one(x), other(x)))


def spec_of(weight_format: str = "bf16", **more: Any) -> MoESpec:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_experts": EXPERTS}
    return MoESpec(**sizes | more, routing=RoutingSpec(top_k=2), weight_format=weight_format)


def random_items(seed: int = 0, *, fused: bool = False) -> list[Item]:
    """Return the tensors of ``spec_of()`` as an engine passes them: (parameter, tensor, shard, expert)."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    items: list[Item] = [("router.weight", matrix(EXPERTS, HIDDEN).float(), None, None)]
    for expert in range(EXPERTS):
        gate, up, down = matrix(*ROWS["w1"]), matrix(*ROWS["w3"]), matrix(*ROWS["w2"])
        upper: list[Item] = [("weight", gate, "w1", expert), ("weight", up, "w3", expert)]
        items += [("weight", torch.cat((gate, up)), "w13", expert)] if fused else upper
        items.append(("weight", down, "w2", expert))
    return items


def load_into(builder: LayerBuilder | WeightUpdater, items: list[Item]) -> list[bool]:
    return [builder.load(name, tensor, shard=shard, expert=expert) for name, tensor, shard, expert in items]


def checksums_of(items: list[Item]) -> dict[Any, int]:
    return {(name, shard, expert): int(tensor_checksum(tensor)) % (1 << 64) for name, tensor, shard, expert in items}


def built(items: list[Item], spec: MoESpec | None = None, **options: Any) -> MoELayer:
    builder = LayerBuilder(spec or spec_of(), device="cpu", **options)
    load_into(builder, items)
    return builder.finish()


def engine_items(checkpoint: Checkpoint) -> Iterator[Item]:
    """Yield the tensors of the Qwen2-MoE layer of ``quantised_layers`` as an engine's loader sorts them."""
    for name in checkpoint.tensors:
        tensor, path = checkpoint.read(name), name.removeprefix(BASE)
        if path == "gate.weight":
            yield "router.weight", tensor, None, None
        elif path == "shared_expert_gate.weight":
            yield "shared.gate", tensor, None, None
        elif path.startswith("shared_expert."):
            _, projection, suffix = path.split(".", 2)
            yield f"shared.{suffix}", tensor, SHARD_OF[projection], None
        else:
            _, expert, projection, suffix = path.split(".", 3)
            yield suffix, tensor, SHARD_OF[projection], int(expert)


@pytest.mark.parametrize("name", list(KINDS))
def test_single_tensors_equal_loaded_files(tmp_path: Path, name: str) -> None:
    write(tmp_path, KINDS[name], lambda path: ".experts." in path or "shared_expert." in path)
    checkpoint = Checkpoint.open(tmp_path)
    view, wanted = CheckpointLayer.open(checkpoint, 0), load_layer(checkpoint, 0, device="cpu")
    spec = replace(view.spec, shared=SharedSpec(intermediate_size=SHARED, gated=True))
    builder = LayerBuilder(spec, device="cpu", stored=view.stored, shared_stored=view.stored)
    for item in sorted(engine_items(checkpoint), key=lambda item: str(hash((item[0], item[2], item[3])))):
        assert builder.load(item[0], item[1], shard=item[2], expert=item[3])
    layer = builder.finish()
    assert same(layer, wanted)
    assert (layer.spec.num_experts, layer.spec.routing.top_k, layer.spec.hidden_size) == (E, K, D)
    # Zeros everywhere, then the same tensors again, in place.
    before = addresses(layer)
    for tensor in (*layer.experts.slots(), *([] if layer.shared is None else layer.shared.experts.slots())):
        tensor.zero_()
    updater = WeightUpdater(layer, stored=view.stored, shared_stored=view.stored)
    new = list(engine_items(checkpoint))
    load_into(updater, new)
    report = updater.finish()
    assert same(layer, wanted)
    assert addresses(layer) == before
    assert report.checksums == checksums_of(new)


@pytest.mark.each_choice
@pytest.mark.parametrize(("family", "name", "storage", "stacked"), combinations())
def test_family_names_map_by_default(tmp_path: Path, family: str, name: str, storage: str, stacked: bool) -> None:
    size = replace(SIZE, intermediate=128) if name == "fp8_block" else SIZE
    tiny = write_checkpoint(tmp_path / "old", family, name, storage, size=size, stacked=stacked)
    new = write_checkpoint(tmp_path / "new", family, name, storage, size=size, stacked=stacked, seed=3)
    number = max(tiny.experts)
    builder = LayerBuilder.from_config(tiny.config, number, device="cpu")
    summary = builder.load_all(reversed(tiny.tensors.items()))
    assert all(".layers.0." in other or "embed_tokens" in other for other in summary.ignored)
    layer = builder.finish()
    files = load_layer(tmp_path / "old", number, device="cpu")
    assert same(layer, files)
    assert layer.layer_id == files.layer_id == number
    before = addresses(layer)
    updater = WeightUpdater.from_config(layer, tiny.config, number)
    updater.load_all(new.tensors.items())
    report = updater.finish()
    assert report.experts == SIZE.experts
    assert same(layer, load_layer(tmp_path / "new", number, device="cpu"))
    assert addresses(layer) == before


@pytest.mark.parametrize("kind", list(GGUF_KINDS))
def test_gguf_blocks_load_by_matrix(kind: str) -> None:
    spec = MoESpec(
        hidden_size=256, intermediate_size=256, num_experts=3, routing=RoutingSpec(top_k=2), weight_format="gguf"
    )
    blocks = random_blocks(kind, 3, 3, 256, 256).blocks
    # Kinds with blocks of the same size are told apart by the storage.
    alike = kind in [storage.name for storage in Gguf.storages]
    stored = StoredFormat(name="gguf", storage=kind) if alike else None
    builder = LayerBuilder(spec, device="cpu", router=False, overrides=Overrides(kernel="reference"), stored=stored)
    for expert in range(3):
        for part, shard in enumerate(("w1", "w3", "w2")):
            builder.load("weight", blocks[expert, part], shard=shard, expert=expert)
    weights: Any = builder.finish().experts
    assert torch.equal(weights.weights.gate_up.blocks, blocks[:, :2])
    assert torch.equal(weights.weights.down.blocks, blocks[:, 2])
    assert weights.weights.gate_up.kind.title == weights.weights.down.kind.title == kind


def test_fused_and_stacked_tensors_match() -> None:
    items = random_items()
    wanted = built(items)
    assert same(built(random_items(fused=True)), wanted)
    by_shard = {
        shard: torch.stack([tensor for _, tensor, which, _ in items if which == shard]) for shard in ("w1", "w3", "w2")
    }
    stacks = [items[0], *(("weight", stack, shard, None) for shard, stack in by_shard.items())]
    assert same(built(stacks), wanted)
    both = ("weight", torch.cat((by_shard["w1"], by_shard["w3"]), 1), "w13", None)
    assert same(built([items[0], both, stacks[-1]]), wanted)
    # An expert is not another one, and gate is not up.
    swapped = [(n, t, {"w1": "w3", "w3": "w1"}.get(s, s), e) for n, t, s, e in items]
    assert not same(built(swapped), wanted)
    moved = [(n, t, s, e if e is None else (e + 1) % EXPERTS) for n, t, s, e in items]
    assert not same(built(moved), wanted)


def test_loaded_tensors_are_copied() -> None:
    items = random_items()
    wanted = built(items)
    builder = LayerBuilder(spec_of(), device="cpu")
    for name, tensor, shard, expert in items:
        bucket = tensor.clone()
        builder.load(name, torch.nn.Parameter(bucket), shard=shard, expert=expert)
        bucket.fill_(7)
    assert same(builder.finish(), wanted)


def test_ungated_experts_reject_w3() -> None:
    spec = spec_of(activation=ActivationSpec(kind="relu2"), expert_bias=True)
    builder = LayerBuilder(spec, device="cpu", router=False, overrides=Overrides(kernel="reference"))
    weights = random_weights(spec, torch.device("cpu"))
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    with raises_with(InputError, "'w3'", "w1, w2"):
        builder.load("weight", torch.zeros(WIDTH, HIDDEN), shard="w3", expert=0)
    for expert in range(EXPERTS):
        builder.load("weight", weights.gate_up[expert].tensors()["values"][0], shard="w1", expert=expert)
        builder.load("weight", weights.down[expert].tensors()["values"], shard="w2", expert=expert)
        builder.load("bias", weights.gate_up_bias[expert, 0], shard="w1", expert=expert)
    with raises_with(MissingTensorError, "bias of expert 0, w2", "bias of expert 4, w2"):
        builder.finish()
    builder.load("bias", weights.down_bias, shard="w2")
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"))
    wanted = MoELayer(weights, plan(problem, Overrides(kernel="reference")))
    assert same(builder.finish(), wanted)


@pytest.mark.parametrize(
    ("family", "name", "storage"),
    [
        ("mixtral", "mxfp4", "modelopt"),
        ("mixtral", "nvfp4", "compressed-tensors"),
        ("mixtral", "fp8_block", "modelopt"),
        ("mixtral", "int4_group", "modelopt"),
        ("gpt_oss", "mxfp4", "gpt-oss"),
    ],
)
def test_slices_match_files_with_padding(tmp_path: Path, family: str, name: str, storage: str) -> None:
    size = TinySize(hidden=128, intermediate=384 if name == "int4_group" else 352, experts=2, top_k=1, layers=1)
    tiny = write_checkpoint(tmp_path, family, name, storage, size=size)
    view = CheckpointLayer.open(Checkpoint.open(tmp_path), 0)
    for rank in range(3):
        placement = tensor_parallel(2, rank, 3)
        builder = LayerBuilder.from_config(
            tiny.config,
            0,
            device="cpu",
            placement=placement,
            overrides=Overrides(dispatcher="partial", kernel="reference"),
        )
        builder.load_all(tiny.tensors.items())
        found, wanted = builder.finish().experts, load_experts(view, placement, pad=True)
        held: Any = found
        for one, other in ((held.weights.gate_up, wanted.gate_up), (held.weights.down, wanted.down)):
            assert one.shape == other.shape
            for tensor, expected in zip(one.tensors().values(), other.tensors().values(), strict=True):
                assert torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        for bias in ("gate_up_bias", "down_bias"):
            both = getattr(held.weights, bias), getattr(wanted, bias)
            assert both == (None, None) or torch.equal(*both)


def test_static_scales_count_for_all_experts(tmp_path: Path) -> None:
    force = Overrides(activation_format="nvfp4_static", unequal_scales="largest")
    tiny = write_checkpoint(tmp_path, "mixtral", "nvfp4", "modelopt", size=SIZE)
    for number, name in enumerate(n for n in tiny.tensors if n.endswith(".input_scale")):
        tiny.tensors[name] = torch.tensor(0.01 * (1 + number % 7))
    from safetensors.torch import save_file

    save_file({n: t.contiguous().clone() for n, t in tiny.tensors.items()}, tmp_path / "model.safetensors")
    wanted = load_layer(tmp_path, 1, device="cpu", overrides=force)
    whole = LayerBuilder.from_config(tiny.config, 1, device="cpu", overrides=force)
    whole.load_all(tiny.tensors.items())
    layer = whole.finish()
    assert layer.experts.input_reach == wanted.experts.input_reach
    strict = LayerBuilder.from_config(tiny.config, 1, device="cpu", overrides=replace(force, unequal_scales=None))
    strict.load_all(tiny.tensors.items())
    with raises_with(BadScaleError, "expert 0, w3", "w1", "unequal_scales='largest'"):
        strict.finish()
    one = LayerBuilder.from_config(
        tiny.config,
        1,
        device="cpu",
        placement=Placement(expert_ids=(2,)),
        overrides=replace(force, dispatcher="partial"),
    )
    one.load_all(tiny.tensors.items())
    assert one.finish().experts.input_reach == wanted.experts.input_reach
    updater = WeightUpdater.from_config(layer, tiny.config, 1)
    larger = {n: t * 2 if n.endswith(".input_scale") else t for n, t in tiny.tensors.items()}
    updater.load_all(larger.items())
    before = stored_bytes(layer)
    with raises_with(InputError, layer.experts.input_reach):
        updater.finish()
    assert all(map(torch.equal, stored_bytes(layer), before))
    lacking = LayerBuilder.from_config(tiny.config, 1, device="cpu", overrides=force)
    lacking.load_all((n, t) for n, t in tiny.tensors.items() if not n.endswith("experts.2.w2.input_scale"))
    with raises_with(MissingTensorError, "expert 2, w2"):
        lacking.finish()


Refusal = tuple[tuple[str, tuple[int, ...], Any, Any], tuple[object, ...], type[Exception]]
UP, TURNED, ROUTER = (WIDTH, HIDDEN), (HIDDEN, WIDTH), (EXPERTS, HIDDEN)
REFUSED: dict[str, Refusal] = {
    "an unknown parameter": (("values", UP, "w1", 0), ("'values'", "weight"), InputError),
    "a scale of BF16 weights": (("weight_scale", (1,), "w1", 0), ("weight_scale", "bf16"), InputError),
    "an unknown shard": (("weight", UP, "gate", 0), ("'gate'", "w1, w3, w13, w2"), InputError),
    "no shard": (("weight", UP, None, 0), ("None", "w13"), InputError),
    "an expert too far": (("weight", UP, "w1", EXPERTS), (f"expert={EXPERTS}", "0 to 4"), InputError),
    "a negative expert": (("weight", UP, "w1", -1), ("expert=-1", "0 to 4"), InputError),
    "a boolean expert": (("weight", UP, "w1", True), ("expert=True", "0 to 4"), InputError),
    "a transposed matrix": (("weight", TURNED, "w1", 0), (TURNED, UP), TensorMismatchError),
    "a foreign expert's transposed matrix": (("weight", TURNED, "w1", 2), (TURNED, UP), TensorMismatchError),
    "gate alone as both": (("weight", UP, "w13", 0), ((2 * WIDTH, HIDDEN),), TensorMismatchError),
    "a short stack": (("weight", (4, *UP), "w1", None), ((5, *UP),), TensorMismatchError),
    "another router": (("router.weight", (4, HIDDEN), None, None), ([4, HIDDEN], [5, HIDDEN]), TensorMismatchError),
    "a router's shard": (("router.weight", ROUTER, "w1", None), ("w1", "router.weight"), InputError),
    "a router's expert": (("router.weight", ROUTER, None, 1), ("expert=1", "router.weight"), InputError),
    "a bias that no expert has": (("bias", (WIDTH,), "w1", 0), ("'bias'", "weight"), InputError),
    "an absent shared expert": (("shared.weight", UP, "w1", None), ("shared.weight",), InputError),
    "an absent correction": (("router.correction_bias", (5,), None, None), ("router.bias",), InputError),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_mismatched_tensor_refused_by_load(case: str) -> None:
    (name, shape, shard, expert), values, kind = REFUSED[case]
    builder = LayerBuilder(spec_of(), device="cpu", placement=Placement(expert_ids=(1, 3)))
    with raises_with(kind, *values):
        builder.load(name, torch.zeros(shape, dtype=torch.bfloat16), shard=shard, expert=expert)
    assert builder.summary.stored == 0


def test_other_dtypes_and_tensors_are_refused() -> None:
    builder = LayerBuilder(spec_of(), device="cpu")
    shape = ROWS["w1"]
    with raises_with(TensorMismatchError, "F32", "BF16"):
        builder.load("weight", torch.zeros(shape), shard="w1", expert=0)
    with raises_with(InputError, "meta"):
        builder.load("weight", torch.zeros(shape, dtype=torch.bfloat16, device="meta"), shard="w1", expert=0)
    with raises_with(InputError, "list"):
        builder.load("weight", [1.0], shard="w1", expert=0)  # pyright: ignore[reportArgumentType]
    with raises_with(BadScaleError, "router.weight"):
        builder.load("router.weight", torch.full((EXPERTS, HIDDEN), float("nan")))
    builder.load("weight", torch.zeros(shape, dtype=torch.bfloat16), shard="w1", expert=0)
    with raises_with(DuplicateTensorError, "expert 0, w1", "weight"):
        builder.load("weight", torch.zeros(ROWS["w13"], dtype=torch.bfloat16), shard="w13", expert=0)
    with raises_with(InputError, "int4_group", "group", "gptq"):
        LayerBuilder(spec_of("int4_group"), device="cpu")
    with raises_with(InputError, "weightformat", "weight_format"):
        LayerBuilder(spec_of(), weightformat="mxfp4")  # pyright: ignore[reportCallIssue]
    with raises_with(InputError, "placement"):
        LayerBuilder(spec_of(), device=Ranks(), placement=Placement(expert_ids=(0,)))


def test_scale_dtypes_must_agree() -> None:
    builder = LayerBuilder(spec_of("fp8_channel"), device="cpu")
    builder.load("weight_scale", torch.ones(WIDTH, 1), shard="w1", expert=0)
    with raises_with(TensorMismatchError, "bfloat16", "float32"):
        builder.load("weight_scale", torch.ones(WIDTH, 1, dtype=torch.bfloat16), shard="w1", expert=1)


def test_flat_tensor_refuses_w13() -> None:
    builder = LayerBuilder(spec_of("bnb4"), device="cpu")
    with raises_with(TensorMismatchError, "bnb4", "w1, w3 and w2"):
        builder.load("weight", torch.zeros(WIDTH * HIDDEN, 1, dtype=torch.uint8), shard="w13", expert=0)


def test_tensor_name_selects_storage() -> None:
    builder = LayerBuilder(spec_of("nvfp4"), device="cpu")
    assert {"weight_packed", "weight_scale_2"} <= {*builder.names}
    builder.load("weight_global_scale", torch.ones(1), shard="w1", expert=0)
    assert "weight_scale_2" in builder.names  # of down, which nothing was loaded of
    with raises_with(InputError, "weight_scale_2", "compressed-tensors", "weight_packed"):
        builder.load("weight_scale_2", torch.ones(1), shard="w3", expert=0)


def test_finish_names_missing_and_runs_once() -> None:
    items = random_items()
    builder = LayerBuilder(spec_of(), device="cpu")
    lacking = [item for item in items if item[2:] not in (("w3", 2), ("w2", 4)) and item[0] != "router.weight"]
    load_into(builder, lacking)
    with raises_with(
        MissingTensorError, "weight of expert 2, w3", "weight of expert 4, w2", "router.weight", "13 tensors"
    ):
        builder.finish()
    load_into(builder, [item for item in items if not any(item is other for other in lacking)])
    assert same(builder.finish(), built(items))
    for call in (builder.finish, lambda: load_into(builder, items), lambda: builder.load_all([], [])):
        with raises_with(InputError, "WeightUpdater", "builds one"):
            call()


def test_nan_weights_refused_before_packing() -> None:
    items = random_items()
    items[4][1][3, 5] = float("nan")
    builder = LayerBuilder(spec_of(), device="cpu")
    load_into(builder, items)
    with raises_with(BadScaleError, f"expert {items[4][3]}, {items[4][2]}", "bf16"):
        builder.finish()


def test_foreign_experts_skipped_and_replicas_filled() -> None:
    items = random_items()
    placement = Placement(expert_ids=(3, 1), spare=1)
    builder = LayerBuilder(
        spec_of(), device="cpu", placement=placement, overrides=Overrides(dispatcher="partial", kernel="reference")
    )
    needed = load_into(builder, items)
    assert needed == [expert in (None, 1, 3) for *_, expert in items]
    assert (builder.summary.skipped, builder.summary.skipped_experts) == (9, {0, 2, 4})
    assert_values(str(builder.summary), "9", "3 experts")
    packed: Any = builder.finish().experts
    by_key = {(shard, expert): tensor for _, tensor, shard, expert in items}
    for slot, expert in enumerate((3, 1, 3)):
        assert torch.equal(
            packed.weights.gate_up.values[slot], torch.stack([by_key["w1", expert], by_key["w3", expert]])
        )
        assert torch.equal(packed.weights.down.values[slot], by_key["w2", expert])


def _two_ranks(rank: int) -> Any:
    items = random_items()
    ranks = Ranks.of(replicas=1)
    builder = LayerBuilder(spec_of(), device=ranks, limits=Limits(max_tokens=16))
    skipped = load_into(builder, items).count(False)
    layer = builder.finish()
    x = torch.randn(3 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    alike = torch.equal(layer(x), built(items, limits=Limits(max_tokens=16))(x))
    newer = random_items(9)
    updater = WeightUpdater(layer)
    load_into(updater, newer)
    report = updater.finish()
    updated = torch.equal(layer(x), built(newer, limits=Limits(max_tokens=16))(x))
    # A replica with other weights, and a tensor that one rank lacks.
    other = LayerBuilder(spec_of(), device=ranks, limits=Limits(max_tokens=16))
    load_into(other, [(n, t + rank if e == 0 else t, s, e) for n, t, s, e in items])
    different = error_of(other.finish)
    lacking = LayerBuilder(spec_of(), device=ranks, limits=Limits(max_tokens=16))
    load_into(lacking, [item for item in items if rank == 0 or item[2:] != ("w2", 4)])
    missing = error_of(lacking.finish)
    return layer.plan.problem.local_experts, skipped, alike, report.experts, updated, different, missing


def test_ranks_share_replicas_and_errors() -> None:
    for rank, found in enumerate(run_ranks(_two_ranks, 2)):
        experts, skipped, alike, count, updated, different, missing = found
        assert experts == ((0, 1, 2, 3), (3, 4, 0))[rank]
        assert skipped == 3 * (EXPERTS - len(experts))
        assert alike
        assert count == len(experts)
        assert updated
        assert different.startswith("InputError")
        assert_values(different, "[0, 1]", "expert 0")
        assert missing.startswith("MissingTensorError")
        assert_values(missing, "expert 4", "w2")
        assert ("on rank 1" in missing) == (rank == 0)


def test_mapping_loads_unknown_model() -> None:
    items = random_items()
    names = {"w1": "wide_in", "w3": "wide_gate", "w2": "back"}
    tensors = {f"blocks.7.ff.expert_{e}.{names[s]}.w": t for _, t, s, e in items if s is not None}
    tensors["blocks.7.ff.chooser"] = items[0][1]
    tensors["blocks.7.attention.q.w"] = torch.zeros(3)
    with raises_with(ConfigError, "novel_moe"):
        LayerBuilder.from_config({"model_type": "novel_moe", "num_experts": 5}, 7)
    builder = LayerBuilder(spec_of(), device="cpu")
    with raises_with(InputError, "mapping="):
        builder.load_all(tensors.items())
    with raises_with(InputError, "('weight',)"):
        builder.load_all(tensors.items(), [("weight",)])
    rows: list[tuple[Any, ...]] = [
        ("weight", f"blocks.7.ff.expert_{{expert}}.{name}.w", None, shard) for shard, name in names.items()
    ]
    summary = builder.load_all(tensors.items(), [*rows, ("router.weight", "blocks.7.ff.chooser")])
    assert summary.ignored == ["blocks.7.attention.q.w"]
    assert same(builder.finish(), built(items))
    # One row for each tensor does as well.
    single = LayerBuilder(spec_of(), device="cpu")
    each = [("weight", f"{e}/{s}", e, s) for _, _, s, e in items if s is not None]
    single.load_all(
        ((f"{e}/{s}" if s else "chooser", t) for _, t, s, e in items), [*each, ("router.weight", "chooser")]
    )
    assert same(single.finish(), built(items))


def test_unknown_expert_tensors_refused(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "bf16", size=SIZE)
    builder = LayerBuilder.from_config(tiny.config, 1, device="cpu")
    with raises_with(UnknownTensorError, "experts.0.w9.weight"):
        builder.load_all({"model.layers.1.block_sparse_moe.experts.0.w9.weight": torch.zeros(2)}.items())
    # Wrapped models have other prefixes; other layers are none of its business.
    renamed = {n.replace("model.layers", "model.language_model.layers"): t for n, t in tiny.tensors.items()}
    builder.load_all(renamed.items())
    assert same(builder.finish(), load_layer(tmp_path, 1, device="cpu"))


def test_square_stack_is_transposed_too(tmp_path: Path) -> None:
    square = TinySize(hidden=128, intermediate=64, experts=4)  # gate and up are 128 x 128
    tiny = write_checkpoint(tmp_path, "qwen3_moe", "bf16", "plain", size=square, stacked=True)
    builder = LayerBuilder.from_config(tiny.config, 1, device="cpu")
    builder.load_all(tiny.tensors.items())
    assert same(builder.finish(), load_layer(tmp_path, 1, device="cpu"))
    alone = LayerBuilder.from_config(tiny.config, 1, device="cpu")
    with raises_with(InputError, "gate_up_proj", "mapping="):
        alone.load_all((n, t) for n, t in tiny.tensors.items() if "gate_up_proj" in n)


def test_update_is_atomic() -> None:
    old, new = random_items(1), random_items(2)
    layer = built(old)
    before, where = stored_bytes(layer), addresses(layer)
    updater = WeightUpdater(layer)
    load_into(updater, new[:-1])
    with raises_with(MissingTensorError, "weight of expert 4, w2", "partial=True"):
        updater.finish()
    assert all(map(torch.equal, stored_bytes(layer), before))
    load_into(updater, new[-1:])
    report = updater.finish()
    assert same(layer, built(new))
    assert addresses(layer) == where
    # The updater begins again, and a bad number leaves the layer as it was.
    bad = random_items(3)
    bad[5][1][0, 0] = float("inf")
    load_into(updater, bad)
    with raises_with(BadScaleError, f"expert {bad[5][3]}, {bad[5][2]}"):
        updater.finish()
    assert same(layer, built(new))
    load_into(updater, old)
    assert updater.finish().checksum != report.checksum
    assert same(layer, built(old))


def test_partial_update_skips_whole_experts() -> None:
    old, new = random_items(1), random_items(2)
    layer = built(old)
    updater = WeightUpdater(layer, partial=True)
    chosen = [item for item in new if item[3] in (1, 4)]
    load_into(updater, chosen)
    report = updater.finish()
    assert report.experts == 2
    assert same(layer, built([item if item[3] in (1, 4) else before for item, before in zip(new, old, strict=True)]))
    load_into(updater, [new[0]])
    assert updater.finish().experts == 0
    load_into(updater, [item for item in new if item[3] == 2][:2])
    with raises_with(MissingTensorError, "weight of expert 2, w2"):
        updater.finish()


def test_checksum_detects_change_and_swap() -> None:
    items = random_items(2)
    layer = built(random_items(1))
    updater = WeightUpdater(layer)

    def received(sent: list[Item]) -> int:
        load_into(updater, sent)
        return updater.finish().checksum

    wanted = weights_checksum(items)
    assert received(items) == wanted
    assert received(items[::-1]) == wanted
    flipped = [*items]
    name, tensor, shard, expert = flipped[7]
    changed = tensor.clone()
    changed.view(torch.int16)[3, 4] ^= 1
    flipped[7] = (name, changed, shard, expert)
    assert received(flipped) != wanted
    swapped = [(n, t, {"w1": "w3", "w3": "w1"}.get(s, s), e) for n, t, s, e in items]
    assert received(swapped) != wanted
    assert received(items) == wanted
    load_into(updater, items)
    report = updater.finish()
    assert report.checksums["weight", "w2", 3] == int(tensor_checksum(items[-4][1])) % (1 << 64)
    assert f"{report.checksum:016x}" in str(report)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(expert_ids=(3, 1, 3)),
        Placement(expert_ids=(0, 1, 2, 3, 4), tp_rank=1, tp_size=2),
    ],
    ids=["replicas", "slices"],
)
@pytest.mark.parametrize("fused", [False, True])
def test_checksums_are_those_of_sent_tensors(placement: Placement, fused: bool) -> None:
    options: Any = {"placement": placement, "overrides": Overrides(dispatcher="partial")}
    layer = built(random_items(1, fused=fused)[1:], router=False, **options)
    new = random_items(2, fused=fused)[1:]
    updater = WeightUpdater(layer)
    for name, tensor, shard, expert in new:
        reused = tensor.clone()
        updater.load(name, reused, shard=shard, expert=expert)
        reused.zero_()
    report = updater.finish()
    local = [item for item in new if item[3] in placement.expert_ids]
    assert report.checksums == checksums_of(local)
    assert report.checksum == weights_checksum(local)
    assert same(layer, built(new, router=False, **options))


class _Launches(TorchDispatchMode):
    """The operations that write memory, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_one_copy_for_each_matrix() -> None:
    layer, new = built(random_items(1)), random_items(2)
    updater = WeightUpdater(layer)
    load_into(updater, new[:4])
    launches = _Launches()
    with launches:
        load_into(updater, new[4:])
    assert [name for name in launches.names if "empty" not in name] == ["aten::copy_"] * len(new[4:])
    assert updater.finish().checksum == weights_checksum(new)


def test_default_device_is_ignored() -> None:
    layer, new = built(random_items(1)), random_items(2)
    updater = WeightUpdater(layer)
    with torch.device("meta"), torch.inference_mode():
        load_into(updater, new)
        report = updater.finish()
    assert report.checksum == weights_checksum(new)
    assert same(layer, built(new))


@pytest.mark.parametrize("shape", [(), (1,), (13,), (3, 8), (5, 1001)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("words", [1 << 22, 700])
def test_checksums_of_rows(
    shape: tuple[int, ...], dtype: torch.dtype, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "_CHUNK", words)
    monkeypatch.setattr(checksum, "_factors", {})
    rows = torch.randn(9, *shape).mul(50).to(dtype)
    indices = [7, 0, 3, 3, 8]
    assert tensor_checksums(rows, indices).tolist() == [int(tensor_checksum(rows[index])) for index in indices]


def test_checksum_depends_on_value_and_position() -> None:
    words = torch.arange(1, 40, dtype=torch.int64) * 12345
    whole = int(tensor_checksum(words))
    for place in range(len(words)):
        other = words.clone()
        other[place] ^= 1 << (place % 63)
        assert int(tensor_checksum(other)) != whole
    assert int(tensor_checksum(words.flip(0))) != whole
    odd = torch.arange(13, dtype=torch.uint8)
    assert int(tensor_checksum(odd)) == int(tensor_checksum(odd[:].clone()))
    assert int(tensor_checksum(torch.cat((odd, odd))[13:])) == int(tensor_checksum(odd))
    assert int(tensor_checksum(odd)) != int(tensor_checksum(odd[:-1]))


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "fp8_block"])
def test_bf16_update_is_quantised(weight_format: str) -> None:
    layer = built(random_items(1), weight_format=weight_format)
    updater = WeightUpdater(layer, stored="bf16")
    new = random_items(2)
    load_into(updater, new)
    updater.finish()
    assert same(layer, built(new, weight_format=weight_format))


@pytest.mark.parametrize("count", [1, 2])
def test_large_updates_run_in_batches(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    layer = built(random_items(1), weight_format="mxfp4")
    monkeypatch.setattr(weight_updater, "_BATCH_BYTES", count * layer.plan.expert_bytes)
    updater = WeightUpdater(layer, stored="bf16", partial=True)
    new = random_items(2)
    load_into(updater, new)
    with patch.object(type(layer.experts), "put_all", autospec=True, side_effect=type(layer.experts).put_all) as put:
        assert updater.finish().experts == EXPERTS
    batches = [list(call.args[1]) for call in put.call_args_list]
    assert [len(batch) for batch in batches] == ([1] * 5 if count == 1 else [2, 2, 1])
    assert [slot for batch in batches for slot in batch] == list(range(EXPERTS))
    assert same(layer, built(new, weight_format="mxfp4"))


def test_update_in_other_layout_refused() -> None:
    """compressed-tensors divides by the global scale, ModelOpt multiplies: the reference kernel keeps which."""
    spec = spec_of("nvfp4")
    modelopt, divided = (StoredFormat(name="nvfp4", storage=name) for name in ("modelopt", "compressed-tensors"))
    options: Any = {"device": "cpu", "router": False, "overrides": Overrides(kernel="reference")}
    codes, scales = torch.zeros(WIDTH, HIDDEN // 2, dtype=torch.uint8), torch.ones(WIDTH, HIDDEN // 16)

    def load(builder: Any, weight: str, whole: str) -> None:
        for expert in range(EXPERTS):
            for shard in ("w1", "w3", "w2"):
                turned = shard == "w2"
                builder.load(weight, codes.reshape(HIDDEN, -1) if turned else codes, shard=shard, expert=expert)
                grid = scales.reshape(HIDDEN, -1) if turned else scales
                builder.load("weight_scale", grid.to(torch.float8_e4m3fn), shard=shard, expert=expert)
                builder.load(whole, torch.ones(1), shard=shard, expert=expert)

    builder = LayerBuilder(spec, stored=modelopt, **options)
    load(builder, "weight", "weight_scale_2")
    layer = builder.finish()
    updater = WeightUpdater(layer, stored=divided)
    load(updater, "weight_packed", "weight_global_scale")
    with raises_with(InputError, "global_divides", "True", "False"):
        updater.finish()


def test_router_latent_and_shared_update() -> None:
    spec = replace(
        spec_of(latent_size=48, latent_norm_eps=1e-5, shared=SharedSpec(intermediate_size=40, gated=True)),
        routing=RoutingSpec(top_k=2, score="sigmoid", correction_bias=True),
    )
    device = torch.device("cpu")

    def items(seed: int) -> list[Item]:
        router, latent = random_router(spec, device, seed), random_latent(spec, device, seed)
        assert latent is not None
        found: list[Item] = [
            ("router.weight", router.weight, None, None),
            ("router.scale", torch.linspace(0.5, 1.5 + seed, HIDDEN), None, None),
            ("router.correction_bias", router.correction_bias, None, None),  # pyright: ignore[reportAssignmentType]
            ("latent.down", latent.down, None, None),
            ("latent.up", latent.up, None, None),
            ("latent.norm", latent.norm + seed, None, None),  # pyright: ignore[reportOptionalOperand]
            ("shared.gate", torch.full((HIDDEN,), 0.01 * seed), None, None),
        ]
        for name, part, experts in (("", spec, EXPERTS), ("shared.", spec.shared_alone(), 1)):
            weights = random_weights(part, device, seed)
            for expert in range(experts):
                halves = weights.gate_up[expert].tensors()["values"]
                where = None if name else expert
                found += [(f"{name}weight", half, s, where) for half, s in zip(halves, ("w1", "w3"), strict=True)]
                found.append((f"{name}weight", weights.down[expert].tensors()["values"], "w2", where))
        return found

    layer, wanted = built(items(1), spec), built(items(2), spec)
    before = addresses(layer)
    assert not same(layer, wanted)
    updater = WeightUpdater(layer)
    load_into(updater, items(2))
    updater.finish()
    assert same(layer, wanted)
    weight, scale = (tensor for _, tensor, *_ in items(2)[:2])
    assert torch.allclose(layer.router.weight, weight * scale / HIDDEN**0.5, rtol=1e-6)
    assert addresses(layer) == before
    with raises_with(InputError, "router.bias"):
        updater.load("router.bias", torch.zeros(EXPERTS))


def test_merged_shared_expert_updates() -> None:
    spec = spec_of(shared=SharedSpec(intermediate_size=2 * WIDTH))
    force = Overrides(shared="merged")

    def items(seed: int) -> list[Item]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"w1": (2 * WIDTH, HIDDEN), "w3": (2 * WIDTH, HIDDEN), "w2": (HIDDEN, 2 * WIDTH)}
        dense: list[Item] = [
            ("shared.weight", torch.randn(*shape, generator=generator).bfloat16(), shard, None)
            for shard, shape in shapes.items()
        ]
        return [*random_items(seed), *dense]

    layer = built(items(1), spec, overrides=force)
    assert layer.plan.merged_shared_experts == 2
    updater = WeightUpdater(layer)
    load_into(updater, items(2))
    updater.finish()
    assert same(layer, built(items(2), spec, overrides=force))


@pytest.mark.parametrize("form", [form.name for form in FORMATS])
def test_kernels_pack_batches_like_whole(form: str) -> None:
    hopper = DeviceFacts(kind="cuda", capability=(9, 0), name="H100", sms=132)
    spec = MoESpec(
        hidden_size=256,
        intermediate_size=128,
        num_experts=5,
        routing=RoutingSpec(top_k=2),
        weight_format=form,
        expert_bias=True,
    )
    device = torch.device("cpu")
    old, new = random_weights(spec, device, 1), random_weights(spec, device, 2)
    kernels = 0
    for kernel in KERNELS:
        for activations in ("bf16", "fp8_group128"):
            for facts in (hopper, DeviceFacts(kind="cpu")):
                problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=8))
                try:
                    made = plan(problem, Overrides(kernel=kernel.name, activation_format=activations))
                except PlanError:
                    continue
                routed = made.problem.routed
                wanted = kernel.pack(new, routed)
                packed = wanted.resized(5)
                packed.put_all(range(5), kernel.pack(old, routed))
                for first, last in ((3, 5), (0, 1), (1, 3)):
                    batch = kernel.pack(experts_between(new, first, last), replace(routed, experts=last - first))
                    packed.put_all(range(first, last), batch)
                for one, other in zip(packed.slots(), wanted.slots(), strict=True):
                    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
                kernels += 1
    assert kernels > 1


def test_mixed_format_slots_hold_experts() -> None:
    spec = replace(spec_of("mxfp4"), down_format="bf16")
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), limits=Limits(max_tokens=8))
    made = plan(problem)
    packed = next(k for k in KERNELS if k.name == made.kernel).pack(
        random_weights(spec, torch.device("cpu")), made.problem.routed
    )
    assert {tensor.shape[0] for tensor in packed.slots()} == {EXPERTS}
    packed.put(EXPERTS - 1, packed.take(0))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "deepseek_v3", "fp8_block", size=SIZE)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    layer = load_layer(tmp_path, 1, device="cpu", weights="dummy")
    assert layer.spec.weight_format == "fp8_block"
    assert layer.spec.shared is not None
    assert same(layer, load_layer(tmp_path, 1, device="cpu", weights="dummy"))
    other = load_layer(tmp_path, 1, device="cpu", weights="dummy", weight_format="mxfp4")
    assert other.spec.weight_format == "mxfp4"
    x = torch.randn(7, SIZE.hidden).bfloat16()
    assert bool(torch.isfinite(other(x)).all())
    assert bool((layer(x) != 0).any())
    built_layer = LayerBuilder.from_config(tiny.config, 1, device="cpu").finish("dummy")
    assert same(built_layer, layer)
    assert layer.layer_id == built_layer.layer_id == copy.copy(layer).layer_id == 1
    started = LayerBuilder(spec_of(), device="cpu")
    load_into(started, random_items()[:2])
    with raises_with(InputError, "2 tensors"):
        started.finish("dummy")
    with raises_with(InputError, "'random'", "dummy"):
        load_layer(tmp_path, 1, device="cpu", weights="random")  # pyright: ignore[reportArgumentType]
    with raises_with(ConfigError, "config.json"):
        load_layer(tmp_path / "none", 1, device="cpu", weights="dummy")


def _dummy_ranks(rank: int) -> bool:
    spec = spec_of("mxfp4")
    builder = LayerBuilder(spec, device=Ranks.of(), limits=Limits(max_tokens=16))
    whole = LayerBuilder(spec, device="cpu", limits=Limits(max_tokens=16))
    x = torch.randn(4 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    return torch.equal(builder.finish("dummy")(x), whole.finish("dummy")(x))


def test_dummy_experts_match_across_ranks() -> None:
    assert run_ranks(_dummy_ranks, 2) == [True, True]


def test_rank_without_experts_fails_planning() -> None:
    builder = LayerBuilder(
        spec_of(), device="cpu", placement=Placement(expert_ids=()), overrides=Overrides(dispatcher="partial")
    )
    items = random_items()
    assert load_into(builder, items) == [shard is None for _, _, shard, _ in items]
    with raises_with(PlanError, "partial", "no experts"):
        builder.finish()
