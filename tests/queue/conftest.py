"""A connection to the session's server, and the key names of the test's own run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.url import RunUrl


@pytest.fixture
async def redis(run_url: str) -> AsyncIterator[Redis]:
    client = connect(RunUrl.parse(run_url), name="test")
    yield client
    await client.aclose()


@pytest.fixture
def keys(run_name: str) -> Keys:
    return Keys(run_name)
