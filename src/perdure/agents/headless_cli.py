"""Shared by headless command-line agents: options, the prompt, the log. The prompt comes from a
file on standard input, because Linux limits an argument to 128 KiB.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from perdure.agents.base import HOME, AgentTask, Evidence
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import ExecState
from perdure.types import AgentEnd, Request

PROMPT = f"{HOME}/prompt.txt"
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)


def _split(value: Any) -> Any:
    """Split a string as a shell would, because slime gives extra arguments as one string."""
    return shlex.split(value) if isinstance(value, str) else value


Arguments = Annotated[tuple[str, ...], BeforeValidator(_split)]


class HeadlessOptions(Request):
    """Options with the same meaning for every headless agent."""

    prompt_template: str | None = Field(
        None, validation_alias=AliasChoices("prompt_template", "SWE_CC_PROMPT")
    )
    """The prompt, with the placeholders of `perdure.agents.prompt_template`. None: the default for the task."""
    extra_args: Arguments = Field(
        (), validation_alias=AliasChoices("extra_args", "SWE_CLAUDE_EXTRA_ARGS")
    )
    """More of the agent's own flags: a list, or one string that is split as a shell would."""
    extra_env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables; no secrets, and not the gateway's address or key."""
    context_window: int | None = Field(None, ge=1024)
    """Tokens at which it compacts or stops; default: the request's
    `sampling.max_context_tokens`."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Tokens of one answer; default: the request's `sampling.max_tokens_per_turn`."""

    def window(self, task: AgentTask) -> int:
        return self.context_window or task.sampling.max_context_tokens

    def answer(self, task: AgentTask) -> int:
        return self.max_output_tokens or task.sampling.max_tokens_per_turn


def gateway_of(agent: str, task: AgentTask) -> str:
    """The gateway's URL. Raises: ConfigurationError without a gateway."""
    if task.gateway_url is None:
        raise ConfigurationError(f"{agent} needs a gateway: start one with `perdure up`")
    return task.gateway_url


def with_prompt(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command with the file `PROMPT` as its standard input. It starts no extra process."""
    return ("/bin/sh", "-c", f'exec "$@" <{PROMPT}', "sh", *argv)


def environment(
    task_env: Mapping[str, str], fixed: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """Merge variables. `extra` may override `task_env` but not `fixed`, and must contain no
    secrets.


    Raises: ConfigurationError naming the variable.
    """
    for name in extra:
        if name in fixed:
            raise ConfigurationError(f"agent_options.extra_env.{name}: set by Perdure; remove it")
        if SECRET.search(name):  # the message must not show the value
            raise ConfigurationError(
                f"agent_options.extra_env.{name}: requests are stored permanently and must contain "
                "no secrets; remove it"
            )
    return {**task_env, **extra, **fixed}


def early_end(evidence: Evidence) -> AgentEnd | None:
    """The end states that all agents share: it never called the model, or it was killed."""
    if evidence.turns == 0:
        return AgentEnd.NEVER_CALLED_MODEL
    if evidence.status.state is ExecState.KILLED:
        return AgentEnd.LIMIT if evidence.status.cause == "timeout" else AgentEnd.CRASHED
    return None


def events(stdout: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects in the agent's log, newest first; other lines are skipped."""
    for line in reversed(stdout.splitlines()):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
