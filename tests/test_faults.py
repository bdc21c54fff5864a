"""Named points: silent unless armed, and armed only by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from anabranch import faults
from anabranch.errors import AnabranchError, UsageError
from anabranch.faults import POINTS, InjectedFault, arm_from_environment, armed, fail_at


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    faults._armed.clear()


@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_point_that_is_not_armed_does_nothing(point: str) -> None:
    fail_at(point)


@pytest.mark.parametrize("point", sorted(POINTS))
def test_an_armed_point_raises_and_the_others_do_not(point: str) -> None:
    with armed(point):
        for other in POINTS - {point}:
            fail_at(other)
        with pytest.raises(InjectedFault, match=point):
            fail_at(point)
    fail_at(point)


def test_it_fires_at_one_passage_only() -> None:
    with armed("after merge", passage=3):
        fail_at("after merge")
        fail_at("after merge")
        with pytest.raises(InjectedFault):
            fail_at("after merge")
        fail_at("after merge")


def test_an_action_of_ones_own() -> None:
    seen: list[str] = []
    with armed("after read", lambda: seen.append("here")):
        fail_at("after read")
    assert seen == ["here"]


def test_nobody_handles_a_fault_by_accident() -> None:
    assert not issubclass(InjectedFault, AnabranchError)


def test_an_unknown_point_is_refused() -> None:
    with (
        pytest.raises(UsageError, match=r"fault point 'nowhere' is unknown; allowed: after commit"),
        armed("nowhere"),
    ):
        pass


def test_the_environment_arms() -> None:
    arm_from_environment({"ANABRANCH_FAIL_AT": "after fetch:2:raise"})
    fail_at("after fetch")
    with pytest.raises(InjectedFault):
        fail_at("after fetch")


def test_an_environment_without_the_variable_arms_nothing() -> None:
    arm_from_environment({})
    assert not faults._armed


@pytest.mark.parametrize("text", ["after fetch", "after fetch:x:kill", "after fetch:1:explode", "nowhere:1:kill"])
def test_what_the_environment_cannot_mean_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        arm_from_environment({"ANABRANCH_FAIL_AT": text})


def test_stop_freezes_until_continued() -> None:
    code = "from anabranch.faults import *; arm_from_environment(); fail_at('after read')"
    environment = {"ANABRANCH_FAIL_AT": "after read:1:stop"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as child:
        frozen = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert frozen is not None
        assert frozen.si_status == signal.SIGSTOP
        child.send_signal(signal.SIGCONT)
    assert child.returncode == 0


def test_kill_is_a_kill() -> None:
    code = "from anabranch.faults import *; arm_from_environment(); fail_at('after read'); fail_at('after read')"
    done = subprocess.run([sys.executable, "-c", code], env={"ANABRANCH_FAIL_AT": "after read:2:kill"}, check=False)
    assert done.returncode == -signal.SIGKILL
