"""RolloutGroupWorkflow and RunWorkflow on a real server."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import pytest
from temporalio import activity
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.client import temporal_names
from perdure.client.sdk import TASK_FAILED, Perdure
from perdure.errors import Cancelled, ConfigurationError, NoResult, NotFound
from perdure.rollouts.activity_messages import (
    WORKER_EVICTED,
    AgentRun,
    Attempt,
    Booted,
    Ending,
    PreparedRun,
)
from perdure.types import (
    AgentEnd,
    Budget,
    EpisodeRef,
    GroupRequest,
    Outcome,
    Price,
    RolloutRequest,
    RolloutStatus,
    RunRequest,
    RunSummary,
    TokenCounts,
)
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import checking_runner, workflow_worker

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")


async def test_a_group_yields_every_episode_once(client: Client, stages: Stages) -> None:
    """Four samples yield four episodes, each with its own index, as they finish."""
    group = await Perdure(client).start_group(GroupRequest(rollout=ROLLOUT, n_samples=4))

    seen = [episode.sample_index async for episode in group.refs()]

    assert sorted(seen) == [0, 1, 2, 3]


async def test_a_workflow_task_that_fails_once_ends_no_loop_over_a_group(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops or is too busy fails a task, and the server refuses the update in it."""
    group = await Perdure(client).start_group(GroupRequest(rollout=ROLLOUT, n_samples=2))
    refused = iter([RPCError(f"... due to {TASK_FAILED}.", RPCStatusCode.FAILED_PRECONDITION, b"")])
    update = group.handle.execute_update

    async def refuses_once(*args: Any, **options: Any) -> Any:
        for error in refused:
            raise error
        return await update(*args, **options)

    monkeypatch.setattr(group.handle, "execute_update", refuses_once)
    seen = [episode.sample_index async for episode in group.refs()]

    assert sorted(seen) == [0, 1]


async def test_a_quorum_ends_the_group_and_cancels_stragglers(
    client: Client, stages: Stages
) -> None:
    """Two of three graded rollouts are enough: the third is cancelled and still leaves an
    episode."""

    async def slow_third(attempt: Any) -> AgentRun:
        while attempt.request.sample_index == 2:
            activity.heartbeat()
            await asyncio.sleep(0.1)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = slow_third
    group = await Perdure(client).start_group(GroupRequest(rollout=ROLLOUT, n_samples=3, quorum=2))

    result = await group.result()

    assert (result.graded, result.quorum_met) == (2, True)
    assert {e.request.sample_index: e.status for e in stages.endings}[2] is RolloutStatus.CANCELLED


async def test_a_withheld_reward_does_not_count_to_the_quorum(
    client: Client, stages: Stages
) -> None:
    """A trainer that waits for two rewards gets two."""

    async def first_withheld(ending: Ending) -> EpisodeRef:
        request, reward = ending.request, {"reward": 1.0}
        told = reward if request.sample_index else {"withheld": "exposed: a twin passed"}
        about = {"instance_id": request.instance_id, "sample_index": request.sample_index}
        known = {"uri": "file:///x", "agent": "nop", "status": ending.status}
        return EpisodeRef.model_validate({**about, **known, **told})

    stages.override["emit_episode"] = first_withheld
    group = await Perdure(client).start_group(GroupRequest(rollout=ROLLOUT, n_samples=3, quorum=2))

    result = await group.result()

    assert (result.graded, result.quorum_met, len(result.episodes)) == (2, True, 3)


ONCE = ROLLOUT.model_copy(update={"max_attempts": 1})


def _lost(attempt: Attempt) -> ApplicationError:
    message = f"sandbox of sample {attempt.request.sample_index} died"
    return ApplicationError(message, "sandbox", type="SandboxLost", non_retryable=True)


@pytest.mark.parametrize(
    ("choice", "rounds", "graded"), [("short", [0], 1), ("replace", [0, 1], 2)]
)
async def test_a_member_without_a_verdict_is_replaced_if_asked(
    client: Client, stages: Stages, choice: str, rounds: list[int], graded: int
) -> None:
    """As the next round of the same sample. The group has one episode for each sample."""

    async def loses_first(attempt: Attempt) -> AgentRun:
        if attempt.request.sample_index == 1 and attempt.request.round == 0:
            raise _lost(attempt)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = loses_first
    request = GroupRequest.model_validate(
        {"rollout": ONCE.model_dump(), "n_samples": 2, "without_verdict": choice}
    )
    result = await (await Perdure(client).start_group(request)).result()

    ended = [one.request for one in stages.endings if one.request.sample_index == 1]
    assert [one.round for one in ended] == rounds
    assert (result.graded, [one.sample_index for one in result.episodes]) == (graded, [0, 1])


async def test_replacements_end_after_three(client: Client, stages: Stages) -> None:
    """The group then goes on without the member, whose reward is unknown and not 0."""

    async def loses(attempt: Attempt) -> AgentRun:
        raise _lost(attempt)

    stages.override["run_agent"] = loses
    group = GroupRequest(rollout=ONCE, n_samples=1, without_verdict="replace")
    result = await (await Perdure(client).start_group(group)).result()

    assert [one.request.round for one in stages.endings] == [0, 1, 2, 3]
    assert [(one.status, one.reward) for one in result.episodes] == [(RolloutStatus.FAILED, None)]


