"""Installs and runs the MCP server of `calculator_program.py`."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.agents import tool_cache
from perdure.agents.base import Agent, AgentTask, Launch
from perdure.python_interpreters import find_uv
from perdure.sandboxes.base import Mount
from perdure.types import McpServer

SDK = "mcp==2.3.0"
TOKEN = "only-the-gateway-knows-it"
MOUNT = "/opt/calculator"
PROGRAM = Path(__file__).with_name("calculator_program.py")


async def installed(tools: Path) -> Path:
    """A Python with the SDK."""
    recipe = f"{SDK} {tool_cache.own_python().identity}"
    return await tool_cache.built(tools, "mcp", recipe, _build)


def _build(folder: Path) -> None:
    uv, python = str(find_uv()), str(tool_cache.own_python().executable)
    tool_cache.run_installer([uv, "venv", "-q", "--relocatable", "--python", python, str(folder)])
    own = str(folder / "bin" / "python")
    tool_cache.run_installer([uv, "pip", "install", "-q", "--python", own, SDK])


def mounts(sdk: Path) -> tuple[Mount, ...]:
    return (Mount(sdk, MOUNT), Mount(PROGRAM.parent, f"{MOUNT}-program"))


def on_stdio() -> McpServer:
    program = f"{MOUNT}-program/{PROGRAM.name}"
    return McpServer.model_validate({"command": f"{MOUNT}/bin/python", "args": ["-I", program]})


PORT_INSIDE = 8123
START_INSIDE = f"""
PORT={PORT_INSIDE} {MOUNT}/bin/python -I {MOUNT}-program/{PROGRAM.name} "$0" >/tmp/calculator-port &
until [ -s /tmp/calculator-port ]; do sleep 0.1; done
exec "$@"
"""


def beside(agent: Agent, kind: str) -> Agent:
    """Change the agent's launch: a server without a token starts first, in the same sandbox, which
    needs `mounts`."""
    own: Callable[[AgentTask], Launch] = agent.launch

    def launch(task: AgentTask) -> Launch:
        found = own(task)
        return replace(found, argv=("sh", "-c", START_INSIDE, kind, *found.argv))

    agent.launch = launch  # type: ignore[method-assign]
    return agent


def in_sandbox(kind: str) -> McpServer:
    """The server that starts beside an agent."""
    url = f"http://127.0.0.1:{PORT_INSIDE}/{'sse' if kind == 'sse' else 'mcp'}"
    return McpServer.model_validate({"type": kind, "url": url, "in_sandbox": True})


@dataclass
class Calculator:
    """A running server."""

    process: "subprocess.Popen[str]"
    port: int
    kind: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{'sse' if self.kind == 'sse' else 'mcp'}"

    def as_server(self, **fields: object) -> McpServer:
        headers = {"Authorization": "Bearer ${CALCULATOR}"}
        return McpServer.model_validate(
            {"type": self.kind, "url": self.address, "headers": headers, **fields}
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def served(sdk: Path, *, port: int = 0, kind: str = "http") -> Iterator[Calculator]:
    """A server on HTTP, on a free port if `port` is 0. It wants `TOKEN`. `kind`: `http` or `sse`."""
    argv = [str(sdk / "bin" / "python"), "-I", str(PROGRAM), kind, TOKEN]
    env = {**os.environ, "PORT": str(port)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    with process.stdout:
        server = Calculator(process, int(process.stdout.readline()), kind)
        try:
            yield server
        finally:
            server.end()
