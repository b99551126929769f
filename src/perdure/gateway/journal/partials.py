"""What has been sampled of the turns in flight, kept as it streams: when a gateway process is killed,
whoever takes the repeated call over goes on from there.

Owns which turns are kept, what a kept one holds, and when it is let go; bytes lie on a `Shelf`. None of
it is the journal's: a finished turn is one record there, and its partial is gone.
"""

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import structlog

from perdure.engines.pool.salvage import Salvage, resumable
from perdure.errors import PerdureError
from perdure.gateway.journal.encoding import JournalDamaged, pack, split, unpack
from perdure.types import EngineSpan, VersionSpan

BEGUN, PART = "begun", "part"
Line = dict[str, Any]

log = structlog.get_logger()


class Name(NamedTuple):
    """A call of a session. `writer` differs for each try at it, in whatever process."""

    session_id: str
    call: str
    writer: str


class Shelf(Protocol):
    """Where partials lie."""

    every_s: float
    """Seconds between two writes of a partial; a turn of less is not written at all."""
    appends: bool
    """Whether lines are added to those that lie there, or take their place."""

    async def read(self, session_id: str, call: str) -> list[bytes]:
        """What the tries at a call left behind. Raises: StoreUnavailable, OSError."""
        ...

    async def write(self, parts: Mapping[Name, Sequence[Line]]) -> None:
        """Put lines down; they survive this process. Raises: StoreUnavailable, OSError."""
        ...

    async def clear(self, session_id: str, call: str | None = None) -> None:
        """Forget a call, or all of a session. Raises: StoreUnavailable, OSError."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What a call conditions on: a partial of anything else is not its beginning.

    `turns`: how many the session has. `answered`: the newest of them that answers the same request,
    or -1; a partial from before it belongs to it.
    """

    name: Name
    prompt: "array[int]"
    sampling: Mapping[str, Any]
    turns: int
    answered: int

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(json.dumps(self.sampling, sort_keys=True).encode())
        digest.update(b"\0")
        digest.update(self.prompt)
        return digest.hexdigest()

    def head(self) -> Line:
        return {"kind": BEGUN, "sha256": self.sha256, "turns": self.turns}

    def fits(self, head: Line) -> bool:
        told = (head["kind"], head["sha256"])
        return told == (BEGUN, self.sha256) and int(head["turns"]) > self.answered


@dataclass(eq=False)
class Partial:
    """A turn in flight. `salvage` grows while it is sampled."""

    wanted: Wanted
    salvage: Salvage
    since: float = field(default_factory=time.monotonic)
    _begun: bool = False
    """Whether there are lines at all."""
    _written: int = 0
    _reports: int = 0
    _cuts: int = 0

    def news(self, *, whole: bool) -> list[Line]:
        """The lines that are not written yet, or all when there are any."""
        salvage = self.salvage
        end, reports, cut = salvage.sure, salvage.reports, salvage.cuts != self._cuts
        if cut:  # what was written may be let go: the next line says it all
            self._cuts, self._written = salvage.cuts, 0
        if end <= self._written and not (cut and self._begun):
            return []
        start = 0 if whole else self._written
        told = start if reports == self._reports else 0  # what an engine said later holds
        line = {
            "kind": PART,
            "start": start,
            "ids": pack(salvage.ids[start:end]),
            "logprobs": pack(salvage.logprobs[start:end]),
            "told": told,
            "versions": [[v.version, v.start, v.end] for v in salvage.versions_of(told, end)],
            "engines": [
                [s.engine, s.generation, s.start, min(s.end, end)]
                for s in salvage.engines
                if s.start < end
            ],
        }
        lines = [line] if self._begun and not whole else [self.wanted.head(), line]
        self._begun, self._written, self._reports = True, end, reports
        return lines


