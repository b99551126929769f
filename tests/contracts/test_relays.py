"""The relay delivers each of the agent's model calls once, and answers it.

Real parts: a bubblewrap sandbox without a network, a gateway, an engine that counts its samples.
"""

import asyncio
import hashlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from perdure.errors import AgentError, ConfigurationError
from perdure.sandboxes.base import Exec, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.relay import host_relay as relay_module
from perdure.sandboxes.relay.host_relay import Relay, exec_id_of
from perdure.settings.settings_tree import Settings
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine

SESSION = "s-1"
IDENTITY = "p-test-relay-1"
HOST = Path(__file__).parents[1] / "relay_host.py"
LONG_S = 60.0

CLIENT = """
import concurrent.futures, http.client, json, sys, time
ask = json.loads(sys.argv[1])

def once(number):
    connection = http.client.HTTPConnection("127.0.0.1", ask["port"], timeout=60)
    text = "Hi %d " % number + "x" * ask.get("pad", 0)
    body = {"model": "m", "stream": ask.get("stream", False)}
    body["messages"] = [{"role": "user", "content": text}]
    body["contents"] = [{"role": "user", "parts": [{"text": text}]}]
    body = ask.get("body", body)
    held = {ask["header"]: ask["key"]} if "header" in ask else {"authorization": "Bearer " + ask["key"]}
    headers = {"content-type": "application/json", **held}
    content = json.dumps(body) if ask.get("method", "POST") == "POST" else None
    connection.request(ask.get("method", "POST"), ask.get("path", "/v1/chat/completions"), content, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()

def stubborn(number):
    for attempt in range(200):
        try:
            return once(number)
        except (OSError, http.client.HTTPException):
            if not ask.get("again"):
                raise
            time.sleep(0.1)

with concurrent.futures.ThreadPoolExecutor(32) as pool:
    print(json.dumps(list(pool.map(stubborn, range(ask.get("count", 1))))))
"""

RAW_CLIENT = """
import hashlib, http.client, random, sys
port, path, seed, size, chunked = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
body = random.Random(seed).randbytes(size)
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
parts = (body[at:at + 70001] for at in range(0, size, 70001)) if chunked else body
connection.request("POST", path, parts, encode_chunked=bool(chunked),
                   headers={"transfer-encoding": "chunked"} if chunked else {})
print(hashlib.sha256(connection.getresponse().read()).hexdigest())
"""


