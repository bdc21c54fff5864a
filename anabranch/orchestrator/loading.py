"""The beginning of a term: from what is stored, or from the newest copy of it if the server lost that.

A run goes on from its stored state; only if that is gone, damaged, or older than what this process still holds or a
checkpoint has, the newest of those is put back (`core/copies.py` decides). Whenever members may have seen more than
there is now, the run goes on under a new timeline.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from anabranch._version import VERSION
from anabranch.errors import CheckpointError, MessageError, PayloadError
from anabranch.model import Float32
from anabranch.orchestrator.checkpoint import Restored
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.core import copies, timelines
from anabranch.orchestrator.core.ledger import Account
from anabranch.orchestrator.core.record import core_record, member_record, restore
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.store import Stored, check_same, load_tensors, make_room, read_stored
from anabranch.orchestrator.vault import Vault, Version
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.messages import SCHEMA, Claim, pack, unpack
from anabranch.queue.records import RunRecord, read_tape
from anabranch.spec import parse_spec

log = logging.getLogger("anabranch.synchronizer")


@dataclass
class Loaded:
    """What a term begins with."""

    state: State
    record: RunRecord
    vault: Vault
    returned: str | None = None  # why members may have seen more than there is: a new timeline begins
    restored: tuple[int, ...] | None = None  # put back: incarnations whose stored records it replaces
    replaced: tuple[Claim, ...] = ()  # put back: blobs of what it takes the place of
    broadcast: int = 0  # put back: by how much the broadcast numbering lags behind what members saw
    heard: int = 0  # number of the last broadcast entry that members may have seen
    redefined: str | None = None  # how the definition differs from what members know


def pack_stored(state: State, broadcast: int, now: float) -> bytes:
    """Everything a checkpoint needs besides tensors: the core's record, members and their accounts."""
    members = [member_record(member, now) for _, member in sorted(state.members.items())]
    accounts = {i: [m.account.applied, m.account.rejected, m.account.lost] for i, m in state.members.items()}
    return pack({"core": core_record(state, now), "members": members, "accounts": accounts, "broadcast": broadcast})


async def load_run(context: Context, memory: Restored | None) -> Loaded:
    """Load, or put back, or begin. `memory`: what an earlier term held when the server lost it. `CheckpointError` if
    the run was here and nothing of it is left."""
    loaded = await _load(context, memory)
    context.stack.callback(loaded.vault.close)
    tape = context.tape
    missed = await context.persist(lambda: read_tape(context.redis, context.keys, tape.last_id), "read the tape")
    tape.catch_up(missed)
    return loaded


async def _load(context: Context, memory: Restored | None) -> Loaded:
    run, now, nonce = context.keys.run, context.clock.tick(), secrets.token_hex(4)
    stored: Stored = await context.persist(
        lambda: read_stored(context.redis, context.keys, context.spec, nonce, now, may_change=context.fresh),
        "read the stored run",
    )
    await _make_room(context, damaged=False)
    state, place = stored.state, _stored_place(stored)
    vault = Vault(state.spec, RedisBlobs(context.redis, context.keys))
    if memory is not None and copies.is_overtaken(_place(memory), place):
        memory = None
    damage = await _load_tensors(context, stored, vault)
    life = stored.run_id, context.life.run_id
    lost = memory is not None and (context.lost or place is None or _place(memory) > place)
    suspicion = copies.suspicion(born=state.born, damage=damage, lost=lost, life=life)
    newest = await _newest_copy(context, stored, memory) if suspicion is not None else None
    if newest is not None and copies.is_put_back(_place(newest), place, damage):
        vault.close()
        return await _put_back(context, stored, newest, suspicion, nonce)
    end = copies.nothing_left(run, born=state.born, damage=damage, saw_model=context.saw_model)
    if end is not None:
        raise CheckpointError(end)
    if state.born:
        log.info("run %s continues: %s tokens applied", run, f"{state.tokens:,}")
    record = replace(stored.record, schema=_schema(stored), release=VERSION)
    returned = suspicion if state.born else None
    return Loaded(state, record, vault, returned, heard=stored.broadcast, redefined=stored.redefined)


def _schema(stored: Stored) -> int:
    """Members of an older release keep the run at theirs; once nobody is live it moves on."""
    return stored.record.schema if any(m.live for m in stored.state.members.values()) else SCHEMA


