"""Untrusted bytes: every broken file is refused with what was found and what is allowed."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from collegium.checkpoint import Checkpoint
from collegium.checkpoint.header import MAX_HEADER_BYTES, read_header
from collegium.errors import (
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    HostileFileError,
    MissingTensorError,
    TruncatedFileError,
)
from commands import command
from raising import raises_with
from toys import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def raw_file(path: Path, header: bytes | str | dict[str, object], data: bytes = b"", length: int | None = None) -> Path:
    text = json.dumps(header) if isinstance(header, dict) else header
    body = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(body) if length is None else length) + body + data)
    return path


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


@pytest.mark.parametrize(
    ("header", "data", "length", "text"),
    [
        ({"a": entry(0, 4)}, b"1234", 2**63, r"header length is 9223372036854775808, allowed are 2 to \d+"),
        ({"a": entry(0, 4)}, b"1234", 2**64 - 1, r"header length is 18446744073709551615"),
        ({"a": entry(0, 4)}, b"1234", 0, r"header length is 0, allowed are 2"),
        ({"a": entry(0, 4)}, b"1234", MAX_HEADER_BYTES + 1, r"header length is 100000001, allowed"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", None, r"'b' overlaps 'a' by 2 bytes"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, b"12345678", None, r"hole of 2 bytes between 'a' and 'b'"),
        ({"a": entry(2, 4)}, b"1234", None, r"hole of 2 bytes between the header and 'a'"),
        ({"a": entry(0, 4)}, b"123456", None, r"2 bytes follow 'a'; the tensors must cover"),
        ({}, b"12", None, r"2 bytes follow the header"),
        ({"a": entry(0, 4, [3])}, b"1234", None, r"holds 4 bytes, shape \[3\] of U8 needs 3"),
        ({"a": entry(0, 4, [4], "F32")}, b"1234", None, r"needs 16"),
        ({"a": entry(0, 4, [4], "F9")}, b"1234", None, r"dtype 'F9', known are BOOL"),
        ({"a": {**entry(0, 4), "dtype": 7}}, b"1234", None, r"dtype 7"),
        ({"a": entry(0, 4, [-4])}, b"1234", None, r"shape \[-4\].*integers from 0"),
        ({"a": entry(0, 4, [True, 4])}, b"1234", None, r"shape \[True, 4\]"),
        ({"a": entry(0, 0, [2**62, 2**62, 0])}, b"", None, r"overflows 2\^63-1"),
        ({"a": entry(0, 4, [2**64])}, b"1234", None, r"integers from 0 to 2\^63-1"),
        ({"a": entry(0, 1, [1] * 65)}, b"1", None, r"at most 64"),
        ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, b"1234", None, r"two rising integers"),
        ({"a": {**entry(0, 4), "data_offsets": [0, 4.0]}}, b"1234", None, r"two rising integers"),
        ({"a": {**entry(0, 4), "extra": 1}}, b"1234", None, r"exactly dtype, shape and data_offsets"),
        ({"a": [1]}, b"", None, r"exactly dtype"),
        ({"__metadata__": {"k": 1}}, b"", None, r"__metadata__ entry 'k' is 1"),
        ({"__metadata__": [1]}, b"", None, r"allowed is an object of strings"),
        ('{"a": 1, "a": 2}', b"", None, r"the key 'a' appears twice"),
        (
            '{"a": {"dtype":"U8","shape":[1],"shape":[0],"data_offsets":[0,1]}}',
            b"1",
            None,
            r"'shape' appears twice",
        ),
        ("[1, 2]", b"", None, r"must start with '\{'"),
        ('{"a": NaN}', b"", None, r"constant NaN"),
        ('{"a": ', b"", None, r"not valid JSON"),
        (b'{"\xff": 1}', b"", None, r"not valid JSON.*utf-8"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", b"", None, r"nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", b"", None, r"not valid JSON"),
    ],
)
def test_broken_headers(
    tmp_path: Path, header: bytes | str | dict[str, object], data: bytes, length: int | None, text: str
) -> None:
    path = raw_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(HostileFileError, match=text) as caught:
        Checkpoint.open(path)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("size", range(0, 60, 3))
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    whole = raw_file(tmp_path / "whole", {"a": entry(0, 4)}, b"1234").read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[:size])
    # 8 bytes of length, the header, and 4 bytes of data.
    needed = 8 if size < 8 else len(whole) - 4 if size < len(whole) - 4 else len(whole)
    with pytest.raises(TruncatedFileError, match=rf"cut.* has {size} bytes, its header needs {needed} ") as caught:
        read_header(cut)
    assert not isinstance(caught.value, HostileFileError)


def test_a_truncated_shard(tmp_path: Path) -> None:
    tensors = {name: torch.arange(100 * scale, dtype=torch.float32) for scale, name in enumerate("abc", 1)}
    weight_map = {}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
        weight_map[name] = f"{name}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(Checkpoint.open(tmp_path).tensors) == set("abc")
    shard = tmp_path / "b.safetensors"
    whole = shard.read_bytes()
    for cut in (1, 300, 799):
        shard.write_bytes(whole[:-cut])
        with pytest.raises(TruncatedFileError, match=rf"b.safetensors.*needs {len(whole)} \({cut} are missing"):
            Checkpoint.open(tmp_path)


def test_truncated_file_with_bad_offsets_hostile(tmp_path: Path) -> None:
    for header in ({"a": entry(0, 8), "b": entry(12, 20)}, {"a": entry(0, 8, [3])}, {"a": entry(0, 2**64)}):
        path = raw_file(tmp_path / "model.safetensors", header, b"1234")
        with pytest.raises(HostileFileError):
            Checkpoint.open(path)


@pytest.mark.parametrize("words", ["inspect", "verify"])
def test_clone_without_lfs_files_explains_itself(tmp_path: Path, words: str) -> None:
    """Cloned without git-lfs, or not downloaded to the end: what it may be, and what to do."""
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for held, text in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345678\n", "(a Git LFS pointer?)"),
        (whole[: len(whole) // 2], f"{len(whole) // 2} bytes, its header needs {len(whole)} "),
        (b"", "the file has 0 bytes"),
    ):
        file.write_bytes(held)
        code, out, said = command(words, tmp_path, "--device", "cpu")
        assert (code, out) == (1, "")
        assert said.startswith("HostileFileError: " if b"git-lfs" in held else "TruncatedFileError: ")
        assert text in said
        assert said.endswith("; download the file again")


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model.safetensors", {"a": entry(0, 4)}, b"1234")
    checkpoint = Checkpoint.open(path)
    path.write_bytes(path.read_bytes()[:-2])
    with raises_with(TruncatedFileError, "'a'", "2"):
        checkpoint.read("a")


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_header_padding_and_empty_tensors_allowed(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(0, 2), "none": entry(2, 2, [0, 3]), "b": entry(2, 4)}) + "     "
    checkpoint = Checkpoint.open(raw_file(tmp_path / "model.safetensors", text, b"\1\2\3\4"))
    assert checkpoint.read("b").tolist() == [3, 4]
    assert checkpoint.read("none").shape == (0, 3)


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "a/../../b", "..\\out", "C:\\out.safetensors", "nul\0byte"]
)
def test_index_leaving_the_folder(tmp_path: Path, name: str) -> None:
    raw_file(tmp_path / "out.safetensors", {"a": entry(0, 1)}, b"1")
    (tmp_path / "model").mkdir()
    index(tmp_path / "model", {"a": name})
    with raises_with(CheckpointError, repr(name), tmp_path / "model"):
        Checkpoint.open(tmp_path / "model")


def test_index_naming_a_missing_file(tmp_path: Path) -> None:
    index(tmp_path, {"a": "one.safetensors"})
    with raises_with(CheckpointError, "'one.safetensors'"):
        Checkpoint.open(tmp_path)


def test_index_naming_a_missing_tensor(tmp_path: Path) -> None:
    raw_file(tmp_path / "one.safetensors", {"a": entry(0, 1)}, b"1")
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with raises_with(MissingTensorError, "'b'", "one.safetensors", "1"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("table", [None, {}, [], {"a": 3}])
def test_index_without_a_table(tmp_path: Path, table: object) -> None:
    index(tmp_path, table)
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("second", "shape", "same"), [(b"12", [2], True), (b"13", [2], False), (b"12", [1, 2], False)])
def test_a_name_in_two_shards(tmp_path: Path, second: bytes, shape: list[int], same: bool) -> None:
    raw_file(tmp_path / "one", {"a": entry(0, 2), "b": entry(2, 3)}, b"12x")
    raw_file(tmp_path / "two", {"a": entry(0, 2, shape), "c": entry(2, 3)}, second + b"y")
    index(tmp_path, {"a": "one", "b": "one", "c": "two"})
    if same:
        assert bytes(Checkpoint.open(tmp_path).read("a").tolist()) == b"12"
        return
    with raises_with(DuplicateTensorError, "'a'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"), [("{", "not a valid JSON"), ('{"a":1,"a":2}', "appears twice"), ("[]", "is a list")]
)
def test_broken_config(tmp_path: Path, text: str, expected: str) -> None:
    raw_file(tmp_path / "model.safetensors", {"a": entry(0, 1)}, b"1")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        Checkpoint.open(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with raises_with(CheckpointError, tmp_path / "absent"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with raises_with(CheckpointError, "pytorch_model.bin"):
        Checkpoint.open(tmp_path)
