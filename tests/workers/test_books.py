"""The worker's side of the ledger against a model of it, in any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from anabranch.queue.messages import Figures, Held, Lease, Verdict
from anabranch.workers.member.books import Books, Snapshot

FRAGMENTS = 2


def verdict(base: int, tokens: int, *, applied: bool = True, fragment: int = 0) -> Verdict:
    return Verdict(incarnation=1, fragment=fragment, base=base, applied=applied, tokens=tokens)


@dataclass
class Page:
    """What the synchronizer knows of one fragment."""

    version: int = -1
    sent: dict[int, list[int]] = field(default_factory=dict)  # base: tokens of each contribution on it
    booked: dict[int, Verdict] = field(default_factory=dict)  # base: its one outcome


class BooksMachine(RuleBasedStateMachine):
    """Training thread and I/O thread in random order; the equation holds after every event."""

    copies: Bundle[tuple[int, Snapshot]] = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(FRAGMENTS)
        self.pages = [Page() for _ in range(FRAGMENTS)]
        self.processed = 0
        for fragment in range(FRAGMENTS):
            self.adopt(fragment, 1)

    fragments = st.integers(0, FRAGMENTS - 1)

    @rule(tokens=st.integers(1, 100))
    def step(self, tokens: int) -> None:
        self.books.step(tokens)
        self.processed += tokens

    @rule(target=copies, fragment=fragments)
    def snapshot(self, fragment: int) -> tuple[int, Snapshot]:
        snapshot = self.books.snapshot(fragment)
        assert snapshot.base == self.pages[fragment].version
        assert snapshot.figures.processed == self.processed
        return fragment, snapshot

    @rule(target=copies, copy=consumes(copies))
    def send(self, copy: tuple[int, Snapshot]) -> MultipleResults[tuple[int, Snapshot]] | tuple[int, Snapshot]:
        fragment, snapshot = copy
        page, base = self.pages[fragment], snapshot.base
        earlier = page.sent.get(base, [])
        if snapshot.tokens == 0 or (earlier and snapshot.tokens < earlier[-1]):
            return multiple()  # the learner sends nothing empty and nothing older
        stands = page.version == base and base not in page.booked
        assert self.books.send(fragment, snapshot) == stands
        if stands:
            page.sent.setdefault(base, []).append(snapshot.tokens)
        return copy

    @rule(fragment=fragments, ahead=st.integers(1, 2))
    def adopt(self, fragment: int, ahead: int) -> None:
        self.pages[fragment].version += ahead
        self.books.adopt(fragment, self.pages[fragment].version)

    @rule(fragment=fragments, data=st.data())
    def outcome(self, fragment: int, data: st.DataObject) -> None:
        page = self.pages[fragment]
        waiting = sorted(page.sent.keys() - page.booked.keys())
        if waiting:
            base = data.draw(st.sampled_from(waiting))
            tokens = data.draw(st.sampled_from(page.sent[base]))
            page.booked[base] = verdict(base, tokens, applied=data.draw(st.booleans()), fragment=fragment)
            self.books.outcome(page.booked[base])

    @rule(fragment=fragments, data=st.data())
    def repeated_outcome(self, fragment: int, data: st.DataObject) -> None:
        booked = self.pages[fragment].booked
        if booked:
            before = self.books.report()
            self.books.outcome(booked[data.draw(st.sampled_from(sorted(booked)))])
            assert self.books.report() == before

    @rule(fragment=fragments, base=st.integers(0, 50), tokens=st.integers(0, 1000))
    def outcome_of_something_never_sent(self, fragment: int, base: int, tokens: int) -> None:
        if base not in self.pages[fragment].sent:
            before = self.books.report()
            self.books.outcome(verdict(base, tokens, fragment=fragment))
            assert self.books.report() == before

    @invariant()
    def every_token_is_somewhere(self) -> None:
        report = self.books.report()
        assert report["processed"] == self.processed
        for fragment, page in enumerate(self.pages):
            booked = sum(outcome.tokens for outcome in page.booked.values())
            pending, discarded = report["pending"][fragment], report["discarded"][fragment]
            assert self.processed == booked + discarded + pending
            assert pending >= 0
            assert discarded >= 0
            assert report["adopted"][fragment] == page.version

    @invariant()
    def it_knows_what_waits(self) -> None:
        for fragment, page in enumerate(self.pages):
            for base in range(page.version + 2):
                waits = base in page.sent and base not in page.booked
                assert self.books.has_outcome(fragment, base) != waits

    def teardown(self) -> None:
        """Leaving: what was sent waits, the rest is discarded."""
        figures = self.books.farewell()
        for fragment, page in enumerate(self.pages):
            booked = sum(outcome.tokens for outcome in page.booked.values())
            waiting = sum(sent[-1] for base, sent in page.sent.items() if base not in page.booked)
            assert figures[fragment].processed == self.processed
            assert figures[fragment].pending == waiting
            assert figures[fragment].discarded == self.processed - booked - waiting
        assert self.books.farewell() == figures, "saying it twice changes nothing"


TestBooksMachine = BooksMachine.TestCase
TestBooksMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def books() -> Books:
    """One fragment, version 0 adopted."""
    books = Books(1)
    books.adopt(0, 0)
    return books


def send(books: Books, fragment: int = 0) -> Snapshot:
    snapshot = books.snapshot(fragment)
    assert books.send(fragment, snapshot)
    return snapshot


def figures(books: Books) -> tuple[int, int, int]:
    """processed, discarded, pending"""
    report = books.report()
    return report["processed"], report["discarded"][0], report["pending"][0]


def test_fresh_books_hold_nothing() -> None:
    report = Books(3).report()
    assert report["adopted"] == [-1, -1, -1]
    assert report["pending"] == report["discarded"] == [0, 0, 0]
    assert report["read"] == 0


def test_every_token_trains_every_fragment() -> None:
    books = Books(2)
    for fragment in range(2):
        books.adopt(fragment, 0)
    books.step(10)
    assert books.report()["held"] == [10, 10]
    assert books.report()["steps"] == 1


def test_a_snapshot_counts_tokens_and_steps_since_the_adoption(books: Books) -> None:
    books.step(10)
    books.adopt(0, 1)
    books.step(3)
    books.step(4)
    snapshot = send(books)
    assert (snapshot.base, snapshot.tokens, snapshot.steps) == (1, 7, 2)
    assert snapshot.figures == Figures(processed=17, discarded=10, pending=7)


def test_an_adoption_discards_what_was_not_sent(books: Books) -> None:
    books.step(10)
    send(books)
    books.step(5)
    assert books.adopt(0, 1) == 5
    assert figures(books) == (15, 5, 10)
    books.outcome(verdict(0, 10))
    assert figures(books) == (15, 5, 0)


def test_an_outcome_before_the_adoption_leaves_the_rest_pending(books: Books) -> None:
    books.step(10)
    send(books)
    books.step(5)
    books.outcome(verdict(0, 10))
    assert figures(books) == (15, 0, 5)
    assert books.adopt(0, 1) == 5
    assert figures(books) == (15, 5, 0)


def test_a_newer_contribution_that_came_too_late_is_discarded(books: Books) -> None:
    books.step(10)
    send(books)
    books.step(5)
    send(books)
    books.adopt(0, 1)
    books.outcome(verdict(0, 10))  # the first of the two was merged
    assert figures(books) == (15, 5, 0)


def test_a_copy_of_an_overwritten_base_is_not_sent(books: Books) -> None:
    books.step(10)
    copy = books.snapshot(0)
    books.adopt(0, 1)
    assert not books.send(0, copy)
    assert figures(books) == (10, 10, 0)


def test_nothing_more_is_sent_on_a_base_that_has_its_outcome(books: Books) -> None:
    books.step(10)
    send(books)
    books.outcome(verdict(0, 10))
    books.step(1)
    assert not books.send(0, books.snapshot(0))


def test_reports_carry_the_newest_broadcast_number(books: Books) -> None:
    books.read(7)
    books.read(5)
    assert books.report()["read"] == 7


def test_the_first_outcome_stands(books: Books) -> None:
    books.step(10)
    send(books)
    books.outcome(verdict(0, 10))
    books.outcome(verdict(0, 4))
    assert figures(books) == (10, 0, 0)


# --- what was not merged is kept (blend, rebase) ----------------------------------------------------------


def test_what_was_refused_for_what_it_is_is_known_until_it_is_overwritten(books: Books) -> None:
    books.step(100)
    send(books)
    assert not books.refused(0)
    books.step(20)
    books.outcome(verdict(0, 100, applied=False))
    assert books.refused(0)
    assert books.adopt(0, 1) == 20
    assert figures(books) == (120, 20, 0)
    assert not books.refused(0)


def test_after_it_came_late_everything_is_pending_again(books: Books) -> None:
    books.step(100)
    send(books)
    books.outcome(verdict(0, 0, applied=False))
    assert not books.refused(0)
    assert books.adopt(0, 1, keep=True) == 0
    assert figures(books) == (100, 0, 100)
    assert (books.snapshot(0).tokens, books.snapshot(0).steps) == (100, 1)


def test_of_an_applied_contribution_only_what_came_after_is_kept(books: Books) -> None:
    books.step(100)
    send(books)
    books.step(20)
    books.step(20)
    books.outcome(verdict(0, 100))
    assert books.applied(0) == 100
    books.adopt(0, 1, keep=True)
    assert figures(books) == (140, 0, 40)
    assert (books.snapshot(0).tokens, books.snapshot(0).steps) == (40, 2)


def test_of_two_contributions_on_a_base_the_applied_one_counts(books: Books) -> None:
    books.step(100)
    send(books)
    books.step(20)
    send(books)
    books.outcome(verdict(0, 100))
    books.adopt(0, 1, keep=True)
    assert (books.snapshot(0).tokens, books.snapshot(0).steps) == (20, 1)


def test_a_contribution_that_comes_too_late_is_not_counted_twice(books: Books) -> None:
    books.step(100)
    send(books)
    books.adopt(0, 1, keep=True)
    assert figures(books) == (100, 0, 100)
    assert books.waiting(0) == [0]
    books.outcome(verdict(0, 0, applied=False))
    assert books.waiting(0) == []
    assert figures(books) == (100, 0, 100)


# --- data -------------------------------------------------------------------------------------------------


def lease(number: int = 1, start: int = 0, stop: int = 10) -> Lease:
    return Lease(number=number, epoch=0, range=0, first=0, start=start, stop=stop)


def held(books: Books) -> list[Held]:
    items: list[Held] = books.report()["leases"]
    return items


def test_a_position_is_settled_when_its_tokens_are_no_longer_pending(books: Books) -> None:
    assert books.lease(lease())
    books.deliver(1, 4)
    books.step(100)
    assert held(books) == [Held(number=1, delivered=4, settled=0)]
    send(books)
    books.deliver(1, 6)
    books.step(50)
    books.outcome(verdict(0, 100))
    assert held(books) == [Held(number=1, delivered=6, settled=4)]


def test_the_slowest_fragment_decides() -> None:
    books = Books(2)
    for fragment in range(2):
        books.adopt(fragment, 0)
    books.lease(lease())
    books.deliver(1, 4)
    books.step(100)
    send(books, 0)
    books.outcome(verdict(0, 100))
    assert held(books) == [Held(number=1, delivered=4, settled=0)]
    books.adopt(1, 1)
    assert held(books) == [Held(number=1, delivered=4, settled=4)], "discarded is an outcome, too"


def test_what_is_in_flight_is_pending_after_an_adoption(books: Books) -> None:
    books.lease(lease())
    books.deliver(1, 4)
    books.step(100)
    send(books)
    books.adopt(0, 1)
    books.deliver(1, 6)
    books.step(50)
    assert held(books) == [Held(number=1, delivered=6, settled=0)]
    books.outcome(verdict(0, 100, applied=False))
    assert held(books) == [Held(number=1, delivered=6, settled=4)]


def test_a_batch_that_was_delivered_but_not_stepped_on_is_not_settled(books: Books) -> None:
    books.lease(lease())
    books.deliver(1, 4)
    assert held(books) == [Held(number=1, delivered=4, settled=0)]
    assert books.parting() == [Held(number=1, delivered=4, settled=0)]


def test_a_settled_range_is_no_longer_listed_but_counts_as_taken(books: Books) -> None:
    books.lease(lease(7))
    books.deliver(7, 10)
    books.step(100)
    send(books)
    books.outcome(verdict(0, 100))
    assert held(books) == []
    assert books.leased == 7
    assert not books.lease(lease(7)), "the run has not read that yet and names it again"


def test_a_range_that_is_given_up_is_not_delivered_from(books: Books) -> None:
    books.lease(lease(1))
    books.lease(lease(2))
    assert books.keep_leases([2]) == [1]
    assert not books.deliver(1, 4)
    assert books.deliver(2, 4)
    assert [item.number for item in held(books)] == [2]


class KeepingMachine(RuleBasedStateMachine):
    """One fragment under a policy that keeps: no token is lost or counted twice, whatever comes when."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(1)
        self.books.adopt(0, 0)
        self.books.lease(lease(1, 0, 10_000))
        self.version = self.processed = self.booked = self.discarded = self.steps = 0
        self.sent: list[Snapshot] = []
        self.late: list[int] = []
        self.settled = 0

    @rule(tokens=st.integers(1, 50))
    def step(self, tokens: int) -> None:
        self.steps += 1
        self.books.deliver(1, self.steps)
        self.books.step(tokens)
        self.processed += tokens

    @rule()
    def send(self) -> None:
        snapshot = self.books.snapshot(0)
        if snapshot.tokens and self.books.send(0, snapshot):
            self.sent.append(snapshot)

    @rule(data=st.data(), fate=st.sampled_from(["applied", "refused", "unmerged", "late"]))
    def merge(self, data: st.DataObject, fate: str) -> None:
        """The base is superseded; the verdict comes before the version, or (late) after it, and then it is 0."""
        if self.sent and fate == "late":
            self.late.append(self.version)
        elif self.sent:
            tokens = data.draw(st.sampled_from(self.sent)).tokens if fate != "unmerged" else 0
            self.booked += tokens
            self.books.outcome(verdict(self.version, tokens, applied=fate == "applied"))
        self.version += 1
        self.discarded += self.books.adopt(0, self.version, keep=not self.books.refused(0))
        self.sent.clear()

    @rule()
    def late_verdicts(self) -> None:
        for base in self.late:
            self.books.outcome(verdict(base, 0, applied=False))
        self.late.clear()

    @invariant()
    def all_is_booked_discarded_or_pending(self) -> None:
        report = self.books.report()
        assert report["discarded"] == [self.discarded]
        assert report["pending"][0] == self.processed - self.booked - self.discarded
        assert self.books.waiting(0).count(self.version) == bool(self.sent)
        [item] = report["leases"]
        assert item.settled >= self.settled
        assert (item.settled == self.steps) == (self.processed == self.booked + self.discarded)
        self.settled = item.settled


TestKeepingMachine = KeepingMachine.TestCase
TestKeepingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_only_what_was_applied_counts_as_merged(books: Books) -> None:
    books.step(10)
    assert books.send(0, books.snapshot(0))
    books.outcome(Verdict(incarnation=1, fragment=0, base=0, applied=False, tokens=10))
    assert books.merged == [0]
    books.adopt(0, 1)
    books.step(4)
    assert books.send(0, books.snapshot(0))
    books.outcome(Verdict(incarnation=1, fragment=0, base=1, applied=True, tokens=4))
    assert books.merged == [4]


def test_what_is_read_of_the_broadcast_goes_back_under_a_new_timeline_only(books: Books) -> None:
    books.read(7)
    books.read(5)
    assert books.last_read == 7
    books.read(3, anew=True)
    assert books.last_read == books.report()["read"] == 3
