"""Runs the user's --notify command when a run has ended or waits for a person."""

import asyncio
import os

from perdure.cli.console import say
from perdure.settings import process_environment

LIMIT_S = 60.0


async def run_completion_command(command: str, run_id: str, told: str) -> None:
    """Run the shell command with `RUN_ID` and `RUN_TEXT`; do nothing if it is empty.

    A failing command causes a warning and does not change the run's result.
    """
    if not command:
        return
    given = {"RUN_ID": run_id, "RUN_TEXT": told}
    process = await asyncio.create_subprocess_shell(
        command, env={**process_environment.variables(), **given}, start_new_session=True
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            code = await process.wait()
    except TimeoutError:
        os.killpg(process.pid, 9)
        say(f"warning: --notify was killed after {LIMIT_S:g} s: {command}")
        return
    if code:
        say(f"warning: --notify ended with exit code {code}: {command}")
