"""Runs as the first process of a container: reaps orphans, and exits at the deadline.

The container's Python gets this file as text, with the seconds until the deadline and the file in
which the guest renews it. For a sandbox with a list of hosts, the text of `gateway_forwarder.py`, a
port and the socket of a proxy follow: it forwards the port to the socket, and starts the forwarder
again whenever a command has killed it. Standard library only. When it exits, the kernel ends all
other processes of the container, and frees the lock for which `sidecars_init.py` waits.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TICK_S = 0.5
RECORDS_OWNER = 64999
"""User id that owns the guest's records, so that root without capabilities cannot enter their folder."""


def main(seconds: float, deadline: str, forwarding: list[str]) -> None:
    end = time.monotonic() + seconds
    folder = os.path.dirname(deadline)
    os.chmod(folder, 0o700)
    if os.geteuid() == 0:  # otherwise all processes run as one user: no owner would protect it
        os.chown(folder, RECORDS_OWNER, RECORDS_OWNER)
    alive = os.open(f"{folder}/.alive", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(alive, fcntl.LOCK_EX)
    forwarder = 0
    os.rename(f"{folder}/.alive", f"{folder}/alive")  # so it appears locked
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    while time.monotonic() < end:
        ended = reap()
        if forwarding and (forwarder in ended or not forwarder):
            forwarder = forward(folder, *forwarding)
        try:
            with open(deadline) as file:
                end = float(file.read().split()[1])  # on the same monotonic clock as ours
        except (OSError, ValueError, IndexError):
            pass  # not renewed yet
        time.sleep(TICK_S)


def forward(folder: str, source: str, port: str, path: str) -> int:
    """Start the forwarder, wait until it listens, and record the process. Returns its id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        names: dict[str, Any] = {"__name__": "forwarder"}
        exec(compile(source, "forwarder", "exec"), names)
        try:
            names["serve"](int(port), path, writer, [])
        finally:
            os._exit(1)
    os.close(writer)
    os.read(reader, 16)
    os.close(reader)
    with open(f"/proc/{pid}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    with open(f"{folder}/.forwarder", "w") as file:
        file.write(f"{pid} {started}")
    os.rename(f"{folder}/.forwarder", f"{folder}/forwarder")
    return pid


def reap() -> set[int]:
    """The process ids of what has ended."""
    ended: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.add(pid)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
