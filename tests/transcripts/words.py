"""Events, instructions and messages in a few words, under the names that they have in the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.queue import messages as msg

Name = Callable[[int], str]  # of an incarnation
Line = tuple[str, str, str, str]  # who, whom, kind, what

_CLOCK, _SHELL, _CORE, _STORE, _LOG, _ALL = "clock", "shell", "core", "store", "log", "all"


def event_line(event: ev.Event, name: Name) -> Line:
    """What the core hears, and from whom."""
    kind = type(event).__name__
    match event:
        case ev.Heard(sender=sender, message=message):
            return sender or "operator", _CORE, type(message).__name__, message_words(message, name)
        case ev.TimerFired(name=timer, round=number):
            return _CLOCK, _CORE, kind, timer + (f" of round {number}" if number else "")
        case ev.Fetched(sender=sender):
            return _SHELL, _CORE, kind, f"{sender}'s payload is here, its digest is right"
        case ev.FetchFailed(sender=sender, reason=reason, gone=gone):
            return _SHELL, _CORE, kind, f"{sender}'s payload is {'gone' if gone else 'unusable'}: {reason}"
        case ev.Merged(round=number, claim=claim):
            return (
                _SHELL,
                _CORE,
                kind,
                f"round {number}: " + ("nothing" if claim is None else "computed and uploaded"),
            )
        case ev.InitReady(sizes=sizes):
            return _SHELL, _CORE, kind, f"version 0: {len(sizes)} fragments of {_list(sizes)} parameters"
        case ev.Returned(reason=reason):
            return _SHELL, _CORE, kind, reason
        case ev.Started(fresh=fresh):
            return _SHELL, _CORE, kind, "a process was started" if fresh else "another process takes over"
    return _SHELL, _CORE, kind, ""


def message_words(message: msg.Message, name: Name) -> str:
    """The telling fields of a message, members by their names."""
    match message:
        case msg.Register(role=role, label=label, can_init=can_init):
            return f"as a {role}" + (f" ({label})" if label else "") + (", has a version 0" if can_init else "")
        case msg.Progress(steps=steps, adopted=adopted, held=held, timeline=timeline):
            return f"{steps} steps; holds {_versions(adopted)} of {timeline}; {_list(held)} tokens since"
        case msg.Contribution(round=number, fragment=fragment, base=base, tokens=tokens):
            called = f"round {number}" if number else "no round"
            return f"for {called}: fragment {fragment}, based on v{base}, {tokens} tokens"
        case msg.Decline(round=number, reason=reason):
            return f"round {number}: {reason}"
        case msg.Farewell(reason=reason):
            return reason
        case msg.Init():
            return "claims of layout and fragments"
        case msg.Welcome(incarnation=incarnation):
            return f"as incarnation {incarnation}"
        case msg.Refused(retry=retry):
            return "ask again later" if retry else "for good"
        case msg.SendInit():
            return "send me version 0"
        case msg.Born(timeline=timeline):
            return f"the model stands, timeline {timeline}"
        case msg.Call(round=number, fragment=fragment, base=base, called=called):
            return f"round {number}: send fragment {fragment}, based on v{base}; called: {_names(called, name)}"
        case msg.Merged(round=number, fragment=fragment, version=version, verdicts=verdicts):
            return f"round {number}: fragment {fragment} is at v{version}; {_verdicts(verdicts, name)}"
        case msg.Verdicts(verdicts=verdicts):
            return _verdicts(verdicts, name)
        case msg.Abandoned(round=number, fragment=fragment, base=base):
            return f"round {number}: fragment {fragment} stays at v{base}"
        case msg.Resend(fragment=fragment, base=base):
            return f"fragment {fragment}, based on v{base}"
        case msg.Closed(incarnations=incarnations):
            return "over: " + ", ".join(f"incarnation {i} ({name(i)})" for i in incarnations)
        case msg.Setting(key=key, value=value):
            return f"{key} = {value}"
    return ", ".join(f"{field} {value}" for field, value in message)


def instruction_line(instruction: do.Instruction, name: Name) -> Line:
    """What the core decides, and who acts on it."""
    kind = type(instruction).__name__
    match instruction:
        case do.Tell(message=message):
            return _CORE, _addressee(message, name), type(message).__name__, message_words(message, name)
        case do.Note(what=what, details=details):
            return _CORE, _LOG, kind, f"{what}: {details['name']}" if "name" in details else what
        case do.SetTimer(name=timer, after_s=after_s, round=number):
            return _CORE, _CLOCK, kind, f"{timer}{f' of round {number}' if number else ''} in {after_s:g} s"
        case do.Fetch(offer=offer):
            return _CORE, _SHELL, kind, f"{offer.sender}'s payload"
        case do.FetchInit(incarnation=incarnation):
            return _CORE, _SHELL, kind, f"{name(incarnation)}'s version 0"
        case do.Drop(sender=sender):
            return _CORE, _SHELL, kind, f"{sender}'s payload"
        case do.Merge(round=number, parts=parts):
            senders = ", ".join(offer.sender for offer, _ in parts)
            return _CORE, _SHELL, kind, f"round {number}: {senders}"
    return _CORE, _STORE, kind, _store_words(instruction, name)


def _store_words(instruction: do.Instruction, name: Name) -> str:
    match instruction:
        case do.Consume(sender=sender, entries=entries):
            return (
                f"{len(entries)} entry of {sender or 'control'}" if len(entries) == 1 else f"{len(entries)} entries"
            )
        case do.Book(incarnation=incarnation, fragment=fragment, column=column, tokens=tokens):
            return f"{name(incarnation)}: {tokens} tokens {column}, fragment {fragment}"
        case do.Commit(fragment=fragment, version=version):
            return f"fragment {fragment} is at v{version}"
        case do.Birth(timeline=timeline):
            return f"version 0, timeline {timeline}"
        case do.NewTimeline(timeline=timeline, jump=jump):
            return f"{timeline}; numbers jump by {jump:,}"
        case do.CloseBooks(incarnation=incarnation, name=sender, lost=lost):
            return f"of incarnation {incarnation} ({sender}), {lost} tokens lost"
        case do.ForgetInbox(name=sender):
            return f"of {sender}"
    return ""


def _addressee(message: msg.Message, name: Name) -> str:
    """Everything told is broadcast; some of it is meant for one."""
    match message:
        case msg.Welcome(name=one) | msg.Refused(name=one):
            return one
        case msg.SendInit(incarnation=incarnation) | msg.Resend(incarnation=incarnation):
            return name(incarnation)
        case msg.SendState(incarnation=incarnation) | msg.Leases(incarnation=incarnation):
            return name(incarnation)
        case msg.PeerState(to=incarnation):
            return name(incarnation)
        case msg.Verdicts(verdicts=[verdict]):
            return name(verdict.incarnation)
    return _ALL


def _verdicts(verdicts: Sequence[msg.Verdict], name: Name) -> str:
    return ", ".join(f"{name(v.incarnation)} {'applied' if v.applied else 'rejected'} {v.tokens}" for v in verdicts)


def _names(incarnations: Sequence[int], name: Name) -> str:
    return " ".join(map(name, incarnations))


def _versions(versions: Sequence[int]) -> str:
    return " ".join("none" if version < 0 else f"v{version}" for version in versions)


def _list(figures: Sequence[int]) -> str:
    return " and ".join(map(str, figures))
