"""Read the safetensors header; every byte of it is checked before it is used."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from ..errors import CheckpointError, ConfigError, HostileFileError, TruncatedFileError
from ..formats.find_storage import SAFETENSORS_DTYPES

__all__ = [
    "DTYPE_BITS",
    "FLOATS",
    "MAX_HEADER_BYTES",
    "TensorInfo",
    "middle_of",
    "read_header",
    "read_json",
    "truncated",
]

MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 1 << 24
_MIDDLE_BYTES = 64
_MAX_DIMENSIONS = 64
_MAX_COUNT = 2**63 - 1
FLOATS = ("BF16", "F16", "F32")  # unquantised dtypes

DTYPE_BITS: Mapping[str, int] = {
    **{name: 8 * dtype.itemsize for name, dtype in SAFETENSORS_DTYPES.items()},
    # Accepted in headers; such tensors cannot be read.
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Header entry of one tensor: ``dtype`` is the safetensors name, ``start`` and ``stop`` are offsets in ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return self.stop - self.start

    def fill(self, into: memoryview, runs: Iterable[tuple[int, int]]) -> None:
        """Read ``runs`` of bytes, (offset in the file, count), into ``into``; raises TruncatedFileError at its end."""
        at = 0
        with self.file.open("rb", buffering=0) as file:
            for start, count in runs:
                file.seek(start)
                end = at + count
                while at < end:
                    count_read = file.readinto(into[at:end])
                    if not count_read:
                        size = os.fstat(file.fileno()).st_size
                        raise truncated(self.file, size, self.stop, f"inside tensor {self.name!r} since it was opened")
                    at += count_read

    def pieces(self) -> Iterator[bytearray]:
        """Yield the tensor's bytes as stored, 16 MiB at a time."""
        return (self._read_bytes(at, min(at + _CHUNK_BYTES, self.nbytes)) for at in range(0, self.nbytes, _CHUNK_BYTES))

    def middle(self) -> bytes:
        """Return up to 64 bytes from the middle of the tensor; fingerprints use them to distinguish models."""
        return bytes(self._read_bytes(*middle_of(self.nbytes)))

    def _read_bytes(self, start: int, stop: int) -> bytearray:
        buffer = bytearray(stop - start)
        self.fill(memoryview(buffer), [(self.start + start, len(buffer))])
        return buffer


def middle_of(nbytes: int) -> tuple[int, int]:
    """Return the half-open byte range that ``TensorInfo.middle`` returns of a tensor of ``nbytes``."""
    start = max(0, nbytes - _MIDDLE_BYTES) // 2
    return start, start + min(_MIDDLE_BYTES, nbytes)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"found the constant {text}, which JSON does not have")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice")
        result[key] = value
    return result


