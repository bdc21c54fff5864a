"""What the status page, `/api/status` and `anabranch status` show: one pure function of the core's state.

Page, command line and log cannot disagree, because all of them show what the core itself decides from.
"""

from __future__ import annotations

from typing import Any

from anabranch.orchestrator.core import lately, policies
from anabranch.orchestrator.core.ledger import weighted
from anabranch.orchestrator.core.state import Departed, Member, Round, State
from anabranch.queue.messages import Progress

_PHASES = {"overtime": "grace", "short": "collecting"}  # of a round, in fewer words

SAID_AFTER_S = 3.0  # what is waited for is said after this long
LEDGER = ("processed", "applied", "rejected", "discarded", "lost", "pending")
CLOSED = ("all arrived", "grace expired", "abandoned")


def view(state: State, now: float) -> dict[str, Any]:
    """A JSON-able picture of the run. Durations in seconds, tokens parameter-weighted."""
    longest_s = policies.longest_step_s(state, now)
    members = sorted(state.members.values(), key=lambda m: (m.role, m.name, m.incarnation))
    return {
        "run": state.spec.name,
        "phase": phase(state, now),
        "timeline": state.timeline,
        "tokens": state.tokens,
        "parameters": sum(state.sizes),
        "settings": _settings(state),
        "rounds": {name: state.counts.get(name, 0) for name in CLOSED},
        "refused": {k: v for k, v in sorted(state.counts.items()) if k not in CLOSED},
        "open": [_round(state, r, now) for _, r in sorted(state.rounds.items())],
        "fragments": [{"version": f.version, "in_hand": len(f.in_hand), "size": f.size} for f in state.fragments],
        "averages": _averages(state),
        "members": [_member(state, m, now, longest_s) for m in members],
        "departed": [_departed(d) for d in state.departed],
        "live": sum(m.live and m.is_worker for m in members),
        "participating": len({number for f in state.fragments for number in f.in_hand} | _recent(state)),
        "heldout": [list(point) for point in state.heldout],
        "data": _data(state),
        "goodput": goodput(state),
        "bytes_sent": sum(m.report.bytes_sent for m in members if m.report is not None)
        + sum(d.bytes_sent for d in state.departed),
    }


def phase(state: State, now: float) -> str:
    """One line: what the run is doing, and if it does not move, why."""
    if state.stopped:
        return "stopped"
    if state.orphaned:
        return "the server lost this run: continue from a checkpoint"
    if not state.born:
        asked = state.members.get(state.asked_init)
        return f"waiting for version 0 from {asked.name}" if asked is not None else "waiting for a first worker"
    if state.paused:
        return "paused"
    if state.full:
        return "the server is nearly full (maxmemory): no round opens"
    workers = [m for m in state.members.values() if m.live and m.is_worker]
    if not workers:
        return "no live worker"
    advancing = sum(policies.advances(m, state, now) for m in workers)
    if not advancing and all(m.idle for m in workers):
        return "no data left: data.epochs is reached"
    if not advancing:
        return "no worker makes steps"
    quorum = state.spec.rounds.quorum
    if quorum != "all" and advancing < quorum:  # no round can succeed, whether one is open at this moment or not
        return f"quorum {advancing}/{quorum}"
    if state.due_at is not None and now - state.due_at > SAID_AFTER_S:
        return _waits_to_open(state, now)
    return "training"


def _waits_to_open(state: State, now: float) -> str:
    """Why a round that is due does not open."""
    longest_s, wanted = policies.longest_step_s(state, now), policies.wanted(state, now)
    able = max(len(policies.able_for(fragment, state, now)) for fragment in state.fragments)
    workers = [m for m in state.members.values() if m.live and m.is_worker]
    why = {m.name: policies.condition(m, state, now, longest_s) for m in workers}
    others = ", ".join(f"{name}: {condition}" for name, condition in sorted(why.items()) if condition != "live")
    return f"quorum {able}/{wanted}" + (f" ({others})" if others else ": the others have yet to adopt")


def quorum_line(state: State, round_: Round) -> str | None:
    """`quorum 1/2` while a round is below its quorum, else None."""
    arrived, quorum = len(state.fragments[round_.fragment].in_hand), policies.quorum_of(round_, state)
    return f"quorum {arrived}/{quorum}" if arrived < quorum else None


def goodput(state: State) -> float | None:
    """Share of workers' time spent in training steps, duty-cycle rest not counted against it."""
    reports = [m.report for m in state.members.values() if m.is_worker and m.report is not None]
    everyone: list[Progress | Departed] = [*reports, *(d for d in state.departed if d.role == "worker")]
    busy = sum(m.life_s - m.rest_s for m in everyone)
    return min(1.0, sum(m.train_s for m in everyone) / busy) if busy > 0 else None


