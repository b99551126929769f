"""Serves one gateway app on listening sockets, either its own or those of a pool."""

import asyncio
import contextlib
import itertools
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from perdure.gateway.gateway_addresses import announce
from perdure.gateway.http import listening_sockets
from perdure.gateway.http.api_keys import session_of
from perdure.gateway.http.connection_acceptor import Acceptor
from perdure.gateway.http.http_app import create_app
from perdure.gateway.http.http_protocol import HttpProtocol
from perdure.gateway.http.idle_connections import IDLE_S, IdleConnections
from perdure.gateway.http.request_limits import CallLimiter
from perdure.gateway.journal.turn_journal import refuse_earlier
from perdure.home_folder import Secrets
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store

GRACE_S = 15
"""Seconds that turns in flight get to end after SIGTERM. Others are sampled again when clients retry."""
NO_GRACE = 0
"""For servers inside tests: connections are closed at once, which saves 0.1 s each time."""
TICK_S = 0.1
"""uvicorn refreshes its date header every tenth tick."""

log = structlog.get_logger()


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the program around it, and that `stop` ends at once."""

    def __init__(self, config: uvicorn.Config, idle_s: float = IDLE_S) -> None:
        super().__init__(config)
        self.idle_s = idle_s
        self._stopping = asyncio.Event()
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sockets is None:
            return await super().startup()
        await super().startup([])
        self._acceptor = acceptor = Acceptor(sockets, self._protocol)
        if isinstance(self.config.app, CallLimiter):
            self.config.app.on_crowded = lambda crowded: (
                acceptor.pause() if crowded else acceptor.resume()
            )
        acceptor.resume()

    async def main_loop(self) -> None:
        ticks = itertools.count()
        idle = IdleConnections(self.idle_s)
        while not await self.on_tick(next(ticks)):
            idle.close_old(self.server_state.connections, time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()
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

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def limited(app: ASGIApp, secrets: Secrets) -> CallLimiter:
    """The app, wrapped in the limits of one process."""
    return CallLimiter(app, partial(session_of, secrets))


def make_server(app: ASGIApp, *, idle_s: float = IDLE_S, **options: Any) -> Server:
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        **{"http": HttpProtocol, "timeout_graceful_shutdown": GRACE_S, **options},
    )
    return Server(config, idle_s)


async def serve(
    settings: Settings,
    secrets: Secrets,
    store: Store,
    *,
    descriptors: Sequence[int] = (),
    health: Path | None = None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    `descriptors`: listening sockets that a pool shares; without them, the gateway binds its own.
    `health`: a unix socket of this process alone, for health checks.
    Raises: ConfigurationError.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes a descriptor
    loop = asyncio.get_running_loop()
    refuse_earlier(settings)
    app = create_app(settings, secrets, store)
    server = make_server(limited(app, secrets))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    with _sockets(settings, descriptors, health) as sockets:
        host, port = sockets[0].getsockname()[:2]
        log.info("gateway listens", host=host, port=port, socket=str(settings.gateway_socket))
        announcing = asyncio.create_task(announce(settings, store, secrets, port))
        await server.serve(sockets)
        announcing.cancel()


@contextlib.contextmanager
def _sockets(
    settings: Settings, descriptors: Sequence[int], health: Path | None
) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        if descriptors:
            sockets = listening_sockets.inherited(descriptors)
        else:
            sockets = stack.enter_context(listening_sockets.bound(settings))
        if health is not None:
            sockets.append(listening_sockets.bind_unix(health))
            stack.callback(health.unlink, missing_ok=True)
        yield sockets
