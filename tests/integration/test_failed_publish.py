"""A publish that fails: which engines are still of use, and what the message says to do."""

import asyncio
from pathlib import Path

import pytest

from perdure.engines.engine_roster import add_engine
from perdure.engines.engine_state import EngineSpec, EngineState, name_of
from perdure.engines.weights.weight_update import Checkpoint, FromDisk, UpdateRefused
from perdure.errors import ConfigurationError
from perdure.testing.scripted_engine import WEIGHTS_FILE, ScriptedEngine
from tests.integration.weights_stand import canary, checkpoint, recorded_versions, stand

SOON_S = 30.0
NEAR = 1 + pow(101, -1, 4093)
"""Weights whose logprobs differ from those of 1 by 1/4096, as after one small training step."""


async def test_a_path_that_cannot_be_opened_costs_no_engine(tmp_path: Path) -> None:
    """Not even on the first publish: the engine serves on, and takes the right path next."""
    async with asyncio.timeout(SOON_S), stand(1) as it:
        with pytest.raises(UpdateRefused, match=r"cannot open.*kept its weights") as refused:
            await it.updates.update(2, FromDisk(tmp_path / "absent"), [canary(2)])
        await it.seen(it.engines[0], EngineState.READY)
        old = await it.ask()
        await it.updates.update(2, checkpoint(tmp_path / "2", 2), [canary(2)])
        new = await it.ask()

    assert str(tmp_path / "absent") in str(refused.value)
    assert set(recorded_versions(old)) == {1} == set(it.true_versions(old))
    assert set(recorded_versions(new)) == {2} == set(it.true_versions(new))


async def test_a_load_that_fails_midway_leaves_no_weights_of_two_versions(tmp_path: Path) -> None:
    """No canary tells them from the old ones, so the engine serves only after a load that succeeded."""
    near = checkpoint(tmp_path / "2", NEAR, cut=True)
    old = Checkpoint(1, checkpoint(tmp_path / "1", 1), [canary(1)])
    async with asyncio.timeout(SOON_S), stand(1) as it:
        with pytest.raises(UpdateRefused, match=r"in the middle.*serves version 1 again"):
            await it.updates.update(2, near, [canary(2)], previous=old)
        restored = it.engines[0].weights
        with pytest.raises(UpdateRefused, match=r"in the middle.*out of use"):
            await it.updates.update(2, near, [canary(2)])
        await it.seen(it.engines[0], EngineState.DEAD)

    assert restored == 1


async def test_a_load_that_broke_the_weights_costs_the_engine(tmp_path: Path) -> None:
    """Without an earlier version to load it is out of use, and the message says so."""
    (tmp_path / WEIGHTS_FILE).write_text("no JSON")
    async with asyncio.timeout(SOON_S), stand(1) as it:
        with pytest.raises(UpdateRefused, match=r"out of use until its process restarts"):
            await it.updates.update(2, FromDisk(tmp_path), [canary(2)])
        await it.seen(it.engines[0], EngineState.DEAD)


async def test_a_wrong_canary_is_named(tmp_path: Path) -> None:
    """The message shows the canary's prompt, both answers, and what became of the engine."""
    async with asyncio.timeout(SOON_S), stand(1) as it:
        prompt = ", ".join(map(str, canary(3).prompt_ids[:3]))
        wanted = rf"\[{prompt}.*instead of.*out of use until its process restarts"
        with pytest.raises(UpdateRefused, match=wanted):
            await it.updates.update(2, checkpoint(tmp_path, 2), [canary(3)])


async def test_an_engine_that_is_gone_stops_no_publish(tmp_path: Path) -> None:
    """The roster still calls it ready, because no gateway looks after it."""
    async with asyncio.timeout(SOON_S), stand(1) as it:
        gone = await ScriptedEngine().__aenter__()
        await gone.__aexit__()
        record = await add_engine(it.roster, EngineSpec(gone.url), "policy")
        ready = record.to(EngineState.READY, "", from_settings=True)  # of no gateway that runs
        await it.roster.change(lambda roster: roster.having(ready))
        updated = await it.updates.update(2, checkpoint(tmp_path, 2), [canary(2)])
        left = (await it.roster.read()).get(name_of(gone.url))

    assert [one.engine for one in updated] == [name_of(it.engines[0].url)]
    assert left is not None
    assert left.state is EngineState.DEAD


async def test_without_an_engine_that_answers_nothing_is_published(tmp_path: Path) -> None:
    """No engine takes the version, so it is not the published one."""
    async with asyncio.timeout(SOON_S), stand(1) as it:
        await it.engines[0].__aexit__()
        with pytest.raises(
            (ConfigurationError, UpdateRefused), match="no engine of the model policy is ready"
        ):
            await it.updates.update(2, checkpoint(tmp_path, 2), [canary(2)])
        await it.engines[0].__aenter__()
