"""What a worker does for its host goes on after an error that was not foreseen."""

import pytest

from workers import process


async def test_an_unforeseen_error_ends_no_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round comes; one that returns is not repeated."""
    monkeypatch.setattr(process, "ASK_AGAIN_S", 0.0)
    rounds = []

    async def sweeps() -> None:
        rounds.append("begun")
        if len(rounds) < 3:
            raise ValueError("a sandbox's folder with half of a file")

    await process.kept_going(sweeps)

    assert len(rounds) == 3
