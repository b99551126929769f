"""`perdure.client.sync_client` gives the same answers to trainers without an event loop."""

import asyncio
from pathlib import Path

from temporalio.client import Client

from perdure.client.sync_client import Perdure
from perdure.storage.local_store import LocalStore
from perdure.types import GroupRequest, RolloutRequest
from tests.workflows.made_episodes import EpisodeStage
from tests.workflows.scripted_stages import Stages

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")


async def test_a_sync_trainer_gets_every_episode(client: Client, stages: Stages) -> None:
    """From a thread without a loop, a group is started, iterated and awaited: three samples, three
    rewards."""

    def train() -> list[float | None]:
        perdure = Perdure.connect(client.service_client.config.target_host)
        group = perdure.start_group(GroupRequest(rollout=ROLLOUT, n_samples=3))
        return [episode.reward for episode in group.refs()]

    rewards = await asyncio.to_thread(train)

    assert rewards == [1.0, 1.0, 1.0]


async def test_a_sync_trainer_collects_a_batch(
    client: Client, stages: Stages, tmp_path: Path
) -> None:
    """Groups come until the last one, each with all its episodes."""
    store = LocalStore(tmp_path)
    stages.override["emit_episode"] = EpisodeStage(store).emit

    def train() -> list[int]:
        perdure = Perdure.connect(client.service_client.config.target_host)
        request = GroupRequest(rollout=ROLLOUT, n_samples=2)
        groups = perdure.collect([request], trainable_tokens=10_000, store=store)
        return [len(group.episodes) for group in groups]

    assert await asyncio.to_thread(train) == [2]


async def test_a_sync_trainer_waits_for_one_rollout(client: Client, stages: Stages) -> None:
    """The result of a rollout is its episode."""

    def train() -> str:
        perdure = Perdure.connect(client.service_client.config.target_host)
        return perdure.start_rollout(ROLLOUT).result().status.value

    assert await asyncio.to_thread(train) == "graded"
