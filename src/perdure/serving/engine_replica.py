"""Starts one engine server on this node, proves it by a sampled token, watches it and ends it.

It does not know Ray or the pool; the manager runs it in an actor. It ends with its server.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path

import httpx

from perdure.engines.auth_proxy import EngineProxy
from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.weights.weight_publishing import Published, fetched
from perdure.engines.weights.weight_update import Checkpoint, load
from perdure.errors import ControlPlaneError, PerdureError
from perdure.serving import engine_commands, engine_exit_causes
from perdure.serving.engine_supervisor import end_orphans
from perdure.serving.replica_plan import EnginePlan, fenced_name
from perdure.settings.process_environment import variables
from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store
from perdure.types import Frozen

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL of a server."""
PROBE_S = 60.0
"""Timeout for the token that proves a server, in seconds."""
PORTS = 5
"""Ports that a start tries if other processes take them first."""
KEPT_LOGS = 10


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    """It has sampled a token."""
    ENDED = "ended"


class ReplicaReport(Frozen):
    """A replica's state, as its actor reports it."""

    generation: int
    state: ReplicaState
    url: str = ""
    pid: int = 0
    """Pid of its supervisor."""
    log: str = ""
    """Path of its log on its node."""
    cause: str = ""
    """Why it ended."""
    final: bool = False
    """Whether another start would end the same way."""


class Replica:
    """Call `start`, then read `report`. One instance is one generation."""

    def __init__(self, plan: EnginePlan, name: str, generation: int, host: str) -> None:
        """`name`: unique to this start; its log and its note are named after it."""
        self._plan, self._generation, self._host = plan, generation, host
        self._folder = Path(plan.folder)
        self._log = self._folder / f"{name}.log"
        self._note = self._folder / f"{name}.note"
        self._child: subprocess.Popen[bytes] | None = None
        self._report = ReplicaReport(
            generation=generation, state=ReplicaState.STARTING, log=str(self._log)
        )
        self._server = ""
        """URL of the server itself, behind the proxy."""
        self._task: asyncio.Task[None] | None = None

    def report(self) -> ReplicaReport:
        return self._report

    def tail(self, size: int = engine_exit_causes.TAIL_BYTES) -> bytes:
        """The end of the log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - size))
                return file.read()
        except OSError:
            return b""

    async def start(self) -> None:
        """Start in the background; `report` shows the progress."""
        self._task = asyncio.create_task(self._live())

    async def take(self, published: Published, settings: Settings) -> str:
        """Load the published version over loopback and prove it; return why that failed, or an empty
        string."""
        name = fenced_name(self._plan, self._generation)
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
        """End the server and all its processes; return once they have ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_child()
        self._update(state=ReplicaState.ENDED, cause=self._report.cause or "stopped")

    async def _live(self) -> None:
        try:
            for attempt in range(PORTS):
                cause = await self._serve()
                if cause.text != engine_exit_causes.PORT_TAKEN or attempt == PORTS - 1:
                    break
        except Exception as error:  # only the report shows it
            cause = engine_exit_causes.ExitCause(f"{type(error).__name__}: {error}")
        await self._end_child()
        self._update(state=ReplicaState.ENDED, cause=cause.text, final=cause.final)

    async def _serve(self) -> engine_exit_causes.ExitCause:
        """Run the server until it ends; return the cause."""
        host = LOOPBACK if self._plan.proxy_keys else self._host
        port = _free_port(host)
        began = await asyncio.to_thread(self._prepare)
        child = self._spawn(host, port)
        self._server = f"http://{_in_url(host)}:{port}"
        async with self._reachable(port) as listening:
            proven = asyncio.create_task(self._prove(listening))
            try:
                return await self._watch(child, proven, began)
            finally:
                proven.cancel()
                await asyncio.gather(proven, return_exceptions=True)

    @asynccontextmanager
    async def _reachable(self, port: int) -> AsyncIterator[str]:
        """The URL at which other processes reach the server on `port`."""
        if self._plan.proxy_keys is None:
            yield f"http://{_in_url(self._host)}:{port}"
            return
        async with EngineProxy(self._plan.proxy_keys, self._host, port) as proxy:
            yield f"http://{_in_url(self._host)}:{proxy.port}"

    async def _watch(
        self, child: subprocess.Popen[bytes], proven: "asyncio.Task[None]", began: int
    ) -> engine_exit_causes.ExitCause:
        started = time.monotonic()
        while (status := child.poll()) is None:
            late = time.monotonic() - started > self._plan.start_timeout_s
            if late and not proven.done():
                return engine_exit_causes.ExitCause(
                    f"no token after {self._plan.start_timeout_s:.0f} s"
                )
            await asyncio.sleep(POLL_S)
        said = self.tail(min(engine_exit_causes.TAIL_BYTES, self._log.stat().st_size - began))
        return engine_exit_causes.exit_cause(self._plan, status, said.decode("utf-8", "replace"))

    def _prepare(self) -> int:
        """Delete old logs and end processes that a killed supervisor has left running. Returns the size
        of the log so far."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        end_orphans(self._folder)
        old = sorted(self._folder.glob("*.log"), key=_changed_at)
        for path in old[:-KEPT_LOGS]:
            path.unlink(missing_ok=True)
        return self._log.stat().st_size if self._log.exists() else 0

    def _spawn(self, host: str, port: int) -> subprocess.Popen[bytes]:
        command = engine_commands.command_line(self._plan, self._generation, host, port)
        supervisor = [sys.executable, "-m", "perdure.serving.engine_supervisor"]
        with self._log.open("ab") as log:
            child = self._child = subprocess.Popen(
                [*supervisor, str(self._note), str(GRACE_S), "--", *command],
                stdin=subprocess.PIPE,  # it closes when this process ends, its only writer
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**variables(), **engine_commands.environment(self._plan)},
            )
        self._update(pid=child.pid)
        return child

    async def _prove(self, listening: str) -> None:
        """Wait for a token under this start's own model name. `listening`: the URL to report then."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                with contextlib.suppress(ControlPlaneError, httpx.HTTPError):
                    await self._round_trip(client)
                    self._update(state=ReplicaState.READY, url=listening)
                    return
                await asyncio.sleep(POLL_S)

    async def _round_trip(self, client: httpx.AsyncClient) -> None:
        name = fenced_name(self._plan, self._generation)
        await self._control(client).round_trip(name, timeout_s=PROBE_S)

    def _control(self, client: httpx.AsyncClient) -> EngineControl:
        """A client that bypasses the proxy, because no node has the keys that the proxy requires."""
        controlled = SglangControl if self._plan.server == "sglang" else EngineControl
        return controlled(self._server, client)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        await asyncio.to_thread(child.wait)

    def _update(self, **changes: object) -> None:
        self._report = self._report.model_copy(update=changes)


def _changed_at(path: Path) -> float:
    """0 if another replica on this node has just deleted it."""
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
