"""Whole rollouts in containers: an unmodified agent edits, the diff is captured and graded afresh."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure import variant_registry
from perdure.sandboxes.base import SandboxProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Outcome, RolloutStatus
from tests.docker_engine import docker_address, docker_engine
from tests.stack.gated_engine import TURNS, commands
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

__all__ = ["docker_address", "docker_engine"]

pytestmark = [pytest.mark.temporal, pytest.mark.registry, pytest.mark.longer]

ROLLOUT_S = 400.0
"""A container's boot and each of its commands cost processes of an engine: slow on a busy host."""


@pytest.fixture(params=["podman", "docker"])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A provider that works here; the stack's processes inherit where its engine is."""
    name = str(request.param)
    if missing := why_not_here():
        pytest.skip(missing)
    if name == "docker":
        request.getfixturevalue("docker_engine")
    provider: SandboxProvider = variant_registry.load("sandbox", variant_registry.SANDBOXES, name)(
        Settings(home=tmp_path)
    )
    if problems := provider.check():
        pytest.skip(problems[0])
    return name


@pytest.fixture
async def stack(tmp_path: Path, sandbox: str) -> AsyncIterator[Stack]:
    async with running(tmp_path / "stack") as stack:
        yield stack


async def test_mini_swe_agent_solves_in_a_container(stack: Stack, sandbox: str) -> None:
    """mini-swe-agent from PyPI solves the instance: resolved, every turn told, no box left."""
    played = [*commands(), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in played
    ]
    stack.engine.control(scripts={"default": {"turns": calls}})
    request = await stack.start(f"mini-{sandbox}", sandbox=sandbox, agent="mini_swe_agent")
    await until(lambda: stack.is_over(request), "the rollout is over", ROLLOUT_S)
    episode = await stack.episode(request)
    assert episode.status is RolloutStatus.GRADED, (episode, stack.last_words())
    provider = variant_registry.load("sandbox", variant_registry.SANDBOXES, sandbox)(
        Settings(home=stack.home)
    )

    assert (episode.outcome, episode.turns) == (Outcome.RESOLVED, TURNS)
    assert list(await provider.list()) == []
