from __future__ import annotations

import torch

from collegium.workspace import Workspace, bytes_of, shared_workspace

WANTED = (((3, 5), torch.bfloat16), ((7,), torch.int64), ((0, 4), torch.float32), ((2, 2), torch.float8_e4m3fn))


def test_buffers_have_the_shapes_and_do_not_overlap() -> None:
    space = Workspace(torch.device("cpu"))
    made = space.cut("a", WANTED)
    assert [(tuple(t.shape), t.dtype) for t in made] == [(shape, dtype) for shape, dtype in WANTED]
    for number, tensor in enumerate(made):
        tensor.view(torch.uint8).fill_(number + 1)
    assert all(bool((t.view(torch.uint8) == n + 1).all()) for n, t in enumerate(made))


def test_a_second_cut_of_the_same_key_takes_no_memory_and_gives_the_same_buffers() -> None:
    space = Workspace(torch.device("cpu"))
    first = space.cut("a", WANTED)
    size = space.nbytes
    assert all(a is b for a, b in zip(first, space.cut("a", WANTED), strict=True))
    space.cut("b", WANTED)
    assert space.nbytes == size == bytes_of(WANTED)


def test_a_start_keeps_two_keys_apart() -> None:
    space = Workspace(torch.device("cpu"))
    space.reserve(2 * bytes_of(WANTED))
    (low, *_), (high, *_) = space.cut("a", WANTED), space.cut("b", WANTED, start=bytes_of(WANTED))
    low.fill_(1.0)
    high.fill_(2.0)
    assert bool((low == 1.0).all())


def test_a_block_that_grew_keeps_the_old_one_alive_for_captured_graphs() -> None:
    space = Workspace(torch.device("cpu"))
    (old, *_) = space.cut("a", WANTED)
    address = old.data_ptr()
    space.reserve(1 << 20)
    (new, *_) = space.cut("a", WANTED)
    assert new.data_ptr() != address
    assert old.data_ptr() == address
    assert old.fill_(1.0).sum() == 15


def test_layers_of_a_device_share_one_workspace() -> None:
    assert shared_workspace(torch.device("cpu")) is shared_workspace(torch.device("cpu"))
