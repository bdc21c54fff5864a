"""A model as a run sees it: named tensors, the layout they give, and flat fragments of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.merge.fragments import Layout, TensorSpec, plan_layout
from anabranch.merge.names import Kind
from anabranch.spec import RunSpec

Float32 = NDArray[np.float32]


def layout_for(
    spec: RunSpec, tensors: Sequence[tuple[str, Sequence[int]]], buffers: Mapping[str, Kind] | None = None
) -> Layout:
    """The run's layout of these (name, shape): every member computes the same one, whatever the order.

    They are sorted by name, since a file (`--init`) has them in another order than the model. `buffers`: which of
    them are, and of what kind; they come last. A fragment holds whole tensors: of a model with fewer tensors than
    `rounds.fragments` each is a fragment.
    """

    def kind(name: str) -> Kind:
        return (buffers or {}).get(name) or ("embedding" if spec.merge.is_embedding(name) else "weights")

    named = [TensorSpec(name, tuple(shape), kind(name)) for name, shape in tensors]
    named.sort(key=lambda tensor: (tensor.is_buffer, tensor.name))
    return plan_layout(named, min(spec.rounds.fragments, max(1, len(named))))


def flatten(arrays: Sequence[NDArray[Any]]) -> Float32:
    """Tensors of one fragment, in its order, as one flat float32 vector [size]."""
    return np.concatenate([np.ascontiguousarray(a, dtype=np.float32).reshape(-1) for a in arrays])


def unflatten(layout: Layout, flats: Sequence[Float32]) -> dict[str, Float32]:
    """Flat fragments back to tensors (views) under the model's own names, in the layout's order."""
    found = {
        tensor.name: flat[start:stop].reshape(tensor.shape)
        for fragment, flat in zip(layout.fragments, flats, strict=True)
        for tensor, start, stop in fragment.segments
    }
    return {tensor.name: found[tensor.name] for tensor in layout.tensors}
