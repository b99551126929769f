"""The engines of a gateway: a call in, one whole completion out, whatever dies on the way.

Owns the loop over engines, the watch of each, and what this process has on them. Their states lie in
the shared roster (`perdure.serving`), seats in `leases`, one stream in `vllm`.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import httpx
import structlog

from perdure.errors import Boundary, GatewayUnavailable, NotFound, PerdureError
from perdure.gateway.base import NO_LABELS, TOO_STALE, Completion, Refused
from perdure.gateway.engines.leases import Boot, Capacity, Leases, Place
from perdure.gateway.engines.queueing import FairQueue
from perdure.gateway.engines.salvage import Salvage, resumable
from perdure.gateway.engines.sglang import SglangEngine
from perdure.gateway.engines.token_server import Ask, Break, Broken
from perdure.gateway.engines.versions import Versions
from perdure.gateway.engines.vllm import VllmEngine
from perdure.gateway.engines.wire import FIRST_PAUSE_S, LONGEST_PAUSE_S, engine_name
from perdure.gateway.prompt_ids import PromptIds
from perdure.serving import watch
from perdure.serving.control_plane import PROBE_S, EngineControl
from perdure.serving.roster import Change, Roster, SharedRoster
from perdure.serving.sglang_control import SglangControl
from perdure.serving.state import EngineRecord, EngineState, name_of, root_of
from perdure.types import EngineSpan, FinishReason

POLL_S = 1.0
"""How old a gateway's picture of the roster may be, and how often it looks at its engines."""
HELD_POLL_S = 0.2
"""The same, while somebody changes an engine's weights: calls wait for the end of it."""
PATIENCE_S = 900.0
"""How long a call waits while no engine at all is usable; agents' own clients give up then."""
HANG_S = 120.0
DRAIN_S = 300.0
FIRST_LOOK_S = 0.05
"""A pool that was just made is given the time to ask its engines once."""
MOST_MOVES = 50
"""Engines that one call may lose before it is given up."""

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


