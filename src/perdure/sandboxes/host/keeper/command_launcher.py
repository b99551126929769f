"""Starts a sandbox's commands, as a process of the host that is in all of the sandbox's cgroups and
most of its namespaces.

It stays outside the sandbox's pid namespace, so no command can see or signal it. It keeps no state:
its keeper is the parent of every command, and starts another launcher if this one dies. Joining
cgroups takes about 13 ms; forking inside them takes no extra time.
"""

import errno
import fcntl
import os
import resource
import signal
from _socket import socket

from perdure.sandboxes.host.keeper import kernel_quotas, linux_syscalls, seccomp_filter
from perdure.sandboxes.host.keeper.output_streams import pipe_of
from perdure.sandboxes.host.keeper.sandbox_users import become_agent

CANNOT_START, CANNOT_EXECUTE, NOT_FOUND = 125, 126, 127
"""Exit codes of a command that could not be executed, as `env` uses them."""

_INSIDE = (
    linux_syscalls.CLONE_NEWNS
    | linux_syscalls.CLONE_NEWPID
    | linux_syscalls.CLONE_NEWIPC
    | linux_syscalls.CLONE_NEWUTS
)
_TO_COMPARE = (
    ("net", linux_syscalls.CLONE_NEWNET),
    ("user", linux_syscalls.CLONE_NEWUSER),
    ("cgroup", linux_syscalls.CLONE_NEWCGROUP),
)
_NO_BIRTH_IN_GROUP = (
    errno.ENOSYS, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP, errno.EBUSY, errno.EPERM, errno.E2BIG
)  # fmt: skip
_TO_DEFAULT = (
    signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM,
    signal.SIGXFSZ, signal.SIGCHLD,
)  # fmt: skip


MASKED_PROC_FILES = (
    "keys", "kpagecgroup", "kpagecount", "kpageflags", "locks", "slabinfo", "vmallocinfo"
)  # fmt: skip
"""Files of /proc about the host. Root may read all of them, and a sandbox's user may be the host's
root. Anyone may read `locks`, which lists some locks of every sandbox with the numbers that their
holder chose."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""Device nodes of the host that commands may use but not change. Their owner could otherwise change
a node's mode for the whole host."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

FILTER = seccomp_filter.program()  # assembled once, in the fork server


class Launcher:
    """`joins`: `cgroup.procs` files to join. `groups`: the folder of the commands' own cgroups."""

    def __init__(self, channel: socket, joins: list[str], groups: str | None) -> None:
        self._channel = channel
        self._becomes_agent = False
        self._execs = os.open("execs", os.O_PATH)
        self._groups = os.open(groups, os.O_PATH) if groups else -1
        self._holder: int | None = None
        self._last_to_enter = 0
        for signum in _TO_DEFAULT:
            signal.signal(signum, signal.SIG_DFL)
        os.umask(0o022)
        for path in joins:
            with open(path, "w") as file:
                file.write("0")
        channel.send(b"joined")

    def serve(self) -> None:
        """The first message names the holder to enter, and the commands' own user or 0. Each later
        one is a command, `EXEC_ID GROUP`; the answer is its pid."""
        holder, user = map(int, self._channel.recv(64).split())
        self._becomes_agent = user > 0
        if holder:
            self._enter(holder)
        self._channel.send(b"entered")
        while request := self._channel.recv(512):
            exec_id, group = request.decode().split()
            try:
                answer = self._launch(exec_id, group)
            except OSError as error:
                answer = -(error.errno or errno.EIO)
            self._channel.send(str(answer).encode())

    def _enter(self, holder: int) -> None:
        linux_syscalls.hide_memory()  # its forks are visible inside before they execute the command
        self._holder = os.pidfd_open(holder)
        # a namespace shared with the host (a build's network) is not entered: only root may do so
        others = 0
        for name, flag in _TO_COMPARE:
            own, theirs = (os.readlink(f"/proc/{pid}/ns/{name}") for pid in ("self", holder))
            others |= flag if own != theirs else 0
        self._last_to_enter = others & (
            linux_syscalls.CLONE_NEWUSER | linux_syscalls.CLONE_NEWCGROUP
        )
        # the holder's folder is the workdir, a mount point that no command can replace
        folder = os.open(f"/proc/{holder}/cwd", os.O_PATH)
        terminals = kernel_quotas.terminals_of(holder)
        settings = os.open("/proc/sys", os.O_PATH)
        first = linux_syscalls.user_namespace_flag(holder)
        self._last_to_enter &= ~first
        linux_syscalls.enter(self._holder, first | _INSIDE | others & linux_syscalls.CLONE_NEWNET)
        if self._last_to_enter & linux_syscalls.CLONE_NEWUSER and not self._becomes_agent:
            self._bound_inotify(settings)
        _seal()
        if terminals is not None:
            kernel_quotas.bound_terminals(terminals)
        os.close(settings)
        os.fchdir(folder)

    def _bound_inotify(self, settings: int) -> None:
        """In a child, because a process cannot leave the sandbox's user namespace again."""
        assert self._holder is not None
        pid = os.fork()
        if pid == 0:
            try:
                linux_syscalls.enter(self._holder, linux_syscalls.CLONE_NEWUSER)
                kernel_quotas.bound_inotify(settings)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(pid, 0)[1] != 0:
            raise OSError(errno.EPERM, "inotify instances cannot be limited")

    def _launch(self, exec_id: str, group: str) -> int:
        """The pid of the command. Its parent is the keeper."""
        if group == "-":
            return self._fork(exec_id, None, -1)
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._groups)
        try:
            return self._fork(exec_id, fd, -1)
        except OSError as error:
            if error.errno not in _NO_BIRTH_IN_GROUP:
                raise
            return self._fork(exec_id, None, fd)
        finally:
            os.close(fd)

    def _fork(self, exec_id: str, birthplace: int | None, join: int) -> int:
        pid = linux_syscalls.fork_sibling(birthplace)
        if pid == 0:
            try:
                self._become(exec_id, join)
            except Exception as error:
                os.write(2, f"sandbox: cannot start: {error}\n".encode())
            finally:
                os._exit(CANNOT_START)
        return pid

    def _become(self, exec_id: str, join: int) -> None:
        os.setsid()
        folder = os.open(exec_id, os.O_PATH, dir_fd=self._execs)
        if join >= 0:
            _join(join, folder)
        order = _read(folder)
        fields = order[order.index(b"\n") + 1 :].split(b"\0")
        cwd, has_stdin, count, limits = fields[0], fields[1], int(fields[2]), fields[3].split()
        argv, env = fields[4 : 4 + count], dict(f.split(b"=", 1) for f in fields[4 + count : -1])
        _open_streams(folder, has_stdin == b"1")
        if self._holder is not None and self._last_to_enter:
            linux_syscalls.enter(self._holder, self._last_to_enter)
        if cwd:
            try:
                os.chdir(cwd)
            except OSError as error:
                _fail(b"cannot change to folder " + cwd, error, CANNOT_START)
        for limit in limits:
            number, value = map(int, limit.split(b"="))
            resource.setrlimit(number, (value, value))
        if self._holder is not None:
            alone = self._last_to_enter & linux_syscalls.CLONE_NEWUSER
            kernel_quotas.bound_user(
                kernel_quotas.SHARES if alone else kernel_quotas.SHARES_OF_MANY
            )
            linux_syscalls.drop_capabilities()
            if self._becomes_agent:
                become_agent()
            linux_syscalls.install_seccomp_filter(FILTER)
        _execute(argv, env)


