"""Two releases in one test: one to come, which speaks schema 2, and the one before it, which speaks schema 1 alone.

Nothing was released with a second schema yet, so one is made up: from schema 2 on heartbeats say `train_s`, and
members may ask for a peer's optimizer state. `python -m tests.promises.previous …` is that release's command line.
"""

from __future__ import annotations

from types import SimpleNamespace

import msgpack
import pytest

from anabranch._version import VERSION
from anabranch.errors import SchemaMismatch
from anabranch.queue import messages
from anabranch.queue.records import RunRecord
from anabranch.queue.streams import Entry, StreamReader
from anabranch.workers.member.synthetic import SyntheticWorker
from tests.harness import change_line

PREVIOUS, NEXT = 1, 2


def make_next(patch: pytest.MonkeyPatch) -> None:
    """This process speaks the schema to come, until the patch is undone."""
    for module in ("queue.messages", "queue.records", "orchestrator.loading"):
        patch.setattr(f"anabranch.{module}.SCHEMA", NEXT)
    patch.setattr(messages.encode, "__defaults__", (NEXT, messages.ENVELOPE_LIMIT))
    patch.setattr(RunRecord.__init__, "__defaults__", (NEXT, VERSION))
    patch.setattr(messages.Progress, "since", {"train_s": NEXT})
    patch.setattr(messages.StateRequest, "introduced", NEXT)


def schema_of(envelope: bytes) -> int:
    schema: int = msgpack.unpackb(envelope)["s"]
    return schema


def decode(data: bytes, run: str) -> messages.Message:
    """As the previous release decodes: schema 1, or not at all."""
    if (schema := schema_of(data)) != PREVIOUS:
        raise SchemaMismatch(f"schema {schema}; this release reads 1 to 1: install the run's release")
    return messages.decode(data, run)


def make_previous(worker: SyntheticWorker) -> SyntheticWorker:
    """A worker of the previous release: writes schema 1 whatever the run says, and chokes on anything newer."""
    client = worker.client
    line, read = client.line, client.line.read

    def encode(message: messages.Message, schema: int) -> bytes:
        return messages.encode(message, line.keys.run, PREVIOUS)

    async def read_broadcast(broadcast: StreamReader, block_ms: int) -> list[Entry]:
        entries = await read(broadcast, block_ms)
        for entry in entries:
            decode(entry.fields[b"m"], line.keys.run)
        return entries

    change_line(client, "encode", encode)
    change_line(client, "read", read_broadcast)
    return worker


def make_leaders_previous(patch: pytest.MonkeyPatch) -> None:
    """Synchronizers of this process are of the previous release, until the patch is undone."""
    patch.setattr("anabranch.orchestrator.ingest.messages", SimpleNamespace(**{**vars(messages), "decode": decode}))
    patch.setattr("anabranch.orchestrator.loading._schema", lambda stored: PREVIOUS)


if __name__ == "__main__":
    from anabranch.cli import main

    make_next(pytest.MonkeyPatch())
    main()
