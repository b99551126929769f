"""One supervised process: started, kept running with growing pauses, stopped for good.

A child dies with its supervisor (PDEATHSIG), writes to one log file, and leads its own process
group, so that Ctrl-C in a terminal reaches only the supervisor.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perdure.stack.failures import USAGE
from perdure.stack.processes import identify
from perdure.stack.state import ChildState

LOG_BYTES = 32 << 20
"""A log that grows over this is moved to `<name>.log.1`."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
STEADY_S = 60.0
"""After running this long a child has earned a short pause again."""

# Replaces itself by the real program; asks the kernel first to be told when the parent dies. Not a
# preexec_fn: the supervisor has threads, and code between fork and exec may deadlock there.
_LAUNCH = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,15,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


@dataclass(frozen=True)
class ChildSpec:
    """A process to keep running. `grace_s`: how long it may take to hand over at SIGTERM."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    grace_s: float = 5.0
    inherits: tuple[int, ...] = ()
    """Descriptors that it gets under the same numbers: listening sockets."""


class Child:
    """Call `start`; then the process is restarted until `stop`."""

    def __init__(self, spec: ChildSpec, logs: Path, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.state: ChildState | None = None
        self.exits = 0
        self.refused = False
        """It ended because what it was given is wrong, and would do so again."""
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
        """SIGTERM, and SIGKILL for what is left after the grace. The process group is gone."""
        self._stopping = True
        async with self._spawning:  # one that is being started is stopped, too
            process = self._process
        if process is not None and process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self.spec.grace_s)
            _signal(process.pid, signal.SIGKILL)
            await process.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def kill(self) -> None:
        """It hangs: end it, so that it is started again."""
        if self._process is not None and self._process.returncode is None:
            _signal(self._process.pid, signal.SIGKILL)

    def rotate(self) -> None:
        """Copy and truncate: the child holds the file open and appends."""
        with contextlib.suppress(OSError):  # a full disk: it grows on
            if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
                shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                os.truncate(self.log, 0)

    def last_words(self, lines: int = 3) -> str:
        """The end of its log, for an error message."""
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
        launcher = (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()))
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *launcher,
                *self.spec.argv,
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
            # A full disk, or no process to be had: after the next pause it is tried again.
            with contextlib.suppress(OSError):
                await self._spawn(_ending(code))


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
