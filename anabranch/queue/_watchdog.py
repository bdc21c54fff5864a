"""Run a command that dies with its owner: `python -I -S _watchdog.py -- COMMAND [ARGUMENT ...]`.

The owner holds the only write end of a pipe that is this process's stdin. When the owner is gone, even by
`kill -9`, the pipe reports end of file: the command gets SIGTERM and, after a grace period, SIGKILL. On Linux
the kernel also kills the command when this process dies first. The first line on stdout is the command's pid;
whatever follows is the command's own output. SIGTERM and SIGINT are passed on; the exit status is the
command's (a command killed by a signal makes this process die of the same signal).

Standard library only, and few imports: it starts in some 20 ms and stays small.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

KILL_AFTER_S = 3.0
PARENT_CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Linux: let the kernel kill the calling process when its parent dies. Elsewhere: nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(137)


def _become(argv: list[str], watchdog: int) -> None:
    """In the child: report the pid, then turn into the command. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        # Python ignores SIGPIPE and SIGXFSZ; ignored signals would stay ignored in the command.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        _die_with_parent(watchdog)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        # Written here rather than by the watchdog, so that it precedes all output of the command.
        os.write(1, b"%d\n" % os.getpid())
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _child_ended(child: int) -> int | None:
    """The child's wait status once it has ended."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid == child else None


def _signal(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _watch(child: int, wakeup: int) -> int:
    """Wait for the child's end, passing signals on; end it when the owner goes. Returns its wait status."""
    owner = os.getppid()
    sources = [0, wakeup]
    kill_at: float | None = None
    while (status := _child_ended(child)) is None:
        ready, _, _ = select.select(sources, [], [], PARENT_CHECK_S)
        if wakeup in ready:
            for number in os.read(wakeup, 512):
                if number != signal.SIGCHLD:
                    _signal(child, number)
        # The parent's pid counts too: a process forked off the owner may still hold the pipe.
        gone = (0 in ready and not os.read(0, 4096)) or os.getppid() != owner
        if gone and kill_at is None:
            _signal(child, signal.SIGTERM)
            kill_at = time.monotonic() + KILL_AFTER_S
            sources = [wakeup]
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal(child, signal.SIGKILL)
    return status


def _exit_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["--"] or len(arguments) < 2:
        sys.exit("usage: _watchdog.py -- COMMAND [ARGUMENT ...]")
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    watchdog = os.getpid()
    child = os.fork()
    if child == 0:
        _become(arguments[1:], watchdog)
    _exit_like(_watch(child, wakeup))


if __name__ == "__main__":
    main(sys.argv[1:])
