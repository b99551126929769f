"""One process of a stack."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stack.wait_until import until


@dataclass(frozen=True)
class Process:
    """One process of the stack."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path
    build: str = ""
    """The build id of a worker; empty: none."""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    async def ended(self) -> int:
        """Its exit code, once it has one."""
        await until(lambda: self.popen.poll() is not None, f"{self.name} ends")
        code: int = self.popen.returncode
        return code

    async def kill(self, signum: int = signal.SIGKILL) -> int:
        if self.alive:
            os.kill(self.pid, signum)
        return await self.ended()


async def answering(process: Process, wait: Awaitable[Any]) -> None:
    """Until it answers; fails at once, with its log, when it ends instead."""
    waiting = asyncio.ensure_future(wait)
    try:
        await until(lambda: waiting.done() or not process.alive, f"{process.name} answers")
        words = process.log.read_text("utf-8", "replace")[-3000:]
        assert waiting.done(), f"{process.name} ended with {process.popen.returncode}:\n{words}"
        waiting.result()
    finally:
        waiting.cancel()
