"""The fenced write: epoch first, then repeats, then every check, and only then writes that cannot fail."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from anabranch.errors import Fenced, ServerChanged
from anabranch.queue.blobs import RedisBlobs, make_claim
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.messages import Claim
from anabranch.queue.scripts import FencedWriter, Transaction, WriteRefused, chunk_keys, load_script
from anabranch.queue.url import RunUrl
from tests.conftest import ServerFactory
from tests.wait import wait_until

LONG_S = 60.0
FRESH = make_claim("_", memoryview(b"on a TTL"), "fp32", "aa")  # uploaded, not kept yet
KEPT = make_claim("_", memoryview(b"for ever"), "fp32", "bb")
GONE = make_claim("_", memoryview(b"nowhere"), "fp32", "cc")

Fill = Callable[[Transaction], None]


@pytest.fixture
async def writer(redis: Redis, keys: Keys) -> FencedWriter:
    """A leader over a run that already has something of every kind."""
    writer = FencedWriter(redis, keys, "one")
    assert await writer.acquire(LONG_S) is None
    await _furnish(redis, keys)
    return writer


async def _furnish(redis: Redis, keys: Keys) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hset(keys.ledger, mapping={"count": "5", "word": "five", "huge": "9" * 20, "old": "1"})
        pipe.xadd(keys.tape, {"e": b"x"}, id="1-1")
        for number in range(300):
            pipe.xadd(keys.control, {"m": b"x"}, id=f"{number + 1}-1")
        pipe.xadd(keys.contributions("w"), {"m": b"x"}, id="1-1")
        pipe.xdel(keys.contributions("w"), "1-1")
        pipe.set(keys.spec, b"before")
        pipe.set(chunk_keys(keys, KEPT)[0], b"for ever")
        await pipe.execute()
    await RedisBlobs(redis, keys).put_again(FRESH, memoryview(b"on a TTL"), LONG_S)


async def everything(redis: Redis, keys: Keys) -> dict[bytes, tuple[bytes, bool]]:
    """All that the run's keys hold: (value, whether it expires)."""
    found = {}
    async for key in redis.scan_iter(count=1000):
        if key.startswith(keys.prefix.encode()) and key != keys.lease.encode():
            value: Any = await redis.dump(key)
            found[key] = (value, await redis.pttl(key) > 0)
    return found


WRITES: dict[str, Fill] = {
    "hset": lambda t: t.hset(t.keys.ledger, {"count": 6}),
    "hincrby": lambda t: t.hincrby(t.keys.ledger, "count", 2),
    "hdel": lambda t: t.hdel(t.keys.ledger, ["old"]),
    "broadcast": lambda t: t.broadcast(b"envelope", 100),
    "xadd": lambda t: t.xadd(t.keys.tape, {"e": b"y"}),
    "xdel": lambda t: t.xdel(t.keys.tape, [b"1-1"]),
    "trim": lambda t: t.trim(t.keys.control, 100),
    "drop_if_empty": lambda t: t.drop_if_empty(t.keys.contributions("w")),
    "set": lambda t: t.set(t.keys.spec, b"after"),
    "persist": lambda t: t.keep_blob(FRESH),
    "expire": lambda t: t.expire_blob(KEPT, LONG_S),
    "unlink": lambda t: t.unlink(t.keys.spec),
}
CHECKS: dict[str, Fill] = {
    "exists": lambda t: t.require_blob(FRESH),
    "absent": lambda t: t.require_absent(t.keys.ledger, "nothing"),
}
FAILING: dict[str, tuple[Fill, str]] = {
    "a chunk is missing": (lambda t: t.require_blob(GONE), r"missing .*blob:_:cc:0"),
    "a field is present": (lambda t: t.require_absent(t.keys.ledger, "count"), "ledger already has count"),
    "a stream instead of a hash": (lambda t: t.hset(t.keys.tape, {"a": 1}), "tape is a stream, expected hash"),
    "a hash instead of a stream": (lambda t: t.xadd(t.keys.ledger, {"a": 1}), "ledger is a hash, expected stream"),
    "a stream instead of a string": (lambda t: t.set(t.keys.tape, b""), "tape is a stream, expected string"),
    "a string instead of a hash": (lambda t: t.hincrby(t.keys.spec, "a", 1), "spec is a string, expected hash"),
    "a word is not counted up": (lambda t: t.hincrby(t.keys.ledger, "word", 1), "ledger word is not an integer"),
    "an unknown operation": (lambda t: t._add("frobnicate", t.keys.spec), "unknown operation frobnicate"),
}


def transaction(keys: Keys, *fills: Fill) -> Transaction:
    made = Transaction(keys)
    for fill in fills:
        fill(made)
    return made


