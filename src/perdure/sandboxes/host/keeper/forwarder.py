"""Forwards TCP connections on 127.0.0.1 to the gateway's unix socket, in a process of its own.

The keeper forks it on the host. It enters only the sandbox's network namespace, so hostile code can
reach the gateway through it, but neither the socket's folder nor this process.
"""

import _socket
import _thread
import os
from time import monotonic, sleep

CONNECT_FOR_S = 30.0
"""Seconds that callers wait for a gateway that restarts, before their connection is closed."""


def serve(port: int, path: str, tell: int) -> None:
    """Never returns. Writes the port it listens on to the descriptor `tell`. `port` 0: any."""
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(256)
    os.write(tell, f"{listener.getsockname()[1]}\n".encode())
    os.close(tell)
    while True:
        fd, _ = listener._accept()  # type: ignore[attr-defined]  # what socket.accept wraps
        client = _socket.socket(fileno=fd)
        client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        _thread.start_new_thread(_carry, (client, path))


def _carry(client: _socket.socket, path: str) -> None:
    try:
        gateway = _connect(path)
    except OSError:
        client.close()
        return
    over = _thread.allocate_lock()
    over.acquire()
    _thread.start_new_thread(_back, (gateway, client, over))
    _pump(client, gateway)
    over.acquire()
    client.close()
    gateway.close()


def _connect(path: str) -> _socket.socket:
    until = monotonic() + CONNECT_FOR_S
    while True:
        gateway = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            gateway.connect(path)
            return gateway
        except OSError:
            gateway.close()
            if monotonic() > until:
                raise
            sleep(0.05)


def _back(gateway: _socket.socket, client: _socket.socket, over: "_thread.LockType") -> None:
    _pump(gateway, client)
    over.release()


def _pump(source: _socket.socket, sink: _socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    for end, how in ((sink, _socket.SHUT_WR), (source, _socket.SHUT_RD)):
        try:  # noqa: SIM105  # contextlib would cost every sandbox an import
            end.shutdown(how)
        except OSError:
            pass
