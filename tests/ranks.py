"""Processes of one torch.distributed group (gloo), that play scenes of tests: `python -m tests.ranks FILE RANK SIZE`.

A scene is a function below; its result, or its error's name and text, comes back as one line of JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import anabranch
from anabranch.faults import arm_from_environment
from anabranch.workers.member.feed import Feed
from anabranch.workers.muon import Muon
from anabranch.workers.trains import Trains

Result = dict[str, Any]


# --- in the test's process ------------------------------------------------------------------------------------


PATIENCE_S = 90.0  # for a scene, or for both to have started: shorter than any test's own limit

READY: Result = {"ready": True}


@dataclass
class Ranks:
    """The processes; `play` a scene on all of them at once."""

    processes: list[subprocess.Popen[str]]
    _said: list[queue.SimpleQueue[Result | None]] = field(default_factory=list)
    _heard: list[int] = field(default_factory=list)
    _begun: int = 0

    def __post_init__(self) -> None:
        """Threads of their own read what they say: one that says nothing holds up no executor, and so no test."""
        for process in self.processes:
            said: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
            self._said.append(said)
            self._heard.append(0)
            threading.Thread(target=_read, args=(process, said), daemon=True).start()

    async def play(self, scene: str, url: str, **options: Any) -> list[Result]:
        """What each rank made of the scene."""
        self.begin(scene, url, **options)
        return await asyncio.gather(*(asyncio.to_thread(self.result, rank) for rank in range(len(self.processes))))

    @property
    def resting(self) -> bool:
        """Whether every scene was heard to its end, on all ranks: else the next test would hear the last one's."""
        return all(process.poll() is None for process in self.processes) and set(self._heard) == {self._begun}

    def begin(self, scene: str, url: str, **options: Any) -> None:
        self._begun += 1
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([scene, url, options]) + "\n")
            process.stdin.flush()

    def result(self, rank: int) -> Result:
        """The next one of this rank."""
        try:
            found = self._said[rank].get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"rank {rank} said nothing for {PATIENCE_S:g} s") from None
        assert found is not None, f"rank {rank} ended without a result"
        self._heard[rank] += found != READY
        return found


def _read(process: subprocess.Popen[str], said: queue.SimpleQueue[Result | None]) -> None:
    """What a rank says, and None at its end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith("{"):
                said.put(json.loads(line))
    said.put(None)


@contextmanager
def started(folder: Path, size: int = 2) -> Iterator[Ranks]:
    """`size` ranks that wait for scenes; ended with the block."""
    command = [sys.executable, "-m", "tests.ranks", str(folder / "rendezvous")]
    processes = [
        subprocess.Popen([*command, str(rank), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        ranks = Ranks(processes)
        for rank in range(size):  # torch takes its time, which is no scene's
            assert ranks.result(rank) == READY
        yield ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


# --- in the ranks' processes ----------------------------------------------------------------------------------


def tiny(seed: int, hidden: int = 8, *, norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    between = torch.nn.BatchNorm1d(hidden) if norm else torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Linear(4, hidden), between, torch.nn.Linear(hidden, 1))


def digest(model: torch.nn.Module) -> str:
    """Of all parameters' bits."""
    found = hashlib.sha256()
    for name, parameter in model.state_dict().items():
        found.update(name.encode() + parameter.numpy().tobytes())
    return found.hexdigest()


class Numbers:
    """A shared dataset whose items are their own numbers."""

    fingerprint = "0123456789abcdef"

    def __init__(self, items: int) -> None:
        self._items = items

    def __len__(self) -> int:
        return self._items

    def batch(self, indices: Any, epoch: int) -> list[int]:
        return [int(index) for index in indices]


