"""The sandbox contract: where the agent or the grader runs.

The client chooses a sandbox's identity, so a lost answer never leaks one. A command runs under an
exec id and its result is durable, so no command runs twice when a watcher dies. Every implementation
passes `perdure.testing.sandbox_contract`.
"""

import asyncio
import hashlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, NamedTuple, Self
from uuid import uuid4

from perdure.errors import Boundary, ConfigurationError, RetryHere
from perdure.types import AccountCaps, Limits, SharedFolder, Sidecar


class Network(StrEnum):
    NONE = "none"
    """Loopback only; also the gateway if `SandboxSpec.gateway` is set."""
    HOST = "host"
    """The host's network: for building environments, never for agents or grading."""
    INDEX = "index"
    """For builds: loopback, and on it a proxy to the package index that the builder starts."""
    LISTED = "listed"
    """Loopback, and on it a proxy to the listed hosts, which the caller serves at
    `Sandbox.proxy_socket`. A service instead enforces `SandboxSpec.allowed_hosts` itself. Builds also
    reach the package index."""


@dataclass(frozen=True)
class Mount:
    """A host path made visible inside a local sandbox."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class SandboxSpec:
    """What to boot. `tree` appears at `workdir`; commands write to a copy of it."""

    workdir: str
    tree: Path | None = None
    image: str | None = None
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: Network = Network.NONE
    allowed_hosts: Sequence[str] = ()
    """Entries of Network.LISTED, for services that enforce the list themselves."""
    gateway: Path | None = None
    """Host path of the gateway's unix socket. Commands reach it at `Sandbox.gateway_url`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """At least `run`, `rollout` and `attempt`, by which the reaper finds the owner."""
    ttl_s: float = 3600.0
    sidecars: Mapping[str, Sidecar] = field(default_factory=dict)
    """Containers next to the sandbox, by name. They share its network, start before `create`
    returns and end with it. Commands can neither see nor signal their processes."""
    folders: tuple[SharedFolder, ...] = ()
    """Folders that the sandbox shares with sidecars."""


@dataclass(frozen=True)
class Exec:
    """A command to run in a sandbox."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bytes | None = None
    timeout_s: float | None = None
    """The whole process tree is killed after this many seconds, even if no worker watches it."""


class ExecState(StrEnum):
    RUNNING = "running"
    EXITED = "exited"
    KILLED = "killed"
    LOST = "lost"
    """There will be no result and the cause is unknown. It is neither an exit code nor a success."""


KillCause = Literal["timeout", "signal", "oom", "output", "sandbox"]


@dataclass(frozen=True)
class ExecStatus:
    """The durable result of one command. `code` only when exited; `cause` only when killed."""

    state: ExecState
    code: int | None = None
    cause: KillCause | None = None
    signal: int | None = None
    seconds: float | None = None
    host_lacked: Literal["", "disk", "processes", "memory"] = ""
    """What its host ran out of while the sandbox was within its own limits. A write, a fork or a
    process may have failed for that reason, so the result proves nothing."""

    @property
    def ok(self) -> bool:
        return self.state is ExecState.EXITED and self.code == 0

    @property
    def done(self) -> bool:
        return self.state is not ExecState.RUNNING


class ExecResult(NamedTuple):
    """What `exec` returns: the status and both outputs, as bytes."""

    status: ExecStatus
    stdout: bytes
    stderr: bytes


class SidecarResult(NamedTuple):
    """What `sidecar_exec` returns."""

    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as `list` reports it, in any state."""

    identity: str
    provider: str
    alive: bool
    created: float
    expires: float
    labels: Mapping[str, str]


def identity_of(run_id: str, rollout: str, purpose: str, generation: int) -> str:
    """Deterministic name of one sandbox, `[a-z0-9-]{1,63}`, the same in every activity attempt.

    Example: identity_of("r1", "rollout/r1/click-8.1.3/0", "agent", 1) -> "p-3f1c...-agent-1"
    """
    digest = hashlib.sha256(f"{run_id}\0{rollout}".encode()).hexdigest()[:24]
    return f"p-{digest}-{purpose}-{generation}"


def shown_shortage(status: ExecStatus) -> str:
    """What the host refused to a command, and the fix."""
    if status.host_lacked == "disk":
        return "its host's disk was full: free space there"
    what = "a process" if status.host_lacked == "processes" else "memory"
    return (
        f"the host refused {what} that the sandbox's own limits allow: raise the host's limits, "
        "or lower PERDURE_SLOTS__AGENT and PERDURE_SLOTS__GRADE"
    )


def check_host(sandbox: "Sandbox", status: ExecStatus) -> None:
    """Raises: RetryHere if the host refused the command a resource: its result proves nothing."""
    if status.host_lacked:
        raise RetryHere(
            f"while a command ran in sandbox {sandbox.identity!r}, {shown_shortage(status)}",
            boundary=Boundary.SANDBOX,
        )


