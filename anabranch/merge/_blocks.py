"""Cache-sized blocks: where they are cut, the scratch memory they use, and a sum of squares.

Block boundaries depend on the array alone, never on the number of threads, and partial results are combined
in block order: that, and no BLAS, is why a merge has the same bits on one thread and on four.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

BLOCK = 1 << 17
"""Elements in a block: 512 KiB of float32. Output and scratch stay in cache while the inputs stream by."""

TASK = 4
"""Blocks handed to a thread at a time: about half a millisecond, against some 20 µs to hand them over."""

F32_MAX = float(np.finfo(np.float32).max)
_RUN = 64  # elements squared and added in float32; whole runs are added in float64
_TINY_MEAN_SQUARE = 1e-30

_T = TypeVar("_T")
_R = TypeVar("_R")
_Scalar = TypeVar("_Scalar", bound=np.generic)


class MapBlocks(Protocol):
    """The builtin `map` or an executor's `.map`: results in the order of the items."""

    def __call__(self, fn: Callable[[Any], _R], items: Iterable[Any], /) -> Iterable[_R]:
        """Apply `fn` to every item."""


_areas = threading.local()


def scratch(dtype: type[_Scalar], size: int, name: str = "") -> NDArray[_Scalar]:
    """This thread's work area of that type and name, [size <= BLOCK]; its content does not survive the next caller.

    It is made when first used and kept: page faults cost more than the arithmetic.
    """
    key = dtype.__name__ + name
    if not hasattr(_areas, key):
        setattr(_areas, key, np.empty(BLOCK, dtype))
    area: NDArray[_Scalar] = getattr(_areas, key)
    return area[:size]


def spans(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into blocks: every BLOCK elements from `start`."""
    for low in range(start, stop, BLOCK):
        yield low, min(low + BLOCK, stop)


def run_blocks(map_blocks: MapBlocks, work: Callable[[_T], _R], blocks: list[_T]) -> list[_R]:
    """`[work(b) for b in blocks]`, several blocks to a task; a single task does not leave this thread."""
    tasks = [blocks[i : i + TASK] for i in range(0, len(blocks), TASK)]
    if len(tasks) <= 1:
        return [work(block) for block in blocks]

    def run_task(task: list[_T]) -> list[_R]:
        return [work(block) for block in task]

    return [result for results in map_blocks(run_task, tasks) for result in results]


def sum_squares(block: Float32) -> float:
    """Sum of squares of one block, [size <= BLOCK] float32, accumulated in float64.

    Fast path: runs of 64 squares are added in float32 (numpy's own loop, no BLAS), the runs in float64;
    relative error below 4e-6, typically 1e-8. Where squares leave float32's range the block is done again
    by `sum_squares_exact`. The result is non-finite exactly if the block holds a non-finite value.
    """
    size = block.size
    cut = size - size % _RUN
    if cut == 0:
        return sum_squares_exact(block)
    rows = block[:cut].reshape(-1, _RUN)
    sums = scratch(np.float32, len(rows))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.einsum("ij,ij->i", rows, rows, out=sums, optimize=False)
        total = float(np.add.reduce(sums, dtype=np.float64))
    if size * _TINY_MEAN_SQUARE <= total < np.inf:
        return total + (sum_squares_exact(block[cut:]) if cut < size else 0.0)
    return sum_squares_exact(block)


def sum_squares_exact(block: Float32 | Float64) -> float:
    """Sum of squares of one block in float64 throughout: no float32 value is too large or small."""
    wide = scratch(np.float64, block.size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(wide, block)
        np.multiply(wide, wide, out=wide)
        return float(np.add.reduce(wide))
