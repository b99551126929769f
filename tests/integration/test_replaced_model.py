"""Another model behind an engine's address: no session goes on with it unless somebody says so."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import InMemoryRoster, add_engine
from perdure.engines.engine_state import EngineSpec, EngineState, name_of
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.pooled_engine import PooledEngine
from perdure.testing.scripted_engine import ScriptedEngine
from tests.integration.engine_calls import LONG, ask, opened, ready, until

OTHER = {"default": {"turns": [{"content": "another model"}]}}
SOON_S = 30.0


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


class OtherTokenizer(ScriptedEngine):
    """The same root with another tokenizer."""

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": [1, 2, 3]})


async def served_at_first(pool: EnginePool, engine: ScriptedEngine) -> tuple[PooledEngine, int]:
    """The pool's view of an engine that was ready and has ended, and its port."""
    await ready(pool, len(pool.engines))
    await engine.__aexit__()
    name = name_of(engine.url)
    return pool.engines[name], int(name.rpartition(":")[2])


def at(port: int, scripts: Any = OTHER, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(scripts, port=port, **options)


async def refused(pooled: PooledEngine, *words: str) -> None:
    """Until its record says why it is out of use."""

    def told() -> bool:
        record = pooled.record
        return record.state is EngineState.DEAD and all(word in record.reason for word in words)

    await until(told)


async def test_another_model_at_an_address_is_refused_by_both_names(
    client: httpx.AsyncClient,
) -> None:
    """The healthy engine takes the work; adding the address again accepts its new model."""
    first = await ScriptedEngine(LONG).__aenter__()
    async with (
        asyncio.timeout(SOON_S),
        ScriptedEngine(LONG) as healthy,
        opened(client, first.url, healthy.url) as pool,
    ):
        pooled, port = await served_at_first(pool, first)
        async with at(port) as other:
            await refused(pooled, first._root, other._root, "perdure engines add")
            completion = await ask(pool)
            await add_engine(pool.fleet, EngineSpec(other.url), "policy")
            await ready(pool, 2)

    assert completion.engine == f"vllm {name_of(healthy.url)}"


async def test_a_call_without_another_engine_waits_and_says_why(client: httpx.AsyncClient) -> None:
    """While only another model answers, the call waits; the first model ends the wait."""
    first = await ScriptedEngine(LONG).__aenter__()
    async with asyncio.timeout(SOON_S), opened(client, first.url) as pool:
        pooled, port = await served_at_first(pool, first)
        async with at(port) as other:
            await refused(pooled, other._root)
            call = ask(pool)
            waiting = await until(lambda: pool.waits("s"))
            assert other._root in waiting.reason
            assert other.stats().calls == 0
        async with at(port, LONG):
            completion = await call

    assert len(completion.token_ids) > 100


async def test_a_restart_of_a_gateway_forgets_no_model(client: httpx.AsyncClient) -> None:
    """The roster keeps what an engine served, so another model is noticed after a restart too."""
    roster = InMemoryRoster()
    first = await ScriptedEngine(LONG).__aenter__()
    async with asyncio.timeout(SOON_S):
        async with opened(client, first.url, roster=roster) as pool:
            _, port = await served_at_first(pool, first)
        async with at(port), opened(client, first.url, roster=roster) as pool:
            await refused(pool.engines[name_of(first.url)], "instead of")


async def test_a_higher_weight_version_is_an_update(client: httpx.AsyncClient) -> None:
    """A trainer may restart its engine from another folder, if its label says so."""
    first = await ScriptedEngine(LONG, policy_version=1).__aenter__()
    async with asyncio.timeout(SOON_S), opened(client, first.url) as pool:
        pooled, port = await served_at_first(pool, first)
        async with at(port, policy_version=2):
            await until(lambda: pooled.record.serves and pooled.record.version == 2)


async def test_another_tokenizer_is_never_an_update(client: httpx.AsyncClient) -> None:
    """Recorded ids would mean other texts, whatever the version says."""
    first = await ScriptedEngine(LONG, policy_version=1).__aenter__()
    async with asyncio.timeout(SOON_S), opened(client, first.url) as pool:
        pooled, port = await served_at_first(pool, first)
        async with OtherTokenizer(LONG, port=port, policy_version=2):
            await refused(pooled, "another tokenizer")
