"""`python -m benchmarks.gateway_load`: one gateway process between many agents and their engines.

The engines are scripted, with one second of latency, all in one process, and so many that no call waits
for one. The agents are plain HTTP clients in this process. In each round every session makes one more
call with a long history through the gateway. For every second call, one with as many tokens goes to an
engine directly. Calls start evenly spread over the round, 16 a second (`--rate`). The report has the
latency that the gateway adds, its CPU per turn above its CPU at rest, in milliseconds and relative to
the yardstick, and its memory with many additional idle sessions.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu_measurement import own_seconds
from benchmarks.gateway_load import load_engines
from benchmarks.gateway_load.load_figures import Level, memory_mb, print_table
from benchmarks.host_speed import HostSpeedProbe, beside
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.home_folder import Secrets

SECRET = b"a benchmark's secret"
LATENCY_S = 1.0
CALLS_PER_S = 16.0
OPENED_AT_ONCE = 16
Counts = Callable[[], dict[str, Any]]
SETTLED_S = 5.0
"""The journal is at rest after this many seconds without a request."""
S3_LATENCY_S = 0.03
"""Latency of a request to the in-memory store, in seconds."""
CALL_S = 60.0
"""The benchmark stops after this many seconds without an answer: its figures would be meaningless."""
DIRECT_EVERY = 2
"""For this many calls through the gateway, one goes to an engine directly."""
REST_S = 5.0
PATIENCE = 4
"""The allowed duration, as a multiple of the duration on an idle host."""
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


class Stuck(Exception):
    """The benchmark is stuck; the message has its stage and the gateway's last log lines."""


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
class Load:
    """The processes under load, and the calls to them."""

    history: str
    engine_urls: list[str]
    gateway_url: str
    gateway_pid: int
    gateway_log: Path
    client: httpx.AsyncClient
    control: GatewayControl
    calls_per_s: float
    yardstick: HostSpeedProbe
    stage: str = ""

    def begin(self, stage: str) -> None:
        self.stage = stage
        print(stage, file=sys.stderr, flush=True)

    def stuck(self, problem: str) -> Stuck:
        said = self.gateway_log.read_text()[-2000:]
        return Stuck(f"{problem} ({self.stage}); the gateway's last log lines:\n{said}")

    async def session(self, name: str, text: str) -> Session:
        """Open a session and make its first call, whose prompt is rendered in full."""
        await self.control.open(SessionSpec(session_id=name, turns_key=f"turns/{name}.parquet"))
        content = f"Task {name}.\n{text}"
        session = Session(name, self.control.key(name), [{"role": "user", "content": content}])
        await self.call(session)
        return session

    async def call(self, session: Session) -> float:
        """Make one more turn through the gateway; return its seconds."""
        headers = {"authorization": f"Bearer {session.key}", "content-type": "application/json"}
        body, url = session.body(), f"{self.gateway_url}/v1/chat/completions"
        answer, seconds = await self._timed(url, body, headers)
        session.extend(answer.json())
        return seconds

    async def call_engine(self, url: str, body: bytes) -> float:
        headers = {"content-type": "application/json"}
        return (await self._timed(f"{url}/inference/v1/generate", body, headers))[1]

    async def _timed(
        self, url: str, body: bytes, headers: dict[str, str]
    ) -> tuple[httpx.Response, float]:
        since = time.perf_counter()
        try:
            answer = await self.client.post(url, content=body, headers=headers)
        except httpx.TimeoutException:
            raise self.stuck(f"no answer from {url} for {CALL_S:g} s") from None
        seconds = time.perf_counter() - since
        return answer.raise_for_status(), seconds


Call = Callable[[], Awaitable[float]]


async def _spread(calls: Sequence[Call], calls_per_s: float) -> list[float]:
    """Start the calls at an even pace, without waiting for earlier ones; return their seconds."""

    async def one(number: int, call: Call) -> float:
        await asyncio.sleep(number / calls_per_s)
        return await call()

    return await asyncio.gather(*(one(number, call) for number, call in enumerate(calls)))


