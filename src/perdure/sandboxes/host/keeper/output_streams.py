"""Outputs of a command: pipes that its processes write to, and files that only the host opens.

The keeper copies the pipes into the files. So no process inside holds a file of the host, which it
could lease, truncate, or fill beyond the cap.
"""

import os
import select

TYPE_CHECKING = False  # importing `typing` would cost every keeper memory
if TYPE_CHECKING:
    from collections.abc import Callable

PIECE = 1 << 16
LARGEST_PIPE = 1 << 20
"""Bytes that an unprivileged command may leave in a pipe. They are copied even after it ends."""


def pipe_of(name: str) -> str:
    """The named pipe for output `name` in a command's folder. It lasts as long as the folder."""
    return f"{name}.pipe"


class Stream:
    """One output. The file appears with the first byte."""

    def __init__(
        self, folder: str, name: str, cap: int, user: int | None, end: "Callable[[], None]"
    ) -> None:
        """`end` is called once, when more than `cap` bytes were written. `user`: who may open the
        pipe by its name in /proc, as /dev/stdout does; None: this process's user only.

        Raises: OSError when the disk is full.
        """
        self._end: Callable[[], None] | None = end
        self._path = f"{folder}/{name}"
        self._file = -1
        self._left = cap
        self._unwritten = b""
        pipe = f"{folder}/{pipe_of(name)}"
        os.mkfifo(pipe, 0o600)
        if user is not None:
            os.chown(pipe, user, user)
        self.fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def stuck(self) -> bool:
        """The disk is full. Nothing more is read until `flush` succeeds, so the writers wait."""
        return bool(self._unwritten)

    @property
    def open(self) -> bool:
        """A process may still write."""
        return self.fd >= 0

    def carry(self) -> bool:
        """Copy at most one piece. False: nothing more can be copied now."""
        if not self.open or self.stuck:
            return False
        try:
            piece = os.read(self.fd, PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
            return False
        if len(piece) > self._left and self._end is not None:
            self._end()
            self._end = None
        self._unwritten = piece[: self._left]
        self._left -= len(self._unwritten)
        return self.flush()

    def drain(self) -> None:
        """Copy all that an ended command wrote. Processes that it left may write more."""
        for _ in range(LARGEST_PIPE // PIECE + 1):
            if not self.carry():
                return

    def flush(self) -> bool:
        """Write what was read. False: the disk is full."""
        try:
            while self._unwritten:
                if self._file < 0:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    self._file = os.open(self._path, flags, 0o600)
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except FileNotFoundError:  # the sandbox's folder has been removed
            self._unwritten = b""
        except OSError:
            return False
        return True

    def close(self) -> None:
        for fd in (self.fd, self._file):
            if fd >= 0:
                os.close(fd)
        self.fd = self._file = -1


class Outputs:
    """The streams of all commands of a sandbox, on the keeper's `poll`."""

    user: int | None = None
    """The commands' user, if it is not this process's."""

    def __init__(self, poll: "select.poll", cap: int) -> None:
        self._poll, self._cap = poll, cap
        self._streams: dict[int, Stream] = {}
        self._stuck: list[Stream] = []

    def open(self, exec_id: str, end: "Callable[[], None]") -> "tuple[Stream, ...]":
        """Both streams of a command that is about to start. `end` is called when one exceeds its cap.

        Raises: OSError when the disk is full.
        """
        streams = tuple(
            Stream(f"execs/{exec_id}", name, self._cap, self.user, end) for name in ("out", "err")
        )
        for stream in streams:
            self._watch(stream)
        return streams

    def __contains__(self, fd: int) -> bool:
        return fd in self._streams

    def carry(self, fd: int) -> None:
        stream = self._streams[fd]
        stream.carry()
        self._look(fd, stream)

    def drain(self, streams: "tuple[Stream, ...]") -> None:
        """Copy all that an ended command wrote, before its result is recorded."""
        for stream in streams:
            if (fd := stream.fd) in self._streams:
                stream.drain()
                self._look(fd, stream)

    @property
    def stuck(self) -> bool:
        """The disk is full, and output waits to be written."""
        return bool(self._stuck)

    def flush(self) -> bool:
        """Write what a full disk refused before. False: it is still full."""
        while self._stuck:
            if not self._stuck[0].flush():
                return False
            stream = self._stuck.pop(0)
            self._watch(stream)
            self.drain((stream,))
        return True

    def close(self, streams: "tuple[Stream, ...]") -> None:
        """Close the streams of a command that never ran."""
        for stream in streams:
            self._forget(stream.fd)
            stream.close()

    def _watch(self, stream: Stream) -> None:
        self._streams[stream.fd] = stream
        self._poll.register(stream.fd, select.POLLIN)

    def _look(self, fd: int, stream: Stream) -> None:
        if stream.stuck:
            self._stuck.append(stream)
        if stream.stuck or not stream.open:
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        if self._streams.pop(fd, None) is not None:
            self._poll.unregister(fd)
