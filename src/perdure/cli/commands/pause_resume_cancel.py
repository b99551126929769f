"""`perdure pause | resume | resize | cancel`: control a run while it is open."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.client.sdk import RunHandle
    from perdure.types import RunStatus

RUN = click.argument("run_id", metavar="RUN", shell_complete=completion.runs)


@click.command()
@RUN
@json_option
def pause(run_id: str, as_json: bool) -> None:
    """Start no more rollouts of a run; those in flight finish."""
    _ask(run_id, lambda run: run.pause(), as_json)


@click.command()
@RUN
@json_option
def resume(run_id: str, as_json: bool) -> None:
    """Continue a run that is paused or that waits for you."""
    _ask(run_id, lambda run: run.resume(), as_json)


@click.command()
@RUN
@click.argument("concurrency", metavar="N", type=click.IntRange(1, 2000))
@json_option
def resize(run_id: str, concurrency: int, as_json: bool) -> None:
    """Change how many rollouts of a run are in flight."""
    _ask(run_id, lambda run: run.resize(concurrency), as_json)


@click.command()
@click.argument("target", metavar="RUN|ROLLOUT", shell_complete=completion.runs)
@json_option
def cancel(target: str, as_json: bool) -> None:
    """Cancel a run, or one rollout (rollout/RUN/INSTANCE/SAMPLE).

    Agents are killed. Each rollout keeps its files and writes an episode with status cancelled. A
    rollout whose workflow code fails cannot write one: it is terminated, and its name is printed.
    Exit code 1: the run or rollout had already ended; the message says how.
    """
    settings = load_settings()

    async def work() -> list[str]:
        from perdure.cli.temporal_connection import connect

        connection = await connect(settings)
        if "/" in target:
            workflow_id = target if target.startswith("rollout/") else f"rollout/{target}"
            await connection.perdure.rollout(workflow_id).cancel()
            return []
        return await (await connection.perdure.run(target)).cancel()

    terminated = asyncio.run(work())
    if as_json:
        answer({"cancelled": target, "terminated": terminated})
    else:
        for one in terminated:
            click.echo(f"{one} was terminated without an episode: its workflow code fails.")
        click.echo(f"{target} is being cancelled: `perdure status` shows when it has ended.")


def _ask(
    run_id: str, request: "Callable[[RunHandle], Awaitable[RunStatus]]", as_json: bool
) -> None:
    settings = load_settings()

    async def work() -> "RunStatus":
        from perdure.cli.temporal_connection import connect

        connection = await connect(settings)
        return await request(await connection.perdure.run(run_id))

    progress = asyncio.run(work())
    if as_json:
        answer(progress.model_dump(mode="json"))
        return
    from perdure.cli.runs.run_text import progress_line

    click.echo(progress_line(progress))