class Partials:
    """The turns in flight of this process.

    Example:
        partial = await partials.begin(wanted)
        with partials.kept(partial):
            ...                                  # sampling fills partial.salvage
        partials.done(session_id, call)          # the turn is in the journal
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._growing: set[Partial] = set()
        self._lying: set[tuple[str, str]] = set()
        """Calls of which something was written."""
        self._writing: asyncio.Task[None] | None = None
        self._clearing: set[asyncio.Task[None]] = set()
        self._pen = asyncio.Lock()
        """Held while lines are put down."""

    async def begin(self, wanted: Wanted) -> Partial:
        """The call, with what an earlier try at it had sampled."""
        partial = Partial(wanted, Salvage())
        if not resumable(wanted.sampling):
            return partial
        found = await self._read(wanted)
        if found:
            self._lying.add(_key(wanted.name))
        whole = [salvage for data in found if (salvage := _restored(data, wanted)) is not None]
        partial.salvage = max(whole, key=lambda salvage: len(salvage.ids), default=Salvage())
        if partial.salvage.ids:
            log.info(
                "turn taken over",
                session_id=wanted.name.session_id,
                tokens=len(partial.salvage.ids),
                engine=partial.salvage.engines[-1].engine,
            )
        return partial

    async def _read(self, wanted: Wanted) -> list[bytes]:
        try:
            return await self._shelf.read(wanted.name.session_id, wanted.name.call)
        except (PerdureError, OSError) as error:
            log.warning("partials cannot be read", error=str(error))
            return []

    @contextmanager
    def kept(self, partial: Partial) -> Iterator[None]:
        """While it is sampled, it is written every now and then."""
        if not resumable(partial.wanted.sampling):
            yield
            return
        self._growing.add(partial)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_on())
        try:
            yield
        finally:
            self._growing.discard(partial)

    def done(self, session_id: str, call: str) -> None:
        """The turn is final: nothing of it is kept beside the journal."""
        if (session_id, call) in self._lying:
            self._lying.discard((session_id, call))
            self._clear(session_id, call)

    def left(self, session_id: str) -> None:
        """The session is closed."""
        self._lying = {key for key in self._lying if key[0] != session_id}
        self._clear(session_id)

    async def aclose(self) -> None:
        """Write what streams still: their callers ask another process, or this one's successor."""
        if (writing := self._writing) is not None:
            async with self._pen:  # cut off, a write would go on in its thread, beside the last one
                writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await self._write(list(self._growing))
        await asyncio.gather(*self._clearing, return_exceptions=True)

    async def _write_on(self) -> None:
        while self._growing:
            await asyncio.sleep(self._shelf.every_s)
            before = time.monotonic() - self._shelf.every_s
            await self._write([partial for partial in self._growing if partial.since <= before])
        self._writing = None

    async def _write(self, growing: Sequence[Partial]) -> None:
        """Those of them that still grow, when the lines before are down."""
        async with self._pen:
            await self._put_down([partial for partial in growing if partial in self._growing])

    async def _put_down(self, growing: Sequence[Partial]) -> None:
        whole = not self._shelf.appends
        news = {partial: lines for partial in growing if (lines := partial.news(whole=whole))}
        if not news:
            return
        parts = {partial.wanted.name: lines for partial, lines in news.items()}
        self._lying.update(map(_key, parts))
        try:
            await self._shelf.write(parts)
        except (PerdureError, OSError) as error:  # the turns themselves go on
            log.warning("partials cannot be written", error=str(error))
            if self._shelf.appends:  # what comes next would not follow
                self._growing.difference_update(news)

    def _clear(self, session_id: str, call: str | None = None) -> None:
        task = asyncio.create_task(self._cleared(session_id, call))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _cleared(self, session_id: str, call: str | None) -> None:
        async with self._pen:  # a write that still names it is under way: it would lie there again
            pass
        try:
            await self._shelf.clear(session_id, call)
        except (PerdureError, OSError) as error:  # it is known by the journal to be over
            log.warning("a partial cannot be removed", session_id=session_id, error=str(error))


def _key(name: Name) -> tuple[str, str]:
    return name.session_id, name.call


def call_name(chain: str, request_sha256: str) -> str:
    """The same for a repeated request, in any process."""
    return hashlib.sha256(f"{chain}\0{request_sha256}".encode()).hexdigest()[:32]


def _restored(data: bytes, wanted: Wanted) -> Salvage | None:
    """The salvage as it was when its last whole line was written; None unless it is this call's."""
    try:
        lines = split(data, "a partial").records
        if not lines or not wanted.fits(lines[0]):
            return None
        return _salvage(lines[1:])
    except (JournalDamaged, KeyError, TypeError, ValueError) as error:
        log.warning("a partial is damaged", error=repr(error))
        return None


def _salvage(parts: Sequence[Line]) -> Salvage:
    """Raises: ValueError when a part is missing."""
    salvage = Salvage()
    for part in parts:
        if part["start"] == 0:
            salvage = Salvage()
        ids, logprobs = unpack("i", part["ids"]), unpack("d", part["logprobs"])
        if part["start"] != len(salvage.ids) or len(ids) != len(logprobs):
            raise ValueError(f"part {part['start']} does not follow {len(salvage.ids)} tokens")
        salvage.restore(
            ids,
            logprobs,
            [EngineSpan(engine=e, generation=g, start=s, end=n) for e, g, s, n in part["engines"]],
            part["told"],
            [VersionSpan(version=v, start=s, end=e) for v, s, e in part["versions"]],
        )
    return salvage
