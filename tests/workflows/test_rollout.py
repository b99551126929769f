"""RolloutWorkflow on a real server: its promises when activities succeed, fail and disappear."""

import asyncio
import contextlib
import time
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.exceptions import ApplicationError, CancelledError

from activities.activity_errors import translated
from perdure.client import search_attribute_keys as attributes
from perdure.client import temporal_names
from perdure.client.sdk import Perdure
from perdure.errors import NotFound, TokenizerChanged
from perdure.rollouts.activity_messages import (
    IDENTITY_DIFFERS,
    AgentRun,
    Attempt,
    Booted,
    Captured,
    Ending,
    GradedPatch,
    Truncation,
)
from perdure.types import (
    AgentEnd,
    EpisodeRef,
    Outcome,
    RolloutRequest,
    RolloutStatus,
)
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows.scripted_stages import Stages
from workflows import activity_options, rollout_workflow

REQUEST = {"run_id": "r1", "instance": "toy/add-1", "agent": "nop"}


async def _start(client: Client, request: Any, **options: Any) -> WorkflowHandle[Any, EpisodeRef]:
    return await client.start_workflow(
        temporal_names.ROLLOUT,
        request,
        id="rollout/r1/add-1/0",
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        result_type=EpisodeRef,
        **options,
    )


async def _played(client: Client, request: Any) -> EpisodeRef:
    """The episode, however the rollout ended. Raw handles raise if there is no verdict."""
    handle = await _start(client, request)
    return await Perdure(client).rollout(handle.id).result()


async def test_a_good_rollout_runs_each_stage_once(client: Client, stages: Stages) -> None:
    """Five stages in a line, nothing destroyed twice, and a graded episode at the end."""
    handle = await _start(client, REQUEST)

    episode = await handle.result()

    assert stages.names() == [
        "boot_sandbox",
        "run_agent",
        "capture_diff",
        "grade_in_fresh_sandbox",
        "emit_episode",
    ]
    assert (episode.status, episode.reward) == (RolloutStatus.GRADED, 1.0)


async def test_a_rollout_that_only_generates_ends_with_its_patch(
    client: Client, stages: Stages
) -> None:
    """It completes as `ungraded` without a grade, and the start that grades runs the grade stage."""
    generated = await _played(client, {**REQUEST, "grading": "later"})
    first = stages.names()
    await _played(client, {**REQUEST, "grading": "later", "start_at": "grade"})

    assert first == ["boot_sandbox", "run_agent", "capture_diff", "emit_episode"]
    assert generated.reward is None
    assert [ending.status.value for ending in stages.endings] == ["ungraded", "graded"]
    assert stages.names()[4:].count("grade_in_fresh_sandbox") == 1


async def test_a_grading_has_the_time_that_its_row_asks_for(client: Client, stages: Stages) -> None:
    """CPython's tests may take two hours per run."""
    limits: list[float] = []

    async def capture(_: Attempt) -> Captured:
        return Captured(size=10, files=1, empty=False, grade_timeout_s=7200)

    async def grade(_: Attempt) -> GradedPatch:
        limit = activity.info().start_to_close_timeout
        limits.append(limit.total_seconds() if limit else 0)
        return GradedPatch(outcome=Outcome.RESOLVED, reward=1.0)

    stages.override |= {"capture_diff": capture, "grade_in_fresh_sandbox": grade}
    await (await _start(client, REQUEST)).result()

    assert limits[0] > 4 * 7200


