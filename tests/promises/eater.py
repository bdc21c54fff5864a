"""A worker that takes items of a shared dataset: `python -m tests.promises.eater URL NAME ITEMS BATCH FOLDER`.

What it is given goes into FOLDER/NAME.jsonl, one line `[epoch, [indices]]` per step, before it is trained on. The
file outlives a SIGKILL: it is written at once, without a buffer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from anabranch.loops import run_async
from anabranch.queue._watchdog import _die_with_parent
from anabranch.queue.url import RunUrl
from anabranch.shuffle import Indices
from anabranch.workers.member.synthetic import Pace, SharedItems, SyntheticWorker


def main(url: str, name: str, items: str, batch: str, folder: str) -> None:
    _die_with_parent(os.getppid())
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    log = os.open(Path(folder) / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def took(epoch: int, indices: Indices) -> None:
        os.write(log, json.dumps([epoch, [int(index) for index in indices]]).encode() + b"\n")

    data = SharedItems(int(items), int(batch), took)
    worker = SyntheticWorker(RunUrl.parse(url), name, Pace(step_s=0.01), data=data)
    run_async(worker.run(lambda: bool(asked)))


if __name__ == "__main__":
    main(*sys.argv[1:])
