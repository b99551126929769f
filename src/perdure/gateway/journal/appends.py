"""Appends that wait to be written: which of them may be, and how their callers are answered."""

import asyncio
import time
from typing import Any, NamedTuple

from perdure.errors import GatewayUnavailable
from perdure.gateway.journal.base import Overtaken
from perdure.gateway.journal.encoding import frame


class Append(NamedTuple):
    session_id: str
    position: int
    data: bytes
    since: float
    """When it was asked for, in `time.monotonic` seconds."""
    done: "asyncio.Future[None]"


def to_append(session_id: str, position: int, record: dict[str, Any]) -> Append:
    """Must be called inside the event loop that awaits `done`."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return Append(session_id, position, frame(record), time.monotonic(), done)


def accept(items: list[Append], records: int) -> list[Append]:
    """The appends that name the next numbers, in order; the others are answered with an error."""
    accepted: list[Append] = []
    for item in items:
        following = records + len(accepted)
        if item.position == following:
            accepted.append(item)
        elif item.position < following:
            resolve([item], overtaken(item.session_id, item.position))
        else:
            missing = f"record {item.position - 1} of session {item.session_id!r} was not written"
            resolve([item], GatewayUnavailable(missing))
    return accepted


def overtaken(session_id: str, position: int) -> Overtaken:
    return Overtaken(f"record {position} of session {session_id!r} was written by another gateway")


def resolve(items: list[Append], error: Exception | None) -> None:
    """Answer the callers, from any thread."""
    for item in items:
        try:
            item.done.get_loop().call_soon_threadsafe(_finish, item.done, error)
        except RuntimeError:  # the loop ended, so no task waits for the answer
            continue


def _finish(done: "asyncio.Future[None]", error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
