"""Rollouts outlive their workers, sandboxes and users: real processes, real signals, one stack.

The quick half of the promises in docs/durability.md; `make chaos` runs the other.
"""

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, CancelledError

from perdure.cli.runs.rollout_progress import current_step
from perdure.client import temporal_names
from perdure.engines.engine_roster import StoredRoster, add_engine, remove_engine, roster_key
from perdure.engines.engine_state import EngineSpec, name_of
from perdure.episodes import turns_parquet
from perdure.errors import NotFound
from perdure.gateway.control_client import GatewayControl
from perdure.home_folder import load_secret, load_secrets
from perdure.rollouts.activity_messages import Truncation
from perdure.sandboxes.base import identity_of
from perdure.types import AgentEnd, Caps, EpisodeRef, Outcome, RolloutRequest, RolloutStatus, Turn
from tests.stack.gated_engine import TURNS, commands
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE, SLOW_INSTANCE
from tests.stack.running_stack import DEATH_S, Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

HELD = 3
"""The turn in which a test interrupts: half of the commands are done, the fix is not."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    """The shared stack with all processes up and no held turns."""
    await shared.refresh()
    yield shared
    shared.engine.let_go()


async def test_a_killed_worker_is_replaced_and_the_agent_runs_on(stack: Stack) -> None:
    """kill -9 mid-turn: another worker re-attaches to the same process; no call is repeated. The host
    reports the death: no heartbeat would be missed for hours."""
    stack.engine.hold(HELD)
    request = await stack.start("worker-killed", heartbeat_timeout_s=7200)
    await stack.held(request)
    agents = stack.agents()
    await stack.workers[0].kill()
    await stack.start_worker()
    await stack.watched(request, attempt=2)

    assert agents
    assert stack.agents() == agents
    stack.engine.let_go()
    await stack.solved_once(request)


@pytest.mark.longer
async def test_a_worker_that_is_told_to_stop_hands_over(stack: Stack) -> None:
    """SIGTERM with a second worker up: same attempt, same agent process, one eviction recorded."""
    stack.engine.hold(HELD)
    request = await stack.start("worker-evicted")
    await stack.held(request)
    agents = stack.agents()
    first = stack.worker_of(await stack.at(request, "run_agent"))
    second = await stack.start_worker()
    os.kill(first.pid, signal.SIGTERM)

    async def handed_over() -> bool:
        return await stack.watched(request) == second.pid

    await until(handed_over, "the second worker watches")
    assert await first.ended() == 0
    assert stack.agents() == agents
    stack.engine.let_go()
    await stack.solved_once(request)
    assert (await stack.episode(request)).evictions == 1


@pytest.mark.longer
async def test_a_replaced_secret_ends_no_rollout(stack: Stack) -> None:
    """The secret changes mid-turn, and worker and gateway start again: the agent goes on with its key."""
    stack.engine.hold(HELD)
    request = await stack.start("secret-replaced", heartbeat_timeout_s=DEATH_S)
    await stack.held(request)
    file = stack.home / "run" / "secret"
    both = file.with_name("both")
    both.write_text("another-secret-of-this-home\n" + file.read_text())
    both.replace(file)
    await stack.kill_all(stack.gateway, *stack.workers)
    await stack.recover()
    stack.engine.let_go()

    await stack.solved_once(request, again=1)


async def test_a_lost_sandbox_means_a_new_attempt_and_keeps_the_old_evidence(stack: Stack) -> None:
    """kill -9 of what holds the sandbox: attempt 2 solves it, and samples no turn of attempt 1 again;
    turns and output of 1 stay, and only the journal goes when the episode is there."""
    stack.engine.hold(HELD)
    request = await stack.start("sandbox-lost")
    await stack.held(request)
    await stack.lose(request, "agent")
    await stack.held(request, attempt=2)
    stack.engine.let_go()

    await stack.solved_once(request, attempt=2, replayed=HELD)
    kept = turns_parquet.decode(await stack.read(request, "turns.parquet", attempt=1))
    assert len(kept) == HELD
    assert await stack.lines(request, "stdout.log", attempt=1) == [
        f"{command} 0" for command in commands()[:HELD]
    ]
    sessions = [
        identity_of(request.run_id, request.workflow_id, "agent", number) for number in (1, 2)
    ]
    assert [name for name in sessions if (stack.home / "store/journal" / name).exists()] == []


def _flip(record: Path) -> None:
    data = bytearray(record.read_bytes())
    data[200] ^= 1
    record.write_bytes(data)


REST_OF_DAMAGE = ((-1, _flip), (1, Path.unlink), (-1, Path.unlink))


@pytest.mark.parametrize(
    ("at", "damage"),
    [(1, _flip), *(pytest.param(*one, marks=pytest.mark.longer) for one in REST_OF_DAMAGE)],
)
async def test_a_damaged_journal_means_a_new_attempt(
    stack: Stack, damage: Callable[[Path], None], at: int
) -> None:
    """A flipped bit, or a lost record, the last one too, under a dead gateway: attempt 2 replays what is
    whole, and its episode has every turn."""
    stack.engine.hold(HELD)
    request = await stack.start(f"journal-{damage.__name__.strip('_')}{at}")
    await stack.held(request)
    await stack.kill_all(stack.gateway)
    records = stack.home / "store/journal" / stack.identity(request, "agent")
    damage(sorted(records.iterdir())[at])
    stack.engine.let_go()
    await stack.start_gateway()

    episode = await stack.episode(request)
    assert (episode.outcome, len(episode.attempts)) == (Outcome.RESOLVED, 2)
    assert (episode.turns, episode.trainable) == (TURNS, True)


async def test_an_episode_shows_where_its_replay_ended(stack: Stack) -> None:
    """Attempt 2 answers the lost attempt's turns with exactly the tokens that were sampled then."""
    stack.engine.hold(HELD)
    request = await stack.start("replayed")
    await stack.held(request)
    await stack.lose(request, "agent")
    await stack.held(request, attempt=2)
    stack.engine.let_go()
    told = (await stack.episode(request)).trajectory
    lost, final = [
        turns_parquet.decode(await stack.read(request, "turns.parquet", n)) for n in (1, 2)
    ]

    assert (told.replayed_turns, told.replay_ended_at) == (HELD, HELD)
    assert told.replayed_tokens == sum(len(turn.completion_ids) for turn in lost)
    assert [_sampled(turn) for turn in final[:HELD]] == [_sampled(turn) for turn in lost]


