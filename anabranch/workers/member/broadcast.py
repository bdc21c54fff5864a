"""What the synchronizer says to everybody, as one incarnation reads it: from a cursor of its own."""

from __future__ import annotations

import logging

from anabranch.errors import MessageError
from anabranch.queue import messages
from anabranch.queue.streams import StreamReader
from anabranch.workers.member.line import Line

log = logging.getLogger("anabranch.worker")


class Broadcast:
    """Begins nowhere: `to_end` says where."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._reader = StreamReader()
        self.cut_off = False  # connection lost since `to_end`: the server may have been started again with less

    async def to_end(self) -> None:
        """Read on from where it ends now: what came before is left out."""
        self.cut_off = False
        self._reader.rewind(self._line.keys.broadcast, await self._line.tail())

    async def read(self, block_ms: int, what: str = "read the broadcast") -> list[tuple[int, messages.Message]]:
        """New entries with their numbers; waits up to `block_ms` for the first."""
        entries = await self._line.persist(
            lambda: self._line.read(self._reader, block_ms), what, on_state=self._note_state
        )
        result = []
        for entry in entries:
            try:
                message = messages.decode(entry.fields.get(b"m", b""), self._line.keys.run)
                result.append((int(entry.fields.get(b"n", b"0")), message))
            except (MessageError, ValueError) as error:
                log.warning("broadcast entry not understood: %s", error)
        return result

    def _note_state(self, hearing: bool) -> None:
        self.cut_off = self.cut_off or not hearing
