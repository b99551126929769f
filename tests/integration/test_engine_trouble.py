"""Faults of engines at the worst moment: no call hangs, and no answer is trusted without proof."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from perdure.dialects.base import Refused
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.engine_roster import (
    Change,
    InMemoryRoster,
    Roster,
    add_engine,
    drain_engine,
    remove_engine,
)
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, name_of
from perdure.engines.pool import engine_fleet
from perdure.engines.pool.session_routing import holder
from perdure.engines.weights.weight_update import UpdatePolicy, UpdateRefused, WeightUpdates
from perdure.errors import StoreUnavailable
from perdure.testing.scripted_engine import ScriptedEngine
from tests.integration.engine_calls import (
    LONG,
    PROMPT,
    SAMPLING,
    Fixed,
    ask,
    opened,
    ready,
    sampling,
    undisturbed,
    until,
)
from tests.integration.weights_stand import canary, checkpoint, recorded_versions, stand

STUCK_S = 50.0
"""Seconds a test may take: fewer than the minute after which idle leases are reclaimed."""


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


class Away(InMemoryRoster):
    """A roster whose store may be unavailable."""

    away = False

    async def change(self, change: Change) -> Roster:
        if self.away:
            raise StoreUnavailable("the store is away")
        return await super().change(change)

    async def read(self) -> Roster:
        return await self.change(lambda roster: roster)


class Stuck(InMemoryRoster):
    """A roster whose store may not answer for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = asyncio.Event(), 0
        self.answers.set()

    async def change(self, change: Change) -> Roster:
        self.asked += 1
        await self.answers.wait()
        return await super().change(change)

    async def read(self) -> Roster:
        return await self.change(lambda roster: roster)


# --- refusals ----------------------------------------------------------------------------------


async def test_an_engine_that_refuses_gets_no_calls_until_it_samples(
    client: httpx.AsyncClient,
) -> None:
    """It answers faster than one that works, so without this it would get every call. Calls go to the
    other engine, and it is back once it samples a probe."""
    async with (
        ScriptedEngine(LONG) as bad,
        ScriptedEngine(LONG) as good,
        opened(client, bad.url, good.url) as pool,
    ):
        await ready(pool, 2)
        refusing, other = (pool.engines[name_of(one.url)] for one in (bad, good))
        bad.control(kind="status", status=401)
        async with asyncio.timeout(STUCK_S):
            served = await asyncio.gather(*(ask(pool, f"s{n}") for n in range(12)))
            await until(lambda: "answered 401" in refusing.record.reason)
            found = refusing.record.state
            bad.reset()
            await until(lambda: refusing.record.serves)

    assert {one.engine for one in served} == {other.client.name}
    assert found is EngineState.SUSPECT


async def test_calls_wait_for_the_only_engine_while_it_refuses(client: httpx.AsyncClient) -> None:
    """They wait with its words as the reason, and go on once it samples again."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        engine.control(kind="status", status=451)
        calls = [ask(pool, f"s{n}") for n in range(4)]
        async with asyncio.timeout(STUCK_S):
            wait = await until(lambda: pool.waits("s0"))
            engine.reset()
            done = await asyncio.gather(*calls)

    assert "answered 451" in wait.reason
    assert [one.finish_reason for one in done] == ["stop"] * 4


# --- leases and queues -------------------------------------------------------------------------


async def test_a_call_cut_by_an_update_does_not_queue_behind_new_sessions(tmp_path: Path) -> None:
    """Its session holds the lease that new sessions wait for, so it goes first: otherwise the engine
    would idle until the lease was reclaimed."""
    async with stand(1, delay_s=0.02) as it:
        (pooled,) = it.pool.engines.values()
        pooled.capacity = Fixed(agents=1)
        call = it.ask(run="r")
        await it.sampling(call)
        new = ask(it.pool, "new", run="r")
        await until(lambda: it.pool.waiting)
        await it.updates.update(2, checkpoint(tmp_path, 2), [canary(2)])
        async with asyncio.timeout(STUCK_S):
            completion = await call
        it.pool.left("s")
        await new

    assert set(recorded_versions(completion)) == {1, 2}


async def test_calls_of_one_session_share_its_lease(client: httpx.AsyncClient) -> None:
    """A harness may begin with several calls at once; no other session's call goes between them,
    because the lease would idle meanwhile."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        pooled.capacity = Fixed(agents=1)
        await ask(pool, "x", run="r")
        one, other, two = (ask(pool, session, run="r") for session in ("a", "b", "a"))
        await until(lambda: pool.waiting.total() == 3)
        pool.left("x")
        async with asyncio.timeout(STUCK_S):
            await asyncio.gather(one, two)
        pool.left("a")
        await other

    assert engine.stats().calls == 4


