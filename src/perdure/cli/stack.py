"""`perdure up` and `perdure down`: start and stop a stack, and the calls other commands use."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from perdure.cli import config, stack_state
from perdure.cli.checkout import find_root
from perdure.cli.console import answer, json_option, say
from perdure.cli.failures import USAGE
from perdure.cli.processes import stop
from perdure.cli.stack_state import StackState
from perdure.errors import ConfigurationError, PerdureError
from perdure.settings import Settings

STOP_GRACE_S = 60.0
"""The supervisor needs its workers' hand-over plus Temporal's own end."""
SAME_HOME_PAUSE_S = 0.1

Say = Callable[[str], None]


class StackFailed(PerdureError):
    """A part did not start; the message has its last words."""


@click.command()
@click.option("--foreground", is_flag=True, help="Stay here and stop everything at Ctrl-C.")
@click.option("--engine", default="", metavar="E", help="scripted:FILE, or an engine's URL.")
@json_option
def up(foreground: bool, engine: str, as_json: bool) -> None:
    """Start Temporal, the gateway and the workers on this machine.

    Everything lies under the home (PERDURE_HOME, default .perdure): database, logs, results. With
    TEMPORAL_ADDRESS or a Temporal profile set, that server is used and none is started. Ports that
    are not set and occupied are replaced by free ones.
    """
    settings = config.load_settings()
    if foreground:
        _run_here(settings, engine)
        return
    state, started = ensure_up(settings, engine)
    if as_json:
        answer({**asdict(state), "started_now": started})
        return
    if not started:
        say(f"Already running (pid {state.pid}).")
    for line in _summary(settings, state):
        click.echo(line)


@click.command()
@click.option("--keep-sandboxes", is_flag=True, help="Leave running agents where they are.")
@json_option
def down(keep_sandboxes: bool, as_json: bool) -> None:
    """Stop everything that `perdure up` started here; data stays.

    Rollouts in flight go on after the next `perdure up`, in a new sandbox.
    """
    settings = config.load_settings()
    stopped = shut_down(settings, keep_sandboxes=keep_sandboxes)
    if as_json:
        answer({"stopped": stopped})
    else:
        click.echo(f"Stopped: {', '.join(stopped)}." if stopped else "Nothing is running.")


def running(settings: Settings) -> StackState | None:
    """The stack of this home while its supervisor lives."""
    state = stack_state.read(settings)
    return state if state is not None and state.alive else None


def ensure_up(settings: Settings, engine: str = "", tell: Say = say) -> tuple[StackState, bool]:
    """A ready stack, and whether it was started just now.

    Raises: ConfigurationError, MissingDependency, StoreUnavailable, StackFailed.
    """
    find_root()
    state = running(settings)
    if state is None:
        _start(settings, engine, tell)
        return _ready(settings), True
    if engine and engine != state.engine:
        raise ConfigurationError(
            f"a stack runs here with engine {state.engine or 'none'!r}: `perdure down` first"
        )
    return _ready(settings), False


def shut_down(settings: Settings, *, keep_sandboxes: bool = False) -> list[str]:
    """Stop the supervisor, whatever outlived it, and the sandboxes; return what was stopped."""
    state = stack_state.read(settings)
    stopped = []
    if state is not None:
        if state.alive:
            stopped = [*state.survivors(), "supervisor"]
            stop(state.supervisor, STOP_GRACE_S, group=False)
        for name, process in state.survivors().items():
            stop(process, grace_s=10.0)
            stopped += [] if name in stopped else [name]
        stack_state.forget(settings)
    from perdure.cli.sandboxes import kill_all

    if not keep_sandboxes and (killed := asyncio.run(kill_all(settings))):
        stopped.append(f"{killed} sandbox{'es' if killed > 1 else ''}")
    return stopped


def _run_here(settings: Settings, engine: str) -> None:
    from perdure.cli import beforehand, supervisor

    beforehand.check(settings, engine)

    def report(event: dict[str, Any]) -> None:
        _relay(event, say)
        state = stack_state.read(settings)
        if event["event"] == "ready" and state is not None:
            for line in _summary(settings, state):
                say(line)

    code = supervisor.run(engine, report)
    if code:
        raise click.exceptions.Exit(code)


def _start(settings: Settings, engine: str, tell: Say) -> None:
    """Spawn the supervisor, detached, and follow its report to the end."""
    from perdure.cli import beforehand

    beforehand.check(settings, engine)
    logs = settings.home.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "supervisor.log"
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    argv = [sys.executable, "-m", "perdure.cli.supervisor", "--report-fd", str(writer)]
    argv += ["--engine", engine] if engine else []
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.posix_spawn(
        sys.executable,
        argv,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    os.close(writer)
    tell(f"Starting Temporal, the gateway and the workers in {settings.home} ...")
    for event in _events(reader):
        _relay(event, tell)
        if event["event"] == "failed":
            failed = ConfigurationError if event.get("code") == USAGE else StackFailed
            raise failed(f"{event['reason']} (logs: {logs})")
        if event["event"] == "ready":
            return
    raise StackFailed(f"the supervisor died while starting: see {log}")


def _events(reader: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(reader) as pipe:
        for line in pipe:
            yield json.loads(line)


def _relay(event: dict[str, Any], tell: Say) -> None:
    if event["event"] == "up":
        tell(f"  {event['name']} is up")
    elif event["event"] == "warning":
        tell(f"  warning: {event['text']}")


def _ready(settings: Settings) -> StackState:
    """The state once it says ready; somebody else may be starting it right now."""
    import time

    while True:
        state = running(settings)
        if state is None:
            raise StackFailed(f"the stack in {settings.home} stopped: see its logs")
        if state.phase == "ready":
            return state
        time.sleep(SAME_HOME_PAUSE_S)


def _engines(settings: Settings) -> str:
    from perdure.cli.engines import any_known

    if any_known(settings):
        return "those that `perdure engines list` lists"
    return "none: set OPENAI_BASE_URL, or `perdure up --engine URL`"


def _summary(settings: Settings, state: StackState) -> list[str]:
    facts = {
        "Web UI": state.ui_url,
        "Temporal": state.temporal_address,
        "Gateway": state.gateway_url,
        "Engine": state.engine or _engines(settings),
        "Results": settings.store_url,
        "Logs": str(Path(settings.home).absolute() / "logs"),
    }
    return [f"{name:<9} {value}" for name, value in facts.items() if value]
