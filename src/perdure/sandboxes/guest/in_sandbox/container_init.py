"""Runs as the first process of a container: reaps orphans, and exits at the deadline.

The container's Python gets this file as text, with the seconds until the deadline and the file in
which the guest renews it. Standard library only. When it exits, the kernel ends all other processes
of the container, and frees the lock for which `sidecars_init.py` waits.
"""

import fcntl
import os
import signal
import sys
import time

TICK_S = 0.5
RECORDS_OWNER = 64999
"""User id that owns the guest's records, so that root without capabilities cannot enter their folder."""


def main(seconds: float, deadline: str) -> None:
    end = time.monotonic() + seconds
    folder = os.path.dirname(deadline)
    os.chmod(folder, 0o700)
    if os.geteuid() == 0:  # otherwise all processes run as one user: no owner would protect it
        os.chown(folder, RECORDS_OWNER, RECORDS_OWNER)
    alive = os.open(f"{folder}/.alive", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(alive, fcntl.LOCK_EX)
    os.rename(f"{folder}/.alive", f"{folder}/alive")  # so it appears locked
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    while time.monotonic() < end:
        reap()
        try:
            with open(deadline) as file:
                end = float(file.read().split()[1])  # on the same monotonic clock as ours
        except (OSError, ValueError, IndexError):
            pass  # not renewed yet
        time.sleep(TICK_S)


def reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