class Upstream:
    """Replaces the gateway: keeps every body unchanged, and answers bytes that are not text."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.answer = random.Random(7).randbytes((3 << 20) + 11)

    async def _whole(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        return Response(self.answer)

    async def _streamed(self, request: Request) -> Response:
        self.bodies.append(await request.body())

        async def parts() -> AsyncIterator[bytes]:
            yield self.answer[:1]
            for at in range(1, len(self.answer), 99991):
                yield self.answer[at : at + 99991]

        return StreamingResponse(parts())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Upstream"]:
        routes = [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/v1/whole", self._whole, methods=["POST"]),
            Route("/v1/streamed", self._streamed, methods=["POST"]),
        ]
        async with served(Starlette(routes=routes)) as self.url:
            yield self


class Stand:
    """One sandbox with a closed network, and a gateway that it cannot reach."""

    def __init__(self, home: Path, gateway: LocalGateway, engine: ScriptedEngine) -> None:
        self.home, self.gateway, self.engine = home, gateway, engine
        self.sandbox: Sandbox
        self.key = ""
        self.port = 0

    @asynccontextmanager
    async def relay(self, **options: Any) -> AsyncIterator[Relay]:
        options = {"gateway_url": self.gateway.url, "reads_are_cheap": True, **options}
        relay = Relay(self.sandbox, session_key=self.key, **options)
        async with relay:
            self.port = int(relay.url.rsplit(":", 1)[1])
            yield relay

    async def start(self, exec_id: str, **ask: Any) -> None:
        words = json.dumps({"port": self.port, "key": self.key, **ask})
        await self.sandbox.start(exec_id, Exec(["python3", "-c", CLIENT, words], timeout_s=LONG_S))

    async def answers(self, exec_id: str) -> list[tuple[int, str]]:
        status = await self.sandbox.wait(exec_id, LONG_S)
        assert status.ok, await self.sandbox.output(exec_id, "stderr")
        return [tuple(pair) for pair in json.loads(await self.sandbox.output(exec_id))]

    async def ask(self, **ask: Any) -> list[tuple[int, str]]:
        await self.start("client", **ask)
        return await self.answers("client")

    @asynccontextmanager
    async def host(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """The host's side, serving in a separate process."""
        words = [str(self.home), IDENTITY, self.gateway.url, self.key]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(HOST), *words, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(LONG_S):
                line = await process.stdout.readline()
            self.port = int(line.decode().rsplit(":", 1)[1])
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def engine_is_busy(self) -> None:
        async with asyncio.timeout(LONG_S):
            while not self.engine.stats().in_flight:
                await asyncio.sleep(0.005)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    provider = BubblewrapProvider(Settings(home=tmp_path / "boxes"))
    if missing := provider.check():
        pytest.skip(missing[0])
    scripts = {"default": {"turns": [{"content": "Hello."}]}}
    async with (
        ScriptedEngine(scripts) as engine,
        LocalGateway(tmp_path / "home", engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        stand = Stand(tmp_path / "boxes", gateway, engine)
        stand.key = await gateway.open(SESSION)
        async with await provider.create(SandboxSpec("/testbed"), IDENTITY) as stand.sandbox:
            yield stand


async def test_plain_and_streamed_answers_pass(stand: Stand) -> None:
    """A plain answer is one JSON, a streamed one a whole stream of events."""
    async with stand.relay():
        [(status, text)] = await stand.ask()
        await stand.start("streamed", stream=True)
        [(streamed, events)] = await stand.answers("streamed")

    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "Hello.")
    assert (streamed, events.rstrip().splitlines()[-1]) == (200, "data: [DONE]")


@pytest.mark.parametrize("path", ["/v1/whole", "/v1/streamed"])
@pytest.mark.parametrize("chunked", [0, 1], ids=["length", "chunks"])
async def test_bodies_pass_byte_for_byte(stand: Stand, path: str, chunked: int) -> None:
    """A request of one megabyte and an answer of three, whole or in parts, arrive unchanged."""
    seed, size = 3, (1 << 20) + 5
    async with (
        Upstream().serving() as upstream,
        stand.relay(gateway_url=upstream.url),
    ):
        words = [str(word) for word in (stand.port, path, seed, size, chunked)]
        await stand.sandbox.start(
            "raw", Exec(["python3", "-c", RAW_CLIENT, *words], timeout_s=LONG_S)
        )
        status = await stand.sandbox.wait("raw", LONG_S)
        read = (await stand.sandbox.output("raw")).decode().strip()

    assert status.ok
    assert upstream.bodies == [random.Random(seed).randbytes(size)]
    assert read == hashlib.sha256(upstream.answer).hexdigest()


async def test_large_requests_reach_the_gateway(stand: Stand) -> None:
    """The gateway reads a request of a megabyte, and answers that it is too long."""
    async with stand.relay():
        [(status, text)] = await stand.ask(pad=1 << 20)

    assert status in (200, 400), text
    assert "invalid_json" not in text


async def test_twenty_calls_at_once(stand: Stand) -> None:
    """Twenty requests at the same time get twenty answers of twenty samples."""
    async with stand.relay():
        answers = await stand.ask(count=20)

    assert [status for status, _ in answers] == [200] * 20
    assert len({json.loads(text)["id"] for _, text in answers}) == 20
    assert stand.engine.stats().calls == 20


async def test_killed_host_loses_nothing(stand: Stand) -> None:
    """After kill -9 of the host's side while the engine samples, another gives the one answer."""
    stand.engine.control(latency_s=0.5)
    async with stand.host() as first:
        await stand.start("client")
        await stand.engine_is_busy()
        first.send_signal(signal.SIGKILL)
        await first.wait()
    async with stand.host():
        [(status, text)] = await stand.answers("client")

    assert (status, stand.engine.stats().calls) == (200, 1), text


class Tool:
    """An MCP server that counts the calls of its tool, and may hold them."""

    def __init__(self) -> None:
        self.calls = 0
        self.called, self.may_answer = asyncio.Event(), asyncio.Event()
        self.url = ""

    async def _call(self, request: Request) -> Response:
        self.calls += 1
        self.called.set()
        message = await request.json()
        await self.may_answer.wait()
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": {"content": []}})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Tool"]:
        app = Starlette(routes=[Route("/mcp", self._call, methods=["POST"])])
        async with served(app) as url:
            self.url = f"{url}/mcp"
            yield self
            self.may_answer.set()


TOOL_CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t"}}


async def test_tool_calls_pass(stand: Stand) -> None:
    """A sandbox without a network reaches its session's MCP servers."""
    async with Tool().serving() as tool:
        tool.may_answer.set()
        stand.key = await stand.gateway.open("tools", mcp_servers={"t": {"url": tool.url}})
        async with stand.relay():
            [(status, text)] = await stand.ask(path="/v1/mcp/t", body=TOOL_CALL)

    assert (status, json.loads(text)["result"], tool.calls) == (200, {"content": []}, 1)


async def test_a_tool_call_of_a_killed_host_is_not_done_twice(stand: Stand) -> None:
    """The tool may have done its work, so no one repeats the call as for a model: the attempt ends."""
    async with Tool().serving() as tool:
        stand.key = await stand.gateway.open("tools", mcp_servers={"t": {"url": tool.url}})
        async with stand.host() as first:
            await stand.start("client", path="/v1/mcp/t", body=TOOL_CALL)
            await tool.called.wait()
            first.send_signal(signal.SIGKILL)
            await first.wait()
        async with stand.host():
            [(status, text)] = await stand.answers("client")
        failed = (await stand.gateway.control.get("tools")).mcp_failed

    assert (status, tool.calls) == (200, 1)
    assert "was lost on the way to the sandbox" in json.loads(text)["error"]["message"]
    assert "MCP server 't' at 127.0.0.1" in failed