async def test_history_stays_within_its_budget(client: Client, stages: Stages) -> None:
    """Without failures, at most 60 events and 12 KB for a full request started by the SDK."""
    request = RolloutRequest(
        run_id="r1", instance="toy/add-1", agent="nop", group_id="r1/add-1", policy_version=7
    )
    handle = await _start(
        client,
        request,
        search_attributes=attributes.of_rollout(request),
        static_summary="add-1 #0 · nop",
    )
    await handle.result()

    history = await handle.fetch_history()
    size = sum(event.ByteSize() for event in history.events)

    assert (len(history.events) <= 60, size <= 12_000) == (True, True), (len(history.events), size)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({**REQUEST, "agnet": "nop"}, "agnet"),
        ({"run_id": "r1", "agent": "nop"}, "instance"),
        ({**REQUEST, "limits": {"memory_mb": 1}}, "limits.memory_mb"),
        ({**REQUEST, "max_attempts": "many"}, "max_attempts"),
        ({**REQUEST, "max_staleness": 1}, "policy_version"),
        ("toy/add-1", "instance"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(
    client: Client, stages: Stages, request_: Any, named: str
) -> None:
    """A hand-written input with a mistake fails at once and names the field, and nothing boots."""
    handle = await _start(client, request_)

    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()

    cause = failed.value.cause
    assert isinstance(cause, ApplicationError)
    assert named in cause.message
    assert stages.calls == []


async def test_a_lost_sandbox_means_a_new_attempt(client: Client, stages: Stages) -> None:
    """After SandboxLost on attempt 1, the sandbox is destroyed, and attempt 2 is graded."""

    async def lose_the_first(attempt: Any) -> AgentRun:
        if attempt.attempt == 1:
            raise ApplicationError("gone", "sandbox", type="SandboxLost", non_retryable=True)
        return AgentRun(end=AgentEnd.FINISHED, turns=1)

    stages.override["run_agent"] = lose_the_first
    episode = await _played(client, REQUEST)

    assert [c for c in stages.calls if c[0] in ("boot_sandbox", "destroy_sandbox")] == [
        ("boot_sandbox", 1),
        ("destroy_sandbox", 1),
        ("boot_sandbox", 2),
    ]
    assert (episode.status, episode.attempts) == (RolloutStatus.GRADED, 2)


async def test_losing_every_sandbox_is_a_failed_episode(client: Client, stages: Stages) -> None:
    """After max_attempts the workflow ends as failed at the sandbox boundary, without a reward."""

    async def lose(_: Any) -> AgentRun:
        raise ApplicationError("gone", "sandbox", type="SandboxLost", non_retryable=True)

    stages.override["run_agent"] = lose
    episode = await _played(client, {**REQUEST, "max_attempts": 2})

    assert episode.failure is not None
    assert (episode.status, episode.reward, episode.failure.boundary.value) == (
        RolloutStatus.FAILED,
        None,
        "sandbox",
    )


async def test_an_eviction_costs_no_attempt(client: Client, stages: Stages) -> None:
    """A worker that shuts down hands over: the attempt continues, and the episode counts the
    eviction."""
    evictions = 2

    async def evict(_: Any) -> AgentRun:
        nonlocal evictions
        if evictions:
            evictions -= 1
            raise ApplicationError("stop", type="WorkerEvicted", non_retryable=True)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = evict
    episode = await _played(client, REQUEST)

    assert (episode.attempts, stages.endings[0].evictions) == (1, 2)


async def test_an_agent_that_never_called_the_model_has_no_reward(
    client: Client, stages: Stages
) -> None:
    """Without a model call, the rollout fails at the agent boundary. It is not graded and not a
    zero."""

    async def silent(_: Any) -> AgentRun:
        return AgentRun(end=AgentEnd.NEVER_CALLED_MODEL, detail="exited 1")

    stages.override["run_agent"] = silent
    episode = await _played(client, REQUEST)

    assert episode.failure is not None
    assert (episode.reward, episode.failure.boundary.value) == (None, "agent")
    assert "grade_in_fresh_sandbox" not in stages.names()


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (AgentRun(end=AgentEnd.CRASHED, turns=3, detail="killed by 9"), RolloutStatus.GRADED),
        (AgentRun(end=AgentEnd.CRASHED), RolloutStatus.FAILED),
    ],
    ids=["answered", "before-its-first-call"],
)
async def test_an_agent_cannot_discard_its_episode_by_dying(
    client: Client, stages: Stages, run: AgentRun, status: RolloutStatus
) -> None:
    """A dead agent is captured and graded, unless it died before its first call."""

    async def die(_: Any) -> AgentRun:
        return run

    stages.override["run_agent"] = die
    episode = await _played(client, REQUEST)

    assert episode.status is status
    assert ("grade_in_fresh_sandbox" in stages.names()) == (status is RolloutStatus.GRADED)


