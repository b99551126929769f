"""How the lines of a relay inside a sandbox reach this host, and the pieces of answers go back.

Three carriers of one protocol: `stdio` reads the relay's standard output by offset, `file` reads a
file, `dial` connects to the relay's port. Nothing read here is trusted.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from perdure.errors import NotFound, OutcomeUnknown, RetryHere
from perdure.sandboxes.base import Sandbox

LARGEST_LINE = 160 << 10
LARGEST_BODY = 32 << 20
LARGEST_LOG = 64 << 20
"""Bytes after which a relay is started afresh: far more than an honest one ever says."""
READ = 1 << 20
POLLS_PER_S = 500.0
"""Of all relays of this process together; a provider of sandboxes was seen to allow 833."""
LONGEST_PAUSE_S = 0.5
NEAR_PAUSE_S, FAR_PAUSE_S = 0.005, 0.05
"""The shortest pause where looking is a system call, and where it is a request."""
STAND_S = 5.0
"""How long one reading waits inside the sandbox, where that is possible."""
LOOK_S = 2.0
"""How often a silent relay is asked whether it lives."""
SILENCE_S = 45.0
"""A dialled relay speaks every 15 s; one silent for this long is dialled again."""

JsonObject = dict[str, Any]
T = TypeVar("T")


class Heard(NamedTuple):
    """A line of the relay, and the body that came with it."""

    line: JsonObject
    body: bytes | None = None


class Carrier(Protocol):
    """One relay process, for as long as it runs."""

    name: ClassVar[str]

    def batches(self) -> AsyncIterator[list[Heard]]:
        """The first batch is everything said so far, so that what is done already is not begun.

        Ends when the relay's process has.
        """
        ...

    async def fetch(self, call_id: str) -> bytes | None:
        """A body that did not come with its line; None when it is gone."""
        ...

    async def answer(self, head: JsonObject, body: bytes) -> None:
        """Hand over one piece. Repeating it is safe; what is lost on the way is asked for again."""
        ...


class Lines:
    """Cuts bytes into lines, each a JSON object of bounded size; anything else is dropped."""

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
    """At most so many polls a second, however many relays this process serves."""

    def __init__(self, per_second: float) -> None:
        self._step = 1 / per_second
        self._free = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        self._free = max(self._free, now - self._step) + self._step
        if self._free > now:
            await asyncio.sleep(self._free - now)


_pace = Pace(POLLS_PER_S)


class LogCarrier:
    """`stdio` and `file`: a log read by offset, answers put into a folder."""

    name: ClassVar[str] = "log"

    def __init__(self, sandbox: Sandbox, exec_id: str, spool: str, *, near: bool) -> None:
        self._sandbox = sandbox
        self._exec_id = exec_id
        self._spool = spool
        self._shortest = NEAR_PAUSE_S if near else FAR_PAUSE_S
        self._nudged = asyncio.Event()
        self._numbers = itertools.count()
        self._sender = uuid4().hex[:8]

    @property
    def _stands(self) -> bool:
        """A reading returns when there is something: no pause is needed between two."""
        return False

    async def _read(self, offset: int) -> bytes:
        raise NotImplementedError

    async def batches(self) -> AsyncIterator[list[Heard]]:
        lines, offset, pause, first = Lines(), 0, self._shortest, True
        looked = time.monotonic()
        batch: list[Heard] = []
        while offset < LARGEST_LOG:
            await _pace.turn()
            data = await _patiently(functools.partial(self._read, offset))
            offset += len(data)
            batch += map(Heard, lines.feed(data))
            if len(data) == READ:
                continue
            if batch or first:
                yield batch
                batch, first, pause = [], False, self._shortest
            elif self._stands or time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if (await _patiently(lambda: self._sandbox.poll(self._exec_id))).done:
                    return
            if not self._stands:
                pause = await self._rest(pause)

    async def _rest(self, pause: float) -> float:
        """How long to wait next time: a little longer, or short again after an answer."""
        self._nudged.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nudged.wait(), pause)
            return self._shortest
        return min(pause * 1.3, LONGEST_PAUSE_S)

    async def fetch(self, call_id: str) -> bytes | None:
        try:
            return await _patiently(
                lambda: self._sandbox.get(f"{self._spool}/body/{call_id}", 0, LARGEST_BODY + 1)
            )
        except NotFound:
            return None

    async def answer(self, head: JsonObject, body: bytes) -> None:
        name = f"{next(self._numbers):08d}.{self._sender}.piece"
        data = json.dumps(head, separators=(",", ":")).encode() + b"\n" + body
        await _patiently(lambda: self._sandbox.put(f"{self._spool}/in/{name}", data))
        self._nudged.set()


class StdioCarrier(LogCarrier):
    """The provider keeps what the relay prints."""

    name: ClassVar[str] = "stdio"

    @property
    def _stands(self) -> bool:
        return self._sandbox.waits_inside

    async def _read(self, offset: int) -> bytes:
        return await self._sandbox.next_output(self._exec_id, offset, READ, wait_s=STAND_S)


class FileCarrier(LogCarrier):
    """The last resort: files are all the provider needs to carry."""

    name: ClassVar[str] = "file"

    async def _read(self, offset: int) -> bytes:
        try:
            return await self._sandbox.get(f"{self._spool}/log-{self._exec_id}", offset, READ)
        except NotFound:
            return b""


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Every call of a relay may be repeated; one that keeps failing for a minute is the watch's."""
    pause, until = 0.2, time.monotonic() + 60
    while True:
        try:
            return await ask()
        except (RetryHere, OutcomeUnknown) as error:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(getattr(error, "retry_after", None) or pause)
            pause = min(pause * 2, 5.0)


