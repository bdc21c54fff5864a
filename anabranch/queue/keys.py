"""The one owner of key names.

Every key of a run starts with `anabranch:{run/s}:`; the braces are a hash tag (all keys of one shard live in
one slot of a Redis Cluster), s is the shard. Type and content of each:

| key | type | written by | content |
| --- | --- | --- | --- |
| `spec` | string | synchronizer | msgpack: spec, its hash, layout |
| `lease` | string, TTL | leader | owner |
| `epoch` | string | leader | `number:owner`, the fencing token |
| `state` | hash | leader | see below |
| `ledger` | hash | leader | `<incarnation>:<fragment>:<column>` in whole tokens |
| `broadcast` | stream, trimmed | leader | `n` (number), `m` (envelope) |
| `tape` | stream, trimmed | leader | `e` (msgpack event) |
| `control` | stream | operators | `m` (envelope) |
| `contributions:<worker>` | stream | that worker | `m` (envelope) |
| `progress:<worker>` | stream, trimmed | that worker | `m` (envelope) |
| `knock` | pub/sub channel | members | a worker's name |
| `blob:<owner>:<id>:<n>` | string | owner | one chunk of a payload |

A key that could not be read is renamed to `NAME:damaged` before a copy of the run takes its place.

Fields of `state`, and who else reads them:

| field | read by | content |
| --- | --- | --- |
| `write`, `epoch` | the fenced write | number of the last write; of the last epoch |
| `broadcast` | members | number of the last entry of `broadcast` |
| `head`, `fragment:<p>`, `own:<n>` | members | messages `Head`, `FragmentHead`, `Own` |
| `picture` | `anabranch status` | what the page shows, at most a second old |
| `server` | the next leader | run_id of the server's life that the leader writes to |
| `core`, `member:<n>`, `momentum:<p>` | the next leader | the core's record; the outer momentum's claim |
"""

from __future__ import annotations

PREFIX = "anabranch:"
SYNCHRONIZER = "_"  # owner of the synchronizer's blobs; no worker's name may start with it


SPECS = PREFIX + "{*/0}:spec"  # every run's definition, as a pattern


def run_of(key: str) -> str:
    """The run whose key it is."""
    return key.removeprefix(PREFIX + "{").rpartition("/")[0]


class Keys:
    """Key names of one run. S = 1 for now, so every fragment lives on shard 0."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"{PREFIX}{{{run}/0}}:"
        self.spec = self.prefix + "spec"
        self.lease = self.prefix + "lease"
        self.epoch = self.prefix + "epoch"
        self.state = self.prefix + "state"
        self.ledger = self.prefix + "ledger"
        self.broadcast = self.prefix + "broadcast"
        self.tape = self.prefix + "tape"
        self.control = self.prefix + "control"
        self.knock = self.prefix + "knock"

    def contributions(self, worker: str) -> str:
        return f"{self.prefix}contributions:{worker}"

    def progress(self, worker: str) -> str:
        return f"{self.prefix}progress:{worker}"

    def blob(self, owner: str, blob_id: str, chunk: int) -> str:
        return f"{self.prefix}blob:{owner}:{blob_id}:{chunk}"


# Fields of `state`.
HEAD_FIELD = "head"
BROADCAST_FIELD = "broadcast"
PICTURE_FIELD = "picture"
SERVER_FIELD = "server"
CORE_FIELD = "core"


def fragment_field(fragment: int) -> str:
    return f"fragment:{fragment}"


def momentum_field(fragment: int) -> str:
    return f"momentum:{fragment}"


def own_field(incarnation: int) -> str:
    return f"own:{incarnation}"


def member_field(incarnation: int) -> str:
    return f"member:{incarnation}"


def ledger_field(incarnation: int, fragment: int, column: str) -> str:
    return f"{incarnation}:{fragment}:{column}"
