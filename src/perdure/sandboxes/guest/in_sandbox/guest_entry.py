"""Runs inside a remote sandbox at every call, and hands the order to the resident guest.

The *resident* is a process that has loaded `guest`. It forks for each order, which takes a tenth of
the time that a new interpreter needs to start. The resident is optional. If it is missing, dead,
silent or of another version, the caller executes the order itself and starts a new resident.
Standard library only, Python 3.7 or later.
"""

import sys

TYPE_CHECKING = False  # importing `typing` would take most of a call's time
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

FOLDER = __file__.rpartition("/")[0]
SOCKET = FOLDER + "/resident"
LOCK = FOLDER + "/resident.lock"
TAKEN = b"+"
TAKEN_S = 5.0
"""Seconds after which a resident that does not take an order is replaced."""
LARGEST_ORDER = 1 << 20


def main() -> None:
    """Execute the order in `sys.argv[1]` and print the answer."""
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
    _start_resident(guest.answer, born, silent)


def _print(answer: str) -> None:
    sys.stdout.write(answer)
    sys.stdout.flush()


def _asked(order: str) -> "str | None":
    """The resident's answer. None: execute the order here, even if that repeats it.

    Raises: TimeoutError when the resident does not take the order.
    """
    import _socket  # importing `socket` takes longer than the answer

    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.settimeout(TAKEN_S)
        connection.connect(SOCKET)
        connection.sendall(order.encode() + b"\n")
        if connection.recv(1) != TAKEN:
            return None
        connection.settimeout(None)
        answer = b""
        while not answer.endswith(b"}\n"):
            piece = connection.recv(1 << 16)
            if not piece:
                return None
            answer += piece
        return answer.decode()
    except _socket.timeout:
        raise TimeoutError from None
    except OSError:
        return None
    finally:
        connection.close()


# -- the resident ---------------------------------------------------------------------------------


def _start_resident(answer: "Callable[[str], str]", born: object, replace_silent: bool) -> None:
    """Start a resident, and return when it listens or is not needed. `replace_silent`: kill one that
    does not answer."""
    import os
    import select

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.setsid()
            if os.fork() == 0:
                _run_resident(answer, born, replace_silent, writing)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    select.select([reading], [], [], TAKEN_S)
    os.close(reading)


def _run_resident(
    answer: "Callable[[str], str]", born: object, replace_silent: bool, told: int
) -> None:
    import os
    import socket

    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir("/")
    os.umask(0o022)
    lock = _hold_lock(replace_silent)
    if lock is None:
        return
    if os.path.exists(SOCKET):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(SOCKET)
    listener.listen(128)
    os.close(told)
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that answer
    while True:
        connection, _ = listener.accept()
        if _version() != born:
            os.unlink(SOCKET)
            os.close(lock)  # before this caller continues, because it starts the next resident
            return
        try:
            pid = os.fork()
        except OSError:  # no free process: the caller executes the order itself
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


def _hold_lock(replace_silent: bool) -> "int | None":
    """Take the lock that one resident holds at a time. None: another holds it.

    `replace_silent`: kill the one that holds it first."""
    import fcntl
    import os
    import signal

    processes = __import__("guest_processes")
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if not replace_silent:
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
    """The version of the installed programs."""
    import os

    found = [entry for entry in os.scandir(FOLDER) if entry.name.endswith(".py")]
    return {entry.name: (entry.inode(), entry.stat().st_mtime_ns) for entry in found}
