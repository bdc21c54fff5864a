"""safetensors files, streamed: neither writing nor reading holds a second copy of the file.

The format: eight bytes with the header's length, a JSON header (name → dtype, shape, offsets), the tensors' bytes
in the header's order without gaps. Ours have the layout's order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from anabranch.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anabranch.merge.fragments import Layout
    from anabranch.model import Float32

PIECE_BYTES = 8 * 1024 * 1024  # what passes at a time: an object store's client keeps a copy of it
_HEADER_LIMIT_BYTES = 100_000_000  # safetensors' own
_DTYPES = {("f", 4): "F32", ("i", 8): "I64"}


class Sink(Protocol):
    """What tensors are written to."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class Source(Protocol):
    """What tensors are read from."""

    def readinto(self, target: Any, /) -> int | None: ...


class HashedSink:
    """Counts and hashes what is written through it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        self._sha256.update(view)
        self._sink.write(view)
        self.bytes += view.nbytes

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


class HashedSource:
    """Hashes what is read through it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._sha256 = hashlib.sha256()

    def readinto(self, target: Any, /) -> int:
        count = self._source.readinto(target) or 0
        self._sha256.update(memoryview(target)[:count])
        return count

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def write_tensors(sink: Sink, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors`, float32 or int64, as one safetensors file, in their order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, array in tensors.items():
        stop = start + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.kind, array.itemsize],
            "shape": list(array.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of eight
    sink.write(len(text).to_bytes(8, "little") + text)
    for array in tensors.values():
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).data.cast("B")
        for piece in range(0, data.nbytes, PIECE_BYTES):
            sink.write(data[piece : piece + PIECE_BYTES])


def read_tensors(source: Source, layout: Layout) -> list[Float32]:
    """The flat fragments, each [size], of a file that holds exactly the tensors of `layout`.

    CheckpointError naming the first thing that is wrong; digests are the caller's business.
    """
    flats = [np.empty(fragment.size, np.float32) for fragment in layout.fragments]
    slots = {
        tensor.name: (tensor.shape, flat[start:stop])
        for fragment, flat in zip(layout.fragments, flats, strict=True)
        for tensor, start, stop in fragment.segments
    }
    at = 0
    for name, row in _read_header(source):
        if name not in slots:
            raise CheckpointError(f"holds the tensor {name!r}, which its layout does not have")
        shape, slot = slots.pop(name)
        expected = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + slot.nbytes]}
        if row != expected:
            raise CheckpointError(f"tensor {name!r} is {row!r}, its layout says {expected!r}")
        _fill(source, slot.data.cast("B"))
        at += slot.nbytes
    if slots:
        raise CheckpointError(f"lacks the tensor {next(iter(slots))!r} of its layout (one of {len(slots)})")
    return flats


def read_all(source: Source, size: int) -> bytes:
    """The next `size` bytes; CheckpointError if the file ends before."""
    data = bytearray(size)
    _fill(source, memoryview(data))
    return bytes(data)


def drain(source: Source) -> None:
    """Read to the end, keeping nothing."""
    piece = memoryview(bytearray(PIECE_BYTES))
    while source.readinto(piece):
        pass


def _read_header(source: Source) -> list[tuple[str, Any]]:
    """(name, row) in the order of their bytes."""
    length = int.from_bytes(read_all(source, 8), "little")
    if length > _HEADER_LIMIT_BYTES:
        raise CheckpointError(f"is no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(read_all(source, length))
        header.pop("__metadata__", None)
        return sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise CheckpointError(f"is no safetensors file: its header cannot be read: {error!r}") from None


def _fill(source: Source, target: memoryview) -> None:
    filled = 0
    while filled < target.nbytes:
        count = source.readinto(target[filled : filled + PIECE_BYTES])
        if not count:
            raise CheckpointError("ends too early")
        filled += count
