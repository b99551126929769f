"""`python -m benchmarks.gateway_load`: one gateway process between many agents and an engine.

The engine is the scripted one with a second's latency, in a process of its own; the agents are
plain HTTP clients here. In each round every session makes one more call of a long history through
the gateway, and the same number of calls with as many tokens goes to the engine directly; calls
start evenly spread over the round, 16 a second. Reported: the latency that the gateway adds, its
CPU per turn, and its memory once many idle sessions have come on top.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import own_seconds
from perdure.gateway.base import SessionSpec
from perdure.gateway.control import GatewayControl
from perdure.gateway.tokenizers import load_tokenizer

SECRET = b"a benchmark's secret"
LATENCY_S = 1.0
CALLS_PER_S = 16.0
SCRIPT = {
    "default": {
        "turns": [
            {
                "content": "I read the file.",
                "tool_calls": [
                    {"name": "bash", "arguments": {"command": "sed -n 1,200p src/module.py"}}
                ],
            }
        ]
    }
}
RESULT = "line of a file that the agent reads\n" * 20


@dataclass
class Session:
    """An agent's conversation so far."""

    name: str
    key: str
    messages: list[dict[str, Any]]

    def body(self) -> bytes:
        return json.dumps({"model": "policy", "messages": self.messages}).encode()

    def extend(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call, "content": RESULT}
        self.messages += [message, result]


@dataclass
class Level:
    """Latencies in seconds of each round's calls, straight to the engine and through the gateway."""

    sessions: int
    direct: list[list[float]] = field(default_factory=list)
    through: list[list[float]] = field(default_factory=list)
    cpu_s_per_turn: list[float] = field(default_factory=list)

    def added(self, percent: int) -> list[float]:
        """Seconds per round that a percentile grew by."""
        pairs = zip(self.direct, self.through, strict=True)
        return [_percentile(t, percent) - _percentile(d, percent) for d, t in pairs]

    def line(self) -> dict[str, float]:
        return {
            "sessions": self.sessions,
            "direct_p50_ms": 1000 * statistics.median(_percentile(d, 50) for d in self.direct),
            "direct_p99_ms": 1000 * statistics.median(_percentile(d, 99) for d in self.direct),
            "added_p50_ms": 1000 * statistics.median(self.added(50)),
            "added_p99_ms": 1000 * statistics.median(self.added(99)),
            "ratio_p50": statistics.median(
                _percentile(t, 50) / _percentile(d, 50)
                for d, t in zip(self.direct, self.through, strict=True)
            ),
            "cpu_ms_per_turn": 1000 * statistics.median(self.cpu_s_per_turn),
            "turns_per_s_per_core": 1 / statistics.median(self.cpu_s_per_turn),
        }


@dataclass
class Load:
    """The processes under load, and what is asked of them."""

    folder: Path
    history: str
    engine_url: str
    gateway_url: str
    gateway_pid: int
    client: httpx.AsyncClient
    control: GatewayControl

    async def session(self, name: str, text: str) -> Session:
        """Open a session and make its first call, whose prompt is rendered in full."""
        await self.control.open(SessionSpec(session_id=name, turns_key=f"turns/{name}.parquet"))
        content = f"Task {name}.\n{text}"
        session = Session(name, self.control.key(name), [{"role": "user", "content": content}])
        await self.call(session)
        return session

    async def call(self, session: Session) -> float:
        """One more turn through the gateway; its seconds."""
        headers = {"authorization": f"Bearer {session.key}", "content-type": "application/json"}
        body, url = session.body(), f"{self.gateway_url}/v1/chat/completions"
        since = time.perf_counter()
        answer = await self.client.post(url, content=body, headers=headers)
        seconds = time.perf_counter() - since
        session.extend(answer.raise_for_status().json())
        return seconds

    async def call_engine(self, body: bytes) -> float:
        headers = {"content-type": "application/json"}
        since = time.perf_counter()
        url = f"{self.engine_url}/inference/v1/generate"
        answer = await self.client.post(url, content=body, headers=headers)
        seconds = time.perf_counter() - since
        answer.raise_for_status()
        return seconds


