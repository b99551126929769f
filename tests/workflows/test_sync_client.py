"""`perdure.client.sync_client` gives the same answers to trainers without an event loop."""

import asyncio

from temporalio.client import Client

from perdure.client.sync_client import Perdure
from perdure.types import GroupRequest, RolloutRequest
from tests.workflows.scripted_stages import Stages

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")


async def test_a_sync_trainer_gets_every_episode(client: Client, stages: Stages) -> None:
    """From a thread without a loop, a group is started, iterated and awaited: three samples, three
    rewards."""

    def train() -> list[float | None]:
        perdure = Perdure(client.service_client.config.target_host)
        group = perdure.start_group(GroupRequest(rollout=ROLLOUT, n_samples=3))
        return [episode.reward for episode in group.episodes()]

    rewards = await asyncio.to_thread(train)

    assert rewards == [1.0, 1.0, 1.0]


async def test_a_sync_trainer_collects_a_batch(client: Client, stages: Stages) -> None:
    """Groups come until the last one, each with all its episodes."""

    def train() -> list[int]:
        perdure = Perdure(client.service_client.config.target_host)
        request = GroupRequest(rollout=ROLLOUT, n_samples=2)
        return [
            len(group.episodes) for group in perdure.collect([request], trainable_tokens=10_000)
        ]

    assert await asyncio.to_thread(train) == [2]


async def test_a_sync_trainer_waits_for_one_rollout(client: Client, stages: Stages) -> None:
    """The result of a rollout is its episode."""

    def train() -> str:
        perdure = Perdure(client.service_client.config.target_host)
        return perdure.start_rollout(ROLLOUT).result().status.value

    assert await asyncio.to_thread(train) == "graded"
