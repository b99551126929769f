"""The launch of agents that read the prompt from standard input and their settings from one file."""

import json
from collections.abc import Mapping
from typing import Any

from perdure.agents import headless_cli, prompt_template
from perdure.agents.base import AgentTask, Launch
from perdure.agents.headless_cli import PROMPT, HeadlessOptions


def headless_launch(
    task: AgentTask,
    chosen: HeadlessOptions,
    command: tuple[str, ...],
    env: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]],
) -> Launch:
    """`settings`: the file -> its content, which becomes JSON."""
    prompt = prompt_template.render(chosen.prompt_template, task)
    files = {file: json.dumps(content).encode() for file, content in settings.items()}
    return Launch(
        argv=headless_cli.with_prompt((*command, *chosen.extra_args)),
        env=env,
        files={PROMPT: prompt.encode(), **files},
    )
