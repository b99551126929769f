"""A session's summary says that it waits for an engine, since when, and why."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from perdure.engines.base import Completion, Wait
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import InMemoryRoster, StoredRoster, add_engine, roster_key
from perdure.engines.engine_state import EngineSpec
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_capacity import Capacity
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.home_folder import load_secrets
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from tests import held_ports

SCRIPTS = {"default": {"turns": [{"content": "Done."}]}}


class One(Capacity):
    """An engine with room for one agent; health checks do not change this."""

    def observe(self, *_: object, **__: object) -> None:
        """Ignores all observations."""


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(SCRIPTS) as engine:
        yield engine


@pytest.fixture
async def pool() -> AsyncIterator[EnginePool]:
    """Has no engine."""
    async with new_client() as client:
        pool = EnginePool(InMemoryRoster(), client, options=PoolOptions(poll_s=0.05))
        await pool.start()
        yield pool
        await pool.aclose()


@pytest.fixture
def unused_url() -> Iterator[str]:
    """An address at which no process listens during the test."""
    with held_ports.held(1) as (port,):
        yield f"http://127.0.0.1:{port}"


def ask(pool: EnginePool, session: str) -> "asyncio.Task[Completion]":
    call = pool.generate(GenerateCall([1, 2], {"max_tokens": 4}, session, f"{session}-0"))
    return asyncio.ensure_future(call)


async def until(told: Callable[[], Awaitable[Wait | None]]) -> Wait:
    async with asyncio.timeout(60):  # otherwise a missing wait would be awaited forever
        while (wait := await told()) is None:
            await asyncio.sleep(0.01)
    return wait


async def test_a_call_waits_until_an_engine_comes(pool: EnginePool, engine: ScriptedEngine) -> None:
    """The reason says that no engine is registered; the answer ends the wait."""

    async def waits() -> Wait | None:
        return pool.waits("s")

    asked = ask(pool, "s")
    wait = await until(waits)
    await add_engine(pool.fleet, EngineSpec(engine.url), "policy")
    await asked

    assert (wait.reason, pool.waits("s"), pool.waits("another")) == (
        "none is registered for the model policy",
        None,
        None,
    )


async def test_a_call_waits_while_every_engine_is_full(
    pool: EnginePool, engine: ScriptedEngine
) -> None:
    """The reason distinguishes full engines from engines that are not ready."""
    await add_engine(pool.fleet, EngineSpec(engine.url), "policy")
    (pooled,) = pool.engines.values()
    pooled.capacity = One(agents=1)
    await ask(pool, "first")

    async def waits() -> Wait | None:
        return pool.waits("second")

    asked = ask(pool, "second")
    wait = await until(waits)
    known = time.monotonic()
    waited = time.monotonic() - known
    pool.left("first")
    completion = await asked

    assert wait.reason == "every ready engine is full"
    assert completion.waited_s >= waited


async def _call(gateway: LocalGateway, key: str) -> int:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60.0) as http:
        body = {"model": "policy", "messages": [{"role": "user", "content": "Go."}]}
        headers = {"authorization": f"Bearer {key}"}
        return (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code


async def test_a_wait_is_in_the_sessions_summary(tmp_path: Path, unused_url: str) -> None:
    """While the call waits, a client with the control token reads which engine is missing."""
    async with LocalGateway(tmp_path, engine={"url": unused_url, "kind": "vllm"}) as gateway:
        asked = asyncio.ensure_future(_call(gateway, await gateway.open("s")))

        async def waits() -> Wait | None:
            return (await gateway.control.get("s")).waits

        wait = await until(waits)
        asked.cancel()

    assert unused_url.removeprefix("http://") in wait.reason


async def test_waiting_does_not_count_as_engine_time(
    tmp_path: Path, unused_url: str, engine: ScriptedEngine
) -> None:
    """A session's engine seconds begin when an engine gets its call."""
    async with LocalGateway(tmp_path, engine={"url": unused_url, "kind": "vllm"}) as gateway:
        key = await gateway.open("s")
        asked = asyncio.ensure_future(_call(gateway, key))

        async def waits() -> Wait | None:
            return (await gateway.control.get("s")).waits

        await until(waits)
        before = (await gateway.control.get("s")).waiting_seconds
        for _ in range(100):  # it waits longer than an answer takes
            await gateway.control.get("s")
        waiting = await gateway.control.get("s")
        key_of_roster = roster_key(load_secrets(gateway.settings).oldest)
        roster = StoredRoster(gateway.store, key_of_roster)
        await add_engine(roster, EngineSpec(engine.url), "policy")
        registered = time.monotonic()
        answered = await asked
        since = time.monotonic() - registered
        summary = await gateway.control.get("s")

    assert answered == 200
    assert 0 < summary.engine_seconds < since
    assert before < waiting.waiting_seconds <= summary.waiting_seconds


async def test_an_answer_at_another_gateway_ends_the_wait(
    tmp_path: Path, unused_url: str, engine: ScriptedEngine
) -> None:
    """An agent that retries may reach another process; its answer also ends the wait at the first
    one."""
    async with (
        LocalGateway(tmp_path, engine={"url": unused_url}) as one,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as other,
    ):
        key = await one.open("s")
        refused = await _call(one, key)
        waited = (await one.control.get("s")).waiting_seconds
        answered = await _call(other, key)
        summary = await one.control.get("s")

    assert (refused, answered, summary.waits) == (503, 200, None)
    assert summary.waiting_seconds >= waited > 0


async def test_an_unanswered_call_waits_since_its_first_try(
    tmp_path: Path, unused_url: str
) -> None:
    """An agent that is refused retries; the wait lasts from its first try until it has an
    answer."""
    told: list[Wait | None] = []
    async with LocalGateway(tmp_path, engine={"url": unused_url}) as gateway:
        key = await gateway.open("s")
        for _ in range(2):
            assert await _call(gateway, key) == httpx.codes.SERVICE_UNAVAILABLE
            told.append((await gateway.control.get("s")).waits)
        closed = await gateway.control.close("s")

    first, second = told
    assert first is not None
    assert second is not None
    assert (first.since, closed.waits) == (second.since, None)
