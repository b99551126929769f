"""Measures what the gateway adds to a call of an MCP server.

    python -m benchmarks.mcp [--calls N] [--rounds N] [--sizes N,N] [--json FILE]

A small client in a bubblewrap sandbox calls a tool again and again on one connection. The sides alternate:
the client reaches the gateway, which journals each call and forwards it, or the client reaches the server
itself in the same way, at a unix socket. The gateway and the server are processes of their own; the server
answers at once, so its own time is as small as it can be. Figures are medians over all calls of a side.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.benchmark_options import words
from benchmarks.cpu_measurement import own_seconds
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.home_folder import Secrets
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import McpServer

SECRET = "a benchmark's secret"
WARM_UP = 5
"""Calls before the measured ones, on the same connection."""
CLIENT = """
import http.client, json, sys, time, urllib.parse
url, key, calls, characters = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
found = urllib.parse.urlsplit(url)
connection = http.client.HTTPConnection(found.hostname, found.port, timeout=60)
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
headers["accept"] = "application/json, text/event-stream"
took = []
for number in range(calls):
    params = {"name": "text", "arguments": {"characters": characters}}
    asked = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
    started = time.perf_counter()
    connection.request("POST", found.path, json.dumps(asked), headers)
    answer = json.load(connection.getresponse())
    took.append(1e3 * (time.perf_counter() - started))
    assert len(answer["result"]["content"][0]["text"]) == characters, answer
print(json.dumps(took))
"""


class Stand:
    """The processes, and the sandboxes in which the client runs."""

    def __init__(self, home: Path, server: str, control: GatewayControl, gateway_pid: int) -> None:
        self._home, self._server = home, server
        self._control, self._gateway_pid = control, gateway_pid
        self._provider = BubblewrapProvider(Settings(home=home))
        self._sessions = 0

    async def through_gateway(self, calls: int, characters: int) -> tuple[list[float], float]:
        """Milliseconds of each call, and the gateway's CPU milliseconds for one."""
        self._sessions += 1  # a session may make 1,200 calls a minute
        session = f"bench-{self._sessions}"
        servers = {"tool": McpServer.model_validate({"url": f"{self._server}/mcp"})}
        spec = SessionSpec(session_id=session, turns_key=f"t/{session}", mcp_servers=servers)
        await self._control.open(spec)
        before = own_seconds(self._gateway_pid)
        socket = Settings(home=self._home).gateway_socket
        took = await self._client(
            socket, "/v1/mcp/tool", self._control.key(session), calls, characters
        )
        cpu = own_seconds(self._gateway_pid) - before
        await self._control.close(session)
        return took, 1e3 * cpu / (calls + WARM_UP)

    async def direct(self, calls: int, characters: int) -> list[float]:
        return await self._client(self._home / "tool.sock", "/mcp", "none", calls, characters)

    async def _client(
        self, socket: Path, path: str, key: str, calls: int, characters: int
    ) -> list[float]:
        identity = f"bench-mcp-{os.getpid()}"
        async with await self._provider.create(SandboxSpec("/w", gateway=socket), identity) as box:
            words = [f"{box.gateway_url}{path}", key, str(calls + WARM_UP), str(characters)]
            result = await box.exec(["python3", "-c", CLIENT, *words], timeout=600)
        if not result.status.ok:
            raise SystemExit(result.stderr.decode())
        found: list[float] = json.loads(result.stdout)
        return found[WARM_UP:]


async def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        async with ScriptedEngine() as engine:
            figures = await _measured(Path(folder), engine.url, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    print(f"load {os.getloadavg()[0]:.0f}; {options.rounds} rounds of {options.calls} calls a side")
    for size, found in figures.items():
        direct, through = (statistics.median(found[side]) for side in ("direct", "gateway"))
        cpu = statistics.median(found["gateway_cpu"])
        print(
            f"{int(size):>8,} characters: direct {direct:.2f} ms, through the gateway {through:.2f} ms "
            f"({through / direct:.1f} x, {through - direct:.2f} ms more), gateway CPU {cpu:.2f} ms"
        )


async def _measured(
    home: Path, engine: str, options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """By size of the answer: milliseconds of each side's calls."""
    sides = ("direct", "gateway", "gateway_cpu")
    figures = {size: {side: list[float]() for side in sides} for size in options.sizes}
    environment = {
        "PERDURE_HOME": str(home),
        "PERDURE_GATEWAY__PORT": "0",
        "PERDURE_SECRET": SECRET,
        "PERDURE_ENGINE__URL": engine,
        "PERDURE_ENGINE__KIND": "vllm",
    }
    with (
        _process(["benchmarks.mcp.tool_server", str(home / "tool.sock")], {}) as server,
        _process(["perdure.gateway"], environment) as gateway,
    ):
        assert server.stdout is not None
        tool = server.stdout.readline().decode().strip()
        socket = Settings(home=home).gateway_socket
        await part_readiness.wait_for_socket(socket)
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        secrets = Secrets.of(SECRET.encode())
        async with GatewayControl("http://gateway", secrets, transport=transport) as control:
            stand = Stand(home, tool, control, gateway.pid)
            for _ in range(options.rounds):
                for size, found in figures.items():
                    found["direct"] += await stand.direct(options.calls, int(size))
                    took, cpu = await stand.through_gateway(options.calls, int(size))
                    found["gateway"] += took
                    found["gateway_cpu"].append(cpu)
    return figures


@contextmanager
def _process(
    arguments: list[str], environment: dict[str, str]
) -> "Iterator[subprocess.Popen[bytes]]":
    given = {name: one for name, one in os.environ.items() if not name.startswith("PERDURE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**given, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100, help="calls of a side in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=words, default=("100", "10000", "1000000"), metavar="N,N",
                        help="characters of an answer")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
