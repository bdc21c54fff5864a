"""A scripted worker as a process of its own: `python -m tests.promises.member URL NAME LAST`.

Says what its wall clock shows, follows the script up to version LAST, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from anabranch.loops import run_async
from anabranch.queue.url import RunUrl
from tests.promises.lives import Script, scripted_worker


async def main(url: str, name: str, last: str) -> None:
    """Until stdin ends."""
    sys.stdout.write(json.dumps({"clock": time.time(), "monotonic": time.monotonic()}) + "\n")
    sys.stdout.flush()
    worker = asyncio.create_task(scripted_worker(RunUrl.parse(url), name, Script(last=int(last))).run())
    ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({worker, ending}, return_when=asyncio.FIRST_COMPLETED)
    if worker.done():
        worker.result()
    worker.cancel()
    await asyncio.gather(worker, ending, return_exceptions=True)


if __name__ == "__main__":
    run_async(main(*sys.argv[1:]))
