"""One boot of one engine server on this node: started, proven by a token, watched, ended.

Knows nothing of Ray or of the pool; the manager runs it in an actor. It is over when its server is.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path

import httpx

from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.plan import EnginePlan, boot_name
from perdure.engines.proxy import Front
from perdure.engines.weights.publishing import Published, fetched
from perdure.engines.weights.update import Checkpoint, load
from perdure.errors import ControlPlaneError, PerdureError
from perdure.serving import commands, verdicts
from perdure.serving.supervisor import end_orphans
from perdure.settings.tree import Settings
from perdure.storage.base import open_store
from perdure.types import Frozen

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
GRACE_S = 10.0
PROBE_S = 60.0
PORTS = 5
"""Ports tried before a start is given up."""
KEPT_LOGS = 10


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    """It has sampled a token."""
    ENDED = "ended"


class ReplicaReport(Frozen):
    """What a replica is, as its actor tells."""

    generation: int
    phase: Phase
    url: str = ""
    pid: int = 0
    """Of its supervisor."""
    log: str = ""
    """Path of its log on its node."""
    verdict: str = ""
    """Why it ended."""
    final: bool = False
    """Starting it again would end the same way."""


class Replica:
    """Start with `start`, then ask `report`. One instance is one generation."""

    def __init__(self, plan: EnginePlan, name: str, generation: int, host: str) -> None:
        """`name`: of this boot alone; its log and its note are called so."""
        self._plan, self._generation, self._host = plan, generation, host
        self._folder = Path(plan.folder)
        self._log = self._folder / f"{name}.log"
        self._note = self._folder / f"{name}.note"
        self._child: subprocess.Popen[bytes] | None = None
        self._report = ReplicaReport(
            generation=generation, phase=Phase.STARTING, log=str(self._log)
        )
        self._server = ""
        """Where the server itself listens."""
        self._task: asyncio.Task[None] | None = None

    def report(self) -> ReplicaReport:
        return self._report

    def tail(self, size: int = verdicts.TAIL_BYTES) -> bytes:
        """The end of the log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - size))
                return file.read()
        except OSError:
            return b""

    async def start(self) -> None:
        """Returns at once; `report` tells how it goes."""
        self._task = asyncio.create_task(self._live())

    async def take(self, published: Published, settings: Settings) -> str:
        """Load the published version over loopback, and prove it; why it cannot, or nothing."""
        name = boot_name(self._plan, self._generation)
        try:
            async with (
                httpx.AsyncClient(trust_env=False) as client,
                fetched(published.source, settings, open_store(settings)) as transfer,
            ):
                wanted = Checkpoint(published.version, transfer, published.canaries)
                await load(self._control(client), name, wanted, "resubmit")
        except PerdureError as error:
            return f"version {published.version} is not served: {error}"
        return ""

    async def stop(self) -> None:
        """End the server and all its processes; returns when none is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_child()
        self._say(phase=Phase.ENDED, verdict=self._report.verdict or "stopped")

    async def _live(self) -> None:
        try:
            for attempt in range(PORTS):
                verdict = await self._boot()
                if verdict.text != verdicts.PORT_TAKEN or attempt == PORTS - 1:
                    break
        except Exception as error:  # an actor has nobody else to tell
            verdict = verdicts.Verdict(f"{type(error).__name__}: {error}")
        await self._end_child()
        self._say(phase=Phase.ENDED, verdict=verdict.text, final=verdict.final)

    async def _boot(self) -> verdicts.Verdict:
        """Serve until the server ends; why it did."""
        host = LOOPBACK if self._plan.guard else self._host
        port = _free_port(host)
        began = await asyncio.to_thread(self._prepare)
        self._spawn(host, port)
        self._server = f"http://{_in_url(host)}:{port}"
        async with self._door(port) as listening:
            proven = asyncio.create_task(self._prove(listening))
            try:
                return await self._watch(proven, began)
            finally:
                proven.cancel()
                await asyncio.gather(proven, return_exceptions=True)

    @asynccontextmanager
    async def _door(self, port: int) -> AsyncIterator[str]:
        """Where others reach the server that listens on `port`."""
        if self._plan.guard is None:
            yield f"http://{_in_url(self._host)}:{port}"
            return
        async with Front(self._plan.guard, self._host, port) as front:
            yield f"http://{_in_url(self._host)}:{front.port}"

    async def _watch(self, proven: "asyncio.Task[None]", began: int) -> verdicts.Verdict:
        child, started = self._child, time.monotonic()
        assert child is not None
        while (status := child.poll()) is None:
            late = time.monotonic() - started > self._plan.start_timeout_s
            if late and not proven.done():
                return verdicts.Verdict(f"no token after {self._plan.start_timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)
        said = self.tail(min(verdicts.TAIL_BYTES, self._log.stat().st_size - began))
        return verdicts.verdict(self._plan, status, said.decode("utf-8", "replace"))

    def _prepare(self) -> int:
        """The folder, free of old logs and of what a killed supervisor left. Where its log begins."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        end_orphans(self._folder)
        old = sorted(self._folder.glob("*.log"), key=_changed_at)
        for path in old[:-KEPT_LOGS]:
            path.unlink(missing_ok=True)
        return self._log.stat().st_size if self._log.exists() else 0

    def _spawn(self, host: str, port: int) -> None:
        command = commands.command_line(self._plan, self._generation, host, port)
        supervisor = [sys.executable, "-m", "perdure.serving.supervisor"]
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [*supervisor, str(self._note), str(GRACE_S), "--", *command],
                stdin=subprocess.PIPE,  # held by this process alone: it closes when this one ends
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **commands.environment(self._plan)},
            )
        self._say(pid=self._child.pid)

    async def _prove(self, listening: str) -> None:
        """Ready means that a token came, under this boot's own name. `listening`: for others."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                with contextlib.suppress(ControlPlaneError, httpx.HTTPError):
                    await self._round_trip(client)
                    self._say(phase=Phase.READY, url=listening)
                    return
                await asyncio.sleep(POLL_S)

    async def _round_trip(self, client: httpx.AsyncClient) -> None:
        name = boot_name(self._plan, self._generation)
        await self._control(client).round_trip(name, timeout_s=PROBE_S)

    def _control(self, client: httpx.AsyncClient) -> EngineControl:
        """Behind the front, which asks for keys that no node has."""
        controlled = SglangControl if self._plan.server == "sglang" else EngineControl
        return controlled(self._server, client)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        await asyncio.to_thread(child.wait)

    def _say(self, **changes: object) -> None:
        self._report = self._report.model_copy(update=changes)


def _changed_at(path: Path) -> float:
    """0 when another replica of this node has removed it meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
