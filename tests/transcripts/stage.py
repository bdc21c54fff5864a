"""A bench that writes down, as text, everything it hears and says from the first act on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill, wrap

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages as msg
from anabranch.simulate.engine import Engine
from anabranch.spec import RunSpec
from tests.orchestrator.bench import Bench, Puppet
from tests.transcripts.words import Line, event_line, instruction_line

DIRECTORY = Path(__file__).parent
WIDTH = 116  # of a paragraph
WORDS_WIDTH = 62  # longer ones push the reason aside

LEGEND = """\
Read a line as: virtual time, who → whom, its name in the code, what it says, and after a dash why it was decided.
A line with a time is an event; the lines below it, without one, are what the core decides because of it.
core: the decision core.  clock: its timers.  shell: whatever fetches payloads and merges.  store: one transaction in
Redis with all that is told.  log: page, log and tape.  Whatever members are told is broadcast; some is meant for one.
vN: version N of a fragment. H steps of training and P fragments: every H/P steps a round is due for one of them.
Left out: heartbeats (Progress) and timers after which nothing was decided, and the timer of the sweep that looks
after everything twice a heartbeat.
"""


class Recorder(Engine):
    """An engine that hands over what went in and what came out."""

    def __init__(self, state: State, stage: Stage) -> None:
        self._stage = stage
        super().__init__(state, stage)

    def feed(self, *events: ev.Event) -> list[do.Instruction]:
        result = super().feed(*events)
        self._stage.record(events, result)
        return result


class Stage(Bench):
    """Acts are what is shown; what comes before the first is the past."""

    def __init__(self, title: str, about: str, spec: RunSpec, *, sizes: Sequence[int], born: bool = True) -> None:
        self._head = [title.upper(), "", *wrap(about, WIDTH), "", LEGEND.rstrip()]
        self._rows: list[str | tuple[str, Line, str]] = []  # a heading, or: time, line, why
        self._names: dict[int, str] = {}
        self._acts = 0
        super().__init__(spec, sizes=sizes, born=born)

    def make_engine(self, state: State) -> Engine:
        return Recorder(state, self)

    def act(self, heading: str) -> None:
        """What follows, in a sentence."""
        self._acts += 1
        self._rows.append(fill(f"{self._acts}. {heading}", WIDTH, subsequent_indent="   "))

    def enter(self, name: str, incarnation: int) -> None:
        """A puppet for a member that was let in before there were fragments, or that begins anew."""
        self.puppets[name] = Puppet(name, incarnation, len(self.state.fragments), timeline=self.state.timeline)

    # --- writing down -------------------------------------------------------------------------------------

    def record(self, events: tuple[ev.Event, ...], said: list[do.Instruction]) -> None:
        for instruction in said:
            if isinstance(instruction, do.Tell) and isinstance(instruction.message, msg.Welcome):
                self._names[instruction.message.incarnation] = instruction.message.name
        shown = [i for i in said if not (isinstance(i, do.SetTimer) and i.name == "sweep")]
        if self._acts == 0 or not (shown or any(self._tells(event) for event in events)):
            return
        time = f"{self.now:.3f} s"
        timers = [e for e in events if isinstance(e, ev.TimerFired) and e.name != "sweep"]  # that are due together
        for event in timers or events:
            self._rows.append((time, event_line(event, self._name), ""))
        for instruction in shown:
            self._rows.append(("", instruction_line(instruction, self._name), instruction.reason))

    def _tells(self, event: ev.Event) -> bool:
        """Whether it is worth a line even if nothing was decided."""
        if isinstance(event, ev.Heard):
            return not isinstance(event.message, msg.Progress)
        return not isinstance(event, ev.TimerFired)

    def _name(self, incarnation: int) -> str:
        return self._names.get(incarnation, f"#{incarnation}")

    def text(self) -> str:
        return "\n".join([*self._head, *self._lines()]) + "\n"

    def _lines(self) -> Iterator[str]:
        before = ""
        for row in self._rows:
            if isinstance(row, str):
                yield from ("", "", row, "")
                continue
            time, (who, whom, kind, words), why = row
            reason = "" if not why else "- (the same)" if why == before else f"- {why}"
            before = why
            yield f"{time:>9}  {who:>8} → {whom:<7}  {kind:<12}  {words:<{WORDS_WIDTH}}  {reason}".rstrip()
