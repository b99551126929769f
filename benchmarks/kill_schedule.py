"""Kills processes during the run. A seeded generator chooses the kind of each."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.perdure_stack import Stack
from perdure.sandboxes.host.host_processes import kill_process
from perdure.sandboxes.host.sandbox_folder import SandboxFolder

WEIGHTS = {"worker": 3, "gateway": 3, "sandbox": 6, "client": 1, "temporal": 1, "everything": 1}
"""The relative frequency of each kind."""


@dataclass
class RunClient:
    """A `perdure run` that is started again after it was killed."""

    start: Callable[[], "subprocess.Popen[bytes]"]
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = self.start()


@dataclass
class Killer:
    """Kills one part at a time. It restarts the parts without a supervisor: the stack and the client."""

    stack: Stack
    rng: random.Random
    client: RunClient | None = None
    """None: the run needs no client."""
    done: list[tuple[float, str]] = field(default_factory=list)
    """The time (monotonic seconds) and kind of each kill."""

    def kill_one(self) -> None:
        kinds = {kind: n for kind, n in WEIGHTS.items() if self.client or kind != "client"}
        what = self.rng.choices(list(kinds), list(kinds.values()))[0]
        if self._kill(what):
            self.done.append((time.monotonic(), what))

    def _kill(self, what: str) -> bool:
        """False if no such process ran."""
        if what == "sandbox":
            return self._kill_sandbox()
        if what in ("client", "everything"):
            if self.client is not None:
                self.client.kill()
            if what == "everything":
                self.stack.kill()
                self.stack = Stack.start(self.stack.home, self.stack.meter)
            if self.client is not None:
                self.client.start_again()
            return True
        child = self.stack.state().children[what]
        if not child.process.alive:
            return False
        os.kill(child.pid, signal.SIGKILL)
        return True

    def _kill_sandbox(self) -> bool:
        folders = sorted((self.stack.home.folder / "sandboxes").glob("*/p-*"))
        living = [box for box in map(SandboxFolder, folders) if box.alive]
        if not living:
            return False
        box = self.rng.choice(living)
        kill_process(self.rng.choice([box.keeper, box.holder]), signal.SIGKILL)
        return True
