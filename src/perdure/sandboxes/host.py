"""What sandboxes on this host share: the keeper, durable commands, adoption, killing.

`local` and `bubblewrap` add how a tree appears, how a command enters, and how files are reached.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal
from uuid import uuid4

from perdure.errors import (
    Boundary,
    ConfigurationError,
    MissingDependency,
    NotFound,
    RetryHere,
    SandboxLost,
)
from perdure.sandboxes import cgroups
from perdure.sandboxes.base import (
    ExecState,
    ExecStatus,
    KillCause,
    Sandbox,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
)
from perdure.sandboxes.box import DRAFT, STANDBYS_AHEAD, Box, BoxMeta, check_identity, locked
from perdure.sandboxes.execs import ExecRecord
from perdure.sandboxes.process import (
    ProcessId,
    below,
    ended,
    is_alive,
    kill_process,
    marked,
    reap,
)

BOOT_TIMEOUT_S = 60.0
GRAVE = ".grave-"
STALE_S = 600.0
OUTPUT_CHECK_S = 0.5
LARGEST_ARGUMENT = 128 * 1024 - 1
"""The kernel's MAX_ARG_STRLEN."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_KEEPER = Path(__file__).with_name("keeper.sh")
_FORWARDER = Path(__file__).with_name("forwarder.py")


@cache
def program(name: str) -> str:
    """Absolute path of a system program. Raises: MissingDependency."""
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise MissingDependency(f"{name} is missing; install it (Debian: {_PACKAGES[name]})")
    return found


_DEFAULT_SIGNALS = [
    signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM, signal.SIGXFSZ
]  # fmt: skip
"""What a worker may ignore (Python itself ignores two of them) must not be ignored in commands."""

_PACKAGES = {
    "bwrap": "apt-get install bubblewrap",
    "env": "apt-get install coreutils",
    "mount": "apt-get install mount",
    "nsenter": "apt-get install util-linux",
    "prlimit": "apt-get install util-linux",
    "setsid": "apt-get install util-linux",
    "unshare": "apt-get install util-linux",
}


# glibc obeys these in every program, and shells forbid or misread the others: they are set in the
# sandbox only, never for the host's programs that lead there. The rest is exported, because an
# argument can be read by every user of the host.
_SET_INSIDE = re.compile(
    r"LD_.*|MALLOC_.*|GLIBC_TUNABLES|GCONV_PATH|GETCONF_DIR|HOSTALIASES|LOCALDOMAIN|LOCPATH|NIS_PATH"
    r"|NLSPATH|RESOLV_HOST_CONF|RES_OPTIONS|TZDIR|UID|EUID|PPID|BASHOPTS|SHELLOPTS|IFS|OPTIND|LINENO"
)


def command_in(
    folder: str | None,
    argv: Sequence[str],
    enforced: Mapping[str, str],
    env: Mapping[str, str],
) -> list[str]:
    """The last part of every command: a session of its own, rlimits, its folder unless it is there."""
    rlimits = [how.split(maxsplit=1)[1] for how in enforced.values() if how.startswith("prlimit")]
    limited = [program("prlimit"), *rlimits] if rlimits else []
    into = [f"--chdir={folder}"] if folder else []
    into += [f"{name}={value}" for name, value in env.items() if _SET_INSIDE.fullmatch(name)]
    return [program("setsid"), *limited, *([program("env"), *into] if into else []), *argv]


