"""The host's side of a relay's process, without a sandbox."""

import asyncio
from typing import Any, cast

from perdure.sandboxes.base import ExecState, ExecStatus, Sandbox
from perdure.sandboxes.relay.relay_process import RelayProcess


class QuietSandbox:
    """A sandbox whose relay never writes a line. `reads` gets an entry for each read of the log."""

    waits_inside = False

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(0)

    async def next_output(self, *_: Any, wait_s: float) -> bytes:
        self.reads.release()
        return b""

    async def put(self, path: str, data: bytes) -> None:
        pass

    async def poll(self, exec_id: str) -> ExecStatus:
        return ExecStatus(ExecState.RUNNING)


async def test_a_cancelled_watcher_ends_although_an_answer_comes_at_that_moment() -> None:
    """`asyncio.wait_for` of Python 3.11 would lose this cancellation: it prefers the result."""
    sandbox = QuietSandbox()
    relay = RelayProcess(cast(Sandbox, sandbox), "relay-stdio-1", "/spool", reads_are_cheap=True)

    async def watch() -> None:
        async for _ in relay.batches():
            pass

    watching = asyncio.create_task(watch())
    for _ in range(2):
        await sandbox.reads.acquire()  # the first read gives an empty batch; then it pauses
    await relay.answer({}, b"")
    watching.cancel()

    async with asyncio.timeout(30):
        await asyncio.wait({watching})
    assert watching.cancelled()
