"""The authenticating proxy in front of a scripted engine, with a real client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from perdure.engines.auth_proxy import EngineProxy, Rejected, engine_keys, key_hashes, read_head
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineRecord, EngineState, name_of
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.weights.weight_update import FromDisk, WeightCanary, WeightUpdates
from perdure.errors import PerdureError
from perdure.testing.scripted_engine import ScriptedEngine, logprob

KEYS = engine_keys(b"a secret of a home")
ASK = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}
POST = b"POST /generate HTTP/1.1\r\nhost: e\r\n"


@asynccontextmanager
async def guarded() -> AsyncIterator[tuple[ScriptedEngine, str]]:
    async with ScriptedEngine({}) as engine:
        port = urlsplit(engine.url).port
        assert port is not None
        async with EngineProxy(key_hashes(KEYS), "127.0.0.1", port) as proxy:
            yield engine, f"http://127.0.0.1:{proxy.port}"


async def status(url: str, method: str, path: str, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        response = await client.request(method, f"{url}{path}", headers=headers, json=ASK)
        return response.status_code


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause?mode=abort"),
        ("POST", "/resume"),
        ("POST", "/update_weights"),
        ("POST", "/collective_rpc"),
        ("POST", "/abort_requests"),
        ("POST", "//pause"),
        ("POST", "/inference/v1/generate/../../../pause"),
        ("GET", "/control"),
    ],
)
async def test_a_gateways_key_opens_no_control_route(method: str, path: str) -> None:
    """The data key opens no route that changes the engine, however the path is written."""
    async with guarded() as (_, url):
        assert await status(url, method, path, KEYS.data) == 403


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/pause", "/metrics"])
async def test_no_route_is_open_without_a_key(path: str) -> None:
    """Other hosts on the network get no tokens and no metrics, and cannot control the engine."""
    async with guarded() as (engine, url):
        wrong = [await status(url, "POST", path), await status(url, "POST", path, "guessed")]

        assert (wrong, engine.stats().calls) == ([401, 401], 0)


async def test_the_control_key_opens_control_routes() -> None:
    """A process that updates weights pauses the engine through the same proxy."""
    async with guarded() as (_, url):
        assert await status(url, "POST", "/pause?mode=abort&clear_cache=true", KEYS.control) == 200


async def test_a_pool_samples_through_the_proxy() -> None:
    """A gateway with the home's key gets whole streamed completions from an engine behind a
    proxy."""
    turns = {"default": {"turns": [{"content": "Said through the proxy."}]}}
    async with guarded() as (engine, url), httpx.AsyncClient(trust_env=False, timeout=30) as client:
        engine.control(scripts=turns)
        roster = InMemoryRoster()
        record = EngineRecord(
            name=url[7:], url=url, model="policy", generation=1, behind_proxy=True
        )
        await roster.change(lambda now: now.having(record))
        pool = EnginePool(roster, client, options=PoolOptions(home_key=KEYS.data, poll_s=60.0))
        try:
            completion = await pool.generate(
                GenerateCall([1, 2, 3], {"max_tokens": 50}, "s", "s-0")
            )
        finally:
            await pool.aclose()

        assert list(completion.token_ids) == list(engine.calls[-1].completion_ids)


async def test_a_client_that_disconnects_ends_its_request() -> None:
    """The engine sees the closed connection and aborts the request."""
    gone = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineProxy(key_hashes(KEYS), "127.0.0.1", port) as proxy:
        _, asker = await asyncio.open_connection("127.0.0.1", proxy.port)
        asker.write(POST + f"authorization: Bearer {KEYS.data}\r\n\r\n".encode())
        await asker.drain()
        asker.close()

        async with asyncio.timeout(30):
            await gone.wait()


async def test_a_second_request_on_the_connection_is_not_forwarded() -> None:
    """A control call after a sampling call on the same connection is not forwarded."""
    seen = bytearray()
    ended = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(4096):
            seen.extend(part)
        ended.set()
        writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineProxy(key_hashes(KEYS), "127.0.0.1", port) as proxy:
        _, asker = await asyncio.open_connection("127.0.0.1", proxy.port)
        key = f"authorization: Bearer {KEYS.data}\r\n".encode()
        asker.write(POST + key + b"content-length: 2\r\n\r\n{}POST /pause HTTP/1.1\r\n\r\n")
        await asker.drain()
        asker.close()
        async with asyncio.timeout(30):
            await ended.wait()

    assert bytes(seen).endswith(b"\r\n\r\n{}")
    assert KEYS.data.encode() not in seen


@pytest.mark.parametrize(
    "raw",
    [
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n",
        POST + b"content-length : 1\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        b"POST /generate\r\n\r\n",
        POST + b"x: y\n\nPOST /pause HTTP/1.1\nhost: e\r\n\r\n",
        POST + b"x: y\rcontent-length: 1\r\n\r\n",
        b"POST /generate HTTP/1.1\nhost: e\r\n\r\n",
    ],
)
def test_an_ambiguous_request_is_refused(raw: bytes) -> None:
    """Proxy and engine must agree where a line, a head and a body end."""
    with pytest.raises(Rejected):
        read_head(raw)


async def test_a_head_cannot_hide_a_second_request() -> None:
    """Engines accept a bare line feed as the end of a line, which must not let the data key open
    control routes."""
    hidden = b"x: a\n\nPOST /pause HTTP/1.1\nhost: e\ncontent-length: 0\r\n\r\n"
    key = b"authorization: Bearer " + KEYS.data.encode()
    async with guarded() as (engine, url), httpx.AsyncClient(trust_env=False, timeout=30) as client:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: e\r\n" + key + b"\r\n" + hidden)
        answer = await reader.read()
        writer.close()
        paused = (await client.get(f"{engine.url}/is_paused")).json()["is_paused"]

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert not paused


async def test_new_weights_are_loaded_through_the_proxy(tmp_path: Path) -> None:
    """An update needs the control key; with a gateway's data key it is refused."""
    (tmp_path / "weights.json").write_text(json.dumps({"weights": 7}))
    async with guarded() as (engine, url), httpx.AsyncClient(trust_env=False, timeout=30) as client:
        roster = InMemoryRoster()
        record = EngineRecord(
            name=name_of(url),
            url=url,
            model="policy",
            generation=1,
            behind_proxy=True,
            state=EngineState.READY,
        )
        await roster.change(lambda now: now.having(record))
        token = engine.policy.complete([1, 2, 3])[0]
        canary = WeightCanary(
            prompt_ids=(1, 2, 3), token_id=token, logprob=logprob(token, 0, weights=7)
        )
        source = FromDisk(tmp_path)

        updates = WeightUpdates(roster, client, control_key=KEYS.control, notice_s=0.0)
        await updates.update(8, source, [canary])

        assert engine.weights == 7
        engine.control(weights=0)
        stranger = WeightUpdates(roster, client, control_key=KEYS.data, notice_s=0.0)
        with pytest.raises(PerdureError):
            await stranger.update(9, source, [canary])
        assert engine.weights == 0
