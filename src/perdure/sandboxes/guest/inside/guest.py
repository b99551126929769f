"""Runs inside a remote sandbox: durable commands and one set-up. Standard library, Python 3.7 or later.

The host sends it there, with `guest_files` and `guest_processes`, and calls it through the provider's
exec (`guest_door`): every call names one operation, may be repeated after a lost answer, and prints
one marked line.

    execs/<id>/order     the guard: the folder appears whole, by rename
    execs/<id>/pid       pid and start time of the supervisor; made once, so the command runs once
    execs/<id>/cause     why it was killed, said by who killed it
    execs/<id>/rc        the result, by rename; without it and without the supervisor: lost
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import resource
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from perdure.sandboxes.guest.inside import guest_files as files
    from perdure.sandboxes.guest.inside import guest_processes as processes

    Answer = dict[str, Any]
else:  # they lie beside this in the sandbox
    import guest_files as files
    import guest_processes as processes

MARK = "perdure-answer:"
LAUNCH_GRACE_S = 10.0
TICK_S = 0.05
INLINE = 1 << 18
MOST_FILES = 64
"""That a caller of ours may have open."""
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 24, 36, 38
OOM_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Of this sandbox's own control group, v2 and v1, where it has one."""
FULL = (errno.EDQUOT, errno.ENOSPC)
BRINGING = ("begin", "place", "ready", "unpack")


def answer(argument: str) -> str:
    """What is printed for one order. `call:` has it in base64; `order:` names a file that holds it,
    where it is too long for a command line."""
    name, _, encoded = argument.partition(":")
    data = base64.b64decode(encoded)
    if name == "order":
        with open(data.decode(), "rb") as file:
            data = file.read()
    call = json.loads(data)
    op = call.pop("op")
    try:
        found = OPERATIONS[op](**call)
    except files.Refused as error:
        found = {"refused": error.kind, "message": str(error)}
    except OSError as error:
        found = {"refused": refusal(op, error.errno), "message": str(error)}
    return f"\n{MARK}{json.dumps(found)}\n"


def refusal(op: str, code: int | None) -> str:
    """What commands have used up is nobody's mistake; too small a disk for what we bring is."""
    if code in files.PASSING:
        return "busy"
    return "full" if code in FULL and op not in BRINGING else "os"


# -- set-up ---------------------------------------------------------------------------------------


def begin(targets: list[str], settings: Answer | None) -> Answer:
    """The first step of the set-up, and the last where nothing of `targets` is missing.

    `settings`: the order of `ready`, unless it comes in a call of its own."""
    if os.path.exists(files.state("ready")):
        return {"ready": True}
    missing = [target for target in targets if not unpacked(target)]
    if missing or settings is None:
        return {"ready": False, "missing": missing}
    ready(**settings)
    return {"ready": True}


def unpack(staged: str, target: str, sha256: str, owned: bool) -> Answer:
    """Unpack an uploaded archive at `target`, once. `owned`: it belongs to the agent."""
    import tarfile  # late, as others here: few calls need it

    with files.locked("setup"):
        done = files.state("unpacked", hashlib.sha256(target.encode()).hexdigest())
        if os.path.exists(done):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)
            return {}
        files.verify(staged, sha256)
        files.make_folder(target, owned)
        with tarfile.open(staged) as tar:
            tar.extraction_filter = lambda member, path: member  # ours: Python 3.14 would change it
            for member in tar:
                member.uid, member.gid = files.owner() if owned else (0, 0)
                member.uname = member.gname = ""
                tar.extract(member, target, numeric_owner=True)
        os.unlink(staged)
        files.replace(done, sha256.encode())
    return {}


def unpacked(target: str) -> bool:
    """Also where the template brings it and will not have it written."""
    if os.path.exists(files.state("unpacked", hashlib.sha256(target.encode()).hexdigest())):
        return True
    return os.path.isdir(target) and bool(os.listdir(target)) and not os.access(target, os.W_OK)


def ready(
    workdir: str, home: str, env: dict[str, str], output: int, seal: dict[str, str] | None = None
) -> Answer:
    """The last step of the set-up: what every later command needs to know.

    `seal`: commands get no capability and the system-call filter of this machine, if it has one.
    """
    with files.locked("setup"):
        for path in (workdir, home):
            files.make_folder(path, True)
        if not os.path.exists(files.state("ready")):
            meta = {"workdir": workdir, "env": env, "output": output, "seal": seal}
            files.replace(files.state("ready"), json.dumps(meta).encode())
    return {}


