"""How long a refusal that may pass is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.model import layout_for
from anabranch.queue.messages import Refused
from anabranch.queue.records import RunRecord
from anabranch.workers.member import registration
from anabranch.workers.member.identity import Identity
from tests.harness import make_spec

HEARTBEAT_S = 0.3


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: self.now))


def refused(*, retry: bool = True) -> Refused:
    return Refused(name="w", nonce=bytes(16), reason="'w' is in use", retry=retry)


def asking(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, registration.Registration]:
    spec = make_spec("run", workers={"heartbeat_s": HEARTBEAT_S})
    line: Any = SimpleNamespace(keys=SimpleNamespace(broadcast="b"))
    layout = layout_for(spec, [("a", (3,)), ("b", (3,))])
    clock = Clock(monkeypatch)
    return clock, registration.Registration(line, RunRecord(spec, None), Identity("w"), layout)


def test_it_is_looked_at_for_some_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asks = asking(monkeypatch)
    heard = 0
    while not asks._is_final(refused(), b"1:a"):
        clock.now += HEARTBEAT_S
        heard += 1
    assert heard == registration.REFUSED_HEARTBEATS + 1


def test_time_in_which_nothing_was_heard_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that slept, or an outage: its former self did not age meanwhile, either."""
    clock, asks = asking(monkeypatch)
    assert not asks._is_final(refused(), b"1:a")
    clock.now += 8 * 3600
    assert not asks._is_final(refused(), b"1:a")


def test_a_new_term_begins_to_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders that die one after the other: the former self of who knocks ages with none of them."""
    clock, asks = asking(monkeypatch)
    for term in range(50):
        for _ in range(3):
            assert not asks._is_final(refused(), b"%d:a" % term)
            clock.now += HEARTBEAT_S


def test_one_that_cannot_pass_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asks = asking(monkeypatch)
    assert asks._is_final(refused(retry=False), b"1:a")
