"""`perdure up` and `perdure down`: start and stop the local stack."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from perdure.cli.console import answer, json_option, say
from perdure.errors import StoreUnavailable
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_state
from perdure.stack.stack_lifecycle import ensure_up, relay, shut_down
from perdure.stack.stack_state import StackState


@click.command()
@click.option("--foreground", is_flag=True, help="Do not return; Ctrl-C stops everything.")
@click.option("--engine", default="", metavar="E", help="scripted:FILE, or an engine's URL.")
@json_option
def up(foreground: bool, engine: str, as_json: bool) -> None:
    """Start Temporal, the gateway and the workers on this machine.

    The home (PERDURE_HOME, default .perdure) holds database, logs and results. If TEMPORAL_ADDRESS
    or a Temporal profile names a server, `up` uses that one instead of starting its own. If a
    default port is taken, it uses a free one.
    """
    settings = load_settings()
    if foreground:
        _run_here(settings, engine)
        return
    state, started = ensure_up(settings, engine, say)
    if as_json:
        answer({**asdict(state), "started_now": started})
        return
    if not started:
        say(f"Already running (pid {state.pid}).")
    for line in _summary(settings, state, _roster_line(settings)):
        click.echo(line)


@click.command()
@click.option("--keep-sandboxes", is_flag=True, help="Leave the agents' sandboxes running.")
@json_option
def down(keep_sandboxes: bool, as_json: bool) -> None:
    """Stop everything that `perdure up` started here. Data is kept.

    Rollouts in flight continue after the next `perdure up`, each in a new sandbox.
    """
    settings = load_settings()
    stopped = shut_down(settings, say, keep_sandboxes=keep_sandboxes)
    if as_json:
        answer({"stopped": stopped})
    else:
        click.echo(f"Stopped: {', '.join(stopped)}." if stopped else "Nothing is running.")


def _run_here(settings: Settings, engine: str) -> None:
    from perdure.stack import stack_supervisor
    from perdure.stack import start_preflight as beforehand

    beforehand.check(settings, engine, say)
    roster = _roster_line(
        settings
    )  # it reads the store, which `report` cannot do inside a running loop

    def report(event: dict[str, Any]) -> None:
        relay(event, say)
        state = stack_state.read(settings)
        if event["event"] == "ready" and state is not None:
            for line in _summary(settings, state, roster):
                say(line)

    code = stack_supervisor.run(engine, report)
    if code:
        raise click.exceptions.Exit(code)


def _roster_line(settings: Settings) -> str:
    """Which engines serve when the settings name none."""
    from perdure.stack.engine_presence import has_added_engines

    try:
        added = has_added_engines(settings)
    except StoreUnavailable:  # the preflight has warned
        added = True
    if added:
        return "see `perdure engines list`"
    return "none: set OPENAI_BASE_URL, or `perdure up --engine URL`"


def _summary(settings: Settings, state: StackState, roster: str) -> list[str]:
    facts = {
        "Web UI": state.ui_url,
        "Temporal": state.temporal_address,
        "Gateway": state.gateway_url,
        "Engine": state.engine or roster,
        "Results": settings.store_url,
        "Logs": str(Path(settings.home).absolute() / "logs"),
    }
    return [f"{name:<9} {value}" for name, value in facts.items() if value]
