"""The engines that this process knows: each one's record in the shared roster, and its health checks.

Follows the roster and checks engines. `pooled_engine` has the calls on an engine; `session_routing` and
`engine_pool` decide which sessions it gets.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import structlog

from perdure.engines import health_check
from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.hosted_requests import engine_name
from perdure.engines.clients.sglang import SglangEngine
from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.token_endpoint import BreakKind, StreamBroken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import PROBE_S, EngineControl
from perdure.engines.engine_roster import Change, Roster, SharedRoster
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, name_of, root_of
from perdure.engines.pool.engine_capacity import MOST_AGENTS, Capacity
from perdure.engines.pool.pooled_engine import PooledEngine
from perdure.engines.pool.session_routing import Leases
from perdure.engines.weights.weight_update import NOTICE_S
from perdure.errors import PerdureError
from perdure.types import DEFAULT_MODEL

HELD_POLL_S = 0.2
"""Seconds between reads of the roster while an update holds an engine, because calls wait for its end."""
LONGEST_RECORDING_S = 5.0
"""The longest that a call waits, in seconds, for the store to record what it found out about an engine."""
SPEAKS: Mapping[str, tuple[type[VllmEngine] | type[SglangEngine], type[EngineControl]]] = {
    "vllm": (VllmEngine, EngineControl),
    "sglang": (SglangEngine, SglangControl),
}

log = structlog.get_logger()


@dataclass(frozen=True)
class PoolOptions:
    """How a process uses its engines."""

    model: str = DEFAULT_MODEL
    """The model of the settings' engines, which `policy` means."""
    api_key: str = ""
    key_source: str = ""
    """The environment variable of `api_key`. Errors name it and never show the key."""
    home_key: str = ""
    """Replaces `api_key` for engines behind an `EngineProxy`; derived from the home's secret."""
    vocabulary: int | None = None
    """How many token ids that model has; None: not known."""
    tokenizer: str = ""
    """The tokenizer of that model's prompts, as in the settings."""
    canary: Callable[[str], health_check.TokenizerCanary] | None = None
    """The canary of the tokenizer that a setting names. Raises: ConfigurationError. None: engines'
    tokenizers are not checked."""
    agents: int = MOST_AGENTS
    """The most agents that one engine may hold."""
    hang_s: float = 120.0
    """Seconds without a token after which an engine with calls counts as hung."""
    patience_s: float = 900.0
    """Seconds that a call waits while no engine is usable. Agents' own clients give up after that."""
    poll_s: float = 1.0
    """Seconds between reads of the roster, and between health checks of an engine."""
    notice_s: float = NOTICE_S
    """Seconds between the announcement of a weight update and its first action."""


