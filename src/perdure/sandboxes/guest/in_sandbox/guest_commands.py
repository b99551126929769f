"""The guest's operations on commands: start, wait, read their output, signal them.

Runs inside a remote sandbox with `guest`. Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.sandboxes.guest.in_sandbox import guest_files as files
    from perdure.sandboxes.guest.in_sandbox import guest_processes as processes
    from perdure.sandboxes.guest.in_sandbox import guest_records as records
    from perdure.sandboxes.guest.in_sandbox import guest_supervisor as supervisor

    Answer = dict[str, Any]
else:  # in the sandbox they are in the folder of this file
    import guest_files as files
    import guest_processes as processes
    import guest_records as records
    import guest_supervisor as supervisor


INLINE = 1 << 18
"""Bytes of each output that `run` returns with the result."""


def start(  # noqa: PLR0917
    exec_id: str,
    argv: list[str],
    digest: str,
    env: dict[str, str],
    cwd: str | None,
    root: bool,
    stdin: str | None,
    timeout: float | None,
) -> Answer:
    """Start once. A known id starts nothing; with another argv it is refused."""
    folder = files.state("execs", exec_id)
    if not os.path.isdir(folder):
        draft = files.state("execs", "." + str(os.getpid()) + os.urandom(4).hex())
        os.makedirs(draft)
        order: Answer = {"argv": argv, "digest": digest, "env": env, "cwd": cwd, "root": root}
        order.update(timeout=timeout, token=os.urandom(16).hex(), stdin=stdin)
        order["made"] = time.monotonic()
        files.replace(os.path.join(draft, "order"), json.dumps(order).encode())
        try:
            os.rename(draft, folder)
        except OSError:
            import shutil

            shutil.rmtree(draft)
    if records.order_of(folder)["digest"] != digest:
        raise files.Refused("argv", "it was started with another argv")
    if records.process_of(folder) is None:
        supervisor.launch(folder)
    return {}


def run(seconds: float, **order: Any) -> Answer:
    """Start, wait, and return the beginning of the output: one call for a short command."""
    start(**order)
    found = dict(wait(order["exec_id"], seconds))
    if found["state"] != "running":
        for stream in ("out", "err"):
            found[stream] = output(order["exec_id"], stream, 0, INLINE)
    return found


def extend(exec_id: str, timeout: float) -> Answer:
    """Move the command's time limit later; `timeout` counts from its start."""
    records.extend(records.known(exec_id), timeout)
    return {}


def poll(exec_id: str) -> Answer:
    folder = records.known(exec_id)
    found = records.result_of(folder)
    if found is None:
        process = records.process_of(folder)
        if process is not None and processes.alive(process):
            return {"state": "running"}
        if process is None and not abandoned(folder):
            return {"state": "running"}
        found = records.result_of(folder)  # it may have been written since
    return found or {"state": "lost"}


def wait(exec_id: str, seconds: float) -> Answer:
    """Poll in the sandbox, where it is cheap, until the command is over or `seconds` pass."""
    finish, pause = time.monotonic() + seconds, 0.001
    while True:
        found = poll(exec_id)
        left = finish - time.monotonic()
        if found["state"] != "running" or left <= 0:
            return found
        time.sleep(min(pause, left))
        pause = min(pause * 1.3, 0.1)


def abandoned(folder: str) -> bool:
    """Whether the command can never start. Makes the pid file, so that no supervisor can."""
    if time.monotonic() - records.order_of(folder)["made"] < supervisor.LAUNCH_GRACE_S:
        return False
    try:
        with open(os.path.join(folder, "pid"), "x") as file:
            file.write("0 0\n")
    except FileExistsError:
        pass
    return True


def send_signal(exec_id: str, signum: int) -> Answer:
    """Signal the whole process tree. SIGKILL also ends processes that a finished command left."""
    folder = records.known(exec_id)
    process = records.process_of(folder)
    over = records.result_of(folder) is not None
    if process is None or (over and signum != signal.SIGKILL):
        return {}
    if signum != signal.SIGKILL:
        for pid in tree(folder, process):
            processes.kill(pid, signum)
        return {}
    if not over:
        records.claim(folder, "signal")
    processes.kill_all(lambda: tree(folder, process))
    finish = time.monotonic() + 5
    while (
        records.result_of(folder) is None and processes.alive(process) and time.monotonic() < finish
    ):
        time.sleep(0.005)
    return {}


def end_all() -> Answer:
    """Kill every process that any command started, then free the reserved disk space."""
    processes.kill_all(lambda: [pid for pid in left() if pid != os.getpid()])
    files.free_room()
    return {}


def left() -> list[int]:
    """Processes to kill. In a container of ours: all but its first process, supervisors, the
    resident, the forwarder and processes from outside. Elsewhere, where other programs run: those of
    commands."""
    supervisors = []
    for name in os.listdir(files.state("execs")) if os.path.isdir(files.state("execs")) else []:
        folder = files.state("execs", name)
        process = None if name.startswith(".") else records.process_of(folder)
        if process is not None:
            supervisors.append((folder, process))
    if files.meta().get("seal") is None:
        return [pid for folder, process in supervisors for pid in tree(folder, process)]
    ours = {process[0] for _, process in supervisors if processes.alive(process)}
    for name in ("resident.lock", "forwarder"):
        kept = records.kept_process(name)
        if kept is not None and processes.alive(kept):
            ours.update((kept[0], *processes.below(kept[0])))
    return [pid for pid in processes.below(1) if pid not in ours]


def tree(folder: str, process: tuple[int, str]) -> list[int]:
    if processes.alive(process):
        return processes.below(process[0])
    return processes.marked("PERDURE_EXEC=" + records.order_of(folder)["token"])


def output(exec_id: str, stream: str, offset: int, limit: int, seconds: float = 0.0) -> Answer:
    """A byte range of an output. Waits up to `seconds` for bytes while the command runs."""
    finish, pause = time.monotonic() + seconds, 0.004
    while time.monotonic() < finish and records.size(records.known(exec_id), stream) <= offset:
        if poll(exec_id)["state"] != "running":
            break
        time.sleep(pause)
        pause = min(pause * 1.3, supervisor.TICK_S)
    try:
        return files.read(os.path.join(records.known(exec_id), stream), offset, limit)
    except FileNotFoundError:  # not launched yet
        return {"data": "", "sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
