"""A host that refuses processes, played by a cgroup."""

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.stack.wait_until import LINGERS_S, PAUSE_S


class PidsGroup:
    """A cgroup of some processes, above their sandboxes'. Skips the test where none can be made."""

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line.split(":")[2] for line in lines if ":pids:" in line), None)
        self._base = Path("/sys/fs/cgroup/pids", (own or "/").lstrip("/"))
        if own is None or os.geteuid() != 0 or not os.access(self._base, os.W_OK):
            pytest.skip("only root may limit processes, by cgroup v1")
        self._group = self._base / f"perdure-test-{uuid4().hex[:8]}"
        self._group.mkdir()

    def add(self, pid: int) -> None:
        """With all its threads; its children are in the group from their start."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def leave_room(self, processes: int) -> None:
        used = int((self._group / "pids.current").read_text())
        (self._group / "pids.max").write_text(str(used + processes))

    def unlimit(self) -> None:
        (self._group / "pids.max").write_text("max")

    @property
    def refusals(self) -> int:
        """Processes and threads that it has refused, without those inside of sandboxes."""
        return int((self._group / "pids.events").read_text().split()[1])

    def remove(self) -> None:
        """Once the sandboxes below are removed."""
        end = time.monotonic() + LINGERS_S
        while self._group.exists():
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self._base / "cgroup.procs").write_text(pid)
            try:
                self._group.rmdir()
            except OSError:  # a process that is about to end is in it
                assert time.monotonic() < end, f"{self._group} is still in use"
                time.sleep(PAUSE_S)
