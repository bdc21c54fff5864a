"""Layouts: balance, wire form, and what a person reads when two models differ."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import MalformedMessage, SpecError
from anabranch.merge.fragments import Layout, TensorSpec, plan_layout

MODEL = [
    TensorSpec("embed", (256, 64), kind="embedding"),
    TensorSpec("blocks.0.attn.weight", (384, 128)),
    TensorSpec("blocks.0.norm", (128,)),
    TensorSpec("blocks.0.mlp.weight", (128, 512)),
    TensorSpec("scale", ()),
]

sizes = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)


def replaced(position: int, tensor: TensorSpec) -> Layout:
    return plan_layout([*MODEL[:position], tensor, *MODEL[position + 1 :]], 2)


def wire(**changes: Any) -> dict[str, Any]:
    return {"tensors": [["a", [2, 3], "weights"], ["b", [4], "embedding"]], "fragments": 2} | changes


def test_sizes_and_segments() -> None:
    layout = plan_layout(MODEL, 1)
    fragment = layout.fragments[0]
    assert MODEL[4].size == 1
    assert layout.size == fragment.size == 256 * 64 + 384 * 128 + 128 + 128 * 512 + 1
    assert fragment.tensors == layout.tensors == tuple(MODEL)
    assert fragment.segments[:2] == ((MODEL[0], 0, 16384), (MODEL[1], 16384, 65536))
    assert fragment.segments[-1] == (MODEL[4], fragment.size - 1, fragment.size)


def test_largest_first_into_the_lightest() -> None:
    tensors = [TensorSpec(name, (size,)) for name, size in zip("abcdef", (3, 5, 2, 4, 2, 2), strict=True)]
    layout = plan_layout(tensors, 2)
    # b5 -> 0, d4 -> 1, a3 -> 1 (7), c2 -> 0 (7), e2 -> 0 (tie: lowest), f2 -> 1; inside, model order
    assert ["".join(t.name for t in f.tensors) for f in layout.fragments] == ["bce", "adf"]
    assert [f.index for f in layout.fragments] == [0, 1]


@given(sizes, st.integers(1, 60))
def test_every_tensor_once_and_balanced(elements: list[int], fragments: int) -> None:
    fragments = min(fragments, len(elements))
    tensors = [TensorSpec(f"t{i}", (size,)) for i, size in enumerate(elements)]
    layout = plan_layout(tensors, fragments)
    assert sorted(t.name for f in layout.fragments for t in f.tensors) == sorted(t.name for t in tensors)
    assert all(fragment.tensors for fragment in layout.fragments)
    order = {tensor.name: place for place, tensor in enumerate(tensors)}
    for fragment in layout.fragments:
        places = [order[tensor.name] for tensor in fragment.tensors]
        assert places == sorted(places)
    # the last tensor put on the heaviest fragment found it the lightest: at most the mean before it came
    heaviest = max(fragment.size for fragment in layout.fragments)
    assert heaviest <= sum(elements) / fragments + max(elements)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 3))
def test_within_four_thirds_of_the_optimum(elements: list[int], fragments: int) -> None:
    fragments = min(fragments, len(elements))
    layout = plan_layout([TensorSpec(f"t{i}", (size,)) for i, size in enumerate(elements)], fragments)
    loads = {(0,) * fragments}
    for size in elements:
        loads = {
            tuple(sorted((*load[:k], load[k] + size, *load[k + 1 :]))) for load in loads for k in range(fragments)
        }
    optimum = min(max(load) for load in loads)
    assert max(fragment.size for fragment in layout.fragments) * 3 * fragments <= optimum * (4 * fragments - 1)


@pytest.mark.parametrize(
    ("tensors", "fragments", "message"),
    [
        ([], 1, "model: has no tensors"),
        (MODEL, 0, "fragments = 0: must be 1 to 5"),
        (MODEL, 6, "fragments = 6: this model has 5 tensors.*1 to 5 are allowed; set fragments"),
        ([*MODEL, MODEL[2]], 2, "'blocks.0.norm': is there 2 times"),
        ([TensorSpec("empty", (3, 0))], 1, r"'empty': shape \(3, 0\) has no elements"),
        ([TensorSpec("n", (), "counter"), *MODEL], 2, "'embed': comes after a buffer; buffers must be the last ones"),
    ],
)
def test_impossible_plans(tensors: list[TensorSpec], fragments: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan_layout(tensors, fragments)


@given(sizes, st.integers(1, 60), st.booleans())
def test_wire_round_trip(elements: list[int], fragments: int, embedding: bool) -> None:
    tensors = [
        TensorSpec(f"t{i}.ü", (size, 2), "embedding" if embedding and i == 0 else "weights")
        for i, size in enumerate(elements)
    ]
    layout = plan_layout(tensors, min(fragments, len(elements)))
    again = Layout.from_wire(json.loads(json.dumps(layout.to_wire())))
    assert again == layout
    assert again.hash == layout.hash
    assert layout.first_difference(again) is None


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (None, "must be a map"),
        ([], "must be a map"),
        ({"tensors": []}, "must be a map with exactly"),
        (wire(extra=1), "must be a map with exactly"),
        (wire(tensors="ab"), "'tensors' must be a list"),
        (wire(tensors=[]), "no tensors"),
        (wire(tensors=[["a", [1], "weights"]] * 70_000), "at most 65536"),
        (wire(fragments=True), "'fragments' must be an integer, not bool"),
        (wire(fragments=2.0), "not float"),
        (wire(fragments=0), "fragments = 0"),
        (wire(fragments=-(2**70)), "must be 1 to 2"),
        (wire(fragments=2**70), "this model has 2 tensors"),
        (wire(tensors=[["a", [1], "weights"], "abc"]), r"number 2 must be \[name"),
        (wire(tensors=[["a", [1]], ["b", [1], "weights"]]), r"number 1 must be \[name"),
        (wire(tensors=[[b"a", [1], "weights"]]), "its name must be a string"),
        (wire(tensors=[["", [1], "weights"]]), "its name must be a string"),
        (wire(tensors=[["a" * 513, [1], "weights"]]), "its name must be a string"),
        (wire(tensors=[["a", 3, "weights"]]), "its shape must be a list"),
        (wire(tensors=[["a", [1] * 33, "weights"]]), "at most 32 dimensions"),
        (wire(tensors=[["a", [-1], "weights"]]), "dimensions must be integers"),
        (wire(tensors=[["a", [0], "weights"]]), "dimensions must be integers"),
        (wire(tensors=[["a", [2**64], "weights"]]), "dimensions must be integers"),
        (wire(tensors=[["a", [1.0], "weights"]]), "dimensions must be integers"),
        (wire(tensors=[["a", [True], "weights"]]), "dimensions must be integers"),
        (wire(tensors=[["a", [2**40, 2**40], "weights"]]), "more than"),
        (wire(tensors=[["a", [1], True]]), "its kind must be one of weights, embedding"),
        (wire(tensors=[["a", [1], "bias"]]), "its kind must be one of weights, embedding"),
        (wire(tensors=[["a", [1], "counter"], ["b", [1], "weights"]]), "'b': comes after a buffer"),
        (wire(tensors=[["a", [1], "weights"], ["a", [1], "weights"]]), "'a': is there 2 times"),
    ],
)
def test_hostile_wire_input(obj: object, message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        Layout.from_wire(obj)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=30)
@given(json_like, json_like)
def test_any_garbage_is_malformed_or_a_layout(tensors: object, fragments: object) -> None:
    try:
        layout = Layout.from_wire({"tensors": tensors, "fragments": fragments})
    except MalformedMessage:
        return
    assert layout.fragments


def test_the_hash_is_fixed_and_sees_everything() -> None:
    base = plan_layout(MODEL, 2)
    others = [
        replaced(2, TensorSpec("renamed", (128,))),
        replaced(2, TensorSpec("blocks.0.norm", (129,))),
        replaced(2, TensorSpec("blocks.0.norm", (128,), kind="embedding")),
        plan_layout(MODEL, 3),
        plan_layout(MODEL[::-1], 2),
        plan_layout(MODEL[:-1], 2),
    ]
    assert len({layout.hash for layout in [base, *others]}) == 7
    assert plan_layout([TensorSpec("a", (2,))], 1).hash == GOLDEN_HASH
    assert [base.first_difference(other) is None for other in others] == [False] * 4 + [True, False]


GOLDEN_HASH = "55cc5d01f87ae6ad47fbbc3e39aebcb1d7ad3355b20ed7463ca79ec2604c43dd"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            replaced(1, TensorSpec("blocks.0.attn.weight", (384, 96))),
            "tensor 'blocks.0.attn.weight' has shape (384, 128) here, (384, 96) in the run",
        ),
        (
            replaced(0, TensorSpec("embed", (256, 64))),
            "tensor 'embed' is of the kind 'embedding' here, 'weights' in the run",
        ),
        (replaced(2, TensorSpec("other", (128,))), "tensor 'blocks.0.norm' exists here but not in the run"),
        (plan_layout(MODEL[:4], 2), "tensor 'scale' exists here but not in the run"),
        (plan_layout([*MODEL, TensorSpec("head", (2,))], 2), "tensor 'head' of the run does not exist here"),
        (
            plan_layout([*MODEL[:2], TensorSpec("new", (2,)), *MODEL[2:]], 2),
            "tensor 'new' of the run does not exist here",
        ),
        (plan_layout([MODEL[1], MODEL[0], *MODEL[2:]], 2), None),
        (plan_layout(MODEL, 3), "the model is split into 2 fragments here, 3 in the run"),
        (plan_layout(MODEL, 2), None),
    ],
)
def test_the_first_difference_is_a_sentence(other: Layout, sentence: str | None) -> None:
    assert plan_layout(MODEL, 2).first_difference(other) == sentence
