"""One supervised process: starts it, restarts it with growing pauses, stops it for good.

A child gets SIGTERM when its supervisor dies (PDEATHSIG) and writes to one log file. It leads its own
process group, so that Ctrl-C in a terminal reaches only the supervisor.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.stack.error_lines import USAGE
from perdure.stack.process_stopping import identify
from perdure.stack.stack_state import ChildState
from perdure.telemetry import STACKS_SIGNAL

LOG_BYTES = 32 << 20
"""A larger log is copied to `<name>.log.1` and truncated."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
STEADY_S = 60.0
"""After a child has run this long, its next restart again waits only the first, short pause."""

# Asks the kernel for SIGTERM when the parent dies, then replaces itself with the real program. We use
# no preexec_fn, because the supervisor has threads: Python code between fork and exec may deadlock.
_LAUNCH = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,15,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


def with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    """Wraps a command so that the kernel sends its process SIGTERM when this process dies."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *argv]


@dataclass(frozen=True)
class ChildSpec:
    """A process to keep running. `grace_s`: seconds between SIGTERM and SIGKILL."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    grace_s: float = 5.0
    inherits: tuple[int, ...] = ()
    """File descriptors of listening sockets. The child gets them under the same numbers."""


class Child:
    """A process that is restarted whenever it ends, from `start` until `stop`."""

    def __init__(self, spec: ChildSpec, logs: Path, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.state: ChildState | None = None
        self.exits = 0
        self.refused = False
        """It ended with the exit code for wrong settings or arguments, so a restart would fail too."""
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._spawning = asyncio.Lock()

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.rotate()
        await self._spawn("")
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`. Return when the process is gone."""
        self._stopping = True
        async with self._spawning:  # wait for a start in progress, then stop that process too
            process = self._process
        if process is not None and process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.grace_s):
                    await process.wait()
            _signal(process.pid, signal.SIGKILL)
            await process.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def write_stacks(self) -> None:
        """Ask the process to log the stack of each thread. It must have configured our logging."""
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, STACKS_SIGNAL)

    def kill(self) -> None:
        """Kill a process that hangs; the keeper task then restarts it."""
        if self._process is not None and self._process.returncode is None:
            _signal(self._process.pid, signal.SIGKILL)

    def rotate(self) -> None:
        """Copy a large log and truncate it: the child keeps the file open and appends to it."""
        with contextlib.suppress(OSError):  # the disk is full; we try again later
            if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
                shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                os.truncate(self.log, 0)

    def log_end(self, lines: int = 3) -> str:
        """The last lines of its log, for an error message."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            tail = file.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join(tail[-lines:])

    async def _spawn(self, last_exit: str) -> None:
        async with self._spawning:
            if not self._stopping:
                await self._launch(last_exit)

    async def _launch(self, last_exit: str) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *with_parent_death_signal(self.spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.spec.env),
                cwd=self.spec.cwd,
                start_new_session=True,
                pass_fds=self.spec.inherits,
            )
        process = identify(self._process.pid)
        self.state = ChildState(
            pid=self._process.pid,
            started=process.started if process else 0,
            log=str(self.log),
            restarts=self.exits,
            last_exit=last_exit,
        )
        self._changed()

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            assert self._process is not None
            since = time.monotonic()
            code = await self._process.wait()
            if self._stopping:
                return
            self.exits += 1
            self.refused = code == USAGE
            if time.monotonic() - since > STEADY_S:
                pause = FIRST_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)
            self.rotate()
            # If the disk is full or the process limit is reached, try again after the next pause.
            with contextlib.suppress(OSError):
                await self._spawn(_ending(code))


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
