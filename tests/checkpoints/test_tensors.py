"""Streamed safetensors: what we write others read, what others write we read, and damage is named."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from anabranch.checkpoints.tensors import HashedSink, HashedSource, drain, read_all, read_tensors, write_tensors
from anabranch.errors import CheckpointError
from anabranch.merge.fragments import Layout, TensorSpec, plan_layout
from anabranch.model import Float32, unflatten

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def made(shapes: list[tuple[int, ...]], fragments: int = 1, seed: int = 0) -> tuple[Layout, list[Float32]]:
    layout = plan_layout([TensorSpec(f"layer.{i}.größe", shape) for i, shape in enumerate(shapes)], fragments)
    generator = np.random.default_rng(seed)
    return layout, [generator.standard_normal(f.size).astype(np.float32) for f in layout.fragments]


def written(layout: Layout, flats: list[Float32]) -> bytes:
    buffer = io.BytesIO()
    write_tensors(buffer, unflatten(layout, flats))
    return buffer.getvalue()


@given(SHAPES, st.data())
def test_what_is_written_comes_back_bit_for_bit(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    layout, flats = made(shapes, data.draw(st.integers(1, len(shapes))), data.draw(st.integers(0, 2**31)))
    for ours, theirs in zip(flats, read_tensors(io.BytesIO(written(layout, flats)), layout), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@given(SHAPES)
def test_the_safetensors_library_reads_what_we_write(shapes: list[tuple[int, ...]]) -> None:
    layout, flats = made(shapes)
    wanted = unflatten(layout, flats)
    found = load(written(layout, flats))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_we_read_what_the_library_writes_in_another_order() -> None:
    layout, flats = made([(2, 3), (4,), (1,)], 2)
    tensors = {name: array.copy() for name, array in reversed(unflatten(layout, flats).items())}
    for ours, theirs in zip(flats, read_tensors(io.BytesIO(save(tensors)), layout), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_values_that_are_no_numbers_keep_their_bits() -> None:
    layout, _ = made([(3,)])
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000], np.uint32).view(np.float32)
    [found] = read_tensors(io.BytesIO(written(layout, [odd])), layout)
    np.testing.assert_array_equal(found.view(np.uint32), odd.view(np.uint32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("b"), r"lacks the tensor 'b' of its layout \(one of 1\)"),
        (lambda h: h.update(c=h.pop("b")), "holds the tensor 'c'"),
        (lambda h: h["b"].update(dtype="F16"), "tensor 'b' is .*'F16'"),
        (lambda h: h["b"].update(shape=[2, 1]), r"tensor 'b' is .*\[2, 1\]"),
        (lambda h: h["b"].update(data_offsets=[16, 24]), "tensor 'b' is"),
        (lambda h: h["b"].update(data_offsets="x"), "tensor 'b' is|cannot be read"),
        (lambda h: h.update(b=7), "its header cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_the_layout_is_named(change: object, message: str) -> None:
    layout = plan_layout([TensorSpec("a", (3,)), TensorSpec("b", (2,))], 1)
    data = written(layout, [np.arange(5, dtype=np.float32)])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=message):
        read_tensors(io.BytesIO(len(text).to_bytes(8, "little") + text + data[8 + length :]), layout)


@pytest.mark.parametrize("data", [b"", b"1234", b"\xff" * 8, (9).to_bytes(8, "little") + b"not json!", bytes(8)])
def test_what_is_no_safetensors_file_is_said_so(data: bytes) -> None:
    layout, _ = made([(2,)])
    with pytest.raises(CheckpointError, match=r"ends too early|no safetensors file"):
        read_tensors(io.BytesIO(data), layout)


def test_a_file_cut_anywhere_is_never_taken() -> None:
    layout, flats = made([(2, 2), (3,)], 2)
    data = written(layout, flats)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            read_tensors(io.BytesIO(data[:length]), layout)


def test_digests_cover_every_byte_in_both_directions() -> None:
    buffer = io.BytesIO()
    sink = HashedSink(buffer)
    sink.write(b"abc")
    sink.write(memoryview(b"defg"))
    whole, parts = HashedSource(io.BytesIO(buffer.getvalue())), HashedSource(io.BytesIO(buffer.getvalue()))
    drain(whole)
    assert read_all(parts, 2) == b"ab"
    drain(parts)
    assert sink.bytes == 7
    assert sink.hexdigest() == whole.hexdigest() == parts.hexdigest()
