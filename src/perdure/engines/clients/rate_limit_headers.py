"""When a provider takes calls again, from the headers of its refusal."""

import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION = re.compile(r"([\d.]+)(ms|[smhd])")
"""A part of a duration such as `6h2m0.5s`."""
EARLIEST_UNIX_S, EARLIEST_UNIX_MS = 1e9, 1e12
"""A number up to the first one is a duration; a number above the second one is in milliseconds."""
LONGEST_S = 8 * 86400.0
"""Maximum result. The longest known limits are weekly; after this time, the provider is asked
again."""


def reset_in_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds until the provider takes calls again; None if it does not say. `now`: Unix seconds.

    `Retry-After` takes precedence. Without it, the latest reset of an exhausted limit counts:
    `x-ratelimit-reset-requests: 6m0s` with `x-ratelimit-remaining-requests: 0`, or
    `anthropic-ratelimit-tokens-reset: 2026-11-28T04:00:00Z` with `...-tokens-remaining: 0`.
    """
    said = [headers["retry-after"]] if "retry-after" in headers else _resets(headers)
    found = [seconds for text in said if (seconds := _seconds(text.strip(), now)) is not None]
    return min(max(0.0, *found), LONGEST_S) if found else None


def _resets(headers: Mapping[str, str]) -> list[str]:
    """The resets of the exhausted limits."""
    named = [name.lower() for name in headers if "ratelimit" in name.lower()]
    used_up = [name for name in named if "remaining" in name and headers[name] == "0"]
    resets = [headers.get(name.replace("remaining", "reset")) for name in used_up]
    return [reset for reset in resets if reset is not None]


def _seconds(text: str, now: float) -> float | None:
    """Seconds from `now`, from a number, a duration, or a time as in RFC 3339 or HTTP."""
    parts = DURATION.findall(text)
    try:
        if parts and "".join(map("".join, parts)) == text:
            return sum(float(number) * UNITS_S[unit] for number, unit in parts)
        if text.replace(".", "", 1).isdigit():
            number = float(text)
            unix_s = number / 1000 if number > EARLIEST_UNIX_MS else number
            return unix_s - now if number > EARLIEST_UNIX_S else number
        at = datetime.fromisoformat(text) if text[:1].isdigit() else parsedate_to_datetime(text)
        return at.timestamp() - now
    except ValueError:
        return None
