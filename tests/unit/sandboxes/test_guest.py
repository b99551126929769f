"""The guest of a remote sandbox and the resident that answers for it, in a folder of this host."""

import asyncio
import base64
import fcntl
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import pytest

from perdure.errors import NotFound
from perdure.sandboxes.base import Exec, SandboxSpec
from perdure.sandboxes.guest import guest_sandbox as guested
from perdure.sandboxes.guest.guest_sandbox import GuestSandbox
from perdure.sandboxes.guest.in_sandbox import guest_processes
from perdure.sandboxes.host.host_processes import ProcessId, ended
from perdure.sandboxes.host.procfs import started_at

TAKEN_S = "TAKEN_S = 5.0"
CALL = re.compile("call:([A-Za-z0-9+/=]+)")


class Folder(GuestSandbox):
    """A guest without a sandbox around it: orders run by this host's shell."""

    service = "Folder"

    def __init__(self, folder: Path) -> None:
        super().__init__("folder", str(folder / "work"), packs=folder / "packs")
        self.folder = folder / "guest"

    async def _print(self, what: str, command: str, extra_s: float) -> str:
        line = CALL.sub(self._relocated, command).replace(guested.FOLDER, str(self.folder))
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", line), stdout=asyncio.subprocess.PIPE
        )
        return (await process.communicate())[0].decode()

    def _relocated(self, call: re.Match[str]) -> str:
        """Staged uploads are in this folder too."""
        order = base64.b64decode(call[1]).decode().replace(guested.FOLDER, str(self.folder))
        return f"call:{base64.b64encode(order.encode()).decode()}"

    async def _write(self, path: str, data: bytes | Path) -> None:
        target = Path(path.replace(guested.FOLDER, str(self.folder)))
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data if isinstance(data, bytes) else data.read_bytes())

    async def touch(self, ttl_s: float) -> None:
        raise NotImplementedError

    async def kill(self) -> None:
        raise NotImplementedError

    async def say(self, word: str) -> bytes:
        return (await self.exec(["echo", word], user="root")).stdout

    @property
    def resident(self) -> int:
        return int((self.folder / "resident.lock").read_text().split()[0])

    async def kill_resident(self) -> None:
        """Wait until it has ended, because it is not replaced while it holds its lock."""
        resident = ProcessId(self.resident, started_at(self.resident))
        os.kill(resident.pid, signal.SIGKILL)
        assert await ended(resident, 60)

    def edit(self, old: str, new: str) -> None:
        """Install the program of another version."""
        path = self.folder / "guest_entry.py"
        text = path.read_text()
        assert old in text
        draft = path.with_suffix(".new")
        draft.write_text(text.replace(old, new))
        draft.replace(path)


@pytest.fixture
async def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Folder]:
    monkeypatch.setenv("PERDURE_OWNER", f"{os.getuid()}:{os.getgid()}")
    box = Folder(tmp_path)
    await box.set_up(SandboxSpec(box.workdir))
    yield box
    await box.kill_resident()


async def test_one_resident_answers_for_the_guest(box: Folder) -> None:
    """The resident forks a command's supervisor and stays. No process's arguments show an order."""
    first = box.resident
    await box.start("long", Exec(["sleep", "600"], user="root"))
    supervisor = (box.folder / "execs/long/pid").read_text().split()[0]
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (supervisor, first)]
    await box.signal("long", signal.SIGKILL)

    assert (box.resident, arguments[0]) == (first, arguments[1])
    assert b"call:" not in arguments[0]


