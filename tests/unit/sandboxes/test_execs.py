"""The state of a command follows from the files in its folder."""

import os
import time
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.sandboxes.host.execs import LAUNCH_GRACE_S, ExecRecord
from perdure.sandboxes.host.procfs import started_at


@pytest.fixture
def record(tmp_path: Path) -> ExecRecord:
    record = ExecRecord(tmp_path / "one")
    record.prepare(["true"], b"run", "token", None)
    return record


def own_line() -> str:
    """The first line of a running command: this process."""
    return f"{os.getpid()} {started_at(os.getpid())} - 0 100.0\n"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("exit 0 oom=0", (ExecState.EXITED, 0, None, None)),
        ("exit 137 oom=0", (ExecState.EXITED, 137, None, None)),
        ("exit 126", (ExecState.EXITED, 126, None, None)),
        ("signal 15 oom=0", (ExecState.KILLED, None, "signal", 15)),
        ("signal 9 oom=1", (ExecState.KILLED, None, "oom", 9)),
        ("exit 137 oom=1", (ExecState.KILLED, None, "oom", 9)),
        ("signal 25 oom=0", (ExecState.KILLED, None, "output", 25)),
        ("signal 9 oom=0 sandbox=gone", (ExecState.KILLED, None, "sandbox", 9)),
    ],
)
def test_result_is_read_as_the_keeper_wrote_it(
    record: ExecRecord, result: str, expected: tuple[object, ...]
) -> None:
    """Exit codes, signals, oom and a dead sandbox come apart."""
    (record.path / "pid").write_text(f"{own_line()}{result} 101.5\n")
    status = record.status()

    assert (status.state, status.code, status.cause, status.signal) == expected


def test_seconds_are_those_between_start_and_end(record: ExecRecord) -> None:
    """The duration is what the keeper measured, whenever it is read."""
    (record.path / "pid").write_text(f"{own_line()}exit 0 oom=0 101.5\n")

    assert record.status().seconds == 1.5


def test_half_written_result_is_not_over(record: ExecRecord) -> None:
    """An incomplete result does not count."""
    (record.path / "pid").write_text(f"{own_line()}exit 1")

    assert record.status() == ExecStatus(ExecState.RUNNING)


def test_dead_without_result_is_lost(record: ExecRecord) -> None:
    """Without a result, a command is lost if its process is gone or a later one has its pid."""
    pid, started, *rest = own_line().split()
    (record.path / "pid").write_text(f"{pid} {int(started) - 1} {' '.join(rest)}\n")

    assert record.status() == ExecStatus(ExecState.LOST)


def test_never_picked_up_is_lost_for_good(record: ExecRecord) -> None:
    """A command that was declared lost at its launch can never run: its guard is taken."""
    _pass(record, LAUNCH_GRACE_S + 1)
    states = [record.status().state for _ in range(2)]

    assert (states, (record.path / "pid").exists()) == ([ExecState.LOST] * 2, True)


@pytest.mark.parametrize("jump", [7200, -7200])
def test_a_clock_that_is_set_loses_no_command(
    record: ExecRecord, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    """A command that its keeper is about to start stays so when the wall clock jumps."""
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + jump)

    assert record.status() == ExecStatus(ExecState.RUNNING)


def _pass(record: ExecRecord, seconds: float) -> None:
    """As if it had been prepared that long ago."""
    first, _, rest = (record.path / "run").read_bytes().partition(b"\n")
    *words, since = first.split()
    earlier = str(float(since) - seconds).encode()
    (record.path / "run").write_bytes(b" ".join([*words, earlier]) + b"\n" + rest)


def test_prepare_twice_changes_nothing(record: ExecRecord) -> None:
    """The first start of an exec id decides what it runs."""
    record.prepare(["true"], b"other", "other", None)

    assert ((record.path / "run").read_bytes().endswith(b"run"), record.token) == (True, "token")


def test_other_argv_is_refused(record: ExecRecord) -> None:
    """The message names the exec id and what to do."""
    with pytest.raises(ConfigurationError, match="new exec_id"):
        record.prepare(["false"], b"run", "token", None)
