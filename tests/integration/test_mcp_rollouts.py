"""MCP servers in the stages of a rollout: what is refused before the agent starts, and how an agent
ends whose server is dead."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.agents.base import AgentTask, Launch
from perdure.gateway.mcp import mcp_proxy
from perdure.rollouts.activity_messages import AgentRun, Attempt
from perdure.rollouts.sandbox import task_mcp_servers
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import identity_of
from perdure.settings.settings_tree import Settings
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import RolloutRequest
from tests.integration.command_agent import CommandAgent
from tests.integration.one_row import ROW, save_row

CALLS = """
import json, sys, urllib.request
body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}})
headers = {"authorization": "Bearer " + sys.argv[2], "content-type": "application/json"}
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], body.encode(), headers)).read())
"""
DEAD = {"url": "http://127.0.0.1:1/mcp"}


class ToolAgent(CommandAgent):
    """It opens a session at the server `docs`, as each client does first, and calls no model."""

    name: ClassVar[str] = "tool_agent"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True

    def launch(self, task: AgentTask) -> Launch:
        url = f"{task.gateway_url}/v1/mcp/docs"
        return Launch(argv=("python3", "-c", CALLS, url, task.session_key))


AGENT = f"{__name__}:ToolAgent"


class Home:
    """A home with a gateway, and a row that names MCP servers."""

    def __init__(self, folder: Path, gateway: str, engine: str) -> None:
        self._settings: dict[str, Any] = {
            "home": folder / "home",
            "sandbox": {"allow_local": True},
            "engine": {"url": engine, "kind": "vllm"},
        }
        self._gateway = {"url": gateway, "reach": "url"}
        self._folder = folder
        self.services: Services

    async def boot(self, *, of_row: Any = None, of_run: Any = None, mcp_hosts: str = "") -> Attempt:
        gateway = {**self._gateway, "mcp_hosts": mcp_hosts}
        self.services = Services(Settings(**self._settings, gateway=gateway))
        await save_row(self.services, self._folder / "tree", mcp_servers=of_row or {})
        fields = {"agent": AGENT, "sandbox": "local", "mcp_servers": of_run or {}}
        request = RolloutRequest.model_validate({"run_id": "r", "instance": ROW, **fields})
        attempt = Attempt(request=request, attempt=1)
        await ActivityEnvironment().run(Stages(self.services).boot, attempt)
        return attempt

    async def run(self, attempt: Attempt) -> AgentRun:
        return await ActivityEnvironment().run(Stages(self.services).run_agent, attempt)


@pytest.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    monkeypatch.setattr(mcp_proxy, "PATIENCE_S", 0.0)
    async with (
        ScriptedEngine() as engine,
        LocalGateway(tmp_path / "home", engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        found = Home(tmp_path, gateway.url, engine.url)
        yield found
        identity = identity_of("r", f"rollout/r/{ROW.split('/')[1]}/0", "agent", 1)
        await found.services.provider("local").kill(identity)
        await found.services.gateway.aclose()


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_dead_server_leaves_no_verdict(home: Home, kind: str) -> None:
    """However the agent ended, its run says which server could not answer."""
    server = {**DEAD, "type": kind}
    run = await home.run(await home.boot(of_run={"docs": server}))

    assert "MCP server 'docs' at 127.0.0.1:1 cannot be reached" in run.broke


async def test_a_row_may_name_only_hosts_that_the_settings_allow(home: Home) -> None:
    """Rows come from elsewhere, and the gateway is inside your network."""
    with pytest.raises(ApplicationError, match="MCP_HOSTS=127") as refused:
        await home.boot(of_row={"docs": DEAD})

    assert refused.value.type == "ConfigurationError"


async def test_a_row_may_name_an_allowed_host(home: Home) -> None:
    run = await home.run(await home.boot(of_row={"docs": DEAD}, mcp_hosts="a.example,127.0.0.1:1"))

    assert "at 127.0.0.1:1 cannot be reached" in run.broke


async def test_a_server_of_the_run_replaces_the_rows(home: Home) -> None:
    """It needs no permission, because a user named it."""
    other = {"url": "http://127.0.0.1:2/mcp"}
    run = await home.run(await home.boot(of_row={"docs": DEAD}, of_run={"docs": other}))

    assert "at 127.0.0.1:2 cannot be reached" in run.broke


async def test_a_silent_address_in_the_sandbox_is_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt ends before its agent starts, and another one may find the server there."""
    monkeypatch.setattr(task_mcp_servers, "STARTS_S", 1)
    attempt = await home.boot(of_row={"docs": {**DEAD, "in_sandbox": True}})

    with pytest.raises(ApplicationError, match="nothing listened at http") as lost:
        await home.run(attempt)
    assert lost.value.type == "SandboxLost"


async def test_an_address_in_the_sandbox_is_waited_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may begin to listen after the first look, also on an IPv6 address."""
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 0))
        url = f"http://docs:{listener.getsockname()[1]}/mcp"
        attempt = await home.boot(of_row={"docs": {"url": url, "in_sandbox": True}})

        async def listen(_seconds: float) -> None:
            listener.listen()

        monkeypatch.setattr(task_mcp_servers, "sleep", listen)
        run = await home.run(attempt)

    assert "docs" not in run.broke


async def test_a_program_that_the_sandbox_lacks_is_named(home: Home) -> None:
    """Agents would start without the server, and the row would get a wrong verdict."""
    attempt = await home.boot(of_row={"calc": {"command": "no-such-calculator"}})

    with pytest.raises(ApplicationError, match="needs the program 'no-such-calculator'") as refused:
        await home.run(attempt)
    assert refused.value.type == "InstanceError"
