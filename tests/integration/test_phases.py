"""Whole rollouts whose phases run in different sandboxes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Outcome, RolloutStatus
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("phases") / "stack") as stack:
        yield stack


@pytest.mark.longer
async def test_agent_in_bubblewrap_graded_in_podman(stack: Stack, tmp_path: Path) -> None:
    """One field moves the grading to another provider; each phase has its own limits."""
    if missing := PodmanProvider(Settings(home=tmp_path)).check():
        pytest.skip("; ".join(missing))
    asked = {
        "agent": {"limits": {"pids": 200}},
        "grade": {"provider": "podman", "limits": {"memory_mb": 1024}},
    }
    request = await stack.start("phases", phases=asked)
    episode = await stack.episode(request)
    assert episode.status is RolloutStatus.GRADED, (episode, stack.last_words())
    booted = stack.home / "sandboxes" / "podman" / ".skeleton"

    assert episode.outcome is Outcome.RESOLVED
    assert (episode.attempts[0].provider, booted.is_dir()) == ("bubblewrap", True)
