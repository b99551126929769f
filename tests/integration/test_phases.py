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


async def test_a_limit_that_the_provider_cannot_enforce_boots_nothing(stack: Stack) -> None:
    """The boot stage refuses it with the field's name, and no sandbox is created."""
    asked = {"grade": {"provider": "local", "limits": {"disk_mb": 64}}}
    request = await stack.start("refused", phases=asked)
    episode = await stack.episode(request)

    assert episode.failure is not None
    assert "phases.grade.limits.disk_mb" in episode.failure.message
    assert not stack.box(request, "agent").exists


async def test_a_sandbox_without_isolation_is_refused_unless_this_host_allows_it(
    stack: Stack,
) -> None:
    """A request that any client sends runs nothing as the worker's user; the setting is named."""
    request = await stack.start("alone", sandbox="local")
    episode = await stack.episode(request)

    assert episode.failure is not None
    assert "PERDURE_SANDBOX__ALLOW_LOCAL=true" in episode.failure.message
    assert [*(stack.home / "sandboxes" / "local").glob("p-*")] == []
