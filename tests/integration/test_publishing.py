"""Publishing weights as a training loop does: what the home stores, and what the trainer gets back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.dialects.base import Refused
from perdure.engines.base import Completion
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.engine_roster import StoredRoster, roster_key
from perdure.engines.engine_state import EngineSpec, EngineState, name_of
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.weights import weight_publishing_sync
from perdure.engines.weights.weight_publishing import Weights
from perdure.engines.weights.weight_update import (
    InFlight,
    UpdatePolicy,
    UpdateRefused,
    WeightCanary,
    WeightUpdates,
)
from perdure.errors import ConfigurationError
from perdure.home_folder import load_secret
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.testing.scripted_engine import WEIGHTS_FILE, ScriptedEngine, logprob
from tests.integration.engine_calls import LONG, PROMPT
from tests.integration.weights_stand import FIRST, recorded_versions

SAMPLING = {"max_tokens": 4000, "temperature": 0.0, "stop_token_ids": [151_645]}


def canary(weights: int) -> WeightCanary:
    """What a trainer's forward pass with these weights says."""
    forced = tuple(logprob(token, place, weights) for place, token in enumerate(PROMPT) if place)
    return WeightCanary(
        prompt_ids=tuple(PROMPT),
        token_id=FIRST,
        logprob=logprob(FIRST, 0, weights),
        prompt_logprobs=forced,
        tolerance=0.01,
    )


@dataclass
class Home:
    """Engines, a gateway's pool and a trainer, which share nothing but a store."""

    settings: Settings
    store: Store
    roster: StoredRoster
    pool: EnginePool
    weights: Weights
    engines: list[ScriptedEngine]

    async def saved(self, version: int, **more: bool) -> str:
        data = json.dumps({"weights": version, **more}).encode()
        await self.store.put(f"checkpoints/{version}/{WEIGHTS_FILE}", data)
        return f"checkpoints/{version}"

    async def publish(self, version: int, policy: UpdatePolicy | None = None) -> None:
        source = await self.saved(version)
        await self.weights.publish(version, source, [canary(version)], policy or UpdatePolicy())

    def ask(self, **labels: int | str) -> "asyncio.Task[Completion]":
        told = {name: str(value) for name, value in labels.items()}
        call = self.pool.generate(
            GenerateCall(PROMPT, SAMPLING, session_id="s", request_id="s-0", labels=told)
        )
        return asyncio.ensure_future(call)

    async def sampling(self) -> None:
        while not any(
            len(call.salvage.ids) >= 40
            for pooled in self.pool.engines.values()
            for call in pooled.running
        ):
            await asyncio.sleep(0.005)


@asynccontextmanager
async def home(folder: Path, count: int = 1, delay_s: float = 0.0) -> AsyncIterator[Home]:
    settings = Settings(home=folder, store=str(folder / "store"))
    store = open_store(settings)
    roster = StoredRoster(store, roster_key(load_secret(settings)))
    engines = [ScriptedEngine(LONG, chunk_delay_s=delay_s, policy_version=1) for _ in range(count)]
    async with new_client() as client, Weights(settings, notice_s=0.15) as weights:
        for engine in engines:
            engine.weights = 1
            await engine.__aenter__()
        own = [EngineSpec(engine.url) for engine in engines]
        pool = EnginePool(roster, client, own, PoolOptions(poll_s=0.03, hang_s=60))
        try:
            await pool.start()
            while not all(pooled.record.serves for pooled in pool.engines.values()):
                await asyncio.sleep(0.005)
            yield Home(settings, store, roster, pool, weights, engines)
        finally:
            await pool.aclose()
            for engine in engines:
                await engine.__aexit__()


async def test_a_failed_version_is_replaced_by_the_published_one(tmp_path: Path) -> None:
    """The store has the earlier version, its source and its canaries."""
    async with home(tmp_path) as it:
        await it.publish(1)
        await it.publish(2)
        stale = await it.saved(3, stale=True)
        with pytest.raises(UpdateRefused, match="trainer's weights"):
            await it.weights.publish(3, stale, [canary(3)])
        completion = await it.ask()
        published = await it.weights.published()

    assert published is not None
    assert published.version == 2
    assert set(recorded_versions(completion)) == {2}
    assert [engine.weights for engine in it.engines] == [2]


@pytest.mark.parametrize("wrong", ["token_id", "logprob", "prompt_logprobs"])
async def test_every_part_of_every_canary_counts(tmp_path: Path, wrong: str) -> None:
    """If one figure of one prompt differs, the version is not served."""
    right = canary(2)
    lies = {
        "token_id": right.token_id + 1,
        "logprob": right.logprob + 0.1,
        "prompt_logprobs": tuple(value - 0.1 for value in right.prompt_logprobs),
    }
    async with home(tmp_path) as it:
        await it.publish(1)
        source = await it.saved(2)
        canaries = [right, right.model_copy(update={wrong: lies[wrong]})]
        with pytest.raises(UpdateRefused, match="trainer's weights"):
            await it.weights.publish(2, source, canaries)

    assert [engine.weights for engine in it.engines] == [1]


async def test_an_engine_that_joins_later_gets_the_published_version(tmp_path: Path) -> None:
    """A restarted replica has its first weights again; `catch_up` updates only that one."""
    async with home(tmp_path, count=2) as it:
        await it.publish(2)
        late = it.engines[1]
        late.control(policy_version=None, weights=1)
        late._started += 1  # as a restart would
        name = name_of(late.url)
        while it.pool.engines[name].record.version is not None:
            await asyncio.sleep(0.005)
        while not it.pool.engines[name].record.serves:
            await asyncio.sleep(0.005)
        updated = await it.weights.catch_up()
        again = await it.weights.catch_up()

    assert [one.engine for one in updated] == [name]
    assert again == []
    assert [engine.weights for engine in it.engines] == [2, 2]


