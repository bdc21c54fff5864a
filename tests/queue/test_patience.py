"""Repeating a command through outages, and only through outages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from anabranch.queue import patience
from anabranch.queue.patience import persist
from tests.wait import wait_until

log = logging.getLogger("anabranch.test")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.001)
    monkeypatch.setattr(patience, "LONGEST_S", 0.002)
    caplog.set_level(logging.INFO, logger="anabranch")


def failing(*errors: BaseException) -> Callable[[], Awaitable[str]]:
    left = list(errors)

    async def action() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return action


@pytest.mark.parametrize(
    "error",
    [
        RedisConnectionError("gone"),
        RedisTimeoutError("slow"),
        OutOfMemoryError("full"),
        ConnectionResetError("reset"),
        TimeoutError(),
        OSError("no route"),
    ],
)
async def test_an_outage_is_waited_out(error: Exception) -> None:
    assert await persist(failing(error, error), "write", log) == "done"


async def test_one_line_when_it_begins_and_one_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    await persist(failing(*[RedisConnectionError("gone")] * 5), "write", log)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write: gone; trying again",
        "can write again",
    ]


async def test_nothing_is_said_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    await persist(failing(), "write", log)
    assert caplog.records == []


@pytest.mark.parametrize("error", [ResponseError("WRONGTYPE"), NoPermissionError("no"), ValueError("bug")])
async def test_other_errors_pass_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        await persist(failing(error), "write", log)


async def test_a_silent_server_is_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    tries = 0

    async def action() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            await asyncio.Event().wait()
        return "done"

    assert await persist(action, "write", log, timeout_s=0.01) == "done"
    assert "cannot write: no answer in 0.01 s" in caplog.text


async def test_it_tells_when_the_state_changes() -> None:
    states: list[bool] = []
    await persist(failing(OSError(), OSError()), "read", log, on_state=states.append)
    assert states == [False, False, True]


@pytest.mark.parametrize("errors", [0, 10**6])
async def test_a_cancellation_passes_at_once(errors: int) -> None:
    """In the middle of a command as well as between two tries."""
    entered = asyncio.Event()

    async def action() -> None:
        entered.set()
        if errors:
            raise OSError("down")
        await asyncio.Event().wait()

    task = asyncio.create_task(persist(action, "write", log), name="persist")
    await entered.wait()
    task.cancel()
    await wait_until(task.done, "it ended")
    assert task.cancelled()


async def test_the_pauses_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.05)
    monkeypatch.setattr(patience, "LONGEST_S", 2.0)
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(patience.asyncio, "sleep", note)  # type: ignore[attr-defined]
        await persist(failing(*[OSError()] * 12), "write", log)
        grown = len(pauses)
        await persist(failing(*[OSError()] * 12), "write", log, longest_s=0.3)
    assert max(pauses[grown:]) <= 0.45, "who has less time gets a smaller limit"
    assert all(0.5 * base <= pause <= 1.5 * base for base, pause in zip([0.05, 0.1, 0.2, 0.4], pauses, strict=False))
    assert max(pauses) <= 3.0
    assert len(set(pauses)) == len(pauses), "with jitter"
