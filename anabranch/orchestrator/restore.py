"""`anabranch restore`: put a checkpoint in the place of what a server holds of a run, under a new timeline."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack

from anabranch.checkpoints.reading import read_checkpoint
from anabranch.errors import UsageError
from anabranch.orchestrator.core.events import Returned
from anabranch.orchestrator.core.port import Core
from anabranch.orchestrator.loading import put_back
from anabranch.orchestrator.scribe import Scribe
from anabranch.orchestrator.store import make_room, read_stored
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.vault import Vault
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import check_server, connect, plainly
from anabranch.queue.keys import Keys
from anabranch.queue.records import read_tape
from anabranch.queue.scripts import FencedWriter
from anabranch.queue.url import RunUrl
from anabranch.spec import parse_spec

LEASE_S = 600.0  # nobody else may lead meanwhile; given back at the end


async def restore(url: RunUrl, where: str, *, force: bool = False) -> str:
    """Write the checkpoint at `where` into the server; returns what was done, for people.

    `UsageError` while a synchronizer leads the run, or if the server holds a model of it already and not `force`.
    """
    copy = await asyncio.to_thread(read_checkpoint, where)
    keys = Keys(url.run)
    async with AsyncExitStack() as stack:
        redis = connect(url, name="anabranch-restore")
        stack.push_async_callback(redis.aclose)
        info = await check_server(redis, url)
        stack.enter_context(plainly(url))
        writer = FencedWriter(redis, keys, f"restore-{secrets.token_hex(4)}")
        if (holder := await writer.acquire(LEASE_S)) is not None:
            raise UsageError(f"run {url.run!r} is led by {holder.owner}: end its synchronizer first, then restore")
        stack.push_async_callback(writer.renew, 0)
        nonce = secrets.token_hex(4)
        stored = await read_stored(redis, keys, None, nonce, 0.0)
        if stored.state.born and not force:
            raise UsageError(
                f"the server holds run {url.run!r} with {stored.state.tokens:,} tokens applied; --force puts "
                f"{copy.location} ({copy.tokens:,} tokens) in its place"
            )
        spec = parse_spec({**copy.manifest["spec"], "name": url.run})
        if stored.damage is not None:
            await make_room(redis, writer, keys, damaged=True)
        vault = Vault(spec, RedisBlobs(redis, keys), copy.layout)
        stack.callback(vault.close)
        loaded = await put_back(vault, vault.upload, stored, copy, nonce, 0.0)
        tape = Tape(None)
        tape.catch_up(await read_tape(redis, keys, 0))
        core = Core(loaded.state)
        scribe = Scribe(keys, core, vault, tape, loaded.record)
        reason = f"restored by hand from {copy.location}, {copy.tokens:,} tokens applied"
        opening = scribe.opening(info.get("run_id"), loaded.restored, loaded.broadcast, loaded.replaced)
        core.step(Returned(reason), 0.0)
        batch = core.take(everything=True)
        assert batch is not None
        transaction, _ = scribe.describe(batch, 0.0, opening)
        await writer.write(transaction)
    return f"run {url.run}: {reason}; timeline {core.state.timeline}"