async def test_a_worker_that_dies_before_the_replacement_starts_one(client: Client) -> None:
    """The member's failure is known while no workflow worker runs; a second worker starts the
    replacement, and a third, which replays the history, starts no other."""
    stages, gate, reported = Stages(), Gate(), asyncio.Event()
    may_report = asyncio.Event()

    async def loses_first(attempt: Attempt) -> AgentRun:
        if attempt.request.round == 0:
            raise _lost(attempt)
        return await gate.agent(attempt)

    async def emit(ending: Ending) -> EpisodeRef:
        reported.set()
        await may_report.wait()
        about = {"instance_id": "add-1", "sample_index": 0, "uri": "file:///x", "agent": "nop"}
        told = {"status": ending.status, "failure": ending.failure}
        reward = 1.0 if ending.failure is None else None
        return EpisodeRef.model_validate({**about, **told, "reward": reward})

    stages.override |= {"run_agent": loses_first, "emit_episode": emit}
    group = GroupRequest(rollout=ONCE, n_samples=1, without_verdict="replace")
    async with stages.carried_out(client), asyncio.timeout(PATIENCE_S):
        async with workflow_worker(client, checking_runner()):
            handle = await Perdure(client).start_group(group)
            await reported.wait()
        may_report.set()
        async with workflow_worker(client, checking_runner()):
            await gate.until_running(1)
        async with workflow_worker(client, checking_runner()):
            gate.open.set()
            result = await handle.result()

    events = [event async for event in handle.handle.fetch_history_events()]
    started = [
        one
        for one in events
        if one.HasField("start_child_workflow_execution_initiated_event_attributes")
    ]
    assert [one.request.round for one in stages.endings] == [0, 1]
    assert (len(started), [one.reward for one in result.episodes]) == (2, [1.0])


async def test_a_deadline_ends_the_group(client: Client, stages: Stages) -> None:
    """No rollout finishes in time: the group ends anyway and reports that its quorum was not
    met."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    group = await Perdure(client).start_group(
        GroupRequest(rollout=ROLLOUT, n_samples=2, deadline_s=1.0)
    )

    result = await group.result()

    assert (result.graded, result.quorum_met) == (0, False)


async def test_starting_a_group_twice_joins_it(
    client: Client, stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted trainer requests the same group again and joins the same workflow without a
    second rollout, and the log says so."""
    request = GroupRequest(rollout=ROLLOUT, n_samples=2)
    perdure = Perdure(client)
    first = await perdure.start_group(request)
    await first.result()
    with caplog.at_level("WARNING", "perdure.client.sdk"):
        again = await perdure.start_group(request)

    episodes = [e async for e in again.refs()]

    assert (len(episodes), stages.names().count("run_agent")) == (2, 2)
    assert f"{request.workflow_id} was started before; joining it" in caplog.text
    assert (first.joined, again.joined) == (False, True)


async def test_an_open_group_follows_another_quorum_and_deadline(
    client: Client, stages: Stages
) -> None:
    """A trainer that restarts with another deadline joins its groups and changes them. Fields that
    it does not set stay."""
    gate = Gate()

    async def slow_second(attempt: Attempt) -> AgentRun:
        if attempt.request.sample_index == 1:
            return await gate.agent(attempt)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = slow_second
    perdure = Perdure(client)
    asks = GroupRequest(rollout=ROLLOUT, n_samples=2, deadline_s=3000)
    first = await perdure.start_group(asks)
    await gate.until_running(1)
    less = GroupRequest(rollout=ROLLOUT, n_samples=2, quorum=1)

    changed = await perdure.start_group(less)
    result = await changed.result()

    assert (first.changes, changed.changes) == ([], ["quorum: null -> 1"])
    assert (result.graded, result.quorum_met) == (1, True)
    assert (await perdure.start_group(asks)).joined


async def test_an_open_group_ends_at_a_changed_deadline(client: Client, stages: Stages) -> None:
    """The new deadline counts from the group's start, like the old one."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    perdure = Perdure(client)
    await perdure.start_group(GroupRequest(rollout=ROLLOUT, n_samples=2, deadline_s=3000))
    await gate.until_running(2)

    changed = await perdure.start_group(GroupRequest(rollout=ROLLOUT, n_samples=2, deadline_s=0.5))
    result = await changed.result()

    assert changed.changes == ["deadline_s: 3000.0 -> 0.5"]
    assert (result.graded, result.quorum_met) == (0, False)


@pytest.mark.parametrize("by_hand", [False, True])
async def test_what_was_started_as_something_else_is_not_joined(
    client: Client, stages: Stages, by_hand: bool
) -> None:
    """The caller would mistake the episodes of another request for its own. The message names the
    differences."""
    stages.instances = ("toy/add-0",)
    perdure, first = Perdure(client), _run()
    if by_hand:  # as Temporal's own command starts it: JSON with the fields that a person wrote
        given = first.model_dump(mode="json", exclude_unset=True)
        await client.start_workflow(
            temporal_names.RUN,
            given,
            id=first.workflow_id,
            task_queue=temporal_names.WORKFLOWS_QUEUE,
        )
    else:
        await perdure.start_run(first)
    again = await perdure.start_run(first.model_copy(update={"concurrency": 3}))
    await again.result()

    other = first.model_copy(update={"rollout": {"agent": "nop", "sampling": {"top_k": 5}}})
    with pytest.raises(ConfigurationError, match=r"(?s)run/r1 was .*sampling.top_k: -1 -> 5"):
        await perdure.start_run(other)


async def test_a_run_plays_everything_within_its_window(client: Client, stages: Stages) -> None:
    """Six instances run at most two at a time, and after a resize four at a time."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = tuple(f"toy/add-{k}" for k in range(6))
    run = await Perdure(client).start_run(_run(concurrency=2))
    await gate.until_running(2)
    before = gate.most
    await run.resize(4)
    await gate.until_running(4)
    gate.open.set()

    summary = await run.result()

    assert (before, gate.most, summary.rollouts) == (2, 4, 6)


