"""The host process of one sandbox: boots it, starts its commands, enforces their deadlines and
writes their results, even if no worker watches. The sandbox cannot see or signal it.

A worker's fork server starts it. Its launcher starts the commands, but they are its own children.
"""

import contextlib
import marshal
import os
import select
import signal
from _socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair
from time import monotonic, sleep

from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.keeper import gateway_forwarder, linux_syscalls
from perdure.sandboxes.host.keeper.command_launcher import CANNOT_EXECUTE, Launcher
from perdure.sandboxes.host.keeper.full_disk import give_up, is_full
from perdure.sandboxes.host.keeper.namespace_holder import become_holder
from perdure.sandboxes.host.keeper.output_streams import Outputs, Stream
from perdure.sandboxes.host.keeper.process_killing import end_command, kill_group, removed
from perdure.sandboxes.host.keeper.sandbox_users import OwnUser

DYING_S = 0.05
"""When pid 1 dies, the kernel kills its commands first, and Slurm and systemd send SIGTERM to all
processes of a job, the keeper included. Wait this long before deciding whether only the command was
meant."""

PF_EXITING = 0x4
"""A flag in /proc/PID/stat: the process is exiting, perhaps blocked until its children have exited."""

LOOK_S = 5.0
"""Seconds between two looks at the sandbox's deadline."""

REMOVING_S = 5.0
"""Seconds to retry the removal of busy cgroups. After that the reaper removes them."""

DISK_LOOK_S = 1.0
"""Seconds between two looks at the host's disk while commands run on it."""

_SAVE_AGAIN_S = 0.5
"""Seconds to wait before writing outputs and results to a full disk again."""

ALL = "-"
"""In place of a command's id: end every process in the sandbox. The second word is then the file to
make when they have ended."""
_HOLDER_KILLS_S = 5.0


def keep(line: socket) -> None:
    """Run a keeper. Its worker reads `ready`, or the end of the stream if the boot fails."""
    linux_syscalls.set_name("perdure-keeper")
    order = marshal.loads(_read_order(line))
    os.setsid()
    linux_syscalls.name_in_environment(b"PERDURE_BOX=" + os.fsencode(order["box"]))
    os.chdir(order["box"])
    _log_to("log")
    with open("keeper", "x") as file:
        file.write(f"{os.getpid()} {procfs.started_at(os.getpid())}\n")
    if order["own_users"]:
        linux_syscalls.enter_new_user_namespace()
    keeper = Keeper(order, line)
    keeper.boot()
    line.sendall(b"ready\n")
    line.close()
    keeper.run()


def _read_order(line: socket) -> bytes:
    """The order follows its length in four bytes."""
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        piece = line.recv(1 << 16)
        if not piece:
            os._exit(0)
        data += piece
    return data[4:]


def _log_to(path: str) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, fd in enumerate((null, null, log)):
        os.dup2(fd, target)
    os.close(null)
    os.close(log)


def _log(error: Exception) -> None:
    os.write(2, f"{error}\n".encode())


def _own_user(holder: dict[str, object]) -> OwnUser | None:
    """None: commands run as this process's user. The log says why, if another was requested."""
    if not holder["own_argv"]:
        return None
    try:
        return OwnUser(holder["user_ids"], holder["paths"])  # type: ignore[arg-type]  # by keeper_client
    except OSError as error:
        _log(error)
        return None


FORWARDERS = 100
"""How often a sandbox's forwarder may be replaced."""


class _Command:
    """A running command. `record` is its open `pid` file, to which the result is appended."""

    def __init__(self, exec_id: str, record: int, group: str | None, ooms: int) -> None:
        self.exec_id = exec_id
        self.record = record
        self.streams: tuple[Stream, ...] = ()
        self.group = group
        self.ooms = ooms
        self.began = monotonic()
        self.pid = 0
        self.started = 0
        self.status = 0
        self.met_full_disk = False

    @property
    def cause_known(self) -> bool:
        return os.path.exists(f"execs/{self.exec_id}/cause")


