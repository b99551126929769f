"""`<home>/run/state.json`: the processes that `perdure up` started, and their addresses.

Only the supervisor writes it. Every command reads it to find the chosen ports.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perdure.errors import ConfigurationError
from perdure.sandboxes.host.host_processes import ProcessId
from perdure.settings.settings_tree import Settings

LOCK = "supervisor.lock"
LOCK_TRIES = 20
LOCK_PAUSE_S = 0.05
"""We retry because a command that checks the lock holds it for a moment."""


@dataclass(frozen=True)
class ChildState:
    """One supervised process. `last_exit`: how the previous process ended, as text."""

    pid: int
    started: int
    log: str
    restarts: int = 0
    last_exit: str = ""

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)


@dataclass(frozen=True)
class StackState:
    """`status`: starting, ready or stopping."""

    status: str
    pid: int
    started: int
    temporal_address: str
    namespace: str
    ui_url: str
    gateway_url: str
    engine: str
    """The engines behind the gateway, as text."""
    children: Mapping[str, ChildState] = field(default_factory=dict)
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    """The engine settings of its processes: url, kind, model, tokenizer."""
    engine_key: str | None = None
    """A keyed digest of the engine's key; empty if there is no key. None: unknown, because an earlier
    version wrote this state."""

    @property
    def supervisor(self) -> ProcessId:
        return ProcessId(self.pid, self.started)

    @property
    def alive(self) -> bool:
        return self.supervisor.alive

    def survivors(self) -> dict[str, ProcessId]:
        """The supervised processes that still run, by name."""
        return {name: c.process for name, c in self.children.items() if c.process.alive}


def run_folder(settings: Settings) -> Path:
    return settings.home.absolute() / "run"


def read(settings: Settings) -> StackState | None:
    """The last state that a supervisor wrote, even if that supervisor has ended."""
    try:
        raw: dict[str, Any] = json.loads((run_folder(settings) / "state.json").read_bytes())
        children = {name: ChildState(**child) for name, child in raw.pop("children").items()}
        return StackState(**raw, children=children)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def write(settings: Settings, state: StackState) -> None:
    """Write atomically: a reader sees the old state or the new one."""
    folder = run_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"state.json.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(state), indent=1))
    temporary.replace(folder / "state.json")


def forget(settings: Settings) -> None:
    (run_folder(settings) / "state.json").unlink(missing_ok=True)


class Locked(ConfigurationError):
    """Another supervisor holds the lock of this home."""


@contextlib.contextmanager
def locked(settings: Settings) -> Iterator[None]:
    """Lock the home for its only supervisor. Raises: Locked if another one holds the lock."""
    folder = run_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        for _ in range(LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOCK_PAUSE_S)
        else:
            raise Locked(f"a stack is already running in {settings.home}")
        yield


def is_locked(settings: Settings) -> bool:
    """Whether a supervisor holds the lock; it may not have written its state yet."""
    with contextlib.suppress(FileNotFoundError), (run_folder(settings) / LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
