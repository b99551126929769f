"""The process that starts one command, watches it, and writes its result.

Runs inside a remote sandbox with `guest`. Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from perdure.sandboxes.guest.in_sandbox import guest_files as files
    from perdure.sandboxes.guest.in_sandbox import guest_processes as processes
    from perdure.sandboxes.guest.in_sandbox import guest_records as records

    Answer = dict[str, Any]
else:  # in the sandbox they are in the folder of this file
    import guest_files as files
    import guest_processes as processes
    import guest_records as records


LAUNCH_GRACE_S = 10.0
"""Seconds after which a command without a supervisor will never get one."""
TICK_S = 0.05
MOST_FILES = 64
"""Descriptors below this number are closed: the process that called us may have them open."""
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 24, 36, 38
OOM_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Files of this sandbox's own cgroup, v2 and v1, if it has one."""


def launch(folder: str) -> None:
    """Fork a supervisor. If several race, only the one that makes the pid file continues."""
    reading, writing = os.pipe()
    if os.fork() == 0:  # it outlives its parent, which only answers the order
        try:
            os.setsid()
            supervise(folder)
        finally:
            os._exit(0)
    os.close(writing)
    select.select(
        [reading], [], [], LAUNCH_GRACE_S
    )  # closed once one supervisor has made the pid file
    os.close(reading)


def supervise(folder: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    try:
        guard = os.open(os.path.join(folder, "pid"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    os.chdir("/")
    import ctypes

    # orphans of the command, in any session, become children of this process
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.write(guard, f"{os.getpid()} {processes.start_time(os.getpid())}\n".encode())
    os.closerange(3, MOST_FILES)  # also those of the caller
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # `watch` waits for it
    order, settings, began, ooms = (
        records.order_of(folder),
        files.meta(),
        time.monotonic(),
        oom_kills(),
    )
    records.hold_room(folder)
    child = os.fork()
    if child == 0:
        try:
            become(folder, order, settings)
        finally:
            os._exit(125)
    watch(folder, child, began, ooms, order["timeout"], settings["output"])


def become(folder: str, order: Answer, settings: Answer) -> None:
    os.setsid()
    for signum in range(1, 32):
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.umask(0o022)
    source = os.devnull
    if order["stdin"] is not None:
        source = os.path.join(folder, "in")
        files.replace(source, base64.b64decode(order["stdin"]))
    os.dup2(os.open(source, os.O_RDONLY), 0)
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(os.path.join(folder, "out"), writing, 0o600), 1)
    os.dup2(os.open(os.path.join(folder, "err"), writing, 0o600), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    uid, gid = files.owner()
    seal = settings.get("seal")
    if seal is not None:
        bound_capabilities()
    if os.geteuid() == 0 and not order["root"]:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if seal is not None:
        drop_privileges(seal)
    env = dict(settings["env"], PERDURE_EXEC=order["token"])
    env.update(order["env"])
    cwd = os.path.join(settings["workdir"], order["cwd"] or "")
    try:
        os.chdir(cwd)
    except OSError as error:
        fail("cannot change to folder " + cwd, error, 125)
    try:
        os.execvpe(order["argv"][0], order["argv"], env)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        fail("cannot execute " + order["argv"][0], error, 127 if missing else 126)


def bound_capabilities() -> None:
    """No program that this process executes gets capabilities, even as root. If memory runs out,
    the kernel kills it before the guest."""
    import ctypes

    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_privileges(filters: dict[str, str]) -> None:
    """Drop capabilities and filter system calls, irrevocably, for this process and its children."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(version_3, (ctypes.c_uint32 * 6)()) or libc.prctl(
        PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
    encoded = filters.get(os.uname().machine)
    if encoded is not None:
        code = base64.b64decode(encoded)

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

        program = Program(len(code) // 8, code)
        if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
            raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


def fail(what: str, error: OSError, code: int) -> NoReturn:
    os.write(2, f"sandbox: {what}: {error.strerror}\n".encode())
    os._exit(code)


def watch(  # noqa: PLR0917
    folder: str, child: int, began: float, ooms: int, timeout: float | None, output: int
) -> None:
    """Write the result when the command's first process ends; return when none of them is left."""
    written = False
    ended = ""  # a full disk has no other record of the cause
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == child:
            cut(folder, output)
            write_result(folder, status, time.monotonic() - began, ooms, ended)
            written = True
        if pid:
            continue
        if max(records.size(folder, "out"), records.size(folder, "err")) > output:
            ended = ended or "output"
            end(folder, "output")
            cut(folder, output)
        if not written and is_late(folder, time.monotonic() - began, timeout):
            ended = ended or "timeout"
            end(folder, "timeout")
        signal.sigtimedwait({signal.SIGCHLD}, TICK_S)


def is_late(folder: str, seconds: float, timeout: float | None) -> bool:
    return timeout is not None and seconds > timeout and seconds > records.extended(folder)


def end(folder: str, cause: str) -> None:
    records.claim(folder, cause)
    processes.kill_all(lambda: processes.below(os.getpid()))


def write_result(folder: str, status: int, seconds: float, ooms: int, ended: str) -> None:
    cause = records.cause_of(folder) or ended
    result: Answer = {"seconds": seconds}
    if os.WIFEXITED(status) and cause != "output":
        result.update(state="exited", code=os.WEXITSTATUS(status))
    else:
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(signal.SIGKILL)
        default = "output" if signum == signal.SIGXFSZ else "signal"
        if signum == signal.SIGKILL and oom_kills() > ooms:
            default = "oom"
        result.update(state="killed", cause=cause or default, signal=signum)
    records.save_result(folder, result)


def oom_kills() -> int:
    for path in OOM_COUNTS:
        with contextlib.suppress(OSError), open(path) as file:
            words = file.read().split()
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return 0


def cut(folder: str, output: int) -> None:
    for name in ("out", "err"):
        if records.size(folder, name) > output:
            records.claim(folder, "output")
            os.truncate(os.path.join(folder, name), output)
