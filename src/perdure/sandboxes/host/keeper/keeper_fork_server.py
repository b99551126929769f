"""A worker's fork server: a small Python process that forks keepers, in 0.5 ms each instead of 10.

It imports only the modules that keepers need. It exits with its worker; its keepers do not.
"""

import gc
import os
import signal
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET, socket

from perdure.sandboxes.host.keeper import linux_syscalls, sandbox_keeper


def main() -> None:
    """Each message on stdin carries a descriptor on which one keeper gets its order and answers."""
    channel = socket(fileno=0)
    linux_syscalls.set_name("perdure-fork")
    os.chdir("/")
    os.umask(0o022)  # for files that sandboxes see; their folder keeps other users out
    os.closerange(3, 1 << 20)  # files that the worker inherited; commands must not inherit them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps its keepers
    gc.disable()
    gc.freeze()
    while True:
        message, passed, _, _ = channel.recvmsg(1, 64)
        if not message:
            return
        for level, kind, data in passed:
            if (level, kind) == (SOL_SOCKET, SCM_RIGHTS):
                _fork_keeper(channel, int.from_bytes(data[:4], sys.byteorder))


def _fork_keeper(channel: socket, line: int) -> None:
    if os.fork() == 0:
        channel.detach()  # its descriptor is the keeper's stdin now
        try:
            sandbox_keeper.keep(socket(fileno=line))
        except Exception as error:
            os.write(2, f"keeper: {error!r}\n".encode())
        finally:
            os._exit(1)
    os.close(line)
