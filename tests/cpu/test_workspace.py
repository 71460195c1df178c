from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import torch

from collegium.runtime.workspace import Workspace, Workspaces, empty, own_memory, owned, shared_workspaces

CPU = torch.device("cpu")
WANTED = (((3, 5), torch.bfloat16), ((7,), torch.int64), ((0, 4), torch.float32), ((2, 2), torch.float8_e4m3fn))


def one_pass(space: Workspace, kind: object, wanted=WANTED) -> list[torch.Tensor]:
    with space.scope(kind):
        return [empty(shape, dtype, CPU) for shape, dtype in wanted]


def test_buffers_have_the_shapes_and_do_not_overlap() -> None:
    made = one_pass(Workspace(CPU), "a")
    assert [(tuple(t.shape), t.dtype) for t in made] == [(shape, dtype) for shape, dtype in WANTED]
    for number, tensor in enumerate(made):
        tensor.view(torch.uint8).fill_(number + 1)
    assert all(bool((t.view(torch.uint8) == n + 1).all()) for n, t in enumerate(made))


def test_a_second_pass_of_the_same_kind_takes_no_memory_and_gets_the_same_buffers() -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    first = one_pass(space, "a")
    assert all(a is b for a, b in zip(first, one_pass(space, "a"), strict=True))
    other = one_pass(space, "b")
    assert other[0].data_ptr() == first[0].data_ptr()
    assert space.nbytes == 4096


def test_a_pass_that_asks_for_something_else_is_cut_anew() -> None:
    space = Workspace(CPU)
    first = one_pass(space, "a")
    changed = one_pass(space, "a", (*WANTED[:1], ((9,), torch.float32)))
    assert changed[0] is first[0]
    assert changed[1].shape == (9,)
    changed[1].fill_(1.0)
    changed[0].fill_(2.0)
    assert bool((changed[1] == 1.0).all())


def test_a_block_that_grew_keeps_the_old_one_alive_for_passes_that_still_run() -> None:
    space = Workspace(CPU)
    (old, *_) = one_pass(space, "a")
    old.fill_(1.0)
    space.reserve(1 << 20)
    (new, *_) = one_pass(space, "a")
    new.fill_(2.0)
    assert new.data_ptr() != old.data_ptr()
    assert bool((old == 1.0).all())


def test_outside_a_pass_and_on_another_device_memory_is_fresh() -> None:
    space = Workspace(CPU)
    kept = [empty((2,), torch.float32, CPU) for _ in range(2)]
    assert kept[0].data_ptr() != kept[1].data_ptr()
    with space.scope("a"):
        assert empty((2,), torch.float32, torch.device("meta")).device.type == "meta"
    assert space.nbytes == 0


def test_a_scope_inside_a_scope_ends_where_it_began() -> None:
    outer, inner = Workspace(CPU), Workspace(CPU)
    with outer.scope("a"):
        with inner.scope("b"):
            empty((100,), torch.uint8, CPU)
        empty((50,), torch.uint8, CPU)
    assert (outer.nbytes, inner.nbytes) == (50, 100)


def test_layers_of_a_device_share_workspaces() -> None:
    assert shared_workspaces(CPU) is shared_workspaces(CPU)


def test_passes_at_the_same_time_have_workspaces_of_their_own_and_later_ones_use_them_again() -> None:
    lent = Workspaces(CPU)
    lent.reserve(1000)
    one, two = lent.take(), lent.take()
    assert one is not two
    assert (one.nbytes, two.nbytes) == (1000, 1000)
    lent.give(one)
    lent.give(two)
    assert {lent.take(), lent.take()} == {one, two}


def test_a_later_reservation_reaches_a_workspace_that_was_lent_meanwhile() -> None:
    lent = Workspaces(CPU)
    early = lent.take()
    lent.reserve(500)
    lent.give(early)
    assert all(space.nbytes >= 500 for space in (lent.take(), lent.take()))


def test_threads_never_hold_one_workspace_at_the_same_time() -> None:
    lent, held, twice = Workspaces(CPU), set[int](), list[int]()

    def many() -> None:
        for _ in range(2000):
            space = lent.take()
            if space.number in held:
                twice.append(space.number)
            held.add(space.number)
            held.discard(space.number)
            lent.give(space)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: many(), range(4)))
    assert not twice


def test_a_copied_or_unpickled_owner_shares_the_devices_workspaces() -> None:
    lent = Workspaces(CPU)
    lent.reserve(300)
    for own in (copy.deepcopy(lent), pickle.loads(pickle.dumps(lent))):
        assert own is shared_workspaces(CPU)
        assert own.take().nbytes >= 300


def test_own_memory_is_given_once_and_only_inside() -> None:
    with own_memory(CPU):
        assert owned(CPU)
        made = [empty((64,), torch.uint8, CPU) for _ in range(20)]
        assert len({tensor.data_ptr() for tensor in made}) == 20
    assert not owned(CPU)


def test_memory_reserved_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        space = Workspace(CPU)
        space.reserve(64)
    (made, *_) = one_pass(space, "a", (((8,), torch.float32),))
    made.zero_()