@pytest.mark.parametrize("field", ["unanswered", "mcp_failed"])
@pytest.mark.parametrize("end", AgentEnd)
async def test_an_agent_without_an_answer_is_tried_again_until_it_has_one(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch, end: AgentEnd, field: str
) -> None:
    """However the agent ended after a call that nothing could answer, there is no verdict.
    Such attempts do not count: even more of them than `max_attempts` lead to a grade."""
    monkeypatch.setattr(rollout_workflow, "FIRST_PAUSE_S", 0.01)

    async def unanswered(attempt: Any) -> AgentRun:
        if attempt.attempt < 5:
            return AgentRun.model_validate({"end": end, "turns": 3, field: "it answered 401"})
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override["run_agent"] = unanswered
    episode = await _played(client, {**REQUEST, "max_attempts": 1})

    assert (episode.status, episode.reward, episode.attempts) == (RolloutStatus.GRADED, 1.0, 5)
    assert stages.names().count("grade_in_fresh_sandbox") == 1


@pytest.mark.parametrize(
    ("limit_s", "retry_on"), [(0.0, ["CallUnanswered"]), (60.0, [])], ids=["time", "request"]
)
async def test_a_rollout_without_answers_ends_without_a_reward(
    client: Client,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    retry_on: list[str],
) -> None:
    """It gives up after its time limit, or at once if the request says so, and never with reward
    0."""
    monkeypatch.setattr(rollout_workflow, "LONGEST_WAIT_S", limit_s)

    async def unanswered(_: Any) -> AgentRun:
        return AgentRun(end=AgentEnd.FINISHED, turns=3, unanswered="the engine answered 520: no")

    stages.override["run_agent"] = unanswered
    episode = await _played(client, {**REQUEST, "retry_on": retry_on})

    assert (episode.status, episode.reward, episode.attempts) == (RolloutStatus.FAILED, None, 1)
    assert episode.failure is not None
    assert (episode.failure.boundary.value, episode.failure.type) == ("engine", "CallUnanswered")
    assert "the engine answered 520" in episode.failure.message


async def test_a_dead_mcp_server_is_a_failure_of_the_tool(client: Client, stages: Stages) -> None:
    """Its rollout has no reward, and says which server could not answer."""

    async def failed(_: Any) -> AgentRun:
        return AgentRun(end=AgentEnd.FINISHED, turns=3, mcp_failed="MCP server 'docs' is dead")

    stages.override["run_agent"] = failed
    episode = await _played(client, {**REQUEST, "retry_on": []})

    assert (episode.status, episode.reward) == (RolloutStatus.FAILED, None)
    assert episode.failure is not None
    assert (episode.failure.boundary.value, episode.failure.type) == ("tool", "CallUnanswered")
    assert "MCP server 'docs' is dead" in episode.failure.message


@pytest.mark.parametrize(
    ("retry_on", "attempts"), [(("SandboxLost",), 1), (("SandboxLost", "AgentError"), 3), ((), 1)]
)
async def test_a_rollout_is_tried_again_after_the_failures_that_it_names(
    client: Client, stages: Stages, retry_on: tuple[Any, ...], attempts: int
) -> None:
    """If the request says so, an agent that ended without a call gets a new sandbox."""

    async def silent(_: Any) -> AgentRun:
        return AgentRun(end=AgentEnd.NEVER_CALLED_MODEL, detail="exited 1")

    stages.override["run_agent"] = silent
    episode = await _played(client, {**REQUEST, "retry_on": list(retry_on)})

    assert stages.names().count("run_agent") == attempts
    assert (episode.status, episode.attempts) == (RolloutStatus.FAILED, attempts)


@pytest.mark.parametrize(
    ("retry_on", "status", "reward"),
    [
        (("SandboxLost", "CallUnanswered"), RolloutStatus.FAILED, None),
        (("TokenizerChanged",), RolloutStatus.GRADED, 1.0),
    ],
)
async def test_a_rollout_whose_model_gets_another_tokenizer_goes_on_only_if_the_request_says_so(
    client: Client,
    stages: Stages,
    retry_on: tuple[Any, ...],
    status: RolloutStatus,
    reward: float | None,
) -> None:
    """A second attempt has a session with the new tokenizer. Without one there is no reward."""

    async def changed(attempt: Any) -> AgentRun:
        async def refused() -> AgentRun:
            raise TokenizerChanged("the model judge now has the tokenizer 'x'")

        if attempt.attempt < 2:
            return await translated(refused())
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override["run_agent"] = changed
    episode = await _played(client, {**REQUEST, "retry_on": list(retry_on)})

    assert (episode.status, episode.reward) == (status, reward)
    if episode.failure is not None:
        found = episode.failure
        assert (found.boundary.value, found.type) == ("engine", "TokenizerChanged")
        assert "model judge" in found.message


