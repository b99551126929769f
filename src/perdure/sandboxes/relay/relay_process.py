"""Reads the requests of the relay inside a sandbox, and sends it pieces of answers.

The relay writes each request as a line of an append-only log, and marks it `done` when the agent has its
answer. The byte offset in the log is the acknowledgment, so any provider that keeps a command's output can
carry it. Answers return in numbered pieces: duplicates are dropped, lost pieces are requested again. Not
all providers stream standard input, and polling folders would take five calls for each model call.
Everything that is read here is untrusted.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar
from uuid import uuid4

from perdure import retry
from perdure.errors import NotFound, OutcomeUnknown, RetryHere
from perdure.sandboxes.base import Sandbox

LARGEST_LINE = 160 << 10
LARGEST_BODY = 32 << 20
LARGEST_LOG = 64 << 20
"""Bytes after which a new relay is started. An honest relay writes far less."""
READ = 1 << 20
POLLS_PER_S = 500.0
"""For all relays of this process together. One sandbox service allowed 833 when measured."""
LONGEST_PAUSE_S = 0.5
NEAR_PAUSE_S, FAR_PAUSE_S = 0.005, 0.05
"""Seconds of the shortest pause between two reads: if a read is a system call, or a request."""
READ_WAIT_S = 5.0
"""Seconds that one read waits in the sandbox, if the sandbox `waits_inside`."""
LOOK_S = 2.0
"""Seconds between two checks that a silent relay still runs."""

JsonObject = dict[str, Any]
T = TypeVar("T")


class Lines:
    """Splits bytes into lines. Each must be a JSON object of bounded size; others are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        self.dropped = 0

    def feed(self, data: bytes) -> list[JsonObject]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif (fields := as_object(line)) is not None:
                found.append(fields)
            else:
                self.dropped += 1
        if len(self._rest) > LARGEST_LINE:
            self._rest, self._skipping = b"", True
            self.dropped += 1
        return found


def as_object(line: bytes) -> JsonObject | None:
    try:
        fields = json.loads(line) if len(line) <= LARGEST_LINE else None
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class Pace:
    """Limits the polls per second of all relays of this process."""

    def __init__(self, per_second: float) -> None:
        self._step = 1 / per_second
        self._free = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        self._free = max(self._free, now - self._step) + self._step
        if self._free > now:
            await asyncio.sleep(self._free - now)


_pace = Pace(POLLS_PER_S)


class RelayProcess:
    """One run of the relay inside: its requests are lines of its standard output, read by offset, and
    pieces of answers are files in a folder."""

    def __init__(
        self, sandbox: Sandbox, exec_id: str, spool: str, *, reads_are_cheap: bool
    ) -> None:
        self._sandbox = sandbox
        self._exec_id = exec_id
        self._spool = spool
        self._shortest = NEAR_PAUSE_S if reads_are_cheap else FAR_PAUSE_S
        self._nudged = asyncio.Event()
        self._numbers = itertools.count()
        self._sender = uuid4().hex[:8]

    async def batches(self) -> AsyncIterator[list[JsonObject]]:
        """The first batch is all lines so far, so that requests already answered are not started.

        Ends when the relay's process has ended.
        """
        lines, offset, pause, first = Lines(), 0, self._shortest, True
        waits_inside = self._sandbox.waits_inside
        looked = time.monotonic()
        batch: list[JsonObject] = []
        while offset < LARGEST_LOG:
            await _pace.turn()
            data = await _patiently(functools.partial(self._read, offset))
            offset += len(data)
            batch += lines.feed(data)
            if len(data) == READ:
                continue
            if batch or first:
                yield batch
                batch, first, pause = [], False, self._shortest
            elif waits_inside or time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if (await _patiently(lambda: self._sandbox.poll(self._exec_id))).done:
                    return
            if not waits_inside:
                pause = await self._rest(pause)

    async def _read(self, offset: int) -> bytes:
        return await self._sandbox.next_output(self._exec_id, offset, READ, wait_s=READ_WAIT_S)

    async def _rest(self, pause: float) -> float:
        """Wait. Returns the next pause: a little longer, or the shortest after an answer."""
        self._nudged.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._nudged.wait()
            return self._shortest
        return min(pause * 1.3, LONGEST_PAUSE_S)

    async def fetch(self, request_id: str) -> bytes | None:
        """A body that is too long for its line; None if it is gone."""
        path = f"{self._spool}/body/{request_id}"
        try:
            return await _patiently(lambda: self._sandbox.get(path, 0, LARGEST_BODY + 1))
        except NotFound:
            return None

    async def answer(self, head: JsonObject, body: bytes) -> None:
        """Send one piece. It may be repeated; the relay asks again for a piece that was lost."""
        name = f"{next(self._numbers):08d}.{self._sender}.piece"
        data = json.dumps(head, separators=(",", ":")).encode() + b"\n" + body
        await _patiently(lambda: self._sandbox.put(f"{self._spool}/in/{name}", data))
        self._nudged.set()


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while it fails. After a minute, raise its error."""
    passing = (RetryHere, OutcomeUnknown)
    return await retry.retry_call(ask, passing, pauses=(0.2, 5.0), patience_s=60.0)