def _step(session: Trains, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(int(session.tokens) * 2 + rank)
    inputs = torch.randn(8, 4, generator=generator)
    loss: Any = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    session.step(tokens=3 + rank, loss=float(1 + rank))


def moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Sums of the averages of gradients that AdamW and Muon keep, by parameter."""
    kept = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return [float(state.get("exp_avg", state.get("momentum_buffer")).sum()) for state in kept]


def train(
    url: str,
    rank: int,
    *,
    tokens: int,
    name: str = "island",
    duty: float = 1.0,
    warm_start: bool = False,
    norm: bool = False,
    muon: bool = False,
) -> Result:
    """DDP, until the run has merged so many tokens."""
    model = DistributedDataParallel(tiny(rank, norm=norm))
    optimizer = Muon.of(model, lr=1e-2) if muon else torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = digest(model.module)
    steps = 0
    with anabranch.join(url, model, optimizer, name=name, duty=duty, warm_start=warm_start) as session:
        begun, averages, warmth = digest(model.module), moments(model, optimizer), session.warmth
        while session.tokens < tokens and not session.stopped:
            _step(session, model, optimizer, rank)
            steps += 1
        return {
            "before": before, "begun": begun, "after": digest(model.module), "steps": steps, "name": session.name,
            "tokens": session.tokens, "kind": type(session).__name__, "stopped": session.stopped,
            "warmth": session.warmth, "warmth at first": warmth, "moments at first": averages,
        }  # fmt: skip


def join(url: str, rank: int, *, hidden: list[int]) -> Result:
    """Each rank with a model of its own size."""
    with anabranch.join(url, tiny(0, hidden[rank]), name="island"):
        return {}


def join_sharded(url: str, rank: int) -> Result:
    """A model whose parameters are spread over the ranks."""
    from torch.distributed.fsdp import fully_shard

    model = tiny(0)
    fully_shard(model)
    with anabranch.join(url, model, name="island"):
        return {}


def _data(count: int, *, broken: bool) -> Iterator[int]:
    yield from range(count)
    if broken:
        raise OSError("the disk is gone")


def own_batches(url: str, rank: int, *, counts: list[int], broken: int | None = None) -> Result:
    """Each rank with so many batches of its own; those of one end in an error."""
    model = tiny(0)
    with anabranch.join(url, model, name="island") as session:
        found = []
        for batch in session.batches(_data(counts[rank], broken=rank == broken)):
            session.step(1)
            found.append(batch)
        return {"batches": found, "stopped": session.stopped}


def shared_batches(url: str, rank: int, *, items: int, batch: int) -> Result:
    """One epoch of a shared dataset."""
    model = tiny(0)
    with anabranch.join(url, model, name="island") as session:
        found: list[int] = []
        for numbers in session.batches(Numbers(items), batch):
            found += numbers
            session.step(len(numbers))
        return {"items": found, "stopped": session.stopped}


def waits(url: str, rank: int, *, versions: int) -> Result:
    """Rank 0 waits for data until it has adopted so many more versions of every fragment; then one step."""
    model = tiny(0)
    ours = Feed.next
    with anabranch.join(url, model, name="island") as session:
        begun = digest(model)
        if rank == 0:
            patience, until = time.monotonic() + 20, min(session.versions()) + versions

            def late(feed: Feed, count: int, timeout_s: float) -> Any:
                if min(session.versions()) < until and time.monotonic() < patience:
                    time.sleep(timeout_s)
                    return None
                return ours(feed, count, timeout_s)

            Feed.next = late  # type: ignore[method-assign,assignment]
        try:
            next(session.batches(Numbers(40), 1))
        finally:
            Feed.next = ours  # type: ignore[method-assign]
        at_batch = digest(model)
        session.step(1)
        return {"moved": begun != at_batch, "at batch": at_batch}


def breaks(url: str, rank: int) -> Result:
    """Rank 0's background thread ends with an error, in the middle of training."""
    model = tiny(0)
    with anabranch.join(url, model, name="island") as session:
        if rank == 0:
            arm_from_environment({"ANABRANCH_FAIL_AT": "worker before upload:1:raise"})
        while True:
            session.step(4)


def miscounts(url: str, rank: int) -> Result:
    """Rank 1 says that it trained on half a token."""
    with anabranch.join(url, tiny(0), name="island") as session:
        session.step(torch.tensor(4), loss=1.0)
        session.step(4 if rank == 0 else 0.5)
    return {}


def serve(file: str, rank: int, size: int) -> None:
    """Play what is asked for on standard input."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    known = (train, join, join_sharded, own_batches, shared_batches, waits, breaks, miscounts)
    scenes = {scene.__name__: scene for scene in known}
    _say(READY)
    for line in sys.stdin:
        scene, url, options = json.loads(line)
        try:
            result = scenes[scene](url, rank, **options)
        except Exception as error:
            result = {"error": type(error).__name__, "text": str(error)}
        _say(result)


def _say(result: Result) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
