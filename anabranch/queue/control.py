"""An operator's commands, as entries of the control stream."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from anabranch.queue import messages

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.queue.keys import Keys


async def send_command(
    redis: Redis, keys: Keys, action: str, *, key: str = "", value: Any = None, by: str = ""
) -> str:
    """Put an operator's command on the control stream; its id, which events on the tape carry that follow from it."""
    identity = secrets.token_hex(8)
    command = messages.Command.model_validate(
        {"id": identity, "action": action, "key": key, "value": value, "by": by}
    )
    await redis.xadd(keys.control, {"m": messages.encode(command, keys.run)})
    return identity
