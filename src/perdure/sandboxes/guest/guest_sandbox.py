"""What sandboxes on other hosts share: a guest program inside them runs commands and handles files.

The guest keeps durable records, so every order may be repeated after a lost answer. Trees and mounts
are packed once and uploaded. Each provider defines how an order reaches the guest.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import shlex
import zlib
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    DiskFull,
    NotFound,
    PerdureError,
    SandboxLost,
)
from perdure.sandboxes.agent_user import ENVIRONMENT, HOME
from perdure.sandboxes.base import (
    Exec,
    ExecResult,
    ExecState,
    ExecStatus,
    Mount,
    Sandbox,
    SandboxSpec,
)
from perdure.sandboxes.guest.folder_archives import pack
from perdure.sandboxes.guest.service_retries import retry_transient
from perdure.sandboxes.host.exec_records import argv_digest
from perdure.sandboxes.spec_validation import check_argv, check_exec_id, check_variables

FOLDER = "/var/lib/perdure"
PROGRAMS = (
    "guest.py", "guest_commands.py", "guest_entry.py", "guest_files.py", "guest_processes.py",
    "guest_records.py", "guest_supervisor.py",
)  # fmt: skip
"""Files of `guest/in_sandbox` that are installed together."""
PYTHON = "exec python3 -I -S -c"
"""`-I -S`: without the image's site-packages."""
CALL = (
    f"{PYTHON} 'import sys; sys.argv[1:] = sys.stdin.read().split(); "
    f'sys.path.insert(0, "{FOLDER}"); import guest_entry; guest_entry.main()\''
)
"""Reads the order from standard input, because other users can list arguments."""
INSTALL = f"""
import base64, json, os, sys, zlib
had = os.umask(0o077)
os.makedirs("{FOLDER}", exist_ok=True)
for name, text in json.loads(zlib.decompress(base64.b64decode(sys.argv[1]))).items():
    path = "{FOLDER}/" + name
    if not os.path.exists(path) or open(path).read() != text:
        draft = path + "." + os.urandom(4).hex()
        with open(draft, "w") as file:
            file.write(text)
        os.replace(draft, path)
os.umask(had)
sys.argv[1:] = sys.stdin.read().split()
sys.path.insert(0, "{FOLDER}")
import guest_entry
guest_entry.main()
"""
"""Its argument holds the guest's files. It reads the order from standard input, as CALL does. Files
with the same text are not replaced."""
MARK = "perdure-answer:"
INLINE_BYTES = 60_000
"""Longer orders are uploaded: a service may pass the line as one argument, and the kernel limits an
argument to 128 KiB."""
PIECE = 1 << 20
WATCH_S = 5.0
"""Seconds that one call waits in the guest for a command's end."""


class DiskTooSmall(ConfigurationError):
    """The service has no room for an upload."""


