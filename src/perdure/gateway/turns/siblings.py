"""Identical calls at the same time: a retry of the same call, or further samples of one prompt.

A request alone does not tell. A retry is proven by its header, by an idempotency key that the waiting
call has too, or because all who wait for that call have hung up. Other calls are samples of their own.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass


async def _waits() -> bool:
    return False


@dataclass(frozen=True)
class Caller:
    """Who waits for the answer of a call, as far as it tells a retry from a sibling."""

    says_retry: bool = False
    """It says that it asks again, or it comes through a relay, which hides who hung up."""
    idempotency_key: str = ""
    has_hung_up: Callable[[], Awaitable[bool]] = _waits


UNKNOWN = Caller()


async def is_retry(caller: Caller, waiting: Iterable[Caller]) -> bool:
    """Whether a call repeats the identical one for which `waiting` wait."""
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
    """The request digest of the sibling with this number; the first has the request's own."""
    return exact if number == 0 else hashlib.sha256(f"{exact}/{number}".encode()).hexdigest()
