"""What a core was given and what it said, as bytes: the journal's frames. Pure.

| frame | content |
| --- | --- |
| `[IMAGE, note, image]` | the state, exactly (`record.image`); `note` names the term, for people |
| `[EVENT, now, kind, …]` | `step`; what was heard is kept as the envelope that was read |
| `[TAKEN, everything, [[kind, reason, checksum], …]]` | `take`, and each instruction that came |
| `[STORED, number, now]` | `stored` |
"""

from __future__ import annotations

from typing import Any, get_args
from zlib import crc32

import msgpack
from pydantic import TypeAdapter

from anabranch.orchestrator.core.events import Event, Heard
from anabranch.orchestrator.core.instructions import Fetch, FetchInit, Instruction, Merge, Tell
from anabranch.orchestrator.core.port import Batch
from anabranch.orchestrator.core.record import image
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages

IMAGE, EVENT, TAKEN, STORED = range(4)

_EVENTS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Event)}

_pack = msgpack.Packer().pack  # one for all: making a packer costs more than a frame

Said = tuple[str, str, int]  # kind, reason, checksum of everything in it


def image_frame(state: State, note: str) -> bytes:
    frame: bytes = _pack((IMAGE, note, image(state)))
    return frame


def event_frame(event: Event, now: float, run: str) -> bytes:
    if isinstance(event, Heard):
        data = event.data or messages.encode(event.message, run)  # in simulations nothing was read
        frame: bytes = _pack((EVENT, now, "Heard", event.sender, event.entry, data))
    else:
        kind = type(event).__name__
        frame = _pack((EVENT, now, kind, _EVENTS[kind].dump_python(event)))
    return frame


def read_event(frame: list[Any], run: str) -> tuple[Event, float]:
    """The inverse of `event_frame`."""
    _, now, kind, *rest = frame
    if kind == "Heard":
        sender, entry, data = rest
        return Heard(sender, entry, messages.decode(data, run), data), now
    event: Event = _EVENTS[kind].validate_python(rest[0])
    return event, now


def taken_frame(batch: Batch, *, everything: bool) -> bytes:
    frame: bytes = _pack((TAKEN, everything, [said(i) for i in batch.instructions]))
    return frame


def stored_frame(number: int, now: float) -> bytes:
    frame: bytes = _pack((STORED, number, now))
    return frame


def said(instruction: Instruction) -> Said:
    """What is compared of an instruction, and shown where it differs."""
    kind = type(instruction).__name__
    match instruction:
        case Tell(message=message):
            kind = f"Tell {message.type}"
            content: Any = [message.model_dump(), instruction.on_tape, instruction.details]
        case Fetch(offer=offer):  # a contribution is what lies there: the journal has it already
            content = [offer.sender, offer.entry]
        case Merge(parts=parts):
            content = [instruction.round, [[offer.sender, offer.entry, weight] for offer, weight in parts]]
        case FetchInit():
            content = [instruction.incarnation, instruction.entry]
        case _:
            content = vars(instruction)
    return kind, instruction.reason, crc32(_pack(content))
