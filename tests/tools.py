"""System programs that some tests drive: where they are, and `python -m tests.tools --install`.

Installing is best effort: as root on a Debian-like system it asks apt-get, elsewhere it says what to install.
A test that needs a missing program is skipped. With ANABRANCH_REQUIRE_TOOLS=1 it fails instead, and so does
`--install`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REQUIRE_VARIABLE = "ANABRANCH_REQUIRE_TOOLS"
_POLICY = Path("/usr/sbin/policy-rc.d")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PLAYWRIGHT_BROWSERS = (
    (".cache/ms-playwright", "chromium-*/chrome-linux*/chrome"),
    ("Library/Caches/ms-playwright", "chromium-*/chrome-mac*/*.app/Contents/MacOS/*"),
)


def chromium_path() -> str | None:
    """A Chromium or Chrome that Playwright can drive: the system's, else one Playwright downloaded."""
    for name in _BROWSERS:
        if found := shutil.which(name):
            return found
    for cache, pattern in _PLAYWRIGHT_BROWSERS:
        for path in sorted((Path.home() / cache).glob(pattern)):
            return str(path)
    return None


def redis_server_path() -> str | None:
    """Redis' own server, which unlike the embedded one speaks TLS."""
    return shutil.which("redis-server")


def tools_required() -> bool:
    """Whether a missing tool is a failure (as in CI) rather than a skipped test."""
    return os.environ.get(REQUIRE_VARIABLE) == "1"


def require(tool_path: str | None, name: str) -> str:
    """`tool_path` where the tool is there; otherwise skip the test, or fail it if tools are required."""
    if tool_path is not None:
        return tool_path
    reason = f"{name} is not installed; `python -m tests.tools --install`"
    if tools_required():
        pytest.fail(f"{reason} ({REQUIRE_VARIABLE}=1)")
    pytest.skip(reason)


# Debian's package name -> where its program is.
TOOLS: dict[str, Callable[[], str | None]] = {"chromium": chromium_path, "redis-server": redis_server_path}


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Keep packages from starting a system service: installing redis-server must not occupy port 6379."""
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            _POLICY.unlink(missing_ok=True)


def _apt_install(packages: list[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    commands = [
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
    ]
    with _services_stay_down():
        for command in commands:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                _say(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-2000:]}")
                return False
    return True


def _say(line: str) -> None:
    sys.stderr.write(f"tests.tools: {line}\n")


def missing() -> list[str]:
    return [name for name, path in TOOLS.items() if path() is None]


def install() -> bool:
    """Install what is missing if this process may; True when every tool is there afterwards."""
    packages = missing()
    if not packages:
        return True
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        _say(f"please install {', '.join(packages)} (Debian: sudo apt-get install {' '.join(packages)})")
    else:
        _say(f"installing {', '.join(packages)} with apt-get")
        _apt_install(packages)
    if still := missing():
        _say(f"still missing: {', '.join(still)}; the tests that need them are skipped")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools", description=__doc__)
    parser.add_argument("--install", action="store_true", help="install what is missing, if possible")
    arguments = parser.parse_args()
    complete = install() if arguments.install else not missing()
    if not arguments.install:
        for name, path in TOOLS.items():
            _say(f"{name}: {path() or 'missing'}")
    return 1 if tools_required() and not complete else 0


if __name__ == "__main__":
    sys.exit(main())
