"""An engine as this process uses it: its watch, its room, and the calls that run on it.

Owns what happens to those calls when the engine's record changes. Which engines there are is in
`fleet`, who gets a seat in `leases`.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from perdure.engines import watch
from perdure.engines.clients.sglang import SglangEngine
from perdure.engines.clients.token_server import Break, Broken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.pool.leases import Capacity, Place
from perdure.engines.pool.salvage import Salvage
from perdure.engines.pool.versions import Versions
from perdure.engines.state import EngineRecord, EngineState
from perdure.types import FinishReason


@dataclass(eq=False)
class Running:
    """A call on an engine. `evicted`: why it was taken off it."""

    task: "asyncio.Task[FinishReason]"
    salvage: Salvage
    versions: Versions
    started: float
    seen: int
    """Tokens that it had when somebody looked last."""
    progress: float
    """When it was first seen to have them; its start, before the first of this engine."""
    evicted: Broken | None = None
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody said whether the weights that it met in an update are right."""

    def evict(self, why: Broken) -> None:
        self.evicted = self.evicted or why
        self.task.cancel()
        self.judged.set()

    def doubt(self, coming: int | None) -> None:
        """Its engine is about to be given other weights."""
        self.salvage.doubt(coming)
        self.judged.clear()

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
    noting: "asyncio.Task[None] | None" = None
    """What a call saw of it is being written down."""

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

    def version_now(self, begun: EngineRecord) -> int | None:
        """The version known to be loaded in the boot that `begun` was; none while somebody changes it."""
        record = self.record
        changing = record.held_by or record.state is EngineState.PAUSED
        return None if changing or record.generation != begun.generation else record.version

    def become(self, record: EngineRecord, hang_s: float) -> None:
        """What a change of the engine's record means for the calls that run on it."""
        before, self.record = self.record, record
        self._meet_update(before, record)
        if record.generation != before.generation or record.state is EngineState.DEAD:
            # Whatever it still says belongs to a boot that is over.
            self.evict(Broken(Break.FENCED, f"generation {before.generation} is over"))
        elif record.state is EngineState.SUSPECT:
            self.evict_stalled(hang_s)

    def _meet_update(self, before: EngineRecord, record: EngineRecord) -> None:
        for call in list(self.running):
            if record.held_by and not before.held_by:
                call.doubt(record.coming)
            if not call.versions.allow(record.coming if record.held_by else record.version):
                call.evict(Broken(Break.ABORTED, "its group is held to older weights"))
        if not before.held_by or record.held_by == before.held_by:
            return
        if record.held_by:
            self.evict(Broken(Break.ABORTED, "another update took over"))
        elif record.serves and record.version == before.coming:
            for call in list(self.running):
                call.trust()
        else:  # what it goes on from was sampled by weights that are gone, or that nobody will prove
            self.evict(Broken(Break.ABORTED, "its new weights were not proven"))

    def evict(self, why: Broken) -> None:
        for call in list(self.running):
            call.evict(why)

    def evict_stalled(self, hang_s: float, *, begun_only: bool = False) -> None:
        """Move calls that got nothing for so long. `begun_only`: one without a token of this engine may
        queue there."""
        self.load()
        before = time.monotonic() - hang_s
        for call in list(self.running):
            begun = call.progress > call.started
            if call.progress < before and (begun or not begun_only):
                call.evict(Broken(Break.LOST, f"no token for {hang_s:.0f} s"))
