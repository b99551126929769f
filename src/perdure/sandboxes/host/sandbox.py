"""What sandboxes on this host share: commands run by a keeper, with durable records.

`local` and `namespaces` add where commands start and how files are read and written.
"""

import asyncio
import contextlib
import os
import resource
import signal
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, cast
from uuid import uuid4

from perdure.errors import (
    ConfigurationError,
    NotFound,
    SandboxLost,
)
from perdure.sandboxes.base import (
    ExecState,
    ExecStatus,
    KillCause,
    Sandbox,
)
from perdure.sandboxes.checks import check_argv, check_variables
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.box import Box, BoxMeta
from perdure.sandboxes.host.execs import ExecRecord
from perdure.sandboxes.host.process import ended, is_alive
from perdure.sandboxes.host.procfs import below, marked
from perdure.sandboxes.host.teardown import destroy, lock_of
from perdure.sandboxes.locks import locked

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

RESULT_S = 1.0
"""Longest pause while waiting for the keeper to write the result of a command that has ended."""
OUTPUT_CHECK_S = 0.5
"""How often `wait` looks whether a running command has written too much."""
OPEN_FILES = 1 << 16


def _lost_with_its_folder(method: Method) -> Method:
    """Raise SandboxLost when the folder vanishes: another process may kill the sandbox at any time."""

    @wraps(method)
    async def guarded(self: "HostSandbox", *args: Any, **options: Any) -> Any:
        try:
            return await method(self, *args, **options)
        except FileNotFoundError as error:
            raise self._lost() from error

    return cast(Method, guarded)


class HostSandbox(Sandbox):
    """A sandbox whose keeper runs on this host."""

    def __init__(self, box: Box, meta: BoxMeta) -> None:
        self.box = box
        self.meta = meta
        self.identity = box.identity
        self.workdir = meta.workdir
        self.gateway_url = box.gateway_url
        self._processes = box.processes  # they never change

    @property
    def alive(self) -> bool:
        return all(map(is_alive, self._processes))

    @property
    def enforced(self) -> Mapping[str, str]:
        """Limit -> the mechanism that enforces it here, such as `memory -> cgroup v1`."""
        return self.meta.enforced

    @_lost_with_its_folder
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
            order = self._order(
                self._argv(argv),
                env=variables,
                cwd=self._folder(cwd),
                token=token,
                has_stdin=bool(stdin),
            )
            record.prepare(argv, order, token, stdin or None)
        if record.process is None:
            await self._launch(record, timeout_s)

    async def _launch(self, record: ExecRecord, timeout_s: float | None) -> None:
        """It may be repeated: the keeper runs each folder once."""
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

    @_lost_with_its_folder
    async def poll(self, exec_id: str) -> ExecStatus:
        record = self._known(exec_id)
        status = record.status()
        if record.longest_output() > self._output_cap:
            self._end(record, "output")
            await self._reported(record)
            record.truncate(self._output_cap)
            status = record.status()
        if status.state is ExecState.LOST:
            if self._awaits_result(record):
                return ExecStatus(ExecState.RUNNING)
            status = record.status()  # the keeper may have written it since
        never_ran = not status.done and record.process is None
        if (never_ran or status.state is ExecState.LOST) and not self.alive:
            return ExecStatus(ExecState.KILLED, cause="sandbox")
        return status

    @_lost_with_its_folder
    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        """Returns as soon as the command is over: it waits for the process instead of polling."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        while True:
            status = await self.poll(exec_id)
            left = OUTPUT_CHECK_S if end is None else min(OUTPUT_CHECK_S, end - loop.time())
            if status.done or left <= 0:
                return status
            process = self.box.record(exec_id).process
            if process is None or not process.pid:  # none yet, or none could be made
                await asyncio.sleep(min(left, 0.005))
            else:
                await ended(process, left)
                await self._result_written(self.box.record(exec_id))

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

    @_lost_with_its_folder
    async def signal(self, exec_id: str, signum: int) -> None:
        record = self._known(exec_id)
        done = record.status().done
        if signum == signal.SIGKILL and done:
            self._kill_tree(record)  # background processes that it left
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

    @_lost_with_its_folder
    async def touch(self, ttl_s: float) -> None:
        self._check_alive()
        self.box.extend(ttl_s)

    async def kill(self) -> None:
        async with locked(lock_of(self.box)):
            await destroy(self.box)

    # -- what differs by provider ---------------------------------------------------------------

    def _argv(self, argv: Sequence[str]) -> Sequence[str]:
        return argv

    @abstractmethod
    def _folder(self, cwd: str | None) -> str | None:
        """The folder in which a command starts; None: the launcher's own."""

    def _environment(self, env: Mapping[str, str]) -> Mapping[str, str]:
        return env

    def _check_user(self, user: str | None) -> None:
        if user not in (None, "agent"):
            raise ConfigurationError(
                f"user={user!r}: this sandbox has one user, 'agent'; leave user unset"
            )

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _output_cap(self) -> int:
        return self.meta.output_mb << 20

    def _order(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        token: str,
        has_stdin: bool,
    ) -> bytes:
        """What the launcher reads to become the command: fields, each ended by NUL."""
        check_argv(argv)
        check_variables(env)
        # larger than the disk, so that a full disk gives ENOSPC, not a signal
        largest_file = (max(self.meta.output_mb, self.meta.disk_mb) + 1) << 20
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: largest_file,
            resource.RLIMIT_NOFILE: _open_files(),
            **_rlimits(self.enforced),
        }
        variables = {"PERDURE_EXEC": token, **env}
        fields = [
            cwd or "",
            "1" if has_stdin else "",
            str(len(argv)),
            " ".join(f"{number}={value}" for number, value in limits.items()),
            *argv,
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        return os.fsencode("".join(f"{field}\0" for field in fields))

    def _lost(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self.identity!r} is gone; boot a new one")

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
            if is_alive(process):  # otherwise another process may have its pid by now
                pids += [process.pid, *below(process.pid)]
        return list(dict.fromkeys(pids))

    def _end(self, record: ExecRecord, cause: KillCause) -> None:
        record.claim_cause(cause)
        self._kill_tree(record)

    def _kill_tree(self, record: ExecRecord) -> None:
        """Kill the whole tree, in rounds: the next round meets what forked during this one."""
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
        await self._result_written(record)

    def _awaits_result(self, record: ExecRecord) -> bool:
        """Its process has ended, and a living keeper will write how."""
        process = record.process
        ran = process is not None and process.pid > 0
        return ran and record.status().state is ExecState.LOST and is_alive(self._processes[0])

    async def _result_written(self, record: ExecRecord) -> None:
        """Wait for the result. The keeper writes it at once, unless it died or is delayed."""
        pause = 0.0003
        while self._awaits_result(record) and pause < RESULT_S:
            await asyncio.sleep(pause)
            pause *= 1.5


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)


def _rlimits(enforced: Mapping[str, str]) -> dict[int, int]:
    """The limits enforced by `prlimit --NAME=VALUE`, as resource numbers."""
    found = {}
    for how in enforced.values():
        if how.startswith("prlimit --"):
            name, value = how.removeprefix("prlimit --").split("=")
            found[getattr(resource, f"RLIMIT_{name.upper()}")] = int(value)
    return found
