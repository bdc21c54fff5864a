"""Which tensors travel together: the model's layout, split into P fragments balanced by bytes."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast, get_args

from anabranch.errors import MalformedMessage, SpecError
from anabranch.merge.names import Kind

BYTES_PER_ELEMENT = 4  # float32 everywhere

_FORMAT = "anabranch-layout/1"  # part of the hash: change it with the encoding or with plan_layout's algorithm
_MAX_TENSORS = 1 << 16
_MAX_NAME = 512
_MAX_NDIM = 32
_MAX_ELEMENTS = 1 << 44


@dataclass(frozen=True)
class TensorSpec:
    """One float32 tensor of the model: its name, its shape, and what it is (see `MergeRules`)."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "weights"

    @property
    def size(self) -> int:
        """Elements; a scalar, shape (), has one."""
        return math.prod(self.shape)

    @property
    def is_buffer(self) -> bool:
        """Whether training changes it without a gradient."""
        return self.kind in ("statistic", "counter")


@dataclass(frozen=True)
class Fragment:
    """Whole tensors that are synchronized together, in model order."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def size(self) -> int:
        """Elements of the fragment's flat float32 vector."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def segments(self) -> tuple[tuple[TensorSpec, int, int], ...]:
        """(tensor, start, stop): where each tensor lies in the flat vector (in order, C order)."""
        found, start = [], 0
        for tensor in self.tensors:
            found.append((tensor, start, start + tensor.size))
            start += tensor.size
        return tuple(found)

    @cached_property
    def buffers(self) -> tuple[tuple[TensorSpec, int, int], ...]:
        """Those of the segments that hold buffers."""
        return tuple(segment for segment in self.segments if segment[0].is_buffer)

    @cached_property
    def weights(self) -> int:
        """Elements before the first buffer: models have theirs at the end."""
        return self.buffers[0][1] if self.buffers else self.size