_CUT = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""Or it says what no relay says: whoever listens there may be hostile."""


class DialCarrier:
    """One connection into the sandbox, made again whenever it breaks.

    Refused while a later watcher is connected; then it asks again, ever more rarely.
    """

    name: ClassVar[str] = "dial"

    def __init__(self, sandbox: Sandbox, exec_id: str, spool: str, *, token: str) -> None:
        self._sandbox = sandbox
        self._exec_id = exec_id
        self._spool = spool
        self._token = token
        self._offset = 0
        self._ticket = 0
        """Given by the relay at the first connection: a later watcher's is higher, and wins."""
        self._unheard: list[Heard] = []
        """Read, and not yet handed on; a connection that breaks does not lose it."""
        self._writer: asyncio.StreamWriter | None = None

    async def batches(self) -> AsyncIterator[list[Heard]]:
        pause = 0.02
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    reader, size = await self._connect()
                pause = 0.02
                async for batch in self._read(reader, size):
                    yield batch
            except (*_CUT, NotFound, RetryHere, OutcomeUnknown):
                pass  # not up yet, or cut: asked below whether it lives
            finally:
                self._hang_up()
            if (await _patiently(lambda: self._sandbox.poll(self._exec_id))).done:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 5.0)

    async def _connect(self) -> tuple[asyncio.StreamReader, int]:
        """The stream, and how much of the log it begins with."""
        port = int(await self._sandbox.get(f"{self._spool}/port", 0, 16))
        if not 0 < port < 65536:
            raise ValueError("no port")
        reader, writer, headers = await self._sandbox.dial(port)
        lines = {
            "Host": f"127.0.0.1:{port}",
            "Connection": "Upgrade",
            "Upgrade": "perdure-relay",
            "X-Perdure-Token": self._token,
            "X-Perdure-Offset": str(self._offset),
            "X-Perdure-Ticket": str(self._ticket),
            **headers,
        }
        asking = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer = writer
        writer.write(f"GET /.perdure-relay HTTP/1.1\r\n{asking}\r\n".encode())
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        if answer[0].split()[1:2] != ["101"]:
            raise ValueError(f"the relay answered {answer[0]!r}")
        fields = dict(line.split(":", 1) for line in answer[1:] if ":" in line)
        self._ticket = int(fields.get("x-perdure-ticket", 0))
        return reader, int(fields.get("x-perdure-size", 0))

    async def _read(self, reader: asyncio.StreamReader, size: int) -> AsyncIterator[list[Heard]]:
        self._unheard.append(Heard({"dialled": True}))
        while True:
            if self._offset >= size and self._unheard:
                batch, self._unheard = self._unheard, []
                yield batch
            async with asyncio.timeout(SILENCE_S):
                offset, length, body_length = map(int, (await reader.readuntil(b"\n")).split())
                if length > LARGEST_LINE or not 0 <= body_length <= LARGEST_BODY:
                    raise ValueError("a frame is too large")
                line = await reader.readexactly(length)
                body = await reader.readexactly(body_length) if body_length else None
            if not offset:
                continue  # it lives, and has nothing to say
            if not self._offset < offset <= LARGEST_LOG:
                raise ValueError("the log goes backwards, or never ends")
            self._offset = offset
            if length and (fields := as_object(line)) is not None:
                self._unheard.append(Heard(fields, body))

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def fetch(self, call_id: str) -> bytes | None:
        try:
            return await _patiently(
                lambda: self._sandbox.get(f"{self._spool}/body/{call_id}", 0, LARGEST_BODY + 1)
            )
        except NotFound:
            return None

    async def answer(self, head: JsonObject, body: bytes) -> None:
        if self._writer is None:
            return  # sent again once dialled
        data = json.dumps({**head, "size": len(body)}, separators=(",", ":")).encode() + b"\n"
        self._writer.write(data + body)
        with contextlib.suppress(OSError):
            await self._writer.drain()
