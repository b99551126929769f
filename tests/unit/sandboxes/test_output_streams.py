"""A command's output reaches its file whole, up to its cap, even if the disk was full."""

import os
import resource
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.sandboxes.host.keeper.output_streams import LARGEST_PIPE, Outputs, Stream, pipe_of

CAP = 1 << 21


@pytest.fixture
def execs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The keeper works in the sandbox's folder."""
    (tmp_path / "execs" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "execs" / "one"


@pytest.fixture
def outputs() -> Outputs:
    return Outputs(select.poll(), CAP)


def writer(folder: Path, name: str = "out") -> int:
    return os.open(folder / pipe_of(name), os.O_WRONLY)


@contextmanager
def full_disk() -> Iterator[None]:
    """No byte can be written to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def never() -> None:
    raise AssertionError("the cap was not exceeded")


def opened(outputs: Outputs) -> tuple[Stream, ...]:
    return outputs.open("one", never)


def test_all_that_an_ended_command_wrote_is_in_the_file(execs: Path, outputs: Outputs) -> None:
    """What is in the pipe when the command ends is copied before its result is recorded."""
    streams = opened(outputs)
    command = writer(execs)
    os.write(command, b"x" * 60_000)
    os.close(command)
    outputs.drain(streams)

    assert (execs / "out").read_bytes() == b"x" * 60_000


def test_output_waits_for_a_full_disk(execs: Path, outputs: Outputs) -> None:
    """No byte is lost or repeated, and copying continues once there is space."""
    streams = opened(outputs)
    command = writer(execs)
    os.write(command, b"first")
    with full_disk():
        outputs.carry(streams[0].fd)
        os.write(command, b", second")
        held = (outputs.stuck, outputs.flush())
    freed = outputs.flush()
    os.close(command)

    assert (held, freed, (execs / "out").read_bytes()) == ((True, False), True, b"first, second")


def test_a_background_writer_delays_no_end(execs: Path, outputs: Outputs) -> None:
    """Draining ends although the pipe stays open, and later output is copied too."""
    streams = opened(outputs)
    left = writer(execs)
    os.write(left, b"early")
    outputs.drain(streams)
    os.write(left, b" late")
    outputs.carry(streams[0].fd)
    os.close(left)

    assert (execs / "out").read_bytes() == b"early late"


def test_what_exceeds_the_cap_ends_the_command_once(execs: Path) -> None:
    """The file ends at the cap; the rest is dropped, and the command is ended once."""
    ended: list[bool] = []
    outputs = Outputs(select.poll(), 10)
    streams = outputs.open("one", lambda: ended.append(True))
    command = writer(execs)
    for _ in range(3):
        os.write(command, b"12345678")
        outputs.carry(streams[0].fd)
    os.close(command)

    assert ((execs / "out").read_bytes(), ended) == (b"1234567812", [True])


def test_a_drain_carries_the_largest_pipe(execs: Path, outputs: Outputs) -> None:
    """A command may enlarge its pipe, and fill it before it ends."""
    import fcntl

    streams = opened(outputs)
    command = writer(execs)
    fcntl.fcntl(command, fcntl.F_SETPIPE_SZ, LARGEST_PIPE)
    os.write(command, b"x" * LARGEST_PIPE)
    os.close(command)
    outputs.drain(streams)

    assert (execs / "out").stat().st_size == LARGEST_PIPE
