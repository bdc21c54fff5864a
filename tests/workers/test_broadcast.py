"""What a member reads of the broadcast, and that a lost connection is not forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.queue import messages
from anabranch.queue.streams import Entry
from anabranch.workers.member.broadcast import Broadcast


class Line:
    """Gives these entries once, after the connection was `lost` and is back, or with no such thing."""

    keys = SimpleNamespace(run="run", broadcast="b")

    def __init__(self, *entries: dict[bytes, bytes], lost: bool = False) -> None:
        self._entries = [Entry("b", b"%d-0" % number, fields) for number, fields in enumerate(entries)]
        self._lost = lost

    async def persist(self, action: Any, what: str, on_state: Any = None) -> Any:
        if self._lost:
            on_state(False)
            on_state(True)
        return self._entries

    async def tail(self) -> bytes:
        return b"0-0"


def said(number: bytes) -> dict[bytes, bytes]:
    return {b"m": messages.encode(messages.Pause(), "run"), b"n": number}


@pytest.mark.parametrize("lost", [False, True])
async def test_a_lost_connection_is_remembered_until_it_begins_anew(*, lost: bool) -> None:
    line: Any = Line(said(b"3"), lost=lost)
    broadcast = Broadcast(line)
    assert await broadcast.read(1) == [(3, messages.Pause())]
    assert broadcast.cut_off == lost
    await broadcast.to_end()
    assert not broadcast.cut_off


async def test_what_is_none_of_ours_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    line: Any = Line({b"m": b"\xc1"}, said(b"not a number"), said(b"4"), {b"x": b""})
    assert await Broadcast(line).read(1) == [(4, messages.Pause())]
    assert caplog.text.count("broadcast entry not understood") == 3
