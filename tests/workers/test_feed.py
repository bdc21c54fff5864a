"""Data ranges between the I/O thread and the training loop."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from anabranch.errors import UsageError
from anabranch.queue.messages import Lease
from anabranch.shuffle import item_order
from anabranch.workers.member.books import Books
from anabranch.workers.member.feed import AHEAD, Feed

SEED = 3
LENGTH = 10


def lease(number: int, range_: int = 0, *, epoch: int = 0, start: int = 0, stop: int = LENGTH) -> Lease:
    return Lease(number=number, epoch=epoch, range=range_, first=range_ * LENGTH, start=start, stop=stop)


class Bench:
    def __init__(self) -> None:
        self.asked = 0
        self.books = Books(1)
        self.books.adopt(0, 0)
        self.feed = Feed(100, "ab" * 16, SEED, self.books, self._hungry)

    def _hungry(self) -> None:
        self.asked += 1

    def next(self, count: int) -> list[int]:
        items = self.feed.next(count, 0.0)
        return [int(index) for index in items.indices] if items is not None else []


@pytest.fixture
def bench() -> Bench:
    return Bench()


def items_of(range_: int, epoch: int = 0) -> list[int]:
    return [int(index) for index in range_ * LENGTH + item_order(LENGTH, SEED, epoch, range_)]


def test_items_come_in_the_order_of_seed_epoch_and_range(bench: Bench) -> None:
    bench.feed.take([lease(1, 4)])
    assert bench.next(3) + bench.next(3) + bench.next(9) == items_of(4)
    assert bench.next(1) == []


def test_what_is_in_hand_ends_with_its_incarnation(bench: Bench) -> None:
    bench.feed.take([lease(1, 4)], exhausted=True)
    assert bench.next(3)
    bench.feed.drop()
    assert bench.next(3) == []
    assert not bench.feed.idle, "the next one may be given more"
    bench.feed.restart(Books(1))
    bench.feed.take([lease(1, 7)])
    assert bench.next(9) == items_of(7)[:9]


def test_a_batch_may_span_ranges_of_one_epoch(bench: Bench) -> None:
    bench.feed.take([lease(1, 4), lease(2, 7), lease(3, 1, epoch=1)])
    assert bench.next(15) == items_of(4) + items_of(7)[:5]
    assert bench.next(15) == items_of(7)[5:], "not into the next epoch"
    assert bench.next(15) == items_of(1, epoch=1)


def test_a_range_that_comes_back_goes_on_where_it_was(bench: Bench) -> None:
    bench.feed.take([lease(1, 4, start=6)])
    assert bench.next(20) == items_of(4)[6:]


def test_it_is_hungry_before_it_is_empty(bench: Bench) -> None:
    bench.feed.take([lease(n, n) for n in range(1, AHEAD + 1)])
    assert bench.feed.wanted == 0
    bench.next(1)
    assert bench.asked == 0
    bench.next(LENGTH - 1)
    assert bench.asked == 1
    assert bench.feed.wanted == 1


def test_a_lease_is_taken_once(bench: Bench) -> None:
    bench.feed.take([lease(1, 4)])
    bench.feed.take([lease(1, 4), lease(2, 5)])
    assert bench.next(100) == items_of(4) + items_of(5)


def test_another_dataset_ends_the_loop_with_what_to_do(bench: Bench) -> None:
    bench.feed.take([], refused="the dataset has 3 items, the run's has 4: every worker needs the same copy")
    with pytest.raises(UsageError, match="every worker needs the same copy"):
        bench.feed.next(1, 0.0)
    assert bench.feed.wanted == 0


@pytest.mark.parametrize("bad", [lease(1, 10), lease(1, 9, stop=11), lease(1, 0, start=10)])
def test_a_range_outside_the_dataset_is_not_trained_on(bench: Bench, bad: Lease) -> None:
    bench.feed.take([bad])
    with pytest.raises(UsageError, match="does not lie within"):
        bench.feed.next(1, 0.0)


def test_idle_is_who_has_nothing_and_gets_nothing(bench: Bench) -> None:
    bench.feed.take([lease(1, 4)], exhausted=True)
    assert not bench.feed.idle
    bench.next(100)
    idle = bench.feed.idle
    bench.feed.take([lease(2, 5)])
    assert (idle, bench.feed.idle) == (True, False)


def test_what_the_run_does_not_know_of_is_given_up(bench: Bench) -> None:
    bench.feed.take([lease(1, 4), lease(2, 5)])
    bench.feed.keep([lease(2, 5)])
    assert bench.next(100) == items_of(5)


def test_a_new_incarnation_begins_with_nothing(bench: Bench) -> None:
    bench.feed.take([lease(5, 4)])
    bench.feed.restart(Books(1))
    assert bench.next(5) == []
    bench.feed.take([lease(1, 6)])
    assert bench.next(100) == items_of(6)


def test_whoever_waits_is_woken(bench: Bench) -> None:
    def grant() -> None:
        bench.feed.take([lease(1, 4)])

    timer = threading.Timer(0.05, grant)
    timer.start()
    items = bench.feed.next(LENGTH, 30.0)
    timer.join()
    assert items is not None
    np.testing.assert_array_equal(items.indices, items_of(4))


def test_a_refusal_ends_with_its_incarnation(bench: Bench) -> None:
    bench.feed.take([], refused="another dataset")
    assert bench.feed.wanted == 0
    with pytest.raises(UsageError, match="another dataset"):
        bench.next(1)
    bench.feed.restart(Books(1))
    assert bench.feed.wanted == AHEAD
    assert bench.next(1) == []