async def test_guest_knows_its_resident(box: Folder) -> None:
    """`end_all` in a container spares the process that this record names."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; import guest_records as r; print(r.kept_process('resident.lock'))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(box.folder)), stdout=asyncio.subprocess.PIPE
    )
    said = (await process.communicate())[0].decode()

    assert said == f"({box.resident}, '{started_at(box.resident)}')\n"


HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_process_whose_first_thread_has_ended_is_killed(box: Folder) -> None:
    """It shows as a zombie while another thread runs. SIGKILL of its command ends it too."""
    held = ["flock", "lock", "python3", "-c", HEADLESS]
    await box.start("agent", Exec(["sh", "-c", '"$@" & sleep 600', "sh", *held], user="root"))
    while not await box.output("agent"):
        await box.wait("agent", timeout_s=0.01)
    await box.signal("agent", signal.SIGKILL)

    assert (await box.exec("flock -w 30 lock true", user="root")).status.ok


async def test_killed_resident_is_replaced(box: Folder) -> None:
    """An order that finds the resident dead is executed, and starts another resident."""
    first = box.resident
    await box.kill_resident()
    said = await box.say("dead")

    assert (said, box.resident != first) == (b"dead\n", True)


async def test_silent_resident_is_replaced(box: Folder) -> None:
    """A stopped resident delays one order by some seconds; no order loses its answer."""
    box.edit("settimeout(TAKEN_S)", "settimeout(0.2)")
    await box.say("edited")
    silent = box.resident
    os.kill(silent, signal.SIGSTOP)
    said = [await box.say("first"), await box.say("second")]

    assert (said, box.resident != silent) == ([b"first\n", b"second\n"], True)


async def test_resident_of_another_version_is_replaced(box: Folder) -> None:
    """After an update the new guest answers, even if the old one was resident."""
    first = box.resident
    box.edit(TAKEN_S, "TAKEN_S = 6.0")
    said = await box.say("new")

    assert (said, box.resident != first) == (b"new\n", True)


async def test_sandbox_of_older_code_stays_usable(box: Folder) -> None:
    """A sandbox set up with another version of the guest answers, and its commands continue."""
    await box.start("long", Exec(["sh", "-c", "until [ -e go ]; do sleep 0.01; done; exit 5"]))
    await box.kill_resident()
    for path in box.folder.glob("guest*.py"):
        path.unlink()
    (box.folder / "guest.py").write_text("def main(): print('perdure-answer:{}')\n")
    await box.put("go", b"")
    status = await box.wait("long", 60)

    assert status.code == 5


async def test_the_same_guest_is_left_alone(box: Folder) -> None:
    """A set-up that finds the same guest keeps its resident."""
    first = box.resident
    await box.set_up(SandboxSpec(box.workdir))

    assert box.resident == first


@pytest.mark.parametrize(
    "made", ["ln -s odd odd", "python3 -c 'import socket; socket.socket(1).bind(\"odd\")'"]
)
async def test_what_cannot_be_opened_is_not_found(box: Folder, made: str) -> None:
    """If there is a link loop or a socket in place of the agent's log, the log counts as missing."""
    await box.exec(made, check=True)

    with pytest.raises(NotFound):
        await box.get("odd")


def _lease(file: BinaryIO) -> None:
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        pytest.skip(f"this disk gives no leases: {error}")


async def test_what_cannot_be_opened_just_now_is_waited_for(box: Folder) -> None:
    """A transient system error does not count as a missing file: the read is repeated."""
    await box.put("leased", b"here")
    with (Path(box.workdir) / "leased").open("rb+") as file:

        def give_back(*_: object) -> None:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

        before = signal.signal(signal.SIGIO, give_back)  # the signal tells that a read was refused
        try:
            _lease(file)
            found = await box.get("leased")
        finally:
            signal.signal(signal.SIGIO, before)

    assert found == b"here"


async def test_tree_is_unpacked_as_it_was_packed(
    box: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes and links to any path arrive, although Python 3.14 filters them by default."""
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python's tarfile knows no filters")
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    default = (
        "import tarfile; tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)"
    )
    script = f'code=$4; shift 4; exec {sys.executable} -I -S -c "{default}\n$code" "$@"'
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    await box.kill_resident()
    tree, target = tmp_path / "tree", tmp_path / "target"
    tree.mkdir()
    (tree / "link").symlink_to("/etc/hostname")
    (tree / "open").touch()
    (tree / "open").chmod(0o666)
    await box._unpack(tree, str(target), agent_owned=True)

    assert (os.readlink(target / "link"), (target / "open").stat().st_mode & 0o777) == (
        "/etc/hostname",
        0o666,
    )


async def test_command_outlives_the_resident(box: Folder) -> None:
    """A command survives the resident, and its result is reported after the resident has ended."""
    await box.start(
        "long", Exec(["sh", "-c", "until [ -e go ]; do sleep 0.01; done; exit 5"], user="root")
    )
    await box.kill_resident()
    await box.put("go", b"")
    status = await box.wait("long", 60)

    assert status.code == 5


def test_a_scan_during_which_a_process_was_born_is_no_proof() -> None:
    """A process that forks and exits at once is in no single scan: the next one is needed."""
    with subprocess.Popen(["sleep", "40"]) as newborn:

        def scan() -> list[int]:
            scans.append(len(scans))
            if len(scans) == 1:
                subprocess.run(["true"], check=True)
            return [newborn.pid] if len(scans) == 2 else []

        scans: list[int] = []
        guest_processes.kill_all(scan)

        assert newborn.wait(10) == -signal.SIGKILL
