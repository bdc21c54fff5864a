"""Datasets that a run hands out: windows of tokens, files, folders, map-style datasets."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.errors import UsageError
from anabranch.workers.shards import MapStyle, TokenWindows, text_folder, token_file


def test_windows_do_not_overlap_and_cover_the_tokens() -> None:
    shards = TokenWindows(np.arange(103), 10, "ab" * 8)
    assert len(shards) == 9
    for epoch in range(5):
        rows = shards.windows(np.arange(len(shards)), epoch)
        assert rows.shape == (9, 11)
        np.testing.assert_array_equal(np.diff(rows, axis=1), 1)
        np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
        assert rows.max() < 103


def test_boundaries_move_from_epoch_to_epoch() -> None:
    shards = TokenWindows(np.arange(1003), 10, "ab" * 8)
    assert len({int(shards.windows(np.array([0]), epoch)[0, 0]) for epoch in range(20)}) > 5


def test_a_batch_predicts_each_token_from_those_before_it() -> None:
    batch = TokenWindows(np.arange(103), 10, "ab" * 8).batch(np.array([2, 5]), 0)
    assert batch.tokens == 20
    np.testing.assert_array_equal(batch.targets.numpy(), batch.inputs.numpy() + 1)


def test_too_few_tokens_say_how_many_are_needed() -> None:
    with pytest.raises(UsageError, match="20 tokens are too few for windows of 10: at least 21"):
        TokenWindows(np.arange(20), 10, "ab" * 8)


def test_a_token_file_is_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(5000, dtype="<u2").tofile(path)
    shards = token_file(path, 64)
    np.testing.assert_array_equal(
        shards.windows(np.array([0]), 0)[0], np.arange(65) + shards.windows(np.array([0]), 0)[0, 0]
    )
    assert shards.fingerprint == token_file(path, 64).fingerprint
    changed = np.arange(5000, dtype="<u2")
    changed[2500] += 1
    changed.tofile(path)
    assert shards.fingerprint != token_file(path, 64).fingerprint


@pytest.mark.parametrize("size", [0, 3])
def test_what_is_no_token_file_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"x" * size)
    with pytest.raises(UsageError, match=r"tokens\.bin cannot be mapped|too few"):
        token_file(path, 64)
    with pytest.raises(UsageError, match=r"missing\.bin cannot be mapped"):
        token_file(tmp_path / "missing.bin", 64)


def test_a_folder_of_text(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 500)
    shards = text_folder(tmp_path, 32)
    assert len(shards) > 10
    assert shards.batch(np.array([0]), 0).inputs.shape == (1, 32)


def test_a_map_style_dataset() -> None:
    def collate(items: Any) -> int:
        return sum(items)

    shards = MapStyle([5, 6, 7], collate, "numbers")
    assert len(shards) == 3
    assert shards.batch(np.array([0, 2]), 0) == 12
    assert shards.fingerprint != MapStyle([5, 6, 7], collate, "others").fingerprint


def test_a_hugging_face_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal data has an equal fingerprint in every process, as long as it was made the same way."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets: Any = import_module("datasets")  # after the environment is set; it is among the test dependencies

    def made(last: int) -> MapStyle[list[list[int]]]:
        rows = datasets.Dataset.from_dict({"input_ids": [[0, 1], [2, 3], [4, last]]})
        return MapStyle(rows, lambda items: [item["input_ids"] for item in items], rows._fingerprint)

    assert made(5).batch(np.array([2, 0]), 0) == [[4, 5], [0, 1]]
    assert made(5).fingerprint == made(5).fingerprint
    assert made(5).fingerprint != made(6).fingerprint