def _played(stages: Stages) -> list[tuple[str, int]]:
    """The rollouts that were booted. A real boot stage would run none twice."""
    return sorted({(e.request.instance_id, e.request.sample_index) for e in stages.endings})


async def test_an_open_run_is_resized_by_the_same_request(client: Client, stages: Stages) -> None:
    """Fields that the request does not set stay, and the run's record has the change."""
    gate = Gate()
    recorded: list[RunRequest] = []

    async def record(run: RunRequest) -> None:
        recorded.append(run)

    stages.override |= {"run_agent": gate.agent, "record_change": record}
    stages.instances = tuple(f"toy/add-{k}" for k in range(4))
    await Perdure(client).start_run(_run(concurrency=1))
    await gate.until_running(1)

    changed = await Perdure(client).start_run(_run(concurrency=4))
    await gate.until_running(4)
    joined = await Perdure(client).start_run(_run(concurrency=4))
    gate.open.set()
    await changed.result()

    assert (changed.changes, joined.changes) == (["concurrency: 1 -> 4"], [])
    assert [(run.concurrency, "@" in run.asked_by) for run in recorded] == [(4, True)]


async def test_a_change_follows_the_list_and_each_has_its_own_time(
    client: Client, stages: Stages
) -> None:
    """The record orders changes by their times. The activity that lists the instances records the
    first request."""
    listing, listed = asyncio.Event(), asyncio.Event()
    recorded: list[RunRequest] = []

    async def prepare(run: RunRequest) -> PreparedRun:
        listing.set()
        await listed.wait()
        recorded.append(run)
        return PreparedRun(total=1, uri="file:///run")

    async def record(run: RunRequest) -> None:
        recorded.append(run)

    stages.override |= {"prepare_run": prepare, "record_change": record}
    stages.instances = ("toy/add-0",)
    run = await Perdure(client).start_run(_run(concurrency=1))
    await listing.wait()
    accepted = [
        await run.handle.start_update(
            "change", {"concurrency": n}, wait_for_stage=WorkflowUpdateStage.ACCEPTED
        )
        for n in (2, 3)
    ]
    listed.set()
    for change in accepted:
        await change.result()

    times = [one.asked_at for one in sorted(recorded, key=lambda one: one.concurrency)]
    assert recorded[0].concurrency == 1
    assert times == sorted(set(times))
    assert times[0] > 0
    assert len(times) == 3


async def test_a_paused_run_that_gets_more_samples_stays_paused(
    client: Client, stages: Stages
) -> None:
    """The run continues as a new execution for the new samples, and starts none before it is
    resumed."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0",)
    run = await Perdure(client).start_run(_run(concurrency=1))
    first = (await run.handle.describe()).run_id
    await gate.until_running(1)
    await run.pause()
    await run.change({"n_samples": 2})
    gate.open.set()

    async def continued() -> bool:
        is_next = (await run.handle.describe()).run_id != first
        return is_next and (await run.progress()).state != "starting"

    await until(continued, "the next execution plays")
    state = (await run.progress()).state
    await run.resume()
    await run.result()

    assert state == "paused"
    assert _played(stages) == [("add-0", 0), ("add-0", 1)]


@pytest.mark.parametrize("is_open", [True, False])
async def test_more_samples_continue_a_run(client: Client, stages: Stages, is_open: bool) -> None:
    """The same run continues with the missing samples, whether it is open or has ended."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    first = await Perdure(client).start_run(_run(concurrency=2))
    if is_open:
        await gate.until_running(2)
    else:
        gate.open.set()
        await first.result()

    more = _run(concurrency=2).model_copy(update={"n_samples": 2})
    changed = await Perdure(client).start_run(more)
    gate.open.set()
    await changed.result()

    assert changed.changes == ["n_samples: 1 -> 2"]
    assert _played(stages) == [("add-0", 0), ("add-0", 1), ("add-1", 0), ("add-1", 1)]