@dataclass(eq=False)
class Running:
    """A call on an engine. `evicted`: why it was taken off it."""

    task: "asyncio.Task[FinishReason]"
    salvage: Salvage
    versions: Versions
    started: float
    seen: int = 0
    progress: float = 0.0
    evicted: Broken | None = None
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody said whether the weights that it met in an update are right."""

    def evict(self, why: Broken) -> None:
        self.evicted = self.evicted or why
        self.task.cancel()
        self.judged.set()

    def trust(self) -> None:
        self.salvage.trust()
        self.judged.set()

    async def judgement(self, patience_s: float) -> None:
        """Weights without proof end no turn. Raises: Broken, with what they sampled let go."""
        if self.salvage.sure == len(self.salvage.ids):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.judged.wait(), patience_s)
        if self.evicted is None and self.salvage.sure < len(self.salvage.ids):
            self.evicted = Broken(Break.ABORTED, "nobody proved its new weights")


@dataclass(eq=False)
class Seat:
    """One engine, as this process uses it."""

    record: EngineRecord
    engine: VllmEngine | SglangEngine
    control: EngineControl
    watcher: watch.EngineWatch
    capacity: Capacity = field(default_factory=Capacity)
    running: set[Running] = field(default_factory=set)
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    looked: bool = False
    """Whether it was asked at all, since this process knows it."""
    watching: "asyncio.Task[None] | None" = None

    def load(self) -> watch.Load:
        now = time.monotonic()
        for call in self.running:
            if len(call.salvage.ids) != call.seen:
                call.seen, call.progress = len(call.salvage.ids), now
        newest = max((call.progress for call in self.running), default=0.0)
        oldest = min((call.started for call in self.running), default=0.0)
        return watch.Load(len(self.running), max(newest, oldest))

    def place(self) -> Place:
        vitals, record = self.watcher.vitals, self.record
        foreign = max(0.0, vitals.running + vitals.waiting - len(self.running))
        most = self.capacity.agents
        strict = self.capacity.lowered
        return Place(record.name, record.generation, record.weight, most, foreign, strict)


class EnginePool:
    """Many engines as one `TokenEngine`.

    Example:
        pool = EnginePool(LoneRoster(), client, [EngineSpec("http://10.0.0.7:8000")])
        completion = await pool.generate(ids, {"max_tokens": 64}, session_id="s", request_id="s-0")
        await pool.aclose()
    """

    def __init__(
        self,
        roster: SharedRoster,
        client: httpx.AsyncClient,
        own: Sequence[EngineSpec] = (),
        *,
        model: str = "policy",
        api_key: str = "",
        key_source: str = "",
        guard_key: str = "",
        hang_s: float = HANG_S,
        patience_s: float = PATIENCE_S,
        poll_s: float = POLL_S,
    ) -> None:
        """`own`: the engines that the settings name; all others come from the roster. `guard_key`:
        of those that Perdure guards, in place of `api_key`."""
        self.leases = Leases()
        self._roster = roster
        self._client = client
        self._own = {name_of(spec.url): spec for spec in own}
        self._model = model
        self._key = (api_key, key_source)
        self._guard_key = (guard_key, "PERDURE_SECRET")
        self._hang_s, self._patience_s, self._poll_s = hang_s, patience_s, poll_s
        self._seats: dict[str, Seat] = {}
        self._queue = FairQueue()
        self._starting = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self.resumed = 0
        """Broken completions that went on elsewhere."""
        self.salvaged_tokens = 0

    # --- engines -------------------------------------------------------------------------------

    @property
    def seats(self) -> Mapping[str, Seat]:
        return self._seats

    @property
    def waiting(self) -> int:
        """Calls without a seat."""
        return len(self._queue)

    async def start(self) -> None:
        """Know the engines and watch them. Repeating is harmless. Raises: StoreUnavailable."""
        async with self._starting:
            if self._following is None:
                await self._change(self._with_own)
                self._following = asyncio.create_task(self._follow())

    async def aclose(self) -> None:
        tasks = [seat.watching for seat in self._seats.values()]
        for task in (self._following, *tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def roster(self) -> Roster:
        """Raises: StoreUnavailable."""
        await self.start()
        return await self._roster.read()

    async def add(self, spec: EngineSpec) -> EngineRecord:
        """Register an engine for all gateways of the home, or give a known one another weight.

        One that was removed, is drained or dead starts anew. Raises: ValueError, StoreUnavailable.
        """
        await self.start()
        name = name_of(spec.url)
        await self._change(lambda roster: self._with(roster, spec, anew=True))
        return self._seats[name].record

    async def drain(self, name: str, *, deadline_s: float = DRAIN_S) -> EngineRecord:
        """Give it nothing new; at the deadline what it still has goes on elsewhere.

        Raises: NotFound, StoreUnavailable.
        """
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
        """Take it out now; its calls go on elsewhere. Raises: NotFound, StoreUnavailable."""
        await self.start()
        await self._change(lambda roster: _removed(roster, _known(roster, name)))

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

    async def _change(self, change: Change) -> Roster:
        roster = await self._roster.change(change)
        self._sync(roster)
        return roster

    async def _follow(self) -> None:
        """See what other processes and people changed; give freed seats to those who wait."""
        while True:
            held = any(seat.record.held_by for seat in self._seats.values())
            await asyncio.sleep(min(self._poll_s, HELD_POLL_S) if held else self._poll_s)
            try:
                self._sync(await self._roster.read())
            except PerdureError as error:
                log.warning("the roster of engines cannot be read", error=str(error))
            self.leases.expire()
            self._serve()

    def _sync(self, roster: Roster) -> None:
        wanted = {
            record.name: record
            for record in roster.engines
            if not record.from_settings or record.name in self._own
        }
        for name in [name for name in self._seats if name not in wanted]:
            self._leave(self._seats.pop(name))
        for record in wanted.values():
            seat = self._seats.get(record.name)
            if seat is None:
                self._seats[record.name] = self._new_seat(record)
            elif seat.record != record:
                self._changed(seat, record)
        self._serve()

    def _new_seat(self, record: EngineRecord) -> Seat:
        api_key, key_source = self._guard_key if record.guarded else self._key
        name = engine_name(record.kind, record.url)
        probe_s = min(PROBE_S, self._hang_s)
        speaks, controlled = SPEAKS[record.kind]
        control = controlled(record.url, self._client, api_key=api_key, probe_s=probe_s)
        seat = Seat(
            record,
            speaks(name, record.url, self._client, api_key=api_key, key_source=key_source),
            control,
            watch.EngineWatch(control, hang_s=self._hang_s),
        )
        seat.watching = asyncio.create_task(self._watch(seat))
        return seat

    def _leave(self, seat: Seat) -> None:
        if seat.watching is not None:
            seat.watching.cancel()
        _evict(seat, Broken(Break.FENCED, "it was removed"))

    def _changed(self, seat: Seat, record: EngineRecord) -> None:
        before, seat.record = seat.record, record
        if record.state is not before.state:
            log.info(
                "engine",
                engine=record.name,
                state=record.state.value,
                was=before.state.value,
                generation=record.generation,
                reason=record.reason,
            )
        if record.held_by and not before.held_by:
            for call in list(seat.running):
                call.salvage.doubt(record.coming)
                if not call.versions.allow(record.coming):
                    call.evict(Broken(Break.ABORTED, "its group is held to older weights"))
        if before.held_by and record.held_by not in ("", before.held_by):
            _evict(seat, Broken(Break.ABORTED, "another update took over"))
        elif before.held_by and record.serves:
            for call in list(seat.running):
                if record.version == before.coming:
                    call.trust()
                else:  # what it goes on from was sampled by weights that are gone
                    call.evict(Broken(Break.ABORTED, "its new weights were wrong"))
        if record.generation != before.generation or record.state is EngineState.DEAD:
            # Whatever it still says belongs to a boot that is over.
            _evict(seat, Broken(Break.FENCED, f"generation {before.generation} is over"))
        elif record.state is EngineState.SUSPECT:
            _evict_stalled(seat, self._hang_s)
        if record.serves and not before.serves:
            self.leases.rebalance(self._places(), record.name)
        seat.kick.set()

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
        vitals = seat.watcher.vitals
        leases = self.leases
        seat.capacity.observe(
            vitals,
            agents=leases.agents(record.name),
            mean_context=leases.mean_context(record.name),
        )
        if record.serves:
            _evict_stalled(seat, self._hang_s, begun_only=True)
        if verdict is not None:
            await self._change(lambda roster: watch.apply(roster, record, verdict))
        self._serve()

    async def _drained(self, seat: Seat) -> None:
        """At its deadline: this process's calls go on elsewhere. Gone when nobody uses it."""
        record = seat.record
        late = record.drain_by is not None and time.time() >= record.drain_by
        if late:
            _evict(seat, Broken(Break.ABORTED, "drained"))
        with contextlib.suppress(PerdureError):
            seat.watcher.vitals = await seat.control.vitals()
        if late or not (seat.running or seat.watcher.vitals.running):
            await self._change(lambda roster: _removed(roster, roster.get(record.name)))

    # --- calls ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        session_id: str,
        request_id: str,
        labels: Mapping[str, str] = NO_LABELS,
        salvage: Salvage | None = None,
        last: EngineSpan | None = None,
    ) -> Completion:
        """One whole completion; its spans say which engine and version gave which tokens.

        `salvage`: what an earlier try had sampled of it; it goes on from there. `last`: where another
        process had the session. Waits while there is no room. Raises: GatewayUnavailable when for
        `patience_s` no engine was usable, Refused.
        """
        await self.start()
        call = _Call(prompt_ids, sampling, session_id, request_id, labels, salvage or Salvage())
        if (taken_over := call.salvage.ids) and call.salvage.engines:
            last = call.salvage.engines[-1]
            self._went_on(len(taken_over))
            if (ended := call.ended()) is not None:
                return call.completion(ended, last.engine)
        call.last = self._boot_of(last)
        while True:
            seat = await self._seated(call)
            try:
                reason = await self._sample(seat, call)
            except Broken as broken:
                ended = call.lost(broken, seat)
                if ended is None:
                    await self._after(seat, call, broken)
                    continue
                reason = ended
            return call.completion(reason, seat.engine.name)

    def _boot_of(self, span: EngineSpan | None) -> Boot | None:
        if span is None:
            return None
        names = (
            seat.record.name for seat in self._seats.values() if seat.engine.name == span.engine
        )
        name = next(names, None)
        return None if name is None else Boot(name, span.generation)

    def _went_on(self, tokens: int) -> None:
        self.resumed += 1
        self.salvaged_tokens += tokens

    async def _seated(self, call: "_Call") -> Seat:
        """An engine that is ready and has room for the session."""
        if len(self._queue) and self.leases.get(call.session_id) is None:
            await self._wait(call)  # those who came earlier, first
        elif not self._try_seat(call):
            await self._wait(call)
        seat, call.seat = call.seat, None
        assert seat is not None
        return seat

    async def _wait(self, call: "_Call") -> None:
        """Raises: GatewayUnavailable, Refused."""
        while call.seat is None:
            # Short of room, it waits as long as it takes; short of engines, a bounded time.
            if short_of_room := self._usable(call):
                call.be_patient()
            timeout = max(call.patience(self._patience_s), FIRST_LOOK_S)
            try:
                async with asyncio.timeout(timeout):
                    await self._queue.wait(
                        call.run, lambda: self._try_seat(call) or self._refused(call) is not None
                    )
            except TimeoutError:
                if short_of_room:
                    call.be_patient()  # if the engines went meanwhile: from now on
                elif all(seat.looked for seat in self._seats.values()) and not self._usable(call):
                    raise self._unusable(call) from None
            if call.seat is None and (refused := self._refused(call)) is not None:
                raise refused

    def _try_seat(self, call: "_Call") -> bool:
        places = [
            place
            for place in self._places()
            if call.versions.include(self._seats[place.name].record.version)
        ]
        if not places:
            return False
        lease = self.leases.take(call.session_id, call.group, places, call.avoid, call.last)
        if lease is None and self.leases.reclaim(places):
            lease = self.leases.take(call.session_id, call.group, places, call.avoid, call.last)
        if lease is None:
            return False
        call.last = None
        call.seat = self._seats[lease.engine]
        self.leases.use(call.session_id, call.length)
        return True

    def _serve(self) -> None:
        self._queue.serve()

    def _places(self) -> list[Place]:
        return [seat.place() for seat in self._seats.values() if seat.record.serves]

    def _usable(self, call: "_Call") -> bool:
        return any(
            seat.record.serves and call.versions.include(seat.record.version)
            for seat in self._seats.values()
        )

    def _refused(self, call: "_Call") -> Refused | None:
        """When every engine says that we ask for the wrong thing, or serves too new a policy,
        waiting helps nobody."""
        serving = [seat for seat in self._seats.values() if seat.record.state not in LEAVING]
        if serving and not any(call.versions.allow(seat.record.version) for seat in serving):
            told = f"every engine is past {call.versions}, which this group may be sampled by"
            return Refused(410, TOO_STALE, told)
        why = [seat.watcher.refused for seat in self._seats.values() if not seat.record.removed]
        if not why or not all(why):
            return None
        hint = " (PERDURE_ENGINE_MODEL and PERDURE_ENGINE_URL must name what it serves)"
        return Refused(400, "engine_refused", why[0] + hint)

    def _unusable(self, call: "_Call") -> GatewayUnavailable:
        states = "; ".join(
            f"{seat.engine.name} is {seat.record.state}"
            + (f" ({seat.record.reason})" if seat.record.reason else "")
            + call.versions.lacked_by(seat.record)
            for seat in self._seats.values()
        )
        return GatewayUnavailable(
            f"no engine is ready: {states or 'none is registered'}", boundary=Boundary.ENGINE
        )

    async def _sample(self, seat: Seat, call: "_Call") -> FinishReason:
        record, now = seat.record, time.monotonic()
        call.salvage.begin(seat.engine.name, record.generation)
        ask = call.ask(record.wire_model)
        task = asyncio.create_task(
            seat.engine.sample(ask, call.salvage, lambda: _version_now(seat, record))
        )
        running = Running(task, call.salvage, call.versions, now, len(call.salvage.ids), now)
        seat.running.add(running)
        try:
            reason = await task
            await running.judgement(self._patience_s)
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if running.evicted is None or (asker is not None and asker.cancelling()):
                raise
            raise running.evicted from None
        else:
            if running.evicted is not None:
                raise running.evicted
            return reason
        finally:
            task.cancel()
            call.salvage.distrust()  # whoever leaves in the middle of an update meets no proof
            seat.running.discard(running)
            self.leases.done(call.session_id, call.length)
            self._serve()

    async def _after(self, seat: Seat, call: "_Call", broken: Broken) -> None:
        """What a broken stream means for the engine and for the call."""
        log.info(
            "completion broken",
            session_id=call.session_id,
            engine=seat.engine.name,
            generation=seat.record.generation,
            kind=broken.kind.value,
            problem=str(broken),
            salvaged=len(call.salvage.ids),
        )
        if call.gained:
            self._went_on(call.gained)
        if broken.kind is Break.LOST:
            await self._doubt(seat, EngineState.SUSPECT, str(broken))
        elif broken.kind is Break.FENCED and seat.record.serves:
            await self._doubt(seat, EngineState.DEAD, str(broken))
        if call.moves > MOST_MOVES or not call.patience(self._patience_s):
            raise GatewayUnavailable(
                f"the engine {seat.engine.name} gave nothing usable: {broken}",
                retry_after=broken.retry_after,
                boundary=Boundary.ENGINE,
            )
        if call.gained == 0:
            await asyncio.sleep(call.pause(broken.retry_after))

    async def _doubt(self, seat: Seat, state: EngineState, reason: str) -> None:
        verdict, record = watch.Verdict(state, reason), seat.record
        if record.serves:
            await self._change(lambda roster: watch.apply(roster, record, verdict))


