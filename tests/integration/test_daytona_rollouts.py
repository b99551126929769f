"""Whole rollouts with `--sandbox daytona`, against the double: boot, agent, diff, grade, clean-up."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.instances import catalog
from perdure.types import Outcome, RolloutStatus
from tests import stack as stacks
from tests.stack import DEATH_S, INSTANCE, Stack

pytest.importorskip("daytona")
pytest.importorskip("aiohttp")
pytestmark = pytest.mark.temporal

HELD = 3
"""The turn in which the worker dies: the relay holds a call, the engine has not answered it."""
GOLD = b"""\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[object]:
    """The double; the stack's processes inherit how to reach it."""
    from perdure.testing.daytona_server import serving

    if missing := stacks.why_not_here():
        pytest.skip(missing)
    async with serving(tmp_path / "server") as (server, url):
        monkeypatch.setenv("DAYTONA_API_URL", f"{url}/api")
        monkeypatch.setenv("DAYTONA_API_KEY", "dtn_0")
        yield server
        for record in server.sandboxes.all():
            await server.guests.kill(record["id"])


@pytest.fixture
async def stack(tmp_path: Path, service: object) -> AsyncIterator[Stack]:
    async with stacks.running(tmp_path / "stack") as stack:
        yield stack


async def solved(stack: Stack, service: object, run_id: str, **fields: object) -> object:
    """What happened, and how many sandboxes the service still has."""
    request = await stack.start(run_id, sandbox="daytona", **fields)
    episode = await stack.episode(request)
    assert episode.status is RolloutStatus.GRADED, (episode, stack.last_words())
    return episode.outcome, episode.turns, service.sandboxes.all()  # type: ignore[attr-defined]


async def test_gold_patch_resolves_in_daytona(stack: Stack, service: object) -> None:
    """The oracle's rollout is graded resolved, and the service has no sandbox left."""
    instance = await catalog.load(stack.store, INSTANCE)
    await catalog.save(
        stack.store, instance.model_copy(update={"gold_patch": GOLD, "instance_id": "gold"})
    )

    assert await solved(stack, service, "gold", instance="tests/gold", agent="oracle") == (
        Outcome.RESOLVED,
        0,
        [],
    )


async def test_agent_reaches_the_gateway_through_the_preview_proxy(
    stack: Stack, service: object
) -> None:
    """An agent in a sandbox without any network calls the model and solves the instance."""
    turns = stack.engine.turns

    assert await solved(stack, service, "relayed") == (Outcome.RESOLVED, turns, [])


@pytest.mark.registry
async def test_mini_swe_agent_solves_in_daytona(stack: Stack, service: object) -> None:
    """The unmodified mini-swe-agent from PyPI, uploaded, finishes through the relay: resolved."""
    commands = [*stacks.commands(), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in commands
    ]
    stack.engine.control(scripts={"default": {"turns": calls}})
    seen = await solved(stack, service, "mini", agent="mini_swe_agent")

    assert seen == (Outcome.RESOLVED, stacks.TURNS, [])


async def test_a_killed_worker_loses_nothing(stack: Stack, service: object) -> None:
    """kill -9 mid-call: another worker finds the sandbox by its name and serves the same relay."""
    stack.engine.hold(HELD)
    request = await stack.start("killed", sandbox="daytona", heartbeat_timeout_s=DEATH_S)
    await stack.held(request)
    pid = await stack.watched(request)
    await stack.start_worker()
    await stack.worker_of(pid).kill()
    await stack.watched(request, attempt=2)
    stack.engine.let_go()
    episode = await stack.episode(request)

    assert (episode.outcome, len(episode.attempts)) == (Outcome.RESOLVED, 1), stack.last_words()
    stack.bought_once(request)
    assert service.sandboxes.all() == []  # type: ignore[attr-defined]
