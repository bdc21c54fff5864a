"""Events per second through the decision core: heartbeats, contributions, merges, timers of a large fleet.

    python -m benchmarks.core_speed [--members 512] [--seconds 48] [--out docs/results/core_speed.json]

A fleet is simulated once in virtual time and what its core was given is kept; then that is given to fresh cores, as
often as asked. `read` is the way from the bytes in a stream to an event, `core` from there to the batches that are to
be stored, `record` what describing the state costs. Absolute figures belong to the machine: compare those of one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from anabranch.orchestrator.core.events import Event, Fetched, Heard, InitReady, Merged, Started
from anabranch.orchestrator.core.instructions import Fetch, Instruction, Merge
from anabranch.orchestrator.core.port import Core
from anabranch.orchestrator.core.record import core_record
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.ingest import read_entry
from anabranch.queue import messages
from anabranch.queue.streams import Entry
from anabranch.simulate.engine import Engine
from anabranch.spec import RunSpec, parse_spec
from benchmarks.machine import cores, processor

FRAGMENTS, INNER_STEPS, STEP_S, TOKENS = 8, 24, 1.0, 64
DIGEST = bytes(32)
RUN = "bench"


class Recorded(Core):
    """A core that keeps what it was given."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.script: list[tuple[float, Event]] = []

    def step(self, event: Event, now: float) -> None:
        self.script.append((now, event))
        super().step(event, now)


