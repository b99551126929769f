"""The engines of a gateway: a call in, one whole completion out, whatever dies on the way.

Owns the loop over engines and who waits for one. Which engines there are is in `fleet`, what runs on
each in `seats`, one completion in `call`, who sits where in `leases`.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import structlog

from perdure.dialects.base import Refused
from perdure.engines.base import NO_LABELS, TOO_STALE, Completion, Wait
from perdure.engines.clients.token_server import Break, Broken
from perdure.engines.pool.call import MOST_MOVES, Call
from perdure.engines.pool.fleet import EngineSpec, Fleet, Key
from perdure.engines.pool.leases import Boot, Leases
from perdure.engines.pool.queueing import FairQueue
from perdure.engines.pool.salvage import Salvage
from perdure.engines.pool.seats import Running, Seat
from perdure.engines.registration import add_engine, drain_engine, remove_engine
from perdure.engines.roster import Roster, SharedRoster
from perdure.engines.state import EngineRecord, EngineState
from perdure.engines.weights.update import NOTICE_S
from perdure.errors import Boundary, GatewayUnavailable
from perdure.types import EngineSpan, FinishReason

__all__ = ["EnginePool", "EngineSpec", "Seat"]

POLL_S = 1.0
"""How old a gateway's picture of the roster may be, and how often it looks at its engines."""
PATIENCE_S = 900.0
"""How long a call waits while no engine at all is usable; agents' own clients give up then."""
HANG_S = 120.0
DRAIN_S = 300.0
FIRST_LOOK_S = 0.05
"""A pool that was just made is given the time to ask its engines once."""