@pytest.mark.parametrize("is_open", [True, False])
async def test_added_instances_continue_a_run(
    client: Client, stages: Stages, is_open: bool
) -> None:
    """A larger limit adds instances. An open run starts them after the others, and no ended rollout
    runs again."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0",)
    one = _run().model_copy(update={"limit": 1})
    first = await Perdure(client).start_run(one)
    if is_open:
        await gate.until_running(1)
    else:
        gate.open.set()
        await first.result()

    stages.instances = ("toy/add-0", "toy/add-1")
    changed = await Perdure(client).start_run(one.model_copy(update={"limit": 2}))
    gate.open.set()
    await changed.result()

    assert changed.changes == ["limit: 1 -> 2"]
    assert _played(stages) == [("add-0", 0), ("add-1", 0)]


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_run_keeps_its_instances(client: Client, stages: Stages, is_open: bool) -> None:
    """Fewer instances, or those of another dataset, are refused with the reason, and the run is as it
    was."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    two = _run().model_copy(update={"limit": 2})
    run = await Perdure(client).start_run(two)
    await gate.until_running(2)
    if not is_open:
        gate.open.set()
        await run.result()

    for fields, why in (({"limit": 1}, "limit: 2 -> 1"), ({"dataset": "b"}, "dataset: toy -> b")):
        with pytest.raises(ConfigurationError, match=f"keeps its instances.*{why}"):
            await Perdure(client).start_run(two.model_copy(update=fields))
    if is_open:
        with pytest.raises(ConfigurationError, match=r"keeps its instances.*limit: 2 -> 1"):
            await run.change({"limit": 1})  # as Temporal's own command sends it
    gate.open.set()
    assert (await run.result()).rollouts == 2


