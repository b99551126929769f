"""Recognizes answers of a sandbox service that say that the account grants nothing for a long time."""

import re
import time

from perdure.errors import AccountExhausted
from perdure.retry import ASK_AGAIN_S

PARK_AFTER_S = 300.0
"""A longer Retry-After is the reset of a quota. Below it, the permits of the account pause."""
PAYMENT_REQUIRED = 402
NO_CREDITS = re.compile(
    r"(depleted|out of|insufficient|no( more)?) credits|spend(ing)? limit|payment (method|required)"
    r"|missing payment|unpaid",
    re.IGNORECASE,
)


def exhausted(
    told: str, *, status: int | None = None, retry_after: float | None = None
) -> AccountExhausted | None:
    """The error for a refused call, or None if the refusal may pass soon or has another cause.

    `told`: our sentence with the service's answer. `retry_after`: seconds that the answer names.
    """
    if status == PAYMENT_REQUIRED or NO_CREDITS.search(told):
        advice = "the account has no credits; add some, then `perdure accounts open`"
        return AccountExhausted(f"{advice}: {told}", time.time() + ASK_AGAIN_S)
    if retry_after is not None and retry_after > PARK_AFTER_S:
        return AccountExhausted(f"the account is at its quota: {told}", time.time() + retry_after)
    return None
