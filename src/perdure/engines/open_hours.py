"""The hours of the day in which an operator lets models be called, such as `22:00-06:00` UTC."""

from perdure.engines.quota_resets import utc_minute

DAY_S = 86400


def opens_at(hours: str, now: float) -> float:
    """Unix seconds at which the hours begin next; 0 if `now` is within them, or if there are none."""
    if not hours:
        return 0.0
    begin, end = map(_second_of_day, hours.split("-"))
    since = (now - begin) % DAY_S
    length = (end - begin) % DAY_S or DAY_S
    return 0.0 if since < length else now - since + DAY_S


def closed_reason(hours: str, until: float) -> str:
    return f"models are called at {hours} UTC only (engine.open_hours), next at {utc_minute(until)}"


def _second_of_day(clock: str) -> int:
    hour, minute = clock.split(":")
    return int(hour) * 3600 + int(minute) * 60
