"""What sandboxes on this host share: commands run by a keeper, with durable records.

`local` and `namespaces` add where commands start and how files are read and written.
"""

import asyncio
import contextlib
import math
import os
import resource
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from uuid import uuid4

from perdure.errors import (
    NotFound,
    SandboxLost,
)
from perdure.sandboxes.base import (
    Exec,
    ExecState,
    ExecStatus,
    Sandbox,
)
from perdure.sandboxes.file_locks import locked
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.exec_records import ExecRecord
from perdure.sandboxes.host.host_processes import ended, is_alive, one_ended
from perdure.sandboxes.host.host_shortage import Refusals
from perdure.sandboxes.host.keeper.process_killing import end_all, end_command, kill_group
from perdure.sandboxes.host.procfs import below, marked
from perdure.sandboxes.host.sandbox_folder import SandboxFolder, SandboxMeta
from perdure.sandboxes.host.sandbox_teardown import destroy, lock_of
from perdure.sandboxes.spec_validation import check_argv, check_variables

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

RESULT_S = 1.0
"""Longest pause while waiting for the keeper to write the result of a command that has ended."""
HOLDER_KILLS_S = 10.0
"""Longest wait for pid 1 to kill all other processes. After that they are killed one by one."""
LOOK_S = 0.5
"""Seconds between two looks of `wait` at a command that has outlived its keeper or holder."""
PIDS = "prlimit --nproc="
"""Limits the processes of the sandbox's user, if no cgroup limits those of the sandbox."""
INLINE_BYTES = 1 << 18
"""Bytes of output up to which a read runs on the event loop, which is quicker than a thread."""


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

    def __init__(self, box: SandboxFolder, meta: SandboxMeta) -> None:
        self.box = box
        self.meta = meta
        self.identity = box.identity
        self.workdir = meta.workdir
        booted = box.booted
        self._processes = box.keeper, *filter(None, [booted.holder])  # they never change
        self.gateway_url, self._user = booted.gateway_url, booted.user

    @property
    def alive(self) -> bool:
        return all(map(is_alive, self._processes))

    @property
    def enforced(self) -> Mapping[str, str]:
        """Limit -> the mechanism that enforces it here, such as `memory -> cgroup v1`."""
        of_root = self._user is None and os.geteuid() == 0  # the kernel exempts root's processes
        if of_root and self.meta.enforced.get("pids", "").startswith(PIDS):
            return {**self.meta.enforced, "pids": "none"}
        return self.meta.enforced

    @_lost_with_its_folder
    async def start(self, exec_id: str, command: Exec) -> None:
        self.check_user(command.user)
        record = self.box.record(exec_id)
        self._check_alive()
        if record.exists:
            record.check_same(command.argv)
        else:
            token = uuid4().hex
            refused = Refusals.of(self.meta.groups)
            record.prepare(command, self._order(command, token), token, refused=refused)
        if record.process is None:
            await self._launch(record, command.timeout_s)

    async def _launch(self, record: ExecRecord, timeout_s: float | None) -> None:
        """May be repeated, because the keeper runs each folder once."""
        try:
            self.box.request(record.path.name, timeout_s)
        except OSError as error:
            raise self._lost() from error
        pause = 0.0005
        while record.process is None and self.alive and pause < 1:
            await asyncio.sleep(pause)
            pause *= 1.6
        if record.process is None:
            self._check_alive()

    @_lost_with_its_folder
    async def extend(self, exec_id: str, timeout_s: float) -> None:
        self._known(exec_id)
        with contextlib.suppress(OSError):  # without a keeper the command is over
            self.box.request(exec_id, timeout_s)

    @_lost_with_its_folder
    async def poll(self, exec_id: str) -> ExecStatus:
        record = self._known(exec_id)
        if record.is_unread:  # a worker died before it asked, or the keeper is slow
            with contextlib.suppress(OSError):  # the keeper is dead, or its pipe is full
                self.box.request(exec_id, record.timeout_s)
        status = record.status()
        if status.state is ExecState.LOST:
            if self._awaits_result(record):
                return ExecStatus(ExecState.RUNNING)
            status = record.status()  # the keeper may have written it since
        never_ran = not status.done and record.process is None
        if (never_ran or status.state is ExecState.LOST) and not self.alive:
            return ExecStatus(ExecState.KILLED, cause="sandbox")
        return self._with_shortage(record, status)

    @_lost_with_its_folder
    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        """Returns as soon as the command is over: the kernel reports its end or the sandbox's."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        while True:
            status = await self.poll(exec_id)
            left = math.inf if end is None else end - loop.time()
            if status.done or left <= 0:
                return status
            process = self.box.record(exec_id).process
            if process is None or not process.pid:  # it has not started yet, or could not start
                await asyncio.sleep(min(left, 0.005))
                continue
            needed = [one for one in self._processes if one is not None]
            if self.alive:
                await one_ended((process, *needed), None if left == math.inf else left)
            else:
                await ended(process, min(left, LOOK_S))
            await self._result_written(self.box.record(exec_id))

    async def output(
        self,
        exec_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: int = 0,
        limit: int = 1 << 24,
    ) -> bytes:
        path = self._known(exec_id).path / ("out" if stream == "stdout" else "err")
        try:  # no process in the sandbox can hold this file
            with open(path, "rb", buffering=0) as file:
                size = max(0, min(limit, os.fstat(file.fileno()).st_size - offset))
                if size <= INLINE_BYTES:
                    return os.pread(file.fileno(), size, offset)
                return await asyncio.to_thread(os.pread, file.fileno(), size, offset)
        except FileNotFoundError:
            return b""  # it has written nothing yet

    @_lost_with_its_folder
    async def signal(self, exec_id: str, signum: int) -> None:
        record = self._known(exec_id)
        done = record.status().done
        if signum == signal.SIGKILL and done:
            await asyncio.to_thread(self._kill_tree, record)  # what it left in the background
            return
        if done:
            return
        if signum == signal.SIGKILL:
            record.claim_cause("signal")
            await asyncio.to_thread(self._kill_tree, record)
            await self._reported(record)
            return
        for pid in await asyncio.to_thread(self._tree, record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    @_lost_with_its_folder
    async def end_all(self) -> None:
        self._check_alive()
        if not await asyncio.to_thread(self._end_all):
            raise SandboxLost(
                f"sandbox {self.identity!r} has processes that cannot be killed; boot a new one"
            )

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

    # -- helpers ----------------------------------------------------------------------------------

    def _order(self, command: Exec, token: str) -> bytes:
        """What the launcher reads to become the command: fields, each ended by NUL."""
        argv = self._argv(command.argv)
        env = self._environment({**self.meta.env, **command.env})
        check_argv(argv)
        check_variables(env)
        # larger than the disk, so that a full disk gives ENOSPC, not a signal
        largest_file = (max(self.meta.output_mb, self.meta.disk_mb) + 1) << 20
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: largest_file,
            resource.RLIMIT_NOFILE: _open_files(self.meta.open_files),
            **_rlimits(self.enforced),
        }
        variables = {"PERDURE_EXEC": token, **env}
        fields = [
            self._folder(command.cwd) or "",
            "1" if command.stdin else "",
            str(len(argv)),
            " ".join(f"{number}={value}" for number, value in limits.items()),
            *argv,
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        return os.fsencode("".join(f"{field}\0" for field in fields))

    def _with_shortage(self, record: ExecRecord, status: ExecStatus) -> ExecStatus:
        if not status.done or status.host_lacked or (before := record.refused_before) is None:
            return status
        groups = self.meta.groups
        return replace(status, host_lacked=Refusals.of(groups).shortage(before, groups))

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

    def _kill_tree(self, record: ExecRecord) -> bool:
        """Kill the command and its processes. It may take a while, so never on the event loop."""
        process = record.process
        if process is None:
            return True
        if (group := record.group) is not None:
            return kill_group(str(group))
        execs, name = str(record.path.parent), record.path.name
        return end_command(execs, name, process, self._keeper, self.box.booted.own_pids)

    def _end_all(self) -> bool:
        if self.meta.exec_groups is not None:
            for group in cgroups.below(Path(self.meta.exec_groups)):
                kill_group(str(group))
        if own := self.box.booted.own_pids:
            self._let_holder_kill()
            return end_all(self._keeper, own, self.box.sidecars)
        execs = self.box.path / "execs"
        return all([self._kill_tree(ExecRecord(path)) for path in execs.glob("[!.]*")])

    def _let_holder_kill(self) -> None:
        with contextlib.suppress(OSError):  # there is no keeper, so its pid 1 ends too
            done, end = self.box.request_end_of_all(), time.monotonic() + HOLDER_KILLS_S
            while not done.exists() and time.monotonic() < end:
                time.sleep(0.001)
            done.unlink(missing_ok=True)

    @property
    def _keeper(self) -> int:
        keeper = self._processes[0]
        return keeper.pid if keeper else 0

    async def _reported(self, record: ExecRecord) -> None:
        """Wait until the keeper has written the result of a command that was just killed."""
        if (process := record.process) is not None:
            await ended(process, 5.0)
        await self._result_written(record)

    def _awaits_result(self, record: ExecRecord) -> bool:
        """Whether its process has ended and a live keeper will write how."""
        process = record.process
        ran = process is not None and process.pid > 0
        return ran and record.status().state is ExecState.LOST and is_alive(self._processes[0])

    async def _result_written(self, record: ExecRecord) -> None:
        """Wait for the result. The keeper writes it at once, unless it died or is delayed."""
        pause = 0.0003
        while self._awaits_result(record) and pause < RESULT_S:
            await asyncio.sleep(pause)
            pause *= 1.5


def _open_files(wanted: int) -> int:
    """At most half the worker's limit: the kernel counts descriptors in flight of both together."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard // 2)


def _rlimits(enforced: Mapping[str, str]) -> dict[int, int]:
    """The limits enforced by `prlimit --NAME=VALUE`, as resource numbers."""
    found = {}
    for how in enforced.values():
        if how.startswith("prlimit --"):
            name, value = how.removeprefix("prlimit --").split("=")
            found[getattr(resource, f"RLIMIT_{name.upper()}")] = int(value)
    return found
