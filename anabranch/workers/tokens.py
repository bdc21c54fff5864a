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
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import UsageError
from anabranch.workers.data import Decoder, none_empty, sides, text_files

log = logging.getLogger("anabranch.worker")

Tokens = NDArray[Any]  # uint16 or uint32
_PIECE_BYTES = 1 << 20  # of text that is tokenized at once


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Training and held-out tokens, [n] each; no file is in both."""

    train: Tokens
    heldout: Tokens
    fingerprint: str  # of the training tokens: hexadecimal


def load_tokens(directory: Path | None, tokenizer: Any, max_bytes: int, encoding: str = "utf-8") -> TokenCorpus:
    """The files of `text_files(directory)`, at most `max_bytes` of them, from the cache if they are there.

    After each file comes the tokenizer's end token, if it has one. `UsageError` if there is no text, or if a file is
    not in `encoding` (Python's name).
    """
    files = text_files(directory)
    place = _cache() / _key(files, tokenizer, max_bytes, encoding)
    if not (place / "meta.json").is_file():
        log.info("tokenizing %d files; kept in %s", len(files), place)
        _make(place, directory, files, max_bytes, partial(_tokens, tokenizer=tokenizer, encoding=encoding))
    meta = json.loads((place / "meta.json").read_text())
    train, heldout = (np.load(place / f"{name}.npy", mmap_mode="r") for name in ("train", "heldout"))
    return TokenCorpus(train, heldout, meta["fingerprint"])


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anabranch" / "tokens"


def _key(files: list[Path], tokenizer: Any, max_bytes: int, encoding: str) -> str:
    """Of the tokenizer, and of the files' sizes and times of change: reading them all would take as long again."""
    digest = hashlib.sha256(f"2 {max_bytes} {tokenizer.eos_token_id} {len(tokenizer)} {encoding}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(vocabulary.encode())
    for path in files:
        about = path.stat()
        digest.update(f"{path.resolve()}:{about.st_size}:{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _make(
    place: Path,
    directory: Path | None,
    files: list[Path],
    max_bytes: int,
    tokens: Callable[[Iterable[Path], int], Tokens],
) -> None:
    parts = [tokens(part, limit) for part, limit in sides(files, directory, max_bytes)]
    train, heldout = none_empty(parts, "tokens", directory)
    fingerprint = hashlib.sha256(np.ascontiguousarray(train).view(np.uint8).data).hexdigest()
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    np.save(temporary / "train.npy", train)
    np.save(temporary / "heldout.npy", heldout)
    (temporary / "meta.json").write_text(json.dumps({"fingerprint": fingerprint}))
    try:
        temporary.rename(place)
    except OSError:  # another process of this machine was faster
        if not (place / "meta.json").is_file():
            raise
        shutil.rmtree(temporary)


def _tokens(files: Iterable[Path], limit_bytes: int, *, tokenizer: Any, encoding: str) -> Tokens:
    dtype: Any = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts: list[Tokens] = []
    for path in files:
        if limit_bytes <= 0:
            break
        decoder = Decoder(path, encoding)
        for piece in _pieces(path, limit_bytes):
            limit_bytes -= len(piece)
            text = decoder.decode(piece)
            found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(np.asarray(found, dtype=dtype))
        if limit_bytes > 0:  # the whole file was read
            decoder.end()
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
