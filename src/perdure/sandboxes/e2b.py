"""The `e2b` provider: sandboxes of E2B or a service that speaks its protocol, through its SDK.

An identity is the idempotency key of its create and stands in the metadata. Commands run under the
guest program (`guest`), whose records survive every lost answer. Trees and mounts are uploaded.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import uuid4

from perdure.errors import ConfigurationError, ControlPlaneError, NotFound, OutcomeUnknown
from perdure.sandboxes.base import (
    ExecResult,
    ExecState,
    ExecStatus,
    Network,
    Sandbox,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
)
from perdure.sandboxes.box import check_identity
from perdure.sandboxes.bubblewrap import ENVIRONMENT, HOME
from perdure.sandboxes.e2b_calls import Conflict, Missing, again, lost, typed
from perdure.sandboxes.execs import EXEC_ID, argv_digest
from perdure.sandboxes.host import _check_argv, _checked
from perdure.sandboxes.packs import pack

if TYPE_CHECKING:
    from e2b import AsyncSandbox

T = TypeVar("T")

FOLDER = "/var/lib/perdure"
GUEST = f"{FOLDER}/guest.py"
MARK = "perdure-answer:"
INLINE_BYTES = 60_000
"""Longer orders are uploaded: the kernel bounds an argument at 128 KiB."""
PIECE = 1 << 20
REQUEST_S = 60.0
WATCH_S = 5.0
"""One waiting call; the guest looks by itself meanwhile."""
MOST_KEYS = 8
"""Idempotency keys tried for one identity: a killed sandbox's key is spent."""
LIST_LAG_S = 2.0
"""A sandbox may be missing from the list for so long after its create."""
OWN = "perdure_"
TEMPLATE = re.compile(r"[a-z0-9][a-z0-9_-]*(?:/[a-z0-9][a-z0-9_-]*)?(?::[A-Za-z0-9._-]+)?")


@dataclass(frozen=True)
class Connection:
    """How to call: everything by name from the environment, read by the SDK itself."""

    request_s: float = REQUEST_S

    @property
    def options(self) -> dict[str, Any]:
        return {"retries": 0, "request_timeout": self.request_s}


