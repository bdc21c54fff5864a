"""A process that imports the synchronizer once and forks one life of it per line on its stdin.

Importing takes most of a second, forking some milliseconds: hundreds of lives that end by a real SIGKILL become
affordable. The zygote has one thread and no event loop, so a fork of it is as good as a fresh process. Its lines:

    in:  {"life": 3, "url": ..., "spec": ..., "directory": ..., "checkpoints": ... or null,
          "fault": "after fetch:2:kill" or null}
    out: {"life": 3, "pid": 4711}, later {"life": 3, "status": -9}; first of all {"life": 0, "pid": its own}

Nothing outlives it: its children are killed by the kernel when it dies (Linux) and by itself when its stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from anabranch import faults
from anabranch.loops import run_async
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.queue._watchdog import _die_with_parent
from anabranch.queue.url import RunUrl
from anabranch.spec import parse_spec

LOG_NAME = "lives.log"


def main() -> None:
    """Serve until stdin ends."""
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lives: dict[int, int] = {}  # pid: life
    pending = b""
    _say(life=0, pid=os.getpid())
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _bury(lives)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _fork(json.loads(line), lives)
    for pid in lives:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _say(**words: int) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _bury(lives: dict[int, int]) -> None:
    """Report every child that has ended; several may share one signal."""
    for pid in list(lives):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            _, status = os.waitpid(pid, 0)
            _say(life=lives.pop(pid), status=os.waitstatus_to_exitcode(status))


def _fork(order: dict[str, Any], lives: dict[int, int]) -> None:
    zygote = os.getpid()
    if pid := os.fork():
        lives[pid] = order["life"]
        _say(life=order["life"], pid=pid)
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with_parent(zygote)
        _live(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _live(order: dict[str, Any]) -> None:
    """One life, in the child: lead the run until the fault strikes."""
    directory = Path(order["directory"])
    log = os.open(directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.INFO, format=f"life {order['life']} %(asctime)s %(message)s")
    if order["fault"] is not None:
        faults.arm_from_environment({faults.VARIABLE: order["fault"]})
    url, spec = RunUrl.parse(order["url"]), parse_spec(order["spec"])
    run_async(Synchronizer(url, spec, directory=directory, checkpoints=order["checkpoints"]).run())


if __name__ == "__main__":
    main()
