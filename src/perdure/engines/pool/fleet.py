"""The engines that this process knows: what the shared roster says of each, and what its own looks show.

Owns following the roster and watching engines. What runs on an engine is in `seats`, which sessions it
gets in `leases` and `pool`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import httpx
import structlog

from perdure.engines import watch
from perdure.engines.clients.sglang import SglangEngine
from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.token_server import Break, Broken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import PROBE_S, EngineControl
from perdure.engines.clients.wire import engine_name
from perdure.engines.pool.leases import Leases, Place
from perdure.engines.pool.seats import Seat
from perdure.engines.roster import Change, Roster, SharedRoster
from perdure.engines.state import EngineRecord, EngineState, name_of, root_of
from perdure.errors import PerdureError

HELD_POLL_S = 0.2
"""How often the roster is read while somebody changes an engine's weights: calls wait for the end."""
LONGEST_NOTE_S = 5.0
"""How long a call waits until the store has taken what it saw of an engine."""
SPEAKS: Mapping[str, tuple[type[VllmEngine] | type[SglangEngine], type[EngineControl]]] = {
    "vllm": (VllmEngine, EngineControl),
    "sglang": (SglangEngine, SglangControl),
}

log = structlog.get_logger()


class EngineSpec(NamedTuple):
    """An engine that somebody named: the settings, or a person at the control route."""

    url: str
    weight: float = 1.0
    kind: Literal["vllm", "sglang"] = "vllm"


class Key(NamedTuple):
    """What engines ask for, and where it comes from: that is named, and never shown, when refused."""

    value: str = ""
    source: str = ""


