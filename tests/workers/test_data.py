"""The byte corpus: which files, the split, and the windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from anabranch.errors import UsageError
from anabranch.workers.data import ByteCorpus, Decoder, check_encoding, is_heldout, load_corpus, text_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two hundred small files; file n consists of its own number."""
    for number in range(200):
        path = tmp_path / f"part{number % 7}" / f"{number:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number:03} " * 50)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.txt").write_text("not text to train on")
    return tmp_path


def test_the_standard_library_is_the_default() -> None:
    files = text_files(None)
    names = {path.name for path in files}
    assert {"argparse.py", "pathlib.py"} <= names
    parts = {part for path in files for part in path.parts[-3:-1]}
    assert parts.isdisjoint({"site-packages", "dist-packages", "test", "idlelib", "__pycache__"})
    assert files == text_files(None)
    corpus = load_corpus()
    assert corpus is load_corpus()
    assert corpus.train.size > 4_000_000
    assert 0.01 < corpus.heldout.size / corpus.train.size < 0.12


def test_a_folder_is_read_in_a_fixed_order(folder: Path) -> None:
    files = text_files(folder)
    assert len(files) == 200
    assert files == sorted(files, key=lambda path: path.relative_to(folder).as_posix())


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_without_text_says_so(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "empty"
    if make:
        folder.mkdir()
    with pytest.raises(UsageError, match="empty"):
        text_files(folder)


def test_held_out_files_are_not_trained_on(folder: Path) -> None:
    corpus = ByteCorpus.load(folder)
    train = set(corpus.train.tobytes().decode().split())
    heldout = set(corpus.heldout.tobytes().decode().split())
    assert train.isdisjoint(heldout)
    assert len(train) + len(heldout) == 200
    assert 3 <= len(heldout) <= 25
    for number in heldout:
        assert is_heldout(f"part{int(number) % 7}/{number}.txt")


def test_a_single_file_gives_its_end_to_the_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_bytes(bytes(range(32, 127)) * 20)
    corpus = ByteCorpus.load(tmp_path)
    assert corpus.train.size + corpus.heldout.size == 1901
    assert corpus.heldout.size == 95


def test_an_empty_file_is_too_little(tmp_path: Path) -> None:
    (tmp_path / "only.txt").touch()
    with pytest.raises(UsageError, match="some kilobytes"):
        ByteCorpus.load(tmp_path)


def test_the_size_is_capped(folder: Path) -> None:
    corpus = ByteCorpus.load(folder, max_bytes=10_000)
    assert corpus.train.size <= 9501
    assert corpus.heldout.size <= 501


def test_random_windows_are_text_and_repeat_with_their_seed(folder: Path, seed: int) -> None:
    corpus = ByteCorpus.load(folder)
    windows = corpus.random_windows(np.random.default_rng(seed), 5, 16)
    assert windows.shape == (5, 17)
    assert windows.dtype == np.uint8
    text = corpus.train.tobytes()
    assert all(window.tobytes() in text for window in windows)
    again = corpus.random_windows(np.random.default_rng(seed), 5, 16)
    assert np.array_equal(windows, again)


def test_held_out_windows_are_fixed_and_cover_the_text(folder: Path) -> None:
    corpus = ByteCorpus.load(folder)
    windows = corpus.heldout_windows(9, 16)
    assert windows.shape == (9, 17)
    assert np.array_equal(windows, corpus.heldout_windows(9, 16))
    assert np.array_equal(windows[0], corpus.heldout[:17])
    assert np.array_equal(windows[-1], corpus.heldout[-17:])


def test_a_window_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("short " * 10)
    corpus = ByteCorpus.load(tmp_path)
    with pytest.raises(UsageError, match="smaller `context`"):
        corpus.heldout_windows(1, 64)


# --- encodings --------------------------------------------------------------------------------------------

SENTENCE = "Füße, naïve Œuvre, 東京 🙂 — "


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32", "gb18030"])
def test_characters_at_the_borders_of_pieces_stay_whole(encoding: str) -> None:
    data = (SENTENCE * 3).encode(encoding)
    decoder = Decoder(Path("x"), encoding)
    text = "".join(decoder.decode(data[at : at + 1]) for at in range(len(data)))
    decoder.end()
    assert text == SENTENCE * 3


def test_a_mark_at_the_start_of_utf_8_is_no_text() -> None:
    assert Decoder(Path("x"), "utf8").decode("\ufeffa".encode()) == "a"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            "é".encode("latin-1"),
            r"a\.txt is not utf-8: byte 0xe9 at 7\. Name .* task\.options\.encoding",
        ),
        ("é".encode()[:1], "byte 0xc3 at 7"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_what_is_not_in_the_encoding_is_named_with_its_place(data: bytes, words: str, size: int) -> None:
    decoder, text = Decoder(Path("a.txt"), "utf-8"), b"seven.." + data

    def read() -> None:
        for at in range(0, len(text), size):
            decoder.decode(text[at : at + size])
        decoder.end()

    with pytest.raises(UsageError, match=words):
        read()


def test_a_mark_of_another_encoding_is_told() -> None:
    with pytest.raises(UsageError, match="it looks like utf-16"):
        Decoder(Path("a.txt"), "utf-8").decode("a".encode("utf-16"))


def test_bytes_of_another_encoding_become_utf_8_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((SENTENCE * 100).encode("utf-16"))
    corpus = ByteCorpus.load(tmp_path, encoding="utf-16")
    text = corpus.train.tobytes() + corpus.heldout.tobytes()
    assert text.decode() == SENTENCE * 100 + "\n"
    ByteCorpus.load(tmp_path, max_bytes=1001, encoding="utf-16")  # cut in the middle of a character
    with pytest.raises(UsageError, match=r"a\.txt is not utf-8: .* looks like utf-16"):
        ByteCorpus.load(tmp_path, encoding="utf-8")


def test_bytes_that_are_no_utf_8_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 100, "utf-8")
    ByteCorpus.load(tmp_path)
    ByteCorpus.load(tmp_path, max_bytes=1004)
    assert not caplog.records
    (tmp_path / "b.txt").write_bytes("é\n".encode("latin-1") * 100)
    ByteCorpus.load(tmp_path)
    assert "1 files are not UTF-8" in caplog.text
    assert "b.txt" in caplog.text


@pytest.mark.parametrize("name", ["utf-9", "hex", "a\0b"])
def test_an_encoding_that_is_none_is_refused(name: str) -> None:
    assert check_encoding(name) is not None
    assert check_encoding("latin-1") is None


def test_data_needs_no_torch() -> None:
    code = "import sys, anabranch.workers.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
