"""An E2B that runs here: its wire protocol to the unmodified `e2b` SDK, bubblewrap boxes behind it.

    python -m tests.doubles.e2b_server --state DIR --port 3900
    export E2B_API_URL=http://127.0.0.1:3900 E2B_SANDBOX_URL=http://127.0.0.1:3900 E2B_API_KEY=e2b_0

Kill it and start it again on the same DIR: it keeps its state, and its sandboxes live on. Post
faults to `/__control/rules` (see `fault_rules.Rule`). `e2b_templates` has the builds of templates. Not
played: PTY, pause, watchers, ports.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import shlex
import signal
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote
from uuid import uuid4

from aiohttp import web

from perdure.errors import NotFound, PerdureError, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Sandbox, SandboxSpec
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from tests.doubles.e2b_templates import E2BTemplates
from tests.doubles.fault_rules import Faults, met_rule
from tests.doubles.service_double import (
    LIMITS,
    Entry,
    Records,
    Refusal,
    abort,
    entries,
    iso,
    listed,
    pid_of,
    run,
    signal_one,
)

ENVD = "0.6.7"
HOME = "/home/user"
PIECE = 32 << 10
LONGEST_NAP_S = 0.1


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Refusal:
    return Refusal(status, {"code": status, "message": message}, headers)


class E2BServer(E2BTemplates):
    """Both planes on one port."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.keys = Records(state / "keys")
        self.faults = Faults(state / "rules.json", self._about)
        self.settings: dict[str, float | None] = {
            "max_live": None, "others_live": 0.0, "creates_per_s": None, "boot_s": 0.0,
            "list_lag_s": 0.0, "clock_offset_s": 0.0, "memory_mb": None, "max_builds": None,
        }  # fmt: skip
        self._creating: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._inputs: dict[tuple[str, int], int] = {}
        self._starting = asyncio.Lock()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return [
            web.post("/v2/sandboxes", self._create),
            web.post("/sandboxes", self._create),
            web.get("/v2/sandboxes", self._list),
            web.get("/sandboxes/{id}", self._info),
            web.delete("/sandboxes/{id}", self._kill),
            web.post("/sandboxes/{id}/timeout", self._timeout),
            web.post("/v2/sandboxes/{id}/connect", self._connect),
            web.post("/sandboxes/{id}/connect", self._connect),
            web.get("/health", self._health),
            web.get("/files", self._read),
            web.post("/files", self._write),
            web.post("/process.Process/Start", self._start),
            web.post("/process.Process/Connect", self._reattach),
            web.post("/process.Process/List", self._processes),
            web.post("/process.Process/SendSignal", self._signal),
            web.post("/process.Process/SendInput", self._input),
            web.post("/process.Process/CloseStdin", self._close_stdin),
            web.post("/filesystem.Filesystem/{operation}", self._filesystem),
            *self.template_routes(),
        ]

    async def _about(self, request: web.Request) -> str:
        """What a rule can match before the sandbox is looked up; also for creates and lists."""
        if request.method == "POST" and request.path.endswith("/sandboxes"):
            return json.dumps((await request.json()).get("metadata") or {})
        if request.method == "GET" and request.path.endswith("/sandboxes"):
            return json.dumps(_wanted(request))
        identity = request.headers.get("E2b-Sandbox-Id") or request.match_info.get("id", "")
        record = self.sandboxes.read(identity) if identity else None
        return json.dumps(record["metadata"]) if record is not None else ""

    # -- control plane ----------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        body = await request.json()
        key = request.headers.get("Idempotency-Key") or uuid4().hex
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        known = self.keys.read(key)
        if known is not None and known["digest"] != digest:
            raise _refusal(409, "idempotency_request_mismatch: this key came with another request")
        if known is not None and "made" in known:  # even if it is dead by now
            return web.json_response(_created(known["made"]), status=201)
        if known is None:
            self.check_template(body["templateID"])
            self._check_quota()
            known = {"digest": digest, "id": f"i{uuid4().hex[:19]}"}
            self.keys.write(key, known)
        if key not in self._creating:
            self._creating[key] = asyncio.create_task(self._boot(self._recorded(known["id"], body)))
        try:  # the sandbox is made even if the client goes away
            record = await asyncio.shield(self._creating[key])
        finally:
            if key in self._creating and self._creating[key].done():
                self._creating.pop(key)
        self.keys.write(key, {**known, "made": record})
        return web.json_response(_created(record), status=201)

    def _recorded(self, identity: str, body: dict[str, Any]) -> dict[str, Any]:
        """The sandbox's record. A new one counts against the quota at once."""
        known: dict[str, Any] | None = self.sandboxes.read(identity)
        if known is not None:
            return known
        now = time.time()
        record: dict[str, Any] = {
            "id": identity,
            "template": body["templateID"],
            "metadata": body.get("metadata") or {},
            "env": body.get("envVars") or {},
            "internet": body.get("allow_internet_access"),
            "network": body.get("network"),
            "started": now,
            "ends": now + (body.get("timeout") or 15),
            "token": uuid4().hex,
            "state": "creating",
            "processes": {},
        }
        self.sandboxes.write(identity, record)
        return record

    async def _boot(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["state"] != "creating":
            return record
        await asyncio.sleep(self.settings["boot_s"] or 0)
        memory = int(self.settings["memory_mb"] or LIMITS.memory_mb)
        limits = LIMITS.model_copy(update={"memory_mb": memory})
        spec = SandboxSpec(HOME, env={**record["env"], "HOME": HOME}, limits=limits)
        await self.fill(await self.guests.create(spec, record["id"]), record["template"])
        record["state"] = "running"
        self.sandboxes.write(record["id"], record)
        return record

    def _check_quota(self) -> None:
        live = self.settings["max_live"]
        taken = len(self.sandboxes.all()) + (self.settings["others_live"] or 0)
        if live is not None and taken >= live:
            raise _refusal(
                429, f"you have reached the maximum number of concurrent E2B sandboxes ({live:.0f})"
            )
        if self.too_many_creates():
            raise _refusal(429, "too many sandboxes created per second", {"Retry-After": "1"})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        wanted = _wanted(request)
        newest = time.time() - (self.settings["list_lag_s"] or 0)
        found = [
            record
            for record in self.sandboxes.all()
            if record["state"] == "running"
            and record["started"] <= newest
            and wanted.items() <= record["metadata"].items()
        ]
        found.sort(key=lambda record: (record["started"], record["id"]))
        start, limit = int(request.query.get("nextToken", 0)), int(request.query.get("limit", 100))
        page = found[start : start + limit]
        headers = {"x-next-token": str(start + limit)} if start + limit < len(found) else {}
        return web.json_response([self._listed(record) for record in page], headers=headers)

    def _listed(self, record: Mapping[str, Any]) -> dict[str, Any]:
        offset = self.settings["clock_offset_s"] or 0
        return {
            "templateID": record["template"],
            "sandboxID": record["id"],
            "clientID": "local",
            "startedAt": iso(record["started"] + offset),
            "endAt": iso(record["ends"] + offset),
            "cpuCount": 2,
            "memoryMB": LIMITS.memory_mb,
            "diskSizeMB": LIMITS.disk_mb,
            "state": "running",
            "envdVersion": ENVD,
            "metadata": record["metadata"],
        }

    async def _info(self, request: web.Request) -> web.StreamResponse:
        record = self._controlled(request)
        detail = {**self._listed(record), "envdAccessToken": record["token"], "domain": None}
        return web.json_response(detail)

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        await self._end(self._controlled(request)["id"])
        return web.Response(status=204)

    async def _timeout(self, request: web.Request) -> web.StreamResponse:
        seconds = (await request.json())["timeout"]
        record = self._controlled(request)  # read after the wait: other requests write it too
        record["ends"] = time.time() + seconds
        self.sandboxes.write(record["id"], record)
        return web.Response(status=204)

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        seconds = (await request.json()).get("timeout") or 0
        record = self._controlled(request)
        record["ends"] = max(record["ends"], time.time() + seconds)
        self.sandboxes.write(record["id"], record)
        return web.json_response(_created(record))

    async def _end(self, identity: str) -> None:
        await self.guests.kill(identity)
        self.sandboxes.remove(identity)
        for place in [place for place in self._inputs if place[0] == identity]:
            os.close(self._inputs.pop(place))

    def _controlled(self, request: web.Request) -> dict[str, Any]:
        self._check_key(request)
        record = self._running(request.match_info["id"])
        if record is None:
            raise _refusal(404, f"sandbox {request.match_info['id']} not found")
        return record

    def _running(self, identity: str) -> dict[str, Any] | None:
        record: dict[str, Any] | None = self.sandboxes.read(identity)
        if record is None or record["state"] != "running" or record["ends"] < time.time():
            return None
        return record

    async def _expiring(self, app: web.Application) -> AsyncIterator[None]:
        # finish what was being made when the last server was killed
        half_made = [one for one in self.sandboxes.all() if one["state"] == "creating"]
        making = [asyncio.create_task(self._boot(record)) for record in half_made]
        async for _ in super()._expiring(app):
            yield
        for left in making:
            left.cancel()
        await self.end_builds()
        for fd in self._inputs.values():
            os.close(fd)

    async def expire(self) -> None:
        for record in self.sandboxes.all():
            if record["ends"] < time.time():  # even one whose server was killed during its boot
                with contextlib.suppress(PerdureError):
                    await self._end(record["id"])

    # -- data plane: files ------------------------------------------------------------------------

    async def _guest(self, request: web.Request) -> tuple[dict[str, Any], NamespaceSandbox]:
        identity = request.headers.get("E2b-Sandbox-Id", "")
        rule = met_rule.get()
        if rule is not None and rule.kill and rule.when == "before":
            await self._end(identity)
        record = self._running(identity)
        box = None if record is None else await self.guests.found(identity)
        if record is None or box is None:
            raise _not_running(identity)
        if request.headers.get("X-Access-Token") != record["token"]:
            raise _refusal(401, "wrong access token")
        return record, box

    async def _health(self, request: web.Request) -> web.StreamResponse:
        identity = request.headers.get("E2b-Sandbox-Id", "")
        if self._running(identity) is None:
            raise _not_running(identity)
        return web.Response(status=204)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        path = request.query["path"]
        try:
            return web.Response(body=await box.get(_absolute(path)))
        except NotFound:
            raise _refusal(404, f"path '{path}' does not exist") from None

    async def _write(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        written: list[dict[str, str]] = []
        if request.content_type == "application/octet-stream":
            await self._keep(box, request.query["path"], request.content, written)
        else:
            async for part in await request.multipart():
                assert not isinstance(part, list)
                path = request.query.get("path") or str(getattr(part, "filename", ""))
                await self._keep(box, path, part, written)
        return web.json_response(written)

    async def _keep(
        self, box: Sandbox, path: str, source: Any, written: list[dict[str, str]]
    ) -> None:
        await self.store(box, _absolute(path), source)
        written.append({"path": path, "name": path.rsplit("/", 1)[-1], "type": "file"})

    # -- data plane: commands ---------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.StreamResponse:
        known, box = await self._guest(request)
        order = json.loads((await request.read())[5:])
        process = order["process"]
        async with self._starting:
            record = self._running(known["id"])
            if record is None:  # it ended meanwhile
                raise _not_running(box.identity)
            pid = 1000 + len(record["processes"])
            record["processes"][str(pid)] = {**process, "tag": order.get("tag")}
            self.sandboxes.write(record["id"], record)
        argv = [process["cmd"], *process.get("args", [])]
        if order.get("stdin"):
            argv = await self._with_input(box, record["id"], pid, argv)
        env, cwd = process.get("envs") or {}, process.get("cwd") or HOME
        rule = met_rule.get()
        if rule is not None and rule.twice:
            await box.start(f"p{pid}-unheard", Exec(argv, env=env, cwd=cwd))
        await box.start(f"p{pid}", Exec(argv, env=env, cwd=cwd))
        if order.get("stdin"):
            self._open_input(box, record["id"], pid)
        return await self._stream(request, box, record["id"], pid, (0, 0))

    async def _reattach(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        pid = _selected(record, json.loads((await request.read())[5:]))
        offsets = await _sizes(box, pid)  # output without a reader is lost
        return await self._stream(request, box, record["id"], pid, offsets)

    async def _stream(
        self,
        request: web.Request,
        box: NamespaceSandbox,
        identity: str,
        pid: int,
        offsets: tuple[int, int],
    ) -> web.StreamResponse:
        rule = met_rule.get()
        how = rule.stream if rule is not None else ""
        if rule is not None and rule.when == "after":
            await box.wait(f"p{pid}")  # the answer is lost, so it is not sent
            if rule.kill:
                await self._end(identity)
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(_message({"event": {"start": {"pid": pid}}}))
        if how == "cut":
            return abort(request)
        if how == "silent":
            await asyncio.Event().wait()
        timeout_ms = int(request.headers.get("connect-timeout-ms") or 0)
        deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else None
        status = await self._copy(response, box, pid, offsets, deadline, half=how == "truncated")
        if how == "empty_end":
            await response.write(_message({"event": {"end": {}}}))
        elif how == "unavailable" or status.cause == "sandbox":
            gone = "the connection to sandbox ended before the stream completed"
            await response.write(_end({"code": "unavailable", "message": gone}))
            return response
        elif status.state is ExecState.RUNNING:
            signal_one(box, f"p{pid}", signal.SIGKILL)
            late = {"code": "deadline_exceeded", "message": "the deadline was exceeded"}
            await response.write(_end(late))
            return response
        elif how != "no_end":
            await response.write(_message({"event": {"end": _outcome(status)}}))
        await response.write(_end())
        return response

    async def _copy(
        self,
        response: web.StreamResponse,
        box: NamespaceSandbox,
        pid: int,
        offsets: tuple[int, int],
        deadline: float | None,
        *,
        half: bool = False,
    ) -> ExecStatus:
        """Send all that it writes, until it ends or its time is over.

        `half`: of each piece only the first half is sent."""
        at, nap = {"stdout": offsets[0], "stderr": offsets[1]}, 0.01
        while True:
            try:
                status = await box.wait(f"p{pid}", nap)
            except (SandboxLost, NotFound, FileNotFoundError):
                return ExecStatus(ExecState.KILLED, cause="sandbox")
            for stream in ("stdout", "stderr"):
                name: Any = stream
                while data := await box.output(f"p{pid}", name, at[stream], PIECE):
                    at[stream] += len(data)
                    data = data[: len(data) // 2] if half else data
                    event = {"data": {stream: base64.b64encode(data).decode()}}
                    await response.write(_message({"event": event}))
            if status.done or (deadline is not None and time.monotonic() > deadline):
                return status
            nap = min(nap * 1.5, LONGEST_NAP_S)

    async def _processes(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        running = []
        for pid, process in record["processes"].items():
            if not (await box.poll(f"p{pid}")).done:
                config = {name: process.get(name) for name in ("cmd", "args", "envs", "cwd")}
                config = {name: value for name, value in config.items() if value is not None}
                running.append({"config": config, "pid": int(pid)})
        return web.json_response({"processes": running})

    async def _signal(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        order = await request.json()
        pid = _selected(record, order)
        if (await box.poll(f"p{pid}")).done:
            raise _rpc("not_found", f"process with pid {pid} not found")
        signal_one(box, f"p{pid}", signal.Signals[order["signal"].removeprefix("SIGNAL_")])
        return web.json_response({})

    async def _input(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        order = await request.json()
        pid = _selected(record, order)
        fd = self._inputs.get((record["id"], pid)) or self._open_input(box, record["id"], pid)
        data = base64.b64decode(order["input"]["stdin"])
        await asyncio.to_thread(_write_all, fd, data)
        return web.json_response({})

    async def _close_stdin(self, request: web.Request) -> web.StreamResponse:
        record, _ = await self._guest(request)
        fd = self._inputs.pop((record["id"], _selected(record, await request.json())), None)
        if fd is not None:
            os.close(fd)
        return web.json_response({})

    async def _with_input(
        self, box: NamespaceSandbox, identity: str, pid: int, argv: list[str]
    ) -> list[str]:
        fifo = f"/tmp/.envd-{pid}"
        await box.exec(["mkfifo", fifo], check=True)
        return ["bash", "-c", f'exec "$@" <{fifo}', "envd", *argv]

    def _open_input(self, box: NamespaceSandbox, identity: str, pid: int) -> int:
        """Opened for reading and writing, so that it does not wait for a reader."""
        path = f"/proc/{pid_of(box, f'p{pid}')}/root/tmp/.envd-{pid}"
        fd = os.open(path, os.O_RDWR)
        self._inputs[identity, pid] = fd
        return fd

    async def _filesystem(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        order, operation = await request.json(), request.match_info["operation"]
        path = _absolute(order.get("path") or order.get("destination") or "/")
        quoted = shlex.quote(path)
        if operation == "ListDir":
            found = await listed(box, path, order.get("depth") or 1)
            return web.json_response({"entries": [_entry(entry) for entry in found]})
        script = {
            "MakeDir": f"[ ! -e {quoted} ] || exit 9; mkdir -p {quoted}",
            "Move": f"mv -T {shlex.quote(_absolute(order.get('source', '/')))} {quoted}",
            "Remove": f"rm -rf {quoted}",
            "Stat": "true",
        }.get(operation)
        if script is None:
            raise _rpc("unimplemented", operation)
        done = (await box.exec(script)).status
        if done.code == 9:
            raise _rpc("already_exists", f"{path} exists")
        found = await entries(box, [path])
        if operation == "Remove":
            return web.json_response({})
        if not done.ok or not found:
            raise _rpc("not_found", f"path '{path}' does not exist")
        return web.json_response({"entry": _entry(found[0])})


# -- how things look on the wire ------------------------------------------------------------------


def _wanted(request: web.Request) -> dict[str, str]:
    """The metadata that a list asks for: encoded three times."""
    pairs = parse_qsl(request.query.get("metadata", ""))
    return {unquote(name): unquote(value) for name, value in pairs}


def _created(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "templateID": record["template"],
        "sandboxID": record["id"],
        "clientID": "local",
        "envdVersion": ENVD,
        "envdAccessToken": record["token"],
        "domain": None,
    }


def _not_running(identity: str) -> Refusal:
    message = "The sandbox was not found"
    return Refusal(502, {"sandboxId": identity, "message": message, "code": 502})


def _rpc(code: str, message: str) -> Refusal:
    status = {"not_found": 404, "already_exists": 409}.get(code, 501)
    return Refusal(status, {"code": code, "message": message})


def _message(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack(">BI", 0, len(data)) + data


def _end(error: Mapping[str, str] | None = None) -> bytes:
    data = json.dumps({} if error is None else {"error": error}).encode()
    return struct.pack(">BI", 2, len(data)) + data


def _outcome(status: ExecStatus) -> dict[str, Any]:
    """proto3 JSON: a zero is left out."""
    if status.state is ExecState.EXITED:
        code = {"exitCode": status.code} if status.code else {}
        return {**code, "exited": True, "status": f"exit status {status.code}"}
    killed = f"signal: {signal.Signals(status.signal or signal.SIGKILL).name}"
    return {"exitCode": -1, "status": killed, "error": killed}


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}"


def _selected(record: Mapping[str, Any], order: Mapping[str, Any]) -> int:
    selector = order["process"]
    if "pid" in selector and str(selector["pid"]) in record["processes"]:
        return int(selector["pid"])
    for pid, process in record["processes"].items():
        if "tag" in selector and process.get("tag") == selector["tag"]:
            return int(pid)
    raise _rpc("not_found", f"process {selector} not found")


async def _sizes(box: NamespaceSandbox, pid: int) -> tuple[int, int]:
    folder = box.box.record(f"p{pid}").path
    out, err = (
        path.stat().st_size if (path := folder / name).exists() else 0 for name in ("out", "err")
    )
    return out, err


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "type": "FILE_TYPE_DIRECTORY" if entry.folder else "FILE_TYPE_FILE",
        "path": entry.path,
        "size": str(entry.size),
        "mode": int(entry.mode, 8),
        "permissions": entry.mode,
        "owner": entry.user,
        "group": entry.group,
        "modifiedTime": iso(entry.modified),
    }


serving = E2BServer.serving


def main() -> None:
    run(E2BServer, lambda url: f"E2B_API_URL={url} E2B_SANDBOX_URL={url}", 3900, __doc__)


if __name__ == "__main__":
    main()
