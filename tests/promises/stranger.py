"""A worker with weights of its own as a process: `python -m tests.promises.stranger URL NAME SEED`."""

from __future__ import annotations

import logging
import sys

from anabranch.loops import run_async
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticWorker


def main(url: str, name: str, seed: str) -> None:
    """Until it is killed."""
    logging.basicConfig(level=logging.INFO)
    worker = SyntheticWorker(
        RunUrl.parse(url), name, Pace(step_s=0.005), store=lambda layout: NumpyStore(layout, seed=int(seed))
    )
    run_async(worker.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
