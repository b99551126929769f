"""What a run or a rollout is, and what may change in it, on a real stack."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.service import RPCError, RPCStatusCode

from perdure.cli.main import invoke
from perdure.errors import Cancelled, ConfigurationError
from perdure.instances import instance_catalog
from perdure.rollouts.run_record import changes_of, current_request
from perdure.storage import store_keys
from perdure.types import Budget, GroupRequest, RolloutRequest, RolloutStatus, RunRequest
from tests.stack.gated_engine import TURNS
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE, SLOW_INSTANCE, UNSOLVED_INSTANCE
from tests.stack.running_stack import MET, Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.mark.longer
async def test_a_run_continues_with_more_samples_and_keeps_a_record(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has ended plays only the samples that it lacks; what changed is written down."""
    one = RunRequest(run_id="more", instances=(INSTANCE,), rollout={"agent": "oracle"})
    await (await stack.perdure.start_run(one)).result()
    (first,) = [r for r in await stack.perdure.rollouts("more")]

    two = await stack.perdure.start_run(one.model_copy(update={"n_samples": 2}))
    summary = await two.result()

    assert two.changes == ["n_samples: 1 -> 2"]
    assert (summary.rollouts, summary.resolved) == (2, 2)
    (change,) = await changes_of(stack.store, "more")
    assert (change.fields, change.told) == ({"n_samples": 2}, ("n_samples: 1 -> 2",))
    assert "@" in change.by
    assert (await current_request(stack.store, "more")).n_samples == 2
    again = [r for r in await stack.perdure.rollouts("more") if r.sample_index == 0]
    assert first.episode is not None
    assert [r.episode.uri for r in again if r.episode] == [first.episode.uri]

    _use(stack, monkeypatch)
    await asyncio.to_thread(invoke, ["status", "more"])
    assert f"by {change.by}: n_samples: 1 -> 2\n" in capsys.readouterr().out

    joined = await stack.perdure.start_run(one.model_copy(update={"concurrency": 2}))
    assert joined.changes == []  # the samples that it does not give stay; it has ended


async def test_a_run_that_has_ended_adds_instances(stack: Stack) -> None:
    """It runs only those that it lacks, and its record and its list have them."""
    one = RunRequest(run_id="grown", instances=(INSTANCE,), rollout={"agent": "oracle"})
    await (await stack.perdure.start_run(one)).result()
    (first,) = await stack.perdure.rollouts("grown")

    two = one.model_copy(update={"instances": (UNSOLVED_INSTANCE, INSTANCE)})
    more = await stack.perdure.start_run(two)
    summary = await more.result()

    assert more.changes == ["instances: 1 -> 2"]
    assert (summary.rollouts, summary.graded) == (2, 2)
    again = {r.instance: r.episode for r in await stack.perdure.rollouts("grown")}
    assert again.keys() == {INSTANCE, UNSOLVED_INSTANCE}
    assert again[INSTANCE] == first.episode
    assert (await current_request(stack.store, "grown")).instances == two.instances
    with pytest.raises(ConfigurationError, match="keeps its instances"):
        await stack.perdure.start_run(one)


