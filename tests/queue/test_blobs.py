"""Payloads: what comes out is what went in, or an error that says what is wrong."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from anabranch.errors import BlobCorrupt, BlobMissing
from anabranch.queue import blobs as module
from anabranch.queue.blobs import RedisBlobs, check_claim, make_claim
from anabranch.queue.keys import Keys
from anabranch.queue.messages import Claim, Stop, encode
from anabranch.queue.scripts import chunk_keys

CHUNK = 256
TTL_S = 60.0


@pytest.fixture
def blobs(redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> RedisBlobs:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return RedisBlobs(redis, keys)


def payload(size: int) -> memoryview:
    return memoryview(np.random.default_rng(size).bytes(size))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 3])
async def test_a_payload_comes_back_as_it_was(redis: Redis, keys: Keys, blobs: RedisBlobs, size: int) -> None:
    data = payload(size)
    claim = await blobs.put("w", data, "fp32", TTL_S)
    assert claim.bytes == size
    assert await blobs.get(claim, size) == data
    chunks = chunk_keys(keys, claim)
    assert len(chunks) == max(1, -(-size // CHUNK))
    lengths = [await redis.strlen(key) for key in chunks]
    assert sum(lengths) == size
    assert max(lengths) <= CHUNK


async def test_other_items_than_bytes_are_taken_as_bytes(blobs: RedisBlobs) -> None:
    numbers = np.arange(200, dtype=np.float32)
    claim = await blobs.put("w", numbers.data, "fp32", TTL_S)
    fetched = await blobs.get(claim, numbers.nbytes)
    np.testing.assert_array_equal(np.frombuffer(fetched, np.float32), numbers)


async def test_every_upload_has_an_id_of_its_own(blobs: RedisBlobs) -> None:
    claims = [await blobs.put("w", payload(10), "fp32", TTL_S) for _ in range(3)]
    assert len({claim.id for claim in claims}) == 3
    assert len({claim.digest for claim in claims}) == 1


@pytest.mark.parametrize("gone", [0, 2])
async def test_a_missing_chunk_is_named(redis: Redis, keys: Keys, blobs: RedisBlobs, gone: int) -> None:
    claim = await blobs.put("w", payload(3 * CHUNK), "fp32", TTL_S)
    key = chunk_keys(keys, claim)[gone]
    await redis.delete(key)
    with pytest.raises(BlobMissing, match=f"{key.split('}')[1]} is gone"):
        await blobs.get(claim, 3 * CHUNK)


async def test_one_changed_byte_is_found(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    data = payload(3 * CHUNK)
    claim = await blobs.put("w", data, "fp32", TTL_S)
    await redis.setrange(chunk_keys(keys, claim)[1], 17, bytes([data[CHUNK + 17] ^ 1]))
    with pytest.raises(BlobCorrupt, match=r":1: SHA-256 differs from the claim"):
        await blobs.get(claim, 3 * CHUNK)


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_chunk_of_another_length_is_found(redis: Redis, keys: Keys, blobs: RedisBlobs, change: int) -> None:
    claim = await blobs.put("w", payload(2 * CHUNK), "fp32", TTL_S)
    await redis.set(chunk_keys(keys, claim)[0], bytes(CHUNK + change))
    with pytest.raises(BlobCorrupt, match=f"has {CHUNK + change} bytes, {CHUNK} expected"):
        await blobs.get(claim, 2 * CHUNK)


async def test_no_more_is_read_than_was_claimed(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    """A key may hold anything its owner put there, up to 512 MB."""
    claim = await blobs.put("w", payload(CHUNK), "fp32", TTL_S)
    await redis.set(chunk_keys(keys, claim)[0], bytes(100 * CHUNK))
    with pytest.raises(BlobCorrupt, match=f"has {CHUNK + 1} bytes, {CHUNK} expected"):
        await blobs.get(claim, CHUNK)


async def test_a_key_of_another_kind_is_no_chunk(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    claim = await blobs.put("w", payload(CHUNK), "fp32", TTL_S)
    key = chunk_keys(keys, claim)[0]
    await redis.delete(key)
    await redis.lpush(key, b"x")
    with pytest.raises(BlobCorrupt, match="is no chunk"):
        await blobs.get(claim, CHUNK)


class NoServer:
    """Whatever asks it for anything fails the test."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"fetched with {name}")