class GuestSandbox(Sandbox):
    waits_inside = True
    users = ("agent", "root")
    service: ClassVar[str]
    """The service's name in messages."""
    room: ClassVar[int] = 0
    """Bytes of the sandbox's own disk that commands cannot use. `end_all` frees them. 0: the disk
    is shared, or its files count as memory."""

    def __init__(self, identity: str, workdir: str, *, packs: Path) -> None:
        """`packs`: the folder of this host that caches archives."""
        self.identity, self.workdir, self._packs = identity, workdir, packs
        self._unanswered = False
        """The last call got no answer. The guest may be missing or of another version."""
        self._is_new = False
        """No command has run in it yet, so a missing program is missing in its image."""

    @abstractmethod
    async def _print(self, what: str, command: str, extra_s: float) -> str:
        """Run one shell line as root and return its output. The line may wait `extra_s` seconds.

        Raises: ControlPlaneError when the call may be repeated; SandboxLost; ConfigurationError.
        """

    @abstractmethod
    async def _write(self, path: str, data: bytes | Path) -> None:
        """Upload as root to a new path. Raises as `_print` does."""

    async def start(self, exec_id: str, command: Exec) -> None:
        self.check_user(command.user)
        await self._guest("start", **_order(exec_id, command))

    async def _to_end(self, command: Exec) -> ExecResult:
        """In one call if the command is short and prints little."""
        self.check_user(command.user)
        exec_id = f"x-{uuid4().hex}"
        found = await self._guest("run", seconds=WATCH_S, **_order(exec_id, command))
        status = _status(found)
        if not status.done:
            status = await self.wait(exec_id)
        out, err = [
            await self._rest(exec_id, stream, found.get(name))
            for stream, name in (("stdout", "out"), ("stderr", "err"))
        ]
        return ExecResult(status, out, err)

    async def _rest(self, exec_id: str, stream: Any, begun: Mapping[str, Any] | None) -> bytes:
        """The whole output. `begun` may hold its beginning."""
        data = _bytes_of(begun) if begun is not None else b""
        if begun is not None and begun["size"] <= len(data):
            return data
        return data + await self.output(exec_id, stream, len(data))

    async def extend(self, exec_id: str, timeout_s: float) -> None:
        check_exec_id(exec_id)
        await self._guest("extend", exec_id=exec_id, timeout=timeout_s)

    async def poll(self, exec_id: str) -> ExecStatus:
        check_exec_id(exec_id)
        return _status(await self._guest("poll", exec_id=exec_id))

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        check_exec_id(exec_id)
        loop = asyncio.get_running_loop()
        end = math.inf if timeout_s is None else loop.time() + timeout_s
        while True:
            seconds = max(0.0, min(WATCH_S, end - loop.time()))
            status = _status(await self._guest("wait", exec_id=exec_id, seconds=seconds))
            if status.done or loop.time() >= end:
                return status

    async def output(
        self,
        exec_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: int = 0,
        limit: int = 1 << 24,
    ) -> bytes:
        check_exec_id(exec_id)
        name = "out" if stream == "stdout" else "err"
        return await self._range("output", offset, limit, exec_id=exec_id, stream=name)

    async def next_output(
        self, exec_id: str, offset: int, limit: int = 1 << 24, *, wait_s: float
    ) -> bytes:
        check_exec_id(exec_id)
        order = {"exec_id": exec_id, "stream": "out", "seconds": wait_s}
        size = min(PIECE, limit)
        return await retry_transient(lambda: self._piece("output", offset, size, order))

    async def signal(self, exec_id: str, signum: int) -> None:
        check_exec_id(exec_id)
        await self._guest("signal", exec_id=exec_id, signum=int(signum))

    async def end_all(self) -> None:
        await self._guest("end_all")

    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        await self._place(data, path=path, mode=mode)

    async def put_as_root(self, path: str, data: bytes | Path) -> None:
        """By the guest, because root's commands lack the capability to write in the agent's folders."""
        await self._place(data, path=path, mode=0o644, as_root=True)

    async def _place(self, data: bytes | Path, **order: Any) -> None:
        if isinstance(data, bytes) and len(data) <= INLINE_BYTES // 2:
            sha256, text = hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode()
            await self._guest("place", sha256=sha256, data=text, **order)
            return
        sha256 = await asyncio.to_thread(_digest, data)
        await retry_transient(lambda: self._deliver("place", data, sha256=sha256, **order))

    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        return await self._range("read", offset, limit, path=path)

    # -- set-up -----------------------------------------------------------------------------------

    async def set_up(self, spec: SandboxSpec) -> None:
        """Upload everything that the spec asks for. May run repeatedly and in several workers."""
        mounts = sorted(self._sent(spec), key=lambda mount: mount.target.count("/"))
        targets = [mount.target for mount in mounts]
        targets += [spec.workdir] if spec.tree is not None else []
        settings = self._settings(spec)
        self._is_new = True
        at_once = None if spec.sidecars else settings  # with settings, it may end the set-up
        begun = await retry_transient(lambda: self._begin(targets, at_once))
        self._is_new = False
        if begun["ready"]:
            return
        for mount in mounts:
            if mount.target in begun["missing"]:
                await self._bring(mount)
        if spec.tree is not None and spec.workdir in begun["missing"]:
            await self._unpack(spec.tree, spec.workdir, agent_owned=True)
        if spec.sidecars:
            await self._boot_sidecars(spec)
        await self._guest("ready", **settings)

    async def _boot_sidecars(self, spec: SandboxSpec) -> None:
        """May run repeatedly. Only for providers that run them."""
        raise NotImplementedError

    def _settings(self, spec: SandboxSpec) -> dict[str, Any]:
        """What every later command needs."""
        env = {**ENVIRONMENT, **self._environment(), **spec.env}
        output = spec.limits.output_mb << 20
        own: dict[str, Any] = {"seal": seal} if (seal := self._seal()) is not None else {}
        own |= {"room": self.room} if self.room else {}
        return {"workdir": spec.workdir, "home": HOME, "env": env, "output": output, **own}

    async def _begin(
        self, targets: Sequence[str], settings: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Install the guest and ask which targets are missing. If none is, the set-up is done."""
        order = {"op": "begin", "targets": targets, "settings": settings}
        line = _line(_installing(), _argument(order))
        if len(line) > INLINE_BYTES and settings is not None:
            return await self._begin(targets, None)
        return self._accepted(await self._run("set-up", line), {})

    def _lacking(self, blame: PerdureError) -> PerdureError:
        """The error for a missing program: `blame` names the image, unless a command has run."""
        if self._is_new:
            return blame
        return SandboxLost(f"a command has removed python3 or a shell tool: {blame}")

    async def _bring(self, mount: Mount) -> None:
        if mount.source.is_dir():
            await self._unpack(mount.source, mount.target, agent_owned=False)
        else:
            mode = mount.source.stat().st_mode & 0o777
            await self.put(mount.target, mount.source, mode=mode)

    def _sent(self, spec: SandboxSpec) -> Sequence[Mount]:
        """The mounts to upload: all, except those that the sandbox already has."""
        return spec.mounts

    def _environment(self) -> Mapping[str, str]:
        """Variables of the image."""
        return {}

    def _seal(self) -> Mapping[str, str] | None:
        """Machine -> system-call filter, if the provider makes plain containers."""
        return None

    async def _unpack(self, folder: Path, target: str, *, agent_owned: bool) -> None:
        packed = await asyncio.to_thread(pack, folder, self._packs)
        order = {"target": target, "sha256": packed.sha256, "agent_owned": agent_owned}
        await retry_transient(lambda: self._deliver("unpack", packed.path, **order))

    async def _deliver(self, op: str, data: bytes | Path, **order: Any) -> None:
        """Upload `data` for the guest to verify and use. An incomplete upload is sent again."""
        staged = f"{FOLDER}/staged/{uuid4().hex}"
        command = _line(self._caller(), _argument({"op": op, "staged": staged, **order}))
        printing = self._write_and_print(op, staged, data, command)
        self._accepted(await self._answer(op, printing), order)

    async def _write_and_print(self, what: str, path: str, data: bytes | Path, command: str) -> str:
        """Upload, then run a line that uses it; in one call if the provider can."""
        await self._write(path, data)
        return await self._print(what, command, 0.0)

    async def _upload(self, data: bytes | Path) -> str:
        staged = f"{FOLDER}/staged/{uuid4().hex}"
        await self._write(staged, data)
        return staged

    # -- the guest --------------------------------------------------------------------------------

    async def _guest(self, op: str, **order: Any) -> dict[str, Any]:
        """One operation of the guest, repeated until it is answered."""
        return await retry_transient(lambda: self._guest_once(op, **order))

    async def _guest_once(self, op: str, **order: Any) -> dict[str, Any]:
        call = {"op": op, **order}
        argument = _argument(call)
        if len(argument) > INLINE_BYTES:
            try:
                staged = await self._upload(json.dumps(call).encode())
            except DiskTooSmall as error:  # the set-up fitted: commands filled the disk
                raise DiskFull(
                    f"sandbox {self.identity!r} has no disk space left: {error}"
                ) from error
            argument = f"order:{base64.b64encode(staged.encode()).decode()}"
        command = _line(self._caller(), argument)
        answer = await self._run(op, command, extra_s=order.get("seconds", 0.0))
        return self._accepted(answer, order)

    def _caller(self) -> str:
        return _installing() if self._unanswered else CALL

    def _accepted(self, answer: dict[str, Any], order: Mapping[str, Any]) -> dict[str, Any]:
        message = answer.get("message", "")
        match answer.get("refused"):
            case None:
                return answer
            case "unknown":
                raise NotFound(
                    f"exec_id {order['exec_id']!r} was never started in sandbox {self.identity!r}"
                )
            case "argv":
                raise ConfigurationError(
                    f"exec_id {order['exec_id']!r} was started with another argv; use a new exec_id"
                )
            case "missing":
                raise NotFound(f"{order.get('path')!r} in sandbox {self.identity!r}: {message}")
            case "full":
                lost = DiskFull if self.room else SandboxLost
                raise lost(f"sandbox {self.identity!r} has no disk space left: {message}")
            case "busy":
                raise ControlPlaneError(
                    f"sandbox {self.identity!r} is out of processes, files or memory: {message}"
                )
            case "short":
                raise ControlPlaneError(
                    f"{self.service}: {message}: {order.get('path', order.get('target'))}"
                )
        raise ConfigurationError(f"sandbox {self.identity!r} refused the order: {message}")

    async def _run(self, what: str, command: str, *, extra_s: float = 0.0) -> dict[str, Any]:
        return await self._answer(what, self._print(what, command, extra_s))

    async def _answer(self, what: str, printing: Awaitable[str]) -> dict[str, Any]:
        try:
            answer = self._answer_in(what, await printing)
        except ControlPlaneError:
            self._unanswered = True
            raise
        self._unanswered = False
        return answer

    def _answer_in(self, what: str, said: str) -> dict[str, Any]:
        """Only the guest's marked line is an answer. Exit codes and closed streams are hints."""
        for line in reversed(said.splitlines()):
            if line.startswith(MARK):
                with contextlib.suppress(ValueError):
                    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return answer
        raise ControlPlaneError(
            f"{self.service}: {what}: the command's answer was lost: {said[-300:]!r}"
        )

    async def _range(self, op: str, offset: int, limit: int | None, **order: Any) -> bytes:
        pieces, left = [], math.inf if limit is None else max(0, limit)
        while left > 0:
            size = int(min(PIECE, left))
            piece = await retry_transient(
                lambda size=size, at=offset: self._piece(op, at, size, order)  # type: ignore[misc]
            )
            pieces.append(piece)
            offset, left = offset + len(piece), left - len(piece)
            if len(piece) < size:
                break
        return b"".join(pieces)

    async def _piece(self, op: str, offset: int, size: int, order: Mapping[str, Any]) -> bytes:
        answer = await self._guest_once(op, offset=offset, limit=size, **order)
        return _bytes_of(answer)


def _installing() -> str:
    """CALL that first installs the guest if it is missing or of another version."""
    folder = resources.files("perdure.sandboxes.guest.in_sandbox")
    programs = {name: folder.joinpath(name).read_text() for name in PROGRAMS}
    packed = base64.b64encode(zlib.compress(json.dumps(programs).encode())).decode()
    return f"{PYTHON} {shlex.quote(INSTALL)} {packed}"


def _line(caller: str, argument: str) -> str:
    """A shell line. The shell runs `echo` itself, so no process's arguments hold the order."""
    return f"echo {argument} | {caller}"


def _argument(call: Mapping[str, Any]) -> str:
    return f"call:{base64.b64encode(json.dumps(call).encode()).decode()}"


def _order(exec_id: str, command: Exec) -> dict[str, Any]:
    check_argv(command.argv)
    check_exec_id(exec_id)
    check_variables(command.env)
    stdin = command.stdin
    return {
        "exec_id": exec_id,
        "argv": list(command.argv),
        "digest": argv_digest(command.argv),
        "env": dict(command.env),
        "cwd": command.cwd,
        "root": command.user == "root",
        "stdin": base64.b64encode(stdin).decode() if stdin is not None else None,
        "timeout": command.timeout_s,
    }


def _bytes_of(answer: Mapping[str, Any]) -> bytes:
    data = base64.b64decode(answer["data"])
    if hashlib.sha256(data).hexdigest() != answer["sha256"]:
        raise ControlPlaneError("the answer of the sandbox was damaged in transit")
    return data


def _status(found: Mapping[str, Any]) -> ExecStatus:
    return ExecStatus(
        ExecState(found["state"]),
        code=found.get("code"),
        cause=found.get("cause"),
        signal=found.get("signal"),
        seconds=found.get("seconds"),
    )


def _digest(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
