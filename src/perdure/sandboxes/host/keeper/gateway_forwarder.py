"""Forwards TCP connections on 127.0.0.1 to the gateway's unix socket, in a process of its own.

The keeper forks it on the host. It enters only the sandbox's network namespace, so hostile code can
reach the gateway through it, but neither the socket's folder nor this process. It has one thread
and at most `MOST` connections; further ones wait in the kernel's queue. Docker's containers run this
file too, with the Python of the image: standard library, Python 3.7 or later.
"""

from __future__ import annotations

import _socket
import os
import select
from time import monotonic

CONNECT_FOR_S = 30.0
"""Seconds that a connection waits for a gateway that restarts, before it is closed."""
CONNECT_AGAIN_MS = 50
MOST = 64
"""Connections at once: as many as the gateway accepts calls of one session."""
CHUNK = 65536
LONGEST_PATH = 107
"""Bytes of a unix socket's path. A longer path is opened relative to its folder."""


def serve(port: int, path: str, tell: int, groups: list[str]) -> None:
    """Never returns. Writes the port it listens on to the descriptor `tell`. `port` 0: any.

    Then it joins the sandbox's `groups` (files named cgroup.procs), whose limits then count it.
    """
    if len(os.fsencode(path)) > LONGEST_PATH:
        folder, _, path = path.rpartition("/")
        os.chdir(folder)
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(256)
    listener.setblocking(False)
    os.write(tell, f"{listener.getsockname()[1]}\n".encode())
    os.close(tell)
    for procs in groups:
        with open(procs, "w") as file:
            file.write("0")
    connections: list[_Connection] = []
    while True:
        connections = _turn(listener, path, connections)


def _turn(listener: _socket.socket, path: str, connections: list[_Connection]) -> list[_Connection]:
    """Wait for events and handle them. Returns the connections that are still open."""
    poll = select.poll()
    if len(connections) < MOST:
        poll.register(listener, select.POLLIN)
    for connection in connections:
        for end, events in connection.wanted():
            poll.register(end, events)
    waiting = any(connection.gateway is None for connection in connections)
    ready = {fd for fd, _ in poll.poll(CONNECT_AGAIN_MS if waiting else None)}
    if listener.fileno() in ready:
        try:
            fd, _ = listener._accept()  # type: ignore[attr-defined]  # what socket.accept wraps
        except OSError:  # the caller has hung up
            pass
        else:
            connections.append(_Connection(_socket.socket(fileno=fd)))
    for connection in connections:
        connection.advance(path, ready)
    return [connection for connection in connections if not connection.over]


class _Connection:
    def __init__(self, client: _socket.socket) -> None:
        client.setblocking(False)
        client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self.client = client
        self.gateway: _socket.socket | None = None
        self.over = False
        self._flows: tuple[_Flow, ...] = ()
        self._until = monotonic() + CONNECT_FOR_S

    def wanted(self) -> list[tuple[_socket.socket, int]]:
        """The ends to poll, with their events. An end without events is left out, because poll
        reports a closed end again and again."""
        events: dict[_socket.socket, int] = {}
        for flow in self._flows:
            end, event = flow.wanted()
            if event:
                events[end] = events.get(end, 0) | event
        return list(events.items())

    def advance(self, path: str, ready: set[int]) -> None:
        try:
            if self.gateway is None:
                self._connect(path)
            for flow in self._flows:
                flow.advance(ready)
        except OSError:
            self._close()
        else:
            if self._flows and all(flow.done for flow in self._flows):
                self._close()

    def _connect(self, path: str) -> None:
        gateway = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        gateway.setblocking(False)
        try:
            gateway.connect(path)
        except OSError:
            gateway.close()
            if monotonic() > self._until:
                raise
        else:
            self.gateway = gateway
            self._flows = (_Flow(self.client, gateway), _Flow(gateway, self.client))

    def _close(self) -> None:
        self.client.close()
        if self.gateway is not None:
            self.gateway.close()
        self.over = True


class _Flow:
    """Bytes in one direction. Reads more only when the other end has taken what was read."""

    def __init__(self, source: _socket.socket, sink: _socket.socket) -> None:
        self._source = source
        self._sink = sink
        self._data = b""
        self.done = False

    def wanted(self) -> tuple[_socket.socket, int]:
        if self._data:
            return self._sink, select.POLLOUT
        return self._source, 0 if self.done else select.POLLIN

    def advance(self, ready: set[int]) -> None:
        if not self._data and not self.done and self._source.fileno() in ready:
            try:
                self._data = self._source.recv(CHUNK)
            except BlockingIOError:
                return
            if not self._data:
                self.done = True
                self._sink.shutdown(_socket.SHUT_WR)
        if self._data:
            try:
                self._data = self._data[self._sink.send(self._data) :]
            except BlockingIOError:
                return
