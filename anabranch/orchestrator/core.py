"""The decision core: events in, instructions with reasons out.

Pure: no I/O, no clock of its own; `now` is seconds of whatever clock the caller injects (the process's monotonic
clock live, virtual time in the simulator). It runs live, in simulation and in replay, and its state serializes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anabranch.errors import SpecError
from anabranch.orchestrator import membership, peers, ranges, rounds, timelines
from anabranch.orchestrator.events import (
    Announce,
    Birth,
    ChangeSetting,
    Checkpoint,
    Commanded,
    Consume,
    Declined,
    Draining,
    Event,
    Fetched,
    FetchFailed,
    FetchInit,
    InitFailed,
    InitOffered,
    InitReady,
    Instruction,
    Joined,
    Left,
    MemorySeen,
    Merged,
    Note,
    Offered,
    Progressed,
    RangesAsked,
    Returned,
    SetTimer,
    StateAsked,
    StateGiven,
    TimerFired,
    Troubled,
    Unreadable,
    Wrote,
)
from anabranch.orchestrator.grace import average
from anabranch.orchestrator.ledger import Account
from anabranch.orchestrator.state import (
    Fragment,
    Member,
    State,
    dump_core,
    dump_member,
    load_core,
    load_member,
)
from anabranch.spec import RunSpec

SWEEPS_PER_HEARTBEAT = 2


class Core:
    """The run's state and what to do next."""

    def __init__(self, spec: RunSpec, nonce: str) -> None:
        """`nonce`: what timelines that begin under this leader are called, besides their number."""
        self.state = State(spec=spec, nonce=nonce)

    def start(self, now: float, *, fresh: bool = True) -> list[Instruction]:
        """Timers for a fresh or a loaded state. `fresh`: somebody has just started this synchronizer."""
        return list(self._start(now, fresh))

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; the instructions are to be carried out in order, as one write."""
        instructions = list(self._dispatch(event, now))
        if not isinstance(event, Progressed) or self._may_be_due(event):
            instructions += rounds.open_due(self.state, now)
        return instructions

    def _may_be_due(self, event: Progressed) -> bool:
        """Ranking everybody at each of thousands of heartbeats costs too much: most cannot make a round due."""
        member = self.state.members.get(event.incarnation)
        return member is not None and member.steps - member.mark >= self.state.spec.rounds.interval_steps

    # --- dispatch -----------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> Iterator[Instruction]:
        state = self.state
        match event:
            case Progressed():
                yield from self._progressed(event, now)
            case Offered():
                yield from rounds.offered(state, event.offer, now)
            case Fetched():
                yield from rounds.fetched(state, event.offer, now)
            case FetchFailed():
                yield from rounds.fetch_failed(state, event, now)
            case Declined():
                yield from rounds.declined(state, event, now)
            case Merged():
                yield from rounds.merged(state, event, now)
                yield from self._later_interval()
            case Wrote():
                self._wrote(event, now)
            case TimerFired():
                yield from self._timer(event, now)
            case Joined():
                yield from membership.join(state, event, now)
            case Left():
                yield from membership.leave(state, event)
                yield from rounds.review_all(state, now)
            case RangesAsked():
                yield from self._asked(event)
            case StateAsked():
                yield from peers.asked(state, event, now)
            case StateGiven():
                yield from peers.given(state, event)
            case InitOffered() | InitReady() | InitFailed():
                yield from self._birth(event)
            case Unreadable():
                yield Consume("unreadable", event.worker, (event.entry,))
                state.count("messages refused")
                yield Note(f"message of {event.worker} refused: {event.reason}", "refused", {"name": event.worker})
            case Commanded():
                yield from self._command(event, now)
            case Troubled():
                state.count("troubles")
                yield Note(event.reason, "trouble")
            case Returned():
                yield from timelines.begin(state, event.reason)
            case MemorySeen():
                yield from membership.memory_seen(state, event.share, now)
            case Draining():
                state.draining = True

    def _progressed(self, event: Progressed, now: float) -> Iterator[Instruction]:
        member = membership.find(self.state, event.incarnation, event.sender)
        if member is not None and (reason := timelines.claim_of_newer(self.state, member, event)) is not None:
            yield from timelines.begin(self.state, reason)
        yield from membership.progress(self.state, event, now)

    def _asked(self, event: RangesAsked) -> Iterator[Instruction]:
        yield Consume("range request read", event.sender, (event.entry,))
        member = membership.find(self.state, event.incarnation, event.sender)
        if member is None:
            yield from membership.speaks_for_none(self.state, event.incarnation, event.sender)
        else:
            yield from ranges.asked(self.state, member, event)

    def _start(self, now: float, fresh: bool) -> Iterator[Instruction]:
        if self.state.stopped and fresh:  # whoever starts a synchronizer on a stopped run wants it to go on
            self.state.stopped = False
            yield Note("the run had been stopped: it goes on", "continued")
        yield SetTimer("sweep", "sweep", self._sweep_s)
        for round_ in self.state.rounds.values():
            left = max(0.0, round_.deadline_s - (now - round_.opened_at))
            yield SetTimer("round deadline, continued", "round deadline", left, round_.number)

    def _timer(self, event: TimerFired, now: float) -> Iterator[Instruction]:
        if event.name == "grace":
            yield from rounds.grace_over(self.state, event.round, now)
        elif event.name == "round deadline":
            yield from rounds.deadline_over(self.state, event.round, now)
        else:
            yield from membership.expire(self.state, now)
            yield from rounds.review_all(self.state, now)
            yield from membership.close_finished(self.state)
            yield from ranges.serve_waiting(self.state)
            yield SetTimer("sweep", "sweep", self._sweep_s)

    @property
    def _sweep_s(self) -> float:
        return self.state.spec.workers.heartbeat_s / SWEEPS_PER_HEARTBEAT

    def _wrote(self, event: Wrote, now: float) -> None:
        """Outcomes of the last write are on the broadcast stream, at or before this number."""
        for incarnation, fragment in self.state.unmarked:
            if (member := self.state.members.get(incarnation)) is not None:
                member.outcome_read[fragment] = event.broadcast
        self.state.unmarked.clear()
        for closed_at in self.state.committing:
            self.state.averages.sync_s = average(self.state.averages.sync_s, now - closed_at)
        self.state.committing.clear()

    # --- birth --------------------------------------------------------------------------------------------

    def _birth(self, event: InitOffered | InitReady | InitFailed) -> Iterator[Instruction]:
        state = self.state
        giver = state.members.get(event.incarnation)
        name = giver.name if giver is not None else ""
        if isinstance(event, InitOffered):
            yield from self._init_offered(event, name)
            return
        state.init_reading = False
        if event.entry is not None and giver is not None:
            yield Consume("version 0 read", name, (event.entry,))
        if state.born or state.orphaned:
            return
        if isinstance(event, InitFailed):
            if event.incarnation == state.asked_init:
                state.asked_init = 0
            yield Note(f"initial weights of {name} refused: {event.reason}", "refused", {"name": name})
            if giver is not None:
                yield from membership.expel(state, giver, f"its initial weights cannot be used: {event.reason}")
            yield from membership.ask_for_init(state)
            return
        state.layout_hash, state.timeline = event.layout_hash, f"0-{state.nonce}"
        state.fragments = [
            Fragment(index=i, size=size, digest=digest)
            for i, (size, digest) in enumerate(zip(event.sizes, event.digests, strict=True))
        ]
        reason = f"version 0 of {len(state.fragments)} fragments, {sum(event.sizes):,} parameters"
        yield Birth(reason, state.timeline, event.payload)
        yield from membership.born(state)

    def _init_offered(self, event: InitOffered, name: str) -> Iterator[Instruction]:
        state = self.state
        if state.born or event.incarnation != state.asked_init or not name or event.sender != name:
            yield Consume("nobody asked for it", event.sender, (event.entry,))
            yield Note(f"initial weights of {event.sender} refused: nobody asked for them", "refused")
        elif state.init_reading:
            yield Consume("a repeat", event.sender, (event.entry,))
        else:
            state.init_reading = True
            yield FetchInit("verify version 0", event.incarnation, event.entry, event.payload)

    # --- operators ----------------------------------------------------------------------------------------

    def _command(self, event: Commanded, now: float) -> Iterator[Instruction]:
        state = self.state
        yield Consume("command read", "", (event.entry,))
        if event.id in state.commands:
            return
        state.commands.append(event.id)
        by = f" (by {event.by})" if event.by else ""
        match event.action:
            case "pause" | "resume":
                state.paused = event.action == "pause"
                yield Announce(f"{event.action}d{by}", "pause" if state.paused else "resume")
            case "stop":
                state.stopped = True
                yield Announce(f"stopped{by}", "stop")
            case "checkpoint":
                yield Checkpoint(f"asked for{by}")
            case "set":
                yield from self._set(event, by, now)
            case _:
                yield Note(f"unknown command {event.action!r}{by}", "refused")

    def _set(self, event: Commanded, by: str, now: float) -> Iterator[Instruction]:
        try:
            self.state.spec = self.state.spec.changed(event.key, event.value)
        except SpecError as error:
            yield Note(f"setting refused{by}: {error}", "refused", {"key": event.key})
            return
        yield ChangeSetting(f"{event.key} = {event.value}{by}", event.key, event.value)
        if event.key.startswith("rounds.grace"):
            yield from rounds.change_grace(self.state, now)
        yield from rounds.review_all(self.state, now)  # quorum and grace act at once

    def _later_interval(self) -> Iterator[Instruction]:
        """H is often smaller at first (`rounds.later_inner_steps`). Once: an operator may change it again."""
        settings = self.state.spec.rounds
        if settings.later_inner_steps is None or self.state.tokens < settings.later_from_tokens:
            return
        reason = f"{settings.later_from_tokens:,} tokens are merged"
        for key, value in (("inner_steps", settings.later_inner_steps), ("later_inner_steps", None)):
            self.state.spec = self.state.spec.changed(f"rounds.{key}", value)
            yield ChangeSetting(reason, f"rounds.{key}", value)

    # --- stored form --------------------------------------------------------------------------------------

    def dump(self, now: float, *, everything: bool = False) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """(core record, member records by incarnation); members only if their durable part changed."""
        wanted = self.state.members if everything else self.state.dirty
        members = {i: dump_member(self.state.members[i], now) for i in sorted(wanted) if i in self.state.members}
        self.state.dirty.clear()
        return dump_core(self.state, now), members

    def dump_all(self, now: float) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """The same with every member, for a copy elsewhere: what `dump` has yet to store stays marked."""
        return dump_core(self.state, now), {i: dump_member(m, now) for i, m in sorted(self.state.members.items())}

    def members(self) -> list[Member]:
        return list(self.state.members.values())

    @classmethod
    def load(
        cls,
        record: dict[str, Any],
        members: list[dict[str, Any]],
        accounts: dict[int, Account],
        *,
        spec: RunSpec,
        nonce: str,
        broadcast: int,
        now: float,
    ) -> Core:
        """The inverse of `dump`, with the ledger's booked figures."""
        core = cls(spec, nonce)
        core.state = load_core(record, spec, now)
        core.state.nonce = nonce
        count = len(core.state.fragments)
        for item in members:
            account = accounts.get(item["incarnation"]) or Account.empty(count)
            member = load_member(item, account, read=broadcast, now=now)
            core.state.members[member.incarnation] = member
        return core
