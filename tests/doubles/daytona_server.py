"""A Daytona that runs here: its wire protocol to the unmodified `daytona` SDK, bubblewrap boxes behind it.

    python -m tests.doubles.daytona_server --state DIR --port 3986
    export DAYTONA_API_URL=http://127.0.0.1:3986/api DAYTONA_API_KEY=dtn_0

Kill it and start it again on the same DIR: it keeps its state, and its sandboxes live on. Post
faults to `/__control/rules` (see `fault_rules.Rule`). `daytona_snapshots` has the builds of snapshots. Not
played: PTY, pause, snapshots of sandboxes, volumes, git, events.
"""

import asyncio
import hashlib
import json
import re
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from perdure.errors import NotFound, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, SandboxSpec
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from tests.doubles import service_double
from tests.doubles.daytona_snapshots import DaytonaSnapshots
from tests.doubles.fault_rules import Faults, Rule, met_rule
from tests.doubles.service_double import LIMITS, Refusal, entries, iso, listed

HOME = "/home/daytona"
PIECE = 1 << 20
BOX = "/toolbox/{id}"
FINAL = ("started", "error", "build_failed", "stopped")
GARBLED = 'failed to convert exit code to int: strconv.Atoi: parsing "": invalid syntax'


class DaytonaServer(DaytonaSnapshots):
    """Control plane below `/api`, data plane below `/toolbox`, ports inside by host name."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.faults = Faults(state / "rules.json", self._about, _caller)
        self.settings = {
            "max_cpu": None, "others_cpu": 0.0, "creates_per_s": None, "boot_s": 0.0,
            "list_lag_s": 0.0, "clock_offset_s": 0.0, "minute_s": 60.0, "max_snapshots": None,
        }  # fmt: skip
        self._booting: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        one, session = "/api/sandbox/{id}", f"{BOX}/process/session"
        command = f"{session}/{{session}}/command/{{command}}"
        return [
            web.post("/api/sandbox", self._create),
            web.get("/api/sandbox", self._list),
            web.get(one, self._get),
            web.delete(one, self._delete),
            web.get(f"{one}/toolbox-proxy-url", self._proxy_url),
            web.put(f"{one}/labels", self._labels),
            web.post(f"{one}/stop", self._stop),
            web.post(f"{one}/last-activity", self._active),
            web.post(f"{one}/{{interval:autostop|autodelete|ttl}}/{{minutes}}", self._interval),
            web.post(f"{BOX}/process/execute", self._execute),
            web.get(session, self._sessions),
            web.post(session, self._open_session),
            web.get(f"{session}/{{session}}", self._session),
            web.delete(f"{session}/{{session}}", self._close_session),
            web.post(f"{session}/{{session}}/exec", self._run_in_session),
            web.get(command, self._command),
            web.get(f"{command}/logs", self._logs),
            web.post(f"{command}/input", self._input),
            web.post(f"{BOX}/files/bulk-upload", self._upload),
            web.post(f"{BOX}/files/bulk-download", self._download),
            web.get(f"{BOX}/files", self._files),
            web.delete(f"{BOX}/files", self._remove),
            web.get(f"{BOX}/files/info", self._file),
            web.post(f"{BOX}/files/folder", self._folder),
            web.post(f"{BOX}/files/move", self._move),
            web.get(f"{BOX}/{{which:work-dir|user-home-dir}}", self._home),
            *self.snapshot_routes(),
        ]

    async def _expiring(self, app: web.Application) -> AsyncIterator[None]:
        async for _ in super()._expiring(app):
            yield
        await self.end_builds()

    async def _about(self, request: web.Request) -> str:
        if request.method == "POST" and request.path == "/api/sandbox":
            return json.dumps((await request.json()).get("labels") or {})
        if request.path == "/api/sandbox":
            return request.query.get("labels", "")
        record = self._find(_sandbox_of(request))
        return json.dumps(record["labels"]) if record is not None else ""

    # -- control plane ----------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        body = await request.json()
        identity = str(uuid4())
        name = body.get("name") or identity
        if self._find(name) is not None:
            raise _refusal(409, f"Sandbox with name {name} already exists")
        self.check_snapshot(body.get("snapshot") or "")
        self._check_quota(body.get("cpu") or 1)
        now, minute = time.time(), self.settings["minute_s"] or 60
        ttl = body.get("ttlMinutes") or 0
        record = {
            "id": identity,
            "name": name,
            "asked": body,
            "labels": body.get("labels") or {},
            "state": "creating",
            "created": now,
            "updated": now,
            "activity": now,
            "autostop": body.get("autoStopInterval", 15),
            "autodelete": body.get("autoDeleteInterval", -1),
            "destroy_at": now + ttl * minute if ttl else None,
            "sessions": {},
            "stuck": _stuck(met_rule.get(), now),
        }
        self.sandboxes.write(identity, record)
        self._boot_later(identity)
        return web.json_response(self._shown(record, request))

    def _check_quota(self, cpu: int) -> None:
        most = self.settings["max_cpu"]
        taken = sum(record["asked"].get("cpu") or 1 for record in self.sandboxes.all())
        if most is not None and taken + cpu + (self.settings["others_cpu"] or 0) > most:
            raise _refusal(400, f"Total CPU limit exceeded. Maximum allowed: {most:.0f}.")
        if self.too_many_creates():
            raise _refusal(429, "Rate limit exceeded", {"Retry-After-sandbox-create": "1"})

    def _boot_later(self, identity: str) -> None:
        self._booting[identity] = asyncio.create_task(self._boot(identity))
        self._booting[identity].add_done_callback(lambda _: self._booting.pop(identity, None))

    async def _boot(self, identity: str) -> None:
        record = self.sandboxes.read(identity)
        if record is not None and (stuck := record["stuck"]):
            self._change(identity, state=stuck["state"], updated=time.time())
            if stuck["state"] in FINAL:
                return
            while stuck["until"] is None or time.time() < stuck["until"]:
                if self.sandboxes.read(identity) is None:
                    return
                await asyncio.sleep(0.02)
        await asyncio.sleep(self.settings["boot_s"] or 0)
        if (record := self.sandboxes.read(identity)) is None:
            return
        env = {**(record["asked"].get("env") or {}), "HOME": HOME}
        box = await self.guests.create(SandboxSpec(HOME, env=env, limits=LIMITS), identity)
        await self.fill(box, record["asked"].get("snapshot") or "")
        now = time.time()
        if self._change(identity, state="started", updated=now, activity=now) is None:
            await self.guests.kill(identity)  # deleted meanwhile

    def _change(self, identity: str, **fields: Any) -> dict[str, Any] | None:
        record: dict[str, Any] | None = self.sandboxes.read(identity)
        if record is not None:
            record.update(fields)
            self.sandboxes.write(identity, record)
        return record

    def _find(self, id_or_name: str) -> dict[str, Any] | None:
        if not id_or_name or "/" in id_or_name:
            return None
        record: dict[str, Any] | None = self.sandboxes.read(id_or_name)
        if record is not None:
            return record
        return next((r for r in self.sandboxes.all() if r["name"] == id_or_name), None)

    def _known(self, request: web.Request) -> dict[str, Any]:
        self._check_key(request)
        record = self._find(request.match_info["id"])
        if record is None:
            raise _refusal(404, f"Sandbox {request.match_info['id']} not found")
        return record

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._shown(self._known(request), request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        wanted = json.loads(request.query.get("labels") or "{}")
        newest = time.time() - (self.settings["list_lag_s"] or 0)
        states = request.query.getall("states", [])
        found = [
            record
            for record in self.sandboxes.all()
            if record["created"] <= newest
            and wanted.items() <= record["labels"].items()
            and (not states or record["state"] in states)
            and request.query.get("name", record["name"]) == record["name"]
        ]
        found.sort(key=lambda record: (record["created"], record["id"]))
        start, limit = int(request.query.get("cursor", 0)), int(request.query.get("limit", 100))
        following = str(start + limit) if start + limit < len(found) else None
        items = [self._shown(record, request) for record in found[start : start + limit]]
        return web.json_response({"items": items, "nextCursor": following})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        record = self._known(request)
        await self._end(record["id"])
        return web.json_response(self._shown({**record, "state": "destroying"}, request))

    async def _end(self, identity: str) -> None:
        """Delete it. If this is interrupted, the next check of the state continues it."""
        self._change(identity, state="destroying")
        await self.guests.kill(identity)
        self.sandboxes.remove(identity)

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        record = self._known(request)
        await self._halt(record)
        return web.json_response(self._shown({**record, "state": "stopped"}, request))

    async def _halt(self, record: Mapping[str, Any]) -> None:
        """End its processes. Its disk stays, unless it is deleted at once."""
        if record["autodelete"] == 0:
            await self._end(record["id"])
            return
        self._change(record["id"], state="stopped", updated=time.time())
        await self.guests.kill(record["id"])

    async def _labels(self, request: web.Request) -> web.StreamResponse:
        labels = (await request.json())["labels"]
        self._change(self._known(request)["id"], labels=labels)
        return web.json_response({"labels": labels})

    async def _active(self, request: web.Request) -> web.StreamResponse:
        self._change(self._known(request)["id"], activity=time.time())
        return web.Response(status=201)

    async def _interval(self, request: web.Request) -> web.StreamResponse:
        record, minutes = self._known(request), int(request.match_info["minutes"])
        fields: dict[str, Any] = {request.match_info["interval"]: minutes}
        if "ttl" in fields:
            later = time.time() + minutes * (self.settings["minute_s"] or 60)
            fields = {"destroy_at": later if minutes else None}
        changed = self._change(record["id"], **fields) or record
        return web.json_response(self._shown(changed, request))

    async def _proxy_url(self, request: web.Request) -> web.StreamResponse:
        self._known(request)
        return web.json_response({"url": _proxy(request)})

    async def expire(self) -> None:
        """End what has outlived its time or is idle. API calls count as activity, processes do not."""
        now, minute = time.time(), self.settings["minute_s"] or 60
        for record in self.sandboxes.all():
            idle = now - record["activity"] > record["autostop"] * minute
            over = record["destroy_at"] is not None and record["destroy_at"] < now
            if over or record["state"] == "destroying":
                await self._end(record["id"])
            elif record["state"] == "started" and record["autostop"] and idle:
                await self._halt(record)
            elif record["state"] not in FINAL and record["id"] not in self._booting:
                self._boot_later(record["id"])  # an earlier server was killed as it booted

    def _shown(self, record: Mapping[str, Any], request: web.Request) -> dict[str, Any]:
        asked, offset = record["asked"], self.settings["clock_offset_s"] or 0
        stuck = record["stuck"] and record["stuck"]["until"] is not None
        updated = time.time() if stuck and record["state"] not in FINAL else record["updated"]
        failed = record["state"] in ("error", "build_failed")
        ends = record["destroy_at"]
        return {
            "id": record["id"],
            "organizationId": "local",
            "name": record["name"],
            "snapshot": asked.get("snapshot"),
            "user": asked.get("user") or "daytona",
            "env": asked.get("env") or {},
            "labels": record["labels"],
            "public": bool(asked.get("public")),
            "networkBlockAll": bool(asked.get("networkBlockAll")),
            "kvm": False,
            "target": asked.get("target") or "local",
            "cpu": asked.get("cpu") or 1,
            "gpu": 0,
            "memory": asked.get("memory") or 1,
            "disk": asked.get("disk") or 3,
            "state": record["state"],
            "desiredState": "started",
            "errorReason": f"injected {record['state']}" if failed else None,
            "autoStopInterval": record["autostop"],
            "autoDeleteInterval": record["autodelete"],
            "autoDestroyAt": iso(ends + offset) if ends is not None else None,
            "createdAt": iso(record["created"] + offset),
            "updatedAt": iso(updated + offset),
            "lastActivityAt": iso(record["activity"] + offset),
            "toolboxProxyUrl": _proxy(request),
        }

    # -- data plane: commands ---------------------------------------------------------------------

    async def _guest(self, request: web.Request) -> tuple[dict[str, Any], NamespaceSandbox]:
        record = self._known(request)
        rule = met_rule.get()
        if rule is not None and rule.kill and rule.when == "before":
            await self._end(record["id"])
            raise _refusal(404, "Sandbox not found", source="DAYTONA_PROXY")
        box = await self.guests.found(record["id"]) if record["state"] == "started" else None
        if box is None:
            state = record["state"]
            raise _refusal(400, f"Sandbox is not running, its state is {state}", source="PROXY")
        self._change(record["id"], activity=time.time())
        return record, box

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        """The command comes on the shell's standard input; both streams are merged."""
        record, box = await self._guest(request)
        order, rule = await request.json(), met_rule.get()
        for again in ("", "-unheard") if rule is not None and rule.twice else ("",):
            exec_id = f"e{uuid4().hex}{again}"
            await box.start(
                exec_id,
                Exec(
                    ["bash", "-c", "exec bash 2>&1"],
                    stdin=order["command"].encode(),
                    env=order.get("envs") or {},
                    cwd=order.get("cwd") or HOME,
                ),
            )
        status = await self._ended(box, exec_id, order.get("timeout"))
        if rule is not None and rule.kill:
            await self._end(record["id"])
            return web.Response()
        if status.state is ExecState.RUNNING:
            service_double.signal_group(box, exec_id)
            raise _refusal(
                408, "command execution timeout", source="DAYTONA_DAEMON",
                code="PROCESS_EXECUTION_TIMEOUT",
            )  # fmt: skip
        said = (await box.output(exec_id)).decode("utf-8", "replace")
        code = status.code if status.code is not None else -1
        answer = {"exitCode": code, "result": said}
        match rule.exit_code if rule is not None else "":
            case "empty":
                answer["exitCode"] = ""
            case "absent":
                answer.pop("exitCode")
            case "unreadable":
                raise _refusal(400, GARBLED, source="DAYTONA_DAEMON")
        return web.json_response(answer)

    async def _ended(
        self, box: NamespaceSandbox, exec_id: str, seconds: float | None
    ) -> ExecStatus:
        try:
            return await box.wait(exec_id, seconds)
        except (SandboxLost, NotFound, FileNotFoundError):
            raise _refusal(502, "bad gateway", source="DAYTONA_PROXY") from None

    async def _sessions(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        return web.json_response([await self._told(box, record, s) for s in record["sessions"]])

    async def _open_session(self, request: web.Request) -> web.StreamResponse:
        """One shell that reads its commands from a pipe. After `exit`, no command gets a code."""
        record, box = await self._guest(request)
        session = (await request.json())["sessionId"]
        if session in record["sessions"]:
            raise _refusal(409, "session already exists", source="DAYTONA_DAEMON")
        self._change(record["id"], sessions={**record["sessions"], session: []})
        folder = _folder(session)
        await box.exec(f"mkdir -p {folder} && mkfifo {folder}/shell", check=True)
        await box.start(
            _shell(session), Exec(["bash", "-c", f"exec bash <>{folder}/shell"], cwd=HOME)
        )
        opened = (
            f": >{folder}/shell"  # returns once the shell has the pipe open: it keeps what follows
        )
        await box.exec(["timeout", "30", "bash", "-c", opened], check=True)
        return web.Response(status=201)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        return web.json_response(await self._told(box, record, _session_of(record, request)))

    async def _told(
        self, box: NamespaceSandbox, record: Mapping[str, Any], session: str
    ) -> dict[str, Any]:
        commands = []
        for entry in record["sessions"][session]:
            code = await self._code(box, session, entry["id"])
            commands.append(entry if code is None else {**entry, "exitCode": code})
        return {"sessionId": session, "commands": commands}

    async def _close_session(self, request: web.Request) -> web.StreamResponse:
        """End it with all that it started, `nohup` and `setsid` included."""
        record, box = await self._guest(request)
        session = _session_of(record, request)
        await box.signal(_shell(session), 9)
        rest = {name: told for name, told in record["sessions"].items() if name != session}
        self._change(record["id"], sessions=rest)
        return web.Response(status=204)

    async def _run_in_session(self, request: web.Request) -> web.StreamResponse:
        order = await request.json()
        record, box = await self._guest(request)
        session = _session_of(record, request)
        entry = {"id": uuid4().hex, "command": order["command"]}
        record["sessions"][session].append(entry)
        self._change(record["id"], sessions=record["sessions"])
        folder, rule = _folder(session, entry["id"]), met_rule.get()
        run = f"{{ {order['command']}\n}} >{folder}/out 2>{folder}/err <>{folder}/in"
        times = 2 if rule is not None and rule.twice else 1
        script = "\n".join([f"mkfifo {folder}/in", *[run] * times, f'echo "$?" >{folder}/code'])
        await box.put(f"{folder}/script", script.encode())
        await box.exec(["bash", "-c", f"echo '. {folder}/script' 1<>{_folder(session)}/shell"])
        if order.get("runAsync") or order.get("async"):
            return web.json_response({"cmdId": entry["id"]}, status=202)
        while not await self._is_over(box, session, entry["id"]):
            await asyncio.sleep(0.02)
        code = await self._code(box, session, entry["id"])
        said = {name: await _text(box, folder, name) for name in ("out", "err")}
        return web.json_response(
            {
                "cmdId": entry["id"],
                "exitCode": code,
                "output": said["out"] + said["err"],
                "stdout": said["out"],
                "stderr": said["err"],
            }
        )

    async def _code(self, box: NamespaceSandbox, session: str, command: str) -> int | None:
        """Read the code as the daemon does: an empty file is an error."""
        try:
            said = await box.get(f"{_folder(session, command)}/code")
        except NotFound:
            return None
        if not said.strip():
            raise _refusal(400, GARBLED, source="DAYTONA_DAEMON")
        return int(said)

    async def _is_over(self, box: NamespaceSandbox, session: str, command: str) -> bool:
        try:
            return await self._code(box, session, command) is not None
        except Refusal:  # it is just being written
            return False

    async def _command(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        session, rule = _session_of(record, request), met_rule.get()
        entry = _command_of(record, session, request)
        how = rule.exit_code if rule is not None else ""
        if how == "unreadable":
            raise _refusal(400, GARBLED, source="DAYTONA_DAEMON")
        code: Any = await self._code(box, session, entry["id"])
        if how == "absent" or code is None:
            return web.json_response(entry)
        return web.json_response({**entry, "exitCode": "" if how == "empty" else code})

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        session = _session_of(record, request)
        entry = _command_of(record, session, request)
        folder = _folder(session, entry["id"])
        if request.query.get("follow") == "true":
            return await self._follow(request, box, session, entry["id"])
        out, err = await _text(box, folder, "out"), await _text(box, folder, "err")
        return web.json_response({"output": out + err, "stdout": out, "stderr": err})

    async def _follow(
        self, request: web.Request, box: NamespaceSandbox, session: str, command: str
    ) -> web.StreamResponse:
        rule = met_rule.get()
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        at = {"out": 0, "err": 0}
        while True:
            over = await self._is_over(box, session, command)
            for name, mark in (("out", b"\1\1\1"), ("err", b"\2\2\2")):
                data = await _bytes(box, _folder(session, command), name, at[name])
                at[name] += len(data)
                if data:
                    await socket.send_bytes(mark + data)
            if rule is not None and rule.stream == "cut" and any(at.values()):
                return service_double.abort(request)
            if over:
                await socket.close()
                return socket
            await asyncio.sleep(0.02)

    async def _input(self, request: web.Request) -> web.StreamResponse:
        record, box = await self._guest(request)
        session = _session_of(record, request)
        folder = _folder(session, _command_of(record, session, request)["id"])
        data = shlex.quote((await request.json())["data"])
        await box.exec(f"printf %s {data} 1<>{folder}/in", check=True)
        return web.Response(status=204)

    # -- data plane: files ------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        path = ""
        async for part in await request.multipart():
            name = str(getattr(part, "name", ""))
            if name.endswith(".path"):
                path = await part.text()  # type: ignore[union-attr]
            else:
                await self.store(box, _absolute(path), part)
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        boundary, rule = f"DAYTONA{uuid4().hex}", met_rule.get()
        response = web.StreamResponse(
            headers={"Content-Type": f"multipart/form-data; boundary={boundary}"}
        )
        await response.prepare(request)
        for path in (await request.json())["paths"]:
            begun = (
                f'--{boundary}\r\nContent-Disposition: form-data; name="%s"; filename="{path}"\r\n'
            )
            try:
                data = await box.get(_absolute(path), 0, PIECE)
            except NotFound:
                error = _body(404, f"file not found: {path}", "DAYTONA_DAEMON", "FILE_NOT_FOUND")
                head = f"{begun % 'error'}Content-Type: application/json\r\n\r\n"
                await response.write(head.encode() + json.dumps(error).encode() + b"\r\n")
                continue
            await response.write(f"{begun % 'file'}\r\n".encode())
            at = 0
            while data:
                await response.write(data)
                if rule is not None and rule.stream == "cut":
                    return service_double.abort(request)
                at += len(data)
                data = await box.get(_absolute(path), at, PIECE)
            await response.write(b"\r\n")
        await response.write(f"--{boundary}--\r\n".encode())
        return response

    async def _files(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        found = await listed(box, _absolute(request.query.get("path", ".")))
        return web.json_response([_file(entry) for entry in found])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        _, box = await self._guest(request)
        if not (found := await entries(box, [_absolute(request.query["path"])])):
            raise _no_file(request.query["path"])
        return web.json_response(_file(found[0]))

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        path = request.query["path"]
        how = "-rf" if request.query.get("recursive") == "true" else "-f"
        await self._shell(request, f"[ -e {{0}} ] && rm {how} {{0}}", path)
        return web.Response(status=204)

    async def _folder(self, request: web.Request) -> web.StreamResponse:
        mode = shlex.quote(request.query.get("mode", "755"))
        await self._shell(request, f"mkdir -p -m {mode} {{0}}", request.query["path"])
        return web.Response(status=201)

    async def _move(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        await self._shell(request, "mv -T {0} {1}", query["source"], query["destination"])
        return web.Response(status=200)

    async def _shell(self, request: web.Request, line: str, *paths: str) -> None:
        _, box = await self._guest(request)
        done = await box.exec(line.format(*(shlex.quote(_absolute(path)) for path in paths)))
        if not done.status.ok:
            raise _no_file(paths[0])

    async def _home(self, request: web.Request) -> web.StreamResponse:
        await self._guest(request)
        return web.json_response({"dir": HOME})


# -- how things look on the wire ------------------------------------------------------------------


def _body(status: int, message: str, source: str, code: str | None = None) -> dict[str, Any]:
    named = {"code": code} if code else {}
    return {"statusCode": status, "message": message, "error": message, "source": source, **named}


def _refusal(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    source: str = "DAYTONA_API",
    code: str | None = None,
) -> Refusal:
    return Refusal(status, _body(status, message, source, code), headers)


def _no_file(path: str) -> Refusal:
    return _refusal(404, f"file not found: {path}", source="DAYTONA_DAEMON", code="FILE_NOT_FOUND")


def _sandbox_of(request: web.Request) -> str:
    found = re.match(r"/(?:api/sandbox|toolbox)/([^/]+)", request.path)
    return found[1] if found else ""


def _caller(request: web.Request) -> tuple[str, str]:
    return request.headers.get("Authorization", ""), _sandbox_of(request)


def _proxy(request: web.Request) -> str:
    return f"{request.scheme}://{request.host}/toolbox"


def _stuck(rule: Rule | None, now: float) -> dict[str, Any] | None:
    if rule is None or not rule.state:
        return None
    until = None if rule.state_s is None else now + rule.state_s
    return {"state": rule.state, "until": until}


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}"


def _folder(session: str, command: str = "") -> str:
    name = hashlib.sha256(session.encode()).hexdigest()[:24]
    return f"/tmp/.daytona/{name}/{command}".rstrip("/")


def _shell(session: str) -> str:
    return f"s{hashlib.sha256(session.encode()).hexdigest()[:24]}"


def _session_of(record: Mapping[str, Any], request: web.Request) -> str:
    session = request.match_info["session"]
    if session not in record["sessions"]:
        raise _refusal(404, "session not found", source="DAYTONA_DAEMON")
    return session


def _command_of(record: Mapping[str, Any], session: str, request: web.Request) -> dict[str, Any]:
    wanted = request.match_info["command"]
    for entry in record["sessions"][session]:
        if entry["id"] == wanted:
            found: dict[str, Any] = entry
            return found
    raise _refusal(404, "command not found", source="DAYTONA_DAEMON")


async def _bytes(box: NamespaceSandbox, folder: str, name: str, at: int = 0) -> bytes:
    try:
        return await box.get(f"{folder}/{name}", at)
    except NotFound:
        return b""


async def _text(box: NamespaceSandbox, folder: str, name: str) -> str:
    """Sessions lose NUL bytes."""
    return (await _bytes(box, folder, name)).replace(b"\0", b"").decode("utf-8", "replace")


def _file(entry: service_double.Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "isDir": entry.folder,
        "size": entry.size,
        "mode": entry.mode,
        "modTime": iso(entry.modified),
        "modifiedAt": iso(entry.modified),
        "permissions": entry.mode,
        "owner": entry.user,
        "group": entry.group,
        "path": entry.path,
    }


serving = DaytonaServer.serving


def main() -> None:
    service_double.run(DaytonaServer, lambda url: f"DAYTONA_API_URL={url}/api", 3986, __doc__)


if __name__ == "__main__":
    main()