async def _level(load: Load, sessions: int, rounds: int) -> Level:
    crowd = await _opened(load, f"busy-{sessions}", sessions, load.history)
    ids = load_tokenizer("qwen3").encode_plain(load.history)
    body = json.dumps({"token_ids": ids, "sampling_params": {"max_tokens": 512}}).encode()
    urls = itertools.islice(itertools.cycle(load.engine_urls), sessions // DIRECT_EVERY)
    straight: list[Call] = [functools.partial(load.call_engine, url, body) for url in urls]
    through: list[Call] = [functools.partial(load.call, session) for session in crowd]
    load.begin(f"{sessions} sessions at rest")
    before, since = own_seconds(load.gateway_pid), time.perf_counter()
    await asyncio.sleep(REST_S)
    rest_cpu = (own_seconds(load.gateway_pid) - before) / (time.perf_counter() - since)
    level = Level(sessions, rest_cpu)
    for number in range(rounds + 1):
        load.begin(f"{sessions} sessions, round {number} of {rounds}")
        before, since = own_seconds(load.gateway_pid), time.perf_counter()
        mark = load.yardstick.mark()
        direct, seconds = await asyncio.gather(
            _spread(straight, load.calls_per_s / DIRECT_EVERY), _spread(through, load.calls_per_s)
        )
        cpu, elapsed = own_seconds(load.gateway_pid) - before, time.perf_counter() - since
        if number == 0:
            continue  # this round opened the connections
        level.direct.append(direct)
        level.through.append(seconds)
        level.cpu_s_per_turn.append((cpu - elapsed * rest_cpu) / sessions)
        level.yardstick_ms.append(load.yardstick.since(mark))
    return level


async def _opened(load: Load, name: str, count: int, text: str) -> list[Session]:
    load.begin(f"opening {count} sessions")
    room = asyncio.Semaphore(OPENED_AT_ONCE)

    async def one(number: int) -> Session:
        async with room:
            return await load.session(f"{name}-{number}", text)

    return await asyncio.gather(*(one(number) for number in range(count)))


def _text(tokens: int) -> str:
    """About `tokens` tokens of text that looks like tool output."""
    tokenizer = load_tokenizer("qwen3")
    line = "    result = compute_value(index, {n})  # step {n} of the loop\n"
    sample = "".join(line.format(n=n) for n in range(1000))
    per_line = len(tokenizer.encode_plain(sample)) / 1000
    return "".join(line.format(n=n % 1000) for n in range(int(tokens / per_line)))


@contextlib.contextmanager
def _process(arguments: list[str], environment: dict[str, str], log: Path) -> Iterator[Any]:
    given = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**given, **environment},
            stdout=subprocess.PIPE,
            stderr=file,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextlib.asynccontextmanager
async def _started(
    folder: Path, options: argparse.Namespace, sessions: int, settings: dict[str, str]
) -> AsyncIterator[Load]:
    """`settings`: further variables of the gateway's environment."""
    history = _text(options.tokens)
    scripts = folder / "scripts.json"
    scripts.write_text(json.dumps(SCRIPT))
    command = [
        "benchmarks.gateway_load.load_engines",
        "--count",
        str(load_engines.needed(sessions)),
    ]
    command += ["--scripts", str(scripts), "--latency", str(LATENCY_S)]
    with _process(command, {}, folder / "engines.log") as first:
        engine_urls = first.stdout.readline().decode().strip()
        environment = {
            "PERDURE_HOME": str(folder / "home"),
            "PERDURE_GATEWAY__PORT": "0",
            "PERDURE_SECRET": SECRET.decode(),
            "PERDURE_ENGINE__URL": engine_urls,
            "PERDURE_ENGINE__KIND": "vllm",
            **settings,
        }
        log = folder / "gateway.log"
        with _process(["perdure.gateway"], environment, log) as second:
            url = await _url(log, second)
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(timeout=CALL_S, limits=limits, trust_env=False) as client,
                GatewayControl(url, Secrets.of(SECRET), timeout_s=CALL_S) as control,
            ):
                urls = engine_urls.split(",")
                with beside(folder / "yardstick") as yardstick:
                    yield Load(
                        history,
                        urls,
                        url,
                        second.pid,
                        log,
                        client,
                        control,
                        options.rate,
                        yardstick,
                    )


