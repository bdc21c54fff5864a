"""Payloads as claim checks: chunks under blob keys, verified by SHA-256 on the way out.

Uploads carry a TTL that the owner refreshes until it learns the outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from anabranch.errors import BlobCorrupt, BlobMissing, CommandRefused
from anabranch.loops import leaf
from anabranch.queue.connection import LEAST_BULK_BYTES, value_limit
from anabranch.queue.messages import Claim
from anabranch.queue.scripts import chunk_keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.queue.keys import Keys

P = ParamSpec("P")
R = TypeVar("R")

CHUNK_BYTES = 4 * 1024 * 1024
_MOST_CHUNKS = 1024  # of one blob: its claim has to fit into an envelope
_INLINE_BYTES = 64 * 1024  # hashing less than this is quicker than handing it to a thread
_CHUNK_S = 180.0  # for one chunk: enough for 0.2 Mbit/s
_CONCURRENT = 4  # chunks on the wire at a time: bounds memory, keeps the pipe full


def make_claim(
    owner: str, data: memoryview, codec: str, blob_id: str | None = None, most_bytes: int | None = None
) -> Claim:
    """Hash `data` chunk by chunk into a claim check. CPU-bound: call it off the event loop when large.

    `most_bytes`: of one chunk, as the server allows (None: unknown). A blob that then has too many chunks for its
    claim gets larger ones all the same: the server's refusal names its setting.
    """
    chunk_bytes = min(CHUNK_BYTES, most_bytes or CHUNK_BYTES)
    chunk_bytes = max(chunk_bytes, -(-data.nbytes // _MOST_CHUNKS))
    hashes = [hashlib.sha256(part).digest() for part in _chunks(data, chunk_bytes)]
    return Claim(
        owner=owner,
        id=blob_id or secrets.token_hex(12),
        bytes=data.nbytes,
        chunk_bytes=chunk_bytes,
        codec=codec,
        hashes=hashes,
        digest=hashlib.sha256(b"".join(hashes)).digest(),
    )


def check_claim(claim: Claim, limit_bytes: int) -> None:
    """Size and consistency of a claim, before a byte is fetched."""
    if claim.bytes > limit_bytes:
        raise BlobCorrupt(f"blob of {claim.bytes} bytes, at most {limit_bytes} expected")
    if len(claim.hashes) != max(1, -(-claim.bytes // claim.chunk_bytes)):
        raise BlobCorrupt(f"blob of {claim.bytes} bytes claims {len(claim.hashes)} chunks of {claim.chunk_bytes}")
    if hashlib.sha256(b"".join(claim.hashes)).digest() != claim.digest:
        raise BlobCorrupt("digest does not match the chunk hashes")


class RedisBlobs:
    """Blobs as plain string keys of the run's own server."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def put(self, owner: str, data: memoryview, codec: str, ttl_s: float) -> Claim:
        """Upload under a fresh id; every chunk expires after `ttl_s` unless refreshed or kept."""
        data = data.cast("B")
        # Asked each time: it may be lowered while we run, and costs little beside an upload.
        limit = await value_limit(self._redis) if data.nbytes > LEAST_BULK_BYTES else None
        most = limit.bytes if limit is not None else None
        claim = await _off_loop(data.nbytes, make_claim, owner, data, codec, most_bytes=most)
        await self.put_again(claim, data, ttl_s)
        return claim

    async def put_again(self, claim: Claim, data: memoryview, ttl_s: float) -> None:
        """Upload the bytes of an earlier claim once more."""
        limit = asyncio.Semaphore(_CONCURRENT)

        async def upload(key: str, part: memoryview) -> None:
            async with limit, asyncio.timeout(_CHUNK_S):
                await self._redis.set(key, part, px=int(ttl_s * 1000))

        parts = _chunks(data.cast("B"), claim.chunk_bytes)
        await _together(upload(*item) for item in zip(chunk_keys(self._keys, claim), parts, strict=True))

    async def get(self, claim: Claim, limit_bytes: int) -> memoryview:
        """Fetch and verify; `BlobCorrupt` when the claim is over the limit or bytes differ, `BlobMissing`."""
        check_claim(claim, limit_bytes)
        buffer = np.empty(claim.bytes, np.uint8).data
        limit = asyncio.Semaphore(_CONCURRENT)

        async def download(key: str, part: memoryview, digest: bytes) -> None:
            async with limit:
                data = await self._read_chunk(key, part.nbytes)
                await _off_loop(len(data), _place, data, part, digest, key)

        parts = _chunks(buffer, claim.chunk_bytes)
        await _together(
            download(*item) for item in zip(chunk_keys(self._keys, claim), parts, claim.hashes, strict=True)
        )
        return buffer

    async def _read_chunk(self, key: str, size: int) -> bytes:
        """At most one byte more than expected: a key may hold anything its owner put there."""
        try:
            async with asyncio.timeout(_CHUNK_S):
                data: Any = await self._redis.getrange(key, 0, size)
                gone = not data and await self._redis.exists(key) == 0
        except CommandRefused as error:
            if error.code != "WRONGTYPE":
                raise
            raise BlobCorrupt(f"{key} is no chunk: {error}") from None
        if gone:
            raise BlobMissing(f"{key} is gone")
        return bytes(data)

    async def refresh(self, claim: Claim, ttl_s: float) -> bool:
        """Restart the TTL; False if a chunk is gone."""
        ttl_ms = int(ttl_s * 1000)
        return all(await asyncio.gather(*[self._redis.pexpire(key, ttl_ms) for key in chunk_keys(self._keys, claim)]))

    async def delete(self, claim: Claim) -> None:
        await self._redis.unlink(*chunk_keys(self._keys, claim))


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; raise the first error itself instead of a group, so that callers can tell an outage by its type."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in work:
                group.create_task(item, name="blob chunk")
    except BaseExceptionGroup as errors:
        raise leaf(errors) from errors


async def _off_loop(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    if size <= _INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _place(data: bytes, part: memoryview, digest: bytes, key: str) -> None:
    if len(data) != part.nbytes:
        raise BlobCorrupt(f"{key} has {len(data)} bytes, {part.nbytes} expected")
    if hashlib.sha256(data).digest() != digest:
        raise BlobCorrupt(f"{key}: SHA-256 differs from the claim")
    part[:] = data


def _chunks(data: memoryview, chunk_bytes: int) -> list[memoryview]:
    return [data[start : start + chunk_bytes] for start in range(0, max(1, data.nbytes), chunk_bytes)]