async def _make_room(context: Context, *, damaged: bool) -> None:
    make = partial(make_room, context.redis, context.writer, context.keys, damaged=damaged)
    if names := await context.persist(make, "rename what is damaged"):
        log.error("damaged: %s; renamed to …:damaged", ", ".join(names))


async def _load_tensors(context: Context, stored: Stored, vault: Vault) -> str | None:
    """Fetch Θ and momentum; what is wrong with what is stored, or None."""
    layout = stored.record.layout
    if stored.damage is not None or not stored.state.born:
        return stored.damage
    if layout is None:
        return "its stored layout is gone"
    try:
        load = partial(load_tensors, context.redis, context.keys, vault, layout, stored.state)
        await context.persist(load, "fetch the model", bounded=False)
    except (MessageError, PayloadError) as error:
        return f"the stored model is damaged ({error})"
    return None


async def _newest_copy(context: Context, stored: Stored, memory: Restored | None) -> Restored | None:
    """The newest of our own memory and the checkpoints."""
    run = context.keys.run
    kept = await context.checkpoints.newest() if context.checkpoints is not None else None
    if kept is not None and kept.manifest["run"] != run:
        raise CheckpointError(
            f"{kept.location} is a checkpoint of run {kept.manifest['run']!r}, not of {run!r}: take another --dir, "
            "or `anabranch restore` it into this run"
        )
    if kept is not None and context.init is not None and not stored.state.born:
        raise CheckpointError(
            f"--init {context.init} would begin a new model, but {kept.location} is a checkpoint of run "
            f"{run!r}: leave out --init to go on from it, or take another --dir for a new run"
        )
    found = [copy for copy in (memory, kept) if copy is not None]
    return max(found, key=_place, default=None)


def _place(copy: Restored) -> copies.Place:
    timeline = timelines.number_of(copy.manifest["timeline"])
    return copies.Place(timeline, copy.tokens, unpack(copy.state)["broadcast"])


def _stored_place(stored: Stored) -> copies.Place | None:
    state = stored.state
    return copies.Place(timelines.number_of(state.timeline), state.tokens, stored.broadcast) if state.born else None


async def _put_back(context: Context, stored: Stored, copy: Restored, suspicion: str | None, nonce: str) -> Loaded:
    """Upload a copy; the term's first write makes it the run's state."""
    spec = parse_spec(copy.manifest["spec"])
    check_same(context.keys.run, context.spec, spec)
    if stored.damage is not None:
        await _make_room(context, damaged=True)
    vault = Vault(spec, RedisBlobs(context.redis, context.keys), copy.layout)

    async def upload(theta: Float32, momentum: Float32 | None) -> Version:
        return await context.persist(partial(vault.upload, theta, momentum), "upload the model", bounded=False)

    loaded = await put_back(vault, upload, stored, copy, nonce, context.clock.now)
    loaded.returned = f"{suspicion}: restored from {copy.location}, {copy.tokens:,} tokens applied"
    return loaded


async def put_back(
    vault: Vault,
    upload: Callable[[Float32, Float32 | None], Awaitable[Version]],
    stored: Stored,
    copy: Restored,
    nonce: str,
    now: float,
) -> Loaded:
    """The state and the tensors of a copy in an empty vault, its blobs uploaded under new names."""
    held = unpack(copy.state)
    core, members, broadcast = held["core"], held["members"], held["broadcast"]
    accounts = {int(i): Account(*columns) for i, columns in held["accounts"].items()}
    state = restore(core, members, accounts, spec=vault.spec, nonce=nonce, broadcast=broadcast, now=now)
    for theta, momentum in zip(copy.thetas, copy.momenta, strict=True):
        vault.versions.append(await upload(theta, momentum))
    timelines.outlast(state, stored.state)
    for fragment, version in zip(state.fragments, vault.versions, strict=True):
        fragment.digest = version.theta_claim.digest
    return Loaded(
        state,
        RunRecord(vault.spec, copy.layout, _schema(stored)),
        vault,
        restored=stored.members,
        replaced=stored.claims,
        broadcast=max(0, broadcast - stored.broadcast),
        heard=max(broadcast, stored.broadcast),
    )
