"""Two builds on one real server: rollouts stay on the build that started them, runs move on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker._workflow import _DeadlockError
from temporalio.workflow import _Definition

from perdure.client import rollout_listing, temporal_names
from perdure.client.deployment_routing import explain_build_routing, explain_own_build_routing
from perdure.client.sdk import Perdure
from perdure.errors import Cancelled
from perdure.rollouts.activity_messages import WORKER_EVICTED, AgentRun, Attempt
from perdure.settings.settings_tree import DeploymentSettings
from perdure.types import AgentEnd, EpisodeRef, Outcome, RolloutRequest, RunRequest
from tests.stack.wait_until import until
from tests.workflows import dev_server, workflow_builds
from tests.workflows.scripted_stages import Stages
from tests.workflows.workflow_builds import Build
from workers.deployment_version import AUTO_UPGRADE_WORKFLOWS, PINNED, warn_if_not_current
from workers.workflow_worker import WORKFLOWS, workflow_worker
from workflows.rollout_workflow import RolloutWorkflow

SOON = (
    *("--dynamic-config-value", 'matching.wv.VersionDrainageStatusVisibilityGracePeriod="1s"'),
    *("--dynamic-config-value", 'matching.wv.VersionDrainageStatusRefreshInterval="1s"'),
)
"""A server that checks every second, not every three minutes, whether a version has drained."""


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with dev_server.serving(*SOON) as client:
        yield client


class Gate:
    """Agents that run until the gate opens."""

    def __init__(self) -> None:
        self.open, self.running = asyncio.Event(), set[str]()

    async def agent(self, attempt: Attempt) -> AgentRun:
        self.running.add(attempt.request.workflow_id)
        await self.open.wait()
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    async def reached(self, *requests: RolloutRequest) -> None:
        wanted = {request.workflow_id for request in requests}
        await until(lambda: wanted <= self.running, f"the agents of {wanted} run")


def rollout(run_id: str) -> RolloutRequest:
    return RolloutRequest(
        run_id=run_id, instance="toy/add-1", agent="nop", heartbeat_timeout_s=3600.0
    )


@pytest.mark.longer
async def test_a_deploy_a_rollback_and_a_changed_message(client: Client, tmp_path: Path) -> None:
    """Each rollout boots, is graded and ends on the build that started it; new ones use the current
    build.

    The next build has one more activity, and other fields in the grader's message.
    """
    gate, perdure = Gate(), Perdure(client)
    old, new = Build("v1", Stages()), workflow_builds.next_build("v2")
    for build in (old, new):
        build.stages.override["run_agent"] = gate.agent
    started: dict[str, Any] = {}

    async def begin(run_id: str) -> None:
        started[run_id] = await perdure.start_rollout(rollout(run_id))
        await gate.reached(rollout(run_id))

    async with old.at_work(client, tmp_path), new.at_work(client, tmp_path):
        await workflow_builds.make_current(client, "v1")
        await begin("before")
        await workflow_builds.make_current(client, "v2")
        await begin("deployed")
        await workflow_builds.make_current(client, "v1")
        await begin("rolled-back")
        gate.open.set()
        episodes: list[EpisodeRef] = [await one.result() for one in started.values()]

    bound = ("boot_sandbox", "review_patch", "grade_in_fresh_sandbox")

    def ran(build: Build) -> list[tuple[str, str]]:
        return sorted(done for done in build.done if done[0] in bound)

    assert [(one.outcome, one.reward, one.attempts) for one in episodes] == [
        (Outcome.RESOLVED, 1.0, 1)
    ] * 3
    assert ran(old) == sorted(
        (stage, run) for stage in bound[::2] for run in ("before", "rolled-back")
    )
    assert ran(new) == sorted((stage, "deployed") for stage in bound)


@pytest.mark.longer
async def test_the_old_worker_of_a_host_may_go_at_once(client: Client, tmp_path: Path) -> None:
    """A worker of another build on the host takes over its agents, so that no sandbox is stranded.

    All else stays on the build that began, wherever its workers are.
    """
    gate, running = Gate(), asyncio.Event()
    old, elsewhere, new = (
        Build("v1", Stages()),
        Build("v1", Stages()),
        workflow_builds.next_build("v2"),
    )

    async def evicted(_: Attempt) -> AgentRun:
        running.set()
        await activity.wait_for_worker_shutdown()
        raise ApplicationError("stop", type=WORKER_EVICTED, non_retryable=True)

    old.stages.override["run_agent"] = evicted
    new.stages.override["run_agent"] = gate.agent
    async with AsyncExitStack() as others:
        async with old.at_work(client, tmp_path):
            await workflow_builds.make_current(client, "v1")
            handle = await Perdure(client).start_rollout(rollout("before"))
            await running.wait()
            await others.enter_async_context(new.at_work(client, tmp_path))
            await others.enter_async_context(elsewhere.at_work(client, tmp_path / "other"))
        await gate.reached(rollout("before"))
        gate.open.set()
        episode = await handle.result()

    assert (episode.outcome, episode.attempts) == (Outcome.RESOLVED, 1)
    assert new.done == [("capture_diff", "before")]
    assert elsewhere.done == [("grade_in_fresh_sandbox", "before")]


@pytest.mark.longer
async def test_an_open_run_moves_on_and_the_old_version_drains(
    client: Client, tmp_path: Path
) -> None:
    """A run's next rollouts start on the current build. When the last rollout of the old build has
    ended, the server reports that version as drained."""
    gate = Gate()
    old, new = Build("v1", Stages()), workflow_builds.next_build("v2")
    for build in (old, new):
        build.stages.instances = ("toy/add-1", "toy/add-2")
        build.stages.override["run_agent"] = gate.agent
    request = RunRequest(
        run_id="long",
        dataset="toy",
        concurrency=1,
        rollout={"agent": "nop", "heartbeat_timeout_s": 3600},
    )
    async with old.at_work(client, tmp_path), new.at_work(client, tmp_path):
        await workflow_builds.make_current(client, "v1")
        run = await Perdure(client).start_run(request)
        await gate.reached(rollout("long"))
        await workflow_builds.make_current(client, "v2")
        before = await workflow_builds.statuses(client)
        gate.open.set()
        summary = await run.result()

        async def drained() -> bool:
            return (await workflow_builds.statuses(client))["v1"] == "DRAINED"

        await until(drained, "the old version has drained")

    assert before == {"v1": "DRAINING", "v2": "CURRENT"}
    assert summary.rollouts == 2
    assert ("grade_in_fresh_sandbox", "long") in old.done
    assert ("review_patch", "long") in new.done


async def test_a_worker_says_that_its_build_is_not_current(client: Client, tmp_path: Path) -> None:
    """The worker's log has the command that makes the build current, and nothing once it is
    current."""
    ours = workflow_builds.DEPLOYMENT.model_copy(update={"build_id": "v1"})
    async with Build("v1", Stages()).at_work(client, tmp_path):
        with capture_logs() as before:
            await warn_if_not_current(client, ours)
        await workflow_builds.make_current(client, "v1")
        with capture_logs() as after:
            await warn_if_not_current(client, ours)

    warnings = [line["fix"] for line in before + after if line["log_level"] == "warning"]
    assert warnings == [
        "temporal worker deployment set-current-version --deployment-name perdure --build-id v1"
    ]


async def test_work_of_a_build_without_workers_is_one_sentence(
    client: Client, tmp_path: Path
) -> None:
    """The sentence names both builds, and the command that routes new work to the available
    workers."""
    command = "temporal worker deployment set-current-version --deployment-name perdure"
    async with Build("v1", Stages()).at_work(client, tmp_path):
        not_current = await until(lambda: explain_build_routing(client), "the workers are seen")
        await workflow_builds.make_current(client, "v1")
        current = await explain_build_routing(client)
    back = await explain_own_build_routing(client, DeploymentSettings())

    assert not_current == (
        "new work goes to workers without a build id, but the workers here have build v1: "
        f"`{command} --build-id v1` sends it to these workers"
    )
    assert current == ""
    assert back == (
        "new work goes to build v1, but the workers here have no build id: "
        f"`{command} --unversioned` sends it to these workers"
    )


async def test_open_rollouts_of_another_build_are_one_sentence(
    client: Client, tmp_path: Path
) -> None:
    """`perdure up` with a new build reports the rollouts that wait for workers of the old build."""
    gate = Gate()
    old = Build("v1", Stages())
    old.stages.override["run_agent"] = gate.agent
    ours = workflow_builds.DEPLOYMENT.model_copy(update={"build_id": "v2"})
    async with old.at_work(client, tmp_path):
        await workflow_builds.make_current(client, "v1")
        await Perdure(client).start_rollout(rollout("long"))
        await gate.reached(rollout("long"))
        async with workflow_builds.next_build("v2").at_work(client, tmp_path):
            await workflow_builds.make_current(client, "v2")
        told = await until(lambda: explain_own_build_routing(client, ours), "the server lists it")
        same = await explain_own_build_routing(client, ours.model_copy(update={"build_id": "v1"}))
        gate.open.set()

    assert told.startswith(
        "open rollouts that need build v1: 1; start its workers with "
        "PERDURE_DEPLOYMENT__BUILD_ID=v1, or, "
    )
    assert "TemporalWorkerDeploymentVersion = 'perdure:v1'" in told
    assert "only build" not in same


@workflow.defn(name=temporal_names.ROLLOUT, sandboxed=False)
class FailingRollout:
    """Code that cannot replay or continue, or whose worker is too busy."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> None:
        error = _DeadlockError if request["instance"] == "toy/slow" else RuntimeError
        raise error("of another build, or too slow")