class HostSandbox(Sandbox):
    """A sandbox whose keeper runs on this host."""

    def __init__(self, box: Box, meta: BoxMeta) -> None:
        self.box = box
        self.meta = meta
        self.identity = box.identity
        self.workdir = meta.workdir
        self.gateway_url = box.gateway_url
        self._processes = box.processes  # read once: they never change

    @property
    def alive(self) -> bool:
        return all(map(is_alive, self._processes))

    @property
    def enforced(self) -> Mapping[str, str]:
        """Limit -> the mechanism that enforces it here, e.g. `memory -> cgroup v1`."""
        return self.meta.enforced

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
        self._check_user(user)
        record = self.box.record(exec_id)
        self._check_alive()
        if record.exists:
            record.check_same(argv)
        else:
            token = uuid4().hex
            variables = self._environment({**self.meta.env, **(env or {})})
            run = self._run_file(
                record, argv, env=variables, cwd=cwd, token=token, has_stdin=stdin is not None
            )
            record.prepare(argv, run, token, stdin)
        if record.process is None:
            await self._launch(record, timeout_s)

    async def _launch(self, record: ExecRecord, timeout_s: float | None) -> None:
        """Repeating it is safe: the keeper runs a folder once, however often it is asked."""
        self.box.make_ahead(self.meta.exec_groups)
        try:
            self.box.request(record.path.name, timeout_s)
        except OSError as error:
            raise self._lost() from error
        pause = 0.0005
        while record.process is None and self.alive and pause < 1:
            await asyncio.sleep(pause)
            pause *= 1.3
        if record.process is None:
            self._check_alive()

    async def poll(self, exec_id: str) -> ExecStatus:
        record = self._known(exec_id)
        status = record.status()
        if record.longest_output() > self._output_cap:
            self._end(record, "output")
            await self._reported(record)
            record.truncate(self._output_cap)
            status = record.status()
        never_ran = not status.done and record.process is None
        if (never_ran or status.state is ExecState.LOST) and not self.alive:
            return ExecStatus(ExecState.KILLED, cause="sandbox")
        return status

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        """Resumes the moment the command is over: it waits for the process, it does not poll."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        while True:
            status = await self.poll(exec_id)
            left = OUTPUT_CHECK_S if end is None else min(OUTPUT_CHECK_S, end - loop.time())
            if status.done or left <= 0:
                return status
            process = self.box.record(exec_id).process
            if process is None:
                await asyncio.sleep(min(left, 0.005))
            else:
                await ended(process, left)

    async def output(
        self,
        exec_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: int = 0,
        limit: int = 1 << 24,
    ) -> bytes:
        path = self._known(exec_id).path / ("out" if stream == "stdout" else "err")
        limit = max(0, min(limit, self._output_cap - offset))
        try:
            with open(path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), limit, offset)
        except FileNotFoundError:
            return b""  # not launched yet

    async def signal(self, exec_id: str, signum: int) -> None:
        record = self._known(exec_id)
        done = record.status().done
        if signum == signal.SIGKILL and done:
            self._kill_tree(record)  # what it left running in the background
            return
        if done:
            return
        if signum == signal.SIGKILL:
            self._end(record, "signal")
            await self._reported(record)
            return
        for pid in self._tree(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    async def touch(self, ttl_s: float) -> None:
        self._check_alive()
        self.box.extend(ttl_s)

    async def kill(self) -> None:
        async with locked(lock_of(self.box)):
            await destroy(self.box)

    # -- what differs by provider ---------------------------------------------------------------

    @abstractmethod
    def _command(self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str]) -> list[str]:
        """The host's argv that runs `argv` in the sandbox, in `cwd`."""

    def _environment(self, env: Mapping[str, str]) -> Mapping[str, str]:
        return env

    def _check_user(self, user: str | None) -> None:
        if user not in (None, "agent"):
            raise ConfigurationError(
                f"user={user!r}: this sandbox has one user, 'agent'; leave user unset"
            )

    def _in_sandbox(self, pid: int) -> bool:
        """False for host-side helpers that share the command's cgroup."""
        return True

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _output_cap(self) -> int:
        return self.meta.output_mb << 20

    def _run_file(
        self,
        record: ExecRecord,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        token: str,
        has_stdin: bool,
    ) -> bytes:
        """The shell text by which a standby process becomes the command."""
        _check_argv(argv)
        folder = shlex.quote(str(record.path))
        stdin = f"{folder}/in" if has_stdin else "/dev/null"
        # in blocks of 512 bytes, and above the disk's size: a full disk is ENOSPC, not a signal
        blocks = (max(self.meta.output_mb, self.meta.disk_mb) + 1) << 11
        lines = [
            "umask 022",
            f"ulimit -f {blocks}",  # bounds the output even while nobody watches
            f"exec <{stdin} >>{folder}/out 2>>{folder}/err",
            "unset PERDURE_BOX PATH PWD OLDPWD",
            f"export PERDURE_EXEC={token}",
            *(
                f"export {name}={shlex.quote(value)}"
                for name, value in _checked(env).items()
                if not _SET_INSIDE.fullmatch(name)
            ),
            # the keeper's shell ignores INT and QUIT in background jobs; commands must not
            f"exec {shlex.join([program('env'), '--default-signal=INT,QUIT', *self._command(argv, cwd, env)])}",
        ]
        return os.fsencode("\n".join(lines) + "\n")

    def _lost(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self.identity!r} is gone; boot a new generation")

    def _check_alive(self) -> None:
        if not self.alive:
            raise self._lost()

    def _known(self, exec_id: str) -> ExecRecord:
        record = self.box.record(exec_id)
        if record.exists:
            return record
        self._check_alive()
        raise NotFound(f"exec_id {exec_id!r} was never started in sandbox {self.identity!r}")

    def _tree(self, record: ExecRecord) -> list[int]:
        process = record.process
        if process is None:
            return []
        if (group := record.group) is not None:
            pids = cgroups.members(group)
        else:
            pids = marked(f"PERDURE_EXEC={record.token}".encode())
            if is_alive(process):  # else its pid may be somebody else's by now
                pids = [*pids, *below(process.pid)]
        return [pid for pid in dict.fromkeys(pids) if self._in_sandbox(pid)]

    def _end(self, record: ExecRecord, cause: KillCause) -> None:
        record.claim_cause(cause)
        self._kill_tree(record)

    def _kill_tree(self, record: ExecRecord) -> None:
        """Kill the whole tree; processes it forks meanwhile are met in the next round."""
        if record.process is None:
            return
        if (group := record.group) is not None:
            cgroups.kill(group)
            return
        while pids := self._tree(record):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _reported(self, record: ExecRecord) -> None:
        """Wait until the keeper has written the result of a command that was just killed."""
        if (process := record.process) is not None:
            await ended(process, 5.0)


