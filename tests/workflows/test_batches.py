"""`perdure.batches` on a real server with the real group workflow and real episodes in a store."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.client import sync_client
from perdure.client.batch_collection import collect, has_signal
from perdure.client.episode_reader import read_episodes
from perdure.client.sdk import GroupHandle, Perdure
from perdure.episodes.training_batch import Batch
from perdure.errors import ConfigurationError
from perdure.rollouts.activity_messages import AgentRun
from perdure.storage.local_store import LocalStore
from perdure.types import AgentEnd, GroupRequest, RolloutRequest, RolloutStatus
from tests import docs_pages
from tests.checkout_paths import ROOT
from tests.stack.wait_until import PATIENCE_S
from tests.workflows import batch_loop
from tests.workflows.activity_gate import Gate
from tests.workflows.made_episodes import EpisodeStage
from tests.workflows.scripted_stages import Stages


@pytest.fixture
def stored(stages: Stages, tmp_path: Path) -> LocalStore:
    """The store that gets the episodes."""
    store = LocalStore(tmp_path / "store")
    stages.override["emit_episode"] = EpisodeStage(store).emit
    return store


async def test_a_batch_has_the_tokens_of_its_episodes(client: Client, stored: LocalStore) -> None:
    """Ids, masks, logprobs and versions of each row are those of the episode in the store."""
    perdure = Perdure(client)
    batches = perdure.batches(batch_loop.requests(7), groups_per_batch=2, store=stored)

    first, second = [batch async for batch in batches]
    again = await perdure.start_group(next(batch_loop.requests(7)))
    episodes = [episode async for episode in again.episodes(stored)]

    assert sorted((*first.group_ids, *second.group_ids)) == [f"loop/add-{k}" for k in range(4)]
    assert [len(batch.episodes) for batch in (first, second)] == [4, 4]
    for one in episodes:
        (segment,) = one.segments
        row, batch = _row_of(one.episode.rollout_id, first, second)
        assert batch.tokens[row].tolist() == [*segment.prompt_ids, *segment.response_ids]
        assert batch.mask[row].tolist() == [False, False, *map(bool, segment.loss_mask)]
        assert batch.logprobs[row].tolist() == [0.0, 0.0, *segment.logprobs]
        assert batch.versions[row].tolist() == [-1, -1, *segment.versions]
        assert batch.rewards[row] == one.episode.reward
    assert first.versions.tolist() == [[-1, -1, 7, -1, 8]] * 4


def _row_of(rollout_id: str, *batches: Batch[Any]) -> tuple[int, Batch[Any]]:
    for batch in batches:
        for row, rollout in enumerate(batch.rollouts):
            if batch.episodes[rollout].rollout_id == rollout_id:
                return row, batch
    raise AssertionError(f"{rollout_id} has no row")


async def test_groups_start_only_for_the_batch_that_waits_for_them(
    client: Client, stored: LocalStore
) -> None:
    """So the trainer can publish new weights, and give their version to the next batch's groups."""
    versions: list[int] = []
    version = 1

    def asking() -> Iterator[GroupRequest]:
        for k in range(4):
            versions.append(version)
            rollout = {"run_id": "r1", "instance": f"toy/add-{k}", "agent": "nop"}
            yield GroupRequest.model_validate(
                {"rollout": {**rollout, "policy_version": version}, "n_samples": 2}
            )

    sampled = []
    async for batch in Perdure(client).batches(asking(), groups_per_batch=2, store=stored):
        sampled.append(batch.versions.max())
        version += 1

    assert versions == [1, 1, 2, 2]
    assert sampled == [2, 3]


async def test_a_member_without_a_verdict_has_no_row(
    client: Client, stages: Stages, stored: LocalStore
) -> None:
    """It is not in its group's mean either. The batch says why it has no reward."""

    async def agent(attempt: Any) -> AgentRun:
        if attempt.request.sample_index == 2:
            raise ApplicationError("the model is gone", type="AgentError", non_retryable=True)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = agent
    request = GroupRequest(
        rollout=RolloutRequest(run_id="r2", instance="toy/add-0", agent="nop"), n_samples=3
    )
    (batch,) = [
        b async for b in Perdure(client).batches([request], groups_per_batch=1, store=stored)
    ]

    samples = [batch.episodes[rollout].sample_index for rollout in batch.rollouts]
    (failed,) = [episode for episode in batch.episodes if episode.reward is None]
    assert (sorted(samples), failed.sample_index, failed.status) == ([0, 1], 2, "failed")
    assert sorted(batch.advantages.tolist()) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


async def test_a_loop_that_is_killed_continues(
    client: Client, stages: Stages, stored: LocalStore, tmp_path: Path
) -> None:
    """kill -9 of the trainer after two batches: the next one gets all groups, also those, without
    sampling anything twice. Groups keep the version that they were started for."""
    gate = Gate()

    async def agent(attempt: Any) -> AgentRun:
        if attempt.request.instance_id in ("add-2", "add-3"):
            return await gate.agent(attempt)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = agent
    async with _loop(client, stored, tmp_path) as loop:
        assert loop.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            before = [(await loop.stdout.readline()).decode().strip() for _ in range(2)]
        await gate.until_running(4)
        loop.kill()
        await loop.wait()
    gate.open.set()
    perdure = Perdure(client)
    again = [
        batch
        async for batch in perdure.batches(batch_loop.requests(2), groups_per_batch=2, store=stored)
    ]

    assert sorted(before) == ["loop/add-0", "loop/add-1"]
    assert sorted(name for batch in again for name in batch.group_ids) == [
        f"loop/add-{k}" for k in range(4)
    ]
    assert stages.names().count("run_agent") == 8
    assert {batch.versions.max() for batch in again} == {2}  # turns of 1 and 2, never of 3


