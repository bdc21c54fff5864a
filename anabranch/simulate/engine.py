"""The decision core in virtual time, under the rules of a live synchronizer (`orchestrator/leading.py`).

What is around the core (members, payloads, merges) is a `World`. A heap of actions stands in for clocks, threads and
Redis, so the same world gives the same decisions again. A test runs one script through both and compares every
decision and reason (`tests/simulate/test_conformance.py`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

from anabranch.orchestrator.core.events import Event, Started
from anabranch.orchestrator.core.instructions import AT_ONCE, Instruction, NewTimeline, SetTimer, Tell
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.core.timers import Timers
from anabranch.queue.messages import Message


class World(Protocol):
    """What is around the core. It answers with `Engine.later`, or `Engine.feed` where nothing takes time."""

    def begin(self, work: Instruction) -> None:
        """One of `AT_ONCE` but `SetTimer`: it may begin now."""
        ...

    def hear(self, number: int, message: Message, reason: str) -> None:
        """An entry of the broadcast."""
        ...

    def store(self, instruction: Instruction) -> None:
        """Anything else; it is stored."""
        ...


class Engine:
    """One core, its clock, its timers, and everything it ever said (`log`)."""

    def __init__(self, state: State, world: World, make_core: Callable[[State], Core] = Core) -> None:
        """`make_core`: of this state, and of each that another leader takes over."""
        self._make_core = make_core
        self.core = make_core(state)
        self.now = 0.0
        self.broadcast = 0  # number of the last entry
        self.log: list[Instruction] = []
        self._world = world
        self._timers = Timers()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    @property
    def state(self) -> State:
        return self.core.state

    def start(self, *, fresh: bool = True, init_given: bool = False) -> list[Instruction]:
        """A leader begins with the state as it is."""
        return self.feed(Started(fresh, init_given))

    def succeed(self, state: State) -> list[Instruction]:
        """Another leader takes over from this state: timers are its own, and it reads every inbox anew."""
        self.core, self._timers = self._make_core(state), Timers()
        return self.start(fresh=False)

    def feed(self, *events: Event) -> list[Instruction]:
        """Events that were read together, now; what was decided."""
        mark = len(self.log)
        for event in events:
            self.core.step(event, self.now)
        if (batch := self.core.take()) is not None:
            self._carry_out(batch)
        return self.log[mark:]

    def _carry_out(self, batch: Batch) -> None:
        """Work begins; the batch is stored; then it is heard."""
        self.log += batch.instructions
        for instruction in batch.instructions:
            if isinstance(instruction, SetTimer):
                self._timers.set(instruction, self.now)
            elif isinstance(instruction, AT_ONCE):
                self._world.begin(instruction)
        told = []
        for instruction in batch.instructions:
            match instruction:
                case Tell():
                    self.broadcast += 1
                    told.append((self.broadcast, instruction))
                case NewTimeline(jump=jump):
                    self.broadcast += jump
        self.core.stored(batch, self.broadcast, self.now)
        for number, tell in told:
            self._world.hear(number, tell.message, tell.reason)
        for instruction in batch.instructions:
            if not isinstance(instruction, (Tell, *AT_ONCE)):
                self._world.store(instruction)

    # --- time ---------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do this then."""
        heapq.heappush(self._heap, (when, next(self._order), action))

    def later(self, after_s: float, event: Event) -> None:
        """This is read in so many seconds."""
        self.at(self.now + after_s, lambda: self.feed(event))

    def elapse(self, seconds: float) -> list[Instruction]:
        """Let time pass; what was decided meanwhile."""
        mark, end = len(self.log), self.now + seconds
        while self.advance(end):
            pass
        self.now = end
        return self.log[mark:]

    def advance(self, end: float) -> bool:
        """Whatever comes next until then; False if that is nothing. Timers fire after all that is heard by then."""
        timer = self._timers.next_at
        thing = self._heap[0][0] if self._heap else None
        if thing is not None and thing <= end and (timer is None or thing <= timer):
            self.now = max(self.now, thing)
            heapq.heappop(self._heap)[2]()
            return True
        if timer is not None and timer <= end:
            self.now = max(self.now, timer)
            self.feed(*self._timers.pop_due(self.now))
            return True
        return False
