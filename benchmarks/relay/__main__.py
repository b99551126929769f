"""Added latency per model call and idle cost of each way from a sandbox to the gateway.

    python -m benchmarks.relay [--providers NAMES] [--calls N] [--idle-sandboxes N] [--idle-s S] [--json]

All ways take turns in one run, with one gateway and an engine that answers at once. Calls have 60 kB
(a history of about 15k tokens). Sandboxes are those of bubblewrap and of the E2B and Daytona doubles,
each a process of its own. `url` calls the gateway's own port from a sandbox that shares the host's
network; the other ways of the same provider are compared with it. CPU at rest is that of this process,
the host's side. Gateway and engine run in it too, and `url` measures them.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import doubles
from benchmarks.scratch import scratch_folder
from perdure import registry
from perdure.sandboxes.base import Network, Sandbox, SandboxProvider, SandboxSpec
from perdure.sandboxes.relay.relay import Relay
from perdure.settings.tree import Settings
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine

PROVIDERS = ("bubblewrap", *doubles.SERVICES)
PAD = 60_000
SETTLE_S = 3.0
"""Seconds until the polling pauses of an idle relay have reached their maximum."""

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


class Idle(NamedTuple):
    """The cost of one sandbox without calls."""

    cpu_ms_a_minute: float
    """CPU of this process."""
    calls_a_second: float | None
    """Calls to the provider; None if it is this host."""


class Bench:
    """One provider, with the gateway that all share; every measurement creates its own sandboxes."""

    def __init__(
        self,
        provider: SandboxProvider,
        gateway: LocalGateway,
        socket: Path,
        services: Sequence[doubles.Service],
    ) -> None:
        """`services`: for a double, the isolated one and the one that shares the host's network."""
        self.provider, self.gateway, self.socket = provider, gateway, socket
        self._services = services
        self._numbers = itertools.count()

    @property
    def ways(self) -> Sequence[str]:
        socket = ("socket",) if self.provider.sees_host else ()
        return ("url", *socket, "stdio")

    @contextlib.contextmanager
    def _service(self, way: str) -> Iterator[doubles.Service | None]:
        """Set the environment in which the provider finds its service."""
        if not self._services:
            yield None
            return
        service = self._services[way == "url"]
        with service.environment():
            yield service

    @asynccontextmanager
    async def _reached(self, way: str) -> AsyncIterator[tuple[Sandbox, str, str]]:
        """A sandbox, the gateway's URL in it, and its session key."""
        identity = f"bench-{way}-{next(self._numbers)}"
        key = await self.gateway.open(f"{self.provider.name}-{identity}")
        spec = SandboxSpec(
            "/testbed",
            network=Network.HOST if way == "url" else Network.NONE,
            gateway=self.socket if way == "socket" else None,
        )
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(await self.provider.create(spec, identity))
            url = self.gateway.url if way == "url" else sandbox.gateway_url or ""
            if way == "stdio":
                relay = Relay(
                    sandbox,
                    gateway_url=self.gateway.url,
                    session_key=key,
                    reads_are_cheap=self.provider.sees_host,
                )
                url = (await stack.enter_async_context(relay)).url
            yield sandbox, url, key

    async def calls(self, way: str, count: int) -> list[float]:
        """Milliseconds of each call, as the agent sees them."""
        with self._service(way):
            async with self._reached(way) as (sandbox, url, key):
                words = [url.rsplit(":", 1)[1], key, str(count), str(PAD)]
                argv = ["python3", "-c", CLIENT, *words]
                result = await sandbox.exec(argv, check=True, timeout=300)
        taken: list[float] = json.loads(result.stdout)
        return taken

    async def idle(self, way: str, sandboxes: int, seconds: float) -> Idle:
        with self._service(way) as service:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(sandboxes):
                    await stack.enter_async_context(self._reached(way))
                await asyncio.sleep(SETTLE_S)
                if service is not None:
                    await asyncio.to_thread(service.forget_calls)
                before, began = time.process_time(), time.monotonic()
                await asyncio.sleep(seconds)
                spent, lasted = time.process_time() - before, time.monotonic() - began
                calls = None if service is None else await asyncio.to_thread(service.calls)
        rate = None if calls is None else calls / sandboxes / lasted
        return Idle(spent / sandboxes / lasted * 60e3, rate)