LEAVING = (EngineState.DRAINING, EngineState.DEAD)


@dataclass(eq=False)
class _Call:
    """One completion on its way through engines."""

    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str
    labels: Mapping[str, str]
    salvage: Salvage
    last: Boot | None = None
    """Where another process had the session."""
    seat: Seat | None = None
    avoid: set[str] = field(default_factory=set)
    moves: int = 0
    gained: int = 0
    """Tokens of the last engine that were kept."""
    _since: float = field(default_factory=time.monotonic)
    _pause: float = FIRST_PAUSE_S

    @property
    def group(self) -> str:
        return self.labels.get("group", "")

    @property
    def run(self) -> str:
        return self.labels.get("run", "")

    @cached_property
    def versions(self) -> Versions:
        return Versions.of(self.labels)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.salvage.ids)

    def ask(self, model: str) -> Ask:
        """Prompt and salvage, for what is missing. A try's id is its own: engines run equal ids twice."""
        held = len(self.salvage.ids)
        sampling, prompt = self.sampling, self.prompt_ids
        if held:
            prompt = PromptIds.of([*prompt, *self.salvage.ids])
            if "max_tokens" in sampling:
                sampling = {**sampling, "max_tokens": sampling["max_tokens"] - held}
        request_id = self.request_id if not self.moves else f"{self.request_id}-{self.moves}"
        return Ask(model, prompt, sampling, self.session_id, request_id)

    def lost(self, broken: Broken, seat: Seat) -> FinishReason | None:
        """Take note; the finish reason when nothing was missing but the engine's saying so."""
        self.moves += 1
        self.avoid = {seat.record.name}
        self.gained = self.salvage.part
        if not resumable(self.sampling):
            self.salvage.cut()
            self.gained = 0
        if self.gained:
            self.be_patient()
            self._pause = FIRST_PAUSE_S
        return self.ended()

    def ended(self) -> FinishReason | None:
        """The finish reason that nobody said, when nothing more may be sampled."""
        ids = self.salvage.ids
        if ids and ids[-1] in self.sampling.get("stop_token_ids", ()):
            return FinishReason.STOP
        if ids and len(ids) >= self.sampling.get("max_tokens", len(ids) + 1):
            return FinishReason.LENGTH
        return None

    def be_patient(self) -> None:
        """What it waits for is on its way: patience begins anew."""
        self._since = time.monotonic()

    def patience(self, patience_s: float) -> float:
        """Seconds left without progress."""
        return max(0.0, self._since + patience_s - time.monotonic())

    def pause(self, retry_after: float | None) -> float:
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE_S)
        return min(max(retry_after or 0.0, pause), LONGEST_PAUSE_S)

    def completion(self, reason: FinishReason, engine: str) -> Completion:
        salvage = self.salvage
        return Completion(
            salvage.ids,
            salvage.logprobs,
            reason,
            tuple(salvage.versions),
            engine,
            tuple(salvage.engines),
        )


def _version_now(seat: Seat, begun: EngineRecord) -> int | None:
    """The version known to be loaded; none while somebody changes it."""
    record = seat.record
    if record.held_by or record.generation != begun.generation:
        return None
    return record.version


def _evict(seat: Seat, why: Broken) -> None:
    for call in list(seat.running):
        call.evict(why)


def _evict_stalled(seat: Seat, hang_s: float, *, begun_only: bool = False) -> None:
    """Move calls that got nothing for so long. `begun_only`: one without a first token may queue."""
    seat.load()
    before = time.monotonic() - hang_s
    for call in list(seat.running):
        begun = call.progress > call.started or call.seen
        if max(call.progress, call.started) < before and (begun or not begun_only):
            call.evict(Broken(Break.LOST, f"no token for {hang_s:.0f} s"))


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