def _strict_object(raw: bytes, constant: Callable[[str], float]) -> dict[str, object]:
    """Parse ``raw`` as a UTF-8 JSON object without duplicate keys; raises ValueError.

    constant: converts NaN and Infinity, which Python writes although JSON does not have them.
    """
    try:
        value: object = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")  # noqa: TRY004  callers catch ValueError
    return cast("dict[str, object]", value)


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object of at most 100 MB without duplicate keys; raises ConfigError.

    NaN and Infinity are accepted, because published configs contain them (time_step_limit of Nemotron-3); code that
    needs a finite number checks for it.
    """
    try:
        size = path.stat().st_size
        if size > MAX_HEADER_BYTES:
            raise ConfigError(f"{path}: {size} bytes, at most {MAX_HEADER_BYTES} are allowed for a JSON file")
        return _strict_object(path.read_bytes(), float)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check that the download is complete") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not a valid JSON object: {error}") from error


def truncated(path: Path, size: int, needed: int, where: str) -> TruncatedFileError:
    """Return the error for a file of ``size`` bytes that needs ``needed``; where: the place of the cut."""
    return TruncatedFileError(
        f"{path}: truncated {where}: the file has {size} bytes, its header needs {needed} ({needed - size} are "
        "missing); download the file again"
    )


def _fail(path: Path, what: str) -> NoReturn:
    raise HostileFileError(f"{path}: {what}; download the file again")


def _read_raw_header(path: Path) -> tuple[int, bytes, int]:
    """Return the length field, the header's bytes and the file's size."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened ({error.strerror}); check that the download is complete and readable"
        ) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise truncated(path, size, 8, "before its header")
        length = int.from_bytes(file.read(8), "little")
        allowed = min(MAX_HEADER_BYTES, size - 8)
        if allowed < length <= MAX_HEADER_BYTES and file.read(1) in (b"{", b""):
            raise truncated(path, size, 8 + length, "inside its header")
        if not 2 <= length <= allowed:
            _fail(path, f"header length is {length}, allowed are 2 to {allowed} of {size} bytes (a Git LFS pointer?)")
        return length, file.read(length), size


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one safetensors file.

    Checks the length field, UTF-8, JSON without duplicate keys, dtypes, shapes, that every tensor's bytes match its
    shape and dtype, and that the tensors cover the data exactly once, without holes or overlaps.

    Raises HostileFileError with the found and the allowed value, and TruncatedFileError where the header is valid but
    the file ends before the bytes it describes.
    """
    length, raw, size = _read_raw_header(path)
    if len(raw) != length or raw[:1] != b"{":
        _fail(path, f"the header has {len(raw)} of {length} bytes and starts {raw[:1]!r}; it must start with '{{'")
    try:
        entries = _strict_object(raw, _refuse_constant)
    except ValueError as error:
        raise HostileFileError(f"{path}: the header is not valid JSON: {error}") from error
    _check_metadata(path, entries.pop("__metadata__", None))
    base = 8 + length
    # An interrupted download has a valid header, so check against the size that the header describes.
    described = max(size, base + max((_end_of(entry) for entry in entries.values()), default=0))
    infos = {name: _parse_entry(path, name, entry, base=base, size=described) for name, entry in entries.items()}
    _check_coverage(path, infos, base=base, size=described)
    if described > size:
        first = min((info for info in infos.values() if info.stop > size), key=lambda info: info.start)
        raise truncated(path, size, described, f"at tensor {first.name!r}")
    return infos


def _end_of(entry: object) -> int:
    """Return the last data offset of a header entry, 0 where it has no valid one."""
    offsets = cast("dict[str, object]", entry).get("data_offsets") if isinstance(entry, dict) else None
    return max(_naturals(offsets) or [0])


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    texts = cast("dict[str, object]", metadata) if isinstance(metadata, dict) else {"": metadata}
    for key, value in texts.items():
        if not isinstance(value, str):
            _fail(path, f"__metadata__ entry {key!r} is {value!r}, allowed is an object of strings")


def _naturals(value: object) -> list[int] | None:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= _MAX_COUNT for n in items):
        return None
    return cast("list[int]", items)


def _parse_entry(path: Path, name: str, entry: object, *, base: int, size: int) -> TensorInfo:
    def fail(what: str) -> NoReturn:
        _fail(path, f"tensor {name!r} {what}")

    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    if set(fields) != {"dtype", "shape", "data_offsets"}:
        fail(f"has {entry!r:.200}, allowed are exactly dtype, shape and data_offsets")
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fail(f"has dtype {dtype!r}, known are {', '.join(DTYPE_BITS)}")
    shape = _naturals(fields["shape"])
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        allowed = f"allowed are at most {_MAX_DIMENSIONS} integers from 0 to 2^63-1"
        fail(f"has shape {fields['shape']!r:.200}, {allowed}")
    bits = DTYPE_BITS[dtype]
    for dimension in shape:
        # A zero elsewhere in the shape must not hide a product that overflows.
        bits *= max(dimension, 1)
    if bits // 8 > _MAX_COUNT:
        fail(f"has shape {shape}, whose size overflows 2^63-1 bytes")
    bits = 0 if 0 in shape else bits
    offsets = _naturals(fields["data_offsets"])
    data_bytes = size - base
    if offsets is None or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        allowed = f"allowed are two rising integers from 0 to {data_bytes}, the bytes after the header"
        fail(f"has data_offsets {fields['data_offsets']!r:.200}, {allowed}")
    start, stop = offsets
    if bits != 8 * (stop - start):
        fail(f"holds {stop - start} bytes, shape {shape} of {dtype} needs {bits / 8:g}")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), file=path, start=base + start, stop=base + stop)


def _check_coverage(path: Path, infos: Mapping[str, TensorInfo], *, base: int, size: int) -> None:
    at = base
    before = "the header"
    for info in sorted(infos.values(), key=lambda i: (i.start, i.stop)):
        if info.start < at:
            _fail(path, f"tensor {info.name!r} overlaps {before} by {at - info.start} bytes; each byte has one owner")
        if info.start > at:
            _fail(path, f"a hole of {info.start - at} bytes between {before} and {info.name!r}; none is allowed")
        at = info.stop
        before = repr(info.name)
    if at != size:
        _fail(path, f"{size - at} bytes follow {before}; the tensors must cover the file to its end")
