"""Runs as the first process of the pid namespace of a sandbox's sidecars. It exits when the sandbox's
first process does, and then the kernel ends the sidecars.

The container's Python gets this file as text, with the sandbox's folder, which both containers
mount. Standard library only.
"""

import fcntl
import os
import signal
import sys
import time

ALIVE = "alive"
"""The sandbox's first process holds a lock on this file from the moment it appears."""
TICK_S = 0.1


def main(folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    while not os.path.exists(f"{folder}/{ALIVE}"):
        time.sleep(TICK_S)
    file = os.open(f"{folder}/{ALIVE}", os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)  # waits until the lock's owner has ended


if __name__ == "__main__":
    main(sys.argv[1])
