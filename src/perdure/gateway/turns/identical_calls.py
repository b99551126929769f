"""Identical concurrent calls: tells a retry of a call from an additional sample of the same prompt.

The request alone does not show which it is. A call is a retry if its header says so, if it shares an
idempotency key with the waiting call, or if all callers of that call have hung up. Any other call is a
separate sample.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass


async def _waits() -> bool:
    return False


@dataclass(frozen=True)
class Caller:
    """The facts about a call's client that tell a retry from a sibling."""

    says_retry: bool = False
    """Whether it says that it retries. Calls through a relay count as such, because a relay hides a
    client that hung up."""
    idempotency_key: str = ""
    has_hung_up: Callable[[], Awaitable[bool]] = _waits


UNKNOWN = Caller()


async def is_retry(caller: Caller, waiting: Iterable[Caller]) -> bool:
    """Whether a call retries the identical call for which `waiting` wait."""
    known = list(waiting)
    if caller.says_retry:
        return True
    if caller.idempotency_key:
        return any(one.idempotency_key == caller.idempotency_key for one in known)
    for one in known:
        if not await one.has_hung_up():
            return False
    return True


def sibling_digest(exact: str, number: int) -> str:
    """The request digest of the sibling with this number; sibling 0 has the request's own."""
    return exact if number == 0 else hashlib.sha256(f"{exact}/{number}".encode()).hexdigest()
