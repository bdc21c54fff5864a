"""Cursors of our own: every entry is handed out once, in order, whatever reads overlap."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from anabranch.queue.keys import Keys
from anabranch.queue.streams import START, StreamReader, last_id, order
from tests.wait import wait_until


@pytest.fixture
def a(run_name: str) -> str:
    return Keys(run_name).contributions("a")


@pytest.fixture
def b(run_name: str) -> str:
    return Keys(run_name).contributions("b")


async def fill(redis: Redis, stream: str, *words: str) -> None:
    for word in words:
        await redis.xadd(stream, {"m": word})


async def words(reader: StreamReader, redis: Redis) -> list[bytes]:
    return [entry.fields[b"m"] for entry in await reader.read(redis, None)]


async def test_entries_are_handed_out_once_and_in_order(redis: Redis, a: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    await fill(redis, a, "1", "2")
    assert await words(reader, redis) == [b"1", b"2"]
    assert await words(reader, redis) == []
    await fill(redis, a, "3")
    assert await words(reader, redis) == [b"3"]


async def test_several_streams_are_read_together(redis: Redis, a: str, b: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    reader.follow(b)
    assert reader.streams == {a, b}
    await fill(redis, a, "1")
    await fill(redis, b, "2")
    entries = await reader.read(redis, None)
    assert {(entry.stream, entry.fields[b"m"]) for entry in entries} == {(a, b"1"), (b, b"2")}


async def test_without_streams_there_is_nothing_to_read(redis: Redis) -> None:
    assert await StreamReader().read(redis, 10_000) == []


async def test_overlapping_reads_hand_out_each_entry_once(redis: Redis, a: str) -> None:
    """A blocking read and a drain may both be answered with the same entries."""
    reader = StreamReader()
    reader.follow(a)
    reads = [asyncio.create_task(reader.read(redis, 5000), name=f"read {n}") for n in range(4)]

    async def blocked() -> bool:
        clients = await redis.info("clients")
        return int(clients["blocked_clients"]) >= 4

    await wait_until(blocked, "all reads wait")
    await fill(redis, a, "1")
    found = [entry.fields[b"m"] for read in reads for entry in await read]
    assert found == [b"1"]


async def test_a_read_waits_for_the_first_entry(redis: Redis, a: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    read = asyncio.create_task(reader.read(redis, 5000), name="read")

    async def blocked() -> bool:
        return int((await redis.info("clients"))["blocked_clients"]) >= 1

    await wait_until(blocked, "the read waits")
    await fill(redis, a, "1")
    assert [entry.fields[b"m"] for entry in await read] == [b"1"]


async def test_following_again_keeps_the_cursor(redis: Redis, a: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    await fill(redis, a, "1")
    await words(reader, redis)
    reader.follow(a, START)
    assert await words(reader, redis) == []


async def test_following_from_a_noted_tail_skips_what_was_before(redis: Redis, a: str) -> None:
    assert await last_id(redis, a) == START
    await fill(redis, a, "1", "2")
    reader = StreamReader()
    reader.follow(a, await last_id(redis, a))
    await fill(redis, a, "3")
    assert await words(reader, redis) == [b"3"]


async def test_a_rewound_stream_is_read_again(redis: Redis, a: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    await fill(redis, a, "1", "2")
    entries = await reader.read(redis, None)
    reader.rewind(a, entries[0].id)
    assert await words(reader, redis) == [b"2"]
    reader.rewind(a, START)
    assert await words(reader, redis) == [b"1", b"2"]


async def test_a_forgotten_stream_is_not_read(redis: Redis, a: str, b: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    reader.follow(b)
    reader.forget(a)
    reader.forget("never followed")
    await fill(redis, a, "1")
    await fill(redis, b, "2")
    assert await words(reader, redis) == [b"2"]


async def test_what_arrives_for_a_stream_forgotten_meanwhile_is_dropped(redis: Redis, a: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    read = asyncio.create_task(reader.read(redis, 5000), name="read")

    async def blocked() -> bool:
        return int((await redis.info("clients"))["blocked_clients"]) >= 1

    await wait_until(blocked, "the read waits")
    reader.forget(a)
    await fill(redis, a, "1")
    assert await read == []


async def test_a_long_stream_is_read_in_bounded_pieces(redis: Redis, a: str) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(600):
            pipe.xadd(a, {"m": str(number)})
        await pipe.execute()
    reader = StreamReader()
    reader.follow(a)
    pieces = []
    while piece := await words(reader, redis):
        pieces.append(piece)
    assert [int(word) for piece in pieces for word in piece] == list(range(600))
    assert max(len(piece) for piece in pieces) <= 256


async def test_deleted_entries_are_no_obstacle(redis: Redis, a: str) -> None:
    reader = StreamReader()
    reader.follow(a)
    await fill(redis, a, "1", "2", "3")
    first = (await reader.read(redis, None))[0]
    await redis.xdel(a, first.id)
    await fill(redis, a, "4")
    assert await words(reader, redis) == [b"4"]
    await redis.delete(a)
    assert await words(reader, redis) == []


@pytest.mark.parametrize(
    ("earlier", "later"), [(b"9-1", b"10-0"), (b"5-9", b"5-10"), (b"0-0", b"0-1"), (b"7", b"7-1")]
)
def test_ids_are_ordered_as_numbers(earlier: bytes, later: bytes) -> None:
    assert order(earlier) < order(later)