class Looking(Perdure):
    """Runs a callback each time it has looked at what it joins."""

    def __init__(self, client: Client, *then: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(client)
        self.then = list(then)

    async def _changes(self, *given: Any) -> Any:
        found = await super()._changes(*given)
        if self.then:
            await self.then.pop(0)()
        return found


async def test_more_samples_continue_a_run_that_ends_at_that_moment(
    client: Client, stages: Stages
) -> None:
    """The run was open when the caller looked, and had ended when the change was sent."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0",)
    run = await Perdure(client).start_run(_run())
    await gate.until_running(1)

    async def end() -> None:
        gate.open.set()
        await run.result()

    more = _run().model_copy(update={"n_samples": 2})
    changed = await Looking(client, end).start_run(more)
    await changed.result()

    assert changed.changes == ["n_samples: 1 -> 2"]
    assert _played(stages) == [("add-0", 0), ("add-0", 1)]


async def test_more_samples_wait_for_a_run_that_is_ending(client: Client, stages: Stages) -> None:
    """While a run writes its manifest it accepts no change. Then it starts again."""
    writing, written = asyncio.Event(), asyncio.Event()

    async def finish(run: RunRequest) -> RunSummary:
        writing.set()
        await written.wait()
        return RunSummary(run_id=run.run_id, uri="file:///m", rollouts=run.n_samples)

    async def look() -> None:
        return None

    async def look_again() -> None:
        written.set()

    stages.override["finish_run"] = finish
    stages.instances = ("toy/add-0",)
    await Perdure(client).start_run(_run())
    await writing.wait()

    more = _run().model_copy(update={"n_samples": 2})
    changed = await Looking(client, look, look_again).start_run(more)
    await changed.result()

    assert changed.changes == ["n_samples: 1 -> 2"]
    assert _played(stages) == [("add-0", 0), ("add-0", 1)]


async def test_a_group_that_ends_at_the_moment_of_a_change_keeps_its_result(
    client: Client, stages: Stages
) -> None:
    """The caller joins the ended group, as it would a moment later."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    asks = GroupRequest(rollout=ROLLOUT, n_samples=2)
    group = await Perdure(client).start_group(asks)
    await gate.until_running(2)

    async def end() -> None:
        gate.open.set()
        await group.result()

    joined = await Looking(client, end).start_group(asks.model_copy(update={"quorum": 1}))

    assert (joined.joined, joined.changes) == (True, [])
    assert (await joined.result()).graded == 2


async def test_fewer_samples_end_a_run_earlier(client: Client, stages: Stages) -> None:
    """Rollouts in flight continue. Samples that have not started are dropped."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    three = _run(concurrency=1).model_copy(update={"n_samples": 3})
    await Perdure(client).start_run(three)
    await gate.until_running(1)

    changed = await Perdure(client).start_run(three.model_copy(update={"n_samples": 1}))
    gate.open.set()
    summary = await changed.result()

    assert _played(stages) == [("add-0", 0), ("add-1", 0)]
    assert (summary.rollouts, summary.by_status) == (2, {"graded": 2})


async def test_a_larger_budget_continues_a_run(client: Client, stages: Stages) -> None:
    """A run that its budget stopped starts again with the missing rollouts."""

    async def expensive(ending: Ending) -> EpisodeRef:
        request = ending.request
        return EpisodeRef(
            uri="file:///x",
            instance_id=request.instance_id,
            sample_index=request.sample_index,
            agent=request.agent,
            status=ending.status,
            tokens=100,
        )

    stages.override["emit_episode"] = expensive
    stages.instances = tuple(f"toy/add-{k}" for k in range(4))
    small = _run(concurrency=1).model_copy(update={"budget": Budget(tokens=150)})
    stopped = await (await Perdure(client).start_run(small)).result()
    before = len(_played(stages))

    more = small.model_copy(update={"budget": Budget(tokens=5000)})
    changed = await Perdure(client).start_run(more)
    summary = await changed.result()

    assert (before, stopped.stopped) == (2, "it has used 200 of 150 tokens")
    assert changed.changes == ["budget.tokens: 150 -> 5000"]
    assert (len(_played(stages)), summary.stopped) == (4, "")


async def test_what_fixes_a_run_cannot_be_changed(client: Client, stages: Stages) -> None:
    """An update sent by Temporal's own command is refused, and the message names the field."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0",)
    run = await Perdure(client).start_run(_run())
    await gate.until_running(1)

    with pytest.raises(
        ConfigurationError, match=r"rollout cannot change in run/r1: give another run_id"
    ):
        await run.change({"rollout": {"agent": "oracle"}})
    with pytest.raises(ConfigurationError, match=r"n_samples: .*greater than or equal to 1"):
        await run.change({"n_samples": 0})

    gate.open.set()
    await run.result()


@pytest.mark.parametrize("activity_name", ["prepare_run", "load_page", "finish_run"])
async def test_bookkeeping_of_a_worker_that_is_told_to_stop_is_done_by_another(
    client: Client, stages: Stages, activity_name: str
) -> None:
    """Like for the stages of a rollout, a deploy in the middle of bookkeeping costs the run
    nothing."""

    async def evict(_: Any) -> None:
        del stages.override[activity_name]
        raise ApplicationError("stop", type=WORKER_EVICTED, non_retryable=True)

    stages.override[activity_name] = evict
    stages.instances = ("toy/add-1",)
    request = RunRequest(run_id=f"evicted-{activity_name}", dataset="toy", rollout={"agent": "nop"})
    run = await Perdure(client).start_run(request)

    summary = await run.result()

    assert summary.by_status == {"graded": 1}
    assert stages.names().count(activity_name) == 2


async def test_a_run_that_cannot_be_listed_fails_with_the_reason(
    client: Client, stages: Stages
) -> None:
    """Temporal's own tools show the reason, and not only that an activity failed."""

    async def refuse(_: Any) -> None:
        raise ApplicationError(
            "dataset 'toy' has no instances", type="ConfigurationError", non_retryable=True
        )

    stages.override["prepare_run"] = refuse
    run = await Perdure(client).start_run(_run())
    with pytest.raises(WorkflowFailureError) as failed:
        await run.handle.result()

    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.message == "dataset 'toy' has no instances"


@pytest.mark.parametrize("size", ["x", 1.5, 0, True])
async def test_a_resize_by_hand_to_no_number_is_one_sentence(
    client: Client, stages: Stages, size: Any
) -> None:
    """`temporal workflow update execute` sends any input, and the error is one sentence."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-1",)
    run = await Perdure(client).start_run(_run())
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await run.handle.execute_update("resize", size)
    gate.open.set()

    assert str(refused.value.cause) == "ValueError: " + (
        "resize takes a whole number from 1 to 2000, such as --input 32"
    )


async def test_samples_of_an_evaluation_start_one_by_one(client: Client, stages: Stages) -> None:
    """Without a quorum or a deadline, samples do not wait for each other: samples of two use all
    three slots."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    request = _run(concurrency=3).model_copy(update={"n_samples": 2})
    run = await Perdure(client).start_run(request)
    await gate.until_running(3)
    gate.open.set()
    summary = await run.result()

    assert summary.by_status == {"graded": 4}
    assert {e.request.group_id for e in stages.endings} == {"r1/add-0", "r1/add-1"}


async def test_a_paused_run_starts_nothing_new(client: Client, stages: Stages) -> None:
    """Paused, running rollouts continue and none starts. Resumed, the others run."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = tuple(f"toy/add-{k}" for k in range(3))
    run = await Perdure(client).start_run(_run(concurrency=1))
    await gate.until_running(1)
    paused = await run.pause()
    gate.open.set()
    async with asyncio.timeout(PATIENCE_S):
        while (await run.progress()).done < 1:
            await asyncio.sleep(0.05)
    progress = await run.progress()
    await run.resume()
    summary = await run.result()

    assert (paused.state, progress.started, summary.rollouts) == ("paused", 1, 3)


async def test_the_page_of_a_run_links_to_its_open_and_failed_rollouts(
    client: Client, stages: Stages
) -> None:
    """The links in the Web UI are filters that the server accepts, and they list rollouts only."""
    gate = Gate()

    async def refuse_one(attempt: Attempt) -> Booted:
        if attempt.request.instance == "toy/add-0":
            raise ApplicationError("torn", "instance", type="InstanceError", non_retryable=True)
        return Booted(host="host-1")

    stages.override["boot_sandbox"] = refuse_one
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    run = await Perdure(client).start_run(_run(concurrency=2))
    await gate.until_running(1)

    async def found() -> bool:
        page = await client.get_workflow_handle(f"run/{run.run_id}").query(
            "__temporal_workflow_metadata", result_type=WorkflowMetadata
        )
        lists = dict(
            re.findall(r"\[([^]]+)\]\(<[^>]*workflows\?query=([^>]+)>\)", page.current_details)
        )
        listed = {
            label: [one.id async for one in client.list_workflows(unquote(query))]
            for label, query in lists.items()
        }
        return listed == {
            "open": [f"rollout/{run.run_id}/add-1/0"],
            "open in a later attempt": [],
            "failed": [f"rollout/{run.run_id}/add-0/0"],
        }

    await until(found, "the server lists the rollouts")
    gate.open.set()
    await run.result()


async def test_a_run_that_has_ended_is_not_paused(client: Client, stages: Stages) -> None:
    """The error says so in one line, as for a run that does not exist."""
    run = await Perdure(client).start_run(_run(concurrency=1))
    await run.result()

    with pytest.raises(NotFound, match=rf"run '{run.run_id}' has ended \(Completed\)"):
        await run.pause()


async def test_a_failure_that_needs_a_person_pauses_the_run(client: Client, stages: Stages) -> None:
    """One missing program must not fail thousands of rollouts: the run pauses and says why."""

    async def refuse(_: Any) -> Any:
        raise ApplicationError("no bwrap", "sandbox", type="MissingDependency", non_retryable=True)

    stages.override["boot_sandbox"] = refuse
    stages.instances = tuple(f"toy/add-{k}" for k in range(5))
    run = await Perdure(client).start_run(_run(concurrency=1))
    async with asyncio.timeout(PATIENCE_S):
        while (progress := await run.progress()).state != "attention":
            await asyncio.sleep(0.05)

    assert (progress.attention, progress.started) == ("no bwrap", 1)


async def test_a_run_whose_rollouts_all_fail_alike_pauses(client: Client, stages: Stages) -> None:
    """A wrong model name must not fail thousands of rollouts: after three instances the run pauses
    and says why. Resumed, it continues."""
    said = "the engine answered 404: The model `x` does not exist"

    async def refuse(attempt: Attempt) -> AgentRun:
        return AgentRun(end=AgentEnd.NEVER_CALLED_MODEL, refused=f"{said} ({attempt.attempt})")

    stages.override["run_agent"] = refuse
    stages.instances = tuple(f"toy/add-{k}" for k in range(7))
    run = await Perdure(client).start_run(_run(concurrency=1))

    async def waits() -> bool:
        return (await run.progress()).state == "attention"

    await until(waits, "the run pauses itself")
    first = await run.progress()
    del stages.override["run_agent"]
    await run.resume()
    summary = await run.result()

    assert (first.started, summary.by_status) == (3, {"failed": 3, "graded": 4})
    assert first.attention.startswith(
        f"3 rollouts failed the same way: the first model call was refused: {said}"
    )
    failure = stages.endings[0].failure
    assert failure is not None
    assert (failure.boundary.value, failure.type) == ("engine", "EngineRefused")


@pytest.mark.parametrize("samples", [1, 4])
async def test_failures_that_differ_or_are_of_one_instance_pause_nothing(
    client: Client, stages: Stages, samples: int
) -> None:
    """Each instance has its own fault, in all of its samples."""

    async def refuse(attempt: Attempt) -> Any:
        words = {"toy/add-0": "no such tag", "toy/add-1": "its patch is torn"}
        said = words.get(attempt.request.instance, "its tests are missing")
        raise ApplicationError(said, "instance", type="InstanceError", non_retryable=True)

    stages.override["boot_sandbox"] = refuse
    stages.instances = tuple(f"toy/add-{k}" for k in range(4))
    asked = _run(concurrency=1).model_copy(update={"n_samples": samples})
    run = await Perdure(client).start_run(asked)

    assert (await run.result()).by_status == {"failed": 4 * samples}


@pytest.mark.parametrize("shard", [500, 2])
async def test_a_run_buys_no_more_than_its_budget(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    """Once the tokens are used, no shard starts a rollout. Running rollouts are graded, and the
    result says why the others are missing."""

    async def emit(ending: Ending) -> EpisodeRef:
        return EpisodeRef(
            uri="file:///e",
            instance_id=ending.request.instance_id,
            sample_index=0,
            agent="nop",
            status=ending.status,
            outcome=Outcome.RESOLVED,
            reward=1.0,
            tokens=100,
            prompt_tokens=900,
        )

    monkeypatch.setattr("workflows.run_workflow.SHARD", shard)
    stages.override["emit_episode"] = emit
    stages.instances = tuple(f"toy/add-{k}" for k in range(8))
    asked = _run(concurrency=1).model_copy(update={"budget": Budget(tokens=1500)})
    run = await Perdure(client).start_run(asked)
    summary = await run.result()

    graded = stages.names().count("grade_in_fresh_sandbox")
    assert 2 <= graded < 8
    assert summary.by_status == {"graded": graded, "cancelled": 8 - graded}
    assert summary.stopped == f"it has used {graded},000 of 1,500 tokens"
    assert (await run.progress()).stopped == summary.stopped


async def test_a_run_counts_its_judges_and_pauses_at_one_without_a_price(
    client: Client, stages: Stages
) -> None:
    """A row may name the model that plays its user. No check before the run sees that its price is missing."""
    used = {"judge": TokenCounts(prompt_tokens=1000, cached_tokens=500, sampled_tokens=100)}

    async def emit(ending: Ending) -> EpisodeRef:
        row = ending.request.instance_id
        others = {**used, "user": TokenCounts(sampled_tokens=1)} if row == "add-1" else used
        return EpisodeRef(
            uri="file:///e",
            instance_id=row,
            sample_index=0,
            agent="nop",
            status=ending.status,
            tokens=100,
            other_tokens=others,
        )

    price = Price(input=1000, cached=200, output=2000)
    budget = Budget(dollars=4.9, price=price, other_prices={"jud*": price})
    stages.override["emit_episode"] = emit
    stages.instances = tuple(f"toy/add-{k}" for k in range(9))
    run = await Perdure(client).start_run(_run(concurrency=1).model_copy(update={"budget": budget}))

    async def is_paused() -> bool:
        return (await run.progress()).state == "attention"

    await until(is_paused, "the run has paused itself")
    paused = await run.progress()
    await run.resume()
    summary = await run.result()

    assert paused.attention.startswith("a limit in dollars needs the price of user")
    assert paused.done in (2, 3), "one more may have started"
    assert paused.tokens == paused.done * 1200 + 1
    assert paused.dollars == pytest.approx(paused.done * (0.2 + 0.5 + 0.1 + 0.2))
    assert re.fullmatch(r"it has used [56]\.00 of 4\.90 dollars", summary.stopped)


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_run_that_has_used_its_budget_stops_its_agents(
    client: Client, stages: Stages, grouped: bool
) -> None:
    """The patch of a stopped agent is graded. A rollout whose agent had not started has no verdict,
    and its agent never starts."""
    working, stopped = asyncio.Event(), asyncio.Event()

    async def boot(attempt: Attempt) -> Booted:
        if attempt.request.workflow_id.endswith("add-1/1"):
            await stopped.wait()
        return Booted(uri="file:///x")

    async def agent(attempt: Attempt) -> AgentRun:
        if attempt.stop:
            stopped.set()
            return AgentRun(end=AgentEnd.LIMIT, turns=3)
        if attempt.request.instance == "toy/add-0":
            await working.wait()
            return AgentRun(end=AgentEnd.FINISHED, turns=6)
        working.set()
        while True:  # until it is cancelled
            activity.heartbeat()
            await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.2)

    async def emit(ending: Ending) -> EpisodeRef:
        return EpisodeRef(
            uri="file:///e",
            instance_id=ending.request.instance_id,
            sample_index=ending.request.sample_index,
            agent="nop",
            status=ending.status,
            tokens=100,
        )

    stages.override |= {"boot_sandbox": boot, "run_agent": agent, "emit_episode": emit}
    stages.instances = ("toy/add-0", "toy/add-1")
    more = {
        "n_samples": 2,
        "group_deadline_s": 3600.0 if grouped else None,
        "budget": Budget(tokens=200),
    }
    run = await Perdure(client).start_run(_run(concurrency=4).model_copy(update=more))
    async with asyncio.timeout(PATIENCE_S):
        summary = await run.result()

    assert summary.by_status == {"graded": 3, "cancelled": 1}
    assert stages.names().count("run_agent") == 4  # one is ordered again, to end its agent
    assert stages.names().count("grade_in_fresh_sandbox") == 3


async def test_a_run_has_its_priority_and_spreads_its_starts(
    client: Client, stages: Stages
) -> None:
    """Temporal gets the priority of the run and of its rollouts, and each start has its own
    timer."""
    stages.instances = ("toy/add-0", "toy/add-1")
    asked = _run().model_copy(update={"priority": 1, "start_jitter_s": 0.01})
    run = await Perdure(client).start_run(asked)
    await run.result()

    events = (await run.handle.fetch_history()).events
    first = events[0].workflow_execution_started_event_attributes
    assert first.priority.priority_key == 1
    assert sum(e.HasField("timer_started_event_attributes") for e in events) == 2


async def test_cancelling_a_run_ends_it_with_a_manifest(client: Client, stages: Stages) -> None:
    """Every rollout in flight leaves a cancelled episode, and the manifest is written."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1", "toy/add-2")
    run = await Perdure(client).start_run(_run(concurrency=2))
    await gate.until_running(2)
    await run.cancel()

    with pytest.raises(Cancelled, match="run 'r1' was cancelled"):
        await run.result()

    assert [e.status for e in stages.endings] == [RolloutStatus.CANCELLED] * 2
    assert stages.names()[-1] == "finish_run"


