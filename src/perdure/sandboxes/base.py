"""The sandbox contract: where the agent or the grader runs.

A provider makes sandboxes by a client-chosen identity, so a lost answer never leaks one. Commands
run under an exec id with a durable result, so a dead watcher never runs one twice. Every
implementation passes `perdure.testing.sandbox_contract`.
"""

import asyncio
import hashlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, NamedTuple, Self
from uuid import uuid4

from perdure.errors import ConfigurationError
from perdure.types import AccountCaps, Limits


class Network(StrEnum):
    NONE = "none"
    """Loopback only, and the gateway when `SandboxSpec.gateway` is given."""
    HOST = "host"
    """The host's network: for building environments, never for agents or grading."""


@dataclass(frozen=True)
class Mount:
    """A host path made visible inside a local sandbox."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class SandboxSpec:
    """What to boot. `tree` appears at `workdir`, writable, without being changed itself."""

    workdir: str
    tree: Path | None = None
    image: str | None = None
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: Network = Network.NONE
    gateway: Path | None = None
    """Host path of the gateway's unix socket; reachable inside as `Sandbox.gateway_url`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """At least `run`, `rollout`, `attempt`; the reaper decides by them."""
    ttl_s: float = 3600.0


class ExecState(StrEnum):
    RUNNING = "running"
    EXITED = "exited"
    KILLED = "killed"
    LOST = "lost"
    """No result will ever come and no cause is known. Not an exit code, not a success."""


KillCause = Literal["timeout", "signal", "oom", "output", "sandbox"]


@dataclass(frozen=True)
class ExecStatus:
    """The durable result of one command. `code` only when exited; `cause` only when killed."""

    state: ExecState
    code: int | None = None
    cause: KillCause | None = None
    signal: int | None = None
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        return self.state is ExecState.EXITED and self.code == 0

    @property
    def done(self) -> bool:
        return self.state is not ExecState.RUNNING


class ExecResult(NamedTuple):
    """What the simple face returns: status and both outputs, as bytes."""

    status: ExecStatus
    stdout: bytes
    stderr: bytes


class PortStream(NamedTuple):
    """A connection to a port inside. `headers`: what the provider's own proxy wants to see in the
    first HTTP request on it, such as its host name and token."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    headers: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as `list` sees it, in any state."""

    identity: str
    provider: str
    alive: bool
    created: float
    expires: float
    labels: Mapping[str, str]


def identity_of(run_id: str, rollout: str, purpose: str, generation: int) -> str:
    """Deterministic name of one sandbox: `[a-z0-9-]{1,63}`, no activity attempt number in it.

    Example: identity_of("r1", "rollout/r1/click-8.1.3/0", "agent", 1) -> "p-3f1c...-agent-1"
    """
    digest = hashlib.sha256(f"{run_id}\0{rollout}".encode()).hexdigest()[:24]
    return f"p-{digest}-{purpose}-{generation}"


