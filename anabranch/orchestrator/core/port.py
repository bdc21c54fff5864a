"""The decision core and its port. Three calls, the same for a live synchronizer, the simulator and a replay:

| call | what it does |
| --- | --- |
| `step(event, now)` | something happened; the core decides what follows |
| `take()` | everything decided since the last `take`, as one `Batch`; None if that is nothing |
| `stored(batch, number, now)` | the batch is stored, and its last broadcast entry has this number |

A batch is one transaction: what `AT_ONCE` names may begin as soon as it is taken, everything else counts once it is
stored, all of it or nothing. At most one batch is out at a time. Whoever drives a core puts a timer that is set again
in the place of the one before, and hands over everything that waits to be heard before a timer fires.

Nobody else changes the core's state. `now` is seconds of whatever clock the caller has (the process's monotonic clock
live, virtual time in the simulator) and never goes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anabranch.orchestrator.core import (
    birth,
    closing,
    contributions,
    heartbeats,
    membership,
    opening,
    operators,
    peers,
    ranges,
    timelines,
)
from anabranch.orchestrator.core.events import (
    Draining,
    Event,
    Fetched,
    FetchFailed,
    Heard,
    InitFailed,
    InitReady,
    MemorySeen,
    Merged,
    Redefined,
    Returned,
    Saved,
    Started,
    TimerFired,
    Troubled,
    Unreadable,
)
from anabranch.orchestrator.core.grace import average
from anabranch.orchestrator.core.instructions import AT_ONCE, Consume, Instruction, Note, SetTimer
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages

SWEEPS_PER_HEARTBEAT = 2


@dataclass(frozen=True)
class Batch:
    """What was decided, in order. Asking it changes nothing."""

    number: int  # of this core's batches, from 1
    instructions: tuple[Instruction, ...]
    writes: bool  # whether there is anything to store
    everything: bool = False  # store all members' records, whether or not they changed
    changed: frozenset[int] = frozenset()  # incarnations whose record differs from what is stored
    removed: frozenset[int] = frozenset()  # incarnations whose record is to be deleted
    outcomes: tuple[tuple[int, int], ...] = ()  # incarnation, fragment: told for the first time
    closed_at: tuple[float, ...] = ()  # of the rounds that are committed


class Core:
    """One run's state and what to do next."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._said: list[Instruction] = []
        self._taken = 0
        self._out: Batch | None = None

    def step(self, event: Event, now: float) -> None:
        """Take one event."""
        self._said += self._dispatch(event, now)
        if isinstance(event, Started):
            return  # what is in inboxes has not been heard yet
        if not isinstance(event, Heard) or opening.makes_due(self.state, event.message):
            self._said += opening.open_due(self.state, now)

    def take(self, *, everything: bool = False) -> Batch | None:
        """What was decided since the last time. `everything`: figures that change with every heartbeat, too, even if
        nothing was decided."""
        assert self._out is None, f"batch {self._taken} is not stored yet"
        state, said = self.state, tuple(self._said)
        if not said and not everything:
            return None
        self._said = []
        self._taken += 1
        writes = everything or any(not isinstance(i, AT_ONCE) for i in said)
        if writes:
            marks = frozenset(state.changed), frozenset(state.removed), tuple(state.unmarked), tuple(state.committing)
            state.changed.clear()
            state.removed.clear()
            self._out = Batch(self._taken, said, True, everything, *marks)
        else:
            self._out = Batch(self._taken, said, False)
        return self._out

    def stored(self, batch: Batch, number: int, now: float) -> None:
        """Outcomes of the batch are on the broadcast stream, at or before this number."""
        assert batch is self._out, "another batch is out"
        state, self._out = self.state, None
        for incarnation, fragment in batch.outcomes:
            if (member := state.members.get(incarnation)) is not None:
                member.outcome_read[fragment] = number
        del state.unmarked[: len(batch.outcomes)]
        for closed_at in batch.closed_at:
            state.averages.sync_s = average(state.averages.sync_s, now - closed_at)
        del state.committing[: len(batch.closed_at)]

    # --- dispatch -----------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> Iterator[Instruction]:
        state = self.state
        match event:
            case Heard():
                yield from self._heard(event, now)
            case Unreadable():
                yield from self._unreadable(event.sender, event.entry, event.reason)
            case Fetched():
                yield from contributions.fetched(state, event, now)
            case FetchFailed():
                yield from contributions.fetch_failed(state, event, now)
            case Merged():
                yield from closing.merged(state, event, now)
                yield from operators.later_interval(state)
            case TimerFired():
                yield from self._timer(event, now)
            case InitReady():
                yield from birth.ready(state, event)
            case InitFailed():
                yield from birth.failed(state, event)
            case MemorySeen():
                yield from membership.memory_seen(state, event.share, now)
            case Saved():
                yield from operators.saved(state, event)
            case Troubled():
                state.count("troubles")
                yield Note(event.reason, "trouble")
            case Draining():
                state.draining = True
            case Returned():
                yield from timelines.begin(state, event.reason)
            case Redefined():
                yield from membership.dismiss_all(state, event.reason)
            case Started():
                yield from self._start(event, now)

    def _heard(self, event: Heard, now: float) -> Iterator[Instruction]:
        state, said = self.state, event.message
        match said:
            case messages.Progress():
                yield from heartbeats.progressed(state, event.sender, said, now)
            case messages.Contribution():
                yield from contributions.offered(state, event, said)
            case messages.Decline():
                yield from contributions.declined(state, event, said, now)
            case messages.Register() if said.name == event.sender:
                yield from membership.join(state, event, said, now)
            case messages.Farewell():
                yield from membership.leave(state, event, said)
                yield from closing.review_all(state, now)
            case messages.RangeRequest():
                yield from ranges.asked(state, event, said)
            case messages.StateRequest():
                yield from peers.asked(state, event, said, now)
            case messages.StateOffer():
                yield from peers.given(state, event, said)
            case messages.Init():
                yield from birth.offered(state, event, said)
            case messages.Command() if not event.sender:
                yield from operators.commanded(state, event, said, now)
            case messages.Register():
                reason = f"registers as {said.name!r} in another's inbox"
                yield from self._unreadable(event.sender, event.entry, reason)
            case _:
                reason = f"a {said.type} message does not belong there"
                yield from self._unreadable(event.sender, event.entry, reason)

    def _unreadable(self, sender: str, entry: bytes, reason: str) -> Iterator[Instruction]:
        if entry:
            yield Consume("unreadable", sender, (entry,))
        self.state.count("messages refused")
        yield Note(f"message of {sender} refused: {reason}", "refused", {"name": sender})

    def _start(self, event: Started, now: float) -> Iterator[Instruction]:
        state = self.state
        state.init_given = event.init_given
        if state.stopped and event.fresh:  # whoever starts a synchronizer on a stopped run wants it to go on
            state.stopped = False
            yield Note("the run had been stopped: it goes on", "continued")
        yield SetTimer("sweep", "sweep", self._sweep_s)
        for round_ in state.rounds.values():
            left = max(0.0, round_.deadline_s - (now - round_.opened_at))
            yield SetTimer("round deadline, continued", "round deadline", left, round_.number)

    def _timer(self, event: TimerFired, now: float) -> Iterator[Instruction]:
        state = self.state
        if event.name == "grace":
            yield from closing.grace_over(state, event.round, now)
        elif event.name == "round deadline":
            yield from closing.deadline_over(state, event.round, now)
        else:
            yield from membership.expire(state, now)
            yield from opening.call_able(state, state.members.values(), now)
            yield from closing.review_all(state, now)
            yield from membership.close_finished(state)
            yield from ranges.serve_waiting(state)
            yield SetTimer("sweep", "sweep", self._sweep_s)

    @property
    def _sweep_s(self) -> float:
        return self.state.spec.workers.heartbeat_s / SWEEPS_PER_HEARTBEAT
