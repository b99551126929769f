"""A gateway process dies during an agent's call of an MCP server. The agent sees a broken tool, so its
attempt must not count. An agent that hangs up by itself fails nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from perdure.gateway.base import SessionSpec
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import McpServer
from tests.gateway_pool import Pool


@dataclass
class SilentMcpServer:
    """Takes calls, and answers none before the test ends."""

    called: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/mcp", self._call, methods=["POST"])])

    async def _call(self, _: Request) -> Response:
        self.called.set()
        await self.released.wait()
        return Response()


@dataclass
class Hosts:
    """Two hosts that share only the store; the first one has taken a call of an MCP server."""

    first: Pool
    second: Pool
    agent: "asyncio.Task[httpx.Response]"

    async def close(self) -> str:
        """Close the session at the second host: why it failed."""
        async with self.second.control() as control:
            return (await control.close("s")).mcp_failed


@pytest.fixture(params=["initialize", "tools/call"])
async def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Hosts]:
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": request.param}
    silent = SilentMcpServer()
    async with AsyncExitStack() as opened:
        engine = await opened.enter_async_context(ScriptedEngine())
        url = await opened.enter_async_context(served(silent.app)) + "/mcp"
        first, second = [
            await opened.enter_async_context(
                Pool([tmp_path / name], engine.url, store=str(tmp_path / "store"))
            )
            for name in ("first", "second")
        ]
        control = await opened.enter_async_context(first.control())
        servers = {"docs": McpServer(type="http", url=url)}
        await control.open(SessionSpec(session_id="s", turns_key="t/1", mcp_servers=servers))
        http = await opened.enter_async_context(httpx.AsyncClient(timeout=60))
        headers = {"authorization": f"Bearer {control.key('s')}"}
        calling = http.post(f"{first.url}/v1/mcp/docs", json=message, headers=headers)
        agent = asyncio.create_task(calling)
        await silent.called.wait()
        yield Hosts(first, second, agent)
        silent.released.set()


async def test_a_call_that_died_with_its_gateway_fails_the_attempt(hosts: Hosts) -> None:
    await hosts.first.kill(0)
    with pytest.raises(httpx.TransportError):
        await hosts.agent

    assert "a gateway process died during a call of MCP server 'docs'" in await hosts.close()


async def test_a_call_on_which_the_agent_hung_up_fails_nothing(hosts: Hosts) -> None:
    """Its process lives, and notes it before the other host gives up."""
    hosts.agent.cancel()

    assert await hosts.close() == ""