async def test_a_group_that_waits_for_weights_delays_no_other(client: httpx.AsyncClient) -> None:
    """Calls of one run that an engine may sample overtake those that wait for other weights."""
    async with (
        ScriptedEngine(LONG, policy_version=1) as engine,
        opened(client, engine.url) as pool,
    ):
        await ready(pool, 1)
        waits = ask(pool, "ahead", run="r", policy_version="2", max_staleness="0")
        await until(lambda: pool.waiting)
        async with asyncio.timeout(STUCK_S):
            completion = await ask(pool, "now", run="r")
        waits.cancel()

    assert completion.finish_reason == "stop"


async def test_an_engine_assigned_to_a_call_that_was_just_cancelled_is_given_back(
    client: httpx.AsyncClient,
) -> None:
    """The session does not count as busy for ever."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        pooled.capacity = Fixed(agents=1)
        await ask(pool, "a")
        waits = ask(pool, "b")
        await until(lambda: pool.waiting)
        pool.left("a")
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        lease = pool.leases.get(holder("b", "policy"))

    assert lease is not None
    assert lease.busy == 0


async def test_an_assigned_engine_that_was_just_removed_is_not_used(
    client: httpx.AsyncClient,
) -> None:
    """It was removed after the assignment and before the call continued; it gets no request."""
    async with (
        ScriptedEngine(LONG) as gone,
        ScriptedEngine(LONG) as other,
        opened(client, gone.url) as pool,
    ):
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        pooled.capacity = Fixed(agents=1)
        await ask(pool, "a")
        waits = ask(pool, "b")
        await until(lambda: pool.waiting)
        pool.left("a")
        await remove_engine(pool.fleet, pooled.record.name)
        await add_engine(pool.fleet, EngineSpec(other.url), "policy")
        completion = await waits

    assert completion.engine == f"vllm {name_of(other.url)}"
    assert gone.stats().calls == 1


# --- one process's trouble is not an engine's --------------------------------------------------


async def test_a_new_start_is_not_blamed_for_streams_that_the_old_one_broke(
    client: httpx.AsyncClient,
) -> None:
    """A gateway that learns of death and return at once cuts the old streams and leaves the new start alone."""
    roster = InMemoryRoster()
    async with (
        ScriptedEngine(LONG, chunk_delay_s=0.02) as engine,
        opened(client, engine.url, roster=roster, poll_s=0.2) as pool,
    ):
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        first = pooled.record.generation
        call = ask(pool)
        await sampling(pool)

        def reborn(now: Roster) -> Roster:
            (record,) = now.engines
            fresh = record.reborn(now.next_generation, record.start_id)
            return now.having(fresh.to(EngineState.READY, version=1))

        await roster.change(reborn)  # another gateway was quicker
        completion = await call
        generation = pooled.record.generation

    assert [span.generation for span in completion.engines] == [first, first + 1]
    assert generation == first + 1


async def test_a_broken_stream_continues_while_the_store_is_unavailable(
    client: httpx.AsyncClient,
) -> None:
    """A turn continues although the engine's failure cannot be recorded."""
    roster = Away()
    async with (
        ScriptedEngine(LONG, chunk_delay_s=0.02) as one,
        ScriptedEngine(LONG, chunk_delay_s=0.02) as two,
        opened(client, one.url, two.url, roster=roster) as pool,
    ):
        await ready(pool, 2)
        one.control(kind="eof_mid_stream", times=1)
        two.control(kind="eof_mid_stream", times=1)
        call = ask(pool)
        await sampling(pool)
        roster.away = True
        completion = await call

    assert list(completion.token_ids) == await undisturbed()
    assert len(completion.engines) > 1


