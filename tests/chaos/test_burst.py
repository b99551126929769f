"""500 rollouts at once on an account of 20 sandboxes and 5 creates a second: all are served."""

from pathlib import Path

import pytest

from tests import burst_checks, e2b_control_plane

pytestmark = pytest.mark.temporal

BURST, LIVE, RATE = 500, 20, 5


async def test_500_at_once_queue_for_20_sandboxes_and_5_creates_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real SDK, workers of two processes: all are graded, no error in any history, hardly a 429."""
    said = f'{{"{e2b_control_plane.NAME}": {{"live": {LIVE}, "creates_per_s": {RATE}}}}}'
    async with burst_checks.capped(tmp_path, monkeypatch, live=LIVE, rate=RATE, said=said) as pair:
        seen = await burst_checks.run_burst(
            *pair, BURST, limit_s=3600, sandbox=e2b_control_plane.NAME
        )

    assert (seen.graded, seen.errors, seen.creates, seen.left) == (BURST, 0, BURST, 0)
    assert seen.refused <= BURST / 50, seen  # a busy machine makes even steps uneven


async def test_500_at_once_find_out_what_the_account_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without configured caps the service refuses some creates, and no workflow sees a refusal."""
    async with burst_checks.capped(tmp_path, monkeypatch, live=LIVE, rate=RATE, said="{}") as pair:
        seen = await burst_checks.run_burst(
            *pair, BURST, limit_s=3600, sandbox=e2b_control_plane.NAME
        )

    assert (seen.graded, seen.errors, seen.left) == (BURST, 0, 0)
    assert seen.refused < BURST / 5, seen
