"""The options of `acp`, what a server's launch takes from the agent's own, and its end."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from perdure.agents import agent_validation
from perdure.agents.acp import NODE, SETTINGS, Acp
from perdure.agents.acp_servers import SERVERS
from perdure.agents.base import HOME, Launch, install
from perdure.agents.headless_cli import PROMPT
from perdure.agents.in_sandbox import acp_client
from perdure.agents.nop import Nop
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer
from tests.unit.agents.headless_task import TASK, ended, with_options

COMMAND = ["goose", "acp"]
every_server = pytest.mark.parametrize("server", SERVERS)


def settings(launch: Launch) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(launch.files[SETTINGS])
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"agent_options\.command: name the server's command.*or set server to one of"),
        ({"server": "goose"}, r"agent_options\.server: .*'claude_code'.*'opencode'"),
        ({"command": COMMAND, "package": "goose"}, r"agent_options\.package: .*name@1\.2\.3"),
        ({"command": COMMAND, "package": "goose@^1.2.3"}, r"agent_options\.package: .*exact"),
        ({"command": COMMAND, "permissions": "ask"}, r"agent_options\.permissions: .*'reject'"),
        ({"command": COMMAND, "turn_s": 0}, r"agent_options\.turn_s: .*greater than 0"),
        ({"command": COMMAND, "context_window": 9999}, r"context_window needs .*server"),
        ({"command": COMMAND, "turns": []}, r"agent_options\.turns: unknown, did you mean turn_s"),
        ({"server": "gemini_cli", "context_window": 9999}, r"context_window: gemini CLI has no"),
        ({"command": COMMAND, "extra_env": {"MY_TOKEN": "x"}}, r"extra_env\.MY_TOKEN"),
        ({"command": COMMAND, "extra_env": {"OPENAI_BASE_URL": "x"}}, r"OPENAI_BASE_URL: set by"),
    ],
)
def test_a_wrong_option_is_refused_before_a_sandbox_boots(
    options: Mapping[str, Any], message: str
) -> None:
    """The error names the field and the fix."""
    with pytest.raises(ConfigurationError, match=message):
        agent_validation.check_options("acp", options)


class _Named(Nop):
    """An agent whose options name a program."""

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        return (Mount(source=tools, target="/opt/own"),)

    async def install_chosen(
        self, tools: Path, settings: AgentSettings, options: Mapping[str, JsonValue]
    ) -> tuple[Mount, ...]:
        return (Mount(source=tools, target=f"/opt/{options['program']}"),)


async def test_what_the_options_name_is_installed_too(tmp_path: Path) -> None:
    """Its mounts come after the agent's own."""
    mounts = await install(_Named(), tmp_path, AgentSettings(), {"program": "goose"})

    assert [mount.target for mount in mounts] == ["/opt/own", "/opt/goose"]


@every_server
def test_a_server_takes_the_settings_of_its_agent(server: str) -> None:
    """Every variable and settings file of the agent but its prompt, and its limits; the key is in no
    argument and in no file that the client reads."""
    own = SERVERS[server].harness.launch(TASK)
    launch = Acp().launch(with_options(server=server))

    assert own.env.items() <= launch.env.items()
    assert {p: own.files[p] for p in own.files if p != PROMPT}.items() <= launch.files.items()
    assert TASK.session_key.encode() not in launch.files[SETTINGS]
    assert TASK.session_key not in " ".join(launch.argv)


def test_the_task_and_flags_reach_the_client() -> None:
    """The task is the first message; flags follow the command, which replaces the agent's own."""
    options = {"server": "opencode", "command": COMMAND, "extra_args": "--a 'b c'"}
    launch = Acp().launch(with_options(**options, prompt_template="Do it."))

    assert launch.files[PROMPT] == b"Do it."
    assert settings(launch)["command"] == [*COMMAND, "--a", "b c"]


def test_a_command_gets_the_gateway_in_each_vendors_variables() -> None:
    """Any of the three protocols works."""
    env = Acp().launch(with_options(command=COMMAND)).env

    assert env["OPENAI_BASE_URL"] == f"{TASK.gateway_url}/v1"
    assert env["ANTHROPIC_BASE_URL"] == env["GOOGLE_GEMINI_BASE_URL"] == TASK.gateway_url
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == TASK.session_key
    assert env["GEMINI_API_KEY"] == TASK.session_key
    assert env["HOME"] == HOME


def test_a_program_of_the_package_runs_on_its_own_node(tmp_path: Path) -> None:
    """The image needs no Node. A native program and one of the image start as they are."""
    programs = tmp_path / "node_modules" / ".bin"
    programs.mkdir(parents=True)
    for name, first in (("script", "#!/usr/bin/env node"), ("native", "\x7fELF")):
        (programs / name).write_text(f"{first}\n")
        (programs / name).chmod(0o755)

    def argv(name: str) -> list[str]:
        return acp_client.argv_of([name, "--acp"], str(tmp_path), f"{NODE}/bin/node")

    assert argv("script") == [f"{NODE}/bin/node", str(programs / "script"), "--acp"]
    assert argv("native") == [str(programs / "native"), "--acp"]
    assert argv("goose") == ["goose", "--acp"]


def test_a_long_update_is_printed_without_its_content(capsys: pytest.CaptureFixture[str]) -> None:
    """Output stays bounded, and says what was left out."""
    acp_client.tell({"sessionUpdate": "tool_call", "content": "x" * acp_client.LINE_BYTES})
    told = json.loads(capsys.readouterr().out)

    assert told.pop("bytes_left_out") > acp_client.LINE_BYTES
    assert told == {"sessionUpdate": "tool_call"}


@pytest.mark.parametrize(
    ("error", "end"),
    [
        ("RequestError: Internal error: Prompt is too long", AgentEnd.LIMIT),
        ("Claude's response exceeded the 100 output token maximum.", AgentEnd.LIMIT),
        ("Tool call not allowed while generating summary: edit", AgentEnd.GAVE_UP),
        ("RequestError: Authentication required", AgentEnd.CRASHED),
    ],
)
def test_a_servers_error_decides_the_end(error: str, end: AgentEnd) -> None:
    """A token limit is a limit; what the policy did wrong is graded; anything else is a crash."""
    assert Acp().classify(ended(b"", acp_client.exit_code_of(error))) is end


@pytest.mark.parametrize("code", [2, 126, 127, 255])
def test_a_foreign_exit_code_is_a_crash(code: int) -> None:
    """Only the client's own codes count."""
    assert Acp().classify(ended(b"", code)) is AgentEnd.CRASHED


def test_opencode_as_a_server_refuses_mcp_servers_on_stdio() -> None:
    """It would hang until its budget ends."""
    servers = {"calc": McpServer.model_validate({"command": "calculator"})}
    task = replace(with_options(server="opencode"), mcp_servers=servers)

    with pytest.raises(ConfigurationError, match=r"'calc'.*use agent opencode"):
        Acp().launch(task)
