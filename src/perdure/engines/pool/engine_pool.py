"""A gateway's engines as one: a call in, one whole completion out, even if engines fail.

Owns the loop over engines and the calls that wait for one. `engine_fleet` knows the engines,
`pooled_engine` the calls on each, `completion_call` one completion, and `session_routing` which session uses
which engine.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import httpx
import structlog

from perdure import tracing
from perdure.dialects.base import Refused
from perdure.engines.base import OTHER_TOKENIZER, TOO_STALE, Completion, Wait
from perdure.engines.clients.token_endpoint import BreakKind, StreamBroken
from perdure.engines.engine_roster import SharedRoster
from perdure.engines.engine_state import EngineSpec, EngineState
from perdure.engines.model_choice import engines_of
from perdure.engines.pool.completion_call import MOST_MOVES, GenerateCall
from perdure.engines.pool.engine_fleet import Fleet, PoolOptions
from perdure.engines.pool.fair_queue import FairQueue
from perdure.engines.pool.policy_versions import Versions
from perdure.engines.pool.pooled_engine import PooledEngine, RunningCall
from perdure.engines.pool.session_routing import EngineStart, Leases
from perdure.errors import Boundary, CallsRefused, GatewayUnavailable
from perdure.types import EngineSpan, FinishReason

FIRST_CHECK_S = 0.05
"""Seconds in which a new pool can check its engines once."""

MOST_REFUSALS = 3
"""Consecutive answers without a completion after which an engine must sample a probe before it gets
calls."""

DEFAULTS = PoolOptions()

log = structlog.get_logger()


class EnginePool:
    """Many engines as one `TokenEngine`.

    Example:
        pool = EnginePool(InMemoryRoster(), client, [EngineSpec("http://10.0.0.7:8000")])
        completion = await pool.generate(GenerateCall(ids, {"max_tokens": 64}, "s", "s-0"))
        await pool.aclose()
    """

    def __init__(
        self,
        roster: SharedRoster,
        client: httpx.AsyncClient,
        own: Sequence[EngineSpec] = (),
        options: PoolOptions = DEFAULTS,
    ) -> None:
        """`own`: the engines that the settings name; all others come from the roster."""
        self.leases = Leases()
        self.model = options.model
        """The model that `policy` means."""
        self._queue = FairQueue()
        self._unassigned: dict[str, dict[GenerateCall, float]] = {}
        """By session: its calls that wait for an engine, and since when (Unix seconds)."""
        self._patience_s = options.patience_s
        self._vocabulary = options.vocabulary
        self.fleet = Fleet(roster, client, own, self.leases, options, changed=self._queue.serve)
        """All engines. This process applies a roster change at once if it is made through the fleet."""
        self.resumed = 0
        """Broken completions that another engine continued."""
        self.salvaged_tokens = 0

    @property
    def engines(self) -> Mapping[str, PooledEngine]:
        return self.fleet.engines

    @property
    def waiting(self) -> Counter[str]:
        """The number of calls that wait for an engine, by model."""
        return Counter(call.model for calls in self._unassigned.values() for call in calls)

    def waits(self, session_id: str) -> Wait | None:
        """Since when the session's oldest call has waited for an engine, and why none can take it."""
        waiting = self._unassigned.get(session_id)
        if not waiting:
            return None
        call, since = next(iter(waiting.items()))
        full = "every ready engine is full" if self._usable(call) else ""
        return Wait(since=since, reason=full or self._states(call))

    async def start(self) -> None:
        """Start to follow the roster and to check the engines. Repeating is harmless.

        Raises: StoreUnavailable.
        """
        await self.fleet.start()

    async def aclose(self) -> None:
        await self.fleet.aclose()

    def left(self, session_id: str) -> None:
        """Free the leases of a session that ended."""
        self.leases.release_session(session_id)
        self._queue.serve()

    async def generate(self, call: GenerateCall) -> Completion:
        """One whole completion. Its spans say which engine and version sampled which tokens.

        Waits while all usable engines are full. Raises: GatewayUnavailable if no engine was usable for
        `patience_s`; Refused.
        """
        await self.start()
        if call.vocabulary is None:
            call.vocabulary = self._vocabulary
        call.start = self._start_of(call.last)
        while True:
            with tracing.span("wait for an engine"):
                engine = await self._engine_for(call)
            generation = engine.record.generation
            try:
                with tracing.span("engine call", _asked(call, engine), kind="client") as span:
                    reason = await self._sample(engine, call)
                    span.set({"gen_ai.usage.output_tokens": call.salvage.part})
            except StreamBroken as broken:
                ended = call.lost(broken, engine)
                if ended is None:
                    await self._after(engine, generation, call, broken)
                    continue
                reason = ended
            return call.completion(reason, engine.client.name, engine.record)

    def _engines_of(self, call: GenerateCall) -> list[PooledEngine]:
        """The engines that may sample the call, according to its model and its run."""
        records = (one.record for one in self.engines.values())
        return [
            self.engines[record.name]
            for record in engines_of(
                records, call.model, call.run, self.model, reserved=call.is_reserved
            )
        ]

    def _start_of(self, span: EngineSpan | None) -> EngineStart | None:
        if span is None:
            return None
        names = (one.record.name for one in self.engines.values() if one.client.name == span.engine)
        name = next(names, None)
        return None if name is None else EngineStart(name, span.generation)

    # --- an engine for a call ------------------------------------------------------------------

    async def _engine_for(self, call: GenerateCall) -> PooledEngine:
        """An engine that is ready and has room for the session. Raises: GatewayUnavailable, Refused."""
        self._queue.serve()  # earlier calls go first
        if self._line(call) not in self._queue:
            self._try_assign(call)
        try:
            with self._known_to_wait(call):
                engine = await self._wait(call)
        except BaseException:
            self._give_back(call)  # it may have been assigned an engine as it was cancelled
            raise
        call.engine = None
        return engine

    @contextlib.contextmanager
    def _known_to_wait(self, call: GenerateCall) -> Iterator[None]:
        waiting = self._unassigned.setdefault(call.session_id, {})
        waiting[call] = time.time()
        began = time.monotonic()
        try:
            yield
        finally:
            call.waited_s += time.monotonic() - began
            del waiting[call]
            if not waiting:
                self._unassigned.pop(call.session_id, None)

    def _line(self, call: GenerateCall) -> tuple[object, ...]:
        """The line in which a call queues. A session that holds a lease queues only behind its own calls.
        Other calls queue per run, model and accepted versions."""
        if self.leases.get(call.holder) is not None:
            return (call.holder,)
        return (call.run, call.model, call.versions)

    async def _wait(self, call: GenerateCall) -> PooledEngine:
        """The call's engine, once it is assigned. Raises: GatewayUnavailable, Refused."""
        while call.engine is None:
            # The wait for room has no limit; the wait for a usable engine has one.
            if short_of_room := bool(self._usable(call)):
                call.reset_patience()
            timeout = max(call.patience(self._patience_s), FIRST_CHECK_S)
            line = self._line(call)
            try:
                async with asyncio.timeout(timeout):
                    await self._queue.wait(
                        line,
                        lambda: self._try_assign(call) or self._refused(call) is not None,
                        owner=call.session_id,
                        first=len(line) == 1,
                    )
            except TimeoutError:
                if short_of_room:
                    call.reset_patience()  # if the engines have left since, the patience starts now
                elif not self._usable(call) and all(one.checked for one in self._engines_of(call)):
                    raise self._unusable(call) from None
            if call.engine is not None and not call.engine.serves:
                self._give_back(call)  # the engine stopped serving before this call continued
            if call.engine is None and (refused := self._refused(call)) is not None:
                raise refused
        return call.engine

    def _give_back(self, call: GenerateCall) -> None:
        if call.engine is not None:
            call.engine = None
            self.leases.done(call.holder, call.length)
            self._queue.serve()

    def _try_assign(self, call: GenerateCall) -> bool:
        candidates = [engine.candidate() for engine in self._usable(call)]
        if not candidates:
            return False
        lease = self.leases.take(call.holder, call.group, candidates, call.avoid, call.start)
        if lease is None and self.leases.reclaim(candidates):
            lease = self.leases.take(call.holder, call.group, candidates, call.avoid, call.start)
        if lease is None:
            return False
        call.start = None
        call.engine = self.engines[lease.start.name]
        self.leases.use(call.holder, call.length)
        return True

    def _usable(self, call: GenerateCall) -> list[PooledEngine]:
        """The engines that are ready, can read the call's prompt, and whose policy version it accepts."""
        if call.versions.may_finish and self._is_too_stale(call):
            call.versions = Versions()
        return [
            one
            for one in self._engines_of(call)
            if one.serves
            and not one.has_other_tokenizer(call.tokenizer)
            and call.versions.include(one.record.version)
        ]

    def _is_too_stale(self, call: GenerateCall) -> bool:
        """Whether every engine serves a policy version that is too new for the call, now and after any
        update."""
        leaving = (EngineState.DRAINING, EngineState.DEAD)
        serving = [one for one in self._engines_of(call) if one.record.state not in leaving]
        return bool(serving) and not any(call.versions.allow(one.record.version) for one in serving)

    def _refused(self, call: GenerateCall) -> Refused | CallsRefused | None:
        """Why waiting cannot help; None if it can. Either the model was added again with another tokenizer,
        or every engine serves a policy version that is too new, or every engine refuses the settings' model
        or key, or has another tokenizer than the model's."""
        present = [one for one in self._engines_of(call) if not one.record.removed]
        if present and present[0].has_other_tokenizer(call.tokenizer):  # all have the same model
            return Refused(410, OTHER_TOKENIZER, _tokenizer_changed(call, present[0]))
        if self._is_too_stale(call):
            told = f"this group accepts only {call.versions}, and every engine serves newer weights"
            return Refused(410, TOO_STALE, told)
        if not present or not all(one.refused for one in present):
            return None
        return CallsRefused(present[0].refused)

    def _unusable(self, call: GenerateCall) -> GatewayUnavailable:
        return GatewayUnavailable(
            f"no engine is ready: {self._states(call)}", boundary=Boundary.ENGINE
        )

    def _states(self, call: GenerateCall) -> str:
        """Why each engine cannot take the call, as text for people."""
        states = "; ".join(
            f"{one.client.name} is {one.record.state}"
            + (f" ({one.record.reason})" if one.record.reason else "")
            + call.versions.explain_mismatch(one.record)
            for one in self._engines_of(call)
        )
        of_run = f" and the run {call.run}" if call.is_reserved else ""
        return states or f"none is registered for the model {call.model}{of_run}"

    # --- a call on an engine -------------------------------------------------------------------

    async def _sample(self, engine: PooledEngine, call: GenerateCall) -> FinishReason:
        record, now = engine.record, time.monotonic()
        loaded = partial(self.fleet.version_now, engine, record)
        call.salvage.begin(engine.client.name, record.generation, loaded())
        ask = call.ask(record.wire_model)
        task = asyncio.create_task(engine.client.sample(ask, call.salvage, loaded))
        running = RunningCall(task, call.salvage, call.versions, now, len(call.salvage.ids), now)
        engine.running.add(running)
        try:
            reason = await task
            engine.refusals = 0
            await running.judgement(self._patience_s)
            if (told := call.salvage.told) not in (None, record.version):
                await self.fleet.relabel(engine, record, told)
            if call.fit < len(call.salvage.ids):
                other = f"its weights are not {call.versions}"
                raise StreamBroken(BreakKind.ABORTED, other)
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
            # A call that ends during a weight update is not covered by the canaries.
            call.salvage.distrust()
            call.salvage.cut(call.fit)
            engine.running.discard(running)
            self.leases.done(call.holder, call.length)
            self._queue.serve()

    async def _after(
        self, engine: PooledEngine, generation: int, call: GenerateCall, broken: StreamBroken
    ) -> None:
        """Handle a broken stream, for the engine and for the call. Raises: GatewayUnavailable."""
        log.info(
            "completion broken",
            session_id=call.session_id,
            engine=engine.client.name,
            generation=generation,
            kind=broken.kind.value,
            problem=str(broken),
            salvaged=len(call.salvage.ids),
        )
        if call.gained:
            self.resumed += 1
            self.salvaged_tokens += call.gained
        if broken.kind in (BreakKind.LOST, BreakKind.IMPOSSIBLE):
            await self.fleet.doubt(engine, generation, EngineState.SUSPECT, str(broken))
        elif broken.kind is BreakKind.FENCED:
            await self.fleet.doubt(engine, generation, EngineState.DEAD, str(broken))
        elif broken.kind is BreakKind.REFUSED:
            engine.refusals += 1
            if engine.refusals >= MOST_REFUSALS:
                engine.refusals = 0  # the count restarts after a probe has proven the engine
                await self.fleet.doubt(engine, generation, EngineState.SUSPECT, str(broken))
        if call.moves > MOST_MOVES or not call.patience(self._patience_s):
            raise GatewayUnavailable(
                f"the engine {engine.client.name} gave no usable answer: {broken}",
                retry_after=broken.retry_after,
                boundary=Boundary.ENGINE,
            )
        if call.gained == 0:
            await asyncio.sleep(call.pause(broken.retry_after))


def _tokenizer_changed(call: GenerateCall, engine: PooledEngine) -> str:
    rendering = engine.health.rendering
    name, digest = (rendering.tokenizer, rendering.canary.digest) if rendering else ("", "")
    return (
        f"the model {call.model} now has the tokenizer {name!r} (digest {digest}), but this session's ids come from "
        f"another one (digest {call.tokenizer}), so no engine can continue it. Start the rollout again, or "
        "allow a new attempt with retry_on TokenizerChanged. To keep open sessions, add an engine with another "
        "tokenizer under another --model"
    )


def _asked(call: GenerateCall, engine: PooledEngine) -> tracing.Attributes:
    """Attributes of a call according to OpenTelemetry's conventions for generative AI."""
    if not tracing.on():
        return tracing.NOTHING
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": engine.record.kind,
        "gen_ai.request.model": engine.record.model,
        "gen_ai.request.max_tokens": call.sampling.get("max_tokens"),
        "gen_ai.request.temperature": call.sampling.get("temperature"),
        "gen_ai.conversation.id": call.session_id,
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "perdure.engine": engine.client.name,
        "perdure.policy_version": engine.record.version,
        "perdure.move": call.moves,
    }
