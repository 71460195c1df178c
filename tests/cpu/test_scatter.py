"""Tokens read once and written to all rows of their experts: in Triton's interpreter, with the bits of a gather."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from by_kernel import by_kernel
from collegium.errors import InputError
from collegium.ops import quantize as quantization, scatter
from collegium.ops.operand import operand
from collegium.ops.permute import permute
from collegium.ops.quantize import AS_IS, PADDED, REORDERED, activation_format, reorder_codes
from collegium.ops.rows import transposed_scale_stride
from collegium.ops.scatter import scatter_codes, scatter_regions, scatter_rows
from collegium.parallel.local import Local
from collegium.parallel.partial import Partial
from collegium.testing.compare import heavy_tailed, uneven_ids
from collegium.types import Routing
from memories import Noted, Poisoned
from raising import raises_with

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS = ("fp8_token", "fp8_group128", "fp8_group128_pow2", "fp8_static", "nvfp4", None)


def form_of(name: str | None) -> Any:
    """Return the format of the rows that tensor cores multiply, calibrated where it is static."""
    if name is None:
        return None
    form = activation_format(name)
    return (form.within(40.0) if form.static else form).operand_format


def on_kernels(*args: Any, **kwargs: Any) -> Any:
    """Run ``scatter_rows`` by its kernels, those of formats that are quantised before they are copied included."""
    with patch.object(quantization, "on_device", lambda *_: True):
        return by_kernel(scatter_rows)(*args, **kwargs)


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def tokens_of(count: int, columns: int) -> torch.Tensor:
    """Return heavy-tailed tokens with zeros, NaN and infinity."""
    x = heavy_tailed(count, columns, seed=3) * torch.logspace(-6, 4, count)[:, None]
    if count > 4:
        x[2], x[3, columns // 2], x[4, -1] = 0, torch.nan, torch.inf
    return x.bfloat16()


def ids_of(kind: str, count: int, top_k: int, experts: int) -> torch.Tensor:
    """Return ids of which some have no expert: few, most, or all of a token."""
    if kind == "hot":
        ids = torch.full((count, top_k), experts - 2)
    else:
        ids = torch.randint(0, experts, (count, top_k), generator=torch.Generator().manual_seed(5))
        ids[ids == 1] = -1  # an expert without rows
    if kind == "foreign":
        ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(6)) < 0.7] = -1
    ids[0] = -1
    ids[-1, -1] = experts + 3
    return ids


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("kind", "count", "top_k", "columns"),
    [("few", 9, 1, 128), ("few", 23, 8, 300), ("hot", 23, 6, 257), ("foreign", 40, 3, 90), ("few", 5, 24, 33)],
)
def test_the_bits_of_a_gather(name: str | None, kind: str, count: int, top_k: int, columns: int) -> None:
    x, form = tokens_of(count, columns), form_of(name)
    permutation = permute(ids_of(kind, count, top_k, 7), 7)
    stop, rows = int(permutation.expert_offsets[-1]), count * top_k
    orders = (AS_IS, PADDED, REORDERED) if form is not None and form.e4m3 else (AS_IS,)
    for order in orders:
        wanted, wanted_scale = operand(x, form, source=permutation.source, order=order)
        for run, memory in ((on_kernels, Poisoned()), (scatter_rows, None)):
            found, scale = run(x, form, permutation.slots, rows, order=order, memory=memory)
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            assert torch.equal(bits(found[:stop]), bits(wanted[:stop]))
            assert (scale is None) == (wanted_scale is None)
            if scale is not None and wanted_scale is not None:
                assert scale.shape == wanted_scale.shape
                assert torch.equal(scale[:stop].nan_to_num(-1.0), wanted_scale[:stop].nan_to_num(-1.0))


@pytest.mark.parametrize("name", ["fp8_group128", "fp8_group128_pow2"])
def test_scales_of_groups_transposed(name: str) -> None:
    """Scales stored across rows are those of rows, from codes of tokens too, and take the bytes that are reserved."""
    x, form = tokens_of(23, 300), form_of(name)
    across = replace(form, transposed_scales=True)
    permutation = permute(ids_of("foreign", 23, 6, 7), 7)
    stop, rows = int(permutation.expert_offsets[-1]), 138
    wanted, wanted_scale = operand(x, form, source=permutation.source)
    assert wanted_scale is not None
    codes, code_scale = operand(x, form)
    assert code_scale is not None
    noted = Noted()
    for run, send, memory in (
        (on_kernels, by_kernel(scatter_codes), noted),
        (on_kernels, by_kernel(scatter_codes), Poisoned()),
        (scatter_rows, scatter_codes, None),
    ):
        found, scale = run(x, across, permutation.slots, rows, memory=memory)
        sent, sent_scale = send(codes, code_scale, permutation.slots, rows, transposed=True)
        assert torch.equal(bits(found[:stop]), bits(wanted[:stop]))
        assert torch.equal(bits(sent[:stop]), bits(wanted[:stop]))
        for scales in (scale, sent_scale):
            assert scales is not None
            assert scales.shape == (rows, 3)
            assert scales.stride() == (1, transposed_scale_stride(rows))
            assert torch.equal(scales[:stop].nan_to_num(-1.0), wanted_scale[:stop].nan_to_num(-1.0))
    assert noted.sizes == scatter_regions(23, rows, 300, across, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_slot_untouched(name: str | None) -> None:
    x, memory = tokens_of(12, 160), Poisoned()
    permutation = permute(ids_of("foreign", 12, 4, 7), 7)
    stop = int(permutation.expert_offsets[-1])
    assert 0 < stop < 48
    found, scale = on_kernels(x, form_of(name), permutation.slots, 48, memory=memory)
    assert bool(found[stop:].float().isnan().all())
    if scale is not None:
        assert bool(scale[stop:].isnan().all())


def test_tokens_far_apart_in_memory() -> None:
    whole = tokens_of(11, 400)
    x = whole[:, 96:256]
    permutation = permute(ids_of("few", 11, 2, 5), 5)
    stop = int(permutation.expert_offsets[-1])
    for name in ("fp8_token", None):
        wanted, _ = operand(x.contiguous(), form_of(name), source=permutation.source)
        found, _ = on_kernels(x, form_of(name), permutation.slots, 22)
        assert torch.equal(bits(found[:stop]), bits(wanted[:stop]))


@pytest.mark.parametrize(("reorder", "groups"), [(AS_IS, 1), (AS_IS, 3), (REORDERED, 1)])
@pytest.mark.parametrize("columns", [300, 384])
def test_codes_keep_their_bits(reorder: int, groups: int, columns: int) -> None:
    codes = (torch.arange(13 * columns) % 256).to(torch.uint8).view(13, columns).view(torch.float8_e4m3fn)
    scale = heavy_tailed(13, groups, seed=4)
    permutation = permute(ids_of("foreign", 13, 4, 7), 7)
    stop, source = int(permutation.expert_offsets[-1]), permutation.source
    wanted = bits(reorder_codes(codes, reorder))[source]
    # Tokens of other ranks' experts alone may be anything.
    away = (permutation.slots < 0).all(1)
    codes.view(torch.uint8)[away] = 0x7F
    for run, memory in ((by_kernel(scatter_codes), Poisoned()), (scatter_codes, None)):
        found, scales = run(codes, scale, permutation.slots, 52, reorder=reorder, memory=memory)
        assert torch.equal(bits(found[:stop]), wanted[:stop])
        assert scales is not None
        assert torch.equal(scales[:stop], scale[source[:stop]])


def test_ranks_fill_their_rows() -> None:
    """The rows of two ranks, each with half of the experts, are those of one rank."""
    x, ids = tokens_of(30, 160), uneven_ids(30, 3, 6, seed=2)
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(30, 3))
    whole, _ = Local(num_experts=6).dispatch(x, routing)
    assert whole.slots is not None
    wanted, wanted_scale = on_kernels(x, "fp8_group128", whole.slots, 90)
    rows: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    for rank in range(2):
        slot = torch.full((8,), -1)
        slot[3 * rank : 3 * rank + 3] = torch.arange(3)
        slot[7] = 9
        batch, _ = Partial(inner=Local(num_experts=3), slot=slot).dispatch(x, routing)
        assert batch.slots is not None
        stop = int(batch.expert_offsets[-1])
        found, scale = on_kernels(x, "fp8_group128", batch.slots, 90, memory=Poisoned())
        rows.append(bits(found[:stop]))
        scales.append(scale[:stop])
    assert torch.equal(torch.cat(rows), bits(wanted))
    assert torch.equal(torch.cat(scales).nan_to_num(-1.0), wanted_scale.nan_to_num(-1.0))


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_counted(name: str | None) -> None:
    memory, x = Noted(), tokens_of(9, 160)
    permutation = permute(ids_of("few", 9, 2, 5), 5)
    on_kernels(x, form_of(name), permutation.slots, 18, memory=memory)
    assert memory.sizes == scatter_regions(9, 18, 160, form_of(name), dtype=torch.bfloat16)


def test_no_tokens() -> None:
    x, slots = torch.empty(0, 160, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int64)
    for name in FORMATS:
        found, _ = on_kernels(x, form_of(name), slots, 0)
        assert found.shape == (0, 160)


def test_wrong_slots_refused() -> None:
    x, slots = torch.ones(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    with raises_with(InputError, "slots", "int32"):
        scatter_rows(x, "fp8_token", slots.int(), 6)
    with raises_with(InputError, "slots"):
        scatter_rows(x, "fp8_token", slots.t(), 6)
    with raises_with(InputError, "x", "3"):
        scatter_rows(x[:2], "fp8_token", slots, 6)
    for name in ("bf16", None):
        with raises_with(InputError, "order", "bf16"):
            scatter_rows(x, name, slots, 6, order=PADDED)
    grouped = replace(activation_format("fp8_group128"), e8m0=True)
    with raises_with(InputError, grouped.name):
        grouped.write_to_slots(scatter.TokenRows(x, slots), grouped.quantize(x))
