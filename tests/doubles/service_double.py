"""What doubles of sandbox services share: real boxes, records that outlive the server, faults, clocks.

A double adds its service's routes and messages. All state is in one folder: after a kill, a server
on the same folder continues from it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import uuid4

from aiohttp import web

from perdure.errors import NotFound, PerdureError, SandboxLost
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Limits
from tests.doubles.fault_rules import CONTROL, Faults, Handler, met_rule

ACCEPTED_IN = 4
"""Turns of the event loop from a connection's arrival until its server knows it."""
LIMITS = Limits(memory_mb=4096, cpus=2, pids=1024, disk_mb=4096, output_mb=512)


class Refusal(Exception):
    """An answer with an error status."""

    def __init__(
        self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(str(body))
        self.response = web.json_response(body, status=status, headers=headers)


class Guests(BubblewrapProvider):
    """Bubblewrap boxes with a writable root folder, like that of a virtual machine."""

    def __init__(self, settings: Settings) -> None:
        """The root folder is the user's, so it is the worker's."""
        shared = settings.sandbox.model_copy(update={"user_ids": 0})
        super().__init__(settings.model_copy(update={"sandbox": shared}))

    def command(self, spec: SandboxSpec, box: SandboxFolder) -> list[str]:
        argv = super().command(spec, box)
        at = next(n for n in range(len(argv)) if argv[n : n + 2] == ["--remount-ro", "/"])
        return argv[:at] + argv[at + 2 :]

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        """Boots it again if it died before the service recorded it: no client has it yet."""
        try:
            return await super().create(spec, identity)
        except SandboxLost:
            await self.kill(identity)
            return await super().create(spec, identity)

    async def found(self, identity: str) -> NamespaceSandbox | None:
        """The box of this name, if it is alive."""
        try:
            box = await self.attach(identity)
        except (NotFound, SandboxLost):
            return None
        assert isinstance(box, NamespaceSandbox)
        return box


class Records:
    """One JSON file per record, replaced by rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, value: Any) -> None:
        draft = self.folder / f".{uuid4().hex}"
        draft.write_text(json.dumps(value))
        draft.replace(self.folder / f"{name}.json")

    def read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def all(self) -> list[Any]:
        names = sorted(path.stem for path in self.folder.glob("[!.]*.json"))
        return [found for name in names if (found := self.read(name)) is not None]


class Double:
    """One server. `settings` may be changed while it runs, by `/__control/settings`."""

    settings: dict[str, float | None]
    faults: Faults
    control = ""
    """URL of the control routes while it serves."""

    def __init__(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self.state = state
        self.guests = Guests(Settings(home=state / "guests"))
        self.sandboxes = Records(state / "sandboxes")
        self._created: deque[float] = deque()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The service's own."""
        raise NotImplementedError

    async def expire(self) -> None:
        """End the sandboxes that the service would have ended by now."""
        raise NotImplementedError

    def too_many_creates(self) -> bool:
        """Whether there were more creates in this second than `creates_per_s`; if not, count this one."""
        now, most = time.monotonic(), self.settings["creates_per_s"]
        while self._created and self._created[0] < now - 1:
            self._created.popleft()
        if most is not None and len(self._created) >= most:
            return True
        self._created.append(now)
        return False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=1 << 32)
        app.add_routes(self.faults.routes())
        app.add_routes(
            [
                web.get(f"{CONTROL}sandboxes", self._truth),
                web.post(f"{CONTROL}settings", self._set),
                *self.routes(),
            ]
        )
        app.on_response_prepare.append(self._own_time)
        app.cleanup_ctx.append(self._expiring)
        return app

    @property
    def _middleware(self) -> Any:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            async def answered(request: web.Request) -> web.StreamResponse:
                try:
                    return await handler(request)
                except Refusal as refusal:
                    return refusal.response

            return await self.faults.around(request, answered)

        return middleware

    async def _own_time(self, request: web.Request, response: web.StreamResponse) -> None:
        """A service with a wrong clock shows it in each answer."""
        if offset := self.settings["clock_offset_s"]:
            response.headers["Date"] = format_datetime(
                datetime.now(UTC) + timedelta(seconds=offset), usegmt=True
            )

    async def _expiring(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._expire_for_ever())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(PerdureError):
            await self.expire()  # what is over already cannot be used any more

    async def _expire_for_ever(self) -> None:
        while True:
            with contextlib.suppress(PerdureError):
                await self.expire()
            await asyncio.sleep(0.5)

    async def _truth(self, request: web.Request) -> web.Response:
        """What exists, even if `list` does not show it."""
        return web.json_response(self.sandboxes.all())

    async def _set(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        if unknown := sorted(wanted.keys() - self.settings.keys()):
            known = ", ".join(self.settings)
            raise web.HTTPBadRequest(text=f"no setting {', '.join(unknown)}: there are {known}\n")
        self.settings.update(wanted)
        return web.json_response(self.settings)

    async def store(self, box: Sandbox, path: str, source: Any) -> None:
        """An upload, through a file of the host so that it is never whole in memory."""
        draft = self.sandboxes.folder / f".upload-{uuid4().hex}"
        read = source.read_chunk if hasattr(source, "read_chunk") else source.read
        try:
            with draft.open("wb") as file:
                while piece := await read(1 << 16):
                    file.write(piece)
            rule = met_rule.get()
            if rule is not None and rule.upload == "short":
                os.truncate(draft, draft.stat().st_size // 2)
            if rule is None or rule.upload != "missing":
                await box.put(path, draft)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls, state: Path, port: int = 0) -> AsyncIterator[tuple[Self, str]]:
        """The server in this event loop: yields (server, url). Its sandboxes outlive it."""
        server = cls(state)
        runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        server.control = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield server, server.control
        finally:
            await site.stop()
            for _ in range(ACCEPTED_IN):
                await asyncio.sleep(0)  # `cleanup` forgets whoever comes while it waits
            assert runner.server is not None
            connections = [one.transport for one in runner.server.connections]
            await runner.cleanup()
            for connection in connections:
                if connection is not None:
                    connection.abort()  # `cleanup` leaves one open whose client still reads


def run(double: type[Double], said: Callable[[str], str], port: int, about: str | None) -> None:
    """The command line of a double. `said`: the first line that it prints for a URL."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder of all that it remembers")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--seed", type=int, help="of the rules' probabilities")
    parser.add_argument("--rules", type=Path, help="JSON list of faults to begin with")
    arguments = parser.parse_args()
    random.seed(arguments.seed)

    async def serve() -> None:
        async with double.serving(arguments.state, arguments.port) as (server, url):
            if arguments.rules is not None:
                server.faults.add(json.loads(arguments.rules.read_text()))
            elsewhere = "" if server.control == url else f" control={server.control}{CONTROL}"
            print(f"{said(url)}{elsewhere}", flush=True)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


# -- boxes ----------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A file inside, as `stat` shows it."""

    path: str
    folder: bool
    size: int
    mode: str
    user: str
    group: str
    modified: float

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


async def entries(box: Sandbox, paths: Sequence[str]) -> list[Entry]:
    if not paths:
        return []
    names = " ".join(map(shlex.quote, paths))
    seen = await box.exec(f"stat -c '%F|%s|%a|%U|%G|%Y|%n' -- {names}")
    found = []
    for line in seen.stdout.decode().splitlines():
        kind, size, mode, user, group, modified, path = line.split("|", 6)
        folder = kind == "directory"
        found.append(Entry(path, folder, int(size), mode, user, group, float(modified)))
    return found


async def listed(box: Sandbox, path: str, depth: int = 1) -> list[Entry]:
    found = await box.exec(f"find {shlex.quote(path)} -mindepth 1 -maxdepth {depth}")
    return await entries(box, found.stdout.decode().splitlines())


def pid_of(box: NamespaceSandbox, exec_id: str) -> int:
    process = box.box.record(exec_id).process
    return process.pid if process is not None else 0


def signal_one(box: NamespaceSandbox, exec_id: str, signum: int) -> None:
    """Kill only the started process; its children live on."""
    if number := pid_of(box, exec_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signum)


def signal_group(box: NamespaceSandbox, exec_id: str) -> None:
    """Kill the started process and its group; processes that left the group live on."""
    if number := pid_of(box, exec_id):
        with contextlib.suppress(ProcessLookupError):
            leads = os.getpgid(number) == number
            (os.killpg if leads else os.kill)(number, signal.SIGKILL)


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def abort(request: web.Request) -> web.StreamResponse:
    """Cut the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
