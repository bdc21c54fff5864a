"""Every setting acts: with two values of it, something that is not the setting itself comes out differently.

The list is complete, or `test_every_setting_is_here` fails: a setting without effect is a promise that is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from pydantic import BaseModel

from anabranch.errors import PayloadError
from anabranch.merge.average import merge_fragment
from anabranch.merge.codecs import encode
from anabranch.model import layout_for
from anabranch.orchestrator.checkpoint import Checkpoints, take_snapshot
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.core.view import phase, view
from anabranch.orchestrator.scribe import Scribe
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.vault import Vault, Version
from anabranch.queue import messages as msg
from anabranch.queue.blobs import RedisBlobs, make_claim
from anabranch.queue.keys import Keys
from anabranch.queue.records import RunRecord
from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.member.adoption import adoption_of
from anabranch.workers.member.synthetic import NumpyStore, SyntheticOptions
from tests.harness import bench as real_bench
from tests.orchestrator.bench import Bench, only, told
from tests.wait import wait_until

BASE: dict[str, Any] = {
    "rounds": {"fragments": 2, "inner_steps": 4},
    "task": {"name": "synthetic", "options": {"tensors": 4, "size": 8}},
    "workers": {"codec": "fp32"},
}
SHAPES = [("embed.weight", (4, 4)), ("a", (4, 4)), ("b", (8,)), ("c", (4, 4))]

Observe = Callable[[RunSpec], Any]


def spec_with(key: str, value: Any, also: dict[str, Any]) -> RunSpec:
    data: dict[str, Any] = {name: dict(section) for name, section in BASE.items()}
    for name, given in {**also, key: value}.items():
        section, _, field = name.partition(".")
        if field:
            data.setdefault(section, {})[field] = given
        else:
            data[section] = given
    return parse_spec(data)


# --- the core ---------------------------------------------------------------------------------------------


def calls(spec: RunSpec) -> list[tuple[int, int]]:
    """After which of 8 steps which fragments are called for."""
    bench = Bench(spec)
    bench.worker("a")
    return [(step, call.fragment) for step in range(8) for call in told(msg.Call, bench.steps(a=1))]


def merges(spec: RunSpec) -> int:
    """Rounds merged of which one of two workers answers."""
    bench = Bench(spec)
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=4, b=4)
    bench.contribute("a")
    bench.elapse(5.0)
    return len(only(do.Merge, bench.log))


def timer(name: str) -> Observe:
    def after_s(spec: RunSpec) -> float:
        bench = Bench(spec)
        bench.worker("a")
        bench.worker("b")
        bench.state.averages.step_s = 1.0
        bench.steps(a=4, b=4)
        bench.contribute("a")
        return next(order.after_s for order in only(do.SetTimer, bench.log) if order.name == name)

    return after_s


def later(spec: RunSpec) -> int:
    bench = Bench(spec)
    bench.worker("a")
    bench.steps(a=4)
    [order] = only(do.Merge, bench.contribute("a"))
    bench.merge(order)
    return bench.state.spec.rounds.inner_steps


def admitted(spec: RunSpec) -> int:
    bench = Bench(spec)
    for name in ("a", "b", "c"):
        bench.join(name)
    return len(bench.puppets)


def lives_s(spec: RunSpec) -> int:
    """How long a silent worker is live."""
    bench = Bench(spec)
    bench.worker("a").silent = True
    for seconds in range(60):
        if (member := bench.state.members.get(1)) is None or not member.live:
            return seconds
        bench.elapse(1.0)
    return 60


def is_stuck(spec: RunSpec) -> str:
    bench = Bench(spec)
    bench.worker("a", step_s=1.0)
    bench.steps(a=1)
    bench.elapse(8.0)  # it sends heartbeats and makes no step
    return phase(bench.state, bench.now)


def steps_believed(spec: RunSpec) -> int:
    bench = Bench(spec)
    bench.worker("a").train(1000)
    bench.elapse(1.0)
    return bench.state.members[1].steps


def ranges(spec: RunSpec) -> tuple[Any, ...]:
    """Ranges that one worker gets of 100 items, and whether the run stops once it has trained on all of them."""
    bench = Bench(spec)
    worker = bench.worker("a")
    request = {"incarnation": worker.incarnation, "items": 100, "fingerprint": "ab" * 16, "wanted": 64, "after": 0}
    [leases] = told(msg.Leases, bench.say("a", msg.RangeRequest.model_validate(request)))
    worker.extra = {"leased": max(lease.number for lease in leases.leases), "leases": []}
    bench.send(worker.heartbeat())
    return tuple((lease.range, lease.start, lease.stop) for lease in leases.leases), bench.state.stopped


# --- numbers and payloads ---------------------------------------------------------------------------------


class Blobs(RedisBlobs):
    """In memory; remembers how long payloads are to live."""

    def __init__(self) -> None:
        self.held: dict[str, memoryview] = {}
        self.ttls: list[float] = []

    async def put(self, owner: str, data: memoryview, codec: str, ttl_s: float) -> msg.Claim:
        claim = make_claim(owner, data.cast("B"), codec)
        self.held[claim.id] = data.cast("B")
        self.ttls.append(ttl_s)
        return claim

    async def get(self, claim: msg.Claim, limit_bytes: int) -> memoryview:
        return self.held[claim.id]


def vault_of(spec: RunSpec) -> Vault:
    return Vault(spec, Blobs(), layout_for(spec, SHAPES))


def merged(spec: RunSpec) -> list[Any]:
    """The outer gradient of two deltas at right angles, and the outer step with it, for each fragment."""
    vault = vault_of(spec)
    assert vault.layout is not None
    found = []
    for fragment in vault.layout.fragments:
        deltas = [np.zeros(fragment.size, np.float32) for _ in range(2)]
        deltas[0][::2], deltas[1][1::2] = 3.0, 1.0
        gradient = merge_fragment(fragment, deltas, [1.0, 1.0], vault._rules)
        assert gradient is not None
        ones = np.ones(fragment.size, np.float32)
        found.append([part.tolist() for part in vault._outer.step(ones, ones, gradient)])
    return found


def carried(spec: RunSpec) -> list[float]:
    """Live parameters after a version was adopted over local work."""
    layout = SyntheticOptions().layout(spec)
    store = NumpyStore(layout)
    store.theta[0] = store.base[0] + 1.0
    theta = store.base[0] * 2
    if not adoption_of(spec.workers).carry(store, 0, theta, None, 0.5):
        store.load(0, theta)
    return [float(value) for value in store.theta[0][:4]]


def fetched(spec: RunSpec) -> str:
    """What becomes of a contribution in fp32 with a norm of 10."""

    async def fetch() -> str:
        vault = vault_of(spec)
        assert vault.layout is not None
        fragment = vault.layout.fragments[0]
        values = np.full(fragment.size, 10.0 / np.sqrt(fragment.size), np.float32)
        claim = await vault.blobs.put("a", encode("fp32", values), "fp32", 1.0)
        one = Bench(sizes=(fragment.size, fragment.size))
        one.worker("a")
        made = one.offer("a")
        try:
            await vault.fetch(replace(made, message=made.message.model_copy(update={"claim": claim})))
        except PayloadError as error:
            return str(error)
        return "taken"

    return asyncio.run(fetch())


def uploaded(spec: RunSpec) -> list[float]:
    vault = vault_of(spec)
    asyncio.run(vault.upload(np.zeros(4, np.float32), None))
    return cast(Blobs, vault.blobs).ttls


def stored(spec: RunSpec) -> list[Any]:
    """Writes of a commit: lengths that streams are trimmed to, and when the superseded version runs out."""
    bench = Bench(spec)
    vault = vault_of(spec)
    zeros = np.zeros(4, np.float32)
    version = Version(zeros, None, make_claim("_", zeros.data, "fp32", "ab"), None)
    vault.versions, vault.prepared = [version, version], {1: version}
    bench.worker("a")
    bench.steps(a=4)
    [order] = only(do.Merge, bench.contribute("a"))
    instructions = bench.commit(order)
    scribe = Scribe(Keys("run"), Core(bench.state), vault, Tape(None), RunRecord(spec, None))
    transaction, _ = scribe.describe(Batch(1, tuple(instructions), True), 0.0)
    return [argument for argument in transaction.script_arguments if isinstance(argument, int)]


def kept(spec: RunSpec, folder: Path) -> int:
    """Checkpoints that are left of four."""

    async def write() -> int:
        checkpoints = Checkpoints(folder, spec.checkpoint.keep)
        vault = vault_of(spec)
        assert vault.layout is not None
        for tokens in range(4):
            state = State(spec, "x", timeline=f"{tokens}-x")
            zeros = [np.zeros(fragment.size, np.float32) for fragment in vault.layout.fragments]
            versions = [Version(z, None, make_claim("_", z.data, "fp32", "ab"), None) for z in zeros]
            await checkpoints.write(take_snapshot(state, vault.layout, versions))
        return len(checkpoints._place.names())

    return asyncio.run(write())


def layout_hash(spec: RunSpec) -> str:
    return SyntheticOptions.parse(spec.task.options).layout(spec).hash


# --- the list ---------------------------------------------------------------------------------------------

ALONE: dict[str, Any] = {}
ACTS: dict[str, tuple[Observe, Any, Any, dict[str, Any]]] = {
    "name": (lambda spec: view(State(spec, "x"), 0.0)["run"], "a", "b", ALONE),
    "seed": (ranges, 0, 1, {"data.range_items": 10}),
    "rounds.fragments": (lambda spec: len(layout_for(spec, SHAPES).fragments), 1, 4, ALONE),
    "rounds.inner_steps": (calls, 2, 8, ALONE),
    "rounds.later_inner_steps": (later, None, 16, {"rounds.later_from_tokens": 1}),
    "rounds.later_from_tokens": (later, 1, 10**6, {"rounds.later_inner_steps": 16}),
    "rounds.in_flight": (calls, 1, 2, ALONE),
    "rounds.quorum": (merges, 1, 2, ALONE),
    "rounds.grace_factor": (timer("grace"), 0.25, 0.75, {"rounds.grace_cap_s": 60.0}),
    "rounds.grace_cap_s": (timer("grace"), None, 0.5, ALONE),
    "rounds.deadline_intervals": (timer("round deadline"), 2.0, 4.0, {"rounds.deadline_min_s": 0.1}),
    "rounds.deadline_min_s": (timer("round deadline"), 10.0, 20.0, ALONE),
    "merge.matrix": (merged, "radial", "average", ALONE),
    "merge.embedding": (merged, "radial", "average", ALONE),
    "merge.embedding_tensors": (merged, ["*embed*"], ["c"], {"merge.embedding": "average"}),
    "merge.buffers": (lambda spec: spec.merge.carries("1.running_mean"), None, [], ALONE),
    "merge.outer_lr": (merged, 0.5, 1.0, ALONE),
    "merge.outer_momentum": (merged, 0.0, 0.5, ALONE),
    "workers.adoption": (carried, "overwrite", "rebase", ALONE),
    "workers.blend_alpha": (carried, 0.25, 0.75, {"workers.adoption": "blend"}),
    "workers.rebase_above": (carried, 0.1, 0.6, {"workers.adoption": "rebase"}),
    "workers.codec": (fetched, "fp32", "bf16", ALONE),
    "workers.heartbeat_s": (lives_s, 1.0, 4.0, ALONE),
    "workers.stuck_after_steps": (is_stuck, 2.0, 20.0, ALONE),
    "workers.min_step_s": (steps_believed, 0.001, 0.1, ALONE),
    "limits.max_members": (admitted, 1, 2, ALONE),
    "limits.max_delta_norm": (fetched, None, 1.0, ALONE),
    "limits.blob_ttl_s": (uploaded, 5.0, 50.0, ALONE),
    "limits.superseded_ttl_s": (stored, 5.0, 50.0, ALONE),
    "limits.broadcast_length": (stored, 100, 200, ALONE),
    "limits.tape_length": (stored, 100, 200, ALONE),
    "data.range_items": (ranges, 10, 20, ALONE),
    "data.epochs": (ranges, 1, 2, {"data.range_items": 50}),
    "task.options": (
        lambda spec: SyntheticOptions.parse(spec.task.options).layout(spec).hash,
        {},
        {"size": 3},
        ALONE,
    ),
}
#: Seen in a run of its own, below, or in the tests named.
ELSEWHERE = {"leader.lease_s", "checkpoint.every_s", "checkpoint.keep", "task.name"}


def settings(model: type[BaseModel] = RunSpec, path: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= settings(kind, f"{path}{name}.")
        else:
            found.add(f"{path}{name}")
    return found


def test_every_setting_is_here() -> None:
    assert settings() == ACTS.keys() | ELSEWHERE


@pytest.mark.parametrize("key", ACTS)
def test_it_acts(key: str) -> None:
    observe, one, other, also = ACTS[key]
    assert observe(spec_with(key, one, also)) == observe(spec_with(key, one, also)), "nothing else makes a difference"
    assert observe(spec_with(key, one, also)) != observe(spec_with(key, other, also))


def test_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    found = [kept(spec_with("checkpoint.keep", n, {}), tmp_path / str(n)) for n in (1, 3)]
    assert found == [1, 3]


async def test_a_lease_is_as_long_as_it_says(run_url: str, run_name: str) -> None:
    for lease_s in (30.0, 300.0):
        spec = spec_with("leader.lease_s", lease_s, {"name": f"{run_name}-{lease_s:.0f}"})
        async with real_bench(run_url.replace(run_name, spec.name), spec) as run:
            left_ms = await run.redis.pttl(run.keys.lease)
            assert lease_s / 2 < left_ms / 1000 <= lease_s


async def test_checkpoints_are_written_every_so_often(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = spec_with("checkpoint.every_s", 0.2, {"name": run_name})
    async with real_bench(run_url, spec, directory=tmp_path) as run:
        run.add("w")
        await run.reach(1)
        await wait_until(lambda: len(run.tape("checkpoint")) >= 2, "two were written without being asked for")