async def test_an_engine_that_a_dead_trainer_left_paused_is_taken_over(tmp_path: Path) -> None:
    """A trainer died between start and finish of its update; its successor publishes."""
    async with home(tmp_path) as it:
        async with new_client() as client:
            dead = WeightUpdates(it.roster, client, notice_s=0)
            record = await dead._hold(name_of(it.engines[0].url), 2)
            control = EngineControl(record.url, client)
            await control.pause("abort")
            await control.start_update()
        await it.publish(2)
        completion = await it.ask()

    assert set(recorded_versions(completion)) == {2}


async def test_an_update_that_was_taken_over_changes_nothing(tmp_path: Path) -> None:
    """A trainer that slept long finds that another update has its engine, and is refused."""
    async with home(tmp_path) as it, new_client() as client:
        slow = WeightUpdates(it.roster, client, notice_s=0)
        held = await slow._hold(name_of(it.engines[0].url), 2)
        await it.publish(3)
        with pytest.raises(UpdateRefused, match="took over"):
            await slow._notice(held, untouched=True)
        found = (await it.roster.read()).get(held.name)

    assert found is not None
    assert (found.state, found.version) == (EngineState.READY, 3)


async def test_two_calls_at_once_publish_one_after_the_other(tmp_path: Path) -> None:
    """If a trainer repeats an unanswered call, the two calls do not take engines from each other."""
    async with home(tmp_path) as it:
        await asyncio.gather(it.publish(2), it.publish(2))
        (record,) = (await it.roster.read()).engines

    assert (record.state, record.version, it.engines[0].weights) == (EngineState.READY, 2, 2)


@pytest.mark.parametrize("wrong", [{"tolerance": float("inf")}, {"logprob": float("nan")}])
def test_a_canary_that_proves_nothing_is_refused(wrong: dict[str, float]) -> None:
    """Any weights would pass it, or none would."""
    with pytest.raises(ValueError, match="finite number"):
        WeightCanary.model_validate({**canary(1).model_dump(), **wrong})


def test_an_update_of_no_engine_at_once_is_refused() -> None:
    """Such an update would never end."""
    with pytest.raises(ConfigurationError, match="at_once is 0"):
        UpdatePolicy(at_once=0)


async def test_a_version_does_not_go_back(tmp_path: Path) -> None:
    """Publishing an older one is a mistake, and nothing is touched."""
    async with home(tmp_path) as it:
        await it.publish(3)
        with pytest.raises(ConfigurationError, match="older than the published version 3"):
            await it.publish(2)

    assert [engine.weights for engine in it.engines] == [3]


@pytest.mark.parametrize("in_flight", ["resubmit", "keep"])
async def test_a_held_group_gets_nothing_from_newer_weights(
    tmp_path: Path, in_flight: InFlight
) -> None:
    """A call leaves an engine before its update; with no engine left it is refused."""
    async with home(tmp_path, delay_s=0.25) as it:  # longer than a slow disk takes to publish
        await it.publish(1)
        call = it.ask(policy_version=1, max_staleness=0)
        await it.sampling()
        await it.publish(2, UpdatePolicy(in_flight=in_flight))
        with pytest.raises(Refused, match="policy version 1") as refused:
            await call

    assert refused.value.code == "policy_too_stale"


@pytest.mark.longer
@pytest.mark.parametrize("in_flight", ["resubmit", "keep"])
async def test_a_group_that_may_finish_goes_on_with_newer_weights(
    tmp_path: Path, in_flight: InFlight
) -> None:
    """A call keeps its tokens, each with the version that sampled it. So does the session's next call,
    which no older engine could take."""
    about: dict[str, Any] = {"policy_version": 1, "max_staleness": 0, "too_stale": "finish"}
    async with home(tmp_path, delay_s=0.25) as it:
        await it.publish(1)
        call = it.ask(**about)
        await it.sampling()
        await it.publish(2, UpdatePolicy(in_flight=in_flight))
        completion = await call
        following = await it.ask(**about)

    recorded = recorded_versions(completion)
    assert recorded == sorted(recorded)
    assert (set(recorded), set(recorded_versions(following))) == ({1, 2}, {2})


async def test_a_group_waits_for_engines_that_are_behind(tmp_path: Path) -> None:
    """A group that starts before its weights are loaded everywhere is sampled only by them."""
    async with home(tmp_path, count=2) as it:
        await it.publish(1)
        call = it.ask(policy_version=2, max_staleness=0)
        await it.publish(2)
        completion = await call

    assert set(recorded_versions(completion)) == {2}


async def test_a_trainer_without_an_event_loop_publishes_too(tmp_path: Path) -> None:
    """`publishing_sync` has the same methods without await."""
    async with home(tmp_path) as it:
        folder = tmp_path / "7"
        folder.mkdir()
        (folder / WEIGHTS_FILE).write_text('{"weights": 7}')
        weights = weight_publishing_sync.Weights(it.settings, notice_s=0.15)
        await asyncio.to_thread(weights.publish, 7, folder, [canary(7)])
        published = await asyncio.to_thread(weights.published)

    assert published is not None
    assert (published.version, published.source) == (7, str(folder))
    assert [engine.weights for engine in it.engines] == [7]
