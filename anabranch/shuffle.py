"""Orders that every member computes alike: a shuffle of 0 … n−1 that depends on nothing but its key.

Sorting by a hash of (key, index) instead of numpy's generators: their streams may change between releases, and
members of one run need not have the same one. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def shuffled(size: int, *key: int | str) -> Indices:
    """The numbers 0 … `size`−1, int64 [size], in an order that `key` decides."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    offset = np.uint64(int.from_bytes(digest[:8], "little"))
    with np.errstate(over="ignore"):
        hashed = np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN + offset
        hashed = (hashed ^ (hashed >> np.uint64(30))) * _MIX_1
        hashed = (hashed ^ (hashed >> np.uint64(27))) * _MIX_2
        hashed ^= hashed >> np.uint64(31)
    order: Indices = np.argsort(hashed, kind="stable").astype(np.int64)
    return order


def range_order(ranges: int, seed: int, epoch: int) -> Indices:
    """In which order the ranges of an epoch are handed out: int64 [ranges]."""
    return shuffled(ranges, "ranges", seed, epoch)


def item_order(items: int, seed: int, epoch: int, range_: int) -> Indices:
    """In which order the items of one range are trained on, from its own start: int64 [items]."""
    return shuffled(items, "items", seed, epoch, range_)
