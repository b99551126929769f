"""A gateway's two listening sockets: the TCP port, and the unix socket for sandboxes.

The supervisor binds them and hands them to its pool. All processes accept from the same queue, so no
connection waits for a killed process. Imports little, because the supervisor imports it.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings

LONGEST_PATH = 107
"""The kernel's limit for the path of a unix socket, in bytes."""
BACKLOG = 1024
"""Connections that the kernel queues while every process is busy or restarting."""


@contextlib.contextmanager
def bound(settings: Settings) -> Iterator[list[socket.socket]]:
    """Both sockets, bound and listening. The unix socket's file is deleted at the end.

    Raises: ConfigurationError if an address is taken or a path is too long.
    """
    tcp = _bind_tcp(settings.gateway.host, settings.gateway.port)
    try:
        unix = bind_unix(settings.gateway_socket)
    except ConfigurationError:
        tcp.close()
        raise
    try:
        yield [tcp, unix]
    finally:
        tcp.close()
        unix.close()
        settings.gateway_socket.unlink(missing_ok=True)


def inherited(descriptors: Sequence[int]) -> list[socket.socket]:
    """The sockets that the parent process bound."""
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def check_path(path: Path) -> None:
    """Raises: ConfigurationError if the path is too long for a unix socket."""
    if (over := len(os.fsencode(path)) - LONGEST_PATH) > 0:
        raise ConfigurationError(
            f"PERDURE_HOME is too long for the unix sockets in it: make it {over} bytes shorter ({path})"
        )


def bind_unix(path: Path) -> socket.socket:
    """Raises: ConfigurationError if the path is too long, or another process listens there."""
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink() and answers(path):  # a link points to this host's forwarder
        raise ConfigurationError(
            f"another gateway uses {path}: stop it, or set another PERDURE_HOME. For several "
            "processes on one socket, set PERDURE_GATEWAY__PROCESSES and use `perdure up`"
        )
    draft = path.with_name(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(draft))
    listener.listen(BACKLOG)  # from now on, callers wait instead of being refused
    draft.chmod(0o600)  # forwarders connect as the worker's user; sandboxes never see the file
    draft.replace(path)  # replaces a killed gateway's socket, or the link to this host's forwarder
    return listener


def answers(path: Path) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue is full, so a process listens
            return True
        except OSError:
            return False
        return True


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
            "set PERDURE_GATEWAY__HOST or PERDURE_GATEWAY__PORT"
        ) from error
