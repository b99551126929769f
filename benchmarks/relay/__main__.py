"""Added latency per model call and idle cost of each way from a sandbox to the gateway.

    python -m benchmarks.relay [--calls N] [--idle-sandboxes N] [--idle-s S] [--json]

All ways in one run over bubblewrap sandboxes and one gateway with an engine that answers at once;
calls of 60 kB (a history of some 15k tokens) in turns. `url` is the gateway's own port, called from
a sandbox that shares the host's network: what the others are compared with. CPU at rest is that of
the host's side alone, this process; gateway and engine run in it too, and are measured with `url`.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from perdure.sandboxes.base import Network, Sandbox, SandboxSpec
from perdure.sandboxes.bubblewrap import BubblewrapProvider
from perdure.sandboxes.relay import CARRIERS, Relay
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine

WAYS = ("url", "socket", *CARRIERS)
PAD = 60_000

CLIENT = """
import http.client, json, sys, time
port, key, calls, pad = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
taken = []
for number in range(calls):
    text = "Call %d of %s. " % (number, time.time()) + "history " * (pad // 8)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    data = answer.read()
    assert answer.status == 200, data
    taken.append((time.perf_counter() - began) * 1e3)
    time.sleep(0.05)  # an agent runs a command between two calls
print(json.dumps(taken))
"""


class Bench:
    """One gateway and one engine; every way gets sandboxes of its own."""

    def __init__(self, home: Path, gateway: LocalGateway) -> None:
        self.provider = BubblewrapProvider(home / "boxes")
        self.gateway = gateway
        self.socket = home / "gw.sock"
        self._number = 0

    @asynccontextmanager
    async def reached(self, way: str) -> AsyncIterator[tuple[Sandbox, str, str]]:
        """A sandbox, the gateway's URL in it, and its session key."""
        self._number += 1
        identity = f"bench-{way}-{self._number}"
        key = await self.gateway.open(identity)
        spec = SandboxSpec(
            "/testbed",
            network=Network.HOST if way == "url" else Network.NONE,
            gateway=self.socket if way == "socket" else None,
        )
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(await self.provider.create(spec, identity))
            url = self.gateway.url if way == "url" else sandbox.gateway_url or ""
            if way in CARRIERS:
                relay = Relay(
                    sandbox,
                    way,
                    gateway_url=self.gateway.url,
                    session_key=key,
                    near=True,
                )
                url = (await stack.enter_async_context(relay)).url
            yield sandbox, url, key

    async def calls(self, way: str, count: int) -> list[float]:
        """Milliseconds of each call, as the agent sees them."""
        async with self.reached(way) as (sandbox, url, key):
            words = [url.rsplit(":", 1)[1], key, str(count), str(PAD)]
            result = await sandbox.exec(["python3", "-c", CLIENT, *words], check=True, timeout=300)
            taken: list[float] = json.loads(result.stdout)
            return taken

    async def idle(self, way: str, sandboxes: int, seconds: float) -> float:
        """CPU seconds of this process for each sandbox and minute in which no agent calls."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(sandboxes):
                await stack.enter_async_context(self.reached(way))
            await asyncio.sleep(2)  # pauses have grown to their longest
            before, began = time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            spent, minutes = time.process_time() - before, (time.monotonic() - began) / 60
            return spent / sandboxes / minutes


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-sandboxes", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        rows = await _measure(Path(folder), options)
    if options.json:
        print(json.dumps(rows))
        return
    print("| way | p50, ms | p99, ms | added p50 | added p99 | CPU ms per idle sandbox-minute |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['way']} | {row['p50']:.1f} | {row['p99']:.1f} | {row['added_p50']:.1f} "
            f"| {row['added_p99']:.1f} | {row['idle_ms']:.0f} |"
        )


async def _measure(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    scripts = {"default": {"turns": [{"content": "Hello."}]}}
    async with (
        ScriptedEngine(scripts) as engine,
        LocalGateway(home / "home", engine_url=engine.url, engine_kind="vllm") as gateway,
    ):
        bench = Bench(home, gateway)
        async with await asyncio.start_unix_server(_to(gateway.url), bench.socket):
            bench.socket.chmod(0o666)
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            await bench.calls("url", 3)
            for _ in range(options.rounds):
                for way in WAYS:
                    taken[way] += (await bench.calls(way, options.calls))[1:]
            idle = {
                way: await bench.idle(way, options.idle_sandboxes, options.idle_s) for way in WAYS
            }
    base = _quantiles(taken["url"])
    rows = []
    for way in WAYS:
        p50, p99 = _quantiles(taken[way])
        added = {"added_p50": p50 - base[0], "added_p99": p99 - base[1]}
        rows.append({"way": way, "p50": p50, "p99": p99, **added, "idle_ms": idle[way] * 1e3})
    return rows


def _quantiles(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


def _to(url: str) -> Any:
    """The gateway's port as a unix socket: one more hop, of this process, than the real one has."""
    port = int(url.rsplit(":", 1)[1])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    return carry


if __name__ == "__main__":
    asyncio.run(main())
