"""The durable record of one command: a folder on the host that the sandbox cannot reach.

`Sandbox.start` writes run and in; the keeper writes pid, cause, out and err. Commands open none of
them: they write into out.pipe and err.pipe, which the keeper reads.

    no folder                   never started
    pid has a second line       over: exited or killed, as the kernel reported to the keeper
    pid names a live process    running
    pid is empty and read-only  lost: its keeper could not start it
    none of these               about to start or about to end; lost if its keeper is dead
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast
from uuid import uuid4

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, KillCause
from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.host_processes import ProcessId, is_alive, read_process_id
from perdure.sandboxes.host.host_shortage import NONE_REFUSED, Refusals
from perdure.sandboxes.host.keeper.full_disk import GIVEN_UP

_RESULT = re.compile(
    r"(?P<how>exit|signal) (?P<number>\d+)(?: oom=(?P<ooms>\d+))?"
    r"(?P<full> disk=full)?(?P<gone> sandbox=gone)? (?P<time>[\d.]+)"
)


@dataclass(frozen=True)
class ExecRecord:
    """Reads and writes one exec folder."""

    path: Path

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    def prepare(
        self, command: Exec, run: bytes, token: str, *, refused: Refusals = NONE_REFUSED
    ) -> None:
        """Create the complete folder, by rename.

        Raises: ConfigurationError when the exec id is known with another argv.
        """
        digest, limit_s = argv_digest(command.argv), command.timeout_s
        draft = self.path.with_name(f".{uuid4().hex}")
        draft.mkdir(mode=0o700)
        first = f"# {digest} {token} {'-' if limit_s is None else limit_s} {refused}\n"
        (draft / "run").write_bytes(first.encode() + run)
        if command.stdin:
            (draft / "in").write_bytes(command.stdin)
        try:
            draft.rename(self.path)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            self.check_same(command.argv)

    def check_same(self, argv: Sequence[str]) -> None:
        if self._identified_by()[0] != argv_digest(argv):
            raise ConfigurationError(
                f"exec_id {self.path.name!r} was started with another argv; use a new exec_id"
            )

    @property
    def process(self) -> ProcessId | None:
        """The command's first process. The keeper writes the result as soon as it ends."""
        return read_process_id(self.path / "pid")

    @property
    def group(self) -> Path | None:
        """The command's own cgroup, if it has one."""
        fields = (self.path / "pid").read_text().split()
        return Path(fields[2]) if fields[2] != "-" else None

    @property
    def token(self) -> str:
        return self._identified_by()[1]

    @property
    def timeout_s(self) -> float | None:
        limit = self._identified_by()[2]
        return None if limit == "-" else float(limit)

    @property
    def refused_before(self) -> Refusals | None:
        """What its host had refused before the request. None: an older version requested it."""
        fields = self._identified_by()
        return Refusals.parse(fields[3]) if len(fields) > 3 else None

    @property
    def is_unread(self) -> bool:
        """Its keeper has not begun to start it."""
        return self.exists and not (self.path / "pid").exists()

    def _identified_by(self) -> list[str]:
        """Digest of the argv, the token that marks the command's processes, its time limit, and what the
        host had refused before it."""
        with open(self.path / "run", "rb") as file:
            return file.readline().decode().split()[1:]

    def claim_cause(self, cause: KillCause) -> None:
        """Write why the command will be killed. The first cause stays."""
        with contextlib.suppress(FileExistsError), open(self.path / "cause", "x") as file:
            file.write(f"{cause}\n")

    def status(self) -> ExecStatus:
        if (over := self._over()) is not None:
            return over
        process = self.process
        if is_alive(process) or (process is None and not self._given_up()):
            return ExecStatus(ExecState.RUNNING)
        lost = ExecStatus(ExecState.LOST, host_lacked="disk" if process is None else "")
        return self._over() or lost  # it may have ended since

    def _given_up(self) -> bool:
        """Whether it can never run. Otherwise a keeper on an overloaded host may start it late."""
        with contextlib.suppress(FileNotFoundError):
            return stat.S_IMODE((self.path / "pid").stat().st_mode) == GIVEN_UP
        return False

    def _over(self) -> ExecStatus | None:
        """Needs two complete lines: the process, and how it ended."""
        lines = procfs.read(f"{self.path}/pid").decode().split("\n")
        if len(lines) < 3:
            return None
        _, _, _, ooms_before, began = lines[0].split()
        result = _RESULT.fullmatch(lines[1])
        if result is None:
            raise ValueError(f"{self.path}/pid holds no result of a command: {lines[1]!r}")
        seconds = max(0.0, float(result["time"]) - float(began))
        return self._verdict(result, int(result["ooms"] or 0) > int(ooms_before), seconds)

    def _verdict(self, result: re.Match[str], oom: bool, seconds: float) -> ExecStatus:
        number, claimed = int(result["number"]), self._claimed_cause()
        exited = result["how"] == "exit"
        lacked: Literal["", "disk"] = "disk" if result["full"] else ""
        # A shell whose child was killed for lack of memory exits with that signal's code. Too much
        # output counts as killed, however the command ended.
        hidden = claimed == "output" or (oom and number == 128 + signal.SIGKILL)
        if exited and not hidden:
            return ExecStatus(ExecState.EXITED, code=number, seconds=seconds, host_lacked=lacked)
        signum = signal.SIGKILL.value if exited else number
        cause = claimed or self._cause(signum, oom, bool(result["gone"]))
        return ExecStatus(
            ExecState.KILLED, cause=cause, signal=signum, seconds=seconds, host_lacked=lacked
        )

    def _claimed_cause(self) -> KillCause | None:
        return cast(KillCause, procfs.read(f"{self.path}/cause").decode().strip()) or None

    def _cause(self, signum: int, oom: bool, sandbox_gone: bool) -> KillCause:
        if sandbox_gone:
            return "sandbox"
        if oom and signum == signal.SIGKILL:
            return "oom"
        return "output" if signum == signal.SIGXFSZ else "signal"


def argv_digest(argv: Sequence[str]) -> str:
    return hashlib.sha256(b"\0".join(map(os.fsencode, argv))).hexdigest()