def touch(ttl: float) -> Answer:
    """The sandbox ends so many seconds from now, where its first process keeps to it."""
    files.replace(files.state("deadline"), f"{time.time() + ttl} {time.monotonic() + ttl}".encode())
    return {}


# -- commands -------------------------------------------------------------------------------------


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
    """Start once; a known id is left alone, a known id with other argv refused."""
    folder = files.state("execs", exec_id)
    if not os.path.isdir(folder):
        draft = files.state("execs", "." + str(os.getpid()) + os.urandom(4).hex())
        os.makedirs(draft)
        order: Answer = {"argv": argv, "digest": digest, "env": env, "cwd": cwd, "root": root}
        order.update(timeout=timeout, token=os.urandom(16).hex(), stdin=stdin)
        files.replace(os.path.join(draft, "order"), json.dumps(order).encode())
        try:
            os.rename(draft, folder)
        except OSError:
            import shutil

            shutil.rmtree(draft)
    if order_of(folder)["digest"] != digest:
        raise files.Refused("argv", "it was started with another argv")
    if process_of(folder) is None:
        launch(folder)
    return {}


def run(seconds: float, **order: Any) -> Answer:
    """Start, wait a while, and bring the beginning of its output: one call for a short command."""
    start(**order)
    found = dict(wait(order["exec_id"], seconds))
    if found["state"] != "running":
        for stream in ("out", "err"):
            found[stream] = output(order["exec_id"], stream, 0, INLINE)
    return found


