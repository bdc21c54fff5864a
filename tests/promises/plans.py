"""What a storm is made of: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace
from tests.harness import make_spec

LEASE_S = 0.4
HEARTBEAT_S = 0.4
PACES = {"ada": Pace(0.004, 64), "bob": Pace(0.007, 65), "cyd": Pace(0.012, 66), "dan": Pace(0.02, 67)}

WEIGHTS: dict[str, float] = {
    "kill leader": 3,
    "kill at a point": 4,
    "kill everybody": 1,
    "stall leader": 2,
    "stall leader, kill server": 2,
    "stall leader, empty server": 1,
    "kill server": 2,
    "kill server, lose the end": 4,
    "empty server": 2,
    "empty server, kill leader": 1,
    "older copy": 2,
    "cut connections": 2,
    "forget scripts": 1,
    "lose payloads": 2,
    "worker vanishes": 2,
    "worker leaves": 2,
    "trim broadcast": 2,
}


@dataclass(frozen=True)
class Plan:
    """What a storm is made of. `checkpoint_s`: between two checkpoints; `leaders`: processes, one of them leads."""

    seed: int
    faults: int
    leaders: int
    quorum: int
    checkpoint_s: float
    workers: tuple[str, ...]
    impatience: float  # chance that the next fault strikes before the run has recovered
    weights: dict[str, float]

    @classmethod
    def drawn(cls, seed: int, faults: int) -> Plan:
        generator = random.Random(f"storm {seed}")
        return cls(
            seed=seed,
            faults=faults,
            leaders=generator.choice((1, 2, 2)),
            quorum=generator.choice((1, 1, 2)),
            checkpoint_s=generator.choice((0.3, 0.3, 1.5)),
            workers=tuple(PACES)[: generator.choice((3, 4))],
            impatience=generator.choice((0.0, 0.3, 0.6)),
            weights={name: weight * generator.choice((0.5, 1, 2)) for name, weight in WEIGHTS.items()},
        )

    def spec(self, run: str) -> RunSpec:
        return make_spec(
            run,
            rounds={"fragments": 3, "inner_steps": 9, "quorum": self.quorum, "deadline_min_s": 2.0},
            workers={"heartbeat_s": HEARTBEAT_S},
            leader={"lease_s": LEASE_S},
            checkpoint={"every_s": self.checkpoint_s, "keep": 3},
            limits={"superseded_ttl_s": 5.0},
        )