async def test_a_cancelled_run_says_how_far_it_came(client: Client, stages: Stages) -> None:
    """The progress of a cancelled run still counts graded and cancelled rollouts."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1", "toy/add-2")
    run = await Perdure(client).start_run(_run(concurrency=2))
    await gate.until_running(2)
    await run.cancel()
    with pytest.raises(Cancelled):
        await run.result()

    progress = await run.progress()

    assert (progress.state, progress.total, progress.running) == ("cancelled", 3, 0)
    assert progress.by_status == {"cancelled": 3}


async def test_rollouts_of_a_cancelled_group_are_counted(client: Client, stages: Stages) -> None:
    """In a cancelled run of groups, graded rollouts count as graded and all others as cancelled."""
    gate = Gate()

    async def first_is_quick(attempt: Any) -> AgentRun:
        if attempt.request.sample_index == 0:
            return AgentRun(end=AgentEnd.FINISHED)
        return await gate.agent(attempt)

    stages.override["run_agent"] = first_is_quick
    stages.instances = ("toy/add-0", "toy/add-1")
    request = _run(concurrency=3).model_copy(update={"n_samples": 3, "quorum": 3})
    run = await Perdure(client).start_run(request)
    await gate.until_running(2)
    async with asyncio.timeout(PATIENCE_S):
        while RolloutStatus.GRADED not in [e.status for e in stages.endings]:
            await asyncio.sleep(0.05)
    await run.cancel()
    with pytest.raises(Cancelled):
        await run.result()

    progress = await run.progress()

    assert (progress.total, progress.done) == (6, 6)
    assert progress.by_status == {"graded": 1, "cancelled": 5}


async def test_a_group_that_a_person_cancels_is_counted_at_once(
    client: Client, stages: Stages
) -> None:
    """If a user cancels one group of two, the run continues and counts the group's rollouts."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    request = _run(concurrency=2).model_copy(update={"n_samples": 2, "quorum": 2})
    run = await Perdure(client).start_run(request)
    await gate.until_running(2)
    await client.get_workflow_handle("group/r1/add-0").cancel()
    async with asyncio.timeout(PATIENCE_S):
        while (progress := await run.progress()).done < 2:
            await asyncio.sleep(0.05)
    gate.open.set()
    summary = await run.result()

    assert progress.by_status == {"cancelled": 2}
    assert summary.by_status == {"cancelled": 2, "graded": 2}