async def test_the_same_command_runs_only_what_is_new(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger limit, and new rows of the dataset with an unchanged command, continue one run."""
    _use(stack, monkeypatch)
    row = await instance_catalog.load(stack.store, INSTANCE)

    async def add(name: str) -> None:
        named = row.model_copy(update={"dataset": "growing", "instance_id": name})
        await instance_catalog.save(stack.store, named)

    async def run(*more: str) -> tuple[str, list[str]]:
        capsys.readouterr()
        command = ["run", "growing", "-a", "oracle", "--json", *more]
        assert await asyncio.to_thread(invoke, command) == 0
        found = json.loads(capsys.readouterr().out)
        return found["run_id"], [one["instance_id"] for one in found["rollouts"]]

    for name in ("b", "c"):
        await add(name)
    run_id, first = await run("-l", "1")
    request = RolloutRequest(run_id=run_id, instance="growing/b", agent="oracle")
    sampled = await stack.store.get(store_keys.episode(request))
    limited = await run("-l", "2")
    await add("a")
    await run()
    await add("d")
    (_, last) = await run()

    assert (first, limited) == (["b"], (run_id, ["b", "c"]))
    assert sorted(last) == ["a", "b", "c", "d"]
    assert await stack.store.get(store_keys.episode(request)) == sampled, "b ran once"


@pytest.mark.longer
async def test_a_deleted_run_starts_from_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run id samples again: neither Temporal, the store nor the gateway has the old turns."""
    request = stack.request("deleted")
    shared = {"agent": request.agent, "agent_options": request.agent_options}
    run = RunRequest(run_id="deleted", instances=(INSTANCE,), rollout=shared)
    stack.engine.hold(MET)
    cancelled = await stack.perdure.start_run(run)
    await stack.held(request)
    await cancelled.cancel()
    with pytest.raises(Cancelled):
        await cancelled.result()
    stack.engine.let_go()
    _use(stack, monkeypatch)
    monkeypatch.setenv("PERDURE_GATEWAY__URL", stack.settings.gateway_base_url)

    code = await asyncio.to_thread(invoke, ["runs", "delete", "deleted", "--yes"])
    again = await stack.perdure.start_run(run)
    summary = await again.result()

    assert (code, again.joined, summary.resolved) == (0, False, 1)
    sampled, session = stack.engine.times_sampled(), stack.identity(request, "agent")
    times = [sampled[f"{session}-{turn}"] for turn in range(TURNS)]
    assert times == [2] * (MET + 1) + [1] * (TURNS - MET - 1)
    assert await changes_of(stack.store, "deleted") == []


@pytest.mark.longer
async def test_a_larger_budget_continues_a_stopped_run(stack: Stack) -> None:
    """Tokens that the run has used count; agents that the budget stopped are not played twice."""
    agent = stack.request("budget").agent
    small = RunRequest(
        run_id="budget",
        instances=(INSTANCE, SLOW_INSTANCE),
        concurrency=1,
        rollout={"agent": agent},
        budget=Budget(tokens=1),
    )
    stopped = await (await stack.perdure.start_run(small)).result()

    large = small.model_copy(update={"budget": Budget(tokens=10**9)})
    summary = await (await stack.perdure.start_run(large)).result()

    assert "of 1 tokens" in stopped.stopped
    assert stopped.by_status == {"graded": 1, "cancelled": 1}
    assert (summary.stopped, summary.by_status) == ("", {"graded": 2})


@pytest.mark.longer
async def test_what_temporal_forgot_answers_no_other_request(stack: Stack) -> None:
    """When a group and its rollouts are deleted there, only the store knows them."""
    oracle = RolloutRequest(run_id="forgotten", instance=INSTANCE, agent="oracle")
    group = GroupRequest(rollout=oracle, n_samples=2)
    first = await (await stack.perdure.start_group(group)).result()
    for workflow in (group.workflow_id, *(group.sample(k).workflow_id for k in range(2))):
        await _forget(stack, workflow)
    other = oracle.model_copy(update={"agent": "nop", "policy_version": 999})

    asked = GroupRequest(rollout=other, n_samples=2)
    refused = await (await stack.perdure.start_group(asked)).result()

    assert [e.reward for e in first.episodes] == [1.0, 1.0]
    assert [(e.status, e.reward) for e in refused.episodes] == [(RolloutStatus.FAILED, None)] * 2
    for episode in refused.episodes:
        assert episode.failure is not None
        assert 'agent: "oracle" -> "nop"' in episode.failure.message
        assert "policy_version: null -> 999" in episode.failure.message
    with pytest.raises(ConfigurationError, match="another run_id"):
        await stack.perdure.start_group(group)


def _use(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use this stack."""
    monkeypatch.setenv("PERDURE_HOME", str(stack.home))
    monkeypatch.setenv("PERDURE_STORE", stack.store.url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.client.service_client.config.target_host)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", stack.client.namespace)


async def _forget(stack: Stack, workflow_id: str) -> None:
    await stack.client.workflow_service.delete_workflow_execution(
        DeleteWorkflowExecutionRequest(
            namespace=stack.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id),
        )
    )

    async def is_gone() -> bool:
        try:
            await stack.client.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            return error.status is RPCStatusCode.NOT_FOUND
        return False

    await until(is_gone, f"{workflow_id} is deleted")
