"""Connects to a port in a sandbox's network namespace, from the host.

A socket stays in the namespace it was made in. So a short-lived child enters the namespace, connects,
and passes the socket to this process.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

from perdure.sandboxes.base import PortStream
from perdure.sandboxes.host.process import ProcessId, is_alive

_SOURCE = str(Path(__file__).parents[3])
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from perdure.sandboxes.host.keeper.dialler import connect_and_hand_out as out; out(*sys.argv[2:])"
)
LIMIT = 1 << 20
"""Bytes that the stream reader buffers."""


async def dial_into(holder: ProcessId, port: int) -> PortStream:
    """Raises: OSError when no process listens there, or the sandbox is gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        python, channel = os.path.realpath(sys.executable), str(theirs.fileno())
        child = await asyncio.create_subprocess_exec(
            *(python, "-I", "-S", "-c", _CHILD, _SOURCE, str(holder.pid), str(port), channel),
            pass_fds=[theirs.fileno()],
            stderr=asyncio.subprocess.DEVNULL,
        )
        if await child.wait() != 0 or not is_alive(holder):
            raise ConnectionRefusedError(f"no process answers at port {port} of the sandbox")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    connected = socket.socket(fileno=descriptors[0])
    connected.setblocking(False)
    return PortStream(*await asyncio.open_connection(sock=connected, limit=LIMIT))