@contextlib.asynccontextmanager
async def _loop(
    client: Client, store: LocalStore, home: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "PERDURE_HOME": str(home),
        "PERDURE_STORE": store.url.removeprefix("file://"),
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
    }
    loop = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.workflows.batch_loop", "1"),
        env=env,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield loop
    finally:
        with contextlib.suppress(ProcessLookupError):
            loop.kill()
        await loop.wait()


async def test_a_group_that_starts_when_the_trainer_leaves_is_cancelled(
    client: Client, stages: Stages, stored: LocalStore
) -> None:
    """The server has started it, and the answer has not come."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    starts, answers = asyncio.Event(), asyncio.Event()

    class Slow(Perdure):
        async def start_group(self, request: GroupRequest) -> GroupHandle:
            handle = await super().start_group(request)
            starts.set()
            await answers.wait()
            return handle

    (request, *_) = batch_loop.requests(1, "r3")
    batches = Slow(client).batches([request], groups_per_batch=1, store=stored)
    first = asyncio.ensure_future(anext(batches))
    await starts.wait()
    first.cancel()
    asyncio.get_running_loop().call_soon(answers.set)
    await asyncio.gather(first, return_exceptions=True)

    group = GroupHandle(Perdure(client), 2, client.get_workflow_handle(request.workflow_id))
    try:
        async with asyncio.timeout(PATIENCE_S):
            statuses = {ref.status async for ref in group.refs()}
    finally:
        gate.open.set()
    assert statuses == {RolloutStatus.CANCELLED}


async def test_a_group_counts_once_in_a_loop(client: Client, stored: LocalStore) -> None:
    """A second epoch under the same run id would train on the first one's episodes again."""
    (request, *_) = batch_loop.requests(1, "r4")

    with pytest.raises(ConfigurationError, match="group/r4/add-0 is requested twice"):
        async for _ in Perdure(client).batches([request] * 2, groups_per_batch=1, store=stored):
            pass


async def test_a_batch_is_no_larger_than_it_should_be(client: Client, stored: LocalStore) -> None:
    """Groups that finish at the same moment go to several batches."""
    perdure = Perdure(client)
    for request in batch_loop.requests(1, "r5"):
        await (await perdure.start_group(request)).result()
    batches = perdure.batches(
        batch_loop.requests(1, "r5"), groups_per_batch=1, in_flight=4, store=stored
    )

    assert [len(batch.group_ids) async for batch in batches] == [1] * 4


async def test_a_group_without_signal_is_replaced(
    client: Client, stages: Stages, stored: LocalStore
) -> None:
    """With `accept`, a batch has as many groups as without."""
    stage = EpisodeStage(
        stored, lambda request: float(request.instance_id != "add-1" or request.sample_index)
    )
    stages.override["emit_episode"] = stage.emit
    batches = Perdure(client).batches(
        batch_loop.requests(1, "r6"), groups_per_batch=1, accept=has_signal, store=stored
    )

    assert [batch.group_ids async for batch in batches] == [("r6/add-1",)]


async def test_the_episodes_of_a_collected_group_have_tokens(
    client: Client, stored: LocalStore
) -> None:
    """They are those that `read_episodes` reads, and the group knows its request."""
    (request, *_) = batch_loop.requests(1, "r7")
    (group,) = [
        g async for g in collect(Perdure(client), [request], trainable_tokens=1, store=stored)
    ]

    assert group.request == request
    assert list(group.episodes) == await read_episodes(group.refs, stored)
    assert [len(one.segments) for one in group.episodes] == [1, 1]


async def test_a_sync_trainer_gets_batches(client: Client, stored: LocalStore) -> None:
    """From a thread without a loop."""

    def train() -> list[int]:
        perdure = sync_client.Perdure.connect(client.service_client.config.target_host)
        requests = batch_loop.requests(1, "r8")
        batches = perdure.batches(requests, groups_per_batch=2, store=stored)
        return [int(numpy.count_nonzero(batch.mask)) for batch in batches]

    assert await asyncio.to_thread(train) == [8, 8]


@pytest.mark.longer
async def test_the_pages_loop_trains_on_the_newest_version(
    client: Client, stored: LocalStore
) -> None:
    """As printed: three epochs of two instances, and a restart that leaves out what is done."""
    names: dict[str, Any] = {"GroupRequest": GroupRequest}
    exec(docs_pages.block("train.md", "python batches").replace("=32", "=2"), names)
    instances = [f"toy/add-{k}" for k in range(2)]
    trainer = Trainer()

    class Stored(Perdure):
        def batches(self, *given: Any, **options: Any) -> Any:
            return super().batches(*given, store=stored, **options)

    await names["train"](Stored(client), trainer, instances)
    await names["train"](Stored(client), trainer, instances)

    assert trainer.trained == [{0, 1}, {1, 2}, {2, 3}]
    assert len(trainer.done) == 6


class Trainer:
    """What the page's loop calls. Each made episode has tokens of its version and the next one."""

    def __init__(self) -> None:
        self.version = 0
        self.done: set[str] = set()
        self.trained: list[set[int]] = []

    def step(self, batch: Batch[Any]) -> None:
        self.trained.append(set(batch.versions[batch.mask].tolist()))

    async def publish(self) -> None:
        self.version += 1


async def test_numbers_below_one_are_refused(client: Client) -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match=r"^groups_per_batch: must be at least 1"):
        await anext(Perdure(client).batches([], groups_per_batch=0))