log = structlog.get_logger()


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
        notice_s: float = NOTICE_S,
    ) -> None:
        """`own`: the engines that the settings name; all others come from the roster. `guard_key`:
        of those that Perdure guards, in place of `api_key`. `notice_s`: seconds by which updates of
        weights are announced."""
        self.leases = Leases()
        self._queue = FairQueue()
        self._unseated: dict[str, dict[Call, float]] = {}
        """By session: the calls that wait, and since when (unix seconds)."""
        self._model, self._patience_s = model, patience_s
        self._fleet = Fleet(
            roster,
            client,
            own,
            self.leases,
            self._queue.serve,
            model=model,
            key=Key(api_key, key_source),
            guard_key=Key(guard_key, "PERDURE_SECRET"),
            hang_s=hang_s,
            poll_s=poll_s,
            notice_s=notice_s,
        )
        self.resumed = 0
        """Broken completions that went on elsewhere."""
        self.salvaged_tokens = 0

    # --- engines -------------------------------------------------------------------------------

    @property
    def seats(self) -> Mapping[str, Seat]:
        return self._fleet.seats

    @property
    def waiting(self) -> int:
        """Calls without a seat."""
        return len(self._queue)

    def waits(self, session_id: str) -> Wait | None:
        """Since when a call of the session waits for a seat, and what the engines lack."""
        waiting = self._unseated.get(session_id)
        if not waiting:
            return None
        call, since = next(iter(waiting.items()))
        full = "every engine that is ready is full" if self._usable(call) else ""
        return Wait(since=since, reason=full or self._states(call))

    async def start(self) -> None:
        """Know the engines and watch them. Repeating is harmless. Raises: StoreUnavailable."""
        await self._fleet.start()

    async def aclose(self) -> None:
        await self._fleet.aclose()

    async def roster(self) -> Roster:
        """Raises: StoreUnavailable."""
        await self.start()
        return await self._fleet.read()

    async def add(self, spec: EngineSpec) -> EngineRecord:
        """Register an engine for all gateways of the home, or give a known one another weight.

        One that was removed, is drained or dead starts anew. Raises: ValueError, StoreUnavailable.
        """
        await self.start()
        return await add_engine(self._fleet, spec.url, self._model, spec.weight, spec.kind)

    async def drain(self, name: str, *, deadline_s: float = DRAIN_S) -> EngineRecord:
        """Give it nothing new; at the deadline what it still has goes on elsewhere.

        Raises: NotFound, StoreUnavailable.
        """
        await self.start()
        return await drain_engine(self._fleet, name, deadline_s)

    async def remove(self, name: str) -> None:
        """Take it out now; its calls go on elsewhere. Raises: NotFound, StoreUnavailable."""
        await self.start()
        await remove_engine(self._fleet, name)

    def left(self, session_id: str) -> None:
        """A session ended: its seat is free."""
        self.leases.release(session_id)
        self._queue.serve()

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
        call = Call(prompt_ids, sampling, session_id, request_id, labels, salvage or Salvage())
        call.salvage.cut(call.fit)
        if (taken_over := call.salvage.ids) and call.salvage.engines:
            last = call.salvage.engines[-1]
            self._went_on(len(taken_over))
            if (ended := call.ended()) is not None:
                return call.completion(ended, last.engine)
        call.last = self._boot_of(last)
        while True:
            seat = await self._seated(call)
            generation = seat.record.generation
            try:
                reason = await self._sample(seat, call)
            except Broken as broken:
                ended = call.lost(broken, seat)
                if ended is None:
                    await self._after(seat, generation, call, broken)
                    continue
                reason = ended
            return call.completion(reason, seat.engine.name)

    def _boot_of(self, span: EngineSpan | None) -> Boot | None:
        if span is None:
            return None
        names = (
            seat.record.name for seat in self.seats.values() if seat.engine.name == span.engine
        )
        name = next(names, None)
        return None if name is None else Boot(name, span.generation)

    def _went_on(self, tokens: int) -> None:
        self.resumed += 1
        self.salvaged_tokens += tokens

    async def _seated(self, call: Call) -> Seat:
        """An engine that is ready and has room for the session."""
        self._queue.serve()  # those who came earlier, first
        if self._line(call) in self._queue or not self._try_seat(call):
            try:
                with self._known_to_wait(call):
                    await self._wait(call)
            except BaseException:
                self._give_back(call)  # it was given at the moment when nobody wanted it any more
                raise
        seat, call.seat = call.seat, None
        assert seat is not None
        return seat

    @contextlib.contextmanager
    def _known_to_wait(self, call: Call) -> Iterator[None]:
        waiting = self._unseated.setdefault(call.session_id, {})
        waiting[call] = time.time()
        try:
            yield
        finally:
            del waiting[call]
            if not waiting:
                self._unseated.pop(call.session_id, None)

    def _line(self, call: Call) -> tuple[object, ...]:
        """Who keeps a seat waits behind nobody who has none; else runs wait each for their versions, a
        session's calls together, for they share its seat."""
        if self.leases.get(call.session_id) is not None:
            return (call.session_id,)
        return (call.run, call.versions)

    async def _wait(self, call: Call) -> None:
        """Raises: GatewayUnavailable, Refused."""
        while call.seat is None:
            # Short of room, it waits as long as it takes; short of engines, a bounded time.
            if short_of_room := self._usable(call):
                call.be_patient()
            timeout = max(call.patience(self._patience_s), FIRST_LOOK_S)
            line = self._line(call)
            try:
                async with asyncio.timeout(timeout):
                    await self._queue.wait(
                        line,
                        lambda: self._try_seat(call) or self._refused(call) is not None,
                        owner=call.session_id,
                        first=len(line) == 1,
                    )
            except TimeoutError:
                if short_of_room:
                    call.be_patient()  # if the engines went meanwhile: from now on
                elif all(seat.looked for seat in self.seats.values()) and not self._usable(call):
                    raise self._unusable(call) from None
            if call.seat is not None and not call.seat.record.serves:
                self._give_back(call)  # it went between the giving and the taking
            if call.seat is None and (refused := self._refused(call)) is not None:
                raise refused

    def _give_back(self, call: Call) -> None:
        if call.seat is not None:
            call.seat = None
            self.leases.done(call.session_id, call.length)
            self._queue.serve()

    def _try_seat(self, call: Call) -> bool:
        places = [
            place
            for place in self._fleet.places()
            if call.versions.include(self.seats[place.name].record.version)
        ]
        if not places:
            return False
        lease = self.leases.take(call.session_id, call.group, places, call.avoid, call.last)
        if lease is None and self.leases.reclaim(places):
            lease = self.leases.take(call.session_id, call.group, places, call.avoid, call.last)
        if lease is None:
            return False
        call.last = None
        call.seat = self.seats[lease.engine]
        self.leases.use(call.session_id, call.length)
        return True

    def _usable(self, call: Call) -> bool:
        return any(
            seat.record.serves and call.versions.include(seat.record.version)
            for seat in self.seats.values()
        )

    def _refused(self, call: Call) -> Refused | None:
        """When every engine says that we ask for the wrong thing, or serves too new a policy,
        waiting helps nobody."""
        leaving = (EngineState.DRAINING, EngineState.DEAD)
        serving = [seat for seat in self.seats.values() if seat.record.state not in leaving]
        if serving and not any(call.versions.allow(seat.record.version) for seat in serving):
            told = f"every engine is past {call.versions}, which this group may be sampled by"
            return Refused(410, TOO_STALE, told)
        why = [seat.watcher.refused for seat in self.seats.values() if not seat.record.removed]
        if not why or not all(why):
            return None
        hint = " (PERDURE_ENGINE__MODEL and PERDURE_ENGINE__URL must name what it serves)"
        return Refused(400, "engine_refused", why[0] + hint)

    def _unusable(self, call: Call) -> GatewayUnavailable:
        return GatewayUnavailable(
            f"no engine is ready: {self._states(call)}", boundary=Boundary.ENGINE
        )

    def _states(self, call: Call) -> str:
        """What each engine lacks, for people."""
        states = "; ".join(
            f"{seat.engine.name} is {seat.record.state}"
            + (f" ({seat.record.reason})" if seat.record.reason else "")
            + call.versions.lacked_by(seat.record)
            for seat in self.seats.values()
        )
        return states or "none is registered"

    async def _sample(self, seat: Seat, call: Call) -> FinishReason:
        record, now = seat.record, time.monotonic()
        call.salvage.begin(seat.engine.name, record.generation)
        ask = call.ask(record.wire_model)
        task = asyncio.create_task(
            seat.engine.sample(ask, call.salvage, lambda: self._fleet.version_now(seat, record))
        )
        running = Running(task, call.salvage, call.versions, now, len(call.salvage.ids), now)
        seat.running.add(running)
        try:
            reason = await task
            await running.judgement(self._patience_s)
            if (told := call.salvage.told) not in (None, record.version):
                await self._fleet.relabel(seat, record, told)
            if call.fit < len(call.salvage.ids):
                raise Broken(Break.ABORTED, f"it has other weights than {call.versions}")
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
            call.salvage.cut(call.fit)
            seat.running.discard(running)
            self.leases.done(call.session_id, call.length)
            self._queue.serve()

    async def _after(self, seat: Seat, generation: int, call: Call, broken: Broken) -> None:
        """What a broken stream means for the engine and for the call."""
        log.info(
            "completion broken",
            session_id=call.session_id,
            engine=seat.engine.name,
            generation=generation,
            kind=broken.kind.value,
            problem=str(broken),
            salvaged=len(call.salvage.ids),
        )
        if call.gained:
            self._went_on(call.gained)
        if broken.kind is Break.LOST:
            await self._fleet.doubt(seat, generation, EngineState.SUSPECT, str(broken))
        elif broken.kind is Break.FENCED:
            await self._fleet.doubt(seat, generation, EngineState.DEAD, str(broken))
        if call.moves > MOST_MOVES or not call.patience(self._patience_s):
            raise GatewayUnavailable(
                f"the engine {seat.engine.name} gave nothing usable: {broken}",
                retry_after=broken.retry_after,
                boundary=Boundary.ENGINE,
            )
        if call.gained == 0:
            await asyncio.sleep(call.pause(broken.retry_after))
