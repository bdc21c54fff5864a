"""The beginning of a term: from what is stored, or from the newest copy of it if the server lost that.

The rule: never go back silently, and never further than needed. A run goes on from its stored state; only if that
is gone, damaged, or older than what this process still holds or a checkpoint has, the newest of those is put back.
Whenever members may have seen more than there is now, the run goes on under a new timeline.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from anabranch._version import VERSION
from anabranch.errors import CheckpointError, PayloadError
from anabranch.orchestrator import timelines
from anabranch.orchestrator.checkpoint import Checkpoints, Restored
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import Account
from anabranch.orchestrator.store import Stored, check_same, load_tensors, read_stored
from anabranch.orchestrator.vault import Vault
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.keys import Keys
from anabranch.queue.messages import SCHEMA, Claim, pack, unpack
from anabranch.queue.records import RunRecord
from anabranch.spec import RunSpec, parse_spec

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.orchestrator.synchronizer import Synchronizer
    from anabranch.queue.connection import ServerLife

log = logging.getLogger("anabranch.synchronizer")


class Persist(Protocol):
    """Await an action through outages."""

    def __call__(
        self, action: Callable[[], Awaitable[Any]], what: str, *, bounded: bool = True
    ) -> Awaitable[Any]: ...


@dataclass
class Loaded:
    """What a term begins with."""

    core: Core
    record: RunRecord
    vault: Vault
    returned: str | None = None  # why members may have seen more than there is: a new timeline begins
    restored: tuple[int, ...] | None = None  # put back: incarnations whose stored records it replaces
    replaced: tuple[Claim, ...] = ()  # put back: blobs of what it takes the place of
    broadcast: int = 0  # put back: by how much the broadcast numbering lags behind what members saw
    heard: int = 0  # number of the last broadcast entry that members may have seen


def pack_stored(core: Core, broadcast: int, now: float) -> bytes:
    """Everything a checkpoint needs besides tensors: the core's record, members and their accounts."""
    record, members = core.dump_all(now)
    accounts = {i: [a.applied, a.rejected, a.lost] for i, a in ((m.incarnation, m.account) for m in core.members())}
    return pack({"core": record, "members": list(members.values()), "accounts": accounts, "broadcast": broadcast})


async def load_run(
    owner: Synchronizer, redis: Redis, life: ServerLife, persist: Persist, memory: Restored | None
) -> Loaded:
    """Load, or put back, or begin. `CheckpointError` if the run was here and nothing of it is left."""
    now, nonce = owner.clock.tick(), secrets.token_hex(4)
    stored: Stored = await persist(
        lambda: read_stored(redis, owner.keys, owner.spec, nonce, now), "read the stored run"
    )
    blobs = RedisBlobs(redis, owner.keys)
    vault = Vault(stored.core.state.spec, blobs)
    if memory is not None and stored.core.state.born and _place(memory)[0] < _stored_place(stored)[0]:
        memory = None  # another leader went on without it
    damage = await _load_tensors(redis, owner, persist, stored, vault)
    suspicion = damage or _suspicion(stored, life, memory)
    newest = await _newest_copy(owner, stored, suspicion, memory)
    if newest is not None and (damage or not stored.core.state.born or _place(newest) > _stored_place(stored)):
        vault.close()
        return await _put_back(owner, redis, persist, stored, newest, suspicion, nonce)
    if damage:
        raise CheckpointError(
            f"run {owner.keys.run!r}: {damage}, and there is no checkpoint to go on from: nothing is written. "
            "Give --checkpoints, or `anabranch restore` one"
        )
    if owner.saw_model and not stored.core.state.born:  # whoever led may still hold it: the lease is given back
        raise CheckpointError(
            f"run {owner.keys.run!r} was under way, and the server holds nothing of it any more. This synchronizer "
            "has no copy: it ends, no new model is begun. Give --checkpoints to all synchronizers of a run"
        )
    stored.core.state.init_given = owner.init is not None
    if stored.core.state.born:
        log.info("run %s continues: %s tokens applied", owner.keys.run, f"{stored.core.state.tokens:,}")
    record = replace(stored.record, schema=_schema(stored), release=VERSION)
    returned = suspicion if stored.core.state.born else None
    return Loaded(stored.core, record, vault, returned, heard=stored.broadcast)


def _schema(stored: Stored) -> int:
    """Members of an older release keep the run at theirs; once nobody is live it moves on."""
    return stored.record.schema if any(m.live for m in stored.core.members()) else SCHEMA


