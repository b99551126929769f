"""Runs inside a remote sandbox, at every call: hands the order to the guest that lives there, if any.

The *resident* is a process that has `guest` loaded and forks for each order, which costs a tenth of
a new interpreter's start with all imports. It is never needed: where it is missing, dead, silent or
of another version, the caller carries the order out itself, which `guest` allows at any time, and
leaves a new resident behind. Standard library only, Python 3.7 or later.
"""

import sys

TYPE_CHECKING = False  # as in `typing`, whose import would be the longest part of a call
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

FOLDER = __file__.rpartition("/")[0]
DOOR = FOLDER + "/door"
LOCK = FOLDER + "/door.lock"
TAKEN = b"+"
TAKEN_S = 5.0
"""A resident that does not take an order for so long is replaced."""
LARGEST_ORDER = 1 << 20


def main() -> None:
    """The order is `sys.argv[1]`, where the caller has put it; its answer is printed."""
    try:
        answer = _asked(sys.argv[1])
    except TimeoutError:
        answer, silent = None, True
    else:
        silent = False
    if answer is not None:
        _print(answer)
        return
    born = _version()
    guest = __import__("guest")
    _print(guest.answer(sys.argv[1]))
    _leave_resident(guest.answer, born, silent)


def _print(answer: str) -> None:
    sys.stdout.write(answer)
    sys.stdout.flush()


def _asked(order: str) -> "str | None":
    """The resident's answer; None where the order must be carried out here, perhaps once more.

    Raises: TimeoutError when it does not even take the order."""
    import _socket  # the module above it takes longer to import than the answer does

    door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        door.settimeout(TAKEN_S)
        door.connect(DOOR)
        door.sendall(order.encode() + b"\n")
        if door.recv(1) != TAKEN:
            return None
        door.settimeout(None)
        answer = b""
        while not answer.endswith(b"}\n"):
            piece = door.recv(1 << 16)
            if not piece:
                return None
            answer += piece
        return answer.decode()
    except _socket.timeout:
        raise TimeoutError from None
    except OSError:
        return None
    finally:
        door.close()


# -- the resident ---------------------------------------------------------------------------------


def _leave_resident(answer: "Callable[[str], str]", born: object, silent: bool) -> None:
    """Returns when it can be asked, or is not to be. `silent`: the one that is there does not answer."""
    import os
    import select

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.setsid()
            if os.fork() == 0:
                _reside(answer, born, silent, writing)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    select.select([reading], [], [], TAKEN_S)
    os.close(reading)


def _reside(answer: "Callable[[str], str]", born: object, silent: bool, told: int) -> None:
    import os
    import socket

    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir("/")
    os.umask(0o022)
    lock = _hold_lock(silent)
    if lock is None:
        return
    if os.path.exists(DOOR):
        os.unlink(DOOR)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(DOOR)
    listener.listen(128)
    os.close(told)
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    while True:
        connection, _ = listener.accept()
        if _version() != born:
            os.unlink(DOOR)
            os.close(lock)  # before its caller is let go, who leaves another behind
            return
        try:
            pid = os.fork()
        except OSError:  # no process left: the caller may have better luck
            pid = -1
        if pid == 0:
            try:
                listener.close()
                os.close(lock)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _serve(connection, answer)
            finally:
                os._exit(0)
        connection.close()


def _serve(connection: "socket.socket", answer: "Callable[[str], str]") -> None:
    order = b""
    while not order.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece or len(order) > LARGEST_ORDER:
            return
        order += piece
    connection.sendall(TAKEN)
    connection.sendall(answer(order.decode().strip()).encode())


def _hold_lock(silent: bool) -> "int | None":
    """One resident at a time: where one is, there is no need of another, unless it is silent."""
    import fcntl
    import os
    import signal

    processes = __import__("guest_processes")
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if not silent:
            return None
        holder = os.read(lock, 100).split()
        if len(holder) == 2 and processes.alive((int(holder[0]), holder[1].decode())):
            os.kill(int(holder[0]), signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, TAKEN_S)  # ends this process
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.lseek(lock, 0, os.SEEK_SET)
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()} {processes.start_time(os.getpid())}\n".encode())
    return lock


def _version() -> object:
    """Of the programs as they lie there now."""
    import os

    found = [entry for entry in os.scandir(FOLDER) if entry.name.endswith(".py")]
    return {entry.name: (entry.inode(), entry.stat().st_mtime_ns) for entry in found}