@dataclass(frozen=True)
class Layout:
    """All tensors, and the fragments `plan_layout` made of them."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]

    @cached_property
    def size(self) -> int:
        """Elements of the whole model."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def hash(self) -> str:
        """SHA-256, hex, of names, shapes, kinds and P: equal where members fit together."""
        text = json.dumps([_FORMAT, self.to_wire()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def to_wire(self) -> dict[str, object]:
        """For msgpack: `{"tensors": [[name, [dim, ...], kind], ...], "fragments": P}`."""
        tensors = [[tensor.name, list(tensor.shape), tensor.kind] for tensor in self.tensors]
        return {"tensors": tensors, "fragments": len(self.fragments)}

    @staticmethod
    def from_wire(obj: object) -> Layout:
        """Read what `to_wire` wrote, trusting nothing; the fragments are planned anew.

        Raises MalformedMessage naming the first thing that is wrong.
        """
        if not isinstance(obj, dict) or set(obj) != {"tensors", "fragments"}:
            raise MalformedMessage("layout: must be a map with exactly the keys 'tensors' and 'fragments'")
        rows, fragments = obj["tensors"], obj["fragments"]
        if not isinstance(rows, list | tuple) or len(rows) > _MAX_TENSORS:
            raise MalformedMessage(f"layout: 'tensors' must be a list of at most {_MAX_TENSORS} tensors")
        if type(fragments) is not int:
            raise MalformedMessage(f"layout: 'fragments' must be an integer, not {type(fragments).__name__}")
        tensors = [_tensor_from_wire(position, row) for position, row in enumerate(rows)]
        if sum(tensor.size for tensor in tensors) > _MAX_ELEMENTS:
            raise MalformedMessage(f"layout: the model has more than {_MAX_ELEMENTS} elements")
        try:
            return plan_layout(tensors, fragments)
        except SpecError as error:
            raise MalformedMessage(f"layout: {error}") from error

    def first_difference(self, other: Layout) -> str | None:
        """A sentence on the first tensor in which `other`, the run's layout, differs; None if all are there and
        equal. About their order it says nothing: `model.layout_for` gives everybody the same."""
        there = {tensor.name: tensor for tensor in other.tensors}
        for ours in self.tensors:
            theirs = there.pop(ours.name, None)
            if theirs is None:
                return f"tensor {ours.name!r} exists here but not in the run"
            if ours.shape != theirs.shape:
                return f"tensor {ours.name!r} has shape {ours.shape} here, {theirs.shape} in the run"
            if ours.kind != theirs.kind:
                return f"tensor {ours.name!r} is of the kind {ours.kind!r} here, {theirs.kind!r} in the run"
        if there:
            return f"tensor {next(iter(there))!r} of the run does not exist here"
        if len(self.fragments) != len(other.fragments):
            here, count = len(self.fragments), len(other.fragments)
            return f"the model is split into {here} fragments here, {count} in the run"
        return None


def plan_layout(tensors: Sequence[TensorSpec], fragments: int) -> Layout:
    """Split the model into `fragments` fragments of nearly equal bytes.

    Whole tensors, largest first (ties: model order), each into the lightest fragment so far (ties: lowest
    index); inside a fragment they stand in model order. The heaviest fragment is at most 4/3 of the best
    possible (Graham 1969). Raises SpecError where that cannot be done.
    """
    _check_plan(tensors, fragments)
    by_size = sorted(range(len(tensors)), key=lambda position: -tensors[position].size)
    members: list[list[int]] = [[] for _ in range(fragments)]
    loads = [(0, index) for index in range(fragments)]  # a heap: lightest first, then lowest index
    for position in by_size:
        load, index = loads[0]
        members[index].append(position)
        heapq.heapreplace(loads, (load + BYTES_PER_ELEMENT * tensors[position].size, index))
    return Layout(
        tensors=tuple(tensors),
        fragments=tuple(
            Fragment(index, tuple(tensors[position] for position in sorted(positions)))
            for index, positions in enumerate(members)
        ),
    )


def _check_plan(tensors: Sequence[TensorSpec], fragments: int) -> None:
    if not tensors:
        raise SpecError("model: has no tensors; at least one is needed: pass the model's trainable parameters")
    if fragments < 1:
        raise SpecError(f"fragments = {fragments}: must be 1 to {len(tensors)}; 24 is a good start")
    if len(tensors) < fragments:
        raise SpecError(
            f"fragments = {fragments}: this model has {len(tensors)} tensors and a fragment holds whole "
            f"tensors, so 1 to {len(tensors)} are allowed; set fragments to {len(tensors)} or fewer"
        )
    name, times = Counter(tensor.name for tensor in tensors).most_common(1)[0]
    if times > 1:
        raise SpecError(f"tensor {name!r}: is there {times} times; names must differ: list shared weights once")
    if (late := _weights_after_buffers(tensors)) is not None:
        raise SpecError(f"tensor {late.name!r}: comes after a buffer; buffers must be the last ones")
    for tensor in tensors:
        if any(dim < 1 for dim in tensor.shape):
            raise SpecError(
                f"tensor {tensor.name!r}: shape {tensor.shape} has no elements; dimensions must be 1 or "
                "more: leave empty tensors out"
            )


def _weights_after_buffers(tensors: Sequence[TensorSpec]) -> TensorSpec | None:
    first = next((position for position, tensor in enumerate(tensors) if tensor.is_buffer), len(tensors))
    return next((tensor for tensor in tensors[first:] if not tensor.is_buffer), None)


def _tensor_from_wire(position: int, row: object) -> TensorSpec:
    where = f"layout: tensor number {position + 1}"
    if not isinstance(row, list | tuple) or len(row) != 3:
        raise MalformedMessage(f"{where} must be [name, shape, kind]")
    name, shape, kind = cast("Sequence[object]", row)
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise MalformedMessage(f"{where}: its name must be a string of 1 to {_MAX_NAME} characters")
    if not isinstance(shape, list | tuple) or len(shape) > _MAX_NDIM:
        raise MalformedMessage(f"{where} ({name!r}): its shape must be a list of at most {_MAX_NDIM} dimensions")
    if any(type(dim) is not int or not 1 <= dim <= _MAX_ELEMENTS for dim in shape):
        raise MalformedMessage(f"{where} ({name!r}): its dimensions must be integers from 1 to {_MAX_ELEMENTS}")
    if kind not in get_args(Kind):
        raise MalformedMessage(f"{where} ({name!r}): its kind must be one of {', '.join(get_args(Kind))}")
    return TensorSpec(name, tuple(shape), cast("Kind", kind))
