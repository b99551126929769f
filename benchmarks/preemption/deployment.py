"""The processes of one side: two engines, and gateways before them; any may be killed."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

SECRET = b"the secret of a benchmark"
WORDS = "I read the file, and now I look at the next one to find where it is called from. "


class Sampled(NamedTuple):
    """One try of a completion, as its engine logged it. `first`: when its first token left."""

    request_id: str
    arrived: float
    first: float | None
    tokens: int


@dataclass
class Deployment:
    """Two engines and `gateways` gateways, in one folder."""

    folder: Path
    gateways: int
    tokens: int
    """Approximate length of a completion in tokens."""
    engine_urls: list[str] = field(default_factory=list)
    url: str = ""
    killed_at: float = 0.0
    _engines: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    _gateways: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    _listener: socket.socket | None = None

    async def __aenter__(self) -> "Deployment":
        scripts = self.folder / "scripts.json"
        content = WORDS * max(1, self.tokens // 20)
        scripts.write_text(json.dumps({"default": {"turns": [{"content": content}]}}))
        for number in range(2):
            self._engines.append(self._engine(number, scripts))
        for engine in self._engines:
            assert engine.stdout is not None
            line = await asyncio.to_thread(engine.stdout.readline)
            self.engine_urls.append(line.decode().strip())
        if self.gateways:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
            self._gateways = [self._gateway() for _ in range(self.gateways)]
            await self._answers()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (*self._gateways, *self._engines):
            process.kill()
            process.wait()
        if self._listener is not None:
            self._listener.close()

    def kill_engine(self) -> None:
        """The engine that has sampled more."""
        busier = max(range(2), key=lambda number: self._log(number).stat().st_size)
        self.killed_at = time.time()
        self._engines[busier].kill()

    def kill_gateway(self) -> None:
        """Kill it and start another one, as `perdure up` does."""
        self.killed_at = time.time()
        self._gateways[0].kill()
        self._gateways[0].wait()
        self._gateways[0] = self._gateway()

    def sampled(self) -> list[Sampled]:
        """Every try of every completion on both engines."""
        tries: dict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
        for number in range(2):
            for line in self._log(number).read_text().splitlines():
                name, at, tokens = line.split()
                tries[number, name].append((float(at), int(tokens)))
        return [
            Sampled(
                name,
                lines[0][0],
                lines[1][0] if len(lines) > 1 else None,
                sum(tokens for _, tokens in lines),
            )
            for (_, name), lines in tries.items()
        ]

    def _log(self, number: int) -> Path:
        return self.folder / f"engine-{number}.log"

    def _engine(self, number: int, scripts: Path) -> "subprocess.Popen[bytes]":
        self._log(number).touch()
        command = [sys.executable, "-m", "benchmarks.preemption.engine", "--scripts", str(scripts)]
        return subprocess.Popen([*command, "--log", str(self._log(number))], stdout=subprocess.PIPE)

    def _gateway(self) -> "subprocess.Popen[bytes]":
        assert self._listener is not None
        given = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
        with (self.folder / "gateway.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "perdure.gateway"),
                    *("--listeners", str(self._listener.fileno())),
                ],
                env={
                    **given,
                    "PERDURE_HOME": str(self.folder / "home"),
                    "PERDURE_SECRET": SECRET.decode(),
                    "PERDURE_ENGINE__URL": ",".join(self.engine_urls),
                    "PERDURE_ENGINE__KIND": "vllm",
                },
                pass_fds=(self._listener.fileno(),),
                stderr=log,
            )

    async def _answers(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            (await client.get("/healthz")).raise_for_status()