class HostProvider(SandboxProvider):
    """Keeps its sandboxes as folders `<home>/sandboxes/<name>/<identity>`."""

    host_bound = True

    def __init__(self, home: Path) -> None:
        self.root = home.absolute() / "sandboxes" / self.name

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        check_identity(identity)
        box = Box(self.root / identity)
        async with locked(lock_of(box)):
            if box.ready:
                return self._adopt(box)
            if box.exists:  # its creator died half way; nobody was ever given it
                await destroy(box)
            try:
                return await self._boot(spec, box)
            except BaseException:
                await asyncio.shield(destroy(box))
                raise

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        box = Box(self.root / identity)
        if not box.ready:
            raise NotFound(f"no {self.name} sandbox {identity!r} on this host")
        return self._adopt(box)

    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        if not self.root.is_dir():
            return []
        await asyncio.to_thread(self._clear_leftovers)
        found = [self._info(Box(path)) for path in sorted(self.root.iterdir())]
        wanted = (labels or {}).items()
        return [info for info in found if info is not None and wanted <= info.labels.items()]

    async def kill(self, identity: str) -> None:
        check_identity(identity)
        box = Box(self.root / identity)
        async with locked(lock_of(box)):
            await destroy(box)

    # -- what differs by provider ---------------------------------------------------------------

    @abstractmethod
    def _handle(self, box: Box, meta: BoxMeta) -> HostSandbox: ...

    @abstractmethod
    async def _boot(self, spec: SandboxSpec, box: Box) -> HostSandbox: ...

    # -- helpers ----------------------------------------------------------------------------------

    def _clear_leftovers(self) -> None:
        """Folders whose maker or remover was killed half way; no process ever ran in them."""
        for path in (*self.root.glob(f"{DRAFT}*"), *self.root.glob(f"{GRAVE}*")):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    shutil.rmtree(path, ignore_errors=True)

    def _adopt(self, box: Box) -> HostSandbox:
        if not box.alive:
            raise SandboxLost(
                f"{self.name} sandbox {box.identity!r} is dead; boot a new generation"
            )
        return self._handle(box, box.meta())

    def _info(self, box: Box) -> SandboxInfo | None:
        try:
            meta, expires = box.meta(), box.expires()
        except (FileNotFoundError, NotADirectoryError):
            return None  # a draft, the locks, or killed just now
        return SandboxInfo(
            box.identity, self.name, box.alive, meta.created, expires, dict(meta.labels)
        )

    def _meta(
        self,
        spec: SandboxSpec,
        box: Box,
        plan: cgroups.Plan,
        *,
        workdir: str,
        env: Mapping[str, str],
        enforced: Mapping[str, str],
        paths: Mapping[str, str] | None = None,
    ) -> BoxMeta:
        return BoxMeta(
            provider=self.name,
            identity=box.identity,
            created=time.time(),
            workdir=workdir,
            labels=dict(spec.labels),
            env=dict(env),
            output_mb=spec.limits.output_mb,
            disk_mb=spec.limits.disk_mb,
            groups=tuple(map(str, plan.folders)),
            exec_groups=str(plan.exec_groups) if plan.exec_groups else None,
            enforced=enforced,
            paths=paths or {},
        )


