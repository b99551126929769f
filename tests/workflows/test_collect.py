"""Collecting a batch by its trainable tokens, on a real server with the real group workflow."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, cast

import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.client.batch_collection import (
    Collector,
    FinishedGroup,
    collect,
    has_signal,
    tokens_with_signal,
)
from perdure.client.sdk import GroupHandle, Perdure
from perdure.rollouts.activity_messages import AgentRun, Ending
from perdure.types import AgentEnd, EpisodeRef, GroupRequest, Outcome, RolloutRequest, RolloutStatus
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages

TOKENS = 100


def _requests(run_id: str, n: int = 50) -> Iterator[GroupRequest]:
    for k in range(n):
        rollout = RolloutRequest(run_id=run_id, instance=f"toy/add-{k}", agent="nop")
        yield GroupRequest(rollout=rollout, n_samples=2)


def _episode(ending: Ending, reward: float) -> EpisodeRef:
    """An episode of `TOKENS` exact tokens."""
    request = ending.request
    return EpisodeRef(
        uri="",  # nothing is stored: test_batches.py reads tokens
        instance_id=request.instance_id,
        sample_index=request.sample_index,
        agent=request.agent,
        status=ending.status,
        outcome=Outcome.RESOLVED,
        reward=reward if ending.status is RolloutStatus.GRADED else None,
        tokens=TOKENS,
        trained_tokens=TOKENS,
        trainable=True,
    )


async def _all_alike(ending: Ending) -> EpisodeRef:
    return _episode(ending, reward=1.0)


@pytest.fixture
def stages(stages: Stages) -> Stages:
    stages.override["emit_episode"] = _all_alike
    return stages


async def _add_1_has_signal(ending: Ending) -> EpisodeRef:
    differs = ending.request.instance_id == "add-1" and ending.request.sample_index == 1
    return _episode(ending, reward=0.0 if differs else 1.0)


async def test_a_batch_is_filled_to_its_tokens(client: Client, stages: Stages) -> None:
    """With two samples of 100 tokens per group, 500 tokens take three groups, and no fourth is
    requested."""
    asked: list[str] = []

    def asking() -> Iterator[GroupRequest]:
        for request in _requests("r1"):
            asked.append(request.group_id)
            yield request

    groups = [
        g
        async for g in collect(Perdure(client), asking(), trainable_tokens=5 * TOKENS, in_flight=1)
    ]

    assert [g.trainable_tokens for g in groups] == [2 * TOKENS] * 3
    assert asked == [g.group_id for g in groups]


async def test_groups_without_signal_do_not_count(client: Client, stages: Stages) -> None:
    """Only groups whose rewards differ fill the batch. The others are yielded too."""
    stages.override["emit_episode"] = _add_1_has_signal
    filling = collect(
        Perdure(client), _requests("r2"), trainable_tokens=1, in_flight=1, count=tokens_with_signal
    )

    groups = [g async for g in filling]

    assert [g.has_signal for g in groups] == [False, True]


async def test_a_filter_keeps_groups_out_of_the_batch(client: Client, stages: Stages) -> None:
    """A filter on signal does not even yield groups without it."""
    stages.override["emit_episode"] = _add_1_has_signal
    filling = collect(
        Perdure(client), _requests("r7", 3), trainable_tokens=10**9, in_flight=1, accept=has_signal
    )

    assert [g.group_id async for g in filling] == ["r7/add-1"]


async def test_groups_run_on_between_batches(client: Client, stages: Stages) -> None:
    """A batch takes the groups that have finished. Groups that still run belong to the next batch,
    also after a restart."""
    gate = Gate()
    held = {"add-1"}

    async def agent(attempt: Any) -> AgentRun:
        if attempt.request.instance_id in held:
            return await gate.agent(attempt)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = agent
    first = Collector(Perdure(client), _requests("r8", 3), in_flight=2)
    batch = await _all(first.groups(2 * TOKENS))
    open_requests = first.open_requests
    await gate.until_running(2)
    await first.aclose("keep")
    gate.open.set()
    again = Collector(Perdure(client), open_requests)
    later = await _all(again.groups(2 * TOKENS))

    assert [g.group_id for g in (*batch, *later)] == ["r8/add-0", "r8/add-1"]
    assert [r.group_id for r in open_requests] == ["r8/add-1"]
    assert stages.names().count("run_agent") == 4


class EndsAtOnce:
    """Replaces a group's handle and the client that starts it."""

    async def with_first_version(self, request: GroupRequest) -> GroupRequest:
        return request

    async def start_group(self, request: GroupRequest) -> "EndsAtOnce":
        return self

    async def result(self) -> None:
        return None

    async def refs(self) -> AsyncIterator[EpisodeRef]:
        nothing: tuple[EpisodeRef, ...] = ()
        for ref in nothing:
            yield ref


async def test_a_group_that_was_not_handed_out_is_still_open() -> None:
    """If two groups end at the same moment, a checkpoint written between them has the second
    one."""
    collector = Collector(cast(Perdure, EndsAtOnce()), _requests("r11", 2), in_flight=2)
    batch = collector.groups(TOKENS)
    first = await anext(batch)
    left = [request.group_id for request in collector.open_requests]
    await batch.aclose()
    await collector.aclose("keep")

    assert (first.group_id, left) == ("r11/add-0", ["r11/add-1"])


