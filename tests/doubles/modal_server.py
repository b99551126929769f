"""A Modal that runs here: its gRPC services to the unmodified `modal` SDK, bubblewrap boxes behind them.

    python -m tests.doubles.modal_server --state DIR --port 3989
    export MODAL_SERVER_URL=http://127.0.0.1:3989 MODAL_TOKEN_ID=ak-0 MODAL_TOKEN_SECRET=as-0

Kill it and start it again on the same DIR: it keeps its state, and its sandboxes live on. Post
faults to `/__control/rules` of the control URL that it prints (see `fault_rules.Rule`).

It is derived from the messages in `modal_proto`, and from how the SDK reads them. Nobody observed
the service for this. Assumed, and to be checked with an account:
- a name is taken from the create to the end of the sandbox, and free after `terminate(wait=True)`;
- a create at a taken name is ALREADY_EXISTS; a read by name finds a sandbox as soon as it is made;
- a full account is RESOURCE_EXHAUSTED with "concurrent" in its text, before the name is looked at;
- too many creates are RESOURCE_EXHAUSTED with an RPCRetryPolicy, and of the control plane alone;
- a create answers before the boot; router calls wait for the boot;
- a sandbox ends with its first process, whose exit code `SandboxWait` tells;
- calls to a sandbox that has ended are NOT_FOUND, and its result stays readable;
- tags take any value, and any number of them; the list is filtered by them, is newest first, and has
  the sandboxes that run, V1 and V2;
- an exec's output stays readable by offset after its end, in order and complete;
- exec ids are forgotten when a worker restarts, and their processes live on;
- commands run as root with all capabilities, in one process namespace with the first process;
- a command beyond the memory limit is killed alone, and its sandbox goes on;
- a time limit of 24 hours is allowed on every account, and ends the sandbox with GENERIC_STATUS_TIMEOUT;
- a full disk fails an upload with "No space left on device".
`modal_images` has images, and what is assumed of them.
Not played: functions, volumes, secrets but variables, tunnels, PTYs, snapshots, sidecars, probes,
logs of sandboxes, network rules, real GPUs. A command starts when its standard input has ended or
its output is first read.
"""

import asyncio
import base64
import contextlib
import functools
import json
import re
import shlex
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from aiohttp import web
from grpclib import GRPCError, Status
from grpclib.const import Handler
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from perdure.errors import NotFound, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, SandboxSpec
from perdure.sandboxes.guest.service_retries import retry_after
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from tests.doubles import service_double
from tests.doubles.fault_rules import Faults, Rule, met_rule
from tests.doubles.modal_images import ModalImages
from tests.doubles.service_double import LIMITS, Records

HOME = "/root"
ROUTER = "task_command_router.TaskCommandRouter"
V1_LENGTH = 22
"""Characters in the id of a V1 sandbox. The SDK takes all others for V2."""
MAIN = "main"
"""The exec id of a sandbox's first process in its box."""
FS_TOOLS = "/__modal/.bin/modal-sandbox-fs-tools"
NO_SPACE = json.dumps({"error_kind": "Other", "message": "No space left on device"})
DISK_FULL = 507
"""Status of a rule that makes an upload fail as on a full disk."""
PIECE = 1 << 20
JWT_S = 3600.0
STATUSES = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.NOT_FOUND,
    408: Status.DEADLINE_EXCEEDED,
    409: Status.ABORTED,
    429: Status.RESOURCE_EXHAUSTED,
    500: Status.INTERNAL,
}
"""HTTP statuses of rules as those of gRPC. All others are UNAVAILABLE."""
UNARY = {
    "AppFetchLogs", "AppGetOrCreate", "AuthTokenGet", "ClientHello", "EnvironmentGetOrCreate",
    "ImageBuildChainGet", "ImageFromId", "ImageGetOrCreate", "MountBatchedCheckExistence",
    "MountGetOrCreate", "MountPutFile", "SandboxCreate", "SandboxCreateV2", "SandboxGetCommandRouterAccess",
    "SandboxGetFromName", "SandboxGetFromNameV2", "SandboxGetTaskId", "SandboxGetTaskIdV2",
    "SandboxList", "SandboxListV2", "SandboxTagsGet", "SandboxTagsGetV2", "SandboxTagsSet",
    "SandboxTagsSetV2", "SandboxTerminate", "SandboxTerminateV2", "SandboxWait", "SandboxWaitV2",
    "TaskExecPoll", "TaskExecStart", "TaskExecStdinStatus", "TaskExecStdinWrite", "TaskExecWait",
    "TaskGetCommandRouterAccess",
}  # fmt: skip