def test_the_table_below_has_every_kind_of_operation() -> None:
    source = load_script("fenced_write")
    types = re.search(r"local TYPES = \{(.*?)\}", source, re.DOTALL)
    assert types is not None
    known = set(re.findall(r"(\w+) = '", types.group(1))) | {"unlink"}
    assert known == WRITES.keys() | CHECKS.keys()
    for name, fill in {**WRITES, **CHECKS}.items():
        assert transaction(Keys("x"), fill).script_arguments[0] == name


@pytest.mark.parametrize("kind", WRITES)
async def test_a_write_of_the_leader_is_carried_out(
    redis: Redis, keys: Keys, writer: FencedWriter, kind: str
) -> None:
    before = await everything(redis, keys)
    written = await writer.write(transaction(keys, WRITES[kind]))
    assert not written.repeat
    after = await everything(redis, keys)
    assert {k: v for k, v in after.items() if k != keys.state.encode()} != {
        k: v for k, v in before.items() if k != keys.state.encode()
    }


@pytest.mark.parametrize("kind", [*WRITES, *CHECKS])
async def test_a_write_of_an_old_epoch_leaves_no_trace(
    redis: Redis, keys: Keys, writer: FencedWriter, kind: str
) -> None:
    await writer.renew(0)
    successor = FencedWriter(redis, keys, "two")
    assert await successor.acquire(LONG_S) is None
    before = await everything(redis, keys)
    with pytest.raises(Fenced, match="epoch 1 is over: the run is held by 2:two"):
        await writer.write(transaction(keys, {**WRITES, **CHECKS}[kind]))
    assert await everything(redis, keys) == before


async def test_the_same_epoch_number_of_another_owner_shows_that_the_server_went_back(
    redis: Redis, keys: Keys, writer: FencedWriter
) -> None:
    impostor = FencedWriter(redis, keys, "impostor")
    impostor.epoch = writer.epoch
    with pytest.raises(ServerChanged, match=f"lost epoch {writer.epoch} of the run: it has {writer.epoch}:one"):
        await impostor.write(transaction(keys, WRITES["set"]))
    assert await redis.get(keys.spec) == b"before"


