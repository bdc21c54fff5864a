"""From stream entries to events of the core: who may say what where."""

from __future__ import annotations

from anabranch.errors import MessageError
from anabranch.orchestrator.core.events import Heard, Unreadable
from anabranch.queue import messages
from anabranch.queue.streams import Entry

#: What each kind of stream may hold. Nothing consumes progress: the stream is trimmed by its owner.
SPOKEN: dict[str, tuple[type[messages.Message], ...]] = {
    "inbox": (
        messages.Contribution,
        messages.Decline,
        messages.Farewell,
        messages.Init,
        messages.RangeRequest,
        messages.Register,
        messages.StateOffer,
        messages.StateRequest,
    ),
    "progress stream": (messages.Progress,),
    "control stream": (messages.Command,),
}


def read_entry(entry: Entry, stream: str, sender: str, run: str) -> Heard | Unreadable:
    """An entry of a stream of this kind; what cannot be read, or does not belong there, becomes an event, too."""
    data = entry.fields.get(b"m", b"")
    number = entry.id if stream != "progress stream" else b""
    try:
        message = messages.decode(data, run)
    except MessageError as error:
        return Unreadable(sender, number, str(error))
    if not isinstance(message, SPOKEN[stream]):
        return Unreadable(sender, number, f"a {message.type} message does not belong in a {stream}")
    return Heard(sender, number, message, data)