def _sampled(turn: Turn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    return turn.prompt_ids, turn.completion_ids, turn.logprobs


async def test_a_sandbox_lost_while_grading_is_graded_again(stack: Stack) -> None:
    """The verdict comes from another fresh sandbox; the agent does not run again."""
    request = await stack.start("grading-lost", instance=SLOW_INSTANCE)
    await stack.at(request, "grade_in_fresh_sandbox")
    await until(lambda: stack.box(request, "grade").alive, "the grading sandbox is up")
    await stack.lose(request, "grade")
    await stack.at(request, "grade_in_fresh_sandbox", attempt=2)

    await stack.solved_once(request)


async def test_cancelled_through_the_sdk(stack: Stack) -> None:
    """The agent is killed; only its partial evidence and a cancelled episode stay."""
    stack.engine.hold(HELD)
    request = await stack.start("cancel-sdk")
    await stack.held(request)
    await stack.perdure.rollout(request.workflow_id).cancel()

    await _cancelled(stack, request)


async def test_cancelled_through_the_temporal_cli(stack: Stack) -> None:
    """`temporal workflow cancel` does the same."""
    stack.engine.hold(HELD)
    request = await stack.start("cancel-cli")
    await stack.held(request)
    await stack.temporal_cli("workflow", "cancel", "--workflow-id", request.workflow_id)

    await _cancelled(stack, request)


async def _cancelled(stack: Stack, request: RolloutRequest) -> None:
    with pytest.raises(WorkflowFailureError) as ended:
        await stack.handle(request).result()
    await stack.nothing_left()
    episode = await stack.episode(request)
    kept = turns_parquet.decode(await stack.read(request, "turns.parquet"))

    assert isinstance(ended.value.cause, CancelledError)
    assert (episode.status, episode.reward, episode.failure) == (
        RolloutStatus.CANCELLED,
        None,
        None,
    )
    assert (len(kept), episode.turns) == (HELD, HELD)
    assert await stack.lines(request, "commands.log") == commands()[:HELD]


async def test_a_rollout_whose_run_is_spent_stops_buying_and_is_graded(stack: Stack) -> None:
    """Its agent is killed in the middle of a turn; the turns that it has bought and its tree are kept."""
    (request,) = await stack.met("spent")
    await stack.handle(request).signal(temporal_names.SPENT)
    episode = await stack.episode(request)

    assert (episode.status, episode.outcome) == (RolloutStatus.GRADED, Outcome.EMPTY_PATCH)
    assert episode.attempts[-1].agent_end is AgentEnd.LIMIT
    assert episode.turns == HELD
    stack.engine.let_go()
    await stack.nothing_left()


async def test_a_reached_cap_ends_the_agent_at_its_limit(stack: Stack) -> None:
    """Whatever the agent makes of the refused call, its work until then is graded."""
    request = await stack.start("capped", caps=Caps(turns=HELD))
    episode = await stack.episode(request)

    assert (episode.status, episode.turns) == (RolloutStatus.GRADED, HELD)
    assert episode.attempts[-1].agent_end is AgentEnd.LIMIT
    assert episode.attempts[-1].agent_detail == f"it has used {HELD} of {HELD} turns"


async def test_a_rollout_that_its_runs_deadline_stops_continues_later(stack: Stack) -> None:
    """Its agent is killed in the middle of a turn. Its diff is captured, and it has no reward. The next
    start replays its turns and ends with a verdict."""
    (request,) = await stack.met("truncated")
    over = Truncation(by="deadline", cause="the run's deadline", ends_at=time.time())
    await stack.handle(request).signal(temporal_names.TRUNCATE, over)
    episode = await stack.episode(request)
    stack.engine.let_go()
    await stack.nothing_left()
    await stack.client.start_workflow(
        temporal_names.ROLLOUT,
        request,
        id=request.workflow_id,
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
    )

    assert (episode.status, episode.reward, episode.turns) == (RolloutStatus.TRUNCATED, None, HELD)
    assert episode.failure is not None
    assert episode.failure.message == f"the run's deadline stopped its agent after {HELD} turns"
    assert episode.patch is not None
    await stack.solved_once(request, attempt=2, replayed=HELD)


async def test_a_cancelled_rollout_can_be_started_again(stack: Stack) -> None:
    """The rollout continues as the next attempt, in a new sandbox and a new session, to a graded
    episode."""
    stack.engine.hold(HELD)
    request = await stack.start("cancel-again")
    await stack.held(request)
    await stack.perdure.rollout(request.workflow_id).cancel()
    await stack.episode(request)
    stack.engine.let_go()
    await stack.perdure.start_rollout(request)

    await stack.solved_once(request, attempt=2, replayed=HELD)


async def test_a_finished_rollout_started_again_does_no_work(stack: Stack) -> None:
    """A second workflow of the same id: the episode in the store answers."""
    request = await stack.start("again")
    first = await stack.episode(request)
    files = await stack.files(request)
    stack.engine.forget()
    handle = await stack.client.start_workflow(
        temporal_names.ROLLOUT,
        request,
        id=request.workflow_id,
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        result_type=EpisodeRef,
    )
    again = await handle.result()

    assert again == first.ref(stack.store.url)
    assert stack.engine.stats().calls == 0
    assert await stack.files(request) == files
    assert await _activities(stack, request) == ["boot_sandbox"]


async def test_a_reset_to_before_grading_grades_again_without_the_agent(stack: Stack) -> None:
    """The store has two verdicts, the episode names the new one, and no model call was made."""
    request = await stack.start("reset")
    first = await stack.episode(request)
    before = dict(stack.engine.times_sampled())
    described = await stack.handle(request).describe()
    await stack.temporal_cli(
        *("workflow", "reset", "--workflow-id", request.workflow_id, "--reason", "grade again"),
        *("--event-id", str(await _task_before(stack, request, "grade_in_fresh_sandbox"))),
    )
    again = await stack.episode(request)
    verdicts = [name for name in await stack.files(request) if "/grade-" in name]

    assert dict(stack.engine.times_sampled()) == before
    assert len(verdicts) == 2
    assert first.provenance.workflow_run_id == described.run_id
    assert again.provenance.workflow_run_id not in ("", described.run_id)
    assert f"grade-{again.provenance.workflow_run_id[-8:]}" in " ".join(verdicts)
    assert (again.outcome, again.turns) == (Outcome.RESOLVED, TURNS)
    await stack.nothing_left()


async def test_no_reset_loses_a_verdict(stack: Stack) -> None:
    """Reset to any of its workflow tasks, a graded rollout is graded, and buys nothing."""
    request = await stack.start("resets")
    await stack.episode(request)
    before = dict(stack.engine.times_sampled())
    handle = stack.handle(request)
    run_id = (await handle.describe()).run_id
    completed = [
        event.event_id
        for event in (await handle.fetch_history()).events
        if event.HasField("workflow_task_completed_event_attributes")
    ]
    for event_id in completed:
        await stack.temporal_cli(
            *("workflow", "reset", "--workflow-id", request.workflow_id, "--run-id", run_id),
            *("--event-id", str(event_id), "--reason", "any"),
        )
        again = await stack.episode(request)
        verdict = again.status, again.outcome, again.reward, again.turns
        assert verdict == (RolloutStatus.GRADED, Outcome.RESOLVED, 1.0, TURNS), event_id

    assert len(completed) > 5
    assert dict(stack.engine.times_sampled()) == before
    await stack.nothing_left()


async def _task_before(stack: Stack, request: RolloutRequest, activity: str) -> int:
    """The workflow task that scheduled `activity`: where a person would reset to."""
    for event in (await stack.handle(request).fetch_history()).events:
        scheduled = event.activity_task_scheduled_event_attributes
        if scheduled.activity_type.name == activity:
            return scheduled.workflow_task_completed_event_id
    raise AssertionError(f"{activity} was never scheduled")


async def test_requests_written_by_hand(stack: Stack) -> None:
    """`temporal workflow start --input` runs a rollout, a group and a run from plain JSON."""
    agent = {"agent": "nop", "grade_empty_patch": True}
    rollout = {"run_id": "hand-1", "instance": INSTANCE, **agent}
    group = {"rollout": {**rollout, "run_id": "hand-2"}, "n_samples": 2}
    run = {"run_id": "hand-3", "instances": [INSTANCE], "rollout": agent}
    name = INSTANCE.split("/")[1]
    ids = f"rollout/hand-1/{name}/0", f"group/hand-2/{name}", "run/hand-3"
    await stack.start_by_hand(temporal_names.ROLLOUT, ids[0], rollout)
    await stack.start_by_hand(temporal_names.GROUP, ids[1], group)
    await stack.start_by_hand(temporal_names.RUN, ids[2], run)
    results = [
        await stack.client.get_workflow_handle(one, result_type=dict).result() for one in ids
    ]

    assert (results[0]["status"], results[0]["reward"]) == ("graded", 0.0)
    assert [e["status"] for e in results[1]["episodes"]] == ["graded", "graded"]
    assert (results[2]["rollouts"], results[2]["by_outcome"]) == (1, {"unresolved": 1})


@pytest.mark.parametrize(
    ("workflow", "request_", "named"),
    [
        (temporal_names.ROLLOUT, {"run_id": "x", "instance": "a/b", "agnet": "nop"}, "agnet"),
        (temporal_names.GROUP, {"rollout": {"run_id": "x"}, "n_samples": 2}, "rollout.instance"),
        (temporal_names.RUN, {"run_id": "x", "instances": ["a/b"], "n_sample": 2}, "n_sample"),
    ],
)
async def test_a_wrong_field_written_by_hand_is_refused_by_name(
    stack: Stack, workflow: str, request_: dict[str, Any], named: str
) -> None:
    """The workflow fails at once with the field's name, and no activity was scheduled."""
    workflow_id = f"wrong-{workflow}"
    await stack.start_by_hand(workflow, workflow_id, request_)
    handle = stack.client.get_workflow_handle(workflow_id)

    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()

    assert isinstance(failed.value.cause, ApplicationError)
    assert named in failed.value.cause.message
    history = await handle.fetch_history()
    assert not any(e.HasField("activity_task_scheduled_event_attributes") for e in history.events)


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


async def _activities(stack: Stack, request: RolloutRequest) -> list[str]:
    return [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in (await stack.handle(request).fetch_history()).events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]


@asynccontextmanager
async def no_engine(stack: Stack) -> AsyncIterator[None]:
    """The gateway has no engine, as it knows."""
    roster = StoredRoster(stack.store, roster_key(load_secret(stack.settings)))
    engine = name_of(stack.engine.url)

    async def let_go() -> bool:
        async with httpx.AsyncClient(timeout=30) as http:
            told = (await http.get(f"{stack.plan.gateway_url}/metrics")).text
            labels = f'engine="{engine}",model="policy",state="ready"'
            return f"perdure_engine_state{{{labels}}} 1.0" not in told

    await remove_engine(roster, engine)
    try:
        await until(let_go, "the gateway knows that its engine is out")
        yield
    finally:
        await add_engine(roster, EngineSpec(stack.engine.url), "policy")


@pytest.mark.longer
async def test_a_rollout_that_waits_for_an_engine_says_so(stack: Stack) -> None:
    """Its engine is removed: `status` shows the wait, until the engine is back."""
    async with no_engine(stack):
        request = await stack.start("waits")

        async def told() -> bool:
            return ": waits for an engine since " in await current_step(
                stack.client, request.workflow_id
            )

        await until(told, "the wait is told")

    await stack.solved_once(request)


@pytest.mark.longer
async def test_an_agent_may_wait_for_an_engine_longer_than_its_budget(stack: Stack) -> None:
    """It is not killed at its time limit, because it did not use that time."""
    budget_s = 30.0
    secrets = load_secrets(stack.settings)
    async with no_engine(stack), GatewayControl(stack.plan.gateway_url, secrets) as gateway:
        request = await stack.start("waits-long", agent_budget_s=budget_s)

        async def waited() -> bool:
            with contextlib.suppress(NotFound):
                return (
                    await gateway.get(stack.identity(request, "agent", 1))
                ).waiting_seconds > budget_s
            return False

        await until(waited, "its call waits for longer than the budget")

    await stack.solved_once(request)