class Sandbox(ABC):
    """A live sandbox. All methods raise `SandboxLost` when it is gone, `OutcomeUnknown` when a
    request may have been carried out, and `RetryHere` when it was not."""

    identity: str
    workdir: str
    gateway_url: str | None = None
    """Base URL of the gateway as seen from inside (no `/v1`), when the spec asked for it."""
    waits_inside: bool = False
    """`next_output` stands inside: asking costs a request, waiting costs none."""

    @abstractmethod
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
        """Spawn once, detached. A known exec_id is left as it is (same argv or ConfigurationError).

        `timeout_s`: the whole process tree is killed after this long, whoever watches.
        """

    @abstractmethod
    async def poll(self, exec_id: str) -> ExecStatus:
        """Where the command stands now. Raises NotFound for an exec id never started."""

    @abstractmethod
    async def output(
        self,
        exec_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: int = 0,
        limit: int = 1 << 24,
    ) -> bytes:
        """A byte range of what the command wrote so far."""

    async def next_output(
        self, exec_id: str, offset: int, limit: int = 1 << 24, *, wait_s: float
    ) -> bytes:
        """Standard output as `output` has it; where the sandbox `waits_inside`, only when there is
        something, the command is over, or `wait_s` have passed."""
        return await self.output(exec_id, "stdout", offset, limit)

    @abstractmethod
    async def signal(self, exec_id: str, signum: int) -> None:
        """Signal the command's whole process tree. Already over = success.

        SIGKILL also ends what a finished command left running in the background."""

    @abstractmethod
    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        """Upload bytes or a host file: temporary name, verified, then renamed. Parents are made."""

    @abstractmethod
    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """A byte range of a file inside. Raises NotFound."""

    @abstractmethod
    async def touch(self, ttl_s: float) -> None:
        """The sandbox lives at least `ttl_s` seconds from now. Sets, never adds."""

    @abstractmethod
    async def kill(self) -> None:
        """The sandbox and its disk are gone. Absent = success."""

    async def dial(self, port: int) -> PortStream:
        """Connect to a TCP port on the sandbox's own loopback, where the provider `dials`.

        Raises: OSError when nobody listens there.
        """
        raise ConfigurationError(f"sandbox {self.identity!r} cannot be dialled")

    # -- what every provider gets for free ----------------------------------------------------

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        """Poll until the command is over, or `timeout_s` has passed (then it is still RUNNING)."""
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
        """Run to the end: the simple face that documents 002 and 004 name.

        A string runs under `bash -c`. `check` raises RuntimeError unless it exited 0.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        exec_id = f"x-{uuid4().hex}"
        await self.start(exec_id, argv, env=env, cwd=cwd, user=user, timeout_s=timeout)
        status = await self.wait(exec_id)
        result = ExecResult(
            status, await self.output(exec_id, "stdout"), await self.output(exec_id, "stderr")
        )
        if check and not status.ok:
            tail = (result.stderr or result.stdout)[-2000:].decode("utf-8", "replace")
            raise RuntimeError(f"{shlex.join(argv)[:200]} ended as {status}: {tail}")
        return result

    async def write_file(
        self, path: str, content: bytes | str | Path, user: str | None = None
    ) -> None:
        await self.put(path, content.encode() if isinstance(content, str) else content)

    async def read_file(self, path: str, user: str | None = None) -> bytes:
        return await self.get(path)

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
    """False only for `local`, which says so loudly."""
    host_bound: bool = False
    """True when a sandbox is a process of this host: only workers here can reach it."""
    dials: bool = False
    """`Sandbox.dial` works: a host can connect to a port inside."""
    runs_images: bool = False
    """Makes sandboxes from `SandboxSpec.image`; without it, rows whose tree lies in one are refused."""

    limits: frozenset[str] = frozenset(Limits.model_fields)
    """Fields of Limits that its sandboxes are held to; a request that names another is refused."""
    networks: frozenset[Network] = frozenset(Network)
    account_caps: AccountCaps | None = None
    """Of a provider with accounts: the caps assumed where the settings name none. None: no account,
    or one that nobody needs to queue for."""
    waits_at_caps: bool = True
    """`create` waits a while where the account is at its caps. False: RateLimited at once, for
    callers who queue for the account together."""

    @property
    def sees_host(self) -> bool:
        """Its sandboxes are made of this host's programs, and may be given writable folders and a
        unix socket of it. False where they get copies, though they may be processes of this host."""
        return self.host_bound

    @property
    def account(self) -> str:
        """Name of the account whose caps all workers share; no secret in it."""
        return self.name

    @abstractmethod
    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        """A live sandbox of this identity: an existing one is adopted, never doubled.

        Raises: SandboxLost when that identity lived before and is dead (use a new generation);
        MissingDependency; ConfigurationError; RetryHere, as RateLimited where the account is at
        its caps.
        """

    @abstractmethod
    async def attach(self, identity: str) -> Sandbox:
        """Raises: NotFound when it never was, SandboxLost when it is dead."""

    @abstractmethod
    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        """Every sandbox of ours with these labels, in any state."""

    @abstractmethod
    async def kill(self, identity: str) -> None:
        """The sandbox and its disk are gone. Absent = success."""

    @abstractmethod
    def check(self) -> Sequence[str]:
        """What is missing on this host, one readable line with the fix each; empty = ready."""
