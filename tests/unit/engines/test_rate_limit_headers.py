"""When a provider takes calls again, as real providers write it."""

import pytest

from perdure.engines.clients.rate_limit_headers import LONGEST_S, reset_in_s

NOW = 1_795_838_400.0
"""2026-11-28 04:00 UTC."""


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "30"}, 30),
        ({"retry-after": "Sat, 28 Nov 2026 06:00:00 GMT"}, 7200),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "6h2m0.5s",
                "x-ratelimit-remaining-tokens": "900",
                "x-ratelimit-reset-tokens": "9h",
            },
            21720.5,
        ),
        (
            {
                "anthropic-ratelimit-tokens-remaining": "0",
                "anthropic-ratelimit-tokens-reset": "2026-11-28T05:00:00Z",
            },
            3600,
        ),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1795838460000"}, 60),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1795838460"}, 60),
        ({"retry-after": "1795838400000000000"}, LONGEST_S),
        ({"retry-after": "Sat, 28 Nov 2026 01:00:00 GMT"}, 0),
    ],
)
def test_the_reset_is_read(headers: dict[str, str], seconds: float) -> None:
    """Only limits of which nothing remains count, a past time means now, and no wait is endless."""
    assert reset_in_s(headers, NOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"retry-after": "soon"},
        {"retry-after": "nan"},
        {"x-ratelimit-remaining-requests": "0"},
        {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "1h"},
    ],
)
def test_an_answer_without_a_reset_names_none(headers: dict[str, str]) -> None:
    """A malformed header is not a time."""
    assert reset_in_s(headers, NOW) is None
