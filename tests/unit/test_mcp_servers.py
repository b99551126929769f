"""MCP servers as people write them: in a run's file, in a task, in a request."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure import variant_registry
from perdure.agents.agent_validation import check_options
from perdure.agents.codex import Codex
from perdure.cli.runs import mcp_file
from perdure.client.request_comparison import differences, outcome_fields
from perdure.errors import ConfigurationError
from perdure.types import McpServer, RolloutRequest
from tests.unit.agents.headless_task import TASK

HEADERS = {"Authorization": "Bearer ${DOCS}", "X-Team": "perdure"}
DOCS = {"type": "http", "url": "https://docs.example/mcp", "headers": HEADERS}
CALC = {"command": "calculator", "args": ["--exact"]}


def asked(**servers: Any) -> RolloutRequest:
    return RolloutRequest(run_id="r", instance="toy/a", mcp_servers=servers)


def written(folder: Path, content: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_claude_code_is_read(tmp_path: Path) -> None:
    """The type may be missing, as in that file."""
    given = mcp_file.read(written(tmp_path, {"mcpServers": {"docs": DOCS, "calc": CALC}}))
    request = RolloutRequest.model_validate(
        {"run_id": "r", "instance": "toy/a", "mcp_servers": given}
    )

    assert request == asked(docs=DOCS, calc=CALC)
    assert [one.type for one in request.mcp_servers.values()] == ["http", "stdio"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"servers": {}}, "mcpServers: it is missing"),
        ({"mcpServers": {"a b": CALC}}, "mcpServers.a b"),
        ({"mcpServers": {"docs": {"type": "sse"}}}, "has a `url` and no `command`"),
        ({"mcpServers": {"docs": {**DOCS, "command": "x"}}}, "has a `url` and no `command`"),
        ({"mcpServers": {"docs": {"url": "ftp://a/b"}}}, "write http://HOST/PATH"),
        ({"mcpServers": {"docs": {**DOCS, "timeout": 5}}}, "mcpServers.docs.timeout"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mcp_file.read(written(tmp_path, content))

    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "server",
    [
        {**DOCS, "headers": {"Authorization": "Bearer s3cret"}},
        {**DOCS, "headers": {"X-Api-Key": "s3cret"}},
        {**DOCS, "headers": {"X-Team": "${TEAM:-s3cret}"}},
        {"url": "https://me:s3cret@docs.example/mcp"},
        {**CALC, "env": {"API_TOKEN": "s3cret"}},
    ],
)
def test_no_secret_enters_a_request(server: dict[str, Any]) -> None:
    """Requests are stored. The message does not repeat the secret."""
    with pytest.raises(ConfigurationError) as caught:
        asked(docs=server)

    assert "s3cret" not in str(caught.value)


def test_headers_take_values_of_variables() -> None:
    """Of those whose names begin with MCP_, so that no server gets another secret of the gateway."""
    server = McpServer.model_validate(DOCS)

    assert server.variables == ("MCP_DOCS",)
    assert server.filled({"MCP_DOCS": "x"}) == {**HEADERS, "Authorization": "Bearer x"}


def test_an_agent_without_mcp_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options("aider", {}, asked(docs=DOCS).mcp_servers)

    assert "agent 'aider' cannot use MCP servers (docs)" in str(caught.value)
    assert "claude_code, codex" in str(caught.value)
    check_options("oracle", {}, asked(docs=DOCS).mcp_servers)  # it calls no model


INSIDE = {"type": "http", "url": "http://docs:8000/mcp", "in_sandbox": True}


@pytest.mark.parametrize(
    "name", ["claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "openhands"]
)
def test_a_server_in_the_sandbox_gets_no_session_key(name: str) -> None:
    """Its own address and headers are in the agent's settings. Whoever wrote its image could use the
    key for model calls."""
    agent = variant_registry.load("agent", variant_registry.AGENTS, name)()
    server = McpServer.model_validate({**INSIDE, "headers": {"X-Team": "blue"}})
    behind = McpServer.model_validate({"url": "https://other.example/mcp"})

    def settings(**servers: McpServer) -> str:
        launch = agent.launch(replace(TASK, mcp_servers=servers))
        return "".join(file.decode() for file in launch.files.values())

    without, written = settings(other=behind), settings(other=behind, docs=server)

    assert "http://docs:8000/mcp" in written
    assert "blue" in written
    for key in ("Bearer", "bearer", TASK.session_key, "PERDURE_SESSION_KEY", f"{TASK.gateway_url}"):
        assert written.count(key) == without.count(key)


def test_codex_is_refused_where_it_cannot_speak() -> None:
    server = McpServer.model_validate({**INSIDE, "type": "sse"})

    with pytest.raises(ConfigurationError, match="'docs' in the sandbox uses `sse`"):
        Codex().launch(replace(TASK, mcp_servers={"docs": server}))


@pytest.mark.parametrize("value", ["$GEMINI_API_KEY", "{file:/home/agent/session-key}"])
def test_no_agent_expands_its_key_for_a_server_in_the_sandbox(value: str) -> None:
    """Some replace such texts in their own settings."""
    server = {**INSIDE, "headers": {"X-Team": value}}

    with pytest.raises(ConfigurationError, match="which agents would expand"):
        check_options("gemini_cli", {}, asked(docs=server).mcp_servers)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": "calc", "in_sandbox": True}, "remove `in_sandbox`"),
        ({**INSIDE, "url": "http://docs:99999/mcp"}, "Port"),
        ({**INSIDE, "url": "http://[::1/mcp"}, "Invalid IPv6 URL"),
    ],
)
def test_a_wrong_place_is_refused(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        asked(docs=server)


def test_no_secret_enters_a_sandbox() -> None:
    with_secret = asked(docs={**INSIDE, "headers": HEADERS}).mcp_servers
    with pytest.raises(
        ConfigurationError, match=r"gets no secrets: remove the header Authorization$"
    ):
        check_options("codex", {}, with_secret)

    check_options("oracle", {}, with_secret)  # it calls no model


def test_another_server_is_another_run() -> None:
    """A run that is started again keeps its tools."""
    before, now = (dict(outcome_fields(one)) for one in (asked(), asked(calc=CALC)))

    assert any(line.startswith("mcp_servers.calc.command") for line in differences(before, now))
