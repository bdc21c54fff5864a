"""What operators ask for, each command once."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.errors import SpecError
from anabranch.orchestrator.core import closing
from anabranch.orchestrator.core.events import Heard
from anabranch.orchestrator.core.instructions import Checkpoint, Consume, Instruction, Note, Tell
from anabranch.orchestrator.core.state import COMMANDS_KEPT, State, keep
from anabranch.queue.messages import Command, Pause, Resume, Setting, Stop


def commanded(state: State, event: Heard, said: Command, now: float) -> Iterator[Instruction]:
    yield Consume("command read", "", (event.entry,))
    if said.id in state.commands:
        return
    keep(state.commands, said.id, COMMANDS_KEPT)
    by = f" (by {said.by})" if said.by else ""
    match said.action:
        case "pause":
            state.paused = True
            yield Tell(f"paused{by}", Pause(), "announced", {"what": "pause"})
        case "resume":
            state.paused = False
            yield Tell(f"resumed{by}", Resume(), "announced", {"what": "resume"})
        case "stop":
            state.stopped = True
            yield Tell(f"stopped{by}", Stop(reason=f"stopped{by}"), "announced", {"what": "stop"})
        case "checkpoint":
            yield Checkpoint(f"asked for{by}")
        case "set":
            yield from _set(state, said, by, now)


def _set(state: State, said: Command, by: str, now: float) -> Iterator[Instruction]:
    try:
        state.spec = state.spec.changed(said.key, said.value)
    except SpecError as error:
        yield Note(f"setting refused{by}: {error}", "refused", {"key": said.key})
        return
    yield Tell(f"{said.key} = {said.value}{by}", Setting(key=said.key, value=said.value), "set")
    if said.key.startswith("rounds.grace"):
        yield from closing.change_grace(state, now)
    yield from closing.review_all(state, now)  # quorum and grace act at once


def later_interval(state: State) -> Iterator[Instruction]:
    """H is often smaller at first (`rounds.later_inner_steps`). Once: an operator may change it again."""
    settings = state.spec.rounds
    if settings.later_inner_steps is None or state.tokens < settings.later_from_tokens:
        return
    reason = f"{settings.later_from_tokens:,} tokens are merged"
    for key, value in (("inner_steps", settings.later_inner_steps), ("later_inner_steps", None)):
        state.spec = state.spec.changed(f"rounds.{key}", value)
        yield Tell(reason, Setting(key=f"rounds.{key}", value=value), "set")
