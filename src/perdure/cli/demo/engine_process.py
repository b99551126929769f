"""The scripted engine of `perdure demo --break`, in a process that can be killed and restarted."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from perdure.settings import process_environment
from perdure.stack import part_readiness, stack_ports
from perdure.stack.child_restarts import with_parent_death_signal
from perdure.stack.stack_lifecycle import StackFailed

LATENCY_S = 1.0
"""Seconds that a model call takes, so that faults find calls in flight."""


class EngineProcess:
    """One engine on one port, through all its restarts."""

    def __init__(self, scripts: Path, log: Path) -> None:
        self._port = stack_ports.free_port()
        self._scripts, self._log = scripts, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{stack_ports.LOOPBACK}:{self._port}"

    async def start(self) -> None:
        """Return when it answers. Raises: StackFailed if it ends instead."""
        arguments = ("--scripts", str(self._scripts), "--port", str(self._port))
        module = ("-m", "perdure.testing.scripted_engine")
        argv = [sys.executable, *module, *arguments, "--latency", str(LATENCY_S)]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal(argv),
                env=process_environment.variables(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not await part_readiness.answers(f"{self.url}/health"):
            if self._process.poll() is not None:
                raise StackFailed(f"the scripted engine ended: see {self._log}")
            await asyncio.sleep(part_readiness.PAUSE_S)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Kill the process, and return when it is gone."""
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait()


@contextlib.asynccontextmanager
async def running(scripts: Path, log: Path) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(scripts, log)
    try:
        await engine.start()
        yield engine
    finally:
        engine.kill(signal.SIGTERM)
