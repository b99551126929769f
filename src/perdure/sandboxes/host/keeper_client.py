"""The worker's side of keepers: starts the fork server and sends each new keeper its order."""

import asyncio
import atexit
import contextlib
import marshal
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perdure.errors import Boundary, RetryHere
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.host_processes import reap
from perdure.sandboxes.host.sandbox_folder import META, SandboxFolder

BOOT_TIMEOUT_S = 60.0

_SOURCE = str(Path(__file__).parents[3])
_START = "import sys; sys.path.append(sys.argv[1]); from perdure.sandboxes.host.keeper.keeper_fork_server import main; main()"
_ROOM_FOR_A_PATH = 4096 + 64
_DEFAULT_SIGNALS = [
    signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM, signal.SIGXFSZ
]  # fmt: skip
"""Reset in the fork server: a worker may ignore these (Python itself ignores two), commands must
not."""


@dataclass(frozen=True)
class Holder:
    """How the keeper boots the holder, pid 1 of a sandbox's namespaces."""

    argv: tuple[str, ...]
    """The holder's command. It writes its pid to descriptor 3 and `up` to 1, reads a system-call
    filter from 4, and exits at the end of descriptor 0."""
    disk: str
    """Mount options of the tmpfs at `disk`; empty: `argv` mounts it and the overlays."""
    overlay: str | None
    """Mount options of the overlay at `disk/tree`."""
    root: str | None = None
    """Mount options of the overlay at `disk/root`, if `argv` uses that as its root folder."""
    pid_file: str | None = None
    """The file to which its pid is written, instead of descriptor 3."""
    own_argv: tuple[str, ...] = ()
    """Its command if the sandbox has a user of its own. Descriptor 5 is that user's namespace."""
    user_ids: int = 0
    """The lowest id on the host for such users."""
    paths: tuple[str, ...] = ()
    """Host paths that it mounts. In the sandbox, root's files there belong to that user."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Folder of the host that `argv` binds read-only -> options of the overlay to mount over it
    first. A lock on a file holds within one overlay, so no other sandbox sees it."""
    kills: bool = False
    """For each line on descriptor 0, a socket, it kills all other processes of its pid namespace
    and answers with a line."""


async def start_keeper(
    box: SandboxFolder,
    plan: cgroups.Plan,
    holder: Holder | None = None,
    gateway: tuple[int, Path] | None = None,
    proxy: tuple[int, Path] | None = None,
    *,
    in_own_users: bool = False,
    sidecars: bool = False,
) -> None:
    """Fork a detached keeper and wait until it accepts commands.

    `in_own_users`: it becomes root of its own user namespace, where it may mount. `gateway`: the
    port to listen on (0: any) and the unix socket to connect to. `proxy`: port
    and socket of an HTTP proxy. `sidecars`: it makes a pid namespace for them, and writes the pid
    of its first process to the file `sidecars`.

    Raises: RetryHere with the last lines of its log, when the sandbox does not boot.
    """
    cgroups.make(plan)
    meta = box.meta()
    order = {
        "box": str(box.path),
        "own_users": in_own_users,
        "joins": [str(path) for path in plan.joins],
        "groups": str(plan.exec_groups) if plan.exec_groups else None,
        "folders": [str(path) for path in plan.folders],
        "deadline": META,
        "output": meta.output_mb << 20,
        "on_disk": meta.on_disk,
        "oom": str(plan.oom_file) if plan.oom_file else None,
        "holder": None if holder is None else vars(holder),
        "gateway": None if gateway is None else (gateway[0], str(gateway[1])),
        "sidecars": sidecars,
        "proxy": None if proxy is None else (proxy[0], str(proxy[1])),
    }
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            _fork_keeper(theirs.fileno())
        said = await _converse(ours, marshal.dumps(order))
    if said != b"ready\n":
        log = box.path / "log"
        words = log.read_bytes()[-400:].decode("utf-8", "replace").strip() if log.exists() else ""
        raise RetryHere(
            f"sandbox {box.identity!r} did not boot: {words or 'no answer'}",
            boundary=Boundary.SANDBOX,
        )


async def _converse(line: socket.socket, order: bytes) -> bytes:
    """Send the order. Returns the answer up to its newline, or what came before the end or timeout."""
    loop = asyncio.get_running_loop()
    line.setblocking(False)
    said = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(BOOT_TIMEOUT_S):
            await loop.sock_sendall(line, len(order).to_bytes(4, "big") + order)
            while not said.endswith(b"\n") and (piece := await loop.sock_recv(line, 512)):
                said += piece
    return said


# -- the fork server ------------------------------------------------------------------------------


class _ForkServer:
    """The fork server. A fork of the worker starts its own, because it may run as another user."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            python = os.path.realpath(sys.executable)
            self.pid = os.posix_spawn(
                python,
                [python, "-I", "-S", "-c", _START, _SOURCE],
                {"PERDURE_BOX": "-" * _ROOM_FOR_A_PATH},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                ],
                setsid=True,
                setsigdef=_DEFAULT_SIGNALS,
                setsigmask=[],
            )

    def close(self) -> None:
        self.channel.close()
        if self.owner == os.getpid():
            reap(self.pid)


def _allow_open_files() -> None:
    """Raise this process's limit, because each request for a keeper puts a descriptor in flight.

    The kernel counts descriptors in flight for each user, including those of commands, and refuses
    ours beyond the soft limit. Commands have a lower limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_fork_servers: list[_ForkServer] = []
"""Empty, or this process's only one."""


def _fork_keeper(line: int) -> None:
    """Ask the fork server for a keeper. Starts a server if there is none or it was killed."""
    _allow_open_files()
    try:
        socket.send_fds(_our_fork_server().channel, [b"k"], [line])
    except ConnectionError:
        _leave()
        socket.send_fds(_our_fork_server().channel, [b"k"], [line])


def _our_fork_server() -> _ForkServer:
    if _fork_servers and _fork_servers[0].owner != os.getpid():
        _leave()
    if not _fork_servers:
        _fork_servers.append(_ForkServer())
    return _fork_servers[0]


@atexit.register
def _leave() -> None:
    while _fork_servers:
        _fork_servers.pop().close()
