"""A start fails for standing still, not for being slow."""

import asyncio
import os
import subprocess
import sys

import pytest

from perdure.sandboxes.host import procfs
from perdure.stack import start_limit
from tests.stack.wait_until import until

LOOK_S = 0.0005


async def test_a_start_that_stands_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds in which no part was at work are counted, and only they."""
    monkeypatch.setattr(start_limit, "IDLE_S", 3 * LOOK_S)
    looks = iter([True, False, True, False, True, False])

    with pytest.raises(TimeoutError):
        await start_limit.limited(asyncio.sleep(3600), lambda: next(looks), LOOK_S)

    assert list(looks) == []


async def test_a_start_that_computes_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_limit, "LONGEST_S", 5 * LOOK_S)

    with pytest.raises(TimeoutError):
        await start_limit.limited(asyncio.sleep(3600), lambda: True, LOOK_S)


async def test_a_slow_start_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more looks than may be idle, and works at each."""
    monkeypatch.setattr(start_limit, "IDLE_S", 3 * LOOK_S)
    looks = 0
    enough = asyncio.Event()

    async def start() -> None:
        await enough.wait()

    def works() -> bool:
        nonlocal looks
        looks += 1
        if looks == 10:
            enough.set()
        return True

    await start_limit.limited(start(), works, LOOK_S)

    assert looks >= 10


async def test_a_failed_start_raises_its_own_error() -> None:
    async def start() -> None:
        raise ValueError("port 1 is taken")

    with pytest.raises(ValueError, match="port 1"):
        await start_limit.limited(start(), lambda: True)


async def test_work_is_seen_in_any_thread_of_a_process() -> None:
    """A process whose first thread waits for a thread that computes is at work; one that waits is not."""
    computing = "import threading; t = threading.Thread(target=lambda: [0 for _ in iter(int, 1)]); t.start(); t.join()"
    waiting = "import signal; signal.pause()"
    started = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code]) for code in (computing, waiting)
    ]
    try:
        busy, idle = (process.pid for process in started)
        await until(lambda: _threads(busy) > 1 and procfs.is_busy(busy), "it computes")
        await until(lambda: not procfs.is_busy(idle), "it waits")
    finally:
        for process in started:
            process.kill()
            process.wait()

    assert not procfs.is_busy(started[0].pid)


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))
