"""A policy that fixes the probe's task with whatever tools an agent offers, as a model would.

It reads the tools in the prompt, calls a sub-agent and the tool of an MCP server if they are offered,
then runs three commands and reports that it is done. If the agent offers no tools, the policy answers
in the format that the prompt describes, or with a shell script if it knows no such format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.agent_stand import ISSUE
from perdure.testing.mcp_server import RESULT, TOOL
from perdure.testing.scripted_policy import Policy

OFFERED = re.compile(r"<tools>\n(\{.*?\})\n</tools>", re.DOTALL)
SHELLS = ("bash", "exec_command", "execute_bash", "run_shell_command", "shell", "terminal")
"""Names of tools that run a command, in lower case."""
SPAWN, WAIT = "multi_agent_v1__spawn_agent", "multi_agent_v1__wait_agent"
"""Codex's sub-agents run in the background."""
SUB_AGENTS = ("agent", "invoke_agent", "task", SPAWN)
SEARCHES = ("tool_search",)
"""Tools that add an MCP server's tools to those that are offered."""
FINISHES = ("complete_task", "final_answer", "finish")
ROLES = ("generalist", "general-purpose", "general")
"""Names of built-in sub-agents for any task."""
ROLE_FIELDS = ("agent_name", "subagent_type")
SPAWNED = re.compile(r"agent_id\W+([0-9a-f-]{36})")
MOST_TURNS = 20
"""An agent that needs more turns does not understand the answers."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent's model prints when it is done."""
COMMANDS = ("cat calc.py", "sed -i s/-/+/ calc.py", "git --no-pager diff")
"""Each is one line without quotes, so a prompt shows it unchanged in any encoding."""
QUESTION = "PROBE: which line of calc.py subtracts?"
"""The sub-agent's task."""
ANSWER = "Line 2 subtracts."
DONE = "add() adds now."
AIDER_EDIT = """calc.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""
AIDER = "*SEARCH/REPLACE*"
"""A phrase of aider's prompt."""
CODE = "<code>"
"""A phrase of smolagents' prompt."""
KEYSTROKES = '"keystrokes"'
"""A phrase of Terminus 2's prompt."""
COMMAND_ENDS_WITHIN_S = 5.0
"""On a busy host, so that each attempt at the task sees the same screen."""

Schema = Mapping[str, Any]


class ToolReadingPolicy(Policy):
    """Its answer depends on the prompt alone, so a second attempt gets the same ones."""

    def __init__(self, *, delegates: bool = False, has_mcp_server: bool = False) -> None:
        """`delegates`: it asks a sub-agent first, if one is offered. `has_mcp_server`: it looks for that
        server's tool, if the agent does not offer it at once."""
        self._reader = load_tokenizer("qwen3")
        self._delegates, self._has_mcp_server = delegates, has_mcp_server
        super().__init__(self._reader, {})

    def complete(self, prompt_ids: list[int]) -> list[int]:
        prompt = self._reader.decode(prompt_ids)
        return self.tokens(answer(prompt, self._delegates, self._has_mcp_server))


def answer(prompt: str, delegates: bool, has_mcp_server: bool) -> dict[str, Any]:
    """The next turn, in the format of `scripted_policy`."""
    tools = offered(prompt)
    if ISSUE not in prompt:  # a sub-agent, or a request for a title
        return _finish(prompt, tools, ANSWER)
    if prompt.count("<|im_start|>assistant") > MOST_TURNS:
        return {"content": "I give up."}
    if (shell := named(tools, SHELLS)) is None:
        return {"content": _text(prompt)}
    if delegates and QUESTION not in prompt and (sub_agent := named(tools, SUB_AGENTS)):
        return _call(prompt, sub_agent, QUESTION)
    if (spawned := SPAWNED.search(prompt)) and f'{{"name": "{WAIT}"' not in prompt:
        return {"tool_calls": [{"name": WAIT, "arguments": {"targets": [spawned[1]]}}]}
    if RESULT not in prompt and (mcp_tool := mcp_tool_of(tools)):
        return _call(prompt, mcp_tool, QUESTION)
    searched = f'"arguments": {{"query": "{TOOL}"}}' in prompt
    if has_mcp_server and not searched and (search := named(tools, SEARCHES)):
        return _call(prompt, search, TOOL)
    if command := _next_command(prompt):
        return _call(prompt, shell, command)
    if SUBMIT in prompt:
        return _call(prompt, shell, f"echo {SUBMIT}")
    return _finish(prompt, tools, DONE)


def offered(prompt: str) -> list[Schema]:
    """The tools' names and parameters, as the chat template shows them."""
    found = OFFERED.search(prompt)
    return [json.loads(line)["function"] for line in found[1].splitlines()] if found else []


def named(tools: Sequence[Schema], names: Sequence[str]) -> Schema | None:
    return next((tool for tool in tools if tool["name"].lower() in names), None)


def mcp_tool_of(tools: Sequence[Schema]) -> Schema | None:
    """The tool of `perdure.testing.mcp_server`. Agents put a prefix before its name."""
    return next((tool for tool in tools if tool["name"].endswith(TOOL)), None)


def _next_command(prompt: str) -> str:
    return next((command for command in COMMANDS if command not in prompt), "")


def _text(prompt: str) -> str:
    """An answer without tools: an edit, Python, keystrokes, or a shell script."""
    command = _next_command(prompt)
    if AIDER in prompt:
        return AIDER_EDIT
    if CODE in prompt:
        python = f'print(bash("{command}"))' if command else f'final_answer("{DONE}")'
        return f"{CODE}\n{python}\n</code>"
    if KEYSTROKES in prompt:
        typed = {"keystrokes": f"{command}\n", "duration": COMMAND_ENDS_WITHIN_S}
        turn = {"analysis": "", "plan": "", "commands": [typed] if command else []}
        return json.dumps({**turn, "task_complete": not command})
    return "\n".join(COMMANDS) if command else DONE


def _finish(prompt: str, tools: Sequence[Schema], text: str) -> dict[str, Any]:
    tool = named(tools, FINISHES)
    return _call(prompt, tool, text) if tool else {"content": text}


def _call(prompt: str, tool: Schema, text: str) -> dict[str, Any]:
    places = (json.dumps(tool), prompt)
    role = next((role for place in places for role in ROLES if role in place), ROLES[0])
    arguments = _fill(tool["parameters"], text, role)
    return {"content": "", "tool_calls": [{"name": tool["name"], "arguments": arguments}]}


def _fill(schema: Schema, text: str, role: str) -> Any:
    """A value of a JSON schema: `text` for each required string, and the role of a sub-agent."""
    if schema.get("type") == "object":
        fields = schema.get("properties", {})
        wanted = [name for name in fields if name in (*schema.get("required", ()), "message")]
        roles = {name: role for name in ROLE_FIELDS if name in fields}
        return {name: _fill(fields[name], text, role) for name in wanted} | roles
    values = {"boolean": False, "integer": 1, "number": 1, "array": []}
    return schema.get("enum", [values.get(str(schema.get("type")), text)])[0]