class Fleet:
    """All engines of this process, kept up to date. It is a `SharedRoster` that applies its own changes."""

    def __init__(
        self,
        roster: SharedRoster,
        client: httpx.AsyncClient,
        own: Sequence[EngineSpec],
        leases: Leases,
        options: PoolOptions,
        *,
        changed: Callable[[], None],
    ) -> None:
        """`own`: the engines that the settings name; all others come from the roster. `changed`: called
        whenever an engine may have room."""
        self.engines: dict[str, PooledEngine] = {}
        self._roster = roster
        self._client = client
        self._connections = Connections()
        self._own = {name_of(spec.url): spec for spec in own}
        self._leases = leases
        self._changed = changed
        self._options = options
        self._starting = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._canaries: dict[str, health_check.TokenizerCanary | None] = {}
        """By the name of a tokenizer that encodes prompts; None if it cannot be read here."""
        self._asked = 0.0
        """When this process requested the roster that it applied last."""
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to follow the roster and to check the engines. Repeating is harmless.

        Raises: StoreUnavailable.
        """
        async with self._starting:
            if self._following is None:
                await self._change(self._with_own)
                self._following = asyncio.create_task(self._follow())

    def used(self, roster: Roster) -> Roster:
        """The part of the roster that this process uses."""
        return roster.used_with(self._own)

    def ignore_settings_engines(self) -> None:
        """Use no engine of the settings, because they name a hosted API. Call it before `start`."""
        self._own = {}

    async def aclose(self) -> None:
        tasks = [task for one in self.engines.values() for task in (one.checking, one.recording)]
        for task in filter(None, (self._following, *tasks)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # its error was already logged
        await self._connections.aclose()

    async def read(self) -> Roster:
        """Read the newest roster, and apply it. Raises: StoreUnavailable."""
        return await self.change(lambda roster: roster)

    async def change(self, change: Change) -> Roster:
        """Change the roster, and apply it. Raises: StoreUnavailable, and any error of `change`."""
        await self.start()
        return await self._change(change)

    async def _change(self, change: Change) -> Roster:
        async with self._turn:  # one at a time: a slow read must not restore an older roster
            asked = time.monotonic()
            roster = await self._roster.change(change)
            self._asked = asked
            await self._load_canaries(roster)
            self._sync(roster)
        return roster

    def version_now(self, engine: PooledEngine, begun: EngineRecord) -> int | None:
        """The version that samples now. None if the roster was not read recently, because another process
        may be changing the version."""
        fresh = time.monotonic() - self._asked <= self._options.notice_s
        return engine.version_now(begun) if fresh else None

    async def doubt(
        self, engine: PooledEngine, generation: int, state: EngineState, reason: str
    ) -> None:
        """Record that a call contradicted the record of this generation of an engine."""
        record = engine.record
        if record.serves and record.generation == generation:
            finding = health_check.Finding(state, reason)
            await self._record(engine, lambda roster: health_check.apply(roster, record, finding))

    async def relabel(self, engine: PooledEngine, record: EngineRecord, version: int) -> None:
        """Correct the version in an engine's record to the one that the engine reported."""

        def relabelled(roster: Roster) -> Roster:
            if roster.get(record.name) != record:
                return roster
            return roster.having(record.model_copy(update={"version": version}))

        if engine.record == record:
            # A trainer updates its engines itself.
            log_version = log.info if record.of_trainer else log.warning
            log_version(
                "an engine serves another policy version than recorded",
                engine=record.name,
                version=version,
            )
            await self._record(engine, relabelled)

    async def _record(self, engine: PooledEngine, change: Change) -> None:
        """Record what a call found out. If one event broke many calls, only the first one writes, and the
        others wait for it. A call continues even if the store does not answer."""
        if engine.recording is None or engine.recording.done():
            engine.recording = asyncio.create_task(self._recorded(change))
        await asyncio.wait({engine.recording}, timeout=LONGEST_RECORDING_S)

    async def _recorded(self, change: Change) -> None:
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
        told: dict[str, Any] = {
            "weight": spec.weight,
            "model": self._options.model,
            "kind": spec.kind,
        }
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
        """Apply changes that other processes and users made, and offer freed room to waiting calls."""
        poll_s = self._options.poll_s
        while True:
            held = any(engine.record.held_by for engine in self.engines.values())
            await asyncio.sleep(min(poll_s, HELD_POLL_S) if held else poll_s)
            try:
                await self.read()
            except PerdureError as error:
                log.warning("cannot read the roster of engines", error=str(error))
            except Exception:  # if this loop ended, the process would see no more changes
                log.exception("cannot follow the roster of engines")
            self._leases.expire()
            self._changed()

    async def _load_canaries(self, roster: Roster) -> None:
        """Load each tokenizer once, before an engine of its models takes calls."""
        if (canary := self._options.canary) is None:
            return
        used = {self._tokenizer(roster, one.model) for one in self.used(roster).engines}
        for name in used - self._canaries.keys():
            try:
                self._canaries[name] = await asyncio.to_thread(canary, name)
            except PerdureError as error:  # a session of its models reports it
                log.warning("cannot check an engine's tokenizer", error=str(error))
                self._canaries[name] = None

    def _tokenizer(self, roster: Roster, model: str) -> str:
        """The tokenizer of a model's prompts, as a setting names it."""
        found = None if self._is_own(model) else roster.formats.get(model)
        return self._options.tokenizer if found is None else found.tokenizer

    def _is_own(self, model: str) -> bool:
        """Whether it is the settings' model."""
        return model in (self._options.model, DEFAULT_MODEL)

    def _rendering(self, roster: Roster, model: str) -> health_check.Rendering | None:
        name = self._tokenizer(roster, model)
        canary = self._canaries.get(name)
        is_default = self._is_own(model) or model not in roster.formats
        return health_check.Rendering(name, canary, is_default) if canary else None

    def _sync(self, roster: Roster) -> None:
        wanted = {record.name: record for record in self.used(roster).engines}
        for name in [name for name in self.engines if name not in wanted]:
            self._leave(self.engines.pop(name))
        for record in wanted.values():
            engine = self.engines.get(record.name)
            rendering = self._rendering(roster, record.model)
            if engine is None:
                engine = self.engines[record.name] = self._join(record)
            elif engine.record != record:
                self._become(engine, record)
            engine.health.rendering = rendering
        self._changed()

    def _join(self, record: EngineRecord) -> PooledEngine:
        options = self._options
        key, source = options.api_key, options.key_source
        if record.behind_proxy:
            key, source = options.home_key, "PERDURE_SECRET"
        name = engine_name(record.kind, record.url)
        probe_s = min(PROBE_S, options.hang_s)
        speaks, controlled = SPEAKS[record.kind]
        control = controlled(
            record.url,
            self._client,
            api_key=key,
            probe_s=probe_s,
            vocabulary=options.vocabulary if self._is_own(record.model) else None,
        )
        engine = PooledEngine(
            record,
            speaks(name, record.url, self._connections, api_key=key, key_source=source),
            control,
            health_check.HealthCheck(control, hang_s=options.hang_s),
            Capacity.unlimited() if record.of_trainer else Capacity(options.agents),
        )
        engine.checking = asyncio.create_task(self._check(engine))
        return engine

    def _leave(self, engine: PooledEngine) -> None:
        if engine.checking is not None:
            engine.checking.cancel()
        engine.evict(StreamBroken(BreakKind.FENCED, "it was removed"))

    def _become(self, engine: PooledEngine, record: EngineRecord) -> None:
        before = engine.record
        if record.state is not before.state:
            log.info(
                "engine",
                engine=record.name,
                state=record.state.value,
                was=before.state.value,
                generation=record.generation,
                reason=record.reason,
            )
        engine.become(record, self._options.hang_s)
        engine.wake.set()

    # --- health checks -------------------------------------------------------------------------

    async def _check(self, engine: PooledEngine) -> None:
        """Check one engine repeatedly, and record the findings."""
        while True:
            try:
                await self._look(engine)
            except PerdureError as error:
                log.warning("cannot record an engine's state", error=str(error))
            except Exception:  # if this loop ended, the engine would never be checked again
                log.exception("cannot check an engine", engine=engine.record.name)
            engine.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await engine.wake.wait()

    async def _look(self, engine: PooledEngine) -> None:
        record = engine.record
        if record.state is EngineState.DRAINING:
            await self._drained(engine)
            return
        finding = await engine.health.look(record, engine.load())
        engine.checked = True
        vitals = engine.health.vitals
        engine.foreign = max(0.0, vitals.running + vitals.waiting - len(engine.running))
        engine.capacity.observe(
            vitals,
            agents=self._leases.agents(record.name),
            mean_context=self._leases.mean_context(record.name),
        )
        if record.serves:
            engine.evict_stalled(self._options.hang_s, begun_only=True)
        if finding is not None:
            await self.change(lambda roster: health_check.apply(roster, record, finding))
        self._changed()

    async def _drained(self, engine: PooledEngine) -> None:
        """At the deadline, move this process's calls. Remove the engine once it has no calls."""
        record = engine.record
        left = (record.drain_by or 0.0) - record.since - engine.health.waited(record)
        late = left <= 0 or time.time() >= (record.drain_by or 0.0)  # by the clock that is ahead
        if late:
            engine.evict(StreamBroken(BreakKind.ABORTED, "drained"))
        with contextlib.suppress(PerdureError):
            engine.health.vitals = await engine.control.vitals()
        if late or not (engine.running or engine.health.vitals.running):
            await self.change(lambda roster: _removed(roster, record.name))


def _removed(roster: Roster, name: str) -> Roster:
    record = roster.get(name)
    if record is None or record.removed:
        return roster
    return roster.having(record.as_removed())
