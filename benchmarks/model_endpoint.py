"""The model that every side calls: one scripted engine in its own process.

Its CPU is counted separately. As a program, this module serves; `Endpoint` controls such a process.
"""

import argparse
import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from benchmarks.call_log import CallLog, EndpointCall
from benchmarks.cpu_measurement import Meter, kill_all
from perdure.engines.clients.vllm_control import PROBE_SESSION
from perdure.testing.scripted_engine import ScriptedEngine

CALLS = ("/v1/chat/completions", "/inference/v1/generate")
SCRIPT, LEDGER = "script.json", "ledger.tsv"


class Calls(NamedTuple):
    """Model calls since the last reset, and the seconds from the first to the end of the last."""

    total: int
    window_s: float
    most_in_flight: int


class TimedEngine(ScriptedEngine):
    """Also records each call in a ledger, and the times of the first call and the last answer."""

    first = 0.0
    last = 0.0
    ledger: CallLog

    def app(self) -> Starlette:
        inner = super().app()

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            session = _session(scope)
            if scope["path"] not in CALLS or session == PROBE_SESSION:
                await inner(scope, receive, send)
                return
            self.first = self.first or time.monotonic()
            name = self.ledger.begin(session)
            try:
                await inner(scope, receive, send)
            finally:
                self.ledger.end(name)
            self.last = time.monotonic()

        async def bought(_: Request) -> JSONResponse:
            stats = self.stats()
            total = stats.calls + stats.chat_calls
            window = self.last - self.first
            return JSONResponse(Calls(total, window, stats.most_in_flight)._asdict())

        return Starlette(routes=[Route("/bought", bought), Mount("/", timed)])

    def reset(self, **changes: Any) -> None:
        super().reset(**changes)
        self.first = self.last = 0.0


class Endpoint:
    """A running endpoint.

    Example:
        with Endpoint.start(folder, script) as endpoint:
            endpoint.reset(latency_s=0.5)
            ...
            endpoint.calls().total
    """

    def __init__(self, folder: Path, meter: Meter) -> None:
        self.meter = meter
        self._folder = folder
        self._ledger = CallLog(folder / LEDGER)
        self._control: dict[str, Any] = {}
        self._process, self.url = self._serve(port=0)

    @classmethod
    def start(cls, folder: Path, script: dict[str, Any]) -> "Endpoint":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT).write_text(json.dumps(script))
        return cls(folder, Meter.open("endpoint", folder))

    def kill(self) -> None:
        """Kill the endpoint with SIGKILL, with calls in flight."""
        kill_all(self.meter.pids(), signal.SIGKILL)
        self._process.wait()
        self._ledger.cut()

    def start_again(self) -> None:
        """Restart after `kill`, at the same address, with the same script and control."""
        self._process, self.url = self._serve(port=int(self.url.rpartition(":")[2]))
        if self._control:
            self._ask("/control", self._control)

    def reset(self, **control: Any) -> None:
        """Reset the counts; `control`: fields of the engine's /control, such as latency_s or scripts."""
        self._ask("/reset", control)
        self._ledger.clear()
        self._control |= control

    def bought(self) -> list[EndpointCall]:
        """Every call since the last reset, including calls whose caller or engine died."""
        return self._ledger.calls()

    def calls(self) -> Calls:
        return Calls(**self._ask("/bought"))

    def stats(self) -> dict[str, Any]:
        """The engine's own counts."""
        return dict(self._ask("/stats"))

    def sampled(self) -> list[dict[str, Any]]:
        """The newest completions, as the engine sampled them."""
        return list(self._ask("/calls"))

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def _serve(self, port: int) -> "tuple[subprocess.Popen[bytes], str]":
        argv = [sys.executable, "-m", "benchmarks.model_endpoint", str(self._folder), str(port)]
        process = self.meter.popen(argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise RuntimeError("the endpoint did not start; its error is above")
        return process, url

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._ledger.close()
        self.meter.close()


def _session(scope: Scope) -> str:
    headers: dict[bytes, bytes] = dict(scope.get("headers", ()))
    return headers.get(b"x-session-id", b"").decode("latin-1")


async def _serve(folder: Path, port: int) -> None:
    script = json.loads((folder / SCRIPT).read_text())
    timed = TimedEngine(script, port=port)
    timed.ledger = CallLog(folder / LEDGER)
    async with timed as engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()  # until it is killed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_endpoint")
    parser.add_argument("folder", type=Path, help="folder of its script and its ledger")
    parser.add_argument("port", type=int, help="0 = any free port")
    options = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each agent
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options.folder, options.port))


if __name__ == "__main__":
    main()