Request = Any
"""A message of the service's protocol."""


class _Handlers:
    """What a generated service base asks for its methods: each one goes through the faults."""

    def __init__(self, server: "ModalServer", base: type[Any]) -> None:
        self._server, self._base = server, base

    def __getattr__(self, name: str) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        return functools.partial(self._server.handle, _path(self._base, name))

    def __mapping__(self) -> dict[str, Handler]:
        found: dict[str, Handler] = self._base.__mapping__(self)
        return found


class _Server(Server):
    """Knows its connections, to cut them at its end."""

    def __init__(self, handlers: Sequence[_Handlers]) -> None:
        super().__init__(handlers, status_details_codec=custom_detail_codec)
        self._protocols: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        self._protocols.append(protocol := super()._protocol_factory())
        return protocol

    async def end(self) -> None:
        self.close()
        for protocol in self._protocols:
            if (transport := vars(protocol.connection).get("_transport")) is not None:
                transport.abort()
        await self.wait_closed()


class _Command:
    """A command, and what it gets on its standard input."""

    def __init__(self, asked: Any, runs: int) -> None:
        """`runs`: how often it is run; the last run is answered."""
        self.asked, self.runs = asked, runs
        self.argv = list(asked.command_args)
        if self.argv[0] == FS_TOOLS:
            self.argv = ["true"]  # the server writes the file
        self.stdin = bytearray()
        self.stdin_is_closed = self.is_started = False
        self.is_uploaded = asyncio.Event()
        self.starting = asyncio.Lock()

    def write(self, offset: int, data: bytes) -> None:
        self.stdin[offset:] = data

    async def read(self, size: int) -> bytes:
        """Standard input as a file that is read once."""
        piece = bytes(self.stdin[:size])
        del self.stdin[:size]
        return piece