class Sandbox(ABC):
    """A live sandbox.

    All methods raise `SandboxLost` when it is gone, `OutcomeUnknown` when the request may have been
    carried out, and `RetryHere` when it was not carried out.
    """

    identity: str
    workdir: str
    tmp: str = "/tmp"
    """A folder for temporary files. It is removed with the sandbox."""
    gateway_url: str | None = None
    """Base URL of the gateway as seen from inside (no `/v1`), when the spec asked for it."""
    proxy_socket: Path | None = None
    """Host path of the unix socket to which the sandbox's proxy port leads, for Network.LISTED."""
    users: ClassVar[Sequence[str]] = ("agent",)
    """Users that a command may run as and a file may belong to; the first is the default."""
    waits_inside: bool = False
    """`next_output` waits in the sandbox: each call costs one request, however long it waits."""

    @abstractmethod
    async def start(self, exec_id: str, command: Exec) -> None:
        """Start once, detached. A known exec_id starts nothing.

        Raises: ConfigurationError for a known exec_id with another argv.
        """

    @abstractmethod
    async def extend(self, exec_id: str, timeout_s: float) -> None:
        """Let a command that was started with a time limit run until `timeout_s` after its start.

        The limit only moves later. If the command is over, nothing happens. Raises: NotFound;
        SandboxLost.
        """

    @abstractmethod
    async def poll(self, exec_id: str) -> ExecStatus:
        """The command's status now. Raises NotFound for an exec id never started."""

    @abstractmethod
    async def output(
        self,
        exec_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: int = 0,
        limit: int = 1 << 24,
    ) -> bytes:
        """A byte range of what the command has written so far."""

    async def next_output(
        self, exec_id: str, offset: int, limit: int = 1 << 24, *, wait_s: float
    ) -> bytes:
        """Standard output as `output` returns it. If the sandbox `waits_inside`, it returns when there
        are bytes, when the command is over, or after `wait_s` seconds."""
        return await self.output(exec_id, "stdout", offset, limit)

    @abstractmethod
    async def signal(self, exec_id: str, signum: int) -> None:
        """Signal the command's whole process tree. If the command is over, this succeeds.

        SIGKILL also ends background processes that a finished command left."""

    @abstractmethod
    async def end_all(self) -> None:
        """SIGKILL every process that any command started. The sandbox itself stays alive."""

    @abstractmethod
    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        """Upload bytes or a host file under a temporary name, verify, rename. Creates parent folders."""

    @abstractmethod
    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """A byte range of a file inside. Raises NotFound."""

    async def sidecar_exec(
        self, name: str, argv: Sequence[str], *, user: str | None = None, timeout_s: float
    ) -> "SidecarResult":
        """Run a command in a sidecar's container. Only if the provider `reads_sidecars`. It may go on
        after a timeout. `user`: None is the container's own.

        Raises: NotFound if the sidecar has ended; SandboxLost; RetryHere, also after a timeout.
        """
        raise NotImplementedError

    @abstractmethod
    async def touch(self, ttl_s: float) -> None:
        """Set the deadline to `ttl_s` seconds from now, even if it was later."""

    @abstractmethod
    async def kill(self) -> None:
        """End the sandbox and remove its disk. If it does not exist, this succeeds."""

    # -- built on the methods above ----------------------------------------------------

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        """Poll until the command is over or `timeout_s` has passed; then the status is still RUNNING."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        pause = 0.005
        while True:
            status = await self.poll(exec_id)
            if status.done:
                return status
            left = pause if end is None else min(pause, end - loop.time())
            if left <= 0:
                return status
            await asyncio.sleep(left)
            pause = min(pause * 1.5, 1.0)

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
        """Run a command to its end (the simple call of the users' documents 002 and 004).

        A string runs under `bash -c`. With `check`, an exit code other than 0 raises RuntimeError.
        A command that fails while its host lacks disk, processes or memory raises RetryHere.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        status, out, err = await self._to_end(Exec(argv, env or {}, cwd, user, timeout_s=timeout))
        if not status.ok:
            check_host(self, status)
        if check and not status.ok:
            tail = (err or out)[-2000:].decode("utf-8", "replace")
            raise RuntimeError(f"{shlex.join(argv)[:200]} ended as {status}: {tail}")
        return ExecResult(status, out, err)

    async def _to_end(self, command: Exec) -> ExecResult:
        """Start it, and return its result when it is over."""
        exec_id = f"x-{uuid4().hex}"
        await self.start(exec_id, command)
        status = await self.wait(exec_id)
        return ExecResult(
            status, await self.output(exec_id, "stdout"), await self.output(exec_id, "stderr")
        )

    async def write_file(
        self, path: str, content: bytes | str | Path, user: str | None = None
    ) -> None:
        """`content`: text, bytes or a file of the host. `user`: the file's owner, by default the agent.

        Raises: ConfigurationError for a user that the sandbox lacks.
        """
        self.check_user(user)
        data = content.encode() if isinstance(content, str) else content
        await (self.put_as_root(path, data) if user == "root" else self.put(path, data))

    async def put_as_root(self, path: str, data: bytes | Path) -> None:
        """`put` a file that belongs to root, in a sandbox whose `users` include root."""
        await self.put(path, data)
        copy = ["bash", "-c", 'cp -- "$1" "$1.root" && mv -f -- "$1.root" "$1"', "_", path]
        await self.exec(copy, user="root", check=True)  # a file belongs to the user that makes it

    async def read_file(self, path: str, user: str | None = None) -> bytes:
        """Raises: NotFound; ConfigurationError for a user that the sandbox lacks."""
        self.check_user(user)
        return await self.get(path)

    def check_user(self, user: str | None) -> None:
        """Raises: ConfigurationError for a user that the sandbox lacks."""
        if user is not None and user not in self.users:
            there = " and ".join(self.users)
            raise ConfigurationError(f"user={user!r}: this sandbox has {there}; leave user unset")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await asyncio.shield(self.kill())


class SandboxProvider(ABC):
    """Makes sandboxes of one kind. `create`, `attach`, `list`, `kill` are idempotent by identity."""

    name: str
    isolated: bool = True
    """False only for `local`, which logs a warning at each boot."""
    host_bound: bool = False
    """A sandbox is a process of this host, so only workers of this host can reach it."""
    tells_workdir: bool = False
    """Has `image_workdir`."""
    runs_images: bool = False
    """Makes sandboxes from `SandboxSpec.image`. If False, rows whose tree is in an image are refused."""

    downloads_to: str = ""
    """Where images from registries are downloaded to, for the run's plan; empty if a service pulls them."""

    limits: frozenset[str] = frozenset(Limits.model_fields) - {"gpu"}
    """Fields of Limits that the provider enforces. A request that sets another is refused."""
    ample: frozenset[str] = frozenset()
    """Fields of Limits that a row may set although the provider does not enforce them: each sandbox
    has more than a task asks for."""
    fixed_by_image: frozenset[str] = frozenset()
    """Fields of Limits that a row with a Dockerfile may set: the image built from it fixes them."""
    networks: frozenset[Network] = frozenset(Network) - {Network.LISTED}
    """For LISTED, `no_list` decides too."""
    has_build_proxy: bool = True
    """Builds of Dockerfiles, if it makes any, can be kept to a list of hosts."""
    account_caps: AccountCaps | None = None
    """The account's caps, unless the settings name others. None: there is no account, or it needs no
    queue."""
    waits_at_caps: bool = True
    """`create` waits for a while when the account is at its caps. False: it raises RateLimited at once,
    for callers that share a queue."""

    reads_sidecars: bool = False
    """Its sandboxes have `sidecar_exec`."""

    def sidecars_refusal(self, sidecars: Mapping[str, Sidecar]) -> str:
        """What to do because this provider cannot run these sidecars; empty if it can."""
        return "use --sandbox podman, docker or kubernetes"

    def no_list(self, hosts: Sequence[str]) -> str:
        """Why it cannot limit a sandbox to these entries of an allow-list, with the fix; empty if it can."""
        return ""

    @property
    def sees_host(self) -> bool:
        """Sandboxes run this host's programs and may get its writable folders and a unix socket. False
        if they get copies, even if they are processes of this host."""
        return self.host_bound

    @property
    def account(self) -> str:
        """Name of the account whose caps all workers share. It contains no secret."""
        return self.name

    def image_used_for(self, image: str) -> str:
        """The image, template or snapshot from which it makes sandboxes of this image.

        Raises: ConfigurationError if the map of images is wrong.
        """
        return image

    async def image_workdir(self, image: str) -> str:
        """The folder in which containers of the image start; empty for `/`. Pulls the image if
        necessary. Raises: as a pull."""
        raise NotImplementedError

    async def images_here(self, names: Collection[str]) -> Mapping[str, int] | None:
        """Those of these images that need no pull or build before a boot, with their bytes or, if it
        does not tell the size, 0. None: it does not know what it has."""
        return None

    @abstractmethod
    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        """A live sandbox of this identity. An existing one is adopted; there are never two.

        Raises: SandboxLost when the sandbox of that identity has died (use a new generation);
        MissingDependency; ConfigurationError; RetryHere, as RateLimited when the account is at its
        caps, and as AccountExhausted when it grants nothing for a long time.
        """

    @abstractmethod
    async def attach(self, identity: str) -> Sandbox:
        """Raises: NotFound when it was never created, SandboxLost when it is dead."""

    @abstractmethod
    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        """Every sandbox of this deployment with these labels, in any state."""

    @abstractmethod
    async def kill(self, identity: str) -> None:
        """End the sandbox and remove its disk. If it does not exist, this succeeds."""

    @abstractmethod
    def check(self) -> Sequence[str]:
        """What this host lacks, one line with the fix for each; empty if the provider is ready."""
