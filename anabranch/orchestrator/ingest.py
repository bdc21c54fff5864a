"""From stream entries to events of the core."""

from __future__ import annotations

from anabranch.errors import MessageError
from anabranch.orchestrator import events
from anabranch.queue import messages
from anabranch.queue.streams import Entry


def read_inbox(entry: Entry, sender: str, run: str) -> events.Event:
    """An entry of `contributions:<sender>`; anything unreadable becomes an event that says so."""
    try:
        message = messages.decode(entry.fields.get(b"m", b""), run)
    except MessageError as error:
        return events.Unreadable(sender, entry.id, str(error))
    match message:
        case messages.Contribution():
            return events.Offered(_offer(message, sender, entry.id))
        case messages.Register():
            if message.name != sender:
                return events.Unreadable(sender, entry.id, f"registers as {message.name!r} in another's inbox")
            return events.Joined(
                name=message.name,
                nonce=message.nonce,
                entry=entry.id,
                label=message.label,
                role=message.role,
                layout_hash=message.layout_hash,
                can_init=message.can_init,
                device=message.device,
            )
        case messages.Decline():
            return events.Declined(
                sender, message.incarnation, message.fragment, message.round, message.reason, entry.id
            )
        case messages.Farewell():
            figures = tuple((f.processed, f.discarded) for f in message.figures)
            return events.Left(sender, message.incarnation, message.reason, entry.id, figures, tuple(message.leases))
        case messages.RangeRequest():
            return events.RangesAsked(
                sender=sender,
                incarnation=message.incarnation,
                entry=entry.id,
                items=message.items,
                fingerprint=message.fingerprint,
                wanted=message.wanted,
                after=message.after,
            )
        case messages.StateRequest():
            return events.StateAsked(sender, message.incarnation, entry.id, tuple(message.not_from))
        case messages.StateOffer():
            return events.StateGiven(sender, message.incarnation, entry.id, message.to, message.claim, message.reason)
        case messages.Init():
            return events.InitOffered(sender, message.incarnation, entry.id, message)
        case _:
            return events.Unreadable(sender, entry.id, f"a {message.type} message does not belong in an inbox")


def read_progress(entry: Entry, sender: str, run: str) -> events.Event:
    """An entry of `progress:<sender>`. Nothing consumes these: the stream is trimmed by its owner."""
    try:
        message = messages.decode(entry.fields.get(b"m", b""), run)
    except MessageError as error:
        return events.Unreadable(sender, b"", str(error))
    if not isinstance(message, messages.Progress):
        return events.Unreadable(sender, b"", f"a {message.type} message does not belong in a progress stream")
    return events.Progressed(
        sender=sender,
        incarnation=message.incarnation,
        steps=message.steps,
        step_s=message.step_s,
        adopted=tuple(message.adopted),
        held=tuple(message.held),
        processed=message.processed,
        discarded=tuple(message.discarded),
        pending=tuple(message.pending),
        read=message.read,
        loss=message.loss,
        train_s=message.train_s,
        rest_s=message.rest_s,
        life_s=message.life_s,
        bytes_sent=message.bytes_sent,
        heldout_loss=message.heldout_loss,
        measured_tokens=message.measured_tokens,
        timeline=message.timeline,
        leased=message.leased,
        leases=tuple(message.leases),
        idle=message.idle,
    )


def read_control(entry: Entry, run: str) -> events.Event:
    """An entry of `control`."""
    try:
        message = messages.decode(entry.fields.get(b"m", b""), run)
    except MessageError as error:
        return events.Unreadable("", entry.id, str(error))
    if not isinstance(message, messages.Command):
        return events.Unreadable("", entry.id, f"a {message.type} message does not belong in the control stream")
    return events.Commanded(message.id, message.action, entry.id, message.key, message.value, message.by)


def _offer(message: messages.Contribution, sender: str, entry: bytes) -> events.Offer:
    return events.Offer(
        sender=sender,
        incarnation=message.incarnation,
        fragment=message.fragment,
        timeline=message.timeline,
        base=message.base,
        base_digest=message.base_digest,
        round=message.round,
        tokens=message.tokens,
        steps=message.steps,
        loss=message.loss,
        processed=message.figures.processed,
        discarded=message.figures.discarded,
        claim=message.claim,
        entry=entry,
    )
