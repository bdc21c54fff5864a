"""The ledger: `processed = applied + rejected + discarded + lost + pending`, per incarnation and fragment."""

from __future__ import annotations

import dataclasses

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.ledger import Account, imbalance, weighted
from anabranch.queue import messages as msg
from tests.orchestrator.bench import TOKENS, Bench, Puppet, claim, make_spec, notes, one, only

# --- the arithmetic ---------------------------------------------------------------------------------------


def test_the_equation() -> None:
    account = Account.empty(2)
    account.add("applied", 1, 50)
    account.add("rejected", 1, 20)
    account.add("lost", 1, 5)
    assert account.settled(1) == 75
    assert account.settled(0) == 0
    assert imbalance(account, 1, processed=100, discarded=15, pending=10) == 0
    assert imbalance(account, 1, processed=100, discarded=15, pending=9) == 1
    assert imbalance(account, 1, processed=100, discarded=15) == 10


def test_figures_are_weighted_by_parameters() -> None:
    assert weighted([100, 20], [30, 10]) == 80.0
    assert weighted([], []) == 0.0


# --- booking ----------------------------------------------------------------------------------------------


def merged_once(bench: Bench) -> Puppet:
    """One worker, one merge of fragment 0."""
    a = bench.worker("a")
    bench.steps(a=2)
    bench.merge(one(do.Merge, bench.contribute("a")))
    return a


def test_a_merge_books_what_it_applied() -> None:
    bench = Bench()
    merged_once(bench)
    booked = one(do.Book, bench.log)
    assert (booked.incarnation, booked.fragment, booked.column, booked.tokens) == (1, 0, "applied", 3 * TOKENS)
    assert bench.state.members[1].account.applied == [300, 0]


def test_what_is_refused_for_an_unknown_base_is_booked_once() -> None:
    bench = Bench()
    bench.worker("a")
    offer = bench.offer("a", base=7)
    assert one(do.Book, bench.send_offer(offer)).column == "rejected"
    again = bench.send_offer(dataclasses.replace(offer, entry=bench.entry()))
    assert notes("rejected", again)
    assert not only(do.Book, again)


def test_lost_is_what_is_left_over_when_an_incarnation_ends() -> None:
    bench = Bench()
    merged_once(bench)
    bench.steps(a=1)  # 100 tokens more in both fragments
    bench.leave("a")  # a farewell without figures: as last reported
    close = one(do.CloseBooks, bench.elapse(0.5))
    assert [(b.fragment, b.tokens) for b in only(do.Book, bench.log) if b.column == "lost"] == [(0, 100), (1, 400)]
    assert close.books == ((300, 0, 100), (0, 0, 400))
    assert close.lost == (100 + 400) / 2, "parameter-weighted over two equal fragments"


def figures_of(processed: int, discarded: int) -> msg.Figures:
    return msg.Figures(processed=processed, discarded=discarded, pending=0)


def test_a_proper_farewell_loses_nothing() -> None:
    bench = Bench()
    a = merged_once(bench)
    bench.steps(a=1)
    figures = [figures_of(a.processed, a.discarded[0] + a.held[0]), figures_of(a.processed, a.held[1])]
    bench.leave("a", figures=figures)
    assert one(do.CloseBooks, bench.elapse(0.5)).lost == 0
    assert not [b for b in only(do.Book, bench.log) if b.column == "lost"]


def test_what_a_contribution_says_of_its_sender_counts_even_without_a_later_heartbeat() -> None:
    bench = Bench(make_spec("overwrite"))
    a = bench.worker("a")
    a.silent = True
    bench.contribute("a", base=7, tokens=100, processed=1000, discarded=200)  # refused and booked
    bench.elapse(3.0)
    assert one(do.CloseBooks, bench.log).books[0] == (0, 100, 1000 - 200 - 100)


def test_the_departed_are_remembered_with_their_final_books() -> None:
    bench = Bench()
    merged_once(bench)
    bench.leave("a")
    bench.elapse(0.5)
    (final,) = bench.state.departed
    assert (final.processed, final.applied, final.discarded, final.lost) == (300, 150, 0, 150)


def test_the_books_of_all_who_departed_are_kept_together() -> None:
    bench = Bench()
    merged_once(bench)
    bench.worker("b")
    bench.steps(b=1)
    for name in ("a", "b"):
        bench.leave(name)
        bench.elapse(0.5)
    closed = [close.books for close in only(do.CloseBooks, bench.log)]
    assert len(closed) == 2
    totals = [[sum(column) for column in zip(*books, strict=True)] for books in zip(*closed, strict=True)]
    assert bench.state.departed_books == totals


# --- checking: a mismatch can be seen ---------------------------------------------------------------------


def test_honest_books_balance() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    for turn in range(6):
        bench.steps(a=2, b=2)
        bench.contribute("a", turn % 2)
        bench.merge(one(do.Merge, bench.contribute("b", turn % 2)))
    bench.elapse(1.0)
    assert [f.version for f in bench.state.fragments] == [3, 3]
    assert not notes("ledger mismatch", bench.log)


def test_tokens_that_vanished_are_noted_once() -> None:
    bench = Bench()
    merged_once(bench).pending[1] -= 40
    (note,) = notes("ledger mismatch", bench.elapse(3.0))
    assert note.reason == "ledger of a, fragment 1: 40 of 300 tokens missing"
    assert note.details == {"incarnation": 1, "name": "a", "fragment": 1, "difference": 40}


def test_a_mismatch_that_changes_is_noted_again() -> None:
    bench = Bench()
    a = merged_once(bench)
    a.pending[1] -= 40
    bench.elapse(1.0)
    a.pending[1] -= 5
    assert notes("ledger mismatch", bench.elapse(1.0))[0].details["difference"] == 45
    a.pending[1] += 45
    assert not notes("ledger mismatch", bench.elapse(1.0))
    a.pending[1] -= 45
    assert notes("ledger mismatch", bench.elapse(1.0))


def test_a_fragment_is_not_checked_before_its_member_has_read_the_last_outcome() -> None:
    bench = Bench()
    a = bench.worker("a")
    bench.steps(a=2)
    order = one(do.Merge, bench.contribute("a"))
    merged = ev.Merged(order.round, claim("_", b"1" * 32))
    bench.engine.feed(merged, a.heartbeat())  # counts as pending what is applied: that is not even broadcast
    bench.send(a.heartbeat())  # nor read
    assert not notes("ledger mismatch", bench.log)
    a.read = bench.engine.broadcast
    assert notes("ledger mismatch", bench.send(a.heartbeat())), "now it has read it, and does not account for it"


def test_other_fragments_are_checked_meanwhile() -> None:
    bench = Bench()
    a = bench.worker("a")
    bench.steps(a=2)
    order = one(do.Merge, bench.contribute("a"))
    bench.send(ev.Merged(order.round, claim("_", b"1" * 32)))
    a.pending[1] -= 1
    assert notes("ledger mismatch", bench.send(a.heartbeat()))[0].details["fragment"] == 1
