"""Runs smolagents' CodeAgent headless, with one tool of Perdure: a shell, which the package lacks.

It runs in the agent's own Python in the sandbox, where Perdure is not installed. It reads a JSON
file of settings, and the prompt from standard input. Its last line is a JSON object, `perdure_end`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND_TIMEOUT_S = 120
CONTEXT_FULL = "context_length_exceeded"


def bash(command: str) -> str:
    """Runs a shell command in the repository and returns its output and exit code.

    Args:
        command: The command.
    """
    argv = ["bash", "-c", command]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {COMMAND_TIMEOUT_S} s"
    return f"{done.stdout.decode('utf-8', 'replace')}\nexit code {done.returncode}"


def main(settings: dict[str, Any], prompt: str) -> None:
    from smolagents import CodeAgent, OpenAIModel, tool  # type: ignore[import-not-found]

    model = OpenAIModel(api_key=os.environ.pop("PERDURE_SESSION_KEY"), **settings["model"])
    agent = CodeAgent(
        tools=[tool(bash)],
        model=model,
        additional_authorized_imports=["*"],
        executor_kwargs={"timeout_seconds": None},  # `bash` has a limit of its own
        max_steps=settings["max_steps"],
    )
    status = error = ""
    try:
        status = agent.run(prompt, return_full_result=True).state
    except Exception as raised:  # `perdure_end` reports it
        error = f"{type(raised).__name__}: {raised}"
        status = "context_full" if CONTEXT_FULL in error else ""
    sys.stdout.write(json.dumps({"kind": "perdure_end", "status": status, "error": error}) + "\n")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.stdin.read())
