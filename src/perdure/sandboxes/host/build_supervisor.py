"""Runs one image build to its end, even if the worker that started it is killed.

    python -m perdure.sandboxes.host.build_supervisor SECONDS BYTES END PROGRAM [ARGUMENT...]

Its standard error is the log: the program's output up to BYTES, and always its last lines. At the
time limit or at SIGTERM, it stops the build: with END = `signal` by SIGTERM, with END = `run` by
killing the processes of the `RUN` lines, so that the program fails and cleans up. Then this process
ends by SIGALRM. If it did not stop the build, its exit code is the program's.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import IO

from perdure.sandboxes.host import procfs

CLEANUP_S = 60.0
"""Seconds that a stopped build has to clean up before it is killed."""
LAST_OUTPUT_S = 2.0
"""Seconds to wait for the last output of a stopped build."""
POLL_S = 0.1
CHUNK = 1 << 16
LOG = 2


def main(seconds: float, limit: int, how: str, program: Sequence[str]) -> int:
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    copier = threading.Thread(target=_copy, args=(process.stdout, limit), daemon=True)
    copier.start()
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until and not stop_requested.is_set():
        stop_requested.wait(POLL_S)
    was_stopped = process.poll() is None
    if was_stopped:
        _stop_build(process, by_signal=how == "signal")
    copier.join(LAST_OUTPUT_S if was_stopped else None)
    if was_stopped:
        os.kill(os.getpid(), signal.SIGALRM)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _stop_build(process: subprocess.Popen[bytes], *, by_signal: bool) -> None:
    until = time.monotonic() + CLEANUP_S
    if by_signal:
        _kill([process.pid], signal.SIGTERM)
    own = procfs.depth(process.pid)
    while process.poll() is None and time.monotonic() < until:
        inside = [pid for pid in procfs.below(process.pid) if procfs.depth(pid) > own]
        _kill(inside, signal.SIGKILL)  # repeated, because the next `RUN` may have begun
        time.sleep(POLL_S)
    if process.poll() is None:
        _kill([*procfs.below(process.pid), process.pid], signal.SIGKILL)
        process.wait()


def _kill(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def _copy(stream: IO[bytes], room: int) -> None:
    last = b""
    while data := os.read(stream.fileno(), CHUNK):
        kept, dropped = data[: max(0, room)], data[max(0, room) :]
        room -= len(data)
        last = (last + dropped)[-CHUNK:]
        _log(kept)
    _log(last)


def _log(data: bytes) -> None:
    with suppress(OSError):  # the host's disk is full
        while data:
            data = data[os.write(LOG, data) :]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
