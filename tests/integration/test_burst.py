"""A burst of rollouts on one account with caps: they queue, and no workflow hears of it."""

from pathlib import Path

import pytest

from tests import burst_checks
from tests.stack.host_requirements import why_not_here
from tests.stack.wait_until import PATIENCE_S

pytestmark = [pytest.mark.temporal, pytest.mark.longer]


@pytest.fixture(autouse=True)
def _here() -> None:
    if missing := why_not_here():
        pytest.skip(missing)


async def test_a_burst_queues_for_an_account_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 rollouts at once, workers of two processes, 4 sandboxes allowed: all graded, no 429."""
    said = '{"e2b": {"live": 4, "creates_per_s": 10}}'
    async with burst_checks.capped(tmp_path, monkeypatch, live=4, rate=10, said=said) as (
        stack,
        server,
    ):
        seen = await burst_checks.run_burst(stack, server, 16, limit_s=PATIENCE_S * 4)

    assert seen == burst_checks.Burst(graded=16, errors=0, creates=32, refused=0, left=0, held=0)