def spec_for(members: int) -> RunSpec:
    return parse_spec(
        {
            "name": RUN,
            "rounds": {"fragments": FRAGMENTS, "inner_steps": INNER_STEPS, "quorum": max(1, members // 2)},
            "limits": {"max_members": members},
        }
    )


class Fleet:
    """Members who make one step per second, report it, and answer every call at once."""

    def __init__(self, members: int) -> None:
        self.core = Recorded(State(spec_for(members), "bench"))
        self.engine = Engine(self.core.state, self, lambda state: self.core)
        self.held = [[0] * FRAGMENTS for _ in range(members)]
        self.discarded = [[0] * FRAGMENTS for _ in range(members)]
        self.adopted = [0] * FRAGMENTS
        self.calls: list[messages.Call] = []
        self.entries = 0
        self.engine.feed(Started())
        self.engine.feed(InitReady(0, "layout", (1000,) * FRAGMENTS, (DIGEST,) * FRAGMENTS))
        for index in range(members):
            register = messages.Register(nonce=index.to_bytes(16, "big"), name=f"w{index}")
            self._say(index, register)
            self._report(index, 0)

    def run(self, seconds: int) -> list[tuple[float, Event]]:
        for second in range(1, seconds + 1):
            self.engine.elapse(STEP_S)
            for index, held in enumerate(self.held):
                self.held[index] = [tokens + TOKENS for tokens in held]
                self._report(index, second)
            calls, self.calls = self.calls, []
            for call in calls:
                for incarnation in call.called:
                    self._contribute(incarnation - 1, call)
        return self.core.script

    # --- what is around the core --------------------------------------------------------------------------

    def begin(self, work: Instruction) -> None:
        match work:
            case Fetch(offer=offer):
                self.engine.later(0.0, Fetched(offer.message.incarnation, offer.sender, offer.entry))
            case Merge():
                self.engine.later(0.0, Merged(work.round, _claim("_")))

    def hear(self, number: int, message: messages.Message, reason: str) -> None:
        match message:
            case messages.Call():
                self.calls.append(message)
            case messages.Merged(fragment=fragment):
                applied = {v.incarnation: v.tokens for v in message.verdicts if v.applied}
                for index, held in enumerate(self.held):
                    self.discarded[index][fragment] += held[fragment] - applied.get(index + 1, 0)
                    held[fragment] = 0
                self.adopted[fragment] = message.version

    def store(self, instruction: Instruction) -> None:
        pass

    # --- members ------------------------------------------------------------------------------------------

    def _say(self, index: int, message: messages.Message, *, consumed: bool = True) -> None:
        self.entries += 1
        entry = b"%d-0" % self.entries if consumed else b""
        self.engine.feed(Heard(f"w{index}", entry, message, messages.encode(message, RUN)))

    def _report(self, index: int, steps: int) -> None:
        said = messages.Progress(
            incarnation=index + 1, steps=steps, step_s=STEP_S, adopted=list(self.adopted),
            held=list(self.held[index]), processed=steps * TOKENS, discarded=list(self.discarded[index]),
            pending=list(self.held[index]), read=self.engine.broadcast, timeline=self.engine.state.timeline,
        )  # fmt: skip
        self._say(index, said, consumed=False)

    def _contribute(self, index: int, call: messages.Call) -> None:
        tokens = self.held[index][call.fragment]
        figures = messages.Figures(processed=tokens, discarded=0, pending=tokens)
        said = messages.Contribution(
            incarnation=index + 1, fragment=call.fragment, timeline=call.timeline, base=call.base,
            base_digest=DIGEST, round=call.round, tokens=tokens, steps=tokens // TOKENS, figures=figures,
            claim=_claim(f"w{index}"),
        )  # fmt: skip
        self._say(index, said)


def _claim(owner: str) -> messages.Claim:
    return messages.Claim(owner=owner, id="ab", bytes=1, chunk_bytes=1, codec="bf16", hashes=[], digest=DIGEST)


def read_again(script: list[tuple[float, Event]]) -> float:
    """Seconds to make events of the bytes."""
    entries = [
        (Entry("s", event.entry, {b"m": event.data}), event.sender, "inbox" if event.entry else "progress stream")
        for _, event in script
        if isinstance(event, Heard)
    ]
    started = time.perf_counter()
    for entry, sender, stream in entries:
        read_entry(entry, stream, sender, RUN)
    return time.perf_counter() - started


def decide_again(script: list[tuple[float, Event]], spec: RunSpec) -> tuple[float, float]:
    """Seconds inside a fresh core, and seconds for the record of each batch that is to be stored."""
    core, number, record_s = Core(State(spec, "bench")), 0, 0.0
    started = time.perf_counter()
    for now, event in script:
        core.step(event, now)
        if (batch := core.take()) is not None:
            number += len(batch.instructions)
            if batch.writes:
                begun = time.perf_counter()
                core_record(core.state, now)
                record_s += time.perf_counter() - begun
            core.stored(batch, number, now)
    return time.perf_counter() - started - record_s, record_s


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=512)
    parser.add_argument("--seconds", type=int, default=48, help="of virtual time: steps of each member")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many is reported")
    parser.add_argument("--out", type=Path, default=Path("docs/results/core_speed.json"))
    args = parser.parse_args()
    fleet = Fleet(args.members)
    script = fleet.run(args.seconds)
    runs = [(read_again(script), *decide_again(script, spec_for(args.members))) for _ in range(args.repeats)]
    best = {name: min(run[i] for run in runs) for i, name in enumerate(("read", "core", "record"))}
    result: dict[str, Any] = {
        "benchmark": "core_speed",
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "members": args.members,
        "events": len(script),
        "kinds": dict(Counter(_kind(event) for _, event in script)),
        "rounds": dict(fleet.engine.state.counts),
        "repeats": args.repeats,
        "seconds": {name: round(seconds, 4) for name, seconds in best.items()},
        "events_per_s": {name: round(len(script) / seconds) for name, seconds in best.items()},
    }
    _report(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


def _kind(event: Event) -> str:
    return event.message.type if isinstance(event, Heard) else type(event).__name__


def _report(result: dict[str, Any]) -> None:
    write = sys.stdout.write
    write(f"{result['processor']}, {result['cores']} cores; {result['members']} members, {result['events']} events\n")
    write(", ".join(f"{n} {kind}" for kind, n in result["kinds"].items()) + "\n\n")
    for name, rate in result["events_per_s"].items():
        write(f"{name:6} {rate:9,} events/s\n")


if __name__ == "__main__":
    main()
