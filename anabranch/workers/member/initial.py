"""Version 0 from a worker's own model, for the synchronizer that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from anabranch.merge.codecs import encode
from anabranch.merge.fragments import Layout
from anabranch.queue.messages import Claim, pack
from anabranch.workers.member.adoption import ParameterStore


async def upload_initial(
    store: ParameterStore, layout: Layout, upload: Callable[[memoryview, str], Awaitable[Claim]]
) -> tuple[Claim, Claim]:
    """Upload every fragment; the claims of the layout and of the list of fragments' claims (both may be large)."""

    def initial(fragment: int) -> memoryview:
        return encode("fp32", store.initial(fragment))

    described = await upload(memoryview(pack(layout.to_wire())), "msgpack")
    claims = [await upload(await asyncio.to_thread(initial, f.index), "fp32") for f in layout.fragments]
    listed = await upload(memoryview(pack([claim.model_dump() for claim in claims])), "msgpack")
    return described, listed