async def test_bad_configuration_ends_the_rollout_without_retries(
    client: Client, stages: Stages
) -> None:
    """A failure that only a user can fix is reported once, at its boundary."""

    async def refuse(_: Any) -> Booted:
        raise ApplicationError("no bwrap", "sandbox", type="MissingDependency", non_retryable=True)

    stages.override["boot_sandbox"] = refuse
    episode = await _played(client, REQUEST)

    assert episode.failure is not None
    assert (episode.failure.type, stages.names().count("boot_sandbox")) == ("MissingDependency", 1)


async def test_lost_grading_sandboxes_end_the_rollout_as_failed(
    client: Client, stages: Stages
) -> None:
    """The agent does not run again, and the reward is null, not 0."""

    async def give_up(_: Any) -> None:
        raise ApplicationError("3 lost", "sandbox", type="GradingSandboxesLost", non_retryable=True)

    stages.override["grade_in_fresh_sandbox"] = give_up
    episode = await _played(client, REQUEST)

    assert episode.failure is not None
    assert (episode.status, episode.reward) == (RolloutStatus.FAILED, None)
    assert (episode.failure.boundary.value, stages.names().count("run_agent")) == ("sandbox", 1)


async def test_cancel_still_leaves_an_episode(client: Client, stages: Stages) -> None:
    """Cancelled while the agent runs: the sandbox is destroyed, and the episode says cancelled."""
    running = asyncio.Event()

    async def forever(_: Any) -> AgentRun:
        from temporalio import activity

        running.set()
        while True:
            activity.heartbeat()
            await asyncio.sleep(0.1)

    stages.override["run_agent"] = forever
    handle = await _start(client, REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        await running.wait()
    await handle.cancel()

    with pytest.raises(WorkflowFailureError) as ended:
        await handle.result()

    assert isinstance(ended.value.cause, CancelledError)
    assert stages.names()[-2:] == ["destroy_sandbox", "emit_episode"]
    assert stages.endings[0].status is RolloutStatus.CANCELLED


@pytest.mark.parametrize("cause", ["cancel", "spent", "truncate"])
async def test_an_agent_is_stopped_without_a_heartbeat(
    client: Client, stages: Stages, cause: str
) -> None:
    """Its watcher would learn of a cancellation only from a heartbeat, a minute later. The gateway
    ends the agent's calls, which the watcher notices, and the agent's work is kept."""
    is_working, has_no_calls = asyncio.Event(), asyncio.Event()

    async def agent(_: Attempt) -> AgentRun:
        is_working.set()
        await has_no_calls.wait()
        return AgentRun(end=AgentEnd.LIMIT, turns=3, stopped=True)

    async def stop_calls(_: Attempt) -> None:
        has_no_calls.set()

    stages.override |= {"run_agent": agent, "stop_calls": stop_calls}
    rollout = await _start(client, REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        await is_working.wait()
    if cause == "cancel":
        await rollout.cancel()
    else:
        now = Truncation(by="deadline", cause="the run's deadline", ends_at=time.time() + 600)
        await rollout.signal(cause, *([now] if cause == "truncate" else []))
    with contextlib.suppress(WorkflowFailureError):
        async with asyncio.timeout(PATIENCE_S):
            await rollout.result()

    ends = {"cancel": "cancelled", "spent": "graded", "truncate": "truncated"}
    assert stages.endings[0].status.value == ends[cause]
    assert stages.names().count("run_agent") == 1


def _parked(resets_at: float) -> Booted:
    return Booted(resets_at=resets_at, reason="the quota resets tonight: answered 429")


async def test_a_rollout_waits_for_its_quota_without_a_sandbox(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It boots after the reset, and neither its attempts nor its time without answers are used up."""
    monkeypatch.setattr(rollout_workflow, "FIRST_PAUSE_S", 0.01)
    is_closed, resets_at, booted_at = False, 0.0, [0.0]

    async def boot(_: Attempt) -> Booted:
        nonlocal is_closed, resets_at
        if is_closed:
            is_closed, resets_at = False, time.time() + 1.5
            return _parked(resets_at)
        booted_at.append(time.time())
        return Booted(uri="file:///x")

    async def exhaust(attempt: Attempt) -> AgentRun:
        nonlocal is_closed
        if attempt.attempt < 4:
            is_closed = True
            monkeypatch.setattr(rollout_workflow, "LONGEST_WAIT_S", 1.0)
            return AgentRun(end=AgentEnd.LIMIT, turns=3, unanswered="answered 429")
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override |= {"boot_sandbox": boot, "run_agent": exhaust}
    episode = await _played(client, {**REQUEST, "max_attempts": 1})

    assert (episode.status, episode.attempts) == (RolloutStatus.GRADED, 4)
    assert stages.names().count("run_agent") == 4
    assert booted_at[-1] >= resets_at


@pytest.mark.parametrize(
    ("cause", "status"),
    [("truncate", "truncated"), ("spent", "cancelled"), ("cancel", "cancelled")],
)
async def test_a_parked_rollout_ends_with_its_run(
    client: Client, stages: Stages, cause: str, status: str
) -> None:
    """The run's deadline, its budget and a user end the wait at once, before any boot."""

    async def boot(_: Attempt) -> Booted:
        return _parked(time.time() + 86400)

    stages.override["boot_sandbox"] = boot
    rollout = await _start(client, REQUEST)

    async def is_parked() -> bool:
        return bool((await rollout.query("state"))["stage"] == "parked")

    await until(is_parked, "the rollout is parked", PATIENCE_S)
    story = (await rollout.query("state"))["story"]
    now = Truncation(by="deadline", cause="the run's deadline", ends_at=time.time())
    if cause == "cancel":
        await rollout.cancel()
    else:
        await rollout.signal(cause, *([now] if cause == "truncate" else []))
    with contextlib.suppress(WorkflowFailureError):
        async with asyncio.timeout(PATIENCE_S):
            await rollout.result()

    (ending,) = stages.endings
    assert ending.status.value == status
    assert stages.names().count("boot_sandbox") == 1
    assert "the quota resets tonight" in story[-1]
    if ending.failure is not None:
        assert "the quota resets tonight" in ending.failure.message


async def _is_parked(rollout: WorkflowHandle[Any, Any]) -> bool:
    return bool((await rollout.query("state"))["stage"] == "parked")


@pytest.mark.parametrize("stage", ["boot_sandbox", "grade_in_fresh_sandbox"])
async def test_a_user_opens_an_account_early(client: Client, stages: Stages, stage: str) -> None:
    """A parked rollout asks again at once. Its agent's work is neither lost nor repeated."""
    opened: list[bool] = []

    async def boot(_: Attempt) -> Booted:
        return Booted(uri="file:///x") if opened else _parked(time.time() + 86400)

    async def grade(_: Attempt) -> GradedPatch:
        if opened:
            return GradedPatch(outcome=Outcome.RESOLVED, reward=1.0)
        closed = _parked(time.time() + 86400)
        return GradedPatch(
            outcome=None, reward=None, reason=closed.reason, resets_at=closed.resets_at
        )

    stages.override[stage] = boot if stage == "boot_sandbox" else grade
    rollout = await _start(client, REQUEST)
    await until(lambda: _is_parked(rollout), "the rollout is parked", PATIENCE_S)
    opened.append(True)
    await rollout.signal(temporal_names.OPENED)
    async with asyncio.timeout(PATIENCE_S):
        episode = EpisodeRef.model_validate(await rollout.result())

    assert (episode.status, episode.attempts) == (RolloutStatus.GRADED, 1)
    assert stages.names().count(stage) == 2
    assert stages.names().count("run_agent") == 1


async def test_a_parked_grading_ends_with_its_run(client: Client, stages: Stages) -> None:
    """The run's deadline does not wait for an account. The patch stays in the store."""

    async def grade(_: Attempt) -> GradedPatch:
        reason = "the quota resets tonight: answered 402"
        return GradedPatch(outcome=None, reward=None, reason=reason, resets_at=time.time() + 86400)

    stages.override["grade_in_fresh_sandbox"] = grade
    rollout = await _start(client, REQUEST)
    await until(lambda: _is_parked(rollout), "the rollout is parked", PATIENCE_S)
    await rollout.signal("spent")  # the budget is for agents, so the grading stays parked
    is_parked = await _is_parked(rollout)
    now = Truncation(by="deadline", cause="the run's deadline", ends_at=time.time())
    await rollout.signal("truncate", now)
    async with asyncio.timeout(PATIENCE_S):
        await rollout.result()

    (ending,) = stages.endings
    assert is_parked
    assert (ending.status, stages.names().count("grade_in_fresh_sandbox")) == ("truncated", 1)
    assert ending.failure is not None
    assert "the quota resets tonight" in ending.failure.message


async def test_a_truncation_between_attempts_names_the_last_failure(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user sees what kept the rollout from a verdict, not only that its time was over."""
    monkeypatch.setattr(rollout_workflow, "FIRST_PAUSE_S", 600.0)

    async def unanswered(_: Attempt) -> AgentRun:
        return AgentRun(end=AgentEnd.FINISHED, unanswered="no engine answers")

    async def is_over() -> bool:
        return "capture_diff" in stages.names()

    stages.override["run_agent"] = unanswered
    rollout = await _start(client, REQUEST)
    await until(is_over, "the first attempt has ended", PATIENCE_S)
    now = Truncation(by="deadline", cause="the run's deadline", ends_at=time.time())
    await rollout.signal("truncate", now)
    with contextlib.suppress(WorkflowFailureError):
        async with asyncio.timeout(PATIENCE_S):
            await rollout.result()

    failure = stages.endings[0].failure
    assert failure is not None
    assert failure.message.startswith("the run's deadline was reached before its next attempt")
    assert failure.message.endswith("no engine answers")


async def test_a_cancelled_boot_does_not_wait_for_a_provider_that_is_away(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was booted, so the cleanup is tried for seconds. After that the reaper suffices."""
    monkeypatch.setattr(activity_options, "UNBOOTED_S", 1.0)
    tried = asyncio.Event()

    async def away(_: Any) -> None:
        tried.set()
        raise ApplicationError("Cannot connect to the Docker daemon", type="ControlPlaneError")

    stages.override |= {"boot_sandbox": away, "destroy_sandbox": away}
    handle = await _start(client, REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        await tried.wait()
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()

    assert stages.endings[0].status is RolloutStatus.CANCELLED


async def test_cancelling_what_has_ended_says_how_it_ended(client: Client, stages: Stages) -> None:
    """The error has the outcome and the reward, not a server's status code."""
    handle = await _start(client, REQUEST)
    await handle.result()

    with pytest.raises(NotFound, match=r"had ended before \(resolved, reward 1\)"):
        await Perdure(client).rollout(handle.id).cancel()


async def test_a_finished_rollout_is_not_done_again(client: Client, stages: Stages) -> None:
    """The stored episode is returned: no agent, no grading, no second episode."""
    done = EpisodeRef(
        uri="file:///old", instance_id="add-1", sample_index=0, agent="nop",
        status=RolloutStatus.GRADED, reward=1.0,
    )  # fmt: skip

    async def finished(_: Any) -> Booted:
        return Booted(done=done)

    stages.override["boot_sandbox"] = finished
    episode = await _played(client, REQUEST)

    assert (episode.uri, stages.names()) == ("file:///old", ["boot_sandbox"])


async def test_expired_before_boot_ends_as_expired(client: Client, stages: Stages) -> None:
    """A rollout that is still queued at `expires_at` gets no sandbox, and its episode says so."""

    async def expired(_: Any) -> Booted:
        return Booted(expired=True)

    stages.override["boot_sandbox"] = expired
    episode = await _played(client, REQUEST)

    assert (episode.status, stages.names()) == (
        RolloutStatus.EXPIRED,
        ["boot_sandbox", "emit_episode"],
    )


async def test_stages_follow_the_sandbox_to_its_host(client: Client, stages: Stages) -> None:
    """Workers of host-1 watch a sandbox that is a process of host-1."""

    async def here(_: Any) -> Booted:
        return Booted(host="host-1")

    stages.override["boot_sandbox"] = here
    handle = await _start(client, REQUEST)
    await handle.result()

    scheduled = {
        event.activity_task_scheduled_event_attributes.activity_type.name:
        event.activity_task_scheduled_event_attributes.task_queue.name
        for event in (await handle.fetch_history()).events
        if event.HasField("activity_task_scheduled_event_attributes")
    }  # fmt: skip
    assert (scheduled["run_agent"], scheduled["capture_diff"]) == (
        temporal_names.host_queue("host-1"),
        temporal_names.upkeep_queue("host-1"),
    )


async def test_a_cancellation_is_not_lost_in_a_stage_that_ends_well(
    client: Client, stages: Stages
) -> None:
    """Cancelled while it boots, and the boot still succeeds: no agent starts."""
    booting, told = asyncio.Event(), asyncio.Event()

    async def boot(_: Any) -> Booted:
        booting.set()
        await told.wait()
        return Booted()

    stages.override["boot_sandbox"] = boot
    handle = await _start(client, REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        await booting.wait()
    await handle.cancel()
    told.set()

    with pytest.raises(WorkflowFailureError):
        await handle.result()

    assert stages.names() == ["boot_sandbox", "destroy_sandbox", "emit_episode"]
    assert stages.endings[0].status is RolloutStatus.CANCELLED


async def test_a_cancellation_does_not_stop_the_episode(client: Client, stages: Stages) -> None:
    """A rollout that is cancelled while its episode is written ends as graded."""
    emitting, told = asyncio.Event(), asyncio.Event()

    async def emit(_: Any) -> EpisodeRef:
        from temporalio import activity

        emitting.set()
        while not told.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.1)
        return EpisodeRef(
            uri="file:///x", instance_id="add-1", sample_index=0, agent="nop",
            status=RolloutStatus.GRADED, reward=1.0,
        )  # fmt: skip

    stages.override["emit_episode"] = emit
    handle = await _start(client, REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        await emitting.wait()
    await handle.cancel()

    async def asked() -> bool:
        return "EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED" in await _event_types(handle)

    await until(asked, "the cancellation is in the history")
    told.set()

    assert (await handle.result()).status is RolloutStatus.GRADED


async def test_the_stage_is_listed(client: Client, stages: Stages) -> None:
    """`PerdureStage` follows a rollout, without a timer in the history."""
    told = asyncio.Event()

    async def slowly(_: Any) -> AgentRun:
        await told.wait()
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = slowly
    handle = await _start(client, REQUEST)

    async def listed() -> bool:
        return await _stage(handle) == "agent"

    await until(listed, "its stage is listed")
    told.set()
    await handle.result()

    assert await _stage(handle) == "done"
    assert "EVENT_TYPE_TIMER_STARTED" not in await _event_types(handle)


async def test_a_rollout_without_verdict_fails_and_carries_its_episode(
    client: Client, stages: Stages
) -> None:
    """The rollout is red in the Web UI, which names boundary and cause. The SDK still returns the
    episode."""

    async def silent(_: Any) -> AgentRun:
        return AgentRun(end=AgentEnd.NEVER_CALLED_MODEL, detail="exited 1")

    stages.override["run_agent"] = silent
    handle = await _start(client, REQUEST)
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    episode = await Perdure(client).rollout(handle.id).result()
    described = await handle.describe()

    assert str(failed.value.cause).startswith("NoVerdict: agent: the agent ended without")
    assert (episode.status, episode.uri) == (RolloutStatus.FAILED, "file:///x/episode.json")
    assert described.status is WorkflowExecutionStatus.FAILED
    assert described.typed_search_attributes.get(attributes.OUTCOME) == "failed"


@pytest.mark.parametrize(
    ("workflow_id", "input_"),
    [
        ("rollout/r9/add-1/0", {"instance": "toy/add-1"}),
        ("by-hand", {"run_id": "r9", "instance": "toy/add-1", "agnet": "nop"}),
    ],
)
async def test_a_refused_input_is_listed_under_its_run(
    client: Client, stages: Stages, workflow_id: str, input_: Any
) -> None:
    """A refused input is listed by the run id in the input or in the workflow id."""
    handle: WorkflowHandle[Any, Any] = await client.start_workflow(
        temporal_names.ROLLOUT, input_, id=workflow_id, task_queue=temporal_names.WORKFLOWS_QUEUE
    )
    with pytest.raises(WorkflowFailureError):
        await handle.result()

    known = (await handle.describe()).typed_search_attributes
    assert (known.get(attributes.RUN), known.get(attributes.FAILURE)) == (
        "r9",
        "input:InvalidRequest",
    )


@pytest.mark.parametrize(
    ("workflow", "input_"),
    [
        (temporal_names.ROLLOUT, {"run_id": "r9", "instance": "toy/add-1", "agent": "nop"}),
        (
            temporal_names.GROUP,
            {"rollout": {"run_id": "r9", "instance": "toy/add-1", "agent": "nop"}},
        ),
        (
            temporal_names.RUN,
            {"run_id": "r9", "instances": ["toy/add-1"], "rollout": {"agent": "nop"}},
        ),
    ],
)
async def test_a_request_is_refused_under_another_workflow_id(
    client: Client, stages: Stages, workflow: str, input_: Any
) -> None:
    """No command would find it, and it could run twice at once. The message has the right id."""
    handle: WorkflowHandle[Any, Any] = await client.start_workflow(
        workflow, input_, id=f"{workflow}-by-hand", task_queue=temporal_names.WORKFLOWS_QUEUE
    )

    with pytest.raises(WorkflowFailureError) as refused:
        await handle.result()

    assert "start it with --workflow-id " in str(refused.value.cause)
    assert "/r9" in str(refused.value.cause)
    assert stages.calls == []


async def test_a_rollout_that_the_store_has_as_another_one_touches_nothing(
    client: Client, stages: Stages
) -> None:
    """It touches neither the stored episode nor the other rollout's sandbox, and fails with the
    differences."""

    async def refuse(_: Any) -> Booted:
        raise ApplicationError("agent: nop -> oracle", type=IDENTITY_DIFFERS, non_retryable=True)

    stages.override["boot_sandbox"] = refuse
    request = RolloutRequest.model_validate(REQUEST)
    handle = await Perdure(client).start_rollout(request)

    episode = await handle.result()

    assert (episode.status, episode.reward) == (RolloutStatus.FAILED, None)
    assert episode.failure is not None
    assert episode.failure.message == "agent: nop -> oracle"
    assert stages.names() == ["boot_sandbox"]


async def test_later_stages_use_the_attempt_that_was_booted(client: Client, stages: Stages) -> None:
    """If attempts of an earlier workflow are used up, every later stage works on the new one."""

    async def third(_: Any) -> Booted:
        return Booted(attempt=3)

    stages.override["boot_sandbox"] = third
    await _played(client, REQUEST)

    assert [number for name, number in stages.calls if name != "boot_sandbox"][:3] == [3, 3, 3]
    assert stages.endings[0].attempts == 3


async def _stage(handle: WorkflowHandle[Any, Any]) -> str | None:
    return (await handle.describe()).typed_search_attributes.get(attributes.STAGE)


async def _event_types(handle: WorkflowHandle[Any, Any]) -> list[str]:
    from temporalio.api.enums.v1 import EventType

    return [EventType.Name(e.event_type) for e in (await handle.fetch_history()).events]


@pytest.mark.parametrize(("asked", "listed"), [(None, 9), (8, 8)])
async def test_a_rollout_is_listed_under_its_policy_version(
    client: Client, stages: Stages, asked: int | None, listed: int
) -> None:
    """It is the version that the request names, or else the newest version that sampled it."""

    async def emitted(ending: Ending) -> EpisodeRef:
        return EpisodeRef(
            uri="file:///x/episode.json",
            instance_id="add-1",
            sample_index=0,
            agent="nop",
            status=ending.status,
            policy_version_min=8,
            policy_version_max=9,
        )

    stages.override["emit_episode"] = emitted
    handle = await _start(client, {**REQUEST, "policy_version": asked})
    await handle.result()
    found = (await handle.describe()).typed_search_attributes

    assert found.get(attributes.POLICY_VERSION) == listed
