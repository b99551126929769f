"""Starts, finds and stops the stack of a home, for commands and tests."""

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from perdure.errors import ConfigurationError, MissingDependency, PerdureError
from perdure.installation import command_for_extra
from perdure.settings import process_environment
from perdure.settings.settings_loader import for_child
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers, host_life, stack_state
from perdure.stack.error_lines import USAGE
from perdure.stack.process_stopping import stop
from perdure.stack.stack_state import StackState

STOP_GRACE_S = 75.0
"""Longer than workers need to hand over their activities and Temporal needs to end."""
SAME_HOME_PAUSE_S = 0.1

Say = Callable[[str], None]


class StackFailed(PerdureError):
    """A part did not start; the message ends with the end of its log."""


def running(settings: Settings) -> StackState | None:
    """The state of this home's stack; None if no supervisor runs."""
    state = stack_state.read(settings)
    return state if state is not None and state.alive else None


def require_service() -> None:
    """Raises: MissingDependency if this copy was installed for the client alone."""
    if importlib.util.find_spec("uvicorn") is None:
        raise MissingDependency(
            "this copy of perdure has only the client; add what a local stack needs: "
            f"{command_for_extra('laptop')}"
        )


def ensure_up(settings: Settings, engine: str, tell: Say) -> tuple[StackState, bool]:
    """Start a stack if none runs, and wait until it is ready.

    Returns its state and whether this call started it. Raises: ConfigurationError, MissingDependency,
    StackFailed.
    """
    require_service()
    started = running(settings) is None and _start(settings, engine, tell)
    state = _ready(settings)
    if not started and engine and engine != state.engine:
        raise ConfigurationError(
            f"a stack already runs here with engine {state.engine or 'none'!r}: run `perdure down` first"
        )
    return state, started


def shut_down(settings: Settings, tell: Say, *, keep_sandboxes: bool = False) -> list[str]:
    """Stop the supervisor, children that outlived it, and sandboxes. Returns the names of what it
    stopped."""
    state = stack_state.read(settings)
    stopped = []
    if state is not None:
        if state.alive:
            stopped = [*state.survivors(), "supervisor"]
            stop(state.supervisor, STOP_GRACE_S, group=False)
        for name, process in state.survivors().items():
            stop(process, grace_s=10.0)
            stopped += [] if name in stopped else [name]
        from perdure.stack.engine_presence import forget_scripted

        forget_scripted(settings, state)
        stack_state.forget(settings)
    if keep_sandboxes:
        return stopped
    if killed := asyncio.run(home_providers.kill_all(settings, tell)):
        stopped.append(f"{killed} sandbox{'es' if killed > 1 else ''}")
    host_life.end(settings)
    return stopped


def _start(settings: Settings, engine: str, tell: Say) -> bool:
    """Spawn a detached supervisor and follow its report until it is ready or has failed.

    False: another command has started one in the meantime.
    """
    from perdure.stack import start_preflight as beforehand

    beforehand.check(settings, engine, tell)
    settings.home.absolute().mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = settings.home.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "supervisor.log"
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    argv = [sys.executable, "-m", "perdure.stack", "--report-fd", str(writer)]
    argv += ["--engine", engine] if engine else []
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.posix_spawn(
        sys.executable,
        argv,
        for_child(settings, process_environment.variables()),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    os.close(writer)
    tell(f"Starting Temporal, the gateway and the workers in {settings.home} ...")
    for event in _events(reader):
        relay(event, tell)
        if event.get("taken"):
            return False
        if event["event"] == "failed":
            failed = ConfigurationError if event.get("code") == USAGE else StackFailed
            raise failed(f"{event['reason']} (logs: {logs})")
        if event["event"] == "ready":
            return True
    raise StackFailed(f"the supervisor ended during the start: see {log}")


def _events(reader: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(reader) as pipe:
        for line in pipe:
            yield json.loads(line)


def relay(event: dict[str, Any], tell: Say) -> None:
    if event["event"] == "up":
        tell(f"  {event['name']} is up")
    elif event["event"] == "warning":
        tell(f"  warning: {event['text']}")


def _ready(settings: Settings) -> StackState:
    """Wait until the state is ready: another `perdure up` may be starting this stack right now."""
    while True:
        state = running(settings)
        if state is not None and state.status == "ready":
            return state
        # A supervisor takes the lock first and writes its state later.
        if state is None and not stack_state.is_locked(settings):
            raise StackFailed(f"the stack in {settings.home} stopped: see its logs")
        time.sleep(SAME_HOME_PAUSE_S)
