"""An agent fills the disk of its remote sandbox: its command has a result, and its tree a verdict."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.graders.diff.diff_capture import capture
from perdure.sandboxes.base import Exec, ExecResult, SandboxSpec
from perdure.testing.grader_contract import make_repository
from tests.unit.sandboxes.test_guest import Folder

FILL = "head -c 100M /dev/zero >../big; printf 'X = 1\\n' >calc/new.py; exit 7"


class SmallDisk(Folder):
    """A guest, the tree of its agent and its temporary files on a disk of 24 MiB."""

    room = 8 << 20

    async def start(self, exec_id: str, command: Exec) -> None:
        """This host has no user `agent`."""
        await super().start(exec_id, replace(command, user="root"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "perdure-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def filled(disk: Path) -> tuple[SmallDisk, ExecResult]:
    """The sandbox after a command that has filled it and changed the tree."""
    sandbox = SmallDisk(disk)
    make_repository(disk / "work")
    subprocess.run(["cp", "-r", disk / "work/.git", disk / "base.git"], check=True)
    (disk / "temporary").mkdir()
    (disk / "work/calc/new.py").write_text("X = 0\n")  # its block is there before the disk is full
    env = {"TMPDIR": str(disk / "temporary"), "PATH": os.environ["PATH"]}
    await sandbox.set_up(SandboxSpec(workdir=str(disk / "work"), env=env))
    return sandbox, await sandbox.exec(FILL, user="root")


async def test_a_full_disk_costs_neither_the_result_nor_the_diff(disk: Path) -> None:
    """The room that was kept is free once the agent's processes have ended."""
    sandbox, done = await filled(disk)
    await sandbox.end_all()
    found = await capture(sandbox, str(disk / "base.git"))
    await sandbox.kill_resident()

    assert (done.status.code, found.refused) == (7, "")
    assert b"+++ b/calc/new.py" in found.data


async def test_a_disk_without_that_room_is_a_verdict(disk: Path) -> None:
    """A root agent took it as well. That must not buy the rollout another try."""
    sandbox, done = await filled(disk)
    (sandbox.folder / "room").rename(disk / "kept")
    await sandbox.end_all()
    found = await capture(sandbox, str(disk / "base.git"))
    await sandbox.kill_resident()

    assert (done.status.code, found.data) == (7, b"")
    assert "no disk space left" in found.refused or "disk of the sandbox is full" in found.refused
