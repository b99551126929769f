"""The hours in which models are called."""

import pytest

from perdure.engines.open_hours import opens_at

MIDNIGHT = 1795824000
"""2026-11-28 00:00 UTC"""
HOUR = 3600


@pytest.mark.parametrize(
    ("hours", "now_h", "opens_h"),
    [
        ("", 12, None),
        ("22:00-06:00", 23, None),
        ("22:00-06:00", 5.99, None),
        ("22:00-06:00", 6, 22),
        ("22:00-06:00", 21.99, 22),
        ("09:30-17:00", 9.4, 9.5),
        ("09:30-17:00", 17, 33.5),
        ("08:00-08:00", 3, None),
    ],
)
def test_the_next_opening(hours: str, now_h: float, opens_h: float | None) -> None:
    """The first second of the hours is inside, the last one is not, and they may span midnight."""
    expected = 0.0 if opens_h is None else MIDNIGHT + opens_h * HOUR

    assert opens_at(hours, MIDNIGHT + now_h * HOUR) == pytest.approx(expected)
