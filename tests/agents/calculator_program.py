"""A real MCP server with the published SDK, in a Python of its own where Perdure is not installed.

    python calculator_program.py                 # stdio
    python calculator_program.py http TOKEN      # streamable HTTP; prints its port, wants the token
    python calculator_program.py sse TOKEN       # the older transport

A client with another token gets 401. Without TOKEN, every client that sends a token gets 401.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn  # the SDK brings it
from mcp.server.mcpserver import Context, MCPServer  # type: ignore[import-not-found]

server = MCPServer("calculator")


@server.tool()  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"the sum is {a + b}"


@server.tool()  # type: ignore[untyped-decorator]
def divide(a: int, b: int) -> str:
    """Divide a number by another."""
    return str(a / b)


@server.tool()  # type: ignore[untyped-decorator]
async def wait(seconds: float, context: Context) -> str:  # type: ignore[type-arg, unused-ignore]
    """Tell that it has begun, then wait."""
    await context.report_progress(0, 1, "begun")
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()  # type: ignore[untyped-decorator]
def fill(size: int) -> str:
    """A text of this many characters."""
    return "x" * size


@server.tool()  # type: ignore[untyped-decorator]
def die() -> str:
    """End the server in the middle of the call."""
    os._exit(1)


def guarded(app: Any, token: str) -> Callable[..., Awaitable[None]]:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        expected = b"Bearer " + token.encode() if token else None
        if scope["type"] == "http" and headers.get(b"authorization") != expected:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return call


def serve(kind: str, token: str = "") -> None:
    listener = socket.create_server(("127.0.0.1", int(os.environ.get("PORT", "0"))))
    print(listener.getsockname()[1], flush=True)
    app = guarded(server.sse_app() if kind == "sse" else server.streamable_http_app(), token)
    config = uvicorn.Config(app, log_level="warning", lifespan="on")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(*sys.argv[1:])
    else:
        server.run("stdio")