async def test_without_any_leader_nobody_writes(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await redis.delete(keys.epoch)
    with pytest.raises(ServerChanged, match="the server lost epoch 1 of the run: it has none"):
        await writer.write(transaction(keys, WRITES["set"]))


@pytest.mark.parametrize("kind", WRITES)
async def test_a_repeat_after_a_lost_reply_changes_nothing(
    redis: Redis, keys: Keys, writer: FencedWriter, kind: str
) -> None:
    fills = [WRITES[kind], WRITES["broadcast"]]
    first = await writer.write(transaction(keys, *fills))
    before = await everything(redis, keys)
    twin = FencedWriter(redis, keys, "one")  # has not seen the reply
    twin.epoch = writer.epoch
    again = await twin.write(transaction(keys, *fills))
    assert (again.repeat, again.broadcast) == (True, first.broadcast)
    assert await everything(redis, keys) == before


async def test_what_is_written_after_an_unanswered_write_is_no_repeat_of_it(
    redis: Redis, keys: Keys, writer: FencedWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is cancelled while a write is under way does not know whether it was carried out."""
    script = writer._write

    async def unheard(**arguments: Any) -> Any:
        await script(**arguments)
        raise asyncio.CancelledError

    monkeypatch.setattr(writer, "_write", unheard)
    with pytest.raises(asyncio.CancelledError):
        await writer.write(transaction(keys, WRITES["hincrby"]))
    monkeypatch.undo()
    assert not (await writer.write(transaction(keys, WRITES["hincrby"]))).repeat
    assert await redis.hget(keys.ledger, "count") == b"9", "each once"


async def test_a_gap_in_the_numbers_is_refused(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    before = await everything(redis, keys)
    writer._number = 1
    with pytest.raises(ServerChanged, match="lost acknowledged writes: write 2 would follow 0"):
        await writer.write(transaction(keys, WRITES["set"]))
    assert await everything(redis, keys) == before


async def test_numbers_begin_anew_with_every_epoch(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    for _ in range(3):
        await writer.write(transaction(keys, WRITES["hincrby"]))
    await writer.renew(0)
    successor = FencedWriter(redis, keys, "two")
    await successor.acquire(LONG_S)
    assert not (await successor.write(transaction(keys, WRITES["hincrby"]))).repeat
    assert await redis.hget(keys.ledger, "count") == b"13"


@pytest.mark.parametrize("why", FAILING)
async def test_one_failing_check_leaves_everything_unchanged(
    redis: Redis, keys: Keys, writer: FencedWriter, why: str
) -> None:
    bad, words = FAILING[why]
    before = await everything(redis, keys)
    for order in ([*WRITES.values(), bad], [bad, *WRITES.values()]):
        with pytest.raises(WriteRefused, match=words):
            await writer.write(transaction(keys, *order))
        assert await everything(redis, keys) == before
    await writer.write(transaction(keys, WRITES["set"]))  # the number was not used up
    assert await redis.get(keys.spec) == b"after"


async def test_a_figure_stops_growing_before_it_overflows(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    """HINCRBY would fail in the middle of the writes; a figure that large is nobody's tokens."""
    await redis.hset(keys.ledger, "near", "9" * 17)
    most = 2**53
    for _ in range(3):
        fills = [lambda t: t.hincrby(t.keys.ledger, "huge", most), lambda t: t.hincrby(t.keys.ledger, "near", most)]
        await writer.write(transaction(keys, *fills, WRITES["hincrby"]))
    assert await redis.hget(keys.ledger, "huge") == b"9" * 20
    assert int(await redis.hget(keys.ledger, "near") or 0) == int("9" * 17) + most
    assert await redis.hget(keys.ledger, "count") == b"11"


@pytest.mark.parametrize("kind", ["xdel", "drop_if_empty", "unlink"])
async def test_what_a_member_made_of_its_own_key_stops_no_write(
    redis: Redis, keys: Keys, writer: FencedWriter, kind: str
) -> None:
    inbox = keys.contributions("w")
    await redis.delete(inbox)
    await redis.set(inbox, b"a string where a stream belongs")
    fills: dict[str, Fill] = {
        "xdel": lambda t: t.xdel(inbox, [b"1-1"]),
        "drop_if_empty": lambda t: t.drop_if_empty(inbox),
        "unlink": lambda t: t.unlink(inbox),
    }
    await writer.write(transaction(keys, fills[kind], WRITES["hincrby"]))
    assert await redis.hget(keys.ledger, "count") == b"7"


async def test_a_foreign_state_is_not_written_over(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await redis.delete(keys.state)
    await redis.set(keys.state, b"something else")
    with pytest.raises(WriteRefused, match="state is not a hash"):
        await writer.write(transaction(keys, WRITES["broadcast"]))
    assert await redis.exists(keys.broadcast) == 0


async def test_a_blob_needs_every_one_of_its_chunks(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    data = memoryview(b"abcdef")
    whole = make_claim("_", data, "fp32", "dd")
    parted = whole.model_copy(update={"chunk_bytes": 2, "hashes": whole.hashes * 3})
    for key in chunk_keys(keys, parted)[:2]:
        await redis.set(key, b"xx")
    with pytest.raises(WriteRefused, match=r"missing .*:dd:2"):
        await writer.write(transaction(keys, lambda t: t.require_blob(parted)))


async def test_broadcast_numbers_are_contiguous_over_writes_and_epochs(
    redis: Redis, keys: Keys, writer: FencedWriter
) -> None:
    assert (await writer.write(transaction(keys, WRITES["broadcast"], WRITES["broadcast"]))).broadcast == 2
    assert (await writer.write(transaction(keys, WRITES["set"]))).broadcast == 2
    with pytest.raises(WriteRefused):
        await writer.write(transaction(keys, WRITES["broadcast"], FAILING["a chunk is missing"][0]))
    await writer.renew(0)
    successor = FencedWriter(redis, keys, "two")
    await successor.acquire(LONG_S)
    assert (await successor.write(transaction(keys, WRITES["broadcast"]))).broadcast == 3
    entries: Any = await redis.xrange(keys.broadcast)
    assert [fields[b"n"] for _, fields in entries] == [b"1", b"2", b"3"]
    assert {fields[b"m"] for _, fields in entries} == {b"envelope"}


async def test_streams_are_trimmed_but_numbers_go_on(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    for _ in range(4):
        await writer.write(transaction(keys, *[WRITES["broadcast"]] * 100))
    assert await redis.xlen(keys.broadcast) <= 200
    entries: Any = await redis.xrevrange(keys.broadcast, count=1)
    assert entries[0][1][b"n"] == b"400"


async def test_more_fields_than_lua_can_unpack(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    many = {f"field {number}": number for number in range(20_000)}
    await writer.write(transaction(keys, lambda t: t.hset(keys.state, many)))
    assert await redis.hlen(keys.state) >= len(many)
    ids = [f"{number + 1}-1".encode() for number in range(300)] * 30
    await writer.write(
        transaction(keys, lambda t: t.hdel(keys.state, list(many)), lambda t: t.xdel(keys.control, ids))
    )
    assert await redis.hlen(keys.state) < 10
    assert await redis.xlen(keys.control) == 0


async def test_a_stream_with_entries_is_not_dropped(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await redis.xadd(keys.contributions("w"), {"m": b"unread"})
    await writer.write(transaction(keys, WRITES["drop_if_empty"]))
    assert await redis.xlen(keys.contributions("w")) == 1


async def test_a_vanished_script_cache_is_reloaded(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await writer.write(transaction(keys, WRITES["hincrby"]))
    await redis.script_flush()
    await writer.write(transaction(keys, WRITES["hincrby"]))
    await redis.script_flush()
    await writer.renew(LONG_S)
    assert await redis.hget(keys.ledger, "count") == b"9"


async def test_a_full_server_still_takes_the_leaders_writes(server_factory: ServerFactory) -> None:
    """They are small, and commits and clean-up are what makes room again."""
    url = RunUrl.parse(server_factory(maxmemory_bytes=8 << 20).url)
    redis, keys = connect(url, name="test"), Keys(url.run)
    try:
        writer = FencedWriter(redis, keys, "one")
        await writer.acquire(LONG_S)
        await _furnish(redis, keys)
        await _fill_memory(redis)
        with pytest.raises(OutOfMemoryError):
            await redis.xadd(keys.contributions("w"), {"m": b"x" * 1000})
        assert not (await writer.write(transaction(keys, *WRITES.values()))).repeat
        await writer.renew(LONG_S)
    finally:
        await redis.aclose()


async def _fill_memory(redis: Redis) -> None:
    number, size = 0, 1 << 20
    while size >= 1 << 10:
        try:
            await redis.set(f"ballast {number}", b"x" * size)
        except OutOfMemoryError:
            size //= 4
        number += 1


# --- the lease --------------------------------------------------------------------------------------------


async def test_a_second_owner_is_standby(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    second = FencedWriter(redis, keys, "two")
    holder = await second.acquire(LONG_S)
    assert holder is not None
    assert holder.owner == "one"
    assert LONG_S - 5 < holder.left_s <= LONG_S
    assert second.epoch == 0
    with pytest.raises(Fenced):
        await second.write(transaction(keys, WRITES["set"]))
    await writer.write(transaction(keys, WRITES["set"]))


async def test_an_expired_lease_lets_the_standby_in_with_a_higher_epoch(redis: Redis, keys: Keys) -> None:
    first, second = FencedWriter(redis, keys, "one"), FencedWriter(redis, keys, "two")
    await first.acquire(0.05)

    async def taken() -> bool:
        return await second.acquire(LONG_S) is None

    await wait_until(taken, "the lease ran out")
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(Fenced, match="held by 2:two"):
        await first.renew(LONG_S)
    holder = await first.acquire(LONG_S)
    assert holder is not None
    assert holder.owner == "two"


async def test_the_lease_runs_out_unless_renewed(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await writer.renew(0.05)

    async def gone() -> bool:
        return await redis.get(keys.lease) is None

    await wait_until(gone, "the lease ran out")
    await writer.renew(LONG_S)  # nobody else took it meanwhile: still the leader
    assert await redis.get(keys.lease) == b"one"
    assert 0 < await redis.pttl(keys.lease) <= LONG_S * 1000


async def test_a_released_lease_is_free_at_once(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await writer.renew(0)
    second = FencedWriter(redis, keys, "two")
    assert await second.acquire(LONG_S) is None
    assert second.epoch == writer.epoch + 1


async def test_a_fenced_leader_cannot_release_its_successors_lease(
    redis: Redis, keys: Keys, writer: FencedWriter
) -> None:
    await writer.renew(0)
    await FencedWriter(redis, keys, "two").acquire(LONG_S)
    with pytest.raises(Fenced):
        await writer.renew(0)
    assert await redis.get(keys.lease) == b"two"


async def test_whoever_asks_again_begins_another_epoch(redis: Redis, keys: Keys, writer: FencedWriter) -> None:
    await writer.write(transaction(keys, WRITES["hincrby"]))
    assert await writer.acquire(LONG_S) is None
    assert writer.epoch == 2
    assert not (await writer.write(transaction(keys, WRITES["hincrby"]))).repeat


def test_chunks_of_a_claim_are_numbered(keys: Keys) -> None:
    claim: Claim = KEPT.model_copy(update={"hashes": KEPT.hashes * 2})
    assert chunk_keys(keys, claim) == [keys.blob("_", "bb", 0), keys.blob("_", "bb", 1)]
