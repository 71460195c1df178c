"""Memory of passes: named regions of one block, and blocks of which no two passes have the same."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from collegium.runtime import memory as memories
from collegium.runtime.memory import (
    ALIGN,
    FreshMemory,
    Memory,
    MemoryMap,
    Region,
    Workspace,
    Workspaces,
    alloc,
    elementwise_max,
    memory_map,
    shared_workspaces,
    with_prefix,
)

CPU = torch.device("cpu")
WANTED = {
    "first": ((3, 5), torch.bfloat16),
    "second": ((7,), torch.int64),
    "none": ((0, 4), torch.float32),
    "part/third": ((2, 2), torch.float8_e4m3fn),
}
REGIONS = (Region("first", 30), Region("second", 600), Region("none", 0), Region("part/third", 5))


def one_pass(memory: Memory) -> dict[str, torch.Tensor]:
    return {name: memory.alloc(name, shape, dtype) for name, (shape, dtype) in WANTED.items()}


def arena(regions: tuple[Region, ...] = REGIONS) -> Memory:
    places = memory_map(regions)
    return Workspace(CPU, places.nbytes).memory(places)


def test_buffers_have_shapes_without_overlap() -> None:
    made = one_pass(arena())
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == WANTED
    for number, tensor in enumerate(made.values()):
        assert tensor.is_contiguous()
        tensor.view(torch.uint8).fill_(number + 1)
    assert all(bool((t.view(torch.uint8) == n + 1).all()) for n, t in enumerate(made.values()))


def test_regions_do_not_depend_on_order() -> None:
    places = memory_map(REGIONS)
    space = Workspace(CPU, places.nbytes)
    wanted = {name: space.block.data_ptr() + start for name, (start, _) in places.offsets.items()}
    assert [places.offsets[region.name][1] for region in REGIONS] == [region.nbytes for region in REGIONS]
    assert all(start % ALIGN == 0 for start, _ in places.offsets.values())
    ends = [start + size for start, size in places.offsets.values()]
    assert all(end <= start for end, (start, _) in zip(ends, list(places.offsets.values())[1:], strict=False))
    assert max(ends) <= places.nbytes
    for names in (list(WANTED), list(WANTED)[::-1], ["part/third"]):
        memory = space.memory(places)
        for name in names:
            shape, dtype = WANTED[name]
            if 0 not in shape:  # a tensor without elements has no address
                assert memory.alloc(name, shape, dtype).data_ptr() == wanted[name]


def test_regions_hold_what_was_declared() -> None:
    memory = arena()
    for size in (600, 599, 1, 0):
        made = memory.alloc("second", (size,), torch.uint8)
        assert made.shape == (size,)
        made.fill_(7)
    assert memory.alloc("second", (75,), torch.int64).shape == (75,)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [("second", 601, "601 .*'second'.* 600"), ("third", 1, "1 .*'third'.* 0"), ("none", 1, "1 .*'none'.* 0")],
)
def test_missing_and_small_regions_are_refused(name: str, size: int, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        arena().alloc(name, (size,), torch.uint8)
    with pytest.raises(AssertionError, match="missing"):
        arena().alloc("missing", (0,), torch.uint8)


def test_later_passes_reuse_buffers() -> None:
    places = memory_map(REGIONS)
    space = Workspace(CPU, places.nbytes)
    first = one_pass(space.memory(places))
    again = one_pass(space.memory(places))
    assert all(again[name] is tensor for name, tensor in first.items())
    other = memory_map((Region("other", 16), Region("first", 30)))
    assert space.memory(other).alloc("other", (16,), torch.uint8).data_ptr() == space.block.data_ptr()
    assert space.memory(places).alloc("first", *WANTED["first"]) is first["first"]
    assert space.nbytes == places.nbytes


def test_regions_have_one_place() -> None:
    memory = arena()
    first = memory.alloc("second", (7,), torch.int64)
    changed = memory.alloc("second", (9,), torch.float32)
    assert (changed.shape, changed.dtype) == ((9,), torch.float32)
    assert changed.data_ptr() == first.data_ptr()
    assert memory.alloc("second", (7,), torch.int64) is first


def test_arena_buffer_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "_MAX_CACHED_BUFFERS", 3)
    memory = arena()
    made = [memory.alloc("second", (size,), torch.uint8) for size in range(20)]
    assert len(memory._buffers) <= 3  # type: ignore[attr-defined]
    assert len({tensor.data_ptr() for tensor in made[1:]}) == 1


def test_equal_regions_give_equal_offsets() -> None:
    one, two = MemoryMap(REGIONS), MemoryMap(tuple(Region(*region) for region in REGIONS))
    assert one.offsets == two.offsets
    assert one.nbytes == two.nbytes
    assert memory_map(REGIONS) is memory_map(tuple(REGIONS))
    longer = MemoryMap((*REGIONS, Region("last", 9)))
    assert all(longer.offsets[name] == place for name, place in one.offsets.items())


def test_copied_maps_equal_their_regions() -> None:
    places = memory_map(REGIONS)
    for made in (copy.deepcopy(places), copy.copy(places), pickle.loads(pickle.dumps(places))):
        assert made is places
    alone = MemoryMap((*REGIONS, Region("last", 9)))
    assert pickle.loads(pickle.dumps(alone)).offsets == alone.offsets


def test_parts_prefix_region_names() -> None:
    memory = arena((*REGIONS, Region("part/inner/fourth", 8)))
    whole = memory.alloc("part/third", (5,), torch.uint8)
    part = memory.part("part")
    assert part.alloc("third", (5,), torch.uint8).data_ptr() == whole.data_ptr()
    assert part.part("inner").alloc("fourth", (8,), torch.uint8).data_ptr() > whole.data_ptr()
    assert memory.part("part") is part
    with pytest.raises(AssertionError, match="'part/first'"):
        part.alloc("first", (1,), torch.uint8)
    with pytest.raises(AssertionError, match="'part/inner/third'"):
        part.part("inner").alloc("third", (1,), torch.uint8)


def test_regions_of_parts_and_of_alternatives() -> None:
    assert with_prefix("part", {"a": 3, "b/c": 4}) == {"part/a": 3, "part/b/c": 4}
    assert elementwise_max({"a": 3, "b": 9}, {}, {"b": 4, "c": 5}) == {"a": 3, "b": 9, "c": 5}


def test_memory_outside_a_pass() -> None:
    kept = [alloc(None, "first", (2,), torch.float32, CPU) for _ in range(2)]
    assert kept[0].data_ptr() != kept[1].data_ptr()
    assert alloc(None, "first", (2,), torch.float32, torch.device("meta")).device.type == "meta"
    memory = arena()
    assert alloc(memory, "first", (3,), torch.int32, CPU) is memory.alloc("first", (3,), torch.int32)


def test_buffers_outlive_their_workspace() -> None:
    made = arena().alloc("second", (600,), torch.uint8).fill_(1)
    taken = [torch.full((600,), 2, dtype=torch.uint8) for _ in range(50)]
    assert bool((made == 1).all())
    assert all(bool((tensor == 2).all()) for tensor in taken)


def test_layers_of_a_device_share_workspaces() -> None:
    assert shared_workspaces(CPU) is shared_workspaces(CPU)


def test_concurrent_passes_have_separate_workspaces() -> None:
    lent = Workspaces(CPU)
    lent.reserve(1000)
    one, two = lent.acquire(), lent.acquire()
    assert one is not two
    assert one.number != two.number
    assert one.block.data_ptr() != two.block.data_ptr()
    assert (one.nbytes, two.nbytes) == (1000, 1000)
    lent.release(one)
    lent.release(two)
    assert lent.nbytes == 2000
    assert {lent.acquire(), lent.acquire()} == {one, two}


def test_reservations_of_workspaces() -> None:
    lent = Workspaces(CPU)
    lent.reserve(700)
    assert lent.nbytes == 700
    lent.reserve(300)
    assert lent.nbytes == 700
    assert lent.acquire().nbytes == 700


def test_reservations_reach_lent_workspaces() -> None:
    lent = Workspaces(CPU)
    early = lent.acquire()
    lent.reserve(500)
    lent.release(early)
    assert all(space.nbytes >= 500 for space in (lent.acquire(), lent.acquire()))


def test_small_workspaces_outlive_running_passes() -> None:
    lent, places = Workspaces(CPU), memory_map(REGIONS)
    lent.reserve(places.nbytes)
    space = lent.acquire()
    old = space.memory(places).alloc("second", (600,), torch.uint8).fill_(1)
    address, number = old.data_ptr(), space.number
    lent.release(space)
    del space, old
    lent.reserve(1 << 20)
    grown = [lent.acquire(), lent.acquire()]
    for other in grown:
        assert other.nbytes == 1 << 20
        assert other.number != number
        other.block.fill_(2)
    (retired,) = lent._retired
    assert retired.memory(places).alloc("second", (600,), torch.uint8).data_ptr() == address
    assert bool((retired.memory(places).alloc("second", (600,), torch.uint8) == 1).all())


def test_threads_never_share_a_workspace() -> None:
    lent, held, twice = Workspaces(CPU), set[int](), list[int]()

    def many() -> None:
        for _ in range(2000):
            space = lent.acquire()
            if space.number in held:
                twice.append(space.number)
            held.add(space.number)
            held.discard(space.number)
            lent.release(space)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: many(), range(4)))
    assert not twice


def test_copies_and_pickles_share_device_workspaces() -> None:
    lent = Workspaces(CPU)
    lent.reserve(300)
    for own in (copy.deepcopy(lent), pickle.loads(pickle.dumps(lent))):
        assert own is shared_workspaces(CPU)
        assert own.acquire().nbytes >= 300


def test_temporary_buffers_are_distinct() -> None:
    memory = FreshMemory(CPU)
    parts = (memory, memory.part("part"), memory.part("part").part("inner"))
    made = [part.alloc("first", (64,), torch.uint8) for part in parts for _ in range(20)]
    assert len({tensor.data_ptr() for tensor in made}) == 60
    assert all(tensor.shape == (64,) and tensor.dtype == torch.uint8 for tensor in made)
    addresses = {tensor.data_ptr() for tensor in made}
    del made
    later = [memory.alloc("first", (64,), torch.uint8) for _ in range(60)]
    assert not addresses & {tensor.data_ptr() for tensor in later}


def test_inference_mode_memory_is_writable_outside() -> None:
    places = memory_map(REGIONS)
    with torch.inference_mode():
        space = Workspace(CPU, places.nbytes)
        inside = space.memory(places).alloc("second", (8,), torch.float32)
    inside.zero_()
    space.memory(places).alloc("first", (4,), torch.float32).zero_()
    outside = Workspace(CPU, places.nbytes)
    with torch.inference_mode():
        outside.memory(places).alloc("second", (8,), torch.float32).zero_()
    outside.memory(places).alloc("second", (8,), torch.float32).zero_()
