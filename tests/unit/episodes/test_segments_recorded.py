"""Recorded Claude Code sessions through a real gateway give these segments to a trainer."""

from pathlib import Path

import pytest

from perdure.episodes.token_accounting import count_trajectory
from perdure.episodes.trajectory_segments import cut
from perdure.types import Turn
from tests.checkout_paths import ROOT
from tests.recordings import captured

RECORDINGS = ROOT.parent / "shared" / "data" / "trajectories" / "claude_code"


async def played(name: str, home: Path) -> list[Turn]:
    path = RECORDINGS / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no recording {name}")
    return await captured(path, home)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("swe", [("final", (0, 1, 2, 3, 4, 5, 6, 7))]),
        ("subfg", [("subagent", (1, 3)), ("subagent", (2, 4)), ("final", (0, 5, 6, 7))]),
        (
            "compact",
            [("wipe", (0, 1)), ("wipe", (2,)), ("wipe", (3, 4)), ("wipe", (5, 6)), ("final", (7,))],
        ),
    ],
)
async def test_kinds_follow_chains_and_compactions(
    name: str, expected: list[tuple[str, tuple[int, ...]]], tmp_path: Path
) -> None:
    """One segment per chain and one per compaction, although the client rewrote messages."""
    turns = await played(name, tmp_path)
    segments = cut(turns)

    assert [(segment.kind.value, segment.turns) for segment in segments] == expected
    assert count_trajectory(turns, segments).untrained_tokens == {}
