"""A small MCP server over streamable HTTP, with one tool. It keeps no sessions and opens no streams."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.testing.local_server import served
from perdure.types import McpServer

TOOL = "lookup"
RESULT = "MCP-RESULT-7301"
"""What the tool says. It occurs nowhere else."""
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}
VERSION = "2025-06-18"
"""Of the protocol, for a client that names none."""
NO_METHOD = -32601


@asynccontextmanager
async def mcp_server() -> AsyncIterator[McpServer]:
    """Serves it until the block ends."""
    app = Starlette(routes=[Route("/mcp", _post, methods=["POST"])])  # GET: 405, no stream
    async with served(app) as url:
        yield McpServer.model_validate({"url": f"{url}/mcp"})


async def _post(request: Request) -> Response:
    message = json.loads(await request.body())
    if "id" not in message:  # a notification
        return Response(status_code=202)
    result = _result(message["method"], message.get("params") or {})
    body = {"error": {"code": NO_METHOD, "message": "no such method"}}
    if result is not None:
        body = {"result": result}
    return JSONResponse({"jsonrpc": "2.0", "id": message["id"], **body})


def _result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    tool = {"name": TOOL, "description": "Looks a text up.", "inputSchema": SCHEMA}
    return {
        "initialize": {
            "protocolVersion": params.get("protocolVersion", VERSION),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "perdure-check", "version": "1"},
        },
        "ping": {},
        "tools/list": {"tools": [tool]},
        "tools/call": {"content": [{"type": "text", "text": RESULT}]},
    }.get(method)
