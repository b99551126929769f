"""The model that every side talks to: one scripted engine in a process of its own.

Its CPU is counted separately. Run as a program, it serves; `Endpoint` controls such a process.
"""

import argparse
import asyncio
import contextlib
import json
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

from benchmarks.measuring import Meter
from perdure.testing.scripted_engine import ScriptedEngine

CALLS = ("/v1/chat/completions", "/inference/v1/generate")


class Calls(NamedTuple):
    """Model calls since the last reset, and the seconds from the first to the end of the last."""

    total: int
    window_s: float
    most_in_flight: int


class TimedEngine(ScriptedEngine):
    """Also records when the first call came and when the last one was answered."""

    first = 0.0
    last = 0.0

    def app(self) -> Starlette:
        inner = super().app()

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] not in CALLS:
                await inner(scope, receive, send)
                return
            self.first = self.first or time.monotonic()
            await inner(scope, receive, send)
            self.last = time.monotonic()

        async def bought(_: Request) -> JSONResponse:
            stats = self.stats()
            total = stats.calls + stats.chat_calls
            window = self.last - self.first
            return JSONResponse(Calls(total, window, stats.most_in_flight)._asdict())

        return Starlette(routes=[Route("/bought", bought), Mount("/", timed)])

    def reset(self) -> None:
        super().reset()
        self.first = self.last = 0.0


class Endpoint:
    """A running endpoint. `turns`: the length of its script.

    Example:
        with Endpoint.start(folder, script) as endpoint:
            endpoint.reset(latency_s=0.5)
            ...
            endpoint.calls().total
    """

    def __init__(self, process: "subprocess.Popen[bytes]", meter: Meter, url: str) -> None:
        self._process = process
        self.meter = meter
        self.url = url

    @classmethod
    def start(cls, folder: Path, script: dict[str, Any]) -> "Endpoint":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "script.json").write_text(json.dumps(script))
        meter = Meter.open("endpoint", folder)
        argv = [sys.executable, "-m", "benchmarks.endpoint", str(folder / "script.json")]
        process = meter.popen(argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise RuntimeError("the endpoint did not start; its error is above")
        return cls(process, meter, url)

    def reset(self, **control: Any) -> None:
        """Reset the counts; `control`: fields of the engine's /control, such as latency_s or scripts."""
        self._ask("/reset", {})
        if control:
            self._ask("/control", control)

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

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self.meter.close()


async def _serve(script: Path) -> None:
    async with TimedEngine(json.loads(script.read_text())) as engine:
        print(engine.url, flush=True)
        await engine.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endpoint")
    parser.add_argument("script", type=Path)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args(arguments).script))


if __name__ == "__main__":
    main()
