"""Where the training side and the I/O side of a worker meet: calls, versions, answers."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from anabranch.merge.codecs import Codec, decode
from anabranch.merge.fragments import Layout, TensorSpec, plan_layout
from anabranch.model import Float32
from anabranch.queue.messages import Call, Claim, Head, Own, Verdict
from anabranch.queue.records import FragmentRecord, Snapshot
from anabranch.workers.member.adoption import POLICIES, Adoption, Rebase
from anabranch.workers.member.books import Books
from anabranch.workers.member.learner import Learner, NewVersion, Outgoing, Refusal
from anabranch.workers.member.synthetic import NumpyStore

LAYOUT = plan_layout([TensorSpec("a", (3,)), TensorSpec("b", (3,))], 2)


class Bench:
    """A learner whose outgoing items are collected, on a clock the test moves."""

    def __init__(
        self, codec: Codec = "fp32", adoption: str | Adoption = "overwrite", layout: Layout = LAYOUT
    ) -> None:
        self.now = 0.0
        self.store = NumpyStore(layout)
        self.books = Books(len(layout.fragments))
        policy = POLICIES[adoption]() if isinstance(adoption, str) else adoption
        self.learner = Learner(self.store, policy, self.books, codec, clock=lambda: self.now)
        self.sent: list[Outgoing | Refusal] = []

    def offer(self, version: int, fragment: int = 0, *, digest: bytes = b"", value: float | None = None) -> None:
        theta = np.full(3, version if value is None else value, np.float32)
        self.learner.offer(NewVersion(fragment, version, digest or bytes([version]) * 32, theta))

    def boundary(self, step_s: float = 0.0) -> list[int]:
        return self.learner.boundary(1.5, self.sent.append, step_s)

    def train(self, by: float = 0.25, tokens: int = 10) -> None:
        for theta in self.store.theta:
            theta -= np.float32(by)
        self.books.step(tokens)

    def hear(self, after_s: float, call: Call) -> Outgoing | None:
        """A call for us arrives `after_s` later."""
        self.now += after_s
        self.learner.heard(call)
        return self.learner.call(call)


def call(base: int = 0, fragment: int = 0, number: int = 1) -> Call:
    return Call(round=number, fragment=fragment, timeline="t", base=base, called=[1])


@pytest.fixture
def bench() -> Bench:
    """Both fragments at version 0."""
    bench = Bench()
    bench.offer(0, 0)
    bench.offer(0, 1)
    assert bench.boundary() == [0, 1]
    return bench


def test_nothing_to_do_at_a_boundary(bench: Bench) -> None:
    assert bench.boundary() == []
    assert bench.sent == []


def values(item: Outgoing | Refusal) -> Float32:
    assert isinstance(item, Outgoing)
    return decode("fp32", item.data, 3)


def test_a_call_is_answered_at_the_next_boundary_with_base_minus_theta(bench: Bench) -> None:
    bench.train(by=0.25)
    assert bench.learner.call(call()) is None
    assert bench.sent == []
    bench.boundary()
    [answer] = bench.sent
    assert isinstance(answer, Outgoing)
    np.testing.assert_array_equal(values(answer), np.full(3, 0.25, np.float32))
    assert (answer.snapshot.base, answer.snapshot.tokens, answer.snapshot.steps) == (0, 10, 1)
    assert answer.base_digest == bytes(32)
    assert answer.loss == 1.5
    assert answer.codec == "fp32"
    assert not bench.books.has_outcome(0, 0)


def test_a_call_is_answered_once(bench: Bench) -> None:
    bench.train()
    bench.learner.call(call())
    bench.boundary()
    bench.boundary()
    assert len(bench.sent) == 1


@pytest.mark.parametrize("codec", get_args(Codec))
def test_the_answer_is_in_the_runs_codec(codec: Codec) -> None:
    bench = Bench(codec)
    bench.offer(0)
    bench.boundary()
    bench.train(by=0.5)
    bench.learner.call(call())
    bench.boundary()
    [answer] = bench.sent
    assert isinstance(answer, Outgoing)
    assert answer.codec == codec
    np.testing.assert_array_equal(decode(codec, answer.data, 3), np.full(3, 0.5, np.float32))


def test_a_call_for_a_base_it_does_not_hold_yet_is_declined(bench: Bench) -> None:
    bench.train()
    bench.learner.call(call(base=3))
    bench.boundary()
    [answer] = bench.sent
    assert isinstance(answer, Refusal)
    assert answer.reason == "holds version 0 of fragment 0, asked for 3"


def test_a_call_without_tokens_is_declined(bench: Bench) -> None:
    bench.learner.call(call())
    bench.boundary()
    [answer] = bench.sent
    assert isinstance(answer, Refusal)
    assert "no tokens" in answer.reason


def test_a_call_of_a_round_that_is_over_is_dropped(bench: Bench) -> None:
    bench.offer(2)
    bench.boundary()
    bench.train()
    bench.learner.call(call(base=1))
    bench.boundary()
    assert bench.sent == []


def test_adoption_comes_before_the_answers(bench: Bench) -> None:
    bench.train()
    bench.learner.call(call(base=1))
    bench.offer(1)
    bench.boundary()
    [answer] = bench.sent
    assert isinstance(answer, Refusal)
    assert "no tokens" in answer.reason, "it holds the base now, but nothing was trained on it"


def test_a_version_overwrites_parameters_and_counters(bench: Bench) -> None:
    bench.train()
    bench.offer(1, value=7.0)
    assert bench.boundary() == [0]
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 7.0))
    assert bench.books.holds(0) == 0
    assert bench.books.holds(1) == 10
    assert bench.books.report()["discarded"] == [10, 0]


def test_a_newer_version_replaces_one_that_waits(bench: Bench) -> None:
    bench.offer(1)
    bench.offer(2)
    bench.boundary()
    assert bench.books.version(0) == 2


def test_an_older_version_does_not_replace_one_that_waits(bench: Bench) -> None:
    bench.offer(2)
    bench.offer(1)
    bench.boundary()
    assert bench.books.version(0) == 2


def test_the_same_version_again_keeps_base_and_work(bench: Bench) -> None:
    bench.train()
    before = bench.store.theta[0].copy()
    bench.offer(0)
    assert bench.boundary() == []
    np.testing.assert_array_equal(bench.store.theta[0], before)
    assert bench.books.holds(0) == 10


def test_the_same_version_with_other_bits_overwrites(bench: Bench) -> None:
    bench.train()
    bench.offer(0, digest=b"x" * 32, value=3.0)
    assert bench.boundary() == [0]
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 3.0))


# --- a new timeline ---------------------------------------------------------------------------------------


def test_what_waited_under_an_earlier_timeline_is_forgotten(bench: Bench) -> None:
    bench.train()
    bench.learner.call(call())
    bench.offer(1)
    bench.learner.go_on_under("2-x")
    assert bench.boundary() == [], "the version belongs to what was lost"
    assert bench.sent == [], "and so does the call"


def test_under_the_same_timeline_nothing_is_forgotten(bench: Bench) -> None:
    bench.learner.go_on_under("2-x")
    bench.train()
    bench.learner.call(call())
    bench.learner.go_on_under("2-x")
    bench.boundary()
    assert len(bench.sent) == 1


def test_a_version_of_an_earlier_timeline_comes_too_late(bench: Bench) -> None:
    bench.learner.go_on_under("2-x")
    bench.offer(1)  # its download took long
    assert bench.boundary() == []
    assert bench.books.version(0) == 0


def test_copies_answer_no_call_of_a_later_timeline(bench: Bench) -> None:
    slow(bench)
    bench.learner.go_on_under("2-x")
    assert bench.hear(1.0, call(number=9)) is None


@pytest.mark.parametrize("adoption", ["blend", "rebase"])
def test_nothing_is_kept_of_what_was_sent_on_a_base_that_is_over(adoption: str) -> None:
    bench = Bench(adoption=adoption)
    bench.offer(0)
    bench.boundary()
    for base in range(3):
        bench.train()
        bench.learner.call(call(base, number=base + 1))
        bench.boundary()
        bench.books.outcome(Verdict(incarnation=1, fragment=0, base=base, applied=True, tokens=10))
        bench.offer(base + 1)
        bench.boundary()
        assert bench.learner._sent == {}
        assert bench.books._pages[0].steps_sent == {}


# --- steps longer than the time between calls: answers from copies ----------------------------------------


def slow(bench: Bench) -> None:
    """Calls come every second, a step takes three: at the boundary all fragments fall due before the next."""
    for number in range(4):
        bench.now += 1.0
        bench.learner.heard(call(base=9, fragment=number % 2, number=number + 1))
    bench.train(by=0.25)
    bench.boundary(step_s=3.0)


def test_a_slow_worker_answers_at_once_from_a_copy(bench: Bench) -> None:
    slow(bench)
    bench.train(by=0.25)  # the next step is under way
    answer = bench.hear(1.0, call())
    assert answer is not None
    np.testing.assert_array_equal(values(answer), np.full(3, 0.25, np.float32))
    assert answer.snapshot.tokens == 10, "what trained after the copy is not claimed"
    assert answer.loss == 1.5
    assert not bench.books.has_outcome(0, 0)


def test_that_others_are_called_later_for_a_round_says_nothing_about_the_time_between_rounds(bench: Bench) -> None:
    slow(bench)
    for _ in range(20):
        bench.now += 0.01
        bench.learner.heard(call(base=9, fragment=1, number=4))
    bench.boundary(step_s=0.25)
    assert bench.hear(0.01, call(number=5)) is None, "a step that is short beside a second needs no copy"


def test_a_copy_answers_one_call_only(bench: Bench) -> None:
    slow(bench)
    assert bench.hear(1.0, call()) is not None
    assert bench.hear(1.0, call(number=2)) is None
    bench.boundary()
    assert len(bench.sent) == 1


def test_a_copy_of_another_base_is_not_sent(bench: Bench) -> None:
    slow(bench)
    assert bench.hear(1.0, call(base=1)) is None
    bench.boundary()
    assert isinstance(bench.sent[0], Refusal)


def test_copies_do_not_outlive_the_next_boundary(bench: Bench) -> None:
    slow(bench)
    bench.boundary(step_s=0.0)
    assert bench.hear(1.0, call()) is None


def test_after_a_pause_no_more_is_copied_than_is_called_for_within_a_step() -> None:
    bench = Bench(layout=plan_layout([TensorSpec(name, (3,)) for name in "abcd"], 4))
    for fragment in range(4):
        bench.offer(0, fragment)
    bench.boundary()
    for number in range(4):
        bench.now += 1.0
        bench.learner.heard(call(base=9, fragment=number, number=number + 1))
    bench.now += 100.0
    bench.train()
    bench.boundary(step_s=0.75)
    answered = [bench.learner.call(call(fragment=fragment)) is not None for fragment in range(4)]
    assert answered == [True, True, False, False]


def test_a_quick_worker_takes_no_copies(bench: Bench) -> None:
    for number in range(4):
        bench.now += 1.0
        bench.learner.heard(call(base=9, fragment=number % 2, number=number + 1))
    bench.train()
    bench.boundary(step_s=0.5)
    assert bench.hear(1.0, call()) is None


# --- what a new timeline has of ours ----------------------------------------------------------------------


def shown(version: int, *told: int, known: bool = True, bits: int | None = None) -> Snapshot:
    """The run under a new timeline: fragment 0 at this version, and outcomes on these bases."""
    digest = bytes([version if bits is None else bits]) * 32
    theta = Claim(owner="_", id="ab", bytes=4, chunk_bytes=1024, codec="fp32", hashes=[b"h" * 32], digest=digest)
    outcomes = [Verdict(incarnation=1, fragment=0, base=base, applied=True, tokens=10) for base in told]
    head = Head(timeline="1-new", tokens=0, paused=False, stopped=False, asked_init=0, calls=[])
    own = Own(nonce=b"n" * 16, outcomes=outcomes, leases=[]) if known else None
    return Snapshot(head, (FragmentRecord(version, theta),), own, 0)


def sent_on(bench: Bench, base: int) -> None:
    bench.train()
    bench.learner.call(call(base))
    bench.boundary()


def test_what_is_still_there_under_a_new_timeline_goes_on(bench: Bench) -> None:
    sent_on(bench, 0)
    assert bench.learner.lost_to(shown(0), "0-old") is None
    assert bench.learner.lost_to(shown(1), "0-old") is None


def test_an_unknown_member_and_other_bits_and_a_version_that_is_gone_are_lost(bench: Bench) -> None:
    assert bench.learner.lost_to(shown(0, known=False), "0-old") == "unknown to the run"
    assert "is based on" in (bench.learner.lost_to(shown(0, bits=9), "0-old") or "")
    bench.offer(1)
    bench.boundary()
    assert "is based on" in (bench.learner.lost_to(shown(0), "0-old") or "")
    assert bench.learner.lost_to(shown(0), "1-new") is None, "the same timeline: the leader has not seen it yet"


def test_what_was_sent_on_a_version_that_is_gone_is_lost(bench: Bench) -> None:
    bench.offer(1)
    bench.boundary()
    sent_on(bench, 1)
    bench.offer(0)  # read from a server that had gone back
    bench.boundary()
    assert "is based on" in (bench.learner.lost_to(shown(0), "0-old") or "")


def test_an_outcome_that_was_told_and_is_gone_is_lost(bench: Bench) -> None:
    sent_on(bench, 0)
    bench.books.outcome(Verdict(incarnation=1, fragment=0, base=0, applied=True, tokens=10))
    assert "lost an outcome" in (bench.learner.lost_to(shown(0), "0-old") or "")
    assert bench.learner.lost_to(shown(0, 0), "0-old") is None
    assert bench.learner.lost_to(shown(3, 1, 2), "0-old") is None, "the newest are kept, and these are newer"


# --- policies that keep what was not merged ---------------------------------------------------------------


def begun(adoption: str, codec: Codec = "fp32") -> Bench:
    bench = Bench(codec, adoption)
    bench.offer(0, 0, value=1.0)
    bench.offer(0, 1, value=1.0)
    bench.boundary()
    return bench


def settle(bench: Bench, tokens: int, *, applied: bool, base: int = 0) -> None:
    bench.books.outcome(Verdict(incarnation=1, fragment=0, base=base, applied=applied, tokens=tokens))


def test_rebase_carries_on_what_came_after_the_applied_snapshot() -> None:
    bench = begun("rebase")
    bench.train(0.25)
    bench.learner.call(call())
    bench.boundary()  # Δ = 0.25
    bench.train(0.125)
    settle(bench, 10, applied=True)
    bench.offer(1, value=5.0)
    bench.boundary()
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 5.0 - 0.125, np.float32))
    bench.learner.call(call(base=1))
    bench.boundary()
    np.testing.assert_array_equal(values(bench.sent[-1]), np.full(3, 0.125, np.float32))


@pytest.mark.parametrize(("above", "carried"), [(0.25, True), (0.26, False)])
def test_rebase_leaves_next_to_nothing_behind(above: float, *, carried: bool) -> None:
    bench = Bench(adoption=Rebase(above))
    for fragment in (0, 1):
        bench.offer(0, fragment)
    bench.boundary()
    for _ in range(3):
        bench.train()
    bench.learner.call(call())
    bench.boundary()
    bench.train()  # a quarter of the work since the base
    bench.books.outcome(Verdict(incarnation=1, fragment=0, base=0, applied=True, tokens=30))
    bench.offer(1, value=5.0)
    bench.boundary()
    assert bench.books.holds(0) == (10 if carried else 0)
    np.testing.assert_allclose(bench.store.theta[0], 4.75 if carried else 5.0)
    assert bench.books.report()["discarded"][0] == (0 if carried else 10)


@pytest.mark.parametrize("adoption", ["rebase", "blend"])
def test_what_the_run_refused_for_what_it_is_is_carried_on_by_no_policy(adoption: str) -> None:
    """A step larger than allowed: with it in the parameters, each later contribution would be as large."""
    bench = begun(adoption)
    bench.train(1e6)
    bench.learner.call(call())
    bench.boundary()
    bench.train(0.125)
    settle(bench, 10, applied=False)
    bench.offer(1, value=5.0)
    bench.boundary()
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 5.0, np.float32))
    assert bench.books.holds(0) == 0
    assert bench.books.report()["discarded"][0] == 10, "and 10 were rejected"
    bench.train(0.5)
    bench.learner.call(call(base=1))
    bench.boundary()
    np.testing.assert_array_equal(values(bench.sent[-1]), np.full(3, 0.5, np.float32))


def test_rebase_carries_on_everything_that_came_late() -> None:
    bench = begun("rebase")
    bench.train(0.25)
    bench.learner.call(call())
    bench.boundary()
    settle(bench, 0, applied=False)
    bench.offer(1, value=5.0)
    bench.boundary()
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 4.75, np.float32))
    assert bench.books.holds(0) == 10


def test_what_a_codec_rounded_away_goes_with_the_next_contribution() -> None:
    bench = begun("rebase", "bf16")
    bench.train(0.1)  # not a bfloat16
    bench.learner.call(call())
    bench.boundary()
    [outgoing] = bench.sent
    assert isinstance(outgoing, Outgoing)
    sent = decode("bf16", outgoing.data, 3)
    settle(bench, 10, applied=True)
    bench.offer(1, value=1.0)
    bench.boundary()
    live = np.float32(1.0) - np.float32(0.1)
    np.testing.assert_array_equal(bench.store.theta[0], (live - np.float32(1.0)) + np.float32(1.0) + sent)
    assert np.all(bench.store.theta[0] != 1.0)


def test_blend_keeps_a_share_of_the_live_parameters() -> None:
    bench = begun("blend")
    bench.train(0.5)
    bench.offer(1, value=2.0)
    bench.boundary()
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 0.5 * 0.5 + 0.5 * 2.0, np.float32))
    assert bench.books.holds(0) == 10, "it stays pending"


@pytest.mark.parametrize("adoption", ["rebase", "blend"])
def test_a_worker_that_diverged_is_healed_by_overwriting(adoption: str) -> None:
    bench = begun(adoption)
    bench.train()
    bench.store.theta[0][1] = np.nan
    bench.offer(1, value=2.0)
    bench.boundary()
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 2.0, np.float32))
    assert bench.books.holds(0) == 0
    assert bench.books.report()["discarded"] == [10, 0]


@pytest.mark.parametrize("adoption", ["rebase", "blend"])
def test_the_same_version_with_other_bits_overwrites_whatever_the_policy(adoption: str) -> None:
    bench = begun(adoption)
    bench.train()
    bench.offer(0, digest=b"x" * 32, value=7.0)
    bench.boundary()
    np.testing.assert_array_equal(bench.store.theta[0], np.full(3, 7.0, np.float32))
