"""A part of the stack that hangs is started again, and its log says where it hung."""

import asyncio
import os
import sys
from pathlib import Path

from perdure.stack.child_restarts import Child, ChildSpec
from perdure.stack.hang_detection import HANGS_AFTER, STARTS_WITHIN, Watch
from perdure.stack.part_readiness import POLLED, socket_answers
from tests.stack.wait_until import until
from workers.health_endpoints import answering

HANGING = """
import time
from perdure.telemetry import configure_logging

def where_it_hangs():
    print("hangs now", flush=True)
    while True:
        time.sleep(3600)

configure_logging("part")
where_it_hangs()
"""


async def _checks_until_hanging(watch: Watch, pid: int) -> int:
    checks = 1
    while not await watch.hangs(pid):
        checks += 1
    return checks


async def test_a_part_hangs_when_it_fails_some_checks_in_a_row() -> None:
    """One answer starts the count again; a part that was started again and has not answered yet gets
    longer. The first process of a stack has answered when `perdure up` waited for it."""
    answers = False

    async def check() -> bool:
        return answers

    assert await _checks_until_hanging(Watch(check, started=1), 1) == HANGS_AFTER
    watch = Watch(check, started=1)
    for _ in range(HANGS_AFTER - 1):
        assert not await watch.hangs(1)
    answers = True
    assert not await watch.hangs(1)
    answers = False

    assert await _checks_until_hanging(watch, 1) == HANGS_AFTER
    assert await _checks_until_hanging(watch, 2) == STARTS_WITHIN


async def test_a_worker_answers_only_while_its_loop_runs(tmp_path: Path) -> None:
    """The socket is there from start to end, and a socket that a killed worker left is replaced."""
    health = tmp_path / "worker.health"
    health.touch()
    async with answering(health, lambda: False):
        assert await socket_answers(health)

    assert not await socket_answers(health)


async def test_a_worker_is_ready_once_the_server_has_seen_it_poll(tmp_path: Path) -> None:
    """A start of the stack waits for that; before, the worker is alive and not ready."""
    health, seen = tmp_path / "worker.health", asyncio.Event()
    async with answering(health, seen.is_set):
        assert not await socket_answers(health, POLLED)
        seen.set()
        assert await socket_answers(health, POLLED)


async def test_a_hanging_part_writes_its_stacks(tmp_path: Path) -> None:
    """On the signal its log gets the line of each thread, although its Python code never returns."""
    spec = ChildSpec("part", (sys.executable, "-c", HANGING), os.environ)
    child = Child(spec, tmp_path, lambda: None)
    await child.start()
    try:
        await until(lambda: "hangs now" in child.log.read_text(), "the part hangs")
        child.write_stacks()
        await until(lambda: "in where_it_hangs" in child.log.read_text(), "its stack is logged")
    finally:
        await child.stop()
