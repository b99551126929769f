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

from perdure.errors import NotFound, PerdureError
from perdure.gateway.engines.leases import Leases, Place
from perdure.gateway.engines.seats import Seat
from perdure.gateway.engines.sglang import SglangEngine
from perdure.gateway.engines.token_server import Break, Broken
from perdure.gateway.engines.vllm import VllmEngine
from perdure.gateway.engines.wire import engine_name
from perdure.serving import watch
from perdure.serving.control_plane import PROBE_S, EngineControl
from perdure.serving.roster import Change, Roster, SharedRoster
from perdure.serving.sglang_control import SglangControl
from perdure.serving.state import EngineRecord, EngineState, name_of, root_of

HELD_POLL_S = 0.2
"""How often the roster is read while somebody changes an engine's weights: calls wait for the end."""
LEAVING = (EngineState.DRAINING, EngineState.DEAD)
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
    ) -> None:
        """`own`: the engines that the settings name; all others come from the roster. `guard_key`:
        of those that Perdure guards, in place of `key`."""
        self.seats: dict[str, Seat] = {}
        self._roster = roster
        self._client = client
        self._own = {name_of(spec.url): spec for spec in own}
        self._leases = leases
        self._told = changed
        self._model = model
        self._key, self._guard_key = key, guard_key
        self._hang_s, self._poll_s = hang_s, poll_s
        self._starting = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Know the engines and watch them. Repeating is harmless. Raises: StoreUnavailable."""
        async with self._starting:
            if self._following is None:
                await self._change(self._with_own)
                self._following = asyncio.create_task(self._follow())

    async def aclose(self) -> None:
        tasks = [seat.watching for seat in self.seats.values()]
        for task in (self._following, *tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def read(self) -> Roster:
        """Raises: StoreUnavailable."""
        await self.start()
        return await self._roster.read()

    def places(self) -> list[Place]:
        return [seat.place() for seat in self.seats.values() if seat.record.serves]

    # --- what people ask -----------------------------------------------------------------------

    async def add(self, spec: EngineSpec) -> EngineRecord:
        """Register an engine for all gateways of the home, or give a known one another weight.

        One that was removed, is drained or dead starts anew. Raises: ValueError, StoreUnavailable.
        """
        await self.start()
        name = name_of(spec.url)
        await self._change(lambda roster: self._with(roster, spec, anew=True))
        return self.seats[name].record

    async def drain(self, name: str, deadline_s: float) -> EngineRecord:
        """Raises: NotFound, StoreUnavailable."""
        await self.start()
        by = time.time() + deadline_s

        def drained(roster: Roster) -> Roster:
            record = _known(roster, name)
            if record.state is EngineState.DEAD:
                return roster.having(record.model_copy(update={"removed": True}))
            to = record.to(EngineState.DRAINING, "told to drain", drain_by=by, held_by="")
            return roster.having(to)

        return _known(await self._change(drained), name)

    async def remove(self, name: str) -> None:
        """Raises: NotFound, StoreUnavailable."""
        await self.start()
        await self._change(lambda roster: _removed(roster, _known(roster, name)))

    async def doubt(self, seat: Seat, state: EngineState, reason: str) -> None:
        """A call showed that an engine is not what its record says."""
        verdict, record = watch.Verdict(state, reason), seat.record
        if record.serves:
            await self._change(lambda roster: watch.apply(roster, record, verdict))

    def _with_own(self, roster: Roster) -> Roster:
        for spec in self._own.values():
            roster = self._with(roster, spec, anew=False)
        return roster

    def _with(self, roster: Roster, spec: EngineSpec, *, anew: bool) -> Roster:
        name = name_of(spec.url)
        known = roster.get(name)
        gone = known is not None and (known.removed or known.state in LEAVING)
        if known is None or (anew and gone):
            record = EngineRecord(
                name=name,
                url=root_of(spec.url),
                weight=spec.weight,
                model=self._model,
                kind=spec.kind,
                generation=roster.next_generation,
                since=time.time(),
                from_settings=not anew,
            )
            return roster.having(record)
        update: dict[str, Any] = {
            "weight": spec.weight,
            "model": self._model,
            "kind": spec.kind,
        }
        if anew:
            update["from_settings"] = False
        return roster.having(known.model_copy(update=update))

    # --- the roster ----------------------------------------------------------------------------

    async def _change(self, change: Change) -> Roster:
        roster = await self._roster.change(change)
        self._sync(roster)
        return roster

    async def _follow(self) -> None:
        """See what other processes and people changed; give freed seats to those who wait."""
        while True:
            held = any(seat.record.held_by for seat in self.seats.values())
            await asyncio.sleep(min(self._poll_s, HELD_POLL_S) if held else self._poll_s)
            try:
                self._sync(await self._roster.read())
            except PerdureError as error:
                log.warning("the roster of engines cannot be read", error=str(error))
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
            await self._change(lambda roster: watch.apply(roster, record, verdict))
        self._told()

    async def _drained(self, seat: Seat) -> None:
        """At its deadline: this process's calls go on elsewhere. Gone when nobody uses it."""
        record = seat.record
        late = record.drain_by is not None and time.time() >= record.drain_by
        if late:
            seat.evict(Broken(Break.ABORTED, "drained"))
        with contextlib.suppress(PerdureError):
            seat.watcher.vitals = await seat.control.vitals()
        if late or not (seat.running or seat.watcher.vitals.running):
            await self._change(lambda roster: _removed(roster, roster.get(record.name)))


def _known(roster: Roster, name: str) -> EngineRecord:
    record = roster.get(name)
    if record is None or record.removed:
        raise NotFound(f"no engine {name!r}: it must be named host:port")
    return record


def _removed(roster: Roster, record: EngineRecord | None) -> Roster:
    """Kept as removed, so that the settings of a gateway that starts do not bring it back."""
    if record is None or record.removed:
        return roster
    gone = record.to(EngineState.DEAD, "removed", removed=True, held_by="")
    return roster.having(gone)