def _seal() -> None:
    """Before hostile code runs: hide files of /proc that root can read without capabilities. Make
    /proc and devices read-only, so that no process changes a device or another's memory. A bind
    takes one system call here; `bwrap` takes three, and reads the list of all mounts again."""
    if os.statvfs("/dev").f_flag & linux_syscalls.MS_RDONLY:  # the container runtime has done it
        return
    for name in MASKED_PROC_FILES:
        if os.path.exists(f"/proc/{name}"):
            linux_syscalls.mount("/dev/null", f"/proc/{name}", "", linux_syscalls.MS_BIND, "")
    own = os.stat("/dev").st_dev
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}") and os.stat(f"/dev/{name}").st_dev != own:
            linux_syscalls.remount_read_only(f"/dev/{name}")
    for folder in ("/proc", "/dev"):
        linux_syscalls.remount_read_only(folder)


def _join(group: int, folder: int) -> None:
    """Join the cgroup, on v1 and kernels without clone3, which cannot fork a process into it."""
    try:
        procs = os.open("cgroup.procs", os.O_WRONLY, dir_fd=group)
        os.write(procs, b"0")
        os.close(procs)
    except OSError:  # it must not run without its limits
        cause = os.open("cause", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        os.write(cause, b"sandbox\n")
        os.kill(os.getpid(), signal.SIGKILL)


def _read(folder: int) -> bytes:
    with open(os.open("run", os.O_RDONLY, dir_fd=folder), "rb", buffering=0) as file:
        return file.readall()


def _open_streams(folder: int, has_stdin: bool) -> None:
    """No stream is a file of the host, because a command could lease, fill or truncate it."""
    streams = (
        _in_memory(folder) if has_stdin else os.open("/dev/null", os.O_RDONLY),
        os.open(pipe_of("out"), os.O_WRONLY, dir_fd=folder),
        os.open(pipe_of("err"), os.O_WRONLY, dir_fd=folder),
    )
    for target, fd in enumerate(streams):
        os.dup2(fd, target, inheritable=True)


def _in_memory(folder: int) -> int:
    """A copy of `in` that counts as the sandbox's memory and cannot be changed."""
    copy = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    given = os.open("in", os.O_RDONLY, dir_fd=folder)
    while os.sendfile(copy, given, None, 1 << 20):
        pass
    os.close(given)
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(copy, 0, os.SEEK_SET)
    return copy


def _execute(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Like execvp, with the PATH of the command's environment."""
    name = argv[0]
    folders = env.get(b"PATH", b"/bin:/usr/bin").split(b":")
    places = [name] if b"/" in name else [(f or b".") + b"/" + name for f in folders]
    reason = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in places:
        try:
            os.execve(place, argv, env)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve("/bin/sh", [b"sh", place, *argv[1:]], env)
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                reason = error
    missing = reason.errno == errno.ENOENT
    _fail(b"cannot execute " + name, reason, NOT_FOUND if missing else CANNOT_EXECUTE)


def _fail(what: bytes, error: OSError, code: int) -> None:
    os.write(2, b"sandbox: " + what + b": " + os.strerror(error.errno or 0).encode() + b"\n")
    os._exit(code)