class Keeper:
    """An event loop over requests, ended children, deadlines and the end of the holder."""

    def __init__(self, order: dict[str, object], line: socket) -> None:
        self._order = order
        self._line = line
        self._pid = os.getpid()
        self._joins: list[str] = order["joins"]  # type: ignore[assignment]  # by keeper_client
        self._groups: str | None = order["groups"]  # type: ignore[assignment]
        self._ooms = os.open(str(order["oom"]), os.O_RDONLY) if order["oom"] else -1
        self._requests = os.open("requests", os.O_RDWR)
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(wakeup)
        self._launcher: socket | None = None
        self._holder = 0
        self._own: tuple[int, ...] = ()
        self._holder_fd = -1
        self._holder_gone = False
        self._forwarders: dict[int, tuple[int, str]] = {}
        """Pid -> port, and the socket that it connects to."""
        self._forwarders_left = FORWARDERS
        self._poll = select.poll()
        cap: int = order["output"]  # type: ignore[assignment]
        self._outputs = Outputs(self._poll, cap)
        self._count = 0
        self._running: dict[int, _Command] = {}
        self._deadlines: list[tuple[float, _Command]] = []
        self._undecided: list[tuple[float, _Command]] = []
        self._unsaved: list[tuple[int, bytes]] = []
        self._look_at = 0.0
        self._watches_disk = bool(order["on_disk"])
        self._disk_look_at = 0.0

    # -- boot -----------------------------------------------------------------------------------

    def boot(self) -> None:
        self._launcher = self._fork_launcher()
        holder: dict[str, object] | None = self._order["holder"]  # type: ignore[assignment]
        if holder is not None:
            self._boot_holder(holder)
        gateway: tuple[int, str] | None = self._order["gateway"]  # type: ignore[assignment]  # by keeper_client
        proxy: tuple[int, str] | None = self._order["proxy"]  # type: ignore[assignment]
        port = "-" if gateway is None else self._fork_forwarder(*gateway)
        if not port or (proxy is not None and not self._fork_forwarder(*proxy)):
            os._exit(1)  # the log says why
        if self._order["sidecars"]:
            self._fork_first_process()
        self._enter_launcher(self._launcher)
        if self._holder:  # before any command runs
            self._own = (self._holder, *procfs.below(self._holder))
        with open("ready.new", "w") as file:  # for `Booted` of host/sandbox_folder.py
            started = procfs.started_at(self._holder) if self._holder else 0
            others = " ".join(map(str, self._own[1:]))
            file.write(f"{self._holder} {started} {port} {self._outputs.user or '-'} {others}\n")
        os.rename("ready.new", "ready")

    def _boot_holder(self, holder: dict[str, object]) -> None:
        """The holder reads from a socket whose other end the keeper holds, so it exits when the
        keeper does. A command could open a pipe by its name in /proc, but not a socket."""
        user = _own_user(holder)
        self._outputs.user = user.id if user else None
        told, info = os.pipe()
        up, say_up = os.pipe()
        ours, theirs = socketpair()
        self_end, self._life = theirs.detach(), ours.detach()
        keeper = os.getpid()
        if os.fork() == 0:
            try:
                linux_syscalls.die_with_parent(keeper)
                become_holder(holder, user, self_end, say_up, info)
            except Exception as error:
                _log(error)
            finally:
                os._exit(1)
        for fd in (info, say_up, self_end):
            os.close(fd)
        if os.read(up, 16) != b"up\n":
            os._exit(1)  # the log says why
        if user:
            user.close()
        if holder["pid_file"]:
            with open(str(holder["pid_file"])) as file:
                self._holder = int(file.read())
        else:
            words = os.read(told, 4096).split()
            self._holder = int(words[words.index(b'"child-pid":') + 1].rstrip(b",}"))
        self._holder_fd = os.pidfd_open(self._holder)
        for fd in (told, up):
            os.close(fd)
        assert self._launcher is not None
        self._launcher.recv(64)  # it has joined its cgroups: the next join is quick
        for path in self._helpers_groups():
            with open(path, "w") as file:
                file.write(str(self._holder))

    def _fork_first_process(self) -> None:
        """Fork pid 1 of the pid namespace that the sidecars share, and write its pid to the file
        `sidecars`. It dies with the keeper, and then the kernel ends the sidecars."""
        reader, writer = os.pipe()
        keeper = os.getpid()
        if os.fork() == 0:
            try:
                linux_syscalls.die_with_parent(keeper)
                signal.set_wakeup_fd(-1)
                linux_syscalls.unshare(linux_syscalls.CLONE_NEWPID)
                pid = os.fork()
                if pid == 0:
                    linux_syscalls.die_with_parent(0)  # its parent is in another pid namespace
                    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
                    os.closerange(3, 256)
                    os.execve("/bin/sleep", ["sleep", "infinity"], {})
                os.write(writer, f"{pid}\n".encode())
                os.closerange(3, 256)
                os.waitpid(pid, 0)
            except Exception as error:
                _log(error)
            finally:
                os._exit(1)
        os.close(writer)
        told = os.read(reader, 16).decode().strip()
        os.close(reader)
        if not told:
            os._exit(1)  # the log says why
        with open("sidecars", "w") as file:
            file.write(told)

    def _fork_launcher(self) -> socket:
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        keeper = os.getpid()
        if os.fork() == 0:
            try:
                linux_syscalls.die_with_parent(keeper)
                linux_syscalls.set_name("perdure-launch")
                signal.set_wakeup_fd(-1)
                ours.close()
                self._line.close()
                Launcher(theirs, self._joins, self._groups).serve()
            except Exception as error:
                _log(error)
            finally:
                os._exit(1)
        theirs.close()
        return ours

    def _enter_launcher(self, launcher: socket) -> None:
        launcher.send(f"{self._holder} {self._outputs.user or 0}".encode())
        while (said := launcher.recv(64)) != b"entered":
            if not said:
                raise OSError("the launcher ended")

    def _helpers_groups(self) -> list[str]:
        """Cgroups that a helper process joins, so that the sandbox's limits count it."""
        own = [f"{self._groups}/holder/cgroup.procs"] if self._groups else []
        return [*self._joins, *own]

    def _fork_forwarder(self, port: int, path: str) -> str:
        """Fork the process that forwards connections to a socket of the host. Returns its port, or
        "" if it cannot listen."""
        reader, writer = os.pipe()
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                linux_syscalls.die_with_parent(keeper)
                linux_syscalls.set_name("perdure-forward")
                signal.set_wakeup_fd(-1)
                self._line.close()
                if self._holder:
                    users = linux_syscalls.user_namespace_flag(self._holder)
                    linux_syscalls.enter(self._holder_fd, users | linux_syscalls.CLONE_NEWNET)
                gateway_forwarder.serve(port, path, tell=writer, groups=self._helpers_groups())
            except Exception as error:
                _log(error)
            finally:
                os._exit(1)
        os.close(writer)
        listening = os.read(reader, 16).decode().strip()
        os.close(reader)
        if listening:
            self._forwarders[pid] = int(listening), path
        return listening

    def _replace_forwarder(self, port: int, path: str) -> None:
        """Start another after one was killed, perhaps for lack of memory. Its callers reconnect."""
        if self._forwarders_left and not self._holder_is_gone():
            self._forwarders_left -= 1
            self._fork_forwarder(port, path)

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        for fd in (self._requests, self._wakeup):
            self._poll.register(fd, select.POLLIN)
        if self._holder:
            self._poll.register(self._holder_fd, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll(self._pause_ms()):
                self._handle(fd)
            self._reap()
            self._decide()
            self._enforce_deadlines()
            self._save()
            if self._look_at <= monotonic():
                self._leave_when_expired()
            if self._watches_disk and self._running and self._disk_look_at <= monotonic():
                self._disk_look_at = monotonic() + DISK_LOOK_S
                self._look_at_disk()

    def _pause_ms(self) -> int:
        times = [self._look_at, *(when for when, _ in (*self._deadlines, *self._undecided))]
        if self._unsaved or self._outputs.stuck:
            times.append(monotonic() + _SAVE_AGAIN_S)
        if self._watches_disk and self._running:
            times.append(self._disk_look_at)
        return max(0, int((min(times) - monotonic()) * 1000) + 1)

    def _handle(self, fd: int) -> None:
        if fd == self._requests:
            for line in os.read(fd, 1 << 16).splitlines():
                exec_id, timeout = line.decode().split()
                if exec_id == ALL:
                    self._let_holder_kill(timeout)
                    continue
                self._start(exec_id, None if timeout == "-" else float(timeout))
        elif fd == self._wakeup:
            os.read(fd, 4096)
        elif fd in self._outputs:
            self._outputs.carry(fd)
        else:
            self._holder_gone = True
            self._poll.unregister(fd)

    # -- starting -------------------------------------------------------------------------------

    def _start(self, exec_id: str, timeout: float | None) -> None:
        try:  # the guard: the process that creates `pid` runs the command; later requests move its limit
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            record = os.open(f"execs/{exec_id}/pid", flags, 0o600)
        except FileNotFoundError:
            return
        except FileExistsError:
            if timeout is not None:
                self._extend(exec_id, timeout)
            return
        if os.path.exists(f"execs/{exec_id}/cause"):  # killed before it began
            now = monotonic()
            killed = f"0 0 - 0 {now}\nsignal {int(signal.SIGKILL)} oom=0 {now}\n"
            self._unsaved.append((record, killed.encode()))
            self._save()
            return
        command = _Command(exec_id, record, self._new_group(), self._count_ooms())
        try:
            command.streams = self._outputs.open(
                exec_id, lambda: self._end_early(command, "output")
            )
        except OSError as error:  # a full disk
            _log(error)
            give_up(record)
            return
        pid = self._launch(command)
        if pid > 0:
            command.pid, command.started = pid, procfs.started_at(pid)
        who = (
            f"{command.pid} {command.started} {command.group or '-'} {command.ooms} {monotonic()}\n"
        )
        if pid <= 0:
            self._refuse(command, -pid, who)
            return
        try:
            os.write(record, who.encode())
        except OSError as error:  # a command whose result cannot be recorded must not run
            self._kill_tree(command)
            self._outputs.close(command.streams)
            _log(error)
            give_up(record)
            return
        self._running[pid] = command
        if timeout is not None:
            self._deadlines.append((command.began + timeout, command))

    def _extend(self, exec_id: str, timeout: float) -> None:
        """A limit only moves later, because a repeated request to start has the first limit."""
        self._deadlines = [
            (max(when, command.began + timeout), command)
            if command.exec_id == exec_id
            else (when, command)
            for when, command in self._deadlines
        ]

    def _new_group(self) -> str | None:
        if self._groups is None:
            return None
        group = f"{self._groups}/x{self._count}"
        self._count += 1
        os.mkdir(group)
        return group

    def _launch(self, command: _Command) -> int:
        """The pid; 0 if the launcher was killed; -errno if no process could be forked.

        No child is reaped while this waits, so the pid still belongs to that command.
        """
        try:
            if self._launcher is None:
                self._launcher = self._fork_launcher()
                self._enter_launcher(self._launcher)
            group = os.path.basename(command.group or "-")
            self._launcher.send(f"{command.exec_id} {group}".encode())
            answer = self._launcher.recv(64)
        except OSError:
            answer = b""
        if not answer and self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        return int(answer or 0)

    def _refuse(self, command: _Command, reason: int, who: str) -> None:
        """Record a command that did not start. If it may have started, kill its cgroup first.

        `who` is written together with the result. Alone it would mean that the command was lost.
        """
        self._outputs.close(command.streams)
        if reason == 0 or self._holder_is_gone():
            if command.group is not None:
                kill_group(command.group)
            self._report(command, f"{who}signal {int(signal.SIGKILL)} sandbox=gone")
            return
        with open(f"execs/{command.exec_id}/err", "ab") as file:
            file.write(f"sandbox: cannot start: {os.strerror(reason)}\n".encode())
        self._report(command, f"{who}exit {CANNOT_EXECUTE}")

    # -- ending ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._forwarders:
                self._replace_forwarder(*self._forwarders.pop(pid))
            if (command := self._running.pop(pid, None)) is not None:
                command.status = status
                if self._watches_disk and is_full("."):
                    command.met_full_disk = True
                self._end(command)

    def _look_at_disk(self) -> None:
        if is_full("."):
            for command in self._running.values():
                command.met_full_disk = True

    def _end(self, command: _Command) -> None:
        """After a SIGKILL or SIGTERM, wait a moment, because the whole sandbox may be ending."""
        self._outputs.drain(command.streams)
        self._deadlines = [entry for entry in self._deadlines if entry[1] is not command]
        killers = (signal.SIGKILL, signal.SIGTERM)
        sudden = os.WIFSIGNALED(command.status) and os.WTERMSIG(command.status) in killers
        oom = self._count_ooms() > command.ooms
        if sudden and self._holder and not oom and not command.cause_known:
            self._undecided.append((monotonic() + DYING_S, command))
        else:
            self._report(command, self._how(command))

    def _decide(self) -> None:
        if self._undecided and (self._holder_gone or self._undecided[0][0] <= monotonic()):
            gone = self._holder_is_gone()
            for _, command in self._undecided:
                self._report(command, self._how(command) + (" sandbox=gone" if gone else ""))
            self._undecided = []

    def _how(self, command: _Command) -> str:
        if os.WIFEXITED(command.status):
            how = f"exit {os.WEXITSTATUS(command.status)}"
        else:
            how = f"signal {os.WTERMSIG(command.status)}"
        full = " disk=full" if command.met_full_disk else ""
        return f"{how} oom={self._count_ooms()}{full}"

    def _report(self, command: _Command, how: str) -> None:
        self._unsaved.append((command.record, f"{how} {monotonic()}\n".encode()))
        self._save()

    def _save(self) -> None:
        """On a full disk, outputs and results are written later and not lost."""
        if not self._outputs.flush():
            return
        while self._unsaved:
            record, result = self._unsaved[0]
            try:
                os.write(record, result)
            except OSError:
                return
            os.close(record)
            del self._unsaved[0]

    def _holder_is_gone(self) -> bool:
        if self._holder and not self._holder_gone:
            state = procfs.stat(self._holder)
            dying = not state or state[0] in b"ZX" or int(state[6]) & PF_EXITING
            self._holder_gone = bool(dying)
        return self._holder_gone

    def _count_ooms(self) -> int:
        if self._ooms < 0:
            return 0
        words = os.pread(self._ooms, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    # -- deadlines ------------------------------------------------------------------------------

    def _leave_when_expired(self) -> None:
        """End the sandbox if its deadline has passed or its folder is gone."""
        try:
            left = os.stat(str(self._order["deadline"])).st_mtime - monotonic()
        except FileNotFoundError:
            left = 0.0
        if left > 0:
            self._look_at = monotonic() + min(left, LOOK_S)
            return
        if self._holder:  # the kernel ends its pid namespace with it
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._holder_fd, signal.SIGKILL)
        else:
            for command in self._running.values():
                self._kill_at_once(command)
        self._fork_remover()
        os._exit(0)  # its other children die with it; the reaper removes the folder

    def _fork_remover(self) -> None:
        """Remove the cgroups in another process: the launcher is in them until the keeper has exited."""
        left: list[str] = self._order["folders"]  # type: ignore[assignment]
        if not left or os.fork() != 0:
            return
        end = monotonic() + REMOVING_S
        try:
            while (left := [group for group in left if not removed(group)]) and monotonic() < end:
                sleep(0.02)
        finally:
            os._exit(0)

    def _enforce_deadlines(self) -> None:
        now = monotonic()
        for when, command in [*self._deadlines]:
            if when <= now:
                self._deadlines.remove((when, command))
                self._end_early(command, "timeout")

    def _end_early(self, command: _Command, cause: str) -> None:
        try:
            with open(f"execs/{command.exec_id}/cause", "x") as file:
                file.write(f"{cause}\n")
        except FileExistsError:
            pass
        self._kill_tree(command)

    def _kill_tree(self, command: _Command) -> None:
        """In a separate process, because a tree that keeps forking would block the keeper."""
        if os.fork() == 0:
            try:
                self._kill_at_once(command)
            finally:
                os._exit(0)

    def _kill_at_once(self, command: _Command) -> None:
        if command.group is not None:
            kill_group(command.group)
        else:
            process = command.pid, command.started
            end_command("execs", command.exec_id, process, self._pid, self._own)

    def _let_holder_kill(self, done: str) -> None:
        """Pid 1 kills all other processes in one system call, and none of them can kill pid 1."""
        holder: dict[str, object] | None = self._order["holder"]  # type: ignore[assignment]
        if holder is not None and holder["kills"]:
            with contextlib.suppress(OSError):  # the holder is gone
                os.write(self._life, b"\n")
                if select.select([self._life], [], [], _HOLDER_KILLS_S)[0]:
                    os.read(self._life, 64)
        with open(done, "x"):
            pass