async def test_kept_stragglers_count_as_running(client: Client, stages: Stages) -> None:
    """The run ends at its quorum, and the kept straggler is still part of the total."""
    gate = Gate()

    async def second_is_slow(attempt: Any) -> AgentRun:
        if attempt.request.sample_index == 0:
            return AgentRun(end=AgentEnd.FINISHED)
        return await gate.agent(attempt)

    stages.override["run_agent"] = second_is_slow
    stages.instances = ("toy/add-0",)
    kept = {"n_samples": 2, "quorum": 1, "stragglers": "keep"}
    run = await Perdure(client).start_run(_run().model_copy(update=kept))
    summary = await run.result()
    progress = await run.progress()
    gate.open.set()
    await client.get_workflow_handle("rollout/r1/add-0/1").result()

    assert summary.by_status == {"graded": 1, "running": 1}
    assert (progress.total, progress.done, progress.running) == (2, 1, 1)


async def test_a_run_cancelled_while_it_lists_its_instances_starts_none(
    client: Client, stages: Stages
) -> None:
    """The list still succeeds, no rollout starts, and the manifest is written."""
    listing, told = asyncio.Event(), asyncio.Event()

    async def prepare(_: Any) -> PreparedRun:
        listing.set()
        await told.wait()
        return PreparedRun(total=3, uri="file:///run")

    stages.override["prepare_run"] = prepare
    stages.instances = tuple(f"toy/add-{k}" for k in range(3))
    run = await Perdure(client).start_run(_run())
    async with asyncio.timeout(PATIENCE_S):
        await listing.wait()
    await run.cancel()

    async def asked_to_stop() -> bool:
        events = (await run.handle.fetch_history()).events
        return any(e.HasField("activity_task_cancel_requested_event_attributes") for e in events)

    await until(asked_to_stop, "the list is asked to stop")
    told.set()

    with pytest.raises(Cancelled, match="run 'r1' was cancelled"):
        await run.result()

    assert stages.names() == ["prepare_run", "finish_run"]