async def test_a_batch_that_does_not_fill_says_why(
    client: Client, stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    """While no group finishes, the log says what their rollouts are doing."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    filling = collect(Perdure(client), _requests("r9", 1), trainable_tokens=1, tell_every_s=0.2)
    first = asyncio.ensure_future(anext(filling))
    await gate.until_running(2)
    while "2 in stage" not in caplog.text:
        assert not first.done()
        await asyncio.sleep(0.05)
    gate.open.set()
    await first
    await filling.aclose()

    assert "r9/add-0 is still open: 0 of 2 rollouts have ended; 2 in stage" in caplog.text


async def test_a_batch_without_an_engine_says_so_soon(
    client: Client,
    stages: Stages,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before the report about open groups, one warning has the gateway's reason."""
    monkeypatch.setattr("perdure.client.batch_collection.LOOK_EVERY_S", 0.1)
    gate = Gate({"waits": {"since": 0.0, "reason": "vllm a:1 is dead (no such checkpoint)"}})
    stages.override["run_agent"] = gate.agent
    filling = collect(Perdure(client), _requests("r12", 1), trainable_tokens=1)
    first = asyncio.ensure_future(anext(filling))
    await gate.until_running(2)
    said = "r12/add-0 waits for an engine: vllm a:1 is dead (no such checkpoint)"
    while said not in caplog.text:
        assert not first.done()
        await asyncio.sleep(0.05)
    gate.open.set()
    await first
    await filling.aclose()

    assert caplog.text.count(said) == 1


async def test_too_few_requests_end_the_batch(client: Client, stages: Stages) -> None:
    """The caller gets the groups that there are."""
    groups = [g async for g in collect(Perdure(client), _requests("r3", 2), trainable_tokens=10**9)]

    assert len(groups) == 2


async def test_a_caller_that_leaves_cancels_what_runs(client: Client, stages: Stages) -> None:
    """Groups in flight when the trainer stops iterating end as cancelled, without a reward."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    perdure = Perdure(client)
    filling = collect(perdure, _requests("r4", 2), trainable_tokens=1, in_flight=2)
    first = asyncio.ensure_future(anext(filling))
    await gate.until_running(4)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await filling.aclose()

    left = [client.get_workflow_handle(request.workflow_id) for request in _requests("r4", 2)]
    groups = [GroupHandle(perdure, 2, handle) for handle in left]
    statuses = {episode.status for group in groups async for episode in group.refs()}
    assert statuses == {RolloutStatus.CANCELLED}


@pytest.mark.parametrize(
    ("leftover", "status"),
    [("cancel", RolloutStatus.CANCELLED), ("keep", RolloutStatus.GRADED)],
)
async def test_a_full_batch_stops_its_stragglers(
    client: Client,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
    leftover: Literal["cancel", "keep"],
    status: RolloutStatus,
) -> None:
    """If two groups are requested and one fills the batch, the slower one is cancelled at once
    unless it is kept."""
    gate = Gate()

    async def agent(attempt: Any) -> AgentRun:
        if attempt.request.instance_id == "add-1":
            return await gate.agent(attempt)
        return AgentRun(end=AgentEnd.FINISHED)

    cancelled = []
    cancel = GroupHandle.cancel

    async def noted(group: GroupHandle) -> None:
        await cancel(group)
        cancelled.append(group.handle.id)

    monkeypatch.setattr(GroupHandle, "cancel", noted)
    stages.override["run_agent"] = agent
    perdure = Perdure(client)
    run_id = f"r12-{leftover}"
    filling = collect(
        perdure, _requests(run_id, 2), trainable_tokens=1, in_flight=2, leftover=leftover
    )
    batch = await _all(filling)

    assert cancelled == ([f"group/{run_id}/add-1"] if leftover == "cancel" else [])
    straggler = await perdure.start_group(list(_requests(run_id, 2))[1])
    if leftover == "keep":
        gate.open.set()
    assert [group.group_id for group in batch] == [f"{run_id}/add-0"]
    assert {episode.status async for episode in straggler.refs()} == {status}


async def test_a_caller_that_leaves_is_told_of_a_group_it_could_not_cancel(
    client: Client,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If Temporal refuses to cancel one group, the log names it, and the other one is still
    cancelled."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    real = GroupHandle.cancel
    refused, other = (request.workflow_id for request in _requests("r6", 2))

    async def cancel(group: GroupHandle) -> None:
        if group.handle.id == refused:
            raise RPCError("namespace is read-only", RPCStatusCode.PERMISSION_DENIED, b"")
        await real(group)

    monkeypatch.setattr(GroupHandle, "cancel", cancel)
    filling = collect(Perdure(client), _requests("r6", 2), trainable_tokens=1, in_flight=2)
    first = asyncio.ensure_future(anext(filling))
    await gate.until_running(4)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    assert f"{refused} could not be cancelled and continues: namespace is read-only" in caplog.text
    group = GroupHandle(Perdure(client), 2, client.get_workflow_handle(other))
    statuses = {episode.status async for episode in group.refs()}
    gate.open.set()
    assert statuses == {RolloutStatus.CANCELLED}


async def test_a_group_that_a_person_cancels_counts_with_the_episodes_it_has(
    client: Client, stages: Stages
) -> None:
    """The batch continues, and the cancelled group has episodes without a reward."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    perdure = Perdure(client)
    filling = asyncio.create_task(_all(collect(perdure, _requests("r5", 1), trainable_tokens=1)))
    await gate.until_running(2)

    (request,) = _requests("r5", 1)
    await (await perdure.start_group(request)).cancel()

    (group,) = await filling
    assert [e.reward for e in group.refs] == [None, None]


async def _all(groups: AsyncIterator[FinishedGroup]) -> list[FinishedGroup]:
    return [group async for group in groups]


async def test_a_target_of_zero_tokens_is_refused(client: Client) -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match=r"^trainable_tokens: must be at least 1"):
        await anext(collect(Perdure(client), [], trainable_tokens=0))
