"""Ends a sandbox of this host: its processes, its cgroups, its folder."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from perdure.errors import Boundary, RetryHere
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.exec_records import ExecRecord
from perdure.sandboxes.host.host_processes import ProcessId, ended, is_alive, kill_process
from perdure.sandboxes.host.procfs import marked
from perdure.sandboxes.host.sandbox_folder import SandboxFolder, timestamped_name

REMOVAL_PREFIX = ".grave-"
"""Prefix of a sandbox's folder while it is being removed."""


def lock_of(box: SandboxFolder) -> Path:
    """The lock under which one process at a time boots or kills this sandbox."""
    return box.path.parent / ".locks" / box.identity


async def destroy(box: SandboxFolder) -> None:
    """End every process of the sandbox, then remove its cgroups and its folder.

    Raises: RetryHere while a killed process has not ended yet. The sandbox stays listed, so that a
    later call or a sweep finishes.
    """
    if not box.exists:
        return
    booted = box.ready  # read first: the boot may still finish until its keeper is stopped
    meta, keeper, holder = box.meta(), box.keeper, box.holder
    # Kill the keeper first. Otherwise it would record that a signal ended the commands, rather
    # than the end of the sandbox.
    session_killed = keeper is not None and _kill_session(keeper)
    if meta.exec_groups:
        cgroups.kill(Path(meta.exec_groups))
    kill_process(holder, signal.SIGKILL)
    if not session_killed or not booted:  # a holder may run whose pid is not recorded yet
        _kill_marked(f"PERDURE_BOX={box.path}".encode())
    if meta.exec_groups is None and holder is None:  # no cgroup or namespace ends them
        _kill_commands(box)
    for process in (holder, keeper):
        if process is not None:
            await ended(process, 5.0)
    await _run_teardown_command(meta.farewell)
    if not await cgroups.remove(map(Path, meta.groups)):
        raise RetryHere(
            f"sandbox {box.identity!r} was killed, but its processes did not end within "
            f"{cgroups.BUSY_S:g} s",
            boundary=Boundary.SANDBOX,
        )
    removed = box.path.with_name(timestamped_name(REMOVAL_PREFIX))
    box.path.rename(removed)  # every process sees it gone at once, however long the removal takes
    await asyncio.to_thread(shutil.rmtree, removed, ignore_errors=True)


async def _run_teardown_command(command: Sequence[str]) -> None:
    """Ignores failures, because what the command removes may never have existed."""
    if command:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await process.wait()


def _kill_session(keeper: ProcessId) -> bool:
    """Kill the keeper and every process it started on the host; False when it was already dead."""
    kill_process(keeper, signal.SIGSTOP)  # so that it forks nothing while its session is killed
    if not is_alive(keeper):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(keeper.pid, signal.SIGKILL)
    return True


def _kill_commands(box: SandboxFolder) -> None:
    for path in (box.path / "execs").iterdir():
        record = ExecRecord(path)
        if record.process is not None:
            _kill_marked(f"PERDURE_EXEC={record.token}".encode())


def _kill_marked(marker: bytes) -> None:
    while pids := marked(marker):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
