"""The folder of one sandbox on this host: its spec, deadline, processes and commands.

Owns the files' names and formats. `provider` boots a sandbox, `sandbox_teardown` kills it.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from perdure.sandboxes.host.exec_records import ExecRecord
from perdure.sandboxes.host.host_processes import ProcessId, is_alive, read_process_id
from perdure.sandboxes.spec_validation import check_exec_id

DRAFT = ".draft-"
"""Prefix of a folder that is not complete yet."""
SIDECARS = "sidecars"
"""The file in which the keeper writes the pid of their first process."""
META = "meta.json"
"""The file's modification time is the deadline."""


def timestamped_name(prefix: str) -> str:
    """A new name that contains the current monotonic time."""
    return f"{prefix}{time.monotonic():.0f}-{uuid4().hex}"


def age_of(name: str, prefix: str) -> float:
    """Seconds since the name was made; infinite if the machine has rebooted or it is not ours."""
    try:
        age = time.monotonic() - float(name.removeprefix(prefix).partition("-")[0])
    except ValueError:
        return math.inf
    return age if age > -1 else math.inf


@dataclass(frozen=True)
class SandboxMeta:
    """Written once, before the boot, so that every process and cgroup can be found and killed."""

    provider: str
    identity: str
    created: float
    workdir: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    output_mb: int
    disk_mb: int
    open_files: int = 4096
    """Most descriptors of one process."""
    groups: tuple[str, ...] = ()
    """Cgroups of this sandbox; they are removed with it."""
    exec_groups: str | None = None
    """The cgroup under which each command gets one of its own."""
    enforced: Mapping[str, str] = field(default_factory=dict)
    """Limit -> the mechanism that enforces it."""
    on_disk: bool = False
    """Commands write to the disk of the host, which other programs may fill."""
    farewell: tuple[str, ...] = ()
    """Command that removes it from other programs' records, run when its processes have ended."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Path in the spec -> host path, for sandboxes without a mount namespace."""


class Booted(NamedTuple):
    """The file `ready`: what the keeper recorded when it booted the sandbox."""

    holder: ProcessId | None
    """Pid 1 of its namespaces; None if it has no namespaces."""
    own_pids: tuple[int, ...]
    """Processes of its pid namespace before the first command: the holder and its descendants."""
    gateway_url: str | None
    """Where the forwarder listens, seen from inside."""
    user: int | None
    """Its commands' user on the host; None: the worker's."""

    @classmethod
    def of(cls, text: str) -> "Booted":
        """Parse the words that `Keeper.boot` writes. After a power failure there may be none."""
        pid, started, port, user, *others = text.split() or ("0", "0", "-", "-")
        holder = ProcessId(int(pid), int(started)) if pid != "0" else None
        return cls(
            holder=holder,
            own_pids=(holder.pid, *map(int, others)) if holder else (),
            gateway_url=None if port == "-" else f"http://127.0.0.1:{port}",
            user=None if user == "-" else int(user),
        )


@dataclass(frozen=True)
class SandboxFolder:
    """One sandbox's folder, `<root>/<identity>`."""

    path: Path

    @property
    def identity(self) -> str:
        return self.path.name

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    @property
    def ready(self) -> bool:
        """The boot has finished. No caller has a folder that is not ready."""
        return (self.path / "ready").exists() and not self.booting.exists()

    @property
    def booting(self) -> Path:
        """A file that exists until the sidecars are up; never, if there are none."""
        return self.path / "booting"

    @property
    def keeper(self) -> ProcessId | None:
        return read_process_id(self.path / "keeper")

    @property
    def booted(self) -> "Booted":
        """Raises: FileNotFoundError before the boot has finished."""
        return Booted.of((self.path / "ready").read_text())

    @property
    def holder(self) -> ProcessId | None:
        """None also before the boot has finished."""
        return self.booted.holder if self.ready else None

    @property
    def processes(self) -> tuple[ProcessId | None, ...]:
        """The processes it needs to be alive: its keeper and, if it has namespaces, its holder."""
        holder = self.holder
        return (self.keeper,) if holder is None else (self.keeper, holder)

    @property
    def sidecars(self) -> int | None:
        """The first process of the pid namespace of its sidecars, if it has any."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.path / SIDECARS).read_text())
        return None

    @property
    def alive(self) -> bool:
        return self.ready and all(map(is_alive, self.processes))

    def create_folder(
        self, meta: SandboxMeta, ttl_s: float, *, files: Mapping[str, str] | None = None
    ) -> None:
        """Create the complete folder, by rename. `files`: name -> content of more files."""
        draft = self.path.parent / timestamped_name(DRAFT)
        draft.mkdir(mode=0o700, parents=True)
        for name in ("disk", "execs"):
            (draft / name).mkdir()
        os.mkfifo(draft / "requests", 0o600)
        (draft / META).write_text(json.dumps(vars(meta)))
        for name, text in (files or {}).items():
            (draft / name).write_text(text)
        SandboxFolder(draft).extend(ttl_s)
        draft.rename(self.path)

    def meta(self) -> SandboxMeta:
        text = (self.path / META).read_text()
        if not text:  # after a power failure, so no process of the sandbox is alive
            return SandboxMeta("", self.identity, 0.0, "", {}, {}, 0, 0)
        fields = json.loads(text)
        tuples = {name: tuple(fields.get(name, ())) for name in ("groups", "farewell")}
        return SandboxMeta(**{**fields, **tuples})

    def expires(self) -> float:
        """Unix seconds. The file's time is on the monotonic clock, which all processes of a host
        share. So no sandbox ends because the clock was set or the machine was suspended."""
        return time.time() + (self.path / META).stat().st_mtime - time.monotonic()

    def extend(self, ttl_s: float) -> None:
        """Move the deadline. It works on a full disk, because a file's time needs no space."""
        deadline = time.monotonic() + ttl_s
        os.utime(self.path / META, (deadline, deadline))

    def record(self, exec_id: str) -> ExecRecord:
        check_exec_id(exec_id)
        return ExecRecord(self.path / "execs" / exec_id)

    def request(self, exec_id: str, timeout_s: float | None) -> None:
        """Ask the keeper to run the command. Raises OSError when there is no keeper."""
        self._ask(f"{exec_id} {'-' if timeout_s is None else f'{timeout_s:.3f}'}\n")

    def request_end_of_all(self) -> Path:
        """Ask the keeper to let pid 1 kill all other processes. Returns a file that appears when
        that is done. Raises: OSError when there is no keeper."""
        done = self.path / f"ended-{uuid4().hex}"
        self._ask(f"- {done.name}\n")
        return done

    def _ask(self, line: str) -> None:
        pipe = os.open(self.path / "requests", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, line.encode())  # atomic: far below PIPE_BUF
        finally:
            os.close(pipe)
