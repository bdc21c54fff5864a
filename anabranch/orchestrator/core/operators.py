"""What operators ask for, each command once."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.errors import SpecError
from anabranch.orchestrator.core import closing
from anabranch.orchestrator.core.events import Heard, Saved
from anabranch.orchestrator.core.instructions import Checkpoint, Consume, Ended, Instruction, Note, Tell
from anabranch.orchestrator.core.state import COMMANDS_KEPT, State, keep
from anabranch.queue.messages import Command, Pause, Resume, Setting, Stop


def commanded(state: State, event: Heard, said: Command, now: float) -> Iterator[Instruction]:
    """What follows carries the command's id: whoever gave it waits for that on the tape."""
    yield Consume("command read", "", (event.entry,))
    if said.id in state.commands:
        return
    keep(state.commands, said.id, COMMANDS_KEPT)
    by = f" (by {said.by})" if said.by else ""
    match said.action:
        case "pause":
            state.paused = True
            yield Tell(f"paused{by}", Pause(), "announced", {"what": "pause", "command": said.id})
        case "resume":
            state.paused = False
            yield Tell(f"resumed{by}", Resume(), "announced", {"what": "resume", "command": said.id})
        case "stop":
            yield from stop(state, f"stopped{by}", said.id)
        case "checkpoint":
            yield Checkpoint(f"asked for{by}", said.id)
        case "set":
            yield from _set(state, said, by, now)


def stop(state: State, reason: str, command: str = "") -> Iterator[Instruction]:
    """The run is over once a last checkpoint is written."""
    state.stopped = True
    yield Tell(reason, Stop(reason=reason), "announced", {"what": "stop", "command": command})
    yield Checkpoint(reason, command, last=True)


def saved(state: State, event: Saved) -> Iterator[Instruction]:
    details = {"where": event.where, "command": event.command}
    if event.where:
        yield Note(event.where, "checkpoint", details)
    else:
        state.count("troubles")
        yield Note(f"no checkpoint was written: {event.reason}", "trouble", details)
    if event.last:
        yield Ended("the run is stopped")


def _set(state: State, said: Command, by: str, now: float) -> Iterator[Instruction]:
    try:
        state.spec = state.spec.changed(said.key, said.value)
    except SpecError as error:
        yield Note(f"setting refused{by}: {error}", "refused", {"key": said.key, "command": said.id})
        return
    reason = f"{said.key} = {said.value}{by}"
    quorum, live = state.spec.rounds.quorum, sum(m.live and m.is_worker for m in state.members.values())
    if said.key == "rounds.quorum" and quorum != "all" and quorum > live:
        reason += f"; only {live} live worker{'s' * (live != 1)}: no round opens until there are {quorum}"
    yield Tell(reason, Setting(key=said.key, value=said.value), "set", {"command": said.id})
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
