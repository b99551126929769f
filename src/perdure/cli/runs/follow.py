"""Following a run to its end: one look at a time, through restarts of the server.

The look is shown live on a terminal, as lines when something changed otherwise.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from temporalio.service import RPCError

from perdure.cli.console import say
from perdure.cli.runs import tables
from perdure.cli.runs.standing import FAILED, WAITS, standings
from perdure.cli.runs.tables import View
from perdure.cli.runs.text import progress_line
from perdure.client.api import CODE_FAILS, NO_WORKER, RolloutInfo, RunHandle, RunProgress
from perdure.errors import ActionNeeded

LOOK_EVERY_S = 1.0
ASK_EVERY_S = 15.0
"""While nothing finishes, rollouts are asked so often what holds them up."""

console = Console(stderr=True, highlight=False, soft_wrap=True)
Show = Callable[[View], None]


async def follow(run: RunHandle, show: Show) -> RunProgress:
    """Show the run until it ends; return how it stood then.

    Raises: NoResult, Cancelled; ActionNeeded when the run waits for a person.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    end = asyncio.create_task(run.result())
    progress = RunProgress(run_id=run.run_id, state="starting")
    rollouts: list[RolloutInfo] = []
    at_first: int | None = None
    held_up, quiet_since = "", started
    try:
        while not end.done():
            done, trouble = progress.done, ""
            try:
                now, rollouts = await _look(run)
                if now.state in (NO_WORKER, CODE_FAILS):  # what was counted before still holds
                    now = progress.model_copy(update={"state": now.state})
                progress = now
                if progress.done != done:
                    held_up, quiet_since = "", loop.time()
                elif loop.time() - quiet_since > ASK_EVERY_S:
                    held_up, quiet_since = await _held_up(run, rollouts), loop.time()
            except RPCError as error:
                trouble = f"Temporal does not answer ({error.status.name.lower()}); still trying"
            seconds = loop.time() - started
            at_first = progress.done if at_first is None else at_first
            rate = (progress.done - at_first) / seconds if seconds else 0.0
            show(View(progress, rollouts, seconds, rate, trouble or held_up))
            _needs_nobody(progress)
            await asyncio.wait({end}, timeout=LOOK_EVERY_S)
        end.result()
    finally:
        end.cancel()
    return await run.progress()


async def _look(run: RunHandle) -> tuple[RunProgress, list[RolloutInfo]]:
    """Lines tell no single rollout; listing them all is the dearest question there is."""
    return await run.progress(), await run.rollouts() if console.is_terminal else []


async def _held_up(run: RunHandle, rollouts: list[RolloutInfo]) -> str:
    """A step that failed and is tried again, or a wait: of the rollout that has run for longest."""
    said = await standings(run.perdure.client, rollouts or await run.rollouts())
    return next((line for line in said if FAILED in line or WAITS in line), "")


def _needs_nobody(progress: RunProgress) -> None:
    if progress.state == "attention":
        raise ActionNeeded(
            f"run {progress.run_id} waits for you: {progress.attention}; "
            f"mend it, then `perdure resume {progress.run_id}`"
        )


@contextlib.contextmanager
def shown() -> Iterator[Show]:
    """Where looks go: a live view on a terminal, else a line whenever a run's counts change.

    Several runs may be shown at once.
    """
    views: dict[str, View] = {}
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as screen:

            def update(look: View) -> None:
                views[look.progress.run_id] = look
                screen.update(Group(*map(tables.live, views.values())), refresh=True)

            yield update
        return
    told: dict[str, str] = {}

    def tell(look: View) -> None:
        line = look.trouble or progress_line(look.progress)
        if told.get(look.progress.run_id) != line:
            told[look.progress.run_id] = line
            say(line)

    yield tell
