"""On a Python's path: its wall clock is ANABRANCH_TEST_CLOCK_S seconds off, from before anything else is imported."""

from __future__ import annotations

import datetime
import os
import time
from typing import Self

_OFF_S = float(os.environ.get("ANABRANCH_TEST_CLOCK_S", "0"))
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return super().now(tz) + datetime.timedelta(seconds=_OFF_S)

    @classmethod
    def utcnow(cls) -> Self:
        return super().utcnow() + datetime.timedelta(seconds=_OFF_S)

    @classmethod
    def today(cls) -> Self:
        return super().today() + datetime.timedelta(seconds=_OFF_S)


time.time = lambda: _time() + _OFF_S
time.time_ns = lambda: _time_ns() + int(_OFF_S * 1e9)
datetime.datetime = _Datetime  # type: ignore[misc]