def launch(folder: str) -> None:
    """Fork a supervisor; of several that race, one makes the pid file and lives."""
    reading, writing = os.pipe()
    if os.fork() == 0:  # an orphan soon, as its parent only answers for it
        try:
            os.setsid()
            supervise(folder)
        finally:
            os._exit(0)
    os.close(writing)
    select.select([reading], [], [], LAUNCH_GRACE_S)  # closed by all: one of them has the guard
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

    # whatever it leaves behind, in whatever session, becomes this process's child
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.write(guard, f"{os.getpid()} {processes.start_time(os.getpid())}\n".encode())
    os.closerange(3, MOST_FILES)  # those of whoever called, too
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # waited for in `watch`
    order, settings, began, ooms = order_of(folder), files.meta(), time.monotonic(), oom_kills()
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
        shed_privileges(seal)
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
    """Nothing that this process becomes has any, not even as root. It is killed before the guest."""
    import ctypes

    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def shed_privileges(filters: dict[str, str]) -> None:
    """For good, on this process and all that it starts."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(version_3, (ctypes.c_uint32 * 6)()) or libc.prctl(
        PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "capabilities stay")
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
    """Until nothing of the command is left: its result is told as soon as its first process ends."""
    told = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == child:
            cut(folder, output)
            tell(folder, status, time.monotonic() - began, ooms)
            told = True
        if pid:
            continue
        if max(size(folder, "out"), size(folder, "err")) > output:
            end(folder, "output")
            cut(folder, output)
        if not told and timeout is not None and time.monotonic() - began > timeout:
            end(folder, "timeout")
        signal.sigtimedwait({signal.SIGCHLD}, TICK_S)


def end(folder: str, cause: str) -> None:
    claim(folder, cause)
    processes.slaughter(os.getpid())


def tell(folder: str, status: int, seconds: float, ooms: int) -> None:
    cause = cause_of(folder)
    result: Answer = {"seconds": seconds}
    if os.WIFEXITED(status) and cause != "output":
        result.update(state="exited", code=os.WEXITSTATUS(status))
    else:
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(signal.SIGKILL)
        default = "output" if signum == signal.SIGXFSZ else "signal"
        if signum == signal.SIGKILL and oom_kills() > ooms:
            default = "oom"
        result.update(state="killed", cause=cause or default, signal=signum)
    files.replace(os.path.join(folder, "rc"), json.dumps(result).encode())


def oom_kills() -> int:
    for path in OOM_COUNTS:
        with contextlib.suppress(OSError), open(path) as file:
            words = file.read().split()
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return 0


def cut(folder: str, output: int) -> None:
    for name in ("out", "err"):
        if size(folder, name) > output:
            claim(folder, "output")
            os.truncate(os.path.join(folder, name), output)


def poll(exec_id: str) -> Answer:
    folder = known(exec_id)
    found = result_of(folder)
    if found is None:
        process = process_of(folder)
        if process is not None and processes.alive(process):
            return {"state": "running"}
        if process is None and not abandoned(folder):
            return {"state": "running"}
        found = result_of(folder)  # it may have been told in between
    return found or {"state": "lost"}


def wait(exec_id: str, seconds: float) -> Answer:
    """Poll in here, where it costs nothing, until it is over or `seconds` have passed."""
    finish, pause = time.monotonic() + seconds, 0.001
    while True:
        found = poll(exec_id)
        left = finish - time.monotonic()
        if found["state"] != "running" or left <= 0:
            return found
        time.sleep(min(pause, left))
        pause = min(pause * 1.3, 0.1)


def abandoned(folder: str) -> bool:
    """Never launched, and never will be from now on: the guard is ours."""
    if time.time() - os.stat(folder).st_mtime < LAUNCH_GRACE_S:
        return False
    try:
        with open(os.path.join(folder, "pid"), "x") as file:
            file.write("0 0\n")
    except FileExistsError:
        pass
    return True


def send_signal(exec_id: str, signum: int) -> Answer:
    """To the whole tree. SIGKILL also ends what a finished command left running."""
    folder = known(exec_id)
    process = process_of(folder)
    over = result_of(folder) is not None
    if process is None or (over and signum != signal.SIGKILL):
        return {}
    if signum != signal.SIGKILL:
        for pid in tree(folder, process):
            processes.kill(pid, signum)
        return {}
    if not over:
        claim(folder, "signal")
    while True:
        pids = tree(folder, process)
        if not pids:
            break
        for pid in pids:
            processes.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    finish = time.monotonic() + 5
    while result_of(folder) is None and processes.alive(process) and time.monotonic() < finish:
        time.sleep(0.005)
    return {}


def tree(folder: str, process: tuple[int, str]) -> list[int]:
    if processes.alive(process):
        return processes.below(process[0])
    return processes.marked("PERDURE_EXEC=" + order_of(folder)["token"])


def output(exec_id: str, stream: str, offset: int, limit: int, seconds: float = 0.0) -> Answer:
    """Stands for up to so many seconds while nothing is there yet, and something may come."""
    finish, pause = time.monotonic() + seconds, 0.004
    while time.monotonic() < finish and size(known(exec_id), stream) <= offset:
        if poll(exec_id)["state"] != "running":
            break
        time.sleep(pause)
        pause = min(pause * 1.3, TICK_S)
    try:
        return files.read(os.path.join(known(exec_id), stream), offset, limit)
    except FileNotFoundError:  # not launched yet
        return {"data": "", "sha256": hashlib.sha256(b"").hexdigest(), "size": 0}


# -- helpers --------------------------------------------------------------------------------------


def known(exec_id: str) -> str:
    folder = files.state("execs", exec_id)
    if not os.path.isdir(folder):
        raise files.Refused("unknown", "never started")
    return folder


def order_of(folder: str) -> Answer:
    with open(os.path.join(folder, "order")) as file:
        found: Answer = json.load(file)
    return found


def process_of(folder: str) -> tuple[int, str] | None:
    try:
        with open(os.path.join(folder, "pid")) as file:
            fields = file.read().split()
    except FileNotFoundError:
        return None
    return (int(fields[0]), fields[1]) if len(fields) == 2 else None


def result_of(folder: str) -> Answer | None:
    try:
        with open(os.path.join(folder, "rc")) as file:
            found: Answer = json.load(file)
    except FileNotFoundError:
        return None
    return found


def claim(folder: str, cause: str) -> None:
    """The first cause stays."""
    try:
        with open(os.path.join(folder, "cause"), "x") as file:
            file.write(cause)
    except FileExistsError:
        pass


def cause_of(folder: str) -> str | None:
    try:
        with open(os.path.join(folder, "cause")) as file:
            return file.read()
    except FileNotFoundError:
        return None


def size(folder: str, name: str) -> int:
    try:
        return os.stat(os.path.join(folder, name)).st_size
    except FileNotFoundError:
        return 0


OPERATIONS: dict[str, Any] = {
    "begin": begin,
    "output": output,
    "place": files.place,
    "poll": poll,
    "read": files.read_file,
    "ready": ready,
    "run": run,
    "signal": send_signal,
    "start": start,
    "touch": touch,
    "unpack": unpack,
    "wait": wait,
}