async def _url(log: Path, process: "subprocess.Popen[bytes]") -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "gateway listens" in line:
                return f"http://127.0.0.1:{json.loads(line)['port']}"
        await asyncio.sleep(0.1)
    raise SystemExit(log.read_text()[-2000:])


def _expected_s(options: argparse.Namespace) -> float:
    """Expected seconds, from the engines' latency; an idle host adds little."""
    opened: int = sum(options.sessions) + options.idle
    rounds = sum(count / options.rate + LATENCY_S for count in options.sessions)
    rest = REST_S * len(options.sessions)
    expected: float = opened / OPENED_AT_ONCE * LATENCY_S + (options.rounds + 1) * rounds + rest
    return expected


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises: Stuck."""
    expected = _expected_s(options)
    print(f"this takes {expected / 60:.0f} minutes or more", file=sys.stderr, flush=True)
    sessions = sum(options.sessions) + options.idle
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-gateway-load-"))
        )
        settings, counts = stack.enter_context(_s3(folder)) if options.s3 else ({}, dict)
        load = await stack.enter_async_context(_started(folder, options, sessions, settings))
        try:
            async with asyncio.timeout(60 + PATIENCE * expected):
                found = await _measured(load, options)
        except TimeoutError:
            raise load.stuck(f"it took {PATIENCE} times as long as it should") from None
        if options.s3:
            found["s3"] = await _requests(load, options, counts)
        return found


@contextlib.contextmanager
def _s3(folder: Path) -> Iterator[tuple[dict[str, str], Counts]]:
    """The gateway's settings for an in-memory store, and a function that returns its request counts."""
    command = ["benchmarks.s3_server", "--latency", str(S3_LATENCY_S)]
    with _process(command, {}, folder / "s3.log") as process:
        url = json.loads(process.stdout.readline())["url"]
        settings = {
            "PERDURE_STORE": "s3://bench/store",
            "PERDURE_S3_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield settings, lambda: httpx.get(f"{url}/-/counts", trust_env=False).json()


async def _requests(load: Load, options: argparse.Namespace, counts: Counts) -> dict[str, Any]:
    """The store's requests and bytes with all sessions open, closed and forgotten."""
    found = {"open": await _settled(counts)}
    names = [f"busy-{count}-{n}" for count in options.sessions for n in range(count)]
    for state, act in {"closed": load.control.close, "forgotten": load.control.forget}.items():
        await asyncio.gather(*map(act, names))
        found[state] = await _settled(counts)
    return found


async def _settled(counts: Counts) -> dict[str, Any]:
    """The store's counts once uploads and deletions that follow the calls have ended."""
    seen: dict[str, Any] = {}
    found = await asyncio.to_thread(counts)
    while seen != (journal := _without_other(found)):
        seen = journal
        await asyncio.sleep(SETTLED_S)
        found = await asyncio.to_thread(counts)
    return found


def _without_other(counts: dict[str, Any]) -> dict[str, Any]:
    """Leaves out reads of engine leases, which never stop."""
    return {name: n for name, n in counts.items() if not name.endswith(" other")}


async def _measured(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    levels = [await _level(load, count, options.rounds) for count in options.sessions]
    if options.idle:
        await _opened(load, "idle", options.idle, _text(options.idle_tokens))
    return {
        "history_tokens": options.tokens,
        "engines": len(load.engine_urls),
        "turns": sum(options.sessions) * (options.rounds + 2) + options.idle,
        "levels": [level.line() for level in levels],
        "idle_sessions": options.idle,
        "idle_tokens": options.idle_tokens,
        "busy_sessions": sum(options.sessions),
        "memory_mb": memory_mb(load.gateway_pid),
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_load", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 256])
    parser.add_argument(
        "--rate", type=float, default=CALLS_PER_S, help="calls that start per second"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, default=30_000, help="tokens of history of a busy session"
    )
    parser.add_argument("--idle", type=int, default=1000, help="additional idle sessions")
    parser.add_argument(
        "--idle-tokens", type=int, default=30_000, help="tokens of history of an idle session"
    )
    parser.add_argument(
        "--s3", action="store_true", help="keep the store in an in-memory S3 server"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = asyncio.run(measure(options))
    except Stuck as stuck:
        sys.exit(str(stuck))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found)


if __name__ == "__main__":
    main()
