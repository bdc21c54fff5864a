"""The previous release, as far as messages go: it writes and reads schema 1 and nothing else.

What it really wrote is kept in `schema_1.json`; docs/upgrade.md says how the real one was tried.
"""

from __future__ import annotations

from types import SimpleNamespace

import msgpack
import pytest
from redis.asyncio import Redis

from anabranch.errors import SchemaMismatch
from anabranch.queue import messages
from anabranch.queue.records import RunRecord
from anabranch.queue.streams import Entry
from anabranch.workers.synthetic import SyntheticWorker

SCHEMA = 1


def schema_of(envelope: bytes) -> int:
    schema: int = msgpack.unpackb(envelope)["s"]
    return schema


def decode(data: bytes, run: str) -> messages.Message:
    """As the previous release decodes: schema 1, or not at all."""
    if (schema := schema_of(data)) != SCHEMA:
        raise SchemaMismatch(f"schema {schema}; this release reads 1 to 1: install the run's release")
    return messages.decode(data, run)


def make_previous(worker: SyntheticWorker) -> SyntheticWorker:
    """A worker of the previous release: writes schema 1 whatever the run says, and chokes on anything newer."""
    client = worker.client
    read = client._broadcast.read

    def encode(message: messages.Message) -> bytes:
        return messages.encode(message, client.keys.run, SCHEMA)

    async def read_broadcast(redis: Redis, block_ms: int | None) -> list[Entry]:
        entries = await read(redis, block_ms)
        for entry in entries:
            decode(entry.fields[b"m"], client.keys.run)
        return entries

    client._encode = encode  # type: ignore[method-assign]
    client._broadcast.read = read_broadcast  # type: ignore[method-assign]
    return worker


def _pack(record: RunRecord) -> bytes:
    layout = record.layout.to_wire() if record.layout is not None else None
    return messages.pack({"spec": record.spec.model_dump(mode="json"), "hash": record.spec.hash, "layout": layout})


def make_leaders_previous(patch: pytest.MonkeyPatch) -> None:
    """Synchronizers of this process, until the patch is undone: their record of the run names no schema."""
    patch.setattr("anabranch.orchestrator.ingest.messages", SimpleNamespace(**{**vars(messages), "decode": decode}))
    patch.setattr("anabranch.orchestrator.loading._schema", lambda stored: SCHEMA)
    patch.setattr(RunRecord, "pack", _pack)
