"""Stores another program's verdicts and patches where the rollouts of a run find them."""

import asyncio
import time
from collections.abc import Sequence

from perdure.adoption.foreign_rollouts import Placed
from perdure.episodes.episode import EpisodeParts
from perdure.episodes.episode_assembly import assemble
from perdure.episodes.episode_store import read_episode, write_episode
from perdure.errors import ConfigurationError, NotFound
from perdure.instances import instance_catalog
from perdure.storage import store_keys, stored_json
from perdure.storage.base import Store
from perdure.types import Instance, RolloutRequest, RolloutStatus, RunRequest

AT_ONCE = 32


async def place(store: Store, run: RunRequest, placed: Sequence[Placed]) -> None:
    """Write an episode for each rollout with a verdict, so that the run does not repeat it. Store
    each patch, which its rollout applies instead of starting an agent. The call is idempotent.

    Raises: ConfigurationError if the run has other results.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(result: Placed) -> None:
        async with slots:
            await _place(store, run.rollout_request(result.ref, result.sample_index), result)

    await asyncio.gather(*map(one, placed))


async def _place(store: Store, request: RolloutRequest, result: Placed) -> None:
    if result.patch is not None:
        await store.put_if_absent(store_keys.prediction(request), result.patch)
    key, data = store_keys.adopted(request), stored_json.encode(result.adopted)
    if not await store.put_if_absent(key, data) and (await store.get(key)).data != data:
        raise ConfigurationError(
            f"run {request.run_id} has another result for {request.instance_id} "
            f"#{request.sample_index}: give another --run"
        )
    if result.adopted.reward is not None and await read_episode(store, request) is None:
        await _write_episode(store, request, result)


async def _write_episode(store: Store, request: RolloutRequest, result: Placed) -> None:
    now = time.time()
    parts = EpisodeParts(
        request=request,
        status=RolloutStatus.ADOPTED,
        started_at=now,
        finished_at=now,
        instance=await _instance(store, request.instance),
        adopted=result.adopted,
    )
    made = await asyncio.to_thread(assemble, parts, None)
    await write_episode(store, made.episode, made.tokens)


async def _instance(store: Store, ref: str) -> Instance | None:
    try:
        return await instance_catalog.load(store, ref)
    except NotFound:
        return None
