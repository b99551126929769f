"""What `benchmarks.channel` says that a message carried."""

from collections import Counter

import pytest

from benchmarks.channel.__main__ import Received, information


def test_a_clean_channel_carries_a_bit_for_each_sent() -> None:
    """1000 bits that arrive as sent, or all inverted, in two seconds are 500 bits a second."""
    for same, other in (("00", "11"), ("01", "10")):
        received = Received(Counter({same: 500, other: 500}), seconds=2.0)

        assert received.a_second == pytest.approx(500)


@pytest.mark.parametrize(
    "pairs",
    [{"00": 510, "10": 490}, {"00": 255, "01": 250, "10": 245, "11": 250}],
    ids=["a constant", "a guess"],
)
def test_what_tells_nothing_is_nothing(pairs: dict[str, int]) -> None:
    """A receiver that always says 0, and one that guesses, got no bit."""
    assert information(Counter(pairs)) == 0


def test_a_noisy_channel_carries_less() -> None:
    """With one wrong bit of ten, about half of each bit arrives."""
    found = information(Counter({"00": 450, "01": 50, "10": 50, "11": 450}))

    assert found == pytest.approx(0.531, abs=0.001)
