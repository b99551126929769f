"""Runs a command that creates sandboxes itself; a signal ends its sandboxes before the command."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`. The first signal cancels the work, which then ends its sandboxes; later
    signals do not interrupt that. Raises: click.exceptions.Exit with 128 + the signal's number."""
    caught: list[int] = []
    try:
        return asyncio.run(_until_signalled(work, caught))
    except asyncio.CancelledError:
        if not caught:
            raise
        raise click.exceptions.Exit(128 + caught[0]) from None


async def _until_signalled(work: Coroutine[Any, Any, Result], caught: list[int]) -> Result:
    task = asyncio.ensure_future(work)

    def end(signum: int) -> None:
        if not caught:
            task.cancel()
        caught.append(signum)

    for signum in ENDS:
        asyncio.get_running_loop().add_signal_handler(signum, end, signum)
    return await task
