"""A folder of text as token ids of a Hugging Face tokenizer: one flat array, made once and kept on disk.

The file is memory-mapped, so all processes of one machine share it. It lies under
`$XDG_CACHE_HOME/anabranch/tokens` (`~/.cache` by default), named after tokenizer and text: change either, and a new
one is made. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import UsageError
from anabranch.workers.data import HELDOUT_SHARE, is_heldout, text_files

log = logging.getLogger("anabranch.worker")

Tokens = NDArray[Any]  # uint16 or uint32
_PIECE_BYTES = 1 << 20  # of text that is tokenized at once


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Training and held-out tokens, [n] each; no file is in both."""

    train: Tokens
    heldout: Tokens
    fingerprint: str  # of the training tokens: hexadecimal


def load_tokens(directory: Path | None, tokenizer: Any, max_bytes: int) -> TokenCorpus:
    """The files of `text_files(directory)`, at most `max_bytes` of them, from the cache if they are there.

    After each file comes the tokenizer's end token, if it has one. `UsageError` if there is no text.
    """
    files = text_files(directory)
    root = directory or Path(sysconfig.get_path("stdlib"))
    place = _cache() / _key(files, tokenizer, max_bytes)
    if not (place / "meta.json").is_file():
        log.info("tokenizing %d files; kept in %s", len(files), place)
        _make(place, root, files, tokenizer, max_bytes)
    meta = json.loads((place / "meta.json").read_text())
    parts = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in ("train", "heldout")}
    return TokenCorpus(parts["train"], parts["heldout"], meta["fingerprint"])


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anabranch" / "tokens"


def _key(files: list[Path], tokenizer: Any, max_bytes: int) -> str:
    """Of the tokenizer, and of the files' sizes and times of change: reading them all would take as long again."""
    digest = hashlib.sha256(f"1 {max_bytes} {tokenizer.eos_token_id}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(vocabulary.encode())
    for path in files:
        about = path.stat()
        digest.update(f"{path.resolve()}:{about.st_size}:{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _make(place: Path, root: Path, files: list[Path], tokenizer: Any, max_bytes: int) -> None:
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    names = {path: os.path.relpath(path, root).replace(os.sep, "/") for path in files}
    sides = {
        "train": ([p for p in files if not is_heldout(names[p])], int(max_bytes * (1 - HELDOUT_SHARE))),
        "heldout": ([p for p in files if is_heldout(names[p])], int(max_bytes * HELDOUT_SHARE)),
    }
    arrays = {name: _tokens(chosen, tokenizer, limit, dtype) for name, (chosen, limit) in sides.items()}
    if not all(array.size for array in arrays.values()):  # very few files: the last twentieth is held out
        everything = np.concatenate(list(arrays.values()))
        cut = everything.size - int(everything.size * HELDOUT_SHARE)
        arrays = {"train": everything[:cut], "heldout": everything[cut:]}
    if not all(array.size for array in arrays.values()):
        raise UsageError(f"the text files in {root} are too short: some kilobytes are needed")
    fingerprint = hashlib.sha256(np.ascontiguousarray(arrays["train"]).view(np.uint8).data).hexdigest()
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(temporary / f"{name}.npy", array)
    (temporary / "meta.json").write_text(json.dumps({"fingerprint": fingerprint}))
    try:
        temporary.rename(place)
    except OSError:  # another process of this machine was faster
        if not (place / "meta.json").is_file():
            raise
        for path in temporary.iterdir():
            path.unlink()
        temporary.rmdir()


def _tokens(files: Iterable[Path], tokenizer: Any, limit_bytes: int, dtype: Any) -> Tokens:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts: list[Tokens] = []
    for path in files:
        if limit_bytes <= 0:
            break
        for piece in _pieces(path, limit_bytes):
            limit_bytes -= len(piece)
            text = piece.decode("utf-8", "replace")
            found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(np.asarray(found, dtype=dtype))
        parts.append(np.asarray(end, dtype=dtype))
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _pieces(path: Path, limit_bytes: int) -> Iterator[bytes]:
    """The file in pieces that end with a line, where lines are shorter than a piece."""
    try:
        with path.open("rb") as file:
            while limit_bytes > 0 and (piece := file.read(min(_PIECE_BYTES, limit_bytes))):
                if len(piece) == _PIECE_BYTES:
                    piece += file.readline(_PIECE_BYTES)
                limit_bytes -= len(piece)
                yield piece
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
