"""Runs Harbor's Terminus 2 headless, in a terminal of the sandbox that it runs in.

It runs in the agent's own Python in the sandbox, where Perdure is not installed. It reads a JSON
file of settings, and the prompt from standard input. Its last line is a JSON object, `perdure_end`.
"""

# mypy: ignore-errors

import asyncio
import json
import os
import shlex
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

SHELL_STARTS_WITHIN_S = 30.0


class ThisSandbox(BaseEnvironment):
    """Runs the agent's tmux commands here, as the sandbox's user."""

    @staticmethod
    def type():
        return "perdure"

    def _validate_definition(self):
        """There is no definition: the sandbox exists."""

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=cwd
        )
        out, err = await process.communicate()
        return ExecResult(
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            return_code=process.returncode,
        )

    async def _unused(self, *_, **__):
        raise NotImplementedError("Terminus 2 needs this only for recordings of the terminal")

    start = stop = upload_file = upload_dir = download_file = download_dir = _unused


async def main(settings, prompt):
    logs = Path(settings["logs_dir"])
    logs.mkdir(parents=True, exist_ok=True)
    profile = f"export PATH={shlex.quote(os.environ['PATH'])}\n"  # a login shell resets it
    Path("~/.bash_profile").expanduser().write_text(profile)
    os.environ["PATH"] = f"/opt/tmux/bin:{os.environ['PATH']}"
    os.environ["OPENAI_API_KEY"] = os.environ.pop("PERDURE_SESSION_KEY")
    agent = Terminus2(**{**settings, "logs_dir": logs})
    del os.environ["OPENAI_API_KEY"]  # the agent has read it, and commands would inherit it
    sandbox = ThisSandbox(logs, "task", "sandbox", TrialPaths(logs), EnvironmentConfig())
    status = error = ""
    try:
        await agent.setup(sandbox)
        await shell_started(sandbox)
        await agent.run(prompt, sandbox, AgentContext())
        status = end_of(agent)
    except Exception as raised:  # `perdure_end` reports it
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"kind": "perdure_end", "status": status, "error": error}), flush=True)


async def shell_started(sandbox):
    """Wait until the shell shows its prompt, so that each attempt at a task begins with the same
    screen."""
    async with asyncio.timeout(SHELL_STARTS_WITHIN_S):
        while not (await sandbox.exec("tmux capture-pane -p")).stdout.strip():
            await asyncio.sleep(0.05)


def end_of(agent):
    """`complete` if the model confirmed that it is done, `max_turns`, or `shell_left`."""
    if agent._pending_completion:
        return "complete"
    return "max_turns" if agent._n_episodes >= agent._max_episodes else "shell_left"


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), sys.stdin.read()))
