"""A frozen worker: what it had under way gets its outcome, with the reason; it adopts again and takes part again.

A real process freezes itself (SIGSTOP) in the worst moment, between the upload of a contribution and the message that
says so, while the others go on. A laptop that slept is a worker whose every connection is dead without a word, whose
keys have expired and whose streams were trimmed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from anabranch.queue.streams import last_id, order
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.harness import Bench, bench, make_spec, process
from tests.wait import wait_until

CONTRIBUTION = b"\xaccontribution"  # its message type, as msgpack writes it
FROZEN_IN_ITS_THIRD = {"ANABRANCH_FAIL_AT": "worker after upload:3:stop"}


async def is_frozen(child: subprocess.Popen[bytes]) -> None:
    """Wait until the process is stopped."""
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    await wait_until(lambda: os.waitid(os.P_PID, child.pid, options), "it is frozen")


async def some_rounds(run: Bench, rounds: int = 3) -> None:
    """Every fragment is merged so many times more, without whoever is frozen."""
    await run.reach(max(run.versions()) + rounds)


def merged_of(run: Bench, incarnation: int) -> list[tuple[int, int]]:
    """(fragment, base) of what was merged of one life, as far as the tape is kept in memory."""
    return [
        (v["fragment"], v["base"])
        for e in run.tape("merged")
        for v in e["verdicts"]
        if v["applied"] and v["incarnation"] == incarnation
    ]


async def books_are_closed(run: Bench, name: str) -> None:
    await wait_until(lambda: any(e["name"] == name for e in run.tape("closed")), f"the books of {name} are closed")


async def old_contribution_is_rejected(run: Bench, name: str, life: int) -> None:
    """Wait for its outcome; the tape shows the reason."""

    def outcomes() -> list[str]:
        mine = [e for e in run.tape("rejected") if (e["name"], e["incarnation"]) == (name, life)]
        return [e["reason"] for e in mine]

    await wait_until(outcomes, f"the old contribution of {name} has its outcome")
    assert outcomes()[0].startswith(("late: based on version", "stale: based on version"))


def life_of(run: Bench, name: str) -> int:
    return max((m.incarnation for m in run.state.members.values() if m.name == name), default=0)


async def test_frozen_for_several_rounds_its_old_contribution_is_late_and_it_goes_on(
    run_url: str, run_name: str
) -> None:
    spec = make_spec(run_name, rounds={"quorum": 1}, workers={"heartbeat_s": 20.0})  # nobody expires
    async with bench(run_url, spec) as run:
        run.add("steady")
        await run.reach(1)
        with process("worker", run_url, "--name", "w", environment=FROZEN_IN_ITS_THIRD) as frozen:
            await is_frozen(frozen)
            life = life_of(run, "w")
            await some_rounds(run)
            frozen.send_signal(signal.SIGCONT)
            await old_contribution_is_rejected(run, "w", life)
            known = max(run.versions())
            await wait_until(
                lambda: any(base >= known for _, base in merged_of(run, life)), "it takes part again, on a new base"
            )
            assert life_of(run, "w") == life, "the same life"
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_frozen_until_it_was_given_up_it_comes_back_as_a_new_life(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name, rounds={"quorum": 1})) as run:
        run.add("steady")
        await run.reach(1)
        with process("worker", run_url, "--name", "w", environment=FROZEN_IN_ITS_THIRD) as frozen:
            await is_frozen(frozen)
            life = life_of(run, "w")
            await books_are_closed(run, "w")
            assert "w: no heartbeat for" in run.tape("gone")[0]["reason"]
            await some_rounds(run)
            frozen.send_signal(signal.SIGCONT)
            over = f"w speaks for incarnation {life}, which is over"
            await wait_until(lambda: any(e["reason"] == over for e in run.tape("told closed")), "it is told")
            await wait_until(lambda: life_of(run, "w") > life, "it joins again under its name")
            await wait_until(lambda: merged_of(run, life_of(run, "w")), "it takes part again")
        [books] = [d for d in run.state.departed if d.incarnation == life]
        assert books.processed == books.applied + books.rejected + books.discarded + books.lost
        assert run.state.counts.get("ledger mismatches", 0) == 0


# --- a laptop ---------------------------------------------------------------------------------------------


@dataclass
class Lid:
    """A TCP proxy whose connections die without a word: closing the lid ends nothing, it only swallows.

    What was open or opened while the lid was closed stays dead for ever; later connections work. It closes by itself
    when a request contains `marker` for the n-th time, and that request is swallowed, too.
    """

    upstream: tuple[str, int]
    marker: bytes
    passage: int
    closed: bool = False
    generation: int = 0  # connections of an earlier one are dead
    _writers: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        generation = self.generation
        server_reader, server_writer = await asyncio.open_connection(*self.upstream)
        self._writers[task] = [writer, server_writer]
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, generation), name="lid: requests"),
            asyncio.create_task(self._pump(server_reader, writer, generation), name="lid: replies"),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in self._writers.pop(task):
            end.transport.abort()
            with suppress(OSError):
                await end.wait_closed()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int) -> None:
        while data := await reader.read(1 << 16):
            if not self.closed and self.marker in data:
                self.passage -= 1
                if self.passage == 0:
                    self.closed = True
            if not self.closed and generation == self.generation:
                writer.write(data)
                await writer.drain()

    def open(self) -> None:
        self.generation += 1
        self.closed = False

    async def hang_up(self) -> None:
        """At the end of a test: end every connection."""
        tasks = list(self._writers)
        for ends in self._writers.values():
            for end in ends:
                end.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def behind_a_lid(run_url: str, marker: bytes, passage: int) -> AsyncIterator[tuple[RunUrl, Lid]]:
    parts = urlsplit(run_url)
    assert parts.hostname is not None
    assert parts.port is not None
    lid = Lid((parts.hostname, parts.port), marker, passage)
    server = await asyncio.start_server(lid.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    credentials, at, _ = parts.netloc.rpartition("@")
    try:
        yield RunUrl.parse(urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{port}"))), lid
    finally:
        server.close()
        await lid.hang_up()
        await server.wait_closed()


async def hours_pass(run: Bench, name: str) -> None:
    """Everything of a member that has a TTL runs out, and the broadcast is trimmed past what it has read."""
    read = order(await last_id(run.redis, run.keys.broadcast))
    expiring = [run.keys.progress(name)]
    async for key in run.redis.scan_iter(match=run.keys.blob(name, "*", 0).replace("{", "\\{")):
        expiring.append(key.decode())
    assert len(expiring) > 1, "a payload of its own is among them"
    await run.redis.delete(*expiring)

    async def trimmed() -> bool:
        for action in ("pause", "resume") * 25:  # each an entry, as rounds are in hours
            await run.command(action)
        first: Any = await run.redis.xrange(run.keys.broadcast, count=1)
        return order(first[0][0]) > read

    await wait_until(trimmed, "the broadcast is trimmed past what it has read")


@pytest.mark.parametrize("heartbeat_s", [0.3, 60.0], ids=["given up", "still a member"])
async def test_a_laptop_that_slept_takes_part_again(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, heartbeat_s: float
) -> None:
    monkeypatch.setattr("anabranch.workers.member.line.REPLY_S", 1.5)  # above the longest blocking read
    monkeypatch.setattr("anabranch.workers.member.outbox.REPLY_S", 1.5)
    monkeypatch.setattr("anabranch.queue.blobs._CHUNK_S", 3.0)
    spec = make_spec(
        run_name, rounds={"quorum": 1}, limits={"broadcast_length": 100}, workers={"heartbeat_s": heartbeat_s}
    )
    async with bench(run_url, spec) as run, behind_a_lid(run_url, CONTRIBUTION, passage=3) as (url, lid):
        run.add("steady")
        await run.reach(1)
        laptop = SyntheticWorker(url, "laptop", Pace(step_s=0.005))
        task = asyncio.create_task(laptop.run(), name="laptop")
        try:
            await wait_until(lambda: lid.closed, "it falls asleep in the middle of a contribution")
            life = life_of(run, "laptop")
            if heartbeat_s < 1.0:
                await books_are_closed(run, "laptop")
            await some_rounds(run)
            await hours_pass(run, "laptop")
            lid.open()
            await (comes_back if heartbeat_s < 1.0 else goes_on)(run, life)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert laptop.client.incarnation == life_of(run, "laptop")
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def comes_back(run: Bench, life: int) -> None:
    """As a new life under its name; the books of the old one are closed."""
    await wait_until(lambda: life_of(run, "laptop") > life, "it joins again by itself")
    await wait_until(lambda: merged_of(run, life_of(run, "laptop")), "it takes part again")
    [books] = [d for d in run.state.departed if d.incarnation == life]
    assert books.processed == books.applied + books.rejected + books.discarded + books.lost


async def goes_on(run: Bench, life: int) -> None:
    """Nobody missed it: its contribution arrives, late, and it adopts what was merged meanwhile."""
    known = max(run.versions())
    await old_contribution_is_rejected(run, "laptop", life)
    await wait_until(lambda: any(base >= known for _, base in merged_of(run, life)), "it takes part again")
    assert life_of(run, "laptop") == life
