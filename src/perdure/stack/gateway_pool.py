"""Asks one gateway process of a pool whether it lives, through the socket that is its alone."""

import asyncio
import http.client
import socket
from pathlib import Path

from perdure.stack.readiness import PAUSE_S

TIMEOUT_S = 5.0


async def wait_for(health: Path) -> None:
    """The process answers."""
    while not await answers(health):
        await asyncio.sleep(PAUSE_S)


async def answers(health: Path) -> bool:
    return await asyncio.to_thread(_get, health)


def _get(health: Path) -> bool:
    connection = _Connection("gateway", timeout=TIMEOUT_S)
    connection.health = health
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _Connection(http.client.HTTPConnection):
    health: Path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.health))