async def main() -> None:
    options = _options()
    with scratch_folder("pd-", keep=False) as folder:
        rows = await _measure(folder, options)
    if options.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows}))
    else:
        _print(rows)


async def _measure(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    scripts = {"default": {"turns": [{"content": "Hello."}]}}
    socket = home / "gw.sock"
    async with (
        ScriptedEngine(scripts) as engine,
        LocalGateway(home / "home", engine={"url": engine.url, "kind": "vllm"}) as gateway,
        await asyncio.start_unix_server(_to(gateway.url), socket),
        contextlib.AsyncExitStack() as stack,
    ):
        socket.chmod(0o666)
        benches = [
            Bench(_provider(name, home), gateway, socket, await _services(name, home, stack))
            for name in options.providers
        ]
        taken: dict[tuple[Bench, str], list[float]] = {}
        for bench in benches:
            await bench.calls("url", 3)
        for _ in range(options.rounds):
            for bench, way in _all(benches):
                taken.setdefault((bench, way), []).extend(
                    (await bench.calls(way, options.calls))[1:]
                )
        idle = {
            (bench, way): await bench.idle(way, options.idle_sandboxes, options.idle_s)
            for bench, way in _all(benches)
        }
    return [_row(bench, way, taken, idle[bench, way]) for bench, way in _all(benches)]


def _all(benches: Sequence[Bench]) -> list[tuple[Bench, str]]:
    return [(bench, way) for bench in benches for way in bench.ways]


def _provider(name: str, home: Path) -> SandboxProvider:
    provider: SandboxProvider = registry.load("sandbox", registry.SANDBOXES, name)(
        Settings(home=home / "boxes")
    )
    return provider


async def _services(
    name: str, home: Path, stack: contextlib.AsyncExitStack
) -> Sequence[doubles.Service]:
    if name not in doubles.SERVICES:
        return ()
    return [
        await stack.enter_async_context(
            doubles.serving(name, home / f"{name}-{int(networked)}", networked=networked)
        )
        for networked in (False, True)
    ]


def _row(
    bench: Bench, way: str, taken: Mapping[tuple[Bench, str], list[float]], idle: Idle
) -> dict[str, Any]:
    base, (p50, p99) = _quantiles(taken[bench, "url"]), _quantiles(taken[bench, way])
    added = {"added_p50": p50 - base[0], "added_p99": p99 - base[1]}
    return {
        "provider": bench.provider.name,
        "way": way,
        "p50": p50,
        "p99": p99,
        **added,
        **idle._asdict(),
    }


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        "| provider | way | p50, ms | p99, ms | added p50 | added p99 "
        "| calls/s per idle sandbox | CPU ms per idle sandbox-minute |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        rate = row["calls_a_second"]
        print(
            f"| {row['provider']} | {row['way']} | {row['p50']:.1f} | {row['p99']:.1f} "
            f"| {row['added_p50']:.1f} | {row['added_p99']:.1f} "
            f"| {'' if rate is None else f'{rate:.2f}'} | {row['cpu_ms_a_minute']:.0f} |"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay")
    parser.add_argument(
        "--providers",
        type=lambda text: text.split(","),
        default=list(PROVIDERS),
        help=f"of {','.join(PROVIDERS)}",
    )
    parser.add_argument("--calls", type=int, default=30, help="calls of each way per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-sandboxes", type=int, default=10)
    parser.add_argument("--idle-s", type=float, default=8.0)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


def _quantiles(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


def _to(url: str) -> Any:
    """The gateway's port as a unix socket; this adds one hop in this process to the real path."""
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
