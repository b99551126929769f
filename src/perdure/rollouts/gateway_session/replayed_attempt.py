"""Chooses which earlier attempt of a rollout a new attempt replays.

`session` opens the session, and the gateway replays.
"""

from collections.abc import Sequence

from perdure.errors import NotFound
from perdure.gateway.control_client import GatewayControl


async def find_longest_recording(gateway: GatewayControl, session_ids: Sequence[str]) -> str | None:
    """The session that recorded the most turns, the later one of two equals; None if none has
    turns.

    `session_ids`: of the earlier attempts, oldest first. An attempt that was lost while it booted
    has no session. One that was lost during a replay has fewer turns than the session it replayed.

    Raises: GatewayUnavailable.
    """
    turns: dict[str, int] = {}
    for session_id in reversed(session_ids):
        try:
            turns[session_id] = (await gateway.get(session_id)).turns
        except NotFound:
            continue
    best = max(turns, key=turns.__getitem__, default=None)
    return best if best is not None and turns[best] else None
