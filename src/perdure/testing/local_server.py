"""Serves an app in this process's event loop until a block ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from perdure.gateway.http.http_server import NO_GRACE, make_server


@asynccontextmanager
async def served(
    app: ASGIApp, listener: socket.socket | None = None, **options: Any
) -> AsyncIterator[str]:
    """Yields the app's URL, or the path of `listener` if that is a unix socket. At the end of the block,
    connections are closed at once.

    `listener`: any free port of 127.0.0.1 if None. `options`: as for `make_server`.

    Example:
        async with served(Starlette(routes=routes)) as url:
            ...
    """
    listener = listener or socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = listener.getsockname()
    server = make_server(app, timeout_graceful_shutdown=NO_GRACE, **options)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield address if isinstance(address, str) else "http://{}:{}".format(*address[:2])
    finally:
        server.stop()
        await serving
