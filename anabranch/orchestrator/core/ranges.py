"""The data queue: a dataset cut into ranges, leased to whoever asks, and leased again if their worker dies.

In an epoch every range is delivered for training exactly once, or noted as redone from some position on; none is
skipped. A range is done once its worker reports it *settled* to its end: nothing of it is pending in any fragment.
What comes back is handed out before anything new; when everything is handed out, the next epoch begins at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from anabranch.orchestrator.core import operators, outcomes
from anabranch.orchestrator.core.events import Heard
from anabranch.orchestrator.core.instructions import Consume, Instruction, Note, Tell
from anabranch.orchestrator.core.state import DataQueue, LeasedRange, Member, State
from anabranch.queue.messages import Farewell, Held, Lease, Leases, RangeRequest
from anabranch.shuffle import Indices, range_order

RANGES_WANTED = 512  # per epoch, unless `data.range_items` says how long one is
LEAST_ITEMS, MOST_ITEMS = 16, 65_536  # of a range, then
MOST_HELD = 64  # leases of one worker


def asked(state: State, event: Heard, said: RangeRequest) -> Iterator[Instruction]:
    """Grant what is there. What was granted before and not heard of is said again, so a repeat does no harm."""
    yield Consume("range request read", event.sender, (event.entry,))
    member = yield from outcomes.speaker(state, said.incarnation, event.sender)
    if member is None or not member.is_worker or not state.born:
        return
    if state.data is None:
        state.data = _cut(state, said)
        epochs = state.spec.data.epochs
        yield Note(
            f"data: {said.items:,} items in {state.data.ranges:,} ranges of {state.data.range_items:,}"
            + (f", {epochs} epochs" if epochs else ""),
            "data",
            {"items": said.items, "ranges": state.data.ranges},
        )
    data = state.data
    if (data.items, data.fingerprint) != (said.items, said.fingerprint):
        reason = (
            f"the dataset has {said.items:,} items (fingerprint {said.fingerprint[:12]}), the run's has "
            f"{data.items:,} ({data.fingerprint[:12]}): every worker needs the same copy, or data of its own "
            "(--own-data)"
        )
        message = Leases(incarnation=member.incarnation, timeline=state.timeline, refused=reason)
        yield Tell(f"{member.name}: {reason}", message)
        return
    unheard = [lease for lease in member.leases.values() if lease.number > said.after]
    member.wants = max(0, min(said.wanted, MOST_HELD - len(member.leases)) - len(unheard))
    yield from _grant(state, member, unheard, answer=True)


def _cut(state: State, said: RangeRequest) -> DataQueue:
    length = state.spec.data.range_items
    if length is None:
        length = min(MOST_ITEMS, max(LEAST_ITEMS, said.items // RANGES_WANTED))
    return DataQueue(said.items, said.fingerprint, length)


def _grant(state: State, member: Member, again: list[LeasedRange], *, answer: bool) -> Iterator[Instruction]:
    """Lease what the member wants. `answer`: say something even if there is nothing."""
    assert state.data is not None
    fresh = []
    while member.wants > 0 and not state.stopped and (lease := _next(state, state.data)) is not None:
        member.leases[lease.number] = lease
        member.wants -= 1
        fresh.append(lease)
    if fresh:
        state.changed.add(member.incarnation)
        numbers = [[lease.number, lease.epoch, lease.range, lease.start] for lease in fresh]
        details = {"incarnation": member.incarnation, "leases": numbers}
        yield Note(f"{member.name}: " + ", ".join(map(_name, fresh[:8])), "leased", details)
    if not (fresh or again or answer):
        return
    exhausted = member.wants > 0
    message = Leases(
        incarnation=member.incarnation,
        timeline=state.timeline,
        leases=[to_message(lease, state.data) for lease in [*again, *fresh]],
        exhausted=exhausted,
    )
    yield Tell("no range is free" if exhausted else "asked for", message)


def _next(state: State, data: DataQueue) -> LeasedRange | None:
    if data.returned:
        epoch, range_, start = data.returned.pop(0)
    else:
        epochs = state.spec.data.epochs
        if epochs is not None and data.epoch >= epochs:
            return None
        if data.next == 0:
            data.left[data.epoch] = data.ranges
        epoch, range_, start = data.epoch, int(_order(data.ranges, state.spec.seed, data.epoch)[data.next]), 0
        data.next += 1
        if data.next == data.ranges:
            data.epoch, data.next = data.epoch + 1, 0
    data.next_lease += 1
    return LeasedRange(data.next_lease - 1, epoch, range_, start, data.length(range_), start, start)


@lru_cache(maxsize=4)
def _order(ranges: int, seed: int, epoch: int) -> Indices:
    return range_order(ranges, seed, epoch)


def to_message(lease: LeasedRange, data: DataQueue) -> Lease:
    return Lease(
        number=lease.number,
        epoch=lease.epoch,
        range=lease.range,
        first=lease.range * data.range_items,
        start=lease.start,
        stop=lease.stop,
    )


def reported(state: State, member: Member, leased: int, held: list[Held]) -> Iterator[Instruction]:
    """A heartbeat says how far the member's ranges are. One that it has taken and no longer lists is done."""
    if state.data is None:
        return
    figures = {item.number: item for item in held}
    for number, lease in list(member.leases.items()):
        if (item := figures.get(number)) is not None:
            lease.delivered = max(lease.delivered, min(item.delivered, lease.stop))
            lease.settled = max(lease.settled, min(item.settled, lease.stop))
        elif number <= leased:
            lease.settled = lease.delivered = lease.stop
        if lease.settled == lease.stop:
            del member.leases[number]
            state.changed.add(member.incarnation)
            yield from _done(state, state.data, lease.epoch)


