"""Follows a run to its end, through restarts of the server.

On a terminal it shows a live view. Otherwise it prints a line whenever the counts change.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from temporalio.service import RPCError

from perdure.cli.console import say
from perdure.cli.runs import run_tables
from perdure.cli.runs.rollout_progress import BUSY_WITH, FAILED, WAITS_FOR, current_steps
from perdure.cli.runs.run_tables import View
from perdure.cli.runs.run_text import progress_line
from perdure.client.rollout_listing import RolloutInfo
from perdure.client.sdk import CODE_FAILS, NO_WORKER, RunHandle
from perdure.errors import ActionNeeded
from perdure.types import RunStatus

POLL_EVERY_S = 1.0
ASK_AFTER_S = 3.0
"""After this long without a finished rollout, ask for the current steps of the oldest ones. Repeat
at this interval."""

console = Console(stderr=True, highlight=False, soft_wrap=True)
Show = Callable[[View], None]


async def follow(run: RunHandle, show: Show) -> RunStatus:
    """Show the run until it ends; return its last progress.

    Raises: NoResult, Cancelled; ActionNeeded if the run waits for a person.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    end = asyncio.create_task(run.result())
    progress = RunStatus(run_id=run.run_id, state="starting")
    rollouts: list[RolloutInfo] = []
    at_first: int | None = None
    held_up, quiet_since = "", started
    try:
        while not end.done():
            done, trouble = progress.done, ""
            try:
                now, rollouts = await _poll(run)
                if now.state in (NO_WORKER, CODE_FAILS):  # keep the last known counts
                    now = progress.model_copy(update={"state": now.state})
                progress = now
                if progress.done != done:
                    held_up, quiet_since = "", loop.time()
                elif loop.time() - quiet_since > ASK_AFTER_S:
                    held_up, quiet_since = await _held_up(run), loop.time()
            except RPCError as error:
                trouble = f"Temporal does not answer ({error.status.name.lower()}); still trying"
            seconds = loop.time() - started
            at_first = progress.done if at_first is None else at_first
            rate = (progress.done - at_first) / seconds if seconds else 0.0
            show(View(progress, rollouts, seconds, rate, trouble or held_up))
            _raise_if_it_waits(progress)
            await asyncio.wait({end}, timeout=POLL_EVERY_S)
        with contextlib.suppress(RPCError):  # the last state stays on screen next to other runs
            progress, rollouts = await _poll(run)
            show(View(progress, rollouts, loop.time() - started))
        end.result()
    finally:
        end.cancel()
    return progress


async def _poll(run: RunHandle) -> tuple[RunStatus, list[RolloutInfo]]:
    """Only the live view shows single rollouts; without it we do not list them."""
    return await run.progress(), await run.rollouts() if console.is_terminal else []


async def _held_up(run: RunHandle) -> str:
    """A line about the oldest open rollouts: a step that is retried after a failure, a wait, or what
    boot is busy with. Empty if none applies."""
    lines = await current_steps(run.perdure.client, run.run_id)
    telling = FAILED, WAITS_FOR, BUSY_WITH
    return next((line for sign in telling for line in lines if sign in line), "")


def _raise_if_it_waits(progress: RunStatus) -> None:
    if progress.state == "attention":
        raise ActionNeeded(
            f"run {progress.run_id} waits for you: {progress.attention}; "
            f"fix it, then `perdure resume {progress.run_id}`"
        )


@contextlib.contextmanager
def shown() -> Iterator[Show]:
    """A function that shows a view: live on a terminal, otherwise one line per change of the counts.

    It can show several runs at once.
    """
    views: dict[str, View] = {}
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as screen:

            def update(view: View) -> None:
                views[view.progress.run_id] = view
                screen.update(Group(*map(run_tables.live, views.values())), refresh=True)

            yield update
        return
    told: dict[str, str] = {}

    def tell(view: View) -> None:
        line = view.trouble or progress_line(view.progress)
        if told.get(view.progress.run_id) != line:
            told[view.progress.run_id] = line
            say(line)

    yield tell