async def test_a_store_that_does_not_answer_delays_no_broken_stream(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn continues even if the store does not record what the call saw of the engine."""
    monkeypatch.setattr(engine_fleet, "LONGEST_RECORDING_S", 0.05)
    roster = Stuck()
    async with (
        ScriptedEngine(LONG, chunk_delay_s=0.02) as one,
        ScriptedEngine(LONG, chunk_delay_s=0.02) as two,
        opened(client, one.url, two.url, roster=roster) as pool,
    ):
        await ready(pool, 2)
        one.control(kind="eof_mid_stream", times=1)
        two.control(kind="eof_mid_stream", times=1)
        call = ask(pool)
        await sampling(pool)
        roster.answers.clear()
        async with asyncio.timeout(STUCK_S):
            completion = await call

    assert list(completion.token_ids) == await undisturbed()
    assert len(completion.engines) > 1


async def test_streams_that_one_death_broke_write_to_the_store_once(
    client: httpx.AsyncClient,
) -> None:
    """If each wrote by itself, a slow store would delay the last one by minutes."""
    roster = Stuck()
    async with (
        ScriptedEngine(LONG) as engine,
        opened(client, engine.url, roster=roster, poll_s=3600.0) as pool,
    ):
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        roster.answers.clear()
        asked, generation = roster.asked, pooled.record.generation
        seen = (
            pool.fleet.doubt(pooled, generation, EngineState.SUSPECT, "it broke") for _ in range(9)
        )
        doubts = asyncio.gather(*seen)
        await until(lambda: roster.asked > asked)
        roster.answers.set()
        await doubts
        state, times = pooled.record.state, roster.asked - asked

    assert (state, times) == (EngineState.SUSPECT, 1)


async def test_an_engine_that_answers_nonsense_is_checked_again(client: httpx.AsyncClient) -> None:
    """The health checks of an engine continue although its routes answer nonsense."""

    class Confused(ScriptedEngine):
        confused = True

        async def _models(self, request: Request) -> Response:
            if self.confused:
                return JSONResponse({"data": [1]})
            return await super()._models(request)

        async def _metrics(self, request: Request) -> Response:
            if self.confused:
                return Response(b"not gzip", headers={"content-encoding": "gzip"})
            return await super()._metrics(request)

    confused = Confused(LONG)
    async with confused as engine, opened(client, engine.url) as pool:
        (pooled,) = pool.engines.values()
        await until(lambda: pooled.record.reason)
        confused.confused = False
        async with asyncio.timeout(STUCK_S):
            await ready(pool, 1)


async def test_a_slow_read_of_the_roster_restores_no_older_state(client: httpx.AsyncClient) -> None:
    """A read that began before a change and ended after it does not undo the change."""

    class Slow(InMemoryRoster):
        reading, let = asyncio.Event(), asyncio.Event()

        async def change(self, change: Change) -> Roster:
            before, found = self._roster, await super().change(change)
            if found is before and found.engines == ():
                self.reading.set()
                await self.let.wait()
            return found

        async def read(self) -> Roster:
            return await self.change(lambda roster: roster)

    roster = Slow()
    roster.let.set()
    async with ScriptedEngine(LONG) as engine, opened(client, roster=roster) as pool:
        roster.let.clear()
        roster.reading.clear()
        await roster.reading.wait()
        adding = asyncio.create_task(add_engine(pool.fleet, EngineSpec(engine.url), "policy"))
        await asyncio.sleep(0)
        before = dict(pool.engines)
        roster.let.set()
        await adding
        await ready(pool, 1)
        after = dict(pool.engines)

    assert before in ({}, after)


# --- which weights -----------------------------------------------------------------------------


async def test_tokens_get_no_version_while_the_roster_cannot_be_read(tmp_path: Path) -> None:
    """An update may have begun unseen, so tokens get no version instead of the old one."""
    roster = Away()
    async with (
        new_client() as client,
        ScriptedEngine(LONG, chunk_delay_s=0.03, policy_version=1) as engine,
        opened(client, engine.url, roster=roster, notice_s=0.15) as pool,
    ):
        engine.weights = 1
        await ready(pool, 1)
        call = ask(pool)
        (running,) = (await sampling(pool, 16)).running
        roster.away = True
        with pytest.raises(StoreUnavailable):
            await pool.fleet.read()
        updates = WeightUpdates(Heard(roster), client, notice_s=0.3)
        await updates.update(2, checkpoint(tmp_path, 2), [canary(2)], UpdatePolicy("keep"))
        new = len(running.salvage.ids) + 8
        await until(lambda: len(running.salvage.ids) >= new + 40)
        stamped = running.salvage.versions_of(new, new + 40)
        call.cancel()

    assert stamped == []


class Heard:
    """Reaches a roster that is unavailable to other processes."""

    def __init__(self, roster: InMemoryRoster) -> None:
        self._roster = roster

    async def read(self) -> Roster:
        return await self.change(lambda roster: roster)

    async def change(self, change: Change) -> Roster:
        return await InMemoryRoster.change(self._roster, change)


async def test_an_engine_whose_weights_two_updates_fought_over_does_not_serve(
    tmp_path: Path,
) -> None:
    """The update that was overtaken loaded after the other one's canaries, so it condemns the engine."""
    over = asyncio.Event()

    class Late(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/pause":
                await over.wait()
            return await super().handle_async_request(request)

    async with stand(1) as it, httpx.AsyncClient(transport=Late()) as client:
        late = WeightUpdates(it.roster, client, notice_s=0)
        overtaken = asyncio.create_task(late.update(2, checkpoint(tmp_path / "2", 2), [canary(2)]))
        await it.seen(it.engines[0], EngineState.PAUSED)
        await it.updates.update(3, checkpoint(tmp_path / "3", 3), [canary(3)])
        over.set()
        with pytest.raises(UpdateRefused, match="took it over"):
            await overtaken
        (record,) = (await it.roster.read()).engines

    assert it.engines[0].weights == 2
    assert (record.state, record.version) == (EngineState.DEAD, None)


@pytest.mark.parametrize("notice_s", [3600.0, 0.0])
async def test_an_update_cancelled_before_its_pause_changes_nothing(
    tmp_path: Path, notice_s: float
) -> None:
    """If a trainer is interrupted during the announcement or right after, the engine keeps serving."""
    looked = asyncio.Event()

    class Slow(Heard):
        async def read(self) -> Roster:
            now = await super().read()
            if any(record.held_by for record in now.engines):
                looked.set()
                await asyncio.Event().wait()
            return now

    async with stand(1) as it, new_client() as client:
        patient = WeightUpdates(Slow(it.roster), client, notice_s=notice_s)
        update = asyncio.create_task(patient.update(2, checkpoint(tmp_path, 2), [canary(2)]))
        await it.seen(it.engines[0], EngineState.PAUSED)
        if not notice_s:
            await looked.wait()
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        async with asyncio.timeout(STUCK_S):
            completion = await it.ask()

    assert set(recorded_versions(completion)) == {1}


async def test_an_engine_that_comes_back_during_an_update_gets_it_too(tmp_path: Path) -> None:
    """Under suspicion when the update began: it does not serve on with the old weights."""
    async with stand(2) as it:
        other = name_of(it.engines[1].url)

        class Meanwhile:
            async def load(self, control: EngineControl, version: int) -> None:
                if control.url == it.engines[0].url:
                    await until(lambda: it.pool.engines[other].record.serves)
                await checkpoint(tmp_path, 2).load(control, version)

        def suspected(now: Roster) -> Roster:
            record = now.get(other)
            assert record is not None
            return now.having(record.to(EngineState.SUSPECT, "a broken stream"))

        await it.roster.change(suspected)
        updated = await it.updates.update(2, Meanwhile(), [canary(2)])

    assert [engine.weights for engine in it.engines] == [2, 2]
    assert len(updated) == 2


async def test_a_finished_update_ignores_later_faults_of_its_engines(
    tmp_path: Path,
) -> None:
    """Suspect a moment after its last engine was proven: the version is served, and counts."""

    class Doubted(Heard):
        async def change(self, change: Change) -> Roster:
            now = await super().change(change)
            (record,) = now.engines
            if (record.serves, record.version) != (True, 2):
                return now
            suspect = record.to(EngineState.SUSPECT, "a broken stream")
            return await super().change(lambda roster: roster.having(suspect))

    async with stand(1) as it, new_client() as client:
        updates = WeightUpdates(Doubted(it.roster), client, notice_s=0)
        updated = await updates.update(2, checkpoint(tmp_path, 2), [canary(2)])

    assert len(updated) == 1


async def test_an_update_that_a_newer_one_overtook_reverts_nothing(tmp_path: Path) -> None:
    """The next engine already has the newer version and keeps it; the older update is refused."""
    async with stand(2) as it:
        first, second = (name_of(engine.url) for engine in it.engines)

        class Outrun:
            async def load(self, control: EngineControl, version: int) -> None:
                def newer(now: Roster) -> Roster:
                    record = now.get(second)
                    assert record is not None
                    return now.having(record.model_copy(update={"version": 3}))

                await it.roster.change(newer)
                await checkpoint(tmp_path, 2).load(control, version)

        with pytest.raises(UpdateRefused, match="version 3 from another update"):
            await it.updates.update(2, Outrun(), [canary(2)])
        versions = {one.name: one.version for one in (await it.roster.read()).engines}

    assert versions == {first: 2, second: 3}


async def test_weights_changed_from_outside_are_known_from_the_next_turn(
    tmp_path: Path,
) -> None:
    """The version that the engine reports corrects its record, and so which groups it may sample."""
    async with stand(1) as it:
        it.engines[0].control(policy_version=3, weights=3)
        completion = await it.ask()
        (record,) = (await it.roster.read()).engines

    assert set(recorded_versions(completion)) == {3} == set(it.true_versions(completion))
    assert record.version == 3


async def test_a_held_group_keeps_no_token_of_unannounced_weights(tmp_path: Path) -> None:
    """Weights were changed without an announcement; the group's call fails, even if it began before."""
    async with stand(1, delay_s=0.02) as it:
        call = it.ask(policy_version="1", max_staleness="0")
        await it.sampling(call)
        it.engines[0].control(policy_version=3, weights=3)
        with pytest.raises(Refused, match="policy version 1"):
            await call


async def test_a_drain_during_an_update_blocks_no_call(tmp_path: Path) -> None:
    """Its new weights can no longer be proven, so its calls move to another engine at once."""
    async with stand(2, delay_s=0.02) as it:
        call = it.ask()
        await it.sampling(call)
        (pooled,) = (pooled for pooled in it.pool.engines.values() if pooled.running)
        await it.updates._hold(pooled.record.name, 2)
        await until(lambda: pooled.record.held_by)
        await drain_engine(it.pool.fleet, pooled.record.name, deadline_s=3600)
        async with asyncio.timeout(STUCK_S):
            completion = await call

    assert len(completion.engines) == 2
    assert set(recorded_versions(completion)) == {1}


# --- control ------------------------------------------------------------------------------------


async def test_draining_a_dead_engine_removes_it(client: httpx.AsyncClient) -> None:
    """It has no call to finish, and the answer says so."""
    roster = InMemoryRoster()
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url, roster=roster) as pool:
        await ready(pool, 1)
        (record,) = (await roster.read()).engines
        await roster.change(lambda now: now.having(record.to(EngineState.DEAD, "gone")))
        drained = await drain_engine(pool.fleet, record.name)

    assert drained.removed


async def test_a_wrong_clock_of_another_host_delays_no_drain(client: httpx.AsyncClient) -> None:
    """A deadline from a host whose clock is an hour ahead is kept by its length."""
    roster = InMemoryRoster()
    async with (
        ScriptedEngine(LONG, chunk_delay_s=0.05) as one,
        ScriptedEngine(LONG, chunk_delay_s=0.05) as two,
        opened(client, one.url, two.url, roster=roster) as pool,
    ):
        await ready(pool, 2)
        call = ask(pool)
        pooled = await sampling(pool)

        def ahead(now: Roster) -> Roster:
            record: EngineRecord | None = now.get(pooled.record.name)
            assert record is not None
            there = record.to(EngineState.DRAINING).since + 3600
            changes = {"since": there, "drain_by": there + 0.1}
            return now.having(record.to(EngineState.DRAINING, "drain", **changes))

        await roster.change(ahead)
        completion = await call

    assert len(completion.engines) == 2
    assert SAMPLING["max_tokens"] > len(completion.token_ids) > len(PROMPT)