def parted(member: Member, said: Farewell) -> None:
    """A farewell says up to where everything was sent: settled once all of it has its outcome."""
    for item in said.leases:
        if (lease := member.leases.get(item.number)) is not None:
            lease.delivered = max(lease.delivered, min(item.delivered, lease.stop))
            lease.parted = min(item.settled, lease.stop)


def give_back(state: State, member: Member, *, lost: bool) -> Iterator[Instruction]:
    """Its incarnation is over: what is not settled is leased again. `lost`: some of what it trained went with it."""
    if (data := state.data) is None:
        return
    for number, lease in sorted(member.leases.items()):
        settled = lease.settled if lost else max(lease.settled, lease.parted)
        data.redone += max(0, lease.delivered - settled)
        if lost or lease.delivered > settled:  # it may have been given more than it had time to report
            yield Note(
                f"{_name(lease)} is redone from position {settled} on: {member.name} had trained up to "
                f"{lease.delivered} or further",
                "redone",
                {"epoch": lease.epoch, "range": lease.range, "from": settled, "delivered": lease.delivered},
            )
        if settled < lease.stop:
            data.returned.append((lease.epoch, lease.range, settled))
        else:
            yield from _done(state, data, lease.epoch)
        del member.leases[number]
    data.returned.sort()


def serve_waiting(state: State) -> Iterator[Instruction]:
    """What came back goes to whoever waits for data."""
    if state.data is None:
        return
    for member in state.members.values():
        if member.live and member.wants > 0:
            yield from _grant(state, member, [], answer=False)


def _done(state: State, data: DataQueue, epoch: int) -> Iterator[Instruction]:
    data.done += 1
    data.left[epoch] -= 1
    if data.left[epoch]:
        return
    del data.left[epoch]
    yield Note(f"epoch {epoch + 1} is done: {data.items:,} items", "epoch", {"epoch": epoch})
    epochs = state.spec.data.epochs
    if epochs is not None and data.epoch >= epochs and not data.left and not state.stopped:
        yield from operators.stop(state, f"stopped: {epochs} of {epochs} epochs are done")


def _name(lease: LeasedRange) -> str:
    return f"range {lease.range} of epoch {lease.epoch + 1}" + (f" from {lease.start}" if lease.start else "")