def _changed(claim: Claim, **fields: Any) -> Claim:
    return claim.model_copy(update=fields)


@pytest.mark.parametrize(
    ("fields", "limit", "words"),
    [
        ({}, 599, "blob of 600 bytes, at most 599 expected"),
        ({"bytes": 10**15}, 600, "at most 600 expected"),
        ({"bytes": 100}, 600, "claims 3 chunks"),
        ({"chunk_bytes": 1}, 600, "claims 3 chunks of 1"),
        ({"hashes": []}, 600, "claims 0 chunks"),
        ({"digest": bytes(32)}, 600, "digest does not match"),
        ({"hashes": [bytes(32)] * 3}, 600, "digest does not match"),
    ],
)
async def test_a_wrong_claim_is_refused_before_a_byte_is_fetched(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limit: int, words: str
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    claim = _changed(make_claim("w", payload(600), "fp32"), **fields)
    server: Any = NoServer()
    with pytest.raises(BlobCorrupt, match=words):
        await RedisBlobs(server, keys).get(claim, limit)


def test_swapped_chunks_do_not_match_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    claim = make_claim("w", payload(2 * CHUNK), "fp32")
    check_claim(claim, 2 * CHUNK)
    with pytest.raises(BlobCorrupt, match="digest"):
        check_claim(_changed(claim, hashes=claim.hashes[::-1]), 2 * CHUNK)


def test_the_hashes_are_plain_sha256(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 2)
    claim = make_claim("w", memoryview(b"abc"), "fp32")
    parts = [hashlib.sha256(b"ab").digest(), hashlib.sha256(b"c").digest()]
    assert claim.hashes == parts
    assert claim.digest == hashlib.sha256(b"".join(parts)).digest()


def test_the_claim_of_any_payload_fits_into_an_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger payloads get larger chunks, not more than an envelope can list."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    claim = make_claim("w", memoryview(bytes(100_000)), "fp32")
    assert len(claim.hashes) <= 1024
    check_claim(claim, 100_000)
    assert 34 * len(claim.hashes) + len(encode(Stop(reason=""), "r")) < 64 * 1024


async def test_an_upload_runs_out_unless_refreshed(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    claim = await blobs.put("w", payload(3 * CHUNK), "fp32", 5.0)
    left = [await redis.pttl(key) for key in chunk_keys(keys, claim)]
    assert all(0 < ms <= 5000 for ms in left)
    assert await blobs.refresh(claim, TTL_S)
    left = [await redis.pttl(key) for key in chunk_keys(keys, claim)]
    assert all(5000 < ms <= TTL_S * 1000 for ms in left)


async def test_refreshing_says_whether_a_chunk_is_gone(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    claim = await blobs.put("w", payload(3 * CHUNK), "fp32", TTL_S)
    await redis.delete(chunk_keys(keys, claim)[1])
    assert not await blobs.refresh(claim, TTL_S)


async def test_put_again_heals_a_blob(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    data = payload(3 * CHUNK)
    claim = await blobs.put("w", data, "fp32", TTL_S)
    await redis.delete(*chunk_keys(keys, claim)[1:])
    await blobs.put_again(claim, data, TTL_S)
    assert await blobs.get(claim, 3 * CHUNK) == data


async def test_a_deleted_blob_leaves_nothing(redis: Redis, keys: Keys, blobs: RedisBlobs) -> None:
    claim = await blobs.put("w", payload(3 * CHUNK), "fp32", TTL_S)
    await blobs.delete(claim)
    assert await redis.exists(*chunk_keys(keys, claim)) == 0


async def test_large_payloads_are_hashed_off_the_loop(
    redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    plain = hashlib.sha256

    def watched(data: Any) -> Any:
        threads.add("loop" if threading.current_thread() is threading.main_thread() else "thread")
        return plain(data)

    blobs = RedisBlobs(redis, keys)
    data = payload(200_000)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", watched)
        claim = await blobs.put("w", data, "fp32", TTL_S)
        assert threads == {"thread"}
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_claim", lambda *_: None)
        patch.setattr(hashlib, "sha256", watched)
        threads.clear()
        assert await blobs.get(claim, 200_000) == data
        assert threads == {"thread"}
