"""Checks whether a part of the stack is up. Each check asks the part itself.

A `wait_*` returns when the part is up. It has no time limit; the caller sets one.
"""

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from pathlib import Path

PAUSE_S = 0.05
SOCKET_TIMEOUT_S = 5.0
ALIVE, POLLED = "/healthz", "/readyz"
"""Health paths. ALIVE: the event loop of a gateway or worker runs. POLLED: the Temporal server has seen
the worker poll all its queues."""


async def wait_for_http(url: str) -> None:
    """Return when `url` answers with 200."""
    while not await answers(url):
        await asyncio.sleep(PAUSE_S)


async def answers(url: str, timeout_s: float = 5.0) -> bool:
    return await asyncio.to_thread(_get, url, timeout_s)


def _get(url: str, timeout_s: float) -> bool:
    # We use no proxy: these are our own addresses, usually loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def wait_for_socket(health: Path, path: str = ALIVE) -> None:
    """Return when the process behind the unix socket `health` answers with 200."""
    while not await socket_answers(health, path):
        await asyncio.sleep(PAUSE_S)


async def socket_answers(health: Path, path: str = ALIVE) -> bool:
    """Whether one process answers with 200. Each process has its own unix socket."""
    return await asyncio.to_thread(_get_by_socket, health, path)


def _get_by_socket(health: Path, path: str) -> bool:
    connection = _UnixConnection(health)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("gateway", timeout=SOCKET_TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))