async def _spread(calls: list[Callable[[], Awaitable[float]]]) -> list[float]:
    """Start the calls evenly, whatever the earlier ones do; their seconds."""

    async def one(number: int, call: Callable[[], Awaitable[float]]) -> float:
        await asyncio.sleep(number / CALLS_PER_S)
        return await call()

    return await asyncio.gather(*(one(number, call) for number, call in enumerate(calls)))


async def _level(load: Load, sessions: int, rounds: int) -> Level:
    level = Level(sessions)
    crowd = await _opened(load, f"busy-{sessions}", sessions, load.history)
    ids = load_tokenizer("qwen3").encode_plain(load.history)
    body = json.dumps({"token_ids": ids, "sampling_params": {"max_tokens": 512}}).encode()
    for number in range(rounds):
        level.direct.append(await _spread([lambda: load.call_engine(body)] * sessions))
        before = own_seconds(load.gateway_pid)
        level.through.append(await _spread([lambda s=s: load.call(s) for s in crowd]))  # type: ignore[misc]
        level.cpu_s_per_turn.append((own_seconds(load.gateway_pid) - before) / sessions)
        print(f"{sessions} sessions, round {number + 1} of {rounds}", file=sys.stderr)
    return level


async def _opened(load: Load, name: str, count: int, text: str) -> list[Session]:
    room = asyncio.Semaphore(16)

    async def one(number: int) -> Session:
        async with room:
            return await load.session(f"{name}-{number}", text)

    return await asyncio.gather(*(one(number) for number in range(count)))


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _text(tokens: int) -> str:
    """About so many tokens of text that looks like tool output."""
    tokenizer = load_tokenizer("qwen3")
    line = "    result = compute_value(index, {n})  # step {n} of the loop\n"
    sample = "".join(line.format(n=n) for n in range(1000))
    per_line = len(tokenizer.encode_plain(sample)) / 1000
    return "".join(line.format(n=n % 1000) for n in range(int(tokens / per_line)))


def _memory(pid: int) -> dict[str, int]:
    """Resident MB now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
    return {name: int(fields[name].split()[0]) >> 10 for name in ("VmRSS", "VmHWM")}


@contextlib.contextmanager
def _process(arguments: list[str], environment: dict[str, str], log: Path) -> Iterator[Any]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=file,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextlib.asynccontextmanager
async def _started(folder: Path, history: str) -> AsyncIterator[Load]:
    scripts = folder / "scripts.json"
    scripts.write_text(json.dumps(SCRIPT))
    engine = ["perdure.testing.scripted_engine", "--port", "0", "--scripts", str(scripts)]
    with _process([*engine, "--latency", str(LATENCY_S)], {}, folder / "engine.log") as first:
        engine_url = first.stdout.readline().decode().strip()
        environment = {
            "PERDURE_HOME": str(folder / "home"),
            "PERDURE_GATEWAY_PORT": "0",
            "PERDURE_SECRET": SECRET.decode(),
            "PERDURE_ENGINE_URL": engine_url,
            "PERDURE_ENGINE_KIND": "vllm",
        }
        log = folder / "gateway.log"
        with _process(["perdure.gateway"], environment, log) as second:
            url = await _url(log, second)
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as client,
                GatewayControl(url, SECRET, timeout_s=300) as control,
            ):
                yield Load(folder, history, engine_url, url, second.pid, client, control)


async def _url(log: Path, process: "subprocess.Popen[bytes]") -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "gateway listens" in line:
                return f"http://127.0.0.1:{json.loads(line)['port']}"
        await asyncio.sleep(0.1)
    raise SystemExit(log.read_text()[-2000:])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="perdure-gateway-load-") as name:
        async with _started(Path(name), _text(options.tokens)) as load:
            levels = [await _level(load, count, options.rounds) for count in options.sessions]
            await _opened(load, "idle", options.idle, _text(options.idle_tokens))
            return {
                "history_tokens": options.tokens,
                "levels": [level.line() for level in levels],
                "idle_sessions": options.idle,
                "idle_tokens": options.idle_tokens,
                "busy_sessions": sum(options.sessions),
                "memory_mb": _memory(load.gateway_pid),
                "load_average": os.getloadavg()[0],
            }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_load")
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=30_000, help="history of a busy session")
    parser.add_argument("--idle", type=int, default=1000, help="sessions that come on top")
    parser.add_argument("--idle-tokens", type=int, default=30_000, help="history of each of them")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
