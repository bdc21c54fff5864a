"""Weighted and radial-directional averages: golden values, properties, and every defined edge case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from anabranch.errors import SpecError
from anabranch.merge import _blocks
from anabranch.merge.average import RADIAL_FROM, MergeRules, Rule, merge_fragment
from anabranch.merge.fragments import Fragment, TensorSpec
from tests.merge import reference

Vector = NDArray[np.float32]

RULES: dict[Rule, MergeRules] = {
    "average": MergeRules("average", "average"),
    "radial": MergeRules("radial", "radial"),
}
F32_MAX = float(np.finfo(np.float32).max)


def one(size: int) -> Fragment:
    return Fragment(0, (TensorSpec("t", (size,)),))


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def merged(rule: Rule, deltas: list[Vector], weights: list[float]) -> Vector:
    """Few elements are followed by zeros, which change no norm: tensors below `RADIAL_FROM` are a case apart."""
    size = deltas[0].size
    padded = [np.pad(delta, (0, max(0, RADIAL_FROM - size))) for delta in deltas]
    result = merge_fragment(one(padded[0].size), padded, weights, RULES[rule])
    assert result is not None
    assert result.dtype == np.float32
    assert not result[size:].any()
    return result[:size]


def length(flat: NDArray[np.floating]) -> float:
    return float(np.sqrt((flat.astype(np.float64) ** 2).sum()))


def random_deltas(seed: int, count: int, size: int) -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) * np.float32(10.0 ** (k % 3)) for k in range(count)]


def assert_close(seen: Vector, wanted: NDArray[np.floating], deltas: list[Vector]) -> None:
    """Equal up to float32 rounding at the scale of the deltas."""
    np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-5 * max(length(delta) for delta in deltas))


cases = st.tuples(
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6),
    st.integers(2, 300),
)


# golden values


def test_average_of_two_is_what_one_computes_by_hand() -> None:
    result = merged("average", [vector(1, 2), vector(5, -2)], [3.0, 1.0])
    np.testing.assert_array_equal(result, vector(2, 1))


def test_radial_keeps_the_mean_norm_of_orthogonal_deltas() -> None:
    result = merged("radial", [vector(3, 0), vector(0, 1)], [1.0, 1.0])
    np.testing.assert_allclose(result, [np.sqrt(2), np.sqrt(2)], rtol=1e-6)  # norm (3 + 1) / 2, direction (1, 1)


def test_each_tensor_is_merged_alone_and_by_its_rule() -> None:
    fragment = Fragment(
        3, (TensorSpec("embed", (4, 5), kind="embedding"), TensorSpec("w", (6, 3)), TensorSpec("b", ()))
    )
    deltas = random_deltas(7, 3, fragment.size)
    weights = [1.0, 2.5, 0.5]
    result = merge_fragment(fragment, deltas, weights, MergeRules())
    assert result is not None
    wanted = [
        reference.average([d[:20] for d in deltas], weights),
        reference.radial([d[20:38] for d in deltas], weights),
        reference.average([d[38:] for d in deltas], weights),  # a scalar: below RADIAL_FROM
    ]
    np.testing.assert_allclose(result, np.concatenate(wanted), rtol=2e-5, atol=1e-6)


def test_statistics_are_averaged_and_of_counters_the_largest_counts() -> None:
    """A delta is base - value: the largest value has the smallest. Who has no weight has no say."""
    fragment = Fragment(
        0, (TensorSpec("w", (18,)), TensorSpec("mean", (20,), "statistic"), TensorSpec("n", (2,), "counter"))
    )
    deltas = random_deltas(8, 3, fragment.size)
    for delta, counted in zip(deltas, ((-3, 5), (-7, 4), (-900, -900)), strict=True):
        delta[38:] = counted
    result = merge_fragment(fragment, deltas, [1.0, 3.0, 0.0], MergeRules())
    assert result is not None
    np.testing.assert_allclose(
        result[18:38], reference.average([d[18:38] for d in deltas[:2]], [1.0, 3.0]), rtol=1e-5
    )
    np.testing.assert_array_equal(result[38:], [-7, 4])


@pytest.mark.parametrize("rule", ["average", "radial"])
def test_a_tensor_of_several_blocks_matches_the_reference(rule: Rule) -> None:
    deltas = random_deltas(1, 4, 2 * _blocks.BLOCK + 77)
    weights = [4.0, 1.0, 2.0, 3.0]
    wanted = getattr(reference, rule)(deltas, weights)
    np.testing.assert_allclose(merged(rule, deltas, weights), wanted, rtol=1e-5, atol=1e-4)


@given(cases)
@pytest.mark.parametrize("rule", ["average", "radial"])
def test_matches_the_reference(rule: Rule, case: tuple[int, list[float], int]) -> None:
    seed, weights, size = case
    deltas = random_deltas(seed, len(weights), size)
    wanted = getattr(reference, rule)(deltas, weights)
    assert_close(merged(rule, deltas, weights), wanted, deltas)


# properties


@pytest.mark.parametrize("rule", ["average", "radial"])
@pytest.mark.parametrize("scale", [1.0, 1e-30])  # the second takes the float64 path
def test_threads_do_not_change_a_bit(rule: Rule, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "TASK", 1)
    tensors = (TensorSpec("a", (3 * _blocks.BLOCK + 5,)), TensorSpec("b", (17,)), TensorSpec("c", (300, 500)))
    fragment = Fragment(0, tensors)
    deltas = [delta * np.float32(scale) for delta in random_deltas(5, 3, fragment.size)]
    weights = [1.0, 2.0, 3.0]
    alone = merge_fragment(fragment, deltas, weights, RULES[rule])
    assert alone is not None
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            result = merge_fragment(fragment, deltas, weights, RULES[rule], map_blocks=pool.map)
        assert result is not None
        assert result.tobytes() == alone.tobytes()


@given(cases)
@pytest.mark.parametrize("rule", ["average", "radial"])
def test_another_order_changes_rounding_only(rule: Rule, case: tuple[int, list[float], int]) -> None:
    seed, weights, size = case
    deltas = random_deltas(seed, len(weights), size)
    order = np.random.default_rng(seed).permutation(len(weights))
    shuffled = merged(rule, [deltas[k] for k in order], [weights[k] for k in order])
    assert_close(shuffled, merged(rule, deltas, weights), deltas)


@given(cases)
@pytest.mark.parametrize("rule", ["average", "radial"])
def test_repeating_a_merge_gives_the_same_bits(rule: Rule, case: tuple[int, list[float], int]) -> None:
    seed, weights, size = case
    deltas = random_deltas(seed, len(weights), size)
    assert merged(rule, deltas, weights).tobytes() == merged(rule, deltas, weights).tobytes()


@given(cases, st.sampled_from([2.0**-3, 2.0, 2.0**10]))
@pytest.mark.parametrize("rule", ["average", "radial"])
def test_scaling_the_deltas_scales_the_result(rule: Rule, case: tuple[int, list[float], int], factor: float) -> None:
    seed, weights, size = case
    deltas = random_deltas(seed, len(weights), size)
    scaled = [delta * np.float32(factor) for delta in deltas]
    assert_close(merged(rule, scaled, weights), merged(rule, deltas, weights) * factor, scaled)


@given(cases, st.floats(1e-6, 1e6))
@pytest.mark.parametrize("rule", ["average", "radial"])
def test_only_ratios_of_weights_matter(rule: Rule, case: tuple[int, list[float], int], factor: float) -> None:
    seed, weights, size = case
    deltas = random_deltas(seed, len(weights), size)
    other = merged(rule, deltas, [weight * factor for weight in weights])
    assert_close(other, merged(rule, deltas, weights), deltas)


@given(cases)
def test_norms_average_shrinks_radial_keeps(case: tuple[int, list[float], int]) -> None:
    seed, weights, size = case
    deltas = random_deltas(seed, len(weights), size)
    mean = sum(w * length(d) for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    assert length(merged("average", deltas, weights)) <= mean * (1 + 1e-5)
    assert length(merged("radial", deltas, weights)) == pytest.approx(mean, rel=1e-5)


# edge cases


def test_a_tensor_of_few_elements_is_averaged() -> None:
    scalar = [vector(0.1), vector(0.1), vector(-1.0)]
    result = merge_fragment(one(1), scalar, [1.0] * 3, RULES["radial"])
    np.testing.assert_allclose(result, [-0.8 / 3], rtol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [RADIAL_FROM - 1, RADIAL_FROM])
def test_from_how_many_elements_on_a_tensor_has_a_direction(size: int) -> None:
    deltas, weights = random_deltas(1, 3, size), [1.0, 2.0, 3.0]
    result = merge_fragment(one(size), deltas, weights, RULES["radial"])
    wanted = (reference.average if size < RADIAL_FROM else reference.radial)(deltas, weights)
    assert result is not None
    assert_close(result, wanted, deltas)


def test_no_weight_no_merge() -> None:
    assert merge_fragment(one(2), [vector(1, 2), vector(3, 4)], [0.0, 0.0], MergeRules()) is None
    assert merge_fragment(one(2), [], [], MergeRules()) is None


@pytest.mark.parametrize("rule", ["average", "radial"])
def test_one_contributor_is_copied_exactly(rule: Rule) -> None:
    delta = vector(1e-45, -0.0, 3e38, 1 / 3)
    ignored = vector(np.nan, np.inf, 1, 1)
    result = merged(rule, [ignored, delta], [0.0, 7.0])
    assert result.tobytes() == delta.tobytes()
    assert not np.shares_memory(result, delta)


@pytest.mark.parametrize("rule", ["average", "radial"])
def test_zero_weight_is_ignored_entirely(rule: Rule) -> None:
    a, b, ignored = vector(1, 2), vector(-1, 5), vector(np.nan, np.inf)
    result = merged(rule, [a, ignored, b], [1.0, 0.0, 2.0])
    assert result.tobytes() == merged(rule, [a, b], [1.0, 2.0]).tobytes()


def test_a_zero_delta_counts_in_the_mean_norm_only() -> None:
    result = merged("radial", [vector(0, 8), vector(0, 0)], [1.0, 3.0])
    np.testing.assert_allclose(result, [0, 2], rtol=1e-6)


@pytest.mark.parametrize("rule", ["average", "radial"])
def test_all_zero(rule: Rule) -> None:
    np.testing.assert_array_equal(merged(rule, [vector(0, 0), vector(0, 0)], [1.0, 2.0]), [0, 0])


def test_cancelling_directions_fall_back_to_the_average() -> None:
    result = merged("radial", [vector(1, 2), vector(-3, -6)], [1.0, 1.0])
    np.testing.assert_allclose(result, [-1, -2], rtol=1e-6)


@pytest.mark.parametrize(("tilt", "cancels"), [(1e-7, True), (1e-4, False)])
def test_nearly_cancelling_directions(tilt: float, cancels: bool) -> None:
    deltas = [vector(1, 0), vector(-1, tilt)]  # ‖Σ w φ‖ / Σ w is tilt / 2
    result = merged("radial", deltas, [1.0, 1.0])
    np.testing.assert_allclose(result, reference.radial(deltas, [1.0, 1.0]), rtol=1e-5, atol=1e-12)
    assert length(result) == pytest.approx(tilt / 2 if cancels else 1.0, rel=1e-3)


def test_a_small_remaining_direction_is_not_rounding_noise() -> None:
    common = random_deltas(3, 1, 1000)[0]
    deltas = [common * np.float32(3), -common * np.float32(0.7)]
    deltas[1][:10] *= np.float32(1.001)
    wanted = reference.radial(deltas, [1.0, 1.0])
    np.testing.assert_allclose(merged("radial", deltas, [1.0, 1.0]), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["average", "radial"])
@pytest.mark.parametrize("magnitude", [3e38, F32_MAX, 1e20, 1e-20, 1e-38, 1e-40, 65504.0, 6e-8])
def test_extreme_magnitudes(rule: Rule, magnitude: float) -> None:
    shape = random_deltas(11, 3, 500)
    deltas = [np.clip(d, -1, 1) * np.float32(magnitude) for d in shape]
    result = merged(rule, deltas, [1.0, 2.0, 1.5])
    assert np.isfinite(result).all()
    wanted = getattr(reference, rule)(deltas, [1.0, 2.0, 1.5])
    np.testing.assert_allclose(
        result, np.clip(wanted, -F32_MAX, F32_MAX), rtol=1e-5, atol=max(1e-6 * magnitude, 3e-45)
    )


@pytest.mark.parametrize("rule", ["average", "radial"])
def test_huge_and_tiny_together(rule: Rule) -> None:
    deltas = [vector(3e38, 0, 1), vector(1e-40, 1e-40, -1e-40), vector(0, 2, 0)]
    result = merged(rule, deltas, [1.0, 1.0, 2.0])
    wanted = getattr(reference, rule)(deltas, [1.0, 1.0, 2.0])
    np.testing.assert_allclose(result, wanted, rtol=1e-5)


@pytest.mark.parametrize("count", [3, 6, 7])
def test_an_average_of_the_largest_values_does_not_round_to_infinity(count: int) -> None:
    deltas = [vector(F32_MAX, -F32_MAX)] * count
    weights = [1.0 + 0.1 * k for k in range(count)]
    np.testing.assert_allclose(merged("average", deltas, weights), [F32_MAX, -F32_MAX], rtol=1e-6)


def test_a_radial_result_beyond_float32_saturates() -> None:
    many = np.full(4000, 3e38, np.float32)
    single = np.zeros(4000, np.float32)
    single[0] = 1
    result = merged("radial", [many, single], [1.0, 1.5])
    assert np.isfinite(result).all()
    assert result[0] == np.float32(F32_MAX)


@pytest.mark.parametrize("weights", [[1e308, 1e308], [5e-324, 1.0], [1e-200, 1e200]])
@pytest.mark.parametrize("rule", ["average", "radial"])
def test_extreme_weights(rule: Rule, weights: list[float]) -> None:
    deltas = [vector(1, 2, 0), vector(2, 0, 1)]
    wanted = getattr(reference, rule)(deltas, [w / max(weights) for w in weights])
    np.testing.assert_allclose(merged(rule, deltas, weights), wanted, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [(4.0, 2.0, 3.0), (-4.0, -2.0, -3.0), (4.0, -2.0, 1.0), (0.0, 5.0, 2.5), (0.0, 0.0, 0.0)],
)
def test_tensors_of_one_element(a: float, b: float, wanted: float) -> None:
    assert float(merged("radial", [vector(a), vector(b)], [1.0, 1.0])[0]) == pytest.approx(wanted, rel=1e-6)


def test_read_only_inputs_are_fine_and_stay_as_they_are() -> None:
    deltas = random_deltas(2, 3, 100)
    before = [delta.tobytes() for delta in deltas]
    for delta in deltas:
        delta.flags.writeable = False
    merged("radial", deltas, [1.0, 2.0, 3.0])
    assert [delta.tobytes() for delta in deltas] == before


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
def test_a_callers_array_receives_the_result(weights: list[float]) -> None:
    deltas = random_deltas(2, 3, 100)
    out = np.full(100, np.nan, np.float32)
    result = merge_fragment(one(100), deltas, weights, RULES["radial"], out=out)
    assert result is out
    assert out.tobytes() == merged("radial", deltas, weights).tobytes()


def test_unsuitable_arrays_for_the_result() -> None:
    deltas = random_deltas(2, 2, 4)
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    for out, message in ((np.zeros(5, np.float32), "shape"), (read_only, "writable"), (deltas[1], "overlaps")):
        with pytest.raises(ValueError, match=message):
            merge_fragment(one(4), deltas, [1.0, 1.0], MergeRules(), out=out)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weights(weight: float) -> None:
    with pytest.raises(ValueError, match="must be finite and 0 or more"):
        merge_fragment(one(1), [vector(1), vector(2)], [1.0, weight], MergeRules())


def test_mismatched_lengths() -> None:
    with pytest.raises(ValueError, match="1 deltas but 2 weights"):
        merge_fragment(one(1), [vector(1)], [1.0, 1.0], MergeRules())
    with pytest.raises(ValueError, match="needs float32 and shape"):
        merge_fragment(one(3), [vector(1, 2)], [1.0], MergeRules())
    with pytest.raises(ValueError, match="dtype float64"):
        merge_fragment(one(1), [np.ones(1)], [1.0], MergeRules())  # type: ignore[list-item]


def test_an_unknown_rule_names_what_is_allowed() -> None:
    with pytest.raises(SpecError, match=r"merge\.matrix = 'median'.*'radial' and 'average'"):
        MergeRules(matrix="median")  # type: ignore[arg-type]


@settings(max_examples=25)
@given(st.integers(1, 5000))
def test_sum_of_squares_of_any_size(size: int) -> None:
    flat = random_deltas(size, 1, size)[0]
    wanted = float((flat.astype(np.float64) ** 2).sum())
    assert _blocks.sum_squares(flat) == pytest.approx(wanted, rel=4e-6)
    assert _blocks.sum_squares_exact(flat) == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("rule", ["average", "radial"])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_where_a_buffer_lies_in_memory_does_not_change_a_bit(rule: Rule, scale: float) -> None:
    size = _blocks.BLOCK + 1003
    deltas = [delta * np.float32(scale) for delta in random_deltas(8, 2, size)]
    wanted = merged(rule, deltas, [1.0, 2.0]).tobytes()
    for offset in (0, 1, 4, 16, 36):
        moved = [
            np.frombuffer(bytearray(offset) + bytearray(delta.tobytes()), np.float32, size, offset)
            for delta in deltas
        ]
        assert merged(rule, moved, [1.0, 2.0]).tobytes() == wanted
        assert [_blocks.sum_squares(m) for m in (moved[0][:999], moved[1][5 : _blocks.BLOCK])] == [
            _blocks.sum_squares(d) for d in (deltas[0][:999], deltas[1][5 : _blocks.BLOCK])
        ]