class ModalServer(ModalImages):
    """Control plane and command router, both on one port."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.faults = Faults(state / "rules.json")
        self.settings = {
            "max_live": None, "others_live": 0.0, "creates_per_s": None, "boot_s": 0.0,
            "list_lag_s": 0.0, "clock_offset_s": 0.0,
        }  # fmt: skip
        self.ended = Records(state / "ended")
        self.url = ""
        self._booting: dict[str, asyncio.Task[None]] = {}
        self._commands: dict[str, _Command] = {}

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return []

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls, state: Path, port: int = 0) -> AsyncIterator[tuple[Self, str]]:
        """As the other doubles. Control routes are on a port of their own: `server.control`."""
        async with super().serving(state) as (server, _):
            handlers = [
                _Handlers(server, base) for base in (ModalClientBase, TaskCommandRouterBase)
            ]
            grpc = _Server(handlers)
            listener = socket.create_server(("127.0.0.1", port))
            await grpc.start(sock=listener)
            server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                yield server, server.url
            finally:
                await grpc.end()
                await server.end_builds()

    # -- faults -----------------------------------------------------------------------------------

    async def handle(self, path: str, stream: Stream[Any, Any]) -> None:
        """One call: do what a rule says, or the work."""
        name = path.rsplit("/", 1)[1]
        headers = {str(key): str(value) for key, value in (stream.metadata or {}).items()}
        self.faults.log.append({"line": f"POST {path}", "headers": headers, "at": time.time()})
        request = await stream.recv_message()
        rule = self.faults.pick(
            f"POST {path}", self._caller(headers, request), self._about(request)
        )
        met_rule.set(rule)
        if rule is not None and rule.when == "before" and not rule.kill:
            await self._break(stream, rule)
        refusal: GRPCError | None = None
        answer = None
        try:
            self._check_token(name, headers)
            answer = await self._answered(name, request, stream)
        except GRPCError as error:
            refusal = error
        if rule is not None and rule.when == "after":
            await self._break(stream, rule)
        if refusal is not None:
            raise refusal
        if answer is not None:
            await stream.send_message(answer)

    async def _answered(self, name: str, request: Request, stream: Stream[Any, Any]) -> Any:
        """The answer; None if it has been streamed."""
        if name in UNARY:
            return await getattr(self, _snake(name))(request)
        if name == "TaskExecStdinWriteStream":
            return await self._stdin_write_stream(request, stream)
        if name == "TaskExecStdioRead":
            return await self._stdio_read(request, stream)
        if name == "ImageJoinStreaming":
            return await self._image_join_streaming(request, stream)
        raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not played")

    async def _break(self, stream: Stream[Any, Any], rule: Rule) -> None:
        """What this rule gives instead of an answer; nothing if it gives none.

        Raises: GRPCError; CancelledError when the call has ended without an answer.
        """
        await asyncio.sleep(rule.delay_s)
        if rule.hang:
            await asyncio.Event().wait()
        if rule.reset or rule.goaway:
            raise _aborted(stream)
        if rule.status is None or rule.status == DISK_FULL:
            return
        if isinstance(rule.body, str):  # from a proxy in front, which does not speak gRPC
            shown = [(":status", str(rule.status)), ("content-type", "text/html")]
            await stream._stream.send_headers(shown, end_stream=True)
            stream._send_trailing_metadata_done = True
            raise asyncio.CancelledError
        status = STATUSES.get(rule.status, Status.UNAVAILABLE)
        text = (rule.body or {}).get("message", f"injected {rule.status}")
        waits = retry_after(rule.headers)
        details = None if waits is None else [api_pb2.RPCRetryPolicy(retry_after_secs=waits)]
        raise GRPCError(status, text, details)

    def _caller(self, headers: Mapping[str, str], request: Request) -> tuple[str, str]:
        token = headers.get("x-modal-token-id") or headers.get("authorization", "")
        return token, getattr(request, "task_id", "")

    def _about(self, request: Request) -> str:
        tags = getattr(request, "tags", None)
        if tags:
            return json.dumps(_tags(tags))
        record = self._record(getattr(request, "sandbox_id", "") or _sandbox_of(request))
        return json.dumps(record["tags"]) if record is not None else ""

    def _check_token(self, name: str, headers: Mapping[str, str]) -> None:
        known = headers.get("x-modal-token-secret") or headers.get("authorization")
        if not known or (name.endswith("V2") and not headers.get("x-modal-auth-token")):
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")

    # -- control plane ----------------------------------------------------------------------------

    async def _client_hello(self, _: Request) -> Any:
        return api_pb2.ClientHelloResponse()

    async def _auth_token_get(self, _: Request) -> Any:
        return api_pb2.AuthTokenGetResponse(token=_jwt())

    async def _environment_get_or_create(self, _: Request) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def _app_get_or_create(self, request: Request) -> Any:
        app = f"ap-{request.app_name}"
        shown = api_pb2.AppHandleMetadata(description=request.app_name, app_id=app)
        return api_pb2.AppGetOrCreateResponse(app_id=app, handle_metadata=shown)

    async def _sandbox_create(self, request: Request) -> Any:
        record = self._made(request, uuid4().hex[:V1_LENGTH])
        return api_pb2.SandboxCreateResponse(
            sandbox_id=record["id"], metadata=api_pb2.SandboxHandleMetadata(app_id=record["app"])
        )

    async def _sandbox_create_v2(self, request: Request) -> Any:
        if request.definition.resources.gpu_config.count:
            raise GRPCError(Status.INVALID_ARGUMENT, "GPUs are not supported")
        record = self._made(request, uuid4().hex)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=record["id"],
            task_id=_task(record["id"]),
            metadata=api_pb2.SandboxHandleMetadata(app_id=record["app"]),
        )

    def _made(self, request: Request, suffix: str) -> dict[str, Any]:
        asked, now = request.definition, time.time()
        most = self.settings["max_live"]
        live = len(self.sandboxes.all()) + (self.settings["others_live"] or 0)
        if most is not None and live >= most:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"limit of {most:.0f} concurrent sandboxes")
        if self._named(request.app_id, asked.name) is not None:
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox {asked.name!r} already exists")
        if self.too_many_creates():
            details = [api_pb2.RPCRetryPolicy(retry_after_secs=1.0)]
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "too many creates", details)
        record = {
            "id": f"sb-{suffix}",
            "app": request.app_id,
            "name": asked.name,
            "argv": list(asked.entrypoint_args),
            "image": asked.image_id,
            "gpu": asked.resources.gpu_config.gpu_type,
            "memory_mb": asked.resources.memory_mb_max or LIMITS.memory_mb,
            "cpus": asked.resources.milli_cpu_max / 1000 or LIMITS.cpus,
            "network": asked.network_access.network_access_type,
            "cidrs": list(asked.network_access.allowed_cidrs),
            "domains": list(asked.network_access.allowed_domains),
            "tags": _tags(request.tags),
            "created": now,
            "ends": now + asked.timeout_secs,
            "state": "starting",
            "fails": (rule := met_rule.get()) is not None and rule.state == "ended",
        }
        self.sandboxes.write(record["id"], record)
        self._boot_later(record["id"])
        return record

    def _boot_later(self, identity: str) -> None:
        self._booting[identity] = asyncio.create_task(self._boot(identity))
        self._booting[identity].add_done_callback(lambda _: self._booting.pop(identity, None))

    async def _boot(self, identity: str) -> None:
        await asyncio.sleep(self.settings["boot_s"] or 0)
        record = self.sandboxes.read(identity)
        if record is None:
            return
        limits = LIMITS.model_copy(
            update={"memory_mb": record["memory_mb"], "cpus": record["cpus"]}
        )
        spec = SandboxSpec(HOME, env={"HOME": HOME}, limits=limits, ttl_s=2 * 86400)
        box = await self.guests.create(spec, identity)
        await box.start(MAIN, Exec(record["argv"], cwd="/"))
        if record["fails"]:
            await box.wait(MAIN)
            await self._look_after(identity)
        if (record := self.sandboxes.read(identity)) is None:
            await self.guests.kill(identity)  # terminated meanwhile
        else:
            self.sandboxes.write(identity, {**record, "state": "running"})

    def _record(self, identity: str) -> dict[str, Any] | None:
        record: dict[str, Any] | None = self.sandboxes.read(identity) if identity else None
        return record

    def _known(self, request: Request) -> dict[str, Any]:
        record = self._record(request.sandbox_id)
        if record is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {request.sandbox_id} not found")
        return record

    def _named(self, app: str, name: str) -> dict[str, Any] | None:
        alike = (one for one in self.sandboxes.all() if one["app"] == app and one["name"] == name)
        return next(alike, None) if name else None

    async def _sandbox_get_from_name(self, request: Request) -> Any:
        return self._found(request, is_v1=True)

    async def _sandbox_get_from_name_v2(self, request: Request) -> Any:
        return self._found(request, is_v1=False)

    def _found(self, request: Request, *, is_v1: bool) -> Any:
        record = self._named(f"ap-{request.app_name}", request.sandbox_name)
        if record is None or _is_v1(record["id"]) != is_v1:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {request.sandbox_name!r} not found")
        return api_pb2.SandboxGetFromNameResponse(
            sandbox_id=record["id"], metadata=api_pb2.SandboxHandleMetadata(app_id=record["app"])
        )

    async def _sandbox_list(self, request: Request) -> Any:
        newest = time.time() - (self.settings["list_lag_s"] or 0)
        before = request.before_timestamp or time.time() + 1e9
        wanted, offset = _tags(request.tags), self.settings["clock_offset_s"] or 0
        found = [
            record
            for record in self.sandboxes.all()
            if record["app"] == request.app_id
            and record["created"] <= newest
            and record["created"] + offset < before
            and wanted.items() <= record["tags"].items()
        ]
        found.sort(key=lambda record: record["created"], reverse=True)
        shown = [
            api_pb2.SandboxInfo(
                id=record["id"],
                created_at=record["created"] + offset,
                app_id=record["app"],
                name=record["name"],
                tags=_tag_messages(record["tags"]),
                metadata=api_pb2.SandboxHandleMetadata(app_id=record["app"]),
            )
            for record in found[:100]
        ]
        return api_pb2.SandboxListResponse(sandboxes=shown)

    async def _sandbox_tags_get(self, request: Request) -> Any:
        tags = _tag_messages(self._known(request)["tags"])
        return api_pb2.SandboxTagsGetResponse(tags=tags)

    async def _sandbox_tags_set(self, request: Request) -> Any:
        from google.protobuf.empty_pb2 import Empty

        record = self._known(request)
        self.sandboxes.write(record["id"], {**record, "tags": _tags(request.tags)})
        return Empty()

    async def _sandbox_get_task_id(self, request: Request) -> Any:
        return api_pb2.SandboxGetTaskIdResponse(task_id=_task(self._known(request)["id"]))

    async def _sandbox_get_command_router_access(self, request: Request) -> Any:
        self._known(request)
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self.url, jwt=_jwt())

    async def _task_get_command_router_access(self, request: Request) -> Any:
        return api_pb2.TaskGetCommandRouterAccessResponse(url=self.url, jwt=_jwt())

    async def _sandbox_wait(self, request: Request) -> Any:
        end = time.monotonic() + request.timeout
        while (result := self._result(request.sandbox_id)) is None and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return api_pb2.SandboxWaitResponse(result=result)

    def _result(self, identity: str) -> Any:
        """How it ended; None if it is alive."""
        if self._record(identity) is not None:
            return None
        ended = self.ended.read(identity)
        if ended is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {identity} not found")
        return api_pb2.GenericResult(status=ended["status"], exitcode=ended["code"])

    async def _sandbox_terminate(self, request: Request) -> Any:
        if self._result(request.sandbox_id) is None:
            await self._end(request.sandbox_id, api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
        return api_pb2.SandboxTerminateResponse()

    _sandbox_get_task_id_v2 = _sandbox_get_task_id
    _sandbox_list_v2 = _sandbox_list
    _sandbox_tags_get_v2 = _sandbox_tags_get
    _sandbox_tags_set_v2 = _sandbox_tags_set
    _sandbox_terminate_v2 = _sandbox_terminate
    _sandbox_wait_v2 = _sandbox_wait

    async def _end(self, identity: str, status: int, code: int = 137) -> None:
        """End it. If this is interrupted, the next check of the state continues it."""
        if (record := self._record(identity)) is None:
            return
        self.sandboxes.write(identity, {**record, "state": "destroying"})
        if self.ended.read(identity) is None:
            self.ended.write(identity, {"status": status, "code": code})
        await self.guests.kill(identity)
        self.sandboxes.remove(identity)

    async def expire(self) -> None:
        """End what has outlived its time limit, or whose first process has ended."""
        for record in self.sandboxes.all():
            if record["state"] == "destroying":
                await self._end(record["id"], api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
            elif record["ends"] < time.time():
                await self._end(record["id"], api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT)
            elif record["state"] == "running":
                await self._look_after(record["id"])
            elif record["id"] not in self._booting:
                self._boot_later(record["id"])  # an earlier server was killed as it booted

    async def _look_after(self, identity: str) -> None:
        try:
            box = await self.guests.found(identity)
            ended = None if box is None else await box.poll(MAIN)
        except (NotFound, SandboxLost):
            ended = None
        if ended is not None and ended.state is ExecState.RUNNING:
            return
        code = ended.code if ended is not None and ended.code is not None else 137
        result = api_pb2.GenericResult
        status = result.GENERIC_STATUS_FAILURE if code else result.GENERIC_STATUS_SUCCESS
        await self._end(identity, status, code)

    # -- command router ---------------------------------------------------------------------------

    async def _box(self, request: Request) -> NamespaceSandbox:
        identity, rule = _sandbox_of(request), met_rule.get()
        if rule is not None and rule.kill and rule.when == "before":
            await self._end(identity, api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
        if (booting := self._booting.get(identity)) is not None:
            await asyncio.shield(booting)
        record = self._record(identity)
        running = record is not None and record["state"] == "running"
        box = await self.guests.found(identity) if running else None
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"Task {request.task_id} not found")
        return box

    async def _task_exec_start(self, request: Request) -> Any:
        await self._box(request)
        rule = met_rule.get()
        runs = 2 if rule is not None and rule.twice else 1
        self._commands.setdefault(request.exec_id, _Command(request, runs))
        if rule is not None and rule.kill:
            await self._end(_sandbox_of(request), api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
        return router.TaskExecStartResponse()

    def _command(self, request: Request) -> _Command:
        if (found := self._commands.get(request.exec_id)) is None:
            raise GRPCError(Status.NOT_FOUND, f"exec {request.exec_id} not found")
        return found

    async def _task_exec_stdin_write(self, request: Request) -> Any:
        await self._box(request)
        command = self._command(request)
        if not command.stdin_is_closed:
            command.write(request.offset, request.data)
            command.stdin_is_closed = request.eof
        return router.TaskExecStdinWriteResponse()

    async def _stdin_write_stream(self, first: Request, stream: Stream[Any, Any]) -> Any:
        box = await self._box(first.start)
        command, offset = self._command(first.start), first.start.offset
        async for message in stream:
            if message.HasField("end"):
                break
            command.write(offset, message.data)
            offset += len(message.data)
        if command.asked.command_args[0] == FS_TOOLS:
            await self._write_file(box, command)
            command.is_uploaded.set()
        command.stdin_is_closed = True
        return router.TaskExecStdinWriteStreamResponse()

    async def _write_file(self, box: NamespaceSandbox, command: _Command) -> None:
        """What the SDK's program inside does for an upload."""
        order, rule = json.loads(command.asked.command_args[1]), met_rule.get()
        if "WriteFile" not in order:
            raise GRPCError(Status.UNIMPLEMENTED, f"{sorted(order)} is not played")
        if rule is not None and rule.status == DISK_FULL:
            command.argv = ["sh", "-c", f"echo {shlex.quote(NO_SPACE)} >&2; exit 1"]
            return
        await self.store(box, order["WriteFile"]["path"], command)

    async def _task_exec_stdin_status(self, request: Request) -> Any:
        command = self._command(request)
        return router.TaskExecStdinStatusResponse(
            num_bytes_written=len(command.stdin), closed=command.stdin_is_closed
        )

    async def _started(self, request: Request) -> NamespaceSandbox:
        """The box, in which the command has started."""
        box, command = await self._box(request), self._command(request)
        if command.asked.command_args[0] == FS_TOOLS:
            await command.is_uploaded.wait()
        async with command.starting:
            if command.is_started:
                return box
            asked, stdin = command.asked, bytes(command.stdin)
            limit, cwd = asked.timeout_secs or None, asked.workdir or HOME
            for number in reversed(range(command.runs)):
                exec_id = asked.exec_id if number == 0 else f"{asked.exec_id}-unheard"
                order = Exec(command.argv, _env(asked), cwd, stdin=stdin, timeout_s=limit)
                await box.start(exec_id, order)
            command.is_started = True
        return box

    async def _stdio_read(self, request: Request, stream: Stream[Any, Any]) -> None:
        box, rule = await self._started(request), met_rule.get()
        is_out = request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        name: Any = "stdout" if is_out else "stderr"
        at = request.offset
        while True:
            is_over = (await self._poll(box, request)).done
            while data := await box.output(request.exec_id, name, at, PIECE):
                at += len(data)
                if rule is not None and rule.stream == "truncated":
                    data = data[: len(data) // 2]
                await stream.send_message(router.TaskExecStdioReadResponse(data=data))
                if rule is not None and rule.stream == "cut":
                    raise _aborted(stream)
            if is_over:
                return
            await asyncio.sleep(0.01)

    async def _poll(self, box: NamespaceSandbox, request: Request) -> ExecStatus:
        try:
            return await box.poll(request.exec_id)
        except (SandboxLost, NotFound, FileNotFoundError):
            raise GRPCError(Status.NOT_FOUND, f"Task {request.task_id} not found") from None

    async def _task_exec_poll(self, request: Request) -> Any:
        status = await self._poll(await self._started(request), request)
        return router.TaskExecPollResponse(**_ended(status))

    async def _task_exec_wait(self, request: Request) -> Any:
        box = await self._started(request)
        while not (status := await self._poll(box, request)).done:
            await asyncio.sleep(0.01)
        return router.TaskExecWaitResponse(**_ended(status))


# -- how things look on the wire ------------------------------------------------------------------


def _path(base: type[Any], name: str) -> str:
    service = "client.ModalClient" if base is ModalClientBase else ROUTER
    return f"/modal.{service}/{name}"


def _snake(name: str) -> str:
    return re.sub(r"(?=[A-Z])", "_", name).lower()


def _jwt() -> str:
    body = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + JWT_S}).encode()).decode()
    return f"e30.{body}.x"


