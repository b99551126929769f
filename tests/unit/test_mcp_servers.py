"""MCP servers as people write them: in a run's file, in a task, in a request."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.agents.agent_validation import check_options
from perdure.cli.runs import mcp_file
from perdure.client.request_comparison import differences, outcome_fields
from perdure.errors import ConfigurationError
from perdure.types import McpServer, RolloutRequest

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


def test_another_server_is_another_run() -> None:
    """A run that is started again keeps its tools."""
    before, now = (dict(outcome_fields(one)) for one in (asked(), asked(calc=CALC)))

    assert any(line.startswith("mcp_servers.calc.command") for line in differences(before, now))
