"""The hours of the day in which an operator lets an account be used, such as `22:00-06:00` UTC."""

from perdure.engines.quota_resets import QuotaReset, utc_minute

DAY_S = 86400


def opens_at(hours: str, now: float) -> float:
    """Unix seconds at which the hours begin next; 0 if `now` is within them, or if there are none."""
    if not hours:
        return 0.0
    begin, end = map(_second_of_day, hours.split("-"))
    since = (now - begin) % DAY_S
    length = (end - begin) % DAY_S or DAY_S
    return 0.0 if since < length else now - since + DAY_S


def models_open(hours: str, now: float, account: str) -> QuotaReset | None:
    """The next opening of models. `hours`: the setting `engine.open_hours`. None if they are open."""
    return _opening(hours, now, account, "models are called", "engine.open_hours")


def sandboxes_open(hours: str, now: float, account: str) -> QuotaReset | None:
    """As `models_open`, for an account of `sandbox.open_hours`."""
    return _opening(hours, now, account, f"{account} is used", "sandbox.open_hours")


def _opening(hours: str, now: float, account: str, used: str, setting: str) -> QuotaReset | None:
    until = opens_at(hours, now)
    if not until:
        return None
    reason = f"{used} at {hours} UTC only ({setting}), next at {utc_minute(until)}"
    return QuotaReset(resets_at=until, reason=reason, account=account)


def _second_of_day(clock: str) -> int:
    hour, minute = clock.split(":")
    return int(hour) * 3600 + int(minute) * 60