def _is_v1(sandbox: str) -> bool:
    return len(sandbox.removeprefix("sb-")) == V1_LENGTH


def _task(sandbox: str) -> str:
    """V2 tasks end in V."""
    return f"ta-{sandbox.removeprefix('sb-')}{'' if _is_v1(sandbox) else 'V'}"


def _sandbox_of(request: Request) -> str:
    task = getattr(request, "task_id", "")
    return f"sb-{task.removeprefix('ta-').removesuffix('V')}" if task else ""


def _tags(messages: Iterable[Any]) -> dict[str, str]:
    return {tag.tag_name: tag.tag_value for tag in messages}


def _tag_messages(tags: Mapping[str, str]) -> list[Any]:
    return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]


def _env(asked: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in asked.secret_sources:
        found |= dict(source.env.contents) if source.HasField("env") else {}
    return found


def _ended(status: ExecStatus) -> dict[str, int]:
    if status.state is ExecState.EXITED:
        return {"code": status.code or 0}
    return {"signal": status.signal or 9} if status.done else {}


def _aborted(stream: Stream[Any, Any]) -> BaseException:
    """Cut the connection without an answer."""
    stream._stream.connection._transport.abort()
    return asyncio.CancelledError()


serving = ModalServer.serving


def main() -> None:
    service_double.run(ModalServer, lambda url: f"MODAL_SERVER_URL={url}", 3989, __doc__)


if __name__ == "__main__":
    main()