async def test_host_that_comes_back_repeats_no_old_call(stand: Stand) -> None:
    """A second host reads the whole log, and skips the requests that the first has answered."""
    async with stand.host():
        await stand.ask()
    async with stand.relay() as relay:
        asked: list[str] = []
        relay._gateway.event_hooks["request"].append(_noting(asked))
        await stand.start("second", count=2)
        await stand.answers("second")

    assert asked.count("/v1/chat/completions") == 2


def _noting(asked: list[str]) -> Any:
    async def note(request: Any) -> None:
        asked.append(request.url.path)

    return note


async def test_killed_relay_is_started_again(stand: Stand) -> None:
    """If the relay dies, the agent repeats its call at the same address. One sample is made."""
    stand.engine.control(latency_s=0.5)
    async with stand.relay():
        await stand.start("client", again=True)
        await stand.engine_is_busy()
        await stand.sandbox.signal(exec_id_of(1), signal.SIGKILL)
        [(status, text)] = await stand.answers("client")

    assert (status, stand.engine.stats().calls) == (200, 1), text


async def test_relay_that_is_killed_for_ever_fails_clearly(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that keeps killing its relay ends with one error that says so."""
    monkeypatch.setattr(relay_module, "MOST_STARTS", 1)
    async with stand.relay() as relay:
        await stand.sandbox.signal(exec_id_of(1), signal.SIGKILL)
        await asyncio.wait([relay._serving], timeout=LONG_S)

        with pytest.raises(AgentError, match="ended 1 times"):
            relay.check()


async def test_lost_answer_is_sent_again(stand: Stand) -> None:
    """A piece that never arrives is requested again. It comes from the record, not from the
    engine."""
    async with stand.relay(again_s=0.2) as relay:
        answer, lost = relay._process.answer, list[dict[str, Any]]()

        async def lose_first(head: dict[str, Any], body: bytes) -> None:
            if not lost:
                lost.append(head)
            else:
                await answer(head, body)

        relay._process.answer = lose_first  # type: ignore[method-assign]
        [(status, text)] = await stand.ask()

    assert (status, len(lost), stand.engine.stats().calls) == (200, 1, 1), text


async def test_duplicated_pieces_are_dropped(stand: Stand) -> None:
    """If every piece is delivered twice, the agent still gets each answer once."""
    async with stand.relay() as relay:
        answer = relay._process.answer

        async def twice(head: dict[str, Any], body: bytes) -> None:
            await answer(head, body)
            await answer(head, body)

        relay._process.answer = twice  # type: ignore[method-assign]
        answers = await stand.ask(count=3, stream=True)

    assert [text.count("[DONE]") for _, text in answers] == [1, 1, 1]


async def test_control_routes_are_out_of_reach(stand: Stand) -> None:
    """Neither sessions nor metrics answer through a relay, however the path is written."""
    paths = ["/sessions/s-1", "/metrics", "/v1/../metrics", "//metrics", "/v1/..%2fmetrics"]
    async with stand.relay():
        for number, path in enumerate(paths):
            await stand.start(f"c{number}", method="GET", path=path)
            [(status, _)] = await stand.answers(f"c{number}")

            assert status == 404, path


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"path": "/v1/messages", "header": "x-api-key"},
        {"path": "/v1beta/models/m:generateContent", "header": "x-goog-api-key"},
    ],
    ids=lambda asked: asked.get("header"),
)
async def test_only_its_own_key_opens_the_gateway(stand: Stand, asked: dict[str, str]) -> None:
    """The valid key of another session is not passed on, in whichever header it comes."""
    other = await stand.gateway.open("s-2")
    async with stand.relay():
        [(status, text)] = await stand.ask(**asked)
        await stand.start("other", key=other, **asked)
        [(refused, _)] = await stand.answers("other")

    assert (status, refused) == (200, 401), text


async def test_garbage_in_the_log_is_dropped(stand: Stand) -> None:
    """Hostile code that writes into the log harms only its own requests."""
    async with stand.relay():
        log = "/proc/$(pgrep -f relay.py | head -1)/fd/1"
        lines = [
            "head -c 400000 /dev/urandom",
            "head -c 400000 /dev/zero",
            "echo; echo '{}'; echo '[]'; echo '{\"id\": 7}'; echo '{\"port\": -1}'",
            'echo \'{"id":"../../etc","method":"GET","path":"/v1/models","headers":[]}\'',
        ]
        await stand.sandbox.exec(f"({'; '.join(lines)}) >> {log}")
        [(status, text)] = await stand.ask(again=True)

    assert status == 200, text


async def test_image_without_python_says_so(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no interpreter is found, the error names the field, what is missing, and the fix."""
    monkeypatch.setattr(
        relay_module, "_FIND_PYTHON", "echo 'no python3 in this image' >&2; exit 127"
    )
    with pytest.raises(ConfigurationError, match=r"gateway\.reach = .*python3 .*image"):
        async with stand.relay():
            pass
