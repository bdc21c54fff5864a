"""Datasets that a run hands out in ranges: every worker has a copy, and is told which items to train on.

Anything with these three members will do (`Shards`). Given are a folder of text, a memory-mapped file of tokens, and
any map-style dataset (torch's, or Hugging Face's).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import UsageError
from anabranch.shuffle import Indices, shuffled
from anabranch.workers.checked import whole
from anabranch.workers.data import load_corpus, windows

if TYPE_CHECKING:
    from anabranch.workers.batches import TokenBatch

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_PROBES = 256  # pieces of a token file that its fingerprint covers
_PROBE_TOKENS = 2048


class Shards(Protocol[T_co]):
    """A dataset of numbered items. Every worker of a run has the same one, or is refused."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal, 16 to 64 digits: equal for equal data."""

    def __len__(self) -> int:
        """Items."""

    def batch(self, indices: Indices, epoch: int) -> T_co:
        """What these items, int64 [n], make up in this epoch (counted from 0), on the CPU."""


class TokenWindows:
    """A long row of tokens, cut into windows of `length` inputs, each with the token after it as the last target.

    Windows do not overlap. From epoch to epoch their boundaries move, so not every epoch cuts at the same places.
    """

    def __init__(self, tokens: NDArray[Any], length: int, fingerprint: str) -> None:
        """`tokens`: integers [n], for example a `numpy.memmap`. `UsageError` if they are too few."""
        length = whole("length", length)
        self._tokens = tokens
        self._length = length
        self.fingerprint = fingerprint
        self._count = (tokens.size - 1) // length - 1  # one less, for the boundaries to move
        if self._count < 1:
            raise UsageError(
                f"{tokens.size} tokens are too few for windows of {length}: at least {2 * length + 1} are needed"
            )

    def __len__(self) -> int:
        return self._count

    def windows(self, indices: Indices, epoch: int) -> NDArray[np.int64]:
        """[n, length + 1]"""
        offset = int(shuffled(self._length, "offset", epoch)[0])
        return windows(self._tokens, indices * self._length + offset, self._length).astype(np.int64)

    def batch(self, indices: Indices, epoch: int) -> TokenBatch:
        """Inputs and targets, int64 [n, length]."""
        from anabranch.workers.batches import TokenBatch

        return TokenBatch.of(self.windows(indices, epoch))


def text_folder(directory: Path | None, length: int, encoding: str = "") -> TokenWindows:
    """The training bytes of a folder of text (`workers/data.py`), in windows of `length`. `encoding`: of its files,
    which then become UTF-8; empty: bytes as they are."""
    train = load_corpus(directory, encoding=encoding).train
    return TokenWindows(train, length, hashlib.sha256(train.data).hexdigest())


def token_file(path: Path, length: int, dtype: str = "uint16") -> TokenWindows:
    """A file that holds nothing but token ids, memory-mapped; `dtype` as numpy names it, little endian.

    Its fingerprint covers the size and pieces spread evenly over the file: reading all of it could take minutes.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    try:
        tokens = np.memmap(path, dtype=kind, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be mapped as {dtype} tokens: {error}") from None
    starts = np.linspace(0, max(0, tokens.size - _PROBE_TOKENS), num=_PROBES).astype(np.int64)
    digest = hashlib.sha256(f"{tokens.size}:{kind.str}".encode())
    for start in starts:
        digest.update(tokens[start : start + _PROBE_TOKENS].tobytes())
    return TokenWindows(tokens, length, digest.hexdigest())


class MapStyle(Generic[T]):
    """A dataset with `len` and `[index]`, as torch and Hugging Face have them; `collate` makes a batch of items.

    `name` tells it from others: what makes it up, for example path and revision, or a Hugging Face dataset's
    `_fingerprint`. The length counts as well.
    """

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], T], name: str) -> None:
        self._dataset = dataset
        self._collate = collate
        self.fingerprint = hashlib.sha256(f"{len(dataset)}:{name}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Indices, epoch: int) -> T:
        return self._collate([self._dataset[int(index)] for index in indices])