@pytest.mark.longer
async def test_a_cancelled_run_terminates_only_rollouts_whose_code_fails(client: Client) -> None:
    """Rollouts whose code fails, as after an upgrade without a build id, cannot handle a
    cancellation. Those of a busy worker can."""
    stages = Stages()
    stages.instances = ("toy/broken", "toy/slow")
    others = [one for one in WORKFLOWS if one is not RolloutWorkflow]
    request = RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    broken, slow = (
        client.get_workflow_handle(f"rollout/r1/{name}/0") for name in ("broken", "slow")
    )

    async def have_failed() -> bool:
        with contextlib.suppress(RPCError):  # one has not started yet
            described = [(await one.describe()).raw_description for one in (broken, slow)]
            tries = [one.pending_workflow_task.attempt for one in described]
            return min(tries) >= rollout_listing.FAILS_AFTER
        return False

    async with (
        stages.carried_out(client),
        workflow_worker(client, workflows=[*others, FailingRollout]),
    ):
        run = await Perdure(client).start_run(request)
        await until(have_failed, "the rollouts have failed")
        terminated = await run.cancel()
        ended = [(await one.describe()).status for one in (broken, slow)]
        await slow.terminate()
        with pytest.raises(Cancelled):
            await run.result()

    assert terminated == [broken.id]
    assert ended == [WorkflowExecutionStatus.TERMINATED, WorkflowExecutionStatus.RUNNING]


def test_it_is_known_of_every_workflow_what_a_deploy_does_to_it() -> None:
    """Rollouts and groups are pinned to their build. Longer-lived workflows move to the current
    one."""
    known = {str(_Definition.must_from_class(one).name) for one in WORKFLOWS}

    assert known == {*PINNED, *AUTO_UPGRADE_WORKFLOWS}