def _recent(state: State) -> set[int]:
    """Who took part in one of the last P rounds."""
    newest = max((m.last_round for m in state.members.values()), default=0)
    horizon = newest - len(state.fragments)
    return {m.incarnation for m in state.members.values() if m.live and m.last_round > max(0, horizon)}


def _settings(state: State) -> dict[str, Any]:
    spec = state.spec
    rounds = state.pacing.model_dump(
        include={"quorum", "inner_steps", "fragments", "in_flight", "grace_factor", "grace_cap_s"}
    )
    workers = spec.workers.model_dump(include={"heartbeat_s", "codec", "adoption"})
    merge = spec.merge.model_dump(include={"outer_lr", "outer_momentum"})
    return {**rounds, **workers, **merge, "task": spec.task.name}


def _averages(state: State) -> dict[str, Any]:
    return {**vars(state.averages), "slack_s": state.averages.slack_s(state.pacing)}


def _round(state: State, round_: Round, now: float) -> dict[str, Any]:
    fragment = state.fragments[round_.fragment]
    age = now - round_.opened_at
    grace_left = None
    if round_.stage in ("grace", "overtime") and round_.quorum_at is not None and round_.grace_s is not None:
        grace_left = max(0.0, round_.quorum_at + round_.grace_s - now)
    return {
        "round": round_.number,
        "fragment": round_.fragment,
        "base": round_.base,
        "age_s": age,
        "called": [state.members[i].name for i in sorted(round_.called) if i in state.members],
        "arrived": [state.members[i].name for i in sorted(fragment.in_hand) if i in state.members],
        "missing": [m.name for m in policies.missing(round_, state)],
        "quorum": policies.quorum_of(round_, state),
        "phase": _PHASES.get(round_.stage, round_.stage),
        "waits_for": quorum_line(state, round_),
        "grace_s": round_.grace_s,
        "grace_left_s": grace_left,
        "deadline_left_s": max(0.0, round_.deadline_s - age),
    }


def _member(state: State, member: Member, now: float, longest_s: float) -> dict[str, Any]:
    sizes = state.sizes
    said = member.report
    behind = [f.version - v for f, v in zip(state.fragments, member.adopted, strict=False)]
    return {
        "incarnation": member.incarnation,
        "name": member.name,
        "label": member.register.label,
        "role": member.role,
        "device": member.register.device,
        "condition": policies.condition(member, state, now, longest_s),
        "seen_s": now - member.seen_at,
        "steps": member.steps,
        "step_s": member.step_s,
        "loss": member.loss,
        "lately": lately.shares(member),
        "complaint": lately.complaint(member, state.spec.workers.adoption),
        "heldout_loss": said.heldout_loss if said is not None and not member.is_worker else None,
        "last_round": member.last_round,
        "behind": max(behind, default=0),
        "processed": member.processed,
        **member.account.weighted(sizes),
        "discarded": weighted(member.discarded, sizes),
        "pending": weighted(member.pending, sizes),
        "unexplained": weighted([abs(member.imbalances.get(f.index, 0)) for f in state.fragments], sizes),
        "bytes_sent": said.bytes_sent if said is not None else 0,
        "memory_bytes": said.memory_bytes if said is not None else 0,
        "leases": len(member.leases),
    }


def _data(state: State) -> dict[str, Any] | None:
    """The data queue, in items; None as long as nobody asked for a range."""
    if (data := state.data) is None:
        return None
    leased = [lease for member in state.members.values() for lease in member.leases.values()]
    return {
        "epoch": data.epoch + 1,
        "epochs": state.spec.data.epochs,
        "items": data.items,
        "ranges": data.ranges,
        "handed_out": data.next,
        "leased": len(leased),
        "waiting": len(data.returned),
        "done": data.done,
        "redone_items": data.redone,
        "unfinished": {str(epoch + 1): left for epoch, left in sorted(data.left.items())},
    }


def _departed(departed: Departed) -> dict[str, Any]:
    booked = departed.applied + departed.rejected + departed.discarded + departed.lost
    extra = {"condition": "left" if departed.left else "gone", "pending": 0.0}
    return {**vars(departed), **extra, "unexplained": abs(departed.processed - booked)}


def ledger_rows(picture: dict[str, Any]) -> list[dict[str, Any]]:
    """Per worker name, all its incarnations added up: the table people read.

    A row of a live worker adds up once it has read its last outcome; `unexplained` is what is missing then.
    """
    rows: dict[str, dict[str, Any]] = {}
    columns = (*LEDGER, "unexplained")
    for item in [*picture["members"], *picture["departed"]]:
        if item["role"] == "worker":
            row = rows.setdefault(item["name"], {"name": item["name"], **dict.fromkeys(columns, 0.0)})
            for column in columns:
                row[column] += item.get(column, 0.0)
    return [rows[name] for name in sorted(rows)]
