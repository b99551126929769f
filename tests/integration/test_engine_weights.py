"""New weights in running engines, over their real control routes."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.dialects.base import Refused
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.engine_roster import remove_engine
from perdure.engines.engine_state import EngineState, name_of
from perdure.engines.weights.weight_update import (
    Checkpoint,
    FromDisk,
    UpdatePolicy,
    UpdateRefused,
    WeightUpdates,
    downloaded,
)
from perdure.errors import ControlPlaneError
from perdure.storage.local_store import LocalStore
from perdure.testing.scripted_engine import WEIGHTS_FILE, ScriptedEngine
from tests.integration.weights_stand import NOTICE_S, canary, checkpoint, recorded_versions, stand


@dataclass
class OnlyOn:
    """A transfer that reaches one engine and fails at all others."""

    engine: ScriptedEngine
    source: FromDisk

    async def load(self, control: EngineControl, version: int) -> None:
        if control.url != self.engine.url:
            raise ControlPlaneError("the trainer cannot reach it")
        await self.source.load(control, version)


@pytest.mark.parametrize("in_flight", ["resubmit", "keep"])
async def test_every_token_is_recorded_with_the_version_that_sampled_it(
    tmp_path: Path, in_flight: Any
) -> None:
    """After an update in the middle of a completion, one turn has two version spans."""
    async with stand(1, delay_s=0.03) as it:
        call = it.ask()
        await it.sampling(call)
        policy = UpdatePolicy(in_flight=in_flight)
        await it.updates.update(2, checkpoint(tmp_path, 2), [canary(2)], policy)
        completion = await call

    assert recorded_versions(completion) == it.true_versions(completion)
    assert set(recorded_versions(completion)) == {1, 2}


async def test_a_rolling_update_leaves_an_engine_that_serves(tmp_path: Path) -> None:
    """While one engine loads, the completion continues on another; the record names each token's
    version."""
    async with stand(2, delay_s=0.03) as it:
        call = it.ask()
        await it.sampling(call)
        updated = await it.updates.update(2, checkpoint(tmp_path, 2), [canary(2)])
        completion = await call

    assert len(updated) == 2
    assert recorded_versions(completion) == it.true_versions(completion)


@pytest.mark.parametrize("broken", ["stale", "absent"])
async def test_weights_that_are_not_the_trainers_are_refused(tmp_path: Path, broken: str) -> None:
    """If a load fails or has no effect, the old version keeps serving and the new one never does."""
    old = Checkpoint(1, checkpoint(tmp_path / "1", 1), [canary(1)])
    new = checkpoint(tmp_path / "2", 2, stale=True) if broken == "stale" else FromDisk(tmp_path)
    async with stand(2) as it:
        with pytest.raises(UpdateRefused):
            await it.updates.update(2, new, [canary(2)], previous=old)
        for engine in it.engines:
            await it.seen(engine, EngineState.READY)
        completion = await it.ask()

    assert {engine.weights for engine in it.engines} == {1}
    assert set(recorded_versions(completion)) == {1} == set(it.true_versions(completion))


async def test_a_condemned_engine_serves_again_only_after_a_restart(tmp_path: Path) -> None:
    """Without the old weights it stays condemned, even if it answers."""
    async with stand(2) as it:
        with pytest.raises(UpdateRefused, match="trainer's weights"):
            await it.updates.update(2, checkpoint(tmp_path, 2, stale=True), [canary(2)])
        first, second = (it.pool.engines[name_of(engine.url)] for engine in it.engines)
        await it.seen(it.engines[0], EngineState.DEAD)
        verdict = await first.health.look(first.record, first.load())
        completion = await it.ask()

    assert verdict is None
    assert completion.engine == second.client.name


async def test_tokens_of_wrong_weights_are_dropped(tmp_path: Path) -> None:
    """Frozen requests continue before the canary; if it fails, their new tokens are dropped."""
    async with stand(2, delay_s=0.03) as it:
        call = it.ask()
        await it.sampling(call)
        with pytest.raises(UpdateRefused):
            await it.updates.update(
                2, checkpoint(tmp_path, 3), [canary(2)], UpdatePolicy(in_flight="keep", at_once=2)
            )
        for engine in it.engines:  # as a restart would
            engine.weights, engine._started = 1, engine._started + 1
        completion = await call

    assert set(it.true_versions(completion)) == {1}


async def test_tokens_of_wrong_weights_are_dropped_when_the_old_ones_are_restored(
    tmp_path: Path,
) -> None:
    """The engine goes back to the old version, and a frozen request keeps only tokens of that one."""
    old = Checkpoint(1, checkpoint(tmp_path / "1", 1), [canary(1)])
    async with stand(1, delay_s=0.03) as it:
        call = it.ask()
        await it.sampling(call)
        wrong = checkpoint(tmp_path / "3", 3)
        with pytest.raises(UpdateRefused):
            await it.updates.update(
                2, wrong, [canary(2)], UpdatePolicy(in_flight="keep"), previous=old
            )
        completion = await call

    assert set(it.true_versions(completion)) == {1}
    assert recorded_versions(completion) == it.true_versions(completion)


async def test_no_turn_ends_on_weights_without_proof(tmp_path: Path) -> None:
    """A frozen request that finishes before the canary waits for its result."""

    class AsksLate(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/inference/v1/generate":
                while it.engines[0].stats().in_flight:
                    await asyncio.sleep(0.005)
            return await super().handle_async_request(request)

    old = Checkpoint(1, checkpoint(tmp_path / "1", 1), [canary(1)])
    async with stand(1, delay_s=0.03) as it, httpx.AsyncClient(transport=AsksLate()) as client:
        updates = WeightUpdates(it.roster, client, notice_s=NOTICE_S)
        call = it.ask()
        await it.sampling(call)
        wrong = checkpoint(tmp_path / "3", 3)
        with pytest.raises(UpdateRefused):
            await updates.update(
                2, wrong, [canary(2)], UpdatePolicy(in_flight="keep"), previous=old
            )
        completion = await call

    assert set(it.true_versions(completion)) == {1}


async def test_a_checkpoint_comes_out_of_the_store(tmp_path: Path) -> None:
    """From S3 or a folder, the prefix is on disk inside the context."""
    store = LocalStore(tmp_path / "store")
    data = json.dumps({"weights": 2}).encode()
    await store.put(f"checkpoints/2/{WEIGHTS_FILE}", data)
    async with stand(1) as it:
        async with downloaded(store, "checkpoints/2") as source:
            await it.updates.update(2, source, [canary(2)])
        completion = await it.ask()

    assert set(recorded_versions(completion)) == {2}
    assert not source.path.exists()


async def test_an_update_is_announced_before_it_is_done(tmp_path: Path) -> None:
    """The roster says which update pauses the engine before the engine is paused."""

    class Looks(httpx.AsyncHTTPTransport):
        seen: list[str]

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/pause":
                self.seen = [e.held_by for e in (await it.pool.fleet.read()).engines]
            return await super().handle_async_request(request)

    looks = Looks()
    async with stand(1) as it, httpx.AsyncClient(transport=looks) as client:
        updates = WeightUpdates(it.roster, client, notice_s=0)
        await updates.update(2, checkpoint(tmp_path, 2), [canary(2)])

    (announced,) = looks.seen
    assert announced.startswith("update 2,")


async def test_a_group_is_not_sampled_by_too_new_a_policy(tmp_path: Path) -> None:
    """In a rolling update it stays on engines within its staleness; with none left, it is refused."""
    group = {"policy_version": "1", "max_staleness": "0"}
    async with stand(2) as it:
        # The first takes version 2, the second cannot load it.
        with pytest.raises(UpdateRefused, match="cannot reach it"):
            await it.updates.update(2, OnlyOn(it.engines[0], checkpoint(tmp_path, 2)), [canary(2)])
        await it.seen(it.engines[1], EngineState.DEAD)
        with pytest.raises(Refused, match="policy version 1"):
            await it.ask(**group)
        allowed = await it.ask(policy_version="1", max_staleness="1")
        finished = await it.ask(**group, too_stale="finish")

    assert set(recorded_versions(allowed)) == set(recorded_versions(finished)) == {2}


async def test_a_group_that_may_finish_prefers_engines_within_its_staleness() -> None:
    """One engine has newer weights and the other has not: no token is lost to age."""
    async with stand(2) as it:
        newer = it.pool.engines[name_of(it.engines[0].url)]
        record = newer.record.model_copy(update={"version": 2})
        await it.roster.change(lambda roster: roster.having(record))
        while newer.record.version != 2:
            await asyncio.sleep(0.005)
        answer = await it.ask(policy_version="1", max_staleness="0", too_stale="finish")

    assert {span.engine for span in answer.engines} == {f"vllm {name_of(it.engines[1].url)}"}


async def test_tokens_of_an_unknown_version_are_sampled_again(tmp_path: Path) -> None:
    """A token was sampled after an update was announced, and the engine was lost before it told its
    version: the version is not guessed."""
    async with stand(2, delay_s=0.03) as it:
        call = it.ask()
        await it.sampling(call)
        (pooled,) = (pooled for pooled in it.pool.engines.values() if pooled.running)
        (running,) = pooled.running
        await it.updates._hold(pooled.record.name, 2)
        await it.seen(next(e for e in it.engines if e.url == pooled.record.url), EngineState.PAUSED)
        known = running.salvage.sure
        while len(running.salvage.ids) < known + 16:
            assert not call.done(), "it ended before 16 tokens of doubt came"
            await asyncio.sleep(0.005)
        await remove_engine(it.pool.fleet, pooled.record.name)
        completion = await call

    first, second = completion.engines
    assert (first.start, first.end, second.start) == (0, known, known)
    assert set(recorded_versions(completion)) == {1} == set(it.true_versions(completion))
