"""Whole rollouts with `--sandbox kubernetes`, against the double: boot, agent, diff, grade, clean-up."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.types import Outcome
from tests.service_harness import KUBERNETES, serving
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running

pytestmark = pytest.mark.temporal


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[object]:
    """The double; the stack's processes inherit how to reach it."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with serving(KUBERNETES, tmp_path / "server", monkeypatch) as (server, _):
        yield server


@pytest.fixture
async def stack(tmp_path: Path, cluster: object) -> AsyncIterator[Stack]:
    async with running(tmp_path / "stack") as stack:
        yield stack


@pytest.mark.longer
async def test_an_evicted_pod_costs_an_attempt_and_nothing_else(
    stack: Stack, cluster: object
) -> None:
    """An agent that reaches the model by a relay is evicted in the middle; the attempt in the next
    pod solves the instance, and no pod is left."""
    stack.engine.hold(1)
    request = await stack.start("evicted", sandbox="kubernetes")
    await stack.held(request)
    (record,) = cluster.sandboxes.all()  # type: ignore[attr-defined]
    await cluster._break(record, "Evicted")  # type: ignore[attr-defined]
    stack.engine.let_go()
    episode = await stack.episode(request)

    ends = (episode.outcome, len(episode.attempts), cluster.sandboxes.all())  # type: ignore[attr-defined]
    assert ends == (Outcome.RESOLVED, 2, []), (episode, stack.last_words())