async def _load_tensors(
    redis: Redis, owner: Synchronizer, persist: Persist, stored: Stored, vault: Vault
) -> str | None:
    """Fetch Θ and momentum; what is wrong with them, or None."""
    layout = stored.record.layout
    if not stored.core.state.born:
        return None
    if layout is None:
        return "its stored layout is gone"
    try:
        await persist(lambda: load_tensors(redis, owner.keys, vault, layout), "fetch the model", bounded=False)
    except PayloadError as error:
        return f"the stored model is damaged ({error})"
    return None


def _suspicion(stored: Stored, life: ServerLife, memory: Restored | None) -> str | None:
    """Why the server may have less than it acknowledged."""
    if not stored.core.state.born:
        return "the server holds nothing of this run any more"
    if memory is not None:
        return "the server lost acknowledged writes, or was started again"
    if None not in (stored.run_id, life.run_id) and stored.run_id != life.run_id:
        return "the server was started again, or another one took its place: its last writes may be lost"
    return None


async def _newest_copy(
    owner: Synchronizer, stored: Stored, suspicion: str | None, memory: Restored | None
) -> Restored | None:
    """The newest of our own memory and the checkpoints, if there is a reason to look."""
    if suspicion is None:
        return None
    kept = await _checkpoint_of(owner.checkpoints, owner.keys.run)
    if kept is not None and owner.init is not None and not stored.core.state.born:
        raise CheckpointError(
            f"--init {owner.init} would begin a new model, but {kept.location} is a checkpoint of run "
            f"{owner.keys.run!r}: leave out --init to go on from it, or take another --dir for a new run"
        )
    copies = [copy for copy in (memory, kept) if copy is not None]
    return max(copies, key=_place, default=None)


Place = tuple[int, ...]  # timeline, tokens, broadcast entries: where in a run's history a copy was made


def _place(copy: Restored) -> Place:
    """A later timeline was begun by whoever knew that the one before had lost something, so it comes first."""
    return timelines.number_of(copy.manifest["timeline"]), copy.tokens, unpack(copy.state)["broadcast"]


def _stored_place(stored: Stored) -> Place:
    return timelines.number_of(stored.core.state.timeline), stored.core.state.tokens, stored.broadcast


async def _checkpoint_of(checkpoints: Checkpoints | None, run: str) -> Restored | None:
    kept = await checkpoints.newest() if checkpoints is not None else None
    if kept is not None and kept.manifest["run"] != run:
        raise CheckpointError(
            f"{kept.location} is a checkpoint of run {kept.manifest['run']!r}, not of {run!r}: take another --dir, "
            "or `anabranch restore` it into this run"
        )
    return kept


async def _put_back(
    owner: Synchronizer,
    redis: Redis,
    persist: Persist,
    stored: Stored,
    copy: Restored,
    suspicion: str | None,
    nonce: str,
) -> Loaded:
    """Upload a copy; the term's first write makes it the run's state."""
    spec = parse_spec(copy.manifest["spec"])
    check_same(owner.keys.run, owner.spec, spec)
    loaded = await put_back(owner.keys.run, redis, persist, stored, copy, spec, nonce, owner.clock.now)
    loaded.returned = f"{suspicion}: restored from {copy.location}, {copy.tokens:,} tokens applied"
    return loaded


async def put_back(
    run: str,
    redis: Redis,
    persist: Persist,
    stored: Stored,
    copy: Restored,
    spec: RunSpec,
    nonce: str,
    now: float,
) -> Loaded:
    """The core and the tensors of a copy, its blobs uploaded under new names."""
    held = unpack(copy.state)
    accounts = {int(i): Account(*columns) for i, columns in held["accounts"].items()}
    core = Core.load(
        held["core"], held["members"], accounts, spec=spec, nonce=nonce, broadcast=held["broadcast"], now=now
    )
    blobs = RedisBlobs(redis, Keys(run))
    vault = Vault(spec, blobs, copy.layout)
    for theta, momentum in zip(copy.thetas, copy.momenta, strict=True):
        upload = partial(vault.upload, theta, momentum)
        vault.versions.append(await persist(upload, "upload the model", bounded=False))
    timelines.outlast(core.state, stored.core.state)
    for fragment, version in zip(core.state.fragments, vault.versions, strict=True):
        fragment.digest = version.theta_claim.digest
    return Loaded(
        core,
        RunRecord(spec, copy.layout, _schema(stored)),
        vault,
        restored=stored.members,
        replaced=stored.claims,
        broadcast=max(0, held["broadcast"] - stored.broadcast),
        heard=max(held["broadcast"], stored.broadcast),
    )
