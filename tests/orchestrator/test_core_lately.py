"""Whose work counts, as the page says it: of which span of rounds, when it is not known, and what is to be done."""

from __future__ import annotations

import pytest

from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core import lately
from anabranch.orchestrator.core.state import Member
from anabranch.orchestrator.core.view import view
from tests.orchestrator.bench import TOKENS, Bench, make_spec, one


class Cycles:
    """Workers `a`, whose steps are all merged, and `b`, which may be late. P = 2."""

    def __init__(self) -> None:
        self.bench = Bench(make_spec("overwrite", quorum=1))
        for name in ("a", "b"):
            self.bench.worker(name)

    @property
    def b(self) -> Member:
        return self.bench.state.members[self.bench.puppets["b"].incarnation]

    def run(self, cycles: int, *, answers: bool, late: bool = False) -> None:
        """So many rounds of each fragment; `b` makes two steps in each."""
        bench = self.bench
        for fragment in [0, 1] * cycles:
            bench.steps(a=2, b=2)
            made = bench.contribute("a", fragment)
            offer = bench.offer("b", fragment)
            if answers:
                made += [i for fetch in bench.send_offer(offer) if isinstance(fetch, do.Fetch)
                         for i in bench.fetched(fetch.offer)]  # fmt: skip
            else:
                made += bench.elapse(20.0)  # its grace window, or its deadline
            bench.merge(one(do.Merge, made))
            if late:
                bench.send_offer(offer)
                bench.puppets["b"].discarded[fragment] -= offer.message.tokens
        bench.steps(a=1, b=1)


@pytest.mark.parametrize("answers", [True, False])
def test_what_was_merged_of_the_last_cycles_is_said(answers: bool) -> None:
    cycles = Cycles()
    cycles.run(4, answers=answers)
    found = lately.shares(cycles.b)
    assert found == {"merged": float(answers), "rejected": 0.0, "discarded": float(not answers)}


def test_before_a_cycle_is_over_nothing_is_known_and_nobody_complains() -> None:
    cycles = Cycles()
    assert lately.shares(cycles.b) is None
    assert lately.complaint(cycles.b, "overwrite") is None
    member = next(m for m in view(cycles.bench.state, cycles.bench.now)["members"] if m["name"] == "b")
    assert (member["lately"], member["complaint"]) == (None, None)


def test_what_is_long_ago_is_forgotten() -> None:
    cycles = Cycles()
    cycles.run(10, answers=False)
    parts = lately.shares(cycles.b)
    assert parts is not None
    assert parts["merged"] == 0.0
    cycles.run(lately.SPANS + 4, answers=True)
    assert lately.shares(cycles.b) == {"merged": 1.0, "rejected": 0.0, "discarded": 0.0}
    assert len(cycles.b.lately.ends) == lately.SPANS + 1


def test_cycles_without_an_outcome_are_no_spans() -> None:
    """A worker whose step outlasts many cycles is judged by its last steps."""
    cycles = Cycles()
    cycles.run(3, answers=True)
    before = [list(end) for end in cycles.b.lately.ends]
    bench = cycles.bench
    for fragment in [0, 1] * 20:
        bench.steps(a=2)
        made = bench.contribute("a", fragment)
        order = one(do.Merge, made + (bench.elapse(20.0) if not any(isinstance(i, do.Merge) for i in made) else []))
        bench.commit(order)  # b adopts nothing meanwhile
        bench.adopt(bench.puppets["a"], fragment, order.base + 1, settled=bench.puppets["a"].held[fragment])
    assert cycles.b.lately.ends[: len(before)] == before
    assert len(cycles.b.lately.ends) <= len(before) + 1


def test_the_complaint_names_the_part_and_the_setting() -> None:
    cycles = Cycles()
    cycles.run(4, answers=False)
    said = lately.complaint(cycles.b, "overwrite")
    assert said is not None
    assert said.startswith("of b's tokens 0% were merged lately: 100% were discarded")
    assert 'workers.adoption = "rebase" with workers.rebase_above = 0.1' in said
    assert "a smaller workers.rebase_above keeps it" in (lately.complaint(cycles.b, "rebase") or "")
    cycles.run(lately.SPANS + 2, answers=True)
    assert lately.complaint(cycles.b, "overwrite") is None


def test_who_comes_late_is_told_of_the_window() -> None:
    cycles = Cycles()
    cycles.run(4, answers=False, late=True)
    parts = lately.shares(cycles.b)
    assert parts is not None
    assert parts["rejected"] == 1.0
    assert "rounds.grace_factor waits longer" in (lately.complaint(cycles.b, "overwrite") or "")


def test_a_successor_begins_to_measure_anew() -> None:
    cycles = Cycles()
    cycles.run(4, answers=True)
    after = cycles.bench.reload().members[cycles.b.incarnation]
    assert lately.shares(cycles.b) is not None
    assert lately.shares(after) is None


def test_figures_that_a_timeline_took_back_are_no_negative_share() -> None:
    cycles = Cycles()
    cycles.run(4, answers=True)
    cycles.b.account.applied[:] = [TOKENS, TOKENS]
    cycles.b.lately.merges = -10
    lately.look(cycles.b, cycles.bench.state)
    assert lately.shares(cycles.b) is None
    assert len(cycles.b.lately.ends) == 1