async def start_keeper(
    box: Box, plan: cgroups.Plan, boot: Path | None, *, as_root_of_own: bool = False
) -> None:
    """Spawn the keeper, detached, and wait until it takes commands.

    `as_root_of_own`: in a user namespace of its own, where it may mount.

    Raises: RetryHere with the last words of the boot, when it does not.
    """
    cgroups.make(plan, exec_groups_ahead=STANDBYS_AHEAD)
    reader, writer = os.pipe()
    try:
        pid = _spawn_keeper(box, plan, boot, writer, as_root_of_own)
    finally:
        os.close(writer)
    try:
        said = await _first_line(reader)
    finally:
        os.close(reader)
    if said != b"ready\n":
        words = (box.path / "log").read_bytes()[-400:].decode("utf-8", "replace").strip()
        reap(pid)
        raise RetryHere(
            f"sandbox {box.identity!r} did not boot: {words or 'no answer'}",
            boundary=Boundary.SANDBOX,
        )


def _spawn_keeper(
    box: Box, plan: cgroups.Plan, boot: Path | None, ready: int, as_root_of_own: bool
) -> int:
    groups = str(plan.exec_groups) if plan.exec_groups else "-"
    oom = str(plan.oom_file) if plan.oom_file else "-"
    own = [program("unshare"), "--user", "--map-root-user"] if as_root_of_own else []
    keeper = [*own, "/bin/sh", str(_KEEPER), str(box.path), groups, oom]
    log = str(box.path / "log")
    return os.posix_spawn(
        keeper[0],
        [*keeper, str(boot) if boot else "-", *map(str, plan.joins)],
        {"PATH": SYSTEM_PATH, "PERDURE_BOX": str(box.path)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, ready, 1),
            (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        ],
        setsid=True,
        setsigdef=_DEFAULT_SIGNALS,
        setsigmask=[],
    )


async def _first_line(reader: int) -> bytes:
    """Up to the first newline, or what came before the other end closed or time ran out."""
    loop = asyncio.get_running_loop()
    said = b""
    readable = asyncio.Event()
    os.set_blocking(reader, False)
    loop.add_reader(reader, readable.set)
    try:
        async with asyncio.timeout(BOOT_TIMEOUT_S):
            while not said.endswith(b"\n"):
                await readable.wait()
                readable.clear()
                with contextlib.suppress(BlockingIOError):
                    if not (piece := os.read(reader, 512)):
                        break
                    said += piece
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(reader)
    return said


def gateway_command(port: int, socket: Path, enter: Sequence[str] = ()) -> str:
    """Shell text that becomes the forwarder."""
    python = os.path.realpath(sys.executable)
    return f"exec {shlex.join([*enter, python, '-I', '-S', str(_FORWARDER), str(port), str(socket)])}\n"


def lock_of(box: Box) -> Path:
    return box.path.parent / ".locks" / box.identity


async def destroy(box: Box) -> None:
    """End every process of the sandbox, then remove its cgroups and its folder."""
    if not box.exists:
        return
    meta, keeper, holder = box.meta(), box.keeper, box.holder
    if meta.exec_groups:
        cgroups.kill(Path(meta.exec_groups))
    kill_process(holder, signal.SIGKILL)
    if keeper is None or not _kill_session(keeper):
        _kill_marked(f"PERDURE_BOX={box.path}".encode())
    if meta.exec_groups is None:
        _kill_commands(box)
    for process in (holder, keeper):
        if process is not None:
            await ended(process, 5.0)
    await cgroups.remove(map(Path, meta.groups))
    grave = box.path.with_name(f"{GRAVE}{uuid4().hex}")
    box.path.rename(grave)  # gone at once for everybody, however long the removal takes
    await asyncio.to_thread(shutil.rmtree, grave, ignore_errors=True)
    if keeper is not None:
        reap(keeper.pid)


def _kill_session(keeper: ProcessId) -> bool:
    """Kill the keeper and all it spawned on the host's side; False when it was dead before."""
    kill_process(keeper, signal.SIGSTOP)  # it forks no more while its session is killed
    if not is_alive(keeper):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(keeper.pid, signal.SIGKILL)
    return True


def _kill_commands(box: Box) -> None:
    for path in (box.path / "execs").iterdir():
        record = ExecRecord(path)
        if record.process is not None and not record.status().done:
            _kill_marked(f"PERDURE_EXEC={record.token}".encode())


def _kill_marked(marker: bytes) -> None:
    while pids := marked(marker):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _check_argv(argv: Sequence[str]) -> None:
    if not argv:
        raise ConfigurationError("argv is empty; name a program")
    for argument in argv:
        if "\0" in argument:
            raise ConfigurationError("argv holds a NUL byte; put the data into a file")
        if len(os.fsencode(argument)) > LARGEST_ARGUMENT:
            raise ConfigurationError(
                f"argv holds an argument above {LARGEST_ARGUMENT} bytes; put it into a file"
            )


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in env.items():
        if not (name.isascii() and name.isidentifier()) or "\0" in value:
            raise ConfigurationError(f"env {name!r} is not a variable the shell can set; rename it")
    return env