class E2BSandbox(Sandbox):
    def __init__(
        self, provider: "E2BProvider", sdk: "AsyncSandbox", identity: str, own: Mapping[str, str]
    ) -> None:
        self.provider, self.sdk, self.identity = provider, sdk, identity
        self.workdir = own.get(f"{OWN}workdir", "/")

    async def start(
        self,
        exec_id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        await self._guest(
            "start",
            **_order(exec_id, argv, env=env, cwd=cwd, user=user, stdin=stdin, timeout_s=timeout_s),
        )

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        check: bool = False,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """As everywhere, in one call where the command is short and says little."""
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        exec_id = f"x-{uuid4().hex}"
        order = _order(exec_id, argv, env=env, cwd=cwd, user=user, stdin=None, timeout_s=timeout)
        found = await self._guest("run", seconds=WATCH_S, **order)
        status = _status(found)
        if not status.done:
            status = await self.wait(exec_id)
        out, err = [
            await self._rest(exec_id, stream, found.get(name))
            for stream, name in (("stdout", "out"), ("stderr", "err"))
        ]
        if check and not status.ok:
            tail = (err or out)[-2000:].decode("utf-8", "replace")
            raise RuntimeError(f"{shlex.join(argv)[:200]} ended as {status}: {tail}")
        return ExecResult(status, out, err)

    async def _rest(self, exec_id: str, stream: Any, begun: Mapping[str, Any] | None) -> bytes:
        """A whole output of which `begun` may be the beginning."""
        data = _bytes_of(begun) if begun is not None else b""
        if begun is not None and begun["size"] <= len(data):
            return data
        return data + await self.output(exec_id, stream, len(data))

    async def poll(self, exec_id: str) -> ExecStatus:
        _check_exec_id(exec_id)
        return _status(await self._guest("poll", exec_id=exec_id))

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        _check_exec_id(exec_id)
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
        _check_exec_id(exec_id)
        name = "out" if stream == "stdout" else "err"
        return await self._range("output", offset, limit, exec_id=exec_id, stream=name)

    async def signal(self, exec_id: str, signum: int) -> None:
        _check_exec_id(exec_id)
        await self._guest("signal", exec_id=exec_id, signum=int(signum))

    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        if isinstance(data, bytes) and len(data) <= INLINE_BYTES // 2:
            sha256, text = hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode()
            await self._guest("place", path=path, sha256=sha256, mode=mode, data=text)
            return
        sha256 = await asyncio.to_thread(_digest, data)

        async def send() -> None:  # what did not arrive whole is sent again, not only placed again
            staged = await self._upload(data)
            await self._guest_once("place", path=path, sha256=sha256, mode=mode, staged=staged)

        await again(send)

    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        return await self._range("read", offset, limit, path=path)

    async def touch(self, ttl_s: float) -> None:
        await self._call(
            "set_timeout",
            lambda: self.sdk.set_timeout(math.ceil(ttl_s), **self.provider.connection.options),
        )

    async def kill(self) -> None:
        await self.provider.kill(self.identity)

    # -- set-up -----------------------------------------------------------------------------------

    async def set_up(self, spec: SandboxSpec) -> None:
        """Everything the spec asks for is inside afterwards, however often and by whomever run."""
        if (await again(self._install_guest))["ready"]:
            return
        for mount in sorted(spec.mounts, key=lambda mount: mount.target.count("/")):
            if mount.source.is_dir():
                await self._unpack(mount.source, mount.target, owned=False)
            else:
                mode = mount.source.stat().st_mode & 0o777
                await self.put(mount.target, mount.source, mode=mode)
        if spec.tree is not None:
            await self._unpack(spec.tree, spec.workdir, owned=True)
        env = {**ENVIRONMENT, **spec.env}
        output = spec.limits.output_mb << 20
        await self._guest("ready", workdir=spec.workdir, home=HOME, env=env, output=output)

    async def _install_guest(self) -> dict[str, Any]:
        program = resources.files("perdure.sandboxes").joinpath("guest.py").read_bytes()
        text = base64.b64encode(program).decode()
        draft = f"{GUEST}.{uuid4().hex}"
        return await self._run(
            "set-up",
            f"umask 077 && mkdir -p {FOLDER} && printf %s {text} | base64 -d >{draft}"
            f" && mv {draft} {GUEST} && {_command({'op': 'hello'})}",
        )

    async def _unpack(self, folder: Path, target: str, *, owned: bool) -> None:
        if (await self._guest("unpacked", target=target))["done"]:
            return
        packed = await asyncio.to_thread(pack, folder, self.provider.root / "packs")

        async def send() -> None:
            staged = await self._upload(packed.path)
            order = {"archive": staged, "target": target, "sha256": packed.sha256, "owned": owned}
            await self._guest_once("unpack", **order)

        await again(send)

    async def _upload(self, data: bytes | Path) -> str:
        staged = f"{FOLDER}/staged/{uuid4().hex}"

        async def write() -> None:
            options: Any = {"user": "root", "request_timeout": self.provider.connection.request_s}
            if isinstance(data, bytes):
                await self.sdk.files.write(staged, data, **options)
            else:
                with data.open("rb") as file:
                    await self.sdk.files.write(staged, file, **options)

        await self._once("upload", write)
        return staged

    # -- the guest --------------------------------------------------------------------------------

    async def _guest(self, op: str, **order: Any) -> dict[str, Any]:
        """One operation of the guest, again while its answer does not come."""
        return await again(lambda: self._guest_once(op, **order))

    async def _guest_once(self, op: str, **order: Any) -> dict[str, Any]:
        call = {"op": op, **order}
        command = _command(call)
        if len(command) > INLINE_BYTES:
            staged = await self._upload(json.dumps(call).encode())
            command = f"python3 -I {GUEST} order:{base64.b64encode(staged.encode()).decode()}"
        answer = await self._run(op, command, extra_s=order.get("seconds", 0.0))
        return self._accepted(answer, order)

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
            case "short":
                raise ControlPlaneError(f"E2B: {message}: {order.get('path', order.get('target'))}")
        raise ConfigurationError(f"sandbox {self.identity!r} cannot do it: {message}")

    async def _run(self, what: str, command: str, *, extra_s: float = 0.0) -> dict[str, Any]:
        """The guest's marked line is the only answer; exit codes and ends of streams are hints."""
        seconds = self.provider.connection.request_s + extra_s

        async def run() -> str:
            from e2b import CommandExitException

            try:
                done = await self.sdk.commands.run(
                    command, user="root", timeout=seconds, request_timeout=seconds, cwd="/"
                )
            except CommandExitException as error:
                if error.exit_code == 127:
                    raise ConfigurationError(
                        f"the template of sandbox {self.identity!r} lacks python3 or a shell tool: "
                        f"{error.stderr[-300:]}"
                    ) from error
                return f"{error.stdout}\n{error.stderr[-300:]}"
            return done.stdout

        said = await self._once(what, run)
        for line in reversed(said.splitlines()):
            if line.startswith(MARK):
                with contextlib.suppress(ValueError):
                    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return answer
        raise ControlPlaneError(f"E2B: {what}: the command's answer was lost: {said[-300:]!r}")

    async def _range(self, op: str, offset: int, limit: int | None, **order: Any) -> bytes:
        pieces, left = [], math.inf if limit is None else max(0, limit)
        while left > 0:
            size = int(min(PIECE, left))
            piece = await again(lambda size=size, at=offset: self._piece(op, at, size, order))  # type: ignore[misc]
            pieces.append(piece)
            offset, left = offset + len(piece), left - len(piece)
            if len(piece) < size:
                break
        return b"".join(pieces)

    async def _piece(self, op: str, offset: int, size: int, order: Mapping[str, Any]) -> bytes:
        answer = await self._guest_once(op, offset=offset, limit=size, **order)
        return _bytes_of(answer)

    async def _call(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        return await again(lambda: self._once(what, call))

    async def _once(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Raises SandboxLost only where the control plane says so too: proxies err."""
        try:
            return await call()
        except Exception as error:
            found = typed(error, what, key_works=True)
            if isinstance(found, Missing | ControlPlaneError):
                if not await self.provider.exists(self.sdk.sandbox_id):
                    raise lost(self.identity) from error
                if isinstance(found, Missing):
                    raise ControlPlaneError(str(found)) from error
            raise found from error


class E2BProvider(SandboxProvider):
    """`E2B_API_KEY` and the SDK's other variables say which account; `PERDURE_E2B_SCOPE` which
    deployment, where several hosts share one or several deployments share an account."""

    name = "e2b"
    runs_images = True

    def __init__(self, home: Path) -> None:
        self.root = home.absolute() / "e2b"
        self.connection = Connection()
        self._key_works = False

    def check(self) -> Sequence[str]:
        missing = []
        try:
            metadata.version("e2b")
        except metadata.PackageNotFoundError:
            missing.append("the e2b package is missing; pip install 'perdure[e2b]'")
        if not os.environ.get("E2B_API_KEY"):
            missing.append("E2B_API_KEY is not set; make a key at https://e2b.dev/dashboard")
        return missing

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        check_identity(identity)
        _check_spec(spec)
        making = asyncio.create_task(self._create(spec, identity))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:  # what was asked for may exist: find it, then end it
            with contextlib.suppress(BaseException):
                await making
            await asyncio.shield(self.kill(identity))
            raise

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        box = await self._known(identity)
        for pause in (0.0, LIST_LAG_S / 2, LIST_LAG_S / 2):
            if box is None and (found := await self._find({f"{OWN}identity": identity})):
                box = await self._connect(found[0].sandbox_id, identity, found[0].metadata)
            if box is not None or not self._hint(identity).parent.exists():
                break
            await asyncio.sleep(pause)
        if box is None:
            raise NotFound(f"no e2b sandbox {identity!r}")
        return box

    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        if self.check() and not self.root.exists():
            return []  # not set up, and never used from here: nothing to sweep
        return [
            SandboxInfo(
                identity=info.metadata[f"{OWN}identity"],
                provider=self.name,
                alive=info.state.value == "running",
                created=info.started_at.timestamp(),
                expires=info.end_at.timestamp(),
                labels={k: v for k, v in info.metadata.items() if not k.startswith(OWN)},
            )
            for info in await self._find(labels or {})
        ]

    async def kill(self, identity: str) -> None:
        check_identity(identity)
        hint = self._hint(identity)
        ids = {info.sandbox_id for info in await self._find({f"{OWN}identity": identity})}
        if hint.exists():
            ids.add(hint.read_text())
        for sandbox_id in ids:
            await self._kill(sandbox_id)
        hint.unlink(missing_ok=True)

    # -- making -----------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec, identity: str) -> E2BSandbox:
        box = await self._known(identity)
        if box is None and (found := await self._find({f"{OWN}identity": identity})):
            box = await self._connect(found[0].sandbox_id, identity, found[0].metadata)
        if box is None:
            box = await self._make(spec, identity)
        await box.set_up(spec)
        return box

    async def _make(self, spec: SandboxSpec, identity: str) -> E2BSandbox:
        """Under the first key that is not spent; creators that race walk the same keys."""
        own = self._metadata(spec, identity)
        for number in range(MOST_KEYS):
            key = f"{self._scope}-{identity}-{number}"
            try:
                sdk = await again(lambda key=key: self._ask(spec, own, key))  # type: ignore[misc]
            except Conflict:  # made by another request, or its fate is unknown to the service
                await asyncio.sleep(LIST_LAG_S)
                if not (found := await self._find({f"{OWN}identity": identity})):
                    continue
                return await self._connect(found[0].sandbox_id, identity, found[0].metadata)
            except ControlPlaneError as error:
                raise OutcomeUnknown(
                    f"{error}; it is looked up by identity {identity!r}"
                ) from error
            if await self.exists(sdk.sandbox_id):
                self._remember(identity, sdk.sandbox_id)
                return E2BSandbox(self, sdk, identity, own)
            await self._kill(sdk.sandbox_id)  # spent, or so early that it cannot be told apart
        raise OutcomeUnknown(
            f"e2b sandbox {identity!r} vanished {MOST_KEYS} times after its create"
        )

    async def _ask(self, spec: SandboxSpec, own: Mapping[str, str], key: str) -> "AsyncSandbox":
        from e2b import AsyncSandbox

        template = _template(spec)
        try:
            sdk = await self._once(
                "create",
                lambda: AsyncSandbox.create(
                    template,
                    timeout=math.ceil(spec.ttl_s),
                    metadata=dict(own),
                    allow_internet_access=spec.network is Network.HOST,
                    lifecycle={"on_timeout": "kill"},
                    idempotency_key=key,
                    **self.connection.options,
                ),
            )
        except Missing as error:
            raise ConfigurationError(
                f"{error}; build the template {template!r}, or name another in environment.image "
                "or PERDURE_E2B_TEMPLATE"
            ) from error
        except Conflict as error:
            if "in_progress" in str(error) or "in progress" in str(error):
                raise ControlPlaneError(str(error)) from error
            raise
        return sdk

    def _metadata(self, spec: SandboxSpec, identity: str) -> dict[str, str]:
        return {
            **spec.labels,
            f"{OWN}scope": self._scope,
            f"{OWN}identity": identity,
            f"{OWN}workdir": spec.workdir,
        }

    # -- finding ----------------------------------------------------------------------------------

    async def _find(self, wanted: Mapping[str, str]) -> "Sequence[Any]":
        """Ours, the oldest first: of two with one identity all take the same."""
        from e2b import AsyncSandbox, SandboxQuery

        query = SandboxQuery(metadata={**wanted, f"{OWN}scope": self._scope})

        async def page(token: str | None) -> tuple[Sequence[Any], str | None]:
            pages = AsyncSandbox.list(query, next_token=token, **self.connection.options)
            return await pages.next_items(), pages.next_token

        found: list[Any] = []
        token: str | None = None
        while True:
            items, token = await again(
                lambda token=token: self._once("list", lambda: page(token))  # type: ignore[misc]
            )
            found += items
            if not token:
                return sorted(found, key=lambda info: (info.started_at, info.sandbox_id))

    async def exists(self, sandbox_id: str) -> bool:
        from e2b import AsyncSandbox

        try:
            await again(
                lambda: self._once(
                    "get_info", lambda: AsyncSandbox.get_info(sandbox_id, **self.connection.options)
                )
            )
        except Missing:
            return False
        return True

    async def _known(self, identity: str) -> E2BSandbox | None:
        """The one this host made, though the list may not show it yet. Raises: SandboxLost."""
        hint = self._hint(identity)
        if not hint.exists():
            return None
        from e2b import AsyncSandbox

        sandbox_id = hint.read_text()
        try:
            info = await again(
                lambda: self._once(
                    "get_info", lambda: AsyncSandbox.get_info(sandbox_id, **self.connection.options)
                )
            )
            return await self._connect(sandbox_id, identity, info.metadata)
        except Missing:
            raise lost(identity) from None

    async def _connect(self, sandbox_id: str, identity: str, own: Mapping[str, str]) -> E2BSandbox:
        from e2b import AsyncSandbox

        try:
            sdk = await again(
                lambda: self._once(
                    "connect",
                    lambda: AsyncSandbox.connect(sandbox_id, timeout=60, **self.connection.options),
                )
            )
        except Missing as error:
            raise lost(identity, error) from error
        self._remember(identity, sandbox_id)
        return E2BSandbox(self, sdk, identity, own)

    async def _kill(self, sandbox_id: str) -> None:
        from e2b import AsyncSandbox

        with contextlib.suppress(Missing):
            await again(
                lambda: self._once(
                    "kill", lambda: AsyncSandbox.kill(sandbox_id, **self.connection.options)
                )
            )

    async def _once(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            done = await call()
        except Exception as error:
            raise typed(error, what, key_works=self._key_works) from error
        self._key_works = True
        return done

    # -- this host's notes ------------------------------------------------------------------------

    @property
    def _scope(self) -> str:
        """Whose sandboxes these are: nobody else's are ever adopted, listed or killed."""
        if named := os.environ.get("PERDURE_E2B_SCOPE"):
            return named
        path = self.root / "scope"
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            draft = self.root / f".{uuid4().hex}"
            draft.write_text(uuid4().hex[:16])
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path.read_text()

    def _hint(self, identity: str) -> Path:
        return self.root / "boxes" / identity

    def _remember(self, identity: str, sandbox_id: str) -> None:
        path = self._hint(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{uuid4().hex}")
        draft.write_text(sandbox_id)
        draft.replace(path)


def _command(call: Mapping[str, Any]) -> str:
    return f"python3 -I {GUEST} call:{base64.b64encode(json.dumps(call).encode()).decode()}"


def _order(
    exec_id: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: bytes | None,
    timeout_s: float | None,
) -> dict[str, Any]:
    if user not in (None, "agent", "root"):
        raise ConfigurationError(f"user={user!r}: this sandbox has 'agent' and 'root'")
    _check_argv(argv)
    _check_exec_id(exec_id)
    return {
        "exec_id": exec_id,
        "argv": list(argv),
        "digest": argv_digest(argv),
        "env": dict(_checked(env or {})),
        "cwd": cwd,
        "root": user == "root",
        "stdin": base64.b64encode(stdin).decode() if stdin is not None else None,
        "timeout": timeout_s,
    }


def _bytes_of(answer: Mapping[str, Any]) -> bytes:
    data = base64.b64decode(answer["data"])
    if hashlib.sha256(data).hexdigest() != answer["sha256"]:
        raise ControlPlaneError("E2B: bytes were damaged on the way")
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


def _check_exec_id(exec_id: str) -> None:
    if not EXEC_ID.fullmatch(exec_id):
        raise ConfigurationError(
            f"exec_id {exec_id!r} must be 1 to 128 letters, digits, '.', '_' or '-'"
        )


def _template(spec: SandboxSpec) -> str:
    """A tree comes by upload into the default template; without one, the image is the template."""
    if spec.tree is None and spec.image is not None:
        return spec.image
    return os.environ.get("PERDURE_E2B_TEMPLATE") or "base"


def _check_spec(spec: SandboxSpec) -> None:
    if spec.gateway is not None:
        raise ConfigurationError(
            "gateway: an e2b sandbox cannot see a socket of this host; reach the gateway by a relay"
        )
    for mount in spec.mounts:
        if mount.writable:
            raise ConfigurationError(
                f"mounts: {mount.target!r} is writable, and nothing an e2b sandbox writes comes "
                "back to this host; use --sandbox bubblewrap for this"
            )
        if not mount.source.exists():
            raise ConfigurationError(f"mount source {str(mount.source)!r} does not exist")
    if spec.tree is not None and not spec.tree.is_dir():
        raise ConfigurationError(f"tree {str(spec.tree)!r} is no folder")
    if not TEMPLATE.fullmatch(_template(spec)):
        raise ConfigurationError(
            f"environment.image: {spec.image!r} is no E2B template; build one from the image "
            "(`e2b template build`) and name it there"
        )
