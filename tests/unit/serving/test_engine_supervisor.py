"""The supervisor of an engine, on real process groups that are killed in every order."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.serving.engine_supervisor import end_orphans

PATIENCE_S = 30.0
ENGINE = """
import os, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), worker.pid, flush=True)
signal.pause()
"""


class Supervised:
    """A supervisor with a server and its worker: two processes, as vLLM has."""

    def __init__(self, folder: Path, grace_s: float) -> None:
        self.note = folder / "engine.note"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "perdure.serving.engine_supervisor", str(self.note)),
                *(str(grace_s), "--", sys.executable, "-c", ENGINE),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.server, self.worker = map(int, self.process.stdout.readline().split())
        while not self.note.exists():  # it is written beside the server's start
            time.sleep(0.001)
        self.watched = [os.pidfd_open(pid) for pid in (self.server, self.worker)]

    def owner_dies(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def gone(self) -> bool:
        """Waits for the end of both processes; True when both have ended."""
        end = time.monotonic() + PATIENCE_S
        poll = select.poll()
        left = set(self.watched)
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left and time.monotonic() < end:
            for descriptor, _ in poll.poll((end - time.monotonic()) * 1000):
                poll.unregister(descriptor)
                left.discard(descriptor)
        return not left

    def close(self) -> None:
        self.process.kill()
        for descriptor in self.watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def supervised(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Supervised]:
    held = Supervised(tmp_path, grace_s=getattr(request, "param", PATIENCE_S))
    yield held
    held.close()


def test_a_dead_owner_ends_the_whole_engine(supervised: Supervised) -> None:
    """When the pipe from the owner closes, server and worker both end."""
    supervised.owner_dies()

    assert supervised.gone()


def test_a_killed_server_ends_its_worker(supervised: Supervised) -> None:
    """An engine core whose API server was killed releases the device."""
    os.kill(supervised.server, signal.SIGKILL)

    assert supervised.gone()
    assert supervised.process.wait() == 128 + signal.SIGKILL


@pytest.mark.parametrize("supervised", [0.5], indirect=True)
def test_a_frozen_worker_is_killed(supervised: Supervised) -> None:
    """A worker that ignores SIGTERM, such as one stuck in a collective, is killed after the grace time."""
    os.kill(supervised.worker, signal.SIGSTOP)

    supervised.owner_dies()

    assert supervised.gone()


def test_sigterm_ends_the_engine_in_order(supervised: Supervised) -> None:
    """A supervisor told to stop ends the group and leaves no note behind."""
    supervised.process.terminate()

    assert supervised.gone()
    assert supervised.process.wait() == 128 + signal.SIGTERM
    assert not supervised.note.exists()


def test_a_killed_supervisor_ends_the_server(supervised: Supervised) -> None:
    """The kernel kills the server when its supervisor is killed: no server outlives its owner."""
    pidfd = supervised.watched[0]

    supervised.process.kill()

    assert select.select([pidfd], [], [], PATIENCE_S)[0]


def test_the_next_start_ends_what_a_killed_supervisor_left(
    supervised: Supervised, tmp_path: Path
) -> None:
    """Workers whose supervisor was killed are ended before the next engine takes the device."""
    supervised.process.kill()
    supervised.process.wait()

    end_orphans(tmp_path)

    assert supervised.gone()


def test_a_running_engine_is_no_orphan(supervised: Supervised, tmp_path: Path) -> None:
    """A second engine that starts on the node leaves the first one alone."""
    ended = end_orphans(tmp_path)

    assert (ended, supervised.process.poll()) == ([], None)


def test_a_note_of_another_process_kills_nothing(tmp_path: Path) -> None:
    """A pid that now belongs to another process is left alone."""
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    facts = {"group": bystander.pid, "started": 1, "supervisor": 1, "supervisor_started": 1}
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (tmp_path / "other.note").write_text(json.dumps({**facts, "boot_id": boot_id}))

    ended = end_orphans(tmp_path)

    assert (ended, bystander.poll()) == ([], None)
    bystander.kill()
    bystander.wait()


def test_a_missing_command_is_reported(tmp_path: Path) -> None:
    """A command that cannot be started ends with 127 and a line that names it."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "perdure.serving.engine_supervisor",
            tmp_path / "n",
            "1",
            "--",
            "no-such-engine",
        ],
        stdin=subprocess.PIPE,
        capture_output=True,
        check=False,
    )

    assert (done.returncode, b"no-such-engine" in done.stderr) == (127, True)
