"""One engine as this process uses it: its client, its health check, and the calls that run on it.

Owns what happens to those calls when the engine's record changes. Which engines there are is in
`engine_fleet`; which session gets which engine is in `session_routing`.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from perdure.engines.clients.sglang import SglangEngine
from perdure.engines.clients.token_endpoint import BreakKind, StreamBroken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.engine_state import EngineRecord, EngineState
from perdure.engines.health_check import HealthCheck, Load
from perdure.engines.pool.engine_capacity import Capacity
from perdure.engines.pool.policy_versions import Versions
from perdure.engines.pool.session_routing import Candidate, EngineStart
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason


@dataclass(eq=False)
class RunningCall:
    """A call on an engine. `evicted`: why it was taken off the engine."""

    task: "asyncio.Task[FinishReason]"
    salvage: Salvage
    versions: Versions
    started: float
    seen: int
    """Tokens that it had at the last health check."""
    progress: float
    """When a health check first saw that many tokens; before the first token, its start."""
    evicted: StreamBroken | None = None
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the weights of the update that it met are proven, or it is evicted."""

    def evict(self, why: StreamBroken) -> None:
        self.evicted = self.evicted or why
        self.task.cancel()
        self.judged.set()

    def doubt(self, coming: int | None) -> None:
        """Its engine will get other weights in a moment."""
        self.salvage.doubt(coming)
        self.judged.clear()

    def trust(self) -> None:
        self.salvage.trust()
        self.judged.set()

    async def judgement(self, patience_s: float) -> None:
        """Wait for the proof of new weights; a turn never ends with tokens of unproven weights.

        If the proof does not come within `patience_s`, the call counts as evicted.
        """
        if self.salvage.sure == len(self.salvage.ids):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self.judged.wait()
        if self.evicted is None and self.salvage.sure < len(self.salvage.ids):
            self.evicted = StreamBroken(BreakKind.ABORTED, "its new weights were never proven")


@dataclass(eq=False)
class PooledEngine:
    """One engine, as this process uses it."""

    record: EngineRecord
    client: VllmEngine | SglangEngine
    control: EngineControl
    health: HealthCheck
    capacity: Capacity = field(default_factory=Capacity)
    running: set[RunningCall] = field(default_factory=set)
    foreign: float = 0.0
    """Other gateways' requests on it at the last health check."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to check its health now instead of after the polling interval."""
    refusals: int = 0
    """Answers without a completion since it last sampled for this process."""
    checked: bool = False
    """Whether this process has checked its health at least once."""
    checking: "asyncio.Task[None] | None" = None
    recording: "asyncio.Task[None] | None" = None
    """Writes what a call saw of the engine to the roster."""

    @property
    def serves(self) -> bool:
        """Whether it takes calls of this process."""
        return self.record.serves and self.health.reads_prompts(self.record)

    @property
    def refused(self) -> str:
        """Why it takes no call until a user changes the settings; empty if it may take calls."""
        is_new = self.record.state is EngineState.STARTING
        return self.health.refused if is_new or self.health.has_other_tokenizer else ""

    def has_other_tokenizer(self, digest: str) -> bool:
        """Whether its model's prompts are encoded with another tokenizer than this one. `digest`: of this
        one's canary; empty if unknown, and then False."""
        rendering = self.health.rendering
        return bool(digest) and rendering is not None and rendering.canary.digest != digest

    def load(self) -> Load:
        now = time.monotonic()
        for call in self.running:
            if len(call.salvage.ids) != call.seen:
                call.seen, call.progress = len(call.salvage.ids), now
        newest = max((call.progress for call in self.running), default=0.0)
        oldest = min((call.started for call in self.running), default=0.0)
        return Load(len(self.running), max(newest, oldest))

    def candidate(self) -> Candidate:
        record = self.record
        return Candidate(
            EngineStart(record.name, record.generation),
            self.capacity.agents,
            weight=record.weight,
            foreign=self.foreign,
            strict=self.capacity.lowered,
        )

    def version_now(self, begun: EngineRecord) -> int | None:
        """The version loaded in the generation of `begun`. None: an update is changing it, or the
        engine was restarted."""
        record = self.record
        changing = record.held_by or record.state is EngineState.PAUSED
        return None if changing or record.generation != begun.generation else record.version

    def become(self, record: EngineRecord, hang_s: float) -> None:
        """Take over the engine's new record, and evict the calls that it affects."""
        before, self.record = self.record, record
        self._meet_update(before, record)
        if record.generation != before.generation or record.state is EngineState.DEAD:
            # Tokens that still arrive belong to a generation that is over.
            over = f"generation {before.generation} is over"
            self.evict(StreamBroken(BreakKind.FENCED, over))
        elif record.state is EngineState.SUSPECT:
            self.evict_stalled(hang_s)

    def _meet_update(self, before: EngineRecord, record: EngineRecord) -> None:
        for call in list(self.running):
            if record.held_by and not before.held_by:
                call.doubt(record.coming)
            if not call.versions.allow(record.coming if record.held_by else record.version):
                newer = "its group may not be sampled by newer weights"
                call.evict(StreamBroken(BreakKind.ABORTED, newer))
        if not before.held_by or record.held_by == before.held_by:
            return
        if record.held_by:
            self.evict(StreamBroken(BreakKind.ABORTED, "another update took over"))
        elif record.serves and record.version == before.coming:
            for call in list(self.running):
                call.trust()
        else:  # the weights that sampled the newest tokens are gone, or will never be proven
            self.evict(StreamBroken(BreakKind.ABORTED, "its new weights were not proven"))

    def evict(self, why: StreamBroken) -> None:
        for call in list(self.running):
            call.evict(why)

    def evict_stalled(self, hang_s: float, *, begun_only: bool = False) -> None:
        """Evict calls without a token for `hang_s` seconds. `begun_only`: leave calls that have no
        token of this engine yet, because they may be queued inside it."""
        self.load()
        before = time.monotonic() - hang_s
        for call in list(self.running):
            begun = call.progress > call.started
            if call.progress < before and (begun or not begun_only):
                call.evict(StreamBroken(BreakKind.LOST, f"no token for {hang_s:.0f} s"))
