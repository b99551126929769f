"""Serves a command's HTTP application until the command ends."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from starlette.types import ASGIApp


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the context ends; yield the port. Raises: OSError if the port is taken."""
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # uvicorn would prefer httptools, which does not limit the size of a request's head.
        config = uvicorn.Config(app, http="h11", log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task
