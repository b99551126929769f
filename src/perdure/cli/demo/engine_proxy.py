"""A reverse proxy in front of the demo's engine. It counts the calls that the engine gets, and refuses
calls on command.

It also sets the pace: `allow` says how many turns each agent may have, so that every fault finds all
agents at work, on a fast host and on a slow one.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from perdure.engines.clients.vllm_control import PROBE_SESSION
from perdure.stack.stack_ports import LOOPBACK

SAMPLES = "/inference/v1/generate"
HOPS = {"host", "connection", "content-length", "transfer-encoding"}
"""Hop-by-hop headers, which the proxy does not forward."""
DELIVERY_S = 1.0
"""A call counts as in flight for this many seconds after its last byte, because its answer may not be
stored yet."""
MOST_BYTES = 1 << 28


@dataclass
class Call:
    """A model call that the proxy passed to the engine. Times are monotonic seconds."""

    session: str
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    answered: bool = False

    @property
    def rollout(self) -> str:
        """The session without its attempt's number. All attempts of a rollout share it."""
        return self.session.rpartition("-")[0]


class EngineProxy:
    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self._allowed = 0
        self._status = 0
        self._changed = asyncio.Event()
        self._client: aiohttp.ClientSession
        self.calls: list[Call] = []
        self.sessions: set[str] = set()
        """Every session that has called, including those whose calls still wait."""
        self._waiting: Counter[str] = Counter()
        self.refused: list[str] = []
        """The rollouts of the calls that it refused."""
        self.url = ""

    def allow(self, turns: int) -> None:
        """Let each agent have this many answers; further calls wait."""
        self._allowed = turns
        self._wake()

    def refuse(self, status: int) -> None:
        """Answer every request with this status; 0 ends it."""
        self._status = status
        self.refused.clear()
        self._wake()

    def answers(self) -> Counter[str]:
        """How many answers each rollout's agents got."""
        return Counter(call.rollout for call in self.calls if call.answered)

    def waiting(self) -> set[str]:
        """The rollouts with a call that waits for `allow`."""
        return set(+self._waiting)

    def at_engine(self) -> list[Call]:
        return [call for call in self.calls if call.ended is None]

    def in_flight(self) -> set[str]:
        """The rollouts with a call in flight."""
        since = time.monotonic() - DELIVERY_S
        return {call.rollout for call in self.calls if call.ended is None or call.ended > since}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        session = request.headers.get("x-session-id", "")
        samples = request.path == SAMPLES and session not in ("", PROBE_SESSION)
        call = Call(session)
        if samples:
            self.sessions.add(session)
            await self._pace(call.rollout)
        if self._status:
            self.refused += [call.rollout] if samples else []
            return web.Response(status=self._status, text="refused by the demo's proxy")
        call.began = time.monotonic()
        if samples:
            self.calls.append(call)
        try:
            return await self._passed_on(request, body, call)
        finally:
            call.ended = time.monotonic()

    async def _pace(self, rollout: str) -> None:
        """Wait until the rollout may have another answer, or the proxy refuses all."""
        self._waiting[rollout] += 1
        try:
            while not self._status and self.answers()[rollout] >= self._allowed:
                await self._changed.wait()
        finally:
            self._waiting[rollout] -= 1

    async def _passed_on(self, request: web.Request, body: bytes, call: Call) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOPS}
        url = f"{self._engine_url}{request.path_qs}"
        try:
            answer = await self._client.request(request.method, url, headers=headers, data=body)
        except aiohttp.ClientError:
            return web.Response(status=502, text="the engine does not answer")
        async with answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOPS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            with contextlib.suppress(aiohttp.ClientError):  # the engine died: the answer ends here
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                call.answered = answer.status == web.HTTPOk.status_code
                await response.write_eof()
                return response
        if request.transport is not None:
            request.transport.abort()
        return response


@contextlib.asynccontextmanager
async def serving(engine_url: str) -> AsyncIterator[EngineProxy]:
    """Serve on a free port of the loopback until the context ends."""
    proxy = EngineProxy(engine_url)
    app = web.Application(client_max_size=MOST_BYTES)
    app.router.add_route("*", "/{path:.*}", proxy._carry)
    # A caller that hangs up cancels its call, as in any proxy.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    async with aiohttp.ClientSession(auto_decompress=False, timeout=NO_LIMIT) as proxy._client:
        await site.start()
        proxy.url = f"http://{LOOPBACK}:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            await runner.cleanup()


NO_LIMIT = aiohttp.ClientTimeout(total=None)
