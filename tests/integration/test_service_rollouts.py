"""Whole rollouts with `--sandbox e2b`, `daytona` and `modal`, each against its double: boot to clean-up."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from perdure.instances.rows.row_import import import_rows
from perdure.types import Outcome, RolloutStatus
from tests import service_harness
from tests.service_harness import DAYTONA, E2B, MODAL, Service
from tests.stack.gated_engine import TURNS, commands, script
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import DEATH_S, Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

HELD = 3
"""The turn in which the worker dies: the relay holds a call, the engine has not answered it."""


@dataclass
class Hosted:
    """A stack, and the double whose sandboxes it uses."""

    stack: Stack
    service: Service
    server: Any

    @property
    def live(self) -> list[object]:
        """Sandboxes that really exist."""
        found: list[object] = self.server.sandboxes.all()
        return found

    async def solved(self, run_id: str, **fields: object) -> tuple[object, ...]:
        """What happened, and the sandboxes that the service still has."""
        request = await self.stack.start(run_id, sandbox=self.service.name, **fields)
        episode = await self.stack.episode(request)
        assert episode.status is RolloutStatus.GRADED, (episode, self.stack.last_words())
        return episode.outcome, episode.turns, self.live


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[E2B, *(pytest.param(each, marks=pytest.mark.longer) for each in (DAYTONA, MODAL))],
    ids=["e2b", "daytona", "modal"],
)
async def hosted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Hosted]:
    if missing := why_not_here():
        pytest.skip(missing)
    folder: Path = tmp_path_factory.mktemp("hosted")
    with pytest.MonkeyPatch.context() as patch:  # the stack's processes inherit it
        async with (
            service_harness.serving(request.param, folder / "server", patch) as (server, _),
            running(folder / "stack") as stack,
        ):
            yield Hosted(stack, request.param, server)


@pytest.mark.longer
async def test_gold_patch_resolves(hosted: Hosted) -> None:
    """The oracle's rollout is graded resolved, and the service has no sandbox left."""
    assert await hosted.solved("gold", agent="oracle") == (Outcome.RESOLVED, 0, [])


TASK = {
    "task.toml": "[environment]\ncpus = 1\nmemory_mb = 2048\nstorage_mb = 10240\n",
    "instruction.md": "Write hello into hello.txt.\n",
    "environment/Dockerfile": "FROM python:3.11\nWORKDIR /app\nCOPY note .\nRUN cat note >made\n",
    "environment/note": "in the image\n",
    "solution/solve.sh": "#!/bin/bash\necho hello > hello.txt\n",
    "tests/test.sh": """#!/bin/bash
if grep -qx hello /app/hello.txt && grep -q image /app/made; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
}
"""A Harbor task. Its size becomes that of the template which E2B builds."""


@pytest.mark.parametrize("hosted", [E2B], indirect=True, ids=["e2b"])
async def test_a_harbor_task_is_built_run_and_graded(hosted: Hosted, tmp_path: Path) -> None:
    """The solution gets 1 and no change gets 0, from one build of its Dockerfile."""
    for name, text in TASK.items():
        path = tmp_path / "hello" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report = await import_rows(hosted.stack.store, tmp_path / "hello")
    (ref,) = report.refs
    seen = [
        await hosted.solved(f"built-{agent}", agent=agent, instance=ref)
        for agent in ("oracle", "nop")
    ]
    (build,) = hosted.server.builds.all()

    assert seen == [(Outcome.RESOLVED, 0, []), (Outcome.UNRESOLVED, 0, [])]
    assert (build["asked"]["cpuCount"], build["asked"]["memoryMB"]) == (1, 2048)


async def test_agent_reaches_the_gateway_by_a_relay(hosted: Hosted) -> None:
    """An agent in a sandbox without any network calls the model and solves the instance."""
    assert await hosted.solved("relayed") == (Outcome.RESOLVED, hosted.stack.engine.turns, [])


@pytest.mark.longer
@pytest.mark.registry
async def test_mini_swe_agent_solves(hosted: Hosted) -> None:
    """The unmodified mini-swe-agent from PyPI, uploaded, finishes through the relay: resolved."""
    played = [*commands(), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in played
    ]
    hosted.stack.engine.control(scripts={"default": {"turns": calls}})
    direct = {"client": "direct"}  # as in a container it calls by litellm: test_container_rollouts
    seen = await hosted.solved("mini", agent="mini_swe_agent", agent_options=direct)
    hosted.stack.engine.control(scripts=script())

    assert seen == (Outcome.RESOLVED, TURNS, [])


@pytest.mark.longer
@pytest.mark.parametrize("hosted", [E2B], indirect=True, ids=["e2b"])
async def test_a_worker_frozen_while_it_boots_kills_nothing_when_it_comes_back(
    hosted: Hosted,
) -> None:
    """Another try adopts the sandbox; the late try leaves it alone: one attempt, resolved."""
    stack, server = hosted.stack, hosted.server
    stack.engine.hold(1)
    server.settings["boot_s"] = 3 * DEATH_S
    request = await stack.start("frozen", sandbox="e2b", heartbeat_timeout_s=DEATH_S)
    await until(server.sandboxes.all, "the service makes a sandbox")
    (frozen,) = stack.workers
    os.kill(frozen.pid, signal.SIGSTOP)
    server.settings["boot_s"] = 0
    await stack.start_worker()
    await stack.held(request)
    os.kill(frozen.pid, signal.SIGCONT)
    await frozen.kill(signal.SIGTERM)
    stack.engine.let_go()
    episode = await stack.episode(request)

    assert (episode.outcome, len(episode.attempts)) == (Outcome.RESOLVED, 1), stack.last_words()
    assert hosted.live == []


@pytest.mark.longer
@pytest.mark.parametrize("hosted", [DAYTONA], indirect=True, ids=["daytona"])
async def test_a_killed_worker_loses_nothing(hosted: Hosted) -> None:
    """kill -9 mid-call: another worker finds the sandbox by its name and serves the same relay."""
    stack = hosted.stack
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
    assert hosted.live == []
