"""Option values with units: durations such as `4h`, and shares such as `98%`."""

import re

import click

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
PART = r"(\d+(?:\.\d+)?)([dhms]?)"


def duration(text: str) -> float:
    """`4h`, `1h30m`, `90s` or `90` -> seconds above 0."""
    parts = re.findall(PART, text) if re.fullmatch(f"(?:{PART})+", text) else []
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not seconds:
        raise click.BadParameter(f"{text!r} is not a duration: write it as 4h, 1h30m or 90s")
    return seconds


def share(text: str) -> float:
    """`98%` or `0.98` -> 0.98."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text)
    found = float(number[1]) / (100 if number[2] else 1) if number else 0.0
    if not 0 < found <= 1:
        raise click.BadParameter(f"{text!r} is not a share: write it as 98% or 0.98")
    return found
