"""`python -m benchmarks.mcp.tool_server SOCKET`: an MCP server whose tool answers at once.

It listens at a unix socket and at a port of the loopback, whose URL is its first line of output. The tool
`text` returns as many characters as its argument says.
"""

import asyncio
import json
import socket
import sys

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.testing.local_server import served


async def _called(request: Request) -> Response:
    message = json.loads(await request.body())
    text = "x" * message["params"]["arguments"]["characters"]
    result = {"content": [{"type": "text", "text": text}]}
    return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})


async def main() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    app = Starlette(routes=[Route("/{path:path}", _called, methods=["POST"])])
    async with served(app) as url, served(app, listener):
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