class Fleet:
    """Seats of all engines, kept up to date. `changed` is called when any of them may have room."""

    def __init__(
        self,
        roster: SharedRoster,
        client: httpx.AsyncClient,
        own: Sequence[EngineSpec],
        leases: Leases,
        changed: Callable[[], None],
        *,
        model: str,
        key: Key,
        guard_key: Key,
        hang_s: float,
        poll_s: float,
        notice_s: float,
    ) -> None:
        """`own`: the engines that the settings name; all others come from the roster. `guard_key`:
        of those that Perdure guards, in place of `key`. `notice_s`: seconds between the announcement
        of an update and its first act."""
        self.seats: dict[str, Seat] = {}
        self._roster = roster
        self._client = client
        self._own = {name_of(spec.url): spec for spec in own}
        self._leases = leases
        self._told = changed
        self._model = model
        self._key, self._guard_key = key, guard_key
        self._hang_s, self._poll_s, self._notice_s = hang_s, poll_s, notice_s
        self._starting = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._asked = 0.0
        """When the roster was asked for what is known of it."""
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Know the engines and watch them. Repeating is harmless. Raises: StoreUnavailable."""
        async with self._starting:
            if self._following is None:
                await self.change(self._with_own)
                self._following = asyncio.create_task(self._follow())

    async def aclose(self) -> None:
        tasks = [task for seat in self.seats.values() for task in (seat.watching, seat.noting)]
        for task in (self._following, *tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def read(self) -> Roster:
        """The newest roster, followed. Raises: StoreUnavailable."""
        return await self.change(lambda roster: roster)

    async def change(self, change: Change) -> Roster:
        """Change the roster, and follow it. Raises: StoreUnavailable, and what `change` raises."""
        async with self._turn:  # one at a time: a slow read must not bring back what was before
            asked = time.monotonic()
            roster = await self._roster.change(change)
            self._asked = asked
            self._sync(roster)
        return roster

    def places(self) -> list[Place]:
        return [seat.place() for seat in self.seats.values() if seat.record.serves]

    def version_now(self, seat: Seat, begun: EngineRecord) -> int | None:
        """As the seat knows it; none while the roster cannot be read, for somebody may change it."""
        fresh = time.monotonic() - self._asked <= self._notice_s
        return seat.version_now(begun) if fresh else None

    async def doubt(self, seat: Seat, generation: int, state: EngineState, reason: str) -> None:
        """A call showed that this boot of an engine is not what its record says."""
        record = seat.record
        if record.serves and record.generation == generation:
            verdict = watch.Verdict(state, reason)
            await self._note(seat, lambda roster: watch.apply(roster, record, verdict))

    async def relabel(self, seat: Seat, record: EngineRecord, version: int) -> None:
        """An engine itself said that it has another version than its record, all the time."""

        def relabelled(roster: Roster) -> Roster:
            if roster.get(record.name) != record:
                return roster
            return roster.having(record.model_copy(update={"version": version}))

        if seat.record == record:
            log.warning(
                "an engine has other weights than known", engine=record.name, version=version
            )
            await self._note(seat, relabelled)

    async def _note(self, seat: Seat, change: Change) -> None:
        """What a call saw on its way. Calls that one event broke say the same: the store is told once.
        They go on without it, too."""
        if seat.noting is None or seat.noting.done():
            seat.noting = asyncio.create_task(self._noted(change))
        await asyncio.wait({seat.noting}, timeout=LONGEST_NOTE_S)

    async def _noted(self, change: Change) -> None:
        try:
            await self.change(change)
        except PerdureError as error:
            log.warning("cannot record an engine's state", error=str(error))

    def _with_own(self, roster: Roster) -> Roster:
        for spec in self._own.values():
            roster = self._with(roster, spec)
        return roster

    def _with(self, roster: Roster, spec: EngineSpec) -> Roster:
        known = roster.get(name_of(spec.url))
        told: dict[str, Any] = {"weight": spec.weight, "model": self._model, "kind": spec.kind}
        if known is not None:
            return roster.having(known.model_copy(update=told))
        record = EngineRecord(
            name=name_of(spec.url),
            url=root_of(spec.url),
            generation=roster.next_generation,
            since=time.time(),
            from_settings=True,
            **told,
        )
        return roster.having(record)

    # --- the roster ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """See what other processes and people changed; give freed seats to those who wait."""
        while True:
            held = any(seat.record.held_by for seat in self.seats.values())
            await asyncio.sleep(min(self._poll_s, HELD_POLL_S) if held else self._poll_s)
            try:
                await self.read()
            except PerdureError as error:
                log.warning("the roster of engines cannot be read", error=str(error))
            except Exception:  # without it this process would be blind for ever
                log.exception("following the roster of engines stumbled")
            self._leases.expire()
            self._told()

    def _sync(self, roster: Roster) -> None:
        wanted = {
            record.name: record
            for record in roster.engines
            if not record.from_settings or record.name in self._own
        }
        for name in [name for name in self.seats if name not in wanted]:
            self._leave(self.seats.pop(name))
        for record in wanted.values():
            seat = self.seats.get(record.name)
            if seat is None:
                self.seats[record.name] = self._new_seat(record)
            elif seat.record != record:
                self._become(seat, record)
        self._told()

    def _new_seat(self, record: EngineRecord) -> Seat:
        key = self._guard_key if record.guarded else self._key
        name = engine_name(record.kind, record.url)
        probe_s = min(PROBE_S, self._hang_s)
        speaks, controlled = SPEAKS[record.kind]
        control = controlled(record.url, self._client, api_key=key.value, probe_s=probe_s)
        seat = Seat(
            record,
            speaks(name, record.url, self._client, api_key=key.value, key_source=key.source),
            control,
            watch.EngineWatch(control, hang_s=self._hang_s),
        )
        seat.watching = asyncio.create_task(self._watch(seat))
        return seat

    def _leave(self, seat: Seat) -> None:
        if seat.watching is not None:
            seat.watching.cancel()
        seat.evict(Broken(Break.FENCED, "it was removed"))

    def _become(self, seat: Seat, record: EngineRecord) -> None:
        before = seat.record
        if record.state is not before.state:
            log.info(
                "engine",
                engine=record.name,
                state=record.state.value,
                was=before.state.value,
                generation=record.generation,
                reason=record.reason,
            )
        seat.become(record, self._hang_s)
        if record.serves and not before.serves:
            self._leases.rebalance(self.places(), record.name)
        seat.kick.set()

    # --- the watch -----------------------------------------------------------------------------

    async def _watch(self, seat: Seat) -> None:
        """Look at one engine again and again; the roster learns what was seen."""
        while True:
            try:
                await self._look(seat)
            except PerdureError as error:
                log.warning("cannot record an engine's state", error=str(error))
            except Exception:  # without it nobody would look at this engine again
                log.exception("the watch of an engine stumbled", engine=seat.record.name)
            seat.kick.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(seat.kick.wait(), self._poll_s)

    async def _look(self, seat: Seat) -> None:
        record = seat.record
        if record.state is EngineState.DRAINING:
            await self._drained(seat)
            return
        verdict = await seat.watcher.look(record, seat.load())
        seat.looked = True
        seat.capacity.observe(
            seat.watcher.vitals,
            agents=self._leases.agents(record.name),
            mean_context=self._leases.mean_context(record.name),
        )
        if record.serves:
            seat.evict_stalled(self._hang_s, begun_only=True)
        if verdict is not None:
            await self.change(lambda roster: watch.apply(roster, record, verdict))
        self._told()

    async def _drained(self, seat: Seat) -> None:
        """At its deadline: this process's calls go on elsewhere. Gone when nobody uses it."""
        record = seat.record
        left = (record.drain_by or 0.0) - record.since - seat.watcher.waited(record)
        late = left <= 0 or time.time() >= (record.drain_by or 0.0)  # by whichever clock is ahead
        if late:
            seat.evict(Broken(Break.ABORTED, "drained"))
        with contextlib.suppress(PerdureError):
            seat.watcher.vitals = await seat.control.vitals()
        if late or not (seat.running or seat.watcher.vitals.running):
            await self.change(lambda roster: _removed(roster, roster.get(record.name)))


def _removed(roster: Roster, record: EngineRecord | None) -> Roster:
    """Kept as removed, so that the settings of a gateway that starts do not bring it back."""
    if record is None or record.removed:
        return roster
    gone = record.to(EngineState.DEAD, "removed", removed=True, held_by="")
    return roster.having(gone)