async def test_a_large_run_is_cut_into_shards(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More instances than one shard holds: each runs exactly once, and the counts add up."""
    monkeypatch.setattr("workflows.run_workflow.SHARD", 4)
    stages.instances = tuple(f"toy/add-{k}" for k in range(10))
    run = await Perdure(client).start_run(_run(concurrency=4))
    await run.result()

    played = sorted(e.request.instance_id for e in stages.endings)
    history = await run.handle.fetch_history()
    begun = [e.child_workflow_execution_started_event_attributes for e in history.events]
    shards = [child for child in begun if child.workflow_type.name == "RunShardWorkflow"]
    assert played == sorted(f"add-{k}" for k in range(10))
    assert len(shards) == 3


async def test_the_same_run_twice_joins(
    client: Client, stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    """Starting a finished run again does no work and gives the same totals, and the log says so."""
    stages.instances = ("toy/add-0",)
    perdure = Perdure(client)
    first = await (await perdure.start_run(_run())).result()
    assert "started before" not in caplog.text
    again = await (await perdure.start_run(_run())).result()

    assert (first, stages.names().count("run_agent")) == (again, 1)
    assert f"run/{_run().run_id} was started before; joining it" in caplog.text


async def test_the_same_rollout_twice_joins(
    client: Client, stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    """A start like a trainer's hook returns the same episode, and the log says so."""
    perdure = Perdure(client)
    first = await (await perdure.start_rollout(ROLLOUT)).result()
    assert "started before" not in caplog.text
    again = await (await perdure.start_rollout(ROLLOUT)).result()

    assert (first, stages.names().count("run_agent")) == (again, 1)
    assert f"{ROLLOUT.workflow_id} was started before; joining it" in caplog.text


async def test_a_run_refuses_a_wrong_rollout_field(client: Client, stages: Stages) -> None:
    """A mistake inside `rollout`, of a run that Temporal's CLI starts, is named in one typed error
    before any instance is listed."""
    request = RunRequest(run_id="r1", instances=("toy/add-0",), rollout={"agnet": "nop"})
    await client.start_workflow(
        temporal_names.RUN,
        request,
        id=request.workflow_id,
        task_queue=temporal_names.WORKFLOWS_QUEUE,
    )
    run = await Perdure(client).run("r1")

    with pytest.raises(
        NoResult, match=r"run 'r1' ended without a result: .*agnet: there is no such field"
    ) as failed:
        await run.result()

    assert isinstance(failed.value.__cause__, WorkflowFailureError)
    assert stages.calls == []


def _run(concurrency: int = 8) -> RunRequest:
    return RunRequest(
        run_id="r1",
        dataset="toy",
        concurrency=concurrency,
        rollout={"agent": "nop"},
    )
