"""Serving one gateway app on a TCP port and on the unix socket that sandboxes mount."""

import asyncio
import contextlib
import itertools
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from perdure.errors import ConfigurationError
from perdure.gateway.app import create_app
from perdure.gateway.journal import LocalJournal
from perdure.settings import Settings
from perdure.storage.base import Store

GRACE_S = 5
"""Seconds that turns in flight get after SIGTERM; their clients ask again."""
NO_GRACE = 0
"""For servers inside a test: connections are cut, which saves 0.1 s each time."""
LONGEST_SOCKET_PATH = 107
BACKLOG = 1024
TICK_S = 0.1
"""uvicorn refreshes its date header every tenth tick."""

log = structlog.get_logger()


class Server(uvicorn.Server):
    """uvicorn inside a program that owns its signals, and that stops at once when told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        ticks = itertools.count()
        while not await self.on_tick(next(ticks)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.timeout_graceful_shutdown != NO_GRACE:
            return await super().shutdown(sockets)
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()


def make_server(app: ASGIApp, **options: Any) -> Server:
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        **{"http": "h11", "timeout_graceful_shutdown": GRACE_S, **options},
    )
    return Server(config)


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """The two sockets of a gateway, bound; the unix socket's file goes away at the end.

    Raises: ConfigurationError when an address is taken or a path too long.
    """
    tcp = _bind_tcp(settings.gateway_host, settings.gateway_port)
    unix = _bind_unix(settings.gateway_socket)
    try:
        yield [tcp, unix]
    finally:
        tcp.close()
        unix.close()
        settings.gateway_socket.unlink(missing_ok=True)


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise ConfigurationError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}; "
            "set PERDURE_GATEWAY_HOST / PERDURE_GATEWAY_PORT"
        ) from error


def _bind_unix(path: Path) -> socket.socket:
    if len(str(path).encode()) > LONGEST_SOCKET_PATH:
        raise ConfigurationError(f"PERDURE_HOME is too long for a unix socket: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left behind by a killed gateway
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(BACKLOG)  # from now on callers wait instead of being refused
    path.chmod(0o666)  # the key in each request is what counts, not the sandbox's uid
    return listener


async def serve(settings: Settings, secret: bytes, store: Store) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    Raises: ConfigurationError.
    """
    loop = asyncio.get_running_loop()
    journal = LocalJournal(settings.home.absolute() / "journal")
    server = make_server(create_app(settings, secret, store, journal))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    with listening(settings) as sockets:
        host, port = sockets[0].getsockname()[:2]
        log.info("gateway listens", host=host, port=port, socket=str(settings.gateway_socket))
        await server.serve(sockets)
    await journal.aclose()
