"""The state of a command follows from the files in its folder."""

import os
import time
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Exec, ExecState, ExecStatus
from perdure.sandboxes.host.exec_records import ExecRecord
from perdure.sandboxes.host.keeper.full_disk import give_up
from perdure.sandboxes.host.procfs import started_at


@pytest.fixture
def record(tmp_path: Path) -> ExecRecord:
    record = ExecRecord(tmp_path / "one")
    record.prepare(Exec(["true"]), b"run", "token")
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
    """Exit codes, signals, out of memory and a dead sandbox are distinguished."""
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


@pytest.mark.parametrize("is_guarded", [False, True], ids=["unread", "being launched"])
def test_a_starved_keeper_loses_no_command(
    record: ExecRecord, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    """An hour later, the command is still about to start, because its sandbox is alive."""
    if is_guarded:
        (record.path / "pid").touch(0o600)
    true_time = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: true_time() + 3600)

    assert record.status() == ExecStatus(ExecState.RUNNING)


def test_a_command_that_its_keeper_could_not_start_is_lost(record: ExecRecord) -> None:
    """On a full disk, the keeper cannot write why."""
    give_up(os.open(record.path / "pid", os.O_WRONLY | os.O_CREAT, 0o600))

    assert record.status() == ExecStatus(ExecState.LOST, host_lacked="disk")


def test_prepare_twice_changes_nothing(record: ExecRecord) -> None:
    """The first start of an exec id decides what it runs."""
    record.prepare(Exec(["true"]), b"other", "other")

    assert ((record.path / "run").read_bytes().endswith(b"run"), record.token) == (True, "token")


def test_other_argv_is_refused(record: ExecRecord) -> None:
    """The message names the exec id and what to do."""
    with pytest.raises(ConfigurationError, match="new exec_id"):
        record.prepare(Exec(["false"]), b"run", "token")


def test_a_request_is_known_until_the_keeper_reads_it(record: ExecRecord) -> None:
    """If a worker dies before it asks the keeper, another worker has all it needs to ask."""
    record = ExecRecord(record.path.with_name("two"))
    record.prepare(Exec(["true"], timeout_s=2.5), b"run", "token")
    unread = (record.is_unread, record.timeout_s)
    (record.path / "pid").touch()

    assert (unread, record.is_unread) == ((True, 2.5), False)
