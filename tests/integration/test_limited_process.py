"""Calls in a child: what they give back, and what each way of hostile bytes to misbehave costs."""

import asyncio
import contextlib
import json
import mmap
import os
import re
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import limited_process
from perdure.errors import ConfigurationError, InstanceError, RetryHere
from perdure.graders.reports.log_parsers import parser_of
from perdure.limited_process import Unparsable, read
from perdure.testing.grader_contract import tiny_instance
from tests.checkout_paths import ROOT


async def test_gives_back_what_the_function_gives() -> None:
    """A value comes back as it is, however large, and so does an error of Perdure's own."""
    large = bytes(range(256)) * 40_000

    assert await read(json.loads, b'{"a": [1, 2]}') == {"a": [1, 2]}
    assert await read(bytes.upper, large) == large.upper()
    with pytest.raises(InstanceError, match="unknown `log_parser`"):
        await read(parser_of, tiny_instance(log_parser="mocha"))


async def test_a_large_worker_keeps_its_child() -> None:
    """A child stays warm however much memory the process that started it has."""
    program = (
        "import asyncio, os\n"
        "from perdure.limited_process import read\n"
        "large = bytearray(os.urandom(1) * (400 << 20))\n"
        "async def twice(): return {await read(os.getpid), await read(os.getpid)}\n"
        "print(len(asyncio.run(twice())))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)

    assert done.stdout == b"1\n"


async def test_a_child_gives_large_memory_back() -> None:
    """A child that holds much after a request is replaced by a small one."""
    before = await read(os.getpid)
    await read(_hoard, 300 << 20)

    assert await read(os.getpid) != before


async def test_a_child_that_is_not_asked_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker keeps no child; one that was asked again meanwhile stays."""
    busy = await read(os.getpid)
    monkeypatch.setattr(limited_process, "IDLE_S", 0.0)
    idle = await read(os.getpid)
    assert idle == busy
    while Path(f"/proc/{idle}").exists():
        await asyncio.sleep(0.01)

    assert await read(os.getpid) != idle


_HOARD: list[bytes] = []


def _hoard(size: int) -> None:
    _HOARD.append(b"x" * size)


async def test_a_broken_reader_is_a_verdict() -> None:
    """An error that no one foresaw is Unparsable, so that nothing tries again for ever."""
    with pytest.raises(Unparsable, match="JSONDecodeError"):
        await read(json.loads, b"[")


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        (bytes, (4 << 30,), "1024 MiB of memory"),
        (os.abort, (), "ended the process with code -6"),
        (os._exit, (3,), "ended the process with code 3"),
        (sys.setrecursionlimit, (-1,), "ValueError"),
    ],
    ids=["memory", "crash", "exit", "exception"],
)
async def test_misbehaviour_ends_the_child_alone(
    function: object, arguments: tuple[object, ...], why: str
) -> None:
    """A child that takes too much or crashes is a verdict with its reason; the next one reads on."""
    with pytest.raises(Unparsable, match=why):
        await read(function, *arguments)  # type: ignore[arg-type]

    assert await read(len, b"abc") == 3


async def test_endless_work_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression that backtracks for ever ends by CPU time, while the event loop goes on."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(Unparsable, match="1 s of CPU time"):
        await _with_cpu_limit(1, monkeypatch)
    ticking.cancel()

    assert ticks > 20


async def _with_cpu_limit(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited_process.end_all()  # their limit is another
    monkeypatch.setattr(limited_process, "CPU_S", seconds)
    try:
        await read(re.match, "(a|aa)+$", "a" * 60 + "b")
    finally:
        limited_process.end_all()


def _kill_myself(note: str, times: int) -> str:
    """End this process from outside, so often."""
    with open(note, "a") as file:
        file.write("x")
    if len(Path(note).read_text()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "read"


async def test_a_killed_child_is_replaced_once(tmp_path: Path) -> None:
    """What the kernel ends for want of memory is read once more. Ended twice it is tried again later: the bytes are not the cause."""
    assert await read(_kill_myself, str(tmp_path / "once"), 1) == "read"
    with pytest.raises(RetryHere, match="ended a child process twice"):
        await read(_kill_myself, str(tmp_path / "always"), 9)

    assert (tmp_path / "always").read_text() == "xx"


async def test_a_cancelled_reading_leaves_no_child_at_work(tmp_path: Path) -> None:
    """Who no longer waits does not leave a process that computes on."""
    note = tmp_path / "working"
    waiting = asyncio.create_task(read(_work_for_ever, str(note)))
    while not note.exists():
        await asyncio.sleep(0.01)
    pid = int(note.read_text())

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert not Path(f"/proc/{pid}").exists()


async def test_a_reading_that_is_cancelled_at_its_start_leaves_no_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child that it had started ends, too, and the next reading is served."""
    limited_process.end_all()
    started: list[int] = []
    start = subprocess.Popen

    def noted(*args: Any, **kwargs: Any) -> Any:
        process = start(*args, **kwargs)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", noted)
    waiting = asyncio.create_task(read(len, b"abc"))
    while not started:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert not Path(f"/proc/{started[0]}").exists()
    assert await read(len, b"abc") == 3


async def test_many_requests_at_once_start_few_children() -> None:
    """However many readings there are at a time, each is served."""
    pids = await asyncio.gather(*(read(os.getpid) for _ in range(50)))

    assert len(set(pids)) <= limited_process.MOST


@pytest.mark.longer
async def test_a_child_that_is_killed_costs_only_its_own_call(tmp_path: Path) -> None:
    """Also when it is killed while it hands its value back."""
    note = tmp_path / "working"
    killed = asyncio.create_task(read(_give_back_much, str(note), 3 << 26))
    while not note.exists():
        await asyncio.sleep(0.001)
    beside = asyncio.create_task(read(len, b"abc"))
    os.kill(int(note.read_text()), signal.SIGKILL)

    async with asyncio.timeout(180):
        assert await beside == 3
        assert len(await killed) == 3 << 26  # by a second child
        assert await read(len, b"abcd") == 4


def _give_back_much(note: str, size: int) -> bytes:
    much = b"x" * size
    Path(note).with_suffix(".part").write_text(str(os.getpid()))
    Path(note).with_suffix(".part").rename(note)
    return much


async def test_a_long_request_holds_up_no_other(tmp_path: Path) -> None:
    """There is another child for the next one."""
    note = tmp_path / "working"
    long = asyncio.create_task(read(_work_for_ever, str(note)))
    while not note.exists():
        await asyncio.sleep(0.01)

    assert await read(len, b"abc") == 3

    long.cancel()


def _work_for_ever(note: str) -> None:
    Path(note).with_suffix(".part").write_text(str(os.getpid()))
    Path(note).with_suffix(".part").rename(note)
    re.match("(a|aa)+$", "a" * 60 + "b")


async def test_only_a_modules_own_function_can_be_sent() -> None:
    """A function that the child could not find is refused by name."""
    with pytest.raises(ConfigurationError, match="defined at module level"):
        await read(lambda: 1)


async def test_memory_is_limited_by_the_kernel() -> None:
    """Also memory that no object of Python's asks for."""
    assert await read(_reserve, 512 << 20) == 512 << 20
    with pytest.raises(Unparsable, match=r"Cannot allocate memory"):
        await read(_reserve, 2 << 30)


def _reserve(size: int) -> int:
    with mmap.mmap(-1, size) as reserved:
        return len(reserved)


async def test_the_kernel_ends_a_child_before_its_parent() -> None:
    """It writes no core file either."""
    adjusted = await read(_oom_score_adjusted)

    assert adjusted == "1000"
    assert await read(resource.getrlimit, resource.RLIMIT_CORE) == (0, 0)


def _oom_score_adjusted() -> str:
    return Path("/proc/self/oom_score_adj").read_text().strip()


def test_children_end_with_their_process() -> None:
    """A process that is killed leaves no reader behind."""
    program = (
        "import asyncio, os, signal\n"
        "from perdure.limited_process import read\n"
        "print(asyncio.run(read(os.getpid)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    pid = int(done.stdout)

    try:  # a pidfd is readable once the process has ended
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 60)[0]
    os.close(fd)


USES_A_READER = (
    "import asyncio, os, signal, sys, temporalio\n"
    "from perdure.limited_process import read\n"
    "async def use(*_):\n"
    "    pid = await read(os.getpid)\n"
    "    os.kill(pid, signal.SIGSTOP)\n"  # it cannot end by itself
    "    print(pid, flush=True)\n"
)


@pytest.mark.parametrize(
    "ends",
    [
        "from workers import worker_process; worker_process.serve = use; sys.argv[1:] = []; worker_process.main()",
        "from perdure.cli import main; main.invoke = lambda _: asyncio.run(use()) or 0; main.main()",
    ],
    ids=["worker", "command"],
)
def test_what_ends_takes_its_readers_with_it(ends: str, tmp_path: Path) -> None:
    """A worker or a command that ends leaves no reader, although it skips Python's clean-up."""
    environment = {**os.environ, "PERDURE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", USES_A_READER + ends],
        stdout=subprocess.PIPE,
        env=environment,
        check=False,
    )
    left = False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIGKILL)
        left = True

    assert not left
